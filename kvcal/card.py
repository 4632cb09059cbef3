"""The card of a plan: README.md next to it, as hubs and registries read it. Front matter in YAML has what was
measured; the page states the plan, how it was made, KL and look-ups next to 16 bits, what fits, how it is
served, and a verdict. What nothing in the folder has measured is said to be unchecked.

The verdict is the worst of its findings, by limits that the page states:

    infeasible  more bytes than a limit, or than a request needs in the engine's memory
    regression  it destroys the model (kvcal.plan.damage), is beyond a limit of quality, or worse than another
                card's plan by more than two standard errors of the difference
    unchecked   not evaluated next to 16 bits, or not on the texts and tasks of the other card
    accept      none of these

The check for damage that lies next to a plan reads few texts, chosen to find what destroys a model. So it is
shown, and refuses a plan, but is no evaluation: no plan is accepted by it, and no further limit is held against it.

A card is compared with by its front matter, which holds its figures. Its template is card.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass as pydantic_dataclass

from kvcal import tables
from kvcal.artifact import sha256_json, write_text_atomic
from kvcal.console import command_line
from kvcal.engines.capacity import Capacity, capacity
from kvcal.engines.support import require_served
from kvcal.errors import ArtifactError, InfeasibleBudget, UnsupportedModel
from kvcal.folder import Folder
from kvcal.geometry import StateGeometry
from kvcal.plan.damage import LIMITS, MAX_KL, MIN_KL, MIN_TOP1, Damage, is_destroyed, load_damage
from kvcal.plan.plan import Plan, load_plan
from kvcal.quantities import format_bytes, format_kl
from kvcal.recipe import BUDGET_KINDS
from kvcal.stages.allocate.stage import allocation_of
from kvcal.stages.evaluate.stage import ALL_TASKS, Evaluation, Gates, Row, load_evaluation, table_columns
from kvcal.strict import STRICT, Amount, Number, NumBytes, Share, dump, parse

FILE, LIBRARY = "README.md", "kvcal"
ERRORS = 2  # of a difference, beyond which it is one
FP8_BITS = 8
LEFT_OUT = ("generated", "bits at tasks' lengths")  # of an evaluation's columns
LIMIT_OF_DAMAGE = LIMITS.removeprefix("allowed: ")
MARKED = f"library_name: {LIBRARY}\n"
Verdict = Literal["accept", "unchecked", "regression", "infeasible"]
WORSE: tuple[Verdict, ...] = ("accept", "unchecked", "regression", "infeasible")


@pydantic_dataclass(frozen=True, config=STRICT)
class TaskFigures:
    """A task's share of right answers, and the nats that an answer loses to 16 bits where it is read; with
    standard errors, None where there are none."""

    accuracy: Share
    accuracy_error: Amount | None
    lost: Number | None
    lost_error: Amount | None


@pydantic_dataclass(frozen=True, config=STRICT)
class Figures:
    """Figures that one card keeps for the next. ``measured_with``: sha256 of texts and settings of the
    evaluation, None of a plan that was not measured; ``kl`` in nats a token, at ``nbytes`` of cache at the
    plan's workload."""

    verdict: Verdict
    model: str
    plan_sha256: str
    bits_per_value: Amount
    nbytes: NumBytes
    measured_with: str | None
    kl: Number | None
    kl_error: Amount | None
    top1: Share | None
    tasks: dict[str, TaskFigures]


@dataclass(frozen=True)
class Finding:
    """One limit and what was measured, both for people."""

    what: str
    limit: str
    measured: str
    verdict: Verdict


@dataclass(frozen=True)
class Card:
    """A written card."""

    path: Path
    figures: Figures
    findings: tuple[Finding, ...]


