"""Pages of systems: each folder has one, with the same parts; their bytes, measured rows, recipes and tables of what is
served are those of the code and of docs/measured; links lead somewhere on the site, too."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from test_claims import anchors, table_of

from kvcal.plan.page_format import Format

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
import generate  # noqa: E402
import rooms  # noqa: E402

FOLDERS = sorted(path.parent for path in (ROOT / "kvcal/systems").glob("*/__init__.py"))
PAGES = {folder.name: folder / "README.md" for folder in FOLDERS}
PARTS = ["Paper and equations", "Bytes", "Recipe", "Where it is served", "Measured", "Limits"]
STALE = "stale: run python docs/generate.py"
OF_NO_SYSTEM = {"16-bit", "best", "sensitivity", "kivi-2", "kivi-4", "kivi-2-sinks", "kivi-4-sinks"}
OF_NO_SYSTEM |= {f"uniform-{bits}" for bits in (2, 3, 4, 8)}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_parts_of_all(name: str) -> None:
    assert re.findall(r"^## (.+)$", PAGES[name].read_text(), re.M) == PARTS


@pytest.mark.parametrize("name", PAGES)
def test_equations_are_in_the_files_that_are_named(name: str) -> None:
    part = PAGES[name].read_text().split("## Paper and equations")[1].split("\n## ")[0]
    named = re.findall(r"[\w/]+\.py", part)
    assert named
    for file in named:
        places = [folder / file for folder in (PAGES[name].parent, ROOT / "kvcal/systems", ROOT)]
        assert any(place.exists() for place in places), file


@pytest.mark.parametrize("name", PAGES)
def test_the_bytes_of_pages_are_the_layouts(name: str) -> None:
    rows = table_of(PAGES[name].read_text(), "## Bytes")
    assert rows
    for spelling, *sizes, bits in rows:
        fmt = TypeAdapter(Format).validate_json(json.dumps(tomllib.loads(f"k = {spelling[1:-1]}")["k"]))
        found, per_value = [], []
        for head_dim in (64, 128):
            layout = fmt.layout("k", 8, head_dim, "bfloat16", fmt.num_bits)
            found.append(layout.records_per_page(8) * layout.record_bytes)
            per_value.append(8 * found[-1] / (128 * 8 * head_dim))
        assert [int(size.replace(",", "")) for size in sizes] == found, spelling
        assert [float(cell) for cell in bits.split(", ")] == pytest.approx(per_value, abs=0.0051)


@pytest.mark.parametrize("name", PAGES)
def test_measured_rows_are_those_of_the_page_that_they_link(name: str) -> None:
    for _, plan, *figures, link in table_of(PAGES[name].read_text(), "## Measured"):
        page = PAGES[name].parent / re.findall(r"\((.+)\)", link)[0]
        lines = [line for line in page.read_text().splitlines() if line.startswith(f"| {plan} |")]
        cells = [{cell.strip() for cell in line.split("|")} for line in lines]
        assert any(set(figures) <= row for row in cells), (plan, figures)


def test_every_recipe_is_on_the_page_of_a_system() -> None:
    told = {row[0].strip("`") for path in PAGES.values() for row in table_of(path.read_text(), "## Recipe")}
    told = {name for cell in told for name in re.findall(r"[\w-]+", cell)}
    assert told | OF_NO_SYSTEM == {path.stem for path in (ROOT / "recipes").glob("*.toml")}
    overview = (DOCS / "systems.md").read_text()
    assert all(f"`{name}`" in overview for name in OF_NO_SYSTEM - {"16-bit", "best", "uniform-3", "uniform-4"})


@pytest.mark.parametrize("path", [*PAGES.values(), DOCS / "engines.md"], ids=lambda path: path.parent.name)
def test_what_is_served_is_as_declared(path: Path) -> None:
    page = path.read_text()
    assert generate.SERVED.search(page) and generate.with_served(page) == page, STALE


def test_the_overview_has_every_system() -> None:
    page = (DOCS / "systems.md").read_text()
    assert generate.with_rooms(page) == page, STALE
    assert all(f"../kvcal/systems/{name}/README.md" in page for name in PAGES)


def test_no_link_is_left_where_a_system_is_deleted() -> None:
    for path in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = path.read_text()
        if path == DOCS / "systems.md":
            text = generate.ROOMS.sub("", text)
        assert not re.findall(r"\]\([^)]*systems/\w+/README\.md", text), path


def test_links_lead_to_pages_of_the_site() -> None:
    site = {path.relative_to(DOCS).as_posix(): path for path in DOCS.rglob("*.md")} | rooms.PAGES
    assert {f"systems/{name}.md" for name in PAGES} == set(rooms.PAGES)
    for uri, path in site.items():
        text = rooms.in_site(path.read_text(), path, uri)
        for target, anchor in re.findall(r"\]\((?!http)([^)#\s]+\.md)#?([^)\s]*)\)", text):
            found = (DOCS / uri).parent.joinpath(target).resolve().relative_to(DOCS).as_posix()
            assert found in site, f"{uri}: {target}"
            assert not anchor or anchor in anchors(site[found].relative_to(ROOT).as_posix()), (
                f"{uri}: {target}#{anchor}"
            )
