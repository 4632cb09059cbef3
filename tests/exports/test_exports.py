"""The contract of kvcal.exports: nothing of a plan is lost in silence. And each target's own file."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import yaml
from consumers import consumed

from kvcal.errors import UsageError
from kvcal.exports import EXPORTERS
from kvcal.exports import export as family
from kvcal.exports.export import BITS, GROUPS, PARTS, dropped, planned_bits
from kvcal.exports.kvtuner import read_kvtuner
from kvcal.geometry import AttentionGeometry, Geometry, ModelIdentity, StateGeometry
from kvcal.plan.layer import LayerPlan, Predictor
from kvcal.plan.page_format import RAW, Boost, Format, Tier, WindowRule
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import needed_tensors

TWO, FOUR, EIGHT = (Format(bits, "channel", 64) for bits in (2, 4, 8))
IDENTITY = ModelIdentity("tests/tiny", "llama", "a" * 64, "b" * 64, "c" * 64)


def attention(index: int, window: int | None = None) -> AttentionGeometry:
    return AttentionGeometry(index, 4, 2, 64, 64, window)


def plan_of(*pairs: tuple[Format | tuple[Format, ...], Format | tuple[Format, ...]] | LayerPlan) -> Plan:
    """A layer for each pair of formats; keys' formats are given per channel, values' are made per token."""
    layers = []
    for index, pair in enumerate(pairs):
        if not isinstance(pair, LayerPlan):
            k, v = (side if isinstance(side, tuple) else (side,) for side in pair)
            v = tuple(fmt if fmt == RAW else replace(fmt, axis="token") for fmt in v)
            pair = LayerPlan(attention(index), k, v)
        layers.append(pair)
    made = {
        name: torch.full(spec.extents, 1, dtype=getattr(torch, spec.dtype))
        for name, spec in needed_tensors(tuple(layers), "bfloat16").items()
    }
    return Plan(IDENTITY, "bfloat16", tuple(layers), Workload(1, 256), {}, made)


MIXED = plan_of((EIGHT, FOUR), (TWO, TWO), (FOUR, TWO), (RAW, RAW), (Format(3, "channel", 64), FOUR))
PLANS = {
    "16 bits": plan_of((RAW, RAW), (RAW, RAW)),
    "one format": plan_of((FOUR, FOUR), (FOUR, FOUR)),
    "mixed": MIXED,
    "heads": plan_of(((FOUR, TWO), (TWO, RAW)), (TWO, TWO)),
    "window and state": plan_of(
        LayerPlan(attention(0, window=512)), (TWO, FOUR), LayerPlan(StateGeometry(2, 640)), (EIGHT, EIGHT)
    ),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("name", EXPORTERS)
def test_every_change_of_bits_is_listed_and_none_is_a_loss_without_need(name: str, plan: Plan) -> None:
    made = EXPORTERS[name](plan)
    planned = planned_bits(plan)
    assert list(made.bits) == list(planned) and made.text.endswith("\n")
    listed = {index for one in dropped(plan, made) if one.part.startswith(BITS) for index in one.layers}
    assert listed == {index for index in planned if made.bits[index] != planned[index]}
    widest = {"kvtuner": 8, "compressed-tensors": 8}.get(name, 16)  # these have no 16 bits beside fewer
    for index, bits in planned.items():
        assert all(stored >= min(wanted, widest) for stored, wanted in zip(made.bits[index], bits, strict=True))
    assert EXPORTERS[name](plan) == made


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_plan_of_16_bits_loses_nothing_where_the_target_has_16_bits(name: str) -> None:
    lost = dropped(PLANS["16 bits"], EXPORTERS[name](PLANS["16 bits"]))
    assert [one.part for one in lost] == ([f"{BITS}: 16 and 16 become 8 and 8"] if name == "kvtuner" else [])


# For each part, a plan whose second layer alone has it.
BOOSTED = replace(TWO, boost=Boost("magnitude", (Tier(4, 0.125),)))
SHRINKING = replace(TWO, shrink_at=(512,), param_dtype="float32")
HAVING: dict[str, LayerPlan] = {
    family.HEADS: LayerPlan(attention(1), (FOUR, TWO), (RAW,)),
    family.CODES: LayerPlan(attention(1), (TWO,), (RAW,)),
    GROUPS: LayerPlan(attention(1), (TWO,), (RAW,)),
    "first tokens at 16 bits": LayerPlan(attention(1), (replace(TWO, num_sink_tokens=4),), (RAW,)),
    "last tokens at 16 bits": LayerPlan(
        attention(1), (replace(TWO, window_rule=WindowRule("clamped", 0.1, 64)),), (RAW,)
    ),
    "channels with more bits": LayerPlan(attention(1), (BOOSTED,), (RAW,)),
    "another quantizer than the uniform one": LayerPlan(
        attention(1), (Format(2, "token", quantizer="rotated"),), (RAW,)
    ),
    "pages that shrink": LayerPlan(attention(1), (SHRINKING,), (RAW,)),
    "factors of key channels (λ)": LayerPlan(attention(1), (TWO,), (RAW,), k_rescale=True),
    "offsets of key channels": LayerPlan(attention(1), (TWO,), (RAW,), k_offset=True),
    "pages of keys before RoPE": LayerPlan(attention(1), (TWO,), (RAW,), k_pages="pre"),
    "predictors": LayerPlan(attention(1), (RAW,), (RAW,), v_predictor=Predictor("linear", 0)),
    "codes chosen with error feedback": LayerPlan(attention(1), (TWO,), (RAW,), k_feedback=True),
}


def test_every_part_has_a_case() -> None:
    assert HAVING.keys() == PARTS.keys()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", EXPORTERS)
def test_every_part_is_carried_or_listed_with_its_layer(name: str, part: str) -> None:
    plan = plan_of((RAW, RAW), HAVING[part])
    made = EXPORTERS[name](plan)
    listed = {one.part: one.layers for one in dropped(plan, made)}
    assert (part in made.keeps) != (part in listed)
    assert listed.get(part, (1,)) == (1,)


def test_every_field_of_a_layer_is_bits_or_a_part() -> None:
    """A new field of a format or a layer has to be given a part, or it would be lost in silence."""
    of_format = {"num_bits", "axis", "group_size", "num_sink_tokens", "recent_window", "boost", "window_rule"}
    of_format |= {"lattice_dim", "shrink_at", "quantizer"}
    details = {"param_dtype", "shift"}  # of codes with a scale, and of pages that shrink
    assert {field.name for field in fields(Format)} == of_format | details
    of_layer = {"geometry", "k", "v", "k_rescale", "k_offset", "k_pages", "k_predictor", "v_predictor"}
    assert {field.name for field in fields(LayerPlan)} == of_layer | {"k_feedback", "v_feedback"}


def test_modelopt_names_a_format_for_each_layer_that_is_quantized() -> None:
    content = json.loads(EXPORTERS["modelopt"](MIXED).text)
    assert content["producer"]["name"] == "kvcal"
    quantization = content["quantization"]
    assert quantization["kv_cache_schema_version"] == 1 and quantization["quant_algo"] is None
    assert quantization["kv_cache_quant_algo"] == "MIXED_PRECISION"
    assert quantization["kv_cache_quantized_layers"] == {
        f"model.layers.{index}.self_attn": {"quant_algo": "FP8" if index == 0 else "NVFP4"} for index in (0, 1, 2, 4)
    }
    uniform = json.loads(EXPORTERS["modelopt"](PLANS["one format"]).text)["quantization"]
    assert uniform["kv_cache_quant_algo"] == "NVFP4" and len(uniform["kv_cache_quantized_layers"]) == 2


def test_compressed_tensors_reads_its_scheme() -> None:
    text = EXPORTERS["compressed-tensors"](MIXED).text
    code = (
        "import json, sys; from compressed_tensors.quantization import QuantizationConfig as C\n"
        "read = C.model_validate(json.load(sys.stdin)['quantization_config'])\n"
        "print(read.kv_cache_scheme.model_dump_json(exclude_none=True))"
    )
    scheme = json.loads(consumed(("compressed-tensors",), code, text))
    written = json.loads(text)["quantization_config"]["kv_cache_scheme"]
    assert written["num_bits"] == 8 and written.items() <= scheme.items()


def test_vllm_reads_the_scheme_and_the_arguments() -> None:
    code = (
        "import json, sys\n"
        "from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (\n"
        "    CompressedTensorsConfig as C, CompressedTensorsKVCacheMethod as M)\n"
        "read = C.from_config(json.load(sys.stdin)['quantization_config'])\n"
        "M.validate_kv_cache_scheme(read.kv_cache_scheme); print(json.dumps(read.kv_cache_scheme))"
    )
    text = EXPORTERS["compressed-tensors"](MIXED).text
    assert (
        json.loads(consumed(("vllm", "compressed-tensors"), code, text))
        == json.loads(text)["quantization_config"]["kv_cache_scheme"]
    )
    code = (
        "import json, sys; from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = EngineArgs.add_cli_args(FlexibleArgumentParser())\n"
        "read = [parser.parse_args(line.split()) for line in sys.stdin]\n"
        "print(json.dumps([[one.kv_cache_dtype, one.kv_cache_dtype_skip_layers] for one in read]))"
    )
    lines = "".join(EXPORTERS["vllm-args"](plan).text for plan, _ in ARGUMENTS)
    assert json.loads(consumed(("vllm",), code, lines)) == [expected for _, expected in ARGUMENTS]


ARGUMENTS = [
    (PLANS["16 bits"], ["auto", []]),
    (PLANS["one format"], ["int4_per_token_head", []]),
    (MIXED, ["int4_per_token_head", ["0", "3"]]),
    (PLANS["window and state"], ["int8_per_token_head", ["sliding_window"]]),
    # Six layers of 8 and 4 bits, and 2 of them at either end at 16: fewer bits than 8 and 8 everywhere.
    (plan_of(*[(EIGHT, FOUR)] * 6), ["int8_per_token_head", []]),
    (plan_of(*[(EIGHT, FOUR)] * 40), ["turboquant_k8v4", ["0", "1", "38", "39"]]),
]


@pytest.mark.parametrize(("plan", "expected"), ARGUMENTS)
def test_vllm_gets_the_preset_with_the_fewest_bits(plan: Plan, expected: list) -> None:
    name, *skipped = EXPORTERS["vllm-args"](plan).text.split()[1:]
    assert [name, skipped[1:]] == expected


@pytest.mark.parametrize(
    ("k", "arguments"),
    [
        ([4, 4, 4], "-ctk q4_0"),
        ([2, 4, 8], "-ctk q4_0 -ctk-last q8_0,1"),
        ([8, 8, 4, 4, 4, 16], "-ctk q4_0 -ctk-first q8_0,2 -ctk-last bf16,1"),
        ([8, 2, 16, 2, 2], "-ctk q4_0 -ctk-first bf16,3"),
        ([16, 16, 4, 16, 16], "-ctk q4_0 -ctk-first bf16,2 -ctk-last bf16,2"),
    ],
)
def test_ik_llama_gets_the_fewest_bits_of_a_middle_and_two_ends(k: list[int], arguments: str) -> None:
    formats = {bits: RAW if bits == 16 else Format(bits, "channel") for bits in k}
    plan = plan_of(*[(formats[bits], RAW) for bits in k])
    made = EXPORTERS["ik-llama"](plan)
    assert made.text == f"{arguments} -ctv bf16\n"
    assert all(bits[1] == 16 for bits in made.bits.values())
    # The bits are those that the arguments say.
    widths = {"q4_0": 4, "q8_0": 8, "bf16": 16}
    words = arguments.split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    stored = [widths[given["-ctk"]]] * len(k)
    if "-ctk-first" in given:
        name, count = given["-ctk-first"].split(",")
        stored[: int(count)] = [widths[name]] * int(count)
    if "-ctk-last" in given:
        name, count = given["-ctk-last"].split(",")
        stored[-int(count) :] = [widths[name]] * int(count)
    assert [bits[0] for bits in made.bits.values()] == stored


def test_kvtuner_reads_the_bits_of_layers_and_heads() -> None:
    made = EXPORTERS["kvtuner"](MIXED)
    assert yaml.safe_load(made.text) == {
        index: {"nbits_key": k, "nbits_value": v}
        for index, (k, v) in enumerate([(8, 4), (2, 2), (4, 2), (8, 8), (3, 4)])
    }
    assert made.text.startswith("# asym=True axis_key=1 axis_value=0 q_group_size=64 residual_length=128\n")
    assert [one.part for one in dropped(MIXED, made)] == [f"{BITS}: 16 and 16 become 8 and 8"]
    heads = yaml.safe_load(EXPORTERS["kvtuner"](PLANS["heads"]).text)
    assert heads[0] == {0: {"nbits_key": 4, "nbits_value": 2}, 1: {"nbits_key": 2, "nbits_value": 8}}
    assert heads[1] == {head: {"nbits_key": 2, "nbits_value": 2} for head in (0, 1)}


def test_kvtuner_has_one_axis_and_group_size_for_all_layers() -> None:
    plan = plan_of((TWO, TWO), (Format(2, "channel", 32), TWO))
    made = EXPORTERS["kvtuner"](plan)
    assert not made.text.startswith("#") and [one.part for one in dropped(plan, made)] == [GROUPS]


@pytest.mark.parametrize(
    "plan",
    [
        plan_of((EIGHT, FOUR), (TWO, TWO), (Format(3, "channel", 64), Format(1, "channel", 64))),
        plan_of(((FOUR, TWO), (TWO, EIGHT)), (TWO, TWO)),
        plan_of(LayerPlan(attention(0, window=512)), (TWO, FOUR), LayerPlan(StateGeometry(2, 640))),
    ],
    ids=["layers", "heads", "window and state"],
)
def test_kvtuner_round_trip(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "bits.yaml"
    path.write_text(EXPORTERS["kvtuner"](plan).text)
    assert read_kvtuner(path, plan.geometry, "channel", 64) == plan.layers


LAYER = "  nbits_key: 4\n  nbits_value: 2\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "layers: 0, 1 in the file or in the model alone"),
        (f"0:\n{LAYER}", "layers: 1 in the file or in the model alone"),
        (f"0:\n{LAYER}1:\n{LAYER}2:\n{LAYER}", "layers: 2 in the file or in the model alone"),
        (f"0:\n{LAYER}0:\n{LAYER}", "line 4: '0:' is no new layer"),
        (f"0:\n{LAYER}1: 4\n", "layer 1: expected bits, or heads with bits"),
        ("0:\n  nbits_key: 4\n", "layer 0: expected the keys nbits_key and nbits_value"),
        (f"0:\n{LAYER}  nbits: 2\n1:\n{LAYER}", "layer 0: expected the keys"),
        ("0:\n  nbits_key: 5\n  nbits_value: 2\n", "layer 0: nbits_key = 5; allowed: 1, 2, 3, 4, 8"),
        ("0:\n  nbits_key: four\n", "line 2: '  nbits_key: four' is no new layer"),
        ("0: {nbits_key: 4, nbits_value: 2}\n", "line 1: '0: {nbits_key: 4, nbits_value: 2}' is no new layer"),
        (f"layers:\n{LAYER}", "line 1: 'layers:' is no new layer"),
        (f"0:\n  3:\n    nbits_key: 4\n    nbits_value: 2\n1:\n{LAYER}", "heads of layer 0: 0, 1, 3 in the file"),
        (f"0:\n  0: 4\n1:\n{LAYER}", "layer 0, head 0: expected the keys"),
    ],
)
def test_kvtuner_files_of_another_shape_are_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bits.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        read_kvtuner(path, Geometry("llama", "bfloat16", (attention(0), attention(1))), "channel", 32)
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("axis", "size", "says"),
    [
        ("tensor", 32, "of the codes, axis = 'tensor': Input should be 'channel' or 'token'"),
        ("channel", 48, "of the codes, group_size = 48: Input should be 32, 64 or 128"),
    ],
)
def test_kvtuner_with_a_wrong_axis_or_group_size(axis: str, size: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        read_kvtuner(tmp_path / "bits.yaml", Geometry("llama", "bfloat16", (attention(0),)), axis, size)
