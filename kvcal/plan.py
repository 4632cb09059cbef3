"""The KV quantization plan: per layer, how keys and values are stored, and the exact bytes that takes.

``nbytes`` is the one cost function: the allocator optimises it, ``inspect`` prints it, and the runtime's tensors
obey it (the runtime sizes its tensors with the same ``Format`` methods). The file format is specified in
docs/plan-format.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from kvcal import artifact
from kvcal.errors import ArtifactError
from kvcal.geometry import CACHE_DTYPES, AttentionGeometry, CacheDtype, Geometry, ModelIdentity, StateGeometry
from kvcal.quantizers.pages import AXES, PAGE_TOKENS, RAW_BITS, PageLayout
from kvcal.strict import STRICT, dump, parse

KIND = "kv-quantization-plan"
SCHEMA = 1

Side = Literal["k", "v"]
SIDES: tuple[Side, Side] = ("k", "v")


@dataclass(frozen=True, config=STRICT)
class Format:
    """How the keys, or the values, of one KV head are stored.

    A sequence is cut, from its first token on, into ``num_sink_tokens`` unquantized tokens, pages of 128 quantized
    tokens, and a buffer of unquantized tokens that always holds at least the last ``recent_window`` ones: a page is
    written when the buffer reaches ``recent_window`` + 128 tokens, once, and never again.
    16-bit heads store pages in the cache's dtype and need no sinks, window, axis or groups.
    """

    num_bits: Literal[1, 2, 3, 4, 8, 16]
    axis: Literal["channel", "token"] = "token"
    group_size: Literal[32, 64, 128] = 128
    num_sink_tokens: int = 0
    recent_window: int = 0
    param_dtype: Literal["float16", "bfloat16", "float32"] = "float16"

    def __post_init__(self) -> None:
        if self.num_sink_tokens < 0 or self.recent_window < 0:
            raise ValueError(
                f"num_sink_tokens = {self.num_sink_tokens} and recent_window = {self.recent_window} must be 0 or more"
            )
        if self.num_bits == RAW_BITS and (self.axis, self.group_size, self.num_sink_tokens, self.recent_window) != (
            "token", 128, 0, 0,
        ):  # fmt: skip
            raise ValueError("16-bit heads take no axis, group_size, num_sink_tokens or recent_window")

    @property
    def buffer_tokens(self) -> int:
        """Capacity of the unquantized buffer in tokens."""
        return self.recent_window + PAGE_TOKENS

    def num_pages(self, num_tokens: int) -> int:
        """Pages written once ``num_tokens`` tokens have been seen."""
        return max(0, num_tokens - self.num_sink_tokens - self.recent_window) // PAGE_TOKENS

    def layout(self, side: Side, head_dim: int, cache_dtype: str) -> PageLayout:
        """The record of one page of one head."""
        return PageLayout(side, self.num_bits, self.axis, self.group_size, head_dim, self.param_dtype, cache_dtype)

    def nbytes(self, side: Side, head_dim: int, cache_dtype: str, lengths: Sequence[int]) -> int:
        """Bytes that one KV head takes for sequences of the given lengths (tokens)."""
        token_bytes = head_dim * CACHE_DTYPES[cache_dtype].itemsize
        unquantized = (self.num_sink_tokens + self.buffer_tokens) * token_bytes
        pages = sum(self.num_pages(length) for length in lengths)
        return len(lengths) * unquantized + pages * self.layout(side, head_dim, cache_dtype).record_bytes


RAW = Format(num_bits=16)


@dataclass(frozen=True, config=STRICT)
class LayerPlan:
    """One caching layer. ``k`` and ``v`` hold one Format for all KV heads, or one for each; both are empty for
    layers that stay as the model has them: sliding windows (16 bits, bounded) and states."""

    geometry: AttentionGeometry | StateGeometry
    k: tuple[Format, ...] = ()
    v: tuple[Format, ...] = ()

    def __post_init__(self) -> None:
        sizes = asdict(self.geometry)
        if sizes.pop("index") < 0 or any(size is not None and size < 1 for size in sizes.values()):
            raise ValueError(f"layer {self.geometry.index} has a size that is not positive: {sizes}")
        for side in SIDES:
            count, formats = len(self.formats(side)), self.formats(side)
            if not self.is_paged:
                if count:
                    raise ValueError(f"layer {self.geometry.index} is bounded and takes no {side} formats")
            elif count not in (1, self.attention.num_kv_heads):
                raise ValueError(
                    f"layer {self.geometry.index} has {count} {side} formats, "
                    f"expected 1 or {self.attention.num_kv_heads}"
                )
            for fmt in formats:
                if fmt.num_bits != RAW_BITS and fmt.axis not in AXES[side]:
                    raise ValueError(
                        f"layer {self.geometry.index} has {side} axis {fmt.axis!r}, expected one of {AXES[side]}"
                    )

    @property
    def is_paged(self) -> bool:
        """Full attention: grows with tokens, stored in pages."""
        return isinstance(self.geometry, AttentionGeometry) and self.geometry.window is None

    @property
    def attention(self) -> AttentionGeometry:
        assert isinstance(self.geometry, AttentionGeometry)
        return self.geometry

    def formats(self, side: Side) -> tuple[Format, ...]:
        return self.k if side == "k" else self.v

    def head_formats(self, side: Side) -> tuple[Format, ...]:
        """One Format per KV head."""
        formats = self.formats(side)
        return formats if len(formats) > 1 else formats * self.attention.num_kv_heads

    def head_dim(self, side: Side) -> int:
        return self.attention.k_head_dim if side == "k" else self.attention.v_head_dim

    def side_nbytes(self, side: Side, cache_dtype: str, lengths: Sequence[int]) -> int:
        """Bytes of the paged keys or values of all heads."""
        formats = self.head_formats(side)
        return sum(fmt.nbytes(side, self.head_dim(side), cache_dtype, lengths) for fmt in formats)

    def nbytes(self, cache_dtype: str, lengths: Sequence[int], columns: int) -> int:
        """Bytes of the layer; ``columns`` is the padded length, which is what a sliding window holds."""
        if isinstance(self.geometry, StateGeometry):
            return self.geometry.bytes_per_sequence * len(lengths)
        if self.is_paged:
            return sum(self.side_nbytes(side, cache_dtype, lengths) for side in SIDES)
        window = self.geometry.window
        assert window is not None
        values = self.geometry.num_kv_heads * (self.geometry.k_head_dim + self.geometry.v_head_dim)
        return len(lengths) * min(columns, window - 1) * values * CACHE_DTYPES[cache_dtype].itemsize


def bare_layers(geometry: Geometry) -> tuple[LayerPlan, ...]:
    """Every layer unquantized: what the model caches by itself, in the cache's dtype."""
    return tuple(
        LayerPlan(layer, (RAW,), (RAW,))
        if isinstance(layer, AttentionGeometry) and layer.window is None
        else LayerPlan(layer)
        for layer in geometry.layers
    )


