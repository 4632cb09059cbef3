"""Text quality of a plan: KL to the 16-bit model, top-1 agreement and perplexity, decode-faithfully.

The text is fed through the packed cache in chunks within which no page is written that they read
(``divergence.feed``), so every token reads back what it would read when generated one by one. What was read is
compared with the packed pages afterwards. The reference is the same model with
transformers' own cache and nothing quantized. Only tokens of the loss mask count:

    KL = mean over loss tokens of sum_v p_v (log p_v - log q_v),  p: 16 bits, q: quantized, in nats
    perplexity = exp(mean negative log-likelihood)

Standard errors are over sequences, since tokens of one text are not independent: each mean is a ratio of
sums, and its error is the delta method's, sqrt(n / (n - 1) sum_i (s_i - m c_i)^2) / sum_i c_i for sequences i
with sum s_i over c_i tokens and mean m; that of the perplexity is the one of its logarithm times the
perplexity. One sequence has none.

The reference's logits are kept for all plans where they take at most ``KEPT_BYTES``. Elsewhere logits exist
for one chunk at a time, and the reference runs next to each plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor
from transformers import DynamicCache

from kvcal.data.sequences import TokenDataset
from kvcal.errors import NonFiniteActivations
from kvcal.models.attention import with_cache
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.progress import SILENT, Reporter
from kvcal.stages.divergence import feed, kl_divergence
from kvcal.stages.measuring.cache import DecodedCache
from kvcal.stages.verify import require_predicted_bytes
from kvcal.strict import STRICT, Amount, Count, Number, Share

KEPT_BYTES, CHUNK = 2**30, 128
TAILS = (0.99, 0.999)
AT_16_BITS, TEXT = "evaluate: texts at 16 bits", "evaluate: text"  # of progress


@pydantic_dataclass(frozen=True, config=STRICT)
class TextQuality:
    """``kl`` in nats per loss token; ``*_se`` are standard errors over sequences, None for a single
    sequence. ``kl_99`` and ``kl_999``: below which KL lies at 99 and 99.9 % of the loss tokens; None in older
    files."""

    perplexity: Amount
    perplexity_se: Amount | None
    kl: Number
    kl_se: Amount | None
    top1_agreement: Share
    top1_se: Amount | None
    num_sequences: Count
    num_tokens: Count
    num_loss_tokens: Count
    kl_99: Amount | None = None
    kl_999: Amount | None = None


@dataclass(frozen=True, eq=False)
class TextBatch:
    """Sequences of equal length, so that their pages are written at the same tokens: ``input_ids_BT`` int64;
    ``scored_TB`` bool: the next token counts; ``sequences``: their numbers in the data set."""

    input_ids_BT: Tensor
    scored_TB: Tensor
    sequences: tuple[int, ...]


def text_batches(data: TokenDataset, batch: int, device: torch.device) -> list[TextBatch]:
    """At most ``batch`` sequences of one length each, longest first."""
    order = sorted(range(len(data.sequences)), key=lambda i: -data.sequences[i].numel())
    batches = []
    for _, equal in itertools.groupby(order, key=lambda i: data.sequences[i].numel()):
        numbers = list(equal)
        for first in range(0, len(numbers), batch):
            chosen = tuple(numbers[first : first + batch])
            input_ids_BT = torch.stack([data.sequences[i] for i in chosen]).to(device)
            masks_TB = torch.stack([data.loss_masks[i] for i in chosen], dim=1).to(device)
            scored_TB = torch.nn.functional.pad(masks_TB[1:], (0, 0, 0, 1), value=False)
            batches.append(TextBatch(input_ids_BT, scored_TB, chosen))
    return batches


@torch.inference_mode()
def reference_logits(loaded: LoadedModel, data: TokenDataset, batch: int, reporter: Reporter = SILENT) -> list[Tensor]:
    """The reference's logits fp32 [M, V] at the predicting positions of each batch, by token, then by
    sequence; no item where they would take more than ``KEPT_BYTES``."""
    found: list[Tensor] = []
    if 4 * data.num_loss_tokens * loaded.vocab_size > KEPT_BYTES:
        return found
    batches = text_batches(data, batch, loaded.model.device)
    for number, text in enumerate(batches):
        reporter(number, len(batches), AT_16_BITS)
        cache = DynamicCache(config=loaded.model.config)
        chunks = range(0, len(text.scored_TB), CHUNK)
        found.append(torch.cat([_reference(loaded, text, start, start + CHUNK, cache) for start in chunks]))
    reporter(len(batches), len(batches), AT_16_BITS)
    return found


@torch.inference_mode()
def measure_text(
    loaded: LoadedModel, plan: Plan, data: TokenDataset, batch: int, reporter: Reporter, kept: Sequence[Tensor] = ()
) -> TextQuality:
    """Measure ``plan`` on ``data``, up to ``batch`` sequences of equal length at once. ``kept``: what
    ``reference_logits`` gives of the same model, data and batch."""
    sums = torch.zeros(len(data.sequences), 3, dtype=torch.float64)  # negative log-likelihood, KL, agreements
    kls: list[Tensor] = []
    done = 0
    for number, text in enumerate(text_batches(data, batch, loaded.model.device)):
        cache, reference = DecodedCache(plan, loaded.model.config), DynamicCache(config=loaded.model.config)
        before = [0, *text.scored_TB.sum(1).cumsum(0).tolist()]
        for start, logits_BTV in feed(loaded.model, cache, text.input_ids_BT):
            stop = start + logits_BTV.shape[1]
            if kept:
                reference_MV = kept[number][before[start] : before[stop]]
            else:
                reference_MV = _reference(loaded, text, start, stop, reference)
            rows, values = _token_values(text, start, logits_BTV, reference_MV)
            kls.append(values[:, 1].cpu())
            sums.index_add_(0, torch.tensor(text.sequences)[rows.cpu()], values.cpu())
            reporter(done + stop * len(text.sequences), data.num_tokens, TEXT)
        require_predicted_bytes(cache)
        cache.verify_decoded()
        done += text.input_ids_BT.numel()
    counts = torch.tensor([int(mask.sum()) for mask in data.loss_masks], dtype=torch.float64)
    (nll, nll_se), (kl, kl_se), (top1, top1_se) = (ratio_and_error(sums[:, i], counts) for i in range(3))
    tails = torch.cat(kls).quantile(torch.tensor(TAILS, dtype=torch.float64)).tolist()
    perplexity = float(torch.tensor(nll, dtype=torch.float64).exp())
    return TextQuality(
        perplexity=perplexity,
        perplexity_se=None if nll_se is None else perplexity * nll_se,
        kl=kl,
        kl_se=kl_se,
        top1_agreement=top1,
        top1_se=top1_se,
        num_sequences=len(data.sequences),
        num_tokens=data.num_tokens,
        num_loss_tokens=data.num_loss_tokens,
        kl_99=tails[0],
        kl_999=tails[1],
    )


def _reference(loaded: LoadedModel, text: TextBatch, start: int, stop: int, cache: DynamicCache) -> Tensor:
    """Logits fp32 [M, V] at the predicting positions from ``start`` on, up to which ``cache`` has the
    text."""
    inputs = {"input_ids": text.input_ids_BT[:, start:stop], **with_cache(loaded.model, cache)}
    return loaded.model(**inputs).logits.transpose(0, 1)[text.scored_TB[start:stop]].float()


def _token_values(text: TextBatch, start: int, logits_BTV: Tensor, reference_MV: Tensor) -> tuple[Tensor, Tensor]:
    """The row [M] of every predicting position, and [M, 3] fp64: negative log-likelihood, KL, agreement."""
    stop = start + logits_BTV.shape[1]
    columns, rows = text.scored_TB[start:stop].nonzero(as_tuple=True)
    logits_MV = logits_BTV[rows, columns].float()
    targets = text.input_ids_BT[rows, columns + start + 1]
    nll = torch.nn.functional.cross_entropy(logits_MV, targets, reduction="none")
    kl = kl_divergence(reference_MV, logits_MV)
    if not torch.isfinite(nll + kl).all():
        raise NonFiniteActivations(
            f"the logits of the model, at 16 bits or with the plan, are not finite between tokens {start} and {stop}"
        )
    agrees = logits_MV.argmax(-1) == reference_MV.argmax(-1)
    return rows, torch.stack([nll.double(), kl, agrees.double()], dim=-1)


def ratio_and_error(sums_N: Tensor, counts_N: Tensor) -> tuple[float, float | None]:
    """Mean of what N sequences have sums and counts of, fp64, and its standard error over sequences."""
    n, mean = len(sums_N), sums_N.sum() / counts_N.sum()
    if n < 2:
        return float(mean), None
    variance = n / (n - 1) * (sums_N - mean * counts_N).square().sum()
    return float(mean), float(variance.sqrt() / counts_N.sum())
