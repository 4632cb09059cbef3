"""The allocation solver against brute force in exact rational numbers, and its proofs, ties and refusals;
and the allocation that holds what it chose."""

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch

from kvcal.errors import InfeasibleBudget
from kvcal.geometry import AttentionGeometry, Geometry, ModelIdentity, StateGeometry
from kvcal.plan.layer import LayerPlan, bare_layers, fixed_layers
from kvcal.plan.page_format import RAW, SIDES, Side
from kvcal.plan.plan import Workload
from kvcal.recipe import AllocateSpec, CacheSpec, ProfileSpec
from kvcal.recipe_files import load_recipe
from kvcal.stages.allocate.budget import resolve_budget, workspace_bytes
from kvcal.stages.allocate.record import Allocation, layer_bytes
from kvcal.stages.allocate.solver import CLOSED, Option, Unit, solve
from kvcal.stages.allocate.stage import allocate
from kvcal.stages.checkpoint import Mean
from kvcal.stages.profile.record import Profile, ProfileSetup
from kvcal.stages.profile.sensitivity import Candidate


def units_of(*rows):
    """Units from lists of (bytes, loss)."""
    return [Unit(f"u{u}", tuple(Option(i, *pair) for i, pair in enumerate(row))) for u, row in enumerate(rows)]


def random_units(rng, num_units, num_options, bytes_up_to, loss):
    return units_of(
        *(
            [(rng.randint(0, bytes_up_to), loss(rng)) for _ in range(rng.randint(1, num_options))]
            for _ in range(num_units)
        )
    )


def all_choices(units):
    """(loss, bytes, choice) of everything, losses exact."""
    for choice in itertools.product(*(range(len(unit.options)) for unit in units)):
        picked = [unit.options[i] for unit, i in zip(units, choice, strict=True)]
        yield sum(Fraction(o.loss) for o in picked), sum(o.nbytes for o in picked), choice


def best_of(choices, budget_bytes):
    return min(entry for entry in choices if entry[1] <= budget_bytes)


# Eighths and tiny byte counts tie all the time; floats and 1e11 bytes never do.
STYLES = {
    "ties": (6, lambda rng: rng.randint(0, 6) / 8),
    "floats": (1000, lambda rng: rng.random()),
    "wide": (10**11, lambda rng: math.exp(rng.gauss(0, 8))),
}


@pytest.mark.parametrize("style", STYLES)
def test_equals_brute_force_also_at_the_last_byte(style):
    """Losses to the gap that is proven; bytes exactly, also where floats do not resolve them."""
    rng = random.Random(style)
    for _ in range(4):
        units = random_units(rng, rng.randint(1, 5), 5, *STYLES[style])
        choices = list(all_choices(units))
        some = rng.choice(choices)[1]
        optimum = best_of(choices, some)[1]
        for budget in {some, optimum, 10**15}:
            loss = float(best_of(choices, budget)[0])
            found = solve(units, budget)
            picked = [unit.options[i] for unit, i in zip(units, found.choice, strict=True)]
            assert sum(option.nbytes for option in picked) == found.nbytes <= budget
            assert math.fsum(option.loss for option in picked) == found.loss
            assert found.gap == 0 or found.gap > CLOSED  # below is rounding
            assert found.proof == "solver" and found.bound <= loss * (1 + 1e-9) + 1e-9
            assert loss <= found.loss <= loss * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_an_answer_within_the_solvers_tolerance_is_counted_again(seed):
    """One byte too much of some 2^44 is less than HiGHS sees."""
    rng = random.Random(seed)
    sizes = [2**44 + 2 * rng.randint(-3, 3) + 1 for _ in range(4)]
    units = units_of(*([(0, 1.0), (size, rng.random())] for size in sizes), [(0, 1.0), (1, 0.999)])
    budget = sum(rng.sample(sizes, 2)) - 1
    found = solve(units, budget)
    assert found.nbytes <= budget
    assert found.loss <= float(best_of(all_choices(units), budget)[0]) * (1 + 1e-6)


def test_dominated_options_are_never_chosen_and_the_first_of_equals_is():
    units = units_of([(5, 1.0), (5, 1.0), (3, 2.0), (4, 2.0), (6, 1.0), (9, 0.5), (8, 0.7), (10, 0.5)])
    assert [solve(units, budget).choice for budget in (100, 8, 7, 3)] == [(5,), (6,), (0,), (2,)]


def test_no_time_is_feasible_and_says_unproven():
    units = large_units(40)
    budget = int(40 * 2.4 * 2**20)
    hasty = solve(units, budget, time_limit_s=0.0)
    exact = solve(units, budget)
    assert hasty.nbytes <= budget and hasty.bound <= exact.loss <= hasty.loss
    assert exact.proof == "solver" and (hasty.proof == "none" or hasty.gap <= 1e-6)


def test_infeasible_says_the_smallest():
    units = units_of([(10**11, 1.0), (10**11 + 7, 0.0)], [(12_345_679, 1.0)])
    smallest = 10**11 + 12_345_679
    with pytest.raises(InfeasibleBudget) as caught:
        solve(units, smallest - 1)
    assert caught.value.smallest_bytes == smallest and caught.value.exit_code == 3
    assert str(smallest) in caught.value.message and "100 GB" in caught.value.message
    assert f"{smallest}B" in caught.value.hint
    assert solve(units, smallest).nbytes == smallest


