"""Budgets: what is asked is what the compiled plan takes, with transforms and scratch, however it was
stated."""

from dataclasses import replace

import pytest
import torch
from allocation_cases import IDENTITY, VOCABULARY, WEIGHTS, geometry, profile
from form_cases import with_tensors

from kvcal.errors import InfeasibleBudget
from kvcal.geometry import ExpandedHeads
from kvcal.plan.layer import FormatsSpec, LayerPlan
from kvcal.plan.page_format import RAW, SIDES, Format
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import layout_tensors, needed_nbytes, tensors_nbytes
from kvcal.recipe import AllocateSpec, CacheSpec, ProfileSpec, Recipe
from kvcal.stages.allocate.budget import (
    compile_plan,
    require_budget,
    spared_lambdas,
    transform_bytes,
    workload_of,
    workspace_bytes,
)
from kvcal.stages.allocate.record import Allocation, fixed_allocation
from kvcal.stages.allocate.stage import allocate
from kvcal.stages.transform import reserved_bytes
from kvcal.store.workspace import step_workspace
from kvcal.systems.aqua_kv.recipe import PredictorSpec
from kvcal.systems.aqua_kv.transform import Predictor
from kvcal.systems.basis.recipe import BasisSpec, FeedbackSpec
from kvcal.systems.pm_kvq.recipe import ProgressiveSpec, ReparamSpec
from kvcal.systems.pm_kvq.schedule import made_progressive

BATCH, CONTEXT = 2, 1024
LINEAR = PredictorSpec(drop=False)


def allocated(reserved: int = 0, **knobs: object) -> Allocation:
    knobs = {"batch": BATCH, "context": CONTEXT, "objective": "sensitivity", **knobs}
    found = profile()
    return allocate(found, AllocateSpec(**knobs), {}, reserved)


def rescaled(allocation: Allocation) -> tuple[tuple[LayerPlan, ...], dict[str, torch.Tensor]]:
    """All layers with λ, and these."""
    layers = tuple(replace(layer, k_rescale=True) for layer in allocation.layers)
    shape = (layers[0].attention.num_kv_heads, layers[0].head_dim("k"))
    return layers, {f"layers.{layer.geometry.index}.k_rescale": torch.ones(shape) for layer in layers}


def of_two_bits(allocation: Allocation) -> Allocation:
    layers = tuple(replace(layer, k=Format(2), v=Format(2)) for layer in allocation.layers)
    return replace(allocation, layers=layers)


FP32 = Format(2, "token", 128, param_dtype="float32")


def fixed() -> Allocation:
    return fixed_allocation(FormatsSpec(FP32, FP32), IDENTITY, geometry(), Workload(BATCH, CONTEXT), {})


LAMBDAS = 3 * 2 * 32 * 4  # of three layers with two heads of 32


def predicted(allocation: Allocation) -> tuple[tuple[LayerPlan, ...], dict[str, torch.Tensor]]:
    """Every layer but the first predicted from the one before."""
    layers = list(allocation.layers)
    for number in range(1, len(layers)):
        kind = Predictor("linear", number - 1)
        layers[number] = replace(layers[number], k_pages="pre", k_predictor=kind, v_predictor=kind)
    bare = Plan(IDENTITY, "bfloat16", allocation.layers, allocation.workload, {})
    return tuple(layers), with_tensors(bare, layers).tensors


STATED = {
    "budget": {"budget": "3MB", "workspace": "1MB"},
    "kv_budget": {"kv_budget": "700000B"},
    "bits": {"bits": 6.5},
    "same_bytes_as": {"same_bytes_as": "kivi-4"},
}


