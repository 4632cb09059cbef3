"""``generate`` with prompt lookup, on the embedded model: the tokens of plain decoding, through steps with drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from cache_cases import plan_of
from torch import Tensor

from kvcal import Plan, PlanCache, attached
from kvcal.models.geometry import geometry_of
from kvcal.models.load import LoadedModel, load
from kvcal.plan.page_format import Format
from kvcal.store.layer_store import LayerStep

TEXT = "The cache holds keys and values. A page of the cache holds keys and values of 128 tokens. "
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load("reasoner-10m", dtype="float32", device=request.param)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """How many steps of so many tokens the first head range of all layers has decoded."""
    counts: Counter[int] = Counter()
    decode = LayerStep.decode

    def counted(self: LayerStep, q: Tensor, *args: object) -> Tensor:
        counts[1 if q.dim() == 3 else q.shape[1]] += 1
        return decode(self, q, *args)

    monkeypatch.setattr(LayerStep, "decode", counted)
    yield counts


def plan_for(loaded: LoadedModel) -> Plan:
    return plan_of(geometry_of(loaded.model, cache_dtype="bfloat16"), Format(2, "channel", 32), Format(2, "token", 32))


@torch.inference_mode()
def test_prompt_lookup_gives_the_tokens_of_plain_decoding(loaded: LoadedModel, steps: Counter[int]) -> None:
    model, plan = loaded.model, plan_for(loaded)
    tokens = loaded.tokenizer(TEXT * 6, add_special_tokens=False)["input_ids"][:110]
    ids = torch.tensor([tokens], device=model.device)
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    found = []
    for lookahead in (0, 7):
        cache = PlanCache(plan, model.config, max_tokens=256, lookahead=lookahead)
        lookup = {"prompt_lookup_num_tokens": lookahead} if lookahead else {}
        with attached(model):
            found.append(model.generate(ids, past_key_values=cache, **options, **lookup))
        assert cache.lengths == [169]
    assert torch.equal(found[0], found[1])
    assert sum(count for tokens, count in steps.items() if tokens > 1) > 0
