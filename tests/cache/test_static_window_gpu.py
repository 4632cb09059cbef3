"""Sliding windows, marks and prefixes of a static cache on a GPU: the CPU's bytes, captured steps, the
dynamic cache's logits."""

import pytest
import torch
import transformers as hf
from cache_cases import KIVI_2, plan_of
from gpu_cases import VOCABULARY, graph_of, logits_of, ragged_ids, random_ids, relative
from test_static_graphs import Step, allocations
from test_static_window import assert_same_windows
from tiny_models import perturbed

from kvcal import Plan, PlanCache, attached
from kvcal.errors import UsageError
from kvcal.geometry import AttentionGeometry, ModelIdentity
from kvcal.kernels.ops import append_window
from kvcal.models.supported_layers import geometry_of
from kvcal.plan.layer import LayerPlan
from kvcal.plan.plan import Workload

pytestmark = pytest.mark.gpu

WINDOW = 100
_SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "sliding_window": WINDOW, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def sliding_model(kind: str, dtype: torch.dtype = torch.bfloat16) -> hf.PreTrainedModel:
    """A sliding layer ("mistral"), or one and a full one, with softcap ("gemma2") or logits of sinks
    ("gpt_oss")."""
    shape = _SHAPE | {"num_hidden_layers": 1 if kind == "mistral" else 2}
    if kind == "gemma2":
        config: hf.PretrainedConfig = hf.Gemma2Config(**shape, attn_logit_softcapping=20.0, query_pre_attn_scalar=64)
    elif kind == "gpt_oss":
        rope = {"rope_type": "default", "rope_theta": 1e4}
        config = hf.GptOssConfig(**shape, num_local_experts=4, num_experts_per_tok=4, rope_parameters=rope)
    else:
        config = hf.MistralConfig(**shape)
    attention = "sdpa" if kind == "mistral" else "eager"  # sdpa has neither softcap nor logits of sinks
    torch.manual_seed(0)
    with torch.inference_mode(False):
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        if kind == "gpt_oss":  # all experts, in one product: nothing depends on a choice, and a graph can hold it
            model.set_experts_implementation("batched_mm")
        return perturbed(model, 0.1).to("cuda", dtype).requires_grad_(False)


def kivi(model: hf.PreTrainedModel) -> Plan:
    return plan_of(geometry_of(model, cache_dtype="bfloat16"), *KIVI_2)


