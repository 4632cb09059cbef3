"""Error feedback: its factor, codes against a loop that rounds every fp64 operation to fp32, the error that
it lowers; and the grid of rotated pages."""

from __future__ import annotations

import bisect
import itertools

import pytest
import torch
from page_cases import random_page
from torch import Tensor

from kvcal.pages.error_feedback import (
    LARGEST_FACTOR,
    factor_row,
    factor_spec,
    factor_weights,
    feedback_factor,
    round_with_feedback,
)
from kvcal.pages.hadamard import random_signs, rotate
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.pages.uniform import UniformLayout
from kvcal.stored_tensor import StoredTensor
from kvcal.systems.basis.rotated import CANDIDATES, LOWEST, SCALE_DTYPE, STEPS, RotatedLayout
from kvcal.systems.kitty.tiered import TieredLayout

SIDE_AXES = [("k", "channel"), ("k", "token"), ("v", "token")]


def hessian_of(num_heads: int, head_dim: int, seed: int = 0) -> Tensor:
    """[N, D, D] fp64 of few loud directions, as queries have, and a little of everything."""
    generator = torch.Generator().manual_seed(seed)
    loud = torch.randn(num_heads, head_dim, max(2, head_dim // 8), generator=generator, dtype=torch.float64) * 3
    return loud @ loud.transpose(1, 2) + 0.1 * torch.eye(head_dim, dtype=torch.float64)


def upper_of(factor: Tensor, head_dim: int) -> Tensor:
    """U fp64 [N, D, D] of a stored factor."""
    upper = torch.eye(head_dim, dtype=torch.float64).repeat(len(factor), 1, 1)
    for channel in range(head_dim):
        upper[:, channel, channel + 1 :] = factor_row(factor, channel, head_dim).double()
    return upper


def test_factors_stay_finite_where_a_channel_all_but_follows_another() -> None:
    upper = torch.tensor([[1.0, 1e6], [0.0, 1.0]], dtype=torch.float64)
    factor, _ = feedback_factor((upper @ upper.T)[None], 0.0)
    assert factor_row(factor, 0, 2).item() == LARGEST_FACTOR
    factor, _ = feedback_factor((upper.inverse().T @ upper.inverse())[None].flip(1, 2), 0.0)
    assert bool(factor.isfinite().all()) and factor_row(factor, 0, 2).item() == -LARGEST_FACTOR


def fp32(number: float) -> float:
    """To the nearest fp32: of one sum, product or quotient of fp32 numbers in fp64, this is what fp32 would
    give."""
    return torch.tensor(number, dtype=torch.float64).float().item()


def wanted(
    x: list[float], scale: list[float], zero: list[float], levels: list[int], upper: list[list[float]], raw=None
):
    """Codes and targets of one token, channel by channel."""
    errors: list[float] = []
    codes, targets = [], []
    for k, value in enumerate(x):
        target = value
        for j, error in enumerate(errors):
            target = fp32(target + fp32(upper[j][k] * error))
        steps = fp32(fp32(target - zero[k]) / scale[k]) if scale[k] else 0.0
        code = min(max(round(steps), 0), levels[k])
        decoded = fp32(fp32(code * scale[k]) + zero[k])
        if raw is not None and levels[k] == 0:
            decoded = torch.tensor(target, dtype=torch.float32).to(raw).float().item()
        errors.append(fp32(value - decoded))
        codes.append(code)
        targets.append(target)
    return codes, targets


@pytest.mark.parametrize(("head_dim", "num_heads"), [(2, 1), (7, 2), (20, 3), (64, 1)])
def test_codes_are_those_of_a_loop(head_dim: int, num_heads: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    x = torch.randn(2, num_heads, 5, head_dim, generator=generator)
    scale = torch.rand(2, num_heads, 1, head_dim, generator=generator) + 0.2
    scale[..., 1] = 0.0  # a constant channel
    zero = torch.randn(2, num_heads, 5, 1, generator=generator) - 1
    levels = torch.tensor([3, 0, 1, 15, 255])[
        torch.randint(5, (2, num_heads, 1, head_dim), generator=generator)
    ].float()
    factor, _ = feedback_factor(hessian_of(num_heads, head_dim), 0.01)
    upper = upper_of(factor, head_dim)
    for raw in (None, torch.bfloat16):
        codes, targets = round_with_feedback(x, scale, zero, levels, factor, raw)
        assert (codes.dtype, codes.shape, targets.shape) == (torch.uint8, x.shape, x.shape)
        for page, head, token in itertools.product(range(2), range(num_heads), range(5)):
            found = wanted(
                x[page, head, token].tolist(),
                scale[page, head, 0].tolist(),
                zero[page, head, token].tolist() * head_dim,
                [int(level) for level in levels[page, head, 0].tolist()],
                upper[head].tolist(),
                raw,
            )
            assert (codes[page, head, token].tolist(), targets[page, head, token].tolist()) == found


@pytest.mark.parametrize("head_dim", [1, 2, 20, 96, 128])
def test_the_factor_is_the_hessians(head_dim: int) -> None:
    hessian, damping = hessian_of(3, head_dim), 0.02
    factor, share = feedback_factor(hessian, damping)
    assert factor_spec(3, head_dim).fault(StoredTensor.of(factor)) is None
    mean = hessian.diagonal(dim1=1, dim2=2).mean(1)
    damped = hessian + damping * mean[:, None, None] * torch.eye(head_dim, dtype=torch.float64)
    upper = upper_of(factor, head_dim)
    inverse = torch.linalg.inv(upper)
    middle = inverse @ damped @ inverse.transpose(1, 2)  # diag(d)
    diagonal = middle.diagonal(dim1=1, dim2=2)
    costs = diagonal / diagonal.mean(1, keepdim=True)
    torch.testing.assert_close(factor_weights(factor, head_dim).double(), costs, rtol=0.01, atol=2e-3)
    rest = middle - torch.diag_embed(diagonal)
    assert float(rest.abs().max()) <= 2e-3 * float(middle.abs().max())  # fp16
    torch.testing.assert_close(share, diagonal.sum(1) / (damped.diagonal(dim1=1, dim2=2)).sum(1), rtol=0.02, atol=1e-3)
    assert bool((share <= 1).all()) and (head_dim < 20 or bool((share < 0.5).all()))


def test_a_head_without_queries_gets_no_feedback() -> None:
    hessian = hessian_of(2, 16)
    hessian[1] = 0
    factor, share = feedback_factor(hessian, 0.01)
    assert torch.equal(upper_of(factor, 16)[1], torch.eye(16, dtype=torch.float64)) and float(share[1]) == 1.0
    assert factor_weights(factor, 16)[1].tolist() == [1.0] * 16 and bool(upper_of(factor, 16)[0].triu(1).any())


def weighted_error(x: Tensor, decoded: Tensor, hessian: Tensor) -> float:
    error = x.double() - decoded.double()
    return float(torch.einsum("mntd,nde,mnte->", error, hessian, error))


@pytest.mark.parametrize("num_bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("side", "axis", "head_dim", "group_size", "num_heads"),
    [("k", "channel", 64, 32, 1), ("k", "token", 80, 64, 7), ("v", "token", 96, 128, 2)],
)
def test_feedback_lowers_the_weighted_error_on_the_same_grid(
    num_bits: int, side: str, axis: str, head_dim: int, group_size: int, num_heads: int
) -> None:
    layout = UniformLayout(side, num_bits, axis, group_size, head_dim, "float16", "bfloat16")
    x = torch.randn(1, num_heads, PAGE_TOKENS, head_dim, generator=torch.Generator().manual_seed(1))
    hessian = hessian_of(num_heads, head_dim)
    factor, share = feedback_factor(hessian, 0.01)
    plain, fed = layout.encode_pages(x, {}), layout.encode_pages(x, {"feedback": factor})
    assert plain.shape == fed.shape
    for before, after in zip(layout.fields(plain)[1:], layout.fields(fed)[1:], strict=True):
        assert torch.equal(before, after)  # scales and zeros
    errors = [weighted_error(x, layout.decode(records), hessian) for records in (plain, fed)]
    # Codes saturate at few bits; without that, the share is what is left.
    bound = {1: 0.9, 2: 0.75}.get(num_bits, 1.3 * float(share.mean()))
    assert errors[1] <= bound * errors[0]
    if num_bits == 8:
        assert errors[1] >= 0.4 * float(share.mean()) * errors[0]


def test_an_identity_leaves_codes_as_they_are() -> None:
    factor, share = feedback_factor(torch.eye(80, dtype=torch.float64).repeat(2, 1, 1), 0.01)
    torch.testing.assert_close(share, torch.ones(2, dtype=torch.float64))
    pages = torch.stack([random_page(80, 0), random_page(80, 1)]).unsqueeze(0)
    layout = UniformLayout("k", 2, "channel", 64, 80, "float16", "bfloat16")
    assert torch.equal(layout.encode_pages(pages, {"feedback": factor}), layout.encode_pages(pages, {}))


@pytest.mark.parametrize(("side", "num_bits", "group_size", "head_dim"), [("k", 2, 128, 20), ("v", 3, 32, 96)])
def test_rotated_tokens_take_the_scales_that_err_least(
    side: str, num_bits: int, group_size: int, head_dim: int
) -> None:
    layout = RotatedLayout(side, num_bits, "token", group_size, head_dim, SCALE_DTYPE, "bfloat16")
    x = torch.stack([random_page(head_dim, 0), random_page(head_dim, 1)]).unsqueeze(0)
    operands = {"signs": random_signs(head_dim, 3)}
    factor, _ = feedback_factor(hessian_of(2, head_dim), 0.01)
    codes, scales, _ = layout.fields(layout.encode_pages(x, operands | {"feedback": factor}))
    codes, scales = (layout._turned(part) for part in (codes, scales.float()))
    rotated = rotate(x, operands["signs"]).bfloat16()
    upper, weights = upper_of(factor, head_dim), factor_weights(factor, head_dim).tolist()
    middle = (2**num_bits - 1) / 2
    ladder = sorted((1 + mantissa / 4) * 2.0**exponent for mantissa in range(4) for exponent in range(-14, 16))
    taken = set()
    for head, token in itertools.product(range(2), range(0, PAGE_TOKENS, 9)):
        values, errors = rotated[0, head, token].double(), []
        lowest = [LOWEST * STEPS[num_bits] * group.square().mean().sqrt().item() for group in values.split(group_size)]
        first = [bisect.bisect_right(ladder, step) - 1 for step in lowest]
        for number in range(CANDIDATES):
            steps = [ladder[place + number] for place in first for _ in range(group_size)][:head_dim]
            starts, levels = [-middle * step for step in steps], [2**num_bits - 1] * head_dim
            found, targets = wanted(values.tolist(), steps, starts, levels, upper[head].tolist())
            stored = [code * step + start for code, step, start in zip(found, steps, starts, strict=True)]
            error = sum(d * (a - b) ** 2 for d, a, b in zip(weights[head], targets, stored, strict=True))
            errors.append((error, found, steps[::group_size]))
        _, found, steps = min(errors)
        assert (codes[0, head, token].tolist(), scales[0, head, token].tolist()) == (found, steps)
        taken.add(errors.index(min(errors)))
    assert len(taken) > 1


def test_tiers_have_the_codes_of_the_loop() -> None:
    layout = TieredLayout(2, ((16, 1, None), (4, 3, None)), 128, 9, "float32", "bfloat16")
    x = torch.randn(1, 1, PAGE_TOKENS, 9, generator=torch.Generator().manual_seed(2))
    scores = torch.arange(9.0).double()[None, None]
    factor, _ = feedback_factor(hessian_of(1, 9), 0.01)
    decoded, plain = layout.decode(layout.encode(x, scores, factor)), layout.encode(x, scores)
    levels = [3] * 5 + [15] * 3 + [0]
    *_, scale, zero, _, _ = layout._split(plain)
    scale, zero = (part.contiguous().view(torch.float32).view(-1)[:9].tolist() for part in (scale, zero))
    for token in range(PAGE_TOKENS):
        codes, targets = wanted(
            x[0, 0, token].tolist(), scale, zero, levels, upper_of(factor, 9)[0].tolist(), torch.bfloat16
        )
        expected = [fp32(fp32(code * s) + z) for code, s, z in zip(codes, scale, zero, strict=True)]
        expected[8] = torch.tensor(targets[8]).bfloat16().float().item()
        assert decoded[0, 0, token].tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_a_gpu_chooses_the_same_codes(head_dim: int) -> None:
    x = torch.randn(3, 2, PAGE_TOKENS, head_dim, generator=torch.Generator().manual_seed(1))
    factor, _ = feedback_factor(hessian_of(2, head_dim), 0.01)
    for num_bits in (1, 2, 3, 4, 8):
        layout = UniformLayout("k", num_bits, "channel", 64, head_dim, "float16", "bfloat16")
        on_gpu = layout.encode_pages(x.cuda(), {"feedback": factor.cuda()})
        assert torch.equal(on_gpu.cpu(), layout.encode_pages(x, {"feedback": factor}))
