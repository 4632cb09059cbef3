"""Divergence through the packed cache: decode-faithful feeding, and the KL itself."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cache_cases import llama_plan, tiny_llama
from listener import Listener
from predictor_runs import HEAD_DIM, loaded_llama, plan_of_random_predictors
from static_cases import drifting_ids, plan_for
from test_profile import CACHE, loaded_model
from tiny_models import TINY_MODELS, as_loaded, measured

from kvcal.cache.plan_cache import PlanCache
from kvcal.errors import NonFiniteActivations, UsageError
from kvcal.models import forwards
from kvcal.models.forwards import decoder_layers
from kvcal.models.load import LoadedModel
from kvcal.pages.codec import PageCodec
from kvcal.plan.plan import RAW, SIDES, Format, Plan
from kvcal.plan.tensors import needed_tensors
from kvcal.stages import divergence
from kvcal.stages.divergence import (
    Room,
    cache_share,
    deviations,
    feed,
    first_difference,
    kl_divergence,
    lockstep,
    one_side_plan,
    unquantized_plan,
)
from kvcal.stages.measuring.cache import DecodedCache, DenseCache
from kvcal.stages.measuring.dense_layer import DenseLayer, UnreadPages


def plans_of(loaded) -> tuple[Plan, Plan]:
    """(16 bits, keys of layer 1 at 2 bits)."""
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    return reference, one_side_plan(reference, 1, "k", CACHE.format("k", 2, "channel", 32))


def tokens_of(*shape: int) -> torch.Tensor:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(2))


def test_feeding_in_chunks_is_feeding_one_token_at_a_time() -> None:
    """Two pages are written on the way; a chunk that reached over a page's end would read exact keys."""
    loaded = loaded_model()
    _, plan = plans_of(loaded)
    tokens_BT = tokens_of(2, 290)
    chunks = list(feed(loaded.model, PlanCache(plan, loaded.model.config), tokens_BT))
    assert [start for start, _ in chunks][0] == 0 and len(chunks) < 12
    assert [start for start, _ in chunks][1:] == torch.tensor([c.shape[1] for _, c in chunks]).cumsum(0).tolist()[:-1]
    cache = PlanCache(plan, loaded.model.config)
    with torch.no_grad():
        single = [
            loaded.model(input_ids=tokens_BT[:, t : t + 1], past_key_values=cache, use_cache=True).logits
            for t in range(290)
        ]
        exact = loaded.model(input_ids=tokens_BT, use_cache=False).logits
    fed = torch.cat([logits for _, logits in chunks], dim=1)
    torch.testing.assert_close(fed, torch.cat(single, dim=1), rtol=1e-3, atol=1e-3)
    assert (fed - exact)[:, :144].abs().max() < 1e-3  # before the first page
    assert (fed - exact)[:, 144:].abs().max() > 0.05


def test_right_padding_leaves_real_tokens_as_they_are() -> None:
    loaded = loaded_model()
    _, plan = plans_of(loaded)
    short = tokens_of(1, 240)
    padded = torch.cat([torch.cat([short, torch.zeros(1, 90, dtype=torch.int64)], 1), tokens_of(1, 330)])
    alone = torch.cat([x for _, x in feed(loaded.model, PlanCache(plan, loaded.model.config), short)], 1)
    batch = torch.cat([x for _, x in feed(loaded.model, PlanCache(plan, loaded.model.config), padded)], 1)
    torch.testing.assert_close(batch[:1, :240], alone, rtol=1e-3, atol=1e-3)


