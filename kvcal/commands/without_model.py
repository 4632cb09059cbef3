"""Commands that load no model: ``kvcal size``, ``recipes``, ``models`` and ``doctor``."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import typer

from kvcal import console
from kvcal.commands import options
from kvcal.errors import WITHOUT_CALIBRATION, KernelError, UsageError
from kvcal.lazy_torch import lazy_imports
from kvcal.quantities import format_bytes, parse_bytes

with lazy_imports():
    from importlib import metadata

    from packaging import requirements

    from kvcal import recipe as recipe_keys
    from kvcal import recipe_files, strict
    from kvcal.engines import support
    from kvcal.kernels import compile as kernel_compile
    from kvcal.models import config as model_config
    from kvcal.models import files as model_files
    from kvcal.plan import plan as plan_file
    from kvcal.stages import memory_needs

# Extras of kvcal, and what needs them.
EXTRAS = {"compile": "commands that make plans", "cuda": "static caches on a GPU, and `kvcal bench`"}
OPTIONAL = ("vllm", "sglang", "flashinfer-python", "lm_eval")


@options.spread
def size(
    model: options.ModelArgument,
    sizes: options.WorkloadOptions,
    given: options.OutputOptions,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Of one device, such as 24GB: also tell what fits, with weights and workspace.",
            callback=options.of_memory,
        ),
    ] = None,
    weights: options.Weights = None,
    tp: Annotated[
        int, typer.Option("--tp", help="Devices that share each layer's heads; all bytes are of one.", min=1, max=1024)
    ] = 1,
) -> None:
    """Tell what a model's cache takes at 16, 8, 4, 3 and 2 bits, and what fits in a memory. Reads config.json
    and the headers of the weights alone.

    Every row is a recipe: `kvcal run uniform-4 --model MODEL` makes its plan. A layer's sensitivity is not
    looked at: `kvcal plan` gives each layer its own bits within a budget.

    Example: `kvcal size meta-llama/Llama-3.1-8B --memory 24GB --batch 8 --context 32768`

    Example: `kvcal size ./my-model --memory 80GB --tp 2 --json`
    """
    limit = None if memory is None else parse_bytes(memory)
    facts, workload = model_config.read_sizes(model), sizes.workload(plan_file.DEFAULT_WORKLOAD)
    if weights is not None:
        facts = replace(facts, weight_bytes=parse_bytes(weights))
    rows = list(memory_needs.uniform_sizes(facts, workload, limit, tp))
    fitting = next((row for row in rows if row.fit is not None and limit is not None and row.fit.total <= limit), None)
    least = None if facts.uncalibrated else memory_needs.least_bits(facts.geometry, workload)
    value = {
        "model": facts.id,
        "model_type": facts.geometry.model_type,
        "is_tested": facts.is_tested,
        "uncalibrated": facts.uncalibrated,
        "max_positions": facts.max_positions,
        "weight_bytes": facts.weight_bytes,
        "workload": strict.dump(workload),
        "memory_bytes": limit,
        "devices": tp,
        "rows": [asdict(row) for row in rows],
        "least_bits": least,
        "finest_that_fits": None if fitting is None else fitting.recipe,
    }
    title = f"{facts.id} at batch {workload.batch} x {workload.context} tokens; weights "
    title += "unknown" if facts.weight_bytes is None else format_bytes(facts.weight_bytes)
    title += ("" if limit is None else f"; memory {format_bytes(limit)}") + (
        "" if tp == 1 else f"; on each of {tp} devices"
    )
    headers, table = ["recipe", "bits", "cache", "smaller"], []
    headers += (
        [] if limit is None else ["in all", "fits", f"batch at {workload.context}", f"context at {workload.batch}"]
    )
    for row in rows:
        factor = f"{rows[0].cache_bytes / row.cache_bytes:.2f}x"
        cells = [row.recipe, f"{row.bits_per_value:.2f}", format_bytes(row.cache_bytes), factor]
        if row.fit is not None:
            cells += [format_bytes(row.fit.total), "no" if limit is None or row.fit.total > limit else "yes"]
            cells += [str(row.fit.max_batch), str(row.fit.max_context)]
        table.append(cells)
    legend = "" if least is None else f"A plan takes {least:.2f} bits or more at this batch and context"
    given.show(value, console.View(title, headers, table, legend))

    say = given.reporter().say
    if facts.uncalibrated is not None:
        say(f"note: {facts.uncalibrated}; {WITHOUT_CALIBRATION}")
    elif not facts.is_tested:
        say(
            f"note: the contract tests build no model of the type {facts.geometry.model_type!r}; its layers are as "
            "config.json states them, and `kvcal profile` tells whether they are supported"
        )
    if facts.max_positions is not None and workload.context > facts.max_positions:
        say(f"note: the model has {facts.max_positions} positions, fewer than the context")
    if limit is not None and fitting is None:
        weights_fit = facts.weight_bytes is None or facts.weight_bytes <= limit
        cause = (
            "lower --batch or --context" if weights_fit else f"the weights alone take more than {format_bytes(limit)}"
        )
        say(f"nothing fits, 2 bits included: {cause}")
    elif fitting is not None and fitting.recipe == "16-bit":
        say("16 bits fit already: nothing has to be quantized at this batch and context")
    elif fitting is not None:
        following, purpose = ["plan", model, "--budget", memory], "give each layer its own bits within this memory"
        if facts.uncalibrated is not None:
            following, purpose = ["run", fitting.recipe, "--model", model], "make its plan"
        line = options.command_line(*following, "--batch", workload.batch, "--context", workload.context)
        say(f"{fitting.recipe} fits; to {purpose}: {line}")


@options.spread
def recipes(
    given: options.OutputOptions,
    name: Annotated[
        str | None,
        typer.Argument(help="Print this recipe's file.", show_default=False, autocompletion=options.complete_recipe),
    ] = None,
) -> None:
    """List the recipes that come with kvcal, and what each chooses bits by; or print one.

    Example: `kvcal recipes`

    Example: `kvcal recipes default > mine.toml`
    """
    if name is not None:
        text = recipe_files.find_recipe(name).read_text(encoding="utf-8")
        given.show(strict.dump(recipe_files.load_recipe(name)), text.removesuffix("\n"))
        return
    found = [(one, recipe_files.load_recipe(one)) for one in recipe_files.recipe_names()]
    values = [{"name": one, "description": r.description, "chooses_by": chooses_by(r)} for one, r in found]
    table = [(value["name"], value["chooses_by"], value["description"]) for value in values]
    title = "Recipes: `kvcal recipes NAME` prints one"
    given.show(values, console.View(title, ("recipe", "chooses by", "description"), table))


def chooses_by(recipe: recipe_keys.Recipe) -> str:
    """The stage that decides a recipe's formats, and those that then work on them."""
    if recipe.search is not None:
        choice = "measured KL of all systems"
    elif recipe.tune is not None:
        choice = "task accuracy, thresholds"
    elif recipe.importance is not None:
        choice = "gradient norms"
    elif recipe.allocate is not None:
        choice = f"integer program, {recipe.allocate.objective}"
    else:
        choice = "fixed formats"
    others = {
        "progressive": recipe.progressive,
        "λ": recipe.reparam,
        "predictors": recipe.predictors,
        "basis": recipe.basis,
        "feedback": recipe.feedback,
    }
    names = [name for name, spec in others.items() if spec is not None]
    return f"{choice}; {', '.join(names)}" if names else choice


