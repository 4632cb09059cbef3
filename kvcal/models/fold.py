"""PM-KVQ's λ folded into a model's weights, so that its cache holds K / λ at no cost at run time (Eq. 9).

    W_k, b_k  <-  / λ        W_q, b_q  <-  x λ, repeated over the query heads that share a KV head

Logits stay the same, because q k' does. Two things lie between a projection and the cache:

- RoPE. λ passes through a rotation only if both channels of a pair have the same factor; which channels pair is
  measured (``kvcal.models.rope``).
- QK-norm (Qwen3, Gemma-3, OLMo-2). A factor before the norm would be normalised away, so it goes into the norms' own
  weights. Where those are shared by all heads, all heads need the same λ; a norm that multiplies by 1 + weight (Gemma)
  is told from one that multiplies by weight by trying it out.

After folding, a probe compares queries, keys and values of every layer with those before, and the fold is undone if
they are not exactly K / λ and Q λ. Left out: norms without weights, norms that are a list of modules, clipped
projections. For those, a plan can carry λ as a runtime vector (``k_rescale``), which works for every model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from kvcal.errors import ArtifactError, UnsupportedModel, UsageError
from kvcal.geometry import CACHE_DTYPES, Geometry
from kvcal.models.attention import attention_modules, layer_index
from kvcal.models.geometry import attention_layers, checkpoint_dtype, geometry_of, probe_ids, sharing_layers
from kvcal.models.load import LoadedModel
from kvcal.models.projections import LayerProjections, output_dim, projections, query_key_norms
from kvcal.models.rope import rotary_pairs
from kvcal.models.streamed import is_streamed
from kvcal.models.taps import Captured, tap

_HINT = "keep λ as a runtime vector: a plan with k_rescale needs no folding"


@dataclass(frozen=True, eq=False)
class _Edit:
    """parameter <- (parameter + constant) factor - constant. ``factor`` fp64, shaped to broadcast."""

    parameter: nn.Parameter
    factor: Tensor
    constant: float = 0.0


def fold(model: PreTrainedModel, lambdas: Mapping[int, Tensor], geometry: Geometry | None = None) -> None:
    """Fold λ into ``model``'s weights, in place. ``lambdas``: {layer: [N, D], positive}; other layers stay.

    Raises:
        ArtifactError: λ is for no layer of the model, mis-shaped, not positive and finite, or differs in a rotary pair.
        UnsupportedModel: the model's weights cannot take λ; the model is then as it was.
        UsageError: the model's layers are streamed from files.
    """
    if is_streamed(model):
        raise UsageError("λ cannot be folded into weights that are streamed from files", "leave --memory out")
    geometry = geometry or geometry_of(model)
    check_lambdas(model, geometry, lambdas)
    if model.config.get_text_config(decoder=True).to_dict().get("clip_qkv") is not None:
        raise UnsupportedModel(f"{geometry.model_type} clips its projections: λ would change what is clipped", _HINT)
    sharing = sharing_layers(model.config)
    if sharing:
        raise UnsupportedModel(
            f"layer {sharing[0]} of {geometry.model_type} reads another layer's keys with queries of its own, which λ "
            "is not folded into",
            _HINT,
        )
    edits = _edits(model, geometry, lambdas)
    saved = {edit.parameter: edit.parameter.detach().clone() for edit in edits}
    before = _probe(model, geometry)
    for edit in edits:
        changed = (edit.parameter.detach().double() + edit.constant) * edit.factor.to(edit.parameter.device)
        edit.parameter.detach().copy_(changed - edit.constant)
    wrong = _first_difference(before, _probe(model, geometry), lambdas)
    if wrong is not None:
        for parameter, value in saved.items():
            parameter.detach().copy_(value)
        raise UnsupportedModel(f"{geometry.model_type}: {wrong} after folding λ into the weights", _HINT)


def check_lambdas(model: PreTrainedModel, geometry: Geometry, lambdas: Mapping[int, Tensor]) -> None:
    """ArtifactError unless each of ``lambdas`` fits its layer, is positive, and commutes with its rotation."""
    layers = {layer.index: layer for layer in attention_layers(geometry)}
    pairs = rotary_pairs(model, geometry, lambdas)
    for index, lambda_ND in lambdas.items():
        layer = layers.get(index)
        if layer is None:
            raise ArtifactError(f"λ of layer {index}: {geometry.model_type} has attention layers {sorted(layers)}")
        expected = (layer.num_kv_heads, layer.k_head_dim)
        if tuple(lambda_ND.shape) != expected or not bool((lambda_ND.isfinite() & (lambda_ND > 0)).all()):
            raise ArtifactError(
                f"λ of layer {index} is {list(lambda_ND.shape)}, {float(lambda_ND.min())} to {float(lambda_ND.max())}; "
                f"expected {list(expected)}, positive"
            )
        a, b = pairs[index].to(lambda_ND.device).unbind(1)
        unequal = (lambda_ND[:, a] != lambda_ND[:, b]).any(0).nonzero()
        if len(unequal):
            channels = pairs[index][int(unequal[0])].tolist()
            raise ArtifactError(
                f"λ of layer {index} differs between channels {channels[0]} and {channels[1]}, which RoPE mixes",
                hint="a pair shares one factor: take the larger maximum of its channels",
            )


def save_folded(loaded: LoadedModel, path: Path) -> None:
    """Write a folded model to the folder ``path`` as a checkpoint that ``load`` takes, with its tokenizer, in the dtype
    that the original is stored in (a bf16 cache must stay one), whole or not at all. UsageError if ``path`` exists
    already."""
    if path.exists():
        raise UsageError(f"{path} exists already", hint="name a folder that does not exist")
    model, stored = loaded.model, CACHE_DTYPES[checkpoint_dtype(loaded.model.config)]
    if model.dtype != stored:
        model = copy.deepcopy(model)
        for parameter in model.parameters():  # not the buffers: rotary frequencies stay fp32
            if parameter.dtype == loaded.model.dtype:
                parameter.data = parameter.data.to(stored)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{path.name}.partial-", dir=path.parent) as folder:
        whole = Path(folder) / path.name
        model.save_pretrained(whole)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(whole)
        whole.rename(path)


def _edits(model: PreTrainedModel, geometry: Geometry, lambdas: Mapping[int, Tensor]) -> list[_Edit]:
    modules = {layer_index(module): module for module in attention_modules(model)}
    by_layer = projections(model, geometry)
    layers = {layer.index: layer for layer in attention_layers(geometry)}
    edits: list[_Edit] = []
    owner: dict[nn.Parameter, int] = {}
    for index, lambda_ND in lambdas.items():
        group = layers[index].num_query_heads // layers[index].num_kv_heads
        k_factor_ND = lambda_ND.to("cpu", torch.float64).reciprocal()
        q_factor_HD = lambda_ND.to("cpu", torch.float64).repeat_interleave(group, dim=0)
        place = f"layer {index} of {geometry.model_type}"
        norms = query_key_norms(modules[index])
        if norms is not None:
            found = [*_norm_edits(norms[0], q_factor_HD, place), *_norm_edits(norms[1], k_factor_ND, place)]
        else:
            found = _projection_edits(by_layer[index], q_factor_HD, k_factor_ND, place)
        for edit in found:
            if owner.setdefault(edit.parameter, index) != index:
                raise UnsupportedModel(f"{place} shares its weights with layer {owner[edit.parameter]}", _HINT)
        edits += found
    return edits


def _norm_edits(norm: nn.Module, factor: Tensor, place: str) -> list[_Edit]:
    """``factor`` [heads, D] into a norm of one head (all rows must be equal) or of all heads."""
    parameters = dict(norm.named_parameters())
    weight = parameters.get("weight")
    if weight is None or not parameters.keys() <= {"weight", "bias"}:
        raise UnsupportedModel(f"{place}: its QK-norm {type(norm).__name__} has no weight that could take λ", _HINT)
    if weight.numel() == factor.shape[1] and not bool((factor == factor[0]).all()):
        raise UnsupportedModel(
            f"{place} normalises queries and keys with one weight for all heads, and λ differs between heads",
            hint="calibrate with shared_heads = true, or keep λ as a runtime vector",
        )
    if weight.numel() not in (factor.shape[1], factor.numel()):
        raise UnsupportedModel(f"{place}: its QK-norm has a weight of shape {list(weight.shape)}", _HINT)
    shaped = (factor[0] if weight.numel() == factor.shape[1] else factor).reshape(weight.shape)
    edits = [_Edit(weight, shaped, _norm_constant(norm, weight, place))]
    return edits if "bias" not in parameters else [*edits, _Edit(parameters["bias"], shaped)]


def _norm_constant(norm: nn.Module, weight: nn.Parameter, place: str) -> float:
    """c of a norm that multiplies by weight + c: 0, or 1 in Gemma. Its outputs with weights 0 and 1 tell."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, *weight.shape, generator=generator).to(weight)
    constants = {name: torch.zeros_like(parameter) for name, parameter in norm.named_parameters()}
    with torch.no_grad():
        at_zero = functional_call(norm, constants, (x,)).float()
        at_one = functional_call(norm, constants | {"weight": torch.ones_like(weight)}, (x,)).float()
    gain = at_one - at_zero
    for constant in (0.0, 1.0):
        if torch.allclose(at_zero, constant * gain, rtol=1e-2, atol=1e-6):
            return constant
    raise UnsupportedModel(f"{place}: its QK-norm {type(norm).__name__} multiplies by neither w nor 1 + w", _HINT)


