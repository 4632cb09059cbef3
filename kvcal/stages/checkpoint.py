"""A long stage's passes over its data, and their unfinished statistics in a file, so that an interrupted run
goes on.

The file lies next to the stage's target. It is written about every ``SAVE_SECONDS`` and when the stage is
left by any error, Ctrl-C included, whole or not at all. It is taken up again by a run of the same version
with the same inputs alone. Statistics are sums in fp64, and steps come in a fixed order: a resumed run gives
the same bits as one that was not interrupted. Of several processes (kvcal.distributed) rank 0 keeps the file.

``for_each_batch`` is a pass over sequences in batches, padded on the right, the longest first. Causal layers
never read what comes after a token, so right padding changes no real token, without any mask. Padding repeats
a sequence's last token: it brings no token that the data do not hold. Batches follow from the data and from
the most tokens of a batch alone, never from the memory that is free: other shapes round differently, and the
same run must give the same bytes. When the device runs out of memory, the rest of the stage goes on with half
as many tokens in a batch.

A process may measure several of its batches together, each in its own shapes: a streamed model loads its
layers once for all of them. Which ones depends on the memory and on the number of processes, the statistics
do not. So when the device runs out of memory, fewer go together before a batch is halved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor
from transformers import PreTrainedModel

from kvcal import artifact
from kvcal.data.sequences import TokenDataset
from kvcal.distributed import from_first, map_over_ranks, rank, require_same, size, size_on_node
from kvcal.errors import ArtifactError, UsageError
from kvcal.folder import partial_path
from kvcal.progress import Reporter
from kvcal.records import record_of
from kvcal.strict import STRICT, Count, dump

SCHEMA = 2
SAVE_SECONDS = 20.0
# Runs of a pass: as many processes have work, and statistics are sent and merged as often.
MAX_SHARDS = 64


@dataclass(frozen=True, eq=False)
class Mean:
    """``total``: fp64 on the CPU, the sum of ``count`` observations."""

    total: Tensor
    count: int

    @classmethod
    def empty(cls, shape: Sequence[int]) -> Mean:
        """No observation yet."""
        return cls(torch.zeros(tuple(shape), dtype=torch.float64), 0)

    @classmethod
    def of(cls, observations: Tensor) -> Mean:
        return cls(observations.to("cpu", torch.float64).sum(0), observations.shape[0])

    def update(self, observations: Tensor) -> Mean:
        return self.merge(Mean.of(observations))

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def result(self) -> Tensor:
        """The mean, fp64."""
        return self.total / self.count


Means = Mapping[str, Mean]


def added(means: Means, observed: Means) -> Means:
    """The statistics of both; what is new joins as it is."""
    return {name: means[name].merge(mean) if name in means else mean for name, mean in observed.items()}


def shards(count: int, most: int = MAX_SHARDS) -> list[range]:
    """The numbers below ``count`` in up to ``most`` runs of one length, the last of what is left. They do not
    depend on the number of processes."""
    length = max(1, -(-count // most))
    return [range(first, min(first + length, count)) for first in range(0, count, length)]


def summed(measure: Callable[[int], Means]) -> Callable[[range], dict[str, Mean]]:
    """``measure`` of one item, for a run of items: their statistics, merged in order."""

    def measure_run(run: range) -> dict[str, Mean]:
        means: dict[str, Mean] = {}
        for number in run:
            means |= added(means, measure(number))
        return means

    return measure_run


@dataclass(frozen=True, eq=False)
class State:
    """Statistics by name, and how many steps of each phase of the stage are in them."""

    means: Means
    done: Mapping[str, int]


@pydantic_dataclass(frozen=True, config=STRICT)
class _StateBody:
    counts: dict[str, Count]
    done: dict[str, Count]


class Checkpoint:
    """A context: ``state`` is the newest, ``advance`` replaces it, leaving by an error saves it, by success
    removes the file."""

    def __init__(self, target: Path, kind: str, inputs: dict[str, Any], start: State, reporter: Reporter) -> None:
        """``start``: the first state, unless an earlier run for the same ``target`` and ``inputs`` left
        one."""
        self.path = partial_path(target)
        self._kind = f"{kind}-partial"
        self._inputs = inputs | {"kvcal": version("kvcal")}
        self.reporter = reporter
        require_same(f"what {self.path.name} is made from", inputs)
        self.state = from_first(lambda: self._resumed(start))
        self._saved = self.state
        self._saved_at = time.monotonic()

    def advance(self, state: State) -> None:
        """ArtifactError when it is time to write the file and it cannot be written."""
        self.state = state
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self._save()

    def run(
        self, phase: str, runs: Sequence[range], measure: Callable[[range], Means | None], label: str
    ) -> range | None:
        """A pass over the steps of ``phase``, from where it is. ``runs``: all steps by number, in runs that
        one process measures at once; rank 0's count, whose device may have more memory. All ranks merge what
        ``measure`` returns of each run, in their order. The pass ends early with a run of which ``measure``
        returns None, and returns it."""
        done = self.state.done[phase]
        total = runs[-1].stop if runs else done
        left = from_first(lambda: [range(max(done, run.start), run.stop) for run in runs if run.stop > done])

        def step(run: range) -> Means | None:
            self.reporter(run.start, total, label)
            return measure(run)

        for run, found in zip(left, map_over_ranks(left, step), strict=False):
            if found is None:
                return run
            means = {**self.state.means, **added(self.state.means, found)}
            self.advance(State(means, {**self.state.done, phase: run.stop}))
        self.reporter(total, total, label)
        return None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.path.unlink(missing_ok=True)
        elif self.state is not self._saved and not issubclass(kind, ArtifactError):  # such as a full disk
            self._save()

    def _save(self) -> None:
        if rank() > 0:
            return
        means = self.state.means
        body = dump(_StateBody({name: mean.count for name, mean in means.items()}, dict(self.state.done)))
        totals = {name: mean.total for name, mean in means.items()}
        artifact.write(self.path, artifact.Artifact(self._kind, SCHEMA, self._inputs, body, totals))
        self._saved, self._saved_at = self.state, time.monotonic()

    def _resumed(self, start: State) -> State:
        if not self.path.exists():
            return start
        try:
            stored = artifact.read(self.path, self._kind, SCHEMA)
            difference = artifact.differing_input(self._inputs, stored.inputs)
            if difference is not None:
                raise ArtifactError(difference)
            body = record_of(_StateBody, stored.body, self.path)
            if body.done.keys() != start.done.keys() or body.counts.keys() != stored.tensors.keys():
                raise ArtifactError("its phases or counts are not the stage's")
        except ArtifactError as error:
            self.reporter.say(f"{self.path.name} is discarded: {error.message}")
            return start
        steps = ", ".join(f"{body.done[phase]} {phase}" for phase in start.done)
        self.reporter.say(f"{self.path.name}: goes on after {steps}")
        means = {name: Mean(total, body.counts[name]) for name, total in stored.tensors.items()}
        return State(means, {phase: body.done[phase] for phase in start.done})


@dataclass(frozen=True, eq=False)
class Batch:
    """B sequences of at most T tokens. ``numbers``: theirs in the data; ``tokens_BT`` int64; ``loss_mask_BT``
    bool, False in the padding; ``lengths``: without the padding."""

    numbers: tuple[int, ...]
    tokens_BT: Tensor
    loss_mask_BT: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, data: TokenDataset, numbers: Sequence[int]) -> Batch:
        lengths = [len(data.sequences[number]) for number in numbers]
        tokens_BT = torch.empty(len(lengths), max(lengths), dtype=torch.int64)
        loss_mask_BT = torch.zeros(tokens_BT.shape, dtype=torch.bool)
        for row, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
            tokens_BT[row, :length], tokens_BT[row, length:] = data.sequences[number], data.sequences[number][-1]
            loss_mask_BT[row, :length] = data.loss_masks[number]
        return cls(tuple(numbers), tokens_BT, loss_mask_BT, tuple(lengths))

    @property
    def num_tokens(self) -> int:
        """Without the padding."""
        return sum(self.lengths)


# From batches to the statistics of each.
Measure = Callable[[Sequence[Batch]], Sequence[Means]]


def for_each_batch(
    data: TokenDataset,
    most_tokens: int,
    measure: Measure,
    phase: str,
    checkpoint: Checkpoint,
    label: str,
    at_once: int = 1,
    numbers: Iterable[int] | None = None,
) -> int:
    """One pass over the sequences, or those of some ``numbers``, that ``checkpoint`` does not count as done
    in ``phase``, in batches of at most ``most_tokens``, padding included: ``measure`` takes ``at_once``
    batches of a process or fewer, and returns their statistics, which are merged in the batches' order.

    Returns the most tokens of a batch at the end: fewer than given, if the device ran out of memory."""
    chosen = range(len(data.sequences)) if numbers is None else numbers
    # The longest first: batches waste little padding, and the first one takes the most memory.
    order = sorted(chosen, key=lambda number: (-len(data.sequences[number]), number))

    def measure_runs(runs: Sequence[range]) -> Sequence[Means]:
        batches = [Batch.of(data, [order[position] for position in run]) for run in runs]
        try:
            return measure(batches)
        except torch.OutOfMemoryError:  # whose traceback holds the batches' tensors until here
            return ()

    while True:
        runs = _runs([len(data.sequences[number]) for number in order], most_tokens, checkpoint.state.done[phase])
        too_large = checkpoint.run(phase, runs, _looking_ahead(measure_runs, runs, at_once), label)
        if too_large is None:
            return most_tokens
        width = len(data.sequences[order[too_large.start]])
        most_tokens = len(too_large) // 2 * width
        require_smaller(most_tokens, f"one sequence of {width} tokens")
        checkpoint.reporter.say(f"{label}: out of memory, goes on with at most {most_tokens} tokens in a batch")


def _runs(widths: Sequence[int], most_tokens: int, first: int) -> list[range]:
    """The positions from ``first`` on, of sequences of ``widths`` tokens, descending, in batches."""
    runs = []
    while first < len(widths):
        stop = min(len(widths), first + max(1, most_tokens // widths[first]))
        runs.append(range(first, stop))
        first = stop
    return runs


def _looking_ahead(
    measure_runs: Callable[[Sequence[range]], Sequence[Means]], runs: Sequence[range], at_once: int
) -> Callable[[range], Means | None]:
    """The statistics of a run, measured together with those that this process will be asked for next; with
    half as many from then on where memory does not suffice. None where it does not suffice for the run
    alone."""
    found: dict[range, Means] = {}

    def measure_run(run: range) -> Means | None:
        nonlocal at_once
        while run not in found:
            mine = runs[runs.index(run) :: size()][:at_once] if run in runs else [run]  # or rank 0 has other runs
            found.update(zip(mine, measure_runs(mine), strict=False))
            if run not in found and len(mine) == 1:
                return None
            at_once = at_once if run in found else len(mine) // 2
        return found.pop(run)

    return measure_run


def require_smaller(most: int, what: str) -> None:
    """UsageError where nothing is left to be halved."""
    if most == 0:
        raise UsageError(
            f"{what} does not fit into the device's memory",
            hint="shorten the sequences (seq_len), or take a larger device",
        )


# The most memory that a container may take, of cgroups 2 and 1.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_bytes() -> int:
    """Bytes of memory of the host, or of its container, for each of the processes on this node."""
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in LIMITS:
        with suppress(OSError, ValueError):  # no file, or no limit
            nbytes = min(nbytes, int(path.read_text()))
    return nbytes // size_on_node()


def parameter_bytes(model: PreTrainedModel) -> int:
    """Bytes of parameters and buffers as they are held now, tied ones once."""
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def graph_bytes(model: PreTrainedModel) -> int:
    """Bytes of a token that a backward to activations alone keeps in all layers: what each matrix of a layer
    makes, of as many experts as a token takes; the activated values once more; attention's output and the
    projections' input; and two norms in fp32."""
    config, itemsize = model.config.get_text_config(decoder=True), model.dtype.itemsize
    num_experts = int(config.to_dict().get("num_experts_per_tok") or 1)
    outside = {model.get_input_embeddings().weight, getattr(model.get_output_embeddings(), "weight", None)}
    made = widest = 0
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter not in outside:
            made += parameter.shape[-2] * (num_experts if parameter.ndim > 2 else 1)
            widest = max(widest, *parameter.shape[-2:])
    layers = config.num_hidden_layers
    return itemsize * (made + layers * (widest + 2 * config.hidden_size)) + layers * 2 * 4 * config.hidden_size
