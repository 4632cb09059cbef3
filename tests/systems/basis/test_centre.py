"""Keys that are scaled by token lose their mean before RoPE, however large a bias the key projection has."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_cases import save_llama
from evaluation_cases import as_loaded
from listener import Listener
from reparam_cases import outlier_model
from tiny_models import VOCAB_SIZE, built
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config

from kvcal import Folder, build_plan, load_model, load_recipe
from kvcal.errors import ArtifactError, NonFiniteActivations
from kvcal.models.load import LoadedModel
from kvcal.models.rope import rotary_maps
from kvcal.models.taps import Captured, tap
from kvcal.pages.codec import PageCodec
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import RAW, Format
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import layout_tensors
from kvcal.stages.divergence import deviations, unquantized_plan
from kvcal.systems.basis.centre import FIRST, centring, load, run_centre

LATTICE, BY_TOKEN = Format(4, lattice_dim=2, num_sink_tokens=4), Format(4, "token", 128, num_sink_tokens=4)
TOKENS = torch.randint(3, VOCAB_SIZE, (3, 300), generator=torch.Generator().manual_seed(5))


def biased(times: float) -> PreTrainedModel:
    """Random biases of key projections, ``times`` as large as what varies."""
    model = copy.deepcopy(built("qwen2"))
    with torch.no_grad():
        for layer in model.model.layers:
            key = layer.self_attn.k_proj
            scale = times * float(key.weight.square().sum(1).mean().sqrt())
            key.bias.copy_(scale * torch.randn(key.bias.shape, generator=torch.Generator().manual_seed(5)))
            layer.self_attn.q_proj.weight.mul_(0.05)  # logits of a bias that large would leave one token each
            layer.self_attn.q_proj.bias.mul_(0.05)
    return model


def layers_in(loaded: LoadedModel, k: Format) -> tuple[LayerPlan, ...]:
    return tuple(replace(x, k=k) if x.is_paged else x for x in bare_layers(loaded.geometry))


def keys_of(loaded: LoadedModel, tokens_BT: Tensor = TOKENS) -> dict[int, Captured]:
    seen: dict[int, Captured] = {}
    with torch.no_grad(), tap(loaded.model, lambda found: seen.update({found.layer: found}), loaded.geometry):
        loaded.model(input_ids=tokens_BT, use_cache=False)
    return seen


# gemma3: QK-norm, two bases; gpt_oss: YaRN, biases; glm4: partial, interleaved; smollm3: no RoPE.
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "glm4", "smollm3"])
def test_pages_hold_keys_less_the_mean_of_a_loop(name: str) -> None:
    """The stored mean is that of an fp64 loop after the first tokens, and pages are read back to 4 bits."""
    loaded = as_loaded(built(name))
    layers = layers_in(loaded, LATTICE)
    found = centring(loaded, layers, [*TOKENS[0, :FIRST].expand(9, FIRST), *TOKENS], Listener())
    applied, tensors = found.apply(layers), layout_tensors(layers) | found.tensors()
    assert {x.geometry.index for x in applied if x.k_offset} == {x.geometry.index for x in layers if x.is_paged}
    for layer in filter(lambda layer: layer.k_offset, applied):
        seen, index = keys_of(loaded)[layer.geometry.index], layer.geometry.index
        total = torch.zeros_like(seen.k_pre_BNTD[0, :, 0]).double()
        for sequence in range(3):
            for position in range(FIRST, 300):
                total += seen.k_pre_BNTD[sequence, :, position].double()
        mean_ND = total / (3 * (300 - FIRST))
        torch.testing.assert_close(tensors[f"layers.{index}.k_offset"].double(), mean_ND, rtol=1e-4, atol=1e-5)
        codec = PageCodec.of_layer(layer, "k", "float32", tensors)
        k_post, k_pre = seen.k_post_BNTD[0, :, :256], seen.k_pre_BNTD[0, :, :256].double()
        rest = (k_pre - mean_ND[:, None]).square().mean()
        assert (codec.read_back(k_post) - k_post).double().square().mean() < 0.02 * rest
        records = codec.encode(k_post.unflatten(1, (2, 128)).transpose(0, 1), torch.arange(2), 4)
        before = codec.before_rope(codec.decode(records, 4), torch.arange(2)).transpose(0, 1).flatten(1, 2)
        assert (before.double() - k_pre).square().mean() < 0.02 * rest  # what a predictor reads


def test_a_bias_takes_no_codes() -> None:
    """KL at 2 bits on a lattice: a bias destroys the model; without its mean it is near one of no bias."""

    def divergence(times: float, is_centred: bool) -> float:
        loaded = as_loaded(biased(times))
        layers = layers_in(loaded, replace(LATTICE, num_bits=2))
        found = centring(loaded, layers, list(TOKENS), Listener())
        tensors = layout_tensors(layers)
        layers, tensors = (found.apply(layers), tensors | found.tensors()) if is_centred else (layers, tensors)
        plan = Plan(loaded.identity, "float32", layers, Workload(1, 300), {}, tensors)
        mask = torch.zeros_like(TOKENS, dtype=torch.bool)
        mask[:, 200:] = True
        reference = unquantized_plan(loaded.identity, loaded.geometry)
        return float(deviations(loaded.model, reference, [plan], TOKENS, mask).kl_Pn.mean())

    plain, as_it_was, centred = divergence(0, False), divergence(20, False), divergence(20, True)
    assert as_it_was > 20 * centred and centred < 4 * plain, (plain, as_it_was, centred)


def test_kernels_formats_take_a_constant_where_it_serves() -> None:
    """A bias of slow channels is the same everywhere; of fast ones it swings: keys are before RoPE."""
    rope = {"rope_type": "default", "rope_theta": 1e8}
    model, notes = outlier_model(1, 1.0, Qwen2Config, rope_parameters=rope), Listener()
    bias = model.model.layers[0].self_attn.k_proj.bias
    loaded, places = as_loaded(model), {}
    for channel in (7, 0):
        with torch.no_grad():
            bias.zero_().view(2, 16)[:, channel] = 30.0
        layers = layers_in(loaded, BY_TOKEN)
        found = centring(loaded, layers, list(TOKENS % 128), notes)
        (layer,) = found.apply(layers)
        places[channel] = layer.k_offset, layer.k_pages
        offset_ND, (table,) = found.stored["layers.0.k_offset"], rotary_maps(model, loaded.geometry).values()
        k_pre_ND = keys_of(loaded, TOKENS % 128)[0].k_pre_BNTD[:, :, FIRST:].double().mean((0, 2))
        if channel == 7:
            for (a, b), frequency in zip(table.pairs.tolist(), table.frequency.tolist(), strict=True):
                cos = sum(math.cos(p * frequency) for p in range(0, 32768, 7)) / len(range(0, 32768, 7))
                sin = sum(math.sin(p * frequency) for p in range(0, 32768, 7)) / len(range(0, 32768, 7))
                expected_N = k_pre_ND[:, a] * cos - k_pre_ND[:, b] * sin
                torch.testing.assert_close(offset_ND[:, a].double(), expected_N, rtol=1e-4, atol=1e-4)
        before = centring(loaded, (replace(layer, k_offset=False, k_pages="pre"),), list(TOKENS % 128), notes)
        assert "layers.0.rotary" in before.stored
        torch.testing.assert_close(before.stored["layers.0.k_offset"].double(), k_pre_ND, rtol=1e-4, atol=1e-4)
    assert places == {7: (True, "post"), 0: (True, "pre")}
    assert len(notes.said) == 1 and "layers [0]" in notes.said[0]


@pytest.mark.parametrize(("share", "is_stored"), [(0.003, False), (0.05, True)])
def test_a_constant_is_taken_out_from_a_hundredth_of_the_variance_on(share: float, is_stored: bool) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e8}
    model = outlier_model(1, 1.0, Qwen2Config, rope_parameters=rope)
    loaded, projection = as_loaded(model), model.model.layers[0].self_attn.k_proj

    def keys() -> Tensor:
        return keys_of(loaded, TOKENS % 128)[0].k_pre_BNTD[:, :, FIRST:].transpose(0, 1).flatten(1, 2)

    with torch.no_grad():
        projection.bias.zero_()
        projection.bias.sub_(keys().mean(1).flatten())  # no constant but that of the slowest channel
        variance = float(keys().var(1).sum())
        projection.bias.view(2, 16)[:, 7] += (share * variance / 2) ** 0.5
    found = centring(loaded, layers_in(loaded, BY_TOKEN), list(TOKENS % 128), Listener())
    assert bool(found.stored) == is_stored


def test_other_layers_keep_theirs(tmp_path: Path) -> None:
    """Ranges by channel, 16 bits, shrinking pages and λ; a file is read again; keys that are not finite."""
    loaded = as_loaded(biased(20))
    (first, *_) = layers_in(loaded, LATTICE)
    shrinking = replace(BY_TOKEN, num_bits=2, shrink_at=(256,), param_dtype="float32")
    others = [
        replace(first, k=Format(2, "channel", 32)),
        replace(first, k=LATTICE, k_rescale=True),
        replace(first, k=RAW),
        replace(first, k=shrinking),
    ]
    for layer in others:
        assert not centring(loaded, (layer,), list(TOKENS), Listener()).stored
    layers = layers_in(loaded, LATTICE)
    made = run_centre(loaded, layers, list(TOKENS), {}, tmp_path / "centre.safetensors", Listener())
    read = load(tmp_path / "centre.safetensors")
    assert read.stored.keys() == made.stored.keys() and read.apply(layers) == made.apply(layers)
    with pytest.raises(ArtifactError, match="do not go with the layers"):
        read.apply((replace(first, k=LATTICE, k_rescale=True), *layers[1:]))
    with torch.no_grad():
        loaded.model.model.layers[0].self_attn.k_proj.bias[0] = math.inf
    with pytest.raises(NonFiniteActivations, match="keys of layer 0"):
        centring(loaded, layers, list(TOKENS), Listener())


def test_means_that_no_layer_takes_any_more_leave_the_folder(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    loaded = load_model(str(save_llama(tmp_path / "model", tokenizer)), device="cpu")
    folder = Folder.create(tmp_path / "out")
    for recipe, has_means in (("higgs-2", True), ("kivi-2", False)):
        plan = build_plan(loaded, folder, load_recipe(recipe), Workload(1, 512))
        assert folder.of_stage("centre").exists() == has_means == any(layer.k_offset for layer in plan.layers)
