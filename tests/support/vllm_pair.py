"""A program of vLLM's environment: two engines in processes of their own, one for prompts and one for answers, and
what a router does between them, step by step.

    {"prefill": arguments of LLM, "decode": arguments of LLM,
     "requests": [{"prompt": [id, ...], "tokens": 40, "at": step, "abort": [engine, steps after it came there],
                   "alone": whether it goes to the second one at once}, ...],
     "wait": steps for which the second engine is not run, at most, "gpus": {engine: CUDA_VISIBLE_DEVICES of it}}
    -> {"steps", "requests": as of vllm_host, of both engines: names of the first one's requests begin with PROMPTS, and
        its blocks come from BLOCKS on,
        "outputs": as of vllm_host, of the second one's, "failed": requests that ended otherwise,
        "logs": {engine: [lines of kvcal's]}, "free": {engine: [free blocks at first, at the end]}}
    or {"error", "message", "trace", "engine"} where one of them does not start
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import socket
import sys
import time
import traceback
from typing import Any

from vllm_recorder import FROM_PEER

# Before the names of the first engine's requests, as engine_replay has it; its blocks, after the second one's.
PROMPTS, BLOCKS = "prompt of ", 1_000_000
NAMES = "prefill", "decode"
STEPS = 20_000
TO_COMPUTE = {"do_remote_decode": True, "do_remote_prefill": False}  # what a router says to the first engine


def engine(name: str, port: int, gpus: str | None, arguments: dict[str, Any], pipe: Any) -> None:
    """In a process of its own: answers what the router asks."""
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    try:
        Engine(name, arguments).serve(pipe)
    except Exception as error:  # noqa: BLE001  (the test looks at it)
        found = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc(), "engine": name}
        pipe.send(found)


class Engine:
    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm_host import Lines
        from vllm_recorder import record

        self.name, self.lines, self.steps = name, Lines(), []
        self.seen = record(self.steps.append)
        self.engine = LLM(**arguments).llm_engine
        logging.getLogger("vllm.kvcal").addHandler(self.lines)
        self.free = [self._free_blocks()]

    def serve(self, pipe: Any) -> None:
        pipe.send({})
        while (asked := pipe.recv()) is not None:
            method, *given = asked
            pipe.send(getattr(self, method)(*given))

    def add(self, name: str, prompt: list[int], tokens: int, transfer: dict[str, Any] | None) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0,
            extra_args=transfer and {"kv_transfer_params": transfer},
        )  # fmt: skip
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])

    def step(self) -> tuple[list[Any], list[Any]]:
        """Requests that end, and the steps that are recorded."""
        ended = []
        for output in self.engine.step():
            (sample,) = output.outputs
            if sample.finish_reason is not None:
                ids = list(sample.token_ids)
                chances = [chances[token].logprob for token, chances in zip(ids, sample.logprobs or [], strict=False)]
                ended.append([output.request_id, sample.finish_reason, [ids, chances], output.kv_transfer_params])
        steps, self.steps[:] = self.steps[:], []
        return ended, steps

    def is_idle(self) -> bool:
        """After a step more, whether all blocks are free."""
        self.engine.step()
        return self._free_blocks() == self.free[0]

    def end(self) -> dict[str, Any]:
        requests = {name: [list(r.prompt_token_ids), list(r.output_token_ids)] for name, r in self.seen.items()}
        return {"requests": requests, "log": self.lines.lines, "free": [*self.free, self._free_blocks()]}

    def _free_blocks(self) -> int:
        scheduler = self.engine.engine_core.engine_core.scheduler
        return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


class Router:
    """Sends each request to the first engine, for one token, and then to the second one, with what the first one says
    of its blocks."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.requests, self.wait = scenario["requests"], scenario.get("wait", 0)
        self.pipes, self.processes = {}, []
        spawn = multiprocessing.get_context("spawn")
        for name in NAMES:
            self.pipes[name], theirs = spawn.Pipe()
            gpus = scenario.get("gpus", {}).get(name)
            process = spawn.Process(target=engine, args=(name, free_port(), gpus, scenario[name], theirs))
            process.start()
            self.processes.append(process)

    def call(self, name: str, *asked: Any) -> Any:
        self.pipes[name].send(asked)
        found = self.pipes[name].recv()
        assert not isinstance(found, dict) or "error" not in found, found["trace"]
        return found

    def run(self) -> dict[str, Any]:
        for pipe in self.pipes.values():
            if found := pipe.recv():
                return found
        steps, outputs, failed, came = [], {}, {}, {}
        waiting, running = dict(enumerate(self.requests)), set()
        for step in range(STEPS):
            for number, given in list(waiting.items()):
                if given.get("at", 0) <= step:
                    where = "decode" if given.get("alone") else "prefill"
                    tokens, transfer = (given["tokens"], None) if given.get("alone") else (1, TO_COMPUTE)
                    self.call(where, "add", str(number), given["prompt"], tokens, transfer)
                    came[where, str(number)] = step
                    running.add(str(number))
                    del waiting[number]
            for number, given in enumerate(self.requests):
                name, after = given.get("abort", (None, 0))
                is_there = name == "decode" or ("decode", str(number)) not in came
                if came.get((name, str(number))) == step - after and is_there:
                    self.call(name, "abort", str(number))
                    running.discard(str(number))
            ended, found = self.call("prefill", "step")
            steps += [renamed(one) for one in found]
            for name, reason, _, transfer in ended:
                if reason != "length" or name not in running:
                    failed[name] = ["prefill", reason]
                    running.discard(name)
                    continue
                given = self.requests[int(name)]
                self.call("decode", "add", name, given["prompt"], given["tokens"], transfer)
                came["decode", name] = step
            if step % (1 + self.wait) == 0:
                ended, found = self.call("decode", "step")
                steps += [taken(one) for one in found]
                for name, reason, output, _ in ended:
                    if reason == "length" and name in running:
                        outputs[name] = output
                    else:
                        failed[name] = ["decode", reason]
                    running.discard(name)
            if not waiting and not running:
                break
        for _ in range(200):  # until the first engine knows what was read
            time.sleep(0.05)
            if all([self.call(name, "is_idle") for name in NAMES]):
                break
        ends = {name: self.call(name, "end") for name in NAMES}
        requests = ends["decode"]["requests"] | {
            PROMPTS + name: found for name, found in ends["prefill"]["requests"].items()
        }
        return {
            "steps": steps, "requests": requests, "outputs": outputs, "failed": failed,
            "logs": {name: end["log"] for name, end in ends.items()},
            "free": {name: end["free"] for name, end in ends.items()},
        }  # fmt: skip


def renamed(step: list[Any]) -> list[Any]:
    """A step of the first engine."""
    found = []
    for name, first, count, blocks, drafts, right, *begins in step:
        own = [BLOCKS + block for block in blocks]
        if name is None:
            found.append([None, first, count, own, drafts, [BLOCKS + block for block in right]])
        else:
            found.append([PROMPTS + name, first, count, own, drafts, right, *begins])
    return found


def taken(step: list[Any]) -> list[Any]:
    """A step of the second one, which reads blocks of the first."""
    is_read = [entry[0] is None and entry[4] == FROM_PEER for entry in step]
    return [
        [*entry[:5], [BLOCKS + block for block in entry[5]]] if read else entry
        for entry, read in zip(step, is_read, strict=True)
    ]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main() -> None:
    router = Router(json.load(sys.stdin))
    try:
        found = router.run()
    finally:
        for process in router.processes:
            process.terminate()
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