def large_units(num_units):
    """As a real model's: 24 options whose bytes fall into few values and whose losses spread widely."""
    rng = random.Random(num_units)
    rows = []
    for _ in range(num_units):
        weight = math.exp(rng.gauss(0, 2))
        rows.append(
            [
                (bits * 524_288 + 16_777_216 // group, weight * 4.0**-bits * rng.uniform(0.7, 1.3))
                for bits in (1, 2, 3, 4, 8, 16)
                for group in (32, 64, 128, 256)
            ]
        )
    return units_of(*rows)


IDENTITY = ModelIdentity("tests/tiny", "llama", "a" * 64, "b" * 64, "c" * 64)
PAGED = tuple(AttentionGeometry(index, 4, 2, 32, 32) for index in (1, 2))
GEOMETRY = Geometry("llama", "bfloat16", (AttentionGeometry(0, 4, 2, 32, 32, window=64), *PAGED, StateGeometry(3, 640)))
PER_TOKEN = ProfileSpec(num_bits=(2, 4), k_axes=("token",), group_sizes=(32,), kl_samples=0)
CACHE = CacheSpec(num_sink_tokens=2, k_recent_window=0, v_recent_window=0)
LENGTHS = {"batch": 2, "context": 4000, "objective": "sensitivity"}
LOUD = {(1, "k"): 90.0, (1, "v"): 3.0, (2, "k"): 1.0, (2, "v"): 40.0}


def profile_of(loudness: dict[tuple[int, Side], float]) -> Profile:
    """Losses that 2 bits more divide by 16; the second head's are twice the first's."""
    subject = ProfileSetup(IDENTITY, GEOMETRY, 10**6, 500, PER_TOKEN, CACHE, "f", "none", 1, 10, 9)
    heads_N1, bits_C = torch.tensor([[1.0], [2.0]], dtype=torch.float64), torch.tensor([2.0, 4.0], dtype=torch.float64)
    means = {
        f"sensitivity.{side}.{index}": Mean(loud * heads_N1 * 4.0**-bits_C, 1)
        for (index, side), loud in loudness.items()
    }
    return Profile(subject, means)


def loss_of(profile: Profile, allocation: Allocation) -> float:
    """The loss of the formats that the layers hold."""
    total = 0.0
    for layer, side in itertools.product((layer for layer in allocation.layers if layer.is_paged), SIDES):
        losses = profile.losses("sensitivity", layer.geometry.index, side)
        fmt = layer.format(side)
        total += 0.0 if fmt == RAW else sum(losses[Candidate(fmt.num_bits, fmt.axis, fmt.group_size)])
    return total


@pytest.mark.parametrize("granularity", ["layer", "block"])
def test_layers_hold_the_formats_whose_losses_were_added_up(granularity) -> None:
    """Keys per token, as values are: nothing but their losses tells them apart."""
    profile = profile_of(LOUD)
    for bits in (4.0, 4.8, 5.8):
        found = allocate(profile, AllocateSpec(bits=bits, granularity=granularity, **LENGTHS), {})
        assert loss_of(profile, found) == pytest.approx(found.loss, rel=1e-12)
    found = allocate(profile, AllocateSpec(bits=4.6, **LENGTHS), {})
    assert [(layer.k.num_bits, layer.v.num_bits) for layer in found.layers[1:3]] == [(4, 2), (2, 4)]


def test_what_a_budget_leaves_for_the_cache() -> None:
    """The device's without weights and workspace; bits per value without the layers that are not paged."""
    layers, workload = bare_layers(GEOMETRY), Workload(2, 4000)
    fixed, _ = layer_bytes(layers, "bfloat16", workload)
    assert fixed > 0

    def left(**budget: object) -> int:
        return resolve_budget(AllocateSpec(**budget, **LENGTHS), layers, "bfloat16", 10**6, vocab_size=500).for_cache

    assert left(budget="9MB") == 9_000_000 - 10**6 - 2 * 4 * 2 * 500 - workspace_bytes(layers, "bfloat16", workload)
    assert left(bits=3.0) == 3 * 2 * 2 * 64 * 8000 // 8 + fixed
    kivi_2 = fixed_layers(load_recipe("kivi-2").formats, layers)
    assert left(same_bytes_as="kivi-2") == sum(layer_bytes(kivi_2, "bfloat16", workload))
    assert left(kv_budget="5KB") == 5000


def test_the_first_paged_layer_has_the_first_formats() -> None:
    """AQUA-KV: 4 bits in the first layer, 2 in the others; layers that are not paged are not counted."""
    formats = load_recipe("aqua-kv").formats
    layers = fixed_layers(formats, (LayerPlan(GEOMETRY.layers[0]), *(LayerPlan(one, RAW, RAW) for one in PAGED)))
    assert [[fmt.num_bits for fmt in layer.formats] for layer in layers] == [[], [4, 4], [2, 2]]
