"""Commands that exchange plans with other programs: ``kvcal export`` and ``kvcal import-kvtuner``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcal.commands import options
from kvcal.errors import GateFailed, UsageError, did_you_mean

if TYPE_CHECKING:
    from kvcal.console import View
    from kvcal.exports.export import Dropped, Export
    from kvcal.plan.plan import Plan


@options.spread
def export(
    plan: options.PlanArgument,
    to: Annotated[str, typer.Option("--to", help="modelopt, compressed-tensors, vllm-args, kvtuner or ik-llama.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)],
    given: options.OutputOptions,
    strict: Annotated[
        bool, typer.Option("--strict", help="Write nothing, and end with exit code 7, if a part is dropped.")
    ] = False,
) -> None:
    """Write what another program takes of a plan, and list what it cannot take.

    No layer gets fewer bits than in the plan, unless that is listed. docs/exports.md says what each target takes.

    Example: `kvcal export plan.safetensors --to vllm-args -o vllm.args`

    Example: `kvcal export plan.safetensors --to kvtuner -o bits.yaml --strict --json`
    """
    from dataclasses import asdict

    from kvcal.artifact import require_output, write_text_atomic
    from kvcal.exports import EXPORTERS
    from kvcal.exports.export import dropped, planned_bits, require_heads
    from kvcal.plan.plan import load_plan

    if to not in EXPORTERS:
        raise UsageError(f"--to {to}; allowed: {', '.join(EXPORTERS)}", did_you_mean(to, EXPORTERS))
    require_output(output, f"{to} file")
    loaded = load_plan(plan)
    require_heads(loaded)
    made = EXPORTERS[to](loaded)
    lost = dropped(loaded, made)
    is_written = not (strict and lost)
    if is_written:
        write_text_atomic(output, made.text)
    planned = planned_bits(loaded)
    value = {
        "to": to,
        "path": str(output) if is_written else None,
        "text": made.text,
        "layers": [{"index": index, "planned": planned[index], "stored": made.bits[index]} for index in planned],
        "dropped": [asdict(one) for one in lost],
        "notes": made.notes,
    }
    given.show(value, _bits_table(loaded, made, to), *([_dropped_table(lost, to)] if lost else []))
    reporter = given.reporter()
    for note in made.notes:
        reporter.say(f"note: {note}")
    if not is_written:
        parts = "; ".join(one.part for one in lost)
        raise GateFailed(f"{plan.name}: {to} drops {len(lost)} parts: {parts}", "leave out --strict to write it")
    reporter.say(f"export: {output}" + ("" if lost else ", nothing is dropped"))


def _bits_table(plan: Plan, made: Export, to: str) -> View:
    from kvcal.exports.export import planned_bits

    rows = [
        (str(index), *map(str, planned), *map(str, made.bits[index])) for index, planned in planned_bits(plan).items()
    ]
    return f"Bits in the plan and in {to}", ("layer", "K", "V", f"K in {to}", f"V in {to}"), rows


def _dropped_table(lost: list[Dropped], to: str) -> View:
    rows = [(one.part, ranges(one.layers)) for one in lost]
    return f"Dropped by {to}", ("part", "layers"), rows


def ranges(layers: tuple[int, ...]) -> str:
    """Ascending numbers as ranges: "0-3, 7"."""
    found: list[list[int]] = []
    for layer in layers:
        if found and layer == found[-1][-1] + 1:
            found[-1].append(layer)
        else:
            found.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


@options.spread
def import_kvtuner(
    file: Annotated[Path, typer.Argument(help="KVTuner's YAML of bits.", show_default=False)],
    model: options.ModelOption,
    out: options.Out,
    sizes: options.WorkloadOptions,
    given: options.ModelOptions,
    k_axis: Annotated[str, typer.Option(help="What of keys has its own scale: channel or token.")] = "channel",
    group_size: Annotated[int, typer.Option(help="Values that share a scale: 32, 64 or 128.")] = 32,
) -> None:
    """Make an allocation of KVTuner's bits for each layer, or for each head; `kvcal compile` then writes its plan.

    As in KVTuner, no sinks and no windows are kept; tokens that do not yet fill a page of 128 stay at 16 bits.

    Example: `kvcal import-kvtuner bits.yaml --model Qwen/Qwen2.5-3B-Instruct --out artifacts/kvtuner`
    """
    from kvcal import tables
    from kvcal.artifact import sha256_file
    from kvcal.exports.kvtuner import read_kvtuner
    from kvcal.folder import Folder, model_inputs
    from kvcal.plan.plan import DEFAULT_WORKLOAD
    from kvcal.stages import allocate as allocation_stage
    from kvcal.strict import dump

    folder, reporter = Folder.create(out), given.reporter()
    loaded = given.load(model)
    layers = read_kvtuner(file, loaded.geometry, k_axis, group_size)
    inputs = {**model_inputs(loaded), "kvtuner.sha256": sha256_file(file)}
    folder.require_model(inputs)
    made = allocation_stage.unbudgeted(
        layers,
        loaded.identity,
        loaded.geometry.cache_dtype,
        sizes.workload(DEFAULT_WORKLOAD),
        {"recipe": None, "kvtuner": inputs["kvtuner.sha256"]},
    )
    allocation_stage.save(made, inputs, folder.allocation)
    given.show(dump(made), tables.layer_table(made.layers, made.cache_dtype, made.workload))
    reporter.say(f"allocation: {folder.allocation}\nnext: {options.command_line('compile', folder.path)}")
