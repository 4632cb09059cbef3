"""Plans that shrink, in a static cache: at every token count the bytes of the dynamic cache, in the memory that the
plan says, whatever the schedule, the padding and the chunks."""

import copy
import dataclasses
import pickle

import pytest
import torch
from cache_cases import attended, feed, llama_plan, ragged_ids, random_ids, random_qkv, tiny_llama
from form_cases import with_tensors
from staged_cases import SCHEDULES, assert_same_bytes, caches, fed_alike, mixed_plan, staged_plan, transformed
from torch._dynamo.testing import CompileCounter

from kvcal import Plan, PlanCache, attached
from kvcal.errors import NonFiniteActivations, UnsupportedModel, UsageError
from kvcal.kernels.operands import BASE, HEADS, PAGES, RECORD, SQUEEZED
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Workload
from kvcal.stages.allocate.schedule import progressive_layers
from kvcal.store.state import Serving

LENGTH = 410


def plans() -> dict[str, Plan]:
    found = {name: staged_plan(*SCHEDULES[name]) for name in ("with the pages", "two at once", "from the start")}
    return found | {"transformed": transformed(staged_plan(*SCHEDULES["unlike"])), "mixed": mixed_plan()}


@pytest.mark.parametrize("name", plans())
def test_every_step_stores_and_reads_what_the_dynamic_cache_does(name: str) -> None:
    """Rows of 40, 9 and 1 tokens, padded on the left; then single steps. Bits go by columns, not by a row's tokens."""
    plan = plans()[name]
    ids, mask = ragged_ids((40, 9, 1), LENGTH - 40)
    static, dynamic = caches(plan, LENGTH, mask[:, :40])
    static.allocate(3, "cpu")
    starts = {at for layer in plan.layers for f in (*layer.k, *layer.v) for at in f.shrink_at if 0 < at < LENGTH}
    held, count, seen = static.nbytes, 0, set()
    steps = {at + more for at in (*starts, 128, 137, 160, 256, 384) for more in range(-2, 3) if 40 < at < LENGTH}
    cuts = (40, *sorted(steps))
    for stop, found, expected in fed_alike(static, dynamic, ids, cuts, mask):
        real = mask[:, stop - found.shape[1] : stop].bool()
        torch.testing.assert_close(found[real], expected[real], atol=1e-4, rtol=1e-4)
        count += assert_same_bytes(static, dynamic)
        seen.add(int(static.static.phases.stage))
        assert static.nbytes == held
    static.check()
    assert seen == set(range(len(starts) + 1)) and count > 50


@pytest.mark.parametrize(
    ("name", "cuts"),
    [("two at once", (139, 140, 141)), ("two at once", ()), ("mixed", (127, 262)), ("transformed", (1, 256, 261, 263))],
)
def test_prompts_in_chunks_store_what_the_dynamic_cache_does(name: str, cuts: tuple[int, ...]) -> None:
    static, dynamic = caches(plans()[name], 400)
    for _ in fed_alike(static, dynamic, random_ids(2, 330), cuts):
        assert_same_bytes(static, dynamic)
    for _ in fed_alike(static, dynamic, random_ids(2, 70, seed=1), range(51, 56)):
        pass
    assert assert_same_bytes(static, dynamic) > 0


