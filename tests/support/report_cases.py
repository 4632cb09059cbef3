"""Rows of an evaluation with given figures, and the plans they are of."""

from dataclasses import replace

from kvcal.geometry import AttentionGeometry, ModelIdentity
from kvcal.plan.plan import Format, LayerPlan, Plan, Workload
from kvcal.stages.evaluate.stage import Evaluation, Row, measured_bits
from kvcal.stages.evaluate.tasks import TaskResult, wilson_se
from kvcal.stages.evaluate.text import TextQuality

K3, V2, V8 = Format(3, "channel", 64), Format(2, "token", 32), Format(8, "token", 128)


def attention(index: int, window: int | None = None) -> AttentionGeometry:
    return AttentionGeometry(index, 8, 2, 64, 64, window)


def plan_of(*layers: LayerPlan) -> Plan:
    return Plan(ModelIdentity("m", "llama", "a", "b", "c"), "bfloat16", layers, Workload(8, 4096), {})


UNIFORM = plan_of(*(LayerPlan(attention(i), K3, V2) for i in range(4)))


def row(name: str, plan: Plan, kl: float, correct: int | None, se: float | None = 0.01) -> Row:
    quality = TextQuality(1.25, se, kl, se, 0.975, se, 8, 4000, 3500)
    tasks = (
        ()
        if correct is None
        else (TaskResult("chain", correct / 8, wilson_se(correct, 8), 8, correct, 0, 900, (500, 700)),)
    )
    bits, at_text = plan.bits_per_value(), measured_bits(plan, [400, 600])
    at_tasks = measured_bits(plan, tasks[0].lengths) if tasks else None
    return Row(name, plan.sha256, plan.workload, bits, plan.predicted_bytes, quality, at_text, tasks, at_tasks, 1.0)


def with_tasks(one: Row) -> Row:
    """The row with its task's result under the names of three."""
    return replace(one, tasks=tuple(replace(one.tasks[0], task=name) for name in ("ledger", "chain", "times")))


def evaluation(*rows: Row) -> Evaluation:
    return Evaluation({}, "text", "f", 1, rows)
