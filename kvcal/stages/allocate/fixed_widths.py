"""Other choices next to the integer program's: the plan that ships is the one that loses less on texts kept apart.

The program adds up costs of layers that were quantized alone, on few texts. How they fall with bits is measured
by side. That is right on some models; on others the law of squared errors is nearer. On some models neither pays:
keys of 3 and values of 2 bits in all layers lose less at the same bytes. So the program's plan is measured next
to the one that the law leads to, and next to plans of fixed widths: one side has one width in all layers, and the
other this width and the next one, keys never fewer bits than values (K3V2, K4V2, K3V3, K4V3 and what lies
between). Which layers get the wider one, so that the bytes are the same, the program says of these widths alone.

Whole plans are fed through the packed cache on texts of the pool *select*: half of the recipe's own sources, and
half documents that look up (kvcal.data.lookups), of which the answers count. A text's figure is the logarithm of
the ratio of the plans' KL to 16 bits, so that texts of large KL do not decide alone. The mean is taken over both
halves alike, and its standard error over texts. The better one of the program's plans is kept. It ships where it
has less KL than every plan of fixed widths by more than the error; else the best of these does. Figures are in
the plan's provenance (``kvcal inspect --why``). Left out: widths that skip one, and other orders of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from kvcal.data.pools import calibration, data_inputs, with_calibration
from kvcal.data.sequences import DataSpec, TokenDataset
from kvcal.data.sources import LOOKUPS
from kvcal.errors import ArtifactError
from kvcal.folder import Job, compute_dtype, job_sequences, profile_data, profile_spec, tokenizer_of
from kvcal.models.files import embedded_models
from kvcal.plan.page_format import RAW, SIDES, Side
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.recipe import AllocateSpec
from kvcal.stages.allocate.record import Allocation
from kvcal.stages.allocate.stage import Problem, allocate, solved
from kvcal.stages.divergence import Text, kl_texts
from kvcal.stages.profile.record import Profile
from kvcal.stages.search import mean_and_error, measured
from kvcal.strict import STRICT, Amount, Positive, dump, parse
from kvcal.systems.basis import fit as basis_stage
from kvcal.systems.basis.fit import BasisRecord

PROGRAM, BY_LAW = "by layer", "by layer, costs as squared errors"
KEY = "fixed_widths"  # of a plan's provenance
LEAST_KL = 1e-12  # of a text: below, the ratio of two is rounding
MOST_AHEAD = 2  # bits of keys above those of values


@pydantic_dataclass(frozen=True, config=STRICT)
class MeasuredWidths:
    """One plan. ``kl`` and ``look_ups``: its KL to the 16-bit cache in nats per loss token, mean over ordinary
    texts and over those that look up (None without any). ``ratio``: of the first plan's KL to this one's, the
    geometric mean over texts, both kinds alike; ``log_error``: the standard error of its logarithm. None for the
    first, the better one of the program's own."""

    name: str
    bits: Amount
    kl: Amount
    look_ups: Amount | None
    ratio: Amount | None = None
    log_error: Amount | None = None


@pydantic_dataclass(frozen=True, config=STRICT)
class WidthsReport:
    """``shipped``: the name of the plan that ships; ``num_texts`` of ``num_tokens`` at most."""

    shipped: str
    num_texts: Positive
    num_tokens: Positive
    plans: tuple[MeasuredWidths, ...]

    @property
    def sentence(self) -> str:
        """The choice, and by how much, for people."""
        others = [one for one in self.plans if one.ratio is not None]
        said = "; ".join(f"{one.ratio:.2f} of that of {one.name}" for one in others)
        return f"{self.shipped} ships; KL {self.plans[0].name} is {said}, on {self.num_texts} texts"


@dataclass(frozen=True, eq=False)
class Contest:
    """Texts that the program's plan is measured on. ``data``: ordinary texts, then those that look up, if any."""

    job: Job
    basis: BasisRecord
    data: tuple[TokenDataset, ...]

    @classmethod
    def of(cls, job: Job) -> Contest:
        """As many texts of *select* as the profile measures KL on, and as many that look up."""
        spec = profile_data(job.recipe, job.loaded)
        is_embedded = job.loaded.source in embedded_models()
        spec = spec.for_model(is_embedded, bool(tokenizer_of(job.loaded).chat_template))
        ordinary = tuple(source for source in _names(spec) if source != LOOKUPS)
        specs = [replace(spec, source=ordinary)] if ordinary else []
        if not is_embedded:
            specs.append(replace(spec, source=LOOKUPS, min_len=spec.seq_len))
        data = tuple(job_sequences(job, one, "select") for one in specs)
        return cls(job, basis_stage.load(job.folder.basis), data)

    @property
    def inputs(self) -> dict[str, Any]:
        """Of the allocation, whose choice depends on them."""
        found = compute_dtype(self.job.loaded)
        for number, data in enumerate(self.data):
            found |= data_inputs(data, f"select_{number}")
        return found

    def decided(
        self, program: Allocation, profile: Profile, spec: AllocateSpec, reserved: int, reporter: Reporter
    ) -> Allocation:
        """The allocation that ships, with the figures in its provenance; the program's where no other choice takes
        as many bytes."""
        found = {PROGRAM: program} | other_allocations(program, profile, spec, reserved)
        if len(found) == 1:
            return program
        plans = {name: self.basis.planned(allocation) for name, allocation in found.items()}
        limits = profile_spec(self.job.recipe.profile, self.job.loaded)
        cache = self.job.recipe.cache
        texts = [kl_texts(data, limits.kl_samples, limits.kl_tokens, cache) for data in self.data]
        report = compared(self._measured(plans, texts, reporter), plans, texts)
        reporter.say(f"allocate: {report.sentence}")
        provenance = program.provenance | {KEY: dump(report)}
        return replace(
            found[report.shipped], provenance=with_calibration(provenance, calibration("allocate", self.inputs))
        )

    def _measured(
        self, plans: Mapping[str, Plan], texts: Sequence[Sequence[Text]], reporter: Reporter
    ) -> list[dict[str, Tensor]]:
        return [measured(self.job.loaded, plans, part, reporter, "allocate: fixed widths") for part in texts]


