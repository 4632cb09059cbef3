"""A language model as the lm-evaluation-harness asks it: likelihoods and completions through a plan's packed cache.

Likelihoods are decode-faithful: context and continuation are fed in chunks that end where pages are written (see
divergence), so that every token reads what it would read in decoding. Generation is ``model.generate``, whose prompt
attends to itself at full precision, as in use.

Sequences share batches, sorted by length: padded on the right for likelihoods (real tokens never see padding, nor do
their pages), on the left for generation. The harness itself is not needed here: any object with ``args`` is a request.
Left out: chat templates, and prompts of several modalities.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers import PreTrainedTokenizerBase as Tokenizer

from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.queries import serving
from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.specs import LM_EVAL
from kvcal.stages.divergence import MAX_COMPARED, feed
from kvcal.stages.evaluate.generation import RefuseNaN, generation_config
from kvcal.stages.evaluate.mirror import MirroredCache
from kvcal.stages.evaluate.text import require_predicted_bytes

NO_TARGET = -100
DEFAULT_NEW_TOKENS = 256
# What a task may ask of a generation; the first three are names of one thing.
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens")
SAMPLING = ("temperature", "top_p", "top_k")
SETTINGS = (*LIMITS, *SAMPLING, "until", "do_sample")


class Request(Protocol):
    """What the harness hands over: (context, continuation), (text,) or (context, settings)."""

    @property
    def args(self) -> tuple[Any, ...]: ...


@dataclass(frozen=True)
class Scored:
    """``tokens``, of which those from ``num_given`` (at least 1) on are to be predicted."""

    tokens: tuple[int, ...]
    num_given: int


class PackedCacheLM:
    """The three questions of ``lm_eval.api.model.LM``, answered through a plan's packed cache."""

    def __init__(self, loaded: LoadedModel, plan: Plan, batch: int) -> None:
        super().__init__()
        if loaded.tokenizer is None:
            raise UsageError(f"{loaded.source}: no tokenizer", hint="tasks cannot be posed without one")
        self.model: Any = loaded.model  # transformers declares no type for generate
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.plan, self.batch = plan, batch
        config = loaded.model.config.get_text_config(decoder=True)
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)

    def loglikelihood(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """(log-probability of the continuation in nats, whether greedy decoding would give it) for each."""
        return self._score([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Request]) -> list[float]:
        """Log-probability of each text in nats: every token once, with as much context as the model has room for."""
        found = []
        for request in requests:
            tokens = self._encode(request.args[0], add_special_tokens=False)
            found.append(sum(value for value, _ in self._score(list(self._windows(tokens)))))
        return found

    def generate_until(self, requests: Sequence[Request]) -> list[str]:
        """A completion for each, greedy unless its settings say otherwise, cut before the first stop text."""
        found: dict[int, str] = {}
        contexts = [self._context(request.args[0]) for request in requests]
        settings = [_settings(request.args[1]) for request in requests]
        for wanted in sorted(set(settings), key=repr):
            numbers = [number for number, given in enumerate(settings) if given == wanted]
            numbers.sort(key=lambda number: len(contexts[number]))
            for first in range(0, len(numbers), self.batch):
                chosen = numbers[first : first + self.batch]
                texts = self._generate([contexts[number] for number in chosen], wanted)
                found |= zip(chosen, texts, strict=True)
        return [found[number] for number in range(len(requests))]

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _context(self, text: str) -> list[int]:
        """The context's tokens, at least one."""
        return self._encode(text) or [self._prefix]

    @property
    def _prefix(self) -> int:
        """What stands before a text without context."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise UsageError("the tokenizer has no token to begin a text with: neither bos nor eos")

    def _pair(self, context: str, continuation: str) -> Scored:
        """Spaces at the context's end belong to the continuation, whose first token they usually are a part of."""
        kept = context.rstrip()
        context, continuation = kept, context[len(kept) :] + continuation
        if not context:
            given, tokens = [self._prefix], self._encode(continuation, add_special_tokens=False)
            return self._fitting([*given, *tokens], 1)
        whole, given = self._encode(context + continuation), self._encode(context)
        return self._fitting(whole, max(1, min(len(given), len(whole) - 1)))

    def _fitting(self, tokens: list[int], num_given: int) -> Scored:
        """Cut on the left to what the model has room for (the last token is predicted, not read)."""
        cut = 0 if self.max_length is None else max(0, len(tokens) - 1 - self.max_length)
        if cut >= num_given:
            raise UsageError(
                f"a continuation of {len(tokens) - num_given} tokens leaves no room for a context in the model's "
                f"{self.max_length}"
            )
        return Scored(tuple(tokens[cut:]), num_given - cut)

    def _windows(self, tokens: list[int]) -> Iterator[Scored]:
        """The text in windows: the first after the prefix, each other with as much context as fits."""
        limit = self.max_length or len(tokens)
        if tokens:
            yield Scored((self._prefix, *tokens[:limit]), 1)
        for done in range(limit, len(tokens), limit):
            stop = min(done + limit, len(tokens))
            start = stop - limit - 1
            yield Scored(tuple(tokens[start:stop]), done - start)

    @torch.inference_mode()
    def _score(self, sequences: list[Scored]) -> list[tuple[float, bool]]:
        order = sorted(range(len(sequences)), key=lambda number: -len(sequences[number].tokens))
        values = torch.zeros(len(sequences), dtype=torch.float64)
        greedy = torch.ones(len(sequences), dtype=torch.bool)
        for first in range(0, len(order), self.batch):
            numbers = torch.tensor(order[first : first + self.batch])
            input_ids_BT, targets_BT = _right_padded([sequences[number] for number in numbers.tolist()])
            cache = PlanCache(self.plan, self.model.config)
            for start, logits_BTV in feed(self.model, cache, input_ids_BT):
                targets = targets_BT[:, start : start + logits_BTV.shape[1]]
                rows, columns = (targets != NO_TARGET).nonzero(as_tuple=True)
                log_p, is_greedy = _log_probabilities(logits_BTV, rows, columns, targets[rows, columns])
                values.index_add_(0, numbers[rows], log_p)
                greedy[numbers[rows[~is_greedy]]] = False
            require_predicted_bytes(cache, self.plan)
        if not torch.isfinite(values).all():
            raise NonFiniteActivations("the logits are not finite", hint="check the model in this dtype")
        return list(zip(values.tolist(), greedy.tolist(), strict=True))

    @torch.inference_mode()
    def _generate(self, contexts: list[list[int]], settings: Settings) -> list[str]:
        config = generation_config(self.model, self.tokenizer)
        settings.apply(config)
        room = None if self.max_length is None else self.max_length - settings.num_new_tokens
        if room is not None and room < 1:
            raise UsageError(f"{settings.num_new_tokens} new tokens fill the model's context of {self.max_length}")
        prompts = [
            torch.tensor(context if room is None else context[-room:], device=self.model.device) for context in contexts
        ]
        input_ids = pad_sequence(prompts, True, float(config.pad_token_id or 0), "left")
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], True, 0.0, "left")
        width = input_ids.shape[1]
        cache = MirroredCache(self.plan, self.model.config, attention_mask=mask)
        with serving(self.model, self.plan):
            output = self.model.generate(
                input_ids,
                attention_mask=mask,
                past_key_values=cache,
                generation_config=config,
                logits_processor=LogitsProcessorList([RefuseNaN()]),
                stopping_criteria=StoppingCriteriaList([StopAt(settings.stops, self.tokenizer, width)]),
            )
        require_predicted_bytes(cache, self.plan)
        cache.verify()
        texts = self.tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        return [_cut(text, settings.stops) for text in texts]


