"""Accuracy of a plan on ``kvcal.data.reading``'s problems: retrieval and completion in long contexts.

Texts are fed decode-faithfully (``divergence.feed``): every token of an answer reads packed pages, as in decoding.
"""

from __future__ import annotations

import torch

from kvcal.cache.plan_cache import PlanCache
from kvcal.data.pools import Purpose
from kvcal.data.reading import Reading, readings
from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.folder import tokenizer_of
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.recipe import EvaluateSpec
from kvcal.stages.divergence import feed
from kvcal.stages.evaluate.tasks import TaskResult, wilson_se


@torch.inference_mode()
def read_answers(loaded: LoadedModel, plan: Plan, texts: tuple[Reading, ...], batch: int) -> list[list[bool]]:
    """Of every text, which answers greedy decoding gives. Texts have one length; ``batch`` are fed at once.

    Raises:
        UsageError: texts beyond the model's context, or beyond the schedule of pages that shrink.
        NonFiniteActivations: NaN in the logits, or NaN or infinity in a page to be quantized.
    """
    length = texts[0].tokens_T.numel()
    schedule = plan.workload.context if plan.is_progressive else None
    for name, limit in (("the model's context", loaded.max_context), ("the schedule of pages that shrink", schedule)):
        if limit is not None and length > limit:
            raise UsageError(f"a text of {length} tokens exceeds {name} of {limit}", hint="name shorter tasks")
    found = []
    for first in range(0, len(texts), batch):
        group = texts[first : first + batch]
        tokens_BT = torch.stack([text.tokens_T for text in group]).to(loaded.model.device)
        is_right_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        for start, logits_BTV in feed(loaded.model, PlanCache.for_measurement(plan, loaded.model.config), tokens_BT):
            if torch.isnan(logits_BTV).any():
                raise NonFiniteActivations(f"the logits hold NaN after {start} tokens")
            stop = min(length, start + 1 + logits_BTV.shape[1])
            expected_BT = tokens_BT[:, start + 1 : stop]
            is_right_BT[:, start + 1 : stop] = logits_BTV[:, : stop - start - 1].argmax(-1) == expected_BT
        for text, is_right_T in zip(group, is_right_BT.cpu(), strict=True):
            found.append([bool(is_right_T[start:stop].all()) for start, stop in text.answers])
    return found


def measure_reading(
    loaded: LoadedModel, plan: Plan, spec: EvaluateSpec, reporter: Reporter, purpose: Purpose = "report"
) -> tuple[TaskResult, ...]:
    """Accuracy of ``plan`` on each of these tasks in ``spec``. UsageError and others as ``readings`` and
    ``read_answers``."""
    results = []
    for task in spec.reading_tasks:
        texts = readings(task, spec.num_problems, spec.seed, tokenizer_of(loaded), purpose)
        right = [is_right for text in read_answers(loaded, plan, texts, spec.batch) for is_right in text]
        results.append(
            TaskResult(
                task=task,
                accuracy=sum(right) / len(right),
                accuracy_se=wilson_se(sum(right), len(right)),
                num_problems=len(right),
                num_correct=sum(right),
                num_unfinished=0,
                generated_tokens=0,
                lengths=tuple(text.tokens_T.numel() for text in texts),
            )
        )
        reporter(len(results), len(spec.reading_tasks), "evaluate: reading")
    return tuple(results)
