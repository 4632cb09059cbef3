"""Generated conversations and word problems: what they say of themselves is true."""

from __future__ import annotations

import random
import re

from kvcal.data.dialogues import dialogue, word_problem


def test_a_dialogue_recalls_what_was_said() -> None:
    num_recalled = 0
    for seed in range(40):
        messages = dialogue(random.Random(seed))
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        for i, message in enumerate(messages):
            if recalled := re.match(r"You told me: (.*)\.", message["content"]):
                assert any(recalled.group(1) in said["content"] for said in messages[: i - 1] if said["role"] == "user")
                num_recalled += 1
    assert num_recalled > 50


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