@dataclass(frozen=True)
class Settings:
    """How to generate. ``sampling``: (name, value) pairs; empty for greedy decoding."""

    stops: tuple[str, ...]
    num_new_tokens: int
    sampling: tuple[tuple[str, float], ...]

    def apply(self, config: GenerationConfig) -> None:
        config.max_new_tokens = self.num_new_tokens
        if self.sampling:
            config.update(do_sample=True, **dict(self.sampling))


def _settings(given: Mapping[str, Any]) -> Settings:
    """UsageError for a setting that would be left out."""
    unknown = sorted(set(given) - set(SETTINGS))
    if unknown:
        raise UsageError(f"the task asks for the generation settings {unknown}; known: {', '.join(SETTINGS)}")
    until = given.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    limits = [int(given[name]) for name in LIMITS if given.get(name) is not None]
    sampling = tuple((name, given[name]) for name in SAMPLING if given.get(name) is not None)
    is_sampled = given.get("do_sample", False) and given.get("temperature") != 0
    return Settings(stops, limits[0] if limits else DEFAULT_NEW_TOKENS, sampling if is_sampled else ())


class StopAt(StoppingCriteria):
    """Ends a row whose last tokens hold one of the stop texts."""

    def __init__(self, stops: Sequence[str], tokenizer: Tokenizer, width: int) -> None:
        self._stops, self._tokenizer, self._width = stops, tokenizer, width
        # A token is one byte at least: longer tails cannot be needed.
        self._tail = max((len(stop.encode()) for stop in stops), default=0) + 1

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        start = max(self._width, input_ids.shape[1] - self._tail)
        texts = self._tokenizer.batch_decode(input_ids[:, start:])
        return torch.tensor([_cut(text, self._stops) != text for text in texts], device=input_ids.device)


