"""A step of one layer by the kernels: the new tokens of every sequence, one or several, are stored and
attend.

Static caches and engines take the same steps, each in memory of its own. ``LayerStep`` is of a layer with
pages, ``WindowedStep`` of one with a sliding window. A step waits for nothing and knows no lengths on the
host, so that it may be captured in a CUDA graph. ``StepScratch`` is what the steps of all layers share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.geometry import AttentionGeometry, CacheDtype
from kvcal.kernels import ops
from kvcal.kernels.decode import workspace_bytes
from kvcal.kernels.operands import Memory, PageTransform, Place, QueryStatistic
from kvcal.kernels.reference import NON_FINITE
from kvcal.kernels.variants import Variant, window_variant
from kvcal.plan.page_format import SIDES, Format, Side
from kvcal.store.pool import fixed
from kvcal.systems.basis.basis import Basis


class StepScratch:
    """Scratch that all layers share, of at most ``max_rows`` sequences of at most ``max_tokens`` tokens;
    counted by no plan. ``error`` int32 [1]: bits that are set when a token or a page cannot be stored
    (kvcal.kernels.ops); ``nothing`` and ``none``: absent operands, fp32 and int32; ``no_statistic``: that of
    no query scores."""

    def __init__(self, max_rows: int, max_tokens: int, device: torch.device) -> None:
        self.max_rows, self.max_tokens, self.device = max_rows, max_tokens, device
        self.error = fixed(torch.zeros(1, dtype=torch.int32, device=device))
        self.nothing, self.none = torch.empty(0, device=device), torch.empty(0, dtype=torch.int32, device=device)
        self.no_statistic = QueryStatistic(self.nothing, self.none)
        self._workspaces: dict[tuple[int, int, int], Tensor] = {}
        self._read_at: dict[Format, Tensor] = {}

    def workspace(self, num_kv_heads: int, group_heads: int, head_dim: int) -> Tensor:
        """uint8: scratch of ``decode`` for heads of this shape; the reference needs none. It ends with
        counters that every launch leaves at zero, as many as there are heads, so each shape has its own."""
        shape = (num_kv_heads, group_heads, head_dim)
        if shape not in self._workspaces:
            needed = workspace_bytes(self.max_rows, *shape, self.device) if self.device.type == "cuda" else 0
            self._workspaces[shape] = fixed(torch.zeros(needed, dtype=torch.uint8, device=self.device))
        return self._workspaces[shape]

    def read_at(self, fmt: Format) -> Tensor:
        """int32: tokens from which page i of a sequence is read, and one beyond all; empty without a window
        rule."""
        if fmt not in self._read_at:
            starts = torch.tensor(fmt.read_at(self.max_tokens), dtype=torch.int32, device=self.device)
            self._read_at[fmt] = fixed(starts)
        return self._read_at[fmt]

    def reach(self, tokens: int) -> None:
        """Sequences may have so many tokens from now on."""
        if tokens > self.max_tokens:
            self.max_tokens = 2 * tokens
            self._read_at.clear()

    @property
    def tensors(self) -> list[Tensor]:
        return [self.error, *self._workspaces.values(), *self._read_at.values()]


def require_no_error(error: Tensor) -> None:
    """Wait for the device. NonFiniteActivations, and no error any more: a page, or a token, could not be
    stored."""
    if int(error) & NON_FINITE:
        error.zero_()
        raise NonFiniteActivations(
            "keys or values cannot be quantized: a page holds NaN, infinity, or a range beyond its param_dtype, or a "
            "token is beyond float16 in its basis",
            hint="check the model's outputs; a range too large for float16 fits with param_dtype = 'bfloat16'",
        )


@dataclass(frozen=True)
class KernelCodec:
    """The kernels that pack and unpack the pages of one side in place of torch. ``transform``: the layer's.
    NaN and infinity set a bit of ``error``, or where it ``is_awaited``, raise NonFiniteActivations."""

    side: Side
    transform: PageTransform
    error: Tensor
    variant: Variant
    is_awaited: bool = False

    def enter(self, basis: Basis, x: Tensor) -> Tensor:
        """Tokens x [b, T, n, D], in the cache's dtype, in the basis of the side; infinite where float16 cannot
        hold a number."""
        nothing, unread = x.new_empty(0), torch.zeros_like(self.error)
        return ops.enter(x, nothing, nothing, basis.operands, [], unread)[0]

    def leave(self, basis: Basis, y: Tensor) -> Tensor:
        """The reverse, in the dtype of y."""
        return ops.leave(y, basis.operands, y.dtype)

    def pack(self, x: Tensor, pages: Tensor, slots: Tensor, query_mean: Tensor | None) -> None:
        """Tokens x [b, n, 128 P, D] to pages[slots], int32 [b, P]; ``query_mean`` [b, n, D] fp32."""
        mean = x.new_empty(0, dtype=torch.float32) if query_mean is None else query_mean
        ops.pack(x, pages, slots, mean, *self._operands(self.error))
        if self.is_awaited:
            require_no_error(self.error)

    def unpack(self, pages: Tensor, slots: Tensor, out: Tensor) -> None:
        """pages[slots], int32 [b, P] -> out [b, n, 128 P, D], any float dtype."""
        ops.unpack(pages, slots, out, *self._operands())

    def _operands(self, *error: Tensor) -> tuple[Any, ...]:
        transform = self.transform if self.side == "k" else self.transform.of_values
        return list(transform), *error, SIDES.index(self.side), self.variant.number


@dataclass(frozen=True)
class LayerStep:
    """A layer's calls of the operators on its memory. ``variants``: numbers of those that take 1, 2, ...
    tokens of a sequence in one call. ``bases`` of keys and values, None where a side has none."""

    scratch: StepScratch
    k: Memory
    v: Memory
    statistic: QueryStatistic
    transform: PageTransform
    bases: tuple[Basis | None, Basis | None]
    workspace: Tensor
    variants: tuple[int, ...]

    def memory(self, side: Side) -> Memory:
        return self.k if side == "k" else self.v

    @property
    def needs_queries(self) -> bool:
        return self.statistic.sum.numel() > 0

    def enter(self, q: Tensor | None, k_new: Tensor, v_new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, if there are any, as they read the layer's keys, and keys and values as the layer holds
        them, in the bases that it has: fp32 queries where either side has one, so that outputs are fp32, too.
        Shapes are those of ``append``. Numbers that float16 cannot hold set a bit of ``error``."""
        k_basis, v_basis = self.bases
        nothing, dtype = self.scratch.nothing, self.k.ring.dtype
        read = nothing if q is None else q
        if k_basis is None and v_basis is None:
            return read, k_new, v_new
        keys, values, turned = ops.enter(
            nothing if k_basis is None else k_new.to(dtype),
            nothing if v_basis is None else v_new.to(dtype),
            nothing if k_basis is None else read,
            [] if k_basis is None else k_basis.operands,
            [] if v_basis is None else v_basis.operands,
            self.scratch.error,
        )
        keys, turned = (k_new, read.float()) if k_basis is None else (keys, turned)
        return turned, keys, v_new if v_basis is None else values

    def append(self, q: Tensor, k_new: Tensor, v_new: Tensor, place: Place) -> Tensor:
        """Store k_new, v_new [B, N, D], one token a sequence, with the queries q [B, N G, D]; or S tokens,
        [B, S, N, D] and [B, S, N G, D]. Returns the queries as ``attend`` takes them."""
        turned, *entered = self.enter(q, k_new, v_new)
        for at, variant, (queries, keys, values) in self._calls(place, q, *entered):
            ops.append(
                keys, values, queries if self.needs_queries else self.scratch.nothing, list(self.k), list(self.v),
                list(self.statistic), list(at), list(self.transform), self.scratch.error, variant,
            )  # fmt: skip
        return turned

    def attend(
        self, queries: Tensor, place: Place, scale: float, softcap: float, s_aux: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Attention, shaped like the ``queries`` of ``append`` [B, N G, D] and in ``dtype``, to all tokens of
        each sequence; of S tokens [B, S, N G, D], each up to its own. ``softcap`` 0 for none; ``s_aux`` [N
        G]: logits of sinks without a key."""
        sinks = self.scratch.nothing if s_aux is None else s_aux
        parts = [
            ops.decode(
                q, list(self.k), list(self.v), list(at), list(self.transform), sinks, self.workspace, scale, softcap,
                variant,
            )
            for at, variant, (q,) in self._calls(place, queries)
        ]  # fmt: skip
        attended: Tensor = parts[0] if len(parts) == 1 else torch.stack(parts, dim=1)
        return self.leave(attended, dtype)

    def leave(self, attended: Tensor, dtype: torch.dtype) -> Tensor:
        """Attention of values as the layer holds them -> of values, in ``dtype``."""
        v_basis = self.bases[1]
        return attended.to(dtype) if v_basis is None else ops.leave(attended, v_basis.operands, dtype)

    def _calls(self, place: Place, *new: Tensor) -> list[tuple[Place, int, tuple[Tensor, ...]]]:
        """Calls of an operator for new tokens [B, n, D], or [B, S, n, D]: one, or where no variant takes so
        many, one for each."""
        tokens = 1 if new[0].dim() == 3 else new[0].shape[1]
        if new[0].dim() == 3 or 1 < tokens <= len(self.variants):
            return [(place, self.variants[tokens - 1], new)]
        return [
            (place._replace(lengths=place.lengths + n), self.variants[0], tuple(x[:, n] for x in new))
            for n in range(tokens)
        ]


class WindowedStep(LayerStep):
    """Of a layer with a sliding window of W tokens: of each side, a ring of the last W - 1 of the past, and
    the token before them, scratch of one step (``append_window``), as the one sink."""

    @classmethod
    def of(
        cls, geometry: AttentionGeometry, cache_dtype: CacheDtype, k: Memory, v: Memory, scratch: StepScratch
    ) -> Self:
        number, nothing = window_variant(geometry, k.ring.shape[2], cache_dtype).number, scratch.nothing
        workspace = scratch.workspace(geometry.num_kv_heads, geometry.group_heads, geometry.k_head_dim)
        transform = PageTransform(*[nothing] * 6)
        return cls(scratch, k, v, scratch.no_statistic, transform, (None, None), workspace, (number,))

    def append(self, q: Tensor, k_new: Tensor, v_new: Tensor, place: Place) -> Tensor:
        """Store k_new, v_new [B, N, D], one token a sequence. Returns q."""
        ops.append_window(
            k_new, v_new, self.k.sinks, self.k.ring, self.v.sinks, self.v.ring, place.lengths, self.scratch.error,
            self.scratch.max_tokens, place.rows if place.rows.numel() else None,
        )  # fmt: skip
        return q
