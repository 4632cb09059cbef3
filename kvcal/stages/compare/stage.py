"""All recipes on one model in one run: every plan built, then every plan measured on the same texts and problems.

The workload is the comparison's, for all plans alike, so that bytes can be compared. 16 bits, KIVI-2 and KIVI-4 come
along. A recipe that is refused, in building or in measuring, becomes a row with the reason and the others go on; a
refused baseline ends the comparison, which would have nothing to stand on.

Every plan has its own folder of artifacts, so that a second run finds all of them current. A profile does not depend
on the budget: the plans of one recipe take it over from each other. A plan's calibration time is the sum over the
artifacts in its folder (see stage_times), such a profile included: what the plan would take by itself. A stage that was
interrupted counts from where it was taken up again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcal.artifact import differing_input, write_bytes_atomic
from kvcal.data.sequences import TokenDataset
from kvcal.errors import ArtifactError, KvcalError
from kvcal.folder import Folder, compute_dtype, flat, model_inputs
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan, Workload
from kvcal.progress import Reporter
from kvcal.recipe import EvaluateSpec, Recipe
from kvcal.stages.compare.points import Point
from kvcal.stages.compare.record import (
    BASELINES,
    Calibration,
    Comparison,
    Entry,
    Refusal,
    StageTime,
    load_comparison,
    save_comparison,
    with_shares,
)
from kvcal.stages.compare.times import artifacts, timed, total
from kvcal.stages.evaluate.stage import Row, evaluate, load_evaluation, scheduled_batch
from kvcal.strict import dump

FILE = "compare.json"

# All stages of a recipe up to its plan, resuming from the folder's artifacts.
Build = Callable[[Recipe, LoadedModel, Folder, Workload, Reporter], Plan]


def compare(
    loaded: LoadedModel,
    points: Sequence[Point],
    workload: Workload,
    spec: EvaluateSpec,
    data: TokenDataset,
    folder: Folder,
    build: Build,
    reporter: Reporter,
) -> Comparison:
    """Build and measure all ``points``; plans, rows and times stay in ``folder`` for the next run.

    ``spec`` and ``data``: what everything is measured with; ``spec.against`` is not used. Plans whose pages shrink on a
    schedule hold at most ``workload.batch`` sequences: with one of them, no plan is measured with more at once.

    Raises:
        ArtifactError: the folder is another model's, or a file of the comparison's own is corrupt or not writable.
        KvcalError: a baseline cannot be built or measured.
    """
    job = _Job(loaded, workload, folder, build, reporter, _known_seconds(folder.path / FILE, loaded))
    entries: dict[str, Entry] = {}
    plans: dict[str, Plan] = {}
    for number, point in enumerate(points):
        reporter.say(f"compare: {point.name} ({number + 1} of {len(points)})")
        try:
            entries[point.name], plan = _build(job, point)
        finally:  # what was finished has its time, whatever happened then
            _save(job, entries, spec, data)
        if plan is not None:
            plans[point.name] = plan
    spec = scheduled_batch(spec, plans.items(), reporter)
    rows, refusals = _measure(job, plans, spec, data)
    for name in plans:
        entries[name] = replace(entries[name], row=rows.get(name), refusal=refusals.get(name))
    return _save(job, entries, spec, data)


def evaluation_inputs(loaded: LoadedModel, spec: EvaluateSpec, data: TokenDataset) -> dict[str, Any]:
    """Everything but the plans that the rows depend on, flat."""
    return {
        **model_inputs(loaded),
        **flat("evaluate", dump(replace(spec, against=()))),
        "data.fingerprint": data.fingerprint,
        **compute_dtype(loaded),
    }


@dataclass(frozen=True)
class _Job:
    """What building and measuring share. ``seconds``, which grows: what every artifact took, by sha256; ``built``: the
    folder in which a recipe was built last, by the recipe's name."""

    loaded: LoadedModel
    workload: Workload
    folder: Folder
    build: Build
    reporter: Reporter
    seconds: dict[str, float]
    built: dict[str, Folder] = field(default_factory=dict)


