"""The sections of a recipe for the five systems and their combination: every knob, with its default.

Where a paper has a value, it is the default. What the sections do is in the stages of the same names.
"""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from kvcal.formats import Boost, Side
from kvcal.strict import STRICT


@dataclass(frozen=True, config=STRICT)
class ReparamSpec:
    """[reparam], PM-KVQ's λ: positions times ``position_scale``, α on a grid of ``num_steps`` + 1 values over [0, 1];
    ``offset``: a static key offset is searched, too. ``shared_heads``: one λ for all KV heads of a layer, which models
    with QK-norm need to fold it into their weights."""

    position_scale: float = 4.0
    num_steps: int = 20
    num_samples: int = 4
    seq_len: int = 2048
    offset: bool = False
    shared_heads: bool = False

    def __post_init__(self) -> None:
        if self.position_scale <= 0 or self.num_steps < 1 or self.num_samples < 1 or self.seq_len < 2:
            raise ValueError(
                f"expected position_scale = {self.position_scale} > 0, num_steps = {self.num_steps} and num_samples = "
                f"{self.num_samples} of 1 or more, seq_len = {self.seq_len} of 2 or more"
            )


@dataclass(frozen=True, config=STRICT)
class PredictorSpec:
    """[predictors], AQUA-KV: of which kind, and when one is left out. ``holdout_share`` of the calibration sequences
    measures the explained variance; ``min_explained``: up to it a predictor is left out, as where it saves less bytes
    than it takes (``drop`` false keeps all). Ablations: ``sides`` predicts keys or values alone; ``inputs`` "exact"
    fits on what the model computes instead of what the cache reads back."""

    kind: Literal["linear", "low_rank", "int4"] = "linear"
    rank: int | None = None
    group_size: int | None = None
    ridge: float = 1e-3
    holdout_share: float = 0.25
    min_explained: float = 0.1
    drop: bool = True
    sides: tuple[Side, ...] = ("k", "v")
    inputs: Literal["reconstructed", "exact"] = "reconstructed"

    def __post_init__(self) -> None:
        if self.ridge <= 0 or not 0 < self.holdout_share < 1:
            raise ValueError(
                f"ridge = {self.ridge} must be positive and holdout_share = {self.holdout_share} in (0, 1)"
            )
        for kind, value in (("low_rank", self.rank), ("int4", self.group_size)):
            if (value is not None) != (self.kind == kind):
                raise ValueError(f"{kind} takes {'rank' if kind == 'low_rank' else 'group_size'}, other kinds do not")
            if value is not None and value < 1:
                raise ValueError(f"{'rank' if kind == 'low_rank' else 'group_size'} = {value}, expected 1 or more")
        if not self.sides or len(set(self.sides)) < len(self.sides):
            raise ValueError(f"sides = {list(self.sides)}, expected one or both of ['k', 'v']")


@dataclass(frozen=True, config=STRICT)
class ProgressiveSpec:
    """[progressive], PM-KVQ's 16 -> 8 -> 4 -> 2: pages shrink when the budget for the tokens so far is used up. The
    budget is the allocation's, or ``bits`` per cached value, all in. Shifts but "equivalent" are ablations."""

    bits: float | None = None
    shift: Literal["equivalent", "modified", "direct"] = "equivalent"


@dataclass(frozen=True, config=STRICT)
class ImportanceSpec:
    """[importance], KVmix: the ``share`` of layers with the largest gradient norms gets ``k_high_bits`` and
    ``v_high_bits`` (K and V apart), and larger recent windows. ``window``: the paper's rule page by page, a clamped
    share of the text, or none (see formats.WindowRule). ``random_seed``: layers at random instead, the ablation.
    """

    share: float = 0.2
    k_high_bits: Literal[2, 3, 4, 8] = 3
    v_high_bits: Literal[2, 3, 4, 8] = 4
    low_bits: Literal[1, 2, 3, 4] = 2
    group_size: Literal[32, 64, 128] = 32
    window: Literal["paged", "clamped", "none"] = "paged"
    high_window_share: float = 0.2
    low_window_share: float = 0.1
    min_window: int = 0
    max_window: int = 512
    random_seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share = {self.share}, expected 0 to 1")
        shares = (self.high_window_share, self.low_window_share)
        if not (all(0 <= share < 1 for share in shares) and 0 <= self.min_window <= self.max_window):
            raise ValueError(
                f"expected window shares {shares} of 0 to below 1, and 0 <= min_window = {self.min_window} <= "
                f"max_window = {self.max_window}"
            )


@dataclass(frozen=True, config=STRICT)
class TuneSpec:
    """[tune], MixKVQ's threshold search: ``num_trials`` of Optuna's TPE over [``low``, ``high``] for every threshold of
    the recipe's key tiers, accuracy up and all-in bits down; the best accuracy under ``max_bits`` is chosen.
    ``fit_range``: instead of ``high``, the score that 1 % of the channels of calibration pages exceed.
    ``fit_capacity``: a tier's room is what ``page_share`` of the calibration pages need at the trial's thresholds (1:
    the largest need), instead of its share in the recipe."""

    tasks: tuple[str, ...] = ("ledger", "chain", "times")
    num_problems: int = 16
    num_trials: int = 30
    low: float = 0.1
    high: float = 2.0
    fit_range: bool = False
    max_bits: float | None = None
    fit_capacity: bool = True
    page_share: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high or self.num_trials < 1 or self.num_problems < 1 or not self.tasks:
            raise ValueError(
                f"expected 0 < low = {self.low} < high = {self.high}, num_trials = {self.num_trials} and num_problems "
                f"= {self.num_problems} of 1 or more, and one task or more"
            )
        if not 0 < self.page_share <= 1:
            raise ValueError(f"page_share = {self.page_share}, expected more than 0 and at most 1")


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
    for all layers, the largest that fits the budget. ``kl_samples`` texts of ``kl_tokens``. ``proxy_plans`` random
    plans check how well these KLs add up. In each of ``refine_rounds`` the best plan so far is the background, and up
    to ``neighbours`` dearer and cheaper compositions of every layer are measured around it.
    """

    keys: tuple[KeyChoice, ...] = (KeyChoice(2), KeyChoice(3), KeyChoice(4))
    values: tuple[ValueChoice, ...] = (ValueChoice(2), ValueChoice(3), ValueChoice(4))
    kl_samples: int = 6
    kl_tokens: int = 768
    proxy_plans: int = 30
    refine_rounds: int = 3
    neighbours: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.keys or not self.values:
            raise ValueError("keys and values need one choice or more each")
        if self.kl_samples < 1 or self.kl_tokens < 2 or min(self.proxy_plans, self.refine_rounds, self.neighbours) < 0:
            raise ValueError(
                f"expected kl_samples = {self.kl_samples} of 1 or more, kl_tokens = {self.kl_tokens} of 2 or more, and "
                "no negative counts"
            )
