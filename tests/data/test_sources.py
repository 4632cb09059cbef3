"""Several sources: how they are spelled, shared out, named and kept apart; and the sources that need no
network."""

import base64
import os
import random
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from test_sequences import assert_says, chat_tokenizer, marked, words, write_jsonl
from transformers import PreTrainedTokenizerBase

from kvcal.data import installed
from kvcal.data.pools import (
    PURPOSES,
    DataRecord,
    Purpose,
    calibration,
    data_inputs,
    require_unseen,
    shared_sources,
    with_calibration,
)
from kvcal.data.sequences import DataSpec, TokenDataset, load_sequences
from kvcal.data.sources import INSTALLED, Source, read_source, read_spellings
from kvcal.data.tasks import problems
from kvcal.errors import ArtifactError, UsageError

OFFLINE = ("python:code", "python:docs", "tasks")


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("tasks:chain", Source("tasks:chain")),
        ("owner/name,split=test,config=en", Source("owner/name", split="test", config="en")),
        ("b.jsonl,columns=q+a", Source("b.jsonl", columns=("q", "a"))),
        (r"C:\texts\a, b.txt,columns=q", Source(r"C:\texts\a, b.txt", ("q",))),
        ("a,b=c/d.txt", Source("a,b=c/d.txt")),
    ],
)  # fmt: skip
def test_a_source_is_spelled_with_its_options(text: str, source: Source) -> None:
    assert read_spellings([text]) == (source,)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([], ["empty", "python:docs"]),
        (["", "tasks"], ["empty"]),
        (["a.txt,split="], ["split is empty"]),
        (["a.txt,split=a,split=b"], ["split is given twice"]),
        (["a.txt,weight=2"], ["unknown option 'weight'", "columns, split, config"]),
        (["tasks:sums"], ["tasks:sums", "tasks:chain"]),
        (["python:tests"], ["python:tests", "python:docs, python:code, python:chat"]),
        (["tasks,columns=a"], ["for files and data sets"]),
        (["a.txt", "tasks", "a.txt"], ["a.txt", "twice"]),
        (["auto", "a.txt"], ["auto stands for all sources", "tasks or python:docs"]),
        (["a.jsonl,columns=a+b+c"], ["columns", "a prompt and a completion"]),
    ],
)
def test_an_impossible_source_says_what_is_allowed(texts: list[str], says: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        DataSpec(tuple(texts))
    assert_says(caught.value, says)


def test_one_file_by_two_paths_is_one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="twice"):
        read_spellings(["a.txt", str(tmp_path / "a.txt")])


def test_auto_depends_on_the_model(tokenizer: PreTrainedTokenizerBase) -> None:
    assert DataSpec().source == "auto" and DataSpec().for_model(True, has_chats=True) == DataSpec("tasks")
    assert DataSpec().for_model(False, has_chats=False) == DataSpec(("python:docs", "python:code"))
    every = ("python:docs", "python:code", "python:chat")
    assert DataSpec().for_model(False, has_chats=True) == DataSpec(every)
    assert not DataSpec().is_toy and DataSpec("tasks").is_toy
    assert DataSpec(num_samples=1).for_model(False, has_chats=True).sources == DataSpec("python:docs").sources
    assert DataSpec("a.txt").for_model(False, has_chats=True) == DataSpec("a.txt")
    known, unknown = (load_sequences(DataSpec(source, 2, 256), tokenizer) for source in ("tasks", "auto"))
    assert known.fingerprint == unknown.fingerprint and known.description == unknown.description


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
    sources = (files["one"], f"{files['pairs']},columns=q+a", "python:code")
    return load_sequences(DataSpec(sources, **{"num_samples": 8, "seq_len": 200, **size}), tokenizer, None, purpose)


