"""The predictor stage: fits AQUA-KV's predictors layer by layer (Alg. 1), and keeps those that pay (choice).

Layer l's keys are regressed on the keys of the paged layer before it, its values on that layer's values and
its own keys, all as the cache will read them back: through the layers' own quantizers and the predictors
fitted so far. So layers are fitted in order, one pass over the data for each: pass l sums up the normal
equations of f_key of layer l and, one layer after, of f_value of layer l - 1, whose inputs need f_key of
layer l - 1. A forward of pass l ends at layer l, and begins where that of the pass before has left its hidden
states, two layers earlier (``Starts``): of as many sequences as a share of the memory holds, others run from
the first layer. Either way gives the same bits. An interrupted run goes on after the last batch, and several
processes take batches in turn.

A share of the sequences, evenly spread, is held out: their own normal equations give the explained variance
of the predictor as it is stored (rounded, of low rank, in 4 bits), and one more pass over them what
quantizing residuals instead of keys and values really brings. Layers after a predictor that is left out are
fitted to what the cache reads back without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcal.data.sequences import TokenDataset
from kvcal.distributed import from_first
from kvcal.errors import naming
from kvcal.models.load import LoadedModel
from kvcal.models.rope import rotary_maps
from kvcal.plan.layer import LATENTS, LayerPlan
from kvcal.plan.page_format import SIDES
from kvcal.plan.plan import Workload
from kvcal.plan.tensors import needed_tensors
from kvcal.progress import Reporter
from kvcal.stages.checkpoint import Batch, Checkpoint, Mean, State, for_each_batch
from kvcal.systems.aqua_kv.recipe import PredictorSpec
from kvcal.systems.aqua_kv.reconstruct import (
    FIT,
    HELD_OUT,
    LayerPages,
    PageReader,
    Receive,
    Reconstruction,
    Starts,
    Wanted,
    num_page_tokens,
    split_sequences,
)
from kvcal.systems.aqua_kv.record import (
    KIND,
    Finding,
    PredictorRecord,
    Subject,
    Target,
    decide,
    find_targets,
    save,
    with_predictors,
)
from kvcal.systems.aqua_kv.regression import NormalEquations, compress

PASSES, SEQUENCES = "passes", "sequences of the next one"
# Tokens of a batch, padding included.
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


def run_fit_predictors(
    loaded: LoadedModel,
    layers: tuple[LayerPlan, ...],
    tensors: Mapping[str, Tensor],
    data: TokenDataset,
    spec: PredictorSpec,
    workload: Workload,
    inputs: dict[str, Any],
    path: Path,
    reporter: Reporter,
) -> PredictorRecord:
    """Fit, and write to ``path``; an earlier run of the same ``inputs`` that was interrupted is continued.

    ``layers`` and ``tensors``: the plan's so far, without predictors. ``workload``: what the bytes must pay
    for."""
    if loaded.geometry.has_latents:
        reporter.say(f"predictors: {LATENTS}")
    fitting = _Fitting(loaded, layers, tensors, data, spec, workload, inputs, path, reporter)
    with fitting.checkpoint:
        record = fitting.run()
        save(record, inputs, path)
    return record


class _Fitting:
    """One run of the stage; tensors are on the model's device. Its results lie in the checkpoint's state, so
    that it
    can be taken up again:

    ``sums.{side}.{split}.{sum}``  the normal equations of the pass so far; counts are tokens
    ``fitted.{name in a plan}``    the tensors of every predictor fitted
    ``facts.{layer}.{side}``       [2]: the variance of held-out tokens, and the share of it that is explained
    ``errors.{layer}.{side}``      squared error per held-out token [2]: without any predictor, and with those kept
    """

    def __init__(
        self, loaded: LoadedModel, layers: tuple[LayerPlan, ...], tensors: Mapping[str, Tensor], data: TokenDataset,
        spec: PredictorSpec, workload: Workload, inputs: dict[str, Any], path: Path, reporter: Reporter,
    ) -> None:  # fmt: skip
        self.loaded, self.layers, self.data, self.spec = loaded, layers, data, spec
        self.workload, self.reporter, device = workload, reporter, loaded.model.device
        self.paged = [layer for layer in layers if layer.is_paged]
        self.targets = find_targets(layers, spec, loaded.geometry.cache_dtype)
        has_work = any(target.shape is not None for target in self.targets)
        self.splits = split_sequences(data) if has_work else {}
        indices = [layer.geometry.index for layer in self.paged]
        maps = rotary_maps(loaded.model, loaded.geometry, indices) if has_work else {}
        self.tables = {index: rotary.tensor().to(device) for index, rotary in maps.items()}
        self.tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        start = State({}, {PASSES: 0, SEQUENCES: 0})
        self.checkpoint = Checkpoint(path, KIND, inputs, start, reporter)
        self.starts, self.most_tokens = Starts(loaded.model), BATCH_TOKENS[device.type]

    def run(self) -> PredictorRecord:
        """All passes that are not done, then the record."""
        for number in range(self.checkpoint.state.done[PASSES], len(self.paged)):
            self._fit(number + 1)
        if self.checkpoint.state.done[PASSES] == len(self.paged):
            self._measure_errors()
        findings, cache_dtype = self.findings, self.loaded.geometry.cache_dtype
        needed = needed_tensors(with_predictors(self.layers, findings, self.spec), cache_dtype)
        stored = {name: tensor.cpu() for name, tensor in self._new_tensors().items() if name in needed}
        tokens = {split: 0 for split in (FIT, HELD_OUT)}
        for number, split in self.splits.items():
            tokens[split] += num_page_tokens(len(self.data.sequences[number]))
        subject = Subject(
            model=self.loaded.identity,
            cache_dtype=cache_dtype,
            spec=self.spec,
            workload=self.workload,
            data_fingerprint=self.data.fingerprint,
            data_description=self.data.description,
            num_fit_tokens=tokens[FIT],
            num_held_out_tokens=tokens[HELD_OUT],
        )
        return PredictorRecord(subject, findings, stored)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """One for each target, as far as passes went."""
        means = self.checkpoint.state.means
        found: list[Finding] = []
        for target in self.targets:
            name = f"{target.index}.{target.side}"
            variance, explained = means[f"facts.{name}"].total.tolist() if f"facts.{name}" in means else (0.0, None)
            finding = decide(target, explained, self.spec, self.workload)
            if f"errors.{name}" in means and variance > 0:
                assert finding.fit is not None
                plain, error = (means[f"errors.{name}"].result() / variance).tolist()
                finding = replace(finding, fit=replace(finding.fit, error=error, plain_error=plain))
            found.append(finding)
        return tuple(found)

    def _fit(self, number: int) -> None:
        """Pass ``number``: keys of that paged layer, counted from 0, and values of the one before."""
        sides = {layer.geometry.index: side for layer, side in zip(self.paged[number - 1 :], ("v", "k"), strict=False)}
        targets = [t for t in self.targets if t.shape is not None and sides.get(t.index) == t.side]
        if targets:
            last = max(target.index for target in targets)
            ways = [self._way(self.findings)]
            # Of the layer before, the values are not needed yet, and are exact until their predictor is
            # known.
            wanted = [Wanted(layer, SIDES) for layer in self.paged[: number - 1]]
            wanted.append(Wanted(self.paged[number - 1], ("k",)))
            wanted += [Wanted(layer, ()) for layer in self.paged[number : number + 1] if layer.geometry.index <= last]
            label = f"predictors: pass {number} of {len(self.paged)}"
            kept = self.paged[number - 1].geometry.index
            self._run_pass(label, (FIT, HELD_OUT), wanted, ways, partial(_sum_equations, targets), kept)
        means = {name: mean for name, mean in self.checkpoint.state.means.items() if not name.startswith("sums.")}
        for target in targets:
            means |= from_first(partial(self._solved, target))
        self.checkpoint.advance(State(means, {PASSES: number, SEQUENCES: 0}))

    def _solved(self, target: Target) -> dict[str, Mean]:
        """The target's predictor and what it explains, from the sums of the pass."""
        equations = {}
        for split in (FIT, HELD_OUT):
            prefix = f"sums.{target.side}.{split}."
            found = {n.removeprefix(prefix): m for n, m in self.checkpoint.state.means.items() if n.startswith(prefix)}
            sums = {name: mean.total for name, mean in found.items()}
            equations[split] = NormalEquations(sums, found["xx"].count)
        fit = equations[FIT].solve()
        predictor = compress(fit, self.spec, self.loaded.geometry.cache_dtype)
        variance = equations[HELD_OUT].result().y_variance_O.sum().item()
        facts = [variance, equations[HELD_OUT].explained_variance(*predictor.dense())]
        tensors = predictor.tensors(f"fitted.layers.{target.index}.{target.side}_predictor")
        tensors |= {f"facts.{target.index}.{target.side}": torch.tensor(facts, dtype=torch.float64)}
        return {name: Mean(tensor, 1) for name, tensor in tensors.items()}

    def _measure_errors(self) -> None:
        """The last pass, over held-out sequences: what the cache reads back without predictors and with
        them."""
        findings = self.findings
        kept = [target for target, finding in zip(self.targets, findings, strict=True) if finding.is_kept]
        if kept:
            ways = [self._way(()), self._way(findings)]
            wanted = [Wanted(layer, SIDES) for layer in self.paged]
            self._run_pass("predictors: errors", (HELD_OUT,), wanted, ways, partial(_sum_errors, kept))
        self.checkpoint.advance(State(self.checkpoint.state.means, {PASSES: len(self.paged) + 1, SEQUENCES: 0}))

    def _run_pass(
        self,
        label: str,
        splits: Sequence[str],
        wanted: Sequence[Wanted],
        ways: Sequence[Reconstruction],
        sums: Sums,
        kept: int | None = None,
    ) -> None:
        """Every sequence of ``splits`` that the pass has not seen through the model; its ``sums`` join the
        state. The next pass can begin at the layer ``kept``; without one, this pass begins at the first."""

        def measure(batches: Sequence[Batch]) -> list[dict[str, Mean]]:
            """Sums of a batch, where they were made until the end."""
            (batch,), found = batches, dict[str, Mean]()
            start = None if kept is None else self.starts.take(batch)
            first = 0 if start is None else start.layer
            reader = PageReader(self.loaded.model, self.loaded.geometry, wanted, ways, self.tables, first, kept)
            with naming(f"sequences {list(batch.numbers)}"):
                receive, here = sums(self._rows(batch), found), start and start.to(self.loaded.model.device)
                following = reader.read(batch, receive, here)
            self.starts.keep(batch, following)
            return [{name: Mean(mean.total.cpu(), mean.count) for name, mean in found.items()}]

        numbers = [number for number, split in self.splits.items() if split in splits]
        most = for_each_batch(self.data, self.most_tokens, measure, SEQUENCES, self.checkpoint, label, numbers=numbers)
        if most < self.most_tokens:
            self.starts.drop()
        self.most_tokens = most

    def _rows(self, batch: Batch) -> dict[str, list[slice]]:
        """Of each split, the rows of its sequences' pages."""
        found: dict[str, list[slice]] = {}
        first = 0
        for number, length in zip(batch.numbers, batch.lengths, strict=True):
            stop = first + num_page_tokens(length)
            found.setdefault(self.splits[number], []).append(slice(first, stop))
            first = stop
        return found

    def _way(self, findings: Sequence[Finding]) -> Reconstruction:
        """Pages as stored with the predictors of ``findings``."""
        layers = with_predictors(self.layers, findings, self.spec)
        return Reconstruction(layers, {**self.tensors, **self._new_tensors()}, self.loaded.geometry.cache_dtype)

    def _new_tensors(self) -> dict[str, Tensor]:
        """Rotary tables and fitted predictors by their names in a plan, on the model's device."""
        rotary = {f"layers.{index}.rotary": table for index, table in self.tables.items()}
        fitted = {n: m.total for n, m in self.checkpoint.state.means.items() if n.startswith("fitted.")}
        device = self.loaded.model.device
        return rotary | {name.removeprefix("fitted."): tensor.to(device) for name, tensor in fitted.items()}


