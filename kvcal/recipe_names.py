"""Names of the recipes that come with kvcal, found without reading one: shells complete them."""

from __future__ import annotations

from pathlib import Path

# In the wheel, and in a clone.
RECIPE_FOLDERS = (Path(__file__).parent / "recipes", Path(__file__).parent.parent / "recipes")
ABLATIONS = "ablations"


def recipe_names() -> tuple[str, ...]:
    """All of them, ablations included."""
    return tuple(sorted({*_names("*.toml"), *ablation_names()}))


def ablation_names() -> tuple[str, ...]:
    """Names of those that vary a system for comparison alone."""
    return _names(f"{ABLATIONS}/*.toml")


def _names(pattern: str) -> tuple[str, ...]:
    return tuple(sorted({path.stem for folder in RECIPE_FOLDERS for path in folder.glob(pattern)}))
