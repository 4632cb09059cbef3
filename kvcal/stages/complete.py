"""One completion with a plan's packed cache: what ``kvcal generate`` runs, and what a user of the library writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvcal.data import prefix_ids
from kvcal.errors import UsageError
from kvcal.models.load import LoadedModel
from kvcal.plan import Plan, bare_layers
from kvcal.runtime.cache import PlanCache
from kvcal.runtime.queries import serving


@torch.inference_mode()
def complete(
    loaded: LoadedModel,
    plan: Plan,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    chat: bool,
) -> dict[str, Any]:
    """Text, token counts, and the cache's bytes beside those of 16 bits.

    Raises:
        UsageError: an empty prompt, no chat template, or more tokens than the model's context.
    """
    input_ids = _encode(loaded, prompt, chat)
    config = loaded.model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and input_ids.shape[1] + max_new_tokens > limit:
        raise UsageError(
            f"{input_ids.shape[1]} prompt tokens + {max_new_tokens} new ones exceed the model's context of {limit}",
            hint="shorten the prompt or lower --max-new-tokens",
        )
    cache = PlanCache(plan, loaded.model.config)
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    model: Any = loaded.model  # transformers declares no type for generate
    with serving(model, plan):
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            **sampling,
        )
    new = output[0, input_ids.shape[1] :]
    raw = replace(plan, layers=bare_layers(plan.geometry), tensors={})
    assert loaded.tokenizer is not None
    return {
        "text": loaded.tokenizer.decode(new, skip_special_tokens=True),
        "new_tokens": len(new),
        "cached_tokens": cache.get_seq_length(),
        "cache_bytes": cache.nbytes,
        "raw_bytes": raw.nbytes(cache.lengths),
    }


def _encode(loaded: LoadedModel, prompt: str, chat: bool) -> torch.Tensor:
    """[1, T] token ids; plain prompts start with what the model's sequences start with."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise UsageError(f"{loaded.source}: no tokenizer", hint="a prompt cannot be tokenized without one")
    if chat:
        if not tokenizer.chat_template:
            raise UsageError(f"{loaded.source}: the tokenizer has no chat template", hint="leave out --chat")
        messages = [{"role": "user", "content": prompt}]
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        tokens = prefix_ids(tokenizer) + tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not tokens or not prompt.strip():
        raise UsageError("the prompt is empty", hint="give --prompt TEXT, or - to read it from stdin")
    return torch.tensor([tokens], device=loaded.model.device)
