"""The fits that the options of a search bring: λ, predictors, and the factors of error feedback.

Each is an artifact beside the search's own, named by what it was fitted for, and read again by the next search in the
folder. λ is calibrated for each style with λ, with its quantizer in every layer; not for a format of which no text
reads a page. Predictors and error feedback are fitted on whole layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from kvcal.artifact import sha256_json, tensors_sha256
from kvcal.data.pools import TokenDataset, data_inputs
from kvcal.folder import compute_dtype, current_or, model_inputs
from kvcal.models.load import LoadedModel
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, Format
from kvcal.plan.plan import Workload
from kvcal.progress import Reporter
from kvcal.recipe import Recipe, ReparamSpec
from kvcal.stages import feedback
from kvcal.stages.allocate.record import layers_in
from kvcal.stages.predictors import stage as fit_predictors
from kvcal.stages.reparam import record as reparam_record
from kvcal.stages.reparam import stage as reparam_stage
from kvcal.strict import dump, flat

Layers = tuple[LayerPlan, ...]


@dataclass(frozen=True, eq=False)
class SearchData:
    """Sequences by purpose; ``reparam``: for λ, where a style takes it; ``feedback``: for error feedback, None where
    the recipe does not ask for it."""

    fit: TokenDataset
    select: TokenDataset
    validate: TokenDataset
    reparam: TokenDataset
    feedback: TokenDataset | None = None


@dataclass(frozen=True, eq=False)
class Fits:
    """See the module's docstring. ``path``: the search's artifact."""

    loaded: LoadedModel
    recipe: Recipe
    data: SearchData
    workload: Workload
    path: Path
    reporter: Reporter

    def can_rescale(self, fmt: Format) -> bool:
        """Whether λ can be calibrated for keys in this format: some text for it is long enough to read a page."""
        return fmt.pages_read(max(len(tokens) for tokens in self.data.reparam.sequences) - 1) > 0

    def lambdas(self, formats: Iterable[Format]) -> dict[Format, dict[int, Tensor]]:
        """λ of every layer, for every format of keys with λ."""
        spec, data, found = self.recipe.reparam or ReparamSpec(), self.data.reparam, {}
        for fmt in sorted(formats, key=str):
            layers = layers_in(self.loaded.geometry, fmt, RAW)
            path = self.beside(f"lambda-{sha256_json(dump(fmt))[:12]}")
            inputs = self._inputs(data, spec, layers, {})
            fit = partial(reparam_stage.run_reparam, self.loaded, layers, data, spec)
            found[fmt] = dict(current_or("search, λ", path, reparam_record.load, inputs, fit, self.reporter).lambdas)
        return found

    def predictors(self, layers: Layers, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of predictors for all sides of ``layers``, whether they pay or not: the search decides that."""
        assert self.recipe.predictors is not None
        spec, data = replace(self.recipe.predictors, drop=False), self.data.fit
        inputs = self._inputs(data, spec, layers, tensors)
        path = self.beside(f"predictors-{inputs['fitted.layers.sha256'][:12]}")
        fit = partial(fit_predictors.run_fit_predictors, self.loaded, layers, tensors, data, spec, self.workload)
        return current_or("search, predictors", path, fit_predictors.load, inputs, fit, self.reporter).tensors()

    def feedback(self, layers: Layers, tensors: dict[str, Tensor]) -> feedback.FeedbackRecord:
        """Error feedback of all sides of ``layers`` that the recipe names."""
        spec, data = self.recipe.feedback, self.data.feedback
        assert spec is not None and data is not None
        inputs = self._inputs(data, spec, layers, tensors)
        path = self.beside(f"feedback-{inputs['fitted.layers.sha256'][:12]}")
        fit = partial(feedback.run_feedback, self.loaded, layers, tensors, data, spec)
        return current_or("search, feedback", path, feedback.load, inputs, fit, self.reporter)

    def beside(self, name: str) -> Path:
        """A file beside the search's artifact."""
        return self.path.with_name(f"{self.path.stem}.{name}{self.path.suffix}")

    def _inputs(self, data: TokenDataset, spec: Any, layers: Layers, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return {
            **model_inputs(self.loaded),
            **compute_dtype(self.loaded),
            **data_inputs(data),
            **flat("spec", dump(spec)),
            **flat("workload", dump(self.workload)),
            "fitted.layers.sha256": sha256_json([dump(layer) for layer in layers]),
            "fitted.tensors.sha256": tensors_sha256(dict(tensors)),
        }
