"""A small artifact of every stage; plans of every feature, and what a plan's file is used for: load it, and rely
on what it says."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from cache_cases import KIVI_2, feed, llama_plan, model_plan, random_ids, tiny_llama
from form_cases import KITTY, RULE, form_plan, with_tensors
from predictor_runs import fitted_llama, loaded_llama
from progressive_cases import fixed, transformed
from tiny_models import built
from transformers import PreTrainedModel

from kvcal import Plan, PlanCache, load_plan
from kvcal import tables as views
from kvcal.cache.attached import attached_for
from kvcal.geometry import ModelIdentity
from kvcal.pages.error_feedback import factor_spec
from kvcal.plan.page_format import SIDES, Format
from kvcal.plan.plan import DEFAULT_WORKLOAD, plan_bytes
from kvcal.recipe import AllocateSpec, CacheSpec, ProfileSpec
from kvcal.stages import search as search_record
from kvcal.stages.allocate import record as allocation_record
from kvcal.stages.allocate.stage import allocate
from kvcal.stages.checkpoint import Mean
from kvcal.stages.profile import record as profile_record
from kvcal.systems.aqua_kv import record as predictor_record
from kvcal.systems.basis import fit as basis_stage
from kvcal.systems.basis.recipe import FeedbackSpec
from kvcal.systems.kvmix.window_rule import WindowRule
from kvcal.systems.pm_kvq import reparam as reparam_stage
from kvcal.systems.pm_kvq.recipe import ReparamSpec

SHORT = {"kl_samples": 1, "kl_num_bits": (2, 4), "num_bits": (2, 4), "group_sizes": (32,)}


def plans() -> dict[str, Plan]:
    """Plans of every feature, each for the model of ``model_for``."""
    names = ["lattice d=2", "low rank", "int4, lattice", "one source of two layers, λ", "before RoPE, boosted"]
    names += ["values alone, from keys that queries chose", "predicted, windows that grow"]
    found = {name: form_plan(name, "float32") for name in names}
    found["paged window"] = llama_plan(
        Format(2, "channel", 32, window_rule=WindowRule("paged", 0.2, 100)), Format(2, "token", 32, window_rule=RULE)
    )
    found["progressive, λ"] = transformed(fixed((140, 260, 300), (200, 300), num_layers=2))
    found["sliding windows"] = model_plan(built("gemma3"), *KIVI_2)
    found["states"] = model_plan(built("qwen3_next"), *KIVI_2)
    fed, rotated = llama_plan(KITTY, KIVI_2[1]), Format(2, quantizer="rotated")
    layers = [replace(layer, v=rotated, k_feedback=True, v_feedback=True) for layer in fed.layers]
    found["error feedback, rotated"] = with_tensors(fed, layers)
    provenance = {"recipe": "r", "seed": 0, "libraries": {"torch": "2"}}
    return {name: replace(plan, provenance=provenance) for name, plan in found.items()}


def model_for(plan: Plan) -> PreTrainedModel:
    """By what cannot be mutated without a refusal: the model's type, and how many layers there are."""
    named = {"gemma3_text": "gemma3", "qwen3_next": "qwen3_next"}
    name = named.get(plan.model.model_type)
    return built(name) if name else tiny_llama(2, len(plan.layers) if len(plan.layers) in (2, 3) else 2)


def use_plan(plan: Plan) -> None:
    """All that is said of it can be said; its cache takes the predicted bytes and gives finite logits."""
    views.plan_json(plan, plan.workload)
    views.plan_table(plan, plan.workload, None)
    views.layer_table(plan.layers, plan.cache_dtype, plan.workload)
    nameless = replace(plan, model=ModelIdentity("", plan.model.model_type, "", "", ""), provenance={})
    if not plan.is_progressive:
        nameless = replace(nameless, workload=DEFAULT_WORKLOAD)
    content = hashlib.sha256(plan_bytes(nameless)).digest()
    if content not in _CACHED:  # names, provenance and a workload without a schedule change no cache
        use_cache(plan)
        _CACHED.add(content)


_CACHED: set[bytes] = set()


