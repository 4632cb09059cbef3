"""The formats, limits and data of the tests that tune thresholds."""

from __future__ import annotations

from kvcal.data.sequences import DataSpec
from kvcal.plan.page_format import Boost, Format, Tier
from kvcal.recipe import EvaluateSpec, TuneSpec

TIERS = (Tier(16, 0.1, 1.0), Tier(4, 0.2, 0.5))
K = Format(2, "channel", 32, boost=Boost("query_range", TIERS))
PAIR = (K, Format(2, "token", 32))
LIMITS = EvaluateSpec(max_size=22, max_hops=4, max_new_tokens=6)
DATA = DataSpec(num_samples=2, seq_len=300)
SPEC = TuneSpec(tasks=("chain",), num_problems=2, low=1e-4, fit_range=True)
