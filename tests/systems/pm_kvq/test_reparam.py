"""PM-KVQ's λ: the formula, the search against loops in fp64, the stage and its record."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from listener import Listener
from oracles import quantized_page
from reparam_cases import DATA, PER_TOKEN, SPEC, data_of, layers_of, outlier_model, run
from tiny_models import _IDS, _SHAPE, _build, as_loaded, built
from torch import Tensor

from kvcal.errors import NonFiniteActivations, UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry
from kvcal.models.load import LoadedModel
from kvcal.models.rope import rotary_pairs
from kvcal.models.supported_layers import geometry_of
from kvcal.models.taps import tap
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Format
from kvcal.stages import checkpoint as checkpoint_module
from kvcal.systems.pm_kvq import reparam as reparam_stage
from kvcal.systems.pm_kvq.lambda_candidates import key_magnitudes, lambda_of


@pytest.fixture(scope="module")
def outliers() -> LoadedModel:
    return as_loaded(outlier_model())


@pytest.fixture(scope="module")
def finished(tmp_path_factory, outliers) -> tuple[reparam_stage.Reparam, Path]:
    folder = tmp_path_factory.mktemp("finished")
    return run(folder, outliers), folder / "reparam.safetensors"


def wanted_lambda(magnitude: list[list[float]], pairs: list[list[int]], alpha: float) -> list[list[float]]:
    """The formula, channel by channel."""
    partner = {a: b for a, b in pairs} | {b: a for a, b in pairs}
    rows = [[max(row[c], row[partner.get(c, c)]) for c in range(len(row))] for row in magnitude]
    found = []
    for row in rows:
        heard = [max(value, max(row) / 1024) if max(row) > 0 else 1.0 for value in row]
        mean = math.exp(sum(math.log(value) for value in heard) / len(heard))
        found.append([(value / mean) ** alpha for value in heard])
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.35, 1.0])
def test_lambda_is_the_formula(alpha):
    magnitude = torch.rand(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 9
    magnitude[0, 3], magnitude[1] = 1e-7, 0  # a channel that was hardly heard, a head that was never
    pairs = torch.tensor([[0, 4], [1, 5], [7, 6]])  # channels 2, 3, 8 and 9 are not rotated
    found = lambda_of(magnitude, pairs, alpha)
    wanted = torch.tensor(wanted_lambda(magnitude.tolist(), pairs.tolist(), alpha))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert torch.equal(found[:, [0, 1, 7]], found[:, [4, 5, 6]])
    torch.testing.assert_close(found.double().log().mean(1), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-6)
    if alpha == 0:
        assert torch.equal(found, torch.ones_like(found))


def with_sinks(count: int) -> LayerPlan:
    return LayerPlan(AttentionGeometry(0, 4, 2, 16, 16), Format(2, "token", 32, count), Format(2))


def magnitudes_of(loaded: LoadedModel, scale: float, index: int, sinks: int) -> Tensor:
    """Merged over the sequences."""
    found = [key_magnitudes(loaded, tokens_T, scale, {index: with_sinks(sinks)})[index] for tokens_T in DATA.sequences]
    return torch.stack(found).amax(0)


def test_magnitudes_are_those_of_the_keys_after_the_sinks(outliers):
    """At stretched positions, merged over sequences, against the keys themselves."""
    keys: dict[int, list[Tensor]] = {0: [], 1: []}
    for tokens_T in DATA.sequences:
        positions = 4 * torch.arange(len(tokens_T))
        with torch.no_grad(), tap(outliers.model, lambda c: keys[c.layer].append(c.k_post_BNTD[0, :, 3:].double())):
            mask = torch.ones(1, len(tokens_T), dtype=torch.long)
            outliers.model(tokens_T[None], position_ids=positions[None], attention_mask=mask, use_cache=False)
    for index, parts in keys.items():
        assert torch.equal(magnitudes_of(outliers, 4.0, index, 3), torch.cat(parts, dim=1).abs().amax(1))
    assert not key_magnitudes(outliers, DATA.sequences[1], 1.0, {0: with_sinks(60)})[0].any()


def errors_by_hand(loaded: LoadedModel, index: int, tokens_T: Tensor, lambda_ND: Tensor) -> float:
    """Layer ``index``: pages through the oracle quantizer, attention query by query in fp64."""
    seen = {}
    with torch.no_grad(), tap(loaded.model, lambda captured: seen.update({captured.layer: captured})):
        loaded.model(input_ids=tokens_T[None], use_cache=False)
    q, k, v = (seen[index].q_post_BHTD[0], seen[index].k_post_BNTD[0], seen[index].v_BNTD[0])
    read = k.double().clone()
    for head in range(k.shape[0]):
        packed = k[head].clone()
        packed[0] = packed[1]  # the sink, which is kept next to its page
        for page in range((len(tokens_T) - 1 - 16) // 128):
            inside = slice(128 * page, 128 * (page + 1))
            stored = packed[inside] / lambda_ND[head]
            decoded = quantized_page(stored, 2, "token", 128, "float16")
            read[head, inside] = (decoded * lambda_ND[head]).double()
    weight = loaded.model.model.layers[index].self_attn.o_proj.weight.detach().double()
    total = 0.0
    for query in range(len(tokens_T)):
        packed = 128 * max(0, (query - 16) // 128)
        parts = []
        for head in range(q.shape[0]):
            kv = head // 2
            outputs = []
            for keys in (k[kv].double(), torch.cat([k[kv, :1].double(), read[kv, 1:packed], k[kv, max(1, packed) :]])):
                logits = keys[: query + 1] @ q[head, query].double() / math.sqrt(16)
                outputs.append(logits.softmax(0) @ v[kv, : query + 1].double())
            parts.append(outputs[1] - outputs[0])
        total += float((weight @ torch.cat(parts)).square().sum())
    return total


def test_search_measures_what_loops_measure(outliers, finished):
    record, _ = finished
    pairs = rotary_pairs(outliers.model, outliers.geometry)[1]
    found = record.layers[1]
    assert found.index == 1 and len(found.errors) == 5
    for step in (0, 3):
        lambda_ND = lambda_of(magnitudes_of(outliers, 1.0, 1, 1), pairs, step / 4)
        expected = sum(errors_by_hand(outliers, 1, tokens_T, lambda_ND) for tokens_T in DATA.sequences) / 3
        assert found.errors[step] == pytest.approx(expected, rel=1e-3)


def test_best_candidate_is_kept_and_lambda_pays_for_an_outlier(outliers, finished):
    record, path = finished
    for layer in record.layers:
        assert layer.error == min(layer.errors) == layer.errors[round(layer.alpha * 4)]
        assert layer.alpha > 0 and layer.error < 0.5 * layer.errors[0]
        assert 0 < layer.error < layer.energy
        lambda_ND = record.lambdas[layer.index]
        assert lambda_ND.dtype == torch.float32 and lambda_ND.shape == (2, 16)
        assert torch.equal(lambda_ND[:, :8], lambda_ND[:, 8:])
        assert set(lambda_ND.argmax(1).tolist()) <= {5, 13}
    again = reparam_stage.load(path)
    assert again.layers == record.layers and again.subject == record.subject
    assert all(torch.equal(again.lambdas[i], record.lambdas[i]) for i in record.lambdas)


def test_interrupted_run_goes_on_to_the_same_bytes(tmp_path, finished, outliers, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "SAVE_SECONDS", 0.0)
    _, path = finished
    listener = Listener()
    for stop_at in (2, 6):  # in the statistics, then in the search
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, outliers, reporter=Listener(stop_at))
    run(tmp_path, outliers, reporter=listener)
    assert "goes on after 2 search samples" in listener.said[0]
    assert (tmp_path / "reparam.safetensors").read_bytes() == path.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["reparam.safetensors"]


def test_positions_end_with_the_models_context(tmp_path, outliers):
    """Of 512 tokens: 290 x 4 would end at 1,157. The statistics are those of the positions that fit."""
    listener = Listener()
    record = run(tmp_path, outliers, spec=replace(SPEC, position_scale=4.0, num_steps=1), reporter=listener)
    assert record.subject.position_scale == 511 / 289
    assert "positions x 1.77 instead of x 4" in listener.said[0]
    pairs = rotary_pairs(outliers.model, outliers.geometry)[0]
    expected = lambda_of(magnitudes_of(outliers, 511 / 289, 0, 1), pairs, record.layers[0].alpha)
    assert torch.equal(record.lambdas[0], expected)


def test_only_layers_per_token_are_searched(tmp_path, outliers):
    per_token = layers_of(outliers, PER_TOKEN)
    layers = (per_token[0], replace(per_token[1], k=Format(2, "channel", 32)))
    record = run(tmp_path, outliers, layers, data=data_of(290))
    assert [layer.index for layer in record.layers] == [0]
    assert not torch.equal(record.lambdas[0], torch.ones(2, 16))
    assert [layer.k_rescale for layer in record.apply(layers)] == [record.layers[0].alpha > 0, False]
    listener = Listener()
    (tmp_path / "none").mkdir()
    nothing = run(tmp_path / "none", outliers, layers_of(outliers, RAW), listener)
    assert nothing.layers == () and nothing.tensors() == {} and "nothing to search" in listener.said[0]
    assert reparam_stage.load(tmp_path / "none" / "reparam.safetensors").layers == ()


def test_lambda_needs_pairs_and_no_angles(tmp_path):
    """Frequencies that change with the length leave the pairs as they are, and λ is equal on each."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = _build(hf.LlamaConfig(**_IDS, **_SHAPE | {"num_hidden_layers": 2}, rope_parameters=rope))
    record = run(tmp_path, as_loaded(model))
    assert [layer.index for layer in record.layers] == [0, 1] and any(layer.alpha > 0 for layer in record.layers)
    for layer in record.layers:
        a, b = rotary_pairs(model, geometry_of(model))[layer.index].unbind(1)
        assert len(a) == 8 and torch.equal(record.lambdas[layer.index][:, a], record.lambdas[layer.index][:, b])
        assert layer.error <= layer.errors[0]


def test_refusals(tmp_path, outliers):
    with pytest.raises(UsageError, match="none reads a quantized page"):
        run(tmp_path, outliers, data=data_of(100, 144))
    with pytest.raises(UsageError, match="a sequence of 513 tokens"):
        run(tmp_path, outliers, data=data_of(513))
    config = copy.deepcopy(built("llama4").config)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    with pytest.raises(UnsupportedModel, match="layer 0 of llama4_text changes its keys after RoPE") as caught:
        run(tmp_path, as_loaded(type(built("llama4"))(config).eval()))
    assert "leave out [reparam]" in str(caught.value.hint)
    broken = outlier_model()
    with torch.no_grad():
        broken.model.layers[1].self_attn.k_proj.weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteActivations, match="sample 0: keys of layer 1"):
        run(tmp_path, as_loaded(broken), layers_of(outliers))
