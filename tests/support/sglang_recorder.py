"""A record of SGLang, step by step: a plug-in of the tests, which writes a line of JSON for every step to
the file that the environment names."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import attention_recorder

VARIABLE, PAGE = "KVCAL_TEST_STEPS", 128
_generations: dict[str, int] = {}  # of each request's row when it was last seen
_available = 0


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    attention_recorder.register()
    worker = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
    HookRegistry.register(worker, _recorded, HookType.AROUND)
    sizes, of = "sglang.srt.model_executor.pool_configurator", "calculate_pool_sizes"
    for kind in ("DefaultPoolConfigurator", "HybridSWAPoolConfigurator", "SWARequestCapPoolConfigurator"):
        HookRegistry.register(f"{sizes}.{kind}.{of}", _sized, HookType.AROUND)
    profile = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes"
    HookRegistry.register(profile, _profiled, HookType.AROUND)
    if "KVCAL_TEST_CONVOLUTIONS" in os.environ:
        import sglang_convolutions

        for name in ("causal_conv1d_fn", "causal_conv1d_update"):
            HookRegistry.register(
                f"sglang.srt.models.lfm2.{name}", getattr(sglang_convolutions, name), HookType.REPLACE
            )
    if "KVCAL_TEST_DRAFTS" in os.environ:
        import sglang_draft_backends

        factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
        for name in ("decode", "extend"):
            target = f"{factory}.create_{'draft_extend' if name == 'extend' else name}_backend"
            HookRegistry.register(target, getattr(sglang_draft_backends, f"{name}_backend"), HookType.REPLACE)
        last = "sglang.srt.mem_cache.allocation.get_last_loc"  # by a kernel for GPUs, but for some backends
        HookRegistry.register(last, sglang_draft_backends.last_places, HookType.REPLACE)


def _profiled(original: Any, configurator: Any, before: int) -> int:
    """What SGLang does first of all that it does for the cache."""
    global _available
    if "KVCAL_TEST_IMAGES" in os.environ:  # a model of text, as if it were one of images
        configurator.model_config.is_multimodal, configurator.model.prepare_attn_masks = True, None
    _available = original(configurator, before)
    return _available


def _sized(original: Any, sizes: Any, nbytes: int, page_size: int) -> Any:
    """Of the memory that SGLang measured, before anything is taken off."""
    found = original(sizes, nbytes, page_size)
    in_windows = found.swa_max_total_num_tokens
    windows = "" if in_windows is None else f" and {in_windows} of windows"
    print(f"{_available} bytes hold {found.max_total_num_tokens} tokens{windows}", file=sys.stderr, flush=True)
    return found


def _recorded(original: Any, worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.runtime_context import get_parallel

    if batch is not None and VARIABLE in os.environ and get_parallel().tp_rank == 0:
        with open(os.environ[VARIABLE], "a") as file:
            file.write(json.dumps(_step(batch)) + "\n")
    return original(worker, batch, *args, **kwargs)


def _step(batch: Any) -> list[list[Any]]:
    """Of each request, as ``engine_replay.Replay`` has it: its name, first token, count, pages, no drafts,
    and whether it begins with this step, in a row that it did not have."""
    if batch.forward_mode.is_decode():
        places = [(length - 1, 1) for length in batch.seq_lens_cpu.tolist()]
    else:
        places = list(zip(batch.prefix_lens, batch.extend_lens, strict=True))
    rows = batch.req_to_token_pool.req_to_token[batch.req_pool_indices, ::PAGE].cpu() // PAGE
    step = []
    generations = batch.req_to_token_pool.req_generation[batch.req_pool_indices.cpu()].tolist()
    for request, (first, count), row, generation in zip(batch.reqs, places, rows, generations, strict=True):
        begins = _generations.get(request.rid) != generation
        _generations[request.rid] = generation
        step.append([request.rid, first, count, row[: -(-(first + count) // PAGE)].tolist(), 0, count, begins])
    return step