@pytest.mark.parametrize("kind", STATED)
def test_a_plan_beyond_its_budget_is_refused_and_reserved_bytes_make_it_fit(kind: str) -> None:
    tight = allocated(**STATED[kind])
    assert tight.split.kind == kind
    used = tight.split.cache + tight.split.overhead
    tight = replace(tight, split=replace(tight.split, budget=used + 100))
    assert compile_plan(tight).predicted_bytes == tight.split.cache
    with pytest.raises(InfeasibleBudget, match=f"{LAMBDAS - 100} more than the budget") as caught:
        compile_plan(tight, *rescaled(tight))
    assert caught.value.smallest_bytes == used + LAMBDAS and f"--reserve {LAMBDAS}" in (caught.value.hint or "")
    compile_plan(replace(tight, split=replace(tight.split, budget=used + LAMBDAS)), *rescaled(tight))
    kept_free = allocated(LAMBDAS, **STATED[kind])
    taken = compile_plan(kept_free, *rescaled(kept_free)).predicted_bytes + kept_free.split.overhead
    assert taken <= kept_free.split.budget == allocated(**STATED[kind]).split.budget


def test_reserved_bytes_are_taken_from_the_formats() -> None:
    given = allocated(kv_budget="700000B")
    assert given.split.reserved == 0
    less = allocated(30_000, kv_budget="730000B")
    assert (less.layers, less.split.reserved, less.split.budget) == (given.layers, 30_000, 730_000)
    assert allocated(30_000, kv_budget="700000B").split.paged <= 670_000 < given.split.paged
    with pytest.raises(InfeasibleBudget) as caught:
        allocated(kv_budget="1000B")
    with pytest.raises(InfeasibleBudget, match="transforms 777 B") as more:
        allocated(777, kv_budget="1000B")
    assert more.value.smallest_bytes == caught.value.smallest_bytes + 777
    allocated(777, kv_budget=f"{more.value.smallest_bytes}B")


def test_the_smallest_bits_have_the_reserved_bytes_in_them() -> None:
    with pytest.raises(InfeasibleBudget) as caught:
        allocated(5000, bits=1.0)
    smallest = caught.value.least_bits
    assert smallest is not None and f"{smallest:.2f} bits per cached value" in caught.value.message
    allocated(5000, bits=smallest)
    with pytest.raises(InfeasibleBudget):
        allocated(5000, bits=smallest - 0.01)


@pytest.mark.parametrize("kind", ["budget", "kv_budget", "bits"])
def test_a_refused_budget_says_what_takes_the_smallest(kind: str) -> None:
    """By hand: three layers with two heads of 32, 2 bits with a scale and a zero for each token, a sink,
    windows, and of a whole device weights and workspace."""
    cache = CacheSpec(num_sink_tokens=1, k_recent_window=16, v_recent_window=0)
    found = profile(spec=ProfileSpec(num_bits=(2,), k_axes=("token",), group_sizes=(32,), kl_samples=0), cache=cache)
    knobs = {"budget": {"budget": "1MB"}, "kv_budget": {"kv_budget": "1KB"}, "bits": {"bits": 1.0}}[kind]
    spec = AllocateSpec(batch=BATCH, context=CONTEXT, objective="sensitivity", **knobs)
    with pytest.raises(InfeasibleBudget) as caught:
        allocate(found, spec, {}, 300)
    parts, heads = dict(caught.value.parts or {}), 3 * BATCH * 2
    device = {"weights": WEIGHTS, "workspace": parts.get("workspace", 0)} if kind == "budget" else {}
    values, token = 2 * heads * CONTEXT * 32, heads * 32 * 2
    assert parts == device | {
        "codes": values * 2 // 8,
        "scales": 2 * heads * CONTEXT * 2 * 2,
        "windows": 16 * token,
        "open_pages": 2 * 128 * token,
        "sinks": 2 * token,
        "transforms": 300,
    }
    assert sum(parts.values()) == caught.value.smallest_bytes and "open pages 196.6 KB" in caught.value.message
    exact = {"budget": {"budget": f"{caught.value.smallest_bytes}B"}, "bits": {"bits": caught.value.least_bits},
             "kv_budget": {"kv_budget": f"{caught.value.smallest_bytes}B"}}[kind]  # fmt: skip
    allocate(found, replace(spec, **exact), {}, 300)


