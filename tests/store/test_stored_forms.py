"""Stored forms in a static cache: the bytes and the values of the dynamic cache, whatever is fed and how."""

import copy
import pickle
from collections.abc import Sequence

import pytest
import tiny_models
import torch
from cache_cases import HEAD_DIM, feed, padded, random_ids, tiny_llama
from cubin_resources import resources
from form_cases import (
    NAMES,
    advance,
    as_met,
    assert_same_records,
    attention,
    dynamic_of,
    form_plan,
    poison,
    states,
    static_of,
)
from static_cases import pages_of
from torch import Tensor

from kvcal import PlanCache, attached
from kvcal.cache.attached import attached_for
from kvcal.errors import NonFiniteActivations, SlowPath, UsageError
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.kernels import variants
from kvcal.kernels.choice import refusals
from kvcal.kernels.compile import cubin
from kvcal.kernels.decode import decode_defines
from kvcal.kernels.variants import VARIANTS, variant_of
from kvcal.models.rope import rotary_maps
from kvcal.models.supported_layers import geometry_of
from kvcal.pages.layout_protocol import noted_in
from kvcal.pages.uniform import UniformLayout
from kvcal.plan.page_format import SIDES, num_pages
from kvcal.store import dequantize

pytestmark = pytest.mark.filterwarnings("ignore::kvcal.errors.SlowPath")

LAYERS = range(3)


def compare(
    static: PlanCache, dynamic: PlanCache, cuts: Sequence[int], inputs: list, mask: Tensor | None = None
) -> int:
    """Feed both in chunks that end at ``cuts``, scratch and free pages full of NaN; how many pages they share."""
    batch = len(inputs[0][0])
    real = torch.ones(batch, cuts[-1], dtype=torch.bool) if mask is None else mask.bool()
    start = int(dynamic.get_seq_length())
    for stop in cuts:
        poison(static)
        found, expected = (advance(cache, start, stop, inputs) for cache in (static, dynamic))
        for layer, ours, theirs, (q, _, _) in zip(static.layers, found, expected, inputs, strict=True):
            if isinstance(ours, Tensor):
                keys, values = as_met(layer, *theirs)
                exact = attention(q[:, :, start:stop], keys, values, real[:, :stop])
                assert (ours - exact).abs().max() < 1e-5 * values.abs().max()  # fp32 sums of a few hundred tokens
            else:
                seen = real[:, None, :stop, None]
                assert all(torch.equal(one * seen, other * seen) for one, other in zip(ours, theirs, strict=True))
        start = stop
    static.check()
    return assert_same_records(static, dynamic)


CUTS = {
    # Pages are packed at 128 and 256, and read where the widest window has left them, 33 tokens later.
    "steps": (126, *range(127, 131), 160, *range(161, 164), 255, *range(256, 259), 287, *range(288, 291), 300),
    "chunks": (64, 127, 129, 132, 140, 255, 264, 300),
    "a prompt that ends with a page": (128, 129, 130, 256, 257, 300),
}


@pytest.mark.parametrize(
    ("name", "cuts"),
    [*((name, "steps") for name in NAMES), ("int4, lattice", "chunks"), ("linear", "a prompt that ends with a page")],
)
def test_bytes_and_values_are_those_of_the_dynamic_cache(name: str, cuts: str) -> None:
    plan = form_plan(name)
    inputs = [states(layer, 2, 300) for layer in LAYERS]
    static, dynamic = static_of(plan, 310, 2), dynamic_of(plan)
    assert compare(static, dynamic, CUTS[cuts], inputs) >= 12


@pytest.mark.parametrize(
    "name", ["lattice d=4", "lattice, queries choose channels of keys", "before RoPE, on a lattice", "linear"]
)
def test_rows_of_a_padded_batch(name: str) -> None:
    """Pages are packed in one row at a time; a row of 3 tokens has one in the end."""
    plan, width = form_plan(name), 300
    mask = torch.zeros(3, width, dtype=torch.long)
    for row, length in enumerate((300, 130, 3)):
        mask[row, width - length :] = 1
    inputs = [states(layer, 3, 440) for layer in LAYERS]
    whole = torch.nn.functional.pad(mask, (0, 140), value=1)
    static, dynamic = static_of(plan, 440, 3, mask), dynamic_of(plan, mask)
    # The first row fills a page with column 384, the second with 426, the third with 425.
    cuts = (170, 299, *range(300, 304), 382, *range(383, 387), 423, *range(424, 429), 440)
    assert compare(static, dynamic, cuts, inputs, whole) > 0


def test_scratch_in_parts_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "VALUES_AT_ONCE", 3 * 2 * 128 * HEAD_DIM)  # three pages of both heads
    plan, inputs = form_plan("int4, lattice"), [states(layer, 2, 700) for layer in LAYERS]
    assert compare(static_of(plan, 720, 2), dynamic_of(plan), (600, 640, *range(641, 660), 700), inputs) >= 36


