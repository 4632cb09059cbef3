"""Other choices next to the integer program's: the plan that ships is the one that loses less on texts kept apart.

The program adds up costs of layers that were quantized alone, on few texts. How they fall with bits is measured
by side. That is right on some models; on others the law of squared errors is nearer. On some models neither pays:
keys of 3 and values of 2 bits in all layers lose less at the same bytes. So the program's plan is measured next
to the one that the law leads to, and next to plans of fixed widths: one side has one width in all layers, and the
other this width and the next one, keys never fewer bits than values (K3V2, K4V2, K3V3, K4V3 and what lies
between). Which layers get the wider one, so that the bytes are the same, the program says of these widths alone.

Whole plans are fed through the packed cache on texts of the pool *select*: some of the recipe's own sources, and
documents that look up (kvcal.data.lookups), of which the answers count. They are ``LONGER`` than what costs are
measured on: errors of keys grow with the tokens that compete for a query, and a table takes thousands of tokens
to lose a row. A text's figure is the logarithm of the ratio of the plans' KL to 16 bits, so that texts of large
KL do not decide alone. The mean is taken over both kinds of text alike, and its standard error over texts.

The plan of the least mean ships. There is no margin: plans of one size differ by .2 to .5 in the logarithm, the
mean is known to .05 to .1, so that what is known beforehand of either kind of plan would move the bound by .02.
A margin of one error did harm: few and short texts have a large error, and fixed widths shipped that lose rows.
Figures are in the plan's provenance (``kvcal inspect --why``). Left out: widths that skip one, and other orders
of layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from kvcal.data.pools import calibration, data_inputs, with_calibration
from kvcal.data.sequences import DataSpec, TokenDataset
from kvcal.data.sources import LOOKUPS
from kvcal.errors import ArtifactError
from kvcal.folder import CPU_PLANS, Job, compute_dtype, is_cut, job_sequences, profile_data, tokenizer_of
from kvcal.models.files import embedded_models
from kvcal.models.load import LoadedModel
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.page_format import RAW, SIDES, Format, Side
from kvcal.plan.plan import Plan
from kvcal.progress import Reporter
from kvcal.recipe import AllocateSpec, Recipe
from kvcal.stages.allocate.record import BY_LAW, COMPETED, PROGRAM, Allocation
from kvcal.stages.allocate.stage import Problem, allocate, solved
from kvcal.stages.divergence import Text, paged_texts
from kvcal.stages.profile.record import Profile
from kvcal.stages.search import mean_and_error, measured
from kvcal.strict import STRICT, Amount, Positive, dump, parse
from kvcal.systems.basis import fit as basis_stage
from kvcal.systems.basis.fit import BasisRecord

LEAST_KL = 1e-12  # of a text: below, the ratio of two is rounding
MOST_AHEAD = 2  # bits of keys above those of values
LONGER = 4  # times as long as the recipe's texts, 4,096 tokens of the default


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
        said = "; ".join(f"{one.ratio:.2f} of that of '{one.name}'" for one in others)
        return f"'{self.shipped}' ships; KL of '{self.plans[0].name}' is {said}, on {self.num_texts} texts"


@dataclass(frozen=True, eq=False)
class Contest:
    """Texts that the program's plan is measured on. ``data``: ordinary texts, then those that look up, if any."""

    job: Job
    basis: BasisRecord
    data: tuple[TokenDataset, ...]

    @classmethod
    def of(cls, job: Job) -> Contest:
        """On texts of *select*."""
        data = tuple(job_sequences(job, spec, "select") for spec in contest_data(job.recipe, job.loaded))
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
        texts = self._texts()
        if not all(texts):
            reporter.say(f"allocate: {PROGRAM} ships unmeasured: no text of select reads a quantized page")
            return program
        plans = {name: self.basis.planned(allocation) for name, allocation in found.items()}
        report = compared(self._measured(plans, texts, reporter), texts, plans)
        reporter.say(f"allocate: {report.sentence}")
        provenance = program.provenance | {COMPETED: dump(report)}
        return replace(
            found[report.shipped], provenance=with_calibration(provenance, calibration("allocate", self.inputs))
        )

    def _texts(self) -> list[list[Text]]:
        """Of each kind, those that read from a page."""
        cache = replace(self.job.recipe.cache, stripe_tokens=PAGE_TOKENS)
        return [paged_texts(data, len(data.sequences), max(map(len, data.sequences)), cache) for data in self.data]

    def _measured(
        self, plans: Mapping[str, Plan], texts: list[list[Text]], reporter: Reporter
    ) -> list[dict[str, Tensor]]:
        """KL of every plan on every text, by kind. Both kinds are fed at once."""
        every = [text for part in texts for text in part]
        paged = {name: in_pages(plan) for name, plan in plans.items()}
        kls = measured(self.job.loaded, paged, every, reporter, "allocate: fixed widths")
        parts = {name: kl_N.split([len(part) for part in texts]) for name, kl_N in kls.items()}
        return [{name: of[number] for name, of in parts.items()} for number in range(len(texts))]


