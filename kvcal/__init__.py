"""kvcal compiles one KV-cache quantization plan for a model and runs it.

from kvcal import PlanCache, load_plan
"""

from kvcal.plan import Plan, load_plan, save_plan
from kvcal.runtime.cache import PlanCache

__all__ = ["Plan", "PlanCache", "load_plan", "save_plan"]
