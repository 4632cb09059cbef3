"""What of one layer of a static cache is in a stored form (kvcal.store.stored_form), or predicted from.

A step runs between ``append`` and ``decode``; a prompt goes through the same pages of 16 bits, which the layer's stores
pack and unpack as if they were stored. Keys come first everywhere, as values may be predicted from them, and layers in
their order: what a layer is predicted from was reconstructed earlier in the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.form_operands import HeldPages
from kvcal.kernels.reference import num_packed
from kvcal.kernels.variants import stored_form
from kvcal.pages.codec import PageCodec
from kvcal.pages.layout import PAGE_TOKENS
from kvcal.plan.format import SIDES, Format, Side
from kvcal.plan.layer import LayerPlan
from kvcal.store.fixed import fixed
from kvcal.store.prediction import predictor_of
from kvcal.store.static_state import StaticState
from kvcal.store.static_store import HeadStore
from kvcal.store.stored_form import Predicted, StoredForm


class LayerForms:
    """``stores``: the layer's, allocated; ``tensors``: the records, which count as the plan's bytes."""

    def __init__(self, plan: LayerPlan, state: StaticState, stores: Sequence[HeadStore]) -> None:
        self.forms: dict[Side, list[StoredForm]] = {"k": [], "v": []}
        for side in SIDES:
            is_read = state.forms.kept(plan.geometry.index, side) is not None
            for fmt, heads in plan.runs(side):
                if is_read or stored_form(plan, side, fmt) is not None:
                    inside = [store for store in stores if heads.start <= store.heads.start < heads.stop]
                    self.forms[side].append(_form(plan, state, side, fmt, heads, inside))

    @property
    def tensors(self) -> list[Tensor]:
        return [form.records[0] for side in SIDES for form in self.forms[side] if form.tokens]

    @torch.compiler.disable
    def step(self) -> None:
        """Behind ``append``, before ``decode``. Not for torch.compile: products and sums that it would fuse round
        otherwise, and records must be the same bytes everywhere."""
        for side in SIDES:
            for form in self.forms[side]:
                form.step()

    def extend(self, rows: slice, num_tokens: int, total: int) -> None:
        """``rows`` had ``num_tokens`` and have ``total`` tokens: pages that their stores have packed since."""
        for side in SIDES:
            for form in self.forms[side]:
                new = range(num_packed(form.format, num_tokens), num_packed(form.format, total))
                form.pack(rows, new)
                if form.kept is not None:
                    form.load(rows, new)

    def load(self, side: Side, rows: slice, num_tokens: int) -> None:
        """All pages of ``rows``, which hold ``num_tokens`` each; the one that is due, too, which their stores have
        packed."""
        for form in self.forms[side]:
            pages = form.format.num_pages(num_tokens)
            form.pack(rows, range(num_packed(form.format, num_tokens), pages))
            form.load(rows, range(pages))

    def select(self, indices: Tensor) -> None:
        """As ``HeadStore.select``."""
        for tensor in self.tensors:
            tensor.copy_(tensor.index_select(0, indices))


def form_reasons(plan: LayerPlan, read_sides: Sequence[Side]) -> list[str]:
    """Why steps of a layer are slower than the kernels': what is reconstructed in each; nothing for packed layers.
    ``read_sides``: those that something is predicted from."""
    found = []
    for side in SIDES:
        forms = [stored_form(plan, side, fmt) for fmt in plan.formats(side)]
        found += [f"{side} pages {form}" for form in dict.fromkeys(forms) if form is not None]
        if side in read_sides and None in forms:
            found.append(f"{side} pages are predicted from")
    return found


def _form(
    plan: LayerPlan, state: StaticState, side: Side, fmt: Format, heads: slice, stores: Sequence[HeadStore]
) -> StoredForm:
    """A run of heads in one format; ``stores``: its head ranges."""
    dtype, device = state.shared.plan.cache_dtype, state.lengths.device
    is_form = stored_form(plan, side, fmt) is not None
    codec = PageCodec.of_layer(plan, side, fmt, heads, dtype, state.shared.tensors_on(device))
    records, tokens = [store.pages[side] for store in stores], []
    if is_form:
        tokens = [pages.view(CACHE_DTYPES[dtype]).unflatten(-1, (PAGE_TOKENS, -1)) for pages in records]
        shape = (state.batch, records[0].shape[1], codec.records_per_page, codec.record_bytes(fmt.num_bits))
        records = [fixed(torch.zeros(shape, dtype=torch.uint8, device=device))]
    return StoredForm(
        codec,
        tuple(records),
        tuple(tokens),
        state.forms.kept(plan.geometry.index, side),
        _predicted(plan, side, state),
        HeldPages(state.lengths, stores[0].page_at[side]),
        state.forms.turns(plan.geometry.index),
        state.error,
        stores[0].nothing,
    )


def _predicted(plan: LayerPlan, side: Side, state: StaticState) -> Predicted | None:
    predictor, index = plan.predictor(side), plan.geometry.index
    if predictor is None:
        return None
    read = [(predictor.source, side)] + ([(index, "k")] if side == "v" else [])
    inputs = [state.forms.kept(*place) for place in read]
    found = predictor_of(plan, side, state.shared, state.lengths.device)
    return Predicted(found, tuple(kept for kept in inputs if kept is not None))
