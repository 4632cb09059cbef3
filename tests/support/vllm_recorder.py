"""A record of vLLM, step by step: a plug-in of the tests, which writes a line of JSON for every step to
the file that the environment names (sglang_recorder.py does so in SGLang)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import attention_recorder

VARIABLE = "KVCAL_TEST_STEPS"
WITHIN, FROM_PEER = 2, 3  # as engine_replay has them


def register() -> None:
    """In each process of vLLM; one of them schedules."""
    attention_recorder.register()
    if VARIABLE not in os.environ:
        return

    def write(step: list[list[Any]]) -> None:
        with open(os.environ[VARIABLE], "a") as file:
            file.write(json.dumps(step) + "\n")

    record(write)


def record(write: Callable[[list[list[Any]]], object]) -> dict[str, Any]:
    """Hand over every step once its tokens are known: of each request its name, first token, count, the block
    of each page, drafts, tokens that the engine took for right, and whether it begins. Blocks that go to the
    host and come back are entries, too, without a name: ``[None, 0, 0, blocks, is store, the host's
    blocks]``; and pages that another block gets before the step, ``[None, 0, 0, to, WITHIN, from]``, or gets from
    another engine, ``[None, 0, 0, to, FROM_PEER, the other's]``. Returns vLLM's requests by name, as they come."""
    from vllm.v1.core.sched.scheduler import Scheduler

    seen: dict[str, Any] = {}
    if hasattr(Scheduler, "kvcal_recorded"):
        return seen
    Scheduler.kvcal_recorded = True
    by_output: dict[int, Any] = {}
    schedule, update = Scheduler.schedule, Scheduler.update_from_output

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = schedule(self, *args, **kwargs)
        new = {request.req_id: request.num_computed_tokens for request in found.scheduled_new_reqs}
        cached = found.scheduled_cached_reqs
        starts = new | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = {name: len(ids) for name, ids in found.scheduled_spec_decode_tokens.items()}
        step = [
            [_without_ending(name), starts[name], count, _pages_of(self, name), drafts.get(name, 0), count,
             name in new or name in cached.resumed_req_ids]
            for name, count in found.num_scheduled_tokens.items()
        ]  # fmt: skip
        loads, stores = _copies_of(found.kv_connector_metadata)
        loads = _reads_of(self, found.kv_connector_metadata) + loads + _copies_within(self, found)
        by_output[id(found)] = found, step, (loads, stores)
        seen.update({_without_ending(name): self.requests[name] for name in found.num_scheduled_tokens})
        return found

    def answered(self: Any, scheduled: Any, output: Any) -> Any:
        _, step, (loads, stores) = by_output.pop(id(scheduled))
        for name, entry in zip(scheduled.num_scheduled_tokens, step, strict=True):
            if entry[4]:  # drafts: of the request's new tokens, one is the model's own
                sampled = output.sampled_token_ids[output.req_id_to_index[name]]
                entry[5] = entry[2] - entry[4] - 1 + len(sampled)
        if step or loads or stores:
            write([*loads, *step, *stores])
        return update(self, scheduled, output)

    Scheduler.schedule, Scheduler.update_from_output = recorded, answered
    return seen


def _copies_of(metadata: Any) -> tuple[list[list[Any]], list[list[Any]]]:
    """Copies from and to the host of a step, of either connector, or of several."""
    for own in getattr(metadata, "metadata", ()):
        if any(found := _copies_of(own)):
            return found
    if hasattr(metadata, "load_jobs"):
        loads = [(job.dst_spec.block_ids, job.src_spec.block_ids) for job in metadata.load_jobs.values()]
        stores = [(job.src_spec.block_ids, job.dst_spec.block_ids) for job in metadata.store_jobs.values()]
    elif hasattr(metadata, "load_gpu_blocks"):
        loads = [(metadata.load_gpu_blocks, metadata.load_cpu_blocks)]
        stores = [(metadata.store_gpu_blocks, metadata.store_cpu_blocks)]
    else:
        return [], []
    return tuple(
        [[None, 0, 0, list(map(int, own)), is_store, list(map(int, hosted))] for own, hosted in copies if len(own)]
        for is_store, copies in ((0, loads), (1, stores))
    )


def _reads_of(scheduler: Any, metadata: Any) -> list[list[Any]]:
    """Pages that requests get from another engine, which reads them until a later step."""
    number, _ = _pages_group(scheduler)
    requests = [
        request for own in getattr(metadata, "metadata", [metadata])
        for request in getattr(own, "reqs_to_recv", {}).values() if request.local_block_ids
    ]  # fmt: skip
    pairs = [(request.local_block_ids[number], request.remote.block_ids[number]) for request in requests]
    return [[None, 0, 0, list(own), FROM_PEER, list(theirs)[len(theirs) - len(own) :]] for own, theirs in pairs]


def _copies_within(scheduler: Any, scheduled: Any) -> list[list[Any]]:
    """Blocks that a request gets a copy of, as it begins within them."""
    _, count = _pages_group(scheduler)
    pairs = scheduled.kv_cache_block_copies or []
    to, source = (
        [block * count + page for block in blocks for page in range(count)]
        for blocks in ([pair.dst_block_id for pair in pairs], [pair.src_block_id for pair in pairs])
    )
    return [[None, 0, 0, to, WITHIN, source]] if pairs else []


def _without_ending(name: str) -> str:
    """vLLM adds a random ending to a request's name."""
    return name.rsplit("-", 1)[0]


def _pages_of(scheduler: Any, name: str) -> list[int]:
    """The pages of a request, those of a block side by side; all else is in other groups."""
    number, count = _pages_group(scheduler)
    blocks = scheduler.kv_cache_manager.get_block_ids(name)[number]
    return [block * count + page for block in blocks for page in range(count)]


def _pages_group(scheduler: Any) -> tuple[int, int]:
    """The number of the group with pages, and pages of a block."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    firsts = [next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec for spec in specs]
    (number,) = [n for n, spec in enumerate(firsts) if isinstance(spec, FullAttentionSpec)]
    return number, firsts[number].block_size // 128
