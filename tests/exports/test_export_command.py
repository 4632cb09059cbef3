"""`kvcal export` and `kvcal import-kvtuner`: a file, a list of what is lost, and an exit code of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_cases import ran_well, run_kvcal, save_llama
from test_exports import MIXED, PLANS
from transformers import PreTrainedTokenizerBase

from kvcal.commands.export import ranges
from kvcal.exports import EXPORTERS
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Plan, load_plan, save_plan

PAGE = (Path(__file__).parents[2] / "docs/exports.md").read_text(encoding="utf-8")


def saved(plan: Plan, folder: Path) -> Path:
    save_plan(plan, folder / "plan.safetensors")
    return folder / "plan.safetensors"


@pytest.mark.parametrize("to", EXPORTERS)
def test_a_file_is_written_and_what_it_lacks_is_listed(to: str, tmp_path: Path) -> None:
    plan, output = saved(MIXED, tmp_path), tmp_path / "made"
    value = ran_well("export", plan, "--to", to, "-o", output, "--json").json
    assert output.read_text() == value["text"] == EXPORTERS[to](MIXED).text
    assert value["path"] == str(output) and value["to"] == to
    assert [layer["index"] for layer in value["layers"]] == [0, 1, 2, 3, 4]
    assert value["layers"][0]["planned"] == [8, 4]
    assert value["dropped"] and all(one["layers"] for one in value["dropped"])
    shown = run_kvcal("export", plan, "--to", to, "-o", output)
    assert f"Dropped by {to}" in shown.out
    assert all(one["part"] in shown.out and ranges(tuple(one["layers"])) in shown.out for one in value["dropped"])
    assert f"export: {output}" in shown.err and all(f"note: {note}" in shown.err for note in value["notes"])


def test_strict_writes_nothing_and_has_an_exit_code(tmp_path: Path) -> None:
    output = tmp_path / "made"
    done = run_kvcal("export", saved(MIXED, tmp_path), "--to", "kvtuner", "-o", output, "--strict", "--json")
    assert done.code == 7 and not output.exists()
    value, error = done.json, json.loads(done.err.splitlines()[-1])["error"]
    assert value["path"] is None and error["kind"] == "GateFailed"
    assert value["dropped"] == [{"part": "K and V bits of a layer: 16 and 16 become 8 and 8", "layers": [3]}]
    assert "kvtuner drops 1 parts: K and V bits of a layer" in error["message"]

    whole = saved(PLANS["one format"], tmp_path)
    done = ran_well("export", whole, "--to", "kvtuner", "-o", output, "--strict")
    assert output.exists() and "nothing is dropped" in done.err


def test_an_unknown_target_is_refused(tmp_path: Path) -> None:
    done = run_kvcal("export", saved(MIXED, tmp_path), "--to", "kv-tuner", "-o", tmp_path / "made")
    assert done.code == 2 and f"--to kv-tuner; allowed: {', '.join(EXPORTERS)}" in done.err
    assert "did you mean 'kvtuner'?" in done.err


def test_help_and_page_name_every_target() -> None:
    help_text = " ".join(run_kvcal("export", "--help").out.split())
    rows = {row[0]: row for row in re.findall(r"^\| `(\w[\w-]*)` \|(.*)\|$", PAGE, re.M)}
    assert rows.keys() == EXPORTERS.keys()
    for name, exporter in EXPORTERS.items():
        assert name in help_text
        kept = set().union(*(exporter(plan).keeps for plan in PLANS.values()))
        assert all(part in rows[name][1] for part in kept) and bool(kept) == (rows[name][1].split("|")[-1] != " ")


def test_imported_bits_are_compiled(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = save_llama(tmp_path / "model", tokenizer)
    bits = tmp_path / "bits.yaml"
    bits.write_text(
        "0:\n  nbits_key: 8\n  nbits_value: 4\n1:\n  0:\n    nbits_key: 4\n    nbits_value: 2\n"
        "  1:\n    nbits_key: 2\n    nbits_value: 2\n"
    )
    imported = ("import-kvtuner", bits, "--model", model, "--out", tmp_path / "made", "--batch", 2, "--context", 512)
    done = ran_well(*imported, "--json")
    ran_well("compile", tmp_path / "made")
    plan = load_plan(tmp_path / "made/plan.safetensors")
    assert plan.workload.lengths == (512, 512) and set(plan.provenance) >= {"kvtuner", "libraries"}
    assert [layer.k for layer in plan.layers] == [
        (Format(8, "channel", 32),), (Format(4, "channel", 32), Format(2, "channel", 32)),
    ]  # fmt: skip
    assert [layer.v for layer in plan.layers] == [(Format(4, "token", 32),), (Format(2, "token", 32),)]
    ran_well("verify", tmp_path / "made/plan.safetensors", "--model", model)

    other = save_llama(tmp_path / "other", tokenizer, num_layers=3)
    done = run_kvcal("import-kvtuner", bits, "--model", other, "--out", tmp_path / "other-made")
    assert done.code == 2 and "layers: 2 in the file or in the model alone" in done.err


@pytest.mark.parametrize(("layers", "text"), [((0,), "0"), ((0, 1, 2, 5), "0-2, 5"), ((1, 3, 4), "1, 3-4")])
def test_layers_are_shown_as_ranges(layers: tuple[int, ...], text: str) -> None:
    assert ranges(layers) == text