def in_pages(plan: Plan) -> Plan:
    """The plan with whole pages in place of stripes, behind windows that hold as many tokens on average: the widths
    are compared in an eighth of the forwards."""

    def paged(fmt: Format) -> Format:
        window = max(0, fmt.recent_window - (PAGE_TOKENS - fmt.stripe_tokens) // 2)
        return replace(fmt, stripe_tokens=PAGE_TOKENS, recent_window=window)

    layers = (
        replace(one, k=paged(one.format("k")), v=paged(one.format("v"))) if one.is_paged else one for one in plan.layers
    )
    return replace(plan, layers=tuple(layers))


def contest_data(recipe: Recipe, loaded: LoadedModel) -> list[DataSpec]:
    """Half as many ordinary texts as the recipe reads, ``LONGER`` times as long: as much text as a basis takes. What
    looks up is drawn: as many texts as the recipe reads. On a CPU both are fewer and shorter. Of an embedded model:
    texts as KL is measured on, and none that look up."""
    if loaded.source in embedded_models():
        spec = profile_data(recipe, loaded).for_model(is_embedded=True, has_chats=False)
        samples = max(min(spec.num_samples, recipe.profile.kl_samples), len(_sources(spec)))
        return [replace(spec, num_samples=samples)]
    spec = recipe.data.for_model(is_embedded=False, has_chats=bool(tokenizer_of(loaded).chat_template))
    samples, tokens = spec.num_samples, LONGER * spec.seq_len
    if is_cut(recipe, loaded):
        samples, tokens = min(samples, CPU_PLANS[0]), min(tokens, CPU_PLANS[1])
    tokens = min(tokens, loaded.max_context or tokens)
    ordinary = tuple(source for source in _sources(spec) if source != LOOKUPS)
    half, least = max(samples // 2, len(ordinary)), min(spec.min_len, tokens)
    of_text = replace(spec, source=ordinary, num_samples=half, seq_len=tokens, min_len=least) if ordinary else None
    look_ups = replace(spec, source=LOOKUPS, num_samples=samples, seq_len=tokens, min_len=tokens)
    return [one for one in (of_text, look_ups) if one is not None]


def _sources(spec: DataSpec) -> tuple[str, ...]:
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
    kls: Sequence[Mapping[str, Tensor]], texts: Sequence[Sequence[Text]], plans: Mapping[str, Plan]
) -> WidthsReport:
    """``kls``: of ordinary texts, then of those that look up, the KL [N] of every plan by name."""
    logs = [{name: kl_N.clamp(min=LEAST_KL).log() for name, kl_N in of.items()} for of in kls]
    means = {name: sum(float(of[name].mean()) for of in logs) / len(logs) for name in plans}
    by_layer = [name for name in (PROGRAM, BY_LAW) if name in plans]
    first, shipped = (min(names, key=lambda name: means[name]) for names in (by_layer, plans))
    rows = []
    for name in (first, *(name for name in plans if name != first)):
        kl = [float(of[name].mean()) for of in kls]
        row = MeasuredWidths(name, plans[name].bits_per_value(), kl[0], kl[1] if len(kl) > 1 else None)
        if name != first:
            errors = [mean_and_error(of[first] - of[name])[1] for of in logs]
            error = sum(error**2 for error in errors) ** 0.5 / len(errors)
            row = replace(row, ratio=math.exp(means[first] - means[name]), log_error=error)
        rows.append(row)
    longest = max(len(text.tokens_T) for part in texts for text in part)
    return WidthsReport(shipped, sum(map(len, texts)), longest, tuple(rows))


def report_of(plan: Plan) -> WidthsReport | None:
    """Figures of a plan's choice, from its provenance. ArtifactError where that is no such report."""
    if COMPETED not in plan.provenance:
        return None
    return parse(WidthsReport, plan.provenance[COMPETED], f"the plan's provenance.{COMPETED}", ArtifactError)
