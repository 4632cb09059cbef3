"""All recipes on one model in one run: every plan built, then every plan measured on the same texts and problems.

The workload is the comparison's, for all plans alike, so that bytes can be compared. 16 bits, KIVI-2 and KIVI-4 come
along. A recipe that raises an error, in building or in measuring, becomes a row with the reason and the others go on;
an error of a baseline ends the comparison, which would have nothing to stand on.

Every plan has its own folder of artifacts, so that a second run finds all of them current. A profile does not depend
on the budget: the plans of one recipe take it over from each other. A plan's calibration time is the sum over the
artifacts in its folder, such a profile included: what the plan would take by itself. A stage that was interrupted
counts from where it was taken up again.

Stages run one after the other and each writes one file when it is done, so a stage's time is from the end of the one
before (at first: the start) to the writing of its file. Times belong to the bytes made: they are kept by sha256, and a
file that lies there unchanged, or is copied into another folder, still has its time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvcal.artifact import sha256_file, write_bytes_atomic
from kvcal.data.sequences import TokenDataset
from kvcal.distributed import gather
from kvcal.errors import KvcalError, RankFailed
from kvcal.folder import Folder, model_inputs, require_model
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan, Workload
from kvcal.progress import SILENT, Reporter
from kvcal.recipe import EvaluateSpec, Recipe
from kvcal.stages.compare.record import (
    BASELINES,
    Calibration,
    Comparison,
    Entry,
    Point,
    Refusal,
    StageTime,
    load_comparison,
    save_comparison,
    with_shares,
)
from kvcal.stages.evaluate import Row, evaluate, evaluation_inputs, kept_rows, scheduled_batch

FILE = "compare.json"

# All stages of a recipe up to its plan, resuming from the folder's artifacts.
Build = Callable[[LoadedModel, Folder, Recipe, Workload, Reporter], Plan]


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
    seconds, refused = _earlier(folder.path / FILE, loaded, workload)
    job = _Job(loaded, workload, data, folder, build, reporter, seconds, refused)
    entries: dict[str, Entry] = {}
    plans: dict[str, Plan] = {}
    for number, point in enumerate(points):
        reporter.say(f"compare: {point.name} ({number + 1} of {len(points)})")
        known = len(job.seconds)
        try:
            entries[point.name], plan = job.build_point(point)
        finally:  # what was finished has its time, whatever happened then
            if len(job.seconds) > known:  # else an earlier run's rows stay until there are new ones
                job.save(entries, spec)
        if plan is not None:
            plans[point.name] = plan
    spec = scheduled_batch(spec, plans.items(), reporter)
    rows, refusals = job.measure(plans, spec)
    for name in plans:
        entries[name] = replace(entries[name], row=rows.get(name), refusal=refusals.get(name))
    return job.save(entries, spec)


def _earlier(path: Path, loaded: LoadedModel, workload: Workload) -> tuple[dict[str, float], frozenset[str]]:
    """An earlier run in this folder: its times, and the recipes (sha256) that could not be built for the workload."""
    if not path.exists():
        return {}, frozenset()
    earlier = load_comparison(path)
    require_model(path, model_inputs(loaded), earlier.inputs)
    refused = [entry for entry in earlier.entries if entry.refusal is not None and entry.refusal.stage == "build"]
    is_same = earlier.workload == workload
    return dict(earlier.stage_seconds), frozenset(entry.recipe_sha256 for entry in refused if is_same)


@dataclass(frozen=True)
class _Job:
    """A comparison in work. ``seconds``, which grows: the time of every artifact, by sha256; ``refused``: recipes
    (sha256) that an earlier run could not build; ``built``: the folder in which a recipe was built last, by the
    recipe's name."""

    loaded: LoadedModel
    workload: Workload
    data: TokenDataset
    folder: Folder
    build: Build
    reporter: Reporter
    seconds: dict[str, float]
    refused: frozenset[str]
    built: dict[str, Folder] = field(default_factory=dict)

    def build_point(self, point: Point) -> tuple[Entry, Plan | None]:
        """Build one plan: its entry, and the plan unless the recipe raised an error."""
        folder = Folder.create(self.folder.path / "plans" / point.folder)
        self._take_over_profile(point, folder)
        self._take_over_search(point, folder)
        gather(None)  # until rank 0 has copied
        plan, refusal, recipe = None, None, point.recipe
        with timed(folder.path, self.seconds):
            try:
                plan = self.build(self.loaded, folder, recipe, self.workload, self.reporter)
            except KvcalError as error:
                if point.is_baseline or isinstance(error, RankFailed):
                    raise
                refusal = Refusal("build", error.message, error.hint, error.exit_code)
                self.reporter.say(f"compare: {point.name} is refused: {error.message}")
        self.built[recipe.name] = folder
        digests = artifacts(folder.path)
        stages = tuple(StageTime(name, digest, self.seconds.get(digest)) for name, digest in digests.items())
        calibration = Calibration(total(digests, self.seconds), stages)
        entry = Entry(point.name, recipe.name, recipe.sha256, point.bits, point.is_baseline, calibration, refusal)
        return entry, plan

    def _take_over_profile(self, point: Point, folder: Folder) -> None:
        """Copy the profile of the same recipe at another budget into ``folder``: of this run if there is one, else,
        where ``folder`` has none, of an earlier run. The build itself finds out whether it is current. A recipe that
        was refused then needs none: a repeated comparison writes nothing."""
        if point.bits is None or point.recipe.sha256 in self.refused:
            return
        source = self.built[point.recipe.name].profile if point.recipe.name in self.built else None
        if source is None or not source.exists():  # a budget that nothing fits is refused without a profile
            stem = point.folder.rpartition("@")[0]
            found = [] if folder.profile.exists() else folder.path.parent.glob(f"{stem}@*/{folder.profile.name}")
            source = min(found, default=None)
        if source is not None:
            content = source.read_bytes()
            if not folder.profile.exists() or folder.profile.read_bytes() != content:
                write_bytes_atomic(folder.profile, content)

    def _take_over_search(self, point: Point, folder: Folder) -> None:
        """Copy into ``folder`` what the search of the same recipe at a smaller budget measured and shipped: this one
        starts from there."""
        earlier = self.built.get(point.recipe.name)
        if point.bits is None or point.recipe.search is None or earlier is None or folder.search.exists():
            return
        for path in earlier.path.glob(f"{folder.search.stem}*{folder.search.suffix}"):
            content, name = path.read_bytes(), path.name
            if path == earlier.search:
                name = f"{path.stem}.earlier-{hashlib.sha256(content).hexdigest()[:12]}{path.suffix}"
            write_bytes_atomic(folder.path / name, content)

    def measure(self, plans: Mapping[str, Plan], spec: EvaluateSpec) -> tuple[dict[str, Row], dict[str, Refusal]]:
        """Rows and refusals, by name. A plan that cannot be measured is left out, and the others are taken up again."""
        inputs, path = evaluation_inputs(self.loaded, spec, self.data), self.folder.evaluation
        remaining, refusals = dict(plans), dict[str, Refusal]()
        while True:
            try:
                plans_left = list(remaining.items())
                evaluation = evaluate(self.loaded, plans_left, spec, self.data, inputs, path, self.reporter)
                return {row.name: row for row in evaluation.rows}, refusals
            except RankFailed:
                raise
            except KvcalError as error:
                gather(None)  # until rank 0 has written the rows
                measured = kept_rows(path, inputs, SILENT)
                name = next((name for name, plan in remaining.items() if plan.sha256 not in measured), None)
                if name is None or name in BASELINES:
                    raise
                refusals[name] = Refusal("evaluate", error.message, error.hint, error.exit_code)
                self.reporter.say(f"compare: {name} cannot be measured: {error.message}")
                del remaining[name]

    def save(self, entries: Mapping[str, Entry], spec: EvaluateSpec) -> Comparison:
        comparison = Comparison(
            model=self.loaded.identity.id,
            inputs=evaluation_inputs(self.loaded, spec, self.data),
            data=self.data.description,
            data_fingerprint=self.data.fingerprint,
            task_seed=spec.seed,
            workload=self.workload,
            stage_seconds=dict(sorted(self.seconds.items())),
            entries=with_shares(tuple(entries.values())),
        )
        save_comparison(comparison, self.folder.path / FILE)
        return comparison


def artifacts(folder: Path) -> dict[str, str]:
    """The sha256 of every finished artifact in ``folder``, by file name, the oldest first."""
    files = [path for path in folder.glob("*.safetensors") if ".partial." not in path.name]
    files.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
    return {path.name: sha256_file(path) for path in files}


@contextmanager
def timed(folder: Path, seconds: dict[str, float]) -> Iterator[None]:
    """Note in ``seconds``, by sha256, the time of every artifact that is made within. Also when it is left by an error:
    what was finished until then has its time."""
    before, previous = artifacts(folder), time.time()
    try:
        yield
    finally:
        for name, digest in artifacts(folder).items():
            if before.get(name) != digest:
                written = (folder / name).stat().st_mtime
                # The first time stays. Clocks of files are coarse, and may be behind.
                seconds.setdefault(digest, round(max(0.0, written - previous), 3))
                previous = max(previous, written)


def total(stages: Mapping[str, str], seconds: Mapping[str, float]) -> float | None:
    """Seconds of all ``stages`` (sha256 by file name) together; None where one of them is not known."""
    if any(digest not in seconds for digest in stages.values()):
        return None
    return round(sum(seconds[digest] for digest in stages.values()), 3)
