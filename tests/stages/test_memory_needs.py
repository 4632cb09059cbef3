"""From how many tokens on a cache pays: against every count before and after, one by one."""

from dataclasses import replace
from pathlib import Path

import pytest
from cache_cases import llama_plan

from kvcal.plan.page_format import RAW, Format
from kvcal.plan.plan import Plan, load_plan
from kvcal.stages.memory_needs import pays_from

COMMITTED = Path(__file__).parents[2] / "artifacts" / "plans" / "schema-3" / "plan.safetensors"
KEYS = Format(4, "channel", 32, num_sink_tokens=3, recent_window=200)
PLANS = {
    "committed": load_plan(COMMITTED),
    "windows": llama_plan(KEYS, Format(2, "token", 32), cache_dtype="bfloat16"),
    "keys alone": llama_plan(Format(2, "channel", 32), RAW, cache_dtype="bfloat16"),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_cache_pays_from_the_number_of_tokens_that_is_said(plan: Plan) -> None:
    found = pays_from(plan)
    assert found is not None
    less = [plan.nbytes((n,)) < plan.raw_nbytes((n,)) for n in range(1, found + 1000)]
    assert all(less[found - 1 :]) and not less[found - 2]


def test_a_cache_that_never_pays_or_shrinks_on_a_schedule_says_nothing() -> None:
    raw = llama_plan(RAW, RAW, cache_dtype="bfloat16")
    assert pays_from(raw) is None  # its ring comes on top
    shrinking = Format(2, "token", 32, param_dtype="float32", shrink_at=(100, 200, 300))
    layers = tuple(replace(layer, k=shrinking) for layer in raw.layers)
    assert pays_from(replace(raw, layers=layers)) is None
