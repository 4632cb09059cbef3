"""A budget next to a model, before anything is measured: enough for 16 bits, for a plan, or too small."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcal.engines.states import state_bytes
from kvcal.errors import InfeasibleBudget
from kvcal.folder import Job
from kvcal.models.load import weight_bytes
from kvcal.plan.layer import bare_layers
from kvcal.plan.plan import Plan
from kvcal.quantities import format_bytes
from kvcal.recipe import Recipe
from kvcal.recipe_files import with_knobs
from kvcal.stages.allocate.budget import resolve_budget, workload_of
from kvcal.stages.formats import require_feasible


@dataclass(frozen=True)
class Need:
    """Bytes that the model's own cache takes, of a whole device with weights and workspace, and those of the
    budget."""

    needed_bytes: int
    budget_bytes: int

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.budget_bytes

    def __str__(self) -> str:
        return f"{format_bytes(self.needed_bytes)} of {format_bytes(self.budget_bytes)}"


def in_own_context(job: Job) -> Job:
    """The job for texts as long as the model takes; of a model that does not say how long, as the recipe
    says."""
    spec, most = job.recipe.allocate, job.loaded.max_context
    assert spec is not None
    own = f"{most}, the model's own maximum" if most else f"{spec.context}, the recipe's: the model states none"
    job.reporter.say(f"plan: --context {own}")
    return replace(job, recipe=with_knobs(job.recipe, {"allocate.context": most or spec.context}))


def with_states(job: Job) -> Job:
    """The job with the bytes of a state in vLLM, where the plan is for it and the model has states."""
    spec, loaded = job.recipe.allocate, job.loaded
    if spec is None or spec.engine != "vllm" or not any(layer.state_bytes for layer in loaded.geometry.layers):
        return job
    config = loaded.model.config.get_text_config(decoder=True).to_dict()
    nbytes = spec.state_bytes or state_bytes(config, spec.tp, spec.step_tokens, loaded.geometry.cache_dtype)
    return replace(job, recipe=with_knobs(job.recipe, {"allocate.state_bytes": nbytes}))


def need_of_16_bits(job: Job) -> Need:
    """Bytes at 16 bits, next to the recipe's budget."""
    loaded, spec = job.loaded, job.recipe.allocate
    assert spec is not None
    layers, cache_dtype = bare_layers(loaded.geometry), loaded.geometry.cache_dtype
    split = resolve_budget(spec, layers, cache_dtype, weight_bytes(loaded.model), loaded.vocab_size)
    plan = Plan(loaded.identity, cache_dtype, layers, workload_of(spec), {})
    return Need(split.overhead + plan.raw_nbytes(plan.workload.lengths), split.budget)


def closest_recipe(job: Job) -> Recipe:
    """The job's recipe; where its budget is too small, with the smallest that is feasible, which is told."""
    try:
        require_feasible(job)
    except InfeasibleBudget as refused:
        spec = job.recipe.allocate
        assert spec is not None
        kinds = {"bits": spec.bits, "budget": spec.budget, "kv_budget": spec.kv_budget}
        kind = next((name for name, given in kinds.items() if given is not None), "kv_budget")
        least, size = refused.least_bits, format_bytes(refused.smallest_bytes)
        value = least if kind == "bits" else f"{refused.smallest_bytes}B"
        job.reporter.say(f"warning: {refused.message}\nplan: makes the closest plan, of {size}, {least} bits")
        return with_knobs(job.recipe, {f"allocate.{kind}": value})
    return job.recipe
