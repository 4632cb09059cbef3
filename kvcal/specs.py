"""The sections of a recipe for the five systems and their combination: every knob, with its default.

Where a paper has a value, it is the default. What the sections do is in the stages of the same names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal.data.tasks import TASKS
from kvcal.plan.format import Boost, Side
from kvcal.quantities import MAX_SEED
from kvcal.strict import STRICT, Seed, Share, Size, SizeOrNone, Tokens

# Bits per cached value: a single token in a buffer of 128 at 16 bits has 2,048.
Bits = Annotated[float, Field(gt=0, le=4096)]
LM_EVAL = "lm-eval:"


@dataclass(frozen=True, config=STRICT)
class ReparamSpec:
    """[reparam], PM-KVQ's λ: positions times ``position_scale``, α on a grid of ``num_steps`` + 1 values over [0, 1];
    ``offset``: a static key offset is searched, too. ``shared_heads``: one λ for all KV heads of a layer, which models
    with QK-norm need to fold it into their weights."""

    position_scale: Annotated[float, Field(gt=0, le=1000)] = 4.0
    num_steps: Annotated[int, Field(ge=1, le=1000)] = 20
    num_samples: Size = 4
    seq_len: Annotated[Tokens, Field(ge=2)] = 2048
    offset: bool = False
    shared_heads: bool = False


@dataclass(frozen=True, config=STRICT)
class PredictorSpec:
    """[predictors], AQUA-KV: of which kind, and when one is left out. ``holdout_share`` of the calibration sequences
    measures the explained variance; ``min_explained``: up to it a predictor is left out, as where it saves less bytes
    than it takes (``drop`` false keeps all). Ablations: ``sides`` predicts keys or values alone; ``inputs`` "exact"
    fits on what the model computes instead of what the cache reads back."""

    kind: Literal["linear", "low_rank", "int4"] = "linear"
    rank: Size | None = None
    group_size: Size | None = None
    ridge: Annotated[float, Field(gt=0)] = 1e-3
    holdout_share: Annotated[float, Field(gt=0, lt=1)] = 0.25
    min_explained: Annotated[float, Field(le=1)] = 0.1
    drop: bool = True
    sides: tuple[Side, ...] = ("k", "v")
    inputs: Literal["reconstructed", "exact"] = "reconstructed"

    def __post_init__(self) -> None:
        for kind, value in (("low_rank", self.rank), ("int4", self.group_size)):
            if (value is not None) != (self.kind == kind):
                raise ValueError(f"{kind} takes {'rank' if kind == 'low_rank' else 'group_size'}, other kinds do not")
        if not self.sides or len(set(self.sides)) < len(self.sides):
            raise ValueError(f"sides = {list(self.sides)}, expected one or both of ['k', 'v']")


@dataclass(frozen=True, config=STRICT)
class ProgressiveSpec:
    """[progressive], PM-KVQ's 16 -> 8 -> 4 -> 2: pages shrink when the budget for the tokens so far is used up. The
    budget is the allocation's, or ``bits`` per cached value, all in. Shifts but "equivalent" are ablations."""

    bits: Bits | None = None
    shift: Literal["equivalent", "modified", "direct"] = "equivalent"


@dataclass(frozen=True, config=STRICT)
class ImportanceSpec:
    """[importance], KVmix: the ``share`` of layers with the largest gradient norms gets ``k_high_bits`` and
    ``v_high_bits`` (K and V apart), and larger recent windows. ``window``: the paper's rule page by page, a clamped
    share of the text, or none (see formats.WindowRule). ``random_seed``: layers at random instead, the ablation.
    """

    share: Share = 0.2
    k_high_bits: Literal[2, 3, 4, 8] = 3
    v_high_bits: Literal[2, 3, 4, 8] = 4
    low_bits: Literal[1, 2, 3, 4] = 2
    group_size: Literal[32, 64, 128] = 32
    window: Literal["paged", "clamped", "none"] = "paged"
    high_window_share: Annotated[float, Field(ge=0, lt=1)] = 0.2
    low_window_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    min_window: SizeOrNone = 0
    max_window: SizeOrNone = 512
    random_seed: Seed | None = None

    def __post_init__(self) -> None:
        if self.min_window > self.max_window:
            raise ValueError(f"expected min_window = {self.min_window} <= max_window = {self.max_window}")


