"""AQUA-KV's predictors as the runtime applies them: y = W x + b, from the tensors that a plan carries.

x are the reconstructed keys (or values and keys) of one token, all KV heads in a row; y is what this layer's keys or
values probably are, so that only the residual needs bits (AQUA-KV, section 3.2). Three ways to store W:

    linear    weight [O, F], bias [O] in the cache's dtype
    low_rank  down [rank, F], up [O, rank], bias [O] in the cache's dtype:  W = up down
    int4      weight uint8 [O, ceil(F / 2)]: two codes a byte, the even input's in the low four bits;  scale float16
              [O, ceil(F / group_size)];  bias [O] in the cache's dtype:  W = (code - 8) scale.  Symmetric: weights of
              a regression scatter about 0, and a zero a group would cost half a bit a weight at group_size 32.

Encoder and decoder, whatever their batch, device or library, must get the same prediction to the last bit: the next
layer's residual builds on it, and pages must be the same bytes everywhere. A matrix product in floating point does not
give that, since its sums are taken in another order for another shape. So the product is exact: a row of x becomes
integers below 2^22 with a power of two of its own, a row of W integers below 2^16 with one of its own, and a dot
product of at most 2^15 of them stays below 2^53, where fp64 adds integers without rounding, in any order. What this
rounds away of x, 2^-23 of the row's largest, is about what fp32 would; of W, 2^-17 of the row's largest, is well below
bfloat16's own step. The result is the same bits on CPU and CUDA, alone or in a batch. The price is an fp64 product:
half the speed on a CPU, the same speed as fp32 on data-centre GPUs, slow on others.

Left out: MLPs (the paper finds them marginally better at 3.3 times the size), and integers below 2^16 as int8 products,
which would be exact and faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kvcal.errors import ArtifactError
from kvcal.geometry import CACHE_DTYPES, CacheDtype

Kind = Literal["linear", "low_rank", "int4"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_INPUTS = 2**15
INT4_ZERO = 8  # the code of weight 0; codes are 0 .. 15

_X_BITS = 22
_W_BITS = 16
_CHUNK_ROWS = 4096  # rows of x that are fp64 at a time


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
        for name, value, kind in (("rank", self.rank, "low_rank"), ("group_size", self.group_size, "int4")):
            if (value is not None) != (self.kind == kind):
                raise ValueError(f"{name} = {value} for a {self.kind} predictor: {kind} takes one, other kinds none")
        if self.rank is not None and not 1 <= self.rank <= min(self.num_inputs, self.num_outputs):
            smallest = min(self.num_inputs, self.num_outputs)
            raise ValueError(f"rank = {self.rank}: expected 1 to {smallest}, the smaller side of the weight")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size = {self.group_size}: expected 1 or more")

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor by name: the one definition of what a predictor is made of."""
        dtype = CACHE_DTYPES[self.cache_dtype]
        bias = {"bias": ((self.num_outputs,), dtype)}
        if self.rank is not None:
            down, up = (self.rank, self.num_inputs), (self.num_outputs, self.rank)
            return {"down": (down, dtype), "up": (up, dtype), **bias}
        if self.group_size is not None:
            num_groups = -(-self.num_inputs // self.group_size)
            codes = ((self.num_outputs, -(-self.num_inputs // 2)), torch.uint8)
            return {"weight": codes, "scale": ((self.num_outputs, num_groups), torch.float16), **bias}
        return {"weight": ((self.num_outputs, self.num_inputs), dtype), **bias}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        total = 0
        for shape, dtype in self.tensors().values():
            total += torch.Size(shape).numel() * dtype.itemsize
        return total


@dataclass(frozen=True, eq=False)
class LinearPredictor:
    """``stored``: the tensors that ``shape`` names, all on one device."""

    shape: PredictorShape
    stored: Mapping[str, Tensor]

    @classmethod
    def from_tensors(cls, shape: PredictorShape, tensors: Mapping[str, Tensor], prefix: str) -> LinearPredictor:
        """The predictor whose tensors are named ``prefix``.<name>; other tensors are not looked at.

        Raises:
            ArtifactError: a tensor is missing, has another shape or dtype, is not finite, or is a negative scale.
        """
        stored = {}
        for name, (size, dtype) in shape.tensors().items():
            full_name = f"{prefix}.{name}"
            if full_name not in tensors:
                raise ArtifactError(f"the tensor '{full_name}' of a {shape.kind} predictor is missing")
            tensor = tensors[full_name]
            if tuple(tensor.shape) != size or tensor.dtype != dtype:
                raise ArtifactError(
                    f"the tensor '{full_name}' is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(size)}"
                )
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ArtifactError(f"the tensor '{full_name}' holds NaN or infinity; allowed: finite values")
            if name == "scale" and (tensor < 0).any():
                raise ArtifactError(f"the tensor '{full_name}' holds a negative scale; allowed: 0 or more")
            stored[name] = tensor
        return cls(shape, stored)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """By their names in a plan: the inverse of :meth:`from_tensors`."""
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

    def weights(self) -> tuple[Tensor, ...]:
        """W as the product of these fp64 matrices [.., ..], first the one that is applied first, as ``apply`` takes
        them: integers below 2^16 times a power of two for each row. Large: keep them for a few calls at most."""
        rounded = (_integers(factor, _W_BITS) for factor in reversed(self.factors()))
        return tuple(integers * _power_of_two(exponents) for integers, exponents in rounded)

    def apply(self, x: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
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


def _product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, F] fp32 times W [O, F] of ``weights`` -> sums fp64 [n, O] and their unit [n, 1], a power of two."""
    integers, exponents = _integers(x, _X_BITS)
    # Exact: a sum is below 2^15 2^22 2^16 = 2^53 times the power of two of its row of W.
    return integers @ weight.transpose(-1, -2), _power_of_two(exponents)


def _integers(x: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    """Rows of x [n, F] fp32 as integers of at most 2^num_bits, in fp64, and the exponents e [n, 1] int64 of their unit:
    x is about integers * 2^e. Only exact operations but the one rounding, half to even."""
    largest = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).double()
    largest = largest.clamp(min=2.0**-149)  # fp32's smallest: a row of zeros needs some unit
    # Any fp32 number is a normal fp64 one: largest < 2^exponent.
    exponent = ((largest.view(torch.int64) >> 52) & 0x7FF) - 1022
    unit = exponent - num_bits
    return (x * _power_of_two(-unit)).round_(), unit


def _power_of_two(exponents: Tensor) -> Tensor:
    """int64 in -1022 .. 1023 -> 2^exponents in fp64, exact on every device; a library's pow need not be."""
    return ((exponents + 1023) << 52).view(torch.float64)
