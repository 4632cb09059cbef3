"""``kvcal serve-args``: how an engine serves a plan, and what of it fits there. No engine is imported."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvcal.commands import options, values
from kvcal.commands.decorators import spread
from kvcal.errors import UsageError
from kvcal.lazy_torch import lazy_imports
from kvcal.progress import Reporter
from kvcal.quantities import format_bytes, parse_bytes

with lazy_imports():
    from kvcal import geometry
    from kvcal.engines import capacity as engine_capacity
    from kvcal.engines import shard, states, support, vllm
    from kvcal.models import config as model_config
    from kvcal.models import files
    from kvcal.plan import plan as plan_file


WASTEFUL = 1.5  # bytes of a block, by those of its pages
OWN_DRAFTS = "ngram", "mtp"


@spread
def serve_args(
    plan: options.PlanArgument,
    given: options.OutputOptions,
    engine: Annotated[Literal["vllm", "sglang"], typer.Option("--engine")] = "vllm",
    model: Annotated[str | None, typer.Option("--model", help="As the engine finds it; default: the plan's.")] = None,
    tp: Annotated[int, typer.Option("--tp", help="Ranks of tensor parallelism.", min=1, max=1024)] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Stages of a pipeline, in vLLM.", min=1, max=1024)] = 1,
    max_requests: Annotated[
        int, typer.Option(help="Requests that run at once at most: SGLang keeps a ring for each.", min=1)
    ] = 64,
    drafts: Annotated[
        int, typer.Option(help="Draft tokens that the engine verifies with a token, 0 to 7.", min=0, max=7)
    ] = 0,
    draft: Annotated[
        str,
        typer.Option(
            help="What drafts: ngram, mtp (a layer of the model's own), or a model: EAGLE, a small one. In SGLang a "
            "small model alone."
        ),
    ] = "ngram",
    context: Annotated[
        int | None, typer.Option(help="Tokens of a request at most; default: the model's.", **values.TOKENS)
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Of one device, for the cache alone, such as 50GB: also tell what fits; default: what the engine "
            "finds.",
            callback=values.of_bytes,
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Of the host, for blocks that leave the device in vLLM, such as 8GB.", callback=values.of_bytes
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="A folder where they stay behind the host's memory, for later engines of the same plan."),
    ] = None,
    role: Annotated[
        Literal["prefill", "decode"] | None,
        typer.Option(help="Of this vLLM, where prompts and answers have engines of their own, with NIXL between them."),
    ] = None,
    state_dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Of recurrent states (linear attention, Mamba) in vLLM; default: the model's."),
    ] = None,
) -> None:
    """Print the command line that serves a plan in an engine; with --kv-memory and --context, what fits.

    kvcal has to be installed next to the engine. Blocks, tokens and requests that fit are as the engine will
    count them; `kvcal size` counts weights and workspace, too. Of a model with states its config.json is
    read.

    Example: `kvcal serve-args plan.safetensors --engine vllm --tp 2`

    Example: `kvcal serve-args plan.safetensors --kv-memory 50GB --context 32768 --json`

    Example: `kvcal serve-args plan.safetensors --host-memory 8GB --store blocks`

    Example: `kvcal serve-args plan.safetensors --role prefill`, and `--role decode` for the other engine
    """
    if drafts and engine != "vllm" and draft in OWN_DRAFTS:
        raise UsageError(f"--draft {draft} with --engine {engine}, where a small model alone drafts", "--draft MODEL")
    if host_memory is not None and engine != "vllm":
        raise UsageError(f"--host-memory with --engine {engine}; blocks of a plan leave the device in vllm alone")
    if pp > 1 and (engine != "vllm" or drafts or host_memory is not None):
        raise UsageError(
            f"--pp {pp} with --engine sglang, --drafts or --host-memory; plans are served in stages of a pipeline in "
            "vllm alone, without these"
        )
    if store is not None and host_memory is None:
        raise UsageError("--store without --host-memory, through which blocks go", hint="--host-memory 8GB")
    if role is not None and engine != "vllm":
        raise UsageError(
            f"--role {role} with --engine {engine}; engines read blocks of a plan from others in vllm alone"
        )
    if role is not None and (drafts or tp > 1 or pp > 1):
        what = f"--drafts {drafts}" if drafts else f"--tp {tp} --pp {pp}"
        raise UsageError(f"--role {role} with {what}, which were not tried together")
    loaded = plan_file.load_plan(plan)
    support.require_served(loaded, True, engine, drafts)
    if store is not None:
        support.require_tiered(loaded)
    if role is not None:
        support.require_peers(loaded)
    stages = shard.stages_of(loaded.layers[-1].geometry.index + 1, pp) if pp > 1 else ()
    if stages:
        support.require_staged(loaded, stages)
    heads = shard.HeadShard(loaded, 0, tp, 1 + drafts, stages)
    for one in heads.of_stages:
        one.blocks  # noqa: B018 - refuses ranks that cannot share the heads
    name, path = model or loaded.model.id, str(plan.resolve())
    memory = None if kv_memory is None else parse_bytes(kv_memory)
    state = 0
    if heads.num_states and engine == "vllm":  # SGLang has a pool for them
        location = files.locate(name)
        config = files.read_json(location.folder / "config.json", location.id)
        state = states.state_bytes(config, tp, 1 + drafts, loaded.cache_dtype, state_dtype)
    draft_bytes = _draft_bytes(draft, loaded, tp) if drafts else 0
    sizes = tp, context or 1, drafts, max_requests, state, draft_bytes
    ratio = _window_ratio(heads, memory, max_requests, context or loaded.workload.context) if engine == "sglang" else 0
    found = None if memory is None else engine_capacity.capacity(engine, loaded, memory, *sizes, ratio, stages)
    if engine == "vllm":
        block = engine_capacity.vllm_pool(heads, state, draft_bytes=draft_bytes).block_tokens
        words = [] if store is None else ["env", f"PYTHONHASHSEED={support.block_seed(loaded)}"]
        words += ["vllm", "serve", name, "--attention-backend", "KVCAL", "--block-size", str(block)]
        words += ["--additional-config", json.dumps({"kvcal_plan": path})]
        words += ["--tensor-parallel-size", str(tp)] if tp > 1 else []
        words += ["--pipeline-parallel-size", str(pp)] if pp > 1 else []
        words += ["--max-model-len", str(context)] if context is not None else []
        words += ["--kv-cache-memory-bytes", str(memory)] if memory is not None else []
        by = {"method" if draft in OWN_DRAFTS else "model": draft, "num_speculative_tokens": drafts}
        words += ["--speculative-config", json.dumps(by)] if drafts else []
        words += ["--mamba-ssm-cache-dtype", state_dtype] if state_dtype is not None else []
        connectors = [] if role is None else [_peer(role)]
        connectors += [] if host_memory is None else [_host(parse_bytes(host_memory), store)]
        words += ["--kv-transfer-config", json.dumps(_one_of(connectors))] if connectors else []
    else:
        words = ["env", f"KVCAL_PLAN={path}", "python", "-m", "sglang.launch_server", "--model-path", name]
        words += ["--attention-backend", "kvcal", "--page-size", "128", "--max-running-requests", str(max_requests)]
        words += ["--disable-prefill-cuda-graph"]
        words += [support.NO_TREE] if heads.num_states else []
        words += ["--tp-size", str(tp)] if tp > 1 else []
        words += ["--context-length", str(context)] if context is not None else []
        words += ["--max-total-tokens", str(found.num_blocks * 128)] if found is not None else []
        words += ["--swa-full-tokens-ratio", f"{ratio:.6f}"] if ratio else []
        words += _drafting(draft, drafts) if drafts else []
    words += [support.NO_PREFIXES] if support.loses_sinks(loaded, engine) else []
    value: dict[str, Any] = {"engine": engine, "arguments": words, "capacity": None}
    if found is not None and context is not None:
        counted = {"tp": tp, "pp": pp, "concurrency": found.concurrency, "tokens": found.num_tokens}
        value["capacity"] = asdict(found) | counted
    given.show(value, shlex.join(words))
    if found is not None and context is not None:
        _say_what_fits(found, given.reporter())
        if engine == "sglang" and found.concurrency > max_requests:
            given.reporter().say(f"note: sglang runs at most {max_requests} of them at once: --max-requests")
    if model is None and "/" not in name:
        given.reporter().say(f"note: {name!r} is no hub id: --model names the model as {engine} finds it")


def _peer(role: Literal["prefill", "decode"]) -> dict[str, Any]:
    """vLLM's KV connector between an engine for prompts and one for answers."""
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    return {"kv_connector": vllm.PEERS, "kv_connector_module_path": vllm.PEERS_MODULE, "kv_role": roles[role]}


