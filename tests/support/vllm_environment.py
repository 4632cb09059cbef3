"""Environments of vLLM's pure-Python build, from the official source distribution, kept outside of the
repository.

    folder of caches / kvcal-tests / vllm-0.32.0-py3.11-torch2.13.0

An environment sees the packages of the one that runs the tests (torch, transformers), and has vLLM and what
that imports besides them. It is made once, in a minute or two, from the package index; tests that cannot have
one are skipped with the reason.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

# Before conftest gives the tests a folder of caches of their own, which goes with them.
ENVIRONMENTS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvcal-tests"
CHECKOUT = Path(__file__).parents[2]
BUILD = ("setuptools>=77,<81", "setuptools-scm>=8", "setuptools-rust>=1.9", "wheel", "packaging", "jinja2")
# What vLLM and its server import for a model without images or tools.
NEEDED = (
    "aiohttp", "blake3", "cachetools", "cbor2", "cloudpickle", "einops", "fastapi", "ijson", "llguidance", "loguru",
    "mistral_common", "model-hosting-container-standards", "msgspec", "openai", "openai-harmony", "orjson",
    "partial-json-parser", "prometheus-client", "prometheus-fastapi-instrumentator", "psutil", "py-cpuinfo", "pybase64",
    "python-json-logger", "python-multipart", "pyzmq", "setproctitle", "tiktoken", "uvicorn", "uvloop", "watchfiles",
)  # fmt: skip
# Without their own needs: torch and transformers are there, in whatever version.
ALONE = ("compressed-tensors", "xgrammar", "apache-tvm-ffi")
NIXL = "nixl>=1.5"
MINUTES = 10


class Unavailable(Exception):
    """Why there is no environment."""


# Installs an engine's version with this pip; the folder is its environment.
Fill = Callable[[list[str], Path, str], None]


def environment(engine: str, wanted: str, fill: Fill, needed: Sequence[str]) -> Path:
    """The interpreter of an environment with this version of an engine, and what it needs besides; those that
    were made with less get the rest. Unavailable where it cannot be made."""
    name = (
        f"{engine}-{wanted}-py{sys.version_info.major}.{sys.version_info.minor}-torch{version('torch').split('+')[0]}"
    )
    made = ENVIRONMENTS / name
    pip = [str(made / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    ready, has_needed = made / "ready", "\n".join(needed)
    try:
        ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
        with open(ENVIRONMENTS / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not ready.exists():
                shutil.rmtree(made, ignore_errors=True)
                run([sys.executable, "-m", "venv", str(made)])
            paths = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}  # an earlier clone's may be gone
            site = next(made.glob("lib/python*/site-packages"))
            (site / "parent.pth").write_text("".join(f"{path}\n" for path in sorted(paths)))
            if not ready.exists():
                fill(pip, made, wanted)
            if not ready.exists() or ready.read_text() != has_needed:
                run([*pip, "install", *needed])
                ready.write_text(has_needed)
    except OSError as error:
        raise Unavailable(f"no environment with {engine} {wanted}: {error}") from error
    return made / "bin" / "python"


@functools.cache
def python_with_vllm(wanted: str) -> Path:
    """The interpreter of an environment with this version of vLLM. Unavailable where it cannot be made."""
    return environment("vllm", wanted, _fill, NEEDED)


@functools.cache
def python_with_nixl(wanted: str) -> Path:
    """The same, which also has NIXL with its UCX. Unavailable where it cannot be had."""
    python = python_with_vllm(wanted)
    made = python.parents[1]
    with open(made.with_suffix(made.suffix + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "nixl").exists():
            run([str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", NIXL])
            (made / "nixl").touch()
    return python


def needed(python_with: Callable[[str], Path], wanted: str) -> Path:
    """An interpreter of such an environment; a test that cannot have it is skipped with the reason."""
    try:
        return python_with(wanted)
    except Unavailable as reason:
        pytest.skip(str(reason))


def _fill(pip: list[str], folder: Path, wanted: str) -> None:
    empty = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": wanted}
    alone = ["--no-deps", "--no-build-isolation"]
    run([*pip, "install", *BUILD])
    run([*pip, "download", *alone, "--no-binary", "vllm", f"vllm=={wanted}", "--dest", str(folder / "sdist")], empty)
    (source,) = (folder / "sdist").iterdir()
    # vLLM takes the platform of a CPU where its version says so.
    on_cpu = empty | {"VLLM_VERSION_OVERRIDE": f"{wanted}+cpu"}
    run([*pip, "wheel", *alone, str(source), "--wheel-dir", str(folder / "wheel")], on_cpu)
    run([*pip, "install", "--no-deps", *map(str, (folder / "wheel").iterdir()), *ALONE])


def run(command: list[str], variables: Mapping[str, str] = MappingProxyType({})) -> None:
    """Unavailable where the command fails or takes too long."""
    try:
        subprocess.run(
            command, env={**os.environ, **variables}, check=True, capture_output=True, text=True, timeout=60 * MINUTES
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stdout + error.stderr).splitlines() if "ERROR" in line or "rror:" in line]
        raise Unavailable(f"{' '.join(command[2:5])} fails: {' '.join(lines)[-300:]}") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{' '.join(command[2:5])} took more than {MINUTES} minutes") from error


def installed_checkout(folder: Path, has_stubs: bool = True) -> list[str]:
    """PYTHONPATH on which vLLM finds the plug-in of this checkout, as if it were installed, and, where
    ``has_stubs``, the tests' own operators. numba is a stand-in."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    own = {"sglang.srt.plugins": {"recorder": "sglang_recorder:register"}}
    own["vllm.general_plugins"] = {"recorder": "vllm_recorder:register"}
    own["vllm.general_plugins"] |= {"stubs": "vllm_stubs:register"} if has_stubs else {}
    for name, groups in ((project["name"], project["entry-points"]), ("kvcal-test-stubs", own)):
        about = folder / f"{name.replace('-', '_')}-{project['version']}.dist-info"
        about.mkdir(parents=True, exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n")
        text = "".join(
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for group, entries in groups.items()
        )
        (about / "entry_points.txt").write_text(text)
    support = CHECKOUT / "tests" / "support"
    return [str(folder), str(CHECKOUT), str(support), str(support / "vllm_stand_ins")]


def run_in(
    wanted: str, folder: Path, program: str, given: Any = None, more: Mapping[str, str] = MappingProxyType({})
) -> Any:
    """A program's answer in the environment of this version of vLLM; ``more``: its variables."""
    return answer_of(python_with_vllm(wanted), folder, program, given, variables_in(folder) | more)


def variables_in(folder: Path) -> dict[str, str]:
    """Of a process on a CPU that finds this checkout's plug-in, installed in ``folder``."""
    return {
        "PYTHONPATH": os.pathsep.join(installed_checkout(folder / "meta")), "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip


def answer_of(python: Path, folder: Path, program: str, given: Any, variables: Mapping[str, str]) -> Any:
    """A program's answer to ``given``; ``folder`` / log: what all of its processes write."""
    shared = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "root"),
    }  # fmt: skip
    done = subprocess.run(
        [str(python), str(CHECKOUT / "tests" / "support" / program)], input=json.dumps(given),
        env=os.environ | shared | variables, capture_output=True, text=True, timeout=60 * 15,
    )  # fmt: skip
    (folder / "log").write_text(done.stdout + done.stderr)
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert answers, f"{program} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(answers[-1].removeprefix("RESULT "))
