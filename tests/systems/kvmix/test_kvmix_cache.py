"""KVmix's windows through the cache: pages, bytes and contents against a simulation token by token, in
fractions."""

from dataclasses import replace
from fractions import Fraction
from math import floor
from pathlib import Path

import oracles
import pytest
import torch
from cache_cases import assert_exact_bytes, llama_plan, random_states, tiny_llama
from kvmix_plans import kvmix_plan

from kvcal import Plan, PlanCache, artifact, load_plan, save_plan
from kvcal.errors import ArtifactError
from kvcal.plan.page_format import Format
from kvcal.plan.plan import KIND, SCHEMA
from kvcal.recipe import CacheSpec
from kvcal.systems.kvmix.importance import layer_format
from kvcal.systems.kvmix.recipe import ImportanceSpec
from kvcal.systems.kvmix.window_rule import WindowRule

PAPER, NO_SINKS = ImportanceSpec(), CacheSpec(num_sink_tokens=0)
HEADS = 2
# Every kind of rule, with sinks and without; K and V of four plans. 60 % jumps by 76 tokens at the first
# page.
K_FORMATS = (
    layer_format("k", True, PAPER, NO_SINKS),
    layer_format("k", False, PAPER, CacheSpec(num_sink_tokens=3)),
    Format(2, "channel", 32, 0, 0, window_rule=WindowRule("paged", 0.6, 192)),
    Format(3, "channel", 64, 5, 0, "bfloat16", window_rule=WindowRule("paged", 0.6, 50, 7)),
)
V_FORMATS = (
    layer_format("v", True, PAPER, NO_SINKS),
    layer_format("v", False, replace(PAPER, window="clamped"), NO_SINKS),
    Format(2, "token", 32, 1, 0, window_rule=WindowRule("clamped", 0.5, 130, 20)),
    Format(4, "token", 128, 60, 0, window_rule=WindowRule("clamped", 0.3, 512)),
)
MIXED = [llama_plan(*pair, HEADS, num_layers=1) for pair in zip(K_FORMATS, V_FORMATS, strict=True)]


def history(fmt: Format, num_tokens: int) -> list[tuple[int, int]]:
    """(pages read, window) after 0, 1, ... tokens. A page is read once it has left the window."""
    rule = fmt.window_rule
    assert rule is not None
    share, kept, pages, found = Fraction(repr(rule.share)), 0, 0, [(0, rule.min_tokens)]
    for count in range(1, num_tokens + 1):
        if count % 128 == 0:
            kept = floor(share * (kept + 128))
        window = min(max(kept if rule.kind == "paged" else floor(share * count), rule.min_tokens), rule.max_tokens)
        if count - 128 * pages >= window + 128:
            pages += 1
        found.append((pages, window))
    return found


def test_the_paged_window_stands_still_after_a_few_pages() -> None:
    """With 128 new tokens at a time, 20 % keeps 31 tokens and 10 % keeps 14, however long the text."""
    for share, kept in ((0.2, [0, 25, 30, 31, 31]), (0.1, [0, 12, 14, 14, 14]), (0.5, [0, 64, 96, 112, 120])):
        rule = WindowRule("paged", share, 512)
        assert [rule.window(128 * pages) for pages in range(5)] == kept
        assert [rule.window(128 * pages + 127) for pages in range(5)] == kept
        assert rule.window(10**6) == floor(128 * share / (1 - share)) - (share == 0.2 or share == 0.5)


def test_the_paper_s_window_and_ours_are_as_documented() -> None:
    """Unquantized tokens after a prompt of 4,096 and then one at a time, by each rule, against the table."""
    steps = (0, 1, 2, 3, 4, 5, 6, 13, 14, 30, 31, 127)
    columns: list[list[int]] = [list(steps)]
    for share in ("0.2", "0.1"):
        kept = [floor(Fraction(share) * 4096)]  # the whole prompt is one update
        for _ in range(steps[-1]):
            kept.append(floor(Fraction(share) * (kept[-1] + 1)))
        fmt = Format(2, "token", 32, window_rule=WindowRule("paged", float(share), 512))
        unquantized = [count - 128 * fmt.pages_read(count) for count in range(4096, 4096 + len(kept))]
        columns += [[counts[step] for step in steps] for counts in (kept, unquantized)]
    assert columns[1][:6] == [819, 164, 33, 6, 1, 0]
    rows = zip(*columns, strict=True)
    table = "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)
    assert table in (Path(__file__).parents[3] / "docs" / "measured" / "2026-11-21-kvmix.md").read_text()


def test_a_plan_with_the_rule_s_old_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.safetensors"
    save_plan(kvmix_plan("paged"), path)
    stored = artifact.read(path, KIND, SCHEMA)
    stored.body["layers"][0]["k"][0]["window_rule"]["kind"] = "literal"
    artifact.write(path, stored)
    with pytest.raises(ArtifactError, match=r"window_rule.kind = 'literal': .*'clamped' or 'paged'") as caught:
        load_plan(path)
    assert caught.value.hint == "compile the plan again with this version of kvcal"


@pytest.mark.parametrize("fmt", K_FORMATS + V_FORMATS, ids=str)
def test_pages_are_those_of_a_simulation_token_by_token(fmt: Format) -> None:
    expected = history(fmt, 2000)
    assert [fmt.pages_read(count) for count in range(2001)] == [pages for pages, _ in expected]
    assert [fmt.window_rule.window(count) for count in range(2001)] == [window for _, window in expected]
    for count in (0, 1, 100, 127, 128, 200, 255, 256, 511, 700):
        pages = expected[count][0]
        distance = next(new for new in range(1, 1300) if expected[count + new][0] > pages)
        assert fmt.tokens_to_next_event(count, count) == distance


@pytest.mark.parametrize(
    ("plan", "cuts"), [*((plan, list(range(40, 520, 37))) for plan in MIXED), (MIXED[2], []), (MIXED[3], [1, 128, 300])]
)
def test_contents_depend_on_the_number_of_tokens_alone(plan: Plan, cuts: list[int]) -> None:
    """A prompt at once, or in any chunks, leaves the pages that single steps would have left."""
    states = random_states(1, HEADS, 530, seed=2)
    cache, start = PlanCache(plan, tiny_llama(HEADS, 1).config), 0
    contents = [[oracles.StoredHead(head, plan.layers[0].format(side)) for head in states[0]] for side in ("k", "v")]
    for stop in [*cuts, 500, *range(501, 530, 4)]:
        found = cache.update(states[:, :, start:stop], states[:, :, start:stop], 0)
        if start >= 300:
            for read, heads in zip(found, contents, strict=True):
                for head, stored in enumerate(heads):
                    assert torch.equal(read[0, head, :start], stored.after(start, history(stored.fmt, start)[-1][0]))
        start = stop
        assert_exact_bytes(cache, [stop])
