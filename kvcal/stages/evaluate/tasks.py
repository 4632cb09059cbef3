"""Accuracy of a plan on tasks: problems that are generated here, and tasks of the lm-evaluation-harness.

Exact-match accuracy on generated problems is that of greedy generation through the packed cache. Problems of all tasks
share ragged, left-padded batches, sorted by length. ``model.generate`` decodes in segments: between two of them the
finished sequences (end-of-sequence token, or a complete answer line) leave the cache. The tokens are those of one long
``generate``. After every segment the cache's bytes are compared with the plan's prediction, and everything the model
attended to with a fresh read of the packed pages (PlanCache.verify_decoded).

The standard error of an accuracy is half the width of Wilson's score interval at z = 1, sqrt(p (1 - p) / n + 1 / (4
n^2)) / (1 + 1 / n): unlike the plain binomial one it is not 0 when all problems, or none, are solved.

The harness's Hugging Face model (``HFLM``) encodes, cuts, batches and stops; only its two calls of the model are
replaced (``packed_cache_lm``). Likelihoods are decode-faithful: context and continuation are fed in chunks that end
where pages are written (see divergence), so that every token reads what it would read in decoding. Generation is
``model.generate``, whose prompt attends to itself at full precision, as in use. ``lm_eval`` is optional, and imported
when a task needs it. Left out: chat templates.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic.dataclasses import dataclass as record
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from kvcal.cache.attached import attached_for
from kvcal.cache.plan_cache import PlanCache
from kvcal.data.pools import Purpose
from kvcal.data.sequences import encode_problem
from kvcal.data.tasks import Problem, extract_answer, problems
from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.folder import max_context
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.recipe import LM_EVAL, EvaluateSpec
from kvcal.stages.divergence import feed
from kvcal.stages.evaluate.text import require_predicted_bytes
from kvcal.strict import STRICT, Amount, Count, Share

SEGMENT_TOKENS = 32
# Whatever the model's own defaults are.
PLAIN_DECODING: dict[str, Any] = {"num_beams": 1, "repetition_penalty": 1.0, "top_p": 1.0, "top_k": 50}
_ANSWER_LINE = re.compile(r"^Answer: \S+[^\S\n]*\n", re.MULTILINE)


@record(frozen=True, config=STRICT)
class TaskResult:
    """``accuracy_se``: see the module's docstring. ``num_unfinished`` problems were cut at ``max_new_tokens``;
    ``generated_tokens`` counts those up to the end of each completion; ``lengths``: tokens of each problem, prompt and
    completion."""

    task: str
    accuracy: Share
    accuracy_se: Amount
    num_problems: Count
    num_correct: Count
    num_unfinished: Count
    generated_tokens: Count
    lengths: tuple[Count, ...]


@dataclass
class Sequence:
    """A problem on its way: ``prompt_T`` int64, ``completion`` grows by segments."""

    problem: Problem
    prompt_T: Tensor
    expected_tokens: int
    completion: list[int] = field(default_factory=list)
    is_finished: bool = False


@torch.inference_mode()
def measure_tasks(
    loaded: LoadedModel, plan: Plan, spec: EvaluateSpec, reporter: Reporter, purpose: Purpose = "report"
) -> tuple[TaskResult, ...]:
    """Accuracy of ``plan`` on ``spec.num_problems`` problems of each of ``spec.tasks``, in their order; ``purpose``: of
    which pool.

    Raises:
        UsageError: no tokenizer, or a prompt that fills the model's context.
        NonFiniteActivations: NaN in the logits, or NaN or infinity in a page to be quantized.
        ArtifactError: the plan is not this model's, the cache's bytes are not the predicted ones, or what was read
            back is not what the packed cache holds.
    """
    if not spec.tasks:
        return ()
    sequences = _sequences(loaded, spec, purpose)
    order = sorted(sequences, key=lambda s: s.prompt_T.numel() + s.expected_tokens)
    for first in range(0, len(order), spec.batch):
        _complete(loaded, plan, order[first : first + spec.batch], order, spec.max_new_tokens, reporter)
    return tuple(_result(loaded, task, [s for s in sequences if s.problem.task == task]) for task in spec.tasks)


def wilson_se(num_correct: int, num_problems: int) -> float:
    """Half the width of Wilson's interval at z = 1."""
    p, n = num_correct / num_problems, num_problems
    return math.sqrt(p * (1 - p) / n + 1 / (4 * n * n)) / (1 + 1 / n)


def _sequences(loaded: LoadedModel, spec: EvaluateSpec, purpose: Purpose) -> list[Sequence]:
    """All problems, encoded."""
    tokenizer = _tokenizer(loaded)
    limits = {name: getattr(spec, name) for name in ("max_steps", "max_size", "max_hops", "max_digits")}
    return [
        Sequence(problem, encode_problem(problem, tokenizer), len(tokenizer(problem.completion)["input_ids"]))
        for task in spec.tasks
        for problem in problems(task, spec.num_problems, spec.seed, purpose, **limits)
    ]


