"""Pages of some KV heads as records of bytes, and back: the only torch encoder and decoder of pages.

    encode   K_post -> [K_pre - mean] or [(K - offset) / λ] -> [- prediction] -> quantizer -> record (V: the last two)
    decode   the same in reverse

The mean of keys before RoPE is an offset, too: one constant, which RoPE turns to every position (keys before
RoPE alone can lose it). Where a projection has a bias it is most of a key, and a format that scales whole
tokens would spend its codes on it.

Every transform is undone right after decoding, so that sinks and ring hold K_post and V as the model made
them, or in the plan's basis, and readers of a page need no transforms of their own. (The kernels fold λ and
offset into the query instead.) Pages of 16 bits hold K_post as the model made them, too: offset and λ are for
codes.

Of a page's place, only its index within its sequence matters here: page p has the tokens at positions 128 p +
0 .. 127, which are also their RoPE positions. Predictions are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvcal.geometry import CacheDtype
from kvcal.lazy_torch import Tensor, torch
from kvcal.pages.error_feedback import feedback_operand
from kvcal.pages.layout_protocol import PAGE_TOKENS, RAW_BITS, Layout, page_positions
from kvcal.pages.rescale_and_rope import BeforeRope, Transform
from kvcal.pages.stripes import pieces
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Format, Side
from kvcal.systems.basis.basis import Basis
from kvcal.systems.kitty.scores import channel_scores

# Pages encoded at once: bounds the scratch of a long prefill to 8 MB a head of 128 (kvcal.store.workspace).
ENCODE_PAGES = 16
# Values that are decoded at once: every temporary in fp32 is 32 MB then.
VALUES_AT_ONCE = 2**23


@dataclass(frozen=True, eq=False)
class PageCodec:
    """The codec of ``num_heads`` (n) KV heads of one side, all in ``format``; :meth:`of_layer` makes one from
    a plan. Tensors are on the pages' device: ``rescale`` and ``offset`` [n, 1, D] fp32, ``rotary`` [pairs, 4]
    fp64 (where ``is_pre``, or for :meth:`before_rope`), ``feedback`` the factor (kvcal.pages.error_feedback),
    ``operands`` as the layout names them. Pages are coded in the ``basis``: tokens are given and returned in
    it.

    M pages are encoded or decoded at once: ``page_index`` int64 [M]; ``prediction`` [M, n, 128, D] fp32, None
    without one; r records a page.
    """

    side: Side
    format: Format
    num_heads: int
    head_dim: int
    cache_dtype: CacheDtype
    rescale: Tensor | None = None
    offset: Tensor | None = None
    rotary: Tensor | None = None
    is_pre: bool = False
    feedback: Tensor | None = None
    basis: Basis | None = None
    operands: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_layer(cls, plan: LayerPlan, side: Side, cache_dtype: CacheDtype, tensors: Mapping[str, Tensor]) -> PageCodec:
        """The codec of a layer's keys or values; ``tensors``: the plan's."""
        prefix, is_k, fmt = f"layers.{plan.geometry.index}", side == "k", plan.format(side)
        layout = plan.layout(side, cache_dtype)
        named = layout.plan_tensors(f"{prefix}.{side}")
        return cls(
            side,
            fmt,
            plan.attention.num_kv_heads,
            plan.head_dim(side),
            cache_dtype,
            rescale=tensors[f"{prefix}.k_rescale"].unsqueeze(-2) if is_k and plan.k_rescale else None,
            offset=tensors[f"{prefix}.k_offset"].unsqueeze(-2) if is_k and plan.k_offset else None,
            rotary=tensors.get(f"{prefix}.rotary") if is_k else None,
            is_pre=is_k and plan.k_pages == "pre",
            feedback=feedback_operand(tensors, f"{prefix}.{side}") if plan.feedback(side) else None,
            basis=Basis.of(tensors, f"{prefix}.{side}") if plan.basis(side) else None,
            operands={operand: tensors[name] for operand, (name, _) in named.items()},
        )

    @property
    def kind(self) -> object:
        """Equal for codecs that can be ``joined``, or stand ``beside`` each other."""
        whole = [self.rotary if self.is_pre else None]
        whole += [] if self.grid is None else [self.grid, self.signs, self.feedback]
        what = self.side, self.format, self.num_heads, self.head_dim, self.cache_dtype, self.is_pre
        missing = (part is None for part in (self.rescale, self.offset, self.basis))
        factor_numbers = 0 if self.feedback is None else self.feedback.shape[1]  # with gains or without
        return *what, *missing, factor_numbers, *map(id, whole)

    @property
    def has_own_factor(self) -> bool:
        """Whether pages of several codecs of a kind are encoded as heads of one (``beside``): each head has a
        factor."""
        return self.feedback is not None and self.grid is None

    @staticmethod
    def joined(codecs: Sequence[PageCodec], count: int) -> PageCodec:
        """One codec for pages of several of a ``kind``, ``count`` pages of each, in order, which are encoded
        at once: λ, offset and signs of a head get a row for each page. Of one it is that one."""
        if len(codecs) == 1:
            return codecs[0]

        def rows(tensors: Sequence[Tensor | None]) -> Tensor | None:
            found = [x for x in tensors if x is not None]
            return torch.stack(found).repeat_interleave(count, 0) if found else None

        one, operands = codecs[0], codecs[0].operands
        if one.grid is None and one.signs is not None:
            signs = rows([codec.signs for codec in codecs])
            assert signs is not None
            operands = {"signs": signs[:, None, None]}
        rescale, offset = rows([codec.rescale for codec in codecs]), rows([codec.offset for codec in codecs])
        return replace(one, rescale=rescale, offset=offset, operands=operands)

    @staticmethod
    def beside(codecs: Sequence[PageCodec]) -> PageCodec:
        """One codec of the heads of several of a ``kind``, which have factors and no grid, in order; for tokens
        that are in their bases already."""

        def heads(tensors: Sequence[Tensor | None]) -> Tensor | None:
            found = [x for x in tensors if x is not None]
            return torch.cat(found) if found else None

        signs = heads([None if c.signs is None else c.signs.expand(c.num_heads, 1, -1) for c in codecs])
        return replace(
            codecs[0],
            num_heads=sum(codec.num_heads for codec in codecs),
            rescale=heads([codec.rescale for codec in codecs]),
            offset=heads([codec.offset for codec in codecs]),
            feedback=heads([codec.feedback for codec in codecs]),
            basis=None,
            operands={} if signs is None else {"signs": signs},
        )

    @property
    def grid(self) -> Tensor | None:
        """Points that vectors are rounded to, if they are."""
        return self.operands.get("grid")

    @property
    def signs(self) -> Tensor | None:
        """Random signs of rotations."""
        return self.operands.get("signs")

    @property
    def records_per_page(self) -> int:
        """r: one record for each head, or one for all heads in a row."""
        return self._layout(self.format.num_bits).records_per_page(self.num_heads)

    @property
    def record(self) -> tuple[int, int]:
        """Records of a page, and bytes of each, before any token has come."""
        return self.records_per_page, self.record_bytes(self.format.bits_at(0))

    def record_bytes(self, num_bits: int) -> int:
        return self._layout(num_bits).record_bytes

    def encode(
        self,
        x: Tensor,
        page_index: Tensor,
        num_bits: int,
        query_mean: Tensor | None = None,
        prediction: Tensor | None = None,
        at_once: int = ENCODE_PAGES,
    ) -> Tensor:
        """x [M, n, 128, D], keys after RoPE or values -> records [M, r, record_bytes] uint8, ``at_once`` at a
        time; of fewer tokens records whose first ones they are, and that are 0 besides. ``query_mean`` [M, n, D]:
        the mean |q| of each page's channels, for query scores."""
        if x.shape[0] == 0:
            return x.new_empty(0, self.records_per_page, self.record_bytes(num_bits), dtype=torch.uint8)
        parts = []
        for part in torch.arange(x.shape[0], device=x.device).split(at_once):
            page = x[part]
            for transform in self._transforms(page_index[part], num_bits):
                page = transform.apply(page)
            if prediction is not None:
                page = page.float() - prediction[part]
            query = None if query_mean is None else query_mean[part]
            parts.append(self._quantize(page, num_bits, query))
        return torch.cat(parts)

    def put(
        self,
        places: Sequence[tuple[Tensor, Tensor]],
        begin: int,
        x: Tensor,
        num_bits: int,
        page_index: Tensor,
        query_mean: Tensor | None = None,
        prediction: Tensor | None = None,
    ) -> None:
        """Store tokens x [b, n, T, D], whole stripes, of which the first is number ``begin`` of its page. ``places``:
        records [slots, r, record_bytes] and slots int64 [b, P] of the heads, or of those of each codec ``beside``
        others. ``page_index`` int64 [b, P]; ``query_mean`` [b, n, D] and ``prediction`` [b, P, n, 128, D] are of whole
        pages alone."""
        layout = self._layout(num_bits)
        for tokens, pages, first in pieces(begin, x.shape[2]):
            part, numbers = x[:, :, tokens], page_index[:, pages].flatten()
            count = pages.stop - pages.start
            by_page = part.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1)
            stop = first + by_page.shape[2]
            if stop - first < PAGE_TOKENS:
                for transform in self._transforms(numbers, num_bits):
                    by_page = transform.apply(by_page)
                found = layout.encode_tokens(by_page, self._operands(by_page, None), first)
            else:
                mean = None if query_mean is None else query_mean.repeat_interleave(count, dim=0)
                predicted = None if prediction is None else prediction[:, pages].flatten(0, 1)
                found = self.encode(by_page, numbers, num_bits, mean, predicted)
            for (records, slots), new in zip(places, found.chunk(len(places), dim=1), strict=True):
                where = slots[:, pages].flatten()
                if first:  # the first tokens of a page set the rest of it to 0
                    new = torch.where(layout.token_bytes(first, stop).to(new.device), new, records[where])
                records[where] = new

    def convert(self, records: Tensor, old_bits: int, new_bits: int) -> Tensor:
        """Records [..., n, bytes] of ``old_bits`` -> of ``new_bits``, of a format whose bits change."""
        transform = Transform(self.rescale, self.offset)
        return self._layout(old_bits).converted(records, self._layout(new_bits), transform)

    def decode(self, records: Tensor, num_bits: int, prediction: Tensor | None = None) -> Tensor:
        """Records [M, r, record_bytes] -> [M, n, 128, D] with the prediction added and before all other
        transforms are undone; fp32, or the cache's dtype from 16-bit pages without transforms."""
        values = self._layout(num_bits).decode_pages(records, self.num_heads, self.operands)
        return values if prediction is None else values.float() + prediction

    def read_back(self, x: Tensor) -> Tensor:
        """x [n, 128 P, D], keys after RoPE or values after the sinks -> [n, 128 P, D] as its P pages are
        read, at the format's final bits and without queries or prediction."""
        if self.basis is not None:
            x = self.basis.enter(x.transpose(0, 1)).transpose(0, 1)
        pages = x.unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1)
        page_index, num_bits = torch.arange(len(pages), device=x.device), self.format.num_bits
        values = self.restore(self.decode(self.encode(pages, page_index, num_bits), num_bits), page_index)
        found = values.transpose(0, 1).flatten(1, 2)
        if self.basis is None:
            return found
        return self.basis.leave(found.transpose(0, 1)).transpose(0, 1).to(found.dtype)

    def restore(self, stored: Tensor, page_index: Tensor, num_bits: int | None = None) -> Tensor:
        """Output of :meth:`decode` -> keys after RoPE, or values. ``num_bits``: as there, None for the
        format's own."""
        for transform in reversed(self._transforms(page_index, self.format.num_bits if num_bits is None else num_bits)):
            stored = transform.undo(stored)
        return stored

    def before_rope(self, stored: Tensor, page_index: Tensor, num_bits: int | None = None) -> Tensor:
        """As :meth:`restore`, but what predictions read: keys before RoPE, or values. fp32."""
        if self.side == "v" or self.is_pre:
            for transform in reversed(self._transforms(page_index, num_bits or self.format.num_bits)[1:]):
                stored = transform.undo(stored)
            return stored.float()
        return self._rope(page_index).apply(self.restore(stored, page_index, num_bits))

    def _transforms(self, page_index: Tensor, num_bits: int) -> tuple[BeforeRope | Transform, ...]:
        """All but the prediction, in the order of encoding."""
        if self.is_pre:
            return (self._rope(page_index), *(() if num_bits == RAW_BITS else (Transform(offset=self.offset),)))
        return () if num_bits == RAW_BITS else (Transform(self.rescale, self.offset),)

    def _rope(self, page_index: Tensor) -> BeforeRope:
        assert self.rotary is not None
        return BeforeRope(self.rotary, page_positions(page_index))

    def _quantize(self, page: Tensor, num_bits: int, query_mean: Tensor | None) -> Tensor:
        layout, operands = self._layout(num_bits), self._operands(page, query_mean)
        if page.shape[2] < PAGE_TOKENS:
            return layout.encode_tokens(page, operands, 0)
        return layout.encode_pages(page, operands)

    def _operands(self, page: Tensor, query_mean: Tensor | None) -> Mapping[str, Tensor]:
        """Operands of the layout to encode a page."""
        operands = self.operands
        if self.format.score is not None:
            if query_mean is not None and self.rescale is not None:
                query_mean = query_mean * self.rescale.squeeze(-2)
            operands = {**operands, "scores": channel_scores(self.format.score, page, query_mean)}
        if self.feedback is not None:
            operands = {**operands, "feedback": self.feedback}
        return operands

    def _layout(self, num_bits: int) -> Layout:
        return self.format.layout(self.side, self.num_heads, self.head_dim, self.cache_dtype, num_bits)
