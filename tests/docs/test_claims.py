"""The documentation's claims: links, commands, paths, targets and Python exist; figures are the measured
ones."""

import ast
import functools
import importlib
import json
import math
import re
import shlex
import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from kvcal import __main__ as cli
from kvcal import errors

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("artifacts/*.md"), *ROOT.glob("kvcal/*/*/*.md")]
)
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
README, COMMANDS = TEXTS["README.md"], TEXTS["docs/commands.md"]
COMMAND = re.compile(r"(?:^\$ |^|`)(kvcal [a-z][^`\n]*)", re.M)


def fenced(text: str, language: str) -> list[str]:
    """Contents of the blocks of one language. All fences are read, so that openings and ends pair up."""
    return [block for name, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if name == language]


def without_fences(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", without_fences(TEXTS[page]), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_relative_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)[^)]*\)", without_fences(TEXTS[page])):
        path = (ROOT / page).parent.joinpath(target).resolve() if target else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.relative_to(ROOT).as_posix()), f"{target}#{anchor}"


def test_every_console_block_is_on_a_page_whose_commands_are_run() -> None:
    shown = {page for page, text in TEXTS.items() if fenced(text, "console")}
    assert shown == {"docs/troubleshooting.md", "docs/tutorial.md"}  # test_generated_pages.py and test_tutorial.py


@pytest.mark.parametrize("page", sorted(set(TEXTS) - {"docs/adding.md"}))  # whose files the reader writes
def test_paths_in_backticks_exist(page: str) -> None:
    roots = "kvcal|tests|docs|examples|lab|recipes|artifacts/plans"
    for path in re.findall(rf"`((?:{roots})/[\w./*-]+)`", TEXTS[page]):
        assert list(ROOT.glob(path.rstrip("/"))), path
    for path in re.findall(r"`(csrc/[\w./]+)`", TEXTS[page]):
        assert (ROOT / "kvcal/kernels" / path).exists(), path


@functools.cache
def command_group() -> Any:
    """Made once: typer makes the parsers of all commands at every call. Its classes are not click's."""
    return get_command(cli.app)


def command_lines(text: str) -> list[list[str]]:
    """Every invocation of kvcal in a page, in fences and backticks, without comments and redirections."""
    lines = (
        "\n".join([*fenced(text, ""), *fenced(text, "console")])
        + "\n"
        + "\n".join(re.findall(r"`[^`\n]+`", without_fences(text)))
    )
    found = []
    for line in COMMAND.findall(lines):
        words = shlex.split(re.split(r" #| < ", line)[0])
        found.append(words[1 : words.index("<")] if "<" in words else words[1:])
    return found


def require_parses(words: list[str]) -> None:
    """Parses a command's options, without running it."""
    command = command_group().commands[words[0].partition("|")[0]]
    if words[1:] and "--help" not in words:
        command.make_context(words[0], words[1:])


@pytest.mark.parametrize("page", sorted(set(TEXTS) - {"CHANGELOG.md"}))  # which names what there was
def test_commands_have_the_options_they_are_given(page: str) -> None:
    for words in command_lines(TEXTS[page]):
        if words[0] in ("COMMAND", "--version"):
            continue
        if len(words) > 2 or words[0] == "run":
            try:
                require_parses(words)
            except cli.WrongArguments as wrong:
                is_part = "Missing" in wrong.format_message() or any(word.isupper() for word in words)
                assert is_part, f"kvcal {shlex.join(words)}: {wrong.format_message()}"
        else:  # a command's name in a sentence
            assert words[0] in command_group().commands, words


def test_the_page_of_commands_names_every_one() -> None:
    named = {words[0] for words in command_lines(COMMANDS)}
    assert set(command_group().commands) <= named


@pytest.mark.parametrize("page", TEXTS)
def test_make_targets_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {name for names in re.findall(r"^([a-z -]+):", makefile, re.M) for name in names.split()}
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", TEXTS[page], re.M):
        assert target in targets, target


def test_a_picture_is_shown_and_is_called_the_same_everywhere() -> None:
    shown = {
        (Path(path).name, title) for text in TEXTS.values() for title, path in re.findall(r"!\[(.+?)\]\((.+?)\)", text)
    }
    assert sorted(name for name, _ in shown) == sorted(path.name for path in (ROOT / "docs/img").iterdir())


@pytest.mark.parametrize("page", TEXTS)
def test_python_blocks_import_what_exists(page: str) -> None:
    for block in fenced(TEXTS[page], "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvcal"):
                for alias in node.names:
                    assert hasattr(importlib.import_module(str(node.module)), alias.name), alias.name
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kvcal":
                assert hasattr(importlib.import_module("kvcal"), node.attr), node.attr


