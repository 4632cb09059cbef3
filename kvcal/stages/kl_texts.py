"""Calibration texts on which a KL can be measured: in which something is read from a quantized page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvcal.data import TokenDataset
from kvcal.errors import UsageError
from kvcal.recipe import CacheSpec


@dataclass(frozen=True, eq=False)
class Text:
    """A calibration sequence for the KL, cut; ``sample`` is its number in the data."""

    sample: int
    tokens_T: Tensor
    loss_mask_T: Tensor


def kl_texts(data: TokenDataset, num_samples: int, num_tokens: int, cache: CacheSpec) -> list[Text]:
    """The first ``num_samples`` sequences, cut at ``num_tokens``, in which some loss token is predicted from a
    quantized page. UsageError if there is none."""
    if num_samples == 0:
        return []
    first = cache.first_from_page
    pairs = zip(data.sequences, data.loss_masks, strict=True)
    cut = [Text(i, tokens[:num_tokens], mask[:num_tokens]) for i, (tokens, mask) in enumerate(pairs)]
    texts = [text for text in cut if bool(text.loss_mask_T[first:].any())][:num_samples]
    if not texts:
        raise UsageError(
            f"none of {len(cut)} sequences has a loss token behind token {first} and within kl_tokens = "
            f"{num_tokens}: nothing would be read from a quantized page, and every KL would be 0",
            hint="give longer sequences, or set kl_samples = 0 to profile without KL",
        )
    return texts


def padded_texts(texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """tokens [B, T] int64 and loss masks [B, T] bool, padded on the right."""
    tokens_BT = pad_sequence([text.tokens_T for text in texts], batch_first=True)
    return tokens_BT, pad_sequence([text.loss_mask_T for text in texts], batch_first=True)
