"""The static cache: exact bytes, memory that stays where it is, prompts in chunks, reuse, and what it
refuses."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cache_cases import (
    HEAD_DIM,
    attended,
    feed,
    llama_plan,
    padded,
    plan_of,
    ragged_ids,
    random_ids,
    random_qkv,
    tiny_llama,
)
from form_cases import form_plan
from static_cases import FORMATS, TRANSFORMED, V, assert_same_pages, drifting_ids, listened, plan_for
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcal import Plan, PlanCache, attached
from kvcal.cache.plan_layer import DYNAMIC_HINT
from kvcal.errors import ArtifactError, NonFiniteActivations, SlowPath, UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.kernels.choice import refusals
from kvcal.kernels.reference import NO_ROOM
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, SIDES, Format
from kvcal.store.state import Serving

ALL = [*FORMATS, *TRANSFORMED]
K_2 = Format(2, "channel")


def static_cache(plan: Plan, max_tokens: int, mask: Tensor | None = None, layers: int = 1) -> PlanCache:
    return PlanCache(plan, tiny_llama(2, layers).config, mask, max_tokens=max_tokens)


def served(cache: PlanCache, ids: Tensor, cuts=(), mask: Tensor | None = None, layers: int = 1) -> Tensor:
    with attached(tiny_llama(2, layers)):
        return feed(tiny_llama(2, layers), cache, ids, cuts, mask)


@pytest.mark.parametrize(
    ("name", "max_tokens"), [*((name, 500) for name in ALL), *(("queries", n) for n in (1, 127, 128, 129))]
)
def test_bytes_are_the_plans_from_the_first_update_on(name: str, max_tokens: int) -> None:
    plan = plan_for(name, num_layers=2)
    cache = static_cache(plan, max_tokens, layers=2)
    held = cache.nbytes
    assert held == sum(tensor.nbytes for tensor in plan.tensors.values())
    served(cache, random_ids(3, 1), layers=2)
    assert cache.nbytes == plan.nbytes([max_tokens] * 3, max_tokens)
    pages = plan.layers[0].format("k").num_pages(max_tokens)
    numbers = 4 * 3 + 8 + 4 + 4 * 3 * pages  # lengths, columns, error, the table of slots
    starts = 2 * 4 * 3 * 2 if plan.needs_queries else 0
    rules = {fmt for layer in plan.layers for fmt in layer.formats if fmt.window_rule is not None}
    tables = sum(4 * (fmt.pages_read(max_tokens) + 1) for fmt in rules)
    assert cache.workspace_nbytes == numbers + starts + tables


@pytest.mark.parametrize("name", ["clamped window", "paged window"])
def test_the_table_of_a_window_rule_says_when_pages_are_read(name: str) -> None:
    cache = static_cache(plan_for(name), 700)
    cache.allocate(2, "cpu")
    place, layer = cache.paged_layers[0].place, cache.plan.layers[0]
    for side, table in zip(SIDES, (place.k_read_at, place.v_read_at), strict=True):
        fmt = layer.format(side)
        assert [int((table <= n).sum()) for n in range(701)] == [fmt.pages_read(n) for n in range(701)]
        assert fmt.pages_read(700) > 2


# On, before and after the boundaries of pages, and of windows of 9 (137, 265) and of 33 (161, 289), too.
CUTS = [(1, 129), (50, 100, 150, 200, 250, 300), (265,)]


@pytest.mark.parametrize(
    ("name", "cuts"), [*((name, (127, 128, 137, 161, 256, 289)) for name in ALL), *(("queries", cuts) for cuts in CUTS)]
)
def test_prompts_in_chunks_are_those_of_the_dynamic_cache(name: str, cuts: tuple[int, ...]) -> None:
    plan, ids = plan_for(name), drifting_ids(2, 384)
    dynamic, static = PlanCache(plan, tiny_llama(2, 1).config), static_cache(plan, 384)
    with listened(2, 1, plan):
        expected = feed(tiny_llama(2, 1), dynamic, ids, cuts)
    found = served(static, ids, cuts)
    assert torch.equal(found, expected) or (found - expected).abs().max() < 1e-4  # steps of one token are not sdpa's
    assert_same_pages(static, dynamic)
    assert static.lengths == [384, 384]


def test_ragged_prompts_in_chunks_that_end_within_padding() -> None:
    plan = plan_for("queries")
    ids, mask = ragged_ids((300, 130, 3), 60)
    for cuts in ((1, 170, 171, 298, 299, 300, 301), (299,)):
        dynamic = PlanCache(plan, tiny_llama(2, 1).config, mask[:, :300])
        static = static_cache(plan, 360, mask[:, :300])
        with listened(2, 1, plan):
            expected = feed(tiny_llama(2, 1), dynamic, ids, cuts, mask)
        found = served(static, ids, cuts, mask)
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)
        assert assert_same_pages(static, dynamic) > 0
        assert static.lengths == [360, 190, 63]


def test_memory_stays_where_it_is() -> None:
    cache = static_cache(plan_for("queries"), 300)
    cache.allocate(2, "cpu")
    state = cache.static
    held = [*(tensor for layer in cache.paged_layers for tensor in layer.tensors), state.lengths, state.columns]
    before = [tensor.data_ptr() for tensor in held]
    served(cache, random_ids(2, 140), (120, *range(121, 140)))
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-1)
    length = cache.get_seq_length()
    assert cache.get_max_length() == 300
    cache.reset()
    assert isinstance(length, Tensor) and int(length) == 139  # what was asked for does not move with the cache
    served(cache, random_ids(2, 130))
    after = [*(tensor for layer in cache.paged_layers for tensor in layer.tensors), state.lengths, state.columns]
    assert [tensor.data_ptr() for tensor in after] == before
    assert cache.lengths == [130, 130]
    with pytest.raises(UsageError, match="is allocated already"):
        cache.allocate(2, "cpu")
    with pytest.raises(UsageError, match=r"allocate\(\) is for static caches"):
        PlanCache(plan_for("queries"), tiny_llama(2, 1).config).allocate(2, "cpu")


def test_reset_and_reuse() -> None:
    plan, ids = plan_for("queries"), random_ids(2, 270, seed=3)
    fresh, used = static_cache(plan, 300), static_cache(plan, 300)
    served(used, random_ids(2, 300, seed=5), (280, *range(281, 300)))
    used.reset()
    assert used.lengths == [] or used.lengths == [0, 0]
    cuts = (250, *range(251, 270))
    assert torch.equal(served(used, ids, cuts), served(fresh, ids, cuts))
    rows, mask = padded([random_ids(1, n, seed=n)[0] for n in (150, 90)], 150, "left")
    used.reset(mask)
    found = served(used, rows.long(), mask=mask)
    assert used.lengths == [150, 90]
    expected = served(static_cache(plan, 300, mask), rows.long(), mask=mask)
    assert torch.equal(found[mask.bool()], expected[mask.bool()])


def test_rows_change_places() -> None:
    plan, order = plan_for("queries"), torch.tensor([2, 0, 0])
    swapped, alike = static_cache(plan, 300), static_cache(plan, 300)
    prompt, rest = random_qkv(3, 2, 240), random_qkv(3, 2, 20, seed=8)
    attended(swapped, *prompt)
    swapped.reorder_cache(order)
    attended(alike, *(x[order] for x in prompt))
    found, expected = (attended(cache, *rest, range(1, 20)) for cache in (swapped, alike))
    assert torch.equal(found, expected)
    swapped.batch_select_indices(torch.tensor([1, 2, 0]))
    for wrong in (lambda: swapped.batch_repeat_interleave(2), lambda: swapped.batch_select_indices(torch.tensor([0]))):
        with pytest.raises(UsageError, match="of 3: a static batch stays") as error:
            wrong()
        assert "without max_tokens" in str(error.value.hint)


@pytest.mark.parametrize(
    ("name", "kept"),
    [*((name, 140) for name in ("uniform", "kivi", "queries", "paged window", *TRANSFORMED)),
     *(("kitty", kept) for kept in (259, 256, 255, 128, 3))],
)  # fmt: skip
def test_removed_tokens_leave_what_they_leave_in_the_dynamic_cache(name: str, kept: int) -> None:
    """Within the ring or into pages: what comes back, and what is packed from it, is the same to the last
    bit."""
    plan, given, more = plan_for(name), random_qkv(2, 2, 260), random_qkv(2, 2, 150, seed=4)
    dynamic, static = PlanCache(plan, tiny_llama(2, 1).config), static_cache(plan, 450)
    found, expected = [], []
    for cache, outputs in ((static, found), (dynamic, expected)):
        attended(cache, *given, (200, *range(232, 240)))
        cache.crop(kept - 260)
        assert cache.lengths == [kept, kept]
        layer, rows = cache.paged_layers[0], cache.padding.rows
        outputs += [layer.store.read(side, rows, kept, 0, torch.float32) for side in SIDES]
        outputs.append(attended(cache, *more, (1, 100, *range(101, 140))))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[2], expected[2], atol=1e-4, rtol=1e-4)
    assert assert_same_pages(static, dynamic) > 0
    assert static.nbytes == plan.nbytes([450] * 2)


def test_too_many_tokens() -> None:
    cache = static_cache(plan_for("kivi"), 20)
    with pytest.raises(UsageError, match="a sequence of 21 tokens does not fit.*max_tokens = 20"):
        served(cache, random_ids(1, 21))
    served(cache, random_ids(1, 20), (19,))
    for new in (1, 2):
        with pytest.raises(UsageError, match="does not fit"):
            served(cache, random_ids(1, new))
    assert cache.lengths == [20]
    for unusable in (0, 3.5):
        with pytest.raises(UsageError, match=f"max_tokens = {unusable}, expected an integer of 1 or more"):
            static_cache(plan_for("kivi"), unusable)


def test_a_step_beyond_the_room_is_found_by_check() -> None:
    """Where the host does not look: as in a captured graph."""
    cache = static_cache(plan_for("uniform"), 130)
    served(cache, random_ids(1, 130))
    q, k, v = random_qkv(1, 2, 1)
    before = cache.layers[0].parts[0].pool.records.clone()
    for _ in range(127):
        cache.layers[0].attend(q, k, v, None, 1.0, 0.0)
    assert int(cache.static.error) == NO_ROOM
    with pytest.raises(UsageError, match="a sequence of 257 tokens does not fit"):
        cache.check()
    cache.check()
    assert torch.equal(cache.layers[0].parts[0].pool.records, before)


@pytest.mark.parametrize("side", ["k", "v"])
def test_what_is_not_finite_is_reported(side: str) -> None:
    cache = static_cache(llama_plan(Format(2, "channel", 32), Format(2, "token", 32), 2, "bfloat16", 1), 300)
    cache.allocate(1, "cpu")
    cache.static.serving, layer = Serving(), cache.paged_layers[0]
    q, k, v = random_qkv(1, 2, 130)
    (k if side == "k" else v)[0, 1, 7, 2] = torch.nan
    layer.update(k, v)
    with pytest.raises(NonFiniteActivations, match="keys or values cannot be quantized"):
        layer.observe(q)
    cache.reset()
    for t in range(130):
        one = slice(t, t + 1)
        layer.attend(q[:, :, one], k[:, :, one], v[:, :, one], None, 1.0, 0.0)
    with pytest.raises(NonFiniteActivations, match="a page holds NaN"):
        cache.reset()
    assert cache.lengths == [0]
    cache.check()


def enlarging(channel_scale: float) -> Plan:
    """In float16, with bases of keys that enlarge one channel of one head so much."""
    plan = plan_for("basis", cache_dtype="float16")
    eye = torch.eye(8).repeat(2, 1, 1)
    eye[1, 3, 3] = channel_scale
    changed = {"layers.0.k_basis": eye, "layers.0.k_basis_inverse": torch.linalg.inv(eye)}
    changed["layers.0.k_center"] = torch.zeros(2, 8)
    return replace(plan, tensors={**plan.tensors, **changed})


@pytest.mark.parametrize("tokens", [1, 3, 200])
@pytest.mark.parametrize("max_tokens", [None, 300])
def test_a_token_beyond_float16_in_its_basis_is_an_error(max_tokens: int | None, tokens: int) -> None:
    """As it enters: of a prompt and of one token, long before its page is packed. What fits passes, and so
    does what stands in padding."""
    mask = torch.ones(1, tokens + 1).long()
    mask[0, 0] = 0
    q, k, v = (x.half() for x in random_qkv(1, 2, tokens + 2))
    k[:, :, 0] = torch.inf
    for scale in (10.0, 1e5):
        cache = PlanCache(enlarging(scale), tiny_llama(2, 1).config, mask, max_tokens)
        try:
            attended(cache, *(x[:, :, : tokens + 1] for x in (q, k, v)))
            attended(cache, *(x[:, :, tokens + 1 :] for x in (q, k, v)))
            cache.check()
        except NonFiniteActivations as error:
            assert scale == 1e5 and "beyond float16" in error.message
        else:
            assert scale == 10.0


def test_a_step_beyond_float16_is_noted_without_a_wait() -> None:
    """In the flag that ``check`` reads; the step itself ends."""
    cache = PlanCache(enlarging(1e5), tiny_llama(2, 1).config, max_tokens=300)
    q, k, v = (x.half() for x in random_qkv(1, 2, 9))
    k[:, 1, :8, 3] = 0.0
    attended(cache, *(x[:, :, :8] for x in (q, k, v)), range(1, 8))
    cache.check()
    k[:, 1, 8, 3] = 2.0
    attended(cache, *(x[:, :, 8:] for x in (q, k, v)))
    with pytest.raises(NonFiniteActivations, match="a token is beyond float16 in its basis"):
        cache.check()


def test_the_batch_and_the_model_are_checked() -> None:
    cache = static_cache(plan_for("kivi"), 30)
    served(cache, random_ids(2, 5))
    with pytest.raises(UsageError, match="allocated for 2 sequences and was given 3"):
        served(cache, random_ids(3, 5))
    other = PlanCache(plan_for("kivi", num_kv_heads=4), tiny_llama(2, 1).config, max_tokens=30)
    with pytest.raises(ArtifactError, match="caches 2 KV heads of size 8 .* the plan is for 4"):
        served(other, random_ids(2, 5))


SHRINKING = Format(2, param_dtype="float32", shrink_at=(100,))
LATTICE = Format(2, lattice_dim=2)
# A plan of three layers, the layer that is refused, and why.
DYNAMIC_ONLY = [
    (llama_plan(SHRINKING, V, num_layers=3), 0, "k pages that shrink: memory of a fixed size stays as it is"),
    (llama_plan(V, SHRINKING, num_layers=3), 0, "v pages that shrink: memory of a fixed size stays as it is"),
    (llama_plan(V, LATTICE, num_layers=3), 0, "v pages on a lattice: no kernel reads them as they are stored"),
    (form_plan("lattice d=2"), 0, "k pages on a lattice: no kernel reads them as they are stored"),
    (form_plan("before RoPE"), 0, "k pages before RoPE: no kernel reads them as they are stored"),
    (form_plan("linear"), 1, "k pages before RoPE: no kernel reads them as they are stored"),
]


@pytest.mark.parametrize(("plan", "layer", "reason"), DYNAMIC_ONLY)
@pytest.mark.parametrize("lookahead", [0, 2])
def test_plans_that_need_a_dynamic_cache(plan: Plan, layer: int, reason: str, lookahead: int) -> None:
    config = tiny_llama(2, 3).config
    with pytest.raises(UnsupportedModel) as refused:
        PlanCache(plan, config, max_tokens=100, lookahead=lookahead)
    assert refused.value.message == f"a static cache cannot hold layer {layer}: {reason}"
    assert refused.value.hint == DYNAMIC_HINT and refused.value.exit_code == 4
    assert PlanCache(plan, config).slow_layers == {}


def test_a_layer_on_another_device_is_told_so() -> None:
    cache = PlanCache(llama_plan(Format(2, "channel", 32), V, 2), tiny_llama(2).config, max_tokens=256)
    cache.allocate(1, "cpu")
    cache.static.serving = Serving()
    elsewhere = torch.empty(1, 2, 1, HEAD_DIM, device="meta")
    with pytest.raises(UnsupportedModel, match="layer 0 is on meta, .* cache on cpu"):
        cache.update(elsewhere, elsewhere, 0)


def test_what_the_kernels_refuse() -> None:
    def found(k: Format, v: Format, dtype: str = "bfloat16", dim: int = 128, v_dim: int | None = None, **changes):
        return list(refusals(LayerPlan(AttentionGeometry(0, 8, 2, dim, v_dim or dim), k, v, **changes), dtype))

    k, sinks = Format(2, "channel"), replace(V, num_sink_tokens=3)
    rotated = replace(V, quantizer="rotated")
    for served in (
        found(k, V), found(RAW, sinks, "float16"), found(rotated, rotated, k_rescale=True, k_offset=True),
        found(k, rotated, "bfloat16", 64), found(rotated, rotated, dim=256, k_feedback=True, v_feedback=True),
    ):  # fmt: skip
        assert served == []
    for refused, says in (
        (found(k, V, "float32"), "float32"),
        (found(k, V, dim=36), "36"),
        (found(k, V, dim=128, v_dim=64), ""),
        (found(k, rotated, dim=264), "head size 264; of rotated pages the kernels take up to 256"),
        (
            found(k, rotated, dim=256, k_feedback=True, v_feedback=True),
            "head size 256; with error feedback the kernels take up to 128, or 256 rotated",
        ),
        (found(SHRINKING, V), "k pages that shrink"),
        (found(rotated, rotated, k_pages="pre"), "k pages before RoPE"),
        (found(LATTICE, sinks), "k pages on a lattice"),
    ):
        assert len(refused) == 1 and says in refused[0]


@pytest.mark.parametrize("name", ["queries", "rotated, feedback"])
def test_the_operators_declare_what_they_do(name: str) -> None:
    """torch's own checks: the schema's mutated arguments, and the fake implementations."""
    cache = static_cache(plan_for(name), 300)
    served(cache, random_ids(2, 140))
    layer, scratch = cache.layers[0], cache.static.scratch
    step, error = layer.store.step, scratch.error
    q, k, v = (x[:, :, 0] for x in random_qkv(2, 2, 1))
    queries = q if step.needs_queries else scratch.nothing
    place, transform, variant, held = (
        list(layer.place),
        list(step.transform),
        step.variants[0],
        (list(step.k), list(step.v)),
    )
    x, mean, slots = random_qkv(2, 2, 256)[1].bfloat16(), step.statistic.sum.clone(), layer.place.table
    packed = step.k.pages, slots, torch.zeros(2, 2, 256, HEAD_DIM)
    bases = [torch.randn(2, HEAD_DIM, HEAD_DIM)] * 2
    calls = {
        "enter": (k.bfloat16(), v.bfloat16(), q, bases, bases, error),
        "leave": (q.float(), bases, torch.bfloat16),
        "append": (k, v, queries, *held, list(step.statistic), place, transform, error, variant),
        "decode": (q, *held, place, transform, scratch.nothing, step.workspace, 0.5, 0.0, variant),
        "pack": (x, step.k.pages, slots, 0, mean, transform, error, 0, variant),
        "unpack": (*packed, transform, 0, variant),
    }
    for op, args in calls.items():
        called = getattr(torch.ops.kvcal, op).default
        torch.library.opcheck(called, args, test_utils=("test_schema", "test_faketensor"))


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeTensorMode:
    """Tensors on CUDA without memory, of which a CPU build cannot make views: layers stay empty. Properties
    of an H200."""
    monkeypatch.setattr("kvcal.cache.static_layer.LayerStore", lambda *given: SimpleNamespace(step=None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return FakeTensorMode()


def two_layers(dims: tuple[int, int], k: Format = K_2) -> PlanCache:
    """Of the model's two layers, one by one; only the plan knows their head sizes."""
    attention = tuple(AttentionGeometry(index, 8, 2, dim, dim) for index, dim in enumerate(dims))
    return PlanCache(
        plan_of(Geometry("llama", "bfloat16", attention), k, Format(2)), tiny_llama().config, max_tokens=300
    )


