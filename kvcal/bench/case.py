"""One decode step's work on one layer's cache, ready to be timed: several caches of random content.

The only file of the benchmarks that does what a step of the attention does (``StaticLayer.attend``) piece by piece. The
caches are layers of one PlanCache: they share its control state (lengths, workspace) and differ in every byte of what
is stored. On a CPU the same calls run the reference, which is how the benchmarks themselves are tested.

Where layers are predicted from one another they are timed in their order, each behind the one that it is predicted
from, as in a model; the layers at both ends, which are unlike the others, are there and are not timed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from pydantic.dataclasses import dataclass as strict_dataclass
from torch import Tensor

from kvcal.bench.content import fill_cache, forms_of, uniform_plan
from kvcal.bench.device import Call
from kvcal.bench.shape import CACHE_DTYPE, MIDDLE, Heads, Pair, Point
from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.static_layer import StaticLayer
from kvcal.errors import SlowPath
from kvcal.geometry import CACHE_DTYPES, ModelIdentity
from kvcal.kernels import ops, reference
from kvcal.kernels.choice import is_plain
from kvcal.kernels.decode import launch_of
from kvcal.kernels.refusals import refusals
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.plan.format import SIDES, Side
from kvcal.store.prediction import predicted, predictor_of
from kvcal.store.static_store import HeadStore
from kvcal.store.stored_form import StoredForm
from kvcal.strict import STRICT

# Tokens that a cache has room for beyond its context: for the steps of a benchmark.
ROOM = 2 * PAGE_TOKENS
# Random content has scores of some 0.05 around their mean, which attend to all tokens alike, and a wrong key would
# hardly show. So many times as sharp, a few tokens count.
SHARPNESS = 50.0
NOBODY = ModelIdentity("random caches", "llama", "", "", "")


@strict_dataclass(frozen=True, config=STRICT)
class KernelUse:
    """The kernel that served a measurement: its name, or that of another library's attention. ``reasons``:
    why it is not ``decode`` alone, of all layers. In the last layer, None where no kernel of kvcal ran: blocks of the
    ``grid``, ``threads`` and ``shared_bytes`` of a block, ``registers`` of a thread."""

    name: str
    reasons: tuple[str, ...] = ()
    grid: int | None = None
    threads: int | None = None
    shared_bytes: int | None = None
    registers: int | None = None


@dataclass(frozen=True)
class KernelCase:
    """Caches of one format at one size, with the query and the token of a step. ``layers`` are timed; ``before`` holds
    what the first of them is predicted from."""

    point: Point
    cache: PlanCache
    before: tuple[StaticLayer, ...]
    layers: tuple[StaticLayer, ...]
    q: Tensor  # [B, N G, D]
    k_new: Tensor  # [B, N, D]
    v_new: Tensor  # [B, N, D]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[-1])

    def calls(self, work: Callable[[StaticLayer], object]) -> list[Call]:
        """``attend``, ``append`` or ``step`` in each cache."""
        return [partial(work, layer) for layer in self.layers]

    def attend(self, layer: StaticLayer, sharpness: float = 1.0) -> Tensor:
        """Attention over ``point.context`` + 1 tokens: what is stored made readable, and read."""
        if layer.forms is not None:
            layer.forms.step()
        parts = [store.decode(self.q, None, sharpness * self.scale, 0.0) for store in layer.stores]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def append(self, layer: StaticLayer) -> None:
        """The step's token stored, and before it a page packed that is full."""
        for store in layer.stores:
            store.append(self.k_new, self.v_new, self.q)

    def step(self, layer: StaticLayer) -> Tensor:
        self.append(layer)
        return self.attend(layer)

    def relative_error(self) -> float:
        """Of the first sequence's output in the first cache, against fp64 over its tokens as they are stored."""
        for layer in self.before:
            if layer.forms is not None:
                layer.forms.step()
        layer = self.layers[0]
        output = self.attend(layer, SHARPNESS)[0].double()
        keys, values = (self._tokens(layer, side) for side in SIDES)
        grouped = self.q[0].double().unflatten(0, (keys.shape[0], -1))
        scores = grouped @ keys.transpose(-1, -2) * (SHARPNESS * self.scale)
        expected = (scores.softmax(-1) @ values).flatten(0, 1)
        return float((output - expected).norm() / expected.norm())

    def _tokens(self, layer: StaticLayer, side: Side) -> Tensor:
        """fp64 [N, S, D]: of the first sequence, all that the step attended to."""
        layers, parts, one = dict(enumerate((*self.before, layer))), [], slice(0, 1)
        for store in stores_of(layer):
            is_form = side in store.reconstructed
            pages = expected_pages(layers, layer, store, side) if is_form else store.pages[side][one]
            sinks, buffer, length = store.sinks[side][one], store.buffer[side][one], int(store.state.lengths[0])
            tokens = reference.tokens(side, sinks, buffer, pages, length, store.rescale, store.offset, store.variant)
            parts.append(tokens)
        return torch.cat(parts, dim=1)[0].double()


def kernel_case(pair: Pair, heads: Heads, point: Point, count: int, device: torch.device) -> KernelCase:
    """``count`` caches of ``point``, every sequence with ``point.context`` tokens before the step."""
    generator = torch.Generator(device).manual_seed(0)
    num_layers, max_tokens = count + 2 * pair.num_ends, point.context + ROOM
    plan = uniform_plan(NOBODY, pair, heads, num_layers, 1, max_tokens)
    cache = PlanCache(plan, heads.config(num_layers), max_tokens=max_tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPath)  # every row names its kernel
        cache.allocate(point.batch, device)
    fill_cache(cache, point.context, generator)

    def normal(num_heads: int) -> Tensor:
        shape = (point.batch, num_heads, heads.head_dim)
        return torch.empty(shape, dtype=CACHE_DTYPES[CACHE_DTYPE], device=device).normal_(generator=generator)

    q, k_new, v_new = (normal(num) for num in (heads.num_query_heads, heads.num_kv_heads, heads.num_kv_heads))
    layers = tuple(cache.static_layers)
    before, timed = layers[: pair.num_ends], layers[pair.num_ends : pair.num_ends + count]
    return KernelCase(point, cache, before, timed, q, k_new, v_new)


