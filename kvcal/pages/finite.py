"""Refusing what cannot be stored: by an error, or, where nobody may wait for the device, by a bit of a flag.

Every quantizer asks here whether its parameters are finite. To raise, the host must see the answer, and so waits for
the device; a decoding step must not, least of all in a CUDA graph. Within ``noted_in`` the answer stays on the device:
the flag is set, what was computed is undefined, and whoever reads the flag later raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from kvcal.errors import NonFiniteActivations

_NOTED: ContextVar[tuple[Tensor, int] | None] = ContextVar("noted", default=None)


@contextmanager
def noted_in(flag: Tensor, bit: int) -> Iterator[None]:
    """Within the context, what is not finite sets ``bit`` of flag, an integer tensor [1] on the values' device."""
    before = _NOTED.set((flag, bit))
    try:
        yield
    finally:
        _NOTED.reset(before)


def require_finite(values: Tensor, message: str, hint: str) -> None:
    """NonFiniteActivations, or a bit of a flag, unless all of ``values`` are finite; of any float dtype (fp64
    far from the end of its range, as all that comes from fp32)."""
    # One sum instead of an isfinite map: a sum of finite values is finite in fp64.
    finite = torch.isfinite(values.sum(dtype=torch.float64))
    noted = _NOTED.get()
    if noted is not None:
        flag, bit = noted
        flag.bitwise_or_((~finite).to(flag.dtype) * bit)
    elif not finite:
        raise NonFiniteActivations(message, hint=hint)
