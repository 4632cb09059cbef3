"""Shared by the tests of profiles: models whose layers differ, samples, and references in scalar
arithmetic."""

import numpy as np
import torch
import transformers as hf
from oracles import quantized_page
from tiny_models import as_loaded, perturbed
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvcal.data.sequences import TokenDataset
from kvcal.models.load import LoadedModel
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.recipe import CacheSpec
from kvcal.stages.checkpoint import Batch
from kvcal.stages.profile.observers import BatchGradients, GradientPass
from kvcal.stages.profile.sensitivity import Candidate, Errors, candidates

IDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CONFIGS = {"llama": hf.LlamaConfig, "qwen3": hf.Qwen3Config}
ALL = {side: candidates(side, (1, 2, 3, 4, 8), ("channel", "token"), (32, 64, 128)) for side in ("k", "v")}
FEW = {"k": (Candidate(2, "channel", 32), Candidate(3, "token", 128)), "v": (Candidate(2, "token", 128),)}
CACHE = CacheSpec(num_sink_tokens=4, k_recent_window=16, v_recent_window=8)


def gqa_model(name: str, dtype: torch.dtype = torch.float32, num_layers: int = 4) -> PreTrainedModel:
    """Layers of very different sensitivity, 2 KV heads for 4 query heads; the same weights in any dtype."""
    torch.manual_seed(3)
    config = CONFIGS[name](**IDS, **SHAPE, num_hidden_layers=num_layers, max_position_embeddings=512)
    model = perturbed(hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32), 0.15)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.mul_(2.0**-number)
    return model.to(dtype)


def loaded_model() -> LoadedModel:
    return as_loaded(gqa_model("llama", num_layers=2))


def data_of(*lengths: int) -> TokenDataset:
    generator = torch.Generator().manual_seed(5)
    sequences = tuple(torch.randint(3, 64, (length,), generator=generator) for length in lengths)
    masks = tuple(torch.arange(length) >= 7 for length in lengths)
    return TokenDataset(sequences, masks, "f", "random tokens")


def sample_of(length: int, num_prompt: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens_T = torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(seed))
    return tokens_T, torch.arange(length) >= num_prompt


def batch_of(number: int, tokens_T: Tensor, mask_T: Tensor) -> Batch:
    """One sequence."""
    return Batch((number,), tokens_T[None], mask_T[None], (len(tokens_T),))


def measure(gradients: GradientPass, number: int, tokens_T: Tensor, mask_T: Tensor) -> BatchGradients:
    """Of one sequence, without the dimension of the batch."""
    return row_of(gradients.measure_together([batch_of(number, tokens_T, mask_T)])[0], 0)


def row_of(found: BatchGradients, row: int) -> BatchGradients:
    """Of one sequence of a batch."""
    errors = {place: Errors(*(part[row] for part in of_place)) for place, of_place in found.errors.items()}
    return BatchGradients(
        found.loss_B[row], errors, {place: norm_B[row] for place, norm_B in found.weight_grad_norms.items()}
    )


class Watched(DynamicCache):
    """Keeps keys and values that a model caches, with gradients, and adds ``nudges`` to them first."""

    def __init__(self, config, nudges: dict | None = None) -> None:
        super().__init__(config=config)
        self.kept: dict[tuple[int, str], Tensor] = {}
        self.nudges = nudges or {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        states = {}
        for side, x in (("k", key_states), ("v", value_states)):
            nudge = self.nudges.get((layer_idx, side))
            states[side] = x if nudge is None else x + nudge
            self.kept[layer_idx, side] = states[side]
            if x.requires_grad:
                states[side].retain_grad()
        return super().update(states["k"], states["v"], layer_idx, *args, **kwargs)


def quantization_error(x_TD: np.ndarray, candidate: Candidate, sinks: int) -> np.ndarray:
    """Q(x) - x of one head with a float16 scale and zero, page by page, one number at a time."""
    error, x_TD = np.zeros(x_TD.shape), x_TD.astype(np.float32)
    for start in range(sinks, len(x_TD), PAGE_TOKENS):
        page_TD = x_TD[start : start + PAGE_TOKENS]
        read_TD = quantized_page(torch.from_numpy(page_TD), *candidate[:3], "float16")
        error[start : start + PAGE_TOKENS] = read_TD.double().numpy() - page_TD
    return error


def reference_errors(cache: Watched, number: int, gradient_of: int, wanted, side: str) -> Tensor:
    """Eq. 5 with layer ``number``'s errors and layer ``gradient_of``'s gradients."""
    x_NTD, g_NTD = cache.kept[number, side][0].detach(), cache.kept[gradient_of, side].grad[0]
    sums = [
        [float(np.abs(g.numpy() * quantization_error(x.numpy(), candidate, 4)).sum()) for candidate in wanted]
        for x, g in zip(x_NTD, g_NTD, strict=True)
    ]
    return torch.tensor(sums, dtype=torch.float64)
