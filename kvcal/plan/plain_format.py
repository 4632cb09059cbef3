"""The part that all formats of keys and values share, and the exact bytes that they take.

Page p of a sequence holds tokens 128 p to 128 p + 127, quantized in the step that completes them, or where a
format packs in stripes, ``stripe_tokens`` at a time. Copies that are not quantized lie outside of the pages:
of the first tokens (sinks), and, in a ring, of the last ones. Attention prefers them: to sinks, and to at
least the last ``recent_window`` tokens. How many pages there are, and at how many bits, is a function of the
number of tokens alone, so that bytes are known beforehand.

Systems add keys, and pages of other kinds (``layout.py`` in their folders); ``kvcal.plan.page_format`` has
the whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal.lazy_torch import Tensor
from kvcal.pages.layout_protocol import PAGE_TOKENS, RAW_BITS, Layout, without_sinks
from kvcal.pages.uniform import UniformLayout
from kvcal.pages.ways import RAW_PAGES, UNIFORM_PAGES, Way
from kvcal.stored_tensor import ITEM_BYTES
from kvcal.strict import STRICT
from kvcal.systems.kvmix.window_rule import MAX_UNQUANTIZED, WindowRule

Side = Literal["k", "v"]
SIDES: tuple[Side, Side] = ("k", "v")
QUERY_ITEM_BYTES = 4  # the running query statistic is a sum in fp32 for every channel of a KV head
NEVER = 2**31 - 1  # beyond all token counts
Unquantized = Annotated[int, Field(ge=0, le=MAX_UNQUANTIZED)]

UNIFORM = "uniform"
# Left out of JSON where they are the usual ones: plans without the keys stay the same bytes.
Quantizer = Annotated[str, Field(exclude_if=lambda name: name == UNIFORM)]
Stripe = Annotated[Literal[16, 32, 128], Field(exclude_if=lambda tokens: tokens == PAGE_TOKENS)]


class Pages(NamedTuple):
    """Pages of a format. ``kind``: the word for them; ``label``: of the format, for people, such as
    "3 channel g64"; ``way``: what they need, and where they are served; ``layout``: as of
    :meth:`PlainFormat.layout`; ``takes_feedback``: whether error feedback can choose their codes, one channel
    at a time; ``packs_by_token``: whether a token's part of them depends on this token alone, and no byte is of
    two stripes."""

    kind: str
    label: str
    way: Way
    layout: Callable[[Side, int, int, str, int], Layout]
    takes_feedback: bool = True
    packs_by_token: bool = False


@dataclass(frozen=True, config=STRICT)
class PlainFormat:
    """See the module's docstring. 16-bit heads store pages in the cache's dtype and take nothing else.
    ``num_bits`` are the final ones; ``window_rule`` lets the window grow with the text (KVmix).
    ``stripe_tokens`` are packed together: a whole page, or a part of one where tokens share no scale."""

    num_bits: Literal[1, 2, 3, 4, 8, 16]
    axis: Literal["channel", "token"] = "token"
    group_size: Literal[32, 64, 128] = 128
    num_sink_tokens: Unquantized = 0
    recent_window: Unquantized = 0
    param_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    quantizer: Quantizer = UNIFORM
    window_rule: WindowRule | None = None
    stripe_tokens: Stripe = 128

    def __post_init__(self) -> None:
        if self.num_bits == RAW_BITS and (self.axis, self.group_size, self.num_sink_tokens, self.recent_window) != (
            "token", 128, 0, 0,
        ):  # fmt: skip
            raise ValueError("16-bit heads take no axis, group_size, num_sink_tokens or recent_window")
        for reason in self.conflicts():
            raise ValueError(reason)

    def kinds(self) -> list[str]:
        """The keys that ask for pages of another kind than uniform ones, of which a format takes one."""
        return [] if self.quantizer == UNIFORM else [f"quantizer = {self.quantizer!r}"]

    def conflicts(self) -> list[str]:
        """Why this composition cannot be stored; usually nothing."""
        kinds, found = self.kinds(), []
        if self.num_bits == RAW_BITS:
            kinds += ["num_bits = 16"] if kinds else []
            found += ["16-bit heads take no window_rule"] if self.window_rule is not None else []
        if len(kinds) > 1:
            found.append(f"{kinds[0]} does not go with {' and '.join(kinds[1:])}: a format has one kind of pages")
        if self.window_rule is not None and self.recent_window:
            found.append(f"recent_window = {self.recent_window} and window_rule are given; expected one of them")
        if self.stripe_tokens < PAGE_TOKENS and not (self.pages().packs_by_token and self.window_rule is None):
            found.append(
                f"stripe_tokens = {self.stripe_tokens} is for pages whose tokens have scales of their own and a fixed "
                f"window: expected {PAGE_TOKENS}"
            )
        if self.quantizer not in self.quantizers():
            found.append(f"quantizer = {self.quantizer!r}, expected one of {self.quantizers()}")
        return found

    def quantizers(self) -> list[str]:
        return [UNIFORM]

    def pages(self) -> Pages:
        """The pages that it stores; of a system's keys, where they ask for it."""
        if self.num_bits == RAW_BITS:
            return Pages("16 bits", str(RAW_BITS), RAW_PAGES, self._uniform, takes_feedback=False)
        return Pages(UNIFORM, f"{self.num_bits} {self.axis} g{self.group_size}", UNIFORM_PAGES, self._uniform)

    @property
    def kind(self) -> str:
        return self.pages().kind

    @property
    def label(self) -> str:
        return self.pages().label

    @property
    def takes_feedback(self) -> bool:
        return self.pages().takes_feedback

    @property
    def score(self) -> str | None:
        """The score by which channels of pages are chosen (kvcal.systems.kitty.scores), if they are."""
        return None

    @property
    def changes_at(self) -> tuple[int, ...]:
        """The token counts at which pages get other bits; mostly none."""
        return ()

    @property
    def start_bits(self) -> int:
        """Bits of the first pages."""
        return self.num_bits

    def bits_at(self, columns: int) -> int:
        """Bits of all pages once the longest sequence of the batch has ``columns`` tokens (padding
        included)."""
        return self.num_bits

    @property
    def needs_queries(self) -> bool:
        """Whether pages are written with the help of the queries since the page before."""
        return "queries" in self.pages().way.needs

    @property
    def max_window(self) -> int:
        return self.recent_window if self.window_rule is None else self.window_rule.max_tokens

    @property
    def kept_tokens(self) -> int:
        """The most tokens that are kept at 16 bits for good: sinks and the window."""
        return self.num_sink_tokens + self.max_window

    @property
    def kept(self) -> str:
        """The same for people, such as "8 + 64"."""
        return f"{self.num_sink_tokens} + {self.recent_window if self.window_rule is None else self.window_rule}"

    def sinks_left(self, num_tokens: int = 0) -> int:
        """Sinks that are to come after the first ``num_tokens`` tokens."""
        return max(0, self.num_sink_tokens - num_tokens)

    def packed(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Tokens [..., T, D], whole stripes from number ``first`` on, as pages hold them (``without_sinks``)."""
        return without_sinks(tokens, self.num_sink_tokens, first, self.stripe_tokens)

    def ring_tokens(self, step_tokens: int = 1) -> int:
        """Tokens that the ring of unquantized recent tokens has room for, with steps of so many tokens at most
        (kvcal.kernels.operands says where each lies)."""
        return self.max_window + self.stripe_tokens + step_tokens - 1

    def tokens_packed(self, num_tokens: int) -> int:
        """Tokens of a sequence of ``num_tokens`` that are in pages: a stripe is packed in the step that fills
        it."""
        return num_tokens - num_tokens % self.stripe_tokens

    def num_pages(self, num_tokens: int) -> int:
        """Pages of a sequence of ``num_tokens`` tokens, the last of which may be incomplete."""
        return -(-self.tokens_packed(num_tokens) // PAGE_TOKENS)

    def tokens_read(self, num_tokens: int) -> int:
        """Tokens that attention reads from pages, of the past of ``num_tokens``; those after them are in the
        ring. Never falls as tokens come."""
        if self.window_rule is None:
            return self.tokens_packed(max(0, num_tokens - self.recent_window))
        return PAGE_TOKENS * self.pages_read(num_tokens)

    def pages_read(self, num_tokens: int) -> int:
        """Pages that hold them, the last of which may have tokens that are not read there."""
        rule = self.window_rule
        if rule is None:
            return -(-self.tokens_read(num_tokens) // PAGE_TOKENS)
        # Where the paged window jumps up, pages that were read just before it stay so: the ring has lost
        # their tokens.
        jumps = range(PAGE_TOKENS - 1, min(num_tokens, rule.last_jump), PAGE_TOKENS)
        return max(max(0, count - rule.window(count)) // PAGE_TOKENS for count in (*jumps, num_tokens))

    def read_at(self, max_tokens: int) -> list[int]:
        """Of a window that follows a rule: the tokens from which page i of at most ``max_tokens`` is read,
        ascending, and one number beyond all; nothing without a rule."""
        if self.window_rule is None:
            return []
        counts, pages = range(max_tokens + 1), range(self.pages_read(max_tokens))
        return [*(bisect_left(counts, page + 1, key=self.pages_read) for page in pages), NEVER]

    def tokens_to_next_event(self, num_tokens: int, columns: int) -> int:
        """New tokens that are stored and read together as they are one by one; a row has ``num_tokens`` of
        the batch's ``columns``. After them another stripe is read, or a page written with the help of queries,
        or pages get other bits."""
        read = self.tokens_read(num_tokens)
        most = self.ring_tokens() + PAGE_TOKENS
        events = [1 + bisect_left(range(1, most + 1), read + 1, key=lambda new: self.tokens_read(num_tokens + new))]
        if self.needs_queries:
            events.append(PAGE_TOKENS - num_tokens % PAGE_TOKENS)
        # An update begins by changing bits: the one that reaches the count comes alone.
        events += [max(1, count - 1 - columns) for count in self.changes_at if count > columns]
        return min(events)

    def layout(self, side: Side, num_heads: int, head_dim: int, cache_dtype: str, num_bits: int) -> Layout:
        """The record of one page at ``num_bits``, of one head, or of all ``num_heads`` in a row. At 16 bits a
        page holds tokens, whatever the format would quantize them with."""
        make = self._uniform if num_bits == RAW_BITS and not self.changes_at else self.pages().layout
        return make(side, num_heads, head_dim, cache_dtype, num_bits)

    def _uniform(self, side: Side, num_heads: int, head_dim: int, cache_dtype: str, num_bits: int) -> Layout:
        return UniformLayout(side, num_bits, self.axis, self.group_size, head_dim, self.param_dtype, cache_dtype)

    def nbytes(
        self,
        side: Side,
        num_heads: int,
        head_dim: int,
        cache_dtype: str,
        lengths: Sequence[int],
        columns: int | None = None,
    ) -> int:
        """Bytes that ``num_heads`` KV heads take for sequences of the given lengths, padded to ``columns``
        (default: the longest)."""
        return sum(self.parts(side, num_heads, head_dim, cache_dtype, lengths, columns).values())

    def parts(
        self,
        side: Side,
        num_heads: int,
        head_dim: int,
        cache_dtype: str,
        lengths: Sequence[int],
        columns: int | None = None,
    ) -> dict[str, int]:
        """The same bytes by what takes them."""
        columns = max(lengths, default=0) if columns is None else columns
        token_bytes = len(lengths) * num_heads * head_dim * ITEM_BYTES[cache_dtype]
        pages = sum(count * self.num_pages(length) for length, count in Counter(lengths).items())
        layout = self.layout(side, num_heads, head_dim, cache_dtype, self.bits_at(columns))
        records = pages * layout.records_per_page(num_heads)
        statistic = len(lengths) * num_heads * head_dim * QUERY_ITEM_BYTES
        return {
            "codes": records * layout.code_bytes,
            "scales": records * (layout.record_bytes - layout.code_bytes),
            "windows": self.max_window * token_bytes,
            "open_pages": self.stripe_tokens * token_bytes,
            "sinks": self.num_sink_tokens * token_bytes,
            "query_statistics": statistic if self.needs_queries else 0,
        }


def num_pages(num_tokens: int) -> int:
    """Complete pages of a sequence of ``num_tokens`` tokens."""
    return num_tokens // PAGE_TOKENS
