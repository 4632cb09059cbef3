"""A recipe: every knob of a compilation, with its default, its range and one line about it.

A recipe either fixes the formats ([formats]: the baselines) or lets a stage choose them ([allocate],
[importance], [search]); what follows works on what was chosen. Where a paper has a value, it is the default.
Unknown keys are errors. ``kvcal.recipe_files`` reads recipes and changes single knobs. [data] is
``kvcal.data.sequences.DataSpec``, [formats] ``kvcal.plan.layer.FormatsSpec``, [evaluate] and [tune] are in
``kvcal.data.reading``.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal.artifact import sha256_json
from kvcal.data.reading import EvaluateSpec, TuneSpec
from kvcal.data.sequences import DataSpec
from kvcal.errors import UsageError
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.pages.ways import Engine
from kvcal.plan.layer import FormatsSpec
from kvcal.plan.page_format import UNIFORM, Stripe
from kvcal.plan.plan import RAW, Format, Side
from kvcal.quantities import MAX_BATCH, parse_bytes
from kvcal.strict import STRICT, Bits, GroupSize, Size, SizeOrNone, TextTokens, Tokens, dump, knob
from kvcal.systems import Section, extended
from kvcal.systems.basis.recipe import BasisSpec, FeedbackSpec
from kvcal.systems.kvmix.recipe import ImportanceSpec
from kvcal.systems.pm_kvq.recipe import ProgressiveSpec, ReparamSpec

Objective = Literal["sensitivity", "kl", "combined", "importance"]
Axis = Literal["channel", "token"]
KlMeasured = Literal["all", "lowest", "sides"]
CandidateBits = Literal[1, 2, 3, 4, 8]
# Left out of JSON where there is one.
Ranks = Annotated[int, Field(ge=1, le=1024, exclude_if=lambda ranks: ranks == 1)]
DEFAULT_KL_BITS = (2, 3, 4)
BUDGET_KINDS = {
    "budget": "of the whole device, such as 24GB",
    "kv_budget": "of the cache alone, such as 2GiB",
    "bits": "per cached value, such as 2.5",
    "same_bytes_as": "a recipe, such as kivi-2",
}


@dataclass(frozen=True, config=STRICT)
class ProfileSpec:
    """[profile]: the measured candidates, just ``quantizers`` x ``num_bits`` x axis x ``group_sizes`` (V: per
    token only) and 16 bits.

    Of these, ``kl_num_bits`` x the largest group size x the first of ``k_axes`` have a KL to the 16-bit
    cache: one layer's K or V alone, through the packed cache. It is measured for all of their bits, or for
    the lowest: then the KL at other bits is that one times the ratio of the squared errors. With "sides" the
    keys, or the values, of all layers together are measured, too, at the two lowest bits: a layer's KL is its
    share of that, so that how it falls with bits is measured for each side.
    """

    num_bits: tuple[CandidateBits, ...] = knob((1, 2, 3, 4, 8), "Bits of the candidates.")
    k_axes: tuple[Axis, ...] = knob(("channel", "token"), "What a group of keys shares its scale along.")
    group_sizes: tuple[GroupSize, ...] = knob((32, 64, 128), "Values that share a scale.")
    kl_num_bits: tuple[CandidateBits, ...] | None = knob(
        None, "Bits whose KL is measured; default: 2, 3 and 4, or all where none of them is a candidate."
    )
    # Left out of JSON by default, as a format's quantizer.
    kl_measured: Annotated[KlMeasured | None, Field(exclude_if=lambda which: which is None)] = knob(
        None,
        "Of kl_num_bits: all, lowest, or sides: the lowest by layer, and the two lowest in all layers together; "
        "default: all for an embedded model, lowest for another.",
    )
    kl_samples: SizeOrNone = knob(3, "Texts that KL is measured on; 0: none is.")
    kl_tokens: TextTokens = knob(512, "Tokens of each of these texts.")
    # Left out of JSON by default, as a format's quantizer.
    quantizers: Annotated[tuple[str, ...], Field(exclude_if=lambda names: names == (UNIFORM,))] = knob(
        (UNIFORM,), "How the candidates' values become codes: uniform, or rotated, per token."
    )
    gradients: Annotated[bool, Field(exclude_if=lambda are_measured: are_measured)] = knob(
        True, "Measure sensitivities and gradient norms; without, KL alone."
    )

    def __post_init__(self) -> None:
        for quantizer, bits, axis, size in product(self.quantizers, self.num_bits, self.k_axes, self.group_sizes):
            Format(bits, axis, size, quantizer=quantizer)  # ValueError for one that cannot be stored
        for name in ("num_bits", "k_axes", "group_sizes", "kl_num_bits", "quantizers"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} is empty, expected one or more")
        if unknown := sorted(set(self.kl_bits) - set(self.num_bits)):
            raise ValueError(f"kl_num_bits: {unknown} are no candidates, expected some of {sorted(set(self.num_bits))}")

    @property
    def kl_bits(self) -> tuple[int, ...]:
        if self.kl_num_bits is not None:
            return self.kl_num_bits
        return tuple(bits for bits in self.num_bits if bits in DEFAULT_KL_BITS) or self.num_bits

    @property
    def kl_group(self) -> int:
        return max(self.group_sizes)


@dataclass(frozen=True, config=STRICT)
class CacheSpec:
    """[cache]: what all chosen formats share."""

    num_sink_tokens: SizeOrNone = knob(4, "First tokens kept at 16 bits.")
    k_recent_window: SizeOrNone = knob(64, "Most recent tokens whose keys stay at 16 bits.")
    v_recent_window: SizeOrNone = knob(64, "Most recent tokens whose values stay at 16 bits.")
    # Left out of JSON by default, as a format's quantizer.
    stripe_tokens: Stripe = knob(
        128, "Tokens that are packed together where each has its own scales (rotated pages): 16, 32, or a page of 128."
    )
    param_dtype: Literal["float16", "bfloat16", "float32"] = knob(
        "float16", "Of scales and zeros; scales of rotated pages always have 8 bits (e5m2)."
    )

    def __post_init__(self) -> None:
        k, v = self.k_recent_window, self.v_recent_window
        if self.stripe_tokens < PAGE_TOKENS and k != v:
            raise ValueError(
                f"stripe_tokens = {self.stripe_tokens} and windows of {k} and {v}: expected equal windows, "
                f"or stripe_tokens = {PAGE_TOKENS}"
            )

    @property
    def first_from_page(self) -> int:
        """The first token predicted from a quantized page, or stripe, which is read after the window and not all
        of sinks."""
        stripes = self.num_sink_tokens // self.stripe_tokens + 1
        return max(self.k_recent_window, self.v_recent_window) + self.stripe_tokens * stripes + 1

    def format(self, side: Side, num_bits: int, axis: str, group_size: int, quantizer: str = UNIFORM) -> Format:
        """The Format of a candidate under this cache."""
        if num_bits == RAW.num_bits:
            return RAW
        window = self.k_recent_window if side == "k" else self.v_recent_window
        found = Format(
            num_bits,  # type: ignore[arg-type]
            axis,  # type: ignore[arg-type]
            group_size,  # type: ignore[arg-type]
            self.num_sink_tokens,
            window,
            self.param_dtype if quantizer == UNIFORM else "float16",
            quantizer=quantizer,
        )
        return replace(found, stripe_tokens=self.stripe_tokens) if found.pages().packs_by_token else found


@dataclass(frozen=True, config=STRICT)
class AllocateSpec:
    """[allocate]: the budget, in exactly one of four ways, for ``batch`` sequences of ``context`` tokens."""

    budget: str | None = knob(None, "Bytes of the device for weights, workspace and cache, such as 24GB.")
    kv_budget: str | None = knob(None, "Bytes of the cache alone, such as 2GiB.")
    bits: Bits | None = knob(None, "All-in bits per cached value, such as 2.5.")
    same_bytes_as: str | None = knob(None, "A recipe with [formats], whose cache's bytes are the budget.")
    batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] = knob(8, "Sequences.")
    context: Tokens = knob(4096, "Tokens of each sequence.")
    workspace: str = knob("auto", "Bytes kept free on the device with budget, or auto.")
    granularity: Literal["layer", "block"] = knob(
        "layer", "A format for each layer's K and V, or for a block (K and V alike, PM-KVQ)."
    )
    objective: Objective = knob("combined", "The cost that is minimised, of those a profile measures.")
    fixed_widths: Annotated[bool, Field(exclude_if=lambda is_measured: not is_measured)] = knob(
        False,
        "Measure fixed widths of keys and values of the same bytes on texts kept apart, and take the plan that "
        "loses least; for pages in a basis.",
    )
    rotary: Annotated[bool, Field(exclude_if=lambda is_chosen: not is_chosen)] = knob(
        False, "Choose a format for latent attention's rotary keys, too, instead of 16 bits."
    )
    tp: Ranks = knob(1, "Ranks of tensor parallelism, which share each layer's heads, with engine.")
    engine: Annotated[Engine | None, Field(exclude_if=lambda engine: engine is None)] = knob(
        None, "Count bytes as this serving engine does: whole blocks of 128 tokens, a ring for each sequence, padding."
    )
    drafts: Annotated[int, Field(ge=0, le=7, exclude_if=lambda drafts: drafts == 0)] = knob(
        0, "Draft tokens with each token, with engine: rings have room for them."
    )
    state_bytes: Annotated[int, Field(ge=0, le=10**12, exclude_if=lambda nbytes: nbytes == 0)] = knob(
        0, "Bytes of a layer's state on a rank, with engine = vllm; `kvcal plan` reads config.json."
    )

    @property
    def step_tokens(self) -> int:
        """The most tokens of a sequence in a step of the engine."""
        return 1 + self.drafts

    def __post_init__(self) -> None:
        if self.drafts and self.engine is None:
            raise ValueError(f"drafts = {self.drafts} without engine: expected engine = 'vllm' or 'sglang'")
        given = [name for name in BUDGET_KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            kinds = ", ".join(f"{name} ({of})" for name, of in BUDGET_KINDS.items())
            raise ValueError(f"{' and '.join(given) or 'no budget'} given; expected exactly one of {kinds}")
        sizes = {"budget": self.budget, "kv_budget": self.kv_budget}
        sizes |= {"workspace": None if self.workspace == "auto" else self.workspace}
        for name, size in sizes.items():
            try:
                if size is not None:
                    parse_bytes(size)
            except UsageError as refused:
                raise ValueError(f"{name} = {size!r}: {refused.message}; {refused.hint}") from None


SYSTEMS = ("default", "sensitivity", "kitty", "kitty-pro", "mixkvq-capped", "kvmix", "kivi-2", "higgs-2", "aqua-kv")


@dataclass(frozen=True, config=STRICT)
class SearchSpec:
    """[search]: the plan of every system within the budget of [allocate]; the one of least KL to the 16-bit
    cache is kept. [data] limits the systems' calibration texts."""

    serve: Literal["decode", "storage"] = knob(
        "decode", "What the plan is for: fast decoding, or few bytes on disk or a network."
    )
    systems: tuple[str, ...] = knob(SYSTEMS, "Recipes with [formats], [importance] or [allocate].")
    kl_samples: Size = knob(16, "Texts at most of each pool, select and validate, that KL is measured on.")
    kl_tokens: TextTokens = knob(2048, "Tokens of each of these texts.")

    def __post_init__(self) -> None:
        if not self.systems or len(set(self.systems)) < len(self.systems):
            raise ValueError(f"systems = {list(self.systems)}, expected one or more, each once")


