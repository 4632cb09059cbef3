"""Sliding-window layers of a static cache: the tokens, bytes and masks of the dynamic one, in a ring."""

import math

import pytest
import torch
import transformers as hf
from cache_cases import feed, model_plan, ragged_ids, random_ids, tiny_llama
from cubin_resources import resources
from static_cases import assert_generate_compiles_one_graph
from tiny_models import built, perturbed
from torch import Tensor
from transformers import DynamicCache

from kvcal import Plan, PlanCache, attached
from kvcal.cache.sliding_window import BoundedLayer, StaticWindow
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry
from kvcal.kernels.compile import cubin
from kvcal.kernels.decode import decode_defines
from kvcal.kernels.ops import append_window
from kvcal.kernels.reference import NO_ROOM
from kvcal.kernels.variants import window_variant
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Workload

FAMILIES = ("gemma3", "gpt_oss", "mistral_all_sliding")
RAGGED = (20, 3, 9)
CUTS = [(3, 4, 11, 20, *range(21, 42)), (5, 6, 19, 20, 27, 28), (1, 2, 3, 20, 33)]


def both(name: str, plan: Plan, ids: Tensor, cuts, mask: Tensor, prompt: int):
    """The dynamic and the static cache, fed alike, and their logits."""
    model, found = built(name), []
    for max_tokens in (None, ids.shape[1]):
        cache = PlanCache(plan, model.config, mask[:, :prompt], max_tokens=max_tokens)
        with attached(model):
            found.append((cache, feed(model, cache, ids, cuts, mask)))
    return found


def assert_same_windows(static: PlanCache, dynamic: PlanCache, exact: bool = True) -> int:
    """The number of compared tokens: those that the dynamic cache holds of every row lie in the ring. After a
    step, keys of later layers differ in their last bits."""
    count, columns = 0, dynamic.get_seq_length()
    rows = dynamic.padding.rows
    for ours, theirs in zip(static.layers, dynamic.layers, strict=True):
        if not isinstance(theirs, BoundedLayer):
            continue
        assert isinstance(ours, StaticWindow) and theirs.keys is not None and theirs.values is not None
        held = theirs.keys.shape[2]
        real = rows.mask(columns - held, held, torch.device("cpu"))
        for row, length in enumerate(dynamic.lengths):
            for side, dense in (("k", theirs.keys), ("v", theirs.values)):
                expected = dense[row : row + 1, :, real[row]]
                out = torch.empty_like(expected)
                ours.read_window(side, slice(row, row + 1), length, out)
                assert torch.equal(out, expected) if exact else torch.allclose(out, expected, atol=1e-4)
                count += out.shape[2]
    return count


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_prompts_chunks_and_steps_are_those_of_the_dynamic_cache(name: str, cuts) -> None:
    """Windows of 6 tokens: chunks end before, on and after them, and within padding."""
    ids, mask = ragged_ids(RAGGED, 22)
    (dynamic, expected), (static, found) = both(name, model_plan(built(name)), ids, cuts, mask, prompt=20)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)
    assert assert_same_windows(static, dynamic, exact=cuts == CUTS[2]) > 0
    assert static.lengths == [42, 25, 31]
    assert static.nbytes == static.plan.nbytes([42] * 3)


@pytest.mark.parametrize(("window", "max_tokens"), [(2, 20), (3, 5), (17, 40), (64, 40), (64, 64), (64, 65), (65, 100)])
def test_windows_and_rooms_of_any_size(window: int, max_tokens: int) -> None:
    model = windowed(window)
    plan, ids = model_plan(model), random_ids(2, min(max_tokens, 80))
    dynamic, static = (PlanCache(plan, model.config, max_tokens=size) for size in (None, max_tokens))
    with attached(model):
        expected, found = (feed(model, cache, ids, range(1, 80)) for cache in (dynamic, static))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert static.nbytes == plan.nbytes([max_tokens] * 2)
    assert assert_same_windows(static, dynamic, exact=False) > 0


def windowed(window: int, num_layers: int = 2) -> hf.PreTrainedModel:
    """4 query heads for each KV head; every layer slides."""
    config = hf.MistralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=num_layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=8, vocab_size=64, max_position_embeddings=512, sliding_window=window,
    )  # fmt: skip
    torch.manual_seed(window)
    return perturbed(hf.MistralForCausalLM(config), 0.2)


