"""The schedule of progressive quantization: at every token count, by a scan written from the rule alone."""

import dataclasses

import oracles
import pytest

from kvcal.errors import InfeasibleBudget
from kvcal.geometry import AttentionGeometry, StateGeometry
from kvcal.plan.plan import RAW, SIDES, Boost, Format, LayerPlan, Tier, Workload
from kvcal.systems.kvmix.window_rule import WindowRule
from kvcal.systems.pm_kvq.schedule import progressive_layers

DIM = 32
TWO = Format(2, "token", 32)
FOUR = Format(4, "channel", 64, num_sink_tokens=3, recent_window=40)
ONE_SINK = Format(2, "token", 128, num_sink_tokens=1, recent_window=128)


def attention(index: int, heads: int = 2, window: int | None = None, dim: int = DIM) -> AttentionGeometry:
    return AttentionGeometry(index, 4, heads, dim, dim, window)


def uniform(num_layers: int, k: Format, v: Format, dim: int = DIM) -> tuple[LayerPlan, ...]:
    return tuple(LayerPlan(attention(index, dim=dim), k, v) for index in range(num_layers))


CASES = {
    "2 bits": uniform(3, TWO, TWO),
    "sinks and windows": uniform(2, FOUR, ONE_SINK),
    "several final bits": (
        *uniform(1, FOUR, TWO),
        LayerPlan(attention(1), RAW, Format(3, "token", 64)),
        LayerPlan(attention(2), Format(8, "channel", 32), Format(1, "token", 32)),
    ),
    "other layers": (
        LayerPlan(attention(0, window=150)),
        LayerPlan(StateGeometry(1, 999)),
        *[dataclasses.replace(layer, geometry=attention(2)) for layer in uniform(1, ONE_SINK, TWO)],
        LayerPlan(attention(5), TWO, TWO),
    ),
    "narrow heads": uniform(2, TWO, TWO, dim=8),  # 8-bit records with fp32 scales are larger than 16-bit ones
    "growing window": uniform(2, TWO, Format(2, "token", 32, window_rule=WindowRule("clamped", 0.3, 100, 10))),
}


def layer_bytes(layer: LayerPlan, bits: int, num_tokens: int, dtype: str) -> int:
    """Bytes of a sequence in a layer whose pages have at most ``bits`` bits, by the format's formulas."""
    item, geometry = oracles.ITEM_BYTES[dtype], layer.geometry
    if isinstance(geometry, StateGeometry):
        return geometry.bytes_per_sequence
    dim, heads = geometry.k_head_dim, geometry.num_kv_heads
    if geometry.window is not None:
        return min(num_tokens, geometry.window - 1) * heads * 2 * dim * item
    total = 0
    for side, fmt in zip(SIDES, layer.formats, strict=True):
        for _ in range(heads):
            stored = fmt.num_bits if fmt.num_bits in (3, 16) else max(fmt.num_bits, bits)
            params = fmt.param_dtype if fmt.num_bits in (3, 16) else "float32"
            record = oracles.record_bytes(stored, side, fmt.axis, fmt.group_size, dim, params, dtype)
            largest = fmt.recent_window if fmt.window_rule is None else fmt.window_rule.max_tokens
            total += (fmt.num_sink_tokens + largest + 128) * dim * item + num_tokens // 128 * record
    return total


def scanned(layers, batch: int, context: int, dtype: str, budget: int) -> list[list[int]]:
    """Bits of every layer at 1 ... ``context`` tokens: steps in the fixed order while above the budget."""
    bits = [16] * len(layers)
    steps = [(layer, to) for to in (8, 4, 2, 1) for layer in range(len(layers))]
    final = [
        min([fmt.num_bits for fmt in layer.formats if fmt.num_bits not in (3, 16)], default=16) for layer in layers
    ]
    found, taken = [], 0
    for count in range(1, context + 1):
        while sum(layer_bytes(layer, bits[i], count, dtype) for i, layer in enumerate(layers)) * batch > budget:
            position, to = steps[taken]
            bits[position] = max(final[position], min(bits[position], to))
            taken += 1
        found.append(list(bits))
    return found


def smallest_budget(layers, workload: Workload, dtype: str) -> int:
    return workload.batch * sum(layer_bytes(layer, 1, workload.context, dtype) for layer in layers)