@pytest.mark.parametrize("name", ["lattice d=4", "linear", "before RoPE"])
def test_reset_and_rows_that_change_places(name: str) -> None:
    plan, inputs = form_plan(name), [states(layer, 3, 300) for layer in LAYERS]
    static = static_of(plan, 320, 3)
    advance(static, 0, 290, [states(layer, 3, 290, seed=5) for layer in LAYERS])
    addresses = [tensor.data_ptr() for layer in static.paged_layers for tensor in layer.tensors]
    static.reset()
    dynamic = dynamic_of(plan)
    compare(static, dynamic, (140, 150), inputs)
    for cache in (static, dynamic):
        cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert compare(static, dynamic, (151, 261, *range(262, 280), 300), inputs) > 0
    assert [tensor.data_ptr() for layer in static.paged_layers for tensor in layer.tensors] == addresses


@pytest.mark.parametrize(
    ("name", "kept", "held"), [("lattice d=2", 162, 170), ("lattice d=2", 125, 260), ("linear", 140, 290)]
)
def test_tokens_can_be_removed(name: str, kept: int, held: int) -> None:
    """Within the ring, and into pages, whose tokens come back as decoded."""
    plan, inputs = form_plan(name), [states(layer, 2, 300) for layer in LAYERS]
    static, dynamic = static_of(plan, 320, 2), dynamic_of(plan)
    for cache in (static, dynamic):
        advance(cache, 0, kept, inputs)
        advance(cache, kept, held, [states(layer, 2, 300, seed=7) for layer in LAYERS])
        cache.crop(kept - held)
    assert compare(static, dynamic, (kept + 1, kept + 2, 254, *range(255, 265), 300), inputs) >= 12


@pytest.mark.parametrize(
    ("name", "max_tokens"), [*((name, 133) for name in NAMES), *(("linear", n) for n in (1, 127, 500))]
)
def test_bytes_are_the_plans_and_scratch_is_counted(name: str, max_tokens: int) -> None:
    plan = form_plan(name)
    static = static_of(plan, max_tokens, 3)
    assert static.nbytes == plan.nbytes([max_tokens] * 3, max_tokens)
    forms = static.static.forms
    page_bytes = 2 * 128 * HEAD_DIM * 2  # of two heads, in bf16
    most = {
        side: max(2 * num_pages(max_tokens) * bool(variants.stored_form(layer, side)) for layer in plan.layers)
        for side in ("k", "v")
    }
    kept = sum(tensor.nbytes for tensor in forms._slots)
    assert forms.nbytes == 3 * sum(most.values()) * page_bytes // 2 + kept
    # Two layers' keys and values in fp32 at a time, where every layer is predicted from the one before.
    if name in ("linear", "low rank", "int4, lattice"):
        assert kept == 2 * 2 * 3 * num_pages(max_tokens) * 2 * page_bytes
    before = static.workspace_nbytes
    advance(static, 0, min(max_tokens, 140), [states(layer, 3, 140) for layer in LAYERS])
    assert static.workspace_nbytes == before >= forms.nbytes


def test_a_source_of_many_stays_and_others_share() -> None:
    forms = static_of(form_plan("one source of two layers, λ"), 300, 1).static.forms
    assert forms.kept(0, "k") is not forms.kept(1, "k")
    assert forms.kept(1, "k") is forms.kept(2, "k")  # each for its own values alone
    assert forms.kept(0, "v") is not None and forms.kept(1, "v") is None
    chain = static_of(form_plan("linear"), 300, 1).static.forms
    assert chain.kept(0, "k") is chain.kept(2, "k") and chain.kept(0, "k") is not chain.kept(1, "k")


@pytest.mark.parametrize(("name", "layer"), [("lattice d=2", 0), ("before RoPE, on a lattice", 0), ("linear", 1)])
@pytest.mark.parametrize("side", ["k", "v"])
def test_what_is_not_finite_is_reported_and_raises_later(name: str, layer: int, side: str) -> None:
    inputs = [states(index, 2, 128) for index in LAYERS]
    inputs[layer][1 if side == "k" else 2][1, 1, 60, 2] = torch.nan
    static = static_of(form_plan(name), 300, 2)
    advance(static, 0, 55, inputs)
    advance(static, 55, 127, inputs)
    static.check()  # nothing is packed
    advance(static, 127, 128, inputs)
    with pytest.raises(NonFiniteActivations, match="a page holds NaN"):
        static.check()
    static.reset()
    with pytest.raises(NonFiniteActivations):
        advance(static, 0, 128, inputs)


def test_a_flag_instead_of_an_error() -> None:
    layout, page = UniformLayout("k", 2, "channel", 32, 8, "float16", "bfloat16"), torch.zeros(128, 8)
    page[3, 4] = torch.inf
    flag = torch.full((1,), 4, dtype=torch.int32)
    with noted_in(flag, 1):
        layout.encode(torch.zeros(128, 8))
        assert flag.item() == 4
        layout.encode(page)
    assert flag.item() == 5
    with pytest.raises(NonFiniteActivations):
        layout.encode(page)