def test_the_transforms_of_a_recipe_take_what_is_reserved_for_them() -> None:
    model, cache = geometry(), CacheSpec()
    assert reserved_bytes(model, cache, {}) == 0
    assert reserved_bytes(model, cache, {"reparam": ReparamSpec()}) == LAMBDAS
    alike = allocated(bits=16)
    found = predicted(replace(alike, layers=quantized(alike)))
    assert reserved_bytes(model, cache, {"predictors": LINEAR}) == tensors_nbytes(found[1])
    device = reserved_bytes(model, cache, {"predictors": LINEAR}, Workload(BATCH, CONTEXT))
    grown = [workspace_bytes(layers, "bfloat16", Workload(BATCH, CONTEXT)) for layers in (quantized(alike), found[0])]
    assert device == tensors_nbytes(found[1]) + grown[1] - grown[0] > tensors_nbytes(found[1])
    fed = [replace(layer, k_feedback=True, v_feedback=True) for layer in quantized(alike)]
    factors = needed_nbytes(fed, "bfloat16")
    feedback = {"feedback": FeedbackSpec()}
    assert reserved_bytes(model, cache, feedback) == factors > 0
    assert reserved_bytes(model, cache, {"reparam": ReparamSpec(), **feedback}) == factors + LAMBDAS


def quantized(allocation: Allocation) -> tuple[LayerPlan, ...]:
    spec = CacheSpec()
    k, v = (spec.format(side, 2, "token", 128) for side in SIDES)
    return tuple(replace(layer, k=k, v=v) for layer in allocation.layers)


def test_bases_are_reserved_with_all_that_they_bring() -> None:
    """Of a latent, which takes none, nothing."""
    model, cache, fmt = geometry(), CacheSpec(), Format(2, quantizer="rotated")
    both = {"k_feedback": True, "v_feedback": True, "k_basis": True, "v_basis": True, "v_gain": True}
    layers = tuple(LayerPlan(layer, fmt, fmt, **both) for layer in model.layers)
    assert reserved_bytes(model, cache, {"basis": BasisSpec()}) == needed_nbytes(layers, model.cache_dtype)
    latent = replace(model.layers[0], num_kv_heads=1, expanded=ExpandedHeads(32, 32))
    latents = replace(model, layers=(latent, *model.layers[1:]))
    rest = needed_nbytes(layers[1:], model.cache_dtype)
    assert reserved_bytes(latents, cache, {"basis": BasisSpec()}) == rest


def test_lambdas_that_other_formats_may_want_are_named_where_some_layer_has_one() -> None:
    layers = quantized(allocated(bits=16))
    assert spared_lambdas(layers) == 0
    assert spared_lambdas((replace(layers[0], k_rescale=True), *layers[1:])) == LAMBDAS * 2 // 3
    assert spared_lambdas([replace(layer, k_rescale=True) for layer in layers]) == 0


def test_an_engine_holds_whole_pages() -> None:
    asked = AllocateSpec(bits=3.0, batch=2, context=1000)
    assert workload_of(asked) == Workload(2, 1000)
    assert workload_of(replace(asked, engine="vllm")) == Workload(2, 1024)
    assert workload_of(replace(asked, engine="vllm", context=1024)) == Workload(2, 1024)


@pytest.mark.parametrize("transform", [rescaled, predicted])
def test_a_whole_device_holds_weights_workspace_and_plan(transform) -> None:
    """Recipes reserve for the most that may follow; what follows fits, its scratch included."""
    sections = {"reparam": ReparamSpec()} if transform is rescaled else {"predictors": LINEAR}
    workload = Workload(BATCH, CONTEXT)
    reserved = reserved_bytes(geometry(), profile().setup.cache, sections, workload)
    total = 700_000 + reserved + WEIGHTS + allocated(budget="10MB").split.workspace
    allocation = allocated(reserved, budget=f"{total}B")
    assert allocation.split.logits == 2 * 4 * BATCH * VOCABULARY and allocation.split.weights == WEIGHTS
    assert any(RAW not in layer.formats for layer in allocation.layers)
    allocation = of_two_bits(allocation)
    plan = compile_plan(allocation, *transform(allocation))
    scratch = step_workspace(plan.layers, "bfloat16", BATCH, CONTEXT).nbytes
    assert plan.predicted_bytes + WEIGHTS + 2 * 4 * BATCH * VOCABULARY + scratch <= total


