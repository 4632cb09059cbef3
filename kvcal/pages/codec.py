"""Pages of some KV heads as records of bytes, and back: the transforms of a layer around its quantizer.

    encode   K_post -> [K_pre] -> [- offset] -> [/ λ] -> [- prediction] -> quantizer -> record        (V: the last two)
    decode   the same in reverse

Every transform is undone right after decoding, so that sinks and buffer hold K_post and V as the model made them, and
whoever reads a page needs to know nothing about it. (The kernels fold λ and offset into the query instead.) Pages of
16 bits hold K_post as the model made them, too: offset and λ are for codes.

Of where a page lies, only its ordinal within its row matters here: its tokens are at positions num_sink_tokens +
128 ordinal + 0 .. 127 of the row, which is also their RoPE position. What a predictor says is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvcal.geometry import CacheDtype
from kvcal.pages.lattice import LatticeLayout
from kvcal.pages.layout import RAW_BITS, PageLayout, page_positions
from kvcal.pages.rope_table import rotate, unrotate
from kvcal.pages.scores import channel_scores
from kvcal.pages.shrink import Transform, convert
from kvcal.pages.tiered import TieredLayout
from kvcal.plan.format import Format, Layout, Side
from kvcal.plan.layer import LayerPlan
from kvcal.plan.tensors import lattice_name

# Pages encoded at once: bounds the scratch of a long prefill to 8 MB a head of 128 (kvcal.store.transient).
ENCODE_PAGES = 16


class PageCodec:
    """See the module's docstring. For the KV heads ``heads`` of a layer's ``side``, all in format ``fmt``; ``tensors``:
    the plan's, on the device. M pages at a time; ``ordinals`` is int64 [M] on the device. ``prediction`` [M, n, 128, D]
    fp32 is what a predictor says about them, None without one."""

    def __init__(
        self,
        plan: LayerPlan,
        side: Side,
        fmt: Format,
        heads: slice,
        cache_dtype: CacheDtype,
        tensors: Mapping[str, Tensor],
    ) -> None:
        prefix = f"layers.{plan.geometry.index}"
        self.format, self.side = fmt, side
        self.heads, self.num_heads, self.head_dim = heads, heads.stop - heads.start, plan.head_dim(side)
        self.cache_dtype = cache_dtype
        is_k = side == "k"
        self.rescale = tensors[f"{prefix}.k_rescale"][heads].unsqueeze(-2) if is_k and plan.k_rescale else None
        self.offset = tensors[f"{prefix}.k_offset"][heads].unsqueeze(-2) if is_k and plan.k_offset else None
        self.rotary = tensors.get(f"{prefix}.rotary") if is_k else None
        self.is_pre = is_k and plan.k_pages == "pre"
        self.grid = self.signs = None
        if fmt.lattice_dim is not None:
            self.grid = tensors[lattice_name(fmt.lattice_dim, fmt.num_bits)]
            self.signs = tensors[f"{prefix}.{side}_signs"]

    @property
    def records_per_page(self) -> int:
        """One record for each head, or one for all heads in a row."""
        return 1 if self.format.lattice_dim is not None else self.num_heads

    def record_bytes(self, num_bits: int) -> int:
        return self._layout(num_bits).record_bytes

    def encode(
        self,
        x: Tensor,
        ordinals: Tensor,
        num_bits: int,
        query_mean: Tensor | None = None,
        prediction: Tensor | None = None,
    ) -> Tensor:
        """x [M, n, 128, D], keys after RoPE or values -> records [M, r, record_bytes] uint8.
        ``query_mean`` [M, n, D]: the mean |q| that the pages' channels meet, for query scores.

        Raises:
            NonFiniteActivations: NaN or infinity.
        """
        if x.shape[0] == 0:
            return x.new_empty(0, self.records_per_page, self.record_bytes(num_bits), dtype=torch.uint8)
        parts = []
        for part in torch.arange(x.shape[0], device=x.device).split(ENCODE_PAGES):
            page = self._transform(x[part], ordinals[part], num_bits)
            if prediction is not None:
                page = page.float() - prediction[part]
            query = None if query_mean is None else query_mean[part]
            parts.append(self._quantize(page, ordinals[part], num_bits, query))
        return torch.cat(parts)

    def convert(self, records: Tensor, old_bits: int, new_bits: int) -> Tensor:
        """Records [..., n, bytes] of ``old_bits`` -> of ``new_bits``.
        Only pages of formats that shrink have more than one number of bits.

        Raises:
            NonFiniteActivations: NaN or infinity in pages of 16 bits that shrink.
        """
        old, new = self._layout(old_bits), self._layout(new_bits)
        assert isinstance(old, PageLayout) and isinstance(new, PageLayout)
        return convert(records, old, new, self.format.shift, Transform(self.rescale, self.offset))

    def decode(self, records: Tensor, num_bits: int, prediction: Tensor | None = None) -> Tensor:
        """Records [M, r, record_bytes] -> [M, n, 128, D] with the prediction added and before all other transforms are
        undone; fp32, or the cache's dtype from 16-bit pages without transforms."""
        values = self._dequantize(records, num_bits)
        return values if prediction is None else values.float() + prediction

    def restore(self, stored: Tensor, ordinals: Tensor, num_bits: int | None = None) -> Tensor:
        """What :meth:`decode` gave -> keys after RoPE, or values. ``num_bits``: as there, None for the format's own."""
        if self.is_pre:
            return self._turned(stored, ordinals, rotate)
        if (self.format.num_bits if num_bits is None else num_bits) == RAW_BITS:
            return stored
        return Transform(self.rescale, self.offset).undo(stored)

    def before_rope(self, stored: Tensor, ordinals: Tensor, num_bits: int | None = None) -> Tensor:
        """As :meth:`restore`, but what a predictor reads: keys before RoPE, or values. fp32."""
        if self.side == "v" or self.is_pre:
            return stored.float()
        return self._turned(self.restore(stored, ordinals, num_bits), ordinals, unrotate)

    def _turned(self, x: Tensor, ordinals: Tensor, turn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """x [M, n, 128, D] turned to, or from, its positions."""
        assert self.rotary is not None
        return turn(x, self.rotary, page_positions(self.format.num_sink_tokens, ordinals))

    def _transform(self, x: Tensor, ordinals: Tensor, num_bits: int) -> Tensor:
        """All that comes before the prediction is subtracted; x unchanged without transforms."""
        if self.is_pre:
            return self._turned(x, ordinals, unrotate)
        return x if num_bits == RAW_BITS else Transform(self.rescale, self.offset).apply(x)

    def _quantize(self, page: Tensor, ordinals: Tensor, num_bits: int, query_mean: Tensor | None) -> Tensor:
        layout = self._layout(num_bits)
        if isinstance(layout, LatticeLayout):
            assert self.grid is not None and self.signs is not None
            return layout.encode_heads(page, self.grid, self.signs)
        if isinstance(layout, TieredLayout):
            assert self.format.boost is not None
            if query_mean is not None and self.rescale is not None:
                query_mean = query_mean * self.rescale.squeeze(-2)
            heads = torch.arange(self.heads.start, self.heads.stop, device=page.device)
            score = self.format.boost.score
            return layout.encode(page, channel_scores(score, page, query_mean, ordinals.unsqueeze(-1), heads))
        return layout.encode(page)

    def _dequantize(self, records: Tensor, num_bits: int) -> Tensor:
        layout = self._layout(num_bits)
        if isinstance(layout, LatticeLayout):
            assert self.grid is not None and self.signs is not None
            return layout.decode_heads(records, self.num_heads, self.grid, self.signs)
        return layout.decode(records)

    def _layout(self, num_bits: int) -> Layout:
        return self.format.layout(self.side, self.num_heads, self.head_dim, self.cache_dtype, num_bits)
