"""Copies of blocks between a GPU and the host, of vLLM's two connectors, in the memory of a CPU. What is
copied is vLLM's own; each copy is made when it is asked for, in place of CUDA's streams and batched
copies."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch


class Done:
    """An event or a stream of CUDA, of work that is done."""

    priority_range = staticmethod(lambda: (0, 0))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.record = self.synchronize = lambda *args: None
        self.query = lambda: True


class Copies:
    """In place of ``DmaCopyBackend``: both sides are tensors by name, int8 [blocks, bytes]."""

    def init(self, blocks: dict[str, Any], hosted: dict[str, Any], *_: Any) -> None:
        self.sides = [(blocks[name], hosted[name]) for name in blocks]

    def launch_copy(
        self, source: list[int], target: list[int], is_store: bool, event_idx: int, events_list: list[Any], **_: Any
    ) -> None:
        for own, hosted in self.sides:
            if is_store:
                hosted[target] = own[source]
            else:
                own[target] = hosted[source]
        events_list.append((event_idx, Done()))


class Worker:
    """In place of ``CPUOffloadingWorker``, of chunks of one block; of a spec with tiers in the memory that these
    read."""

    def __init__(self, spec: Any, kv_caches: Any) -> None:
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        (cache,) = kv_caches.tensors  # layers side by side: a block is one range of bytes
        self.copies, self.finished = Copies(), list[Any]()
        self.nbytes, self.region = cache.page_size_bytes, None
        if "secondary_tiers" in spec.extra_config:
            rank, page = spec.config.parallel.rank, spec.cpu_page_size_per_worker
            self.region = SharedOffloadRegion(
                spec.config.engine_id, spec.num_chunks, rank, spec.kv_bytes_per_chunk, page
            )
            hosted = self.region.create_next_worker_view(self.nbytes)
        else:
            hosted = torch.zeros(spec.num_chunks, self.nbytes, dtype=torch.int8)
        self.copies.init({"": cache.tensor}, {"": hosted})

    def submit_store(self, job: int, source: Any, target: Any) -> bool:
        return self._copy(job, source, target, True)

    def submit_load(self, job: int, source: Any, target: Any) -> bool:
        return self._copy(job, source, target, False)

    def _copy(self, job: int, source: Any, target: Any, is_store: bool) -> bool:
        from vllm.v1.kv_offload.base import TransferResult

        start, (own, other) = time.monotonic(), (source.block_ids.tolist(), target.block_ids.tolist())
        assert len(own) == len(other)
        self.copies.launch_copy(own, other, is_store, job, [])
        self.finished.append(TransferResult(job, True, len(own) * self.nbytes, time.monotonic() - start))
        return True

    def get_finished(self) -> list[Any]:
        found, self.finished = self.finished, []
        return found

    def wait(self, jobs: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        if self.region is not None:
            self.copies.sides.clear()
            self.region.cleanup()


def copy_on_a_cpu() -> None:
    """Replace the workers' copies of both connectors."""
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.simple_kv_offload import worker

    cuda = SimpleNamespace(Stream=Done, current_stream=lambda: None)
    given = {name: getattr(torch, name) for name in ("Tensor", "device", "empty", "int8", "zeros")}
    worker.torch = SimpleNamespace(**given, cuda=cuda, Event=Done)
    worker.DmaCopyBackend = Copies
    CPUOffloadingSpec.get_worker = lambda self, kv_caches: Worker(self, kv_caches)
