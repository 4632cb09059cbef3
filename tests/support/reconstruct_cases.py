"""Stored forms of every kind with random records, and calls of ``reconstruct`` on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES, AttentionGeometry
from kvcal.kernels.operands import Place
from kvcal.kernels.page_codec import PageCoding, Reconstruction
from kvcal.kernels.reconstruct import HeadPages, position_turns, reconstruct
from kvcal.pages.codec import PageCodec
from kvcal.pages.hadamard import random_signs
from kvcal.pages.lattice import LatticeLayout
from kvcal.pages.record_layout import PAGE_TOKENS
from kvcal.pages.tiered import TieredLayout
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Boost, Format, Tier, WindowRule

LATTICES = ((2, 2), (3, 2), (4, 2), (2, 4))  # num_bits, lattice_dim
KITTY = Boost("magnitude", (Tier(4, 0.25),))
THREE_TIERS = Boost("magnitude", (Tier(16, 0.1), Tier(8, 0.2), Tier(4, 0.3)))
PAGED = WindowRule("paged", 0.2, 200)
BATCH, PAGES = 4, 3


@dataclass(frozen=True)
class Case:
    """A form, and what is made of it: 16-bit pages, unless it is ``merely`` predicted from; ``ranges``: heads of each
    head range."""

    form: Reconstruction
    is_predicted: bool = False
    is_kept: bool = False
    merely: bool = False
    ranges: tuple[int, ...] = ()

    @property
    def head_ranges(self) -> tuple[int, ...]:
        return self.ranges or (self.form.num_heads,)


def _lattice(bits: int, dim: int, heads: int, head_dim: int, side: str = "v", **more: object) -> Reconstruction:
    return Reconstruction(side, Format(bits, lattice_dim=dim), heads, head_dim, "bfloat16", **more)


def _cases() -> Iterator[tuple[str, Case]]:
    """Every lattice; every width of a plane's row; every other layout; everything that is done with a value."""
    for bits, dim in LATTICES:
        yield f"lattice {bits} bits d={dim}, 8 x 128", Case(_lattice(bits, dim, 8, 128))
        yield (
            f"lattice {bits} bits d={dim}, 2 x 64, fp16",
            Case(replace(_lattice(bits, dim, 2, 64), cache_dtype="float16"), is_predicted=True, is_kept=True),
        )
    for heads, head_dim in ((1, 8), (3, 8), (1, 40), (3, 64), (3, 80), (1, 128), (4, 128), (3, 176), (32, 80)):
        for dim in (2, 4):
            yield f"lattice d={dim}, {heads} x {head_dim}", Case(_lattice(2, dim, heads, head_dim))
    for heads, head_dim in ((16, 128), (33, 256)):  # 4 tokens a tile; one, of more values than 32 a thread
        yield f"lattice, {heads} x {head_dim}", Case(_lattice(2, 2, heads, head_dim))
    for dtype in ("bfloat16", "float32"):
        form = _lattice(3, 2, 2, 64)
        yield f"lattice, scales in {dtype}", Case(replace(form, format=replace(form.format, param_dtype=dtype)))
    pre, post = {"side": "k", "is_pre": True, "num_pairs": 32}, {"side": "k", "rescale": True, "offset": True}
    for name, rule in (("a window", {"recent_window": 33}), ("a window that grows", {"window_rule": PAGED})):
        form = replace(_lattice(2, 2, 3, 64), format=Format(2, lattice_dim=2, num_sink_tokens=3, **rule))
        yield f"lattice, sinks and {name}", Case(form)
    yield "lattice before RoPE", Case(_lattice(2, 2, 3, 64, **pre))
    yield "lattice before RoPE, predicted, kept", Case(_lattice(4, 2, 3, 64, **pre), is_predicted=True, is_kept=True)
    yield "lattice before RoPE, partial", Case(_lattice(2, 4, 2, 80, **pre | {"num_pairs": 10}), is_kept=True)
    yield "lattice, λ and offset", Case(_lattice(2, 2, 3, 64, **post))
    yield "lattice, λ and offset, kept", Case(_lattice(2, 2, 3, 64, **post, num_pairs=32), is_kept=True)
    yield "lattice, two head ranges", Case(_lattice(2, 2, 5, 64), is_kept=True, ranges=(2, 3))
    yield "lattice, merely predicted from", Case(_lattice(2, 2, 2, 64), is_kept=True, merely=True)

    uniform = {
        "keys per channel": ("k", Format(2, "channel", 32)),
        "keys per token": ("k", Format(3, "token", 64, num_sink_tokens=5)),
        "keys of 1 bit": ("k", Format(1, "channel", 64)),
        "keys, 8 bits, fp32": ("k", Format(8, "channel", 128, param_dtype="float32")),
        "keys, window that grows": ("k", Format(2, "channel", 32, 2, window_rule=PAGED)),
        "Kitty": ("k", Format(2, "channel", 64, 4, boost=KITTY)),
        "three tiers": ("k", Format(2, "channel", 32, boost=THREE_TIERS)),
        "keys, 16 bits": ("k", RAW),
        "values": ("v", Format(2, "token", 64)),
        "values, 3 bits": ("v", Format(3, "token", 32, recent_window=70, param_dtype="bfloat16")),
        "values, 4 bits": ("v", Format(4)),
        "values, 16 bits": ("v", RAW),
    }
    for name, (side, fmt) in uniform.items():
        for heads, head_dim in ((1, 8), (3, 64), (2, 80), (8, 128)):
            form = Reconstruction(side, fmt, heads, head_dim, "bfloat16")
            if side == "k":
                form = replace(form, is_pre=True, num_pairs=head_dim // 2)
            yield f"{name}, {heads} x {head_dim}", Case(form, is_predicted=head_dim == 64, is_kept=head_dim != 128)
    form = Reconstruction("k", Format(4, "channel", 32), 3, 64, "float16", rescale=True, offset=True, num_pairs=32)
    yield "λ and offset, kept, fp16", Case(form, is_kept=True)
    yield "λ and offset, merely predicted from, two head ranges", Case(form, is_kept=True, merely=True, ranges=(1, 2))
    yield "heads of 256", Case(Reconstruction("v", Format(2), 1, 256, "bfloat16"), is_predicted=True)
    yield (
        "before RoPE, two head ranges",
        Case(Reconstruction("k", Format(2, "channel"), 3, 64, "bfloat16", is_pre=True, num_pairs=32), ranges=(2, 1)),
    )


CASES = dict(_cases())


def rotary_table(dim: int, pairs: int) -> Tensor:
    """Llama's: the first ``pairs`` of dim / 2, neighbours dim / 2 apart."""
    a = torch.arange(pairs, dtype=torch.float64)
    return torch.stack([a, a + dim // 2, 1e4 ** (-2 * a / dim), torch.ones_like(a)], dim=1)


@functools.cache
def tensors_of(name: str) -> Mapping[str, Tensor]:
    """What the records of a case are read with, and the records: [BATCH, PAGES, r, bytes] uint8, on the CPU."""
    case = CASES[name]
    form, generator = case.form, torch.Generator().manual_seed(len(name))
    heads, dim, dtype = form.num_heads, form.head_dim, CACHE_DTYPES[form.cache_dtype]
    x = torch.randn(BATCH, PAGES, heads, PAGE_TOKENS, dim, generator=generator)
    x[..., 1] *= 20.0
    x[0, 0, 0, 5] = 0.0
    layout, found = form.layout, {}
    if isinstance(layout, LatticeLayout):
        found["grid"] = torch.randn(layout.num_points, layout.lattice_dim, generator=generator)
        found["signs"] = random_signs(heads * dim, seed=3)
        records = layout.encode(x.transpose(2, 3).flatten(-2), found["grid"], found["signs"]).unsqueeze(2)
    elif isinstance(layout, TieredLayout):
        records = layout.encode(x, torch.rand(BATCH, PAGES, heads, dim, generator=generator, dtype=torch.float64))
    else:
        records = layout.encode(x.to(dtype))
    found["records"] = records
    if form.rescale:
        found["rescale"] = torch.rand(heads, dim, generator=generator) + 0.5
    if form.offset:
        found["offset"] = torch.randn(heads, dim, generator=generator)
    if form.num_pairs:
        table = rotary_table(dim, form.num_pairs)
        table[:, 3] = torch.linspace(1.0, 1.3, len(table))  # amplitudes, as YaRN's are not 1
        found["rotary"] = table
    if case.is_predicted:
        found["prediction"] = torch.randn(BATCH * PAGES, PAGE_TOKENS, heads, dim, generator=generator)
    return found


def codec_of(name: str) -> PageCodec:
    """The dynamic cache's, of the case's heads."""
    form, given = CASES[name].form, tensors_of(name)
    geometry = AttentionGeometry(0, form.num_heads, form.num_heads, form.head_dim, form.head_dim)
    k, v = (form.format, RAW) if form.side == "k" else (RAW, form.format)
    pages = "pre" if form.is_pre else "post"
    layer = LayerPlan(geometry, (k,), (v,), k_rescale=form.rescale, k_offset=form.offset, k_pages=pages)
    tensors = {f"layers.0.k_{key}": given[key] for key in ("rescale", "offset") if key in given}
    if "rotary" in given:
        tensors["layers.0.rotary"] = given["rotary"]
    for operand, (tensor, _) in form.layout.plan_tensors(f"layers.0.{form.side}").items():
        tensors[tensor] = given[operand]
    return PageCodec.of_layer(layer, form.side, form.format, slice(0, form.num_heads), form.cache_dtype, tensors)


def place_of(lengths: Sequence[int], device: str, seed: int | None = None) -> Place:
    """Sequences of so many tokens before the step, PAGES pages each; ``seed`` shuffles the slots."""
    nothing, slots = torch.empty(0, dtype=torch.int32, device=device), torch.arange(len(lengths) * PAGES)
    if seed is not None:
        slots = torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed))
    held = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Place(held, slots.view(-1, PAGES).int().to(device), nothing, nothing)


def by_slot(x: Tensor, place: Place) -> Tensor:
    """x [B, PAGES, ...] -> [slots, ...], on the place's device."""
    table = place.table.long()
    found = x.new_empty(table.numel(), *x.shape[2:], device=table.device)
    found[table] = x.to(table.device)
    return found


def prepared(
    name: str,
    device: str,
    lengths: Sequence[int] = (PAGE_TOKENS * PAGES,) * BATCH,
    numbers: range = range(BATCH * PAGES),
    seed: int | None = None,
) -> tuple[Place, Callable[[], list[Tensor]], Callable[[], None]]:
    """A place on a device; what reads a case's outputs, which were full of 7: tokens [BATCH, PAGES, n, 128, D] of every
    head range, then what is kept; and what writes those of pages ``numbers``, in two calls a head range."""
    case, given = CASES[name], {key: x.to(device) for key, x in tensors_of(name).items()}
    form, nothing, place = case.form, torch.empty(0, device=device), place_of(lengths, device, seed)
    dtype, middle = CACHE_DTYPES[form.cache_dtype], (numbers.start + numbers.stop) // 2
    kept = turns = nothing
    if case.is_kept:
        kept = torch.full((BATCH, PAGES, PAGE_TOKENS, form.num_heads, form.head_dim), 7.0, device=device)
    if form.num_pairs:
        turns = position_turns(given["rotary"], PAGE_TOKENS * PAGES)
    coding = PageCoding(*(given.get(key, nothing) for key in PageCoding._fields[:-1]), turns)
    outputs, calls, first = [], [], 0
    every_record = by_slot(given["records"], place)
    for heads in case.head_ranges:
        shape = (BATCH * PAGES, heads, PAGE_TOKENS, form.head_dim)
        tokens, records = torch.full(shape, 7.0, dtype=dtype, device=device), every_record
        if not form.is_lattice:
            records = records[:, first : first + heads]
            records = records.clone() if case.merely else records  # of a store of their own
        target = nothing if case.merely else tokens
        for part in (range(numbers.start, middle), range(middle, numbers.stop)):
            told = given["prediction"][part.start : part.stop] if case.is_predicted else nothing
            calls.append((HeadPages(records, target, first), place, coding, told, kept, part, form))
        outputs.append(tokens)
        first += heads

    def write() -> None:
        for call in calls:
            reconstruct(*call)

    def read() -> list[Tensor]:
        return [*(tokens[place.table.long()] for tokens in outputs), kept]

    return place, read, write


def run(name: str, device: str, **more: object) -> list[Tensor]:
    """The outputs of ``prepared``, written."""
    _, read, write = prepared(name, device, **more)
    write()
    return read()
