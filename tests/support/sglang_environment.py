"""Environments of SGLang, kept beside those of vLLM and made in the same way: from the wheel alone and what it imports,
with the torch and transformers of the environment that runs the tests."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_environment import CHECKOUT, ENVIRONMENTS, Unavailable, _run, installed_checkout

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
    name = f"sglang-{wanted}-py{sys.version_info.major}.{sys.version_info.minor}-torch{version('torch').split('+')[0]}"
    made = ENVIRONMENTS / name
    try:
        ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
        with open(ENVIRONMENTS / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (made / "ready").exists():
                shutil.rmtree(made, ignore_errors=True)
                _make(made, wanted)
                (made / "ready").touch()
    except OSError as error:
        raise Unavailable(f"no environment with SGLang {wanted}: {error}") from error
    return made / "bin" / "python"


def _make(folder: Path, wanted: str) -> None:
    _run([sys.executable, "-m", "venv", str(folder)], {})
    python, paths = str(folder / "bin" / "python"), {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "parent.pth").write_text("".join(f"{path}\n" for path in sorted(paths)))
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    _run([*pip, "--no-deps", f"sglang=={wanted}", *ALONE], {})
    _run([*pip, *NEEDED], {})


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