@pytest.mark.parametrize(
    ("name", "slack", "batch"),
    [(name, 0.07, 3) for name in CASES] + [("several final bits", 0.0, 1), ("sinks and windows", 0.6, 1)],
)
def test_every_token_count_fits_and_is_as_wide_as_the_rule_allows(name, slack, batch):
    layers, workload = CASES[name], Workload(batch, 700)
    budget = int(smallest_budget(layers, workload, "bfloat16") * (1 + slack))
    found = progressive_layers(layers, workload, "bfloat16", budget)
    expected = scanned(layers, batch, workload.context, "bfloat16", budget)
    for count in range(1, workload.context + 1):
        nbytes = sum(layer.nbytes("bfloat16", (count,) * batch, count) for layer in found)
        assert nbytes <= budget, count
        at = expected[count - 1]
        assert nbytes == batch * sum(
            layer_bytes(layer, bits, count, "bfloat16") for layer, bits in zip(layers, at, strict=True)
        )
        for layer, bits in zip(found, at, strict=True):
            for fmt in layer.formats:
                shrinks = fmt.num_bits not in (3, 16)
                assert fmt.bits_at(count) == (max(bits, fmt.num_bits) if shrinks else fmt.num_bits), count
    assert expected[0] != expected[-1] or slack > 0.5
    if slack == 0:
        assert all(fmt.bits_at(workload.context) == fmt.num_bits for layer in found for fmt in layer.formats)


def test_a_ragged_batch_never_takes_more():
    layers, workload = CASES["sinks and windows"], Workload(3, 900)
    budget = smallest_budget(layers, workload, "bfloat16")
    found = progressive_layers(layers, workload, "bfloat16", budget)
    for columns in range(1, 901, 31):
        for lengths in ((columns, 1, 1), (columns, columns // 2, columns - 1), (1, columns - 1, 2)):
            assert sum(layer.nbytes("bfloat16", lengths, columns) for layer in found) <= budget


def test_what_shrinks_has_fp32_parameters_and_all_else_is_left_alone():
    boosted = Format(2, "channel", 32, boost=Boost("magnitude", (Tier(4, 0.25),)))
    lattice = Format(2, "token", 128, lattice_dim=2)
    layers = (
        LayerPlan(attention(0), boosted, lattice),
        LayerPlan(attention(1), RAW, Format(3, "token", 64, param_dtype="bfloat16")),
        LayerPlan(attention(2), Format(4, "channel", 64, 5, 7), TWO, k_offset=True),
    )
    workload = Workload(2, 2000)
    final = sum(layer.nbytes("bfloat16", workload.lengths, 2000) for layer in layers)
    found = progressive_layers(layers, workload, "bfloat16", 2 * final)
    assert found[:2] == layers[:2]
    k, v = found[2].k, found[2].v
    assert found[2].k_offset and found[2].geometry == layers[2].geometry
    assert (k.start_bits, v.start_bits, k.param_dtype, v.param_dtype) == (16, 16, "float32", "float32")
    assert dataclasses.replace(k, shrink_at=(), param_dtype="float16") == layers[2].k
    assert v.shrink_at[:2] == k.shrink_at  # K and V of a layer shrink together


def test_an_infeasible_budget_says_the_smallest_one():
    layers, workload = CASES["several final bits"], Workload(2, 700)
    smallest = smallest_budget(layers, workload, "float16")
    with pytest.raises(InfeasibleBudget, match=f"{smallest} bytes") as caught:
        progressive_layers(layers, workload, "float16", smallest - 1)
    assert caught.value.smallest_bytes == smallest and caught.value.exit_code == 3
    progressive_layers(layers, workload, "float16", smallest)


def test_many_layers_and_a_long_context_take_no_time():
    """80 layers, 128K tokens, batch 4: thousands of pages; spot checks at every ninth event."""
    layers = uniform(80, Format(2, "token", 128, 1, 128), Format(2, "token", 128, 1, 128), dim=128)
    workload = Workload(4, 131072)
    budget = smallest_budget(layers, workload, "bfloat16")
    found = progressive_layers(layers, workload, "bfloat16", budget)
    counts = sorted({count for layer in found for count in layer.k.shrink_at})
    assert len(counts) > 20
    for count in (*counts[::9], 131072):
        sizes = [sum(layer.nbytes("bfloat16", (n,) * 4, n) for layer in found) for n in (count - 1, count)]
        assert max(sizes) <= budget and sizes[0] > 0.9 * budget
