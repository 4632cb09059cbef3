"""``kvcal report``: one page of what a folder holds."""

from __future__ import annotations

from kvcal.commands import options
from kvcal.commands.decorators import spread
from kvcal.lazy_torch import lazy_imports

with lazy_imports():
    from kvcal import folder as artifacts
    from kvcal import report as report_page


@spread
def report(folder: options.FolderArgument, given: options.OutputOptions) -> None:
    """Write report.html of what a folder of `kvcal plan`, `run`, `search`, `compare`, `tune` or `eval` holds:
    one page, which needs no network, and its figures bits.png and quality.png. These commands write them,
    too.

    Example: `kvcal report artifacts/first`
    """
    path = report_page.write_report(artifacts.Folder.of_plan(folder))
    given.show({"report": str(path)})
    given.reporter().say(f"report: {path}")