def _names(spec: DataSpec) -> tuple[str, ...]:
    return (spec.source,) if isinstance(spec.source, str) else spec.source


def other_allocations(
    program: Allocation, profile: Profile, spec: AllocateSpec, reserved: int
) -> dict[str, Allocation]:
    """The program's by the law of squared errors, where that is another choice, and those of fixed widths."""
    by_law = allocate(profile.by_law, spec, program.provenance, reserved)
    found = {} if by_law.layers == program.layers else {BY_LAW: by_law}
    fixed = fixed_allocations(program, profile, spec, reserved)
    return found | {name: one for name, one in fixed.items() if one.layers != by_law.layers}


def fixed_allocations(
    program: Allocation, profile: Profile, spec: AllocateSpec, reserved: int
) -> dict[str, Allocation]:
    """Those of fixed widths that the program's bytes lie between, by name; none that is the program's own."""
    problem, found = Problem(profile, spec), dict[str, Allocation]()
    for allowed in width_pairs(sorted(set(profile.setup.spec.kl_bits))):
        fixed = problem.only(lambda side, fmt, widths=allowed: fmt.num_bits in widths[side])  # type: ignore[misc]
        if not fixed.nbytes(fixed.smallest) <= program.split.paged < fixed.nbytes(fixed.largest):
            continue
        allocation = solved(fixed, profile, spec, program.provenance, reserved)
        known = [program.layers, *(one.layers for one in found.values())]
        if allocation.layers not in known:
            found[_name(allowed)] = allocation
    return found


Widths = Mapping[Side, tuple[int, ...]]


def width_pairs(bits: Sequence[int]) -> list[Widths]:
    """One width of one side with two neighbours of the other, keys from values' on up to ``MOST_AHEAD`` bits
    more."""
    quantized = [width for width in bits if width < RAW.num_bits]
    pairs: list[Widths] = []
    for few, more in pairwise(quantized):
        pairs += [{"k": (few, more), "v": (width,)} for width in quantized]
        pairs += [{"k": (width,), "v": (few, more)} for width in quantized]
    return [one for one in pairs if max(one["v"]) <= min(one["k"]) and max(one["k"]) - min(one["v"]) <= MOST_AHEAD]


def _name(widths: Widths) -> str:
    """Such as "keys 3, values 2 or 3"."""
    keys, values = (" or ".join(map(str, widths[side])) for side in SIDES)
    return f"keys {keys}, values {values}"


def compared(
    kls: Sequence[Mapping[str, Tensor]], plans: Mapping[str, Plan], texts: Sequence[Sequence[Text]]
) -> WidthsReport:
    """``kls``: of ordinary texts, then of those that look up, the KL [N] of every plan by name."""
    logs = [{name: kl_N.clamp(min=LEAST_KL).log() for name, kl_N in of.items()} for of in kls]
    by_layer = [name for name in (PROGRAM, BY_LAW) if name in plans]
    first = min(by_layer, key=lambda name: sum(float(of[name].mean()) for of in logs))
    rows, losing = [], {}
    for name in (first, *(name for name in plans if name != first)):
        means = [float(of[name].mean()) for of in kls]
        row = MeasuredWidths(name, plans[name].bits_per_value(), means[0], means[1] if len(means) > 1 else None)
        if name != first:
            pairs = [mean_and_error(of[first] - of[name]) for of in logs]
            mean = sum(log for log, _ in pairs) / len(pairs)
            error = sum(error**2 for _, error in pairs) ** 0.5 / len(pairs)
            row = replace(row, ratio=float(torch.tensor(mean, dtype=torch.float64).exp()), log_error=error)
            if mean + error >= 0 and name not in by_layer:
                losing[name] = mean
        rows.append(row)
    shipped = max(losing, key=lambda name: losing[name]) if losing else first
    longest = max(len(text.tokens_T) for part in texts for text in part)
    return WidthsReport(shipped, sum(map(len, texts)), longest, tuple(rows))


def report_of(plan: Plan) -> WidthsReport | None:
    """Figures of a plan's choice, from its provenance. ArtifactError where that is no such report."""
    if KEY not in plan.provenance:
        return None
    return parse(WidthsReport, plan.provenance[KEY], f"the plan's provenance.{KEY}", ArtifactError)
