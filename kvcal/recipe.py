"""A recipe: every knob of a compilation, with its default, its range and one line about it.

A recipe either fixes the formats ([formats]: the baselines) or lets a stage choose them ([allocate], [importance],
[search]); what follows works on what was chosen. Where a paper has a value, it is the default. Unknown keys are errors.
``kvcal.recipe_files`` reads recipes and changes single knobs. [data] is a
``DataSpec``, a layer's format a ``Format``.
"""

from __future__ import annotations

from itertools import product
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal.artifact import sha256_json
from kvcal.data.reading import MIN_TOKENS, READINGS, is_reading
from kvcal.data.sequences import DataSpec
from kvcal.data.tasks import TASKS, require_lengths
from kvcal.errors import UsageError
from kvcal.pages.predictor import Kind, require_sizes
from kvcal.pages.record_layout import AXES, PAGE_TOKENS
from kvcal.plan.layer import in_formats
from kvcal.plan.page_format import UNIFORM
from kvcal.plan.plan import RAW, Format, LayerPlan, Side
from kvcal.quantities import MAX_BATCH, MAX_SEED, parse_bytes
from kvcal.strict import MAX_COUNT, STRICT, Seed, Share, Size, SizeOrNone, Tokens, dump, knob

Objective = Literal["sensitivity", "kl", "combined", "importance"]
Axis = Literal["channel", "token"]
CandidateBits = Literal[1, 2, 3, 4, 8]
GroupSize = Literal[32, 64, 128]
# Left out of JSON where there is one.
Ranks = Annotated[int, Field(ge=1, le=1024, exclude_if=lambda ranks: ranks == 1)]
# Bits per cached value: a single token in a buffer of 128 at 16 bits has 2,048.
Bits = Annotated[float, Field(gt=0, le=4096)]
TextTokens = Annotated[Tokens, Field(ge=2)]
DEFAULT_KL_BITS = (2, 3, 4)
LM_EVAL = "lm-eval:"
BUDGET_KINDS = {
    "budget": "of the whole device, such as 24GB",
    "kv_budget": "of the cache alone, such as 2GiB",
    "bits": "per cached value, such as 2.5",
    "same_bytes_as": "a recipe, such as kivi-2",
}


@dataclass(frozen=True, config=STRICT)
class FormatsSpec:
    """[formats]: fixed formats for every layer; the first one may differ (AQUA-KV)."""

    k: Format = Field(description="Format of the keys.")
    v: Format = Field(description="Format of the values.")
    first_k: Format | None = knob(None, "Format of the first layer's keys, if it differs.")
    first_v: Format | None = knob(None, "Format of the first layer's values, if it differs.")
    k_pages: Literal["post", "pre"] = knob("post", "Pages hold keys after or before RoPE.")
    rotary: Annotated[Format | None, Field(exclude_if=lambda fmt: fmt is None)] = knob(
        None, "Format of latent attention's rotary keys; default: 16 bits. Its latents are stored as keys are."
    )

    def __post_init__(self) -> None:
        sides: tuple[tuple[Side, tuple[Format | None, ...]], ...] = (
            ("k", (self.k, self.first_k)),
            ("v", (self.v, self.first_v, self.rotary)),
        )
        for side, formats in sides:
            for fmt in formats:
                if fmt is not None and fmt != RAW and fmt.axis not in AXES[side]:
                    raise ValueError(f"{side} axis {fmt.axis!r}, expected one of {AXES[side]}")
                if fmt is not None and fmt.num_sink_tokens + fmt.max_window > MAX_COUNT:
                    raise ValueError(
                        f"{side}: num_sink_tokens = {fmt.num_sink_tokens} and a window of {fmt.max_window}; allowed: "
                        f"up to {MAX_COUNT} together"
                    )


