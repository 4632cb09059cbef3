"""``kvcal doctor``: what this machine has, and what on it would be slow or refused, with the reason.

Packages are compared with kvcal's own requirements; nothing is compiled or measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated, Literal

import typer

from kvcal.commands import options
from kvcal.engines.support import TESTED, refusal, require_version
from kvcal.errors import KernelError, UsageError

# Extras of kvcal, and what needs them.
EXTRAS = {"compile": "commands that make plans", "cuda": "static caches on a GPU, and `kvcal bench`"}
OPTIONAL = ("vllm", "sglang", "flashinfer-python", "lm_eval")


@dataclass(frozen=True)
class Finding:
    """One thing of the machine. ``status``: ok, absent (and not needed), slow, refused (a part of kvcal does not work),
    or unusable (nothing does); ``note`` says what follows."""

    name: str
    found: str
    status: Literal["ok", "absent", "slow", "refused", "unusable"] = "ok"
    note: str = ""


@options.spread
def doctor(
    given: options.OutputOptions,
    *,
    engine: Annotated[
        str | None,
        typer.Option(help="Also check that an engine can serve plans: vllm, sglang.", show_default=False),
    ] = None,
) -> None:
    """Check this machine: versions, GPU, driver, compiler of the kernels, optional engines; what would be slow or
    refused, and why. Exit code 0 when kvcal is usable, with or without a GPU; 2 when it is not, or the engine of
    `--engine` is not installed; 4 when that engine cannot serve plans.

    Example: `kvcal doctor --json`

    Example: `kvcal doctor --engine vllm`
    """
    findings = [Finding("python", platform.python_version()), Finding("kvcal", version("kvcal"))]
    findings += [*_packages(), *_gpu(), *map(_optional, OPTIONAL), _cache_folder()]
    if engine is not None:
        findings.append(_served(engine))
    rows = [(one.name, one.found, one.status, one.note) for one in findings]
    unusable = [one.name for one in findings if one.status == "unusable"]
    value = {"is_usable": not unusable, "findings": [asdict(one) for one in findings]}
    given.show(value, ("This machine", ("", "found", "status", "what follows"), rows))
    if unusable:
        raise UsageError(f"kvcal is not usable here: {', '.join(unusable)}", hint="pip install --upgrade kvcal")
    if engine is not None:
        require_version(engine)


def _packages() -> Iterator[Finding]:
    """The requirements of kvcal itself and of its extras."""
    from packaging.requirements import Requirement

    for needed in map(Requirement, requires("kvcal") or ()):
        extras = ("", *EXTRAS)
        extra = next((e for e in extras if needed.marker is None or needed.marker.evaluate({"extra": e})), None)
        if extra is None:
            continue
        found = _optional(needed.name)
        if found.status == "ok" and needed.specifier.contains(found.found, prereleases=True):
            yield found
            continue
        serves = f"{EXTRAS[extra]}: pip install 'kvcal[{extra}]'" if extra else "everything"
        expected = "" if found.status == "absent" else f"expected {needed.specifier}, "
        yield Finding(needed.name, found.found, "refused" if extra else "unusable", f"{expected}needed by {serves}")


def _optional(name: str) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, "not installed", "absent")


def _gpu() -> Iterator[Finding]:
    """torch's CUDA, the driver, the GPUs and the compiler of the kernels."""
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        yield Finding("import of torch and transformers", "fails", "unusable", " ".join(str(error).split()))
        return
    from kvcal.kernels.compile import OLDEST, nvrtc_version

    has_gpu = torch.cuda.is_available()
    yield Finding("CUDA of torch", str(torch.version.cuda or "none"), "ok" if torch.version.cuda else "absent")
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = ""
    yield Finding("NVIDIA driver", driver or "unknown", "ok" if driver else "absent")
    if not has_gpu:
        note = "caches run through torch on the CPU; the CUDA kernels and `kvcal bench` are refused"
        if driver and torch.version.cuda is None:
            note = f"torch is a build for CPUs; install one for CUDA. Until then {note}"
        yield Finding("GPU", "none that torch sees", "slow", note)
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found = f"{about.name}, compute capability {about.major}.{about.minor}, {about.total_memory / 1e9:.1f} GB"
        is_old = torch.version.hip is not None or 10 * about.major + about.minor < OLDEST
        note = f"the kernels need NVIDIA's compute capability {OLDEST / 10} or newer; attention runs through torch"
        yield Finding(f"GPU {index}", found, *(("slow", note) if is_old else ()))
    try:
        yield Finding("NVRTC", nvrtc_version())
    except KernelError as refused:
        yield Finding("NVRTC", "none", "refused" if has_gpu else "absent", f"{refused.message}; {refused.hint}")


def _served(engine: str) -> Finding:
    """Whether the installed engine has all that its plug-in uses. UsageError for an engine without a plug-in, or one
    that is not installed."""
    reason, found, tested = refusal(engine), version(engine), TESTED[engine]
    if reason is not None:
        return Finding(f"plans in {engine}", found, "refused", reason)
    note = "" if found.split("+")[0] in tested else f"not tested; tested versions: {', '.join(tested)}"
    return Finding(f"plans in {engine}", found, note=note)


def _cache_folder() -> Finding:
    """The folder of compiled kernels and grids."""
    from kvcal.user_cache import cache_folder

    folder = cache_folder()
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # False where one may not look
    if os.access(nearest, os.W_OK | os.X_OK):
        return Finding("cache folder", str(folder))
    note = "kernels are compiled again at every start: set XDG_CACHE_HOME to a folder that can be written"
    return Finding("cache folder", str(folder), "slow", note)
