"""Each family of docs/families.json is what `kvcal plan` makes of it: by its default recipe, by the
one that it takes for latent attention, and by the one that its error names."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import transformers
from model_families import FAMILIES, attends_back, measure

LISTED = json.loads((Path(__file__).parents[2] / "docs/families.json").read_text())
ROWS = {row["model_type"]: row for row in LISTED["families"]}
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own, about models without an optional package
    pytest.mark.skipif(transformers.__version__ != LISTED["transformers"], reason="the table is of another release"),
]


def test_every_family_has_a_row() -> None:
    assert set(ROWS) == set(FAMILIES)
    assert {row["outcome"] for row in ROWS.values()} == {"supported", "refused", "not built"}
    for row in ROWS.values():
        is_served = row["outcome"] == "supported"
        assert bool(row["reason"]) == (not is_served or row["recipe"] not in ("default", "sensitivity"))
        assert bool(row["recipe"]) == bool(row["layers"]) == is_served


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("stablelm", "default"),  # 4 of 16 channels are turned
        ("bert", "default"),  # the output projection is not the attention's own
        ("bart", "default"),  # forward takes no position_ids
        ("nemotron_h", "default"),
        ("gemma3_text", "default"),
        ("deepseek_v3", "sensitivity"),
        ("bigbird_pegasus", "default"),  # its products are rounded by where they lie
        ("bloom", "kivi-2"),
        ("prophetnet", ""),
        ("falcon_mamba", ""),
        ("longcat_flash", ""),
    ],
)
def test_a_family_comes_out_as_it_is_listed(family: str, recipe: str) -> None:
    assert asdict(measure(family)) == ROWS[family] and ROWS[family]["recipe"] == recipe


def test_encoders_are_told_from_decoders() -> None:
    assert not attends_back("bert") and attends_back("gpt2")
