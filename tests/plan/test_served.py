"""The table of what is served where, against what caches and engines do with a plan of each way."""

from dataclasses import replace

import pytest
from cache_cases import llama_plan, plan_of, tiny_llama
from form_cases import form_plan, with_tensors
from tiny_models import built

from kvcal import PlanCache
from kvcal.engines.support import require_served
from kvcal.errors import UnsupportedModel
from kvcal.models.supported_layers import geometry_of
from kvcal.pages.ways import PLACES
from kvcal.plan.page_format import RAW, Boost, Format, Tier
from kvcal.plan.plan import Plan
from kvcal.plan.served import HEADER, all_ways, table
from kvcal.systems.aqua_kv.transform import Predictor

K, V, ROTATED = Format(2, "channel", 32), Format(2), Format(2, quantizer="rotated")
CASES = {
    "pages of 16 bits": (RAW, RAW, {}),
    "uniform pages": (K, V, {}),
    "rotated pages": (ROTATED, ROTATED, {}),
    "pages of fp8": (Format(8, quantizer="fp8"), V, {}),
    "pages with tiers": (replace(K, boost=Boost("magnitude", (Tier(4, 0.25),))), V, {}),
    "pages with tiers that queries choose": (replace(K, boost=Boost("query_range", (Tier(4, 0.25),))), V, {}),
    "pages that shrink": (replace(V, num_bits=4, shrink_at=(256,), param_dtype="float32"), V, {}),
    "keys with λ": (V, V, {"k_rescale": True}),
    "keys with an offset": (V, V, {"k_offset": True}),
    "codes chosen with error feedback": (K, V, {"k_feedback": True, "v_feedback": True}),
    "keys or values in a basis": (ROTATED, ROTATED, {"k_basis": True, "v_basis": True}),
}
FORMS = {
    "pages on a lattice": "lattice d=2",
    "pages before RoPE": "before RoPE",
}
PREDICTED = "residuals of a prediction"
GEOMETRIES = {
    "latents (multi-head latent attention)": "deepseek_v3",
    "a sliding window": "mistral_all_sliding",
    "a state": "qwen3_next",
    "a state besides keys and values": "falcon_h1",
}


def plan_of_way(name: str) -> tuple[Plan, object]:
    """A plan whose layers are stored so, and its model's configuration."""
    if name in GEOMETRIES:
        model = built(GEOMETRIES[name])
        return plan_of(geometry_of(model), RAW if name.startswith("latents") else K, RAW), model.config
    if name == PREDICTED:
        first, second = (plan := llama_plan(V, V, num_layers=2)).layers
        layers = [first, replace(second, v_predictor=Predictor("linear", 0))]
        return with_tensors(plan, layers), tiny_llama(2, 2).config
    if name in FORMS:
        return form_plan(FORMS[name], "float32"), tiny_llama(2, 3).config
    k, v, changes = CASES[name]
    plan = llama_plan(RAW, RAW, num_layers=1)
    return with_tensors(plan, [replace(plan.layers[0], k=k, v=v, **changes)]), tiny_llama(2, 1).config


def refusal(name: str, place: str) -> str | None:
    """The refusal of a plan of this way by a cache, or an engine; None where it takes it."""
    plan, config = plan_of_way(name)
    try:
        if place in ("vllm", "sglang"):
            require_served(plan, is_cuda=False, engine=place)
        else:
            sizes = {"dynamic": {}, "static": {"max_tokens": 512}, "drafts": {"max_tokens": 512, "lookahead": 3}}
            PlanCache(plan, config, **sizes[place])
    except UnsupportedModel as refused:
        return str(refused)
    return None


def test_every_way_has_a_case() -> None:
    """So that one that a system adds is tested against what it says of itself."""
    assert {way.name for way in all_ways()} == CASES.keys() | FORMS.keys() | GEOMETRIES.keys() | {PREDICTED}


@pytest.mark.parametrize("way", all_ways(), ids=lambda way: way.name)
def test_the_table_says_what_caches_and_engines_do(way) -> None:
    for place in PLACES:
        said, reason = refusal(way.name, place), way.reason(place)
        if place == "drafts" and way.reason("static") is not None:
            continue  # refused before drafts are looked at
        if said is not None and "no layer has full attention" in said:
            continue  # of the model, whatever its layers store
        assert (said is None) == (reason is None), (place, reason, said)
        assert reason is None or f"{way.name}: {reason}" in str(said), (place, reason, said)


def test_rows_have_a_cell_for_every_place() -> None:
    rows = table()
    assert {len(row) for row in rows} == {len(HEADER)} and len(rows) == len(all_ways())
    assert any(cell != "yes" for row in rows for cell in row[2:])
