"""Accuracy of a plan on tasks whose problems are made here; the lm-evaluation-harness's are in ``harness``.

Exact-match accuracy on generated problems is that of greedy generation through the packed cache. Problems of
all tasks share ragged, left-padded batches, sorted by length. ``model.generate`` decodes in segments: between
two of them the finished sequences (end-of-sequence token, or a complete answer line) leave the cache. The
tokens are those of one long ``generate``. After every segment the cache's bytes are compared with the plan's
prediction, and everything the model attended to with a fresh read of the packed pages
(DecodedCache.verify_decoded).

Long contexts are read (``kvcal.data.reading``: rows, pairs, late facts and others): texts are fed
decode-faithfully and next to 16 bits (``divergence.lockstep``), so that every token of an answer reads packed
pages, as in decoding. The rise of an answer's negative log-likelihood, paired with 16 bits, is far quieter
than the share of right answers, and tells plans apart that shares cannot.

The standard error of an accuracy is half the width of Wilson's score interval at z = 1, sqrt(p (1 - p) / n +
1 / (4 n^2)) / (1 + 1 / n): unlike the plain binomial one it is not 0 when all problems, or none, are solved.
The interval lies around (p + 1 / (2 n)) / (1 + 1 / n), within 0 and 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from kvcal.cache.attached import attached_for
from kvcal.data.pools import Purpose
from kvcal.data.reading import EvaluateSpec, Reading, readings
from kvcal.data.sequences import encode_problem
from kvcal.data.tasks import Problem, extract_answer, problems
from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.folder import tokenizer_of
from kvcal.models.attention import with_cache
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.stages.divergence import kl_divergence, lockstep, unquantized_plan
from kvcal.stages.evaluate.text import TAILS, ratio_and_error
from kvcal.stages.generate import PLAIN_DECODING
from kvcal.stages.measuring.cache import DecodedCache, DenseCache
from kvcal.stages.verify import require_predicted_bytes
from kvcal.strict import STRICT, Amount, Count, Number, Share

SEGMENT_TOKENS = 32
_ANSWER_LINE = re.compile(r"^Answer: \S+[^\S\n]*\n", re.MULTILINE)


@pydantic_dataclass(frozen=True, config=STRICT)
class TaskResult:
    """``accuracy_se``: see the module's docstring. ``num_unfinished`` problems were cut at
    ``max_new_tokens``; ``generated_tokens`` counts those up to the end of each completion; ``lengths``:
    tokens of each problem, prompt and completion. The harness does not count ``num_correct`` and
    ``num_unfinished``: None.

    Of texts that are read: ``lost``, the nats that an answer's negative log-likelihood is above that at 16
    bits, with its standard error over texts (None for one text); ``kl_99`` and ``kl_999``, below which the KL
    to 16 bits lies at 99 and 99.9 % of the answers' tokens. None for other tasks."""

    task: str
    accuracy: Share
    accuracy_se: Amount
    num_problems: Count
    num_correct: Count | None
    num_unfinished: Count | None
    generated_tokens: Count
    lengths: tuple[Count, ...]
    lost: Number | None = None
    lost_se: Amount | None = None
    kl_99: Amount | None = None
    kl_999: Amount | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's at z = 1; of the harness's metrics, a standard error to both sides. Within 0 and 1."""
        n, middle = self.num_problems, self.accuracy
        if self.num_correct is not None:
            middle = (self.accuracy + 1 / (2 * n)) / (1 + 1 / n)
        return max(0.0, middle - self.accuracy_se), min(1.0, middle + self.accuracy_se)


@dataclass
class Written:
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
    """Accuracy of ``plan`` on ``spec.num_problems`` problems of each embedded task of ``spec``, in their
    order; ``purpose``: of which pool."""
    if not spec.embedded_tasks:
        return ()
    tokenizer = tokenizer_of(loaded)
    limits = {name: getattr(spec, name) for name in ("max_steps", "max_size", "max_hops", "max_digits")}
    sequences = [
        Written(problem, encode_problem(problem, tokenizer), len(tokenizer(problem.completion)["input_ids"]))
        for task in spec.embedded_tasks
        for problem in problems(task, spec.num_problems, spec.seed, purpose, **limits)
    ]
    order = sorted(sequences, key=lambda s: s.prompt_T.numel() + s.expected_tokens)
    for first in range(0, len(order), spec.batch):
        _complete(loaded, plan, order[first : first + spec.batch], order, spec.max_new_tokens, reporter)
    return tuple(
        _result(loaded, task, [s for s in sequences if s.problem.task == task]) for task in spec.embedded_tasks
    )


@dataclass(frozen=True, eq=False)
class Answers:
    """Of one text. ``right_A``: whether greedy decoding gives an answer; ``lost_A``: nats that its negative
    log-likelihood is above that at 16 bits, fp64; ``kl_n``: KL to 16 bits at the answers' tokens, nats,
    fp64."""

    right_A: Tensor
    lost_A: Tensor
    kl_n: Tensor


@torch.inference_mode()
def read_answers(loaded: LoadedModel, plan: Plan, texts: Sequence[Reading], batch: int) -> list[Answers]:
    """The answers of every text, next to 16 bits. Texts have one length; ``batch`` are fed at once."""
    length = texts[0].tokens_T.numel()
    _require_room(loaded, plan, length, "a text", "name shorter tasks")
    found = []
    for first in range(0, len(texts), batch):
        group = texts[first : first + batch]
        right_BT, lost_BT, kl_BT = _read(loaded, plan, group)
        for row, text in enumerate(group):
            parts = [slice(*answer) for answer in text.answers]
            right_A = torch.stack([right_BT[row, part].all() for part in parts])
            lost_A = torch.stack([lost_BT[row, part].sum() for part in parts])
            found.append(Answers(right_A, lost_A, torch.cat([kl_BT[row, part] for part in parts])))
    return found


def _read(loaded: LoadedModel, plan: Plan, texts: Sequence[Reading]) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token [B, T] that is in an answer, on the CPU: whether it is the most likely one; its negative
    log-likelihood less that at 16 bits; and the KL to 16 bits."""
    tokens_BT = torch.stack([text.tokens_T for text in texts]).to(loaded.model.device)
    right_BT = torch.zeros(tokens_BT.shape, dtype=torch.bool)
    lost_BT, kl_BT = (torch.zeros(tokens_BT.shape, dtype=torch.float64) for _ in range(2))
    asked_BT = right_BT.clone()
    for row, text in enumerate(texts):
        for start, stop in text.answers:
            asked_BT[row, start:stop] = True
    raw = unquantized_plan(loaded.identity, loaded.geometry)
    caches = [DenseCache(one, loaded.model.config) for one in (raw, plan)]
    reference: list[tuple[Tensor, Tensor]] = []  # logits and negative log-likelihoods of chunks not yet compared
    for number, start, logits_BTV in lockstep(loaded.model, caches, tokens_BT):
        if torch.isnan(logits_BTV).any():
            raise NonFiniteActivations(f"the logits hold NaN after {start} tokens")
        row_n, place_n = asked_BT[:, start + 1 : start + 1 + logits_BTV.shape[1]].nonzero().unbind(1)
        at = row_n.to(logits_BTV.device), place_n.to(logits_BTV.device)
        logits_nV, expected_n = logits_BTV[at], tokens_BT[at[0], at[1] + start + 1]
        nll_n = cross_entropy(logits_nV.float(), expected_n, reduction="none").double()
        if number == 0:
            reference.append((logits_nV, nll_n))
            continue
        raw_nV, raw_n = reference.pop()
        to = row_n, place_n + start + 1
        right_BT[to] = (logits_nV.argmax(-1) == expected_n).cpu()
        lost_BT[to] = (nll_n - raw_n).cpu()
        kl_BT[to] = kl_divergence(raw_nV, logits_nV).cpu()
    return right_BT, lost_BT, kl_BT


