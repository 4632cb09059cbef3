"""Refusals: layers of a plan that an engine does not take, versions of engines, and other models than the
plan's.

A block holds 128 tokens and nothing of the request that wrote them. Windows, which a plan keeps at 16 bits
besides its pages, lie in the ring of a request: one that begins after blocks of another decodes its window
from them. Sinks, of which there are few, are shared with pages. Layers with a sliding window and
states are the engine's own. What the kernels cannot read as it is stored is refused everywhere. It is
refused at start: a plan is never served wrongly.

Engines change between versions, and what a plug-in holds on to is not all public. So it is imported, and with
it the engine, by ``kvcal doctor --engine`` before serving, and at every start.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from kvcal.errors import ArtifactError, UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry, CacheDtype
from kvcal.kernels import choice
from kvcal.models.files import config_sha256
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.pages.ways import SLIDING_WINDOW, Engine
from kvcal.plan.layer import LayerPlan
from kvcal.plan.plan import Plan

# What else would be served.
FORMATS = "allocate a plan of uniform or boosted pages"
DTYPE = "the cache has the checkpoint's dtype: convert the model to bfloat16, and make its plan anew"
DRAFTS = "serve it without drafts"
NO_PLAN = "{} serves no plan of this model; `PlanCache` does, in transformers"
BOTH_WAYS = "tokens of an image attend to each other both ways, and attention with a plan is causal"
WITHOUT_IMAGES = "serve it without images:"
# Models for which SGLang takes backends of a list of its own.
CLOSED_IN_SGLANG = ("gpt_oss",)
# Models with states beside which drafts, of n-grams, are served in vLLM.
DRAFTED = ("lfm2",)
# In which the tests serve plans, the oldest first.
TESTED = {"vllm": ("0.32.0", "0.33.0"), "sglang": ("0.5.23",)}
PLUGIN = ("backend", "serving")  # which import the other modules of a plug-in
NO_PREFIXES = "--no-enable-prefix-caching"  # of vLLM: no request begins after blocks of another
NO_TREE = "--disable-radix-cache"  # of SGLang, likewise


def refusals(
    layer: LayerPlan, cache_dtype: CacheDtype, is_cuda: bool, engine: Engine, lookahead: int = 0, model_type: str = ""
) -> Iterator[str]:
    """Why an engine cannot serve this layer of a model of this type, with so many drafts a token; nothing if it
    can."""
    yield from choice.not_served(layer, engine)
    if lookahead and layer.geometry.state_bytes and (engine != "vllm" or model_type not in DRAFTED):
        others = f" other than {', '.join(DRAFTED)}'s" if engine == "vllm" else ""
        ended = ", but for Qwen3-Next's and Qwen3.5's: there they ended in an illegal memory access"
        yield f"a state: drafts beside states{others} were not tried in {engine}{ended if others else ''}"
    if lookahead and engine == "sglang" and SLIDING_WINDOW in layer.geometry_ways():
        yield f"{SLIDING_WINDOW.name}: drafts beside sliding windows were not tried in SGLang"
    if layer.is_paged and not layer.attention.is_latent:
        yield from choice.not_served(layer, "drafts") if lookahead else ()
        yield from choice.limits(layer, cache_dtype, is_cuda)


def loses_sinks(plan: Plan, engine: Engine = "vllm") -> bool:
    """Whether requests would lack sinks of the plan after a cached prefix, and need ``NO_PREFIXES``: where
    vLLM shares them with the first page of a prompt, those that are not there before it ends."""
    numbers = (fmt.num_sink_tokens for layer in plan.layers for fmt in layer.formats)
    most = max(numbers, default=0)
    return engine == "vllm" and most >= PAGE_TOKENS


def require_sinks(plan: Plan) -> None:
    """UnsupportedModel where prefixes are cached in vLLM, and requests would lack sinks after them."""
    if not loses_sinks(plan):
        return
    raise UnsupportedModel(
        f"the plan keeps {PAGE_TOKENS} sinks or more, and requests after a cached page would have others' tokens; "
        f"expected {NO_PREFIXES}",
        hint="or a plan with fewer sinks: kvcal plan … --for-engine vllm "
        f"--set cache.num_sink_tokens={PAGE_TOKENS - 1}",
    )


def require_tiered(plan: Plan) -> None:
    """UnsupportedModel where vLLM's ``OffloadingConnector``, and tiers behind it, do not take all of a request's
    blocks."""
    if any(fmt.num_sink_tokens for layer in plan.layers for fmt in layer.formats):
        raise UnsupportedModel(
            "OffloadingConnector asks every group of blocks for full attention or a window; a group of sinks has "
            "neither",
            hint="SimpleCPUOffloadConnector, or a plan without sinks: kvcal plan … --set cache.num_sink_tokens=0",
        )


def require_peers(plan: Plan) -> None:
    """UnsupportedModel where vLLM reads a request's blocks from another engine, and these are not pages, a ring and
    sinks alone, or would count a token's query twice: that of a prompt's last one, which both engines compute."""
    found = {
        "channels that queries choose": any(layer.needs_queries for layer in plan.layers),
        "layers with a sliding window": any(
            isinstance(layer.geometry, AttentionGeometry) and layer.geometry.window is not None for layer in plan.layers
        ),
        "layers with a state": any(layer.geometry.state_bytes for layer in plan.layers),
    }
    for what, is_there in found.items():
        if is_there:
            raise UnsupportedModel(
                f"prompts and answers in engines of their own, and {what}: blocks of these are not read from another "
                "engine",
                hint="one engine for both",
            )


def require_staged(plan: Plan, stages: Sequence[range]) -> None:
    """UnsupportedModel where the plan's layers cannot be divided among these stages of a pipeline in vLLM."""
    others = [layer.geometry.index for layer in plan.layers if not layer.is_paged or layer.geometry.state_bytes]
    if others:
        raise UnsupportedModel(
            f"layers {', '.join(map(str, others))} have a sliding window or a state, which was not tried in "
            f"{len(stages)} stages of a pipeline",
            hint="tensor parallelism alone",
        )
    indices = {layer.geometry.index for layer in plan.layers}
    for number, own in enumerate(stages):
        if not indices & set(own):
            raise UnsupportedModel(
                f"stage {number} of a pipeline of {len(stages)} has no layer of the plan's {len(plan.layers)}",
                hint="fewer stages",
            )


