"""The argument that hands a cache to a forward or to ``generate``: "cache" since transformers 5.24, before it
"past_key_values".

transformers renames the old one, with a warning, until 5.40. Code of a checkpoint's own may know the old name alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

NAMES = ("cache", "past_key_values")


def cache_argument(module: nn.Module) -> str | None:
    """The name in the signature of the module's forward; None where it takes no cache."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in NAMES if name in parameters), None)


def with_cache(module: nn.Module, cache: object) -> dict[str, Any]:
    """The argument of the module's forward, or of its ``generate``, that hands ``cache`` over."""
    return {cache_argument(module) or NAMES[0]: cache}


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """The cache among a forward's arguments; None where there is none."""
    return next((kwargs[name] for name in NAMES if kwargs.get(name) is not None), None)
