"""The damage that a plan does to a model's predictions, in a file next to the plan, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from kvcal.errors import GateFailed
from kvcal.plan.page_format import Side
from kvcal.plan.plan import Plan, save_plan
from kvcal.records import read_json, write_json
from kvcal.strict import STRICT, Amount, Count, Share

DAMAGE, DAMAGE_SCHEMA = "damage", 1
OF_EVALUATION: Mapping[str, Any] = {"evaluation": True}  # inputs of figures that an evaluation has measured

# A plan is destroyed beyond MAX_KL nats per token, or below MIN_TOP1 where KL is above MIN_KL: a model that
# is sure of nothing changes its most likely token for nothing.
MAX_KL, MIN_TOP1, MIN_KL = 0.5, 0.8, 0.1
# Up to FINE_KL, with a top-1 from FINE_TOP1 on, codes that were looked up were found as at 16 bits, within
# two standard errors; rows of long tables were not (docs/which-bits.md).
FINE_KL, FINE_TOP1 = 0.02, 0.94
VERDICTS = (
    f"Fine: up to {FINE_KL:g}, with {FINE_TOP1:.0%} of next tokens the same. Destroyed: above {MAX_KL:g}, or above "
    f"{MIN_KL:g} with fewer than {MIN_TOP1:.0%}."
)
LIMITS = f"allowed: KL up to {MAX_KL:g} and, where it is above {MIN_KL:g}, top-1 from {MIN_TOP1:.0%} on"


@dataclass(frozen=True, config=STRICT)
class SideDamage:
    """KL in nats per token with one side of one layer quantized alone."""

    layer: Count
    side: Side
    kl: Amount


@dataclass(frozen=True, config=STRICT)
class Damage:
    """A plan (by its digest) next to 16 bits over ``num_tokens`` tokens: ``kl`` in nats per token, its
    standard error over texts, and ``top1``, the share of tokens whose most likely token stays. ``worst``: of
    a destroyed plan, the sides that do most by themselves. ``inputs``: what it was measured with."""

    plan_sha256: str
    kl: Amount
    kl_error: Amount | None
    top1: Share
    num_tokens: Count
    texts: str
    worst: tuple[SideDamage, ...]
    inputs: dict[str, Any]

    @property
    def is_of_evaluation(self) -> bool:
        """Whether the figures are those of an evaluation's row."""
        return self.inputs == OF_EVALUATION

    @property
    def is_destroyed(self) -> bool:
        return is_destroyed(self.kl, self.top1)

    @property
    def verdict(self) -> Literal["fine", "watch", "destroyed"]:
        if self.is_destroyed:
            return "destroyed"
        return "fine" if self.kl <= FINE_KL and self.top1 >= FINE_TOP1 else "watch"

    def __str__(self) -> str:
        error = "" if self.kl_error is None else f" ± {self.kl_error:.1g}"
        found = f"KL {self.kl:.3g}{error} nats a token, top-1 {self.top1:.1%} of 16 bits"
        named = ", ".join(f"layer {one.layer} {one.side.upper()} (alone: KL {one.kl:.3g})" for one in self.worst)
        return f"{found}; most by {named}" if named else found


def is_destroyed(kl: float, top1: float) -> bool:
    """Whether a plan of this KL and top-1 agreement is beyond the limits."""
    return kl > MAX_KL or (kl > MIN_KL and top1 < MIN_TOP1)


def damage_path(plan: Path) -> Path:
    return plan.with_name(f"{plan.stem}.damage.json")


def save_damage(damage: Damage, plan: Path) -> None:
    write_json(damage_path(plan), DAMAGE, DAMAGE_SCHEMA, damage)


def load_damage(file: Path, plan: Plan) -> Damage | None:
    """The measurement of ``plan``, which this file holds; None where there is none. The plan's digest needs
    torch, and is taken only where there is a measurement."""
    path = damage_path(file)
    if not path.is_file():
        return None
    damage = read_json(
        path, DAMAGE, DAMAGE_SCHEMA, Damage, "delete the file; `kvcal plan` and `kvcal compile` write it again"
    )
    return damage if damage.plan_sha256 == plan.sha256 else None


def concern(damage: Damage | None) -> str | None:
    """A warning for the user of a plan with this record, or without one; None for a good plan.
    ``concern(load_damage(file, plan))`` is that of a file."""
    if damage is None:
        return "the plan is unchecked: `kvcal inspect --model` measures what it does to the model"
    return f"the plan destroys the model: {damage}" if damage.is_destroyed else None


def save_measured(
    plan: Plan, damage: Damage | None, path: Path, is_allowed: bool, reasons: Mapping[str, Any] | None = None
) -> bool:
    """Write a plan, with its ``reasons`` (``plan_bytes``), after its measurement, so that it never lies there
    unmarked; not one that destroys the model, unless that ``is_allowed``. Whether it was written;
    ArtifactError when a file cannot be."""
    is_written = is_allowed or damage is None or not damage.is_destroyed
    if is_written:
        if damage is not None:
            save_damage(damage, path)
        save_plan(plan, path, reasons)
    return is_written


def require_undamaged(damage: Damage | None, is_allowed: bool) -> None:
    """GateFailed for a plan that destroys the model, unless that ``is_allowed``."""
    if damage is not None and damage.is_destroyed and not is_allowed:
        raise GateFailed(
            f"{concern(damage)}; {LIMITS}",
            hint="a larger budget, or other formats for these layers; --allow-damage takes the plan as it is",
        )
