"""The check of every compiled plan: KL and top-1 of its packed cache against 16 bits, on a few texts.

A format may fit a budget and destroy a model: keys with a large bias, an outlier that no calibration text
had. So KL(16 bits || plan) and the share of tokens whose most likely next token stays are measured on texts
of the pool
*report*, where every layer reads a packed page. Texts stand at places from the first to the last of the
plan's context: a format that is right for the first positions may fail at the last ones. Keys that are stored
before RoPE are of no position. Of a plan beyond the limits (``kvcal.plan.damage``) each layer, then each side
of the worst layers, is quantized alone. Pages that get other bits at more tokens than these are not seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvcal.data.sequences import DataSpec
from kvcal.errors import UsageError
from kvcal.folder import compute_dtype, model_inputs, sequences
from kvcal.models.files import embedded_models
from kvcal.models.load import LoadedModel
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.damage import OF_EVALUATION, Damage, SideDamage, concern, load_damage, save_damage
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import RAW, SIDES, Side
from kvcal.plan.plan import Plan
from kvcal.plan.tensors import needed_tensors
from kvcal.progress import Reporter
from kvcal.stages.divergence import deviations, unquantized_plan
from kvcal.stages.evaluate.stage import Row

# Texts and tokens of each, at least: seconds of a small model on a CPU.
TEXTS, TOKENS = {"cpu": 2, "cuda": 8}, {"cpu": 512, "cuda": 1024}
NUM_WORST = 3


class Texts(NamedTuple):
    """Tokens [B, T] int64, and whether each is counted: predicted from a packed page of every layer."""

    tokens_BT: Tensor
    mask_BT: Tensor
    first_B: Tensor | None  # positions of the first tokens, int64
    description: str
    fingerprint: str


def measure_damage(
    plan: Plan, loaded: LoadedModel, sources: Sequence[str], reporter: Reporter, path: Path | None = None
) -> Damage | None:
    """Measure ``plan`` and say what was found; None, with the reason, where no text is long enough.
    ``sources``: as in [data], none for kvcal's own. ``path``: the plan's file, next to which the result is
    kept for the next time."""
    texts = _texts(plan, loaded, sources, reporter)
    if texts is None:
        return None
    first = None if texts.first_B is None else texts.first_B.tolist()
    asked = {"fingerprint": texts.fingerprint, "num_tokens": int(texts.mask_BT.sum()), "first": first}
    inputs = {**model_inputs(loaded), **compute_dtype(loaded), **asked}
    damage = None if path is None else load_damage(path, plan)
    if damage is None or damage.inputs != inputs:
        kl, error, top1 = _against_16_bits(loaded, [plan], texts)[0]
        tokens = int(texts.mask_BT.sum())
        damage = _kept(Damage(plan.sha256, kl, error, top1, tokens, texts.description, (), inputs), path)
    if damage.is_destroyed and not damage.worst:
        damage = _kept(replace(damage, worst=_worst(plan, loaded, texts, reporter)), path)
    _say(damage, reporter)
    return damage


def _kept(damage: Damage, path: Path | None) -> Damage:
    """``damage``, written next to the plan at once: what comes after it may be interrupted."""
    if path is not None:
        save_damage(damage, path)
    return damage


def damage_of_row(plan: Plan, loaded: LoadedModel, row: Row, path: Path, reporter: Reporter) -> Damage:
    """The same of a plan that an evaluation has measured already, on its texts."""
    text = row.text
    kl, tokens, inputs = max(text.kl, 0.0), text.num_loss_tokens, dict(OF_EVALUATION)
    found = Damage(row.plan_sha256, kl, text.kl_se, text.top1_agreement, tokens, "the evaluation's", (), inputs)
    damage = _kept(found, path)
    if damage.is_destroyed:
        texts = _texts(plan, loaded, (), reporter)
        if texts is not None:
            damage = _kept(replace(damage, worst=_worst(plan, loaded, texts, reporter)), path)
        _say(damage, reporter)
    return damage


def _say(damage: Damage, reporter: Reporter) -> None:
    said = concern(damage)
    reporter.say(f"damage: {damage}" if said is None else f"warning: {said}")


def _texts(plan: Plan, loaded: LoadedModel, sources: Sequence[str], reporter: Reporter) -> Texts | None:
    formats = [fmt for layer in plan.layers for fmt in layer.formats if fmt != RAW]
    # What is read from pages is packed, and has left the window.
    first = max((fmt.stripe_tokens + fmt.max_window for fmt in formats), default=1)
    device = loaded.model.device.type
    count, length = TEXTS.get(device, 2), max(TOKENS.get(device, 512), first + PAGE_TOKENS)
    if plan.is_progressive:  # its bits change on a schedule for no more
        count, length = min(count, plan.workload.batch), min(length, plan.workload.context)
    length = min(length, loaded.max_context or length)
    own = "tasks:ledger" if loaded.source in embedded_models() else "python:docs"
    refusal = f"texts of {length} tokens read no page that is packed: that begins after token {first}"
    for source in (tuple(sources), own) if sources else (own,):
        if length <= first:
            break
        try:
            spec = DataSpec(source, num_samples=count, seq_len=length, min_len=min(length, first + PAGE_TOKENS // 2))
            data = sequences(spec, loaded, "report")
        except UsageError as refused:
            refusal = refused.message
            continue
        width = min(len(tokens) for tokens in data.sequences)
        tokens_BT = torch.stack([tokens[:width] for tokens in data.sequences])
        mask_BT = torch.stack([mask[:width] for mask in data.loss_masks])
        mask_BT[:, :first] = False
        if mask_BT.any(1).all():
            return Texts(
                tokens_BT, mask_BT, first_positions(plan, loaded, tokens_BT), data.description, data.fingerprint
            )
        refusal = f"{data.description}: no token to predict after token {first}"
    reporter.say(f"warning: damage is not measured: {refusal}")
    return None


def first_positions(plan: Plan, loaded: LoadedModel, tokens_BT: Tensor) -> Tensor | None:
    """Positions of the texts' first tokens, evenly from the first to the last place of the context [B]."""
    takes_positions = "position_ids" in inspect.signature(loaded.model.forward).parameters
    if not takes_positions or any(layer.k_pages == "pre" for layer in plan.layers):
        return None
    count, width = tokens_BT.shape
    context = min(plan.workload.context, loaded.max_context or plan.workload.context)
    return torch.linspace(0, max(0, context - width), count).long()


