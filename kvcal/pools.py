"""Pools of data by purpose: what a plan is fitted on, chosen on and reported on share no text.

Every source is dealt to the pools before any window is cut, item by item: a record, a chat, a generated problem or a
document of a table by a hash of its content, a piece of a text file in turn. So pools stay disjoint whatever the seed,
the process, the number of samples and their length, and two copies of an item lie in one pool.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, get_args

# fit: profile, λ, predictors. select: a search's candidates, tuning. validate: a final choice. report: evaluation.
Purpose = Literal["fit", "select", "validate", "report"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


def pool_of(content: Any, turn: int = 0) -> Purpose:
    """The pool of an item by its content (JSON), or that of the item ``turn`` places behind it."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).digest()
    return PURPOSES[(digest[0] + turn) % len(PURPOSES)]
