"""AQUA-KV's predictors as the runtime applies them: y = W x + b, from the tensors that a plan carries.

x are the reconstructed keys (or values and keys) of one token, all KV heads in a row; y is what this layer's
keys or values probably are, so that only the residual needs bits (AQUA-KV, section 3.2). Three ways to store
W:

    linear    weight [O, F], bias [O] in the cache's dtype
    low_rank  down [rank, F], up [O, rank], bias [O] in the cache's dtype:  W = up down
    int4      weight uint8 [O, ceil(F / 2)]: two codes a byte, the even input's in the low four bits;  scale float16
              [O, ceil(F / group_size)];  bias [O] in the cache's dtype:  W = (code - 8) scale.  Symmetric:
              weights of a regression scatter about 0, and a zero a group would cost half a bit a weight at
              group_size 32.

Products are fp32, with TF32 off. Their sums depend on shapes and devices in the last bits, so a page that is
read back differs by this rounding from what its encoder saw, and so do the pages that are predicted from it.
Measured over all layers of a model whose keys have large biases, the drift is a small share of the error of
quantization (README.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from kvcal.geometry import CacheDtype
from kvcal.lazy_torch import Tensor, torch
from kvcal.records import TensorSpec

Kind = Literal["linear", "low_rank", "int4"]
MAX_INPUTS = 2**15
INT4_ZERO = 8  # the code of weight 0; codes are 0 .. 15

LARGEST = 2.0**32  # of weights and biases that a file may hold: far beyond a fit's, and predictions stay finite


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
        if not (1 <= self.num_inputs <= MAX_INPUTS and self.num_outputs >= 1):
            raise ValueError(
                f"a predictor of {self.num_outputs} outputs from {self.num_inputs} inputs: "
                f"expected 1 or more outputs and 1 to {MAX_INPUTS} inputs"
            )
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
        return sum(spec.nbytes for spec in self.tensors().values())


@dataclass(frozen=True, eq=False)
class LinearPredictor:
    """``stored``: the tensors that ``shape`` names, all on one device."""

    shape: PredictorShape
    stored: Mapping[str, Tensor]

    @classmethod
    def from_tensors(cls, shape: PredictorShape, tensors: Mapping[str, Tensor], prefix: str) -> LinearPredictor:
        """The predictor whose tensors are named ``prefix``.<name>, of a plan, which has checked them."""
        return cls(shape, {name: tensors[f"{prefix}.{name}"] for name in shape.tensors()})

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """The inverse of :meth:`from_tensors`."""
        return {f"{prefix}.{name}": tensor for name, tensor in self.stored.items()}

    def factors(self) -> tuple[Tensor, ...]:
        """W as the product of these fp32 matrices, first the one that is applied last. Exact: what is
        stored."""
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

    def of_pages(self, num_heads: int, inputs: Sequence[Tensor]) -> Tensor:
        """[M, N, 128, D] fp32: what it says about M pages of ``num_heads`` KV heads, from pages [M, .., 128,
        ..] fp32: the source's; for values, this layer's keys after them."""
        x = torch.cat([part.transpose(1, 2).flatten(-2) for part in inputs], dim=-1)
        return self.apply(x).unflatten(-1, (num_heads, -1)).transpose(1, 2)

    def apply(self, x: Tensor) -> Tensor:
        """x [..., F] fp32 on the predictor's device -> [..., O] fp32."""
        bias = self.stored["bias"].float()
        with _without_tf32(x.device):
            *first, last = reversed(self.factors())
            for factor in first:
                x = torch.nn.functional.linear(x, factor)
            return torch.nn.functional.linear(x, last, bias)


@contextmanager
def _without_tf32(device: torch.device) -> Iterator[None]:
    """Within the context, fp32 products have all bits of fp32, whatever the program has chosen."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    products = backend.matmul
    before = products.fp32_precision
    if before in ("none", "ieee"):
        yield
        return
    products.fp32_precision = "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before