def _projection_edits(layer: LayerProjections, q_factor_HD: Tensor, k_factor_ND: Tensor, place: str) -> list[_Edit]:
    if layer.query is None or layer.q_channels_HD is None:
        raise UnsupportedModel(f"{place}: the channels of its query projection are in no known order", _HINT)
    edits = []
    for projection, channels, factor in (
        (layer.query, layer.q_channels_HD, q_factor_HD),
        (layer.key, layer.k_channels_ND, k_factor_ND),
    ):
        weight, bias = projection.get_parameter("weight"), projection.bias
        if not weight.is_floating_point():
            raise UnsupportedModel(f"{place}: its projections hold {weight.dtype}, which λ cannot scale", _HINT)
        out_dim = output_dim(projection)
        by_channel = torch.ones(weight.shape[out_dim], dtype=torch.float64)
        by_channel[channels.flatten()] = factor.flatten()
        edits.append(_Edit(weight, by_channel.unsqueeze(1 - out_dim)))
        if bias is not None:
            edits.append(_Edit(bias, by_channel))
    return edits


def _probe(model: PreTrainedModel, geometry: Geometry) -> dict[int, Captured]:
    seen: dict[int, Captured] = {}
    with torch.no_grad(), tap(model, lambda captured: seen.update({captured.layer: captured}), geometry):
        model(input_ids=probe_ids(model, 1, 8), use_cache=False)
    return seen


def _first_difference(
    before: Mapping[int, Captured], after: Mapping[int, Captured], lambdas: Mapping[int, Tensor]
) -> str | None:
    """Names the first tensor that differs from what folding makes of it by more than rounding; None if none does."""
    for index, old in before.items():
        new = after[index]
        tolerance = 1e-3 if old.q_post_BHTD.dtype in (torch.float32, torch.float64) else 0.1
        ones = torch.ones_like(old.k_post_BNTD[0, :, 0]).double()
        factor = lambdas[index].to(ones) if index in lambdas else ones
        group = old.q_post_BHTD.shape[1] // old.k_post_BNTD.shape[1]
        checks = (
            ("queries", old.q_post_BHTD, new.q_post_BHTD / factor.repeat_interleave(group, 0).unsqueeze(1)),
            ("keys", old.k_post_BNTD, new.k_post_BNTD * factor.unsqueeze(1)),
            ("values", old.v_BNTD, new.v_BNTD),
        )
        for name, expected, found in checks:
            if not (found - expected).double().norm() <= tolerance * expected.double().norm():
                return f"the {name} of layer {index} are not what they should be"
    return None
