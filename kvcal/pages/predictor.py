"""AQUA-KV's predictors as the runtime applies them: y = W x + b, from the tensors that a plan carries.

x are the reconstructed keys (or values and keys) of one token, all KV heads in a row; y is what this layer's keys or
values probably are, so that only the residual needs bits (AQUA-KV, section 3.2). Three ways to store W:

    linear    weight [O, F], bias [O] in the cache's dtype
    low_rank  down [rank, F], up [O, rank], bias [O] in the cache's dtype:  W = up down
    int4      weight uint8 [O, ceil(F / 2)]: two codes a byte, the even input's in the low four bits;  scale float16
              [O, ceil(F / group_size)];  bias [O] in the cache's dtype:  W = (code - 8) scale.  Symmetric: weights of
              a regression scatter about 0, and a zero a group would cost half a bit a weight at group_size 32.

Encoder and decoder, whatever their batch, device or library, must compute the same prediction to the last bit: the next
layer's residual builds on it, and pages must be the same bytes everywhere. Sums of a floating-point product are taken
in another order for another shape, so the product here is exact. Powers of two bring the largest number of every column
of W to about 1, and x is multiplied by them, so that a number of x counts for what it can contribute. Then a row of x
becomes integers of at most 2^14 with a power of two of its own, a row of W likewise, and a dot product of at most 2^15
of them stays below 2^43, where fp64 adds integers without rounding, in any order. What this rounds away, 2^-14 of the
row's largest contribution, is in the residual. An integer has two digits to the base of 256, each a signed byte: tensor
cores get the same sums from products of bytes (kvcal.kernels.predict), many times as fast as fp64 on most GPUs.

Left out: MLPs (the paper finds them marginally better at 3.3 times the size).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvcal.geometry import CacheDtype
from kvcal.lazy_torch import Tensor, torch
from kvcal.records import TensorSpec, refusing, require_tensors

Kind = Literal["linear", "low_rank", "int4"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_INPUTS = 2**15
INT4_ZERO = 8  # the code of weight 0; codes are 0 .. 15

INTEGER_BITS = 14  # of x and of W: 2^14 is 64 * 256, so that the upper of two signed digits has room
LARGEST = 2.0**32  # of weights and biases that a file may hold: far beyond a fit's, and predictions stay finite
LEAST_EXPONENT = -100  # of a row or column: what is smaller throughout is rounded as if it were not
_CHUNK_ROWS = 4096  # rows of x that are fp64 at a time


def require_sizes(kind: Kind, rank: int | None, group_size: int | None) -> None:
    """ValueError unless low_rank alone has a rank and int4 alone a group size, each 1 or more."""
    for name, value, owner in (("rank", rank, "low_rank"), ("group_size", group_size, "int4")):
        if (value is not None) != (kind == owner):
            raise ValueError(f"{name} = {value} for a {kind} predictor: {owner} takes a {name}, other kinds none")
        if value is not None and value < 1:
            raise ValueError(f"{name} = {value} for a {kind} predictor: expected 1 or more")


@dataclass(frozen=True)
class PredictorShape:
    """All that fixes a predictor's tensors: ``num_inputs`` F, ``num_outputs`` O, ``rank`` of "low_rank" and
    ``group_size`` of "int4" (None for the other kinds)."""

    kind: Kind
    num_inputs: int
    num_outputs: int
    cache_dtype: CacheDtype
    rank: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        """ValueError for a shape that no predictor has."""
        if self.kind not in KINDS:
            raise ValueError(f"predictor kind {self.kind!r}: expected one of {', '.join(KINDS)}")
        if not (1 <= self.num_inputs <= MAX_INPUTS and self.num_outputs >= 1):
            raise ValueError(
                f"a predictor of {self.num_outputs} outputs from {self.num_inputs} inputs: "
                f"expected 1 or more outputs and 1 to {MAX_INPUTS} inputs"
            )
        require_sizes(self.kind, self.rank, self.group_size)
        smallest = min(self.num_inputs, self.num_outputs)
        if self.rank is not None and self.rank > smallest:
            raise ValueError(f"rank = {self.rank}: expected 1 to {smallest}, the smaller side of the weight")

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor by name: the one definition of what a predictor is made of."""

        def spec(*shape: int) -> TensorSpec:
            return TensorSpec(self.cache_dtype, shape, -LARGEST, LARGEST)

        bias = spec(self.num_outputs)
        if self.rank is not None:
            return {"down": spec(self.rank, self.num_inputs), "up": spec(self.num_outputs, self.rank), "bias": bias}
        if self.group_size is not None:
            num_groups = -(-self.num_inputs // self.group_size)
            codes = TensorSpec("uint8", (self.num_outputs, -(-self.num_inputs // 2)))
            scale = TensorSpec("float16", (self.num_outputs, num_groups), low=0.0)
            return {"weight": codes, "scale": scale, "bias": bias}
        return {"weight": spec(self.num_outputs, self.num_inputs), "bias": bias}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(spec.nbytes for spec in self.tensors().values())


@dataclass(frozen=True, eq=False)
class LinearPredictor:
    """``stored``: the tensors that ``shape`` names, all on one device."""

    shape: PredictorShape
    stored: Mapping[str, Tensor]

    @classmethod
    def from_tensors(cls, shape: PredictorShape, tensors: Mapping[str, Tensor], prefix: str) -> LinearPredictor:
        """The predictor whose tensors are named ``prefix``.<name>; other tensors are not looked at.

        Raises:
            ArtifactError: a tensor is missing, has another shape or dtype, or holds values that are not allowed.
        """
        declared = {f"{prefix}.{name}": spec for name, spec in shape.tensors().items()}
        found = {name: tensors[name] for name in declared if name in tensors}
        with refusing(f"{shape.kind} predictor"):
            require_tensors(found, declared)
        return cls(shape, {name.removeprefix(f"{prefix}."): tensor for name, tensor in found.items()})

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """The inverse of :meth:`from_tensors`."""
        return {f"{prefix}.{name}": tensor for name, tensor in self.stored.items()}

    def to(self, device: torch.device | str) -> LinearPredictor:
        """The same predictor on another device."""
        return LinearPredictor(self.shape, {name: tensor.to(device) for name, tensor in self.stored.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, measured."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.stored.values())

    def factors(self) -> tuple[Tensor, ...]:
        """W as the product of these fp32 matrices, first the one that is applied last. Exact: what is stored."""
        if self.shape.kind == "low_rank":
            return self.stored["up"].float(), self.stored["down"].float()
        if self.shape.kind == "linear":
            return (self.stored["weight"].float(),)
        packed, scale = self.stored["weight"], self.stored["scale"].float()
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        codes = codes[:, : self.shape.num_inputs].float() - INT4_ZERO
        assert self.shape.group_size is not None
        group_of = torch.arange(codes.shape[-1], device=codes.device) // self.shape.group_size
        return (codes * scale.index_select(-1, group_of),)

    def dense(self) -> tuple[Tensor, Tensor]:
        """W [O, F] and the bias [O], fp64 on the CPU, as stored."""
        factors = [factor.to("cpu", torch.float64) for factor in self.factors()]
        weight = factors[0] @ factors[1] if len(factors) == 2 else factors[0]
        return weight, self.stored["bias"].to("cpu", torch.float64)

    def weights(self) -> tuple[Weight, ...]:
        """W as the product of these, first the one that is applied first, as ``apply`` takes them. Large: keep them for
        a few calls at most."""
        return tuple(_weight(factor) for factor in reversed(self.factors()))

    def apply(self, x: Tensor, weights: Sequence[Weight] | None = None) -> Tensor:
        """x [..., F] fp32 on the predictor's device -> [..., O] fp32: the same bits for the same row of x, on any
        device and in any batch. A row with NaN or infinity gives a row of NaN or infinity. ``weights``: what
        :meth:`weights` gives, for many calls in a row."""
        rows = x.reshape(-1, x.shape[-1])
        bias = self.stored["bias"].double()
        *first, last = self.weights() if weights is None else weights
        found = x.new_empty(len(rows), self.shape.num_outputs, dtype=torch.float32)
        for chunk, out in zip(rows.split(_CHUNK_ROWS), found.split(_CHUNK_ROWS), strict=True):
            for weight in first:
                sums, unit = _product(chunk, weight)
                chunk = (sums * unit).float()
            out.copy_(torch.addcmul(bias, *_product(chunk, last)))  # one rounding: sums times unit is exact
        return found.view(*x.shape[:-1], self.shape.num_outputs)


@dataclass(frozen=True, eq=False)
class Weight:
    """A factor of W [O, F], rounded: ``integers`` [O, F] fp64, of at most 2^14, times a power of two for each row;
    x is multiplied by ``columns`` [F] fp32, powers of two, first."""

    integers: Tensor
    columns: Tensor


def balanced_columns(factor: Tensor) -> Tensor:
    """factor [O, F] fp32 -> [F] fp32: for each column, the power of two above its largest number."""
    return _power_of_two(_exponents(torch.linalg.vector_norm(factor, torch.inf, dim=0)).clamp(max=-LEAST_EXPONENT))


def _weight(factor: Tensor) -> Weight:
    columns = balanced_columns(factor)
    integers, unit = _integers(factor / columns)
    return Weight(integers.double().mul_(unit), columns)


def _product(x: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
    """x [n, F] fp32 times W [O, F] -> sums fp64 [n, O] and their unit [n, 1], a power of two."""
    integers, unit = _integers(x * weight.columns)
    # Exact: a sum is below 2^15 2^14 2^14 = 2^43 times the power of two of its row of W.
    return integers.double() @ weight.integers.transpose(-1, -2), unit


def _integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x [n, F] fp32 as integers of at most 2^14, in fp32, and their unit [n, 1] fp64, a power of two: x is
    about integers * unit. Only exact operations but the one rounding, half to even."""
    exponents = _exponents(torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True))
    unit = ((exponents.long() + (1023 - INTEGER_BITS)) << 52).view(torch.float64)
    return (x * _power_of_two(INTEGER_BITS - exponents)).round_(), unit


def _exponents(largest: Tensor) -> Tensor:
    """fp32, 0 or more -> the least int32 e, but LEAST_EXPONENT or more, with largest < 2^e; 129 for NaN, infinity."""
    return ((largest.view(torch.int32) >> 23) - 126).clamp(min=LEAST_EXPONENT)


def _power_of_two(exponents: Tensor) -> Tensor:
    """int32 in -126 .. 127 -> 2^exponents in fp32, exact on every device; a library's pow need not be."""
    return ((exponents + 127) << 23).view(torch.float32)
