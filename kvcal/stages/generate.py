"""One completion with a plan's packed cache: what ``kvcal generate`` runs, and what a user of the library
writes.

``pack`` keeps a prompt's cache on disk, with which ``complete`` can begin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from kvcal.cache.attached import decoding
from kvcal.cache.plan_cache import PlanCache
from kvcal.data.sequences import prefix_ids
from kvcal.errors import UsageError
from kvcal.folder import tokenizer_of
from kvcal.models.attention import with_cache
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.stages.memory_needs import pays_from

# A template is a small program of the model's author.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

# Of greedy decoding, whatever the model's own defaults are.
PLAIN_DECODING: dict[str, Any] = {"num_beams": 1, "repetition_penalty": 1.0, "top_p": 1.0, "top_k": 50}


@torch.inference_mode()
def complete(
    loaded: LoadedModel, plan: Plan, prompt: str, max_new_tokens: int, temperature: float, seed: int, chat: bool,
    prefix: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Text, token counts, and the cache's bytes next to those of 16 bits. ``prefix``: a file of ``pack``,
    with which the prompt begins."""
    tokens_T = prompt_tokens(loaded, prompt, chat, max_new_tokens)
    if prefix is None:
        cache, known_T = PlanCache(plan, loaded.model.config), tokens_T[:0]
    else:
        cache, known_T = PlanCache.load(prefix, plan, loaded.model.config, loaded.model.device)
        if len(known_T) >= len(tokens_T) or not torch.equal(tokens_T[: len(known_T)], known_T):
            raise UsageError(
                f"the prompt does not begin with the {len(known_T)} tokens of the prefix, or has none beyond them",
                hint="give the packed prompt and what follows it; the packed one has to end where the next text cannot "
                "join its last word, such as at a line's end",
            )
    new_n = new_tokens(loaded, cache, tokens_T, max_new_tokens, temperature, seed)
    return {
        "text": tokenizer_of(loaded).decode(new_n, skip_special_tokens=True),
        "new_tokens": len(new_n),
        "cached_tokens": cache.get_seq_length(),
        "cache_bytes": cache.nbytes,
        "raw_bytes": cache.plan.raw_nbytes(cache.lengths),
        "pays_from": pays_from(plan),
        "prefix_tokens": len(known_T),
    }


@torch.inference_mode()
def pack(loaded: LoadedModel, plan: Plan, prompt: str, path: Path) -> dict[str, int]:
    """Take a prompt in and write its packed cache to ``path``: token count, bytes of the file, and at 16
    bits."""
    tokens_T = prompt_tokens(loaded, prompt, False, 0)
    cache = PlanCache(plan, loaded.model.config)
    new_tokens(loaded, cache, tokens_T, 1, 0.0, 0)
    cache.save(path, tokens_T)
    raw_bytes = plan.raw_nbytes([len(tokens_T)])
    return {"num_tokens": len(tokens_T), "file_bytes": path.stat().st_size, "raw_bytes": raw_bytes}


def prompt_tokens(loaded: LoadedModel, prompt: str, chat: bool, max_new_tokens: int) -> Tensor:
    """Token ids int64 [T]; plain prompts start with what the model's sequences start with. UsageError as
    ``complete`` has it."""
    tokenizer = tokenizer_of(loaded)
    if chat:
        if not tokenizer.chat_template:
            raise UsageError(f"{loaded.source}: the tokenizer has no chat template", hint="leave out --chat")
        messages = [{"role": "user", "content": prompt}]
        try:
            text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except TEMPLATE_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(f"{loaded.source}: the chat template fails: {reason}", hint="leave out --chat") from error
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        tokens = prefix_ids(tokenizer) + tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not tokens or not prompt.strip():
        raise UsageError("the prompt is empty", hint="give --prompt TEXT, or - to read it from stdin")
    limit = loaded.max_context
    if limit is not None and len(tokens) + max_new_tokens > limit:
        new, mend = (f" + {max_new_tokens} new ones", " or lower --max-new-tokens") if max_new_tokens else ("", "")
        raise UsageError(
            f"{len(tokens)} prompt tokens{new} exceed the model's context of {limit}", f"shorten the prompt{mend}"
        )
    return torch.tensor(tokens)


def new_tokens(
    loaded: LoadedModel, cache: PlanCache, tokens_T: Tensor, max_new_tokens: int, temperature: float, seed: int
) -> Tensor:
    """Text after the tokens, int64 [n]; the first of them may lie in the cache, not all."""
    torch.manual_seed(seed)
    settings = {"do_sample": True, "temperature": temperature, "num_beams": 1}
    settings = settings if temperature > 0 else {"do_sample": False, **PLAIN_DECODING}
    input_ids = tokens_T.unsqueeze(0).to(loaded.model.device)
    model: Any = loaded.model  # transformers declares no type for generate
    with decoding(loaded.model, cache.plan):
        output: Tensor = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            **with_cache(loaded.model, cache),
            max_new_tokens=max_new_tokens,
            **settings,
        )
    return output[0, len(tokens_T) :]
