"""A recipe: every knob of a compilation in one strict TOML file.

A recipe either fixes the formats ([formats]: the baselines) or lets the solver choose them ([allocate], from what
[profile] measured). The command line overrides few knobs; unknown keys are errors. ``Recipe.sha256`` identifies
the recipe by content, not by name or comments.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal.artifact import require_file, sha256_json
from kvcal.data.sequences import DataSpec
from kvcal.data.tasks import TASKS, require_lengths
from kvcal.errors import UsageError
from kvcal.pages.layout import AXES, PAGE_TOKENS
from kvcal.plan.format import UNIFORM
from kvcal.plan.plan import RAW, Format, LayerPlan, Side
from kvcal.quantities import MAX_BATCH, parse_bytes
from kvcal.specs import Bits, ImportanceSpec, PredictorSpec, ProgressiveSpec, ReparamSpec, SearchSpec, TuneSpec
from kvcal.strict import MAX_COUNT, STRICT, Seed, Size, SizeOrNone, Tokens, dump, parse

Objective = Literal["sensitivity", "kl", "combined", "importance"]
DEFAULT_KL_BITS = (2, 3, 4)

RECIPE_FOLDERS = (Path(__file__).parent / "recipes", Path(__file__).parent.parent / "recipes")


@dataclass(frozen=True, config=STRICT)
class ProfileSpec:
    """The measured candidates: exactly ``quantizers`` (of kvcal.pages.LAYOUTS) x ``num_bits`` x axis x ``group_sizes``
    (V: per token only) and 16 bits.

    Of these, ``kl_num_bits`` (default: 2, 3 and 4 bits, or all where none of them is a candidate) x ``kl_group_size``
    (default: the largest) x the first of ``k_axes`` are also measured by their KL to the 16-bit cache: one layer's K or
    V alone, through the packed cache, on ``kl_samples`` sequences of ``kl_tokens`` tokens.
    """

    num_bits: tuple[Literal[1, 2, 3, 4, 8], ...] = (1, 2, 3, 4, 8)
    k_axes: tuple[Literal["channel", "token"], ...] = ("channel", "token")
    group_sizes: tuple[Literal[32, 64, 128], ...] = (32, 64, 128)
    kl_num_bits: tuple[Literal[1, 2, 3, 4, 8], ...] | None = None
    kl_group_size: Literal[32, 64, 128] | None = None
    kl_samples: SizeOrNone = 3
    kl_tokens: Annotated[Tokens, Field(ge=2)] = 512
    # Left out of JSON by default, as a format's quantizer.
    quantizers: Annotated[tuple[str, ...], Field(exclude_if=lambda names: names == (UNIFORM,))] = (UNIFORM,)

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
    """What all chosen formats share; windows and sinks in tokens."""

    num_sink_tokens: SizeOrNone = 4
    k_recent_window: SizeOrNone = 64
    v_recent_window: SizeOrNone = 64
    param_dtype: Literal["float16", "bfloat16", "float32"] = "float16"

    @property
    def first_from_page(self) -> int:
        """The first token predicted from a quantized page, which is written with the token two before it."""
        return self.num_sink_tokens + max(self.k_recent_window, self.v_recent_window) + PAGE_TOKENS + 1

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


@dataclass(frozen=True, config=STRICT)
class AllocateSpec:
    """The budget, in exactly one of four ways, for ``batch`` sequences of ``context`` tokens. ``granularity``: what
    gets a format of its own: a layer's K and its V, a block (K and V alike, as in PM-KVQ), or every KV head.

    ``budget``: the whole device (weights + workspace + cache); ``kv_budget``: the cache; ``bits``: all-in bits per
    cached value; ``same_bytes_as``: what the named recipe's cache takes. ``objective``: the cost that is minimised (see
    stages.profile_record).
    """

    budget: str | None = None
    kv_budget: str | None = None
    bits: Bits | None = None
    same_bytes_as: str | None = None
    batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] = 8
    context: Tokens = 4096
    workspace: str = "auto"
    granularity: Literal["layer", "block", "head"] = "layer"
    objective: Objective = "combined"

    def __post_init__(self) -> None:
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


BUDGET_KINDS = {
    "budget": "of the whole device, such as 24GB",
    "kv_budget": "of the cache alone, such as 2GiB",
    "bits": "per cached value, such as 2.5",
    "same_bytes_as": "a recipe, such as kivi-2",
}


@dataclass(frozen=True, config=STRICT)
class FormatsSpec:
    """Fixed formats for every layer; ``first_k`` and ``first_v`` for the first one, if it differs (AQUA-KV).
    ``k_pages`` "pre": pages hold keys before RoPE."""

    k: Format
    v: Format
    first_k: Format | None = None
    first_v: Format | None = None
    k_pages: Literal["post", "pre"] = "post"

    def __post_init__(self) -> None:
        sides: tuple[tuple[Side, tuple[Format | None, ...]], ...] = (
            ("k", (self.k, self.first_k)),
            ("v", (self.v, self.first_v)),
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


@dataclass(frozen=True, config=STRICT)
class EvaluateSpec:
    """Perplexity, KL and top-1 on ``data``; exact match by greedy generation on ``num_problems`` problems a task.

    ``max_steps``, ``max_size``, ``max_hops`` and ``max_digits`` bound the tasks' lengths. ``against`` names recipes to
    evaluate beside the plan.
    """

    data: DataSpec = DataSpec(seed=1)
    tasks: tuple[str, ...] = tuple(TASKS)
    num_problems: Size = 16
    max_steps: int = 70
    max_size: int = 160
    max_hops: int = 40
    max_digits: int = 7
    max_new_tokens: Tokens = 2048
    batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] = 16
    seed: Seed = 1
    against: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = sorted(set(self.tasks) - set(TASKS))
        if unknown:
            raise ValueError(f"tasks {unknown} unknown, expected some of {sorted(TASKS)}")
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks = {list(self.tasks)}, expected each one once")
        try:
            require_lengths(self.max_steps, self.max_size, self.max_hops, self.max_digits)
        except UsageError as refused:
            raise ValueError(f"{refused.message}: {refused.hint}") from None


@dataclass(frozen=True, config=STRICT)
class Recipe:
    """See the module's docstring. Exactly one of ``formats``, ``allocate``, ``importance`` and ``search`` chooses the
    formats; ``progressive``, ``reparam`` and ``predictors`` then work on what was chosen. ``tune`` searches the
    thresholds of ``formats`` alone."""

    name: str
    description: str = ""
    model: str = "reasoner-10m"
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
    tune: TuneSpec | None = None
    evaluate: EvaluateSpec = EvaluateSpec()

    def __post_init__(self) -> None:
        given = [name for name in ("formats", "importance") if getattr(self, name) is not None]
        given += ["allocate"] if self.allocate is not None else []
        if self.search is not None and given != ["allocate"]:
            raise ValueError("[search] needs the budget of [allocate], and none of [formats] and [importance]")
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given) or 'nothing'} given; expected one of [formats], [importance], [allocate]"
            )
        if self.tune is not None and not self.is_formats_alone:
            raise ValueError("[tune] needs [formats], and none of [progressive], [reparam] and [predictors]")
        if self.progressive is not None and self.predictors is not None:
            raise ValueError("[progressive] and [predictors]: predictions of pages that shrink would change with them")
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
    def is_formats_alone(self) -> bool:
        """Whether its formats are fixed and no stage but [tune] works on them."""
        others = (self.progressive, self.reparam, self.predictors)
        return self.formats is not None and all(other is None for other in others)

    @property
    def is_baseline(self) -> bool:
        """Whether its formats are its plan: nothing is measured, fitted or tuned for a model."""
        return self.is_formats_alone and self.tune is None

    @property
    def calibrates(self) -> bool:
        """Whether a stage of `kvcal run` reads [data]."""
        return any(stage is not None for stage in (self.allocate, self.importance, self.reparam, self.predictors))

    @property
    def sha256(self) -> str:
        """Content hash of every knob (name and description left out)."""
        knobs = dump(self)
        return sha256_json({key: knobs[key] for key in knobs if key not in ("name", "description")})


def find_recipe(name: str) -> Path:
    """A path, or the name of a recipe that comes with kvcal.

    Raises:
        UsageError: neither a file nor a known name.
    """
    if Path(name).is_file():
        return Path(name)
    if name.endswith(".toml") or "/" in name:
        name = Path(name).stem if Path(name).parent in (Path("recipes"), Path(".")) else name
    for folder in RECIPE_FOLDERS:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    if name:
        require_file(name, UsageError)
    raise UsageError(
        f"recipe {name!r} is neither a file nor one of {list(recipe_names())}",
        hint="give the path of a TOML file or one of these names",
    )


def recipe_names() -> tuple[str, ...]:
    """Names of the recipes that come with kvcal."""
    return tuple(sorted({path.stem for folder in RECIPE_FOLDERS for path in folder.glob("*.toml")}))


def load_recipe(name: str) -> Recipe:
    """Read and check a recipe, and the recipes that it names.

    Raises:
        UsageError: not found, not TOML, unknown key or value out of range, with its place.
    """
    recipe = _read(name)
    require_baselines(recipe.evaluate.against, f"{name}: evaluate.against")
    same = None if recipe.allocate is None else recipe.allocate.same_bytes_as
    require_baselines(() if same is None else (same,), f"{name}: allocate.same_bytes_as")
    return recipe


def _read(name: str) -> Recipe:
    path = find_recipe(name)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as broken:
        raise UsageError(f"{path}: not TOML: {broken}") from None
    return parse(Recipe, {"name": path.stem, **content}, str(path), UsageError)


def require_baselines(names: Iterable[str], place: str) -> None:
    """UsageError unless all are recipes with [formats], whose plans and bytes are known without a profile."""
    for name in names:
        if _read(name).formats is None:
            raise UsageError(
                f"{place}: recipe {name!r} has no [formats]",
                hint="name a recipe with fixed formats, such as kivi-2; the other one is run by itself",
            )


def fixed_layers(formats: FormatsSpec, layers: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
    """The given layers with every paged one in the recipe's formats."""
    first = next((layer.geometry.index for layer in layers if layer.is_paged), None)
    found = []
    for layer in layers:
        k, v = formats.k, formats.v
        if layer.geometry.index == first:
            k, v = formats.first_k or k, formats.first_v or v
        if layer.is_paged:
            layer = LayerPlan(layer.geometry, (k,), (v,), k_pages=formats.k_pages)
        found.append(layer)
    return tuple(found)
