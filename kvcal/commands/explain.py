"""Commands on what a folder's artifacts tell: ``kvcal explain`` and ``kvcal report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcal import console
from kvcal.commands import options
from kvcal.quantities import format_bytes, format_measured

if TYPE_CHECKING:
    from kvcal.stages.explain import Explanation, UnitReasons


@options.spread
def explain(
    plan: options.PlanArgument,
    given: options.OutputOptions,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the plan's artifacts; default: the one it lies in.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="This layer alone, with the options that others better, too.", min=0)
    ] = None,
) -> None:
    """Tell why each layer's keys and values got their bits: what every option would have cost, there and in all; what
    10 % more bytes would buy; where the plan is at risk. From the artifacts beside the plan; nothing is measured.

    Example: `kvcal explain artifacts/first/plan.safetensors --layer 7`

    Example: `kvcal explain plan.safetensors --folder artifacts/first --json`
    """
    from dataclasses import asdict

    from kvcal import tables
    from kvcal.plan.plan import load_plan
    from kvcal.stages.explain import explain as explain_plan
    from kvcal.stages.explain import folder_of

    with given.reporting() as reporter:
        found = explain_plan(load_plan(plan), folder_of(plan, folder), reporter, layer)
        shown = [_options_table(found, layer is not None), _reasons_table(found)]
        shown += [] if found.more is None else [tables.more_table(found, found.more)]
        value = asdict(found)
        value["risks"] = [risk._asdict() for risk in found.risks]
        if found.more is not None:
            value["more"]["swaps"] = [swap._asdict() for swap in found.more.swaps]
        given.show(value, *shown, tables.risks_table(found.risks))
        if not found.units:
            reporter.say("the plan that ships is no composition of single options: it won as a whole")
        if found.source == "profile":
            reporter.say("note: a profile keeps no KL by kind of text; `kvcal search` does")


@options.spread
def report(folder: options.FolderArgument, given: options.OutputOptions) -> None:
    """Write report.html of what a folder of `kvcal plan`, `run`, `search`, `compare` or `tune` holds: one page, which
    needs no network. These commands write it, too.

    Example: `kvcal report artifacts/first`
    """
    from kvcal.charts.report import write_report
    from kvcal.folder import Folder
    from kvcal.stages.explain import folder_of

    path = write_report(folder_of(Folder(folder).plan, None))
    given.show({"report": str(path)})
    given.reporter().say(f"report: {path}")


def _options_table(found: Explanation, is_whole: bool) -> console.View:
    """Options that another betters are left out, unless ``is_whole``."""
    headers = ["unit", "option", "bytes", f"{'change of the ' if found.source == 'search' else ''}{found.measure}"]
    is_profile = found.source == "profile"
    headers += ["KL alone", "sensitivity", "plan's loss"] if is_profile else []
    rows = []
    for unit in found.units:
        name = unit.name
        for option in sorted(unit.options, key=lambda option: option.nbytes):
            if option.better is not None and not (is_whole or option.is_chosen):
                continue
            cells = [name, f"{option.name}{' (chosen)' if option.is_chosen else ''}", format_bytes(option.nbytes)]
            cells.append(format_measured(option.loss, option.error, 4, 1))
            if is_profile:
                total = "" if option.total is None else f"{option.total:+.3g}"
                total = total if option.better is None else f"no better than {option.better}"
                cells += [_number(option.kl), _number(option.sensitivity), total if option.fits else "does not fit"]
            rows.append(cells)
            name = ""
    title = "What each option costs" + (
        "; plan's loss: of the best plan with it, against this one" if is_profile else ""
    )
    return title, headers, rows


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _reasons_table(found: Explanation) -> console.View:
    def cells(unit: UnitReasons) -> tuple[str, str, str]:
        return unit.name, unit.chosen.name, unit.reason

    headers = ("unit", "chosen", f"what the next smaller and the next larger option would change ({found.measure})")
    return "Why", headers, [cells(unit) for unit in found.units]