@options.spread
def models(given: options.OutputOptions) -> None:
    """List the embedded models, and every family of decoders in transformers that kvcal was run on, small and
    with random weights: the recipe that `kvcal plan` makes its plan with, or names; and those that are not
    supported, with the reason. Other models are measured when they are loaded.

    Example: `kvcal models --json`
    """
    listed: dict[str, Any] = {"embedded": list(model_files.embedded_models()), **model_config.families()}
    of_outcome: dict[str, list[dict[str, Any]]] = {"supported": [], "refused": [], "not built": []}
    for one in listed["families"]:
        of_outcome[one["outcome"]].append(one)
    decoder = {False: "", True: ", with is_decoder"}
    supported = [
        (one["model_type"], one["model_class"], one["layers"] + decoder[one["is_decoder"]], one["recipe"])
        for one in of_outcome["supported"]
    ]
    given.show(
        listed,
        console.View("Embedded models", ("name",), [(name,) for name in listed["embedded"]]),
        console.View("Supported families", ("model type", "class", "layers", "recipe"), supported),
        console.View(
            "Families that are not supported",
            ("model type", "reason"),
            [(one["model_type"], one["reason"]) for one in of_outcome["refused"]],
        ),
    )


@dataclass(frozen=True)
class Finding:
    """One thing of the machine. ``status``: ok, absent (and not needed), slow, refused (a part of kvcal does
    not work), or unusable (nothing does); ``note`` says what follows."""

    name: str
    found: str
    status: Literal["ok", "absent", "slow", "refused", "unusable"] = "ok"
    note: str = ""


@options.spread
def doctor(
    given: options.OutputOptions,
    *,
    engine: Annotated[
        str | None, typer.Option(help="Also check that an engine can serve plans: vllm, sglang.", show_default=False)
    ] = None,
) -> None:
    """Check this machine: versions, GPU, driver, compiler of the kernels, optional engines; what would be
    slow or refused, and why. Exit code 0 when kvcal is usable, with or without a GPU; 2 when it is not, or
    the engine of `--engine` is not installed; 4 when that engine cannot serve plans.

    Example: `kvcal doctor --json`

    Example: `kvcal doctor --engine vllm`
    """
    findings = [Finding("python", platform.python_version()), Finding("kvcal", metadata.version("kvcal"))]
    findings += [*_packages(), *_gpu(), *map(_optional, OPTIONAL)]
    if engine is not None:
        findings.append(_served(engine))
    rows = [(one.name, one.found, one.status, one.note) for one in findings]
    unusable = [one.name for one in findings if one.status == "unusable"]
    value = {"is_usable": not unusable, "findings": [asdict(one) for one in findings]}
    given.show(value, console.View("This machine", ("", "found", "status", "what follows"), rows))
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
        note = "caches run through torch on the CPU; the CUDA kernels and `kvcal bench` are refused"
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
