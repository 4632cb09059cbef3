"""KVmix's own 3-bit layout (Eq. 12), for comparison only: no page is stored this way.

    word = q0 | q1 << 3 | ... | q9 << 27 | q10 << 30        11 codes in 32 bits: ten of 3 bits, the last of 2

All codes of a group share one scale, (max - min) / 7, so the eleventh of each word saturates at min + 3
scale: any value above min + 3.5 scale is lost there. The paper calls this 10 % denser than 10 codes a word.
With everything counted it is not: a group of 11, as its public kernels store it, is one word + scale + zero =
64 bits, 5.8 a value; groups of 32 fill three words, 4.0 a value, exactly what the 2-bit plane + 1-bit plane
of ``packing`` takes without saturating anything. Only groups that are multiples of 11 save codes, 2.91 bits a
value instead of 3.

Groups run along the last dimension and each starts a new word. The codes are those of ``uniform`` at 3 bits,
the eleventh clamped to 3: it saturates, it never wraps. Left out: kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcal.pages import uniform

CODES_PER_WORD = 11
WORD_BITS = 32
NUM_BITS = 3
_LAST_CODE = 3


@dataclass(frozen=True, eq=False)
class Packed:
    """words [..., words of the groups, one group after the other] int32; scale, zero [..., groups], as
    given."""

    words: Tensor
    scale: Tensor
    zero: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.words, self.scale, self.zero))


def pack(codes: Tensor) -> Tensor:
    """One group's codes [..., g] uint8 below 8 -> words [..., ceil(g / 11)] int32; every eleventh code above
    3 becomes 3, free slots are 0."""
    num_words = uniform.num_groups(codes.shape[-1], CODES_PER_WORD)
    free = num_words * CODES_PER_WORD - codes.shape[-1]
    slots = torch.nn.functional.pad(codes, (0, free)).unflatten(-1, (num_words, CODES_PER_WORD))
    slots = torch.minimum(slots, _largest_codes(codes.device)).long()
    words = (slots << _shifts(codes.device)).sum(-1)
    # Two's complement by hand: 3 << 30 is beyond int32.
    return torch.where(words >= 2 ** (WORD_BITS - 1), words - 2**WORD_BITS, words).to(torch.int32)


def unpack(words: Tensor, length: int) -> Tensor:
    """Inverse of :func:`pack`: words [..., ceil(length / 11)] int32 -> codes [..., length] uint8."""
    unsigned = words.long() & (2**WORD_BITS - 1)
    codes = (unsigned.unsqueeze(-1) >> _shifts(words.device)) & _largest_codes(words.device)
    return codes.flatten(-2)[..., :length].to(torch.uint8)


def encode(x: Tensor, group_size: int, param_dtype: torch.dtype) -> Packed:
    """x [..., C], any float dtype, in groups of ``group_size`` consecutive values; the last may be shorter.

    Raises:
        NonFiniteActivations: NaN or infinity, or a range that ``param_dtype`` cannot hold.
    """
    codes, scale, zero = uniform.quantize(x, NUM_BITS, group_size, -1, param_dtype)
    words = [pack(group) for group in codes.split(group_size, dim=-1)]
    return Packed(torch.cat(words, dim=-1), scale, zero)


def decode(packed: Packed, length: int, group_size: int) -> Tensor:
    """Inverse of :func:`encode` up to quantization: [..., length] fp32."""
    per_group = uniform.num_groups(group_size, CODES_PER_WORD)
    codes, left = [], length
    for words in packed.words.split(per_group, dim=-1):
        codes.append(unpack(words, min(left, group_size)))
        left -= group_size
    return uniform.dequantize(torch.cat(codes, dim=-1), packed.scale, packed.zero, group_size, -1)


def _shifts(device: torch.device) -> Tensor:
    return NUM_BITS * torch.arange(CODES_PER_WORD, device=device)


def _largest_codes(device: torch.device) -> Tensor:
    """[11] uint8: 7 in the first ten slots, 3 in the last (Eq. 12)."""
    largest = torch.full((CODES_PER_WORD,), 2**NUM_BITS - 1, dtype=torch.uint8, device=device)
    largest[-1] = _LAST_CODE
    return largest
