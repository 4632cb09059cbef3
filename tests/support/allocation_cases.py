"""Shared by the tests of allocations: profiles made by hand, of models that are not there."""

import torch

from kvcal.geometry import AttentionGeometry, Geometry, ModelIdentity
from kvcal.plan.plan import Side
from kvcal.recipe import CacheSpec, ProfileSpec
from kvcal.stages.checkpoint import Mean
from kvcal.stages.profile.record import Profile, ProfileSetup
from kvcal.stages.profile.sensitivity import Candidate

IDENTITY = ModelIdentity("t", "llama", "c", "w", "t")
CACHE = CacheSpec(num_sink_tokens=0, k_recent_window=0, v_recent_window=0)
WEIGHTS, VOCABULARY = 1_000_000, 500


def halving(layer: int, side: Side, candidate: Candidate) -> float:
    """Later layers, values and few bits lose more; keys per token lose more than per channel."""
    num_bits, axis, group_size, _ = candidate
    return (layer + (2 if side == "v" else 1 + (axis == "token"))) * group_size / 4.0**num_bits


def geometry() -> Geometry:
    return Geometry("llama", "bfloat16", tuple(AttentionGeometry(n, 4, 2, 32, 32) for n in range(3)))


def profile(spec: ProfileSpec | None = None, cache: CacheSpec = CACHE) -> Profile:
    """Of sensitivities alone."""
    spec = spec or ProfileSpec(num_bits=(2, 3, 4), group_sizes=(32, 128), kl_samples=0)
    subject = ProfileSetup(IDENTITY, geometry(), WEIGHTS, VOCABULARY, spec, cache, "f", "by hand", 1, 10, 9)
    means = {}
    for name, shape in subject.totals().items():
        found = torch.ones(shape, dtype=torch.float64)
        if name.startswith("sensitivity"):
            _, side, index = name.split(".")
            for column, candidate in enumerate(subject.candidates(side)):
                found[:, column] = halving(int(index), side, candidate)
        means[name] = Mean(found, 1)
    return Profile(subject, means)
