"""The operators of a step, in torch's namespace ``kvcal``: on CUDA the kernels, elsewhere the reference.

One call serves one head range of one layer. Lists of tensors are the groups of kvcal.kernels.operands: ``k`` and ``v``
(Memory), ``place`` (Place), ``queries`` (QueryStatistic), ``transform`` (PageTransform). Beside them:

    k_new, v_new   [B, n, D]     the step's token, any float dtype and strides; stored in the cache's dtype
    q              [B, n G, D]   its queries after RoPE; for the query sum, CUDA rounds them as k_new
    error          [1] int32     bits that are set, never cleared: 1 when a page cannot be stored (NaN, infinity; its
                                 record is then undefined), 2 when there is no room for it
    s_aux          [n G]         logits of attention sinks without a key (gpt-oss)
    workspace      uint8         scratch of ``decode`` on CUDA: kvcal.kernels.decode says how much. Begins with counters
                                 that are zero between calls: for one number of heads
    variants                     what the kernels are compiled for (``Variant.number``): one, or where pages shrink, one
                                 for each pair of bits that keys and values come to have
    present, regions             where pages shrink: ``operands.Regions``; else empty

Mutated arguments are declared, so that torch.compile and CUDA graphs can hold the operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcal.kernels import reference
from kvcal.kernels.decode import launch_decode
from kvcal.kernels.operands import Memory, PageTransform, Place, QueryStatistic, Regions
from kvcal.kernels.pack import launch_append, launch_pack, launch_unpack
from kvcal.kernels.variants import VARIANTS
from kvcal.plan.page_format import SIDES


@torch.library.custom_op("kvcal::append", mutates_args=("k", "v", "queries", "error"))
def append(
    k_new: Tensor, v_new: Tensor, q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], queries: Sequence[Tensor],
    place: Sequence[Tensor], transform: Sequence[Tensor], error: Tensor, variants: Sequence[int], present: Tensor,
    regions: Sequence[int],
) -> None:  # fmt: skip
    """Store the step's token and count its queries; then pack the page that it completes, if it does."""
    statistic, of_keys = QueryStatistic(*queries), PageTransform(*transform)
    if k_new.is_cuda:
        launch_append(
            k_new, v_new, q, Memory(*k), Memory(*v), statistic, Place(*place), of_keys, error,
            [VARIANTS[number] for number in variants], _regions(present, regions),
        )  # fmt: skip
    else:
        variant, k_held, v_held, where = reference.present_operands(k, v, place, variants, present, regions)
        reference.append(k_new, v_new, q, k_held, v_held, statistic, where, of_keys, error, variant)


@torch.library.custom_op("kvcal::decode", mutates_args=("workspace",))
def decode(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], place: Sequence[Tensor], transform: Sequence[Tensor],
    s_aux: Tensor, workspace: Tensor, scale: float, softcap: float, variants: Sequence[int], present: Tensor,
    regions: Sequence[int],
) -> Tensor:  # fmt: skip
    """[B, n G, D] in q's dtype: attention of the step's queries over the ``lengths`` + 1 tokens of every sequence,
    after ``append``. ``softcap`` 0 for none."""
    if q.is_cuda:
        return launch_decode(
            q, Memory(*k), Memory(*v), Place(*place), PageTransform(*transform), s_aux, workspace, scale, softcap,
            [VARIANTS[number] for number in variants], _regions(present, regions),
        )  # fmt: skip
    variant, k_held, v_held, where = reference.present_operands(k, v, place, variants, present, regions)
    return reference.decode(q, k_held, v_held, where, PageTransform(*transform), s_aux, scale, softcap, variant)


@decode.register_fake
def _decode_fake(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], place: Sequence[Tensor], transform: Sequence[Tensor],
    s_aux: Tensor, workspace: Tensor, scale: float, softcap: float, variants: Sequence[int], present: Tensor,
    regions: Sequence[int],
) -> Tensor:  # fmt: skip
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op("kvcal::pack", mutates_args=("pages", "error"))
def pack(
    x: Tensor, pages: Tensor, slots: Tensor, first_page: int, query_mean: Tensor, transform: Sequence[Tensor],
    error: Tensor, side: int, variant: int,
) -> None:  # fmt: skip
    """Tokens x [b, n, 128 P, D], P 1 or more, any strides -> pages[slots], int32 [b, P]. They are number ``first_page``
    and on of their sequences. ``query_mean`` [b, n, D] fp32, for query scores. ``side``: its index in SIDES."""
    of_keys, named, mean = PageTransform(*transform), VARIANTS[variant], query_mean if query_mean.numel() else None
    if x.is_cuda:
        launch_pack(x, pages, slots, first_page, query_mean, of_keys, error, SIDES[side], named)
    else:
        reference.pack(x, pages, slots, first_page, mean, of_keys, error, SIDES[side], named)


@torch.library.custom_op("kvcal::unpack", mutates_args=("out",))
def unpack(
    pages: Tensor, slots: Tensor, out: Tensor, transform: Sequence[Tensor], side: int, variant: int
) -> None:  # fmt: skip
    """pages[slots], int32 [b, P] -> out [b, n, 128 P, D], any float dtype, channels side by side."""
    serve = launch_unpack if out.is_cuda else reference.unpack
    serve(pages, slots, out, PageTransform(*transform), SIDES[side], VARIANTS[variant])


def _regions(present: Tensor, regions: Sequence[int]) -> Regions | None:
    return Regions(present, (regions[0], regions[1])) if regions else None