@pytest.mark.parametrize("ring", [1, 5, 127])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_ring_has_the_references_bytes(ring: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(ring)
    lengths = torch.tensor([0, 1, ring - 1, ring, 3 * ring + 2], dtype=torch.int32)
    stores = [torch.randn(5, 3, n, 64, generator=generator).to(dtype) for n in (1, ring, 1, ring)]
    k, v = (torch.randn(5, 4, 2, 64, generator=generator).to(dtype) for _ in range(2))
    on_gpu, error = [tensor.cuda() for tensor in stores], torch.zeros(1, dtype=torch.int32)
    errors = error.clone(), error.cuda()
    append_window(k[:, 1:, 1], v[:, 1:, 1], *stores, lengths, errors[0], 3 * ring + 2)
    append_window(k.cuda()[:, 1:, 1], v.cuda()[:, 1:, 1], *on_gpu, lengths.cuda(), errors[1], 3 * ring + 2)
    for expected, found in zip(stores, on_gpu, strict=True):
        assert torch.equal(found.cpu(), expected)
    assert int(errors[0]) == int(errors[1]) == 2


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [2, 33, 128, 300])
def test_a_step_is_the_references(head_dim: int, window: int) -> None:
    """Rows that fill their windows and rows that do not; softcap and a logit without a value."""
    layer = LayerPlan(AttentionGeometry(0, 8, 2, head_dim, head_dim, window))
    config = hf.MistralConfig(**_SHAPE | {"num_hidden_layers": 1, "head_dim": head_dim, "sliding_window": window})
    plan = Plan(ModelIdentity("tiny", "mistral", "0", "1", "2"), "bfloat16", (layer,), Workload(5, 400), {})
    lengths, outputs, rings = (0, 1, window - 1, window, 310), [], []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(window)
        cache = PlanCache(plan, config, max_tokens=400)
        cache.allocate(len(lengths), device)
        (windows,) = cache.paged_layers
        for row, length in enumerate(lengths):
            k, v = (torch.randn(1, 2, length, head_dim, generator=generator).bfloat16().to(device) for _ in range(2))
            if length:
                windows.extend_window(slice(row, row + 1), 0, {"k": k, "v": v})
        cache.static.lengths.copy_(torch.tensor(lengths))
        found = []
        for _ in range(40):
            q, k, v = (
                torch.randn(len(lengths), heads, 1, head_dim, generator=generator).bfloat16().to(device)
                for heads in (8, 2, 2)
            )
            s_aux = torch.linspace(-2, 2, 8, device=device)
            found.append(windows.attend(q.float(), k, v, s_aux, head_dim**-0.5, 20.0).cpu())
        outputs.append(torch.stack(found))
        rings.append([tensor.cpu() for tensor in windows.tensors])
    assert all(torch.equal(one, other) for one, other in zip(*rings, strict=True))
    assert relative(outputs[1], outputs[0]).max() < 5e-3


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gpt_oss"])
def test_ragged_batches_give_the_logits_of_the_dynamic_cache(kind: str) -> None:
    model = sliding_model(kind, torch.float32)
    plan, (ids, mask) = kivi(model), ragged_ids((300, 130, 3), 200)
    static = PlanCache(plan, model.config, mask[:, :300], max_tokens=520)
    dynamic = PlanCache(plan, model.config, mask[:, :300])
    found, expected = (logits_of(model, cache, ids, 300, mask) for cache in (static, dynamic))
    assert relative(found, expected).median() < 5e-3
    assert (relative(found, expected) > 0.05).float().mean() < 0.02  # a code of a second layer may be another one
    static.check()
    assert static.nbytes == plan.nbytes([520] * 3)
    assert static.lengths == [500, 330, 203]
    if kind == "mistral":  # one layer: its keys depend on the tokens alone
        assert assert_same_windows(static, dynamic) > 0


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_captured_steps_go_on_behind_a_full_window_(kind: str) -> None:
    """Graph against eager, bit for bit: from a prompt shorter than the window on, through a page and
    beyond."""
    model = sliding_model(kind)
    plan, prompt, found = kivi(model), random_ids(2, 60), []
    with attached(model):
        for is_captured in (False, True):
            step = Step(model, PlanCache(plan, model.config, max_tokens=500), 2, 250)
            step.cache.allocate(2, "cuda")
            call = graph_of(step).replay if is_captured else step
            step.cache.reset()
            step.begin(prompt)
            held = step.cache.workspace_nbytes
            before = allocations()
            step.run(call)
            assert allocations() == before or not is_captured
            step.cache.check()
            once = step.history.clone()
            assert step.cache.workspace_nbytes == held
            assert step.cache.lengths == [310, 310]
            found.append(once)
    assert torch.equal(*found)


def test_steps_beyond_the_room_are_found_in_a_window_of_less() -> None:
    model = sliding_model("mistral")
    cache = PlanCache(kivi(model), model.config, max_tokens=20)
    cache.allocate(1, "cuda")
    (layer,) = cache.paged_layers
    q, k = torch.randn(1, 8, 1, 64, device="cuda"), torch.randn(1, 2, 1, 64, device="cuda")
    for _ in range(20):
        layer.attend(q, k, k, None, 0.1, 0.0)
    cache.check()
    layer.attend(q, k, k, None, 0.1, 0.0)
    with pytest.raises(UsageError, match="a sequence of 21 tokens does not fit"):
        cache.check()
