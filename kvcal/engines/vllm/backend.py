"""The attention backend: vLLM's metadata of a batch, as the core's decodes and chunks.

vLLM puts requests with one new token, or several to be verified, first. They are decodes, served by one call;
every other request is a chunk of its own. All tokens are stored before any attention is computed: vLLM lets a
request begin after blocks that another one fills in the same step.

A batch of decodes alone, of equally many tokens, may be captured in a CUDA graph: what changes from step to
step lies in tensors of fixed addresses, which are written while the metadata is built, outside of the graph.

Besides the full-attention layers of a plan there is a layer with the rings of all of them (rings.py), and one
with their shared sinks where prefixes are cached. Layers with a sliding window are vLLM's, but for the size
of their blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import KVCacheLayout

from kvcal.engines.capacity import WINDOW_BLOCKS
from kvcal.engines.prefill import Logits
from kvcal.engines.scratch import Chunk, Decoded, Decodes, Tail
from kvcal.engines.step import PagedStep
from kvcal.engines.support import BOTH_WAYS, WITHOUT_IMAGES
from kvcal.engines.vllm import BACKEND
from kvcal.engines.vllm.rings import RingLayer, as_bytes
from kvcal.engines.vllm.serving import Begun, Serving, latest, logger
from kvcal.errors import ArtifactError, UnsupportedModel, UsageError
from kvcal.pages.layout_protocol import PAGE_TOKENS


class PlanLayer:
    """Attachment of one of vLLM's attention layers with pages: its step, and where it lies in blocks and
    rings."""

    def __init__(self, serving: Serving, attention: Any, config: VllmConfig) -> None:
        """ArtifactError where the layer is not in the plan, or has other heads; UnsupportedModel where more
        is asked of its attention."""
        self.index, self.serving = _planned(serving, attention), serving
        if any(layer.index == self.index for layer in serving.layers):
            raise ArtifactError(f"vLLM makes a second layer {self.index}, {attention.layer_name}")
        _require_asked(attention, config)
        self.step = PagedStep(serving.shard, self.index, serving.scratch)
        self._first = serving.pool.pages.at[self.index][1]
        self._ring_block, self._first_of_ring = serving.pool.rings.at[self.index]
        serving.make_rings(attention, config)
        serving.layers.append(self)
        self._bound: tuple[Tensor, Tensor] | None = None

    def bind(self) -> None:
        """vLLM's memory of all layers, as it is now. The shares of all layers follow the first one's. UnsupportedModel
        for more of it than pages have numbers."""
        first, rings = self.serving.first.kv_cache, self.serving.ring.kv_cache
        if self._bound is None or self._bound[0] is not first or self._bound[1] is not rings:
            self._bound, own, pool = (first, rings), as_bytes(first), self.serving.pool
            unit, *_ = self.serving.page_numbers
            count = 1 + self.serving.pages_of([len(own) - 1])[-1]
            if count > torch.iinfo(torch.int32).max:
                raise UnsupportedModel(f"{own.stride(0) * len(own)} bytes of blocks, with pages at {unit} bytes each")
            pages = own.as_strided((count, pool.pages.block_bytes), (unit, 1))
            self.step.bind(pages[:, self._first :], as_bytes(rings)[:, self._first_of_ring :])
            self.serving.bound(self.index, own)

    def rings(self) -> Tensor:
        """int32 [B]: the blocks that have the ring of every request of the batch."""
        return _metadata(self.serving.ring).rings[self._ring_block]

    def share_sinks(self, rings: Tensor) -> None:
        """After a step has stored all tokens: sinks of first pages to their blocks, and to requests after
        them."""
        if self.serving.sinks:
            layer = self.serving.sinks[self.serving.pool.sinks.at[self.index][0]]
            _metadata(layer).copy(self.index, rings)

    def begin(self) -> None:
        """Windows of the requests that begin with this step, after sinks are in their rings."""
        self.bind()
        for one in self.serving.begun:
            self.step.begin(Chunk(one.num_past, one.table, self._ring_of(one)), one.total)

    def tail(self, chunk: Chunk, tail: Tail) -> Tail:
        """The ``tail`` of a chunk; where a request begins with it, of pages that another may have filled just
        now."""
        for one in (one for one in self.serving.begun if one.num_past == chunk.num_past):
            tail = self.step.begun_tail(chunk, tail, chunk.ring == self._ring_of(one))
        return tail

    def _ring_of(self, one: Begun) -> Tensor:
        return one.rings[self._ring_block : self._ring_block + 1]


def _metadata(layer: RingLayer) -> Any:
    """RingMetadata or SinkMetadata of the step."""
    by_layer: Any = get_forward_context().attn_metadata
    return by_layer[layer.name]


def attach_window(serving: Serving, attention: Any) -> None:
    """Blocks of a plan for a layer with a sliding window, whose attention and memory are vLLM's own. ArtifactError as
    of ``PlanLayer``; UnsupportedModel for attention that cannot read such blocks."""
    _planned(serving, attention)
    hint = '--attention-config \'{"backend_per_kind": {"sliding_window": "TRITON_ATTN"}}\''
    _require_side_by_side(attention, "the sliding window", hint)
    attention.attn_backend = _in_small_blocks(attention.attn_backend)


@functools.cache
def _in_small_blocks(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """The backend, with blocks of as many tokens as waste least besides a plan's pages."""

    def customize_spec(cls: Any, spec: Any) -> Any:
        serving = latest()
        if spec.block_size > 1 and serving is not None:
            sizes = backend.get_supported_kernel_block_sizes(spec)
            taken = [n for n in WINDOW_BLOCKS if any(n % size.base == 0 if hasattr(size, "base") else n == size
                                                     for size in sizes)]  # fmt: skip
            spec = dataclasses.replace(spec, block_size=serving.pool.window(spec.sliding_window, taken).tokens)
        return backend.customize_spec(spec)

    name = f"{backend.__qualname__}InSmallBlocks"
    return type(name, (backend,), {"customize_spec": classmethod(customize_spec), "__module__": __name__})


