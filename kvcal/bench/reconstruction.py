"""The pages of a stored form as they should be after a step, by the page codec alone: what a step's result is held to.

Apart from whatever a step reconstructs them with: kernels, or torch in other parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcal.formats import Side
from kvcal.geometry import CACHE_DTYPES
from kvcal.runtime.prediction import predicted
from kvcal.runtime.static_layer import StaticLayer
from kvcal.runtime.static_store import HeadStore
from kvcal.runtime.stored_form import StoredForm


def reconstructed_pages(layer: StaticLayer, store: HeadStore, side: Side) -> Tensor:
    """uint8 [1, pages, n, record]: the first sequence's pages of 16 bits of a head range, from what is stored now."""
    assert layer.forms is not None
    (form,) = [form for form in layer.forms.forms[side] if _holds(form, store)]
    codec, records = form.codec, form.records[0][0]
    ordinals = torch.arange(len(records), device=records.device)
    prediction = None
    if form.predicted is not None:
        inputs = [kept[0] for kept in form.predicted.inputs]
        prediction = predicted(form.predicted.predictor, inputs, codec.num_heads)
    tokens = codec.restore(codec.decode(records, form.format.num_bits, prediction), ordinals)
    first, last = (edge - codec.heads.start for edge in (store.heads.start, store.heads.stop))
    rounded = tokens[:, first:last].to(CACHE_DTYPES[codec.cache_dtype])
    return rounded.flatten(-2).view(torch.uint8).unsqueeze(0)


def _holds(form: StoredForm, store: HeadStore) -> bool:
    return bool(form.tokens) and form.codec.heads.start <= store.heads.start < form.codec.heads.stop
