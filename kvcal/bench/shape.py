"""What a measurement is taken at: heads, batch and context, and the bytes that attention must read there.

The bytes are the floor of every decode kernel: packed records with their scales, zeros and indices, sinks, and the
tokens of the buffer that are filled. Their ratio to 16 bits is the ceiling of any factor.
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from kvcal.formats import RAW, SIDES, Format, Side
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry, CacheDtype
from kvcal.layer_plan import LayerPlan
from kvcal.quantizers.pages import PAGE_TOKENS
from kvcal.strict import STRICT

CACHE_DTYPE: CacheDtype = "bfloat16"
ITEM_BYTES = CACHE_DTYPES[CACHE_DTYPE].itemsize


@dataclass(frozen=True, config=STRICT)
class Point:
    """``batch`` sequences that hold ``context`` tokens each."""

    batch: int
    context: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.context < PAGE_TOKENS:
            raise ValueError(f"batch = {self.batch} must be 1 or more, context = {self.context} {PAGE_TOKENS} or more")

    @property
    def name(self) -> str:
        """``8 x 32K``."""
        whole, rest = divmod(self.context, 1024)
        return f"{self.batch} x {self.context if rest else f'{whole}K'}"


@dataclass(frozen=True, config=STRICT)
class Heads:
    """``num_kv_heads`` KV heads of ``head_dim``, each read by ``group`` query heads."""

    num_kv_heads: int = 8
    head_dim: int = 128
    group: int = 4

    @property
    def num_query_heads(self) -> int:
        return self.num_kv_heads * self.group

    def layer(self, pair: Pair, index: int = 0) -> LayerPlan:
        """A layer of these heads, all of them stored as ``pair`` says."""
        geometry = AttentionGeometry(
            index, self.num_query_heads, self.num_kv_heads, self.head_dim, self.head_dim, window=None
        )
        return LayerPlan(geometry, (pair.k,), (pair.v,))


@dataclass(frozen=True, config=STRICT)
class Pair:
    """The formats of keys and values under one name."""

    name: str
    k: Format
    v: Format

    def format(self, side: Side) -> Format:
        return self.k if side == "k" else self.v


RAW_PAIR = Pair("16", RAW, RAW)


def read_bytes(pair: Pair, heads: Heads, point: Point) -> int:
    """Bytes of cache that a decode step reads, ``point.context`` tokens before it and the new one."""
    return point.batch * heads.num_kv_heads * sum(side_read_bytes(side, pair, heads, point) for side in SIDES)


def side_read_bytes(side: Side, pair: Pair, heads: Heads, point: Point) -> int:
    """The same of the keys or values of one KV head of one sequence."""
    fmt = pair.format(side)
    pages = fmt.num_pages(point.context)
    record = fmt.layout(side, 1, heads.head_dim, CACHE_DTYPE, fmt.num_bits).record_bytes
    unquantized = point.context + 1 - pages * PAGE_TOKENS
    return pages * record + unquantized * heads.head_dim * ITEM_BYTES


def raw_bytes(heads: Heads, point: Point) -> int:
    """Bytes of the keys and values of ``point.context`` tokens in 16 bits: what the baselines read."""
    return 2 * point.batch * heads.num_kv_heads * point.context * heads.head_dim * ITEM_BYTES


def bits_per_value(pair: Pair, heads: Heads, point: Point) -> float:
    """Bits that are read per cached value, everything included."""
    return 16 * read_bytes(pair, heads, point) / raw_bytes(heads, point)
