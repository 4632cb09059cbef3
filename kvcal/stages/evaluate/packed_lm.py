"""A model of transformers with a plan's packed cache, as the lm-evaluation-harness asks it. Needs
``lm_eval``.

The harness's Hugging Face model (``HFLM``) encodes, cuts, batches and stops; only its two calls of the model
are replaced. Likelihoods are decode-faithful: context and continuation are fed in chunks that end where pages
are written (``divergence.feed``), so that every token reads what it would read in decoding. Generation is
``model.generate``, whose prompt attends to itself at full precision, as in use. After each call the cache's
bytes are compared with the plan's prediction, and what was read with the packed pages.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.folder import tokenizer_of
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.stages.divergence import feed
from kvcal.stages.evaluate.tasks import generate_packed
from kvcal.stages.generate import PLAIN_DECODING
from kvcal.stages.measuring.cache import DecodedCache
from kvcal.stages.verify import require_predicted_bytes, require_same_model


class PackedCacheLM(HFLM):
    """HFLM with a packed cache for every batch. ``lengths``: tokens of each sequence that it was asked about,
    cut to the model's context; ``generated_tokens``: those of completions, padding apart."""

    def __init__(self, loaded: LoadedModel, plan: Plan, batch_size: int = 1) -> None:
        require_same_model(plan, loaded)
        self.plan, self.lengths, self.generated_tokens = plan, list[int](), 0
        tokenizer = tokenizer_of(loaded)
        super().__init__(
            pretrained=loaded.model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype=torch.float32
        )

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        longest = self.max_length
        self.lengths += [min(len(context) + len(more) - 1, longest) for _, context, more in requests]
        answers: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, *args, **kwargs)
        return answers

    @torch.inference_mode()
    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of sequences that are padded on the right."""
        cache = DecodedCache(self.plan, self.model.config)
        logits_BTV = torch.cat([chunk_BTV for _, chunk_BTV in feed(self.model, cache, inps)], dim=1)
        require_predicted_bytes(cache)
        cache.verify_decoded()
        if torch.isnan(logits_BTV).any():
            raise NonFiniteActivations("the logits hold NaN")
        return logits_BTV

    @torch.inference_mode()
    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
        """Tokens [B, T] of prompts and completions; ``settings`` hold the attention mask."""
        mask = settings["attention_mask"]
        cache = DecodedCache(self.plan, self.model.config, mask)
        generate, settings = super()._model_generate, PLAIN_DECODING | settings
        output = generate_packed(cache, self.model, generate, context, max_length, stop, **settings)
        new_B = (output[:, context.shape[1] :] != self.tokenizer.pad_token_id).sum(1)
        self.generated_tokens += int(new_B.sum())
        self.lengths += (mask.sum(1) + new_B).tolist()
        return output

    def get_model_info(self) -> dict[str, Any]:
        """None: HFLM would ask the hub."""
        return {}
