"""What the evaluation tests share: a tiny model as loaded, plans for it, random text, and a noting reporter."""

from __future__ import annotations

import torch
from cache_cases import KIVI_2, VOCAB_SIZE, tiny_llama
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcal.data.sequences import TokenDataset
from kvcal.geometry import ModelIdentity
from kvcal.models.geometry import geometry_of
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import RAW, Format, LayerPlan, Plan, Workload

RAW_PAIR = (RAW, RAW)
COARSE = (Format(1, "channel", 128), Format(2, "token", 64, 3, 20))


class Notes:
    """A Reporter that keeps the messages, and can interrupt at a message."""

    def __init__(self, interrupt_at: str | None = None) -> None:
        self.messages: list[str] = []
        self.interrupt_at = interrupt_at

    def say(self, message: str) -> None:
        self.messages.append(message)
        if self.interrupt_at is not None and self.interrupt_at in message:
            raise KeyboardInterrupt

    def __call__(self, done: int, total: int, label: str) -> None:
        assert 0 <= done <= total


def as_loaded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> LoadedModel:
    identity = ModelIdentity("tiny", model.config.model_type, "a" * 64, "b" * 64, "c" * 64)
    return LoadedModel(model, tokenizer, identity, geometry_of(model), "tiny")


def tiny() -> LoadedModel:
    return as_loaded(tiny_llama())


def make_plan(loaded: LoadedModel, pair: tuple[Format, Format] = KIVI_2, context: int = 512) -> Plan:
    layers = tuple(LayerPlan(geometry, (pair[0],), (pair[1],)) for geometry in loaded.geometry.layers)
    return Plan(loaded.identity, loaded.geometry.cache_dtype, layers, Workload(2, context), {})


def text(*lengths: int, first_loss: int = 1) -> TokenDataset:
    """Random tokens; the loss covers ``first_loss`` onwards."""
    generator = torch.Generator().manual_seed(0)
    sequences = tuple(torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in lengths)
    masks = tuple(torch.arange(length) >= first_loss for length in lengths)
    return TokenDataset(sequences, masks, "f" * 64, "random tokens")