def measure_reading(
    loaded: LoadedModel, plan: Plan, spec: EvaluateSpec, reporter: Reporter, purpose: Purpose = "report"
) -> tuple[TaskResult, ...]:
    """Answers of ``plan`` to each of these tasks in ``spec``. UsageError and others as ``readings`` and
    ``read_answers``."""
    results = []
    for task in spec.reading_tasks:
        texts = readings(task, spec.num_problems, spec.seed, tokenizer_of(loaded), purpose)
        found = read_answers(loaded, plan, texts, spec.batch)
        results.append(reading_result(task, found, [text.tokens_T.numel() for text in texts]))
        reporter(len(results), len(spec.reading_tasks), "evaluate: reading")
    return tuple(results)


def reading_result(task: str, found: Sequence[Answers], lengths: list[int]) -> TaskResult:
    """Of the texts of one task, of these lengths in tokens."""
    right = [bool(one) for text in found for one in text.right_A]
    sums, counts = (
        torch.tensor(values).double()
        for values in zip(*((text.lost_A.sum(), len(text.lost_A)) for text in found), strict=True)
    )
    lost, error = ratio_and_error(sums, counts)
    tails = torch.cat([text.kl_n for text in found]).quantile(torch.tensor(TAILS, dtype=torch.float64)).tolist()
    return replace(task_result(task, right, lengths), lost=lost, lost_se=error, kl_99=tails[0], kl_999=tails[1])


