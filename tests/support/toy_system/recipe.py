"""[mirror]."""

from pydantic.dataclasses import dataclass

from kvcal.strict import STRICT, Size, knob
from kvcal.systems import Section


@dataclass(frozen=True, config=STRICT)
class MirrorSpec(Section):
    """[mirror], a toy."""

    excludes = {"feedback": "a mirror has two sides"}
    reads_text = False
    times: Size = knob(1, "How often it is looked into.")


@dataclass(frozen=True, config=STRICT)
class Recipe:
    """The section of the toy."""

    mirror: MirrorSpec | None = None
