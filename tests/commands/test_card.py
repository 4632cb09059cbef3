"""``kvcal card``: its figures are those of the evaluation in the folder, a hub's own reader takes its front matter,
and its verdict follows from stated limits and from the card before."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_cases import RECIPE, Outcome, ran_well, run_kvcal, save_llama
from form_cases import form_plan
from huggingface_hub import ModelCard
from hybrid_shapes import SHAPES
from transformers import PreTrainedTokenizerBase

from kvcal import card as cards
from kvcal.plan.damage import Damage, damage_path, load_damage, save_damage
from kvcal.plan.plan import Plan, load_plan, save_plan
from kvcal.quantities import format_bytes
from kvcal.stages.evaluate.stage import Evaluation, load_evaluation, save_evaluation

LOOKED_UP = '"chain", "pairs:512"'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The folder that `kvcal run` leaves of a small model, with a look-up among the tasks."""
    folder = tmp_path_factory.mktemp("card")
    model = save_llama(folder / "model", tokenizer, head_dim=64)
    recipe = RECIPE.replace('"chain"', LOOKED_UP).replace('"kivi-2"]', '"fp8"]')
    (folder / "small.toml").write_text(recipe)
    ran_well("run", folder / "small.toml", "--model", model, "--out", folder / "out", "--quiet")
    return folder / "out"


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whose report is not drawn again: that takes seconds."""
    monkeypatch.setattr("kvcal.report.write_report", lambda place: place.report)
    return Path(shutil.copytree(made, tmp_path / "out"))


def plan_and_evaluation(folder: Path) -> tuple[Plan, Evaluation]:
    return load_plan(folder / "plan.safetensors"), load_evaluation(folder / "evaluation.json")


def verdict(done: Outcome) -> str:
    return str(done.json["verdict"])


def figures_of(card: Path) -> dict[str, Any]:
    return ModelCard.load(card).data.to_dict()["kvcal"]


def edited(card: Path, **figures: Any) -> Path:
    """The card with other figures in its front matter."""
    path = card.with_name("before.md")
    line = f"kvcal: {json.dumps(figures_of(card) | figures)}\n"
    path.write_text(re.sub(r"^kvcal: .*\n", lambda _: line, card.read_text(), flags=re.M))
    return path


def test_figures_are_those_of_the_evaluation(folder: Path) -> None:
    done = ran_well("card", folder, "--kv-memory", "1GB", "--json")
    plan, evaluation = plan_and_evaluation(folder)
    row, value = evaluation.rows[-1], done.json
    assert value["verdict"] == "accept" and row.plan_sha256 == value["plan_sha256"] == plan.sha256
    assert (value["kl"], value["kl_error"], value["top1"]) == (row.text.kl, row.text.kl_se, row.text.top1_agreement)
    assert (value["bits_per_value"], value["nbytes"]) == (plan.bits_per_value(), plan.predicted_bytes)
    for task in row.tasks:
        assert value["tasks"][task.task]["accuracy"] == task.accuracy
        assert value["tasks"][task.task]["lost"] == task.lost
    page = (folder / "README.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    measured = {one[0]: one for one in rows if one[0] in ("16-bit", "fp8", "small")}
    assert measured.keys() == {"16-bit", "fp8", "small"}
    assert measured["small"][1:3] == [f"{plan.bits_per_value():.3f}", f"{row.text.kl:.5f} ± {row.text.kl_se:.5f}"]
    cells, raw = {one[0]: one[1:] for one in rows}, plan.raw_nbytes(plan.workload.lengths)
    assert cells["cache"] == [format_bytes(nbytes) for nbytes in (raw, raw // 2, plan.predicted_bytes)]
    at_16, in_fp8, _ = map(float, next(cells[name] for name in cells if name.startswith("requests of 512 tokens")))
    assert in_fp8 == pytest.approx(2 * at_16, abs=0.2)
    assert f"sha256 {plan.sha256}" in page and "`kvcal plan model --recipe small --set " in page
    assert 'eval "$(kvcal serve-args plan.safetensors --engine vllm --model model)"' in page
    assert "unchecked" not in page.split("## Limits")[0] and (folder / "report.html").is_file()
    again = page, ran_well("card", folder, "--kv-memory", "1GB").out
    assert (folder / "README.md").read_text() == again[0] and "Verdict: accept" in again[1]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (
            {"kv_budget": "1GB", "engine": "vllm", "tp": 1, "drafts": 1},
            "--kv-budget 1GB {} --for-engine vllm --drafts 1",
        ),
        ({"bits": 3.0, "engine": "sglang", "tp": 2, "drafts": 0}, "--bits 3.0 {} --for-engine sglang --tp 2"),
        ({"budget": "24GB", "engine": None, "tp": 1}, "--budget 24GB {}"),
    ],
)
def test_the_command_that_made_the_plan_has_its_options(
    knobs: dict[str, Any], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {f"allocate.{key}": value for key, value in knobs.items()}
    monkeypatch.setattr(cards, "allocation_of", lambda plan, folder: (None, inputs))
    ran_well("card", folder)
    line = f"`kvcal plan model --recipe small {words.format('--batch 2 --context 512')}`"
    assert line in (folder / "README.md").read_text()


def test_a_hub_reads_the_front_matter(folder: Path) -> None:
    ran_well("card", folder)
    data = ModelCard.load(folder / "README.md").data
    row = load_evaluation(folder / "evaluation.json").rows[-1]
    assert data.library_name == "kvcal" and {"kvcal", "kv-cache"} <= set(data.tags)
    found = {(one.metric_type, one.metric_name): one for one in data.eval_results}
    assert found["kl", "KL to 16 bits, nats a token"].metric_value == row.text.kl
    assert found["kl", "KL to 16 bits, nats a token"].metric_args == {"standard_error": row.text.kl_se}
    assert found["accuracy", "chain"].metric_value == row.tasks[0].accuracy
    assert data.base_model is None  # of a folder, which no hub has
    plan, evaluation = plan_and_evaluation(folder)
    named = replace(plan, model=replace(plan.model, id="owner/<b>one&two|x"))
    save_plan(named, folder / "plan.safetensors")
    rows = (*evaluation.rows[:-1], replace(row, plan_sha256=named.sha256))
    save_evaluation(replace(evaluation, rows=rows), folder / "evaluation.json")
    ran_well("card", folder)
    assert ModelCard.load(folder / "README.md").data.base_model == "owner/<b>one&two|x"
    assert "# owner/&lt;b>one&amp;two\\|x: a KV cache of" in (folder / "README.md").read_text()


def test_what_nothing_measured_is_unchecked(folder: Path) -> None:
    _, evaluation = plan_and_evaluation(folder)
    save_evaluation(replace(evaluation, rows=evaluation.rows[:-1]), folder / "evaluation.json")  # another plan's
    done = ran_well("card", folder, "--max-kl", 1, "--json")
    assert verdict(done) == "unchecked" and done.json["kl"] is None
    save_evaluation(replace(evaluation, rows=evaluation.rows[-1:]), folder / "evaluation.json")  # without fp8
    assert verdict(ran_well("card", folder, "--json")) == "accept"
    assert "fp8 (`--set" in (folder / "README.md").read_text()
    (folder / "evaluation.json").unlink()
    assert verdict(ran_well("card", folder, "--json")) == "unchecked"
    page = (folder / "README.md").read_text()
    assert "**Verdict: unchecked.**" in page and "kvcal eval plan.safetensors --model model --out ." in page
    assert "look-ups (`kvcal eval --tasks rows:4096,late:4096` measures them): unchecked" in page
    assert "fp8 (`--set 'evaluate.against=[\"fp8\"]'` measures it): unchecked" in page


def with_check(folder: Path, kl: float, top1: float, **changes: Any) -> None:
    """The folder with a check for damage that found so much."""
    path = folder / "plan.safetensors"
    check = Damage(load_plan(path).sha256, kl, 0.002, top1, 784, "some texts", (), {"fingerprint": "f"})
    save_damage(replace(check, **changes), path)


def test_a_check_for_damage_is_shown_and_accepts_no_plan(folder: Path) -> None:
    (folder / "evaluation.json").unlink()
    with_check(folder, 0.0123, 0.956)
    done = ran_well("card", folder, "--max-kl", 0.001, "--json")
    found = {one["what"]: one for one in done.json["findings"]}
    assert verdict(done) == "unchecked" and done.json["kl"] is None  # no other card is compared with it
    assert found["check for damage, 784 tokens"]["measured"] == "0.012 ± 0.002, top-1 95.6%"
    assert found["check for damage, 784 tokens"]["verdict"] == "accept"
    assert found["evaluation next to 16 bits"]["verdict"] == "unchecked" and len(found) == 2
    page = (folder / "README.md").read_text()
    head, _, rest = page.partition("## Measured")
    assert (
        "**Verdict: unchecked.** evaluation next to 16 bits: none. The check for damage is within its limits: KL"
        in head
    )
    said = "KL 0.0123 ± 0.002 nats a token, top-1 95.6% of 16 bits"
    assert f"The check for damage alone, over 784 tokens of some texts: {said}." in rest
    assert "Nothing next to this plan measured it" not in page
    with_check(folder, 0.0123, 0.956, plan_sha256="0" * 64)  # of another plan
    done = ran_well("card", folder, "--json")
    assert [one["what"] for one in done.json["findings"]] == ["evaluation next to 16 bits"]
    assert "Nothing next to this plan measured it" in (folder / "README.md").read_text()


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_a_check_that_finds_damage_refuses_the_plan(is_evaluated: bool, folder: Path) -> None:
    """At positions of no evaluation, too."""
    if not is_evaluated:
        (folder / "evaluation.json").unlink()
    with_check(folder, 0.7, 0.5)
    done = run_kvcal("card", folder, "--json")
    assert done.code == 7 and verdict(done) == "regression"
    assert "regression: check for damage, 784 tokens: 0.70" in done.err and "limit KL up to 0.5" in done.err


def test_a_plan_that_was_inspected_is_not_said_to_be_unmeasured(made: Path, folder: Path) -> None:
    """What `kvcal inspect` shows, the card shows."""
    (folder / "evaluation.json").unlink()
    damage_path(folder / "plan.safetensors").unlink(missing_ok=True)
    ran_well("inspect", folder / "plan.safetensors", "--model", made.parent / "model", "--allow-damage")
    damage = load_damage(folder / "plan.safetensors", load_plan(folder / "plan.safetensors"))
    assert damage is not None
    done = run_kvcal("card", folder, "--json")
    assert f"check for damage, {damage.num_tokens} tokens" in [one["what"] for one in done.json["findings"]]


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        (("--max-bytes", "1KB"), "infeasible: bytes: "),
        (("--kv-memory", "1KB"), "infeasible: a request of 512 tokens in vLLM: "),
        (("--max-kl", 0), "regression: max kl: "),
        (("--min-accuracy", "pairs:512=1"), "regression: min accuracy pairs:512: "),
        (("--min-accuracy", 1), "regression: min accuracy all: "),
        (("--max-kl", 0, "--max-bytes", "1KB"), "infeasible: bytes: "),
    ],
)
def test_a_plan_beyond_a_limit_fails_and_has_its_card(limit: tuple[object, ...], says: str, folder: Path) -> None:
    done = run_kvcal("card", folder, *limit, "--json")
    word = says.partition(":")[0]
    assert done.code == 7 and says in done.err and verdict(done) == word
    because = (folder / "README.md").read_text().partition(f"**Verdict: {word}.**")[2].partition("\n\n")[0]
    assert because.strip().startswith(says.partition(": ")[2]) and because.count(";") == 0


def test_a_limit_of_a_task_that_was_not_measured_is_unchecked(folder: Path) -> None:
    done = ran_well("card", folder, "--min-accuracy", "gsm8k=0.5", "--json")
    assert verdict(done) == "unchecked"
    assert {one["what"]: one["verdict"] for one in done.json["findings"]}["min accuracy gsm8k"] == "unchecked"


def test_a_worse_plan_than_that_of_the_card_before_is_a_regression(folder: Path) -> None:
    ran_well("card", folder)
    card, against = folder / "README.md", ("--against", folder / "before.md", "--json")
    figures = figures_of(card)
    shutil.copy(card, folder / "before.md")
    assert verdict(ran_well("card", folder, *against)) == "accept"  # as good as itself
    edited(card, kl=0.0, kl_error=0.0)
    done = run_kvcal("card", folder, *against)
    assert figures["kl"] > 2 * figures["kl_error"]
    assert done.code == 7 and "regression: KL of the card before" in done.err
    for errors, expected in ((2.5, "accept"), (3.5, "regression")):  # two of the difference are 2.8
        edited(card, kl=figures["kl"] - errors * figures["kl_error"])
        assert verdict(run_kvcal("card", folder, *against)) == expected
    tasks = figures["tasks"]
    edited(card, tasks=tasks | {"pairs:512": tasks["pairs:512"] | {"lost": -1e3}})
    assert "regression: nats lost in pairs:512" in run_kvcal("card", folder, *against).err
    edited(card, tasks=tasks | {"chain": tasks["chain"] | {"accuracy": 1.0, "accuracy_error": 0.0}})
    assert "regression: wrong in chain" in run_kvcal("card", folder, *against).err
    edited(card, measured_with="0" * 64)
    assert verdict(ran_well("card", folder, *against)) == "unchecked"


def test_what_is_no_card_or_of_another_model_is_refused(folder: Path) -> None:
    (folder / "README.md").write_text("# My own words\n")
    done = run_kvcal("card", folder)
    assert done.code == 5 and "is no card of kvcal" in done.err
    assert (folder / "README.md").read_text() == "# My own words\n"
    for content, says in (
        ("# My own words\n", "is no card of kvcal"),
        ("---\nkvcal: {1}\n---\n", "is no card of kvcal"),
    ):
        (folder / "before.md").write_text(content)
        (folder / "README.md").unlink(missing_ok=True)
        done = run_kvcal("card", folder, "--against", folder / "before.md")
        assert done.code == 5 and says in done.err, done.err
    ran_well("card", folder)
    done = run_kvcal("card", folder, "--against", edited(folder / "README.md", model="another"))
    assert done.code == 5 and "before.md is of another, the plan of model" in done.err
    done = run_kvcal("card", folder, "--against", edited(folder / "README.md", kl="much"))
    assert done.code == 5 and re.search("kl = 'much': Input should be a valid number", done.err)
    done = run_kvcal("card", folder, "--against", folder / "none.md")
    assert done.code == 5 and "no such card" in done.err


def test_an_evaluation_of_the_comparison_above_counts(folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "compared" / "plans" / "small" / "3")
    (place / "evaluation.json").rename(tmp_path / "compared" / "evaluation.json")
    assert verdict(ran_well("card", place, "--json")) == "accept"


def test_a_plan_at_the_very_limit_of_bytes_passes(folder: Path) -> None:
    nbytes = load_plan(folder / "plan.safetensors").predicted_bytes
    done = ran_well("card", folder, "--max-bytes", nbytes, "--json")
    assert verdict(done) == "accept" and [one["what"] for one in done.json["findings"]] == ["bytes", "damage"]


@pytest.mark.parametrize(
    ("plan", "says"), [(SHAPES["qwen3-next"].plan(2), "states"), (form_plan("lattice d=2"), "not served")]
)
def test_what_vllm_holds_besides_or_not_at_all_is_unchecked(plan: Plan, says: str) -> None:
    fits, finding = cards._in_engine(plan, 1 << 40)
    assert fits is None and finding.verdict == "unchecked" and says in finding.measured


def test_without_a_plan_the_report_is_all(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made, tmp_path / "out")
    (folder / "plan.safetensors").unlink()
    (folder / "report.html").unlink()
    done = ran_well("card", folder)
    assert "no plan lies there" in done.err and (folder / "report.html").is_file()
    assert not (folder / "README.md").exists()
