"""The adapter: every contact with a transformers model (loading, geometry, taps, projection weights)."""

from kvcal.models.geometry import attention_layers, geometry_of
from kvcal.models.load import LoadedModel, embedded_models, load, weight_bytes
from kvcal.models.projections import KVProjection, kv_projections
from kvcal.models.taps import Captured, check_taps, tap

__all__ = [
    "Captured",
    "KVProjection",
    "LoadedModel",
    "attention_layers",
    "check_taps",
    "embedded_models",
    "geometry_of",
    "kv_projections",
    "load",
    "tap",
    "weight_bytes",
]