def write_card(folder: Folder, gates: Gates, last: Path | None = None, memory: int | None = None) -> Card:
    """Write README.md next to the plan in ``folder``, of what lies there. ``gates``: further limits;
    ``last``: a card to be no worse than; ``memory``: bytes of one device for the cache in vLLM.

    Raises:
        ArtifactError: no plan, a damaged artifact, a ``last`` that is no card or of another model, or a README
            that is not kvcal's.
    """
    from jinja2 import Environment

    plan, path = load_plan(folder.plan), folder.path / FILE
    if path.is_file() and MARKED not in path.read_text(encoding="utf-8", errors="replace"):
        raise ArtifactError(f"{path} is no card of kvcal", "move it away: the plan's card takes its place")
    before = None if last is None else read_card(last)
    if before is not None and before.model != plan.model.id:
        raise ArtifactError(f"{last} is of {before.model}, the plan of {plan.model.id}", "name a card of this model")
    evaluation, row = _measured(folder, plan)
    figures = _figures(plan, evaluation, row)
    damage = load_damage(folder.plan, plan)
    findings, fits = list(_findings(figures, row, damage, gates, before)), None
    if memory is not None:
        fits, finding = _in_engine(plan, memory)
        findings.append(finding)
    figures = replace(figures, verdict=max((one.verdict for one in findings), key=WORSE.index))
    environment = Environment(keep_trailing_newline=True)
    environment.filters["cell"] = _cell
    template = environment.from_string(Path(__file__).with_name("card.md").read_text(encoding="utf-8"))
    page = template.render(_page(folder, plan, figures, evaluation, damage, findings, fits))
    write_text_atomic(path, f"---\n{_front_matter(figures, evaluation)}\n---\n\n{page}")
    return Card(path, figures, tuple(findings))


def read_card(path: Path) -> Figures:
    """The figures of a card. ArtifactError: no such file, or no card."""
    hint = f"name a {FILE} that `kvcal card` has written"
    if not path.is_file():
        raise ArtifactError(f"{path}: no such card", hint)
    found = re.search(rf"^{LIBRARY}: (\{{.*\}})$", path.read_text(encoding="utf-8", errors="replace"), re.M)
    try:
        content = json.loads(found[1]) if found is not None else None
    except ValueError:
        content = None
    if content is None:
        raise ArtifactError(f"{path} is no card of kvcal", hint)
    return parse(Figures, content, str(path), ArtifactError, hint)


def _measured(folder: Folder, plan: Plan) -> tuple[Evaluation | None, Row | None]:
    """The evaluation that holds the plan, and its row: in the folder, or of the comparison that it lies
    in."""
    above = folder.path.absolute().parents
    for path in (folder.evaluation, *(Folder(one).evaluation for one in above[2:3])):
        evaluation = load_evaluation(path) if path.is_file() else None
        for row in evaluation.rows if evaluation is not None else ():
            if row.plan_sha256 == plan.sha256:
                return evaluation, row
    return None, None


def _figures(plan: Plan, evaluation: Evaluation | None, row: Row | None) -> Figures:
    common = plan.model.id, plan.sha256, plan.bits_per_value(), plan.predicted_bytes
    if evaluation is None or row is None:
        return Figures("unchecked", *common, None, None, None, None, {})
    tasks = {one.task: TaskFigures(one.accuracy, one.accuracy_se, one.lost, one.lost_se) for one in row.tasks}
    text, measured_with = row.text, sha256_json(evaluation.inputs)
    return Figures("accept", *common, measured_with, text.kl, text.kl_se, text.top1_agreement, tasks)


def _findings(
    figures: Figures, row: Row | None, damage: Damage | None, gates: Gates, before: Figures | None
) -> Iterator[Finding]:
    if gates.max_bytes is not None:
        verdict: Verdict = "accept" if figures.nbytes <= gates.max_bytes else "infeasible"
        yield Finding("bytes", str(gates.max_bytes), str(figures.nbytes), verdict)
    if damage is not None and (row is None or not damage.is_of_evaluation):
        what = f"check for damage, {damage.num_tokens} tokens"
        yield _not_destroyed(what, damage.kl, damage.kl_error, damage.top1)
    if row is None or figures.kl is None or figures.top1 is None:
        yield Finding("evaluation next to 16 bits", "there is one", "none", "unchecked")
        return
    yield _not_destroyed("damage", figures.kl, figures.kl_error, figures.top1)
    is_there = {task: task in figures.tasks or (task == ALL_TASKS and bool(row.tasks)) for task in gates.min_accuracy}
    known = {task: share for task, share in gates.min_accuracy.items() if is_there[task]}
    for one in replace(gates, min_accuracy=known, max_bytes=None).results(row):
        error = "" if one.standard_error is None else f" ± {one.standard_error:.2g}"
        passed: Verdict = "accept" if one.passed else "regression"
        yield Finding(one.gate.replace("_", " "), f"{one.limit:g}", f"{one.measured:.4g}{error}", passed)
    for task in gates.min_accuracy:
        if not is_there[task]:
            yield Finding(f"min accuracy {task}", f"{gates.min_accuracy[task]:g}", "", "unchecked")
    if before is not None:
        yield from _against(figures, before)


