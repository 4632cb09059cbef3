"""The table of all families that transformers lists: it is whole, and rows of it come out again. The script that writes
it (tests/support/model_families.py) goes through all of them."""

import json
from dataclasses import asdict
from pathlib import Path

import model_families
import pytest
import transformers

LISTED = json.loads((Path(__file__).parents[2] / "docs/families.json").read_text())
ROWS = {row["model_type"]: row for row in LISTED["families"]}
NAMES = ("bart", "nemotron_h", "gemma3_text", "bloom", "falcon_mamba", "longcat_flash")


def test_every_family_has_a_row() -> None:
    if transformers.__version__ != LISTED["transformers"]:
        pytest.skip(f"the table is of transformers {LISTED['transformers']}")
    assert set(ROWS) == set(model_families.FAMILIES)
    assert {row["outcome"] for row in ROWS.values()} == {"supported", "refused", "not built"}
    assert all(bool(row["reason"]) != (row["outcome"] == "supported") for row in ROWS.values())
    assert len({ROWS[name]["outcome"] for name in NAMES}) == 3


@pytest.mark.filterwarnings("ignore")  # transformers' own, about models without an optional package
@pytest.mark.parametrize("name", NAMES)
def test_a_family_comes_out_as_listed(name: str) -> None:
    if transformers.__version__ != LISTED["transformers"]:
        pytest.skip(f"the table is of transformers {LISTED['transformers']}")
    assert asdict(model_families.measure(name)) == ROWS[name]
