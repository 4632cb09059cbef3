"""[feedback] and [basis]."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvcal.strict import STRICT, Size, TextTokens, knob
from kvcal.systems import Section


@dataclass(frozen=True, config=STRICT)
class FeedbackSpec(Section):
    """[feedback], GPTQ's and LDLQ's error feedback: codes of a token are chosen one after the other, each
    making up for the errors before it. Pages and their decoder stay. ``stage``: its name, and its artifact's
    kind."""

    stage: ClassVar[str] = "feedback"
    excludes = {"progressive": "its pages round codes again"}
    damping: Annotated[float, Field(ge=1e-4, le=10)] = knob(0.03, "Added to the Hessian, times its mean diagonal.")
    position_scale: Annotated[float, Field(gt=0, le=1000)] = knob(4.0, "Stretches positions: short text for long.")
    num_samples: Size = knob(16, "Calibration sequences.")
    seq_len: TextTokens = knob(2048, "Tokens of each at most.")


@dataclass(frozen=True, config=STRICT)
class BasisSpec(FeedbackSpec):
    """[basis], in which rotated pages are stored: the one that queries and output weights ask for. Codes are
    chosen with error feedback in it."""

    stage: ClassVar[str] = "basis"
    excludes = {**FeedbackSpec.excludes, "feedback": "a basis has error feedback of its own"}
    position_scale: Annotated[float, Field(gt=0, le=1000)] = knob(1.0, "Stretches positions: short text for long.")
    exponent: Annotated[float, Field(ge=0, le=0.5)] = knob(0.4375, "How far the basis evens out energies.")
