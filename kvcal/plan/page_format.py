"""Formats of the keys, or the values, of KV heads, and the exact bytes that they take.

A ``Format`` is the unit of choice of every allocation. Page p of a sequence holds tokens 128 p to 128 p +
127, quantized in the step that completes them. Copies that are not quantized lie outside of the pages: of the
first tokens (sinks), and, in a ring, of the last ones. Attention prefers them: to sinks, and to at least the
last ``recent_window`` tokens. How many pages there are, and at how many bits, is a function of the number of
tokens alone, so that bytes are
known beforehand:

- ``boost`` splits the channels of a page of keys by a score (Kitty, MixKVQ): the best get more bits;
- ``window_rule`` lets the window grow with the text (KVmix's recent pivotal context);
- ``lattice_dim`` takes HIGGS's lattice quantizer instead of the uniform one (AQUA-KV), ``quantizer`` a
  rotated one;
- ``shrink_at`` lets pages begin with more bits and halve them at given token counts (PM-KVQ's progressive
  cache).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal.pages.layout_protocol import PAGE_TOKENS, RAW_BITS, Layout
from kvcal.pages.uniform import UniformLayout
from kvcal.stored_tensor import ITEM_BYTES
from kvcal.strict import STRICT
from kvcal.systems.aqua_kv.lattice import ALLOWED_BITS, LatticeLayout
from kvcal.systems.basis.rotated import SCALE_DTYPE, RotatedLayout
from kvcal.systems.kitty.scores import SCORES
from kvcal.systems.kitty.tiered import BASE_BITS, TieredLayout
from kvcal.systems.kvmix.window_rule import MAX_UNQUANTIZED, WindowRule

Side = Literal["k", "v"]
SIDES: tuple[Side, Side] = ("k", "v")
QUERY_ITEM_BYTES = 4  # the running query statistic is a sum in fp32 for every channel of a KV head
NEVER = 2**31 - 1  # beyond all token counts
Unquantized = Annotated[int, Field(ge=0, le=MAX_UNQUANTIZED)]


UNIFORM = "uniform"
QUANTIZERS: dict[str, type[UniformLayout]] = {UNIFORM: UniformLayout, "rotated": RotatedLayout}
# Left out of JSON where it is the uniform one: plans without the key stay the same bytes.
Quantizer = Annotated[str, Field(exclude_if=lambda name: name == UNIFORM)]


@dataclass(frozen=True, config=STRICT)
class Tier:
    """Channels of a page that get ``num_bits``: room for ``share`` of them. ``above`` None fills all of it
    with the best channels by score (Kitty); a number takes only channels whose score is above it (MixKVQ)."""

    num_bits: Literal[4, 8, 16]
    share: Annotated[float, Field(gt=0, le=1)]
    above: float | None = None

    def num_channels(self, head_dim: int) -> int:
        """Channels of a page that the tier has room for, at least one."""
        return max(1, int(self.share * head_dim + 0.5))

    def __str__(self) -> str:
        above = "" if self.above is None else f">{self.above:g}"
        return f" +{100 * self.share:g}%@{self.num_bits}{above}"


@dataclass(frozen=True, config=STRICT)
class Boost:
    """Channels of every page of keys that get more bits: the best by ``score``, tier by tier, from most bits
    to fewest; decided anew for every page."""

    score: str
    tiers: tuple[Tier, ...]

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score = {self.score!r}, expected one of {list(SCORES)}")
        bits = [tier.num_bits for tier in self.tiers]
        if not bits or bits != sorted(set(bits), reverse=True):
            raise ValueError(f"tiers of {bits} bits, expected one or more, from most bits to fewest")


@dataclass(frozen=True, config=STRICT)
class Format:
    """See the module's docstring. 16-bit heads store pages in the cache's dtype and take nothing else.

    ``num_bits`` are the final ones. ``shrink_at`` (ascending token counts): pages begin with ``num_bits`` x
    2^len(shrink_at) bits and halve them at each, by the right ``shift`` of PM-KVQ's Eq. 3.
    """

    num_bits: Literal[1, 2, 3, 4, 8, 16]
    axis: Literal["channel", "token"] = "token"
    group_size: Literal[32, 64, 128] = 128
    num_sink_tokens: Unquantized = 0
    recent_window: Unquantized = 0
    param_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    boost: Boost | None = None
    window_rule: WindowRule | None = None
    lattice_dim: Literal[2, 4] | None = None
    shrink_at: tuple[int, ...] = ()
    shift: Literal["equivalent"] = "equivalent"
    quantizer: Quantizer = UNIFORM

    def __post_init__(self) -> None:
        if self.num_bits == RAW_BITS and (self.axis, self.group_size, self.num_sink_tokens, self.recent_window) != (
            "token", 128, 0, 0,
        ):  # fmt: skip
            raise ValueError("16-bit heads take no axis, group_size, num_sink_tokens or recent_window")
        for reason in self._conflicts():
            raise ValueError(reason)

    def _conflicts(self) -> list[str]:
        """Why this composition cannot be stored; usually nothing."""
        found = []
        special = [
            name
            for name in ("boost", "window_rule", "lattice_dim", "shrink_at")
            if getattr(self, name) not in (None, ())
        ]
        if self.num_bits == RAW_BITS and special:
            found.append(f"16-bit heads take no {' or '.join(special)}")
        if self.quantizer not in QUANTIZERS:
            return [*found, f"quantizer = {self.quantizer!r}, expected one of {list(QUANTIZERS)}"]
        if self.quantizer != UNIFORM:
            special += ["num_bits = 16"] if self.num_bits == RAW_BITS else []
            if clashing := [name for name in special if name != "window_rule"]:
                found.append(f"quantizer = {self.quantizer!r} does not go with {' and '.join(clashing)}")
            if self.axis != "token":
                found.append(f"rotated pages take fewer than 16 bits and axis 'token', found {self.axis!r}")
            if self.param_dtype != "float16":
                found.append(
                    f"scales of rotated pages have 8 bits: they take no param_dtype, found {self.param_dtype!r}"
                )
        if self.boost is not None:
            lowest = self.boost.tiers[-1].num_bits
            if self.num_bits not in BASE_BITS or self.axis != "channel" or lowest <= self.num_bits:
                found.append(
                    f"boost needs axis 'channel' and 2 or 4 bits below those of its tiers, found {self.axis!r} and "
                    f"{self.num_bits} against {lowest}"
                )
            if self.lattice_dim is not None or self.shrink_at:
                found.append("boost does not go with lattice_dim or shrink_at: its planes are of the uniform quantizer")
        elif self.lattice_dim is not None:
            allowed = ALLOWED_BITS[self.lattice_dim]
            if self.num_bits not in allowed or self.axis != "token" or self.group_size != 128 or self.shrink_at:
                found.append(
                    f"lattice_dim = {self.lattice_dim} takes {allowed} bits, axis 'token', no group_size and no "
                    f"shrink_at; found {self.num_bits}, {self.axis!r}, {self.group_size}, {list(self.shrink_at)}"
                )
        if self.shrink_at:
            ascending = list(self.shrink_at) == sorted(self.shrink_at) and self.shrink_at[0] >= 0
            if self.start_bits not in (4, 8, 16) or not ascending or self.param_dtype != "float32":
                found.append(
                    f"shrink_at = {list(self.shrink_at)} must ascend, start from 4, 8 or 16 bits (found "
                    f"{self.start_bits}) and have param_dtype 'float32' (found {self.param_dtype!r}): the shift needs "
                    "exact ratios of scales"
                )
        if self.window_rule is not None and self.recent_window:
            found.append(f"recent_window = {self.recent_window} and window_rule are given; expected one of them")
        return found

    @property
    def label(self) -> str:
        """For people: "3 channel g64", "16", "2 channel g128 +12.5%@4 magnitude", "16>8>4>2 token g128"."""
        if self.num_bits == RAW_BITS:
            return str(RAW_BITS)
        bits = ">".join(str(self.start_bits >> n) for n in range(len(self.shrink_at) + 1))
        if self.lattice_dim is not None:
            return f"{bits} lattice d{self.lattice_dim}"
        if self.quantizer != UNIFORM:
            return f"{bits} {self.quantizer} g{self.group_size}"
        tiers = "" if self.boost is None else f"{''.join(map(str, self.boost.tiers))} {self.boost.score}"
        return f"{bits} {self.axis} g{self.group_size}{tiers}"

    @property
    def takes_feedback(self) -> bool:
        """Whether its pages have codes that can be chosen with error feedback, one channel at a time."""
        return self.num_bits != RAW_BITS and self.lattice_dim is None

    @property
    def start_bits(self) -> int:
        return self.num_bits << len(self.shrink_at)

    def bits_at(self, columns: int) -> int:
        """Bits of all pages once the longest sequence of the batch has ``columns`` tokens (padding
        included)."""
        return self.start_bits >> bisect_right(self.shrink_at, columns)

    @property
    def needs_queries(self) -> bool:
        """Whether pages are written with the help of a running query statistic."""
        return self.boost is not None and SCORES[self.boost.score].needs_queries

    @property
    def max_window(self) -> int:
        return self.recent_window if self.window_rule is None else self.window_rule.max_tokens

    def ring_tokens(self, lookahead: int = 0) -> int:
        """Tokens that the ring of unquantized recent tokens has room for, with so many drafts
        (kvcal.kernels.operands says where each lies)."""
        return self.max_window + PAGE_TOKENS + lookahead

    def pages_read(self, num_tokens: int) -> int:
        """Pages from which attention reads the past of ``num_tokens`` tokens; the tokens after them are in
        the ring. Never falls as tokens come."""
        rule = self.window_rule
        if rule is None:
            return max(0, num_tokens - self.recent_window) // PAGE_TOKENS
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
        the batch's ``columns``. After them another page is read, or written by a query score, or pages
        shrink."""
        read = self.pages_read(num_tokens)
        most = self.ring_tokens() + PAGE_TOKENS
        events = [1 + bisect_left(range(1, most + 1), read + 1, key=lambda new: self.pages_read(num_tokens + new))]
        if self.needs_queries:
            events.append(PAGE_TOKENS - num_tokens % PAGE_TOKENS)
        # An update begins by shrinking: the one that reaches the count comes alone.
        events += [max(1, count - 1 - columns) for count in self.shrink_at if count > columns]
        return min(events)

    def layout(self, side: Side, num_heads: int, head_dim: int, cache_dtype: str, num_bits: int) -> Layout:
        """The record of one page at ``num_bits``: of one head, or with a lattice of all ``num_heads`` in a
        row. At 16 bits a page holds tokens, whatever the format would quantize them with."""
        if num_bits != RAW_BITS and self.boost is not None:
            tiers = tuple((tier.num_bits, tier.num_channels(head_dim), tier.above) for tier in self.boost.tiers)
            return TieredLayout(num_bits, tiers, self.group_size, head_dim, self.param_dtype, cache_dtype)
        if num_bits != RAW_BITS and self.lattice_dim is not None:
            return LatticeLayout(num_bits, self.lattice_dim, num_heads * head_dim, self.param_dtype)
        kind = UniformLayout if num_bits == RAW_BITS else QUANTIZERS[self.quantizer]
        param_dtype = self.param_dtype if kind is UniformLayout else SCALE_DTYPE
        return kind(side, num_bits, self.axis, self.group_size, head_dim, param_dtype, cache_dtype)

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
        pages = sum(count * num_pages(length) for length, count in Counter(lengths).items())
        layout = self.layout(side, num_heads, head_dim, cache_dtype, self.bits_at(columns))
        records = pages * layout.records_per_page(num_heads)
        statistic = len(lengths) * num_heads * head_dim * QUERY_ITEM_BYTES
        return {
            "codes": records * layout.code_bytes,
            "scales": records * (layout.record_bytes - layout.code_bytes),
            "windows": self.max_window * token_bytes,
            "open_pages": PAGE_TOKENS * token_bytes,
            "sinks": self.num_sink_tokens * token_bytes,
            "query_statistics": statistic if self.needs_queries else 0,
        }


def num_pages(num_tokens: int) -> int:
    """Pages of a sequence of ``num_tokens`` tokens, whatever its format: a page is packed in the step that
    fills it."""
    return num_tokens // PAGE_TOKENS


RAW = Format(num_bits=16)