def test_kl_is_that_of_the_definition_in_any_number_of_rows(monkeypatch) -> None:
    """Near ones, with KL far below the rounding of fp32 log-probabilities, among destroyed ones."""
    p_nV = 4 * torch.randn(12, 50)
    q_nV = p_nV + torch.randn(12, 50) * torch.tensor([1e-4, 1e-2, 1.0, 300.0]).repeat(3)[:, None] + 7
    expected = [
        math.fsum(
            math.exp(a) * (a - b)
            for a, b in zip(p.double().log_softmax(0).tolist(), q.double().log_softmax(0).tolist(), strict=True)
        )
        for p, q in zip(p_nV, q_nV, strict=True)
    ]
    near = {"rtol": 1e-4, "atol": 1e-12}
    torch.testing.assert_close(kl_divergence(p_nV, q_nV), torch.tensor(expected, dtype=torch.float64), **near)
    monkeypatch.setattr(divergence, "MAX_COMPARED", {"cpu": 100})
    torch.testing.assert_close(kl_divergence(p_nV, q_nV), torch.tensor(expected, dtype=torch.float64), **near)
    assert bool((kl_divergence(p_nV.bfloat16(), p_nV.bfloat16() * torch.nan)).isnan().all())
    assert not kl_divergence(p_nV, p_nV).any()
    assert kl_divergence(p_nV[:0], q_nV[:0]).shape == (0,)


def test_kl_counts_the_positions_that_predict_loss_tokens() -> None:
    loaded = loaded_model()
    reference, plan = plans_of(loaded)
    tokens_T = tokens_of(300)
    mask_T = torch.zeros(300, dtype=torch.bool)
    mask_T[[40, 200, 299]] = True
    found_1n = deviations(loaded.model, reference, [plan], tokens_T[None], mask_T[None]).kl_Pn
    logits = [
        torch.cat([x for _, x in feed(loaded.model, PlanCache(p, loaded.model.config), tokens_T[None])], 1)[0]
        for p in (reference, plan)
    ]
    expected = torch.stack([kl_divergence(*(x[t - 1 : t] for x in logits))[0] for t in (40, 200, 299)])
    torch.testing.assert_close(found_1n[0], expected, rtol=1e-3, atol=1e-12)
    assert found_1n[0, 0] < 1e-9 < found_1n[0, 1]  # token 40 is predicted before anything is quantized
    mask_T[:] = False
    assert deviations(loaded.model, reference, [plan], tokens_T[None], mask_T[None]).kl_Pn.shape == (1, 0)
    assert deviations(loaded.model, reference, [], tokens_T[None], mask_T[None]).kl_Pn.shape == (0, 0)


def sharing_plans(loaded: LoadedModel) -> list[Plan]:
    """One side of each layer in turn; then two plans that differ from the first in the last layer."""
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    paged = [layer.geometry.index for layer in reference.layers if layer.is_paged]
    plans = [
        one_side_plan(reference, index, side, CACHE.format(side, 2, "token", 32)) for index in paged for side in "vk"
    ]
    first = one_side_plan(plans[0], paged[-1], "v", CACHE.format("v", 4, "token", 32))
    return [*plans, first, one_side_plan(first, paged[-1], "k", CACHE.format("k", 3, "token", 32)), reference]


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3", "qwen3_next", "gpt_oss", "gpt2", "deepseek_v3", "falcon_h1"])
def test_layers_that_plans_share_run_once_and_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry, model = measured(name), TINY_MODELS[name]()
    loaded = as_loaded(model)
    tokens_BT, mask_BT = tokens_of(2, 330), torch.arange(330).expand(2, -1) > 150
    plans, reference = sharing_plans(loaded), unquantized_plan(loaded.identity, geometry)
    own, found, calls = list(decoder_layers(model)), [], []
    for layer_number, layer in enumerate(own):
        layer.register_forward_hook(lambda *_, index=layer_number: calls[-1].append(index))
    for is_shared in (True, False):
        calls.append([])
        with monkeypatch.context() as patch:
            if not is_shared:
                patch.setattr(forwards, "decoder_layers", lambda _: None)
                patch.setattr(DenseLayer, "can_stand_for", lambda layer: False)  # of pages
            found.append(deviations(model, reference, plans, tokens_BT, mask_BT, Room(100.0)))
        assert list(decoder_layers(model)) == own
    for part, expected in zip(*found, strict=True):
        assert torch.equal(part, expected)
    assert (found[0].kl_Pn[:-1].amax(1) > 0).all() and not found[0].kl_Pn[-1].any()
    num_chunks, rest = divmod(calls[1].count(0), len(plans) + 1)
    assert rest == 0 and {calls[1].count(index) for index in range(len(own))} == {num_chunks * (len(plans) + 1)}
    paged = [layer.geometry.index for layer in reference.layers if layer.is_paged]
    begins = [0, *sorted(2 * paged), paged[-1], paged[-1], geometry.layers[-1].index]
    expected = [num_chunks * sum(begin <= index for begin in begins) for index in range(len(own))]
    assert [calls[0].count(index) for index in range(len(own))] == expected