def test_a_whole_device_without_room_for_the_scratch_of_predictors_is_refused() -> None:
    allocation = of_two_bits(allocated(budget="8MB"))
    split = allocation.split
    layers, tensors = predicted(allocation)
    taken = transform_bytes(allocation, layers, tensors_nbytes(tensors))
    assert taken > tensors_nbytes(tensors)
    cache = compile_plan(allocation).predicted_bytes
    exact = replace(allocation, split=replace(split, budget=split.overhead + cache + taken))
    plan = compile_plan(exact, layers, tensors)
    with pytest.raises(InfeasibleBudget, match="1 more than the budget"):
        require_budget(replace(exact, split=replace(exact.split, budget=exact.split.budget - 1)), plan)
    # Stated in bytes, the workspace is the user's.
    stated = replace(
        exact, split=replace(exact.split, logits=None, budget=exact.split.budget - taken + tensors_nbytes(tensors))
    )
    require_budget(stated, plan)


def test_the_workspace_by_hand() -> None:
    """Logits and softmax in fp32, one layer's keys and values, the pages of one side on their way there, 32
    bytes a value that is encoded at once, and indices of rows and of places in a ring."""
    split = allocated(budget="20MB").split
    one_side, indices = BATCH * CONTEXT * 2 * 32, 64 * BATCH + 16 * 128
    assert split.workspace == 2 * 4 * BATCH * VOCABULARY + 3 * 2 * one_side + 32 * one_side + indices
    assert split.weights + split.workspace + split.cache <= 20_000_000


PROGRESSIVE_CACHE = CacheSpec(num_sink_tokens=1, k_recent_window=0, v_recent_window=0, param_dtype="float32")


def most_bytes(plan: Plan) -> int:
    return max(plan.nbytes([count] * BATCH) for count in range(1, CONTEXT + 1))


def test_pages_that_shrink_leave_the_reserved_bytes_at_every_count() -> None:
    found = profile(cache=PROGRESSIVE_CACHE, spec=ProfileSpec(num_bits=(2, 4), k_axes=("token",), kl_samples=0))
    spec = AllocateSpec(kv_budget="900000B", batch=BATCH, context=CONTEXT, objective="sensitivity")
    allocation = allocate(found, spec, {}, LAMBDAS)
    allocation = made_progressive(allocation, ProgressiveSpec(), LAMBDAS)
    assert any(fmt.shrink_at for layer in allocation.layers for fmt in layer.formats)
    plan = compile_plan(allocation, *rescaled(allocation))
    assert 900_000 - 40_000 < most_bytes(plan) <= 900_000
    solved = allocate(found, spec, {}, 100_000)
    most = [
        most_bytes(Plan(IDENTITY, "bfloat16", progressive.layers, progressive.workload, {}, {}))
        for progressive in (made_progressive(solved, ProgressiveSpec(), kept) for kept in (0, 100_000))
    ]
    assert most[1] <= 800_000 < most[0] <= 900_000


def test_a_progressive_plan_is_held_against_its_budget_at_every_count() -> None:
    """At the workload there is room for λ, and right before pages shrink there is not."""
    allocation, fmt = fixed(), replace(FP32, shrink_at=(600, 600, 600))
    layers = tuple(replace(layer, k=fmt, v=fmt) for layer in allocation.layers)
    peak = Plan(IDENTITY, "bfloat16", layers, allocation.workload, {}, {}).nbytes([599] * BATCH)
    allocation = replace(allocation, layers=layers, split=replace(allocation.split, kind="bits", budget=peak))
    assert compile_plan(allocation).predicted_bytes + LAMBDAS < peak
    with pytest.raises(InfeasibleBudget, match=f"{LAMBDAS} more than the budget"):
        compile_plan(allocation, *rescaled(allocation))


