"""Messages between ranks, without a model: `torchrun ... rank_checks.py FOLDER`. Each rank writes what it has
seen to FOLDER/RANK.json."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvcal import distributed
from kvcal.artifact import write_text_atomic
from kvcal.data.sequences import TokenDataset
from kvcal.distributed import from_first, gather, map_over_ranks, rank, require_same
from kvcal.errors import InfeasibleBudget, KvcalError
from kvcal.progress import SILENT
from kvcal.stages.checkpoint import Batch, Checkpoint, Mean, State, for_each_batch

folder = Path(sys.argv[1])


def number(item: int) -> list[int]:
    return [item, rank(), int(torch.tensor(item) ** 2)]


def failing(item: int) -> list[int]:
    if item >= 3:
        raise InfeasibleBudget(f"item {item}", 7, "a hint").at("a place")
    return number(item)


def nested(item: int) -> list[list[int]]:
    """Measures items of its own, for itself."""
    return list(map_over_ranks(range(item), number))


def caught(call: Callable[[], object]) -> list[Any]:
    try:
        call()
    except KvcalError as error:
        return [type(error).__name__, error.message, error.hint, error.place, getattr(error, "smallest_bytes", None)]
    return []


def batch_sums(most_tokens: int, at_once: int) -> list[Any]:
    """A pass over 12 sequences of 8 tokens; rank 1 has no memory for more than two in a batch."""
    data = TokenDataset(
        tuple(torch.arange(n, n + 8) for n in range(12)),
        tuple(torch.ones(8, dtype=torch.bool) for _ in range(12)),
        "",
        "",
    )
    start = State({"sum": Mean.empty(())}, {"steps": 0})
    widths: list[list[int]] = []

    def measure(batches: Sequence[Batch]) -> list[dict[str, Mean]]:
        if rank() == 1 and len(batches[0].numbers) > 2:
            raise torch.OutOfMemoryError("none left")
        widths.append([len(batch.numbers) for batch in batches])
        return [{"sum": Mean.of(batch.tokens_BT.double().sum(1) / 3)} for batch in batches]

    target = folder / "batches" / "sums.safetensors"
    with Checkpoint(target, "sums", {}, start, SILENT) as checkpoint:
        most = for_each_batch(data, most_tokens, measure, "steps", checkpoint, "sums", at_once)
        mean = checkpoint.state.means["sum"]
        return [most, float(mean.total), mean.count, checkpoint.state.done["steps"], widths]


with distributed.joined():
    write_text_atomic(folder / "written", f"by rank {rank()}")
    report = {
        "environment": sorted(os.environ.keys() & {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}),
        "all": list(map_over_ranks(range(5), number)),
        "one": from_first(lambda: number(7)),
        "gathered": gather(rank()),
        "nested": list(map_over_ranks(range(3), nested)),
        "batches": batch_sums(32, 1),
        "together": batch_sums(8, 3),
        "failing": caught(lambda: list(map_over_ranks(range(6), failing))),
        "elsewhere": caught(lambda: require_same("a number", min(rank(), 1))),
    }
    (folder / f"{rank()}.json").write_text(json.dumps(report))