def test_a_cache_names_its_slow_layers_when_it_is_allocated_on_cuda(fake_gpu: FakeTensorMode) -> None:
    cache = two_layers((128, 80))
    assert cache.slow_layers == {1: ["head size 80, where the fast kernel takes 64, 96, 128, 192, 256"]}
    with fake_gpu, pytest.warns(SlowPath, match=r"layers 1: head size 80, ") as caught:
        cache.allocate(2, "cuda")
    assert len(caught) == 1 and caught[0].filename == __file__
    both = two_layers((128, 64), replace(K_2, num_sink_tokens=4))
    with fake_gpu, pytest.warns(SlowPath, match=r"layers 0, 1: 4 sink tokens of keys and 0 of values"):
        both.allocate(2, "cuda")


def test_a_refused_allocation_leaves_the_cache_unallocated(fake_gpu: FakeTensorMode) -> None:
    """Layer 1 is refused after layer 0 and the control tensors; the CPU, which takes it, may then have the
    cache."""
    cache = two_layers((128, 20))
    for _ in range(2):
        with fake_gpu, pytest.raises(UnsupportedModel, match="the kernels cannot serve layer 1: head size 20"):
            cache.allocate(2, "cuda")
        assert cache.static is not None and not cache.static.is_allocated
        assert cache.padding.rows is None and not any(layer.is_initialized for layer in cache.layers)
        assert cache.workspace_nbytes == 0
    cache.allocate(3, "cpu")
    assert cache.static is not None and cache.static.lengths.tolist() == [0, 0, 0]
    with pytest.raises(UsageError, match="is allocated already"):
        cache.allocate(3, "cpu")


def test_a_cache_without_slow_layers_is_silent(fake_gpu: FakeTensorMode) -> None:
    fast = two_layers((128, 64))
    assert fast.slow_layers == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fake_gpu:
            fast.allocate(2, "cuda")
        two_layers((80, 80)).allocate(2, "cpu")  # the reference has one path
