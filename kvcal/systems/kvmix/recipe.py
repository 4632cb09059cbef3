"""[importance]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal.strict import STRICT, GroupSize, Share, SizeOrNone, knob


@dataclass(frozen=True, config=STRICT)
class ImportanceSpec:
    """[importance], KVmix: layers with the largest gradient norms (K and V apart) get more bits and larger
    windows."""

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

    def __post_init__(self) -> None:
        if self.min_window > self.max_window:
            raise ValueError(f"expected min_window = {self.min_window} <= max_window = {self.max_window}")
