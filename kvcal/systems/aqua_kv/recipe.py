"""[predictors]."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal.strict import STRICT, Size, knob
from kvcal.systems import Section
from kvcal.systems.aqua_kv.predictor import Kind, require_sizes


@dataclass(frozen=True, config=STRICT)
class PredictorSpec(Section):
    """[predictors], AQUA-KV: of which kind, and when one is left out."""

    excludes = {"progressive": "predictions would change with pages, too"}
    in_engines = False
    kind: Kind = knob("linear", "How weights are stored.")
    rank: Size | None = knob(None, "Rank of low_rank, and of it alone.")
    group_size: Size | None = knob(None, "Weights that share a scale in int4, and in it alone.")
    min_explained: Annotated[float, Field(le=1)] = knob(
        0.1, "Drop predictors that explain no more than this share of the variance."
    )
    drop: bool = knob(True, "Drop predictors that save fewer bytes than they take.")

    def __post_init__(self) -> None:
        require_sizes(self.kind, self.rank, self.group_size)


@dataclass(frozen=True, config=STRICT)
class Recipe:
    """The section of AQUA-KV."""

    predictors: PredictorSpec | None = None