def test_several_sources_take_turns(files: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
    data = mixed(files, tokenizer)
    assert data.kinds == (*("one.txt", "pairs.jsonl", "python:code") * 2, "one.txt", "pairs.jsonl")
    for tokens_T, kind in zip(data.sequences, data.kinds, strict=True):
        text = tokenizer.decode(tokens_T)
        assert ("mark 0" in text) == (kind == "one.txt") and ("is the answer" in text) == (kind == "pairs.jsonl")
    assert data.description == (
        "one.txt 3, pairs.jsonl 3, python:code 2 (pool fit): 8 sequences of at most 200 tokens, seed 0"
    )
    alone = load_sequences(DataSpec(files["one"], 3, 200), tokenizer)
    assert alone.parts == () and set(alone.digests) <= set(data.digests)


def test_a_source_that_is_too_small_is_named(files: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UsageError) as caught:
        mixed(files, tokenizer, num_samples=600, seq_len=32)
    assert_says(caught.value, ["pairs.jsonl holds", "num_samples = 600, 200 of this source,"])
    with pytest.raises(UsageError) as caught:
        mixed(files, tokenizer, num_samples=2)
    assert_says(caught.value, ["num_samples = 2 leaves no sequence for python:code", "raise num_samples"])


def test_the_provenance_names_every_source_and_the_guard_every_sequence(
    files: dict[str, str], tokenizer: PreTrainedTokenizerBase
) -> None:
    fit, report = mixed(files, tokenizer), mixed(files, tokenizer, "report")
    provenance = with_calibration({}, calibration("profile", data_inputs(fit)))
    record = provenance["calibration"]["profile"]
    counted = [(part["source"], part["num_sequences"]) for part in record["parts"]]
    assert counted == [("one.txt", 3), ("pairs.jsonl", 3), ("python:code", 2)]
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


def fitted(data: TokenDataset) -> dict[str, Any]:
    return with_calibration({}, calibration("feedback", data_inputs(data)))


def test_an_edited_copy_of_the_calibration_file_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A line at its head deals every piece to another pool, or leaves it; no sequence is as before."""
    text = words(20_000)
    (tmp_path / "a.txt").write_text(text)
    fit = load_sequences(DataSpec(str(tmp_path / "a.txt"), 16, 512), tokenizer)
    provenance = fitted(fit)
    record = provenance["calibration"]["feedback"]
    assert len(record["windows"]) == 2732 and record["windows"] == fitted(fit)["calibration"]["feedback"]["windows"]
    outcomes = set()
    for number in range(6):
        (tmp_path / "b.txt").write_text(f"version {number} of the file\n{text}")
        copy = load_sequences(DataSpec(str(tmp_path / "b.txt"), 8, 700, seed=1), tokenizer, None, "report")
        share = len(copy.windows & fit.windows) / len(copy.windows)
        assert not 0.02 < share < 0.15 and not set(copy.digests) & set(fit.digests)
        outcomes.add(share > 0.15)
        if share > 0.15:
            with pytest.raises(UsageError) as caught:
                require_unseen(provenance, copy)
            assert_says(caught.value, ["b.txt (pool report)", "that feedback used (pool fit of a.txt)", "allowed: 5%"])
            told = re.search(r"at least (\d+)%", caught.value.message)
            assert told is not None and share - 0.15 < int(told.group(1)) / 100 <= share + 0.02
        else:
            require_unseen(provenance, copy)
        older = {key: value for key, value in record.items() if key != "windows"}
        require_unseen({"calibration": {"feedback": older}}, copy)  # of a plan that has sequences alone
    assert outcomes == {True, False}


def test_the_share_of_windows_is_that_of_a_sample_less_twice_its_error() -> None:
    digests = [(1000 * number).to_bytes(4, "big") for number in range(512)]
    largest, above = 1000 * 511, {(600_000 + number).to_bytes(4, "big") for number in range(5000)}
    of_few, of_many = (
        DataRecord("fit", None, None, (), (), base64.urlsafe_b64encode(b"".join(held)).decode())
        for held in (digests[:100], digests)
    )
    others = {(1 + 1000 * number).to_bytes(4, "big") for number in range(75)}
    measured = {*digests[:25], *others}
    assert max(others) < largest.to_bytes(4, "big") and of_many.shared(measured) == pytest.approx((25 - 10) / 100)
    assert of_many.shared(measured | above) == of_many.shared(measured)  # not in the sample
    assert of_few.shared(measured | above) == pytest.approx(15 / 5100)  # all windows are kept
    assert of_many.shared({*digests[:3]}) == of_many.shared(set()) == 0.0


def test_a_prompt_that_all_records_begin_with_is_no_copy(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = "Answer in one word, without any explanation. Think of who asks, and of what they want. " * 3
    records = [{"question": prompt + words(60, 60 * i), "answer": "yes, without doubt"} for i in range(200)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    fit, report = (load_sequences(DataSpec(source, 12, 512), tokenizer, None, one) for one in ("fit", "report"))
    of_each = [{tuple(one[i : i + 20].tolist()) for i in range(len(one) - 19)} for one in fit.sequences]
    assert len(set.intersection(*of_each)) > 20
    require_unseen(fitted(fit), report)


def test_a_record_of_windows_that_is_none_is_refused(files: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
    provenance = fitted(mixed(files, tokenizer))
    for wrong in ("?", "AAAAAAA="):
        provenance["calibration"]["feedback"]["windows"] = wrong
        with pytest.raises(ArtifactError, match="provenance.calibration: feedback"):
            require_unseen(provenance, mixed(files, tokenizer, "report"))


@pytest.mark.parametrize("source", OFFLINE)
def test_pools_share_nothing_whatever_the_seed(source: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Neither a sequence, nor a long line of one."""
    seen: dict[str, set[str]] = {}
    for purpose in PURPOSES:
        data = [load_sequences(DataSpec(source, 4, 200, seed), tokenizer, None, purpose) for seed in (0, 1)]
        assert all(set(found.kinds) == {source} for found in data)
        seen[purpose] = {digest for found in data for digest in found.digests}
        assert len(seen[purpose]) > 4
    assert sum(map(len, seen.values())) == len(set.union(*seen.values()))


def only_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_packages", lambda: {installed.STDLIB: None})


def test_all_views_of_a_file_lie_in_one_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(60):
        said = f"What the module of mark {number:06d} is for, said in prose and at length. " * 20
        body = "".join(f'def step_{i}(x):\n    """{said}"""\n    return x + {i}\n\n' for i in range(2))
        (tmp_path / f"m{number}.py").write_text(f'"""{said}"""\n\n{body}')
    only_the_standard_library(monkeypatch)
    monkeypatch.setattr(installed.sysconfig, "get_path", lambda name: str(tmp_path))
    of_pools = []
    for purpose in PURPOSES:
        items = {name: list(read_source(Source(name), 0, purpose)) for name in INSTALLED}
        of_views = {name: set(re.findall(r"mark (\d{6})", str(found))) for name, found in items.items()}
        assert len({frozenset(marks) for marks in of_views.values()}) == 1 and len(of_views["python:chat"]) > 5
        of_pools.append(of_views["python:chat"])
    assert sum(map(len, of_pools)) == len(set.union(*of_pools)) == 60


def test_the_standard_library_alone_fills_every_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    only_the_standard_library(monkeypatch)
    spec, tokenizer = DataSpec(num_samples=6, seq_len=512, min_len=256).for_model(False, True), chat_tokenizer()
    found = {purpose: load_sequences(spec, tokenizer, None, purpose) for purpose in PURPOSES}
    for purpose in PURPOSES[1:]:
        require_unseen(fitted(found["fit"]), found[purpose])


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


def test_names_and_versions_are_those_of_the_metadata() -> None:
    for package in installed.distributions():
        for name in ("Name", "Version"):
            assert installed._header(package, name) == (package.metadata[name] or "")


def test_installed_text_does_not_depend_on_the_order_of_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list({one.name: one for one in installed.distributions()}.values())  # a path may have two versions of one
    monkeypatch.setattr(installed, "distributions", lambda: found)
    first = list(islice(installed.installed_texts("python:code"), 30))
    found = found.copy()
    random.Random(1).shuffle(found)
    walk = os.walk
    monkeypatch.setattr(installed, "distributions", lambda: found)
    monkeypatch.setattr(os, "walk", lambda root: ((a, b, c[::-1]) for a, b, c in walk(root)))
    assert list(islice(installed.installed_texts("python:code"), 30)) == first


def test_docstrings_are_prose_without_code() -> None:
    code = 'class A:\n    """First line.\n\n    Second."""\n    def f(self):\n        "Third."\n        return 1\n'
    assert installed._docstrings(code) == "First line.\n\nSecond.\n\nThird.\n"
    assert installed._docstrings("def broken(") == "\n"


def write_sources(folder: Path) -> dict[str, str]:
    (folder / "line.txt").write_text(marked(1500).replace("\n", " "))
    (folder / "books").mkdir()
    for i in range(3):
        (folder / "books" / f"{i}.txt").write_text(marked(600 * (i + 1), 600 * i))
    texts = [f"{i:06d} is a short document\n" * (1 + i % 5) for i in range(1000)]
    write_jsonl(folder / "texts.jsonl", [{"text": text} for text in texts])
    write_jsonl(folder / "pairs.jsonl", [{"question": f"q {i:06d}", "answer": f"{i:06d} a"} for i in range(400)])
    chats = [[{"role": "user", "content": f"{i:06d}"}, {"role": "assistant", "content": "yes"}] for i in range(400)]
    write_jsonl(folder / "chats.jsonl", [{"messages": chat} for chat in chats])
    names = ("line.txt", "books", "texts.jsonl", "pairs.jsonl", "chats.jsonl")
    return {name: str(folder / name) for name in names}


@pytest.mark.parametrize("name", ["line.txt", "books", "texts.jsonl", "pairs.jsonl", "chats.jsonl"])
def test_purposes_share_no_text_whatever_the_seed_count_and_length(name: str, tmp_path: Path) -> None:
    source, tokenizer = write_sources(tmp_path)[name], chat_tokenizer()
    seen: dict[str, set[str]] = {purpose: set() for purpose in PURPOSES}
    for purpose in PURPOSES:
        for seed, num_samples, seq_len in ((0, 8, 64), (1, 3, 400)):
            is_plain = "pairs" not in name and "chats" not in name
            spec = DataSpec(source, num_samples, seq_len if is_plain else max(seq_len, 128), seed)
            data = load_sequences(spec, tokenizer, None, purpose)
            for tokens_T in data.sequences:
                seen[purpose] |= set(re.findall(r"(?<!\d)\d{6}(?!\d)", tokenizer.decode(tokens_T)))
    assert all(len(marks) > 9 for marks in seen.values())
    assert sum(map(len, seen.values())) == len(set.union(*seen.values()))


def test_purposes_share_no_problem(tokenizer: PreTrainedTokenizerBase) -> None:
    """Two numbers of two digits: few enough for chance to repeat them."""
    seen: dict[str, set[str]] = {}
    for purpose in PURPOSES:
        data = load_sequences(DataSpec("tasks:times", 20, 512), tokenizer, None, purpose)
        opening = {tokenizer.decode(tokens_T).split("<think>")[0] for tokens_T in data.sequences}
        posed = [problem for seed in (0, 1) for problem in problems("times", 150, seed, purpose, max_digits=2)]
        seen[purpose] = {o.removeprefix("<eos>") for o in opening} | {problem.prompt for problem in posed}
    assert sum(map(len, seen.values())) == len(set.union(*seen.values()))


def test_copies_of_a_record_lie_in_one_pool(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    records = [{"question": f"question {i % 40}", "answer": "yes"} for i in range(400)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    digests = [
        set(load_sequences(DataSpec(source, 20, 64, seed=seed), tokenizer, None, purpose).digests)
        for purpose, seed in (("fit", 0), ("report", 0), ("select", 1), ("validate", 2))
    ]
    assert sum(map(len, digests)) == len(set.union(*digests))


def test_a_small_file_reaches_every_pool(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "small.txt"
    path.write_text(words(20_000)[: 60 * 1024])
    for purpose in PURPOSES:
        assert load_sequences(DataSpec(str(path), 8, 512), tokenizer, None, purpose).num_tokens == 8 * 512
    path.write_text(words(2000)[: 5 * 1024])
    for purpose in PURPOSES:
        assert load_sequences(DataSpec(str(path), 2, 128), tokenizer, None, purpose).num_tokens == 256
        with pytest.raises(UsageError) as caught:
            load_sequences(DataSpec(str(path), 16, 1024), tokenizer, None, purpose)
        assert_says(caught.value, [f"pool '{purpose}'", "64 records", "65536 tokens", "--samples"])
        assert ("of its own" in str(caught.value.hint)) == (purpose == "report")