def _not_destroyed(what: str, kl: float, kl_error: float | None, top1: float) -> Finding:
    shown = f"{format_kl(kl, kl_error)}, top-1 {top1:.1%}"
    return Finding(what, LIMIT_OF_DAMAGE, shown, "regression" if is_destroyed(kl, top1) else "accept")


def _against(ours: Figures, theirs: Figures) -> Iterator[Finding]:
    """Figures that both have, ours no worse."""
    if theirs.measured_with != ours.measured_with:
        yield Finding("the card before", "the same texts and tasks", "others", "unchecked")
        return
    pairs = [("KL of the card before", ours.kl, ours.kl_error, theirs.kl, theirs.kl_error)]
    for task, one in theirs.tasks.items():
        other = ours.tasks[task]
        if one.lost is not None and other.lost is not None:
            pairs.append((f"nats lost in {task}", other.lost, other.lost_error, one.lost, one.lost_error))
        else:  # as a loss, too
            errors = other.accuracy_error, one.accuracy_error
            pairs.append((f"wrong in {task}", 1 - other.accuracy, errors[0], 1 - one.accuracy, errors[1]))
    for what, mine, my_error, its, its_error in pairs:
        assert mine is not None and its is not None
        error = ((my_error or 0.0) ** 2 + (its_error or 0.0) ** 2) ** 0.5
        worse: Verdict = "regression" if mine - its > ERRORS * error else "accept"
        yield Finding(what, f"{its:.4g} + {ERRORS * error:.2g}", f"{mine:.4g}", worse)


def _in_engine(plan: Plan, memory: int) -> tuple[Capacity | None, Finding]:
    """Requests that fit in vLLM at the plan's context."""
    what = f"a request of {plan.workload.context} tokens in vLLM"
    if any(isinstance(layer.geometry, StateGeometry) for layer in plan.layers):  # their bytes are the engine's
        return None, Finding(what, f"{memory} bytes", "states beside pages", "unchecked")
    try:
        require_served(plan, True, "vllm")
        found = capacity("vllm", plan, memory, 1, plan.workload.context)
    except InfeasibleBudget as refused:
        return None, Finding(what, f"{memory} bytes", f"{refused.smallest_bytes} bytes", "infeasible")
    except UnsupportedModel:
        return None, Finding(what, f"{memory} bytes", "not served", "unchecked")
    return found, Finding(what, f"{memory} bytes", f"{found.concurrency:.2f} at once", "accept")


def _page(
    folder: Folder, plan: Plan, figures: Figures, evaluation: Evaluation | None, damage: Damage | None,
    findings: list[Finding], fits: Capacity | None,
) -> dict[str, Any]:  # fmt: skip
    """The values that the template shows."""
    columns: list[tuple[str, tuple[str, ...]]] = []
    unchecked = []
    if evaluation is not None:
        columns = [one for one in table_columns(evaluation.rows) if one[0] not in LEFT_OUT]
    if evaluation is None or all(row.name != "fp8" for row in evaluation.rows):
        unchecked.append("fp8 (`--set 'evaluate.against=[\"fp8\"]'` measures it)")
    if not any(task.lost is not None for task in figures.tasks.values()):
        unchecked.append("look-ups (`kvcal eval --tasks rows:4096,late:4096` measures them)")
    reasons = [f"{one.what}: {one.measured or 'not measured'}" for one in findings if one.verdict == figures.verdict]
    because = "All that was measured is within the limits." if figures.verdict == "accept" else "; ".join(reasons) + "."
    if damage is not None and figures.verdict == "unchecked":
        because += f" The check for damage is within its limits: {damage}."
    try:
        require_served(plan, True, "vllm")
        refused = None
    except UnsupportedModel as error:
        refused = error.message
    raw, workload = plan.raw_nbytes(plan.workload.lengths), plan.workload
    tokens = workload.batch * workload.context
    in_fp8 = raw * FP8_BITS // 16
    rows = [("cache", *map(format_bytes, (raw, in_fp8, figures.nbytes)))]
    rows.append(("bytes a token", *(f"{one / tokens:.0f}" for one in (raw, in_fp8, figures.nbytes))))
    if fits is not None:
        at_16 = fits.raw_tokens / fits.context
        cells = (f"{one:.1f}" for one in (at_16, at_16 * 16 / FP8_BITS, fits.concurrency))
        rows.append((f"requests of {fits.context} tokens in {format_bytes(fits.memory)} of vLLM", *cells))
    return {
        "title": f"{plan.model.id}: a KV cache of {figures.bits_per_value:.2f} bits",
        "figures": figures,
        "because": because,
        "facts": _facts(folder, plan),
        "damage": damage,
        "texts": "" if evaluation is None else evaluation.data,
        "columns": [head for head, _ in columns],
        "rows": list(zip(*(cells for _, cells in columns), strict=True)),
        "unchecked": unchecked,
        "eval_line": command_line("eval", "plan.safetensors", "--model", plan.model.id, "--out", "."),
        "findings": findings,
        "max_kl": f"{MAX_KL:g}",
        "min_kl": f"{MIN_KL:g}",
        "min_top1": f"{MIN_TOP1:.0%}",
        "workload": workload,
        "capacity": rows,
        "refused": refused,
        "serve_line": command_line("serve-args", "plan.safetensors", "--engine", "vllm", "--model", plan.model.id),
    }


