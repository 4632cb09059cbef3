"""The phases of a recipe's stages and their expected work, from shapes alone: for the time that is left of a command.

Work is in tokens through the model, as an evaluation of texts feeds them. The constants below were measured on the
embedded model on a CPU; the phases of a command that have ended correct them all at once (kvcal.progress).
"""

from __future__ import annotations

import math

from kvcal.data.sequences import DataSpec
from kvcal.folder import Job, profile_spec
from kvcal.geometry import AttentionGeometry
from kvcal.progress import Phase
from kvcal.recipe import EvaluateSpec, FeedbackSpec, ReparamSpec
from kvcal.stages.search.cost import expected_plans

# Tokens through the model that take as long as: a token with its gradients and candidates, a token of a plan whose KL
# is measured, a token through the observers of λ and of error feedback, a step of a batch that generates.
GRADIENT, DIVERGENCE, OBSERVED, STEP = 2.5, 1.3, 1.5, 20.0
# Of the tokens that may be generated, the share that is until the last problem of a batch ends.
GENERATED = 0.5


def expected_phases(job: Job, evaluates: bool) -> list[Phase]:
    """Those of ``run`` (or, without ``evaluates``, of ``build_plan``), in order. One that is skipped tells nothing."""
    recipe, context = job.recipe, job.loaded.max_context or math.inf
    layers = sum(isinstance(layer, AttentionGeometry) for layer in job.loaded.geometry.layers)

    def tokens(spec: DataSpec | ReparamSpec | FeedbackSpec) -> float:
        return spec.num_samples * min(spec.seq_len, context)

    phases = []
    if recipe.importance or (recipe.allocate and not recipe.search):
        spec = profile_spec(recipe.profile, job.loaded)
        places, texts = 2 * layers, min(spec.kl_samples, recipe.data.num_samples)
        bits = 1 if spec.kl_measured == "lowest" else len(spec.kl_bits)
        plans = places * (1 + bits * len(spec.quantizers) / 2)  # on the mean, half of the layers are run
        phases.append(Phase("profile: gradients", GRADIENT * tokens(recipe.data)))
        phases.append(
            Phase("profile: divergence", DIVERGENCE * plans * texts * min(spec.kl_tokens, recipe.data.seq_len))
        )
    if recipe.search:
        plans = expected_plans(recipe.search, layers)
        texts = min(recipe.search.kl_samples, recipe.data.num_samples)
        work = DIVERGENCE * plans * texts * min(recipe.search.kl_tokens, recipe.data.seq_len)
        phases.append(Phase("search: ", work, plans))
    if recipe.tune:
        steps = recipe.evaluate.max_new_tokens * GENERATED
        batches = math.ceil(len(recipe.tune.tasks) * recipe.tune.num_problems / recipe.evaluate.batch)
        phases.append(Phase("tune: trials", STEP * recipe.tune.num_trials * batches * steps))
    if recipe.reparam and not recipe.search:
        work = OBSERVED * tokens(recipe.reparam)
        phases += [
            Phase("reparam: statistics", work),
            Phase("reparam: search", work * (1 + recipe.reparam.num_steps / 20)),
        ]
    if recipe.predictors and not recipe.search:
        work = tokens(recipe.data) * layers / 2  # a pass for each layer; on the mean, half of them are run
        phases.append(Phase("predictors: ", work, recipe.data.num_samples * layers))
    if recipe.feedback and not recipe.search:
        phases.append(Phase("feedback", OBSERVED * tokens(recipe.feedback)))
    if evaluates:
        plans = len(recipe.evaluate.against) + 1
        phases.append(Phase("evaluate: plans", plans * (tokens(recipe.evaluate.data) + _generated(recipe.evaluate))))
    return [phase for phase in phases if phase.work]


def _generated(spec: EvaluateSpec) -> float:
    """The work of a plan's problems, each task in batches."""
    batches = math.ceil(len(spec.tasks) * spec.num_problems / spec.batch)
    return STEP * batches * spec.max_new_tokens * GENERATED
