"""Environments of SGLang, kept beside those of vLLM and made in the same way: from the wheel alone and what it imports,
with the torch and transformers of the environment that runs the tests."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from vllm_environment import CHECKOUT, environment, installed_checkout, run

# What a model without images, tools or a server makes SGLang import.
NEEDED = (
    "aiohttp", "einops", "fastapi", "gguf", "ipython", "loguru", "msgspec", "openai", "opentelemetry-api",
    "opentelemetry-exporter-otlp", "opentelemetry-sdk", "orjson", "partial-json-parser", "psutil", "pybase64", "pyzmq",
    "requests", "sentencepiece", "setproctitle", "uvicorn", "uvloop",
)  # fmt: skip
ALONE = ("compressed-tensors", "xgrammar", "apache-tvm-ffi", "triton")


@functools.cache
def python_with_sglang(wanted: str) -> Path:
    """The interpreter of an environment with this version of SGLang. Unavailable where it cannot be made."""
    return environment("sglang", wanted, _fill)


def _fill(pip: list[str], folder: Path, wanted: str) -> None:
    run([*pip, "install", "--no-deps", f"sglang=={wanted}", *ALONE])
    run([*pip, "install", *NEEDED])


def run_sglang(wanted: str, folder: Path, plan: str | None, given: Any, seconds: int = 900) -> tuple[Any, str]:
    """What sglang_host.py answers, None where SGLang did not start, and what was logged."""
    support = CHECKOUT / "tests" / "support"
    # SGLang wants cores for each rank, where there are more ranks than memories.
    cores = "|".join(["0"] * given["engine"].get("tp_size", 1))
    paths = [*installed_checkout(folder / "meta"), str(support / "sglang_stand_ins")]
    # The radix tree's compiled core is built for one torch.
    variables = {
        "PYTHONPATH": os.pathsep.join(paths), "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": cores,
    } | ({} if plan is None else {"KVCAL_PLAN": plan})  # fmt: skip
    done = subprocess.run(
        [str(python_with_sglang(wanted)), str(support / "sglang_host.py")], input=json.dumps(given),
        env=os.environ | variables, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return (json.loads(answers[-1].removeprefix("RESULT ")) if answers else None), done.stderr
