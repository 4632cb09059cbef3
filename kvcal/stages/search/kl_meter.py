"""The KL of many plans, of each once: what the search measures its candidates with.

A plan is known by its content. What was measured of it, by this search or by another in the folder, is kept in a
checkpoint, and read there when the plan comes again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kvcal.artifact import sha256_json, tensors_sha256
from kvcal.distributed import map_over_ranks
from kvcal.errors import naming
from kvcal.models.load import LoadedModel
from kvcal.pages.record_layout import PAGE_TOKENS
from kvcal.plan.page_format import RAW, SIDES
from kvcal.plan.plan import Plan, plan_record
from kvcal.progress import Reporter
from kvcal.stages.checkpoint import Checkpoint, Declare, Mean, State, Statistic
from kvcal.stages.divergence import LOCKSTEP, STATISTICS, Room, Text, deviations, padded_texts, unquantized_plan

PHASE = "groups of plans"


def chunk_ends(plan: Plan) -> list[int]:
    """The places in a page at which chunks of the plan's cache end: plans of one group end theirs at all of them. Of a
    window that follows a rule, where it ends them once it is as long as it can be."""
    formats = {fmt for layer in plan.layers if layer.is_paged for side in SIDES for fmt in layer.formats(side)}
    read = {fmt.max_window % PAGE_TOKENS for fmt in formats if fmt != RAW}
    return sorted(read | {0 for fmt in formats if fmt.needs_queries})


def declare_plans(num_texts: int) -> Declare:
    """The content of a meter's checkpoint: for each plan, named by its sha256, ``STATISTICS`` of its first texts, as
    many as it counts."""

    def declare(done: Mapping[str, int], names: Collection[str]) -> dict[str, Statistic]:
        for name in names:
            if not re.fullmatch("[0-9a-f]{64}", name):
                raise ValueError(f"{name[:80]!r} is no plan's sha256")
        if bool(names) != bool(done[PHASE]):
            raise ValueError(f"{len(names)} plans after {done[PHASE]} {PHASE}")
        return {name: Statistic.of((num_texts, len(STATISTICS)), low=0.0) for name in names}

    return declare


class KLMeter:
    """``STATISTICS`` of many plans on the first few texts or on all of them, kept in a checkpoint: no plan is measured
    twice on a text. Plans are told apart by their layers and the content of their tensors, so that a plan that comes
    again, in another search, too, costs nothing."""

    def __init__(
        self,
        loaded: LoadedModel,
        texts: Sequence[Text],
        tiers: Sequence[int],
        batch: int,
        checkpoint: Checkpoint,
        reporter: Reporter,
    ) -> None:
        """``tiers``: numbers of texts, ascending up to all, that may be asked for; ``batch``: texts fed at once."""
        self.texts, self.tiers = texts, tuple(tiers)
        self._model, self._batch = loaded.model, batch
        self._reference = unquantized_plan(loaded.identity, loaded.geometry)
        self._checkpoint, self._reporter, self._room = checkpoint, reporter, Room(LOCKSTEP, reporter)

    @property
    def num_plans(self) -> int:
        """Plans that were measured so far, by this search or by others in its folder."""
        return len(self._checkpoint.state.means)

    def measure(self, plans: Sequence[Plan], num_texts: int, what: str) -> Tensor:
        """[P, num_texts, 3] fp64: ``STATISTICS`` of each plan on the first texts; ``what`` is being measured, for the
        progress.

        Raises:
            NonFiniteActivations: with a plan, or at 16 bits.
        """
        digests = [plan_digest(plan) for plan in plans]
        plan_of = {digest: plan for digest, plan in zip(reversed(digests), reversed(plans), strict=True)}
        parts = [(a, b) for a, b in zip((0, *self.tiers), self.tiers, strict=False) if a < num_texts]
        in_order = sorted(dict.fromkeys(digests), key=lambda digest: chunk_ends(plan_of[digest]))
        missing = [[digest for digest in in_order if self._num_measured(digest) < stop] for _, stop in parts]
        groups = [
            (wanted[first : first + LOCKSTEP], *part)
            for part, wanted in zip(parts, missing, strict=True)
            for first in range(0, len(wanted), LOCKSTEP)
        ]
        batches = [[range(n, min(n + self._batch, stop)) for n in range(a, stop, self._batch)] for _, a, stop in groups]
        items = [(number, texts) for number, of_group in enumerate(batches) for texts in of_group]
        label, total = f"search: {what}", sum(map(len, missing))

        def step(item: tuple[int, range]) -> Tensor:
            self._reporter(sum(len(names) for names, *_ in groups[: item[0]]), total, label)
            names = groups[item[0]][0]
            return self._measured(names, [plan_of[name] for name in names], item[1])

        found = map_over_ranks(items, step)
        for (names, start, stop), of_group in zip(groups, batches, strict=True):
            self._keep(names, start, stop, torch.cat([next(found) for _ in of_group], dim=1))
        self._reporter(total, total, label)
        return torch.stack([self._checkpoint.state.means[digest].total[:num_texts] for digest in digests])

    def _num_measured(self, digest: str) -> int:
        mean = self._checkpoint.state.means.get(digest)
        return 0 if mean is None else mean.count

    def _measured(self, digests: Sequence[str], plans: Sequence[Plan], numbers: range) -> Tensor:
        """[P, B, 3] fp64: ``STATISTICS`` on the texts of these numbers, in a batch that depends on nothing else."""
        texts = [self.texts[number] for number in numbers]
        with naming(f"search, plans {', '.join(digest[:8] for digest in digests)}"):
            found = deviations(self._model, self._reference, plans, *padded_texts(texts), self._room)
        return found.statistics(len(texts))

    def _keep(self, digests: Sequence[str], start: int, stop: int, found_PNS: Tensor) -> None:
        """The measurements of texts ``start`` to ``stop``."""
        state, means = self._checkpoint.state, dict[str, Mean]()
        for digest, found_NS in zip(digests, found_PNS, strict=True):
            known = state.means.get(digest, Mean.empty((len(self.texts), len(STATISTICS))))
            table_NS = known.total.clone()
            table_NS[start:stop] = found_NS
            means[digest] = Mean(table_NS, stop)
        done = {**state.done, PHASE: state.done[PHASE] + 1}
        self._checkpoint.advance(State({**state.means, **means}, done))


def plan_digest(plan: Plan) -> str:
    """Hex sha256 of all that the plan does. A tensor is hashed once, however many plans share it."""
    tensors = {name: _tensor_sha256(tensor) for name, tensor in plan.tensors.items()}
    return sha256_json(
        {**plan_record(plan), **dict.fromkeys(("workload", "predicted_bytes", "provenance")), "tensors": tensors}
    )


_hashed: MutableMapping[Tensor, tuple[int, str]] = WeakTensorKeyDictionary()


def _tensor_sha256(tensor: Tensor) -> str:
    """Hex sha256 over dtype, shape and bytes; of a tensor that is unchanged, found once in a process."""
    if tensor.is_inference():  # has no count of its changes
        return tensors_sha256({"": tensor})
    version, digest = _hashed.get(tensor, (-1, ""))
    if version != tensor._version:
        version, digest = tensor._version, tensors_sha256({"": tensor})
        _hashed[tensor] = version, digest
    return digest
