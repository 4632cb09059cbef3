"""``kvcal doctor``: what this machine has, and what on it would be slow or refused, with the reason.

Packages are compared with kvcal's own requirements, extra by extra, as its installed metadata states them; the GPU is
asked through torch and the driver, the compiler of the kernels by loading it. Nothing is compiled or measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvcal.commands import options
from kvcal.engines.contract import CONTRACTS, missing_parts, require_parts
from kvcal.errors import KernelError, UsageError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

UNKNOWN = "unknown"
# Extras of kvcal, and what needs them.
EXTRAS = {"compile": "commands that make plans", "cuda": "static caches on a GPU, and `kvcal bench`"}
ENGINES = ("vllm", "sglang", "flashinfer-python", "lm_eval")

Status = Literal["ok", "absent", "slow", "refused", "unusable"]


@dataclass(frozen=True)
class Finding:
    """One thing of the machine. ``status``: ok, absent (and not needed), slow, refused (a part of kvcal does not work),
    or unusable (nothing does); ``note`` says what follows."""

    name: str
    found: str
    status: Status = "ok"
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

    Example: `kvcal doctor`

    Example: `kvcal doctor --json`

    Example: `kvcal doctor --engine vllm`
    """
    findings = [*_software(), *_gpu(), *_engines(), _cache_folder()]
    if engine is not None:
        findings.append(_contract(engine))
    rows = [(one.name, one.found, one.status, one.note) for one in findings]
    is_usable = all(one.status != "unusable" for one in findings)
    value = {"is_usable": is_usable, "findings": [asdict(one) for one in findings]}
    given.show(value, ("This machine", ("", "found", "status", "what follows"), rows))
    if not is_usable:
        names = ", ".join(one.name for one in findings if one.status == "unusable")
        raise UsageError(f"kvcal is not usable here: {names}", hint="pip install --upgrade kvcal")
    if engine is not None:
        require_parts(engine)


def _software() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    yield Finding("python", platform.python_version())
    yield Finding("kvcal", version("kvcal"))
    for text in requires("kvcal") or ():
        requirement = Requirement(text)
        for extra in ("", *EXTRAS):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield _package(requirement, extra)
                break


def _package(requirement: Requirement, extra: str) -> Finding:
    """One requirement: of kvcal itself, or of an extra."""
    status: Status = "refused" if extra else "unusable"
    serves = f"{EXTRAS[extra]}: pip install 'kvcal[{extra}]'" if extra else "everything"
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return Finding(requirement.name, "not installed", status, f"needed by {serves}")
    if not requirement.specifier.contains(found, prereleases=True):
        return Finding(requirement.name, found, status, f"expected {requirement.specifier}, needed by {serves}")
    return Finding(requirement.name, found)


def _gpu() -> Iterator[Finding]:
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        yield Finding("import of torch and transformers", "fails", "unusable", " ".join(str(error).split()))
        return
    from kvcal.kernels.compile import OLDEST

    yield Finding("CUDA of torch", str(torch.version.cuda or "none"), "ok" if torch.version.cuda else "absent")
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = UNKNOWN
    yield Finding("NVIDIA driver", driver, "absent" if driver == UNKNOWN else "ok")
    if not torch.cuda.is_available():
        note = "caches run through torch on the CPU; the CUDA kernels and `kvcal bench` are refused"
        if driver != UNKNOWN and torch.version.cuda is None:
            note = f"torch is a build for CPUs; install one for CUDA. Until then {note}"
        yield Finding("GPU", "none that torch sees", "slow", note)
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found = f"{about.name}, compute capability {about.major}.{about.minor}, {about.total_memory / 1e9:.1f} GB"
        if torch.version.hip is not None or 10 * about.major + about.minor < OLDEST:
            note = f"the kernels need NVIDIA's compute capability {OLDEST / 10} or newer; attention runs through torch"
            yield Finding(f"GPU {index}", found, "slow", note)
        else:
            yield Finding(f"GPU {index}", found)
    yield _compiler(torch.cuda.is_available())


def _compiler(has_gpu: bool) -> Finding:
    from kvcal.kernels.compile import nvrtc_version

    try:
        return Finding("NVRTC", nvrtc_version())
    except KernelError as refused:
        return Finding("NVRTC", "none", "refused" if has_gpu else "absent", f"{refused.message}; {refused.hint}")


def _engines() -> Iterator[Finding]:
    """Optional programs that kvcal is measured against or works with."""
    for name in ENGINES:
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, "not installed", "absent")


def _contract(engine: str) -> Finding:
    """Whether the installed engine has all that its plug-in uses. UsageError for an engine without a plug-in, or one
    that is not installed."""
    missing = missing_parts(engine)
    name, found = f"plans in {engine}", version(engine)
    if missing:
        return Finding(name, found, "refused", f"lacks {'; '.join(missing)}")
    tried = CONTRACTS[engine].tried
    is_tried = found.split("+")[0] in tried
    return Finding(name, found, note="" if is_tried else f"all parts are there; tried versions: {', '.join(tried)}")


def _cache_folder() -> Finding:
    """The folder of compiled kernels and grids."""
    from kvcal.user_cache import cache_folder

    folder = cache_folder()
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # False where one may not look
    if os.access(nearest, os.W_OK | os.X_OK):
        return Finding("cache folder", str(folder))
    note = "kernels are compiled again at every start: set XDG_CACHE_HOME to a folder that can be written"
    return Finding("cache folder", str(folder), "slow", note)
