"""A whole decode step from a static cache on a GPU: captured in a CUDA graph by hand, or compiled by
``generate``."""

import pytest
import torch
import transformers as hf
from gpu_cases import graph_of, mixed_plan, plan_for, random_ids, random_llama, reasoner, task_prompts
from torch import Tensor
from transformers import CompileConfig

from kvcal import PlanCache, attached
from kvcal.kernels.compile import Kernel

pytestmark = pytest.mark.gpu


class Step:
    """One whole decode step of a model with fixed inputs, as a graph captures it; ``history`` [steps, B,
    vocabulary] is what it has given."""

    def __init__(self, model: hf.PreTrainedModel, cache: PlanCache, batch: int, count: int) -> None:
        self.model, self.cache = model, cache
        self.ids, self.positions = (torch.zeros(batch, 1, dtype=torch.long, device="cuda") for _ in range(2))
        self.logits = torch.zeros(batch, model.config.vocab_size, dtype=model.dtype, device="cuda")
        self.history = torch.zeros(count, *self.logits.shape, dtype=model.dtype, device="cuda")

    def __call__(self) -> None:
        logits = self.model(self.ids, position_ids=self.positions, past_key_values=self.cache).logits[:, -1]
        self.logits.copy_(logits)
        self.ids.copy_(logits.argmax(-1, keepdim=True))
        self.positions.add_(1)

    def begin(self, prompt: Tensor) -> None:
        logits = self.model(prompt, past_key_values=self.cache, logits_to_keep=1).logits[:, -1]
        self.ids.copy_(logits.argmax(-1, keepdim=True))
        self.positions.fill_(prompt.shape[1])

    def run(self, call) -> Tensor:
        for place in self.history:
            call()
            place.copy_(self.logits)
        torch.cuda.synchronize()
        return self.history


def allocations() -> list[int]:
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return [stats[key] for key in ("allocation.all.allocated", "segment.all.allocated", "reserved_bytes.all.current")]


@pytest.mark.parametrize("name", ["mixed", "basis"])
@torch.inference_mode()
def test_a_captured_step_is_an_eager_one_bit_for_bit_and_allocates_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the graph, kernels overlap; the eager ones run one at a time."""
    launch = Kernel.launch

    def launch_alone(*args, **kwargs) -> None:
        torch.cuda.synchronize()
        launch(*args, **kwargs)
        torch.cuda.synchronize()

    model = reasoner("bfloat16").model
    plan, prompt = mixed_plan(model) if name == "mixed" else plan_for(model, name), task_prompts(2, 100)
    found = []
    with attached(model):
        for is_captured in (False, True):
            monkeypatch.setattr(Kernel, "launch", launch if is_captured else launch_alone)
            step = Step(model, PlanCache(plan, model.config, max_tokens=500), 2, 300)
            if is_captured:
                step.cache.allocate(2, "cuda")
                call = graph_of(step).replay  # before the prompt, which may begin anew
                step.cache.reset()
            else:
                call = step
            step.begin(prompt)
            before = allocations()
            step.run(call)
            assert allocations() == before or not is_captured
            step.cache.check()
            found.append(step)
    eager, captured = found
    assert torch.equal(eager.history, captured.history)
    assert captured.cache.lengths == [400, 400]
    for ours, theirs in zip(captured.cache.paged_layers, eager.cache.paged_layers, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours.tensors, theirs.tensors, strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # torch's own, to reserve a pool
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_generate_compiles_the_step_by_itself(mode: str) -> None:
    from torch._dynamo.utils import counters

    model = random_llama(num_layers=2, dtype=torch.float32)
    plan, ids = plan_for(model, "kitty"), random_ids(2, 120)
    cache = PlanCache(plan, model.config, max_tokens=400)
    options = {"max_new_tokens": 200, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    torch.compiler.reset()
    counters.clear()
    with attached(model):
        expected = model.generate(ids, past_key_values=cache, disable_compile=True, **options)
        cache.reset()
        found = model.generate(ids, past_key_values=cache, compile_config=CompileConfig(mode=mode), **options)
    del model._compiled_call, model._last_compile_config
    cache.check()
    assert cache.lengths == [319, 319]
    assert not counters["graph_break"] and not counters["inductor"]["cudagraph_skips"]
    assert torch.equal(found, expected)