@pytest.mark.parametrize(("batch", "max_tokens"), [(1, 560), (3, 333)])
def test_memory_is_what_the_plan_says_at_its_worst_and_within_the_budget(batch: int, max_tokens: int) -> None:
    """Four layers that shrink one after the other, with unlike windows, and one that cannot shrink."""
    k, v = Format(2, "channel", 32, 3, 20), Format(4, "token", 32)
    plain = llama_plan(*(dataclasses.replace(f, param_dtype="float32") for f in (k, v)), num_layers=5)
    layers = (*plain.layers[:4], dataclasses.replace(plain.layers[4], k=(Format(3, "channel", 32),)))
    budget, workload = dataclasses.replace(plain, layers=layers).nbytes([560] * batch), Workload(batch, 560)
    layers = progressive_layers(layers, workload, "float32", budget)
    plan = dataclasses.replace(plain, layers=layers, workload=workload)
    static, _ = caches(plan, max_tokens)
    static.allocate(batch, "cpu")
    by_count = [plan.nbytes([count] * batch) for count in range(1, max_tokens + 1)]
    assert static.nbytes == max(by_count) <= budget
    if max_tokens == 560:
        own = [layer.format(side).nbytes(side, 2, layer.head_dim(side), "float32", [count] * batch)
               for layer in layers for side in ("k", "v") for count in range(1, 561)]  # fmt: skip
        assert sum(max(own[i : i + 560]) for i in range(0, len(own), 560)) > budget  # each with memory of its own
    if (max_tokens, batch) == (560, 1):
        q, states = torch.zeros(1, 8, 400, 8), torch.zeros(1, 2, 400, 8)
        static.static.serving = Serving()
        for layer in static.paged_layers:
            layer.update(states, states)
            layer.observe(q)
        for _ in range(160):
            for layer in static.paged_layers:
                layer.attend(q[:, :, :1], states[:, :, :1], states[:, :, :1], None, 1.0, 0.0)
        assert static.lengths == [560]
        assert static.nbytes == max(by_count)


def test_layers_that_shrink_apart_keep_their_pages() -> None:
    """Other layers' pages move when one shrinks. Keys and values of a later layer differ in their last bits between the
    caches, so both are fed the same ones."""
    layers = tuple(
        staged_plan((140 + 7 * i, 260 + 9 * i), (150 + 5 * i, 270 + 4 * i, 280 + 3 * i), num_layers=3).layers[i]
        for i in range(3)
    )
    plan = dataclasses.replace(staged_plan((), (150,), num_layers=3), layers=layers)
    static, dynamic = caches(plan, 400)
    static.allocate(2, "cpu")
    parts = [random_qkv(2, 2, 400, seed=i) for i in range(3)]
    static.static.serving = Serving()
    for index, (q, k, v) in enumerate(parts):
        for layer in (static.layers[index], dynamic.layers[index]):
            layer.update(k[:, :, :120], v[:, :, :120])
            layer.observe(q[:, :, :120])
    for t in range(120, 300):
        one = slice(t, t + 1)
        for index, (q, k, v) in enumerate(parts):
            dynamic.update(k[:, :, one], v[:, :, one], index)
            static.layers[index].attend(q[:, :, one], k[:, :, one], v[:, :, one], None, 1.0, 0.0)
        if t > 130 and t % 4 == 0:
            assert assert_same_bytes(static, dynamic) > 0
    assert int(static.static.phases.stage) == 14


def test_a_chunk_up_to_the_next_stage_is_like_single_steps() -> None:
    by_chunk, by_step = (caches(staged_plan(*SCHEDULES["unlike"]), LENGTH)[0] for _ in range(2))
    given = random_qkv(2, 2, LENGTH)
    found, expected = attended(by_chunk, *given, None), attended(by_step, *given, range(1, LENGTH))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(by_chunk.static.phases.pages, by_step.static.phases.pages)


def test_a_copy_keeps_its_own_stage() -> None:
    """Prompts are packed and read back at the bits of the cache that they are fed to."""
    cache, fresh = (caches(staged_plan(*SCHEDULES["unlike"]), LENGTH)[0] for _ in range(2))
    given, later = random_qkv(2, 2, 200), random_qkv(2, 2, 200, seed=4)
    attended(cache, *given, (130,))
    copied = copy.deepcopy(cache)
    attended(cache, *later, (60, 190))
    assert int(cache.static.phases.stage) == 5 > int(copied.static.phases.stage)
    attended(fresh, *given, (130,))
    found, expected = (attended(each, *later, (55, 70, 150)) for each in (copied, fresh))
    assert torch.equal(found, expected) and torch.equal(copied.static.phases.pages, fresh.static.phases.pages)
    with pytest.raises(UsageError, match="a static cache cannot be pickled"):
        pickle.dumps(copied)


