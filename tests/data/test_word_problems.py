"""Generated word problems: what they say of themselves is true."""

from __future__ import annotations

import random
import re

from kvcal.data.word_problems import word_problem


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
