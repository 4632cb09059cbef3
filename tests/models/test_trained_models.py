"""The script that trains models of other families: it computes what transformers computes, learns, and what it saves
runs through a plan's cache."""

import sys
from pathlib import Path

import pytest
import torch
from cache_cases import plan_of
from tiny_models import perturbed

from kvcal import PlanCache
from kvcal.models.load import load
from kvcal.plan.plan import Format

sys.path.append(str(Path(__file__).parents[2] / "experiments"))

import train_models  # noqa: E402

LENGTH = 160  # beyond GPT-OSS's window


class SameRows:
    """The same batch again and again, and a clock that counts them."""

    num_batches = 0

    def __init__(self) -> None:
        self.tokens = torch.randint(2, 50, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    def batch(self, progress: float, batch_tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        self.num_batches += 1
        return self.tokens, torch.ones(2, LENGTH), 1

    def monotonic(self) -> int:
        return self.num_batches


@pytest.mark.parametrize("family", train_models.FAMILIES)
def test_training_computes_what_the_family_computes(family):
    torch.manual_seed(0)
    model = perturbed(train_models.build(family, True, "cpu"), 0.05)
    if family == "gemma":
        model.config.sliding_window = 128
    with torch.no_grad():
        ids = torch.randint(2, 4096, (2, LENGTH))
        masks = train_models.masks_of(model.config, LENGTH, "cpu")
        found = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=masks, use_cache=False).logits
        model.config._attn_implementation = model.config._experts_implementation = "eager"
        expected = model(input_ids=ids, use_cache=False).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_trained_model_runs_through_a_plans_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(train_models, "WARMUP_STEPS", 1)
    torch.manual_seed(0)
    model = train_models.build("gpt-oss", True, "cpu")
    record: dict = {}
    rows = SameRows()
    monkeypatch.setattr(train_models, "time", rows)  # a busy machine takes as many steps as an idle one
    train_models.train(model, rows, 8, 2 * LENGTH, False, record)
    train_models.save(model, record, tmp_path)
    ids = rows.tokens[:1, :-1]
    loaded = load(str(tmp_path), device="cpu")
    with torch.no_grad():
        loss = loaded.model(ids, labels=ids, use_cache=False).loss.item()
        assert record["steps"] == 8
        assert loss < record["log"][0]["text"] - 1
        exact = loaded.model(ids).logits
        cache = PlanCache(plan_of(loaded.geometry, Format(2, "channel", 32), Format(2, "token", 32)), model.config)
        for token in ids.split([128, 16, 16], 1):
            logits = loaded.model(token, past_key_values=cache).logits
    assert torch.isfinite(logits).all()
    assert (logits - exact[:, -16:]).abs().max() > 1e-3
