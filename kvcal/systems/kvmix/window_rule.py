"""KVmix's recent window, which depends on the number of tokens."""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Literal

from pydantic.dataclasses import dataclass

from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.strict import STRICT

MAX_UNQUANTIZED = 2**20  # tokens of sinks, and of a window


@dataclass(frozen=True, config=STRICT)
class WindowRule:
    """A recent window that depends on the number of tokens n (KVmix's RPC), never beyond ``max_tokens``.

    ``clamped``: floor(share n), at least ``min_tokens``. ``paged``: kept <- floor(share (kept + 128)) for
    every page of 128 new tokens; it stays near 128 share / (1 - share), however long the text. The paper's
    rule, kept <- floor(share (kept + new)) for every update, keeps 819 tokens of a prompt of 4,096 at 20 %,
    and none after five tokens of decoding: no window at all.
    """

    kind: Literal["clamped", "paged"]
    share: float
    max_tokens: int
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.share < 1 and 0 <= self.min_tokens <= self.max_tokens <= MAX_UNQUANTIZED):
            raise ValueError(
                f"share = {self.share} must be between 0 and 1, and 0 <= min_tokens = {self.min_tokens} <= "
                f"max_tokens = {self.max_tokens} <= {MAX_UNQUANTIZED}"
            )

    def __str__(self) -> str:
        return f"{100 * self.share:g}% {self.kind}, at most {self.max_tokens}"

    def window(self, num_tokens: int) -> int:
        """Tokens that stay unquantized at least, after ``num_tokens``."""
        if self.kind == "clamped":
            return min(max(int(self._exact_share * num_tokens), self.min_tokens), self.max_tokens)
        kept = self._kept[min(num_tokens // PAGE_TOKENS, len(self._kept) - 1)]
        return min(max(kept, self.min_tokens), self.max_tokens)

    @functools.cached_property
    def _exact_share(self) -> Fraction:
        """The decimal number as written: 0.29 of 100 tokens are 29."""
        return Fraction(repr(self.share))

    @functools.cached_property
    def _kept(self) -> list[int]:
        """The paged rule after 0, 1, ... pages of new tokens, until it stands still (it only grows) or is
        cut."""
        kept = [0]
        while len(kept) < 2 or kept[-2] != kept[-1] < self.max_tokens:
            kept.append(int(self._exact_share * (kept[-1] + PAGE_TOKENS)))
        return kept

    @property
    def last_jump(self) -> int:
        """The number of tokens from which on the window moves by at most one token per token."""
        return 0 if self.kind == "clamped" else len(self._kept) * PAGE_TOKENS
