"""Tasks of the lm-evaluation-harness: two small ones from a folder, and what is read from its results."""

import functools
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_cases import KIVI_2
from cli_cases import ran_well, run_kvcal, save_llama
from evaluation_cases import make_plan
from transformers import PreTrainedTokenizerBase

from kvcal.data.reading import EvaluateSpec
from kvcal.data.tasks import problems
from kvcal.errors import UsageError
from kvcal.models.load import load
from kvcal.plan.plan import save_plan
from kvcal.stages.evaluate.harness import read_accuracy, require_tasks

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/{name}.jsonl
test_split: test
doc_to_text: "{{{{prompt}}}}"
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
GENERATION = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\nAnswer: "], max_gen_toks: 300}
filter_list:
  - name: last
    filter:
      - {function: regex, regex_pattern: "sum (\\\\d+)\\\\s"}
      - {function: take_first}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the ends of chains as choices, and with the first rows of products to be generated."""
    lm_eval_tasks = pytest.importorskip("lm_eval.tasks", reason="needs kvcal[lm-eval]")
    own_alone = functools.partialmethod(lm_eval_tasks.TaskManager.__init__, include_defaults=False)  # not thousands
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval_tasks.TaskManager, "__init__", own_alone)
        yield write_tasks(tmp_path_factory.mktemp("tasks"))


def write_tasks(folder: Path) -> Path:
    choices, sums = [], []
    for problem in problems("chain", 6, 3, max_size=20, max_hops=4):
        start = problem.reasoning.split()[1]
        prompt = f"{problem.prompt_text}{problem.reasoning}</think>\nAnswer:"
        choices.append({"prompt": prompt, "choices": [start, problem.answer], "answer": 1})
    for problem in problems("times", 6, 3, max_digits=2):
        first = problem.reasoning.split("sum ")[1].split()[0]
        sums.append({"prompt": f"<eos>{problem.prompt_text}", "answer": first})
    for name, rows, kind in (("tiny_ends", choices, CHOICE), ("tiny_sums", sums, GENERATION)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder) + kind)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A random model, with its plan in its folder."""
    folder = save_llama(tmp_path_factory.mktemp("model"), tokenizer)
    save_plan(make_plan(load(str(folder), device="cpu"), KIVI_2), folder / "plan.safetensors")
    return folder


@pytest.mark.filterwarnings("ignore")
def test_eval_poses_tasks_of_the_harness_beside_its_own(
    tasks: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    command = ["eval", model / "plan.safetensors", "--model", model, "--out", tmp_path, "--include-path", tasks]
    command += ["--samples", 1, "--seq-len", 200, "--limit", 3, "--json", "--set", "evaluate.max_new_tokens=1"]
    value = ran_well(*command, "--tasks", "chain,tiny_ends,tiny_sums", "--min-accuracy", "tiny_ends=0").json
    assert value["data"].startswith("python:docs (pool report)")  # the recipe's ledgers are the embedded model's
    for row in value["rows"]:
        own, ends, sums = row["tasks"]
        assert [task["task"] for task in row["tasks"]] == ["chain", "tiny_ends", "tiny_sums"]
        assert [task["num_problems"] for task in row["tasks"]] == [3, 3, 3]
        assert own["accuracy"] == 0.0  # a token is no answer
        assert ends["accuracy_se"] > 0 and len(ends["lengths"]) == 6 and min(ends["lengths"]) > 128
        assert ends["generated_tokens"] == 0 < sums["generated_tokens"] and len(sums["lengths"]) == 3
    assert [gate["gate"] for gate in value["gates"]] == ["min_accuracy tiny_ends"]
    wrong = run_kvcal(*command, "--tasks", "chain,nope")
    assert wrong.code == 2 and "neither kvcal nor lm-eval has a task 'nope'" in wrong.err
    assert "retrieval:TOKENS" in wrong.err


RESULTS = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "perplexity,none": 3.0,
            "exact_match,strict-match": 0.25,
            "exact_match_stderr,strict-match": 0.05,
            "exact_match,flexible-extract": 0.5,
            "exact_match_stderr,flexible-extract": "N/A",
        }
    },
    "higher_is_better": {"gsm8k": {"exact_match": True, "perplexity": False}},
}


def test_accuracy_is_read_from_the_harness() -> None:
    assert read_accuracy(RESULTS, "gsm8k", "") == (0.25, 0.05)
    assert read_accuracy(RESULTS, "gsm8k", "exact_match,flexible-extract") == (0.5, None)
    assert read_accuracy(RESULTS, "gsm8k", "exact_match") == (0.25, 0.05)
    with pytest.raises(UsageError, match="'perplexity,none' of 'gsm8k' is better when it is less"):
        read_accuracy(RESULTS, "gsm8k", "perplexity")
    with pytest.raises(UsageError, match="'gsm8k' has no metric acc; it has"):
        read_accuracy(RESULTS, "gsm8k", "acc")
    with pytest.raises(UsageError, match="no metric of which more is better"):
        read_accuracy(RESULTS, "arc", "")
    scaled = {"results": {"wmt": {"bleu,none": 23.5}}}
    with pytest.raises(UsageError, match="'bleu,none' of 'wmt' is 23.5, expected a share"):
        read_accuracy(scaled, "wmt", "bleu")


def test_the_harness_is_missed_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="lm_eval, accelerate is not installed") as error:
        require_tasks(EvaluateSpec(tasks=("lm-eval:gsm8k",)))
    assert error.value.hint is not None and "kvcal[lm-eval]" in error.value.hint