def test_bits_of_a_progressive_plan_are_all_in() -> None:
    found = made_progressive(fixed(), ProgressiveSpec(bits=7.0), LAMBDAS)
    budget = int(7.0 * 3 * 2 * 2 * 32 * BATCH * CONTEXT / 8)
    assert (found.split.budget, found.split.kind, found.split.reserved) == (budget, "bits", LAMBDAS)
    plan = compile_plan(found, *rescaled(found))
    assert most_bytes(plan) <= budget
    own = made_progressive(fixed(), ProgressiveSpec(), LAMBDAS)  # its own bytes, which leave nothing to reserve
    assert own.split.kind is None and own.split.reserved == 0
    whole = allocated(budget="8MB")
    split = replace(whole.split, budget=whole.split.overhead + budget + 1)
    whole = made_progressive(replace(whole, layers=fixed().layers, split=split), ProgressiveSpec(bits=7.0), 0)
    assert whole.split.budget == whole.split.overhead + budget


@pytest.mark.parametrize("budget", ["1TB", "1000000000000000000TB", "1" + "0" * 30])
def test_a_budget_beyond_16_bits_is_that_of_16_bits(budget: str) -> None:
    found = allocated(kv_budget=budget)
    assert all(fmt == RAW for layer in found.layers for fmt in layer.formats) and found.loss == 0
    assert found.split.budget in (10**12, 10**30)
    layers = made_progressive(replace(fixed(), split=found.split), ProgressiveSpec(), 0).layers
    assert all(min(fmt.shrink_at) > CONTEXT for layer in layers for fmt in layer.formats)


def test_layers_with_a_side_at_16_bits_pack_whole_pages_within_the_budget() -> None:
    """Both sides of a layer are packed together; what the other side's ring then takes more is counted."""
    cache = CacheSpec(num_sink_tokens=8, k_recent_window=48, v_recent_window=48, stripe_tokens=16)
    rotated = ProfileSpec(num_bits=(2, 4), k_axes=("token",), group_sizes=(128,), quantizers=("rotated",), kl_samples=0)
    found, stripes = profile(spec=rotated, cache=cache), set()
    for bits in (4.0, 6.0, 9.0, 12.0, 16.5):
        spec = AllocateSpec(bits=bits, batch=BATCH, context=CONTEXT, objective="sensitivity")
        chosen = allocate(found, spec, {}, 6 * 32)  # the signs of rotated sides
        assert compile_plan(chosen, tensors=layout_tensors(chosen.layers)).bits_per_value() <= bits
        for layer in chosen.layers:
            sizes = {fmt.stripe_tokens for fmt in layer.formats}
            assert sizes == ({128} if RAW in layer.formats else {16})
            stripes |= {(RAW in layer.formats, layer.k == layer.v == RAW)}
    assert stripes == {(False, False), (True, False), (True, True)} or stripes == {(False, False), (True, False)}


def test_stripes_are_for_equal_windows_and_rotated_pages() -> None:
    with pytest.raises(ValueError, match="windows of 64 and 32"):
        CacheSpec(v_recent_window=32, stripe_tokens=16)
    spec = CacheSpec(num_sink_tokens=8, k_recent_window=112, v_recent_window=112, stripe_tokens=16)
    assert spec.format("k", 2, "token", 128, "rotated").ring_tokens() == 128
    assert spec.format("k", 2, "channel", 128).stripe_tokens == 128
    assert spec.first_from_page == 129
    with pytest.raises(ValueError, match="of rotated pages"):
        Recipe("stripes", cache=spec, allocate=AllocateSpec(bits=2.5))
