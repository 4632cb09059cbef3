"""Linear predictions on CUDA: the bits of ``LinearPredictor.apply``, from products of bytes on tensor cores.

Integers of at most 2^14, of which pages/predictor.py makes x and W, are 256 high + low with two signed bytes. Of a
product of such integers, three sums are matrix products of bytes: of the high digits, of the low ones, and of high ones
with low ones, both ways in one product of twice the length, since digits of x lie as [high | low] and those of W as
[low | high]. Up to 2^15 inputs, each of them stays below 2^30, so 32 bits hold it; together they are the sum that fp64
would have, and the rest is its arithmetic. The products are the library's (cuBLASLt, through torch), which wants inputs
and outputs padded with zeros; ``csrc/digits.cu`` makes the digits, ``csrc/digit_sums.cu`` puts the sums together. Rows
are taken some at a time, which bounds the scratch. On a CPU, ``LinearPredictor.apply`` itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcal.kernels.compile import Kernel, kernel
from kvcal.lazy_torch import Tensor, torch
from kvcal.pages.predictor import INTEGER_BITS, LEAST_EXPONENT, LinearPredictor, balanced_columns

# [..., F1], [..., F2], fp32: inputs in a row, one or two parts -> [..., O] fp32
Predict = Callable[[Sequence[Tensor]], Tensor]

ROWS_AT_ONCE = 8192
THREADS = 256
BLOCKS_PER_SM = 8  # of the grid of ``digit_sums``
_INPUT_ALIGNMENT = 16  # bytes of a row of digits, for the library's fast kernels
_OUTPUT_ALIGNMENT = 8  # columns of its products
_ROW_ALIGNMENT = 32  # rows of its products: it refuses 16 and less


def prepared(predictor: LinearPredictor, rows_at_once: int = ROWS_AT_ONCE) -> Predict:
    """For a few calls, since what is prepared of W is as large as W."""
    if predictor.stored["bias"].device.type == "cpu":
        weights = predictor.weights()
        return lambda parts: predictor.apply(parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1), weights)
    bias = predictor.stored["bias"].double()
    factors = [_factor(weight) for weight in reversed(predictor.factors())]
    return functools.partial(_predict, factors, bias, rows_at_once)


@dataclass(frozen=True, eq=False)
class _Factor:
    """A factor of W [O, F]: ``digits`` int8 [O', 2 F'], the low ones first, padded; ``units`` fp64 [O]; ``columns``
    fp32 [F], which x is multiplied by."""

    digits: Tensor
    units: Tensor
    columns: Tensor

    def products(self, digits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """digits int8 [n, 2 F'] of x, the high ones first -> sums int32 [n, O'] each: high, cross, low."""
        half = digits.shape[-1] // 2
        x = digits[:, :half], digits, digits[:, half:]
        weights = self.digits[:, half:], self.digits, self.digits[:, :half]
        high, cross, low = (torch._int_mm(mine, its.t()) for mine, its in zip(x, weights, strict=True))
        return high, cross, low


def _factor(weight: Tensor) -> _Factor:
    """weight [O, F] fp32."""
    columns = balanced_columns(weight)
    padded = _round_up(len(weight), _OUTPUT_ALIGNMENT)
    digits = weight.new_zeros(padded, 2 * _round_up(weight.shape[1], _INPUT_ALIGNMENT), dtype=torch.int8)
    low, high = digits.chunk(2, dim=-1)
    return _Factor(digits, _digits([weight], columns.reciprocal(), high, low), columns)


def _predict(factors: Sequence[_Factor], bias: Tensor, rows_at_once: int, parts: Sequence[Tensor]) -> Tensor:
    """See ``Predict``."""
    shape = parts[0].shape[:-1]
    rows = [part.reshape(-1, part.shape[-1]).contiguous() for part in parts]
    found = rows[0].new_empty(len(rows[0]), len(bias))
    for start in range(0, len(found), rows_at_once):
        given = [part[start : start + rows_at_once] for part in rows]
        for factor in factors[:-1]:
            given = [_applied(factor, None, given, None)]
        _applied(factors[-1], bias, given, found[start : start + rows_at_once])
    return found.view(*shape, len(bias))


def _applied(factor: _Factor, bias: Tensor | None, parts: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """One factor of rows; ``out`` [n, O] fp32."""
    num_rows, outputs = len(parts[0]), len(factor.units)
    if out is None:
        out = parts[0].new_empty(num_rows, outputs)
    # What rows beyond the last one hold does not matter.
    digits = parts[0].new_empty(_round_up(num_rows, _ROW_ALIGNMENT), factor.digits.shape[1], dtype=torch.int8)
    high, low = digits.chunk(2, dim=-1)
    units = _digits(parts, factor.columns, high, low)
    sums = factor.products(digits)
    device_index = out.get_device()
    compiled = _sums_kernel(outputs, sums[0].shape[1], device_index)
    blocks = BLOCKS_PER_SM * torch.cuda.get_device_properties(device_index).multi_processor_count
    needed = -(-num_rows * -(-outputs // 4) // THREADS)
    compiled.launch(
        (min(needed, blocks), 1, 1),
        THREADS,
        0,
        *(part.data_ptr() for part in (*sums, units, factor.units)),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_rows,
    )
    return out


def _digits(parts: Sequence[Tensor], scales: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Rows of ``parts``, one or two, times ``scales``: their digits to ``high`` and ``low`` int8 [n or more, F'], and
    their units fp64 [n]."""
    first, second = parts if len(parts) == 2 else (parts[0], parts[0][:, :0])
    units = first.new_empty(len(first), dtype=torch.float64)
    compiled = _digits_kernel(first.shape[1], second.shape[1], high.shape[1], first.get_device())
    pointers = (first.data_ptr(), second.data_ptr(), scales.data_ptr(), high.data_ptr(), low.data_ptr())
    compiled.launch((len(first), 1, 1), THREADS, 0, *pointers, high.stride(0), units.data_ptr())
    return units


@functools.cache
def _digits_kernel(first: int, second: int, padded: int, device_index: int) -> Kernel:
    return kernel("digits", "digits", digits_defines(first, second, padded), device_index)


@functools.cache
def _sums_kernel(outputs: int, padded: int, device_index: int) -> Kernel:
    return kernel("digit_sums", "digit_sums", {"OUTPUTS": outputs, "PADDED_OUTPUTS": padded}, device_index)


def digits_defines(first: int, second: int, padded: int) -> dict[str, int]:
    """Macros, names as in ``csrc``."""
    sizes = {"FIRST": first, "SECOND": second, "PADDED_INPUTS": padded}
    return sizes | {"INTEGER_BITS": INTEGER_BITS, "LEAST_EXPONENT": LEAST_EXPONENT}


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
