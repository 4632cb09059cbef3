"""The feedback stage: Hessians against loops, the record, and what its factors do in a cache and in a
folder."""

import gc
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers as hf
from cache_cases import random_ids
from cli_cases import ran_well, save_llama
from form_cases import rotary_table
from listener import Listener
from predictor_runs import as_loaded, sequences
from reparam_cases import outlier_model
from tiny_models import built, captured_by
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvcal import PlanCache, artifact, attached
from kvcal.errors import ArtifactError, NonFiniteActivations, UnsupportedModel, UsageError
from kvcal.folder import Folder, Job
from kvcal.models.load import LoadedModel, load
from kvcal.models.projections import output_weights
from kvcal.models.rope import rotary_maps
from kvcal.models.supported_layers import geometry_of
from kvcal.pages.error_feedback import feedback_factor
from kvcal.pages.hadamard import rotate as rotate_channels
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import RAW, Boost, Format, Tier
from kvcal.plan.plan import Plan, Workload, load_plan
from kvcal.plan.tensors import layout_tensors
from kvcal.progress import Silent
from kvcal.recipe_files import load_recipe
from kvcal.stages import checkpoint as checkpoint_module
from kvcal.stages import pipeline
from kvcal.stages.formats import fix_folder
from kvcal.systems.basis import fit as basis_stage
from kvcal.systems.basis.basis import fitted_basis, moved_hessian
from kvcal.systems.basis.hessians import (
    key_costs,
    mean_and_covariance,
    moments,
    output_products,
    over_context,
    query_products,
    rotated,
)
from kvcal.systems.basis.recipe import BasisSpec, FeedbackSpec

K, V = Format(2, "channel", 128, 2), Format(2, "token", 128, 2)
DATA = sequences([200, 180, 190], 1, 128)
SPEC = FeedbackSpec(damping=0.01, position_scale=1.0)


def layers_of(loaded: LoadedModel, k: Format = K, v: Format = V, **changes) -> tuple[LayerPlan, ...]:
    return tuple(
        replace(layer, k=k, v=v, **changes) if layer.is_paged else layer for layer in bare_layers(loaded.geometry)
    )


def run(folder: Path, loaded: LoadedModel, layers=None, tensors=None, spec=SPEC, reporter=None, data=DATA):
    folder.mkdir(exist_ok=True)
    layers = layers_of(loaded) if layers is None else layers
    path = folder / "feedback.safetensors"
    return basis_stage.run_basis(loaded, layers, tensors or {}, data, spec, {}, path, reporter or Silent())


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    """2 KV heads, 4 query heads of 16; queries and values lie in few directions, as trained ones."""
    model = outlier_model(scale=1.0)
    with torch.no_grad():
        for layer in model.model.layers:
            queries = layer.self_attn.q_proj.weight.view(4, 16, -1)
            queries[:, [2, 3, 4, 10, 11, 12]] += 3 * queries[:, [5, 6, 7, 13, 14, 15]]
            queries[:, [0, 1, 8, 9]] *= 0.1
            heads = layer.self_attn.o_proj.weight.view(32, 4, 16)
            heads[:, :, 4:] = heads[:, :, :4] @ torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    return as_loaded(model)


def queries_of(loaded: LoadedModel, layer: int) -> list[Tensor]:
    """[H, T, D] of each sequence of DATA."""
    return [
        captured_by(loaded.model, loaded.geometry, {"input_ids": ids[None]})[0][layer].q_post_BHTD[0]
        for ids in DATA.sequences
    ]


