"""The memory that a dynamic cache takes for a moment while it packs and shrinks: measured storages against the stated
bound."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from cache_cases import (
    KINDS,
    KIVI_2,
    SINKS_3,
    attended,
    llama_plan,
    padded,
    plan_of,
    random_qkv,
    random_states,
    recipe_formats,
    tiny_llama,
)
from form_cases import with_tensors
from peak_bytes import PeakBytes
from progressive_cases import K_2, V_2, fixed, scheduled
from static_cases import with_transforms

from kvcal import Plan, PlanCache
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.pages.codec import ENCODE_PAGES
from kvcal.plan.page_format import RAW, Format
from kvcal.store import paged_tensor
from kvcal.store.layer_store import LayerStore
from kvcal.store.step import KernelCodec
from kvcal.store.workspace import SCRATCH_BYTES, step_workspace, transient_bytes
from kvcal.systems.basis.basis import Basis

ROTATED = Format(2, "token", 128, 8, 64, quantizer="rotated")


def held_by(cache: PlanCache) -> list[torch.Tensor]:
    return [*cache.plan.tensors.values(), *(tensor for each in cache.layers for tensor in each.tensors)]


def default_plan(heads: int, head_dim: int, cache_dtype: str = "bfloat16") -> Plan:
    """One layer with what the default recipe gives every layer: rotated, in bases, with error feedback and
    gains."""
    attention = AttentionGeometry(0, heads, heads, head_dim, head_dim)
    plan = plan_of(Geometry("llama", cache_dtype, (attention,)), ROTATED, ROTATED)
    return with_transforms(plan, "basis", 0.01)


def without_feedback(plan: Plan) -> Plan:
    layers = [replace(layer, k_feedback=False, v_feedback=False, v_gain=False) for layer in plan.layers]
    tensors = {name: x for name, x in plan.tensors.items() if not name.endswith(("feedback", "gain"))}
    return replace(plan, layers=tuple(layers), tensors=tensors)


def default_cache(plan: Plan) -> PlanCache:
    attention = plan.layers[0].attention
    heads, head_dim = attention.num_kv_heads, attention.k_head_dim
    config = hf.LlamaConfig(
        hidden_size=heads * head_dim, num_attention_heads=heads, num_key_value_heads=heads, num_hidden_layers=1,
        vocab_size=32,
    )  # fmt: skip
    return PlanCache(plan, config)


def peak_of_storing(cache: PlanCache, states: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes alive while any layer shrinks its pages or stores ``states`` [B, N, T, D]: the whole
    cache and what that takes."""
    peak = 0

    def watched(call: Callable[..., None]) -> Callable[..., None]:
        def method(layer: LayerStore, *args: Any) -> None:
            nonlocal peak
            with PeakBytes(held_by(cache)) as storages:
                call(layer, *args)
            peak = max(peak, storages.peak)

        return method

    with monkeypatch.context() as patched:
        for call in (LayerStore.set_bits, LayerStore.write):
            patched.setattr(LayerStore, call.__name__, watched(call))
        for layer in range(len(cache.plan.layers)):
            cache.update(states, -states, layer)
    return peak


