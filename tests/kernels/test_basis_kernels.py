"""``enter`` and ``leave``: sums of integers one by one, the torch reference, and the kernels, on a CPU by
emulation.

Bytes of what enters are equal; turned queries and outputs are within what products of two halves leave."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from cubin_resources import resources
from emulated import EmulatedKernel, require_compiler
from torch import Tensor

from kvcal.kernels import basis as launching
from kvcal.kernels import ops, reference
from kvcal.kernels.choice import MAX_ROTATED_DIM
from kvcal.kernels.compile import cubin
from kvcal.kernels.reference import NON_FINITE
from kvcal.kernels.variants import Variant
from kvcal.plan.page_format import Boost, Format, Tier
from kvcal.systems.basis.basis import Basis, rounded

N = 2
CHIPS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
ACCURACY = 1e-6  # of turned queries and outputs: root mean square of errors, of that of the result


def random_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def basis_of(dim: int, has_center: bool = True) -> Basis:
    """Rows of unlike size, one of them 0. Of a row, and of a token of zeros less the center, the largest
    number rounds up to a power of two that its integers do not reach."""
    matrix = random_of(N, dim, dim, seed=1) * torch.logspace(-3, 1, dim).unsqueeze(1)
    matrix[0, 3], matrix[1, 4, 6] = 0, 64 - 2**-12
    center = random_of(N, dim, seed=2) * torch.logspace(-2, 1, dim) if has_center else None
    if center is not None:
        center[0, 1] = 2**-16 - 256
    inverse = random_of(N, dim, dim, seed=3) * torch.logspace(-2, 2, dim)
    return Basis(rounded(matrix), inverse.mT.contiguous().mT, center)  # by columns, as of torch.linalg.inv


def tokens_of(dtype: torch.dtype, *shape: int) -> Tensor:
    """Large and small tokens, zeros, outliers."""
    x = random_of(*shape, seed=4) * torch.logspace(-3, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
    x[..., 5] *= 50
    x[0] = 0
    return x.to(dtype)


def power_of_two(x: float) -> int:
    """e of the least 2^e above |x|."""
    return math.frexp(x)[1]


def entered_one_by_one(basis: Basis, x: Tensor) -> Tensor:
    """T (x - c) of x [rows, N, D] in Python's integers, rounded to fp32 and to x's dtype."""
    out = torch.empty_like(x)
    for row in range(len(x)):
        for head in range(N):
            a = x[row, head].float() - (0 if basis.center is None else basis.center[head])
            token = max(power_of_two(float(a.abs().max())), -94)
            numbers = [min(round(math.ldexp(number, 23 - token)), 2**23 - 1) for number in a.tolist()]
            for channel, entries in enumerate(basis.matrix[head].tolist()):
                scale = max(power_of_two(max(map(abs, entries))), -62)
                integers = [min(round(math.ldexp(entry, 15 - scale)), 2**15 - 1) for entry in entries]
                total = sum(i * n for i, n in zip(integers, numbers, strict=True))
                y = torch.tensor(float(total), dtype=torch.float64).float()  # below 2^53
                out[row, head, channel] = y * 2.0 ** (scale - 15) * 2.0 ** (token - 23)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("has_center", [True, False])
def test_tokens_enter_by_sums_of_integers(dtype: torch.dtype, has_center: bool) -> None:
    basis, x = basis_of(24, has_center), tokens_of(dtype, 7, N, 24)
    entered = basis.enter(x)
    assert torch.equal(entered, entered_one_by_one(basis, x))
    assert torch.equal(entered[2:4], basis.enter(x[2:4])) and torch.equal(entered.flip(-1).flip(-1), basis.enter(x))
    permuted = Basis(basis.matrix.flip(-1), basis.inverse, None if basis.center is None else basis.center.flip(-1))
    assert torch.equal(permuted.enter(x.flip(-1)), entered)


def test_entering_errs_by_little_and_keeps_what_is_not_finite() -> None:
    basis, x = basis_of(128), tokens_of(torch.float32, 40, N, 128)[1:]
    exact = torch.einsum("...nd,ned->...ne", x.double() - basis.center, basis.matrix.double())
    error = (basis.enter(x) - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) < 1e-5 and float(basis.matrix[0, 3].abs().max()) == 0
    for value in (math.nan, math.inf, -math.inf):
        x[3, 1, 7] = value
        found = basis.enter(x)
        assert found[3, 1].isnan().all() and found[3, 0].isfinite().all() and found[2].isfinite().all()
    tiny = torch.full((1, N, 128), 1e-44)
    assert Basis(basis.matrix, basis.inverse).enter(tiny).isfinite().all()


class Launched:
    """Both operators as a GPU serves them, of tensors on the CPU."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def kernel(entry: str, dim: int, group: int, dtypes: tuple[torch.dtype, ...], _: int) -> EmulatedKernel:
            return EmulatedKernel("basis", entry, launching.basis_defines(entry, dim, group, dtypes), folder)

        require_compiler()
        monkeypatch.setattr(launching, "_kernel", kernel)
        self.enter, self.leave = launching.launch_enter, launching.launch_leave


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    return Launched(tmp_path, monkeypatch)