def test_factors_are_those_of_the_hessians(tmp_path: Path, llama: LoadedModel) -> None:
    record = run(tmp_path, llama)
    assert [(found.index, found.side) for found in record.sides] == [(0, "k"), (0, "v"), (1, "k"), (1, "v")]
    weights = output_weights(llama.model, llama.geometry)
    for layer in (0, 1):
        queries = torch.cat(queries_of(llama, layer), 1).double()
        hessian = torch.einsum("ngtd,ngte->nde", *[queries.unflatten(0, (2, 2))] * 2) / queries.shape[1]
        factor, share = feedback_factor(hessian, 0.01)
        torch.testing.assert_close(record.factors[layer, "k"], factor, rtol=2e-3, atol=1e-4)
        assert record.sides[2 * layer].share == pytest.approx(float(share.mean()), rel=1e-4)
        by_head = weights[layer].double().unflatten(1, (2, 2))
        hessian = torch.einsum("cngd,cnge->nde", by_head, by_head)
        torch.testing.assert_close(record.factors[layer, "v"], feedback_factor(hessian, 0.01)[0], rtol=2e-3, atol=1e-4)
    again = basis_stage.load(tmp_path / "feedback.safetensors", "feedback")
    assert again.subject == record.subject and again.sides == record.sides
    assert all(torch.equal(again.factors[place], factor) for place, factor in record.factors.items())
    headers, rows = basis_stage.table_rows(record)
    assert len(rows) == 2 and all(len(row) == len(headers) and row[1].endswith("%") for row in rows)


def test_hessians_are_in_the_space_of_the_pages(tmp_path: Path, llama: LoadedModel) -> None:
    """λ and a rotation change the basis of errors, offsets do not; 16-bit sides are left out."""
    generator = torch.Generator().manual_seed(0)
    lambdas = {f"layers.{i}.k_rescale": torch.rand(2, 16, generator=generator) + 0.5 for i in range(2)}
    offsets = {f"layers.{i}.k_offset": torch.ones(2, 16) for i in range(2)}
    values = Format(2, quantizer="rotated")
    layers = layers_of(llama, K, values, k_rescale=True, k_offset=True)
    record = run(tmp_path / "a", llama, layers, {**lambdas, **offsets})
    queries = (
        torch.cat(queries_of(llama, 1), 1).double()
        * lambdas["layers.1.k_rescale"].double().repeat_interleave(2, 0)[:, None]
    )
    hessian = torch.einsum("ngtd,ngte->nde", *[queries.unflatten(0, (2, 2))] * 2) / queries.shape[1]
    torch.testing.assert_close(record.factors[1, "k"], feedback_factor(hessian, 0.01)[0], rtol=2e-3, atol=2e-4)
    signs = layout_tensors(layers)["layers.1.v_signs"]
    weight = output_weights(llama.model, llama.geometry)[1]
    turned = rotate_channels(weight, signs).double().unflatten(1, (2, 2))
    hessian = torch.einsum("cngd,cnge->nde", turned, turned)
    torch.testing.assert_close(record.factors[1, "v"], feedback_factor(hessian, 0.01)[0], rtol=2e-3, atol=2e-4)

    keys = run(tmp_path / "b", llama, layers_of(llama, K, RAW))
    assert {side for _, side in keys.factors} == {"k"}
    lattice = run(tmp_path / "c", llama, layers_of(llama, Format(2, lattice_dim=2), V))
    assert {side for _, side in lattice.factors} == {"v"}
    listener = Listener()
    nothing = run(tmp_path / "d", llama, layers_of(llama, RAW, RAW), reporter=listener)
    assert not nothing.factors and "nothing to calibrate" in listener.said[0]
    assert nothing.apply(layers_of(llama, RAW, RAW)) == layers_of(llama, RAW, RAW)
    with pytest.raises(ArtifactError, match="whose layers are not the plan's"):
        keys.apply(bare_layers(geometry_of(built("qwen3"))))


def test_keys_before_rope_are_measured_before_rope(tmp_path: Path, llama: LoadedModel) -> None:
    tables = {f"layers.{i}.rotary": rotary_table(16) for i in range(2)}
    record = run(tmp_path, llama, layers_of(llama, k_pages="pre"), tables)
    total = sum(query_products(q, 2, torch.arange(q.shape[1]), rotary_table(16)) for q in queries_of(llama, 0))
    factor, _ = feedback_factor(total / sum(map(len, DATA.sequences)), 0.01)
    torch.testing.assert_close(record.factors[0, "k"], factor, rtol=2e-3, atol=1e-4)


