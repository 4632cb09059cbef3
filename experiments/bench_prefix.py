"""Loading a stored prompt against taking it in: GB/s of 16-bit keys and values that come out, and seconds.

    python experiments/bench_prefix.py --layers 16 --folder out

A model of a public shape with random weights; prefixes with random pages, whose content costs no time. A prefix is
loaded from pinned and from pageable host memory, and from a file (verified, in the page cache or dropped from it),
reconstructed into 16-bit pages or as stored. ``in torch`` is what loading was before the kernels served it: all tokens
are read by the dynamic cache and stored again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvcal import artifact
from kvcal.bench.case import SPREAD, fill_records
from kvcal.bench.model import model_plan, random_model, shape_config, time_prefill
from kvcal.bench.shape import PAIRS
from kvcal.cache.plan_cache import PlanCache
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import Plan
from kvcal.stages.prefix import (
    KIND,
    SCHEMA,
    HeldPrefix,
    PrefixLoader,
    PrefixSubject,
    held_tensors,
    named_parts,
    tokens_sha256,
)
from kvcal.strict import dump

REPEATS = 5


def seconds(call: Callable[[], Any], before: Callable[[], None] = lambda: None) -> list[float]:
    """Of REPEATS calls and one more before, from the call until the device is done; in order of length."""
    times = []
    for _ in range(REPEATS + 1):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        del found
    return sorted(times[1:])


def random_prefix(loaded: LoadedModel, plan: Plan, num_tokens: int) -> HeldPrefix:
    """Random pages and tokens of the plan's formats, on the CPU."""
    cache, device = PlanCache(plan, loaded.model.config), loaded.model.device
    for layer in cache.paged_layers:
        layer.create(1, device)
        layer.resume(num_tokens)
        for part in layer.parts:
            fill_records(part)
            part.sinks.normal_(std=SPREAD)
            part.ring.normal_(std=SPREAD)
    vocabulary = loaded.model.config.vocab_size
    tokens = torch.randint(0, vocabulary, (num_tokens,), dtype=torch.int32)
    names = [name for name, part in named_parts(cache) if part.format.needs_queries]
    subject = PrefixSubject(
        plan.model, plan.sha256, "bfloat16", num_tokens, tokens_sha256(tokens), dict.fromkeys(names, 0)
    )
    held = {name: tensor.cpu().contiguous() for name, tensor in held_tensors(cache)}
    return HeldPrefix(Path("random"), subject, tokens, torch.zeros(vocabulary), held)


@torch.no_grad()
def in_torch(stored: PrefixLoader, held: HeldPrefix, into: Plan, loaded: LoadedModel) -> PlanCache:
    """Read by the dynamic cache, stored again."""
    old, made = stored.load(held).cache, PlanCache(into, loaded.model.config)
    for ours, theirs in zip(old.layers, made.layers, strict=True):
        dims = (ours.plan.head_dim(side) for side in "kv")
        heads = ours.plan.attention.num_kv_heads
        theirs.update(*ours.update(*(torch.zeros(1, heads, 0, dim, device=loaded.model.device) for dim in dims)))
    return made


def dropped(path: Path) -> None:
    """The file out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(model: Any, name: str, context: int, folder: Path, is_full: bool) -> dict[str, Any]:
    """Seconds of every way to load a prefix of one format."""
    plan = model_plan("random", model.config, PAIRS[name], 1, context)
    loaded = LoadedModel(model, None, plan.model, plan.geometry, "random")
    raw, path = plan.unquantized(), folder / "prefix.kv"
    held = random_prefix(loaded, plan, context)
    pinned, into, stored = held.pinned(), PrefixLoader(loaded, plan, raw), PrefixLoader(loaded, plan)
    gigabytes = raw.nbytes([context]) / 1e9
    found = {"output_gb": gigabytes, "file_gb": sum(tensor.nbytes for tensor in held.tensors.values()) / 1e9}
    ways: dict[str, Callable[[], Any]] = {"pinned": lambda: into.load(pinned), "pageable": lambda: into.load(held)}
    ways["as stored, pinned"] = lambda: stored.load(pinned)
    if is_full:
        tensors = {**held.tensors, "tokens": held.tokens_T, "logits": held.logits_V}
        prefix = artifact.Artifact(KIND, SCHEMA, {}, dump(held.subject), tensors)
        artifact.write(path, prefix)
        ways["read, in page cache"] = lambda: into.read(path)
        ways["file, in page cache"] = lambda: into.load_file(path)
        ways["file, from disk"] = lambda: into.load_file(path)
        ways["in torch"] = lambda: in_torch(stored, held, raw, loaded)
    for way, call in ways.items():
        times = seconds(call, functools.partial(dropped, path)) if way == "file, from disk" else seconds(call)
        least, median, most = times[0], statistics.median(times), times[-1]
        found[way] = {"median": median, "least": least, "most": most}
        spread = f"{1e3 * median:.1f} ms ({1e3 * least:.1f} to {1e3 * most:.1f})"
        print(f"{name}, {way}: {spread}, {gigabytes / median:.1f} GB/s", flush=True)
    path.unlink(missing_ok=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="so many of them")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--formats", nargs="+", default=["aqua", "higgs", "2"], choices=sorted(PAIRS))
    parser.add_argument("--folder", type=Path, default=Path("."))
    options = parser.parse_args()
    config = shape_config(options.shape)
    if options.layers:
        config.num_hidden_layers = options.layers
    model = random_model(config, torch.device("cuda"))
    results: dict[str, Any] = {"shape": options.shape, "layers": config.num_hidden_layers, "context": options.context}
    times = time_prefill(model, options.shape, None, options.context)
    results["prefill_s"] = times.median_us / 1e6
    print(f"prefill: {times} µs", flush=True)
    for number, name in enumerate(options.formats):
        results[name] = measured(model, name, options.context, options.folder, number == 0)
        (options.folder / "prefix.json").write_text(json.dumps(results, indent=1))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
