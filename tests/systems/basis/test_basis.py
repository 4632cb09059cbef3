"""Bases of keys and values against the definitions: products that stay, costs and energies that a basis evens
out."""

import math

import pytest
import torch
from torch import Tensor

from kvcal.systems.basis.basis import (
    LARGEST_ENTRY,
    RIDGE,
    Basis,
    basis_specs,
    fitted_basis,
    moved_hessian,
    rounded,
)


def random_of(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def positive(heads: int, dim: int, seed: int) -> Tensor:
    """[N, D, D], with eigenvalues a hundred times apart."""
    x = random_of(heads, 3 * dim, dim, seed=seed) * torch.logspace(-1, 1, dim, dtype=torch.float64)
    return x.mT @ x


def some_basis(heads: int, dim: int, has_center: bool) -> Basis:
    center = random_of(heads, dim, seed=2) if has_center else None
    return fitted_basis(positive(heads, dim, 0), positive(heads, dim, 1), 0.375, center)


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("dim", [16, 64, 96, 192])
def test_scores_and_outputs_stay(group: int, dim: int) -> None:
    heads = 2
    keys, values = some_basis(heads, dim, True), some_basis(heads, dim, False)
    q, k, v = (random_of(3, n, dim, seed=n).float() for n in (heads * group, heads, heads + 1))
    v = v[:, :heads]
    turned, stored, weight = keys.turned_queries(q), keys.enter(k), 0.25
    for head in range(heads * group):
        n = head // group
        expected = (q[:, head].double() * (k[:, n] - keys.center[n]).double()).sum(1)
        found = (turned[:, head].double() * stored[:, n].double()).sum(1)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    read = values.leave(weight * values.enter(v).repeat_interleave(group, 1))
    torch.testing.assert_close(read, weight * v.repeat_interleave(group, 1), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(keys.leave(stored), k, atol=1e-3, rtol=1e-3)
    assert keys.enter(k.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("exponent", [0.25, 0.375])
def test_costs_and_energies_are_powers_of_the_same_numbers(exponent: float) -> None:
    """B = diag(l)^(2 e) and T C T' = diag(l)^(1 - 2 e), up to one factor each, and T's 16 bits."""
    dim, eye = 12, torch.eye(12, dtype=torch.float64)
    hessian, covariance = positive(2, dim, 3), positive(2, dim, 4)
    basis = fitted_basis(hessian, covariance, exponent)
    ridged = [x + RIDGE * x.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * eye for x in (hessian, covariance)]
    costs, matrix = moved_hessian(ridged[0], basis), basis.matrix.double()
    energies = matrix @ ridged[1] @ matrix.mT
    for head in range(2):
        cost, energy = costs[head].diagonal(), energies[head].diagonal()
        assert float((costs[head] - cost.diag()).abs().max()) < 1e-4 * float(cost.max())
        assert float((energies[head] - energy.diag()).abs().max()) < 1e-3
        assert float(energy.mean()) == pytest.approx(1.0, rel=1e-4)
        ratio = energy / cost ** ((1 - 2 * exponent) / (2 * exponent))
        assert float(ratio.max() / ratio.min()) == pytest.approx(1.0, rel=1e-3)


def test_heads_without_queries_or_keys_have_a_basis() -> None:
    nothing = torch.zeros(1, 8, 8, dtype=torch.float64)
    for hessian, covariance in ((nothing, positive(1, 8, 1)), (positive(1, 8, 1), nothing), (nothing, nothing)):
        basis = fitted_basis(hessian, covariance, 0.375)
        torch.testing.assert_close(basis.matrix @ basis.inverse, torch.eye(8)[None], atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [1e-14, 1e-150, 1e14])
def test_values_of_any_size_have_a_basis_within_the_plans_limits(size: float) -> None:
    basis = fitted_basis(positive(2, 8, 0), size**2 * positive(2, 8, 1), 0.375)
    usual = some_basis(2, 8, False)
    for matrix, other in ((basis.matrix, usual.matrix), (basis.inverse, usual.inverse)):
        assert float(matrix.abs().max()) <= LARGEST_ENTRY
        torch.testing.assert_close(matrix / matrix.norm(dim=(1, 2), keepdim=True),
                                   other / other.norm(dim=(1, 2), keepdim=True), atol=1e-4, rtol=0)  # fmt: skip
    torch.testing.assert_close(basis.matrix @ basis.inverse, torch.eye(8).expand(2, 8, 8), atol=1e-4, rtol=0)


def test_entries_are_integers_of_16_bits_a_row() -> None:
    matrix = random_of(2, 16, 16, seed=5).float() * torch.logspace(-9, 9, 16).unsqueeze(1)
    matrix[0, 1], matrix[1, 2, 3] = 0, 2.0**30 * (1 - 2.0**-20)
    found = rounded(matrix)
    for row, of_row in zip(found.flatten(0, 1), matrix.flatten(0, 1), strict=True):
        unit = 2.0 ** (math.frexp(float(of_row.abs().max()))[1] - 15)
        integers = (row / unit).tolist()
        assert all(number == int(number) and abs(number) < 2**15 for number in integers)
        assert float((row - of_row).abs().max()) <= unit / 2 or max(map(abs, integers)) == 2**15 - 1
    assert rounded(found) is found
    basis = Basis.of({"k_basis": matrix, "k_basis_inverse": matrix}, "k")
    assert basis is not None and torch.equal(basis.matrix, found)


def test_units_next_to_zero_are_normal_numbers() -> None:
    assert not rounded(torch.full((1, 4, 4), 1e-34)).any()
    x = torch.full((3, 1, 4), 2e-32)
    torch.testing.assert_close(Basis(torch.eye(4)[None], torch.eye(4)[None]).enter(x), x, rtol=1e-3, atol=0)


def test_operands_lie_row_by_row() -> None:
    """A fitted basis is read by kernels before it was ever stored, and those know no strides."""
    assert all(operand.is_contiguous() for operand in some_basis(3, 16, True).operands)


def test_a_plan_has_its_tensors() -> None:
    keys, values = some_basis(3, 16, True), some_basis(3, 16, False)
    stored = keys.tensors("k") | values.tensors("v")
    specs = basis_specs("k", 3, 16) | basis_specs("v", 3, 16)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {n: s.shape for n, s in specs.items()}
    own = Basis.of(stored, "k")
    assert own is not None and own.center is not None and torch.equal(own.center, keys.center)
    assert Basis.of({}, "k") is None
