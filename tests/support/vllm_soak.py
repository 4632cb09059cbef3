"""A program of vLLM's environment: serves random requests for a while (soak_requests)."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from soak_requests import PROBE_TOKENS, Request, given, soak


class VllmSoak:
    def __init__(self, arguments: dict) -> None:
        from vllm import LLM
        from vllm.v1.core.sched.scheduler import Scheduler

        self.counts: Counter[str] = Counter()
        schedule, preempt = Scheduler.schedule, Scheduler._preempt_request

        def recorded(scheduler: Scheduler, *args: object, **kwargs: object) -> object:
            found = schedule(scheduler, *args, **kwargs)
            self.counts["cached"] += sum(new.num_computed_tokens for new in found.scheduled_new_reqs)
            return found

        def counted(scheduler: Scheduler, *args: object, **kwargs: object) -> object:
            self.counts["preempted"] += 1
            return preempt(scheduler, *args, **kwargs)

        Scheduler.schedule, Scheduler._preempt_request = recorded, counted
        self.engine = LLM(**arguments).llm_engine

    def add(self, prompt: list[int], tokens: int, temperature: float) -> str:
        """The request's name. Every tenth that is not greedy is sampled twice."""
        from vllm import SamplingParams

        number = self.counts["requests"]
        self.counts["requests"] += 1
        sampling = SamplingParams(
            max_tokens=tokens, temperature=temperature, n=1 + (temperature > 0 and number % 10 == 0), logprobs=0,
            ignore_eos=True, detokenize=False,
        )  # fmt: skip
        self.engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        return str(number)

    def step(self) -> list:
        """Outputs of requests that are done."""
        done = [output for output in self.engine.step() if output.finished]
        self.counts["tokens"] += sum(len(sample.token_ids) for output in done for sample in output.outputs)
        return done

    def serve(self, requests: Iterator[Request]) -> None:
        for request in requests:
            name = self.add(request.prompt, request.tokens, request.temperature)
            for _ in range(request.pause):
                self.step()
            if request.is_aborted:
                self.engine.abort_request([name])
                self.counts["aborted"] += 1
        while self.engine.has_unfinished_requests():
            self.step()

    def answers(self, probes: list[list[int]]) -> list:
        assert self.engine.reset_prefix_cache(), "a request is left"
        found = []
        for prompt in probes * 2:
            self.add(prompt, PROBE_TOKENS, 0.0)
            done = []
            while not done:
                done = self.step()
            (sample,) = done[0].outputs
            chances = [one[token].logprob for token, one in zip(sample.token_ids, sample.logprobs, strict=True)]
            found.append((list(sample.token_ids), chances))
        return found

    def left(self) -> dict[str, int]:
        import torch

        gc.collect()
        pool = self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "resident": pages * os.sysconf("SC_PAGE_SIZE"),
            "on_device": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
            "free_blocks": pool.get_num_free_blocks(),
        }


if __name__ == "__main__":
    scenario = given()
    soak(VllmSoak(scenario["engine"]), scenario["seconds"], scenario["vocabulary"])
