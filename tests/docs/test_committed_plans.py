"""Committed plans stay readable: each loads with its old bytes, or is refused by the name of its schema."""

import json
from pathlib import Path

import pytest

from kvcal import load_plan
from kvcal.embedded import model_folder
from kvcal.errors import ArtifactError
from kvcal.models.load import identity_of
from kvcal.plan.plan import SCHEMA, Plan

ROOT = Path(__file__).parents[2]
FOLDERS = sorted((ROOT / "artifacts/plans").iterdir())


def schema_of(folder: Path) -> int:
    return int(folder.name.removeprefix("schema-"))


def plan_of(folder: Path) -> Plan:
    """The folder's plan; skips for a schema that this version does not read."""
    try:
        return load_plan(folder / "plan.safetensors")
    except ArtifactError as refused:
        assert schema_of(folder) != SCHEMA, f"a plan of the present schema must load: {refused}"
        assert f"schema version {schema_of(folder)}" in refused.message
        assert str(SCHEMA) in refused.message
        pytest.skip(f"refused with its reason: {refused.message}")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_committed_plan_loads_with_its_bytes_or_is_refused_by_schema(folder: Path) -> None:
    plan = plan_of(folder)
    report = json.loads((folder / "inspect.json").read_text())
    assert plan.predicted_bytes == report["bytes"] == report["predicted_bytes"]
    assert plan.bits_per_value() == report["bits_per_value"]
    layer_bytes = [
        layer.nbytes(plan.cache_dtype, plan.workload.lengths, plan.workload.context) for layer in plan.layers
    ]
    assert layer_bytes == report["layer_bytes"]
    bits = [(layer.k[0].num_bits, layer.v[0].num_bits) for layer in plan.layers]
    assert bits == [(layer["k"][0]["num_bits"], layer["v"][0]["num_bits"]) for layer in report["layers"]]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_committed_plan_is_the_embedded_models(folder: Path) -> None:
    assert plan_of(folder).model == identity_of(model_folder(), "reasoner-10m")


def test_the_readme_of_the_artifacts_names_every_folder_and_its_figures() -> None:
    text = (ROOT / "artifacts/README.md").read_text()
    for folder in FOLDERS:
        rows = {row["name"]: row for row in json.loads((folder / "evaluation.json").read_text())["body"]["rows"]}
        row = rows["default"]
        line = next(line for line in text.splitlines() if f"`plans/{folder.name}`" in line)
        assert f"| {row['bits_per_value']:.3f} |" in line
        assert f"| {row['total_bytes'] / 1e6:.2f} MB |" in line
        assert f"| {row['text']['kl']:.4f} ± {row['text']['kl_se']:.4f} |" in line
