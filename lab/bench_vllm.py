"""Tokens a second inside vLLM at equal memory of the cache: of plans that ship, and of vLLM's own caches.

    python lab/bench_vllm.py --caches kvcal bfloat16 fp8 --context 4096 8192 32768 --out speed.json
    python lab/bench_vllm.py --plan plan.safetensors --caches kvcal turboquant_4bit_nc --context 8192 --passes 8
    python lab/bench_vllm.py --shape hybrid --layers 48 --caches kvcal bfloat16 fp8 --bits 2.5 --context 32768
    python lab/bench_vllm.py --drafts 3 --caches kvcal bfloat16 fp8 --bits 2.5 --context 32768

Needs vLLM and kvcal[compile] in one environment. The model has Llama-3-8B's shape, maybe fewer layers, and
dummy weights; or that of Qwen3-Next, every fourth layer with full attention and the others with a state, whose
prompts Triton's kernels compute; but for dense layers in place of experts. With drafts a model of one layer
guesses tokens: tokens a second are one a request and step that verifies, and grow by what a real model accepts.

Plans are those of --plan, or what the default recipe makes of this shape at each of --bits (``shared``:
random where a calibration decides): in bases, with error feedback, sinks and windows. Prefixes are cached, as
they are by default. Prompts are of random lengths, so that requests are at random phases of their pages.

How caches take turns: ``turns``. A cache that vLLM does not serve is reported with vLLM's reason.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turns import (
    BATCHED,
    CACHE_BYTES,
    DRAFT,
    EVERY,
    PROFILED,
    WARM_STEPS,
    Prompts,
    first_tokens,
    main,
    shares_in,
    state_of,
)

BITS = {"fp8": 8, "int4_per_token_head": 4, "turboquant_4bit_nc": 4, "turboquant_3bit_nc": 3}  # scales aside


class ServedByVllm:
    """One engine with one cache of ``given.memory`` bytes, and of each of ``given.context``, one after the
    other, as many sequences as fit, of which the last tokens are made in ``given.passes`` of ``given.steps``,
    and then with a profiler."""

    def __init__(self, folder: Path, cache: str, given: argparse.Namespace) -> None:
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        from vllm import LLM

        from kvcal.engines.capacity import capacity as capacity_of
        from kvcal.engines.capacity import vllm_pool
        from kvcal.engines.shard import HeadShard
        from kvcal.plan.plan import load_plan

        self.given, self.traces = given, folder / f"{cache}.traces"
        path = folder / "plans" / f"{cache}.safetensors"
        plan = load_plan(path) if path.exists() else None
        is_tiny = given.shape == "tiny"
        shape = json.loads((folder / "config.json").read_text())
        draft = json.loads((folder / DRAFT / "config.json").read_text())
        layer, drafted = (
            2 * CACHE_BYTES[one["torch_dtype"]] * one["num_key_value_heads"] * one["head_dim"] for one in (shape, draft)
        )
        full = given.layers // EVERY if given.shape == "hybrid" else given.layers
        state, drafted = state_of(shape, given.drafts), drafted if given.drafts else 0

        def most_of(context: int) -> int:
            if plan is None:
                return given.memory * 16 // BITS.get(cache, 16) // (layer * full) // context
            capacity = capacity_of("vllm", plan, given.memory, 1, context, given.drafts, 0, state, drafted)
            return (capacity.num_blocks - 1) // capacity.blocks_per_request

        self.counts = {context: most_of(context) for context in given.context}
        most = max(self.counts.values())
        arguments: dict[str, Any] = {
            "model": str(folder), "dtype": "float32" if is_tiny else "bfloat16", "load_format": "dummy",
            "skip_tokenizer_init": True, "max_model_len": max(given.context), "max_num_seqs": most,
            "max_num_batched_tokens": BATCHED, "kv_cache_memory_bytes": given.memory, "gpu_memory_utilization": 0.15,
            "enable_prefix_caching": True, "disable_log_stats": True,
            "profiler_config": {
                "profiler": "torch", "torch_profiler_dir": str(self.traces), "torch_profiler_with_stack": False,
                "torch_profiler_activities": ["CPU" if is_tiny else "CUDA"],
            },
        }  # fmt: skip
        if given.drafts:
            drafts = {"method": "draft_model", "model": str(folder / DRAFT), "num_speculative_tokens": given.drafts}
            reads = {} if plan is None or is_tiny else {"attention_backend": "TRITON_ATTN"}  # blocks side by side
            arguments["speculative_config"] = drafts | reads
        arguments["additional_config"] = {"gdn_prefill_backend": "triton"} if given.shape == "hybrid" else {}
        if plan is not None:
            tokens = vllm_pool(HeadShard(plan, step_tokens=1 + given.drafts), state, draft_bytes=drafted).block_tokens
            arguments |= {"block_size": tokens}
            arguments["additional_config"] |= {"kvcal_plan": str(path)}
        elif cache != "bfloat16":
            arguments["kv_cache_dtype"] = cache
        if is_tiny:
            arguments |= {"enforce_eager": True, "compilation_config": {"custom_ops": ["none"]}}
        else:
            # vLLM captures none above max_num_seqs: more run eager.
            sizes = [(1 + given.drafts) * count for count in sorted({1, *range(8, most, 8), *self.counts.values()})]
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
            arguments |= {"compilation_config": graphs, "kernel_config": {"enable_jit_warmup": False}}
            arguments |= {"attention_backend": "KVCAL"} if plan is not None else {}
        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        config = self.engine.vllm_config
        if plan is None:
            blocks, size = config.cache_config.num_gpu_blocks - 1, config.cache_config.block_size
            # Of states vLLM has a group for each layer between two with full attention, and two blocks of each.
            beside = 2 * (EVERY - 1) if given.shape == "hybrid" else 0
            self.counts = {
                context: min(most, blocks // (-(-context // size) + beside)) for context, most in self.counts.items()
            }
        self.prompts, self.running, self.added = Prompts(folder), list[str](), 0

    def answers(self) -> Iterator[dict[str, Any]]:
        """See :class:`turns.Served`."""
        steps = self.given.passes * self.given.steps + PROFILED
        for context, count in self.counts.items():
            start = time.perf_counter()
            self.first_token_seconds(context // 2)  # warms up
            yield {"ready_s": time.perf_counter() - start}
            # While later prompts are computed, earlier ones already have new tokens.
            made = steps + 2 * WARM_STEPS * (self.given.passes + 1) + count * -(-context // BATCHED)
            room = (1 + self.given.drafts) * made
            prompt = context - room
            yield {"first_token_s": first_tokens(lambda prompt=prompt: self.first_token_seconds(prompt))}
            start = time.perf_counter()
            self.fill(count, prompt, room)
            yield {"sequences": count, "prompt": prompt, "fill_s": time.perf_counter() - start}
            for _ in range(self.given.passes):
                tokens, seconds = self.make(self.given.steps)
                yield {"tokens_per_s": tokens / sum(seconds), "step_s": seconds}
            yield self.profile()
            self.finish()

    def add(self, count: int, ids: list[int]) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        self.running.append(str(self.added))
        self.engine.add_request(self.running[-1], {"prompt_token_ids": ids}, sampling)
        self.added += 1

    def first_token_seconds(self, prompt: int) -> float:
        """Of one prompt alone."""
        self.add(1, self.prompts.of(prompt))
        start = time.perf_counter()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.running.clear()
        return time.perf_counter() - start

    def fill(self, count: int, prompt: int, room: int) -> None:
        """Computes the prompts of all sequences that fit, at random phases of a page."""
        for _ in range(count):
            self.add(room, self.prompts.below(prompt))
        begun: set[str] = set()
        while len(begun) < count:
            begun |= {output.request_id for output in self.engine.step()}
        self.llm.sleep(level=0, mode="keep")

    def make(self, steps: int) -> tuple[int, list[float]]:
        """New tokens, and seconds of each step. The engine is paused before and after; it may be a step or
        two ahead of what it has said."""
        tokens, seconds = 0, []
        self.llm.wake_up(["scheduling"])
        for _ in range(WARM_STEPS):
            self.engine.step()
        for _ in range(steps):
            start = time.perf_counter()
            tokens += len(self.engine.step())
            seconds.append(time.perf_counter() - start)
        self.llm.sleep(level=0, mode="keep")
        return tokens, seconds

    def profile(self) -> dict[str, float]:
        """Shares of the GPU's time in some steps, by kernels."""
        self.llm.start_profile()
        self.make(PROFILED)
        self.llm.stop_profile()
        return shares_in(self.traces)

    def finish(self) -> None:
        """Ends all sequences."""
        self.engine.abort_request(self.running)
        self.running.clear()
        self.llm.wake_up(["scheduling"])
        while self.engine.has_unfinished_requests():
            self.engine.step()


if __name__ == "__main__":
    main(__doc__, ServedByVllm, "a --kv-cache-dtype of vLLM")
