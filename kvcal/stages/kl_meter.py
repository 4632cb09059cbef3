"""Measures the KL of many plans on the same texts, each plan once, and keeps what was measured if it is interrupted."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kvcal.artifact import sha256_json, tensors_sha256
from kvcal.errors import NonFiniteActivations
from kvcal.models.load import LoadedModel
from kvcal.observers.mean import Mean
from kvcal.plan import Plan, plan_record
from kvcal.progress import Reporter
from kvcal.stages.checkpoint import Checkpoint, State, Statistic
from kvcal.stages.divergence import LOCKSTEP, divergences, unquantized_plan
from kvcal.stages.kl_texts import Text, padded_texts

PHASE = "groups of plans"


def declare_kls(done: Mapping[str, int], names: Collection[str]) -> dict[str, Statistic]:
    """The content of the meter's checkpoint: a mean for each plan, named by the plan's sha256."""
    for name in names:
        if not re.fullmatch("[0-9a-f]{64}", name):
            raise ValueError(f"{name[:80]!r} is no plan's sha256")
    if bool(names) != bool(done[PHASE]):
        raise ValueError(f"{len(names)} plans after {done[PHASE]} {PHASE}")
    return {name: Statistic.of((), low=0.0) for name in names}


class KLMeter:
    """``kl`` in nats per loss token, through the packed cache, decode-faithfully. Plans are told apart by their layers
    and the content of their tensors, so that a plan that comes again costs nothing. A tensor is hashed once, however
    many plans share it."""

    def __init__(
        self, loaded: LoadedModel, texts: Sequence[Text], batch: int, checkpoint: Checkpoint, reporter: Reporter
    ) -> None:
        """``batch``: texts fed at once."""
        self._loaded = loaded
        self._batches = [padded_texts(texts[first : first + batch]) for first in range(0, len(texts), batch)]
        self._reference = unquantized_plan(loaded.identity, loaded.geometry)
        self._checkpoint = checkpoint
        self._reporter = reporter
        self._hashed: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()

    def kl(self, plans: Sequence[Plan], what: str) -> list[float]:
        """One for each plan; ``what`` is being measured, for the progress.

        Raises:
            NonFiniteActivations: with a plan, or at 16 bits.
        """
        digests = [self._digest(plan) for plan in plans]
        first_of = {digest: plan for digest, plan in zip(reversed(digests), reversed(plans), strict=True)}
        missing = [digest for digest in dict.fromkeys(digests) if digest not in self._checkpoint.state.means]
        for first in range(0, len(missing), LOCKSTEP):
            self._reporter(first, len(missing), f"search: {what}")
            group = missing[first : first + LOCKSTEP]
            self._measure(group, [first_of[digest] for digest in group])
        self._reporter(len(missing), len(missing), f"search: {what}")
        return [float(self._checkpoint.state.means[digest].result()) for digest in digests]

    def _digest(self, plan: Plan) -> str:
        """Hex sha256 of all that the plan does."""
        for tensor in plan.tensors.values():
            if tensor not in self._hashed:
                self._hashed[tensor] = tensors_sha256({"": tensor})
        tensors = {name: self._hashed[tensor] for name, tensor in plan.tensors.items()}
        return sha256_json({**plan_record(plan), "provenance": {}, "tensors": tensors})

    def _measure(self, digests: Sequence[str], plans: Sequence[Plan]) -> None:
        model = self._loaded.model
        try:
            parts = [divergences(model, self._reference, plans, *batch) for batch in self._batches]
        except NonFiniteActivations as error:
            raise NonFiniteActivations(
                f"search, plans {', '.join(d[:8] for d in digests)}: {error.message}", error.hint
            ) from error
        kl_Pn = torch.cat(parts, dim=1)
        state = self._checkpoint.state
        found = {digest: Mean.empty(()).update(row) for digest, row in zip(digests, kl_Pn, strict=True)}
        done = {**state.done, PHASE: state.done[PHASE] + 1}
        self._checkpoint.advance(State({**state.means, **found}, done))