def fixed_layers(formats: FormatsSpec, layers: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
    """The given layers with every paged one in the recipe's formats. UnsupportedModel as ``in_formats``."""
    first = next((layer.geometry.index for layer in layers if layer.is_paged), None)
    fixed = []
    for layer in layers:
        k, v = formats.k, formats.v
        if layer.geometry.index == first:
            k, v = formats.first_k or k, formats.first_v or v
        fixed.append(in_formats(layer, k, v, formats.rotary or RAW, formats.k_pages) if layer.is_paged else layer)
    return tuple(fixed)


@dataclass(frozen=True, config=STRICT)
class ProfileSpec:
    """[profile]: the measured candidates, just ``quantizers`` x ``num_bits`` x axis x ``group_sizes`` (V: per token
    only) and 16 bits.

    Of these, ``kl_num_bits`` x ``kl_group_size`` x the first of ``k_axes`` have a KL to the 16-bit cache: one layer's K
    or V alone, through the packed cache. It is measured for all of their bits, or for the lowest: then the KL at other
    bits is that one times the ratio of the squared errors.
    """

    num_bits: tuple[CandidateBits, ...] = knob((1, 2, 3, 4, 8), "Bits of the candidates.")
    k_axes: tuple[Axis, ...] = knob(("channel", "token"), "What a group of keys shares its scale along.")
    group_sizes: tuple[GroupSize, ...] = knob((32, 64, 128), "Values that share a scale.")
    kl_num_bits: tuple[CandidateBits, ...] | None = knob(
        None, "Bits whose KL is measured; default: 2, 3 and 4, or all where none of them is a candidate."
    )
    # Left out of JSON by default, as a format's quantizer.
    kl_measured: Annotated[Literal["all", "lowest"] | None, Field(exclude_if=lambda which: which is None)] = knob(
        None, "Of kl_num_bits: all or lowest; default: all for an embedded model, lowest for another."
    )
    kl_group_size: GroupSize | None = knob(None, "Group size whose KL is measured; default: the largest.")
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
        for name, measured, allowed in (
            ("kl_num_bits", self.kl_bits, self.num_bits),
            ("kl_group_size", (self.kl_group,), self.group_sizes),
        ):
            unknown = sorted(set(measured) - set(allowed))
            if unknown:
                raise ValueError(f"{name}: {unknown} are no candidates, expected some of {sorted(set(allowed))}")

    @property
    def kl_bits(self) -> tuple[int, ...]:
        """Bits of the candidates whose KL is measured."""
        if self.kl_num_bits is not None:
            return self.kl_num_bits
        return tuple(bits for bits in self.num_bits if bits in DEFAULT_KL_BITS) or self.num_bits

    @property
    def kl_group(self) -> int:
        """Group size of the candidates whose KL is measured."""
        return self.kl_group_size or max(self.group_sizes)


@dataclass(frozen=True, config=STRICT)
class CacheSpec:
    """[cache]: what all chosen formats share."""

    num_sink_tokens: SizeOrNone = knob(4, "First tokens kept at 16 bits.")
    k_recent_window: SizeOrNone = knob(64, "Most recent tokens whose keys stay at 16 bits.")
    v_recent_window: SizeOrNone = knob(64, "Most recent tokens whose values stay at 16 bits.")
    param_dtype: Literal["float16", "bfloat16", "float32"] = knob("float16", "Of scales and zeros.")

    @property
    def first_from_page(self) -> int:
        """The first token predicted from a quantized page, which is read after the window and not all of sinks."""
        pages = self.num_sink_tokens // PAGE_TOKENS + 1
        return max(self.k_recent_window, self.v_recent_window) + PAGE_TOKENS * pages + 1

    def format(self, side: Side, num_bits: int, axis: str, group_size: int, quantizer: str = UNIFORM) -> Format:
        """The Format of a candidate under this cache."""
        if num_bits == RAW.num_bits:
            return RAW
        window = self.k_recent_window if side == "k" else self.v_recent_window
        return Format(
            num_bits,  # type: ignore[arg-type]
            axis,  # type: ignore[arg-type]
            group_size,  # type: ignore[arg-type]
            self.num_sink_tokens,
            window,
            self.param_dtype,
            quantizer=quantizer,
        )


Engine = Literal["vllm", "sglang"]


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
    rotary: Annotated[bool, Field(exclude_if=lambda is_chosen: not is_chosen)] = knob(
        False, "Choose a format for latent attention's rotary keys, too, instead of 16 bits."
    )
    tp: Ranks = knob(1, "Ranks of tensor parallelism, which share each layer's heads, with engine.")
    engine: Annotated[Engine | None, Field(exclude_if=lambda engine: engine is None)] = knob(
        None, "Count bytes as this serving engine does: whole blocks of 128 tokens, a ring for each sequence, padding."
    )
    drafts: Annotated[int, Field(ge=0, le=7, exclude_if=lambda drafts: drafts == 0)] = knob(
        0, "Draft tokens with each token, with engine = vllm: rings have room for them."
    )

    def __post_init__(self) -> None:
        if self.drafts and self.engine != "vllm":
            raise ValueError(f"drafts = {self.drafts} and engine = {self.engine!r}: expected engine = 'vllm'")
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


@dataclass(frozen=True, config=STRICT)
class ImportanceSpec:
    """[importance], KVmix: layers with the largest gradient norms (K and V apart) get more bits and larger windows."""

    share: Share = knob(0.2, "Share of the layers that get the high bits.")
    k_high_bits: Literal[2, 3, 4, 8] = knob(3, "Bits of the keys of these layers.")
    v_high_bits: Literal[2, 3, 4, 8] = knob(4, "Bits of the values of these layers.")
    low_bits: Literal[1, 2, 3, 4] = knob(2, "Bits of all others.")
    group_size: GroupSize = knob(32, "Values that share a scale.")
    window: Literal["paged", "clamped", "none"] = knob("paged", "Recent window: by page (KVmix), a share, or none.")
    high_window_share: Annotated[float, Field(ge=0, lt=1)] = knob(0.2, "Window share with the high bits.")
    low_window_share: Annotated[float, Field(ge=0, lt=1)] = knob(0.1, "Window share with the low bits.")
    min_window: SizeOrNone = knob(0, "Tokens of a clamped window at least.")
    max_window: SizeOrNone = knob(512, "Tokens of a window at most.")
    random_seed: Seed | None = knob(None, "Draws the layers at random instead (ablation).")

    def __post_init__(self) -> None:
        if self.min_window > self.max_window:
            raise ValueError(f"expected min_window = {self.min_window} <= max_window = {self.max_window}")


SYSTEMS = ("basis", "default", "kitty", "kitty-pro", "mixkvq-capped", "kvmix", "kivi-2", "higgs-2", "aqua-kv")


@dataclass(frozen=True, config=STRICT)
class SearchSpec:
    """[search]: the plan of every system within the budget of [allocate]; the one of least KL to the 16-bit cache is
    kept. [data] limits the systems' calibration texts."""

    serve: Literal["decode", "storage"] = knob(
        "decode", "What the plan is for: fast decoding, or few bytes on disk or a network."
    )
    systems: tuple[str, ...] = knob(SYSTEMS, "Recipes with [formats], [importance] or [allocate].")
    kl_samples: Size = knob(16, "Texts at most of each pool, select and validate, that KL is measured on.")
    kl_tokens: TextTokens = knob(2048, "Tokens of each of these texts.")

    def __post_init__(self) -> None:
        if not self.systems or len(set(self.systems)) < len(self.systems):
            raise ValueError(f"systems = {list(self.systems)}, expected one or more, each once")


@dataclass(frozen=True, config=STRICT)
class ProgressiveSpec:
    """[progressive], PM-KVQ's 16 -> 8 -> 4 -> 2: pages shrink when the budget for the tokens so far is used up."""

    bits: Bits | None = knob(None, "All-in bits per cached value; default: the allocation's budget.")
    shift: Literal["equivalent", "modified", "direct"] = knob("equivalent", "How codes lose bits (others: ablations).")


@dataclass(frozen=True, config=STRICT)
class ReparamSpec:
    """[reparam], PM-KVQ's λ: channel factors of the keys, searched on a grid of α."""

    position_scale: Annotated[float, Field(gt=0, le=1000)] = knob(4.0, "Stretches positions: short text for long.")
    num_steps: Annotated[int, Field(ge=1, le=1000)] = knob(20, "Steps of the grid of α over [0, 1].")
    num_samples: Size = knob(4, "Calibration sequences.")
    seq_len: TextTokens = knob(2048, "Tokens of each at most.")
    offset: bool = knob(False, "Search a static key offset, too.")
    shared_heads: bool = knob(False, "One λ for all KV heads: QK-norms need it to be folded.")


@dataclass(frozen=True, config=STRICT)
class PredictorSpec:
    """[predictors], AQUA-KV: of which kind, and when one is left out."""

    kind: Kind = knob("linear", "How weights are stored.")
    rank: Size | None = knob(None, "Rank of low_rank, and of it alone.")
    group_size: Size | None = knob(None, "Weights that share a scale in int4, and in it alone.")
    ridge: Annotated[float, Field(gt=0)] = knob(1e-3, "Penalty of the fit, relative to the variance.")
    holdout_share: Annotated[float, Field(gt=0, lt=1)] = knob(0.25, "Share of the sequences held out to measure fits.")
    min_explained: Annotated[float, Field(le=1)] = knob(
        0.1, "Drop predictors that explain no more than this share of the variance."
    )
    drop: bool = knob(True, "Drop predictors that save fewer bytes than they take.")
    sides: tuple[Side, ...] = knob(("k", "v"), "Predict keys, values or both (ablation).")
    inputs: Literal["reconstructed", "exact"] = knob("reconstructed", "Fit on what is read back (exact: ablation).")

    def __post_init__(self) -> None:
        require_sizes(self.kind, self.rank, self.group_size)
        require_sides(self.sides)


@dataclass(frozen=True, config=STRICT)
class FeedbackSpec:
    """[feedback], GPTQ's and LDLQ's error feedback: codes of a token are chosen one after the other, each making up for
    the errors before it. Pages and their decoder stay."""

    sides: tuple[Side, ...] = knob(("k", "v"), "Keys, values or both.")
    basis: bool = knob(False, "Store rotated pages in the basis that queries and output weights ask for.")
    exponent: Annotated[float, Field(ge=0, le=0.5)] = knob(0.375, "Of the basis: how far it evens out energies.")
    damping: Annotated[float, Field(ge=1e-4, le=10)] = knob(0.03, "Added to the Hessian, times its mean diagonal.")
    position_scale: Annotated[float, Field(gt=0, le=1000)] = knob(4.0, "Stretches positions: short text for long.")
    num_samples: Size = knob(16, "Calibration sequences.")
    seq_len: TextTokens = knob(2048, "Tokens of each at most.")

    def __post_init__(self) -> None:
        require_sides(self.sides)


def require_sides(sides: tuple[Side, ...]) -> None:
    """ValueError unless one or both are given, each once."""
    if not sides or len(set(sides)) < len(sides):
        raise ValueError(f"sides = {list(sides)}, expected one or both of ['k', 'v']")


@dataclass(frozen=True, config=STRICT)
class TuneSpec:
    """[tune], MixKVQ's threshold search: Optuna's TPE, accuracy up and all-in bits down; the best accuracy under
    ``max_bits`` is chosen."""

    tasks: tuple[str, ...] = knob(
        ("ledger", "chain", "times"), "Embedded tasks, retrieval:TOKENS, completion:TOKENS or lm-eval:NAME[:METRIC]."
    )
    num_problems: Size = knob(16, "Problems of each task.")
    num_trials: Size = knob(30, "Trials in all; a larger number continues the study.")
    low: Annotated[float, Field(gt=0)] = knob(0.1, "Lowest threshold.")
    high: float = knob(2.0, "Highest threshold.")
    fit_range: bool = knob(False, "Instead of high: the score that 1 % of the channels exceed.")
    max_bits: Bits | None = knob(None, "Cap on all-in bits per cached value.")
    fit_capacity: bool = knob(True, "A tier's capacity is what pages need, not the recipe's share.")
    page_share: Annotated[Share, Field(gt=0)] = knob(0.95, "Share of the pages whose need a capacity covers.")
    seed: Annotated[Seed, Field(lt=MAX_SEED)] = knob(0, "Seed of the search and of its problems.")

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"expected low = {self.low} < high = {self.high}")
        if not self.tasks:
            raise ValueError(f"no tasks, expected some of {sorted(TASKS)}, or {LM_EVAL}NAME of lm-eval")
        _require_tasks(self.tasks)


