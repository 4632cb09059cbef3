"""``lattice_dim``: pages on HIGGS's lattice (kvcal.systems.aqua_kv.lattice)."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from kvcal.pages.layout_protocol import Layout
from kvcal.pages.ways import NO_KERNELS, Way
from kvcal.plan.plain_format import Pages, PlainFormat, Side
from kvcal.strict import STRICT
from kvcal.systems.aqua_kv.lattice import ALLOWED_BITS, LatticeLayout

LATTICE = Way("pages on a lattice", refused={"static": NO_KERNELS})
WAYS = (LATTICE,)


@dataclass(frozen=True, config=STRICT)
class Format(PlainFormat):
    """A lattice for all KV heads in a row, where ``lattice_dim`` is given."""

    lattice_dim: Literal[2, 4] | None = None

    def kinds(self) -> list[str]:
        return [*super().kinds(), *(["lattice_dim"] if self.lattice_dim is not None else [])]

    def conflicts(self) -> list[str]:
        found = super().conflicts()
        allowed = () if self.lattice_dim is None else ALLOWED_BITS[self.lattice_dim]
        if allowed and (self.num_bits not in allowed or self.axis != "token" or self.group_size != 128):
            found.append(
                f"lattice_dim = {self.lattice_dim} takes {allowed} bits, axis 'token' and no group_size; found "
                f"{self.num_bits}, {self.axis!r}, {self.group_size}"
            )
        return found

    def pages(self) -> Pages:
        if self.lattice_dim is None:
            return super().pages()
        label = f"{self.num_bits} lattice d{self.lattice_dim}"
        return Pages("lattice", label, LATTICE, self._lattice, takes_feedback=False)

    def _lattice(self, side: Side, num_heads: int, head_dim: int, cache_dtype: str, num_bits: int) -> Layout:
        assert self.lattice_dim is not None
        return LatticeLayout(num_bits, self.lattice_dim, num_heads * head_dim, self.param_dtype)
