"""Text of the installed Python packages and the standard library, read at run time: code, documentation and
chats.

Every machine that runs kvcal has some, nobody's text is committed for it, and it needs no network. Other
versions of packages give other texts, and so another fingerprint. Files come in rounds, one of each package a
round, so that no package is the whole sample; a package's order is that of hashes of its name and paths, the
same on every machine and whatever a folder's listing order. A package is not looked into before its turn, nor
a file read.

The three sources are views of the same files. So a file is dealt to a pool (kvcal.data.pools) by its own
text: what is said in its code, its docstrings and the conversations on them lies in one pool, whatever the
source.

python:code: files of 2 to 200 thousand characters. python:docs: a package's description, its .rst, .md and
.txt files, and the docstrings of a module, joined. python:chat: a conversation a module, on what its
functions and classes are for and how they are written, after their docstrings.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import sysconfig
import textwrap
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import TypeVar

from kvcal.data.pools import Purpose, pool_of

MIN_CHARS, MAX_CHARS = 2_000, 200_000
MIN_DOC_CHARS, MAX_CHAT_CHARS = 80, 1 << 16  # of a docstring that a chat is about, and of the whole
ROLES = ("user", "assistant")
STDLIB = "python"
_OUTSIDE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
_NO_PROSE = re.compile(r"licen|copying|notice|authors|require|top_level|entry_points|sources|credits", re.IGNORECASE)
_PROSE_SHARE = 0.75  # of letters and spaces in what is read as prose
_Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Messages = list[dict[str, str]]
T = TypeVar("T")
Pool = Purpose | None  # None: all of them


def installed_texts(source: str, pool: Pool = None) -> Iterator[str]:
    """Documents of "python:code" or "python:docs"."""
    return _in_turn(_code if source == "python:code" else _docs, pool)


def installed_chats(pool: Pool = None) -> Iterator[Messages]:
    """Conversations of "python:chat": the user's and the assistant's messages in turn."""
    return _in_turn(_chats, pool)


def _in_turn(read: Callable[[str, Distribution | None, Pool], Iterator[T]], pool: Pool) -> Iterator[T]:
    packages = sorted(_packages().items(), key=lambda item: _hash(item[0]))
    waiting = deque(read(name, package, pool) for name, package in packages)
    while waiting:
        package = waiting.popleft()
        item = next(package, None)
        if item is not None:
            waiting.append(package)
            yield item


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def installed_sha256() -> str:
    """Of the packages' names and versions, and Python's."""
    packages = _packages().items()
    versions = [f"{name}=={'' if package is None else _header(package, 'Version')}" for name, package in packages]
    return hashlib.sha256(";".join([platform.python_version(), *sorted(versions)]).encode()).hexdigest()


def _packages() -> dict[str, Distribution | None]:
    """By normalized name; of two with one name, the one that is imported. None stands for the standard
    library."""
    found: dict[str, Distribution | None] = {STDLIB: None}
    for package in distributions():
        name = _header(package, "Name")
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), package)
    return found


def _header(package: Distribution, name: str) -> str:
    """A line of the package's metadata, empty where it is missing. ``Distribution.metadata`` parses all of them, and
    the description, each time: 4 ms a package."""
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
    found = re.search(rf"^{name}:(.*)$", text.partition("\n\n")[0], re.MULTILINE)
    return "" if found is None else found[1].strip()


def _code(name: str, package: Distribution | None, pool: Pool) -> Iterator[str]:
    return (text for _, text in _texts(name, package, (".py",), pool))


def _docs(name: str, package: Distribution | None, pool: Pool) -> Iterator[str]:
    description = "" if package is None else (package.read_text("METADATA") or "").partition("\n\n")[2]
    if _is_prose(description) and pool in (None, pool_of(description)):
        yield description[:MAX_CHARS]
    for path, text in _texts(name, package, (".rst", ".md", ".txt", ".py"), pool):
        if path.suffix != ".py" and _NO_PROSE.search(path.name):
            continue
        prose = _docstrings(text) if path.suffix == ".py" else text
        if _is_prose(prose):
            yield prose


def _chats(name: str, package: Distribution | None, pool: Pool) -> Iterator[Messages]:
    for text in _code(name, package, pool):
        lines, messages, num_chars = text.split("\n"), Messages(), 0
        for node, doc in _documented(text):
            if isinstance(node, ast.Module) or len(doc) < MIN_DOC_CHARS or num_chars > MAX_CHAT_CHARS:
                continue
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            summary, head = doc.partition("\n")[0], code.partition("\n")[0].rstrip(":")
            turn = (f"Write `{node.name}`. {summary}", f"```python\n{code}\n```")
            if len(messages) % 4 == 0:
                turn = (f"What is `{head}` for?", doc)
            messages += [{"role": role, "content": said} for role, said in zip(ROLES, turn, strict=True)]
            num_chars += sum(map(len, turn))
        if messages:
            yield messages


def _files(name: str, package: Distribution | None, suffixes: tuple[str, ...]) -> list[Path]:
    """Files of a package, in the order of a hash of its name and their paths."""
    if package is None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = {path.relative_to(root).as_posix(): path for path in _walk(root, suffixes)}
    else:
        files = [path for path in package.files or () if path.suffix in suffixes]
        paths = {path.as_posix(): Path(str(package.locate_file(path))) for path in files}
    return [paths[key] for key in sorted(paths, key=lambda key: _hash(f"{name}/{key}"))]


def _walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _OUTSIDE]
        yield from (Path(folder) / name for name in names if name.endswith(suffixes))


def _texts(
    name: str, package: Distribution | None, suffixes: tuple[str, ...], pool: Pool
) -> Iterator[tuple[Path, str]]:
    """Those files of a package that are in a pool, with their texts."""
    for path in _files(name, package, suffixes):
        text = _text(path)
        if text is not None and pool in (None, pool_of(text)):
            yield path, text


def _text(path: Path) -> str | None:
    """A file's text, None where it cannot be read, is no UTF-8, or is too short or too long."""
    try:
        if not MIN_CHARS <= path.stat().st_size <= 4 * MAX_CHARS:
            return None
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if MIN_CHARS <= len(text) <= MAX_CHARS else None


def _docstrings(text: str) -> str:
    return "\n\n".join(doc for _, doc in _documented(text)) + "\n"


def _documented(text: str) -> list[tuple[_Node, str]]:
    """A module, its classes and functions, and their docstrings; none where it is no Python of this
    version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like in others' code
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, _Node)]
    return [(node, doc) for node in nodes if (doc := ast.get_docstring(node))]


def _is_prose(text: str) -> bool:
    if len(text) < MIN_CHARS:
        return False
    return sum(char.isalpha() or char == " " for char in text) >= _PROSE_SHARE * len(text)