def prefill_call(case: KernelCase, num_pages: int) -> tuple[Call, int]:
    """Packing the keys and the values of ``num_pages`` pages of every sequence at once, as after a prompt, and the
    bytes that it reads and writes: the tokens, the records, and between them, twice, 16-bit pages of a stored form."""
    layer = case.layers[0]
    (store,) = stores_of(layer)
    shape = (*case.k_new.shape[:2], num_pages * PAGE_TOKENS, case.k_new.shape[-1])
    tokens = torch.empty(shape, dtype=case.k_new.dtype, device=case.k_new.device).normal_()
    nothing = store.nothing
    pages = {side: min(num_pages, store.pages[side].shape[1]) for side in SIDES}
    # Query scores take the same statistic as a step would: ones.
    mean = store.query_sum if store.variant.k.needs_queries else nothing

    def call() -> None:
        for side in SIDES:
            ops.pack(
                tokens[:, :, : pages[side] * PAGE_TOKENS], store.pages[side], 0, mean if side == "k" else nothing,
                nothing, nothing, store.state.error, side, store.variant.key,
            )  # fmt: skip
        if layer.forms is not None:
            layer.forms.extend(slice(0, case.point.batch), 0, num_pages * PAGE_TOKENS + 1)

    nbytes = sum(tokens[:, :, : pages[side] * PAGE_TOKENS].nbytes for side in SIDES)
    nbytes += sum(store.pages[side][:, : pages[side]].nbytes for side in SIDES)
    for form in forms_of(layer):
        if form.tokens:  # read once more, and stored
            encoded = form.format.num_pages(num_pages * PAGE_TOKENS)
            nbytes += sum(part[:, :encoded].nbytes for part in (store.pages[form.codec.side], form.records[0]))
    return call, nbytes


def stores_of(layer: StaticLayer) -> list[HeadStore]:
    """Its head ranges: no layer of a benchmark has a sliding window."""
    return [store for store in layer.stores if isinstance(store, HeadStore)]


def refusal(pair: Pair, heads: Heads) -> str | None:
    """Why no kernel serves this format; None if one does."""
    return next(refusals(heads.layer(pair, MIDDLE), CACHE_DTYPE), None)


def kernel_use(layers: Sequence[StaticLayer]) -> KernelUse:
    """The kernels of a step of these layers, whose stores are allocated; compiles the last one's kernel on CUDA."""
    names = []
    for layer in layers:
        is_any_plain = any(is_plain(store.variant) for store in layer.stores)
        names.append(("reconstruct + " if layer.form_reasons else "") + ("decode_plain" if is_any_plain else "decode"))
    name = ", ".join(dict.fromkeys(names))
    reasons = tuple(dict.fromkeys(reason for layer in layers for reason in layer.slow_reasons))
    store = layers[-1].stores[-1]
    if not store.state.lengths.is_cuda:  # the reference
        return KernelUse(name, reasons)
    launch = launch_of(store.variant, CACHE_DTYPES[CACHE_DTYPE], store.state.lengths.get_device())
    return KernelUse(name, reasons, launch.grid, launch.threads, launch.shared_bytes, launch.kernel.registers)


def expected_pages(layers: Mapping[int, StaticLayer], layer: StaticLayer, store: HeadStore, side: Side) -> Tensor:
    """uint8 [1, pages, n, record]: the first sequence's pages of 16 bits that a step must reconstruct for a head range.

    By the page codec alone, from records and the plan's tensors, those of the ``layers`` (by index) that it is
    predicted from included: nothing of what a step leaves in its workspace is read, and nothing that fills it is run.
    """

    def form_at(of: StaticLayer, side: Side, head: int) -> StoredForm:
        forms = [form for form in forms_of(of) if form.codec.side == side]
        return next(form for form in forms if form.codec.heads.start <= head < form.codec.heads.stop)

    def stored(of: StaticLayer, form: StoredForm) -> Tensor:
        """[pages, n, 128, D], the prediction added: ``PageCodec.decode``."""
        codec, predictor = form.codec, of.plan.predictor(form.codec.side)
        records, prediction = torch.cat([part[0] for part in form.records], dim=1), None
        if predictor is not None:
            inputs = [before_rope(layers[predictor.source], codec.side)]
            inputs += [before_rope(of, "k")] if codec.side == "v" else []
            weights = predictor_of(of.plan, codec.side, of.state.shared, records.device)
            prediction = predicted(weights, inputs, codec.num_heads)
        return codec.decode(records, form.format.num_bits, prediction)

    def before_rope(of: StaticLayer, side: Side) -> Tensor:
        """fp32 [pages, N, 128, D]: as predictors read them, of a side that is one form."""
        form = form_at(of, side, 0)
        return form.codec.before_rope(stored(of, form), indices(form))

    def indices(form: StoredForm) -> Tensor:
        return torch.arange(form.max_pages, device=form.held.lengths.device)

    form = form_at(layer, side, store.heads.start)
    tokens = form.codec.restore(stored(layer, form), indices(form))
    first, last = (head - form.codec.heads.start for head in (store.heads.start, store.heads.stop))
    rounded = tokens[:, first:last].to(CACHE_DTYPES[form.codec.cache_dtype]).contiguous()
    return rounded.flatten(-2).view(torch.uint8).unsqueeze(0)