def accuracy(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def check(launched: Launched, dim: int, group: int, dtype: torch.dtype, q_dtype: torch.dtype, lead: tuple[int, ...],
          device: str = "cpu") -> None:  # fmt: skip
    """Tokens and queries as slices of wider tensors, as projections give them."""
    k_basis, v_basis = basis_of(dim), basis_of(dim, has_center=False)
    k, v = (tokens_of(dtype, *lead, N + 1, dim)[..., part, :] for part in (slice(N), slice(1, None)))
    q = random_of(*lead, (N + 1) * group, dim, seed=8).to(q_dtype)[..., : N * group, :]
    on_device = [x.to(device) for x in (k, v, q)]
    bases = [[x.to(device) for x in basis.operands] for basis in (k_basis, v_basis)]
    error, expected_error = (torch.zeros(1, dtype=torch.int32, device=where) for where in (device, "cpu"))
    keys, values, turned = (x.cpu() for x in launched.enter(*on_device, *bases, error))
    expected = reference.enter(k, v, q, k_basis.operands, v_basis.operands, expected_error)
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
    exact = torch.einsum("...ngd,nde->...nge", q.double().unflatten(-2, (N, group)), k_basis.inverse.double())
    assert turned.shape == q.shape and accuracy(turned.unflatten(-2, (N, group)), exact) < ACCURACY
    assert int(error) == int(expected_error)
    attention = random_of(*lead, N * group, dim, seed=9)
    check_left(launched, attention, v_basis, q_dtype, device)
    check_left(launched, attention.to(dtype)[..., :N, :], k_basis, q_dtype, device)


def check_left(launched: Launched, y: Tensor, basis: Basis, dtype: torch.dtype, device: str) -> None:
    """Attention's outputs, or tokens, which have a center."""
    left = launched.leave(y.to(device), [x.to(device) for x in basis.operands], dtype).cpu()
    exact = torch.einsum("...ngd,ned->...nge", y.double().unflatten(-2, (N, -1)), basis.inverse.double())
    exact += 0 if basis.center is None else basis.center.unsqueeze(-2)
    bound = {torch.float32: ACCURACY, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert left.dtype == dtype and left.shape == y.shape
    assert accuracy(left.unflatten(-2, (N, -1)), exact) < bound


SHAPES = (
    (128, 4, torch.bfloat16, torch.bfloat16, (3,)), (64, 1, torch.float16, torch.float16, (9,)),
    (96, 7, torch.bfloat16, torch.float32, (2, 3)), (128, 8, torch.float16, torch.float16, (1, 4)),
    (72, 3, torch.bfloat16, torch.bfloat16, (17,)), (256, 8, torch.bfloat16, torch.bfloat16, (2,)),
)  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_do_what_the_reference_does(launched: Launched, shape: tuple) -> None:
    check(launched, *shape)


@pytest.mark.gpu
@pytest.mark.parametrize("lead", [(1,), (38,), (5, 8), (700,)], ids=str)
@pytest.mark.parametrize("shape", [shape[:-1] for shape in SHAPES], ids=str)
def test_on_a_gpu(shape: tuple, lead: tuple[int, ...]) -> None:
    class OnGpu:
        enter, leave = staticmethod(ops.enter), staticmethod(ops.leave)

    check(OnGpu, *shape, lead, "cuda")  # type: ignore[arg-type]


def one_sided(launched: Launched, dtype: torch.dtype, x: Tensor, basis: Basis) -> tuple[Tensor, int]:
    error, nothing = torch.zeros(1, dtype=torch.int32), torch.empty(0)
    keys, values, turned = launched.enter(nothing, x.to(dtype), nothing, [], basis.operands, error)
    assert not keys.numel() and not turned.numel()
    return values, int(error)


def test_one_side_alone_and_what_cannot_be_stored(launched: Launched) -> None:
    """A prompt's side, [b, T, n, D] of [b, n, T, D]; a number that is not finite; one that float16 cannot
    hold."""
    basis, x = basis_of(64, has_center=False), tokens_of(torch.float32, 2, 11, N, 64).clamp(-4, 4)
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    values, error = one_sided(launched, torch.bfloat16, x, basis)
    assert torch.equal(values, basis.enter(x.bfloat16())) and error == 0
    x[1, 4, 1, 9] = -math.inf
    values, error = one_sided(launched, torch.bfloat16, x, basis)
    assert error == 0 and values[1, 4, 1].isnan().all() and int(values.isnan().sum()) == 64
    x[1, 4, 1, 9], small = 0, Basis(basis.matrix / 1024, basis.inverse)
    assert one_sided(launched, torch.float16, x, small)[1] == 0
    x[0, 10, 0, 40] = 6e4
    values, error = one_sided(launched, torch.float16, x, Basis(basis.matrix * 128, basis.inverse))
    assert error == NON_FINITE and values[0, 10, 0].isinf().any()


@pytest.mark.parametrize(("dim", "registers"), ((128, 160), (MAX_ROTATED_DIM, 255)))
@pytest.mark.parametrize("arch", CHIPS)
def test_the_kernels_fit_every_chip(arch: str, dim: int, registers: int) -> None:
    """No spill up to 128 channels; the largest heads that pages in a basis have on a GPU may spill four registers."""
    for dtype, q_dtype in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        for entry, dtypes in (("enter", (dtype, q_dtype)), ("leave", (torch.float32, q_dtype))):
            defines = launching.basis_defines(entry, dim, 4, dtypes)
            needs = resources(cubin("basis", defines, arch))[entry]
            assert needs.local_bytes <= (0 if dim <= 128 else 16) and needs.static_shared_bytes == 0
            assert needs.registers <= registers and needs.fp64 == 0


def test_scores_of_channels_are_counted_as_fp64() -> None:
    """Which no kernel of a step has besides: consumer GPUs have it at a 64th of the speed of fp32."""
    tiered = Format(2, "channel", boost=Boost("variance", (Tier(4, 0.125),)))  # scores are means in fp64
    scored = Variant(tiered, Format(2, quantizer="rotated"), 128, "bfloat16", 4, False, False)
    assert resources(cubin("pack", scored.defines, "sm_89"))["append"].fp64 > 0
