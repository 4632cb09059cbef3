"""The formats, limits, data and recipe of the tests that tune thresholds."""

from kvcal.data.reading import EvaluateSpec, TuneSpec
from kvcal.data.sequences import DataSpec
from kvcal.plan.page_format import Boost, Format, Tier

TIERS = (Tier(16, 0.1, 1.0), Tier(4, 0.2, 0.5))
K = Format(2, "channel", 32, boost=Boost("query_range", TIERS))
PAIR = (K, Format(2, "token", 32))
LIMITS = EvaluateSpec(max_size=22, max_hops=4, max_new_tokens=6)
DATA = DataSpec(num_samples=2, seq_len=300)
SPEC = TuneSpec(tasks=("chain",), num_problems=2, low=1e-4, fit_range=True)
RECIPE = """
[formats]
k = { num_bits = 2, axis = "channel", group_size = 32, boost = { score = "query_range", tiers = [
  { num_bits = 16, share = 0.1, above = 1.0 }, { num_bits = 4, share = 0.2, above = 0.5 } ] } }
v = { num_bits = 2, axis = "token", group_size = 32 }
[data]
num_samples = 2
seq_len = 300
[evaluate]
tasks = ["chain"]
num_problems = 2
max_size = 22
max_hops = 4
max_new_tokens = 6
data = { num_samples = 1, seq_len = 200, seed = 1 }
[tune]
tasks = ["chain"]
num_problems = 2
num_trials = 4
low = 0.0001
fit_range = true
"""
