"""Shared by the cache tests: tiny models, plans for them, and ways to feed a cache."""

import functools
from collections.abc import Sequence

import pytest
import torch
import transformers as hf
from tiny_models import perturbed
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kvcal import Plan, PlanCache
from kvcal.geometry import AttentionGeometry, Geometry, ModelIdentity
from kvcal.models.supported_layers import geometry_of
from kvcal.plan.page_format import Side
from kvcal.plan.plan import RAW, Format, LayerPlan, Workload
from kvcal.plan.tensors import layout_tensors
from kvcal.recipe_files import load_recipe, recipe_names
from kvcal.store.state import Serving

NUM_HEADS = 8
HEAD_DIM = 8
VOCAB_SIZE = 64

KIVI_2 = (Format(2, "channel", 32), Format(2, "token", 32, recent_window=128))
SINKS_3 = (Format(3, "channel", 64, 4, 64), Format(3, "token", 64, 5, 33, "bfloat16"))


# All bits, both K axes, sinks, windows and parameter dtypes.
KINDS = {
    "sinks": (Format(3, "channel", 64, 4), Format(1, "token", 32, 5)),
    "windows": (Format(2, "token", 32, 0, 128, "bfloat16"), Format(4, "token", 64, 0, 64)),
    "raw keys": (RAW, Format(4, "token", 64, 0, 64)),
    "raw values": (Format(8, "channel", 128, 1, 17, "float32"), RAW),
}


def recipe_formats() -> dict[str, tuple[Format, Format]]:
    """K and V formats of every recipe that fixes them."""
    recipes = {name: load_recipe(name).formats for name in recipe_names()}
    return {name: (formats.k, formats.v) for name, formats in recipes.items() if formats is not None}


@functools.cache
def tiny_llama(num_kv_heads: int = 2, num_layers: int = 2) -> hf.LlamaForCausalLM:
    """fp32, 8 query heads of 8; keys and attention far from uniform."""
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=num_layers, num_attention_heads=NUM_HEADS,
        num_key_value_heads=num_kv_heads, head_dim=HEAD_DIM, vocab_size=VOCAB_SIZE, max_position_embeddings=2048,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(num_kv_heads)
    return perturbed(hf.LlamaForCausalLM(config), 0.2)


def plan_of(geometry: Geometry, k: Format, v: Format, **changes) -> Plan:
    """The same formats for every paged layer of ``geometry``."""
    layers = tuple(
        LayerPlan(layer, k, v) if isinstance(layer, AttentionGeometry) and layer.window is None else LayerPlan(layer)
        for layer in geometry.layers
    )
    identity = ModelIdentity("tiny", geometry.model_type, "0", "1", "2")
    changes = {"tensors": layout_tensors(layers)} | changes
    return Plan(identity, geometry.cache_dtype, layers, Workload(2, 300), {}, **changes)


def llama_plan(
    k: Format, v: Format, num_kv_heads: int = 2, cache_dtype: str = "float32",
    num_layers: int = 2,
) -> Plan:  # fmt: skip
    """A plan for ``tiny_llama(num_kv_heads, num_layers)``."""
    attention = tuple(
        AttentionGeometry(index, NUM_HEADS, num_kv_heads, HEAD_DIM, HEAD_DIM) for index in range(num_layers)
    )
    return plan_of(Geometry("llama", cache_dtype, attention), k, v)


def model_plan(model: hf.PreTrainedModel, k: Format = RAW, v: Format = RAW) -> Plan:
    """A plan for any model that the adapter takes."""
    return plan_of(geometry_of(model, cache_dtype="float32"), k, v)


def random_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(seed))


def random_states(batch: int, heads: int, tokens: int, dim: int = HEAD_DIM, seed: int = 0) -> Tensor:
    """[batch, heads, tokens, dim] with an outlier channel, in bf16, which every cache dtype holds."""
    states = torch.randn(batch, heads, tokens, dim, generator=torch.Generator().manual_seed(seed))
    states[..., 1] *= 20.0
    return states.bfloat16().float()


