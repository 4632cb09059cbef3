"""The size of a stage before it begins: time from one timed step, memory from shapes; and the memory there is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from kvcal.distributed import size_on_node

# The most memory that a container may take, of cgroups 2 and 1.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class Estimate(NamedTuple):
    """A stage's ``seconds``, and the most ``nbytes`` of its device, weights included. ``steps``: what it consists of,
    such as {"plans": 30}."""

    stage: str
    steps: Mapping[str, int]
    seconds: float
    nbytes: int


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of the second call of two: the first compiles what has to be."""
    for _ in range(2):
        _wait()
        started = time.perf_counter()
        call()
        _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_bytes() -> int:
    """Bytes of memory of the host, or of its container, for each of the processes on this node."""
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in LIMITS:
        with suppress(OSError, ValueError):  # no file, or no limit
            nbytes = min(nbytes, int(path.read_text()))
    return nbytes // size_on_node()


def parameter_bytes(model: PreTrainedModel) -> int:
    """Bytes of parameters and buffers as they are held now, tied ones once."""
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def graph_bytes(model: PreTrainedModel) -> int:
    """Bytes of a token that a backward to activations alone keeps in all layers: what each matrix of a layer makes, of
    as many experts as a token takes; the activated values once more; attention's output and the projections' input; and
    two norms in fp32."""
    config, itemsize = model.config.get_text_config(decoder=True), model.dtype.itemsize
    num_experts = int(config.to_dict().get("num_experts_per_tok") or 1)
    outside = {model.get_input_embeddings().weight, getattr(model.get_output_embeddings(), "weight", None)}
    made = widest = 0
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter not in outside:
            made += parameter.shape[-2] * (num_experts if parameter.ndim > 2 else 1)
            widest = max(widest, *parameter.shape[-2:])
    layers = config.num_hidden_layers
    return itemsize * (made + layers * (widest + 2 * config.hidden_size)) + layers * 2 * 4 * config.hidden_size
