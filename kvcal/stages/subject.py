"""The subject of a calibration of a model's forwards: the part that its record shares with those of other stages."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from kvcal.geometry import Geometry, ModelIdentity
from kvcal.strict import STRICT, Amount, Count


@dataclass(frozen=True, config=STRICT)
class CalibrationSubject:
    """The model and the data; a stage adds its settings. ``position_scale``: the one used, which is the settings'
    within the model's context; ``num_tokens``: of the data."""

    identity: ModelIdentity
    geometry: Geometry
    position_scale: Amount
    data_fingerprint: str
    data_description: str
    num_tokens: Count