@dataclass(frozen=True, config=STRICT)
class Workload:
    """What a budget is for: ``batch`` sequences of ``context`` tokens each."""

    batch: int
    context: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.context < 1:
            raise ValueError(f"batch = {self.batch} and context = {self.context} must be 1 or more")

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.context,) * self.batch


@dataclass(frozen=True, config=STRICT)
class Plan:
    """A validated plan. ``provenance`` says what it was made from: recipe, seeds, data, library versions."""

    model: ModelIdentity
    cache_dtype: CacheDtype
    layers: tuple[LayerPlan, ...]
    workload: Workload
    provenance: dict[str, Any]

    def __post_init__(self) -> None:
        indices = [layer.geometry.index for layer in self.layers]
        if not indices or indices != sorted(set(indices)):
            raise ValueError(f"layers must be present, unique and in order, found indices {indices}")

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.model.model_type, self.cache_dtype, tuple(layer.geometry for layer in self.layers))

    def nbytes(self, lengths: Sequence[int], columns: int | None = None) -> int:
        """Exact bytes of the cache for sequences of these lengths (tokens), padded to ``columns`` (default: the
        longest). Equals ``PlanCache.nbytes`` at every length and batch."""
        columns = max(lengths) if columns is None else columns
        return sum(layer.nbytes(self.cache_dtype, lengths, columns) for layer in self.layers)

    @property
    def predicted_bytes(self) -> int:
        """Bytes at the plan's workload."""
        return self.nbytes(self.workload.lengths)

    def bits_per_value(self, workload: Workload | None = None) -> float:
        """Bits per cached value of the paged layers, everything included (scales, zeros, sinks, windows, buffers,
        padding), at ``workload`` (default: the plan's)."""
        workload = workload or self.workload
        paged = [layer for layer in self.layers if layer.is_paged]
        values = sum(p.attention.num_kv_heads * (p.attention.k_head_dim + p.attention.v_head_dim) for p in paged)
        nbytes = sum(layer.nbytes(self.cache_dtype, workload.lengths, workload.context) for layer in paged)
        return 8 * nbytes / (values * workload.batch * workload.context) if values else float(RAW_BITS)


def plan_bytes(plan: Plan) -> bytes:
    """The plan's file, the same in any process."""
    body = {**dump(plan), "predicted_bytes": plan.predicted_bytes}
    return artifact.to_bytes(artifact.Artifact(KIND, SCHEMA, inputs={}, body=body, tensors={}))


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan atomically. ArtifactError when the file cannot be written."""
    artifact.write_bytes_atomic(path, plan_bytes(plan))


def load_plan(path: str | Path) -> Plan:
    """Read and validate a plan.

    Raises:
        ArtifactError: missing, truncated, corrupt or foreign file; unknown version, key or tensor; missing or
            mis-shaped content; predicted bytes that are not what the layers take.
    """
    stored = artifact.read(path, KIND, SCHEMA)
    if stored.tensors:
        raise ArtifactError(f"{path}: unknown tensor {min(stored.tensors)!r}; a version {SCHEMA} plan holds none")
    body = dict(stored.body)
    predicted = body.pop("predicted_bytes", None)
    plan = parse(Plan, body, str(path), ArtifactError, hint="compile the plan again with this version of kvcal")
    # One spelling only: 2.0 or true for an integer, or a key left to its default, is not what this version writes.
    difference = artifact.differing_input(dump(plan), body)
    if difference is not None:
        raise ArtifactError(f"{path}: {difference}", hint="compile the plan again with this version of kvcal")
    if type(predicted) is not int or predicted != plan.predicted_bytes:
        raise ArtifactError(f"{path}: predicted_bytes = {predicted!r}, but its layers take {plan.predicted_bytes}")
    return plan