def is_own_task(name: str) -> bool:
    """Whether a task is generated here, and not lm-eval's."""
    return name in TASKS or is_reading(name)


def _require_tasks(tasks: tuple[str, ...]) -> None:
    """ValueError for a task that is not there, or named twice; lm-eval's are looked up when they run."""
    unknown = sorted(
        name for name in tasks if not is_own_task(name) and not name.startswith(LM_EVAL) or name == LM_EVAL
    )
    if unknown:
        own = [*sorted(TASKS), *(f"{name}:TOKENS (at least {MIN_TOKENS})" for name in READINGS)]
        raise ValueError(f"tasks {unknown} unknown, expected some of {own}, or {LM_EVAL}NAME of lm-eval")
    if len(set(tasks)) < len(tasks):
        raise ValueError(f"tasks = {list(tasks)}, expected each one once")


@dataclass(frozen=True, config=STRICT)
class EvaluateSpec:
    """[evaluate]: perplexity, KL and top-1 on ``data``; exact match by greedy generation on problems of ``tasks``."""

    data: DataSpec = knob(DataSpec(seed=1), "Texts to measure on.")
    tasks: tuple[str, ...] = knob(
        tuple(TASKS), "Embedded tasks, retrieval:TOKENS, completion:TOKENS or lm-eval:NAME[:METRIC]; [] for none."
    )
    num_problems: Size = knob(16, "Problems of each task.")
    max_steps: int = knob(70, "Transfers in a ledger at most.")
    max_size: int = knob(160, "Words in a chain's table at most.")
    max_hops: int = knob(40, "Hops along a chain at most.")
    max_digits: int = knob(7, "Digits of a factor at most.")
    max_new_tokens: Tokens = knob(2048, "Tokens generated for a problem at most.")
    batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] = knob(16, "Sequences fed at once.")
    seed: Seed = knob(1, "Seed of the problems.")
    against: tuple[str, ...] = knob((), "Recipes with [formats] to measure next to the plan.")
    include_path: Annotated[str, Field(exclude_if=lambda folder: not folder)] = knob(
        "", "Folder with task files (YAML) of lm-eval, next to its own."
    )

    def __post_init__(self) -> None:
        _require_tasks(self.tasks)
        try:
            require_lengths(self.max_steps, self.max_size, self.max_hops, self.max_digits)
        except UsageError as refused:
            raise ValueError(f"{refused.message}: {refused.hint}") from None

    @property
    def embedded_tasks(self) -> tuple[str, ...]:
        return tuple(name for name in self.tasks if name in TASKS)

    @property
    def harness_tasks(self) -> tuple[str, ...]:
        """Tasks of the lm-evaluation-harness, NAME or NAME:METRIC."""
        return tuple(name.removeprefix(LM_EVAL) for name in self.tasks if not is_own_task(name))

    @property
    def reading_tasks(self) -> tuple[str, ...]:
        """retrieval:TOKENS and completion:TOKENS."""
        return tuple(filter(is_reading, self.tasks))


