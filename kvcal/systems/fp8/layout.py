"""``quantizer = "fp8"``: pages of e4m3 values without scales, as engines store an fp8 cache by default.

    x' = e4m3(clamp(x, -448, 448)), rounded to the nearest, ties to even

It is what plans are measured next to. As in every plan, the newest page is kept at 16 bits until it is full;
an engine has it in fp8, too. Left out: scales, which engines take from a checkpoint that has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic.dataclasses import dataclass as pydantic_dataclass

from kvcal.lazy_torch import Tensor, torch
from kvcal.pages.layout_protocol import PAGE_TOKENS, Layout, aligned_size, join_fields, require_finite
from kvcal.pages.ways import NO_KERNELS, Way
from kvcal.plan.plain_format import Pages, PlainFormat, Side
from kvcal.strict import STRICT

FP8, BITS, LARGEST = "fp8", 8, 448.0
FP8_PAGES = Way("pages of fp8", refused={"static": NO_KERNELS})
WAYS = (FP8_PAGES,)


@pydantic_dataclass(frozen=True, config=STRICT)
class Format(PlainFormat):
    """Pages of e4m3 values, where ``quantizer`` says so."""

    def quantizers(self) -> list[str]:
        return [*super().quantizers(), FP8]

    def conflicts(self) -> list[str]:
        found = super().conflicts()
        if self.quantizer == FP8 and (self.num_bits, self.axis, self.group_size) != (BITS, "token", 128):
            found.append(f"quantizer = 'fp8' takes 8 bits, and no axis or group_size; found {self.num_bits} bits")
        return found

    def pages(self) -> Pages:
        if self.quantizer != FP8:
            return super().pages()
        return Pages(FP8, f"{BITS} {FP8}", FP8_PAGES, self._fp8, takes_feedback=False)

    def _fp8(self, side: Side, num_heads: int, head_dim: int, cache_dtype: str, num_bits: int) -> Layout:
        return Fp8Layout(head_dim, self.param_dtype)


@dataclass(frozen=True)
class Fp8Layout(Layout):
    """A record of 128 x ``head_dim`` bytes, token by token."""

    head_dim: int
    param_dtype: str
    num_bits: int = BITS

    @property
    def code_bytes(self) -> int:
        return PAGE_TOKENS * self.head_dim

    @property
    def record_bytes(self) -> int:
        return aligned_size(self.code_bytes)

    def encode_pages(self, x: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
        require_finite(x, "keys or values cannot be quantized: a page holds NaN or infinity", "check the model")
        values = x.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).contiguous()
        return join_fields([values.view(torch.uint8).flatten(-2)])

    def decode_pages(self, records: Tensor, num_heads: int, operands: Mapping[str, Tensor]) -> Tensor:
        values = records[..., : self.code_bytes].contiguous().view(torch.float8_e4m3fn)
        return values.float().unflatten(-1, (PAGE_TOKENS, self.head_dim))