def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path: Path, llama: LoadedModel, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_module, "SAVE_SECONDS", 0.0)
    monkeypatch.setitem(basis_stage.BATCH_TOKENS, "cpu", 200)
    run(tmp_path / "whole", llama)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", llama, reporter=Listener(2))
    listener = Listener()
    run(tmp_path / "cut", llama, reporter=listener)
    assert "goes on after 1 samples" in listener.said[0] or "goes on after 2 samples" in listener.said[0]
    whole, cut = (tmp_path / name / "feedback.safetensors" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes() and len(list(cut.parent.iterdir())) == 1


def test_queries_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = outlier_model()
    loaded = as_loaded(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteActivations, match="sample 0: queries of layer 1 hold NaN or infinity"):
        run(tmp_path, loaded)


def test_a_hessian_that_is_not_positive_definite_asks_for_more_damping(tmp_path, llama, monkeypatch) -> None:
    monkeypatch.setattr(basis_stage._Calibration, "hessian", lambda *_: (2 * torch.eye(16).double()[None] - 1, None))
    with pytest.raises(UsageError, match="Hessian of layer 0's k is not positive definite") as error:
        run(tmp_path, llama)
    assert "damping" in str(error.value.hint)


def plan_of(loaded: LoadedModel, layers: tuple[LayerPlan, ...], tensors: dict[str, Tensor]) -> Plan:
    return Plan(loaded.identity, loaded.geometry.cache_dtype, layers, Workload(1, 512), {}, tensors)


KITTY = replace(K, boost=Boost("query_range", (Tier(16, 0.1, 1.0), Tier(4, 0.2))))


@pytest.mark.parametrize(
    ("k", "v", "changes"),
    [
        (K, V, {}),
        (KITTY, replace(V, num_bits=3), {}),
        (replace(K, axis="token", num_bits=4), Format(2, quantizer="rotated"), {}),
        (replace(K, recent_window=40), V, {"k_pages": "pre"}),
    ],
    ids=["plain", "boosted", "rotated", "before RoPE"],
)
def test_a_cache_packs_pages_with_feedback_and_errs_less(tmp_path, llama, k, v, changes) -> None:
    """Scores of unseen queries, and the block's outputs, in as many bytes and the factors'."""
    layers = layers_of(llama, k, v, **changes)
    tensors = layout_tensors(layers)
    if changes:
        tensors |= {f"layers.{i}.rotary": rotary_table(16) for i in range(2)}
    record = run(tmp_path, llama, layers, tensors)
    plain, fed = plan_of(llama, layers, tensors), plan_of(llama, record.apply(layers), tensors | record.tensors())
    more = sum(tensor.nbytes for tensor in record.tensors().values())
    assert fed.nbytes([300]) == plain.nbytes([300]) + more == plain.nbytes([300]) + 2 * 2 * 2 * 136 * 2
    ids = sequences([190], 7, 128).sequences[0]
    seen, _ = captured_by(llama.model, llama.geometry, {"input_ids": ids[None]})
    weights = output_weights(llama.model, llama.geometry)
    errors = []
    for plan in (plain, fed):
        cache = PlanCache(plan, llama.model.config)
        with attached(llama.model), torch.no_grad():
            llama.model(input_ids=ids[None], past_key_values=cache)
        assert cache.nbytes == plan.nbytes([190])
        found = {"k": 0.0, "v": 0.0}
        for captured, layer in zip(seen, cache.paged_layers, strict=True):
            for side, exact in (("k", captured.k_post_BNTD), ("v", captured.v_BNTD)):
                part = layer.store.sides[side]
                spans = [(0, 0, part.format.pages_read(190))]
                read = part.decode(spans, torch.float32).transpose(0, 1).flatten(1, 2)
                error = (read - exact[0, :, : read.shape[1]])[:, 2:].repeat_interleave(2, 0)
                if side == "k":
                    made = captured.q_post_BHTD[0] @ error.transpose(1, 2)
                else:
                    made = torch.einsum("htd,chd->tch", error, weights[captured.layer])
                found[side] += float(made.double().square().sum())
        errors.append(found)
    ratios = {side: errors[1][side] / errors[0][side] for side in ("k", "v")}
    assert ratios["k"] < 0.9 and ratios["v"] < 0.6, ratios


def test_what_takes_no_feedback_is_refused() -> None:
    loaded = as_loaded(built("llama"))
    layer = layers_of(loaded)[0]
    with pytest.raises(ValueError, match="has k_feedback, which chooses no codes of pages such as .2 lattice d2"):
        replace(layer, k=Format(2, lattice_dim=2), k_feedback=True)
    with pytest.raises(ValueError, match="has v_feedback, which chooses no codes of pages such as .16"):
        replace(layer, v=RAW, v_feedback=True)
    shrinking = Format(2, "token", 128, param_dtype="float32", shrink_at=(100,))
    with pytest.raises(ValueError, match="has v_feedback, which chooses no codes of pages such as .4>2"):
        replace(layer, v=shrinking, v_feedback=True)
    window = bare_layers(geometry_of(built("mistral_all_sliding")))[0]
    with pytest.raises(ValueError, match="is bounded and takes no transforms"):
        replace(window, v_feedback=True)


ROTATED = Format(2, "token", 128, 2, 16, quantizer="rotated")
WITH_BASIS = BasisSpec(**asdict(SPEC))


@pytest.mark.parametrize("scaling", [16**-0.5, 0.7])
def test_a_basis_is_that_of_weighted_queries_and_feedback_works_in_it(tmp_path, llama, scaling, monkeypatch) -> None:
    for decoder in llama.model.model.layers:
        monkeypatch.setattr(decoder.self_attn, "scaling", scaling)
    layers = layers_of(llama, ROTATED, ROTATED)
    record = run(tmp_path, llama, layers, spec=WITH_BASIS)
    weights = output_weights(llama.model, llama.geometry)
    captured = [captured_by(llama.model, llama.geometry, {"input_ids": ids[None]})[0] for ids in DATA.sequences]
    for layer in layers:
        index, cost = layer.geometry.index, weights[layer.geometry.index].transpose(0, 1)
        seen = [(c[index].q_post_BHTD[0], c[index].k_post_BNTD[0], c[index].v_BNTD[0]) for c in captured]
        weighted = [key_costs(*qkv, cost.mT @ cost, scaling, 2, 16) for qkv in seen]
        queries = sum(found for found, _ in weighted)
        keys = sum(moments(k, weight) for (_, k, _), (_, weight) in zip(seen, weighted, strict=True))
        values = sum(moments(v[:, 2:]) for _, _, v in seen)
        place = rotary_maps(llama.model, llama.geometry)[index], 200, llama.max_context
        queries, keys = (over_context(sums, *place) for sums in (queries, keys))
        center, covariance = mean_and_covariance(keys, True)
        outputs = output_products(weights[index], 2)
        expected = {
            "k": (queries, fitted_basis(queries, covariance, WITH_BASIS.exponent, center)),
            "v": (outputs, fitted_basis(outputs, mean_and_covariance(values, False)[1], WITH_BASIS.exponent)),
        }
        for side, (hessian, basis) in expected.items():
            found = record.bases[index, side]
            assert (found.center is None) == (side == "v")
            assert side == "v" or torch.allclose(found.center, basis.center, atol=1e-5)
            # Eigenvectors have no sign.
            torch.testing.assert_close(found.matrix.abs(), basis.matrix.abs(), atol=2e-3, rtol=2e-2)
            signs = layout_tensors((layer,))[f"layers.{index}.{side}_signs"]
            costs = rotated(moved_hessian(hessian, found), signs)
            factor, _ = feedback_factor(costs, SPEC.damping)
            torch.testing.assert_close(record.factors[index, side].float(), factor.float(), atol=5e-3, rtol=2e-2)
    read = basis_stage.load(tmp_path / "feedback.safetensors")
    assert read.sides == record.sides and all(side.basis for side in read.sides)
    assert {n: t.tolist() for n, t in read.tensors().items()} == {n: t.tolist() for n, t in record.tensors().items()}


def test_keys_get_no_center_where_softmax_sees_a_constant(tmp_path: Path, llama: LoadedModel) -> None:
    """Attention with sinks has a logit without a key; soft caps bend logits."""
    capped = as_loaded(outlier_model(1, 1.0, hf.Gemma2Config, layer_types=["full_attention"]))
    assert capped.model.config.attn_logit_softcapping
    for name, loaded in {"sinks": as_loaded(built("gpt_oss")), "caps": capped, "neither": llama}.items():
        record = run(tmp_path / name, loaded, layers_of(loaded, ROTATED, ROTATED), spec=WITH_BASIS)
        centers = [basis.center for (_, side), basis in record.bases.items() if side == "k"]
        assert centers and all(bool(center.any()) == (name == "neither") for center in centers)


def test_without_a_context_or_known_positions_a_basis_is_of_the_texts_places(tmp_path, llama, monkeypatch) -> None:
    layers, listener, found = layers_of(llama, ROTATED, ROTATED), Listener(), {}
    found["context"] = run(tmp_path / "context", llama, layers, spec=WITH_BASIS)
    with monkeypatch.context() as patch:
        patch.setattr(LoadedModel, "max_context", None)
        found["endless"] = run(tmp_path / "endless", llama, layers, spec=WITH_BASIS)
    monkeypatch.setattr(basis_stage, "rotary_maps", Mock(side_effect=UnsupportedModel("unknown RoPE")))
    found["unknown"] = run(tmp_path / "unknown", llama, layers, spec=WITH_BASIS, reporter=listener)
    assert "basis: bases are fitted to the first 200 positions alone: unknown RoPE" in listener.said
    bases = {name: record.bases[0, "k"].matrix for name, record in found.items()}
    assert torch.equal(bases["endless"], bases["unknown"]) and not torch.equal(bases["context"], bases["unknown"])


def test_only_codes_of_2_bits_have_gains(tmp_path: Path, llama: LoadedModel) -> None:
    record = run(tmp_path, llama, layers_of(llama, ROTATED, ROTATED), spec=WITH_BASIS)
    for bits in (1, 2, 3, 4):
        layers = record.apply(layers_of(llama, ROTATED, replace(ROTATED, num_bits=bits)))
        assert {layer.v_gain for layer in layers} == {bits == 2} and all(layer.v_basis for layer in layers)


def test_a_basis_of_no_packed_token_is_refused(tmp_path: Path, llama: LoadedModel) -> None:
    """The first token of a page's side is packed after 2 sinks, once 16 have come since."""
    layers = layers_of(llama, ROTATED, ROTATED)
    with pytest.raises(UsageError, match=r"after 2 sinks, .* window of 16, .* has 18; expected 19 or more") as refused:
        run(tmp_path / "a", llama, layers, spec=WITH_BASIS, data=sequences([18, 12], 1, 128))
    assert "seq_len" in str(refused.value.hint) and not list((tmp_path / "a").iterdir())
    record = run(tmp_path / "b", llama, layers, spec=WITH_BASIS, data=sequences([12, 19], 1, 128))
    eye = torch.eye(16)
    assert all(not torch.equal(basis.matrix[0], eye) for basis in record.bases.values())
    run(tmp_path / "c", llama, layers, data=sequences([18], 1, 128))  # feedback alone needs none


def test_a_record_without_one_of_its_tensors_is_refused(tmp_path: Path, llama: LoadedModel) -> None:
    run(tmp_path, llama, layers_of(llama, ROTATED, ROTATED), spec=WITH_BASIS)
    path = tmp_path / "feedback.safetensors"
    stored = artifact.read(path, "basis", basis_stage.SCHEMA)
    assert len(stored.tensors) == 2 * (2 * 3 + 2)
    for name in stored.tensors:
        tensors = {other: tensor for other, tensor in stored.tensors.items() if other != name}
        artifact.write(path, replace(stored, tensors=tensors))
        with pytest.raises(ArtifactError, match=f"missing tensor '{name}'"):
            basis_stage.load(path)
    sides = [{**side, "index": 7} for side in stored.body["sides"]]
    artifact.write(path, replace(stored, body={**stored.body, "sides": sides}))
    with pytest.raises(ArtifactError, match=r"layer 7 has error feedback, expected one of \[0, 1\]"):
        basis_stage.load(path)


def test_a_calibration_lets_go_of_its_model(tmp_path: Path) -> None:
    loaded = as_loaded(outlier_model())
    model = weakref.ref(loaded.model)
    run(tmp_path, loaded, layers_of(loaded, ROTATED, ROTATED), spec=WITH_BASIS)
    del loaded
    gc.collect()
    assert model() is None


def test_only_rotated_pages_without_transforms_get_a_basis(tmp_path: Path, llama: LoadedModel) -> None:
    record = run(tmp_path, llama, layers_of(llama, K, ROTATED), spec=WITH_BASIS)
    assert {side for _, side in record.bases} == {"v"} and {side for _, side in record.factors} == {"k", "v"}
    for moved in ({"k_offset": True}, {"k_rescale": True}, {"k_pages": "pre"}):
        layers = layers_of(llama, ROTATED, ROTATED, **moved)
        assert {side for _, side in basis_stage.basis_places(layers)} == {"v"}
    shrinking = Format(2, "token", 128, param_dtype="float32", shrink_at=(100,))
    assert basis_stage.feedback_places(layers_of(llama, K, shrinking)) == [(0, "k"), (1, "k")]
    for layer in record.apply(layers_of(llama, K, RAW)):  # bits are chosen later: these at 16
        assert layer.k_feedback and not (layer.v_feedback or layer.v_basis or layer.v_gain)
    layer = layers_of(llama, ROTATED, V)[0]
    with pytest.raises(ValueError, match="has v_basis, which is for rotated pages"):
        replace(layer, v_basis=True)
    with pytest.raises(ValueError, match="has k_basis, which takes the place of other transforms"):
        replace(layer, k_basis=True, k_offset=True)


def test_a_basis_errs_less_in_a_cache(tmp_path: Path, llama: LoadedModel) -> None:
    """Of the same bits: logits after a text, through the packed cache."""
    layers, signs = layers_of(llama, ROTATED, ROTATED), layout_tensors(layers_of(llama, ROTATED, ROTATED))
    ids, errors = random_ids(2, 200, seed=3), {}
    with torch.no_grad():
        exact = llama.model(ids).logits[:, -1]
        for name, spec in (("feedback", SPEC), ("basis", WITH_BASIS)):
            record = run(tmp_path / name, llama, layers, signs, spec)
            plan = plan_of(llama, record.apply(layers), signs | record.tensors())
            cache = PlanCache(plan, llama.model.config)
            llama.model(ids[:, :-1], past_key_values=cache)
            found = llama.model(ids[:, -1:], past_key_values=cache).logits[:, -1]
            errors[name] = float((found - exact).norm() / exact.norm())
            assert cache.nbytes == plan.nbytes(cache.lengths, 200)
    assert errors["basis"] < errors["feedback"] < 0.5


RECIPE = """
[data]
source = "tasks"
[formats]
k = { num_bits = 2, axis = "token", num_sink_tokens = 1 }
v = { num_bits = 2, quantizer = "rotated" }
[feedback]
num_samples = 2
seq_len = 200
damping = 0.02
"""


def test_from_a_recipe_to_a_plan(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = save_llama(tmp_path / "tiny", tokenizer, dtype=torch.float32)
    loaded, path = load(str(model), device="cpu"), tmp_path / "small.toml"
    path.write_text(RECIPE)
    recipe = load_recipe(str(path))
    plan = pipeline.build_plan(loaded, Folder.create(tmp_path / "run"), recipe, Workload(1, 512))
    assert all(layer.k_feedback and layer.v_feedback for layer in plan.layers if layer.is_paged)
    assert plan.provenance["calibration"]["feedback"]["purpose"] == "fit"
    assert load_plan(tmp_path / "run" / "plan.safetensors").sha256 == plan.sha256

    folder = Folder.create(tmp_path / "stages")
    fix_folder(Job(recipe, loaded, folder, Silent(), Workload(1, 512)))
    given = ["transform", folder.path, "--model", model, "--recipe", path, "--device", "cpu"]
    assert {side["side"] for side in ran_well(*given, "--json", "--quiet").json["feedback"]["sides"]} == {"k", "v"}
    table = ran_well(*given)
    assert "K error left" in table.out and "feedback.safetensors is current" in table.err
    assert pipeline.compile_folder(folder).sha256 == plan.sha256
