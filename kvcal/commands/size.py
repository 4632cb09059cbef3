"""``kvcal size``: what a model's cache takes, before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

from kvcal import console
from kvcal.commands import options, values
from kvcal.commands.decorators import spread
from kvcal.errors import WITHOUT_CALIBRATION
from kvcal.lazy_torch import lazy_imports
from kvcal.quantities import format_bytes, parse_bytes

with lazy_imports():
    from kvcal import strict
    from kvcal.models import config as model_config
    from kvcal.plan import plan as plan_file
    from kvcal.stages import memory_needs


@spread
def size(
    model: options.ModelArgument,
    sizes: options.WorkloadOptions,
    given: options.OutputOptions,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Of one device, such as 24GB: also tell what fits, with weights and workspace.",
            callback=values.of_memory,
        ),
    ] = None,
    weights: options.Weights = None,
    tp: Annotated[
        int, typer.Option("--tp", help="Devices that share each layer's heads; all bytes are of one.", min=1, max=1024)
    ] = 1,
) -> None:
    """Tell what a model's cache takes at 16, 8, 4, 3 and 2 bits, and what fits in a memory.

    Reads config.json and the headers of the weights alone. Every row is a recipe: `kvcal run uniform-4
    --model MODEL` makes its plan. A layer's sensitivity is not looked at: `kvcal plan` gives each layer its
    own bits within a budget.

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
        line = console.command_line(*following, "--batch", workload.batch, "--context", workload.context)
        say(f"{fitting.recipe} fits; to {purpose}: {line}")
