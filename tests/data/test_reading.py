"""kvcal.data.reading: answers are where they are said to be, and can be found in the text before."""

from __future__ import annotations

import random
import re

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from kvcal.data import reading
from kvcal.data.reading import ASKED, LINES, NUM_KEYS, is_reading, readings, word_problem
from kvcal.data.sources import Piece
from kvcal.errors import UsageError


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


def test_purposes_and_seeds_share_no_text_and_a_repetition_gives_the_same(tokenizer: PreTrainedTokenizerBase) -> None:
    def of(seed: int, purpose: str) -> list[bytes]:
        tasks = (f"{name}:512" for name in ("retrieval", "completion"))
        return [one.tokens_T.numpy().tobytes() for task in tasks for one in readings(task, 8, seed, tokenizer, purpose)]

    assert of(1, "report") == of(1, "report")
    assert not set(of(1, "report")) & set(of(1, "select"))


def test_more_files_than_there_are_is_an_error(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "read_source", lambda *_: iter([Piece("print(1)\n" * 600)]))
    with pytest.raises(UsageError, match=r"hold 0 files so long, 1 were asked for"):
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
