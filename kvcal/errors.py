"""Every error for users, one class per kind, each with a stable exit code; a warning; and the hint of a
misspelling.

A message names the value, the place and the allowed set; the optional hint says what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Self


class KvcalError(Exception):
    """Base class; never raised itself."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.place: str | None = None

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        """The hint, which Python prints below a traceback: an engine logs nothing else of an error."""
        return [] if self.hint is None else [f"hint: {self.hint}"]

    def __reduce__(self) -> tuple[object, ...]:
        """Errors of one rank are raised on all of them."""
        return _unpickled, (type(self), self.message, vars(self))

    def at(self, place: object) -> Self:
        """The error with its place, such as a file, for programs: the message names it for people."""
        self.place = str(place)
        return self


def _unpickled(kind: type[KvcalError], message: str, attributes: dict[str, object]) -> KvcalError:
    error = kind.__new__(kind, message)
    vars(error).update(attributes)
    return error


class UsageError(KvcalError):
    """A wrong argument, recipe key, path or data source."""

    exit_code = 2


class InfeasibleBudget(KvcalError):
    """No allocation fits; ``smallest_bytes`` is the smallest budget (bytes) that would. Where formats are
    chosen: ``least_bits`` per cached value, rounded up to hundredths, and ``parts``, the bytes by what takes
    them."""

    exit_code = 3

    def __init__(
        self,
        message: str,
        smallest_bytes: int,
        hint: str | None = None,
        least_bits: float | None = None,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.smallest_bytes = smallest_bytes
        self.least_bits = least_bits
        self.parts = parts


class UnsupportedModel(KvcalError):
    """The model's attention or cache is one that kvcal refuses, with the reason."""

    exit_code = 4


# The hint for a model that is served, but whose queries, keys, values or weights no stage can find.
WITHOUT_CALIBRATION = "a recipe with [formats], such as kivi-2, compiles a plan without calibration"
# The hint for a model that is not causal.
AS_A_DECODER = "an encoder has no cache; one that was trained as a decoder says is_decoder = true in its config.json"


class ArtifactError(KvcalError):
    """A stale, mismatched, truncated or corrupt file, or one that could not be written."""

    exit_code = 5


class NonFiniteActivations(KvcalError):
    """NaN or infinity in keys, values, gradients or logits."""

    exit_code = 4

    def __init__(
        self,
        message: str,
        hint: str | None = "check the checkpoint; a model that overflows in float16 needs --dtype bfloat16 or float32",
    ) -> None:
        super().__init__(message, hint)


class KernelError(KvcalError):
    """A CUDA kernel that cannot be compiled, loaded or run here: no cuda-core, no GPU, one that is too
    old."""

    exit_code = 6


class GateFailed(KvcalError):
    """A measurement that is beyond a limit that the command was given; its result was printed."""

    exit_code = 7


class RankFailed(KvcalError):
    """Another process of a command of several (kvcal.distributed) has ended before its work was done."""

    exit_code = 8


@contextmanager
def naming(what: str) -> Iterator[None]:
    """A context whose NonFiniteActivations begin with ``what`` was measured."""
    try:
        yield
    except NonFiniteActivations as error:
        raise NonFiniteActivations(f"{what}: {error.message}", error.hint) from error


class SlowPath(UserWarning):
    """A warning: a request is served, but not by the fast kernels."""


def did_you_mean(name: str, allowed: Iterable[str]) -> str | None:
    """A hint with the allowed names that are most like ``name``; None where none is."""
    near = get_close_matches(name, list(allowed))
    return f"did you mean {' or '.join(map(repr, near))}?" if near else None