LATTICE = Format(2, "token", 128, 5, lattice_dim=2)


@pytest.mark.parametrize(
    ("name", "cache_dtype"),
    [
        *(
            (name, "bfloat16")
            for name in ("kivi", "kitty", "queries", "different sinks", "clamped window", "transformed")
        ),
        *(
            (name, "float32")
            for name in ("rotated, feedback", "lattice", "16 bits", "basis", "stripes", "stripes, basis")
        ),
    ],
)
def test_dense_layers_give_what_pages_give(name: str, cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In other dtypes than the model's, too; pages of layers and caches are read back by one call."""
    plan = llama_plan(LATTICE, LATTICE, 2, cache_dtype, 3) if name == "lattice" else plan_for(name, 2, 3, cache_dtype)
    plans = [plan, plan, plan_for("kivi" if name == "rotated" else "rotated", 2, 3, cache_dtype)]
    model, unread = tiny_llama(2, 3), UnreadPages()
    dense = [DenseCache(one, model.config, unread) for one in plans]
    assert all(isinstance(layer, DenseLayer) for cache in dense for layer in cache.layers)
    found, num_pages, encode = [], [], PageCodec.encode
    monkeypatch.setattr(DenseLayer, "can_stand_for", lambda layer: False)
    for caches in ([DenseCache(one, model.config) for one in plans], dense):
        logits: list[list[torch.Tensor]] = [[] for _ in plans]
        for number, _, logits_BTV in lockstep(model, caches, drifting_ids(2, 600)):
            logits[number].append(logits_BTV)
        found.append([torch.cat(chunks, 1) for chunks in logits])
        assert {cache.get_seq_length() for cache in caches} == {600}
        monkeypatch.setattr(PageCodec, "encode", lambda *a, **b: num_pages.append(len(a[1])) or encode(*a, **b))
    for expected, logits_BTV in zip(*found, strict=True):
        # What leaves a basis rounds by the number of tokens that leave it at once; of stripes chunks are longer.
        is_rounded = name == "basis" or name.startswith("stripes")
        torch.testing.assert_close(logits_BTV, expected, rtol=0, atol=1e-5 if is_rounded else 0)
    own = name in (
        "feedback",
        "rotated, feedback",
        "basis",
        "stripes, basis",
        "lattice",
    )  # tensors of a layer or of its heads
    assert own or max(num_pages) == 2 * (3 if name == "16 bits" else 4)  # sequences; layers, one of the second cache


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("sides", ["both", "k", "v"])
def test_chunks_longer_than_stripes_read_what_tokens_read_one_by_one(
    sides: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of 70 tokens lets chunks reach over four ends of stripes. Errors of codes would be beyond these."""
    fmt = Format(4, "token", 64, 5, 70, quantizer="rotated", stripe_tokens=16)
    k, v = (fmt if sides in (side, "both") else RAW for side in SIDES)
    plan, raw = llama_plan(k, v, 2, "float32", 3), llama_plan(RAW, RAW, 2, "float32", 3)
    model, unread = copy.deepcopy(tiny_llama(2, 3)), UnreadPages()
    model.set_attn_implementation(implementation)
    dense = [DenseCache(one, model.config, unread) for one in (plan, plan, raw)]
    monkeypatch.setattr(DenseLayer, "can_stand_for", lambda layer: False)
    found, counts = [], []
    for caches in ([DenseCache(one, model.config) for one in (plan, plan, raw)], dense):
        chunks = [(number, logits) for number, _, logits in lockstep(model, caches, drifting_ids(1, 260))]
        found.append([torch.cat([logits for own, logits in chunks if own == number], 1) for number in range(3)])
        counts.append(len(chunks) // 3)
    assert counts[1] < counts[0] / 2
    for expected, logits_BTV in zip(*found, strict=True):
        torch.testing.assert_close(logits_BTV, expected, rtol=0, atol=2e-5)
    assert (found[0][0] - found[0][2]).abs().max() > 1e-2
    decoded = DecodedCache(plan, model.config)
    chunks = list(feed(model, decoded, drifting_ids(1, 260)))
    assert len(chunks) == counts[1] and decoded.nbytes == plan.nbytes([260])
    torch.testing.assert_close(torch.cat([logits for _, logits in chunks], 1), found[1][0], rtol=0, atol=2e-5)
    decoded.verify_decoded()


def test_layers_that_read_another_ones_keys_run_from_the_first_on() -> None:
    """Gemma 3n's last layers are handed keys and values, which a forward that begins later has not made."""
    geometry, model = measured("gemma3n"), TINY_MODELS["gemma3n"]()
    loaded = as_loaded(model)
    tokens_BT, mask_BT = tokens_of(2, 330), torch.arange(330).expand(2, -1) > 150
    plans, reference = sharing_plans(loaded), unquantized_plan(loaded.identity, geometry)
    found = deviations(model, reference, plans, tokens_BT, mask_BT, Room(100.0))
    for plan, kl_n in zip(plans[:4], found.kl_Pn, strict=False):
        alone = deviations(model, reference, [plan], tokens_BT, mask_BT, Room(100.0)).kl_Pn[0]
        torch.testing.assert_close(alone, kl_n, rtol=1e-2, atol=1e-7)  # chunks end elsewhere
    assert (found.kl_Pn[:-1].amax(1) > 0).all() and not found.kl_Pn[-1].any()


def test_a_layer_that_returns_more_than_hidden_states_is_noticed() -> None:
    model = loaded_model().model
    own = list(model.model.layers)
    with forwards.kept_inputs(model) as inputs:
        wrapped, given = model.model.layers[0], {"position_embeddings": (torch.ones(1, 2, 16),) * 2}
        assert wrapped.self_attn is own[0].self_attn
        wrapped(torch.zeros(1, 2, 32), **given)
        assert inputs.can_begin_later
        own[0].register_forward_hook(lambda module, args, output: (output, None))
        wrapped(torch.zeros(1, 2, 32), **given)
        assert inputs.can_begin_later
        inputs.forward = forwards.Forward(first=1)
        hidden_states, nothing = wrapped(torch.ones(1, 2, 32), **given)  # as models unpack it, such as Bamba
        assert torch.equal(hidden_states, torch.ones(1, 2, 32)) and nothing is None
    with forwards.kept_inputs(model) as inputs:
        wrapped = model.model.layers[0]
        inputs.forward = forwards.Forward(first=1)
        assert len(wrapped(torch.ones(1, 2, 32), **given)) == 2  # in a context in which it never ran, too
        inputs.forward = forwards.Forward()
        own[0].register_forward_hook(lambda module, args, output: (output[0], "weights"))
        wrapped(torch.zeros(1, 2, 32), **given)
        assert not inputs.can_begin_later
    assert list(model.model.layers) == own


def test_plans_begin_where_nothing_before_is_read() -> None:
    """Formats, tensors and predictors' sources count."""
    loaded = loaded_llama()
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    last = reference.layers[-1].geometry.index
    assert first_difference(reference, reference) == last and last >= 1
    assert cache_share(reference, reference) == pytest.approx(1 / (last + 1))
    assert first_difference(reference, one_side_plan(reference, 1, "v", Format(2, "token", 32))) == 1
    predicted = plan_of_random_predictors(loaded, Format(2, "channel", 32), Format(2, "token", 32))
    layers = (*reference.layers[:last], predicted.layers[last])
    needed = needed_tensors(layers, reference.cache_dtype)
    alone = replace(reference, layers=layers, tensors={name: predicted.tensors[name] for name in needed})
    assert (last - 1, "v") in alone.layers[last].sources("v")
    plain = replace(reference, layers=(*layers[:last], replace(layers[last], v_predictor=None)))
    assert first_difference(alone, plain) == last and first_difference(plain, alone) == last - 1
    layer = replace(reference.layers[0], k=Format(2, "token", 32), k_rescale=True)
    scaled = replace(
        reference, layers=(layer, *reference.layers[1:]), tensors={"layers.0.k_rescale": torch.ones(2, HEAD_DIM)}
    )
    assert first_difference(scaled, replace(scaled)) == last
    assert first_difference(scaled, replace(scaled, tensors={"layers.0.k_rescale": torch.ones(2, HEAD_DIM)})) == 0
    assert first_difference(plain, replace(plain, cache_dtype="float16")) == 0


def test_out_of_memory_halves_the_plans_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that holds two plans' caches besides the reference."""
    loaded, sizes, listener = loaded_model(), [], Listener()
    reference, _ = plans_of(loaded)
    plans = [one_side_plan(reference, 0, "k", CACHE.format("k", bits, "channel", 32)) for bits in (1, 2, 3, 4, 8)]
    given = (loaded.model, reference, plans, tokens_of(1, 300), torch.arange(300)[None] > 150)
    expected, original, most = deviations(*given), divergence.lockstep, 2

    def limited(model, caches, *given):
        sizes.append(len(caches) - 1)
        for fed in original(model, caches, *given):
            if fed[0] > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            yield fed

    monkeypatch.setattr(divergence, "lockstep", limited)
    room = Room(12, listener)
    for _ in range(2):
        assert torch.equal(deviations(*given, room).kl_Pn, expected.kl_Pn)
    assert sizes == [5, 2, 2, 1, 2, 2, 1]
    assert listener.said == ["out of memory, goes on with 2.5 caches at once"]
    most = 0
    with pytest.raises(UsageError, match="one plan's cache of these texts does not fit"):
        deviations(*given, room)


def test_logits_that_are_not_finite_are_refused() -> None:
    loaded = loaded_model()
    reference, plan = plans_of(loaded)
    with torch.no_grad():
        loaded.model.lm_head.weight[5] = math.inf
    with pytest.raises(NonFiniteActivations, match="not finite"):
        deviations(loaded.model, reference, [plan], tokens_of(1, 40), torch.arange(40)[None] > 0)


def test_a_gpu_takes_as_many_texts_as_leave_room_for_a_reference_and_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the memory that the device has, not by what is free; a CPU always takes as many."""
    loaded = loaded_model()
    assert divergence.texts_at_once(loaded, 1 << 20) == divergence.KL_BATCH["cpu"]
    cache = 1000 * 4 * sum(layer.values_per_token for layer in loaded.geometry.layers)
    weights = divergence.parameter_bytes(loaded.model)

    class OnGpu:
        device, dtype = torch.device("cuda:0"), torch.float32
        parameters, buffers = loaded.model.parameters, loaded.model.buffers

    moved = replace(loaded, model=OnGpu())
    for caches, expected in ((4, 1), (11.9, 2), (12.1, 3), (1000, 32), (0.5, 1)):
        total = SimpleNamespace(total_memory=(caches * cache + weights) / divergence.MEMORY_SHARE + 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, total=total: total)
        assert divergence.texts_at_once(moved, 1000) == expected, caches
