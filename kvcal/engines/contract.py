"""The contract with each engine: every class, method, parameter and field of its code that the plug-in uses.

Engines change between versions, and what a plug-in holds on to is not all public. So it is written down here, with the
oldest version that has it, and compared with the installed engine: by ``kvcal doctor --engine`` before serving, and at
every start. Reading it imports the engine.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from kvcal.errors import UnsupportedModel, UsageError


@dataclass(frozen=True)
class Part:
    """``name`` of ``module``: a class, function, method or enum member, dots between. It takes ``parameters``; it has
    ``fields`` (of a dataclass, or set by its ``__init__``)."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """The part of it that the installed engine lacks; None for nothing."""
        try:
            found: Any = importlib.import_module(self.module)
            for step in self.name.split("."):
                found = getattr(found, step)
        except (ImportError, AttributeError) as error:
            return f"{self.module}.{self.name} ({' '.join(str(error).split())})"
        if self.parameters:
            taken = inspect.signature(found).parameters
            lacking = [name for name in self.parameters if name not in taken]
            if lacking:
                return f"{self.module}.{self.name} without the parameter {', '.join(lacking)}"
        lacking = [name for name in self.fields if name not in _fields(found)]
        return f"{self.module}.{self.name} without the field {', '.join(lacking)}" if lacking else None


def _fields(cls: Any) -> set[str]:
    """Fields of a dataclass and of its bases, properties, and all that ``__init__`` names."""
    names = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    init = getattr(inspect.unwrap(cls.__init__), "__code__", None)
    return names | set(init.co_names if init else ()) | set(dir(cls))


@dataclass(frozen=True)
class Contract:
    """``oldest``: the first version that has all parts; ``tried``: versions in which the tests serve plans."""

    oldest: str
    tried: tuple[str, ...]
    parts: tuple[Part, ...]


BACKEND, CACHE = "vllm.v1.attention.backend", "vllm.v1.kv_cache_interface"
CONTRACTS = {
    "vllm": Contract(
        "0.32.0",
        ("0.32.0", "0.33.0"),
        (
            Part("vllm.v1.attention.backends.registry", "register_backend", ("backend", "class_path")),
            Part("vllm.v1.attention.backends.registry", "AttentionBackendEnum.__members__"),
            Part(
                "vllm.model_executor.layers.attention", "Attention",
                ("num_heads", "head_size", "scale", "attn_backend"),
                ("layer_name", "num_heads", "num_kv_heads", "head_size", "sliding_window"),
            ),
            Part("vllm.model_executor.layers.attention", "Attention.get_kv_cache_spec", ("vllm_config",)),
            Part("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase.get_kv_cache_spec"),
            Part("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase.get_attn_backend"),
            Part("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase.bind_kv_cache", ("kv_cache",)),
            Part("vllm.model_executor.models.utils", "extract_layer_index"),
            Part("vllm.forward_context", "get_forward_context"),
            Part("vllm.forward_context", "ForwardContext", fields=("attn_metadata",)),
            Part("vllm.config", "get_current_vllm_config"),
            Part(
                "vllm.config", "VllmConfig",
                fields=(
                    "additional_config", "attention_config", "cache_config", "compilation_config", "device_config",
                    "kv_transfer_config", "model_config", "parallel_config", "scheduler_config", "speculative_config",
                ),
            ),
            Part("vllm.config", "AttentionConfig", fields=("backend",)),
            Part("vllm.config", "CacheConfig", fields=("block_size", "cache_dtype", "enable_prefix_caching")),
            Part("vllm.config", "CompilationConfig", fields=("static_forward_context",)),
            Part("vllm.config", "DeviceConfig", fields=("device",)),
            Part(
                "vllm.config", "ModelConfig",
                fields=("model", "hf_text_config", "get_total_num_kv_heads", "get_head_size",
                        "max_model_len"),
            ),
            Part(
                "vllm.config", "ParallelConfig", fields=("pipeline_parallel_size", "decode_context_parallel_size"),
            ),
            Part("vllm.config", "SchedulerConfig", fields=("max_num_seqs",)),
            Part(
                "vllm.config", "SpeculativeConfig",
                fields=("method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"),
            ),
            Part("vllm.distributed", "get_tensor_model_parallel_rank"),
            Part("vllm.distributed", "get_tensor_model_parallel_world_size"),
            Part("vllm.distributed", "get_world_group"),
            Part("vllm.distributed.parallel_state", "GroupCoordinator", fields=("world_size", "cpu_group")),
            Part(
                CACHE, "FullAttentionSpec",
                fields=("dtype", "num_head_slots", "tokens_per_state", "state_content_bytes"),
            ),
            Part(
                CACHE, "CircularBufferSpec",
                ("block_size", "num_kv_heads", "head_size", "dtype", "num_head_slots", "tokens_per_state",
                 "state_content_bytes"),
            ),
            Part(CACHE, "KVCacheLayout.BLHNC"),
            Part("vllm.v1.attention.backends.fa_utils", "get_flash_attn_version"),
            Part(BACKEND, "AttentionBackend.get_supported_kernel_block_sizes"),
            Part(BACKEND, "AttentionBackend.supported_kv_cache_layouts"),
            Part(BACKEND, "AttentionBackend.supports_sink"),
            Part(BACKEND, "AttentionBackend.forward_includes_kv_cache_update"),
            Part(BACKEND, "AttentionType.DECODER"),
            Part(BACKEND, "AttentionMetadata"),
            Part(BACKEND, "AttentionCGSupport.UNIFORM_BATCH"),
            Part(
                BACKEND, "AttentionMetadataBuilder", ("kv_cache_spec", "layer_names", "vllm_config", "device"),
                ("_cudagraph_support", "build_for_cudagraph_capture"),
            ),
            Part(
                BACKEND, "AttentionMetadataBuilder._init_reorder_batch_threshold",
                ("reorder_batch_threshold", "supports_spec_as_decode"),
            ),
            Part(
                BACKEND, "AttentionMetadataBuilder.build", ("common_prefix_len", "common_attn_metadata", "fast_build"),
            ),
            Part(
                BACKEND, "CommonAttentionMetadata",
                fields=("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs",
                        "max_query_len", "block_table_tensor"),
            ),
            Part(
                BACKEND, "AttentionImpl.forward",
                ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
                 "output_block_scale"),
            ),
            Part(
                BACKEND, "AttentionImpl",
                ("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
                 "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
            ),
        ),
    ),
    "sglang": Contract(
        "0.5.23",
        ("0.5.23",),
        (
            Part("sglang.srt.layers.attention.attention_registry", "register_attention_backend", ("name",)),
            Part("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
            Part("sglang.srt.plugins.hook_registry", "HookType.AROUND"),
            Part("sglang.srt.server_args", "add_attention_backend_choices"),
            Part(
                "sglang.srt.server_args", "ServerArgs",
                fields=("attention_backend", "page_size", "kv_cache_dtype", "max_running_requests",
                        "prefill_attention_backend", "decode_attention_backend", "pp_size", "speculative_algorithm",
                        "disaggregation_mode", "enable_hierarchical_cache"),
            ),
            Part("sglang.srt.model_executor.cuda_graph_config", "check_cuda_graph_backend", ("phase", "backend")),
            Part("sglang.srt.model_executor.cuda_graph_config", "Backend", fields=("BREAKABLE", "DISABLED")),
            Part("sglang.srt.model_executor.cuda_graph_config", "Phase", fields=("DECODE", "PREFILL")),
            Part("sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator._resolve_kv_pool_class",
                 ("kind", "default")),
            Part(
                "sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator",
                ("server_args", "model_config", "device", "use_mla_backend"),
            ),
            Part("sglang.srt.model_executor.pool_configurator", "DefaultPoolConfigurator._compute_cell_size",
                 ("kvc", "num_layers")),
            Part("sglang.srt.model_executor.pool_configurator", "DefaultPoolConfigurator", ("kvc",),
                 ("_cell_size", "_fixed_overhead_bytes")),
            Part("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool._create_buffers"),
            Part("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool._init_data_ptrs_and_strides"),
            Part("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.get_kv_size_bytes"),
            Part("sglang.srt.mem_cache.memory_pool", "ReqToTokenPool", fields=("req_to_token",)),
            Part("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend.init_forward_metadata_out_graph",
                 ("forward_batch", "in_capture")),
            Part("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend.init_forward_metadata_in_graph",
                 ("forward_batch",)),
            Part("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend.init_cuda_graph_state",
                 ("max_bs", "max_num_tokens")),
            Part("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend.get_cuda_graph_seq_len_fill_value"),
            Part("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend.forward_decode",
                 ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")),
            Part("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend.forward_extend",
                 ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")),
            Part(
                "sglang.srt.layers.radix_attention", "RadixAttention", ("sliding_window_size", "attn_type"),
                ("tp_q_head_num", "tp_k_head_num", "tp_v_head_num", "qk_head_dim", "v_head_dim", "scaling", "layer_id",
                 "logit_cap", "is_cross_attention"),
            ),
            Part(
                "sglang.srt.model_executor.forward_batch_info", "ForwardBatch",
                fields=("req_pool_indices", "seq_lens", "forward_mode", "extend_prefix_lens_cpu",
                        "extend_seq_lens_cpu"),
            ),
            Part("sglang.srt.model_executor.forward_batch_info", "ForwardMode.is_idle"),
            Part("sglang.srt.model_executor.forward_batch_info", "ForwardMode.is_decode"),
            Part("sglang.srt.runtime_context", "get_parallel"),
            Part("sglang.srt.distributed", "get_tp_group"),
            Part(
                "sglang.srt.distributed.parallel_state", "GroupCoordinator", fields=("world_size", "cpu_group")
            ),
            Part(
                "sglang.srt.configs.model_config", "ModelConfig",
                fields=("hf_text_config", "model_path", "get_total_num_kv_heads"),
            ),
        ),
    ),
}  # fmt: skip


def missing_parts(engine: str) -> list[str]:
    """Parts that the installed version of an engine lacks; nothing if plans can be served in it.

    Raises:
        UsageError: an engine without a plug-in, or one that is not installed.
    """
    if engine not in CONTRACTS:
        raise UsageError(f"no plug-in for the engine {engine!r}; allowed: {', '.join(CONTRACTS)}")
    contract = CONTRACTS[engine]
    try:
        found = version(engine)
    except PackageNotFoundError:
        raise UsageError(f"{engine} is not installed in this environment", hint=f"pip install {engine}") from None
    missing = []
    if Version(found) < Version(contract.oldest):
        missing.append(f"version {found}, expected {contract.oldest} or newer")
    return missing + [text for part in contract.parts if (text := part.missing()) is not None]


def require_parts(engine: str) -> None:
    """UnsupportedModel (exit code 4) unless plans can be served in the installed version of an engine."""
    missing = missing_parts(engine)
    if missing:
        raise UnsupportedModel(
            f"plans cannot be served in {engine} {version(engine)}, which lacks {'; '.join(missing)}",
            hint=f"tried versions: {', '.join(CONTRACTS[engine].tried)}",
        )
