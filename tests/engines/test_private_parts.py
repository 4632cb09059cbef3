"""What plug-ins hold on to of an engine, and is not public, is on the list of docs/architecture.md, and no more.

Read from the sources: methods of the engine that are replaced, those that a class of the engine's calls, and private
attributes that no plug-in defines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = "| engine | private part | for what | public interface that would do |"
OF_TUPLES = {"_asdict", "_replace"}


def listed(engine: str) -> set[str]:
    """Names in the rows of an engine."""
    table = (ROOT / "docs/architecture.md").read_text().partition(HEAD)[2].partition("\n\n")[0]
    rows = [row.split("|") for row in table.splitlines()[2:]]
    assert all(row[3].strip() and row[4].strip() for row in rows)
    spans = [span for row in rows if row[1].strip().lower() == engine for span in re.findall(r"`([^`]+)`", row[2])]
    return {name for span in spans for name in re.findall(r"\w+", span)}


def held(tree: ast.Module, engine: str, own: set[str]) -> Iterator[str]:
    """Names of an engine's methods and attributes; ``own``: private names that plug-ins define."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {alias.name for node in imports if (node.module or "").startswith(engine) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) in imported:
                    yield target.attr
                if ast.unparse(target) == "WRAPPED":
                    texts = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
                    yield from (text.rpartition(".")[2] for text in texts if isinstance(text, str))
        elif isinstance(node, ast.ClassDef) and imported & set(map(ast.unparse, node.bases)):
            names = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            # Those that nothing here calls, but for the same method.
            used = set(re.findall(r"(?<!def )(?<!super\(\)\.)\b_[a-z]\w+", ast.unparse(tree)))
            yield from (name for name in names if re.match("_[a-z]", name) and name not in used)
        elif isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr) and node.attr not in own | OF_TUPLES:
            yield node.attr


def defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_private_parts_are_listed(engine: str) -> None:
    files = sorted((ROOT / "kvcal/engines" / engine).glob("*.py"))
    trees = [ast.parse(file.read_text()) for file in files]
    own = {name for tree in trees for name in defined(tree)}
    names = {name for tree in trees for name in held(tree, engine, own) if not name.startswith("kvcal")}
    assert len(names) > 4
    assert not names - listed(engine), sorted(names - listed(engine))
    text = "".join(file.read_text() for file in files)
    assert not {name for name in listed(engine) if not re.search(rf"\b{name}\b", text)}