def _complete(
    loaded: LoadedModel,
    plan: Plan,
    active: list[Sequence],
    everything: list[Sequence],
    max_new_tokens: int,
    reporter: Reporter,
) -> None:
    """Complete the sequences of one batch."""
    tokenizer = _tokenizer(loaded)
    model: Any = loaded.model  # transformers declares no type for generate
    config = generation_config(model, tokenizer)
    prompts = [sequence.prompt_T.to(model.device) for sequence in active]
    input_ids = pad_sequence(prompts, True, config.pad_token_id, "left")
    mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], True, 0, "left")
    left = _room(loaded, plan, input_ids.shape[1], max_new_tokens)
    cache = PlanCache(plan, model.config, attention_mask=mask, keep_decoded=True)
    while active and left:
        config.max_new_tokens = min(SEGMENT_TOKENS, left)
        width = input_ids.shape[1]
        output = generate_packed(cache, model, model.generate, input_ids, attention_mask=mask, generation_config=config)
        left -= output.shape[1] - width
        for sequence, new in zip(active, output[:, width:].tolist(), strict=True):
            _extend(sequence, new, config.eos_token_id, tokenizer)
        keep = [row for row, sequence in enumerate(active) if not sequence.is_finished]
        reporter(sum(s.is_finished for s in everything), len(everything), "evaluate: problems")
        if keep and len(keep) < len(active):
            cache.batch_select_indices(torch.tensor(keep))
        active = [active[row] for row in keep]
        input_ids = output[keep]
        mask = torch.nn.functional.pad(mask[keep], (0, output.shape[1] - width), value=1)


def generate_packed(
    cache: PlanCache, model: PreTrainedModel, generate: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Tokens [B, T] of ``generate(*args, **kwargs)``, which is ``model.generate`` or calls it, through ``cache``; then
    the cache's bytes and its decoded copy are checked."""
    with attached_for(model, cache.plan):
        output = generate(*args, **kwargs, past_key_values=cache, logits_processor=LogitsProcessorList([RefuseNaN()]))
    require_predicted_bytes(cache, cache.plan)
    cache.verify_decoded()
    return output


class RefuseNaN(LogitsProcessor):
    """Raises on NaN, which greedy search would take for a maximum."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if torch.isnan(scores).any():
            raise NonFiniteActivations(
                f"the logits hold NaN after {input_ids.shape[1]} tokens",
                hint="check the model in this dtype; float16 overflows where bfloat16 and float32 do not",
            )
        return scores


def generation_config(model: PreTrainedModel, tokenizer: Tokenizer) -> GenerationConfig:
    """Plain greedy decoding, with the model's end-of-sequence tokens."""
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    pad = next((i for i in (tokenizer.pad_token_id, *ends) if i is not None), 0)
    return GenerationConfig(
        do_sample=False, temperature=1.0, eos_token_id=ends or None, pad_token_id=pad, **PLAIN_DECODING
    )


def _extend(sequence: Sequence, new: list[int], ends: list[int] | None, tokenizer: Tokenizer) -> None:
    """Add a segment up to its end-of-sequence token; a complete answer line is an end, too."""
    stop = next((i for i, token in enumerate(new) if token in (ends or ())), None)
    sequence.completion += new[:stop]
    text = str(tokenizer.decode(sequence.completion))
    sequence.is_finished = stop is not None or _ANSWER_LINE.search(text) is not None


def _result(loaded: LoadedModel, task: str, sequences: list[Sequence]) -> TaskResult:
    tokenizer = _tokenizer(loaded)
    answers = [extract_answer(str(tokenizer.decode(s.completion))) for s in sequences]
    correct = sum(answer == s.problem.answer for answer, s in zip(answers, sequences, strict=True))
    return TaskResult(
        task=task,
        accuracy=correct / len(sequences),
        accuracy_se=wilson_se(correct, len(sequences)),
        num_problems=len(sequences),
        num_correct=correct,
        num_unfinished=sum(not s.is_finished for s in sequences),
        generated_tokens=sum(len(s.completion) for s in sequences),
        lengths=tuple(s.prompt_T.numel() + len(s.completion) for s in sequences),
    )


def _room(loaded: LoadedModel, plan: Plan, width: int, max_new_tokens: int) -> int:
    """New tokens behind ``width`` columns that the model's context and the plan's schedule allow, at most
    ``max_new_tokens``."""
    model_context = max_context(loaded)
    schedule = plan.workload.context if plan.is_progressive else None
    limits = {"the model's context": model_context, "the schedule of pages that shrink": schedule}
    for name, limit in limits.items():
        if limit is not None and width >= limit:
            raise UsageError(
                f"a problem's prompt of {width} tokens fills {name} of {limit}",
                hint="lower max_steps, max_size, max_hops or max_digits in [evaluate], or evaluate without tasks",
            )
    return min(max_new_tokens, *(limit - width for limit in limits.values() if limit is not None))


def _tokenizer(loaded: LoadedModel) -> Tokenizer:
    if loaded.tokenizer is None:
        raise UsageError(f"{loaded.source}: no tokenizer", hint="tasks cannot be posed without one")
    return loaded.tokenizer


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