def _facts(folder: Folder, plan: Plan) -> list[tuple[str, str]]:
    """The plan, its model, and the command that made it."""
    model, workload = plan.model, plan.workload
    raw, total = plan.raw_nbytes(workload.lengths), plan.predicted_bytes
    return [
        ("model", f"{model.id} ({model.model_type}), config {model.config_sha256[:12]}, "
                  f"weights {model.weights_sha256[:12]}"),
        ("plan", f"sha256 {plan.sha256}"),
        ("made by", _made_by(folder, plan)),
        (tables.bits_name(plan), f"{plan.bits_per_value():.3f} at {workload.batch} x {workload.context} tokens"),
        ("cache", f"{format_bytes(total)}, {raw / total:.2f}x smaller than 16 bits"),
    ]  # fmt: skip


def _made_by(folder: Folder, plan: Plan) -> str:
    """The command that makes this plan, of the allocation that lies there; without one, its recipe."""
    recipe = plan.provenance.get("recipe")
    try:
        inputs = allocation_of(plan, folder)[1]
    except ArtifactError:
        inputs = {}
    budget = next((kind for kind in BUDGET_KINDS if inputs.get(f"allocate.{kind}") is not None), None)
    if recipe is None or budget is None:
        return "allocated stage by stage" if recipe is None else f"recipe `{recipe}`"
    words: list[object] = ["plan", plan.model.id, "--recipe", recipe]
    if budget == "same_bytes_as":
        words += ["--set", f"allocate.same_bytes_as={inputs['allocate.same_bytes_as']}"]
    else:
        words += [f"--{budget.replace('_', '-')}", inputs[f"allocate.{budget}"]]
    words += ["--batch", plan.workload.batch, "--context", plan.workload.context]
    for key, option, default in (("engine", "--for-engine", None), ("tp", "--tp", 1), ("drafts", "--drafts", 0)):
        if inputs.get(f"allocate.{key}") not in (None, default):
            words += [option, inputs[f"allocate.{key}"]]
    return f"`{command_line(*words)}`"


def _cell(text: str) -> str:
    """Text as Markdown shows it, in a row of a table, too: names are of users' files."""
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").split())


def _front_matter(figures: Figures, evaluation: Evaluation | None) -> str:
    """YAML of a hub's model card, with the figures under ``kvcal``: JSON, which YAML holds."""
    from huggingface_hub import EvalResult, ModelCardData

    measured = [("kl", "KL to 16 bits, nats a token", figures.kl, figures.kl_error)]
    measured.append(("top1", "same next token as at 16 bits", figures.top1, None))
    for name, task in figures.tasks.items():
        measured.append(("accuracy", name, task.accuracy, task.accuracy_error))
        measured.append(("nats_lost", f"{name}: nats that an answer loses", task.lost, task.lost_error))
    results = [
        EvalResult(
            "text-generation", LIBRARY, "" if evaluation is None else evaluation.data, kind, value, metric_name=name,
            metric_args=None if error is None else {"standard_error": error},
        )
        for kind, name, value, error in measured
        if value is not None
    ]  # fmt: skip
    data = ModelCardData(
        base_model=figures.model if "/" in figures.model else None,
        base_model_relation="quantized" if "/" in figures.model else None,
        library_name=LIBRARY,
        tags=[LIBRARY, "kv-cache", "quantization"],
        model_name=f"{figures.model} KV cache at {figures.bits_per_value:.2f} bits",
        eval_results=results or None,
    )
    return f"{data.to_yaml()}\n{LIBRARY}: {json.dumps(dump(figures))}"
