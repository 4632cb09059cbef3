"""A program of SGLang's environment: serves random requests for a while (soak_requests)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

from soak_requests import PROBE_TOKENS, Request, given, soak

STEP_SECONDS = 0.02


class SglangSoak:
    def __init__(self, arguments: dict) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self.counts: Counter[str] = Counter()
        self.engine = Engine(**arguments)

    async def answer(self, name: str, prompt: list[int], tokens: int, temperature: float) -> tuple[list, list]:
        sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        found = await self.engine.async_generate(
            input_ids=prompt, sampling_params=sampling, rid=name, return_logprob=True, logprob_start_len=-1
        )
        about, ids = found["meta_info"], found["output_ids"]
        self.counts["tokens"] += len(ids)
        self.counts["cached"] += about.get("cached_tokens", 0)  # where it began
        self.counts["aborted"] += about["finish_reason"]["type"] == "abort"
        return ids, [chance for chance, *_ in about.get("output_token_logprobs", [])]

    def name(self) -> str:
        self.counts["requests"] += 1
        return f"request {self.counts['requests']}"

    async def serve_all(self, requests: Iterator[Request]) -> None:
        tasks = []
        for request in requests:
            name = self.name()
            coming = self.answer(name, request.prompt, request.tokens, request.temperature)
            tasks.append(asyncio.create_task(coming))
            await asyncio.sleep(request.pause * STEP_SECONDS)
            if request.is_aborted:
                self.engine.tokenizer_manager.abort_request(name)
        await asyncio.gather(*tasks)

    def serve(self, requests: Iterator[Request]) -> None:
        self.engine.loop.run_until_complete(self.serve_all(requests))

    def answers(self, probes: list[list[int]]) -> list:
        assert self.engine.flush_cache().success, "a request is left"
        wait = self.engine.loop.run_until_complete
        return [wait(self.answer(self.name(), prompt, PROBE_TOKENS, 0.0)) for prompt in probes * 2]

    def left(self) -> dict[str, int]:
        """The scheduler itself counts its pages while no request is there."""
        import psutil

        resident = sum(one.memory_info().rss for one in psutil.Process().children(recursive=True))
        return {"resident": resident, "on_device": 0}


if __name__ == "__main__":
    scenario = given()
    engine = SglangSoak(scenario["engine"])
    soak(engine, scenario["seconds"], scenario["vocabulary"])
    engine.engine.shutdown()
