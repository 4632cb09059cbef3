"""Pages to pack."""

import torch

from kvcal.pages.layout_protocol import PAGE_TOKENS


def random_page(dim: int, seed: int = 0) -> torch.Tensor:
    """[128, dim] bf16 values, with an outlier channel, a constant channel and a constant token."""
    page = torch.randn(PAGE_TOKENS, dim, generator=torch.Generator().manual_seed(seed))
    page[:, 3] *= 30.0
    page[:, 5] = -0.75
    page[7, :] = 0.5
    return page.to(torch.bfloat16)
