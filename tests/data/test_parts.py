"""Several sources: how they are spelled, shared out, named and kept apart; and the sources that need no network."""

from __future__ import annotations

import os
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from test_data import assert_says, marked, write_jsonl
from transformers import PreTrainedTokenizerBase

from kvcal.data import installed
from kvcal.data.parts import KINDS, PUBLIC, Part, apportion, interleaved, read_parts
from kvcal.data.pools import (
    PURPOSES,
    Purpose,
    calibration,
    data_inputs,
    require_unseen,
    shared_sources,
    with_calibration,
)
from kvcal.data.sequences import DataSpec, TokenDataset, load_sequences
from kvcal.errors import UsageError

OFFLINE = ("python:code", "python:docs", "tasks")
OFFLINE_KINDS = dict(zip(OFFLINE, ("code", "prose", "reasoning"), strict=True))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("tasks:chain", Part("tasks:chain")),
        ("my.jsonl,weight=2,kind=dialogue", Part("my.jsonl", 2.0, "dialogue")),
        ("owner/name,split=test,config=en", Part("owner/name", split="test", config="en")),
        ("b.jsonl,columns=q+a,weight=3", Part("b.jsonl", 3.0, columns=("q", "a"))),
        (r"C:\texts\a, b.txt,weight=.5", Part(r"C:\texts\a, b.txt", 0.5)),
        ("a,b=c/d.txt", Part("a,b=c/d.txt")),
        ("tasks,kind=math", Part("tasks", kind="math")),
    ],
)  # fmt: skip
def test_a_source_is_spelled_with_its_options(text: str, part: Part) -> None:
    assert read_parts([text]) == (part,)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([], ["empty", "python:docs"]),
        (["", "tasks"], ["empty"]),
        (["a.txt,weight=0"], ["weight = 0", "1e-6 to 1e6"]),
        (["a.txt,weight=-1"], ["weight = -1", "1e-6 to 1e6"]),
        (["a.txt,weight=inf"], ["weight = inf"]),
        (["a.txt,weight=1e308"], ["weight = 1e308", "1e-6 to 1e6"]),
        (["a.txt,weight=two"], ["weight = two"]),
        (["a.txt,weight="], ["weight is empty"]),
        (["a.txt,weight=1,weight=2"], ["weight is given twice"]),
        (["a.txt,wight=2"], ["unknown option 'wight'", "weight, kind, columns, split, config"]),
        (["a.txt,kind=poetry"], ["unknown kind 'poetry'", "prose, math, code, dialogue, reasoning"]),
        (["tasks:sums"], ["tasks:sums", "tasks:chain"]),
        (["python:tests"], ["python:tests", "python:docs, python:code"]),
        (["tasks,columns=a"], ["for files and data sets"]),
        (["a.txt", "tasks", "a.txt,weight=2"], ["a.txt", "twice"]),
        (["auto", "a.txt"], ["auto stands for all sources", "tasks or python:docs"]),
        (["a.jsonl,columns=a+b+c"], ["columns", "a prompt and a completion"]),
    ],
)
def test_an_impossible_source_says_what_is_allowed(texts: list[str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        DataSpec(tuple(texts))
    assert_says(caught.value, words)


def test_columns_belong_to_one_source() -> None:
    assert DataSpec("a.jsonl", columns=("q",)).parts == DataSpec("a.jsonl,columns=q").parts
    for given in ({"columns": ("q",)}, {"split": "test"}, {"config": "en"}):
        with pytest.raises(UsageError) as caught:
            DataSpec(("a.jsonl", "b.jsonl"), **given)  # type: ignore[arg-type]
        assert_says(caught.value, [next(iter(given)), "beside 2 sources"])


def test_one_file_by_two_paths_is_one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="twice"):
        read_parts(["a.txt", str(tmp_path / "a.txt")])


def test_public_sets_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {part.kind for part in PUBLIC.values()} == set(KINDS)
    (part,) = read_parts(["gsm8k,weight=3,split=test"])
    assert part == Part("openai/gsm8k", 3.0, "math", ("question", "answer"), "test", "main")
    (tmp_path / "gsm8k").mkdir()
    assert read_parts(["gsm8k"]) == (Part("gsm8k"),)  # a path comes first


def test_auto_depends_on_the_model(tokenizer: PreTrainedTokenizerBase) -> None:
    assert DataSpec().source == "auto" and DataSpec().for_model(True) == DataSpec("tasks")
    assert (
        DataSpec().for_model(False) == DataSpec(("python:docs", "python:code"))
        and not DataSpec().is_toy
        and DataSpec("tasks").is_toy
    )
    assert DataSpec(num_samples=1).for_model(False).parts == DataSpec("python:docs").parts
    assert DataSpec("a.txt").for_model(False) == DataSpec("a.txt")
    known, unknown = (load_sequences(DataSpec(source, 2, 256), tokenizer) for source in ("tasks", "auto"))
    assert known.fingerprint == unknown.fingerprint and known.description == unknown.description


def test_sequences_are_apportioned_by_weight() -> None:
    def counts(weights: list[float], n: int) -> list[int]:
        return apportion([Part(f"{i}", weight) for i, weight in enumerate(weights)], n)

    assert counts([1, 1, 1], 8) == [3, 3, 2]
    assert counts([2, 1, 1], 8) == [4, 2, 2]
    assert counts([0.6, 0.25, 0.15], 10) == [6, 3, 1]  # 6, 2.5, 1.5: of equal remainders the first
    for n in range(40, 80):
        weights = [random.Random(n).uniform(0.5, 3) for _ in range(5)]
        found = counts(weights, n)
        assert sum(found) == n
        assert all(abs(count - n * w / sum(weights)) < 1 for count, w in zip(found, weights, strict=True))
    with pytest.raises(UsageError) as caught:
        apportion([Part("a", 9.0), Part("b", 1.0)], 2)
    assert_says(caught.value, ["num_samples = 2", "no sequence for b", "raise num_samples"])


def test_the_first_sequences_are_shared_out_as_all_are() -> None:
    assert interleaved([2, 4]) == [(1, 0), (0, 0), (1, 1), (1, 2), (0, 1), (1, 3)]
    counts = [8, 4, 4]
    order = interleaved(counts)
    assert sorted(order) == [(part, i) for part, count in enumerate(counts) for i in range(count)]
    for n in range(1, 17):
        first = [sum(part == p for part, _ in order[:n]) for p in range(3)]
        assert all(abs(found - n * count / 16) <= 1 for found, count in zip(first, counts, strict=True))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "one.txt").write_text(marked(4000))
    pairs = [{"q": f"q {i:06d}", "a": f"{i:06d} is the answer, said at some length"} for i in range(400)]
    return {"one": str(folder / "one.txt"), "pairs": write_jsonl(folder / "pairs.jsonl", pairs)}


