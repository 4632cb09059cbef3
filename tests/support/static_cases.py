"""Shared by the tests of static caches: formats, caches and ways to compare them with the dynamic cache."""

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from cache_cases import KIVI_2, SINKS_3, llama_plan, random_ids, recipe_formats, tiny_llama
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig, PreTrainedModel

from kvcal import Plan, PlanCache, attached
from kvcal.cache.attached import attached_for
from kvcal.cache.plan_layer import AttentionLayer
from kvcal.pages.error_feedback import factor_spec
from kvcal.plan.page_format import RAW, SIDES, Boost, Format, Tier
from kvcal.store.paged_tensor import PagedTensor
from kvcal.systems.basis.basis import Basis, rounded
from kvcal.systems.kvmix.window_rule import WindowRule

RECIPES = recipe_formats()
V = Format(2, "token", 32, recent_window=33)
QUERY = Format(2, "channel", 32, 5, boost=Boost("query_range", (Tier(16, 0.25, 1.5), Tier(4, 0.25, 0.5))))
FORMATS: dict[str, tuple] = {
    "uniform": RECIPES["uniform-2"],
    "kivi": KIVI_2,
    "kitty": RECIPES["kitty"],
    "queries": (QUERY, replace(V, num_sink_tokens=5)),
    "query magnitude": (replace(QUERY, boost=Boost("query_magnitude", (Tier(4, 0.5),)), recent_window=9), V),
    "variance": (replace(QUERY, boost=Boost("variance", (Tier(4, 0.5),))), V),
    "different sinks": SINKS_3,
    "clamped window": (
        Format(3, "channel", 64, window_rule=WindowRule("clamped", 0.25, 100, 10)),
        Format(2, "token", 32, window_rule=WindowRule("clamped", 0.3, 80)),
    ),
    "paged window": (
        Format(2, "channel", 32, 4, window_rule=WindowRule("paged", 0.4, 200)),
        Format(2, "token", 32, 4, window_rule=WindowRule("paged", 0.2, 200)),
    ),
    "16-bit values": (Format(2, "channel", 32), RAW),
    "rotated": (Format(3, "token", 64, 5, 9, quantizer="rotated"), replace(V, num_sink_tokens=5, quantizer="rotated")),
    "stripes": (
        Format(3, "token", 64, 5, 9, quantizer="rotated", stripe_tokens=16),
        Format(2, "token", 32, 5, 9, quantizer="rotated", stripe_tokens=16),
    ),
    "rotated values": (KIVI_2[0], replace(KIVI_2[1], quantizer="rotated")),
    "16 bits": (RAW, RAW),
}

# Plans with transforms: the formats that they have.
TRANSFORMED = {
    "transformed": "queries", "feedback": "queries", "rotated, feedback": "rotated", "basis": "rotated",
    "stripes, basis": "stripes",
}  # fmt: skip


def plan_for(name: str, num_kv_heads: int = 2, num_layers: int = 1, cache_dtype: str = "bfloat16") -> Plan:
    """For ``tiny_llama(num_kv_heads, num_layers)``; "transformed": λ, offset; "feedback": with error feedback
    of both sides, too, and "rotated, feedback": the same of rotated pages.

    With one layer, keys, values and queries depend on the tokens alone, so both caches store the very same
    bytes.
    """
    if name not in TRANSFORMED:
        return llama_plan(*FORMATS[name], num_kv_heads, cache_dtype, num_layers)
    plan = llama_plan(*FORMATS[TRANSFORMED[name]], num_kv_heads, cache_dtype, num_layers)
    return with_transforms(plan, name, 0.3)


def with_transforms(plan: Plan, name: str, feedback_scale: float) -> Plan:
    """The plan with those of TRANSFORMED's ``name`` in all layers."""
    generator, tensors, has_feedback = torch.Generator().manual_seed(0), dict(plan.tensors), name != "transformed"
    has_basis = name.endswith("basis")
    for index, layer in enumerate(plan.layers):
        shape = (layer.attention.num_kv_heads, layer.attention.k_head_dim)
        if has_basis:
            tensors |= random_bases(f"layers.{index}", *shape, generator)
        else:
            tensors[f"layers.{index}.k_rescale"] = torch.rand(shape, generator=generator) + 0.5
            tensors[f"layers.{index}.k_offset"] = torch.randn(shape, generator=generator)
        if has_feedback:
            for side in SIDES:
                factor = torch.randn(factor_spec(*shape).extents, generator=generator) * feedback_scale
                tensors[f"layers.{index}.{side}_feedback"] = factor.half()
        if has_basis:
            tensors[f"layers.{index}.v_gain"] = (torch.rand(shape, generator=generator) + 0.5).half()
    changes = dict.fromkeys(("k_basis", "v_basis", "v_gain") if has_basis else ("k_rescale", "k_offset"), True)
    changes |= dict.fromkeys(("k_feedback", "v_feedback"), has_feedback)
    layers = tuple(replace(layer, **changes) for layer in plan.layers)
    return replace(plan, layers=layers, tensors=tensors)


