"""A serving engine's own HTTP server in a process, started by the command line that ``kvcal serve-args``
prints."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of both servers on a CPU, besides what kvcal serve-args prints; the model in fp32.
ON_CPU = {
    "vllm": [
        "--dtype", "float32", "--enforce-eager", "--compilation-config", '{"custom_ops": ["none"]}', "--max-num-seqs",
        "4", "--kv-cache-memory-bytes", str(1 << 29),
    ],
    "sglang": [
        "--dtype", "float32", "--device", "cpu", "--disable-cuda-graph", "--sleep-on-idle",
        "--mem-fraction-static", "0.3", "--max-total-tokens", "8192",
    ],
}  # fmt: skip
START_SECONDS = 900


@dataclass(frozen=True)
class Server:
    """``address``: http://127.0.0.1:port; ``steps`` and ``attention``: files that the recorders write."""

    engine: str
    address: str
    model: str
    steps: Path
    attention: Path

    def complete(self, prompts: Mapping[str, list[int]], tokens: int, together: bool = False) -> dict[str, Any]:
        """Greedy completions of prompts, one after the other or all at once, by name: [new tokens,
        log-probability of each]. SGLang's end where the model ends them: of requests that ignore ends it
        never runs short of pages."""
        with concurrent.futures.ThreadPoolExecutor(len(prompts) if together else 1) as threads:
            found = threads.map(lambda name: self._one(name, prompts[name], tokens), prompts)
            return dict(zip(prompts, found, strict=True))

    def _one(self, name: str, prompt: list[int], tokens: int) -> list[Any]:
        if self.engine == "sglang":
            sampling = {"temperature": 0.0, "max_new_tokens": tokens}
            body = {"input_ids": prompt, "rid": name, "sampling_params": sampling, "return_logprob": True}
            found = self.post("/generate", body)
            return [found["output_ids"], [chance for chance, *_ in found["meta_info"]["output_token_logprobs"]]]
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "logprobs": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        (choice,) = self.post("/v1/completions", body, {"X-Request-Id": name})["choices"]
        return [choice["token_ids"], choice["logprobs"]["token_logprobs"]]

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
        """The answer to a request. Raises urllib.error.URLError."""
        given = {"Content-Type": "application/json"} | dict(headers or {})
        request = urllib.request.Request(self.address + path, json.dumps(body).encode(), given)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def recorded(self) -> list[Any]:
        """The steps so far; names of requests are those of ``complete``."""
        lines = [json.loads(line) for line in self.steps.read_text().splitlines()]
        # vLLM's name of a completion, and of its prompt among those of a request.
        return [[[one[0].removeprefix("cmpl-").removesuffix("-0"), *one[1:]] for one in step] for step in lines]


@contextmanager
def serving(
    words: Sequence[str], model: str, folder: Path, python: Path, variables: Mapping[str, str]
) -> Iterator[Server]:
    """A server of ``words`` with the engine of this interpreter, until the end of the context. ``folder`` /
    log: what it writes. RuntimeError where it does not start."""
    engine = "vllm" if words[0] == "vllm" else "sglang"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python.parent / "vllm") if word == "vllm" else str(python) if word == "python" else word
               for word in words]  # fmt: skip
    steps, attention = folder / "steps", folder / "attention"
    for file in (steps, attention):
        file.write_text("")
    given = os.environ | {"HF_HUB_OFFLINE": "1", "KVCAL_TEST_STEPS": str(steps)} | dict(variables)
    server = Server(engine, f"http://127.0.0.1:{port}", model, steps, attention)
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], env=given, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            _await(server, process, folder / "log")
            yield server
        finally:
            for each in (signal.SIGINT, signal.SIGKILL):
                try:
                    os.killpg(process.pid, each)
                    process.wait(30)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass


def _await(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(server.address + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise RuntimeError(f"{server.engine} did not start: {log.read_text()[-4000:]}")