@extended("recipe")
@dataclass(frozen=True, config=STRICT)
class Recipe:
    """Exactly one of ``formats``, ``allocate``, ``importance`` and ``search`` (with the budget of
    ``allocate``) chooses the formats; ``progressive``, ``reparam``, ``basis``, ``feedback`` and sections of
    other systems then work on what was chosen. ``tune`` searches the thresholds of ``formats`` alone."""

    name: str = Field(description="The file's name unless given.")
    description: str = knob("", "One line for people.")
    model: str = knob("reasoner-10m", "Folder, .gguf file, hub id or embedded name.")
    formats: FormatsSpec | None = None
    data: DataSpec = DataSpec()
    profile: ProfileSpec = ProfileSpec()
    cache: CacheSpec = CacheSpec()
    allocate: AllocateSpec | None = None
    importance: ImportanceSpec | None = None
    search: SearchSpec | None = None
    progressive: ProgressiveSpec | None = None
    reparam: ReparamSpec | None = None
    basis: Annotated[BasisSpec | None, Field(exclude_if=lambda spec: spec is None)] = None
    feedback: Annotated[FeedbackSpec | None, Field(exclude_if=lambda spec: spec is None)] = None
    tune: TuneSpec | None = None
    evaluate: EvaluateSpec = EvaluateSpec()

    def __post_init__(self) -> None:
        choices = {"formats": self.formats, "importance": self.importance, "allocate": self.allocate}
        chosen, sections = [name for name, spec in choices.items() if spec is not None], self.sections
        given = [*chosen, *sections]
        allocate, quantizers = self.allocate, list(self.profile.quantizers)
        only = "expected one of [formats], [importance], [allocate]"
        systems = "expected [allocate], whose budget it takes, and nothing else: each system has its own formats"
        wrong: dict[str, object] = {
            f"[search] and {[x for x in given if x != 'allocate']}: {systems}": self.search and given != ["allocate"],
            f"{' and '.join(chosen) or 'nothing'} given; {only}": len(chosen) != 1,
            "[tune] needs [formats], and no stage that works on its formats": self.tune and not self.is_formats_alone,
            "allocate.fixed_widths = true: expected [basis], and no [search]": allocate
            and allocate.fixed_widths
            and not self.chooses_in_a_basis,
            f"[basis] is of rotated pages; profile.quantizers = {quantizers}, expected ['rotated']": (
                self.chooses_in_a_basis and quantizers != ["rotated"]
            ),
        }
        wrong[
            f"cache.stripe_tokens = {self.cache.stripe_tokens} is of rotated pages; profile.quantizers = {quantizers}, "
            "expected ['rotated']"
        ] = self.cache.stripe_tokens < PAGE_TOKENS and allocate and not self.search and quantizers != ["rotated"]
        for name, spec in sections.items():
            wrong |= {f"[{other}] and [{name}]: {why}": other in sections for other, why in spec.excludes.items()}
        if allocate is not None:
            others = ["search"] * bool(self.search) + [name for name, spec in sections.items() if not spec.in_engines]
            wrong |= {
                f"allocate.tp = {allocate.tp}: [search] does not give ranks equal bytes; expected 1": self.search
                and allocate.tp > 1,
                f"allocate.engine = {allocate.engine!r} and [{', '.join(others)}]: engines serve no such plans": others
                and allocate.engine,
                f"allocate.objective = {allocate.objective!r} and profile.gradients = false: nothing measures it; "
                "expected 'kl'": allocate.objective != "kl" and not self.profile.gradients,
            }
        for reason, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(reason)
        self._require_pages()

    def _require_pages(self) -> None:
        """ValueError where sinks and windows leave nothing to quantize, or no KL to measure."""
        if self.allocate is not None and self.cache.num_sink_tokens >= self.allocate.context:
            raise ValueError(
                f"cache.num_sink_tokens = {self.cache.num_sink_tokens} leaves nothing to quantize of allocate.context "
                f"= {self.allocate.context}"
            )
        name, measured = "search.kl_tokens", None if self.search is None else self.search.kl_tokens
        if self.search is None and self.formats is None and self.profile.kl_samples:
            name, measured = "profile.kl_tokens", self.profile.kl_tokens
        if measured is not None and measured <= self.cache.first_from_page:
            raise ValueError(
                f"{name} = {measured}: the sinks and windows of [cache], and a page, take "
                f"{self.cache.first_from_page} tokens, so that no KL can be measured; expected more"
            )

    @property
    def sections(self) -> dict[str, Section]:
        """The given sections that work on chosen formats, by their names."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: spec for name, spec in found.items() if isinstance(spec, Section)}

    @property
    def chooses_in_a_basis(self) -> bool:
        """Whether bits are chosen for pages in a basis, which is fitted first."""
        return bool(self.basis and self.allocate and not self.search)

    @property
    def is_formats_alone(self) -> bool:
        """Whether its formats are fixed and no stage but [tune] works on them."""
        return self.formats is not None and not self.sections

    @property
    def is_baseline(self) -> bool:
        """Whether its formats are its plan: nothing is measured, fitted or tuned for a model."""
        return self.is_formats_alone and self.tune is None

    @property
    def calibrates(self) -> bool:
        """Whether a stage of `kvcal run` reads [data]."""
        choice = self.allocate or self.importance or self.tune
        return choice is not None or any(spec.reads_text for spec in self.sections.values())

    @property
    def sha256(self) -> str:
        """Content hash of every knob (name and description left out)."""
        content = dump(self)
        return sha256_json({key: content[key] for key in content if key not in ("name", "description")})
