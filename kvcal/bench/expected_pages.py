"""The pages that a stored form is to be reconstructed into, by the page codec alone: what a step's result is held to.

From records and the plan's tensors, those of the layers that it is predicted from included: nothing of what a step
leaves in its workspace is read, and nothing of what fills it is run.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvcal.cache.static_layer import StaticLayer
from kvcal.geometry import CACHE_DTYPES
from kvcal.plan.format import SIDES, Side
from kvcal.store.prediction import predicted, predictor_of
from kvcal.store.static_store import HeadStore
from kvcal.store.stored_form import StoredForm


class ExpectedPages:
    """Of the first sequence, as stored when they are asked for. ``layers``: by index, all that are predicted from."""

    def __init__(self, layers: Mapping[int, StaticLayer]) -> None:
        self.layers = layers

    def of(self, layer: StaticLayer, store: HeadStore, side: Side) -> Tensor:
        """uint8 [1, pages, n, record]: the pages of 16 bits of a head range."""
        of_side = [form for form in forms_of(layer) if form.codec.side == side]
        (form,) = [form for form in of_side if form.codec.heads.start <= store.heads.start < form.codec.heads.stop]
        tokens = form.codec.restore(self._stored(layer, form), self._ordinals(form))
        first, last = (head - form.codec.heads.start for head in (store.heads.start, store.heads.stop))
        rounded = tokens[:, first:last].to(CACHE_DTYPES[form.codec.cache_dtype]).contiguous()
        return rounded.flatten(-2).view(torch.uint8).unsqueeze(0)

    def _stored(self, layer: StaticLayer, form: StoredForm) -> Tensor:
        """[pages, n, 128, D], the prediction added: ``PageCodec.decode``."""
        codec, predictor = form.codec, layer.plan.predictor(form.codec.side)
        records = torch.cat([part[0] for part in form.records], dim=1)
        prediction = None
        if predictor is not None:
            inputs = [self._before_rope(self.layers[predictor.source], codec.side)]
            inputs += [self._before_rope(layer, "k")] if codec.side == "v" else []
            found = predictor_of(layer.plan, codec.side, layer.state.shared, records.device)
            prediction = predicted(found, inputs, codec.num_heads)
        return codec.decode(records, form.format.num_bits, prediction)

    def _before_rope(self, layer: StaticLayer, side: Side) -> Tensor:
        """fp32 [pages, N, 128, D]: as predictors read them, of a side that is one form."""
        (form,) = [form for form in forms_of(layer) if form.codec.side == side]
        return form.codec.before_rope(self._stored(layer, form), self._ordinals(form))

    @staticmethod
    def _ordinals(form: StoredForm) -> Tensor:
        return torch.arange(form.max_pages, device=form.held.lengths.device)


def forms_of(layer: StaticLayer) -> list[StoredForm]:
    """All stored forms of a layer, those that are merely predicted from included."""
    return [] if layer.forms is None else [form for side in SIDES for form in layer.forms.forms[side]]
