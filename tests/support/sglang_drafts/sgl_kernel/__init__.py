"""Operators of SGLang's kernels for CPUs that chains of drafts call, in torch. The package itself is not built
here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, stops: Tensor, out: Tensor, _: int
) -> None:
    """Places ``starts`` to ``stops`` of each row of the table, one after the other."""
    bounds = zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True)
    found = torch.cat([table[row, start:stop] for row, start, stop in bounds])
    out[: len(found)] = found


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, stops: Tensor, places: Tensor, _: int
) -> None:
    """The other way round: places into each row of the table."""
    first = 0
    for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
        table[row, start:stop] = places[first : first + stop - start].to(table.dtype)
        first += stop - start


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, table: Tensor, lengths: Tensor, out: Tensor, width: int, topk: int, steps: int
) -> None:
    """The places after each request's tokens."""
    assign_extend_cache_locs_cpu(rows, table, lengths, lengths + topk * steps, out, width)


def fill_accept_out_cache_loc_cpu(accepted: Tensor, places: Tensor, out: Tensor) -> None:
    """The places of accepted tokens, side by side."""
    chosen = places[accepted[accepted >= 0].long()]
    out[: len(chosen)] = chosen


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, out: Tensor, stride: int) -> None:
    """The last accepted token of each request."""
    out.copy_(tokens.flatten()[torch.arange(len(lengths)) * stride + lengths.long() - 1])


def build_tree_kernel_efficient_cpu(
    parents: Tensor, scores: Tensor, lengths: Tensor, mask: Tensor, positions: Tensor, index: Tensor, following: Tensor,
    sibling: Tensor, topk: int, steps: int, count: int, mode: int,
) -> None:  # fmt: skip
    """Of chains: each token follows the one before."""
    assert topk == 1
    numbers = torch.arange(count)
    positions.copy_((lengths.unsqueeze(1) + numbers).flatten())
    index.copy_(torch.arange(len(lengths) * count).view(-1, count))
    following.copy_(torch.where(numbers + 1 < count, numbers + 1, -1).expand_as(following))
    sibling.fill_(-1)
    if mask.numel() == len(lengths) * count * count:
        mask.copy_(torch.ones(count, count, dtype=torch.bool).tril().expand(len(lengths), -1, -1).flatten())


def verify_tree_greedy_cpu(
    *, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    """Drafts of a chain are right as long as each is what the model says after the one before."""
    wanted = target_predict.flatten()
    for request, drafts in enumerate(candidates.tolist()):
        places = retrive_index[request].tolist()
        accept_index[request, 0], number = places[0], 0
        while number + 1 < len(drafts) and drafts[number + 1] == int(wanted[places[number]]):
            predicts[places[number]] = wanted[places[number]]
            number += 1
            accept_index[request, number] = places[number]
        accept_token_num[request] = number
        predicts[places[number]] = wanted[places[number]]


def rotate_input_ids_cpu(*args: Any) -> None:
    """Of models that draft with several layers."""
    raise NotImplementedError


def copy_all_layer_kv_cache_cpu(*args: Any) -> None:
    """Called once before anything is served. Trees of drafts move tokens."""
