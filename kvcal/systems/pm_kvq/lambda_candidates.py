"""Candidates for λ of one layer's keys, as in PM-KVQ: magnitudes of keys at far positions, and keys as pages
hold them. The reparam stage chooses among the candidates.

    λ_c = max|K_post_c|^α,   pages hold K_post / λ,   queries are multiplied by λ                   (Eq. 9-11)

Within a rotary pair both channels take the larger maximum: the rotation moves one's energy to the other as
positions go on, so that their long-run maxima are equal, and λ commutes with it. λ is divided by its
geometric mean over the head. A common factor changes no code (scales and zeros are proportional to it), but
without the division K / λ would grow or shrink by orders of magnitude with α, and leave the range of fp16
scales.

Magnitudes are taken at positions that are multiplied by a scale (Eq. 12): a short sequence shows what RoPE
makes of keys far after it. Sinks are left out: a cache never quantizes them, and their keys can be unlike all
others. Keys per channel are left alone: each channel has a scale of its own, which λ would only round
differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import torch
from torch import Tensor

from kvcal.errors import NonFiniteActivations
from kvcal.geometry import CACHE_DTYPES, CacheDtype
from kvcal.models.load import LoadedModel
from kvcal.models.taps import Captured, Segment, tap
from kvcal.pages.codec import PageCodec
from kvcal.pages.layout_protocol import PAGE_TOKENS, RAW_BITS
from kvcal.plan.layer import LayerPlan
from kvcal.stages.calibration import calibration_inputs

# A channel quieter than this share of its head's loudest counts as that loud: K / λ must not blow up, in
# later text, what is rare in calibration, and a channel that was always 0 still needs a λ.
QUIETEST = 2.0**-10


def key_magnitudes(
    loaded: LoadedModel, tokens_T: Tensor, position_scale: float, layers: Mapping[int, LayerPlan]
) -> dict[int, Tensor]:
    """Of one sequence, {layer: max|K_post| over the tokens after its sinks, fp64 [N, D] on the CPU, 0 without
    any}, for each of ``layers`` by index. NonFiniteActivations: NaN or infinity, naming the layer."""
    found: dict[int, Tensor] = {}

    def measure(captured: Captured) -> None:
        if captured.layer not in layers:
            return
        k_post_NTD = captured.k_post_BNTD[0, :, layers[captured.layer].format("k").num_sink_tokens :]
        if not bool(torch.isfinite(k_post_NTD).all()):
            raise NonFiniteActivations(f"keys of layer {captured.layer} hold NaN or infinity")
        largest_ND = k_post_NTD.abs().amax(1) if k_post_NTD.shape[1] else k_post_NTD.new_zeros(k_post_NTD.shape[::2])
        found[captured.layer] = largest_ND.to("cpu", torch.float64)

    with torch.no_grad(), tap(loaded.model, measure, loaded.geometry):
        loaded.model(**calibration_inputs(loaded, tokens_T[None], position_scale))
    return found


def takes_rescale(layer: LayerPlan) -> bool:
    """Whether λ can help a layer's keys: quantized per token, without other transforms, no latents."""
    if not layer.takes_transforms or layer.k_pages == "pre" or layer.k_rescale or layer.k_offset:
        return False
    fmt = layer.format("k")
    return fmt.num_bits != RAW_BITS and fmt.axis == "token"


def lambda_of(magnitude_ND: Tensor, pairs: Tensor, alpha: float) -> Tensor:
    """λ fp32 [N, D], positive, with geometric mean 1 in each head; 1 everywhere at α = 0. ``magnitude_ND``:
    fp64 max|K_post|; ``pairs`` int64 [P, 2]."""
    a, b = pairs.unbind(1)
    largest = magnitude_ND.clone()
    largest[:, a] = largest[:, b] = torch.maximum(magnitude_ND[:, a], magnitude_ND[:, b])
    loudest = largest.amax(1, keepdim=True)
    largest = torch.where(loudest > 0, torch.maximum(largest, loudest * QUIETEST), 1.0)
    logarithm = largest.log()
    return (alpha * (logarithm - logarithm.mean(1, keepdim=True))).exp().float()


def page_segments(layer: LayerPlan, num_tokens: int) -> tuple[Segment, ...]:
    """The queries of a sequence, cut where pages are written. A token reads, as in decoding, the pages that
    the tokens before it filled; sinks and recent tokens, its own included, it reads exactly."""
    fmt, heads, segments = layer.format("k"), layer.attention.num_kv_heads, []
    tokens = torch.arange(num_tokens)
    for pages, queries in groupby(range(num_tokens), key=fmt.pages_read):
        start, *rest = queries
        is_stored = (tokens >= fmt.num_sink_tokens) & (tokens < PAGE_TOKENS * pages)
        segments.append(Segment(start, start + len(rest) + 1, is_stored.expand(heads, -1)))
    return tuple(segments)


def read_back(layer: LayerPlan, cache_dtype: CacheDtype, tensors: Mapping[str, Tensor], k_post_BNTD: Tensor) -> Tensor:
    """Keys [1, N, T, D] as a cache would read them back from the pages of T - 1 tokens (at their final bits),
    in k_post's dtype; what is in no page is as it was. Raises NonFiniteActivations: NaN or infinity in a
    page."""
    found, fmt = k_post_BNTD.clone(), layer.format("k")
    num_pages = fmt.pages_read(k_post_BNTD.shape[2] - 1)
    if fmt.num_bits != RAW_BITS and num_pages:
        codec = PageCodec.of_layer(layer, "k", cache_dtype, tensors)
        sinks, stored = fmt.num_sink_tokens, PAGE_TOKENS * num_pages
        cached = k_post_BNTD[0, :, :stored].to(CACHE_DTYPES[cache_dtype])  # what the cache is given
        found[0, :, sinks:stored] = codec.read_back(fmt.packed(cached))[:, sinks:].to(found.dtype)
    return found