def test_recipes_of_the_readme_and_exit_codes_are_those_of_the_package() -> None:
    section = README.split("## Systems")[1].split("##")[0]
    recipes = set(re.findall(r"`([\w-]+)`", section)) - {"kvcal"}
    assert {"pm-kvq", "mixkvq", "aqua-kv", "kvmix", "kitty", "kitty-pro", "best"} <= recipes
    assert recipes <= {path.stem for path in (ROOT / "recipes").rglob("*.toml")}
    codes = {error.exit_code for error in errors.KvcalError.__subclasses__()} | {0, 130}
    sentence = re.search(r"Exit codes: (.*?)\.\n", COMMANDS, re.S)
    assert sentence is not None
    assert {int(code) for code in re.findall(r"\b(\d+)\b", sentence[1])} == codes


def test_pages_that_the_code_names_exist() -> None:
    for path in (ROOT / "kvcal").rglob("*.py"):
        for name in re.findall(r"(?<![\w/])docs/[\w./-]+\.md", path.read_text()):
            assert (ROOT / name).exists(), f"{path}: {name}"


def test_the_readme_asks_for_the_python_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in README


def test_the_results_of_the_readme_are_the_measured_ones() -> None:
    data = ROOT / "docs/measured/data"
    found = json.loads((data / "2026-11-29-plans-Qwen2.5-Coder-0.5B.json").read_text())
    right = json.loads((data / "2026-11-29-rows-of-tables.json").read_text())["right"]
    names = {
        "fp8": "fp8 e4m3, scale 1, as in vLLM ([simulated](docs/real.md))",
        "kivi-4-sinks": "KIVI-4, with the first and latest tokens at 16 bits as in our plans",
        "k3v2": "keys 3, values 2 bits in all layers, same basis",
        "kivi-2-sinks": "KIVI-2, with the same first and latest tokens",
    }
    names |= {f"default@{bits}": f"**kvcal plan --bits {bits}**" for bits in ("4", "3", "2.74", "2.5", "2.25")}
    rows = {cells[0]: cells[1:] for cells in table_of(README, "# kvcal")}
    assert set(rows) == {"16 bits", *names.values()}
    for name, title in names.items():
        bits, *cells = rows[title]
        assert float(bits) == pytest.approx(found["plans"][name]["bits"], abs=0.0051)
        measured = found["measured"][name]
        texts = [one for label in sorted(measured) for one in measured[label] if "kl" in one]
        counts = [one["count"] for one in texts]
        figures = [(1e3, [one["kl"] for one in texts], counts), (100, [one["same"] for one in texts], counts)]
        figures.append((1, right[name], right["16-bit"]))
        for cell, (scale, above, below) in zip(cells, figures, strict=True):
            told = [float(number) for number in cell.replace("*", "").split(" ± ")]
            assert told == pytest.approx([scale * one for one in ratio(above, below)], abs=0.051 if scale > 1 else 6e-4)


def ratio(above: list[float], below: list[float]) -> tuple[float, float]:
    """Sum over sum, and its standard error over texts (delta method)."""
    mean, n = sum(above) / sum(below), len(above)
    spread = sum((x - mean * y) ** 2 for x, y in zip(above, below, strict=True))
    return mean, math.sqrt(n / (n - 1) * spread) / sum(below)


def test_the_speed_of_the_readme_is_the_measured_one() -> None:
    content = json.loads((ROOT / "docs/measured/data/2026-11-29-vllm-speed.json").read_text())["results"]
    rows = table_of(README, "**How fast?**")
    assert [int(tokens.replace(",", "")) for tokens, *_ in rows] == [int(tokens) for tokens in content]
    for (_, *cells), found in zip(rows, content.values(), strict=True):
        for cell, cache in zip(cells, ("2.5 bits", "3 bits", "fp8", "bfloat16"), strict=True):
            rate = statistics.median(one["tokens_per_s"] for one in found[cache]["passes"])
            first = f"{statistics.median(found[cache]['first_token_s']):.2f}".removeprefix("0")
            assert cell == f"{rate:,.0f} ({found[cache]['sequences']}; {first} s)"


def table_of(text: str, heading: str, with_head: bool = False) -> list[list[str]]:
    """The cells of the first table after a heading."""
    lines = text.split(heading)[1].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    shown = [lines[first - 1]] if with_head else []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        shown.append(line)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in shown]


def pages_of(nav: list[dict[str, Any]]) -> list[str]:
    """The pages of a navigation, those of its sections among them."""
    values = [value for entry in nav for value in entry.values()]
    return [page for value in values for page in (pages_of(value) if isinstance(value, list) else [value])]


def test_the_site_shows_every_page_and_asks_no_other_host_for_anything() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    shown = pages_of(yaml.safe_load(config)["nav"])
    assert {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} == set(shown)
    assert len(shown) == len(set(shown))
    assert "font: false" in config and "http" not in config
    for picture in (ROOT / "docs/img").glob("*.svg"):
        assert "href" not in picture.read_text()
