"""``kvcal explain``: every figure against all plans there are, counted one by one; and what is refused."""

from __future__ import annotations

import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cli_cases import RECIPE, ran_well, run_kvcal, save_llama
from transformers import PreTrainedTokenizerBase

from kvcal.charts.layers import draw_profile
from kvcal.folder import Folder
from kvcal.plan.page_format import RAW, Format
from kvcal.plan.plan import load_plan
from kvcal.stages.allocate import load as load_allocation
from kvcal.stages.profile import load as load_profile
from kvcal.stages.profile.record import Profile
from kvcal.stages.search.record import load as load_search

SIZES = ("--batch", 2, "--context", 4096)
SMALL = RECIPE.replace("batch = 2\n", 'batch = 2\nobjective = "sensitivity"\n').replace(
    '["channel"]', '["channel", "token"]'
)
SEARCH = """[search]
keys = [{ num_bits = 2 }, { num_bits = 4 }]
values = [{ num_bits = 2 }, { num_bits = 4 }]
kl_samples = 2
kl_tokens = 256
refine_rounds = 1
systems = ["kivi-2"]
[reparam]
num_samples = 1
seq_len = 256
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A model of two layers, and plans of it: plans/a by a profile, searched/ by a search."""
    folder = tmp_path_factory.mktemp("explain")
    model = save_llama(folder / "model", tokenizer)
    (folder / "small.toml").write_text(SMALL)
    (folder / "searched.toml").write_text(RECIPE.replace('same_bytes_as = "kivi-2"', "bits = 5.0") + SEARCH)
    small = ("--recipe", folder / "small.toml", "--out", folder / "plans", "--name", "a", "--bits", 4.5)
    ran_well("plan", model, *small, *SIZES, "--quiet")
    searched = ("--model", model, "--out", folder / "searched", *SIZES)
    ran_well("search", folder / "searched.toml", *searched, "--quiet")
    return folder


def explained(*arguments: object) -> dict[str, Any]:
    return ran_well("explain", *arguments, "--json").json


class Way(NamedTuple):
    """A way to store a unit."""

    format: Format
    nbytes: int
    loss: float


def ways_of(profile: Profile, lengths: tuple[int, ...]) -> list[list[Way]]:
    """Of each layer's keys and values in turn."""
    units = []
    for layer in profile.setup.layers:
        for side, dim in (("k", layer.k_head_dim), ("v", layer.v_head_dim)):
            losses = profile.losses("sensitivity", layer.index, side)
            costs = {profile.cache.format(side, *candidate): sum(loss) for candidate, loss in losses.items()} | {
                RAW: 0.0
            }
            heads, dtype = layer.num_kv_heads, profile.geometry.cache_dtype
            units.append([Way(f, f.nbytes(side, heads, dim, dtype, lengths), loss) for f, loss in costs.items()])
    return units


def test_every_figure_is_that_of_all_plans(made: Path) -> None:
    path = made / "plans" / "a" / "plan.safetensors"
    value = explained(path)
    plan, profile = load_plan(path), load_profile(made / "plans" / "profile.safetensors")
    allocation, _ = load_allocation(path.with_name("allocation.safetensors"))
    units = ways_of(profile, plan.workload.lengths)
    plans = list(product(*units))
    capacity = allocation.split.budget
    chosen = [layer.formats(side)[0] for layer in plan.layers for side in ("k", "v")]
    ours = [next(way for way in unit if way.format == fmt) for unit, fmt in zip(units, chosen, strict=True)]
    best = sum(way.loss for way in ours)
    assert best == pytest.approx(min(sum(w.loss for w in p) for p in plans if sum(w.nbytes for w in p) <= capacity))

    priced = 0
    for number, (unit, ways) in enumerate(zip(value["units"], units, strict=True)):
        assert [option["nbytes"] for option in unit["options"]] == [way.nbytes for way in ways]
        assert [option["loss"] for option in unit["options"]] == pytest.approx([way.loss for way in ways])
        assert [option["is_chosen"] for option in unit["options"]] == [way == ours[number] for way in ways]
        for option, way in zip(unit["options"], ways, strict=True):
            others = [
                w for w in ways if (w.nbytes, w.loss) != (way.nbytes, way.loss) or ways.index(w) < ways.index(way)
            ]
            others = [w for w in others if w.nbytes <= way.nbytes and w.loss <= way.loss]
            assert (option["better"] is not None) == bool(others)
            losses = [
                sum(w.loss for w in p) for p in plans if p[number] == way and sum(w.nbytes for w in p) <= capacity
            ]
            if not option["is_chosen"] and not others:
                assert option["fits"] == bool(losses)
                if losses:
                    assert option["total"] == pytest.approx(min(losses) - best, abs=1e-12)
                    priced += option["total"] > 0
            side, index = unit["side"], unit["index"]
            measured = {profile.cache.format(side, *c): v for c, v in profile.losses("kl", index, side).items()}
            expected = 0.0 if way.format == RAW else measured.get(way.format, [None])[0]
            assert option["kl"] == (expected if expected is None else pytest.approx(expected))
    assert priced >= 2

    more, taken = value["more"], sum(way.nbytes for way in ours)
    assert (more["capacity"], more["nbytes_before"]) == (int(1.1 * taken), taken)
    fitting = [p for p in plans if sum(w.nbytes for w in p) <= more["capacity"]]
    assert more["loss_after"] == pytest.approx(min(sum(w.loss for w in p) for p in fitting))
    assert more["loss_before"] == pytest.approx(best) and more["nbytes_after"] <= more["capacity"]
    assert sum(swap["nbytes"] for swap in more["swaps"]) == more["nbytes_after"] - taken


