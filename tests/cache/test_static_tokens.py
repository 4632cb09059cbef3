"""1,000 tokens of a static cache on a GPU are those of the dynamic cache; what rounding does is told apart.

Both are fed the same tokens, though not as many at a time. So the last bits of products and of attention
differ, and now and then a key or a value lies on the other side of a code's boundary. All tokens after its
page feel that: noise of 1e-6 on the reference's own attention changes its choices, too. So two questions are
asked, page by page and token by token. Are the pages that the reference packs, from the same pages before
them, those of the static cache, but for few codes? And from the same pages, are its tokens the same, but for
ties?
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from gpu_cases import context, mixed_plan, plan_for, reasoner, relative, steps, task_prompts
from static_cases import pages_of
from torch import Tensor

from kvcal import PlanCache
from kvcal.models.load import load
from kvcal.plan.page_format import num_pages

pytestmark = pytest.mark.gpu

# From the same pages, a token that differs from the reference's is worth at most this much less to it, in
# logits, of which the best two are about 3 apart in the middle of a text.
MARGIN = 0.01


class Distance(NamedTuple):
    """Of one page of one head from another: the share of its bytes that differ, and the distance of what it
    decodes to, relative to its size."""

    bytes: float
    values: float


def greedy(model, cache: PlanCache, prompt: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """prompt [B, P] with the ``count`` tokens that follow, and the logits [B, count, vocabulary] they were
    taken by."""
    ids, found = torch.nn.functional.pad(prompt, (0, count)), []
    with context(model, cache):
        for column, logits in enumerate(steps(model, cache, ids[:, :-1], prompt.shape[1]), prompt.shape[1]):
            ids[:, column] = logits.argmax(-1)
            found.append(logits)
    return ids, torch.stack(found, dim=1)


@torch.inference_mode()
def forced(
    model, cache: PlanCache, ids: Tensor, prompt: int, static: PlanCache | None = None
) -> tuple[Tensor, list[Distance]]:
    """The logits [B, T - P, vocabulary] by which a dynamic cache would judge each of ids [B, T] after a
    prompt, fed in the longest chunks that are like single steps. With ``static`` it reads the pages of that
    one as soon as it has packed its own; how these differ."""
    found, distances, start, stop = [], [], 0, prompt
    with context(model, cache):
        while start < ids.shape[1] - 1:
            logits = model(ids[:, start:stop], past_key_values=cache).logits.float()
            found.append(logits if found else logits[:, -1:])
            distances += [] if static is None else adopt(cache, static)
            start, stop = stop, min(stop + cache.tokens_to_next_page(), ids.shape[1] - 1)
    return torch.cat(found, dim=1), distances


def adopt(cache: PlanCache, static: PlanCache) -> list[Distance]:
    """Put the pages of ``static`` into a dynamic cache; how its own differed from them, where they did."""
    distances = []
    for ours, theirs in zip(cache.paged_layers, static.paged_layers, strict=True):
        pairs = zip(ours.parts, theirs.parts, strict=True)
        for (part, other), (row, length) in itertools.product(pairs, enumerate(cache.lengths)):
            slots = part.pool.slots([(row, 0, num_pages(length))])
            pages = part.pool.records[slots]
            wanted = pages_of(other, row, length).to(pages.device)
            for number, head in (pages != wanted).any(dim=2).nonzero().tolist():
                share = (pages[number, head] != wanted[number, head]).double().mean()
                old, new = (part.codec.decode(of[number : number + 1], part.num_bits) for of in (pages, wanted))
                old, new = (x[0, head].double() for x in (old, new))
                distances.append(Distance(float(share), float((new - old).norm() / old.norm())))
            part.pool.records[slots] = wanted
    return distances


@pytest.mark.parametrize("name", ["kivi", "kitty", "mixkvq", "mixed"])
def test_a_thousand_tokens_are_the_references_but_for_rounding(name: str) -> None:
    """On a GPU and on a CPU. In fp32: in bf16, the reference's own choices depend on how many tokens it is
    fed at a time."""
    model, prompt = reasoner("float32").model, task_prompts(2, 150)
    plan = mixed_plan(model) if name == "mixed" else plan_for(model, name)
    static = PlanCache(plan, model.config, max_tokens=1200)
    ids, found = greedy(model, static, prompt, 1000)
    assert static.lengths == [1149, 1149]
    assert static.nbytes == plan.nbytes([1200] * 2)
    static.check()

    def lost(expected: Tensor) -> Tensor:
        """Logits [B, count] that the chosen tokens are after the best ones."""
        return expected.amax(-1) - expected.gather(2, ids[:, 150:].unsqueeze(-1)).squeeze(-1)

    for reference in (model, load("reasoner-10m", dtype="float32", device="cpu").model):
        ids, found = ids.to(reference.device), found.to(reference.device)
        expected, _ = forced(reference, PlanCache(plan, model.config), ids, 150)
        assert (lost(expected) > 0).float().mean() < 0.005
        assert relative(found, expected).median() < 0.005
        expected, distances = forced(reference, PlanCache(plan, model.config), ids, 150, static)
        assert lost(expected).max() < MARGIN
        assert relative(found, expected).median() < 5e-4 and relative(found, expected).max() < 0.02
        assert max(page.values for page in distances) < 0.1
        assert sum(page.bytes for page in distances) / len(distances) < 0.05