def test_reset_reorder_and_crop() -> None:
    plan, order = staged_plan(*SCHEDULES["unlike"]), torch.tensor([2, 0, 0])
    used, fresh = caches(plan, 300)[0], caches(plan, 300)[0]
    given = random_qkv(3, 2, 281)
    prompt, rest = ([x[:, :, part] for x in given] for part in (slice(0, 201), slice(200, 280)))
    attended(used, *random_qkv(3, 2, 290, seed=5), (270, 280))
    with pytest.raises(UsageError, match="cannot go back from 290 tokens to 250: pages have shrunk"):
        used.crop(-40)
    used.reset()
    assert int(used.static.phases.stage) == 0
    attended(used, *prompt)
    with pytest.raises(UsageError, match="cannot go back from 201 tokens to 199: pages have shrunk"):
        used.crop(-2)
    used.crop(-1)
    used.reorder_cache(order)
    attended(fresh, *(x[order][:, :, :200] for x in given))
    found, expected = (attended(cache, *(x[order] for x in rest), range(1, 80)) for cache in (used, fresh))
    assert torch.equal(found, expected)
    assert used.lengths == [280] * 3


@pytest.mark.parametrize("kept", [380, 255, 201])
def test_tokens_removed_between_stages_leave_what_they_leave_in_the_dynamic_cache(kept: int) -> None:
    static, dynamic = caches(transformed(staged_plan((140, 200), (150, 190, 395))), 400)
    given, more, read = random_qkv(2, 2, 390), random_qkv(2, 2, 390 - kept + 8, seed=4), []
    for cache in (static, dynamic):
        attended(cache, *given, (380, *range(381, 390)))
        cache.crop(kept - 390)
        layer = cache.paged_layers[0]
        read.append([layer.store.read(side, cache.padding.rows, kept, 0, torch.float32) for side in ("k", "v")])
    assert torch.equal(read[0][0], read[1][0]) and torch.equal(read[0][1], read[1][1])
    assert_same_bytes(static, dynamic)
    found, expected = (attended(cache, *more, range(1, 400)) for cache in (static, dynamic))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert assert_same_bytes(static, dynamic) > 0


def test_what_is_not_finite_is_told_when_it_shrinks() -> None:
    static, _ = caches(staged_plan((150,), (160,)), 300)
    static.allocate(2, "cpu")
    q, k, v = random_qkv(2, 2, 150)
    k[1, 0, 40, 2] = torch.inf
    for t in range(150):
        static.check()
        one = slice(t, t + 1)
        static.layers[0].attend(q[:, :, one], k[:, :, one], v[:, :, one], None, 1.0, 0.0)
    with pytest.raises(NonFiniteActivations):
        static.check()


def test_what_cannot_be_held() -> None:
    narrow = dataclasses.replace(staged_plan((150,), (160,)), cache_dtype="bfloat16")
    with pytest.raises(UnsupportedModel, match="k pages of 8 bits take 2560 bytes, and those of 16 .* 2048"):
        caches(narrow, 100)
    plan = dataclasses.replace(staged_plan((150,), (160,)), workload=Workload(2, 200))
    with pytest.raises(UsageError, match="2 sequences of 201 tokens: .* at most 2 of 200"):
        caches(plan, 201)[0].allocate(2, "cpu")
    with pytest.raises(UsageError, match="3 sequences of 200 tokens"):
        caches(plan, 200)[0].allocate(3, "cpu")
    PlanCache(plan, tiny_llama(2, 1).config, max_tokens=200).allocate(2, "cpu")


