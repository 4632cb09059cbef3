"""A long stage's unfinished statistics, kept in a file beside its target, so that an interrupted run goes on.

The file is written about every ``SAVE_SECONDS`` and when the stage is left by any error, Ctrl-C included, whole or
not at all. It is taken up again only by a run with the same inputs. Statistics are sums in fp64, and steps come in a
fixed order: a resumed run gives the same bits as one that was not interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from kvcal import artifact
from kvcal.errors import ArtifactError
from kvcal.observers.mean import Mean
from kvcal.progress import Reporter

SCHEMA = 1
SAVE_SECONDS = 20.0


@dataclass(frozen=True, eq=False)
class State:
    """Statistics by name, and how many steps of each phase of the stage are in them."""

    means: Mapping[str, Mean]
    done: Mapping[str, int]

    def after(self, phase: str, observations: Mapping[str, Tensor]) -> State:
        """With one more step of ``phase``, and what it observed: [n, *shape] by name."""
        means = {name: self.means[name].update(values) for name, values in observations.items()}
        return State({**self.means, **means}, {**self.done, phase: self.done[phase] + 1})


class Checkpoint:
    """A context: ``state`` is the newest, ``advance`` replaces it, leaving by an error saves it,
    by success removes the file."""

    def __init__(self, target: Path, kind: str, inputs: dict[str, Any], start: State, reporter: Reporter) -> None:
        """``start``: the state to begin with, unless an earlier run for the same ``target`` left a usable one."""
        self.path = target.with_name(f"{target.stem}.partial{target.suffix}")
        self._kind = f"{kind}-partial"
        self._inputs = inputs
        self.state = self._resumed(start, reporter)
        self._saved = self.state
        self._saved_at = time.monotonic()

    def advance(self, state: State) -> None:
        """ArtifactError when the file is due and cannot be written."""
        self.state = state
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self._save()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.path.unlink(missing_ok=True)
        elif self.state is not self._saved and not issubclass(kind, ArtifactError):  # such as a full disk
            self._save()

    def _save(self) -> None:
        state = self.state
        tensors = {name: mean.total for name, mean in state.means.items()}
        counts = {name: mean.count for name, mean in state.means.items()}
        body = {"counts": counts, "done": dict(state.done)}
        artifact.write(self.path, artifact.Artifact(self._kind, SCHEMA, self._inputs, body, tensors))
        self._saved, self._saved_at = state, time.monotonic()

    def _resumed(self, start: State, reporter: Reporter) -> State:
        if not self.path.exists():
            return start
        try:
            stored = artifact.read(self.path, self._kind, SCHEMA)
        except ArtifactError as error:
            reporter.say(f"{self.path.name} is discarded: {error.message}")
            return start
        difference = artifact.differing_input(self._inputs, stored.inputs)
        if difference is not None:
            reporter.say(f"{self.path.name} is discarded: {difference}")
            return start
        means = {name: Mean(total, stored.body["counts"][name]) for name, total in stored.tensors.items()}
        done = {phase: stored.body["done"][phase] for phase in start.done}
        steps = ", ".join(f"{count} {phase}" for phase, count in done.items())
        reporter.say(f"{self.path.name}: goes on after {steps}")
        return State(means, done)
