"""Checkpoints of the long stages, interrupted when nothing but their record was left to do, and taken up again."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from predictor_runs import WORKLOAD, aqua_layers, loaded_llama, sequences

from kvcal.errors import ArtifactError
from kvcal.progress import Silent
from kvcal.recipe import CacheSpec, FeedbackSpec, PredictorSpec, ProfileSpec, ReparamSpec
from kvcal.stages import feedback
from kvcal.stages.predictors import record as predictor_record
from kvcal.stages.predictors import stage as fit_predictors
from kvcal.stages.profile import record as profile_record
from kvcal.stages.profile import stage as profile_stage
from kvcal.stages.reparam import record as reparam_record
from kvcal.stages.reparam import search as reparam_search
from kvcal.stages.reparam import stage as reparam_stage

DATA = sequences([200, 180, 190], 1)
SPEC = ProfileSpec(
    num_bits=(2, 4), group_sizes=(32,), kl_num_bits=(2, 4), kl_group_size=32, kl_samples=2, kl_tokens=170
)


def run_profile(target: Path) -> None:
    cache = CacheSpec(num_sink_tokens=2, k_recent_window=16, v_recent_window=8)
    profile_stage.run_profile(loaded_llama(), DATA, SPEC, cache, {}, target, Strict())
    profile_record.load(target)


def run_reparam(target: Path) -> None:
    layers = aqua_layers(loaded_llama())
    spec = ReparamSpec(position_scale=1.0, num_steps=2, offset=True)
    reparam_stage.run_reparam(loaded_llama(), layers, DATA, spec, {}, target, Strict())
    reparam_record.table_rows(reparam_record.load(target))


def run_predictors(target: Path) -> None:
    loaded = loaded_llama()
    spec = PredictorSpec(drop=False)
    fit_predictors.run_fit_predictors(loaded, aqua_layers(loaded), {}, DATA, spec, WORKLOAD, {}, target, Strict())
    predictor_record.table_rows(predictor_record.load(target))


def run_feedback(target: Path) -> None:
    layers = aqua_layers(loaded_llama())
    feedback.run_feedback(loaded_llama(), layers, {}, DATA, FeedbackSpec(), {}, target, Strict())
    feedback.table_rows(feedback.load(target))


class Strict(Silent):
    """A reporter that takes a discarded checkpoint as a refusal, which it is: the stage starts anew."""

    def say(self, message: str) -> None:
        if "is discarded" in message:
            raise ArtifactError(message)


STAGES: dict[str, tuple[Callable[[Path], None], ModuleType]] = {
    "profile": (run_profile, profile_stage),
    "reparam": (run_reparam, reparam_stage),
    "predictors": (run_predictors, fit_predictors),
    "feedback": (run_feedback, feedback),
}


def write_partial(name: str, path: Path) -> None:
    """The checkpoint of the stage when its record is about to be written."""
    run, module = STAGES[name]
    place = "save" if module else "checkpoint_hook"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "x.safetensors"
        interrupted = mock.patch.object(module or sys.modules[__name__], place, side_effect=KeyboardInterrupt)
        with interrupted, contextlib.suppress(KeyboardInterrupt):
            run(target)
        path.write_bytes((Path(folder) / "x.partial.safetensors").read_bytes())


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, called once: for what the same model and data always give."""
    found: list[Any] = []

    def known(*arguments: Any) -> Any:
        found or found.append(function(*arguments))
        return found[0]

    return known


# What the stages ask of the model alone before they open a checkpoint. No file can change it.
KNOWN = [
    (profile_stage, "check_taps", once(profile_stage.check_taps)),
    (reparam_stage, "check_taps", once(reparam_stage.check_taps)),
    (reparam_stage, "rotary_pairs", once(reparam_stage.rotary_pairs)),
    (reparam_stage, "fitting_scale", once(reparam_search.fitting_scale)),
    (fit_predictors, "rotary_maps", once(fit_predictors.rotary_maps)),
]


def use_partial(name: str, path: Path) -> None:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for known in KNOWN:
            stack.enter_context(mock.patch.object(*known))
        (Path(folder) / "x.partial.safetensors").write_bytes(path.read_bytes())
        STAGES[name][0](Path(folder) / "x.safetensors")