def test_risks_are_shares_of_what_was_measured(made: Path) -> None:
    path = made / "plans" / "a" / "plan.safetensors"
    risks = [risk for risk in explained(path)["risks"] if risk["kind"] == "head"]
    plan, profile = load_plan(path), load_profile(made / "plans" / "profile.safetensors")
    heads = {}
    for layer in plan.layers:
        for side in ("k", "v"):
            candidates = [profile.cache.format(side, *c) for c in profile.setup.candidates(side)]
            if layer.formats(side) != (RAW,):
                column = profile.sensitivity(layer.geometry.index, side)[:, candidates.index(layer.formats(side)[0])]
                heads |= {
                    f"layer {layer.geometry.index} {side.upper()} head {n}": x for n, x in enumerate(column.tolist())
                }
    worst = sorted(heads, key=lambda name: -heads[name])[:5]
    assert [risk["what"] for risk in risks] == worst
    assert [risk["share"] for risk in risks] == pytest.approx([heads[name] / sum(heads.values()) for name in worst])


def test_one_layer_shows_what_others_better_too(made: Path) -> None:
    path = made / "plans" / "a" / "plan.safetensors"
    done = ran_well("explain", path, "--layer", 1)
    assert "layer 0" not in done.out.split("What 10 %")[0]
    assert "no better than" in done.out and "(chosen)" in done.out and "elsewhere" in done.out
    assert "no better than" not in run_kvcal("explain", path).out
    assert explained(path, "--layer", 1)["more"] == explained(path)["more"]
    done = run_kvcal("explain", path, "--layer", 7)
    assert done.code == 2 and "--layer 7: nothing was chosen there" in done.err and "layers with one: 0, 1" in done.err


def test_a_search_is_explained_by_its_estimates(made: Path) -> None:
    folder = Folder(made / "searched")
    value, report = explained(folder.plan), load_search(folder.search).report
    assert value["source"] == "search" and len(value["units"]) == len(report.units) > 0
    for unit, kept in zip(value["units"], report.units, strict=True):
        by_name = {option["name"]: option for option in unit["options"]}
        assert by_name[kept.chosen]["is_chosen"] and by_name[kept.chosen]["nbytes"] == kept.nbytes
        for option in kept.options:
            found = by_name[option.name]
            assert (found["nbytes"], found["loss"], found["error"]) == (option.nbytes, option.estimate, option.error)
    more = value["more"]
    best = {(0, 0.0)}  # (bytes, loss) of all ways to choose
    for unit in value["units"]:
        best = {(b + o["nbytes"], loss + o["loss"]) for b, loss in best for o in unit["options"]}
    least = min(loss for nbytes, loss in best if nbytes <= more["capacity"])
    assert more["loss_after"] == pytest.approx(least, abs=1e-9)
    texts = [(risk["what"], risk["value"], risk["error"]) for risk in value["risks"] if risk["kind"] == "text"]
    pools = (("select", report.select), ("validate", report.validate))
    assert texts == [(f"{k.kind} ({name})", k.kl, k.kl_error) for name, pool in pools for k in pool.kinds]
    assert "±" in run_kvcal("explain", folder.plan).out


def test_a_plan_elsewhere_needs_its_folder(made: Path, tmp_path: Path) -> None:
    path = made / "plans" / "a" / "plan.safetensors"
    shutil.copy(path, tmp_path / "p.safetensors")
    done = run_kvcal("explain", tmp_path / "p.safetensors")
    assert done.code == 5 and "allocation.safetensors is missing" in done.err and "hint: give --folder" in done.err
    there = explained(tmp_path / "p.safetensors", "--folder", path.parent)
    assert there == explained(path)