@pytest.mark.parametrize("lengths", [(0, 0), (4, 7), (6, 5), (30, 2)])
def test_the_step_in_fp64(lengths: tuple[int, int]) -> None:
    """softcap, a logit without a value, rows that have filled their window and rows that have not."""
    plan, batch, window = slid_plan(6, dim=8), 2, 6
    static = PlanCache(plan, windowed(6, 1).config, max_tokens=40)
    static.allocate(batch, "cpu")
    (layer,) = static.paged_layers
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, n, 31, 8, generator=generator) for n in (8, 2, 2))
    s_aux = torch.randn(8, generator=generator)
    for row, length in enumerate(lengths):
        if length:
            new = {"k": k[row : row + 1, :, :length], "v": v[row : row + 1, :, :length]}
            layer.extend_window(slice(row, row + 1), 0, new)
    static.static.lengths.copy_(torch.tensor(lengths))
    new = [torch.stack([x[row, :, length : length + 1] for row, length in enumerate(lengths)]) for x in (q, k, v)]
    out = layer.attend(*new, s_aux, 0.3, 2.5)
    for row, length in enumerate(lengths):
        seen = range(max(0, length - window + 1), length + 1)
        for head in range(8):
            dots = [float(q[row, head, length].double() @ k[row, head // 4, at].double()) for at in seen]
            weights = [math.exp(2.5 * math.tanh(0.3 * dot / 2.5)) for dot in dots]
            total = sum(weights) + math.exp(float(s_aux[head]))
            expected = sum(w / total * v[row, head // 4, at].double() for w, at in zip(weights, seen, strict=True))
            torch.testing.assert_close(out[row, 0, head].double(), expected, atol=1e-5, rtol=1e-5)


def slid_plan(window: int, dim: int, num_layers: int = 1) -> Plan:
    layers = tuple(LayerPlan(AttentionGeometry(index, 8, 2, dim, dim, window)) for index in range(num_layers))
    return Plan(model_plan(windowed(6, 1)).model, "float32", layers, Workload(2, 100), {})


@pytest.mark.parametrize("name", FAMILIES)
def test_generate_gives_the_tokens_of_the_models_own_cache(name: str) -> None:
    model, plan = built(name), model_plan(built(name))
    ids, mask = ragged_ids(RAGGED, 0)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    static = PlanCache(plan, model.config, mask, max_tokens=60)
    with attached(model):
        for chunk in (None, 7):
            assert torch.equal(
                model.generate(ids, past_key_values=static, prefill_chunk_size=chunk, **options), expected
            )
            static.reset()


def test_a_step_compiles_into_one_graph() -> None:
    model = built("gemma3")
    assert_generate_compiles_one_graph(model, model_plan(model), random_ids(2, 9), 8)


def test_memory_stays_where_it_is_and_is_used_again() -> None:
    model, ids = built("gemma3"), random_ids(2, 200)
    plan = model_plan(model, Format(2, "channel", 32, 4), Format(2, "token", 32, 4, 5))
    used, fresh = (PlanCache(plan, model.config, max_tokens=240) for _ in range(2))
    used.allocate(2, "cpu")
    before = [tensor.data_ptr() for layer in used.paged_layers for tensor in layer.tensors]
    with attached(model):
        feed(model, used, random_ids(2, 220, seed=3), range(200, 220))
        used.reset()
        found, expected = (feed(model, cache, ids, range(185, 200)) for cache in (used, fresh))
        assert torch.equal(found, expected)
        order = torch.tensor([1, 0])
        used.reorder_cache(order)
        rest = random_ids(2, 20, seed=5)
        found, expected = feed(model, used, rest[order], range(1, 20)), feed(model, fresh, rest, range(1, 20))[order]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)  # a row's last bits depend on its place
    assert [tensor.data_ptr() for layer in used.paged_layers for tensor in layer.tensors] == before
    scratch = 2 * 2 * 1 * 16 * 4  # the leaving token: sides, rows, heads, channels of fp32
    table = 4 * 2  # a page of 128 tokens for each row
    assert used.workspace_nbytes == 4 * 2 + 8 + 4 + table + scratch


def test_tokens_are_removed_while_the_window_has_room() -> None:
    model, plan, ids = built("mistral_all_sliding"), model_plan(built("mistral_all_sliding")), random_ids(2, 30)
    cache, straight = (PlanCache(plan, model.config, max_tokens=40) for _ in range(2))
    with attached(model):
        feed(model, cache, ids[:, :5])
        cache.crop(-3)
        feed(model, straight, ids[:, :2])
        found, expected = (feed(model, each, ids[:, 5:], range(1, 25)) for each in (cache, straight))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(UsageError, match=r"cannot remove 1 of 27 tokens: .* have left the sliding window of 6"):
        cache.crop(-1)
    assert cache.lengths == [27, 27]


def test_what_a_static_window_cannot_be() -> None:
    model = built("gemma3")
    plan = model_plan(model)
    right = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    with pytest.raises(UnsupportedModel, match=r"row 0 .* padded after its tokens \(columns 3 to 3\)") as error:
        PlanCache(plan, model.config, right, max_tokens=40)
    assert "padding_side = 'left'" in str(error.value.hint)
    PlanCache(plan, model.config, right.flip(1), max_tokens=40)
    PlanCache(plan, model.config, right)
    PlanCache(model_plan(tiny_llama()), tiny_llama().config, right, max_tokens=40)
    chunked = built("llama4")
    with pytest.raises(UnsupportedModel, match="cannot hold layer 0: it attends in chunks") as error:
        PlanCache(model_plan(chunked), chunked.config, max_tokens=40)
    with pytest.raises(UnsupportedModel, match="cannot hold layer 0: its sliding window of 1 token keeps nothing"):
        PlanCache(slid_plan(1, 8), windowed(1, 1).config, max_tokens=40)


def test_a_refused_reset_changes_nothing() -> None:
    """Neither the padding nor what is cached: the next step gives the logits of a cache that was never
    reset."""
    model, ids = built("gemma3"), random_ids(2, 12)
    left = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    full = torch.nn.functional.pad(left, (0, 8), value=1)
    used, untouched = (PlanCache(model_plan(model), model.config, left, max_tokens=40) for _ in range(2))
    refused = {
        "padded after its tokens": left.flip(1),
        "attention_mask has 3 rows, but the batch has 2": torch.ones(3, 4, dtype=torch.long),
        "has holes": torch.tensor([[1, 0, 1], [1, 1, 1]]),
    }
    with attached(model):
        for cache in (used, untouched):
            feed(model, cache, ids[:, :6], mask=full[:, :6])
        for message, mask in refused.items():
            with pytest.raises((UnsupportedModel, UsageError), match=message):
                used.reset(mask)
            assert used.lengths == untouched.lengths == [5, 6] and used.padding.prompt == untouched.padding.prompt
        found, expected = (feed(model, each, ids[:, 6:], mask=full) for each in (used, untouched))
    assert torch.equal(found, expected)


def test_the_kernels_compile() -> None:
    found = resources(cubin("window", {}))["append_window"]
    assert found.local_bytes == 0 and found.static_shared_bytes == 0
    variant = window_variant(AttentionGeometry(0, 64, 8, 64, 64, 128), 127, "bfloat16")
    found = resources(cubin("decode", decode_defines(variant, "bfloat16", True, (9, 0))))["decode"]
    assert found.local_bytes <= 256


@pytest.mark.parametrize("ring", [1, 5])
def test_the_operator_declares_what_it_does(ring: int) -> None:
    """torch's own checks, and the room that a row has."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(3, 2, 8, generator=generator) for _ in range(2))
    stores = [torch.randn(3, 2, n, 8, generator=generator).bfloat16() for n in (1, ring, 1, ring)]
    lengths, error = torch.tensor([0, 5, 12], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    args = (k, v, *stores, lengths, error, 13)
    torch.library.opcheck(torch.ops.kvcal.append_window.default, args, test_utils=("test_schema", "test_faketensor"))
    before = [tensor.clone() for tensor in stores]
    append_window(*args)
    for new, leaving, filled, old in ((k, *stores[:2], before[1]), (v, *stores[2:], before[3])):
        for row, length in enumerate(lengths.tolist()):
            slot = length % ring
            assert torch.equal(filled[row, :, slot], new[row].bfloat16())
            gone = old[row, :, slot] if length >= ring else new[row].bfloat16()
            assert torch.equal(leaving[row, :, 0], gone)
            assert filled[row].ne(old[row]).any(-1).any(0).sum() == 1
    assert int(error) == 0
    append_window(*args[:-1], 12)
    assert int(error) == NO_ROOM


def test_each_sequence_has_its_own_row() -> None:
    """Two sequences in rows 3 and 1 of four, further apart than their heads are long."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 2, 8, generator=generator) for _ in range(2))
    room = [torch.randn(4, 2 * n * 8 + 5, generator=generator)[:, 5:].unflatten(1, (2, n, 8)) for n in (1, 5, 1, 5)]
    rows, lengths = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([12, 3], dtype=torch.int32)
    packed, errors = [part[[3, 1]] for part in room], torch.zeros(2, 1, dtype=torch.int32)
    others = [part[[0, 2]] for part in room]
    append_window(k, v, *room, lengths, errors[0], 99, rows)
    append_window(k, v, *packed, lengths, errors[1], 99)
    for found, expected, untouched in zip(room, packed, others, strict=True):
        assert torch.equal(found[[3, 1]], expected) and torch.equal(found[[0, 2]], untouched)
