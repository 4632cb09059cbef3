"""[progressive] and [reparam]."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal.strict import STRICT, Bits, Size, TextTokens, knob
from kvcal.systems import Section


@dataclass(frozen=True, config=STRICT)
class ProgressiveSpec(Section):
    """[progressive], PM-KVQ's 16 -> 8 -> 4 -> 2: pages shrink when the budget for the tokens so far is used
    up."""

    reads_text = False
    in_engines = False
    bits: Bits | None = knob(None, "All-in bits per cached value; default: the allocation's budget.")


@dataclass(frozen=True, config=STRICT)
class ReparamSpec(Section):
    """[reparam], PM-KVQ's λ: channel factors of the keys, searched on a grid of α."""

    position_scale: Annotated[float, Field(gt=0, le=1000)] = knob(4.0, "Stretches positions: short text for long.")
    num_steps: Annotated[int, Field(ge=1, le=1000)] = knob(20, "Steps of the grid of α over [0, 1].")
    num_samples: Size = knob(4, "Calibration sequences.")
    seq_len: TextTokens = knob(2048, "Tokens of each at most.")