def test_artifacts_of_something_else_are_refused(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "plans", tmp_path / "plans")
    path = tmp_path / "plans" / "a" / "plan.safetensors"
    shutil.copy(made / "plans" / "profile.safetensors", tmp_path / "profile.safetensors")
    (tmp_path / "plans" / "profile.safetensors").unlink()
    done = run_kvcal("explain", path)
    assert done.code == 5 and "profile.safetensors is missing" in done.err
    done = ran_well("allocate", tmp_path, "--bits", 9, "--name", "plans", *SIZES)
    done = run_kvcal("explain", path, "--folder", tmp_path / "plans")
    assert done.code == 5 and "allocation.safetensors is of another plan" in done.err

    shutil.copy(made / "searched" / "plan.safetensors", tmp_path / "plan.safetensors")
    shutil.copy(made / "searched" / "allocation.safetensors", tmp_path / "allocation.safetensors")
    done = run_kvcal("explain", tmp_path / "plan.safetensors")
    assert done.code == 5 and "is not the search that the plan was made from" in done.err


def test_fixed_formats_have_no_reason(made: Path, tmp_path: Path) -> None:
    few = ("--set", "evaluate.tasks=[]", "--set", "evaluate.against=[]", "--samples", 1, "--seq-len", 200)
    ran_well("run", "kivi-2", "--model", made / "model", "--out", tmp_path, *few)
    done = run_kvcal("explain", tmp_path / "plan.safetensors")
    assert done.code == 5 and "nothing was solved for: kivi-2 fixes the formats" in done.err
    page = (tmp_path / "report.html").read_text()
    assert 'id="bits"' in page and "nothing was solved for" in page


def test_reports_lie_beside_plans_and_are_written_anew(made: Path) -> None:
    for folder in (made / "plans" / "a", made / "searched"):
        path = folder / "report.html"
        before = path.read_bytes()
        path.unlink()
        done = ran_well("report", folder)
        assert f"report: {path}" in done.err
        assert path.read_bytes() == before
    value, page = (
        explained(made / "plans" / "a" / "plan.safetensors"),
        (made / "plans/a/report.html").read_text(),
    )
    for unit in value["units"]:
        chosen = next(option for option in unit["options"] if option["is_chosen"])
        cell = f"{unit['name']}, {chosen['name']}: sensitivity loss {chosen['loss']:.3g}; "
        assert re.search(f'class="heat chosen"[^>]*title="{re.escape(cell)}', page)
    points = re.findall(r"<title>([\d.]+) bits, [^:]+: loss ([\d.e-]+)</title>", page)
    chosen = re.search(r"<title>chosen: ([\d.]+) bits, [^:]+: loss ([\d.e-]+)</title>", page)
    assert chosen is not None and points


@pytest.mark.parametrize("granularity", ["block", "head"])
def test_blocks_and_heads_are_units_of_their_own(granularity: str, made: Path, tmp_path: Path) -> None:
    shutil.copy(made / "plans" / "profile.safetensors", tmp_path)
    sets = ("--set", f"allocate.granularity={granularity}", "--set", "allocate.objective=sensitivity")
    ran_well("allocate", tmp_path, "--bits", 6, *SIZES, *sets)
    ran_well("compile", tmp_path)
    ran_well("allocate", tmp_path, "--sweep", *SIZES, *sets)
    for name in ("allocation.png", "sweep.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for number in (1, 2):
        draw_profile(load_profile(tmp_path / "profile.safetensors"), tmp_path / f"profile{number}.png")
    assert (tmp_path / "profile1.png").read_bytes() == (tmp_path / "profile2.png").read_bytes()
    value, plan = explained(tmp_path / "plan.safetensors"), load_plan(tmp_path / "plan.safetensors")
    names = [unit["name"] for unit in value["units"]]
    expected = {"block": ["layer 0 K and V", "layer 1 K and V"],
                "head": [f"layer {n} {s} head {h}" for n in (0, 1) for s in "KV" for h in (0, 1)]}  # fmt: skip
    assert names == expected[granularity]
    for unit in value["units"]:
        chosen = next(option for option in unit["options"] if option["is_chosen"])
        layer, head = plan.layers[unit["index"]], int((re.findall(r"head (\d)", unit["name"]) or ["0"])[0])
        assert int(chosen["name"].split()[0]) == layer.head_formats(unit["side"][0])[head].num_bits
        assert chosen["total"] == 0 and all(
            option["total"] is None or option["total"] >= 0 for option in unit["options"]
        )