def _known_seconds(path: Path, loaded: LoadedModel) -> dict[str, float]:
    """Times of an earlier run in this folder."""
    if not path.exists():
        return {}
    earlier = load_comparison(path)
    model = model_inputs(loaded)
    difference = differing_input(model, {key: earlier.inputs.get(key) for key in model})
    if difference is not None:
        raise ArtifactError(
            f"{path} was made from another model: {difference}",
            hint="choose another --out, or delete the folder if its artifacts are not needed",
        )
    return dict(earlier.stage_seconds)


def _build(job: _Job, point: Point) -> tuple[Entry, Plan | None]:
    """Build one plan: its entry, and the plan unless the recipe was refused."""
    folder = Folder.create(job.folder.path / "plans" / point.folder)
    _take_over_profile(job, point, folder)
    plan, refusal = None, None
    with timed(folder.path, job.seconds) as made:
        try:
            plan = job.build(point.recipe, job.loaded, folder, job.workload, job.reporter)
        except KvcalError as error:
            if point.is_baseline:
                raise
            refusal = Refusal("build", error.message, error.hint, error.exit_code)
            job.reporter.say(f"compare: {point.name} is refused: {error.message}")
    job.built[point.recipe.name] = folder
    found = artifacts(folder.path)
    stages = tuple(StageTime(name, digest, job.seconds.get(digest)) for name, digest in found.items())
    calibration = Calibration(total(found, job.seconds), plan is not None and not made, stages)
    recipe = point.recipe
    entry = Entry(point.name, recipe.name, recipe.sha256, point.bits, point.is_baseline, calibration, refusal)
    return entry, plan


def _take_over_profile(job: _Job, point: Point, folder: Folder) -> None:
    """Copy the profile of the same recipe at another budget into ``folder``: of this run if there is one, else, where
    ``folder`` has none, of an earlier run. The build itself finds out whether it is current."""
    if point.bits is None:
        return
    source = job.built[point.recipe.name].profile if point.recipe.name in job.built else None
    if source is None and not folder.profile.exists():
        stem = point.folder.rpartition("@")[0]
        source = next(iter(sorted(folder.path.parent.glob(f"{stem}@*/{folder.profile.name}"))), None)
    if source is not None and source.exists():
        content = source.read_bytes()
        if not folder.profile.exists() or folder.profile.read_bytes() != content:
            write_bytes_atomic(folder.profile, content)


def _measure(
    job: _Job, plans: dict[str, Plan], spec: EvaluateSpec, data: TokenDataset
) -> tuple[dict[str, Row], dict[str, Refusal]]:
    """Rows and refusals, by name. A plan that cannot be measured is left out, and the others are taken up again."""
    inputs, path = evaluation_inputs(job.loaded, spec, data), job.folder.evaluation
    digests = {name: plan.sha256 for name, plan in plans.items()}
    remaining, refusals = dict(plans), dict[str, Refusal]()
    while True:
        try:
            found = evaluate(job.loaded, list(remaining.items()), spec, data, inputs, path, job.reporter)
            return {row.name: row for row in found.rows}, refusals
        except KvcalError as error:
            measured = _measured(path, inputs)
            name = next((name for name in remaining if digests[name] not in measured), None)
            if name is None or name in BASELINES:
                raise
            refusals[name] = Refusal("evaluate", error.message, error.hint, error.exit_code)
            job.reporter.say(f"compare: {name} cannot be measured: {error.message}")
            del remaining[name]


def _measured(path: Path, inputs: dict[str, Any]) -> set[str]:
    """Digests of the plans that the evaluation's file holds for ``inputs``."""
    if not path.exists():
        return set()
    earlier = load_evaluation(path)
    return {row.plan_sha256 for row in earlier.rows} if differing_input(inputs, earlier.inputs) is None else set()


def _save(job: _Job, entries: dict[str, Entry], spec: EvaluateSpec, data: TokenDataset) -> Comparison:
    comparison = Comparison(
        model=job.loaded.identity.id,
        inputs=evaluation_inputs(job.loaded, spec, data),
        data=data.description,
        data_fingerprint=data.fingerprint,
        task_seed=spec.seed,
        workload=job.workload,
        stage_seconds=dict(sorted(job.seconds.items())),
        entries=with_shares(tuple(entries.values())),
    )
    save_comparison(comparison, job.folder.path / FILE)
    return comparison
