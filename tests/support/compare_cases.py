"""Shared by the comparison's tests: a recipe that allocates a budget, and one that does not."""

from pathlib import Path

from cli_cases import RECIPE

from kvcal.stages.compare import Comparison, Entry

FIXED = (
    "[formats]\nk = { num_bits = 4, axis = 'channel', group_size = 64 }\n"
    "v = { num_bits = 4, axis = 'token', group_size = 32 }\n"
)
BUDGETED = RECIPE.replace("batch = 2\n", 'batch = 2\nobjective = "sensitivity"\n')
BASELINE_NAMES = ["16-bit", "kivi-2", "kivi-4"]


def write_recipes(folder: Path) -> tuple[str, str]:
    """Paths of small.toml, which allocates a budget, and of fixed.toml."""
    for name, content in (("small", BUDGETED), ("fixed", FIXED)):
        (folder / f"{name}.toml").write_text(content)
    return str(folder / "small.toml"), str(folder / "fixed.toml")


def by_name(comparison: Comparison) -> dict[str, Entry]:
    return {entry.name: entry for entry in comparison.entries}