# The rows of each split, in a layer's pages.
Rows = Mapping[str, Sequence[slice]]
# From a batch's rows, and a place for the sums, to a receiver of its layers.
Sums = Callable[[Rows, dict[str, Mean]], Receive]


def _sum_equations(targets: Sequence[Target], rows: Rows, found: dict[str, Mean]) -> Receive:
    before: list[LayerPages] = []

    def receive(index: int, exact: LayerPages, read_back: Sequence[LayerPages]) -> None:
        (inputs,) = read_back
        for target in targets:
            if target.index == index:
                x = before[0]["k"] if target.side == "k" else torch.cat([before[0]["v"], inputs["k"]], dim=-1)
                y = exact[target.side]
                for split, slices in rows.items():
                    mine = [torch.cat([pages[part] for part in slices]) for pages in (x, y)]
                    equations = NormalEquations.empty(x.shape[1], y.shape[1], x.device).update(*mine)
                    for name, total in equations.sums.items():
                        found[f"sums.{target.side}.{split}.{name}"] = Mean(total, equations.count)
        before[:] = [inputs]

    return receive


def _sum_errors(targets: Sequence[Target], rows: Rows, found: dict[str, Mean]) -> Receive:
    """The squared errors of what is read back, in each way."""

    def receive(index: int, exact: LayerPages, read_back: Sequence[LayerPages]) -> None:
        for target in targets:
            if target.index == index:
                wanted = exact[target.side].double()
                errors = [(pages[target.side].double() - wanted).square().sum(-1) for pages in read_back]
                found[f"errors.{index}.{target.side}"] = Mean.empty((len(errors),)).update(torch.stack(errors, -1))

    return receive
