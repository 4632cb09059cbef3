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

Rotated pages (kvcal.systems.basis.rotated) add their Hadamard transform when they are packed. H and C get ``RIDGE``
times their mean diagonal, so that T can be inverted. T is scaled to a mean variance of 1 in y. Left out: one
T for all heads, which share no query; T within the projections' weights, which norms of queries and keys
forbid; and a center of values, which on SmolLM2-135M made the KL worse (24.2 instead of 15.0 thousandths).
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


def basis_specs(side: str, num_heads: int, head_dim: int) -> dict[str, TensorSpec]:
    """The stored tensors of one side of a layer, by the last part of their names."""
    square = (num_heads, head_dim, head_dim)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys((f"{side}_{part}" for part in MATRICES), square)
    shapes |= {f"k_{CENTER}": (num_heads, head_dim)} if side == "k" else {}
    return {name: TensorSpec("float32", shape, -LARGEST_ENTRY, LARGEST_ENTRY) for name, shape in shapes.items()}


@dataclass(frozen=True, eq=False)
class Basis:
    """T and T^-1, fp32 [N, D, D], and of keys the center c, fp32 [N, D], of N KV heads.

    Tokens are [..., N, D], and keep their float dtype; queries and outputs of query heads are [..., N G,
    D]."""

    matrix: Tensor
    inverse: Tensor
    center: Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], prefix: str) -> Basis | None:
        """That of a plan's tensors, whose names begin with ``prefix``; None without one."""
        matrix, inverse, center = (tensors.get(f"{prefix}_{part}") for part in (*MATRICES, CENTER))
        return None if matrix is None or inverse is None else cls(matrix, inverse, center)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        found = zip((*MATRICES, CENTER), (self.matrix, self.inverse, self.center), strict=True)
        return {f"{prefix}_{part}": tensor for part, tensor in found if tensor is not None}

    def enter(self, x: Tensor) -> Tensor:
        """T (x - c): in fp64, whose order of sums does not reach the result, so that pages are the same bytes
        for any number of tokens at once and on any device."""
        centered = x.double() if self.center is None else x.double() - self.center
        return torch.einsum("...nd,ned->...ne", centered, self.matrix.double()).to(x.dtype)

    def leave(self, y: Tensor) -> Tensor:
        """T^-1 y + c."""
        found = torch.einsum("...nd,ned->...ne", y.float(), self.inverse)
        return (found if self.center is None else found + self.center).to(y.dtype)

    def turned_queries(self, q: Tensor) -> Tensor:
        """T^-T q in fp32, for a basis of keys: 16 bits would lose what large components of q and y cancel."""
        return torch.einsum("...ngd,nde->...nge", self._by_head(q), self.inverse).flatten(-3, -2)

    def outputs(self, y: Tensor) -> Tensor:
        """T^-1 y in fp32 of attention's outputs, for a basis of values."""
        return torch.einsum("...ngd,ned->...nge", self._by_head(y), self.inverse).flatten(-3, -2)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.float().unflatten(-2, (len(self.matrix), -1))


def reading_queries(q: Tensor, k_basis: Basis | None, v_basis: Basis | None) -> Tensor:
    """Queries as a step reads pages with them; fp32 where there is a basis, and so are the outputs then."""
    if k_basis is not None:
        return k_basis.turned_queries(q)
    return q if v_basis is None else q.float()


def fitted_basis(
    hessian_NDD: Tensor, covariance_NDD: Tensor, exponent: float, center_ND: Tensor | None = None
) -> Basis:
    """The basis of heads with these H, and C about the center, fp64. Without a trace, H or C counts as the
    identity."""
    hessian, covariance = _ridged(hessian_NDD), _ridged(covariance_NDD)
    lower = torch.linalg.cholesky(hessian)
    energies_ND, vectors = torch.linalg.eigh(lower.mT @ covariance @ lower)
    scale_ND = energies_ND.clamp_min(torch.finfo(torch.float64).tiny) ** -exponent
    matrix = scale_ND.unsqueeze(2) * (vectors.mT @ lower.mT)
    variance_N = torch.einsum("nij,njk,nik->n", matrix, covariance, matrix)
    matrix = matrix * (matrix.shape[1] / variance_N).sqrt()[:, None, None]
    # Of values that are all but 0, or beyond any range, T is as large, or as small, as a plan takes it.
    matrix = matrix * (LARGEST_ENTRY / _largest(matrix)).clamp_max(1.0)
    matrix = matrix * (_largest(torch.linalg.inv(matrix)) / LARGEST_ENTRY).clamp_min(1.0)
    center = None if center_ND is None else center_ND.float()
    return Basis(matrix.float(), torch.linalg.inv(matrix).float(), center)


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
