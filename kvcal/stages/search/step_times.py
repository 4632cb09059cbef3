"""The artifact of measured step times: what attention over one layer takes on one GPU, by formats, heads and length.

``kvcal bench kernels`` writes it, and a search for decoding reads it. A layer is a LayerPlan as layer 1 of a model of
layers like it; error feedback, which changes codes and no time, is left out of it, and λ, which is folded into the
query. Times of 16 bits are those of the fastest attention found, of any library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal import artifact
from kvcal.plan.layer import LayerPlan, Predictor
from kvcal.plan.page_format import RAW
from kvcal.plan.plan import Workload
from kvcal.records import record_of
from kvcal.strict import STRICT, dump

KIND = "step-times"
SCHEMA = 1
FILE = "step-times.safetensors"

Microseconds = Annotated[float, Field(gt=0, le=1e12)]


def placed(layer: LayerPlan, index: int = 1) -> LayerPlan:
    """The layer as number ``index`` of a model of layers like it: each predicted from the one before, the first not."""

    def moved(predictor: Predictor | None) -> Predictor | None:
        return None if predictor is None or index == 0 else replace(predictor, source=index - 1)

    return replace(
        layer,
        geometry=replace(layer.attention, index=index),
        k_predictor=moved(layer.k_predictor),
        v_predictor=moved(layer.v_predictor),
    )


def timed_as(layer: LayerPlan) -> LayerPlan:
    """The layer that stands in a table for all that take its time."""
    return replace(placed(layer), k_rescale=False, k_feedback=False, v_feedback=False)


def unquantized(layer: LayerPlan) -> LayerPlan:
    """A layer of the same heads at 16 bits."""
    return LayerPlan(layer.geometry, (RAW,), (RAW,))


@dataclass(frozen=True, config=STRICT)
class StepTime:
    """Microseconds of attention over one layer at a workload."""

    workload: Workload
    layer: LayerPlan
    us: Microseconds


@dataclass(frozen=True, config=STRICT)
class StepTimes:
    """The table of one GPU. ``device``: its name."""

    device: str
    times: tuple[StepTime, ...]

    def __post_init__(self) -> None:
        seen = set()
        for time in self.times:
            key = time.workload, time.layer
            if key in seen:
                raise ValueError(f"times holds a layer twice at batch {time.workload.batch} x {time.workload.context}")
            if not time.layer.is_paged or timed_as(time.layer) != time.layer:
                raise ValueError(f"times holds layer {time.layer.geometry.index}, expected a paged layer, placed as 1")
            seen.add(key)
        for workload, layer in seen:
            if (workload, unquantized(layer)) not in seen:
                raise ValueError(f"times holds no 16 bits of its heads at batch {workload.batch} x {workload.context}")

    def at(self, workload: Workload, layer: LayerPlan) -> dict[LayerPlan, float]:
        """Microseconds of all layers with this one's heads, at the workload nearest in tokens; empty without any."""
        geometry = placed(layer).geometry
        mine = [time for time in self.times if time.layer.geometry == geometry]
        wanted = workload.batch * workload.context

        def distance(time: StepTime) -> tuple[float, int, int]:
            tokens = time.workload.batch * time.workload.context
            return max(tokens / wanted, wanted / tokens), time.workload.batch, time.workload.context

        if not mine:
            return {}
        nearest = min(mine, key=distance).workload
        return {time.layer: time.us for time in mine if time.workload == nearest}


def save(times: StepTimes, inputs: dict[str, Any], path: Path) -> None:
    """ArtifactError when the file cannot be written."""
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, dump(times), {}))


def load(path: str | Path) -> StepTimes:
    """ArtifactError when missing, corrupt or foreign."""
    path = Path(path)
    stored = artifact.read(path, KIND, SCHEMA)
    return record_of(StepTimes, stored.body, path, hint="delete the file and run `kvcal bench kernels` again")


def merged(device: str, times: Sequence[StepTime]) -> StepTimes:
    """A table of these times; of equal layers the fastest counts."""
    fastest: dict[tuple[Workload, LayerPlan], float] = {}
    for time in times:
        key = time.workload, time.layer
        fastest[key] = min(time.us, fastest.get(key, time.us))
    return StepTimes(device, tuple(StepTime(workload, layer, us) for (workload, layer), us in fastest.items()))
