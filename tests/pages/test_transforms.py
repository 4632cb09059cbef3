"""Transforms of pages: what was applied is undone."""

import pytest
import torch
from torch import Tensor

from kvcal.pages.rescale_and_rope import BeforeRope, Transform, rotate, unrotate

PAGES, HEADS, DIM = 3, 2, 16
SHAPE = (PAGES, HEADS, 128, DIM)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def examples() -> dict[str, list[BeforeRope] | list[Transform]]:
    """Transforms with far-off numbers; 6 of the 8 pairs turn, with an amplitude."""
    rescale, offset = random(HEADS, 1, DIM).exp() * 100, random(HEADS, 1, DIM, seed=1) * 50
    table = torch.stack([torch.arange(6), torch.arange(6) + 8, 0.5 ** torch.arange(6), torch.full((6,), 1.3)], dim=1)
    positions = torch.tensor([0, 7, 4000])[:, None, None] * 128 + torch.arange(128)
    return {
        "rescale and offset": [Transform(rescale, offset), Transform(rescale), Transform(offset=offset)],
        "before RoPE": [BeforeRope(table.double(), positions)],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["rescale and offset", "before RoPE"])
def test_what_was_applied_is_undone(name: str, dtype: torch.dtype) -> None:
    x = (random(*SHAPE, seed=3) * 10).to(dtype)
    before = x.clone()
    for transform in examples()[name]:
        applied = transform.apply(x)
        assert applied.shape == x.shape and applied.dtype == torch.float32
        assert (applied - x.float()).abs().mean() > 0.1  # it does something
        torch.testing.assert_close(transform.undo(applied), x.float(), rtol=1e-5, atol=1e-4)
        assert torch.equal(x, before)


def test_nothing_to_do_leaves_a_page_in_its_own_dtype() -> None:
    x = random(*SHAPE).bfloat16()
    assert Transform().apply(x) is x and Transform().undo(x) is x


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits() -> None:
    x = random(*SHAPE, seed=3)
    for transform in examples()["rescale and offset"]:
        fields = {key: None if value is None else value.cuda() for key, value in vars(transform).items()}
        on_device = type(transform)(**fields)
        assert torch.equal(on_device.apply(x.cuda()).cpu(), transform.apply(x))
        assert torch.equal(on_device.undo(x.cuda()).cpu(), transform.undo(x))


def test_keys_turn_as_complex_numbers_and_back() -> None:
    """Pairs (0, 3) and (5, 1) with amplitudes as of YaRN; channels 2 and 4 in no pair."""
    table = torch.tensor([[0, 3, 0.7, 1.25], [5, 1, 0.01, 0.8]], dtype=torch.float64)
    positions = torch.tensor([0, 1, 17, 4000])
    keys = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    expected = keys.double().clone()
    for a, b, angle, amplitude in table.tolist():
        turn = amplitude * torch.exp(1j * angle * positions.double())
        turned = torch.complex(keys[..., int(a)].double(), keys[..., int(b)].double()) * turn
        expected[..., int(a)], expected[..., int(b)] = turned.real, turned.imag
    found = rotate(keys, table, positions)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(unrotate(found, table, positions), keys, rtol=1e-6, atol=1e-6)
