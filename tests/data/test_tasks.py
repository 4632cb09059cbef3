"""The task generator: the training distribution exactly, right by an independent interpreter, and bounded.
Readings: answers can be found in the text before."""

import hashlib
import json
import random
import re

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from kvcal.data import reading
from kvcal.data.lookup_tasks import FORMS
from kvcal.data.reading import ASKED, LINES, NUM_KEYS, READINGS, is_reading, readings
from kvcal.data.sources import Piece
from kvcal.data.tasks import TASKS, Problem, chain, extract_answer, ledger, mixture, problems, times
from kvcal.data.word_problems import word_problem
from kvcal.errors import UsageError

# sha256 over 50 documents from random.Random(0), computed with the generator that made the training data.
GOLDEN = {
    "ledger": "0f05e2fe4dfb30ddf8f1da37f9477c9629fd5e3209f6e3dfb9024f2f4fc27bc1",
    "chain": "3e2c2c86924e0abdca192ad3e0041b6a6f88e01d9f8f16f5919c30e412f024dc",
    "times": "bb550840db33ad6d2cd4ddb487bcfb6e756c7ef972ffbf77afd44f60f1c89a15",
    "mixture": "5c96e38b281c6e0c7f2ac67dff02a3d88ceace1323be1e9b1ee36b8a9da2ed01",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_documents_are_those_of_the_training_data(name: str) -> None:
    draw = {**TASKS, "mixture": mixture}[name]
    rng, digest = random.Random(0), hashlib.sha256()
    for _ in range(50):
        digest.update(draw(rng).text.encode())
    assert digest.hexdigest() == GOLDEN[name]


def solve(problem: Problem) -> str:
    """The answer from the prompt alone, by other means than the generator's."""
    if problem.task == "times":
        a, b = map(int, re.findall(r"\d+", problem.prompt))
        return str(a * b)
    if problem.task == "chain":
        target = dict(re.findall(r"(\w+) to (\w+)", problem.prompt))
        at, hops = re.findall(r"Question: (\w+), (\d+) hops", problem.prompt)[0]
        for _ in range(int(hops)):
            at = target[at]
        return at
    opening, *lines, question = problem.prompt.splitlines()
    balance = {name: int(value) for name, value in re.findall(r"(\w+) (\d+)", opening)}
    for line in lines:
        action, _, remainder = line.split(". ", 1)[1].partition(", ")
        match action.split():
            case [a, "pays", b, x]:
                balance[a], balance[b] = balance[a] - int(x), balance[b] + int(x)
            case [a, "earns", x]:
                balance[a] += int(x)
            case [a, "copies", b]:
                balance[a] = balance[b]
            case [a, "halves"]:
                balance[a] //= 2
        if remainder:
            balance[remainder.split()[0]] %= 100
    return str(balance[re.findall(r"Question: (\w+)\?", question)[0]])


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right(task: str) -> None:
    for problem in problems(task, 100, seed=1):
        assert problem.answer == solve(problem)
        assert extract_answer(problem.completion) == extract_answer(problem.text) == problem.answer


def test_an_arithmetic_step_in_the_reasoning_is_right() -> None:
    num_checked = 0
    for task in ("ledger", "times"):
        for problem in problems(task, 50, seed=2):
            for left, right in re.findall(r"(?<![\d=])(\d+(?:[-+/x]\d+)+)=(\d+)", problem.reasoning):
                assert eval(left.replace("x", "*").replace("/", "//")) == int(right), (left, right)
                num_checked += 1
    assert num_checked > 1000


def test_limits_bound_the_problems() -> None:
    for problem in problems("ledger", 200, 0, max_steps=9):
        assert 6 <= problem.reasoning.count("\n") <= 9
    for problem in problems("chain", 200, 0, max_size=25, max_hops=6):
        assert 20 <= problem.prompt.count(" to ") <= 25
        assert 4 <= problem.reasoning.count("\n") <= 6
    for problem in problems("times", 200, 0, max_digits=3):
        assert all(2 <= len(number) <= 3 for number in re.findall(r"\d+", problem.prompt))


def test_the_default_limits_are_the_training_ones() -> None:
    for generator in (ledger, chain, times):
        one = problems(generator.__name__, 1, seed=7)[0]
        rng = random.Random(f"report:{one.task}:7")
        assert one in [generator(rng) for _ in range(40)]


def test_a_shorter_list_is_a_prefix_and_seeds_differ() -> None:
    longer = problems("ledger", 8, seed=0)
    assert problems("ledger", 3, seed=0) == longer[:3]
    assert not set(longer) & set(problems("ledger", 8, seed=1))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1. a\n</think>\nAnswer: 42\n", "42"), ("</think>\nAnswer: bobo", "bobo"), ("Answer: 1\nAnswer: 2\n", "1"),
        ("Answer: 7  \r\n", "7"), ("no answer", None), ("Answer:\n5", None), ("the Answer: 5", None),
        ("Answer: 5 or 6\n", None), ("", None),
    ],
)  # fmt: skip
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("num_tokens", [512, 1500])
def test_every_code_that_is_asked_for_is_told_once_before(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
    texts = readings(f"retrieval:{num_tokens}", 2 * ASKED, 1, tokenizer)
    assert len(texts) == 2 and not torch.equal(texts[0].tokens_T, texts[1].tokens_T)
    for text in texts:
        assert text.tokens_T.shape == (num_tokens,) and len(text.answers) == ASKED
        whole = tokenizer.decode(text.tokens_T)
        told = dict(re.findall(r"The code of the (\w+ \w+) is (\d+)\.", whole))
        assert len(told) == NUM_KEYS
        for start, stop in text.answers:
            asked = re.findall(r"Answer: the code of the (\w+ \w+) is$", tokenizer.decode(text.tokens_T[:start]))
            assert tokenizer.decode(text.tokens_T[start:stop]).strip() == told[asked[0]]


def test_lines_to_complete_are_whole_lines_of_the_last_half(tokenizer: PreTrainedTokenizerBase) -> None:
    (text,) = readings("completion:600", LINES, 1, tokenizer)
    lines = {line.strip() for line in tokenizer.decode(text.tokens_T).splitlines()}
    assert text.tokens_T.shape == (600,) and len(set(text.answers)) == LINES
    for start, stop in text.answers:
        assert start >= 300 and tokenizer.decode(text.tokens_T[start:stop]).strip() in lines


def told_of(name: str, before: str, after: str) -> str:
    """A pattern, by what stands right before an answer, of what the text says elsewhere and the answer repeats."""
    if name in ("late", "hops"):
        key = re.findall(r"[Tt]he ([\w ]+?) is in box $" if name == "late" else r"of (\w+ \w\.) is in box $", before)[
            -1
        ]
        if name == "hops":
            cares = rf"{key} looks after the (.+?)\.|The (.+?) is fed by {key}|It is {key} who walks the (.+?)\."
            (key,) = filter(None, re.findall(cares, before)[0])
        places = "sleeps in box {}\\.", "in box {}\\.", "into box {}\\."
        told = [f"{key} {place.format(after)}" for place in places]
        return "|".join([*told, rf"ox {after} belongs to the {key}\.", rf"ox {after} is home to the {key}\."])
    if name == "pairs":
        return re.escape(before.rsplit("\n", 1)[1] + after) + "\n"
    if name == "copies":
        return re.escape(after)
    values = json.loads(after)["arguments"] if name == "calls" else dict(enumerate(after.split(",")))
    return "|".join(re.escape(str(value)) for value in values.values())


@pytest.mark.parametrize("name", FORMS)
def test_what_is_looked_up_was_told_before(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = readings(f"{name}:2048", 12, 1, tokenizer)
    assert sum(len(text.answers) for text in texts) >= 12
    for text in texts:
        assert text.tokens_T.shape == (2048,) and text.answers[-1][1] > 2000
        whole = tokenizer.decode(text.tokens_T)
        for start, stop in text.answers[:: max(1, len(text.answers) // 5)]:
            before, answer = (tokenizer.decode(part) for part in (text.tokens_T[:start], text.tokens_T[start:stop]))
            assert whole.startswith(before + answer)
            pad = " " if answer.startswith(" ") else ""
            assert re.search(told_of(name, before + pad, answer.strip()), before), (name, answer)


def test_too_few_tokens_for_two_facts_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UsageError, match=r"200 tokens hold \d facts of late"):
        next(READINGS["late"](tokenizer, 200, 1, "report"))


def test_purposes_and_seeds_share_no_text_and_a_repetition_gives_the_same(tokenizer: PreTrainedTokenizerBase) -> None:
    def of(seed: int, purpose: str) -> list[bytes]:
        tasks = (f"{name}:512" for name in ("retrieval", "completion", "rows", "copies"))
        return [one.tokens_T.numpy().tobytes() for task in tasks for one in readings(task, 8, seed, tokenizer, purpose)]

    assert of(1, "report") == of(1, "report")
    assert not set(of(1, "report")) & set(of(1, "select"))


def test_more_files_than_there_are_is_an_error(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "read_source", lambda *_: iter([Piece("print(1)\n" * 600)]))
    with pytest.raises(UsageError, match=r"hold 0 such files, with 0 of 1 problems"):
        readings("completion:200000", 1, 1, tokenizer)


@pytest.mark.parametrize(
    ("task", "expected"),
    [("retrieval:4096", True), ("completion:512", True), ("retrieval:511", False), ("retrieval", False),
     ("retrieval:", False), ("ledger:512", False), ("retrieval:4e3", False), ("retrieval:-1", False)],
)  # fmt: skip
def test_a_task_has_a_name_and_a_length(task: str, expected: bool) -> None:
    assert is_reading(task) == expected


def test_the_solution_of_a_word_problem_is_right() -> None:
    num_checked = 0
    for seed in range(200):
        text = word_problem(random.Random(seed))
        for left, right in re.findall(r"(\d+ [-+*/] \d+) = (\d+)", text):
            assert eval(left) == int(right)
            num_checked += 1
        last = re.findall(r"(\d+)", text.rsplit("\nAnswer: ", 1)[0].rsplit("\n", 1)[1])
        assert text.rstrip().endswith(f"Answer: {last[-1]}")
    assert num_checked > 800