def assert_bounded(cache: PlanCache, states: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes an update took beyond what is held before or after it."""
    batch, columns = len(states), cache.get_seq_length()
    before, held = cache.lengths or [0] * batch, cache.nbytes
    peak = peak_of_storing(cache, states, monkeypatch)
    larger = max(held, cache.nbytes, cache.plan.nbytes(before, columns))
    stop = columns + states.shape[2]
    assert peak <= larger + transient_bytes(
        cache.plan.layers, cache.plan.cache_dtype, before, cache.lengths, (columns, stop)
    ), stop
    return peak - larger


LATTICE, TWO_LAYERS = Format(2, lattice_dim=2), llama_plan(RAW, RAW).layers
PLANS = {
    "kivi": llama_plan(*KIVI_2),
    "sinks": llama_plan(*SINKS_3),
    "windows": llama_plan(*KINDS["windows"]),
    "raw": llama_plan(RAW, RAW),
    "kitty": llama_plan(*recipe_formats()["kitty"]),
    "lattice": with_tensors(llama_plan(RAW, RAW), [replace(layer, k=LATTICE, v=LATTICE) for layer in TWO_LAYERS]),
    "shrinking": fixed((130, 259, 300), (200, 200, 400)),
    "scheduled": scheduled(K_2, V_2, 3)[0],
    "feedback": with_transforms(llama_plan(*KIVI_2), "feedback", 0.1),
    "default": with_transforms(llama_plan(ROTATED, ROTATED, num_layers=1), "basis", 0.1),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_bound_holds_at_every_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLANS[name]
    cache, states, start = PlanCache(plan, tiny_llama(2, len(plan.layers)).config), random_states(3, 2, 402), 0
    # Where pages are packed, come to be read, or shrink.
    for stop in sorted(
        {count + more for count in (128, 130, 161, 200, 256, 259, 300, 384, 400) for more in range(-1, 2)}
    ):
        assert_bounded(cache, states[:, :, start:stop], monkeypatch)
        start = stop
    for _ in range(2):
        assert_bounded(cache, random_states(3, 2, 70), monkeypatch)


@pytest.mark.parametrize(("name", "side"), [("windows", "left"), ("scheduled", "right"), ("default", "left")])
def test_the_bound_holds_for_ragged_batches(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLANS[name]
    states, mask = padded([random_states(1, 2, n, seed=n)[0] for n in (500, 370, 115)], 500, side)
    cache = PlanCache(plan, tiny_llama(2, len(plan.layers)).config, mask)
    for part in (*states.split(150, dim=2), *random_states(3, 2, 20).split(1, dim=2)):
        assert_bounded(cache, part, monkeypatch)


@pytest.mark.parametrize("name", ["kivi", "raw"])
def test_a_long_prompt_takes_the_scratch_of_a_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its own 16-bit copy, and no page twice."""
    plan, tokens = PLANS[name], 128 * ENCODE_PAGES * 20
    cache = PlanCache(plan, tiny_llama().config)
    beyond = assert_bounded(cache, random_states(1, 2, tokens), monkeypatch)
    assert beyond <= SCRATCH_BYTES * 2 * 128 * ENCODE_PAGES * 8 < 2 * 2 * tokens * 8 * 4


def test_one_part_is_held_twice_when_pages_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is no guess from afar: without scratch it is met to within a page."""
    plan = llama_plan(RAW, RAW, cache_dtype="bfloat16")
    cache = PlanCache(plan, tiny_llama().config)
    assert_bounded(cache, random_states(1, 2, 128 * 400 + 127), monkeypatch)
    beyond = assert_bounded(cache, random_states(1, 2, 1), monkeypatch)
    pages = 400 * 128 * 2 * 8 * 2
    assert pages - 128 * 2 * 8 * 2 * 4 <= beyond <= pages + SCRATCH_BYTES * 128 * 128 * 8


@pytest.mark.parametrize("has_feedback", [True, False])
@pytest.mark.parametrize(
    ("heads", "head_dim", "cache_dtype"),
    [(4, 16, "bfloat16"), (2, 64, "float32"), (1, 130, "float32"), (2, 128, "bfloat16"), (1, 256, "float32")],
)
def test_the_bound_holds_in_a_basis(
    heads: int, head_dim: int, cache_dtype: str, has_feedback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts longer than what enters at once, steps, chunks, and the step that fills a page; of several
    rows."""
    plan = default_plan(heads, head_dim, cache_dtype)
    plan = plan if has_feedback else without_feedback(plan)
    cache = default_cache(plan)
    for tokens in (128 * ENCODE_PAGES + 300, 1, 20, 62, 1, 300):
        assert_bounded(cache, random_states(1, heads, tokens, head_dim), monkeypatch)
    cache = default_cache(plan)
    for tokens in (700, 1, 67):
        assert_bounded(cache, random_states(3, heads, tokens, head_dim), monkeypatch)


@pytest.mark.parametrize("has_feedback", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_an_update_in_a_basis_takes_no_copy_of_a_prompt(batch: int, has_feedback: bool) -> None:
    """The whole of an update, what it hands to attention included: of a prompt that enters in several parts,
    and of the step after it, which reads all of it."""
    heads, head_dim, tokens = 2, 64, 128 * ENCODE_PAGES * 3
    plan = default_plan(heads, head_dim)
    plan = plan if has_feedback else without_feedback(plan)
    cache, states = default_cache(plan), random_states(batch, heads, tokens, head_dim).bfloat16()
    with PeakBytes(held_by(cache)) as peak:
        handed = cache.update(states, states, 0)
    handed_bytes = sum(x.untyped_storage().nbytes() for x in handed)
    assert handed_bytes == 2 * states.nbytes
    lengths = [tokens] * batch
    bound = transient_bytes(plan.layers, plan.cache_dtype, [0] * batch, lengths, (0, tokens))
    assert peak.peak <= cache.nbytes + bound + handed_bytes
    del handed
    with PeakBytes(held_by(cache)) as peak:
        cache.update(states[:, :, :1], states[:, :, :1], 0)
    assert peak.peak <= cache.nbytes + step_workspace(plan.layers, plan.cache_dtype, batch, tokens + 1).nbytes


@pytest.mark.parametrize("batch", [1, 3])
def test_kernels_are_handed_what_enters_at_once(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a whole prompt, of which a copy in its basis would lie beside it."""
    plan, tokens, sizes = PLANS["default"], 128 * ENCODE_PAGES * 2, list[int]()
    cache, packed = PlanCache(plan, tiny_llama(2, 1).config, max_tokens=tokens), KernelCodec.pack

    def counted(self: KernelCodec, x: torch.Tensor, *more: Any) -> None:
        sizes.append(x.shape[0] * x.shape[2])
        packed(self, x, *more)

    monkeypatch.setattr(KernelCodec, "pack", counted)
    attended(cache, *random_qkv(batch, 2, tokens))
    assert max(sizes) <= 128 * ENCODE_PAGES and sum(sizes) == 2 * batch * tokens


def test_what_is_read_leaves_a_basis_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every temporary in fp32 is as large as a part, whatever the past; and what is read stays."""
    cache, left, leave, reads = PlanCache(PLANS["default"], tiny_llama(2, 1).config), list[int](), Basis.leave, []
    states = random_states(3, 2, 500)
    cache.update(states, -states, 0)

    def counted(self: Basis, y: torch.Tensor) -> torch.Tensor:
        left.append(y.numel())
        return leave(self, y)

    monkeypatch.setattr(Basis, "leave", counted)
    for at_once in (10**6, 3 * 2 * 8 * 70):
        monkeypatch.setattr(paged_tensor, "VALUES_AT_ONCE", at_once)
        left.clear()
        reads.append(cache.update(states[:, :, :0], states[:, :, :0], 0))
        assert sum(left) == 2 * states.numel() and max(left) <= at_once
    for one, other in zip(*reads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_ring_of_a_long_window_enters_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = replace(ROTATED, recent_window=4000)
    plan = without_feedback(with_transforms(llama_plan(fmt, fmt, num_layers=1), "basis", 0.1))
    assert_bounded(PlanCache(plan, tiny_llama(2, 1).config), random_states(8, 2, 4200), monkeypatch)
