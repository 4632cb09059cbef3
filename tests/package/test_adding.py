"""The code of docs/adding.md runs as it is written: a new score chooses channels."""

import re
from pathlib import Path

import pytest
import torch

from kvcal.pages import scores
from kvcal.plan.page_format import Boost, Format, Tier

PAGE = (Path(__file__).parents[2] / "docs" / "adding.md").read_text(encoding="utf-8")
(SCORE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_a_new_score_chooses_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "SCORES", scores.SCORES)
    for name in ("peak", "query_peak"):
        monkeypatch.setitem(scores.SCORES, name, scores.SCORES["random"])  # undone when the test ends
    exec(SCORE, vars(scores) | {})
    fmt = Format(2, "channel", boost=Boost("peak", (Tier(4, 0.125),)))
    assert fmt.label == "2 channel g128 +12.5%@4 peak" and not fmt.needs_queries
    assert Format(2, "channel", boost=Boost("query_peak", (Tier(4, 0.125),))).needs_queries
    keys = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    keys[5, 3] = 40.0
    assert scores.channel_scores("peak", keys).argmax() == 3