def block_seed(plan: Plan) -> int:
    """``PYTHONHASHSEED`` with which vLLM's names of blocks are the plan's own: 32 bits of its digest. A name is a hash
    of this seed and of the tokens up to the block's end, and says nothing else of what the bytes mean."""
    return int(plan.sha256[:8], 16)


def require_served(plan: Plan, is_cuda: bool, engine: Engine = "vllm", lookahead: int = 0) -> None:
    """Nothing, where an engine can serve every layer, with so many drafts a token.

    Raises:
        UnsupportedModel: it cannot (exit code 4): all reasons, with their layers.
        UsageError: more drafts than a step verifies.
    """
    if lookahead >= choice.MAX_STEP_TOKENS:
        raise UsageError(
            f"{lookahead} drafts, expected at most {choice.MAX_STEP_TOKENS - 1}: a ring has no room for more",
            hint=f"num_speculative_tokens = {choice.MAX_STEP_TOKENS - 1}",
        )
    if not any(layer.is_paged for layer in plan.layers):
        raise UnsupportedModel(
            "an engine cannot serve this plan: no layer has full attention, whose blocks it hands out",
            hint=NO_PLAN.format(engine),
        )
    if engine == "sglang" and plan.model.model_type in CLOSED_IN_SGLANG:
        raise UnsupportedModel(
            f"SGLang serves models of the type {plan.model.model_type} with attention backends of a list of its own, "
            "without kvcal",
            hint="serve it in vLLM",
        )
    by_reason = _by_reason(plan.layers, plan.cache_dtype, is_cuda, engine, lookahead, plan.model.model_type)
    if by_reason:
        parts = [f"layers {', '.join(map(str, found))}: {reason}" for reason, found in by_reason.items()]
        with_drafts = f" with {lookahead} drafts" if lookahead else ""
        raise UnsupportedModel(
            f"an engine cannot serve this plan{with_drafts}: {'; '.join(parts)}",
            hint=_mend(plan, is_cuda, engine, lookahead),
        )


