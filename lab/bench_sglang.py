"""Tokens a second inside SGLang at equal memory of the cache: of plans that ship, and of SGLang's own caches.

    python lab/bench_sglang.py --caches kvcal bfloat16 fp8_e4m3 --context 4096 8192 32768 --out speed.json
    python lab/bench_sglang.py --bits 2.5 --caches kvcal bfloat16:triton fp8_e4m3:triton --context 8192

Needs SGLang and kvcal[compile] in one environment. The model has Llama-3-8B's shape, maybe fewer layers, and
dummy weights. Plans are those of --plan, or what the default recipe makes of this shape at each of --bits
(``shared``: random where a calibration decides): in bases, with error feedback, sinks and windows. Prefixes
are cached, as they are by default. Prompts are of random lengths, so that requests are at random phases of
their pages.

How caches take turns: ``turns``. SGLang's own caches have the attention backend that it takes by itself, or
the one after the colon. A context has an engine of its own, with as many rings as sequences fit. Steps are
timed in SGLang's scheduler, from the results of one to the next one's, by its own hooks. Graphs are of steps
that only decode.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from turns import BATCHED, CACHE_BYTES, PAGE, PROFILED, WARM_STEPS, Prompts, first_tokens, main, shares_in

from kvcal.engines.capacity import Capacity, capacity
from kvcal.engines.sglang import BACKEND, PLAN_VARIABLE
from kvcal.errors import InfeasibleBudget
from kvcal.plan.plan import Plan, load_plan

STEPS_VARIABLE = "KVCAL_BENCH_STEPS"  # a file: when each step ended, and its requests, if it only decodes
BITS = {"fp8_e4m3": 8, "fp8_e5m2": 8}
MOST = 1024  # sequences
LATE_STEPS = 20  # at most, until the scheduler has heard that it shall pause
FULL_STEPS = 50  # without another prompt: no more fit
POLL_SECONDS = 0.0005


class Step(NamedTuple):
    """``sequences``: 0 where prompts were computed."""

    ended: float
    sequences: int


def schedule(*given: Any) -> None:
    """SGLang's process that schedules, and writes down its steps."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    results = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
    HookRegistry.register(results, write_step, HookType.AROUND)
    run_scheduler_process(*given)


def write_step(original: Any, scheduler: Any, batch: Any, *given: Any) -> None:
    sequences = len(batch.reqs) if batch.forward_mode.is_decode() else 0
    original(scheduler, batch, *given)
    with open(os.environ[STEPS_VARIABLE], "a") as file:
        file.write(f"{time.perf_counter()} {sequences}\n")


def fitting(plan: Plan, memory: int, context: int) -> tuple[int, Capacity]:
    """Sequences that fit with a ring each, and the capacity with so many rings."""

    def is_too_much(count: int) -> bool:
        try:
            found = capacity("sglang", plan, memory, 1, context, max_requests=count)
        except InfeasibleBudget:
            return True
        return found.num_blocks // found.blocks_per_request < count

    count = bisect.bisect_left(range(1, MOST), True, key=is_too_much)
    return count, capacity("sglang", plan, memory, 1, context, max_requests=count)


