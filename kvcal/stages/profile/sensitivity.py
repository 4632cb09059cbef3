"""A candidate's quantization error: weighted by the loss's gradient (PM-KVQ's sensitivity, Eq. 5), and
squared.

    s = sum over tokens and channels of |G * (X - Q(X))|

X are the keys after RoPE, before the GQA repeat, or the values; G is the gradient of the loss with respect to
them. K and V, and the KV heads, are kept apart, so that a solver can choose for each. Both X and Q(X) are
what the runtime's cache holds: X is rounded to the cache's dtype (so 16 bits cost nothing, by definition),
and pages of 128 tokens begin after the sinks, which are never quantized. Groups divide pages, so that pages
need not be cut here; the last, partial page is quantized with partial groups. The recent window counts as
quantized: in a long text it is a vanishing part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.geometry import CACHE_DTYPES, CacheDtype
from kvcal.pages.codec import PageCodec
from kvcal.pages.layout_protocol import AXES, PAGE_TOKENS, PARAM_DTYPES
from kvcal.plan.page_format import UNIFORM, Format, Side
from kvcal.recipe import CacheSpec


class Errors(NamedTuple):
    """Of one layer's keys or values in B sequences, fp64: ``weighted_BNC`` Eq. 5 for N heads and C
    candidates, ``squared_BC`` the sum of (X - Q(X))^2 over all heads, ``energy_B`` that of X^2."""

    weighted_BNC: Tensor
    squared_BC: Tensor
    energy_B: Tensor


class Candidate(NamedTuple):
    """A way to store one side of a layer, with the fields of a Format."""

    num_bits: int
    axis: str
    group_size: int
    quantizer: str = UNIFORM


def candidates(
    side: str,
    num_bits: Iterable[int],
    k_axes: Iterable[str],
    group_sizes: Iterable[int],
    quantizers: Iterable[str] = (UNIFORM,),
) -> tuple[Candidate, ...]:
    """All candidates below 16 bits of ``side`` ("k" or "v"), in a fixed order; values take the axes they
    have."""
    bits, groups = sorted(set(num_bits)), sorted(set(group_sizes))
    axes = sorted(set(k_axes)) if side == "k" else AXES[side]
    return tuple(Candidate(b, axis, g, q) for q in quantizers for b in bits for axis in axes for g in groups)


def quantization_errors(
    x_BNTD: Tensor,
    g_BNTD: Tensor,
    lengths_B: Tensor,
    formats: Sequence[Candidate],
    cache: CacheSpec,
    cache_dtype: CacheDtype,
    side: Side = "k",
) -> Errors:
    """The errors of every candidate in ``formats``, on the device of x; zero where all tokens are sinks, not
    finite where a group's range is one that the cache's ``param_dtype`` cannot hold (``range_refusal``). Does
    not wait for the device.

    Products, and their sums over at most ``D`` channels, are fp32 (1e-7 relative); all further sums are fp64.

    Args:
        x_BNTD, g_BNTD: keys or values, and the loss's gradients with respect to them, any float dtype.
        lengths_B: int64, on the device of x; what lies after a sequence's length is padding."""
    B, N, T, D = x_BNTD.shape
    found = [(x_BNTD.new_zeros(B, N, 0, dtype=torch.float64), x_BNTD.new_zeros(B, 0, dtype=torch.float64))]
    if cache.num_sink_tokens >= T:
        nothing = x_BNTD.new_zeros(B, N, len(formats), dtype=torch.float64)
        return Errors(nothing, nothing[:, 0], nothing.new_zeros(B))
    columns_of: dict[tuple[str, str, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for column, (num_bits, axis, size, quantizer) in enumerate(formats):
        # Uniform groups longer than a token's channels are all the same group.
        size = min(size, D) if (quantizer, axis) == (UNIFORM, "token") else size
        columns_of[quantizer, axis, size][num_bits].append(column)
    values = _Values(x_BNTD, g_BNTD, lengths_B, cache.num_sink_tokens, cache_dtype, PARAM_DTYPES[cache.param_dtype])
    place_of: dict[int, int] = {}  # of a column, in what is found
    for (quantizer, axis, size), columns_of_bits in columns_of.items():
        for place, columns in enumerate(columns_of_bits.values(), start=sum(part.shape[1] for _, part in found)):
            place_of |= dict.fromkeys(columns, place)
        all_bits = tuple(columns_of_bits)
        if quantizer != UNIFORM:
            found.append(_page_errors(values, all_bits, axis, size, quantizer, side))
        else:
            found.append(_group_errors(values, all_bits, axis, size))
    places = torch.tensor([place_of[column] for column in range(len(formats))], dtype=torch.int64, device=x_BNTD.device)
    weighted_BNC, squared_BC = (torch.cat(parts, -1)[..., places] for parts in zip(*found, strict=True))
    return Errors(weighted_BNC, squared_BC, values.squares(values.x_BNTD))


def range_refusal(candidate: Candidate, param_dtype: str) -> NonFiniteActivations:
    """The error for a candidate whose errors are not finite."""
    return NonFiniteActivations(
        f"a group of {candidate.group_size} values holds NaN, infinity, or a range beyond {param_dtype}",
        hint="a range too large for float16 fits with param_dtype = 'bfloat16'",
    )


@dataclass(frozen=True, eq=False)
class _Values:
    """Keys or values and their gradients. Padding is read as the last token again, which moves no group's
    range; it has weight 0, and no part in sums of squares."""

    raw_BNTD: Tensor
    g_BNTD: Tensor
    lengths_B: Tensor
    num_sinks: int
    cache_dtype: CacheDtype
    param_dtype: torch.dtype

    @cached_property
    def is_real_BT(self) -> Tensor:
        """Mask of the tokens after the sinks that are no padding."""
        tokens = torch.arange(self.num_sinks, self.raw_BNTD.shape[2], device=self.raw_BNTD.device)
        return tokens < self.lengths_B[:, None]

    @cached_property
    def x_BNTD(self) -> Tensor:
        """After the sinks, as a cache holds them, fp32."""
        token_T = torch.arange(self.num_sinks, self.raw_BNTD.shape[2], device=self.raw_BNTD.device)
        last_B1 = (self.lengths_B - 1).clamp(min=self.num_sinks)[:, None]
        read_B1T1 = token_T.minimum(last_B1)[:, None, :, None]
        return self.raw_BNTD.take_along_dim(read_B1T1, 2).to(CACHE_DTYPES[self.cache_dtype]).float()

    @cached_property
    def weight_BNTD(self) -> Tensor:
        """|gradients| after the sinks, fp32."""
        return self.g_BNTD[:, :, self.num_sinks :].float().abs() * self.is_real_BT[:, None, :, None]

    def squares(self, x_BNTD: Tensor) -> Tensor:
        """The sum of squares over heads, channels and real tokens, fp64 [B]."""
        norm_BNT = torch.linalg.vector_norm(x_BNTD, dim=-1).double()
        return norm_BNT.square().mul_(self.is_real_BT[:, None]).sum((1, 2))


def _page_errors(
    values: _Values, all_bits: Sequence[int], axis: str, size: int, quantizer: str, side: Side
) -> tuple[Tensor, Tensor]:
    """As ``_group_errors``, of pages that another quantizer packs."""
    weighted, squared = [], []
    for num_bits in all_bits:
        fmt = Format(num_bits, axis, size, quantizer=quantizer)  # type: ignore[arg-type]
        read_BNTD = torch.stack([_read_back(fmt, side, x_NTD, values.cache_dtype) for x_NTD in values.x_BNTD])
        error_BNTD = (read_BNTD - values.x_BNTD).abs()
        squared.append(values.squares(error_BNTD))
        weighted.append(error_BNTD.mul_(values.weight_BNTD).sum(-1).sum(-1, dtype=torch.float64))
    return torch.stack(weighted, -1), torch.stack(squared, -1)


def _group_errors(values: _Values, all_bits: Sequence[int], axis: str, group_size: int) -> tuple[Tensor, Tensor]:
    """Eq. 5, [B, N, C] fp64, and the squared errors, [B, C], for C = len(all_bits) and groups of
    ``group_size`` along ``axis``.

    |Q(x) - x| is what pages.uniform does, the same operations in the same order (a test compares bit for bit), but
    without codes and with the minima and x - zero shared by all bits: 2.4 times faster for the default
    candidates.
    """
    dim = -2 if axis == "channel" else -1
    x_BNTD, weight_BNTD = values.x_BNTD, values.weight_BNTD
    length = x_BNTD.shape[dim]
    # A partial group is filled up with its own last value, which moves neither minimum nor maximum, at weight
    # 0.
    missing = -length % group_size
    if missing:
        fill = x_BNTD.narrow(dim, length - 1, 1).repeat_interleave(missing, dim)
        x_BNTD = torch.cat([x_BNTD, fill], dim)
        weight_BNTD = torch.cat([weight_BNTD, torch.zeros_like(fill)], dim)
    grouped = x_BNTD.contiguous().unflatten(dim, (-1, group_size))
    weight = weight_BNTD.contiguous().unflatten(dim, (-1, group_size))
    minimum, maximum = torch.aminmax(grouped, dim=dim, keepdim=True)
    zero = minimum.to(values.param_dtype).float()
    offset, error = grouped - zero, torch.empty_like(grouped)
    weighted, squared = [], []
    for num_bits in all_bits:
        levels = float(2**num_bits - 1)
        step = ((maximum - minimum) / maximum.new_full((), levels)).to(values.param_dtype).float()
        torch.div(offset, torch.where(step == 0, torch.inf, step), out=error)
        error.round_().clamp_(0.0, levels).mul_(step).add_(zero).sub_(grouped).abs_()
        squared.append(values.squares(error.flatten(dim - 1, dim).narrow(dim, 0, length)))
        weighted.append(error.mul_(weight).sum(-1).flatten(2).sum(-1, dtype=torch.float64))
    return torch.stack(weighted, -1), torch.stack(squared, -1)


def _read_back(fmt: Format, side: Side, x_NTD: Tensor, cache_dtype: CacheDtype) -> Tensor:
    """x as pages of ``fmt`` are read, fp32; the last, partial page is filled up with its last token."""
    heads, length, dim = x_NTD.shape
    operands = {
        operand: layout.make_tensor(operand, seed=0).to(x_NTD.device)
        for layout in [fmt.layout(side, heads, dim, cache_dtype, fmt.num_bits)]
        for operand in layout.plan_tensors("")
    }
    codec = PageCodec(side, fmt, heads, dim, cache_dtype, operands=operands)
    missing = -length % PAGE_TOKENS
    filled = torch.cat([x_NTD, x_NTD[:, -1:].expand(-1, missing, -1)], dim=1)
    return codec.read_back(filled)[:, :length].float()
