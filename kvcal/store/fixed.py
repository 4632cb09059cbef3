"""Memory that a captured graph may write to."""

from __future__ import annotations

import torch
from torch import Tensor


def fixed(tensor: Tensor) -> Tensor:
    """The tensor, known to torch.compile as one whose address stays: CUDA graphs may write to it in place."""
    torch._dynamo.mark_static_address(tensor)
    return tensor
