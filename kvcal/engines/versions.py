"""Versions of the engines: one older than the tested ones is refused, and one that lacks what the plug-in imports.

Engines change between versions, and what a plug-in holds on to is not all public. So it is imported, and with it the
engine, by ``kvcal doctor --engine`` before serving, and at every start.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from kvcal.errors import UnsupportedModel, UsageError

# In which the tests serve plans, the oldest first.
TESTED = {"vllm": ("0.32.0", "0.33.0"), "sglang": ("0.5.23",)}
PLUGIN = ("backend", "serving")  # which import the other modules of a plug-in


def refusal(engine: str) -> str | None:
    """Why plans cannot be served in the installed version of an engine; None if they can.

    Raises:
        UsageError: an engine without a plug-in, or one that is not installed.
    """
    if engine not in TESTED:
        raise UsageError(f"no plug-in for the engine {engine!r}; allowed: {', '.join(TESTED)}")
    try:
        found = version(engine)
    except PackageNotFoundError:
        raise UsageError(f"{engine} is not installed in this environment", hint=f"pip install {engine}") from None
    if Version(found) < Version(TESTED[engine][0]):
        return f"version {found}, expected {TESTED[engine][0]} or newer"
    try:
        for name in PLUGIN:
            importlib.import_module(f"kvcal.engines.{engine}.{name}")
    except (ImportError, AttributeError) as missing:
        return f"version {found} lacks what the plug-in uses: {' '.join(str(missing).split())}"
    return None


def require_version(engine: str) -> None:
    """UnsupportedModel (exit code 4) unless plans can be served in the installed version of an engine."""
    if (reason := refusal(engine)) is not None:
        raise UnsupportedModel(
            f"plans cannot be served in {engine}: {reason}", hint=f"tested versions: {', '.join(TESTED[engine])}"
        )