class ServedBySglang:
    """See :class:`turns.Served`."""

    def __init__(self, folder: Path, cache: str, given: argparse.Namespace) -> None:
        self.folder, self.given, self.cache = folder, given, cache
        self.traces, self.path = folder / f"{cache}.traces", folder / f"{cache}.steps"
        plan = folder / "plans" / f"{cache}.safetensors"
        self.plan = load_plan(plan) if plan.exists() else None
        os.environ[PLAN_VARIABLE] = str(plan) if self.plan else ""
        os.environ[STEPS_VARIABLE] = str(self.path)
        self.prompts = Prompts(folder)

    def most(self, context: int) -> tuple[int, dict[str, Any]]:
        """Sequences that fit, and what of SGLang's arguments says so."""
        if self.plan is not None:
            count, found = fitting(self.plan, self.given.memory, context)
            return count, {
                "max_total_tokens": found.num_blocks * PAGE, "page_size": PAGE, "attention_backend": BACKEND,
            }  # fmt: skip
        name, _, backend = self.cache.partition(":")
        shape = json.loads((self.folder / "config.json").read_text())
        values = 2 * shape["num_key_value_heads"] * shape["head_dim"] * shape["num_hidden_layers"]
        token = values * CACHE_BYTES[shape["torch_dtype"]] * BITS.get(name, 16) // 16
        tokens = self.given.memory // token
        dtype = name if name in BITS else "auto"
        backends = {"attention_backend": backend} if backend else {}
        return tokens // context, {"max_total_tokens": tokens, "kv_cache_dtype": dtype} | backends

    def engine(self, context: int) -> int:
        """Starts an engine, for the sequences that fit."""
        from sglang.srt.entrypoints.engine import Engine

        class Timed(Engine):
            run_scheduler_process_func = staticmethod(schedule)

        count, arguments = self.most(context)
        is_tiny = self.given.shape == "tiny"
        arguments |= {
            "model_path": str(self.folder), "dtype": "float32" if is_tiny else "bfloat16", "load_format": "dummy",
            "skip_tokenizer_init": True, "context_length": context, "max_running_requests": count,
            "chunked_prefill_size": BATCHED, "sampling_backend": "pytorch", "log_level": "info",
            "watchdog_timeout": 3600, "mem_fraction_static": 0.3 if is_tiny else 0.9,
        }  # fmt: skip
        if is_tiny:
            arguments |= {"device": "cpu", "disable_cuda_graph": True}
        else:
            arguments |= {"disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": [1, *range(8, count, 8), count]}
        self.path.write_text("")
        self.served = Timed(**arguments)
        self.manager, self.loop = self.served.tokenizer_manager, self.served.loop
        return count

    def answers(self) -> Iterator[dict[str, Any]]:
        passes = self.given.passes + 1
        room = self.given.passes * self.given.steps + PROFILED + passes * (WARM_STEPS + LATE_STEPS) + FULL_STEPS
        for context in self.given.context:
            start, prompt = time.perf_counter(), context - room
            count = self.engine(context)
            self.first_token_seconds(context // 2)  # warms up
            yield {"ready_s": time.perf_counter() - start}
            yield {"first_token_s": first_tokens(lambda prompt=prompt: self.first_token_seconds(prompt))}
            start = time.perf_counter()
            running = self.fill(count, prompt, room)
            yield {"sequences": running, "prompt": prompt, "fill_s": time.perf_counter() - start}
            for _ in range(self.given.passes):
                tokens, seconds = self.make(self.given.steps)
                yield {"tokens_per_s": tokens / sum(seconds), "step_s": seconds}
            yield self.profile()
            self.served.shutdown()

    def first_token_seconds(self, prompt: int) -> float:
        """Of one prompt alone."""
        ids, start = self.prompts.of(prompt), time.perf_counter()
        self.served.generate(input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": 1})
        return time.perf_counter() - start

    def fill(self, count: int, prompt: int, room: int) -> int:
        """Computes the prompts of all sequences that fit, at random phases of a page. Those that run."""
        ids = [self.prompts.below(prompt) for _ in range(count)]
        sampling = {"temperature": 0.0, "max_new_tokens": room, "ignore_eos": True}
        self.running = self.loop.create_task(self.served.async_generate(input_ids=ids, sampling_params=sampling))

        def is_full(steps: list[Step]) -> bool:
            latest = {step.sequences for step in steps[-FULL_STEPS:]}
            return bool(steps) and (steps[-1].sequences == count or (len(steps) > FULL_STEPS and 0 not in latest))

        self.until(is_full)
        self.pause()
        return self.steps()[-1].sequences

    def make(self, steps: int) -> tuple[int, list[float]]:
        """New tokens, and seconds of each step. The engine is paused before and after."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        first = len(self.steps()) + WARM_STEPS
        self.loop.run_until_complete(self.manager.continue_generation(ContinueGenerationReqInput()))
        self.until(lambda found: len(found) > first + steps)
        self.pause()
        found = self.steps()[first : first + steps + 1]
        seconds = [after.ended - before.ended for before, after in zip(found, found[1:], strict=False)]
        return sum(step.sequences for step in found[1:]), seconds

    def profile(self) -> dict[str, float]:
        """Shares of the GPU's time in some steps, by kernels."""
        activity = "CPU" if self.given.shape == "tiny" else "GPU"
        options = {"activities": [activity], "with_stack": False, "record_shapes": False}
        self.served.start_profile(output_dir=str(self.traces), **options)
        self.make(PROFILED)
        self.served.stop_profile()
        return shares_in(self.traces)

    def steps(self) -> list[Step]:
        """Those that have ended."""
        *lines, _ = self.path.read_text().split("\n")
        pairs = (line.split() for line in lines)
        return [Step(float(ended), int(sequences)) for ended, sequences in pairs]

    def until(self, is_reached: Callable[[list[Step]], bool]) -> None:
        async def wait() -> None:
            while not is_reached(self.steps()):
                if self.running.done():
                    self.running.result()
                    raise RuntimeError("all sequences have ended")
                await asyncio.sleep(POLL_SECONDS)

        self.loop.run_until_complete(wait())

    def pause(self) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self.loop.run_until_complete(self.manager.pause_generation(PauseGenerationReqInput(mode="in_place")))
        self.loop.run_until_complete(asyncio.sleep(0.2))  # steps that it has begun


if __name__ == "__main__":
    main(__doc__, ServedBySglang, "a --kv-cache-dtype of SGLang, with :BACKEND for another attention than its own")
