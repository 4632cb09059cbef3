"""Random contents in all of a static cache, in place: pages, stored forms, sinks, buffers; and its length set by hand.

Pages of 16 bits that a stored form is reconstructed into stay as they are: every step writes them.
"""

from __future__ import annotations

import torch

from kvcal.bench.expected_pages import forms_of
from kvcal.bench.random_pages import SPREAD, fill_lattice, fill_pages
from kvcal.cache.plan_cache import PlanCache
from kvcal.cache.static_layer import StaticLayer
from kvcal.pages.lattice import LatticeLayout
from kvcal.plan.format import SIDES
from kvcal.store.static_store import HeadStore
from kvcal.store.stored_form import StoredForm


def fill_cache(cache: PlanCache, num_tokens: int, generator: torch.Generator | None = None) -> None:
    """Random tokens and pages in all of an allocated static cache, every sequence with ``num_tokens``."""
    for layer in cache.static_layers:
        _fill_layer(layer, generator)
    hold(cache, num_tokens)


def hold(cache: PlanCache, num_tokens: int) -> None:
    """Every sequence of a static cache holds so many tokens before the next step."""
    assert cache.static is not None
    cache.static.set_columns(num_tokens)


def _fill_layer(layer: StaticLayer, generator: torch.Generator | None) -> None:
    for store in layer.stores:
        if isinstance(store, HeadStore):
            _fill_store(store, generator)
        else:  # a sliding window holds nothing but tokens
            for tensor in store.tensors:
                tensor.normal_(std=SPREAD, generator=generator)
    for form in forms_of(layer):
        if form.tokens:  # the others' records are the stores'
            _fill_form(form, generator)


def _fill_store(store: HeadStore, generator: torch.Generator | None) -> None:
    for side in SIDES:
        store.sinks[side].normal_(std=SPREAD, generator=generator)
        store.buffer[side].normal_(std=SPREAD, generator=generator)
        variant = store.variant
        if side not in store.reconstructed:
            fill_pages(store.pages[side], side, variant.format(side), variant.head_dim, variant.cache_dtype, generator)
    store.query_sum.fill_(1.0)


def _fill_form(form: StoredForm, generator: torch.Generator | None) -> None:
    codec, fmt = form.codec, form.format
    layout = fmt.layout(codec.side, codec.num_heads, codec.head_dim, codec.cache_dtype, fmt.num_bits)
    if isinstance(layout, LatticeLayout):
        fill_lattice(form.records[0], layout, generator)
    else:
        fill_pages(form.records[0], codec.side, fmt, codec.head_dim, codec.cache_dtype, generator)
