"""As much of numba as vLLM's search for n-grams asks for: its functions run as they are written, in
Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

prange = range


def jit(**options: Any) -> Callable[[Any], Any]:
    return lambda function: function


njit = jit


def get_num_threads() -> int:
    return 1


def set_num_threads(count: int) -> None:
    assert count == 1
