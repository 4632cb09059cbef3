"""A plan that is wrong is refused, one test per way (those of the container are in test_artifact), and the
document says what readers say."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from form_cases import form_plan
from fuzz_artifacts import limited
from static_cases import plan_for as static_plan_for
from test_plan import body_of, example
from torch import Tensor

from kvcal import artifact, load_plan
from kvcal.artifact import Artifact
from kvcal.errors import ArtifactError
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry, ModelIdentity, StateGeometry
from kvcal.pages.layout_protocol import PARAM_DTYPES
from kvcal.plan.page_format import SIDES, Side
from kvcal.plan.plan import (
    KIND,
    SCHEMA,
    Boost,
    Format,
    LayerPlan,
    Plan,
    Tier,
    Workload,
    save_plan,
)  # fmt: skip
from kvcal.plan.tensors import needed_tensors
from kvcal.systems.aqua_kv.transform import Predictor
from kvcal.systems.kvmix.window_rule import WindowRule

DOCUMENT = (Path(__file__).parents[2] / "docs" / "plan-format.md").read_text(encoding="utf-8")


def write_body(path: Path, body: dict, schema: int = SCHEMA, kind: str = KIND, tensors: dict | None = None) -> None:
    """A container whose digest is right, whatever the body says."""
    artifact.write(path, Artifact(kind, schema, {}, body, tensors or {}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.safetensors"


def refusal(path: Path) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        load_plan(path)
    assert caught.value.exit_code == 5
    return caught.value


def at(body: dict, place: str):
    """(container, key) of a dotted place such as layers.1.k.0.num_bits."""
    *parents, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    for part in parents:
        body = body[part]
    return body, last


ADDED = ["x", "layers.1.geometry.x", "layers.1.k.0.x"]


@pytest.mark.parametrize("place", ADDED)
def test_unknown_keys(path, place):
    body = body_of(example())
    container, key = at(body, place)
    container[key] = 1
    write_body(path, body)
    assert "unknown key" in refusal(path).message and ".x'" in refusal(path).message.replace("'x'", ".x'")


REMOVED = ["model.weights_sha256", "layers", "layers.0.geometry.index", "layers.1.k.0.num_bits", "provenance"]
# Keys that have a default, to which they are never left.
DEFAULTS = {"layers.1.k.0.axis": "layers is", "layers.2.geometry.window": "layer 3 has no k", "layers.0.k": "layers is"}


@pytest.mark.parametrize("place", [*REMOVED, *DEFAULTS])
def test_missing_keys(path, place):
    body = body_of(example())
    container, key = at(body, place)
    del container[key]
    write_body(path, body)
    assert DEFAULTS.get(place, "missing key") in refusal(path).message
    assert place in DEFAULTS or place.split(".")[-1] in refusal(path).message


CHANGED = [
    ("layers.1.k.0.num_bits", 5, "num_bits = 5: Input should be 1, 2, 3, 4, 8 or 16"),
    ("layers.1.k.0.num_bits", 2.0, 'um_bits":2.0,'),
    ("layers.1.k.0.num_bits", True, '_bits":true,'),
    ("layers.1.v.0.group_size", 64, "16-bit heads take no axis, group_size, num_sink_tokens or recent_window"),
    ("layers.4.v.0.axis", "channel", "layer 4 has v axis 'channel', expected one of ('token',)"),
    ("workload.batch", 0, "workload.batch = 0: Input should be greater than or equal to 1"),
    ("layers.1.geometry.index", 0, "layers must be present, unique and in order, found indices [0, 0, 3, 4]"),
    ("layers.1.geometry.window", 512, "layer 1 is bounded and takes no k format"),
    ("layers.1.geometry.k_head_dim", 0, "k_head_dim = 0: Input should be greater than or equal to 1"),
    ("layers", {}, "layers = {}"),
    ("workload.batch", 10**8, "workload.batch = 100000000: Input should be less than or equal to 1000000"),
    ("layers.0.geometry.bytes_per_sequence", 10**30, "Input should be less than or equal to"),
    ("provenance", [], "provenance = []"),
]


@pytest.mark.parametrize(("place", "value", "message"), CHANGED)
def test_values_out_of_range(path, place, value, message):
    body = body_of(example())
    container, key = at(body, place.replace("layers.4", "layers.3"))
    container[key] = value
    write_body(path, body)
    assert message in refusal(path).message
    assert str(path) in refusal(path).message


@pytest.mark.parametrize("value", [0, None, "1"])
def test_predicted_bytes_that_are_not_what_the_layers_take(path, value):
    expected = example().predicted_bytes
    write_body(path, body_of(example()) | {"predicted_bytes": value})
    assert f"predicted_bytes = {value!r}, but its layers take {expected}" in refusal(path).message
    write_body(path, body_of(example()) | {"predicted_bytes": float(expected)})
    assert f"predicted_bytes = {expected}.0, but its layers take {expected}" in refusal(path).message


def test_lists_within_lists(path):
    """Deeper than anything that reads them may recurse."""
    deep: list = []
    for _ in range(300):
        deep = [deep]
    write_body(path, body_of(example()) | {"provenance": {"x": deep}})
    assert "lists and objects within each other" in refusal(path).message


def test_a_paged_window_that_hardly_shrinks_ends():
    """The rule adds a little less than 128 tokens a page, for 10^7 pages, of which max_tokens lets the first
    count."""
    with limited(5):
        rule = WindowRule("paged", 0.9999999, 1000)
        assert [rule.window(128 * pages) for pages in (0, 1, 2, 7, 8, 10**6)] == [0, 127, 254, 889, 1000, 1000]
        assert rule.last_jump <= 128 * 10


HOSTILE = [
    ("lattice d=2", "lattice.d2.b3", (3, 1), 3e38, "holds values from -"),
    ("lattice d=2", "layers.0.k_signs", (3,), 0, "a sign that is neither -1 nor 1"),
    ("before RoPE", "layers.0.rotary", (1, 3), 0.0, "holds values from 0 to 1, expected 0.00390625 to 256"),
    ("before RoPE", "layers.0.rotary", (1, 2), 1e9, "to 1e+09, expected 0 to 3.14159"),
    ("before RoPE", "layers.0.rotary", (1, 0), 0.5, "expected distinct ones of the head"),
    ("before RoPE", "layers.0.rotary", (1, 0), 8.0, "to 8, expected 0 to 7"),
    ("one source of two layers, λ", "layers.0.k_rescale", (1, 1), 0.0, "expected 2.32831e-10 to 4.29497e+09"),
    ("one source of two layers, λ", "layers.0.k_offset", (1, 1), -1e30, "holds values from -1e+30"),
    ("linear", "layers.1.k_predictor.weight", (1, 1), 3e38, "to 3e+38"),
    ("int4, lattice", "layers.1.k_predictor.scale", (1, 1), -1.0, "holds values from -1"),
]


@pytest.mark.parametrize(("name", "tensor", "place", "value", "message"), HOSTILE)
def test_values_of_tensors_that_no_stage_writes(path, name, tensor, place, value, message):
    plan = form_plan(name, "float32")
    tensors = {key: stored.clone() for key, stored in plan.tensors.items()}
    tensors[tensor][place] = value
    write_body(path, body_of(plan), tensors=tensors)
    assert f"tensor {tensor!r} " in refusal(path).message and message in refusal(path).message


def test_a_width_that_no_lattice_takes(path):
    """The layout's own error, of a file's content."""
    plan = form_plan("lattice d=4", "float32")
    body = body_of(plan)
    for layer in body["layers"]:
        layer["geometry"] |= {"num_kv_heads": 1, "k_head_dim": 7, "v_head_dim": 7}
    tensors = {name: tensor[:7] if name.endswith("signs") else tensor for name, tensor in plan.tensors.items()}
    write_body(path, body, tensors=tensors)
    assert "a row of 7 values cannot be cut in vectors of lattice_dim = 4" in refusal(path).message


def test_the_document_quotes_the_real_messages(path):
    body = body_of(example())
    refusals = []
    for changes in ({"schema": SCHEMA + 1}, {"tensors": {"layers.1.k_offset": torch.zeros(2, 64)}}):
        write_body(path, body, **changes)
        refusals.append(refusal(path).message)
    body["layers"][1]["k"][0]["rotation"] = {}
    write_body(path, body)
    refusals.append(refusal(path).message)
    for message in refusals:
        assert "    " + message.replace(str(path), path.name) + "\n" in DOCUMENT


def test_every_field_is_documented():
    records = (Plan, LayerPlan, Format, Boost, Tier, WindowRule, Predictor)
    records += (Workload, ModelIdentity, AttentionGeometry, StateGeometry)
    names = {field.name for record in records for field in fields(record)} - {"tensors"}
    for name in [*sorted(names), "predicted_bytes"]:
        assert f"`{name}`" in DOCUMENT or f'"{name}"' in DOCUMENT, name
    for dtype in (*PARAM_DTYPES, *CACHE_DTYPES):
        assert f'`"{dtype}"`' in DOCUMENT
    for number in (1, 2, 3, 4, 8, 16, 32, 64, 128):
        assert re.search(rf"\b{number}\b", DOCUMENT)


IDENTITY = ModelIdentity("m", "llama", "a", "b", "c")
GEOMETRY = tuple(AttentionGeometry(index, 4, 2, 8, 8) for index in range(2))
LATTICE = Format(2, lattice_dim=2, num_sink_tokens=4)
PLAIN = Format(2, num_sink_tokens=4, group_size=64)
SHRINKING = replace(PLAIN, param_dtype="float32", shrink_at=(200,))
ROTARY = torch.tensor([[0, 4, 1.0, 1.0], [1, 5, 0.1, 1.0]], dtype=torch.float64)
VALUES_FROM_0 = Predictor("linear", 0)


def plan_of(
    layers: tuple[LayerPlan, ...], change: Callable[[dict[str, Tensor]], object] = lambda tensors: None
) -> Plan:
    """With tensors of ones and rotary tables, ``change`` applied."""
    tensors = {
        name: ROTARY.clone() if name.endswith("rotary") else torch.ones(spec.extents, dtype=getattr(torch, spec.dtype))
        for name, spec in needed_tensors(layers, "float32").items()
    }
    change(tensors)
    return Plan(IDENTITY, "float32", layers, Workload(1, 512), {}, tensors)


LAYERS = (
    LayerPlan(GEOMETRY[0], LATTICE, LATTICE, k_pages="pre"),
    LayerPlan(GEOMETRY[1], LATTICE, LATTICE, k_pages="pre", v_predictor=VALUES_FROM_0),
)
CHANGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "missing tensor 'layers.0.k_signs'": lambda tensors: tensors.pop("layers.0.k_signs"),
    "unknown tensor 'more'": lambda tensors: tensors.update(more=torch.ones(1)),
    r"'layers.0.v_signs' is int8 \[8\], expected int8 \[16\]": lambda tensors: tensors.update(
        {"layers.0.v_signs": tensors["layers.0.v_signs"][:8]}
    ),
    r"'lattice.d2.b2' is float64 \[16, 2\], expected float32": lambda tensors: tensors.update(
        {"lattice.d2.b2": tensors["lattice.d2.b2"].double()}
    ),
    r"'layers.1.rotary' is float64 \[2, 3\], expected float64 \[any, 4\]": lambda tensors: tensors.update(
        {"layers.1.rotary": ROTARY[:, :3]}
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_tensors_that_are_not_those_needed(message: str) -> None:
    assert plan_of(LAYERS).tensors
    with pytest.raises(ValueError, match=message):
        plan_of(LAYERS, CHANGES[message])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_predictor": Predictor("linear", 1)}, "predicts v from layer 1, which is not an earlier layer"),
        ({"v": SHRINKING}, "and pages shrink: the prediction would change with them"),
    ],
)
def test_predictors_that_read_what_is_not_there(change: dict[str, object], message: str) -> None:
    first = LayerPlan(GEOMETRY[0], PLAIN, PLAIN)
    second = LayerPlan(GEOMETRY[1], PLAIN, PLAIN, v_predictor=VALUES_FROM_0)
    assert plan_of((first, second)).predicted_bytes
    with pytest.raises(ValueError, match=message):
        Plan(IDENTITY, "float32", (first, replace(second, **change)), Workload(1, 512), {})


def shear(size: float) -> Tensor:
    """[2, 8, 8]: an invertible matrix a head, the worse conditioned the larger ``size``."""
    generator = torch.Generator().manual_seed(3)
    return torch.eye(8) + size * torch.randn(2, 8, 8, generator=generator).triu(1)


@pytest.mark.parametrize("side", SIDES)
def test_a_basis_and_an_inverse_that_is_not_its_own(path: Path, side: Side) -> None:
    """Of one head as of both; a basis of 0, or one that is not finite, has none. Rounding to fp32 is no
    fault, however ill-conditioned a basis is."""
    plan, name = static_plan_for("basis"), f"layers.0.{side}_basis"
    for size in (0.1, 3.0, 20.0):
        exact = shear(size).double()
        tensors = {**plan.tensors, name: exact.float(), f"{name}_inverse": torch.linalg.inv(exact).float()}
        save_plan(replace(plan, tensors=tensors), path)
        load_plan(path)
    good = plan.tensors[f"{name}_inverse"]
    off = good.clone()
    off[1] = off[1].mT.clone()
    for matrix, inverse, head in (
        (plan.tensors[name], off, 1),
        (plan.tensors[name], 1.01 * good, 0),
        (torch.zeros(2, 8, 8), good, 0),
        (plan.tensors[name], torch.zeros(2, 8, 8), 0),
    ):
        save_plan(replace(plan, tensors={**plan.tensors, name: matrix, f"{name}_inverse": inverse}), path)
        message = refusal(path).message
        assert f"tensor '{name}': its product with {side}_basis_inverse is not the identity" in message
        assert message.endswith(f"off for head {head}")
    good[0, 2, 3] = torch.nan
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        replace(plan, tensors={**plan.tensors, f"{name}_inverse": good})


def test_a_small_error_counts_by_its_own_row_and_column(path: Path) -> None:
    """[[1, a], [0, 1]] [[0, -a], [1 / a, 1]] is 1 / a off at (1, 0), where a row of norm 1 meets a column of
    norm 1 / a. Their norms the other way round, about a each, would allow it."""
    plan, name, a = static_plan_for("basis"), "layers.0.k_basis", 2.0**14
    matrix, inverse = torch.eye(8).repeat(2, 1, 1), torch.eye(8).repeat(2, 1, 1)
    matrix[1, :2, :2] = torch.tensor([[1.0, a], [0.0, 1.0]])
    inverse[1, :2, :2] = torch.tensor([[0.0, -a], [1 / a, 1.0]])
    save_plan(replace(plan, tensors={**plan.tensors, name: matrix, f"{name}_inverse": inverse}), path)
    assert refusal(path).message.endswith(f"but {1 / a:.3g} off for head 1")