def mean_accuracy(results: Collection[TaskResult]) -> tuple[float, float]:
    """Over one task or more, and its standard error: the tasks' errors are independent."""
    error = sum(result.accuracy_se**2 for result in results) ** 0.5 / len(results)
    return sum(result.accuracy for result in results) / len(results), error


def mean_interval(results: Collection[TaskResult]) -> tuple[float, float]:
    """Around ``mean_accuracy``: the ends of the tasks' intervals, as independent errors to each side."""
    mean, count = mean_accuracy(results)[0], len(results)
    below, above = (sum((one.interval[end] - one.accuracy) ** 2 for one in results) ** 0.5 / count for end in (0, 1))
    return max(0.0, mean - below), min(1.0, mean + above)


def task_result(task: str, right: list[bool], lengths: list[int]) -> TaskResult:
    """Of problems that are all finished, without generated tokens."""
    correct, count = sum(right), len(right)
    return TaskResult(task, correct / count, wilson_se(correct, count), count, correct, 0, 0, tuple(lengths))


def wilson_se(num_correct: float, num_problems: int) -> float:
    """Half the width of Wilson's interval at z = 1."""
    p, n = num_correct / num_problems, num_problems
    return math.sqrt(p * (1 - p) / n + 1 / (4 * n * n)) / (1 + 1 / n)


def _complete(
    loaded: LoadedModel,
    plan: Plan,
    active: list[Written],
    everything: list[Written],
    max_new_tokens: int,
    reporter: Reporter,
) -> None:
    tokenizer = tokenizer_of(loaded)
    model: Any = loaded.model  # transformers declares no type for generate
    config = generation_config(model, tokenizer)
    prompts = [sequence.prompt_T.to(model.device) for sequence in active]
    input_ids = pad_sequence(prompts, True, config.pad_token_id, "left")
    mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], True, 0, "left")
    width, hint = input_ids.shape[1], "lower max_steps, max_size, max_hops or max_digits, or evaluate without tasks"
    room = _require_room(loaded, plan, width + 1, "a problem's prompt and a token", hint)
    left = int(min(max_new_tokens, room - width))
    cache = DecodedCache(plan, model.config, mask)
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
    cache: DecodedCache, model: PreTrainedModel, generate: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Tokens [B, T] of ``generate(*args, **kwargs)``, which is ``model.generate`` or calls it, through
    ``cache``; then the cache's bytes and its decoded copy are checked."""
    with attached_for(model, cache.plan):
        processors = LogitsProcessorList([RefuseNaN()])
        output = generate(*args, **kwargs, **with_cache(model, cache), logits_processor=processors)
    require_predicted_bytes(cache)
    cache.verify_decoded()
    return output


class RefuseNaN(LogitsProcessor):
    """Raises on NaN, which greedy search would take for a maximum."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if torch.isnan(scores).any():
            raise NonFiniteActivations(f"the logits hold NaN after {input_ids.shape[1]} tokens")
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


def _extend(sequence: Written, new: list[int], ends: list[int] | None, tokenizer: Tokenizer) -> None:
    """Add a segment up to its end-of-sequence token; a complete answer line is an end, too."""
    stop = next((i for i, token in enumerate(new) if token in (ends or ())), None)
    sequence.completion += new[:stop]
    text = str(tokenizer.decode(sequence.completion))
    sequence.is_finished = stop is not None or _ANSWER_LINE.search(text) is not None


def _result(loaded: LoadedModel, task: str, sequences: list[Written]) -> TaskResult:
    tokenizer = tokenizer_of(loaded)
    right = [extract_answer(str(tokenizer.decode(one.completion))) == one.problem.answer for one in sequences]
    found = task_result(task, right, [one.prompt_T.numel() + len(one.completion) for one in sequences])
    unfinished = sum(not one.is_finished for one in sequences)
    return replace(found, num_unfinished=unfinished, generated_tokens=sum(len(one.completion) for one in sequences))


def _require_room(loaded: LoadedModel, plan: Plan, width: int, what: str, hint: str) -> float:
    """The columns that the model's context and the plan's schedule allow. UsageError where ``width`` is
    more."""
    limits = {"the model's context": loaded.max_context}
    if plan.is_progressive:
        limits["the schedule of bits"] = plan.workload.context
    for name, limit in limits.items():
        if limit is not None and width > limit:
            raise UsageError(f"{what} of {width} tokens exceeds {name} of {limit}", hint=hint)
    return min((limit for limit in limits.values() if limit is not None), default=math.inf)
