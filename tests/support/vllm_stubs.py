"""The five compiled operators that vLLM calls on a CPU and that its pure-Python build does not have, in torch. It is a
plug-in of vLLM's, so that every one of its processes has them.

KVCAL_TEST_PLAN_OF_RANK_1: the plan that rank 1 reads in place of the one that it is told.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

_LIBRARY: list[torch.library.Library] = []


def register() -> None:
    """Once a process."""
    if _LIBRARY:
        return
    library = torch.library.Library("_C", "FRAGMENT")
    _LIBRARY.append(library)
    for schema, function in {
        "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
        "init_cpu_threads_env(str cores) -> str": lambda cores: "",
        "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
        "fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor": _sampled,
        "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
        "Tensor(a!) slot_mapping, int block_size) -> ()": _slot_mapping,
    }.items():
        name = schema.split("(")[0]
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
    if "KVCAL_TEST_PLAN_OF_RANK_1" in os.environ:
        _read_other_plan()
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._compute_slot_mapping_kernel_impl = _slot_mapping_of_kernel


def _read_other_plan() -> None:
    """As where two machines have different files of the same name."""
    from vllm.distributed import get_tensor_model_parallel_rank

    from kvcal.plan import plan

    load = plan.load_plan

    def load_plan(path: str) -> Any:
        return load(os.environ["KVCAL_TEST_PLAN_OF_RANK_1"] if get_tensor_model_parallel_rank() else path)

    plan.load_plan = load_plan


def _slot_mapping_of_kernel(*args: object) -> None:
    """In place of the Triton kernel, by position: 0.32 hands over its arguments in the order of the kernel, and its own
    replacement expects the block size one place earlier."""
    starts, positions, table, _, *others = args[2:]
    if isinstance(others[0], Tensor):
        slots, block_size = others[:2]
    else:
        block_size, slots = others[:2]
    _slot_mapping(starts, positions, table, slots, block_size)  # type: ignore[arg-type]


def _sampled(logits: Tensor, seeds: Tensor) -> Tensor:
    """A token of every row [B, vocabulary], by noise of the row's seed."""
    generators = (torch.Generator().manual_seed(seed) for seed in seeds.tolist())
    noise = [torch.empty_like(row).exponential_(generator=own) for row, own in zip(logits, generators, strict=True)]
    return (logits.softmax(-1) / torch.stack(noise)).argmax(-1)


def _slot_mapping(starts: Tensor, positions: Tensor, table: Tensor, slots: Tensor, block_size: int) -> None:
    """The slot of every token; of a table that is too narrow (rings), some slot of its last block: nobody reads it."""
    counts = starts[1:] - starts[:-1]
    row = torch.repeat_interleave(torch.arange(len(counts)), counts.long())
    at = positions[: len(row)]
    blocks = table[row, (at // block_size).clamp(max=table.shape[1] - 1)]
    slots[: len(row)] = blocks.long() * block_size + at % block_size
    slots[len(row) :] = -1