@dataclass(frozen=True, config=STRICT)
class Recipe:
    """Exactly one of ``formats``, ``allocate``, ``importance`` and ``search`` (with the budget of ``allocate``) chooses
    the formats; ``progressive``, ``reparam``, ``predictors`` and ``feedback`` then work on what was chosen. ``tune``
    searches the thresholds of ``formats`` alone."""

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
    predictors: PredictorSpec | None = None
    feedback: Annotated[FeedbackSpec | None, Field(exclude_if=lambda spec: spec is None)] = None
    tune: TuneSpec | None = None
    evaluate: EvaluateSpec = EvaluateSpec()

    def __post_init__(self) -> None:
        parts = ("formats", "importance", "allocate", "progressive", "reparam", "predictors", "feedback")
        given = [name for name in parts if getattr(self, name) is not None]
        chosen = [name for name in given if name in parts[:3]]
        allocate, basis, quantizers = self.allocate, self.chooses_in_a_basis, list(self.profile.quantizers)
        shrinks, only = self.progressive is not None, "expected one of [formats], [importance], [allocate]"
        systems = "expected [allocate], whose budget it takes, and nothing else: each system has its own formats"
        refused = [
            (
                bool(self.search) and given != ["allocate"],
                f"[search] and {[x for x in given if x != 'allocate']}: {systems}",
            ),
            (len(chosen) != 1, f"{' and '.join(chosen) or 'nothing'} given; {only}"),
            (
                self.tune is not None and not self.is_formats_alone,
                "[tune] needs [formats], and none of [progressive], [reparam], [predictors] and [feedback]",
            ),
            (shrinks and self.predictors is not None, "[progressive] and [predictors]: predictions would shrink, too"),
            (shrinks and self.feedback is not None, "[progressive] and [feedback]: shrinking rounds codes again"),
            (
                basis and quantizers != ["rotated"],
                f"[feedback] basis is of rotated pages; profile.quantizers = {quantizers}, expected ['rotated']",
            ),
        ]
        if allocate is not None:
            others = [name for name in ("search", "progressive", "predictors") if getattr(self, name) is not None]
            refused += [
                (
                    self.search is not None and allocate.tp > 1,
                    f"allocate.tp = {allocate.tp}: [search] does not give ranks equal bytes; expected 1",
                ),
                (
                    allocate.engine is not None and bool(others),
                    f"allocate.engine = {allocate.engine!r} and [{', '.join(others)}]: engines serve no such plans",
                ),
                (
                    allocate.objective != "kl" and not self.profile.gradients,
                    f"allocate.objective = {allocate.objective!r} and profile.gradients = false: nothing measures it; "
                    "expected 'kl'",
                ),
            ]
        for is_wrong, reason in refused:
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
    def chooses_in_a_basis(self) -> bool:
        """Whether bits are chosen for pages in a basis, which is fitted first."""
        return bool(self.feedback and self.feedback.basis and self.allocate and not self.search)

    @property
    def is_formats_alone(self) -> bool:
        """Whether its formats are fixed and no stage but [tune] works on them."""
        others = (self.progressive, self.reparam, self.predictors, self.feedback)
        return self.formats is not None and all(other is None for other in others)

    @property
    def is_baseline(self) -> bool:
        """Whether its formats are its plan: nothing is measured, fitted or tuned for a model."""
        return self.is_formats_alone and self.tune is None

    @property
    def calibrates(self) -> bool:
        """Whether a stage of `kvcal run` reads [data]."""
        stages = (self.allocate, self.importance, self.reparam, self.predictors, self.feedback)
        return any(stage is not None for stage in stages)

    @property
    def sha256(self) -> str:
        """Content hash of every knob (name and description left out)."""
        content = dump(self)
        return sha256_json({key: content[key] for key in content if key not in ("name", "description")})
