"""A basis for the keys, or the values, of each KV head, in which errors of equal size cost the same.

A cache may hold keys y = T (k - c) and values y = T v. Attention then reads the query T^-T q, since

    q . (k - c) = (T^-T q) . y

and softmax does not see the constant q . c. Values come back as T^-1 times attention's output. With an error
e of y the output's error costs e B e', B = T^-T H T^-1, where H is the cost of an error of keys or values:

    keys     H = sum of w q q' over queries after RoPE and the KV head's query heads; w of kvcal.systems.basis.hessians
    values   H = sum of W_o' W_o over the KV head's query heads

With C the weighted covariance of keys, or the mean of v v', L L' = H and U diag(l) U' = L' C L, the transform
is

    T = diag(l)^-exponent U' L'                       (WUSH-KV has exponent 1/4; with error feedback 7/16 errs less)

Rotated pages (kvcal.systems.basis.rotated) add their Hadamard transform when they are packed. H and C get
``RIDGE`` times their mean diagonal, so that T can be inverted. T is scaled to a mean variance of 1 in y. Left
out: one T for all heads, which share no query; T within the projections' weights, which norms of queries and
keys forbid; and a center of values, which on SmolLM2-135M made the KL worse (24.2 instead of 15.0
thousandths).

What enters decides bytes, so the sums of T (k - c) are sums of integers: T in 16 bits for each row and k - c
in 24 bits for each token and head, in units of a power of two. A product is at most 2^38 and a sum of up to
2^14 of them at most 2^52, so fp64 on a CPU and int32 of bytes on a tensor core (csrc/basis.cu) are both
exact in any order. One rounding to fp32 and one to the cache's dtype follow. Queries and outputs decide no
bytes and are fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcal.lazy_torch import Tensor, torch
from kvcal.records import TensorSpec

RIDGE = 1e-2
LARGEST_ENTRY = 2.0**40
# Of both sides, by the last part of their names in a plan; keys have a center, too.
MATRICES, CENTER = ("basis", "basis_inverse"), "center"
MATRIX_BITS, TOKEN_BITS = 16, 24  # of the integers of a row of T, and of a token, with their signs
# Exponents of rows of T, and of tokens, at the least: powers of two that undo them are normal numbers.
LEAST_EXPONENTS = {MATRIX_BITS: -62, TOKEN_BITS: -94}


def basis_specs(side: str, num_heads: int, head_dim: int) -> dict[str, TensorSpec]:
    """The stored tensors of one side of a layer, by the last part of their names."""
    square = (num_heads, head_dim, head_dim)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys((f"{side}_{part}" for part in MATRICES), square)
    shapes |= {f"k_{CENTER}": (num_heads, head_dim)} if side == "k" else {}
    return {name: TensorSpec("float32", shape, -LARGEST_ENTRY, LARGEST_ENTRY) for name, shape in shapes.items()}


@dataclass(frozen=True, eq=False)
class Basis:
    """T, ``rounded``, and T^-1, fp32 [N, D, D], and of keys the center c, fp32 [N, D], of N KV heads.

    Tokens are [..., N, D], and keep their float dtype; queries and outputs of query heads are [..., N G,
    D]."""

    matrix: Tensor
    inverse: Tensor
    center: Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], prefix: str) -> Basis | None:
        """That of a plan's tensors, whose names begin with ``prefix``, with T rounded; None without one."""
        matrix, inverse, center = (tensors.get(f"{prefix}_{part}") for part in (*MATRICES, CENTER))
        return None if matrix is None or inverse is None else cls(rounded(matrix), inverse, center)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        found = zip((*MATRICES, CENTER), (self.matrix, self.inverse, self.center), strict=True)
        return {f"{prefix}_{part}": tensor for part, tensor in found if tensor is not None}

    @property
    def operands(self) -> list[Tensor]:
        """As the operators are given it (kvcal.kernels.ops)."""
        return [self.matrix, self.inverse] if self.center is None else [self.matrix, self.inverse, self.center]

    def enter(self, x: Tensor) -> Tensor:
        """T (x - c) by exact sums of integers: the same bytes for any number of tokens at once and on any
        device. NaN in all channels of a token and head with a number that is not finite."""
        token_unit, tokens = _in_units(x.float() if self.center is None else x.float() - self.center, TOKEN_BITS)
        sums = torch.einsum("...nd,ned->...ne", tokens, self.matrix.double())  # of integers times T's powers of two
        del tokens  # of 8 bytes a value, as the sums
        return sums.float().mul_(token_unit).to(x.dtype)

    def leave(self, y: Tensor) -> Tensor:
        """T^-1 y + c in fp32; of attention's outputs [..., N G, D], too."""
        found = torch.einsum("...ngd,ned->...nge", self._by_head(y), self.inverse)
        return (found if self.center is None else found.add_(self.center.unsqueeze(-2))).flatten(-3, -2)

    def turned_queries(self, q: Tensor) -> Tensor:
        """T^-T q in fp32, for a basis of keys: 16 bits would lose what large components of q and y cancel."""
        return torch.einsum("...ngd,nde->...nge", self._by_head(q), self.inverse).flatten(-3, -2)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.float().unflatten(-2, (len(self.matrix), -1))


