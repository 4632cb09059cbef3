"""One decode step's work on one layer's cache, ready to be timed: several caches of random content.

The only file of the benchmarks that does what a step of the attention does (``PagedLayer.attend``) piece by piece. The
caches are layers of one PlanCache: they share its control state (lengths, workspace) and differ in every byte of what
is stored. On a CPU the same calls run the reference, which is how the benchmarks themselves are tested.

Where layers are predicted from one another they are timed in their order, each behind the one that it is predicted
from, as in a model; the layers at both ends, which are unlike the others, are there and are not timed.

A plan is like a real one in all that changes a time: shapes, dtypes, a lattice's points, RoPE's angles. Predictors
contract (their largest singular value is about 0.5 at most), so that reconstructions stay small from layer to layer, in
a benchmark that feeds its layers in a ring, too.

Attention never reads zeros: a kernel on zeros draws less power and clocks higher, one on random bytes for scales meets
NaN. So codes are random bytes, and scales and zeros are spread around values that keep what is decoded in about -0.1 to
0.05, at every bit width; tokens that are not quantized scatter as much. The places of a record's fields are those of
the layouts that pack real pages.
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

from kvcal.bench.device import Call
from kvcal.bench.shape import CACHE_DTYPE, Heads, Point, Stored
from kvcal.cache.paged_layer import PagedLayer
from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.sliding_window import StaticWindow
from kvcal.errors import SlowPath
from kvcal.geometry import CACHE_DTYPES, ModelIdentity
from kvcal.kernels import reference
from kvcal.kernels.choice import is_plain, refusals
from kvcal.kernels.decode import launch_of
from kvcal.kernels.variants import VARIANTS, Variant, side_defines, stored_form
from kvcal.pages.grids import gaussian_grid
from kvcal.pages.lattice import LatticeLayout
from kvcal.pages.record_layout import PAGE_TOKENS, PARAM_DTYPES, RAW_BITS
from kvcal.pages.rotated_lattice import LEVELS
from kvcal.pages.tiered import NO_SLOT
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES, Format, Side
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import needed_tensors
from kvcal.store.layer_store import NewTokens
from kvcal.store.pages_and_ring import PagedTensor
from kvcal.store.prediction import predicted, predictor_of
from kvcal.strict import STRICT

THETA = 10_000.0  # RoPE's; angles cost the same with any
GAIN = 0.25
INT4_SPREAD = 4.6  # the standard deviation of a random code of 4 bits
# The largest code times the scale, and the zero; each is multiplied by 0.5 to 1.5 at random.
CODE_RANGE, ZERO = 0.15, -0.1
# Standard deviation of tokens in 16 bits, and of what a lattice decodes to.
SPREAD = 0.05
# Filled at once, so that what is drawn does not count beside the caches of a full device.
PART_BYTES = 16 << 20

Generator = torch.Generator | None


def random_plan(model: ModelIdentity, layers: tuple[LayerPlan, ...], batch: int, num_tokens: int) -> Plan:
    """A plan of these layers with random tensors."""
    return Plan(model, CACHE_DTYPE, layers, Workload(batch, num_tokens), provenance={}, tensors=_tensors(layers))


def _tensors(layers: Sequence[LayerPlan]) -> dict[str, Tensor]:
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, spec in needed_tensors(layers, CACHE_DTYPE).items():
        size, kind = list(spec.extents), name.rpartition(".")[2]
        spread = GAIN / max(size) ** 0.5
        if kind == "rotary":
            tensor = rotary_table(layers[0].attention.k_head_dim)
        elif name.startswith("lattice."):
            tensor = gaussian_grid(size[1], size[0])
        elif kind.endswith("signs"):
            tensor = torch.randint(0, 2, size, generator=generator).mul_(2).sub_(1)
        elif spec.dtype == "uint8":  # codes of 4 bits, two a byte
            tensor = torch.randint(0, 256, size, generator=generator)
        elif kind == "k_rescale":
            tensor = torch.rand(*size, generator=generator).add_(0.5)
        elif kind == "scale":
            tensor = torch.rand(*size, generator=generator).add_(0.5).mul_(spread / INT4_SPREAD)
        else:
            tensor = torch.randn(*size, generator=generator).mul_(spread)
        tensors[name] = tensor.to(getattr(torch, spec.dtype))
    return tensors


def rotary_table(head_dim: int) -> Tensor:
    """fp64 [head_dim / 2, 4], as kvcal.plan.tensors has it: Llama's pairs."""
    first = torch.arange(head_dim // 2, dtype=torch.float64)
    angles = THETA ** (-2 * first / head_dim)
    return torch.stack([first, first + head_dim // 2, angles, torch.ones_like(first)], dim=1)


def fill_cache(cache: PlanCache, num_tokens: int, generator: Generator = None) -> None:
    """Random tokens and pages in all of an allocated static cache, every sequence with ``num_tokens``. Pages of 16 bits
    that a stored form is reconstructed into stay as they are: every step writes them."""
    for layer in cache.paged_layers:
        for part in layer.parts:
            for tensor in (part.sinks, part.ring):
                tensor.normal_(std=SPREAD, generator=generator)
            part.query_sum.fill_(1.0)
            fill_records(part, generator)
        if isinstance(layer, StaticWindow):
            for tensor in layer.tensors:
                tensor.normal_(std=SPREAD, generator=generator)
    set_length(cache, num_tokens)


def set_length(cache: PlanCache, num_tokens: int) -> None:
    """Every sequence of a static cache holds so many tokens before the next step."""
    assert cache.static is not None
    cache.static.set_columns(num_tokens)
    for layer in cache.paged_layers:
        for tensor in layer.control:
            tensor.zero_()


def fill_records(part: PagedTensor, generator: Generator = None) -> None:
    """Random pages in all of a part."""
    codec, fmt = part.codec, part.format
    layout = fmt.layout(codec.side, codec.num_heads, codec.head_dim, codec.cache_dtype, fmt.num_bits)
    if isinstance(layout, LatticeLayout):
        fill_lattice(part.pool.records, layout, generator)
    else:
        fill_pages(part.pool.records, codec.side, fmt, codec.head_dim, codec.cache_dtype, generator)


def fill_pages(
    pages: Tensor, side: Side, fmt: Format, head_dim: int, cache_dtype: str, generator: Generator = None
) -> None:
    """Overwrite pages [slots, ..., record_bytes] uint8, contiguous, in place."""
    dtype, defines = CACHE_DTYPES[cache_dtype], {}
    if fmt.num_bits != RAW_BITS:
        of_side = side_defines(side, fmt, head_dim, cache_dtype, fmt.num_bits)
        defines = {name.partition("_")[2]: value for name, value in of_side.items()}
    for part in _parts(pages):
        if not defines:
            part.view(dtype).normal_(std=SPREAD, generator=generator)
            continue
        part.random_(0, 256, generator=generator)
        param_dtype = PARAM_DTYPES[fmt.param_dtype]
        num_params = (defines["ZERO"] - defines["SCALE"]) // param_dtype.itemsize
        levels = LEVELS if defines["POINTS"] else 2**fmt.num_bits - 1
        _write_params(part, defines["SCALE"], num_params, CODE_RANGE / levels, param_dtype, generator)
        if not defines["POINTS"]:
            _write_params(part, defines["ZERO"], num_params, ZERO, param_dtype, generator)
        if defines["TIERS"]:
            # As many random channels as there are slots, each once.
            place = torch.rand(*part.shape[:-1], head_dim, device=part.device, generator=generator).argsort(-1)
            _write(part, defines["INDEX"], torch.where(place < defines["SLOTS"], place, NO_SLOT).to(torch.uint8))
            raw = torch.empty(*part.shape[:-1], defines["RAW_SLOTS"] * PAGE_TOKENS, device=part.device, dtype=dtype)
            _write(part, defines["RAW"], raw.normal_(std=SPREAD, generator=generator))


def fill_lattice(records: Tensor, layout: LatticeLayout, generator: Generator = None) -> None:
    """The same for a lattice's records [slots, ..., record_bytes] uint8, contiguous."""
    for part in _parts(records):
        part.random_(0, 256, generator=generator)
        num_scales, dtype = layout.num_groups * PAGE_TOKENS, PARAM_DTYPES[layout.param_dtype]
        _write_params(part, sum(layout.plane_sizes), num_scales, SPREAD, dtype, generator)


def _parts(records: Tensor) -> Sequence[Tensor]:
    return records.split(max(1, PART_BYTES // max(1, records[:1].nbytes)))


def _write_params(
    records: Tensor, offset: int, count: int, middle: float, dtype: torch.dtype, generator: Generator
) -> None:
    """``count`` parameters of each record: ``middle`` times 0.5 to 1.5."""
    values = torch.empty(*records.shape[:-1], count, device=records.device)
    _write(records, offset, values.uniform_(0.5, 1.5, generator=generator).mul_(middle).to(dtype))


def _write(records: Tensor, offset: int, values: Tensor) -> None:
    """Put values [..., n] of any dtype into the records from byte ``offset`` on."""
    packed = values.view(torch.uint8)
    records[..., offset : offset + packed.shape[-1]] = packed


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
    before: tuple[PagedLayer, ...]
    layers: tuple[PagedLayer, ...]
    q: Tensor  # [B, N G, D]
    k_new: Tensor  # [B, N, D]
    v_new: Tensor  # [B, N, D]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[-1])

    def calls(self, work: Callable[[PagedLayer], object]) -> list[Call]:
        """``attend``, ``append`` or ``step`` in each cache."""
        return [partial(work, layer) for layer in self.layers]

    def attend(self, layer: PagedLayer, sharpness: float = 1.0) -> Tensor:
        """Attention over ``point.context`` + 1 tokens: what is stored made readable, and read."""
        for form in layer.forms:
            form.step()
        parts = [step.decode(self.q, None, sharpness * self.scale, 0.0) for step in layer.store.steps]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def append(self, layer: PagedLayer) -> None:
        """The step's token stored, and the page packed that it completes, if it does."""
        for step in layer.store.steps:
            step.append(self.k_new, self.v_new, self.q)

    def step(self, layer: PagedLayer) -> Tensor:
        self.append(layer)
        return self.attend(layer)

    def relative_error(self) -> float:
        """Of the first sequence's output in the first cache, against fp64 over its tokens as they are stored."""
        for layer in self.before:
            for form in layer.forms:
                form.step()
        layer = self.layers[0]
        output = self.attend(layer, SHARPNESS)[0].double()
        keys, values = (self._tokens(layer, side) for side in SIDES)
        grouped = self.q[0].double().unflatten(0, (keys.shape[0], -1))
        scores = grouped @ keys.transpose(-1, -2) * (SHARPNESS * self.scale)
        expected = (scores.softmax(-1) @ values).flatten(0, 1)
        return float((output - expected).norm() / expected.norm())

    def _tokens(self, layer: PagedLayer, side: Side) -> Tensor:
        """fp64 [N, S, D]: of the first sequence, all that the step attended to."""
        layers, parts = dict(enumerate((*self.before, layer))), []
        for step in layer.store.steps:
            memory, place, variant = step.k if side == "k" else step.v, step.place, VARIANTS[step.variants[0]]
            if stored_form(layer.plan, side, variant.format(side)) is not None:
                memory = memory._replace(pages=expected_pages(layers, layer, step.heads, side))
                slots = torch.arange(len(memory.pages), device=place.table.device)
                place = place._replace(table=slots.unsqueeze(0))
            transform = step.transform if side == "k" else step.transform.of_values
            held = int(step.place.lengths[0])
            parts.append(reference.tokens(side, memory, place, 0, held, transform, variant))
        return torch.cat(parts).double()


def kernel_case(stored_as: Stored, heads: Heads, point: Point, count: int, device: torch.device) -> KernelCase:
    """``count`` caches of ``point``, every sequence with ``point.context`` tokens before the step."""
    generator = torch.Generator(device).manual_seed(0)
    ends = stored_as.num_ends
    num_layers, max_tokens = count + 2 * ends, point.context + ROOM
    plan = random_plan(NOBODY, stored_as.layers(heads, num_layers), 1, max_tokens)
    cache = PlanCache(plan, heads.config(num_layers), max_tokens=max_tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPath)  # every row names its kernel
        cache.allocate(point.batch, device)
    fill_cache(cache, point.context, generator)

    def normal(num_heads: int) -> Tensor:
        shape = (point.batch, num_heads, heads.head_dim)
        return torch.empty(shape, dtype=CACHE_DTYPES[CACHE_DTYPE], device=device).normal_(generator=generator)

    q, k_new, v_new = (normal(num) for num in (heads.num_query_heads, heads.num_kv_heads, heads.num_kv_heads))
    layers = tuple(cache.paged_layers)
    before, timed = layers[:ends], layers[ends : ends + count]
    return KernelCase(point, cache, before, timed, q, k_new, v_new)


def prefill_call(case: KernelCase, num_pages: int) -> tuple[Call, int]:
    """Storing ``num_pages`` pages of keys and values of every sequence at once, as a prompt is, and the bytes that it
    reads and writes: tokens and records."""
    layer, static = case.layers[0], case.cache.static
    assert static is not None
    shape = (*case.k_new.shape[:2], num_pages * PAGE_TOKENS, case.k_new.shape[-1])
    tokens = torch.empty(shape, dtype=case.k_new.dtype, device=case.k_new.device).normal_()
    query_sum = torch.ones(*case.k_new.shape, device=tokens.device)
    new = NewTokens(tokens, tokens, static.rows, 0)
    slots = len(static.table) * num_pages
    nbytes = 2 * tokens.nbytes + sum(slots * part.pool.records[0].nbytes for part in layer.parts)
    return partial(layer.store.write, new, query_sum), nbytes


def refusal(stored_as: Stored, heads: Heads, num_layers: int = 3) -> str | None:
    """Why no kernel serves these layers; None if one does."""
    return next((why for layer in stored_as.layers(heads, num_layers) for why in refusals(layer, CACHE_DTYPE)), None)


def kernel_use(layers: Sequence[PagedLayer]) -> KernelUse:
    """The kernels of a step of these layers, which are allocated; compiles the last one's kernel on CUDA."""
    names = []
    for layer in layers:
        is_any_plain = any(is_plain(variant) for variant in _variants(layer))
        names.append(("reconstruct + " if layer.form_reasons else "") + ("decode_plain" if is_any_plain else "decode"))
    name = ", ".join(dict.fromkeys(names))
    reasons = tuple(dict.fromkeys(reason for layer in layers for reason in layer.slow_reasons))
    static, variant = layers[-1].static, _variants(layers[-1])[-1]
    assert static is not None
    if not static.lengths.is_cuda:  # the reference
        return KernelUse(name, reasons)
    launch = launch_of(variant, CACHE_DTYPES[CACHE_DTYPE], static.lengths.get_device())
    return KernelUse(name, reasons, launch.grid, launch.threads, launch.shared_bytes, launch.kernel.registers)


def _variants(layer: PagedLayer) -> list[Variant]:
    if isinstance(layer, StaticWindow):
        return [layer.window.variant]
    return [VARIANTS[number] for step in layer.store.steps for number in step.variants]


def expected_pages(layers: Mapping[int, PagedLayer], layer: PagedLayer, heads: slice, side: Side) -> Tensor:
    """uint8 [pages, n, record]: the first sequence's pages of 16 bits that a step must reconstruct for a head range.

    By the page codec alone, from records and the plan's tensors, those of the ``layers`` (by index) that it is
    predicted from included: nothing of what a step leaves in its workspace is read, and nothing that fills it is run.
    """

    def part_at(of: PagedLayer, side: Side, head: int) -> PagedTensor:
        return next(part for part in of.sides[side] if part.heads.start <= head < part.heads.stop)

    def stored(of: PagedLayer, part: PagedTensor) -> Tensor:
        """[pages, n, 128, D], the prediction added: ``PageCodec.decode``."""
        codec, predictor, prediction = part.codec, of.plan.predictor(part.codec.side), None
        records = part.pool.records[slots]
        if predictor is not None:
            inputs = [before_rope(layers[predictor.source], codec.side)]
            inputs += [before_rope(of, "k")] if codec.side == "v" else []
            weights = predictor_of(of.plan, codec.side, of.state, records.device)
            prediction = predicted(weights, inputs, codec.num_heads)
        return codec.decode(records, part.num_bits, prediction)

    def before_rope(of: PagedLayer, side: Side) -> Tensor:
        """fp32 [pages, N, 128, D]: as predictors read them, of a side that is one part."""
        part = part_at(of, side, 0)
        return part.codec.before_rope(stored(of, part), ordinals)

    assert layer.static is not None
    slots = layer.static.table[0].long()
    ordinals = torch.arange(len(slots), device=slots.device)
    part = part_at(layer, side, heads.start)
    tokens = part.codec.restore(stored(layer, part), ordinals)
    first, last = (head - part.heads.start for head in (heads.start, heads.stop))
    rounded = tokens[:, first:last].to(CACHE_DTYPES[part.codec.cache_dtype]).contiguous()
    return rounded.flatten(-2).view(torch.uint8)
