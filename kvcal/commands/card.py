"""``kvcal card``: the pages of a folder: its report, and the card of its plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcal import console
from kvcal.commands import options, values
from kvcal.commands.decorators import spread
from kvcal.commands.eval import GateOptions
from kvcal.errors import GateFailed
from kvcal.lazy_torch import lazy_imports
from kvcal.quantities import parse_bytes

with lazy_imports():
    from kvcal import card as plan_card
    from kvcal import folder as artifacts
    from kvcal import report as report_page
    from kvcal import strict


@spread
def card(
    folder: options.FolderArgument,
    limits: GateOptions,
    given: options.OutputOptions,
    against: Annotated[
        Path | None, typer.Option(metavar="README.md", help="Another card: worse than it is a regression.")
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(help="Of one device, for the cache in vLLM, such as 50GB.", callback=values.of_bytes),
    ] = None,
) -> None:
    """Write the pages of a folder: report.html of all that lies there, and README.md, the card of its plan.

    The card is what a hub or a registry shows: model, digest, command, bits, KL and look-ups next to 16 bits,
    capacity, the serving command, and a verdict, by limits that it states: accept, regression, infeasible or
    unchecked. Exit code 7 for a regression and for what is infeasible; the card is written all the same. Its
    figures are those of `kvcal eval --out DIR` or `kvcal compare`; nothing is measured. What `kvcal plan` and
    `kvcal inspect --model` found of a plan's damage is shown: it may refuse a plan, and accepts none.

    The report needs no network. `kvcal plan`, `run`, `search`, `compare`, `tune` and `eval` write it, too. In
    a folder without a plan, it is all that is written.

    Example: `kvcal card artifacts/first --max-kl 0.01 --kv-memory 50GB`

    Example: `kvcal card artifacts/second --against artifacts/first/README.md --json`
    """
    place, say = artifacts.Folder.of_plan(folder), given.reporter().say
    gates = limits.gates()
    gates.require_measured(tuple(gates.min_accuracy))
    report = report_page.write_report(place)
    value: dict[str, Any] = {"report": str(report)}
    if not place.plan.is_file():
        given.show(value)
        say(f"report: {report}\nnote: no plan lies there, so no card was written")
        return
    written = plan_card.write_card(place, gates, against, None if kv_memory is None else parse_bytes(kv_memory))
    value |= {"card": str(written.path), "findings": [asdict(one) for one in written.findings]}
    rows = [(one.what, one.limit, one.measured, one.verdict) for one in written.findings]
    verdict = written.figures.verdict
    shown = console.View(f"Verdict: {verdict}", ("what", "limit", "measured", "verdict"), rows)
    given.show(value | strict.dump(written.figures), shown)
    say(f"card: {written.path}\nreport: {report}")
    if verdict in ("regression", "infeasible"):
        reasons = "; ".join(f"{one.what}: {one.measured}, limit {one.limit}" for one in written.findings
                            if one.verdict == verdict)  # fmt: skip
        raise GateFailed(f"{verdict}: {reasons}", hint="give the plan more bytes, or raise the limit")
