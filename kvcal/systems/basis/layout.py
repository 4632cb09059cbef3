"""``quantizer = "rotated"``: rotated pages (kvcal.systems.basis.rotated)."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from kvcal.pages.layout_protocol import Layout
from kvcal.pages.ways import Way
from kvcal.plan.plain_format import Pages, PlainFormat, Side
from kvcal.strict import STRICT
from kvcal.systems.basis.rotated import SCALE_DTYPE, RotatedLayout

ROTATED = "rotated"
ROTATED_PAGES = Way("rotated pages")
WAYS = (ROTATED_PAGES,)


@dataclass(frozen=True, config=STRICT)
class Format(PlainFormat):
    """Rotated pages, where ``quantizer`` says so."""

    def quantizers(self) -> list[str]:
        return [*super().quantizers(), ROTATED]

    def conflicts(self) -> list[str]:
        found = super().conflicts()
        if self.quantizer == ROTATED and self.axis != "token":
            found.append(f"rotated pages take fewer than 16 bits and axis 'token', found {self.axis!r}")
        if self.quantizer == ROTATED and self.param_dtype != "float16":
            found.append(f"scales of rotated pages have 8 bits: they take no param_dtype, found {self.param_dtype!r}")
        return found

    def pages(self) -> Pages:
        if self.quantizer != ROTATED:
            return super().pages()
        return Pages(ROTATED, f"{self.num_bits} {ROTATED} g{self.group_size}", ROTATED_PAGES, self._rotated)

    def _rotated(self, side: Side, num_heads: int, head_dim: int, cache_dtype: str, num_bits: int) -> Layout:
        return RotatedLayout(side, num_bits, self.axis, self.group_size, head_dim, SCALE_DTYPE, cache_dtype)
