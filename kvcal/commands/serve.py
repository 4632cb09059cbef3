"""Commands before a plan is served: ``kvcal bench``, ``capacity`` and ``serve-args``. No engine is
imported."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvcal import console
from kvcal.commands import options
from kvcal.errors import ArtifactError, KernelError, UsageError
from kvcal.lazy_torch import lazy_imports
from kvcal.quantities import format_bytes, parse_bytes

with lazy_imports():
    from kvcal import bench as layer_times
    from kvcal.engines import capacity as engine_capacity
    from kvcal.engines import shard, support
    from kvcal.models import config as model_config
    from kvcal.plan import plan as plan_file


WASTEFUL = 1.5  # bytes of a block, by those of its pages

EngineOption = Annotated[Literal["vllm", "sglang"], typer.Option("--engine")]
RequestsOption = Annotated[
    int, typer.Option("--max-requests", help="Requests that run at once at most: SGLang keeps a ring for each.", min=1)
]
DraftsOption = Annotated[
    int, typer.Option("--drafts", help="Draft tokens (n-grams) that vLLM verifies with a token, 0 to 7.", min=0, max=7)
]
RanksOption = Annotated[int, typer.Option("--tp", help="Ranks of tensor parallelism.", min=1, max=1024)]


@options.spread
def bench(plan: options.PlanArgument, sizes: options.WorkloadOptions, given: options.OutputOptions) -> None:
    """Time the steps of a plan's layers on this GPU, next to torch's fastest attention at 16 bits.

    A step is all that a layer's cache does for a new token: storing it, packing pages, attention, and with a
    basis, entering and leaving it. Rows are at random phases of their pages. Layers that differ in nothing
    but their index share a row. Exit code 6 without a GPU.

    Example: `kvcal bench plan.safetensors --batch 8 --context 32768`
    """
    import torch

    loaded = plan_file.load_plan(plan)
    workload = sizes.workload(loaded.workload)
    if not torch.cuda.is_available():
        raise KernelError(
            f"kvcal bench needs a CUDA device, and torch {torch.__version__} sees none",
            hint="run it on a machine with an NVIDIA GPU and a CUDA build of torch",
        )
    times, device = layer_times.time_layers(loaded, workload, torch.device("cuda")), torch.cuda.get_device_name()
    about = {"device": device, "plan_sha256": loaded.sha256, "workload": asdict(workload)}
    rows = [_bench_row(time) for time in times]
    title = f"A step of a layer of {plan.name}, for {loaded.model.id}, on {device}, batch {workload.batch} x "
    head = ("layers", "K", "V", "cache", "µs", "99 %", "longest", "in phase", "packing", "µs at 16 bits", "factor")
    value = about | {"layers": [asdict(time) for time in times]}
    given.show(value, console.View(f"{title}{workload.context} tokens", head, rows))


def _bench_row(time: layer_times.LayerTime) -> tuple[str, ...]:
    dense, step = time.dense_us, time.step
    found = (f"{len(time.layers)} from {time.layers[0]}", time.k, time.v, format_bytes(time.nbytes))
    at_16_bits = "" if dense is None else f"{dense:.1f}"
    if step is None:
        return (*found, *[""] * 5, at_16_bits, time.reason)
    us = (f"{us:.1f}" for us in (step.us, step.us_99, step.longest_us, step.in_phase_us))
    return (*found, *us, f"{step.packing:.1%}", at_16_bits, "" if dense is None else f"{dense / step.us:.2f}x")


@options.spread
def capacity(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, or an embedded model's name.")],
    plan: options.PlanOption,
    given: options.OutputOptions,
    context: Annotated[int, typer.Option(help="Tokens of a request at most.", **options.TOKENS)],
    kv_memory: Annotated[
        str, typer.Option(help="Of one device, for the cache alone, such as 50GB.", callback=options.of_bytes)
    ],
    engine: EngineOption = "vllm",
    tp: RanksOption = 1,
    max_requests: RequestsOption = 64,
    drafts: DraftsOption = 0,
) -> None:
    """Tell what fits into an engine's memory with a plan: blocks, tokens, and requests of a context, as the
    engine will count them. `kvcal size` counts weights and workspace, too.

    Example: `kvcal capacity meta-llama/Llama-3.1-8B --plan plan.safetensors --kv-memory 50GB --tp 4 --context
    32768`
    """
    loaded = _served(plan, engine, drafts)
    facts = model_config.read_sizes(model)
    if loaded.geometry.layers != facts.geometry.layers:
        raise ArtifactError(
            f"{plan}: the plan is for {loaded.model.id}, whose layers or heads are others than those of {facts.id}"
        )
    nbytes = parse_bytes(kv_memory)
    found = engine_capacity.capacity(engine, loaded, nbytes, tp, context, drafts, max_requests)
    value = asdict(found) | {"engine": engine, "tp": tp, "concurrency": found.concurrency, "tokens": found.num_tokens}
    rows = [
        ("memory for the cache, on each rank", format_bytes(nbytes)),
        ("block of 128 tokens, all layers", format_bytes(found.block_bytes)),
        ("of which padding", format_bytes(found.block_bytes - found.page_bytes)),
        ("blocks", str(found.num_blocks)),
        (
            "blocks of a request",
            f"{found.blocks_per_request}, {found.ring_blocks} of them for rings, {found.window_blocks} for windows",
        ),
        (f"requests of {context} tokens at once", f"{found.concurrency:.2f}"),
        ("tokens", f"{found.num_tokens}, {found.num_tokens / max(1, found.raw_tokens):.2f}x of 16 bits"),
    ]
    given.show(value, console.View(f"{facts.id} with {plan.name} in {engine}", ("", ""), rows))
    say = given.reporter().say
    if found.block_bytes > WASTEFUL * found.page_bytes:
        say(
            "note: a ring is larger than the pages of a block, and vLLM gives every block its bytes: few layers with "
            "full attention cannot save more"
        )
    if engine == "sglang" and found.concurrency > max_requests:
        say(f"note: sglang runs at most {max_requests} of them at once, which --max-requests states")


@options.spread
def serve_args(
    plan: options.PlanArgument,
    given: options.OutputOptions,
    engine: EngineOption = "vllm",
    model: Annotated[str | None, typer.Option("--model", help="As the engine finds it; default: the plan's.")] = None,
    tp: RanksOption = 1,
    max_requests: RequestsOption = 64,
    drafts: DraftsOption = 0,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a request at most; default: the model's.", **options.TOKENS)
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Of one device, for the cache alone; default: what the engine finds.", callback=options.of_bytes
        ),
    ] = None,
) -> None:
    """Print the command line that serves a plan in an engine, with kvcal installed next to it.

    Example: `kvcal serve-args plan.safetensors --engine vllm --tp 2`
    """
    loaded = _served(plan, engine, drafts)
    shard.HeadShard(loaded, 0, tp).blocks  # noqa: B018 - refuses ranks that cannot share the heads
    name, path = model or loaded.model.id, str(plan.resolve())
    memory = None if kv_memory is None else parse_bytes(kv_memory)
    sizes = tp, context or 1, drafts, max_requests
    found = None if memory is None else engine_capacity.capacity(engine, loaded, memory, *sizes)
    if engine == "vllm":
        words = ["vllm", "serve", name, "--attention-backend", "KVCAL", "--block-size", "128"]
        words += ["--additional-config", json.dumps({"kvcal_plan": path})]
        words += ["--tensor-parallel-size", str(tp)] if tp > 1 else []
        words += ["--max-model-len", str(context)] if context is not None else []
        words += ["--kv-cache-memory-bytes", str(memory)] if memory is not None else []
        by_ngrams = json.dumps({"method": "ngram", "num_speculative_tokens": drafts})
        words += ["--speculative-config", by_ngrams] if drafts else []
    else:
        words = ["env", f"KVCAL_PLAN={path}", "python", "-m", "sglang.launch_server", "--model-path", name]
        words += ["--attention-backend", "kvcal", "--page-size", "128", "--max-running-requests", str(max_requests)]
        words += ["--disable-prefill-cuda-graph"]
        words += ["--tp-size", str(tp)] if tp > 1 else []
        words += ["--context-length", str(context)] if context is not None else []
        words += ["--max-total-tokens", str(found.num_blocks * 128)] if found is not None else []
    words += [support.NO_PREFIXES] if support.loses_sinks(loaded, drafts, engine) else []
    given.show({"engine": engine, "arguments": words}, shlex.join(words))
    if model is None and "/" not in name:
        given.reporter().say(f"note: {name!r} is no hub id: --model names the model as {engine} finds it")


def _served(plan: Path, engine: str, drafts: int) -> plan_file.Plan:
    """The plan, if the engine serves it."""
    if drafts and engine != "vllm":
        raise UsageError(f"--drafts {drafts} with --engine {engine}; plans are served with drafts in vllm alone")
    loaded = plan_file.load_plan(plan)
    support.require_served(loaded, True, engine, drafts)
    return loaded