def _one_of(connectors: list[dict[str, Any]]) -> dict[str, Any]:
    """vLLM takes one, which may have others."""
    if len(connectors) == 1:
        return connectors[0]
    extra = {"connectors": connectors}
    return {"kv_connector": "MultiConnector", "kv_role": connectors[0]["kv_role"], "kv_connector_extra_config": extra}


def _drafting(draft: str, drafts: int) -> list[str]:
    """SGLang's options of a small model that drafts."""
    own = {"algorithm": "STANDALONE", "draft-model-path": draft, "num-steps": drafts, "eagle-topk": 1}
    own |= {"num-draft-tokens": 1 + drafts, "draft-attention-backend": "triton"}
    return [word for name, value in own.items() for word in (f"--speculative-{name}", str(value))]


def _window_ratio(heads: shard.HeadShard, memory: int | None, max_requests: int, context: int) -> float:
    """Tokens of SGLang's pool for sliding windows, by those in pages, for as many requests as fit; 0 without."""
    pool = engine_capacity.SglangPool.of(heads, max_requests)
    fitting = max_requests if memory is None else pool.fitting(memory, max_requests, context)
    return pool.ratio(fitting, context)


def _host(nbytes: int, store: Path | None) -> dict[str, Any]:
    """vLLM's, of blocks in so many bytes of the host, and behind them in a folder."""
    name, more = "SimpleCPUOffloadConnector", dict[str, Any]()
    if store is not None:
        tier = {"type": "fs", "root_dir": str(store.resolve())}
        name, more = "OffloadingConnector", {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    extra = {"cpu_bytes_to_use": nbytes, **more}
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _draft_bytes(draft: str, plan: plan_file.Plan, num_ranks: int) -> int:
    """Of a token in the layers of what drafts; of one layer more of the model where these are its own."""
    if draft == "ngram":
        return 0
    if draft == "mtp":
        own = next(layer.attention for layer in plan.layers if layer.is_paged)
        return engine_capacity.draft_token_bytes([own], plan.cache_dtype, num_ranks)
    model = model_config.read_sizes(draft).geometry
    layers = [layer for layer in model.layers if isinstance(layer, geometry.AttentionGeometry)]
    return engine_capacity.draft_token_bytes(layers, model.cache_dtype, num_ranks)


def _say_what_fits(found: engine_capacity.Capacity, reporter: Reporter) -> None:
    fitting = f"{found.concurrency:.2f} requests of {found.context} tokens at once"
    factor = found.num_tokens / max(1, found.raw_tokens)
    reporter.say(f"{fitting}: {found.num_tokens} tokens, {factor:.2f}x of those at 16 bits")
    block, besides = format_bytes(found.block_bytes), format_bytes(found.block_bytes - found.page_bytes)
    kind = "sliding windows and padding" if found.window_tokens else "padding"
    reporter.say(
        f"{found.num_blocks} blocks of {found.block_tokens} tokens on each rank, {block} each ({besides} of {kind}); "
        f"a request takes {found.blocks_per_request}, {found.ring_blocks} of them for rings, {found.window_blocks} for "
        f"windows and {found.state_blocks} for states"
    )
    if found.window_tokens:
        reporter.say(f"{found.window_tokens} tokens of sliding windows lie in a pool of their own")
    if found.block_bytes > WASTEFUL * found.page_bytes and not found.window_tokens:
        reporter.say(
            "note: a ring, a state or the layers of a draft take more than the pages of a block, and vLLM gives every "
            "block its bytes: few layers with full attention, or a large draft, cannot save more"
        )