@dataclass(frozen=True, config=STRICT)
class TuneSpec:
    """[tune], MixKVQ's threshold search: ``num_trials`` of Optuna's TPE over [``low``, ``high``] for every threshold of
    the recipe's key tiers, accuracy up and all-in bits down; the best accuracy under ``max_bits`` is chosen.
    ``fit_range``: instead of ``high``, the score that 1 % of the channels of calibration pages exceed.
    ``fit_capacity``: a tier's room is what ``page_share`` of the calibration pages need at the trial's thresholds (1:
    the largest need), instead of its share in the recipe."""

    tasks: tuple[str, ...] = ("ledger", "chain", "times")
    num_problems: Size = 16
    num_trials: Size = 30
    low: Annotated[float, Field(gt=0)] = 0.1
    high: float = 2.0
    fit_range: bool = False
    max_bits: Bits | None = None
    fit_capacity: bool = True
    page_share: Annotated[Share, Field(gt=0)] = 0.95
    seed: Annotated[Seed, Field(lt=MAX_SEED)] = 0

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"expected low = {self.low} < high = {self.high}")
        own = [name for name in self.tasks if not name.startswith(LM_EVAL)]
        unknown = sorted(set(own) - set(TASKS)) + [name for name in self.tasks if name == LM_EVAL]
        if unknown or not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(
                f"tasks {unknown or list(self.tasks)} unknown, missing or twice, expected some of {sorted(TASKS)}, or "
                f"{LM_EVAL}NAME for a task of lm-eval"
            )


@dataclass(frozen=True, config=STRICT)
class KeyChoice:
    """One way to store a layer's keys in a search. ``rescale``: with the layer's λ. ``predicted``: as a residual."""

    num_bits: Literal[1, 2, 3, 4, 8, 16]
    axis: Literal["channel", "token"] = "channel"
    group_size: Literal[32, 64, 128] = 128
    boost: Boost | None = None
    lattice_dim: Literal[2, 4] | None = None
    rescale: bool = False
    predicted: bool = False


@dataclass(frozen=True, config=STRICT)
class ValueChoice:
    """One way to store a layer's values in a search."""

    num_bits: Literal[1, 2, 3, 4, 8, 16]
    group_size: Literal[32, 64, 128] = 128
    lattice_dim: Literal[2, 4] | None = None
    predicted: bool = False


@dataclass(frozen=True, config=STRICT)
class SearchSpec:
    """[search]: which compositions of a layer's keys and values are measured, and how far the plan is refined.

    Each is measured by its KL to the 16-bit cache while all other layers are as in a background plan: one composition
    for all layers, that of least KL among those that fit the budget. ``kl_samples`` texts of ``kl_tokens``, others than
    those of the fits. ``proxy_plans`` random plans check how well these KLs add up. In each of ``refine_rounds`` the
    best plan so far is the background, and up to ``neighbours`` dearer and cheaper compositions of every layer are
    measured around it.
    """

    keys: tuple[KeyChoice, ...] = (KeyChoice(2), KeyChoice(3), KeyChoice(4))
    values: tuple[ValueChoice, ...] = (ValueChoice(2), ValueChoice(3), ValueChoice(4))
    kl_samples: Size = 6
    kl_tokens: Annotated[Tokens, Field(ge=2)] = 768
    proxy_plans: SizeOrNone = 30
    refine_rounds: SizeOrNone = 3
    neighbours: SizeOrNone = 2
    seed: Seed = 0

    def __post_init__(self) -> None:
        if not self.keys or not self.values:
            raise ValueError("keys and values need one choice or more each")