def _cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop text in it."""
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


def _right_padded(sequences: list[Scored]) -> tuple[Tensor, Tensor]:
    """input_ids and the targets of their predictions, NO_TARGET where none counts; both int64 [B, longest - 1]."""
    width = max(len(sequence.tokens) for sequence in sequences) - 1
    input_ids_BT = torch.zeros(len(sequences), width, dtype=torch.int64)
    targets_BT = torch.full_like(input_ids_BT, NO_TARGET)
    for row, sequence in enumerate(sequences):
        tokens = torch.tensor(sequence.tokens)
        input_ids_BT[row, : len(tokens) - 1] = tokens[:-1]
        targets_BT[row, sequence.num_given - 1 : len(tokens) - 1] = tokens[sequence.num_given :]
    return input_ids_BT, targets_BT


def _log_probabilities(logits_BTV: Tensor, rows: Tensor, columns: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of the target at each (row, column): its log-probability [n] fp64, and whether it has the largest logit [n];
    on the CPU."""
    at_once = max(1, MAX_COMPARED // logits_BTV.shape[-1])
    values, greedy = [torch.empty(0, dtype=torch.float64)], [torch.empty(0, dtype=torch.bool)]
    for row, column, target in zip(rows.split(at_once), columns.split(at_once), targets.split(at_once), strict=True):
        logits_nV = logits_BTV[row.to(logits_BTV.device), column.to(logits_BTV.device)].double()
        log_p_nV = logits_nV.log_softmax(-1)
        values.append(log_p_nV.gather(-1, target.to(logits_nV.device)[:, None])[:, 0].cpu())
        greedy.append(logits_nV.argmax(-1).cpu() == target)
    return torch.cat(values), torch.cat(greedy)


def require_lm_eval() -> None:
    """UsageError unless the harness can be imported."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            f"a task named {LM_EVAL}... needs the lm-evaluation-harness, which is not installed",
            hint="pip install lm-eval, or choose one of the embedded tasks",
        )


def measure_lm_eval(
    loaded: LoadedModel, plan: Plan, task: str, num_problems: int, batch: int, seed: int
) -> tuple[float, float | None]:
    """Accuracy of ``plan`` on the first ``num_problems`` problems of a task (or group) of the harness, and its standard
    error if the harness has one. ``task`` is NAME, or NAME:METRIC; without a metric, the task's first of which more is
    better.

    Raises:
        UsageError: the harness is not installed, does not know the task, or the task has no such metric.
        NonFiniteActivations, ArtifactError: see generation.measure_tasks.
    """
    require_lm_eval()
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Answering(PackedCacheLM, LM):
        """What the harness takes for a model."""

    name, _, metric = task.partition(":")
    manager = TaskManager()
    if name not in manager.all_tasks:
        raise UsageError(f"lm-eval knows no task {name!r}", hint="lm-eval ls tasks prints their names")
    results = simple_evaluate(
        model=Answering(loaded, plan, batch),
        tasks=[name],
        task_manager=manager,
        limit=num_problems,
        log_samples=False,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
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