def random_bases(prefix: str, heads: int, dim: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The tensors of bases of a layer's keys and values."""
    tensors: dict[str, Tensor] = {}
    for side in SIDES:
        matrix = rounded(torch.randn(heads, dim, dim, generator=generator) * 0.25 / dim**0.5 + torch.eye(dim))
        center = torch.randn(heads, dim, generator=generator) if side == "k" else None
        tensors |= Basis(matrix, torch.linalg.inv(matrix.double()).float(), center).tensors(f"{prefix}.{side}")
    return tensors


def listened(num_kv_heads: int, num_layers: int, plan: Plan) -> AbstractContextManager[None]:
    """The context to call the dynamic cache in."""
    return attached_for(tiny_llama(num_kv_heads, num_layers), plan)


def drifting_ids(batch: int, length: int) -> Tensor:
    """Tokens whose queries change with the text: each 32 of them repeat two."""
    pairs = random_ids(batch, 2 * -(-length // 32)).unflatten(1, (-1, 2))
    return pairs.repeat(1, 1, 16).flatten(1)[:, :length]


def assert_same_pages(static: PlanCache, dynamic: PlanCache) -> int:
    """Every page is stored with the same bytes, in every row and head of all layers, and the queries since the
    last one were counted alike; how many pages there are."""
    count = 0
    lengths = dynamic.lengths
    assert static.lengths == lengths
    for ours, theirs in zip(static.layers, dynamic.layers, strict=True):
        assert isinstance(ours, AttentionLayer) and isinstance(theirs, AttentionLayer)
        for our, their in zip(ours.parts, theirs.parts, strict=True):
            assert_same_queries(our, their, lengths)
            for row, length in enumerate(lengths):
                found, expected = pages_of(our, row, length), pages_of(their, row, length)
                assert torch.equal(found.to(expected.device), expected), (our.codec.side, row)
                count += len(expected) * our.codec.num_heads
    return count


def assert_same_queries(our: PagedTensor, their: PagedTensor, lengths: list[int]) -> None:
    """The running query statistic: on a GPU to the last bit but one, as torch adds the queries of a group
    there in an order of its own."""
    if our.format.needs_queries:
        held = [row for row, length in enumerate(lengths) if length]
        assert torch.equal(our.query_since[held].cpu(), their.query_since[held].cpu())
        found, expected = our.query_sum[held], their.query_sum[held].to(our.query_sum.device)
        assert torch.allclose(found, expected, rtol=1e-6) if found.is_cuda else torch.equal(found, expected)


def pages_of(part: PagedTensor, row: int, length: int) -> Tensor:
    """[pages, r, record_bytes]: what is stored of one row of so many tokens."""
    return part.pool.records[part.pool.slots([(row, 0, part.format.num_pages(length))])]


def assert_generate_compiles_one_graph(model: PreTrainedModel, plan: Plan, ids: Tensor, num_new: int) -> None:
    """``generate`` compiles the step of a static cache by itself, and gives what it gives uncompiled."""
    counter = CompileCounter()  # transformers copies an object that is the backend
    config = CompileConfig(backend=lambda *given: counter(*given), mode=None, fullgraph=True)
    config._compile_all_devices = True  # transformers compiles for GPUs alone otherwise
    cache = PlanCache(plan, model.config, max_tokens=ids.shape[1] + num_new)
    options = {"max_new_tokens": num_new, "do_sample": False, "eos_token_id": None}
    options["attention_mask"] = torch.ones_like(ids)
    with attached(model):
        expected = model.generate(ids, past_key_values=cache, **options)
        assert not counter.frame_count
        cache.reset()
        assert torch.equal(model.generate(ids, past_key_values=cache, compile_config=config, **options), expected)
    assert counter.frame_count == 1
    del model._compiled_call, model._last_compile_config  # the model is shared with other tests
