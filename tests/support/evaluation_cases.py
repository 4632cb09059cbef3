"""Shared by the evaluation tests: a tiny model as loaded, plans for it, random text, and a noting
reporter."""

from functools import cache

import torch
from cache_cases import KIVI_2, VOCAB_SIZE, tiny_llama
from tiny_models import as_loaded, perturbed
from transformers import LlamaConfig, LlamaForCausalLM

from kvcal.data.reading import EvaluateSpec
from kvcal.data.sequences import TokenDataset
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import RAW, Format, LayerPlan, Plan, Workload
from kvcal.plan.tensors import layout_tensors

RAW_PAIR = (RAW, RAW)
WORDY_CONTEXT = 640  # tokens at most, of ``wordy_llama``
COARSE = (Format(1, "channel", 128), Format(2, "token", 64, 3, 20))
SMALL = {"max_steps": 6, "max_size": 22, "max_hops": 5, "max_digits": 2}


def tiny() -> LoadedModel:
    return as_loaded(tiny_llama())


def make_plan(loaded: LoadedModel, pair: tuple[Format, Format] = KIVI_2, context: int = 512) -> Plan:
    layers = tuple(LayerPlan(geometry, pair[0], pair[1]) for geometry in loaded.geometry.layers)
    tensors = layout_tensors(layers)
    return Plan(loaded.identity, loaded.geometry.cache_dtype, layers, Workload(2, context), {}, tensors=tensors)


def text(*lengths: int, first_loss: int = 1) -> TokenDataset:
    """Random tokens; the loss covers ``first_loss`` onwards."""
    generator = torch.Generator().manual_seed(0)
    sequences = tuple(torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in lengths)
    masks = tuple(torch.arange(length) >= first_loss for length in lengths)
    return TokenDataset(sequences, masks, "f" * 64, "random tokens")


@cache
def wordy_llama(vocab_size: int) -> LlamaForCausalLM:
    """Two layers, whose logits differ from word to word."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=WORDY_CONTEXT, bos_token_id=0, eos_token_id=0,
        pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return perturbed(LlamaForCausalLM(config), 0.2)


def spec(**changes) -> EvaluateSpec:
    return EvaluateSpec(
        **{"tasks": ("chain",), "num_problems": 3, "max_new_tokens": 60, "batch": 6, **SMALL, **changes}
    )
