"""``mirrored``: uniform pages of -x."""

from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass

from pydantic.dataclasses import dataclass

from kvcal.lazy_torch import Tensor
from kvcal.pages.layout_protocol import Layout
from kvcal.pages.uniform import UniformLayout
from kvcal.pages.ways import NO_KERNELS, Way
from kvcal.plan.plain_format import Pages, PlainFormat, Side
from kvcal.strict import STRICT

MIRRORED = Way("pages in a mirror", refused={"static": NO_KERNELS})
WAYS = (MIRRORED,)


@plain_dataclass(frozen=True)
class MirroredLayout(UniformLayout):
    """A record of -x."""

    def encode_pages(self, x: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
        return super().encode_pages(-x, operands)

    def decode_pages(self, records: Tensor, num_heads: int, operands: Mapping[str, Tensor]) -> Tensor:
        return -super().decode_pages(records, num_heads, operands)


@dataclass(frozen=True, config=STRICT)
class Format(PlainFormat):
    """Mirrored pages, where it says so."""

    mirrored: bool = False

    def kinds(self) -> list[str]:
        return [*super().kinds(), *["mirrored"] * self.mirrored]

    def pages(self) -> Pages:
        plain = super().pages()
        if not self.mirrored:
            return plain
        return Pages("mirrored", f"{plain.label} mirrored", MIRRORED, self._mirrored)

    def _mirrored(self, side: Side, num_heads: int, head_dim: int, cache_dtype: str, num_bits: int) -> Layout:
        return MirroredLayout(side, num_bits, self.axis, self.group_size, head_dim, self.param_dtype, cache_dtype)
