"""``kvcal doctor``: what this machine has for kvcal, and lacks."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer

from kvcal import console
from kvcal.commands import options
from kvcal.commands.decorators import spread
from kvcal.errors import KernelError, UsageError
from kvcal.lazy_torch import lazy_imports

with lazy_imports():
    from importlib import metadata

    from packaging import requirements

    from kvcal.engines import support
    from kvcal.kernels import compile as kernel_compile
    from kvcal.plan import served

# Extras of kvcal, and what needs them.
EXTRAS = {"compile": "commands that make plans", "cuda": "packed caches on a GPU"}
OPTIONAL = ("vllm", "sglang", "flashinfer-python", "lm_eval")


@dataclass(frozen=True)
class Finding:
    """One thing of the machine. ``status``: ok, absent (and not needed), slow, refused (a part of kvcal does
    not work), or unusable (nothing does); ``note`` says what follows."""

    name: str
    found: str
    status: Literal["ok", "absent", "slow", "refused", "unusable"] = "ok"
    note: str = ""


@spread
def doctor(
    given: options.OutputOptions,
    *,
    engine: Annotated[
        str | None, typer.Option(help="Also check that an engine can serve plans: vllm, sglang.", show_default=False)
    ] = None,
) -> None:
    """Check this machine: versions, GPU, driver, compiler, engines; what would be slow or refused, and why.

    Exit code 0 when kvcal is usable, with or without a GPU; 2 when it is not, or
    the engine of `--engine` is not installed; 4 when that engine cannot serve plans.

    Example: `kvcal doctor --json`

    Example: `kvcal doctor --engine vllm`
    """
    findings = [Finding("python", platform.python_version()), Finding("kvcal", metadata.version("kvcal"))]
    findings += [*_packages(), *_gpu(), *map(_optional, OPTIONAL)]
    if engine is not None:
        findings.append(_served(engine))
        findings += _peers() if engine == "vllm" and findings[-1].status == "ok" else ()
    rows = [(one.name, one.found, one.status, one.note) for one in findings]
    unusable = [one.name for one in findings if one.status == "unusable"]
    value = {"is_usable": not unusable, "findings": [asdict(one) for one in findings]}
    value["served"] = [dict(zip(served.HEADER, row, strict=True)) for row in served.table()]
    machine = console.View("This machine", ("", "found", "status", "what follows"), rows)
    short = [
        (way, needs, *("yes" if cell == "yes" else "no" for cell in cells)) for way, needs, *cells in served.table()
    ]
    given.show(
        value,
        machine,
        console.View("What is served where; --json and docs/engines.md say why not", served.HEADER, short),
    )
    if unusable:
        raise UsageError(f"kvcal is not usable here: {', '.join(unusable)}", hint="pip install --upgrade kvcal")
    if engine is not None:
        support.require_version(engine)


def _packages() -> Iterator[Finding]:
    """The requirements of kvcal itself and of its extras."""
    for needed in map(requirements.Requirement, metadata.requires("kvcal") or ()):
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
        return Finding(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "not installed", "absent")


def _gpu() -> Iterator[Finding]:
    """torch's CUDA, the driver, the GPUs and the compiler of the kernels."""
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        yield Finding("import of torch and transformers", "fails", "unusable", " ".join(str(error).split()))
        return

    has_gpu = torch.cuda.is_available()
    yield Finding("CUDA of torch", str(torch.version.cuda or "none"), "ok" if torch.version.cuda else "absent")
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = ""
    yield Finding("NVIDIA driver", driver or "unknown", "ok" if driver else "absent")
    if not has_gpu:
        note = "caches run through torch on the CPU; the CUDA kernels are refused"
        if driver and torch.version.cuda is None:
            note = f"torch is a build for CPUs; install one for CUDA. Until then {note}"
        yield Finding("GPU", "none that torch sees", "slow", note)
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found = f"{about.name}, compute capability {about.major}.{about.minor}, {about.total_memory / 1e9:.1f} GB"
        oldest = kernel_compile.OLDEST
        is_old = torch.version.hip is not None or 10 * about.major + about.minor < oldest
        note = f"the kernels need NVIDIA's compute capability {oldest / 10} or newer; attention runs through torch"
        yield Finding(f"GPU {index}", found, *(("slow", note) if is_old else ()))
    try:
        yield Finding("NVRTC", kernel_compile.nvrtc_version())
    except KernelError as refused:
        yield Finding("NVRTC", "none", "refused" if has_gpu else "absent", f"{refused.message}; {refused.hint}")


def _served(engine: str) -> Finding:
    """Whether the installed engine has all that its plug-in uses. UsageError for an engine without a plug-in,
    or one that is not installed."""
    reason, found, tested = support.refusal(engine), metadata.version(engine), support.TESTED[engine]
    if reason is not None:
        return Finding(f"plans in {engine}", found, "refused", reason)
    note = "" if found.split("+")[0] in tested else f"not tested; tested versions: {', '.join(tested)}"
    return Finding(f"plans in {engine}", found, note=note)


def _peers() -> Iterator[Finding]:
    """Whether prompts and answers can have an engine each: NIXL, and what the connector uses of vLLM's."""
    name, found = "blocks of another vllm", _optional("nixl")
    if found.status == "absent":
        yield Finding(name, "no NIXL", "absent", "needed by kvcal serve-args --role: pip install nixl")
    elif (reason := support.peers_refusal()) is not None:
        yield Finding(name, f"NIXL {found.found}", "refused", reason)
    else:
        yield Finding(name, f"NIXL {found.found}")