def rounded(matrix: Tensor) -> Tensor:
    """T fp32 [N, D, D] as the integers of its rows hold it: itself, where they do."""
    unit, rows = _in_units(matrix, MATRIX_BITS)
    found = rows.mul_(unit).float()
    return matrix if torch.equal(found, matrix) else found


def _in_units(x: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    """x fp32 [..., D] as integers of so many bits, in fp64, and the unit of each row [..., 1], a power of
    two; NaN of a row with a number that is not finite."""
    largest = x.abs().amax(-1, keepdim=True)
    shift = num_bits - 1 - torch.frexp(largest).exponent.clamp_(min=LEAST_EXPONENTS[num_bits])
    unit = _power_of_two(-shift).masked_fill_(~largest.isfinite(), torch.nan)
    # Exact in fp32: products with powers of two, of which what is less than a normal number rounds to 0.
    return unit, (x * _power_of_two(shift)).round_().clamp_(max=2 ** (num_bits - 1) - 1).double()


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp32, of int32 within the exponents of normal numbers: its bits, as pow may round."""
    return ((exponent + 127) << 23).view(torch.float32)


def fitted_basis(
    hessian_NDD: Tensor, covariance_NDD: Tensor, exponent: float, center_ND: Tensor | None = None
) -> Basis:
    """The basis of heads with these H, and C about the center, fp64. Without a trace, H or C counts as the
    identity. T is rounded to the integers by which tokens enter before it is inverted."""
    hessian, covariance = _ridged(hessian_NDD), _ridged(covariance_NDD)
    lower = torch.linalg.cholesky(hessian)
    energies_ND, vectors = torch.linalg.eigh(lower.mT @ covariance @ lower)
    scale_ND = energies_ND.clamp_min(torch.finfo(torch.float64).tiny) ** -exponent
    matrix = scale_ND.unsqueeze(2) * (vectors.mT @ lower.mT)
    variance_N = torch.einsum("nij,njk,nik->n", matrix, covariance, matrix)
    matrix = matrix * (matrix.shape[1] / variance_N).sqrt()[:, None, None]
    # Of values that are all but 0, or beyond any range, T is as large, or nearly as small, as a plan takes
    # it: rounding moves the inverse.
    matrix = matrix * (LARGEST_ENTRY / _largest(matrix)).clamp_max(1.0)
    matrix = matrix * (_largest(torch.linalg.inv(matrix)) / (LARGEST_ENTRY / 2)).clamp_min(1.0)
    found, center = rounded(matrix.float()), None if center_ND is None else center_ND.float()
    # Kernels read matrices row by row; inv returns them by columns.
    return Basis(found, torch.linalg.inv(found.double()).float().contiguous(), center)


def _largest(matrix_NDD: Tensor) -> Tensor:
    return matrix_NDD.abs().amax((1, 2), keepdim=True)


def _ridged(matrix_NDD: Tensor) -> Tensor:
    eye = torch.eye(matrix_NDD.shape[-1], dtype=torch.float64, device=matrix_NDD.device)
    mean_N = matrix_NDD.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    return torch.where(mean_N > 0, matrix_NDD + RIDGE * mean_N * eye, eye)


def moved_hessian(hessian_NDD: Tensor, basis: Basis) -> Tensor:
    """B = T^-T H T^-1 of fp64 H: the cost of errors in the basis."""
    inverse = basis.inverse.double()
    return inverse.mT @ hessian_NDD @ inverse
