"""Random content for what is timed: plans without a model to fit them to, pages of random codes, filled caches.

A plan is like a real one in all that changes a time: shapes, dtypes, a lattice's points, RoPE's angles. Predictors
contract (their largest singular value is about 0.5 at most), so that reconstructions stay small from layer to layer, in
a benchmark that feeds its layers in a ring, too.

Attention never reads zeros: a kernel on zeros draws less power and clocks higher, one on random bytes for scales meets
NaN. So codes are random bytes, and scales and zeros are spread around values that keep what is decoded in about -0.1 to
0.05, at every bit width; tokens that are not quantized scatter as much. The places of a record's fields are those of
the layouts that pack real pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal.bench.shape import CACHE_DTYPE, Heads, Pair
from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.sliding_window import StaticWindow
from kvcal.geometry import CACHE_DTYPES, ModelIdentity
from kvcal.kernels.variants import side_defines
from kvcal.pages.grids import gaussian_grid
from kvcal.pages.lattice import LatticeLayout
from kvcal.pages.layout import PAGE_TOKENS, PARAM_DTYPES, RAW_BITS
from kvcal.pages.tiered import NO_SLOT
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Format, Side
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import needed_tensors
from kvcal.store.paged_tensor import PagedTensor

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


def uniform_plan(model: ModelIdentity, pair: Pair, heads: Heads, num_layers: int, batch: int, num_tokens: int) -> Plan:
    """A plan of ``num_layers`` layers with the formats of ``pair``."""
    layers = tuple(heads.layer(pair, index) for index in range(num_layers))
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
        elif spec.dtype == torch.uint8:  # codes of 4 bits, two a byte
            tensor = torch.randint(0, 256, size, generator=generator)
        elif kind == "scale":
            tensor = torch.rand(*size, generator=generator).add_(0.5).mul_(spread / INT4_SPREAD)
        else:
            tensor = torch.randn(*size, generator=generator).mul_(spread)
        tensors[name] = tensor.to(spec.dtype)
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
            _fill_records(part, generator)
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


def _fill_records(part: PagedTensor, generator: Generator) -> None:
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
        for offset, middle in ((defines["SCALE"], CODE_RANGE / (2**fmt.num_bits - 1)), (defines["ZERO"], ZERO)):
            _write_params(part, offset, num_params, middle, param_dtype, generator)
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
