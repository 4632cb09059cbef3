"""Environments of SGLang, next to those of vLLM and made in the same way: from the wheel alone and what it
imports, with the torch and transformers of the environment that runs the tests."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_recorder import VARIABLE
from vllm_environment import CHECKOUT, environment, installed_checkout, run

# What SGLang and its server import for a model without images or tools.
NEEDED = (
    "aiohttp", "einops", "fastapi", "gguf", "ipython", "jsonschema", "loguru", "msgspec", "openai", "opentelemetry-api",
    "opentelemetry-exporter-otlp", "opentelemetry-sdk", "orjson", "partial-json-parser", "prometheus-client", "psutil",
    "pybase64", "python-multipart", "pyzmq", "requests", "sentencepiece", "setproctitle", "soundfile", "uvicorn",
    "uvloop", "watchfiles",
)  # fmt: skip
STAND_INS = str(CHECKOUT / "tests" / "support" / "sglang_stand_ins")
DRAFTS = str(CHECKOUT / "tests" / "support" / "sglang_drafts")
ALONE = ("compressed-tensors", "xgrammar", "apache-tvm-ffi", "triton")


@functools.cache
def python_with_sglang(wanted: str) -> Path:
    """The interpreter of an environment with this version of SGLang. Unavailable where it cannot be made."""
    return environment("sglang", wanted, _fill, NEEDED)


def _fill(pip: list[str], folder: Path, wanted: str) -> None:
    run([*pip, "install", "--no-deps", f"sglang=={wanted}", *ALONE])


def run_sglang(
    wanted: str, folder: Path, plan: str | None, given: Any, program: str = "sglang_host.py"
) -> tuple[Any, str]:
    """A program's answer on a CPU, None where SGLang did not start, and what was logged."""
    # SGLang wants cores for each rank, where there are more ranks than memories.
    cores = "|".join(["0"] * given["engine"].get("tp_size", 1))
    variables = {"SGLANG_CPU_OMP_THREADS_BIND": cores} | ({} if plan is None else {"KVCAL_PLAN": plan})
    paths, more = [STAND_INS], {}
    if "speculative_algorithm" in given["engine"]:
        paths, more = [STAND_INS, DRAFTS], {"KVCAL_TEST_DRAFTS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    python = python_with_sglang(wanted)
    return answer_of_sglang(python, folder, given, paths, variables | more, program=program)


def variables_in_sglang(folder: Path, paths: Sequence[str] = (STAND_INS,)) -> dict[str, str]:
    """Of a process that finds this checkout's plug-in, installed in ``folder``, and modules in ``paths``."""
    # The radix tree's compiled core is built for one torch.
    return {
        "PYTHONPATH": os.pathsep.join([*installed_checkout(folder / "meta"), *paths]), "OMP_NUM_THREADS": "1",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    }  # fmt: skip


def answer_of_sglang(
    python: Path, folder: Path, given: Any, paths: list[str], variables: dict[str, str], seconds: int = 900,
    program: str = "sglang_host.py",
) -> tuple[Any, str]:  # fmt: skip
    """A program's answer with this interpreter, and what was logged, as in ``folder`` / log."""
    shared = variables_in_sglang(folder, paths) | {"HF_HUB_OFFLINE": "1", VARIABLE: str(folder / "steps")}
    (folder / "steps").unlink(missing_ok=True)
    with open(folder / "log", "w") as log:
        done = subprocess.run(
            [str(python), str(CHECKOUT / "tests" / "support" / program)], input=json.dumps(given),
            env=os.environ | shared | variables, stdout=subprocess.PIPE, stderr=log, text=True, timeout=seconds,
        )  # fmt: skip
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return (json.loads(answers[-1].removeprefix("RESULT ")) if answers else None), (folder / "log").read_text()


def recorded(found: Any, rounds: list[list[list[int]]]) -> dict[str, Any]:
    """An answer of sglang_host.py, as ``engine_replay`` has those of vLLM."""
    served = {
        f"{number}.{place}": (prompt, one["output"], one["chances"])
        for number, (prompts, answers) in enumerate(zip(rounds, found["rounds"], strict=True))
        for place, (prompt, one) in enumerate(zip(prompts, answers, strict=True))
    }
    return {
        "steps": without_discarded(found["steps"]),
        "requests": {name: [prompt, output] for name, (prompt, output, _) in served.items()},
        "outputs": {name: [output, chances] for name, (_, output, chances) in served.items()},
    }


def without_discarded(steps: list[list[list[Any]]]) -> list[list[list[Any]]]:
    """Steps without those whose token SGLang dropped: it takes a request's pages back while a step computes
    its next token, and computes that token again, after the tokens that it knows."""
    places: dict[str, list[tuple[int, int]]] = {}  # of each request, by step: its first token and the one after
    kept: list[list[list[Any]]] = []
    for step in reversed(steps):
        kept.append([])
        for one in step:
            name, first, count, *_ = one
            later = places.setdefault(name, [])
            is_taken_back = bool(later) and later[-1][0] != first + count
            if not (is_taken_back and first + count in {end for _, end in later}):
                kept[-1].append(one)
            later.append((first, first + count))
    return kept[::-1]