def test_what_does_not_go_with_pages_that_shrink() -> None:
    plan = staged_plan((150,), (160,), num_layers=2)
    lattice = dataclasses.replace(plan.layers[1], v=(Format(2, lattice_dim=2),))
    with pytest.raises(UnsupportedModel, match="layer 1: v pages are on a lattice, and others shrink"):
        caches(with_tensors(plan, [plan.layers[0], lattice], None), 100)


def test_records_only_ever_slide_where_nothing_is_left_to_read() -> None:
    """What the kernels rest on: by the order of addresses, left and then right, without gaps beyond the room."""
    static, _ = caches(transformed(mixed_plan()), 400)
    static.allocate(3, "cpu")
    pool = static.static.phases
    table = pool._layout.tolist()
    assert len(table) == 4
    for old, new in zip(table, table[1:], strict=False):
        end = 0
        for before, after in zip(old, new, strict=True):
            assert after[SQUEEZED] <= before[BASE] and after[SQUEEZED] <= after[BASE] and after[SQUEEZED] >= end
            assert after[RECORD] <= before[RECORD] and after[PAGES] >= before[PAGES]
            end = after[SQUEEZED] + 3 * before[PAGES] * before[HEADS] * after[RECORD]
            assert after[BASE] % 16 == after[SQUEEZED] % 16 == after[RECORD] % 16 == 0
    ends = [rows[-1][BASE] + 3 * rows[-1][PAGES] * rows[-1][HEADS] * rows[-1][RECORD] for rows in table]
    assert pool.pages.numel() == max(ends)


def test_a_compiled_step_is_one_graph_that_serves_every_stage() -> None:
    """Also where nothing was packed, and no kernel's key was asked for, before it was compiled."""
    plan, model = staged_plan((140,), (140, 150)), tiny_llama(2, 1)
    ids, backend = random_ids(2, 160), CompileCounter()

    def step(token: torch.Tensor, position: torch.Tensor, cache: PlanCache) -> torch.Tensor:
        return model(token, position_ids=position, past_key_values=cache).logits

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    eager, static = (PlanCache(plan, model.config, max_tokens=160) for _ in range(2))
    with attached(model), torch.no_grad():
        feed(model, eager, ids[:, :120])
        feed(model, static, ids[:, :120])
        for i in range(120, 160):
            token, position = ids[:, i : i + 1], torch.full((2, 1), i)
            assert torch.equal(compiled(token, position, static), step(token, position, eager))
    assert backend.frame_count == 1 and int(static.static.phases.stage) == 2


def test_the_operators_declare_what_they_do() -> None:
    static, _ = caches(transformed(staged_plan((140,), (140, 150))), 300)
    with attached(tiny_llama(2, 1)):
        feed(tiny_llama(2, 1), static, random_ids(2, 140), (139,))
    phases, store, scratch = static.static.phases, static.layers[0].store, static.static.scratch
    step = store.step
    state, checks = static.static, ("test_schema", "test_faketensor")
    number, members = phases._shrinking[0]
    stages = (phases.stage, phases._start_columns, phases._layout, state.columns)
    q, k, v = (x[:, :, 0] for x in random_qkv(2, 2, 1))
    held, place, transform = (list(step.k), list(step.v)), list(store.place), list(step.transform)
    present = list(step.variants[0]), step.present, list(step.regions)
    assert len(step.variants[0]) > 1 and len(step.regions) == 2
    calls = {
        "shrink": (phases.pages, list(stages), members, state.lengths, phases._transforms, scratch.error, number),
        "slide": (phases.pages, *stages, phases.present, phases._tickets, 2, phases._largest),
        "append": (k, v, scratch.nothing, *held, list(step.statistic), place, transform, scratch.error, *present),
        "decode": (q, *held, place, transform, scratch.nothing, step.workspace, 0.5, 0.0, *present),
    }
    for op, args in calls.items():
        torch.library.opcheck(getattr(torch.ops.kvcal, op).default, args, test_utils=checks)
