"""The plain decode kernel against attention in fp64 over the decoded pages, and against the fast kernel, on a
GPU.

Its arithmetic is fp32 throughout, so it is held to a thirtieth of what the fast kernel is allowed.
"""

import dataclasses
from typing import Any

import pytest
import torch
from decode_cases import CASES, ROTATED, TOLERANCE, Case, in_turn, k_format, relative_error, v_format, variant_of
from decode_cases import LENGTHS as FAST_LENGTHS

from kvcal.kernels.variants import Variant
from kvcal.plan.page_format import Format

pytestmark = pytest.mark.gpu

HEAD_DIMS = (16, 24, 32, 40, 48, 72, 80, 96, 112, 136, 160, 192, 256, 512)
LENGTHS = (0, 1, 31, 127, 128, 129, 1000)
SHARE = 1 / 30
SINKS = {
    "sinks of keys": (k_format(2, num_sink_tokens=5, recent_window=40), v_format(2)),
    "sinks of values": (k_format(3), v_format(4, 32, num_sink_tokens=37)),
    "sinks of both": (
        dataclasses.replace(CASES["MixKVQ"][0], num_sink_tokens=133),
        v_format(1, num_sink_tokens=16, recent_window=100),
    ),
    "sinks and rules": (
        dataclasses.replace(CASES["window rules"][0], num_sink_tokens=4),
        dataclasses.replace(CASES["window rules"][1], num_sink_tokens=9),
    ),
}


def plain_variant_of(*formats: Format, **more: Any) -> Variant:
    """Served by the plain kernel, also where the fast one could."""
    return dataclasses.replace(variant_of(*formats, **more), plain=True)


def assert_exact(case: Case, scale: float, softcap: float = 0.0, s_aux: torch.Tensor | None = None) -> None:
    found = case.run(scale, softcap, s_aux)
    assert relative_error(found, case.expected(scale, softcap, s_aux)) <= SHARE * TOLERANCE


@pytest.mark.parametrize("name", ("2 bits", "K per token, groups of 32", "sinks of both"))
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_size(dim: int, name: str) -> None:
    case = Case(plain_variant_of(*(CASES | SINKS)[name], dim=dim), LENGTHS, heads=2, seed=1)
    assert_exact(case, 0.4 * dim**-0.5)


@pytest.mark.parametrize("name", [*CASES, *SINKS])
def test_every_format(name: str) -> None:
    assert_exact(Case(variant_of(*(CASES | SINKS)[name], dim=80), LENGTHS, heads=2, seed=2), 0.04)


@pytest.mark.parametrize(("dim", "group"), ((40, 1), (40, 3), (80, 8), (80, 12), (256, 16), (40, 17), (512, 16)))
def test_query_groups(dim: int, group: int) -> None:
    case = Case(plain_variant_of(*SINKS["sinks of keys"], dim=dim, group=group), LENGTHS, heads=3, seed=3)
    assert_exact(case, 0.4 * dim**-0.5)


@pytest.mark.parametrize("name", ("2 bits", "16 bits", "MixKVQ"))
def test_half_precision(name: str) -> None:
    for cache, dtype, precision in (("float16", torch.float16, 2.0**-11), ("bfloat16", torch.bfloat16, 2.0**-8)):
        case = Case(plain_variant_of(*CASES[name], dim=96, dtype=cache), LENGTHS, heads=2, seed=4)
        found = case.run(0.05, dtype=dtype)
        assert found.dtype == dtype
        allowed = precision + SHARE * TOLERANCE
        assert relative_error(found, case.expected(0.05, dtype=dtype)) <= allowed
        assert_exact(case, 0.05)


@pytest.mark.parametrize(("rescale", "offset"), ((False, True), (True, False), (True, True)))
@pytest.mark.parametrize("key", (k_format(3), k_format(3, "token"), k_format(3, "token", **ROTATED)), ids=str)
def test_rescaled_keys(rescale: bool, offset: bool, key: Format) -> None:
    formats = dataclasses.replace(key, num_sink_tokens=4), v_format(3, num_sink_tokens=4)
    assert_exact(Case(variant_of(*formats, dim=72, rescale=rescale, offset=offset), LENGTHS, heads=2, seed=5), 0.05)


@pytest.mark.parametrize("name", ("2 bits", "sinks of values", "16 bits"))
def test_softcap_and_sink_logits(name: str) -> None:
    case = Case(plain_variant_of(*(CASES | SINKS)[name], dim=256), LENGTHS, heads=2, seed=6)
    s_aux = torch.linspace(-2, 3, 8, device="cuda")
    for softcap, aux in ((2.0, None), (30.0, s_aux), (0.0, s_aux)):
        assert_exact(case, 0.05, softcap, aux)


@pytest.mark.parametrize(("name", "dim"), in_turn(CASES, 64, 128))
def test_it_agrees_with_the_fast_kernel(name: str, dim: int) -> None:
    variant, scale = variant_of(*CASES[name], dim=dim), 0.4 * dim**-0.5
    both = (dataclasses.replace(variant, plain=True), variant)
    case, other = (Case(one, FAST_LENGTHS, heads=2, seed=1) for one in both)
    assert_exact(case, scale)
    plain, fast = case.run(scale), other.run(scale)
    assert relative_error(fast, plain.double()) <= (1 + SHARE) * TOLERANCE
    assert not torch.equal(fast, plain)  # two kernels, not one


@pytest.mark.parametrize("plain", (False, True))
def test_it_repeats_bit_for_bit_and_leaves_its_counters_at_zero(plain: bool) -> None:
    """In a workspace that another kernel may take in turns."""
    lengths, formats = (*LENGTHS, 5000), CASES["Kitty"]
    case = Case(variant_of(*formats, dim=128, plain=True), lengths, heads=2, seed=10)
    other = Case(variant_of(*formats, dim=128, plain=plain), lengths, heads=2, seed=11)
    workspace = case.workspace()
    first, others = case.run(0.06, workspace=workspace), other.run(0.06, workspace=workspace)
    for _ in range(20):
        assert torch.equal(case.run(0.06, workspace=workspace), first)
        assert torch.equal(other.run(0.06, workspace=workspace), others)
    assert not workspace[-256:].any()


@pytest.mark.parametrize(("dim", "name"), ((80, "Kitty"), (256, "sinks of both"), (48, "sinks and rules")))
def test_a_captured_launch_follows_the_lengths(dim: int, name: str) -> None:
    """One graph, replayed over caches that grow: each result is that of a launch of its own."""
    variant = variant_of(*(CASES | SINKS)[name], dim=dim)
    cases = [Case(variant, (length, 1000, 3), heads=2, seed=length) for length in (1, 0, 127, 128, 129, 500, 1000)]
    expected = [case.run(0.05) for case in cases]
    held, workspace = cases[0], cases[0].workspace()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = held.run(0.05, workspace=workspace)
    for case, result in zip(cases, expected, strict=True):
        held.q.copy_(case.q)
        held.lengths.copy_(case.lengths)
        held.place.table.copy_(case.place.table)
        for side, store in held.stores.items():
            for tensor, other in zip(store, case.stores[side], strict=True):
                tensor.copy_(other)
        graph.replay()
        assert torch.equal(found, result)


def test_lengths_beyond_the_room_read_nothing_outside() -> None:
    """A replayed graph knows no end: it must stay inside what was allocated (``append`` reports it)."""
    case = Case(variant_of(*SINKS["sinks of both"], dim=80), (700, 300), heads=2, seed=12)
    case.lengths.add_(100_000)
    assert case.run(0.06).shape == case.q.shape
    torch.cuda.synchronize()