def mixed(
    files: dict[str, str], tokenizer: PreTrainedTokenizerBase, purpose: Purpose = "fit", **size: Any
) -> TokenDataset:
    """A text file, pairs with columns of their own, and code."""
    sources = (f"{files['one']},weight=2", f"{files['pairs']},columns=q+a,kind=math", "python:code")
    return load_sequences(DataSpec(sources, **{"num_samples": 8, "seq_len": 200, **size}), tokenizer, None, purpose)


def test_several_sources_keep_their_kinds_and_turns(files: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
    data = mixed(files, tokenizer)
    assert sorted(data.kinds) == ["code"] * 2 + ["math"] * 2 + ["one.txt"] * 4 and set(data.kinds[:4]) == set(
        data.kinds
    )
    for tokens_T, kind in zip(data.sequences, data.kinds, strict=True):
        text = tokenizer.decode(tokens_T)
        assert ("mark 0" in text) == (kind == "one.txt") and ("is the answer" in text) == (kind == "math")
    assert data.description == (
        "one.txt 4, pairs.jsonl 2, python:code 2 (pool fit): 8 sequences of at most 200 tokens, seed 0"
    )
    assert [(part.source, part.num_sequences) for part in data.parts] == [
        ("one.txt", 4), ("pairs.jsonl", 2), ("python:code", 2),
    ]  # fmt: skip
    alone = load_sequences(DataSpec(files["one"], 4, 200), tokenizer)
    assert alone.parts == () and set(alone.digests) <= set(data.digests)
    weights = (f"{files['one']},weight=1", f"{files['pairs']},columns=q+a", "python:code")
    assert load_sequences(DataSpec(weights, 8, 200), tokenizer).fingerprint != data.fingerprint


def test_a_part_that_is_too_small_is_named(files: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UsageError) as caught:
        mixed(files, tokenizer, num_samples=900, seq_len=32)
    assert_says(caught.value, ["pairs.jsonl holds", "num_samples = 900, 225 of this source,"])


def test_the_provenance_names_every_source_and_the_guard_every_sequence(
    files: dict[str, str], tokenizer: PreTrainedTokenizerBase
) -> None:
    fit, report = mixed(files, tokenizer), mixed(files, tokenizer, "report")
    provenance = with_calibration({}, calibration("profile", data_inputs(fit)))
    record = provenance["calibration"]["profile"]
    assert [part["source"] for part in record["parts"]] == ["one.txt", "pairs.jsonl", "python:code"]
    assert "/" not in str(record) and len(record["sequences"]) == 8
    require_unseen(provenance, report)
    require_unseen(provenance, fit)  # the same pool
    code = load_sequences(DataSpec("python:code", 2, 64), tokenizer, None, "report")
    other = load_sequences(DataSpec("tasks", 2, 64), tokenizer, None, "report")
    assert shared_sources(provenance, report) == shared_sources(provenance, code) == ["profile"]
    assert shared_sources(provenance, other) == []
    alone = with_calibration({}, calibration("profile", data_inputs(code)))
    assert "parts" not in alone["calibration"]["profile"] and shared_sources(alone, fit) == ["profile"]


def test_pools_that_meet_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Records that are equal up to the cut, in one of two sources."""
    source = write_jsonl(tmp_path / "same.jsonl", [{"text": "again and again " * 99 + str(i)} for i in range(80)])
    fit, report = (
        load_sequences(DataSpec((source, "tasks"), 4, 64), tokenizer, None, purpose) for purpose in ("fit", "report")
    )
    provenance = with_calibration({}, calibration("profile", data_inputs(fit)))
    with pytest.raises(UsageError) as caught:
        require_unseen(provenance, report)
    assert_says(caught.value, ["of 4 sequences", "same.jsonl 2, tasks 2", "profile"])


@pytest.mark.parametrize("source", OFFLINE)
def test_pools_share_nothing_whatever_the_seed(source: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Neither a sequence, nor a long line of one."""
    seen: dict[str, set[str]] = {}
    for purpose in PURPOSES:
        data = [load_sequences(DataSpec(source, 4, 200, seed), tokenizer, None, purpose) for seed in (0, 1)]
        assert all(set(found.kinds) == {OFFLINE_KINDS[source]} for found in data)
        seen[purpose] = {digest for found in data for digest in found.digests}
        assert len(seen[purpose]) > 4
    assert sum(map(len, seen.values())) == len(set.union(*seen.values()))


def test_packages_take_turns_and_are_read_only_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    text = installed._text

    def counting(path: Path) -> str | None:
        read.append(path)
        return text(path)

    monkeypatch.setattr(installed, "_text", counting)
    for source in ("python:code", "python:docs"):
        read.clear()
        found = list(islice(installed.installed_texts(source), 12))
        assert len(found) == len(set(found)) == 12 and len(read) < 200
        assert all(installed.MIN_CHARS <= len(text) <= installed.MAX_CHARS for text in found)
    code = list(islice(installed.installed_texts("python:code"), 12))
    assert sum("def " in text or "import " in text for text in code) >= 9
    packages = {
        path.relative_to(folder).parts[0] for path in read for folder in path.parents if folder.name[-8:] == "packages"
    }
    assert len(packages) > 4


def test_installed_text_does_not_depend_on_the_order_of_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    first = list(islice(installed.installed_texts("python:code"), 30))
    found = list(installed.distributions())
    random.Random(1).shuffle(found)
    walk = os.walk
    monkeypatch.setattr(installed, "distributions", lambda: found)
    monkeypatch.setattr(os, "walk", lambda root: ((a, b, c[::-1]) for a, b, c in walk(root)))
    assert list(islice(installed.installed_texts("python:code"), 30)) == first


def test_docstrings_are_prose_without_code() -> None:
    code = 'class A:\n    """First line.\n\n    Second."""\n    def f(self):\n        "Third."\n        return 1\n'
    assert installed._docstrings(code) == "First line.\n\nSecond.\n\nThird.\n"
    assert installed._docstrings("def broken(") is None