@pytest.mark.parametrize(("name", "sizes"), [("before RoPE", (125,)), ("int4, lattice", (140, 125, 3))])
def test_generate_gives_the_tokens_of_the_dynamic_cache(name: str, sizes: tuple[int, ...]) -> None:
    """In fp32, where the two caches round alike."""
    model, plan = tiny_llama(2, 3), form_plan(name, "float32")
    ids, mask = padded([random_ids(1, n, seed=n)[0] for n in sizes], max(sizes), "left")
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": mask}
    expected = model.generate(ids.long(), past_key_values=PlanCache(plan, model.config, mask), **options)
    static = PlanCache(plan, model.config, mask, max_tokens=160)
    with attached(model):
        found = model.generate(ids.long(), past_key_values=static, **options)
    assert torch.equal(found, expected)
    assert len(found[:, max(sizes) :].unique()) > 1


@pytest.mark.parametrize(("family", "name"), [("glm4", "linear"), ("llama_mha_yarn", "before RoPE")])
def test_logits_with_partial_rotary_and_other_families(family: str, name: str) -> None:
    model = tiny_models.TINY_MODELS[family]()
    geometry = geometry_of(model, cache_dtype="float32")
    plan = form_plan(name, geometry=geometry, rotary=rotary_maps(model, geometry)[0].tensor())
    ids, cuts = random_ids(2, 136), (125, *range(126, 136))
    dynamic, static = (PlanCache(plan, model.config, max_tokens=size) for size in (None, 136))
    with attached_for(model, plan):
        expected = feed(model, dynamic, ids, cuts)
    with attached(model):
        found = feed(model, static, ids, cuts)
    # After the first layer attention's last bits differ, so that a code may be another one.
    relative = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert relative.max() < 0.01 and relative.median() < 1e-5
    assert_same_records_of_first_layer(static, dynamic)


def assert_same_records_of_first_layer(static: PlanCache, dynamic: PlanCache) -> None:
    """Its keys and values depend on the tokens alone."""
    for ours, theirs in zip(static.layers[0].parts, dynamic.layers[0].parts, strict=True):
        for row, length in enumerate(dynamic.lengths):
            assert length >= 128 and torch.equal(pages_of(ours, row, length), pages_of(theirs, row, length))


def test_a_slow_cache_says_so_once() -> None:
    plan = form_plan("linear")
    with pytest.warns(SlowPath) as caught:
        static = static_of(plan, 300, 1)
    assert [str(warning.message) for warning in caught] == [
        "steps of some layers take longer than the fast kernels: layers 0: k pages are predicted from, v pages "
        "are predicted from; layers 1, 2: k pages hold residuals of a prediction, v pages hold residuals of a "
        "prediction"
    ]
    assert list(static.slow_layers) == [0, 1, 2] and not static.is_compileable
    apart = static_of(form_plan("lattice d=2"), 300, 1)
    first, *others = [layer.form_reasons for layer in apart.paged_layers]
    assert first == ["k pages are on a lattice", "v pages are on a lattice"] and not any(others)


# Both sides reconstructed; keys alone; values alone, besides boosted keys.
MET = ["lattice d=2", "before RoPE, boosted", "lattice, queries choose channels of keys"]


@pytest.mark.parametrize("name", MET)
def test_kernels_compile_for_reconstructed_sides(name: str) -> None:
    geometry = Geometry("llama", "bfloat16", tuple(AttentionGeometry(index, 8, 2, 128, 128) for index in LAYERS))
    layer = form_plan(name, geometry=geometry).layers[0]
    assert not list(refusals(layer, "bfloat16"))
    variant = variant_of(layer, "bfloat16")
    reconstructed = [variants.stored_form(layer, side) is not None for side in SIDES]
    assert [variant.num_bits(side) == 16 for side in SIDES] == reconstructed
    assert VARIANTS[variant.number] == variant
    defines = decode_defines(variant, "bfloat16", False, (9, 0))
    assert resources(cubin("decode", defines))["decode"].local_bytes <= 256
    assert resources(cubin("pack", variant.defines))["append"].local_bytes <= 256


@pytest.mark.parametrize("name", ("lattice d=2", "before RoPE", "linear"))
def test_a_copy_goes_on_alike_and_pickle_is_refused(name: str) -> None:
    """Layers and workspace are views of the same memory."""
    cache, inputs = static_of(form_plan(name), 400, 1), [states(index, 1, 400) for index in LAYERS]
    advance(cache, 0, 300, inputs)
    copied = copy.deepcopy(cache)
    expected = advance(cache, 300, 301, inputs)
    advance(cache, 301, 400, inputs)
    for ours, theirs in zip(advance(copied, 300, 301, inputs), expected, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(UsageError, match="a static cache cannot be pickled: its layers share memory"):
        pickle.dumps(cache)
