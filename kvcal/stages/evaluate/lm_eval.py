"""Accuracy of a plan on a task of the lm-evaluation-harness, whose model reads a plan's packed cache.

The harness's Hugging Face model (``HFLM``) encodes, cuts, batches and stops; only its two calls of the model are
replaced. Likelihoods are decode-faithful: context and continuation are fed in chunks that end where pages are written
(see divergence), so that every token reads what it would read in decoding. Generation is ``model.generate``, whose
prompt attends to itself at full precision, as in use.

``lm_eval`` is optional, and imported when a task needs it. Left out: chat templates.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvcal.cache.plan_cache import PlanCache
from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.recipe import LM_EVAL
from kvcal.stages.divergence import feed
from kvcal.stages.evaluate.generation import PLAIN_DECODING, generate_packed
from kvcal.stages.evaluate.text import require_predicted_bytes


def require_lm_eval() -> None:
    """UsageError unless the harness can be imported."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            f"a task named {LM_EVAL}... needs the lm-evaluation-harness, which is not installed",
            hint="pip install lm-eval[hf], or choose one of the embedded tasks",
        )


def packed_cache_lm(loaded: LoadedModel, plan: Plan, batch: int) -> Any:
    """The harness's model of ``loaded``, reading ``plan``'s packed cache, ``batch`` sequences at once. Raises
    UsageError: the model has no tokenizer, or the harness is not installed."""
    require_lm_eval()
    from lm_eval.models.huggingface import HFLM

    if loaded.tokenizer is None:
        raise UsageError(f"{loaded.source}: no tokenizer", hint="tasks cannot be posed without one")
    model = loaded.model

    class PackedCacheLM(HFLM):
        """HFLM with a packed cache for every batch."""

        @torch.inference_mode()
        def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
            """Logits [B, T, V] of sequences that are padded on the right."""
            cache = PlanCache(plan, model.config)
            logits_BTV = torch.cat([chunk_BTV for _, chunk_BTV in feed(model, cache, inps)], dim=1)
            require_predicted_bytes(cache, plan)
            if torch.isnan(logits_BTV).any():
                raise NonFiniteActivations("the logits hold NaN", hint="check the model in this dtype")
            return logits_BTV

        @torch.inference_mode()
        def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
            """Tokens [B, T] of prompts and completions; ``settings`` hold the attention mask."""
            cache = PlanCache(plan, model.config, settings["attention_mask"], keep_decoded=True)
            generate, settings = super()._model_generate, PLAIN_DECODING | settings
            return generate_packed(cache, model, generate, context, max_length, stop, **settings)

    return PackedCacheLM(pretrained=model, tokenizer=loaded.tokenizer, batch_size=batch, softmax_dtype=torch.float32)


def measure_lm_eval(
    loaded: LoadedModel, plan: Plan, task: str, num_problems: int, batch: int, seed: int
) -> tuple[float, float | None]:
    """Accuracy of ``plan`` on the first ``num_problems`` problems of a task (or group) of the harness, and its standard
    error if the harness has one. ``task`` is NAME, or NAME:METRIC; without a metric, the task's first of which more is
    better.

    Raises:
        UsageError: the harness is not installed, does not have the task, or cannot pose it to this model; the task has
            no such metric.
        NonFiniteActivations, ArtifactError: see generation.measure_tasks.
    """
    lm = packed_cache_lm(loaded, plan, batch)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    name, _, metric = task.partition(":")
    manager = TaskManager()
    if name not in manager.all_tasks:
        raise UsageError(f"lm-eval has no task {name!r}", hint="lm-eval ls tasks prints their names")
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    try:
        results = simple_evaluate(
            model=lm,
            tasks=[name],
            task_manager=manager,
            limit=num_problems,
            log_samples=False,
            **dict.fromkeys(seeds, seed),
        )
    except (AssertionError, ValueError) as refused:  # such as a prompt beyond the context, or an unknown setting
        raise UsageError(f"lm-eval's task {name!r} cannot be posed to {loaded.source}: {refused}") from refused
    return read_accuracy(results, name, metric)


def read_accuracy(results: Mapping[str, Any], name: str, metric: str) -> tuple[float, float | None]:
    """The metric's value and standard error in what ``simple_evaluate`` gave; see measure_lm_eval."""
    values = results["results"].get(name, {})
    better = results.get("higher_is_better", {}).get(name, {})
    # Keys are "metric,filter" and "metric_stderr,filter", beside others.
    found = {key: value for key, value in values.items() if "," in key and "_stderr," not in key}
    for key, value in found.items():
        short, _, rule = key.partition(",")
        is_wanted = metric in (key, short) if metric else bool(better.get(short))
        if is_wanted and not better.get(short, True):
            raise UsageError(
                f"lm-eval's metric {key!r} of {name!r} is better when it is less: it cannot be an accuracy"
            )
        if is_wanted and isinstance(value, int | float):
            error = values.get(f"{short}_stderr,{rule}")
            return float(value), float(error) if isinstance(error, int | float) else None
    raise UsageError(
        f"lm-eval's task {name!r} has no metric {metric or 'of which more is better'}; it has {sorted(found)}",
        hint=f"name one: {LM_EVAL}{name}:METRIC",
    )