def require_draft(attention: Any) -> None:
    """UnsupportedModel unless a layer of a model that drafts can lie next to a plan's in the same blocks: its
    attention and memory are vLLM's own."""
    if attention.kv_sharing_target_layer_name is not None:
        raise UnsupportedModel(f"drafts of {attention.layer_name} read keys that a plan has packed")
    hint = '--speculative-config \'{"attention_backend": "TRITON_ATTN", …}\''
    _require_side_by_side(attention, "drafts", hint)


def _require_side_by_side(attention: Any, what: str, hint: str) -> None:
    backend = attention.attn_backend
    layouts = backend.supported_kv_cache_layouts()
    if layouts is not None and KVCacheLayout.BLHNC not in layouts:
        raise UnsupportedModel(
            f"vLLM serves {what} of {attention.layer_name} with {backend.get_name()}, which does not read blocks of "
            "layers that lie side by side, as a plan's do",
            hint=f"another one: {hint}",
        )


def _planned(serving: Serving, attention: Any) -> int:
    """The plan's layer that is one of vLLM's."""
    index = extract_layer_index(attention.layer_name)
    if index not in serving.geometries:
        raise ArtifactError(f"vLLM's layer {attention.layer_name} is not in the plan {serving.path}")
    planned = serving.geometries[index]
    expected = (planned.num_query_heads, planned.num_kv_heads, planned.k_head_dim, planned.window)
    found = (attention.num_heads, attention.num_kv_heads, attention.head_size, attention.sliding_window)
    if found != expected:
        raise ArtifactError(
            f"vLLM's layer {attention.layer_name} has {found[0]} query heads and {found[1]} KV heads of size "
            f"{found[2]}, and the window {found[3]}; the plan has {expected[0]}, {expected[1]} of {expected[2]} "
            f"and the window {expected[3]} there"
        )
    return index


