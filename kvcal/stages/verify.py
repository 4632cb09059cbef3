"""Verification: a plan is this model's, and its cache allocates the bytes that it predicts, on real
decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcal.cache.attached import attached_for
from kvcal.cache.plan_cache import PlanCache
from kvcal.errors import ArtifactError
from kvcal.models.attention import with_cache
from kvcal.models.files import config_sha256, locate, read_json
from kvcal.models.load import LoadedModel
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter

# A page boundary and its neighbours are where a byte count would first go wrong.
AROUND_A_PAGE = (1, 127, 128, 129)
RAGGED = (1, 64, 129)
ANOTHER_MODEL = "compile a plan for this model, or name the model the plan was made for"


@dataclass(frozen=True)
class Check:
    """One thing that holds, with the figures that show it."""

    name: str
    detail: str


def require_same_config(plan: Plan, source: str) -> None:
    """ArtifactError when the plan was compiled for a model with another config.json than that of ``source``,
    whose weights are not read."""
    location = locate(source)
    if location.gguf is None and config_sha256(location.folder, location.id) != plan.model.config_sha256:
        content = read_json(location.folder / "config.json", location.id)
        text = content.get("text_config") or content
        about = f"{text.get('model_type')}, {text.get('num_hidden_layers', 'unknown')} layers"
        planned = f"{plan.model.model_type}, {len(plan.geometry.layers)} layers with a cache"
        raise ArtifactError(
            f"the plan is for {plan.model.id!r} ({planned}), and {location.id!r} has another config.json ({about})",
            hint=ANOTHER_MODEL,
        )


def require_same_model(plan: Plan, loaded: LoadedModel) -> None:
    """ArtifactError, naming the first difference, when the plan was compiled for another model."""
    parts = {"model_type": "is of another type", "config_sha256": "has another config.json",
             "weights_sha256": "has other weights", "tokenizer_sha256": "has another tokenizer"}  # fmt: skip
    for field, differs in parts.items():
        if getattr(plan.model, field) != getattr(loaded.identity, field):
            planned, found = (f"{one.id!r} ({one.model_type})" for one in (plan.model, loaded.identity))
            raise ArtifactError(f"the plan is for {planned}, and {found} {differs}", hint=ANOTHER_MODEL)
    if plan.geometry != loaded.geometry:
        raise ArtifactError(
            f"the plan's layers are not those that {loaded.source!r} caches",
            hint="a layer's state has the bytes of the dtype that computes it: leave out --dtype, or compile again",
        )


@torch.inference_mode()
def verify_plan(plan: Plan, loaded: LoadedModel, max_context: int | None, reporter: Reporter) -> list[Check]:
    """All that ``kvcal inspect --model`` checks, on random tokens; the plan file itself was checked by
    reading it."""
    require_same_model(plan, loaded)
    checks = [
        Check("file", f"digest, keys, values and predicted bytes ({plan.predicted_bytes}) are sound"),
        Check("model", f"{plan.model.id}: configuration, weights, tokenizer and layers match"),
    ]
    longest = max((fmt.kept_tokens + PAGE_TOKENS for p in plan.layers for fmt in p.formats), default=0)
    counts = sorted({*AROUND_A_PAGE, longest - 1, longest, longest + 128})
    most_rows = len(RAGGED)
    if plan.is_progressive:  # its bits change on a schedule for no more than the workload
        most_rows = min(most_rows, plan.workload.batch)
        max_context = min(max_context or plan.workload.context, plan.workload.context)
    counts = [count for count in counts if 0 < count <= (max_context or count)]
    for batch in sorted({1, most_rows}):
        cache, fed = PlanCache(plan, loaded.model.config), 0
        tokens_BT = _random_tokens(loaded, batch, counts[-1])
        for number, count in enumerate(counts):
            with attached_for(loaded.model, plan):
                loaded.model(input_ids=tokens_BT[:, fed:count], **with_cache(loaded.model, cache))
            fed = count
            require_predicted_bytes(cache, [count] * batch)
            reporter(number + 1, len(counts), f"verify: batch {batch}")
        checks.append(Check("bytes", f"batch {batch}: allocated = predicted at {str(counts)[1:-1]} tokens"))
    lengths = [length for length in RAGGED if length <= (max_context or length)][-most_rows:]
    width = max(lengths)
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths], device=loaded.model.device)
    cache = PlanCache(plan, loaded.model.config, attention_mask=mask)
    tokens_BT = _random_tokens(loaded, len(lengths), width)
    with attached_for(loaded.model, plan):
        loaded.model(input_ids=tokens_BT, attention_mask=mask, **with_cache(loaded.model, cache))
    require_predicted_bytes(cache, lengths)
    checks.append(Check("bytes", f"ragged batch of {str(lengths)[1:-1]} tokens: allocated = predicted"))
    return checks


def require_predicted_bytes(cache: PlanCache, lengths: Sequence[int] | None = None) -> None:
    """ArtifactError unless the cache's measured bytes are those that its plan predicts for sequences of these
    lengths (default: as the cache counts them)."""
    lengths = cache.lengths if lengths is None else lengths
    predicted = cache.plan.nbytes(lengths, cache.get_seq_length())
    if cache.nbytes != predicted:
        raise ArtifactError(
            f"sequences of {lengths} tokens take {cache.nbytes} bytes of cache, the plan predicts {predicted}",
            hint="the byte count is wrong, and so would be every budget: please report this",
        )


def _random_tokens(loaded: LoadedModel, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(loaded.vocab_size, (batch, length), generator=generator).to(loaded.model.device)