@torch.inference_mode()
def use_cache(plan: Plan) -> None:
    model = model_for(plan)
    cache = PlanCache(plan, model.config)
    tokens = min(300, plan.workload.context if cache.state.is_scheduled else 300)
    with attached_for(model, plan):
        logits = feed(model, cache, random_ids(1, tokens), [tokens - 20] if tokens > 20 else [])
    assert cache.nbytes == plan.nbytes([tokens]), f"{cache.nbytes} bytes, {plan.nbytes([tokens])} predicted"
    assert bool(torch.isfinite(logits).all()), "logits are not finite"


def open_plan(path: Path) -> None:
    plan = load_plan(path)
    assert plan_bytes(plan) == path.read_bytes(), "another spelling is accepted"
    use_plan(plan)


@functools.cache
def profile() -> profile_record.Profile:
    loaded = loaded_llama()
    spec, cache = ProfileSpec(**SHORT), CacheSpec(num_sink_tokens=2, k_recent_window=16, v_recent_window=8)
    subject = profile_record.ProfileSetup(
        loaded.identity, loaded.geometry, 5000, 64, spec, cache, "f", "text", 4, 900, 800
    )
    generator = torch.Generator().manual_seed(0)
    means = {
        name: Mean(torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1, 4)
        for name, shape in subject.totals().items()
    }
    return profile_record.Profile(subject, means)


@functools.cache
def search_result() -> search_record.SearchRecord:
    plan = form_plan("one source of two layers, λ", "float32")
    fixed, paged = allocation_record.layer_bytes(plan.layers, plan.cache_dtype, plan.workload)
    split = allocation_record.BudgetSplit(fixed + paged + 10**6, None, None, fixed, paged)
    allocation = allocation_record.Allocation(
        plan.model, plan.cache_dtype, plan.layers, plan.workload, {"recipe": "r"}, split, 0.25
    )
    kitty = search_record.SystemResult("kitty", 2.5, 0.2, 0.01, 0.25, 0.02, 0.0, 0.0)
    others = search_record.SystemResult("kivi-2", 3.1, 0.4, 0.03), search_record.SystemResult("b", left_out="too slow")
    report = search_record.SearchReport("kitty", "decode", 3, 3, (kitty, *others))
    return search_record.SearchRecord(allocation, report, plan.tensors)


@functools.cache
def reparam_result() -> reparam_stage.Reparam:
    loaded = loaded_llama()
    subject = reparam_stage.Subject(loaded.identity, loaded.geometry, 4.0, "f", "text", 900, ReparamSpec(num_steps=2))
    curve = (0.5, 0.25, 0.375)
    layers = tuple(reparam_stage.LayerReparam(i, 0.5, 0.25, 8.0, curve) for i in range(3))
    generator = torch.Generator().manual_seed(0)
    lambdas = {i: torch.rand(2, 8, generator=generator) + 0.5 for i in range(3)}
    return reparam_stage.Reparam(subject, layers, lambdas)


@functools.cache
def feedback_result() -> basis_stage.BasisRecord:
    loaded = loaded_llama()
    subject = basis_stage.Subject(loaded.identity, loaded.geometry, 4.0, "f", "text", 900, FeedbackSpec())
    places = [(index, side) for index in range(3) for side in SIDES if (index, side) != (1, "v")]
    generator, shape = torch.Generator().manual_seed(0), factor_spec(2, 8).extents
    factors = {place: torch.randn(shape, generator=generator).half() for place in places}
    sides = tuple(basis_stage.SideFeedback(*place, 0.5) for place in places)
    return basis_stage.BasisRecord(subject, sides, factors, {})


def allocation_result() -> allocation_record.Allocation:
    return allocate(profile(), AllocateSpec(bits=16.0, batch=2, context=512), {"recipe": "r"})


# Of each stage's artifact: one, and the module that saves and loads it.
RECORDS: dict[str, tuple[Callable[[], Any], ModuleType]] = {
    "profile": (profile, profile_record),
    "allocation": (allocation_result, allocation_record),
    "predictors": (lambda: fitted_llama()[1], predictor_record),
    "reparam": (reparam_result, reparam_stage),
    "feedback": (feedback_result, basis_stage),
}