def _require_asked(attention: Any, config: VllmConfig) -> None:
    """UnsupportedModel unless the backend can do what vLLM would ask of it before it chose it by itself."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    asked = AttentionSelectorConfig(
        attention.head_size, torch.get_default_dtype(), attention.kv_cache_dtype, config.cache_config.block_size,
        has_sink=attention.has_sink, use_mm_prefix=attention.use_mm_prefix, attn_type=attention.attn_type,
        use_non_causal=config.attention_config.use_non_causal, use_batch_invariant=envs.VLLM_BATCH_INVARIANT,
        use_kv_connector=transfer is not None and transfer.is_kv_transfer_instance,
        use_pcp=parallel.prefill_context_parallel_size > 1, use_dcp=parallel.decode_context_parallel_size > 1,
        use_rswa=config.model_config.rswa_window is not None,
    )  # fmt: skip
    device = current_platform.get_device_capability()
    if reasons := PlanBackend.validate_configuration(device_capability=device, **asked._asdict()):
        reason = BOTH_WAYS if attention.use_mm_prefix else f"attention of {attention.layer_name} is more than a plan's"
        options = """--language-model-only, or --limit-mm-per-prompt '{"image": 0}'"""
        raise UnsupportedModel(
            f"{reason}: {'; '.join(reasons)}", hint=f"{WITHOUT_IMAGES} {options}" if attention.use_mm_prefix else None
        )


class NewTokens(NamedTuple):
    """A request with more than one new token: its row of the batch, its rows of the queries, tokens
    before."""

    row: int
    tokens: slice
    num_past: int


@dataclass
class PlanMetadata(AttentionMetadata):
    """``lengths`` int32 [B]: tokens of every request before the step; ``table`` int32 [B, pages]: a block's
    pages one after the other."""

    decoded: Decoded
    lengths: Tensor
    table: Tensor
    chunks: list[NewTokens]


class PlanMetadataBuilder(AttentionMetadataBuilder[PlanMetadata]):
    """See the module's docstring."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._lengths = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)
        attention: Any = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._serving: Serving = attention.kvcal_layer.serving
        self._table = torch.zeros(0, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PlanMetadata:
        given, batch = common_attn_metadata, common_attn_metadata.num_reqs
        self._serving.scratch.report_errors(logger)
        starts = given.query_start_loc_cpu[: batch + 1]
        counts = starts[1:] - starts[:-1]
        lengths = self._lengths[:batch]
        torch.sub(given.seq_lens[:batch], (given.query_start_loc[1:] - given.query_start_loc[:-1])[:batch], out=lengths)
        lengths.clamp_(min=0)  # of padding
        table = self._pages_of(given.block_table_tensor)
        if given.max_query_len <= 1:
            return PlanMetadata(Decoded(batch), lengths, table, [])
        most = self._serving.shard.step_tokens
        num_decodes = int(((counts > 0) & (counts <= most)).int().cumprod(0).sum())
        decoded = Decoded.of_counts(counts[:num_decodes], most, lengths.device)
        assert given.seq_lens_cpu_upper_bound is not None, "vLLM gives exact lengths of requests with a prompt"
        totals, bounds = given.seq_lens_cpu_upper_bound.tolist(), starts.tolist()
        chunks = [
            NewTokens(row, slice(bounds[row], bounds[row + 1]), totals[row] - bounds[row + 1] + bounds[row])
            for row in range(num_decodes, batch)
            if bounds[row] < bounds[row + 1]
        ]
        return PlanMetadata(decoded, lengths, table, chunks)

    def _pages_of(self, blocks: Tensor) -> Tensor:
        """The numbers of every request's pages, int32 [B, pages], by its blocks, int32 [B, blocks]; at a fixed
        address."""
        count = self._serving.pool.pages_per_block
        if count == 1:
            return blocks
        rows, width, (_, of_block, of_page) = (
            self._lengths.shape[0],
            blocks.shape[1] * count,
            self._serving.page_numbers,
        )
        if self._table.shape != (rows, width):
            self._table = torch.zeros(rows, width, dtype=torch.int32, device=blocks.device)
            self._page = of_page * torch.arange(count, dtype=torch.int32, device=blocks.device)
        table = self._table[: len(blocks)]
        torch.add(self._page, blocks.unsqueeze(2), alpha=of_block, out=table.unflatten(1, (-1, count)))
        return table

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PlanMetadata:
        """Of requests without a past: no page is read while a graph is captured."""
        found = self.build(0, common_attn_metadata)
        found.lengths.zero_()
        return found


class PlanImpl(AttentionImpl[PlanMetadata]):
    """Attention of one layer, by the step that is attached to it."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """UsageError for attention that is more than the plan's: ALiBi, shared layers, encoders."""
        refused = {
            "ALiBi": alibi_slopes is not None,
            f"attention of the kind {attn_type!r}": attn_type != AttentionType.DECODER,
            "keys and values of another layer": kv_sharing_target_layer_name is not None,
        }
        for reason, is_there in refused.items():
            if is_there:
                raise UsageError(f"a layer of this model has {reason}, which is not served with a plan")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.kv_cache_dtype, self.sinks = float(scale), kv_cache_dtype, sinks
        self.logits = Logits(self.scale, logits_soft_cap or 0.0, sinks)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PlanMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [tokens, H, D], key and value [tokens, N, D] -> output [tokens, H, D]; padding after the
        tokens of the batch is left as it is."""
        plan: PlanLayer = layer.kvcal_layer
        if attn_metadata is None:  # vLLM measures the memory of a model without a cache
            plan.step.warm_up(len(query), query.dtype)
            return output.fill_(0)
        plan.bind()
        rings = plan.rings()
        decoded, table = attn_metadata.decoded, attn_metadata.table
        count = decoded.requests
        step = plan.step
        decodes = Decodes(attn_metadata.lengths[:count], table[:count], rings[:count])
        if count:
            queries = step.append(decoded.of_rows(query), decoded.of_rows(key), decoded.of_rows(value), decodes)
        stored = []
        for row, tokens, num_past in attn_metadata.chunks:
            chunk = Chunk(num_past, table[row], rings[row : row + 1])
            stored.append((tokens, chunk, step.store(query[tokens], key[tokens], value[tokens], chunk)))
        if stored:
            plan.share_sinks(rings)
            plan.begin()
        if count:
            decoded.to_rows(step.attend(queries, decodes, self.logits, query.dtype), output)
        for tokens, chunk, held in stored:
            held = held._replace(tail=plan.tail(chunk, held.tail))
            output[tokens] = step.attend_chunk(held, chunk, self.logits, query.dtype)
        return output


class PlanBackend(AttentionBackend):
    """The attention backend, as vLLM asks for it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type[PlanImpl]:
        return PlanImpl

    @staticmethod
    def get_builder_cls() -> type[PlanMetadataBuilder]:
        return PlanMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Blocks of several pages stay whole."""
        return [PAGE_TOKENS if kv_cache_spec is None else kv_cache_spec.block_size]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Of a layer's share of a block: one head slot of one state, so that it is bytes to vLLM. All layers have
        equal shares.

        vLLM makes blocks so long that attention takes as many bytes as a state. It asks with one token: as many
        bytes of it as leave the blocks as they are. UnsupportedModel where it has made them longer all the same."""
        serving = latest()
        if serving is None:
            return spec
        pool = serving.pool
        if spec.block_size > 1 and spec.block_size != pool.block_tokens:
            raise UnsupportedModel(
                f"vLLM has made blocks of {pool.block_tokens} tokens longer, {spec.block_size}, as the first layer "
                "with keys is none of the plan's pages"
            )
        if spec.block_size > 1:
            given = {"tokens_per_state": PAGE_TOKENS, "state_content_bytes": pool.share_bytes}
        elif pool.state_bytes:
            given = {"state_content_bytes": pool.state_bytes // pool.block_tokens}
        else:
            return spec
        return dataclasses.replace(spec, dtype=torch.uint8, num_head_slots=1, **given)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks of layers of unequal bytes lie side by side."""
        return (KVCacheLayout.BLHNC,)