def _against_16_bits(
    loaded: LoadedModel, plans: Sequence[Plan], texts: Texts
) -> list[tuple[float, float | None, float]]:
    """(KL, its standard error over texts, top-1 agreement) of each plan."""
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    found = deviations(loaded.model, reference, plans, texts.tokens_BT, texts.mask_BT, first_B=texts.first_B)
    kl_PB = found.kl_of_sequences(len(texts.tokens_BT)).clamp_min(0)
    count = kl_PB.shape[1]
    errors = [None] * len(plans) if count < 2 else (kl_PB.std(1) / count**0.5).tolist()
    agrees = (~found.flips_Pn).double().mean(1)
    return list(zip(kl_PB.mean(1).tolist(), errors, agrees.tolist(), strict=True))


def _worst(plan: Plan, loaded: LoadedModel, texts: Texts, reporter: Reporter) -> tuple[SideDamage, ...]:
    """The sides that do most by themselves: of the worst layers, keys and values apart."""
    reporter.say("damage: which layers do it")
    # The last text, which stands farthest.
    one = texts._replace(tokens_BT=texts.tokens_BT[-1:], mask_BT=texts.mask_BT[-1:])
    one = one if one.first_B is None else one._replace(first_B=one.first_B[-1:])
    paged = [layer for layer in plan.layers if layer.is_paged and {*layer.formats} != {RAW}]
    alone = _against_16_bits(loaded, [_only(plan, layer, SIDES) for layer in paged], one)
    by_kl = sorted(zip(alone, paged, strict=True), key=lambda pair: -pair[0][0])[:NUM_WORST]
    sides = [(layer, side) for _, layer in by_kl for side in SIDES if layer.format(side) != RAW]
    found = _against_16_bits(loaded, [_only(plan, layer, (side,)) for layer, side in sides], one)
    each = [SideDamage(layer.geometry.index, side, kl) for (layer, side), (kl, _, _) in zip(sides, found, strict=True)]
    return tuple(sorted(each, key=lambda side: -side.kl)[:NUM_WORST])


def _only(plan: Plan, quantized: LayerPlan, sides: Sequence[Side]) -> Plan:
    """``plan`` with all at 16 bits but these sides of one layer."""
    layers = list(plan.layers)
    for number, layer in enumerate(layers):
        for side in SIDES:
            if layer.is_paged and not (layer is quantized and side in sides):
                layers[number] = layers[number].at_16_bits(side)
    needed = needed_tensors(layers, plan.cache_dtype)
    return replace(plan, layers=tuple(layers), tensors={name: plan.tensors[name] for name in needed})