def _by_reason(
    layers: Sequence[LayerPlan], dtype: CacheDtype, is_cuda: bool, engine: Engine, lookahead: int, model_type: str
) -> dict[str, list[int]]:
    """The layers of each reason."""
    by_reason: dict[str, list[int]] = {}
    for layer in layers:
        for reason in dict.fromkeys(refusals(layer, dtype, is_cuda, engine, lookahead, model_type)):
            by_reason.setdefault(reason, []).append(layer.geometry.index)
    return by_reason


def _mend(plan: Plan, is_cuda: bool, engine: Engine, lookahead: int) -> str:
    """The smallest change with which nothing is refused."""
    plain, own = plan.unquantized().layers, plan.cache_dtype
    changed: tuple[tuple[str, Sequence[LayerPlan], CacheDtype, int], ...] = (
        (DRAFTS, plan.layers, own, 0),
        (FORMATS, plain, own, lookahead),
        (DTYPE, plan.layers, "bfloat16", lookahead),
        (f"{FORMATS}; {DRAFTS}", plain, own, 0),
        (f"{DTYPE}; {FORMATS}", plain, "bfloat16", 0),
    )
    for hint, layers, dtype, drafts in changed:
        if not _by_reason(layers, dtype, is_cuda, engine, drafts, plan.model.model_type):
            return hint
    return NO_PLAN.format(engine)


def refusal(engine: str) -> str | None:
    """Why plans cannot be served in the installed version of an engine; None if they can.

    Raises:
        UsageError: an engine without a plug-in, or one that is not installed.
    """
    if engine not in TESTED:
        raise UsageError(f"no plug-in for the engine {engine!r}; allowed: {', '.join(TESTED)}")
    try:
        found = version(engine)
    except PackageNotFoundError:
        raise UsageError(f"{engine} is not installed in this environment", hint=f"pip install {engine}") from None
    if Version(found) < Version(TESTED[engine][0]):
        return f"version {found}, expected {TESTED[engine][0]} or newer"
    return _lacking(engine, found, PLUGIN)


def _lacking(engine: str, found: str, names: Sequence[str]) -> str | None:
    try:
        for name in names:
            importlib.import_module(f"kvcal.engines.{engine}.{name}")
    except (ImportError, AttributeError) as missing:
        return f"version {found} lacks what the plug-in uses: {' '.join(str(missing).split())}"
    return None


def peers_refusal() -> str | None:
    """Why the installed vLLM, in which plans can be served, reads no blocks from another one; None if it does."""
    return _lacking("vllm", version("vllm"), ("nixl",))


def require_version(engine: str) -> None:
    """UnsupportedModel (exit code 4) unless plans can be served in the installed version of an engine."""
    if (reason := refusal(engine)) is not None:
        raise UnsupportedModel(
            f"plans cannot be served in {engine}: {reason}", hint=f"tested versions: {', '.join(TESTED[engine])}"
        )


class ServedModel(NamedTuple):
    """``source``: its folder or hub id. Heads are those of all ranks; ``head_dim`` None: compared layer by
    layer, by the plug-in's attention."""

    source: str
    model_type: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int | None


def require_model(plan: Plan, served: ServedModel, engine: str) -> None:
    """ArtifactError unless the model is the plan's; of a local folder, config.json is compared, too."""
    attention = next(layer.attention for layer in plan.layers if layer.is_paged)
    pairs: dict[str, tuple[object, object]] = {
        "model type": (plan.model.model_type, served.model_type),
        "query heads": (attention.num_query_heads, served.num_query_heads),
        "KV heads": (attention.num_kv_heads, served.num_kv_heads),
    }
    if plan.layers[-1].geometry.index + 1 == len(plan.layers):  # or some layers cache nothing
        pairs["layers"] = len(plan.layers), served.num_layers
    if served.head_dim is not None:
        pairs["head size"] = attention.k_head_dim, served.head_dim
    folder = Path(served.source)
    if (folder / "config.json").is_file():
        pairs["sha256 of config.json"] = plan.model.config_sha256, config_sha256(folder, served.source)
    for name, (expected, found) in pairs.items():
        if expected != found:
            raise ArtifactError(
                f"the plan is for {plan.model.id}, of {name} {expected}, but {engine} serves {served.source}, of "
                f"{name} {found}",
                hint="compile a plan for this model, or serve the model that the plan names",
            )
