"""A prompt's packed cache on disk: ``PlanCache.save`` and ``PlanCache.load`` (AQUA-KV's codec mode).

The file is one artifact (kvcal.artifact): the token ids, and of every layer the packed pages, sinks, recent
tokens and query statistics of one sequence, as a dynamic cache holds them, so that it takes the bytes of the
plan. It names the plan by its digest, and the model. Generation goes on from the file as it does from the
cache that was saved.

A prompt attends to itself before it is quantized, but tokens after a loaded prefix read its pages. So a
longer prompt gives what it gives in two parts, the prefix first. Left out: states of linear attention,
batches, and static caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvcal import artifact
from kvcal.cache.plan_layer import PlanLayer
from kvcal.errors import ArtifactError
from kvcal.plan.plan import Plan
from kvcal.strict import dump

KIND = "prefix"
SCHEMA = 6  # one digest
AGAIN = "pack the prompt again with this plan and model: kvcal generate --pack"


def save(path: str | Path, plan: Plan, layers: Mapping[int, PlanLayer], tokens_T: Tensor) -> None:
    """Write the layers of a dynamic cache that holds the sequence ``tokens_T`` (ids) alone. ArtifactError
    when the file cannot be written."""
    tensors = {name: tensor for index, layer in layers.items() for name, tensor in _held(index, layer)}
    inputs = {"plan_sha256": plan.sha256, "model": dump(plan.model)}
    tensors["tokens"] = tokens_T.to(torch.int64)
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, inputs, {}, tensors))


def load(path: str | Path, plan: Plan, layers: Mapping[int, PlanLayer], device: torch.device) -> Tensor:
    """Fill the layers of an empty dynamic cache, and return the token ids int64 [T]."""
    found = artifact.read(path, KIND, SCHEMA)
    stated = found.inputs.get("model"), found.inputs.get("plan_sha256")
    for name, have, want in zip(("model", "plan"), stated, (dump(plan.model), plan.sha256), strict=True):
        if have != want:
            raise ArtifactError(f"{path} was packed with the {name} {have}, this one is {want}", AGAIN)
    tensors = dict(found.tensors)
    tokens_T = tensors.pop("tokens", torch.empty(0))
    if tokens_T.dtype != torch.int64 or tokens_T.dim() != 1 or not len(tokens_T):
        raise ArtifactError(f"{path} holds no token ids", AGAIN)
    for layer in layers.values():
        layer.make_room(len(tokens_T), device)
    own = {name: tensor for index, layer in layers.items() for name, tensor in _held(index, layer)}
    for name in sorted(own.keys() ^ tensors.keys()):
        raise ArtifactError(f"{path}: {'missing' if name in own else 'unknown'} tensor '{name}'", AGAIN)
    for name, place in own.items():
        given = tensors[name]
        if (given.dtype, given.shape) != (place.dtype, place.shape):
            kinds = [f"{one.dtype} {list(one.shape)}" for one in (given, place)]
            raise ArtifactError(f"{path}: the tensor '{name}' is {kinds[0]}, expected {kinds[1]}", AGAIN)
        place.copy_(given)
    return tokens_T


def _held(index: int, layer: PlanLayer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer that holds one sequence, by their names in the file."""
    return ((f"layers.{index}.{name}", tensor) for name, tensor in layer.named_tensors())