def random_qkv(batch: int, num_kv_heads: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, 8, T, 8], keys and values [B, N, T, 8] that bf16 holds."""
    generator = torch.Generator().manual_seed(seed)
    heads = (NUM_HEADS, num_kv_heads, num_kv_heads)
    q, k, v = (torch.randn(batch, n, tokens, HEAD_DIM, generator=generator).bfloat16().float() for n in heads)
    k[..., 1] *= 20.0
    return q, k, v


def padded(rows: Sequence[Tensor], width: int, side: str, filling: float = 0.0) -> tuple[Tensor, Tensor]:
    """Rows [..., T_i, D] or [T_i] as one batch of ``width`` columns along T, and its attention mask."""
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    token_dim = 0 if rows[0].dim() == 1 else -2
    shape = list(rows[0].shape)
    shape[token_dim] = width
    batch = torch.full((len(rows), *shape), filling, dtype=rows[0].dtype)
    for index, row in enumerate(rows):
        length = row.shape[token_dim]
        start = width - length if side == "left" else 0
        mask[index, start : start + length] = 1
        batch[index].narrow(token_dim, start, length).copy_(row)
    return batch, mask


def ragged_ids(lengths: Sequence[int], more: int) -> tuple[Tensor, Tensor]:
    """ids and mask [B, columns]: prompts of these lengths, padded on the left, then ``more`` tokens each."""
    ids, mask = padded([random_ids(1, length, seed=length)[0] for length in lengths], max(lengths), "left")
    return torch.cat([ids, random_ids(len(lengths), more, seed=9)], 1), pad(mask, (0, more), value=1)


@torch.no_grad()
def feed(
    model: hf.PreTrainedModel, cache: hf.Cache, ids: Tensor, cuts: Sequence[int] = (), mask: Tensor | None = None
) -> Tensor:
    """Logits [B, T, vocabulary] of ``ids`` [B, T], fed in chunks that end at ``cuts`` (columns) and at T."""
    columns, logits = cache.get_seq_length(), []
    mask = ids.new_ones(ids.shape[0], columns + ids.shape[1]) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    start = 0
    for stop in [cut for cut in cuts if cut < ids.shape[1]] + [ids.shape[1]]:
        seen = slice(columns + start, columns + stop)
        output = model(
            ids[:, start:stop],
            attention_mask=mask[:, : seen.stop],
            position_ids=positions[:, seen],
            past_key_values=cache,
        )
        logits.append(output.logits)
        start = stop
    return torch.cat(logits, 1)


@torch.no_grad()
def attended(cache: PlanCache, q: Tensor, k: Tensor, v: Tensor, cuts: Sequence[int] | None = ()) -> Tensor:
    """Outputs [B, H, T, D] of the one layer of ``cache``, dynamic or static, given q [B, H, T, D], k and v
    [B, N, T, D] in chunks that end at ``cuts``; None: in the longest chunks that are like single steps. To
    compare chunks of unlike sizes: a model's own products differ in their last bits with the number of
    tokens."""
    (layer,), start, outputs = cache.layers, 0, []
    if cache.static is not None:
        cache.static.serving = Serving()
    while start < q.shape[2]:
        ends = [start + cache.tokens_to_next_page()] if cuts is None else [cut for cut in cuts if cut > start]
        new = slice(start, min([*ends, q.shape[2]]))
        keys, values = cache.update(k[:, :, new], v[:, :, new], 0)
        if layer.awaits_step(new.stop - start):
            outputs.append(layer.attend(q[:, :, new], keys, values, None, 1.0, 0.0).transpose(1, 2))
        else:
            sees = torch.ones(new.stop - start, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - new.stop + start)
            given = q[:, :, new], keys, values
            outputs.append(scaled_dot_product_attention(*given, attn_mask=sees, scale=1.0, enable_gqa=True))
            layer.observe(q[:, :, new])
        start = new.stop
    return torch.cat(outputs, 2)


def after_crop(plan: Plan, side: Side, read: Tensor, raw: Tensor, kept: int) -> Tensor:
    """``kept`` tokens of layer 0 as they are read back once the others were removed: [B, N, kept, D], from
    ``read`` and ``raw`` [B, N, T, D], what all T of them read back as, and were. Where pages are read no
    more, tokens are raw, if the ring still has them."""
    expected, fmt = read[:, :, :kept].clone(), plan.layers[0].format(side)
    first = max(read.shape[2] - fmt.ring_tokens(), fmt.tokens_read(kept), 0)
    expected[:, :, first:] = raw[:, :, first:kept]
    return expected


def assert_exact_bytes(cache: PlanCache, lengths: Sequence[int], columns: int | None = None) -> None:
    """Measured bytes equal the plan's prediction for these lengths, and the cache knows the lengths."""
    assert cache.lengths == list(lengths)
    assert cache.nbytes == cache.plan.nbytes(lengths, columns)


def checked_crops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The arguments of ``PlanCache.crop`` from here on; bytes are exact after each call."""
    crops, crop = list[int](), PlanCache.crop

    def checked_crop(cache: PlanCache, tokens_to_remove: int) -> None:
        crop(cache, tokens_to_remove)
        crops.append(tokens_to_remove)
        assert_exact_bytes(cache, [cache.get_seq_length()])

    monkeypatch.setattr(PlanCache, "crop", checked_crop)
    return crops
