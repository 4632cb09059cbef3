"""A candidate's quantization error: weighted by the loss's gradient (PM-KVQ's sensitivity, Eq. 5), and squared.

    s = sum over tokens and channels of |G * (X - Q(X))|

X are the keys after RoPE, before the GQA repeat, or the values; G is the gradient of the loss with respect to
them. K and V, and the KV heads, are kept apart, so that a solver can choose for each. Both X and Q(X) are what the
runtime's cache holds: X is rounded to the cache's dtype (so 16 bits cost nothing, by definition), and pages of 128
tokens begin behind the sinks, which are never quantized. Groups divide pages, so that pages need not be cut here;
the last, partial page is quantized with partial groups. The recent window counts as quantized: in a long text it is
a vanishing part.

Left out: the sign (errors of one group could cancel; Eq. 5 takes the bound), and second-order terms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.pages.codec import PageCodec
from kvcal.pages.record_layout import AXES, PAGE_TOKENS
from kvcal.plan.page_format import UNIFORM, Format, Side


class Errors(NamedTuple):
    """Of one layer's keys or values in one sequence, fp64: ``weighted_NC`` Eq. 5 for N heads and C candidates,
    ``squared_C`` the sum of (X - Q(X))^2 over all heads, ``energy`` that of X^2."""

    weighted_NC: Tensor
    squared_C: Tensor
    energy: Tensor


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
    """All candidates below 16 bits of ``side`` ("k" or "v"), in a fixed order; values take the axes they have."""
    bits, groups = sorted(set(num_bits)), sorted(set(group_sizes))
    axes = sorted(set(k_axes)) if side == "k" else AXES[side]
    return tuple(Candidate(b, axis, g, q) for q in quantizers for b in bits for axis in axes for g in groups)


def quantization_errors(
    x_NTD: Tensor,
    g_NTD: Tensor,
    formats: Sequence[Candidate],
    num_sink_tokens: int,
    cache_dtype: torch.dtype,
    param_dtype: torch.dtype,
    side: Side = "k",
) -> Errors:
    """The errors of every candidate in ``formats``, on the device of x; zero where all tokens are sinks.

    Products, and their sums over at most ``D`` channels, are fp32 (1e-7 relative); all further sums are fp64.

    Args:
        x_NTD, g_NTD: keys or values, and the loss's gradients with respect to them, any float dtype.
    Raises:
        NonFiniteActivations: x is not finite, or has a range that ``param_dtype`` cannot hold.
    """
    x_NTD = x_NTD[:, num_sink_tokens:].to(cache_dtype).float()
    weight_NTD = g_NTD[:, num_sink_tokens:].float().abs()
    weighted_NC = x_NTD.new_zeros(x_NTD.shape[0], len(formats), dtype=torch.float64)
    squared_C, energy = weighted_NC.new_zeros(len(formats)), _squares(x_NTD)
    if x_NTD.shape[1] == 0:
        return Errors(weighted_NC, squared_C, energy)
    columns_of: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for column, (num_bits, axis, size, quantizer) in enumerate(formats):
        if quantizer != UNIFORM:
            fmt = Format(num_bits, axis, size, param_dtype=_name(param_dtype), quantizer=quantizer)  # type: ignore[arg-type]
            error_NTD = (_read_back(fmt, side, x_NTD, _name(cache_dtype)) - x_NTD).abs()
            squared_C[column] = _squares(error_NTD)
            weighted_NC[:, column] = error_NTD.mul_(weight_NTD).sum(-1).sum(-1, dtype=torch.float64)
            continue
        # Groups longer than a token's channels are all the same group.
        columns_of[axis, min(size, x_NTD.shape[2]) if axis == "token" else size][num_bits].append(column)
    for (axis, size), columns_of_bits in columns_of.items():
        dim = -2 if axis == "channel" else -1
        errors = _group_errors(x_NTD, weight_NTD, tuple(columns_of_bits), size, dim, param_dtype)
        for columns, (weighted_N, squared) in zip(columns_of_bits.values(), errors, strict=True):
            weighted_NC[:, columns] = weighted_N.unsqueeze(-1)
            squared_C[columns] = squared
    return Errors(weighted_NC, squared_C, energy)


def _group_errors(
    x_NTD: Tensor, weight_NTD: Tensor, all_bits: Sequence[int], group_size: int, dim: int, param_dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Eq. 5, [N] fp64, and the squared error, [], for groups of ``group_size`` along ``dim``: for each of
    ``all_bits``.

    |Q(x) - x| is what pages.uniform does, the same operations in the same order (a test compares bit for bit), but
    without codes and with the minima and x - zero shared by all bits: 2.4 times faster for the default candidates.
    """
    length = x_NTD.shape[dim]
    # A partial group is filled up with its own last value, which moves neither minimum nor maximum, at weight 0.
    missing = -length % group_size
    if missing:
        fill = x_NTD.narrow(dim, length - 1, 1).repeat_interleave(missing, dim)
        x_NTD = torch.cat([x_NTD, fill], dim)
        weight_NTD = torch.cat([weight_NTD, torch.zeros_like(fill)], dim)
    grouped = x_NTD.contiguous().unflatten(dim, (-1, group_size))
    weight = weight_NTD.contiguous().unflatten(dim, (-1, group_size))
    minimum, maximum = torch.aminmax(grouped, dim=dim, keepdim=True)
    zero = minimum.to(param_dtype).float()
    offset, error = grouped - zero, torch.empty_like(grouped)
    errors = []
    for num_bits in all_bits:
        levels = float(2**num_bits - 1)
        step = ((maximum - minimum) / maximum.new_full((), levels)).to(param_dtype).float()
        if not torch.isfinite(step.sum(dtype=torch.float64) + zero.sum(dtype=torch.float64)):
            raise NonFiniteActivations(
                f"a group of {group_size} values holds NaN, infinity, or a range beyond "
                f"{str(param_dtype).removeprefix('torch.')}",
                hint="a range too large for float16 fits with param_dtype = 'bfloat16'",
            )
        torch.div(offset, torch.where(step == 0, torch.inf, step), out=error)
        error.round_().clamp_(0.0, levels).mul_(step).add_(zero).sub_(grouped).abs_()
        squared = _squares(error.flatten(dim - 1, dim).narrow(dim, 0, length))
        errors.append((error.mul_(weight).sum(-1).flatten(1).sum(-1, dtype=torch.float64), squared))
    return errors


def _read_back(fmt: Format, side: Side, x_NTD: Tensor, cache_dtype: str) -> Tensor:
    """x as pages of ``fmt`` are read, fp32; the last, partial page is filled up with its last token."""
    heads, length, dim = x_NTD.shape
    operands = {
        operand: layout.make_tensor(operand, seed=0).to(x_NTD.device)
        for layout in [fmt.layout(side, heads, dim, cache_dtype, fmt.num_bits)]
        for operand in layout.plan_tensors("")
    }
    codec = PageCodec(side, fmt, slice(0, heads), dim, cache_dtype, operands=operands)  # type: ignore[arg-type]
    missing = -length % PAGE_TOKENS
    filled = torch.cat([x_NTD, x_NTD[:, -1:].expand(-1, missing, -1)], dim=1)
    return codec.read_back(filled)[:, :length].float()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _squares(x_NTD: Tensor) -> Tensor:
    """The sum of squares, [] fp64."""
    return torch.linalg.vector_norm(x_NTD, dim=-1).double().square().sum()
