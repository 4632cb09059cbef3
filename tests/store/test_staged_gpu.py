"""Plans that shrink, in a static cache on a GPU: the bytes of the CPU's and of the dynamic cache, and captured steps
that cross stages."""

import dataclasses

import pytest
import torch
from cache_cases import padded, plan_of
from gpu_cases import graph_of, logits_of, ragged_ids, random_llama, relative
from staged_cases import SCHEDULES, assert_same_bytes, fmt, mixed_plan, transformed
from static_cases import pages_of
from torch import Tensor

from kvcal import Plan, PlanCache
from kvcal.models.supported_layers import geometry_of
from kvcal.plan.plan import Workload
from kvcal.store.state import Serving

pytestmark = pytest.mark.gpu

NAMES = [*SCHEDULES, "transformed", "mixed"]


def plan_for(name: str, head_dim: int = 64) -> Plan:
    """For ``random_llama(head_dim=head_dim)``; 2 KV heads."""
    geometry = geometry_of(random_llama(head_dim=head_dim), cache_dtype="bfloat16")
    if name == "mixed":
        layer = mixed_plan().layers[0]
        plan = plan_of(geometry, layer.k, layer.v)
    else:
        k_at, v_at = SCHEDULES.get(name, SCHEDULES["unlike"])
        plan = plan_of(geometry, fmt("k", k_at), fmt("v", v_at))
    plan = dataclasses.replace(plan, workload=Workload(8, 2048))
    return transformed(plan) if name == "transformed" else plan


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", NAMES)
def test_a_ragged_batch_stores_what_the_dynamic_cache_stores(name: str, head_dim: int) -> None:
    """Prompts of 40, 9 and 1 tokens, padded on the left; then 370 steps over all stages."""
    model, plan = random_llama(head_dim=head_dim), plan_for(name, head_dim)
    ids, mask = ragged_ids((40, 9, 1), 370)
    static = PlanCache(plan, model.config, mask[:, :40], max_tokens=410)
    static.allocate(3, "cuda")
    held = static.nbytes
    found = logits_of(model, static, ids, 40, mask)
    static.check()
    assert static.nbytes == held and static.lengths == [410, 379, 371]
    dynamic = PlanCache(plan, model.config, mask[:, :40])
    expected = logits_of(model, dynamic, ids, 40, mask)
    assert relative(found, expected).max() < 0.03
    assert assert_same_bytes(static, dynamic) > 0


class Steps:
    """Decode steps of a layer from tables of keys, values and queries: step n takes row n of them, on the device."""

    def __init__(self, plan: Plan, max_tokens: int, device: str) -> None:
        config = random_llama().config
        self.cache = PlanCache(plan, config, padded([torch.ones(n) for n in (40, 9, 1)], 40, "left")[1], max_tokens)
        self.cache.allocate(3, device)
        self.cache.static.serving = Serving()
        generator = torch.Generator().manual_seed(5)
        shapes = [(max_tokens, 3, heads, 64) for heads in (8, 2, 2)]
        self.tables = [torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes]
        self.out = torch.zeros(3, 1, 8, 64, dtype=torch.bfloat16, device=device)

    @property
    def layer(self):
        return self.cache.paged_layers[0]

    def begin(self) -> None:
        """An empty cache, and its prompt of 40 columns."""
        self.cache.reset()
        q, k, v = (table[:40].permute(1, 2, 0, 3) for table in self.tables)
        self.layer.update(k, v)
        self.layer.observe(q)

    def step(self) -> None:
        at = self.cache.static.columns.view(1)
        q, k, v = (table.index_select(0, at).permute(1, 2, 0, 3) for table in self.tables)
        self.out.copy_(self.layer.attend(q, k, v, None, 0.125, 0.0))

    def store(self) -> None:
        """A step without its attention."""
        at = int(self.cache.static.columns)
        self.cache.static.phases.advance()
        q, k, v = (table[at] for table in self.tables)
        self.layer.store.step.append(q, k, v, self.layer.store.place)
        self.cache.static.advance_step(1)

    def capture(self) -> torch.cuda.CUDAGraph:
        self.begin()
        return graph_of(self.step)


def packed(cache: PlanCache) -> list[Tensor]:
    """The pages that are packed, on the CPU, row by row."""
    parts, lengths = cache.paged_layers[0].parts, cache.static.lengths.tolist()
    return [pages_of(part, row, length).cpu() for part in parts for row, length in enumerate(lengths)]


@torch.inference_mode()
@pytest.mark.parametrize("name", ["unlike", "two at once", "mixed"])
def test_a_captured_step_crosses_stages_as_an_eager_one(name: str) -> None:
    plan, found = plan_for(name), []
    for is_captured in (False, True):
        steps = Steps(plan, 410, "cuda")
        call = steps.capture().replay if is_captured else steps.step
        steps.begin()
        history = []
        for _ in range(370):
            call()
            history.append(steps.out.clone())
        steps.cache.check()
        found.append((torch.stack(history), packed(steps.cache), int(steps.cache.static.phases.stage)))
    assert torch.equal(found[0][0], found[1][0]) and found[0][2] == found[1][2] > 0
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


@torch.inference_mode()
def test_a_soak_of_200000_steps() -> None:
    """Rounds of 960 captured steps of a ragged batch through all stages: memory stays, and the last round's pages are
    those of the reference on a CPU."""
    schedule = (200, 400, 700), (300, 300, 900)
    geometry = geometry_of(random_llama(), cache_dtype="bfloat16")
    plan = dataclasses.replace(
        plan_of(geometry, fmt("k", schedule[0]), fmt("v", schedule[1])), workload=Workload(3, 1000)
    )
    steps, before = Steps(plan, 1000, "cuda"), 0
    graph = steps.capture()
    for number in range(209):
        steps.begin()  # raises what the kernels met
        for _ in range(960):
            graph.replay()
        torch.cuda.synchronize()
        if number == 0:
            before, first = torch.cuda.memory_allocated(), steps.out.clone()
        assert torch.equal(steps.out, first)
    assert torch.cuda.memory_allocated() <= before + first.numel() * first.itemsize + 512
    steps.cache.check()
    assert steps.cache.lengths == [1000, 969, 961] and int(steps.cache.static.phases.stage) == 5
    reference = Steps(plan, 1000, "cpu")
    reference.begin()
    for _ in range(960):
        reference.store()
    pages = packed(reference.cache)
    assert sum(map(len, pages)) > 30
    assert all(torch.equal(one, other) for one, other in zip(packed(steps.cache), pages, strict=True))
