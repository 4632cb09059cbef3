"""The report: what the records say stands in it, it refers to nothing outside, hostile text stays text, and a browser
shows it without a complaint."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from artifact_subjects import search_result
from report_cases import UNIFORM, evaluation, row

from kvcal.charts.html import Part, Point, Series, bars, page, scatter
from kvcal.charts.report import report_html, write_report
from kvcal.errors import ArtifactError
from kvcal.folder import Folder
from kvcal.plan.plan import Plan, save_plan
from kvcal.stages.allocate.record import Split, layer_bytes, unbudgeted
from kvcal.stages.allocate.record import save as save_allocation
from kvcal.stages.compare.record import Calibration, Comparison, Entry, StageTime, save_comparison, with_shares
from kvcal.stages.compile import compile_plan
from kvcal.stages.evaluate import save_evaluation
from kvcal.stages.evaluate.text import PartKL
from kvcal.stages.search.record import save as save_search
from kvcal.stages.tune.study import Outcome, Search, Threshold, Trial, Tuning, pareto_front, save_tuning

HOSTILE = """</td></title><script>alert("1")</script><img src='http://x.example/a.png' onerror=alert(1)>&amp;"""
BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "chromium-headless-shell",
)
LINKS = {"src", "href", "action", "data", "poster", "srcset", "xlink:href", "background", "formaction"}


class Page(HTMLParser):
    """What a browser would make of a page: elements, attributes, text by section, cells of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.sections: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self._section = "top"
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self._open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.sections[self._section] = self.sections.get(self._section, "") + data
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def require_alone(text: str) -> Page:
    """A page that no browser would load anything for, and that runs nothing."""
    found = Page(text)
    assert not set(found.tags) & {
        "script",
        "img",
        "link",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "a",
        "image",
        "use",
    }
    names = {name for name, _ in found.attributes}
    assert not names & LINKS and not [name for name in names if name.startswith("on")]
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert ("http-equiv", "Content-Security-Policy") in found.attributes
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes
    return found


def planned(folder: Path, name: str = "m") -> Plan:
    """A plan in a folder with its allocation (of fixed formats, within a stated budget) and its evaluation."""
    plan = replace(
        UNIFORM, model=replace(UNIFORM.model, id=name), provenance={"recipe": name, "nested": {"key": name, name: 3}}
    )
    allocation = unbudgeted(plan.layers, plan.model, plan.cache_dtype, plan.workload, plan.provenance)
    fixed, paged = layer_bytes(plan.layers, plan.cache_dtype, plan.workload)
    split = Split(fixed + paged + 7_000_000, 3_000_000, 1_000_000, fixed, paged, kind="budget")
    paths = Folder(folder)
    save_plan(plan, paths.plan)
    save_allocation(replace(allocation, split=split), {}, paths.allocation)
    save_evaluation(evaluation(row("16-bit", UNIFORM, 1e-7, 8), row(name, plan, 0.05, 6)), paths.evaluation)
    return plan


def searched(folder: Path) -> None:
    result = search_result()
    paths = Folder(folder)
    save_search(result, {}, paths.search)
    save_allocation(
        result.allocation, {"search.sha256": hashlib.sha256(paths.search.read_bytes()).hexdigest()}, paths.allocation
    )
    save_plan(compile_plan(result.allocation, result.layers, result.plan_tensors), paths.plan)


def compared(folder: Path, name: str = "a-model") -> None:
    times = tuple(StageTime(f"{stage}.safetensors", stage, 2.5) for stage in ("profile", "plan"))
    entries = [
        Entry(n, n.split(" @")[0], "r", None, n in ("16-bit", "kivi-2"), Calibration(5.0, times), None,
              row(n, UNIFORM, kl, correct))
        for n, kl, correct in (("16-bit", 1e-7, 8), ("kivi-2", 0.05, 3), (f"{name} @ 3", 0.01, 7))
    ]  # fmt: skip
    save_comparison(
        Comparison(name, {}, "text", "f", 1, UNIFORM.workload, {}, with_shares(entries)), folder / "compare.json"
    )


def tuned(folder: Path) -> None:
    trials = tuple(
        Trial(n, {"tau_4": 0.5 + n}, Outcome(accuracy, 0.05, bits, int(1e6 * bits), {}))
        for n, (accuracy, bits) in enumerate([(0.5, 2.5), (0.75, 3.0), (0.6, 3.5)])
    )
    search = Search((Threshold("tau_4", 0.1, 9.0),), 3, 0)
    save_tuning(Tuning({}, search, 1, trials, pareto_front(trials)), folder / "tune.json")
    save_plan(replace(UNIFORM, provenance={"thresholds": {"tau_4": 1.5}}), folder / "plan.safetensors")


MAKERS = {"planned": planned, "searched": searched, "compared": compared, "tuned": tuned}


@pytest.mark.parametrize("name", MAKERS)
def test_equal_records_give_equal_bytes_that_stand_alone(name: str, tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        MAKERS[name](folder)
        assert write_report(Folder(folder)) == folder / "report.html"
    first, second = ((tmp_path / one / "report.html").read_bytes() for one in "ab")
    assert first == second and str(tmp_path).encode() not in first
    require_alone(first.decode())


def test_memory_and_evaluation_state_the_records_figures(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    found = require_alone(report_html(Folder(tmp_path)))
    assert list(found.sections) == ["top", "memory", "bits", "evaluation", "provenance"]
    cells = {cells[0]: cells[1:] for cells in found.rows}
    assert cells["cache of this plan"][1] == str(plan.predicted_bytes)
    assert cells["cache at 16 bits"][1] == str(2 * 8 * 4096 * 4 * 2 * (64 + 64))
    assert [cells[name][1] for name in ("weights", "workspace", "left over")] == ["3000000", "1000000", "3000000"]
    assert cells["budget"][1] == str(plan.predicted_bytes + 7_000_000)
    assert cells["0"][:2] == ["3 channel g64", "2 token g32"]
    assert "0.05000 ± 0.01000" in cells["m"] and "75.0 ± 14.7" in cells["m"]
    assert "m: 0.05 ± 0.01 nats per token" in found.sections["evaluation"]
    assert "m, chain: 75 ± 15 %" in found.sections["evaluation"]
    assert cells["nested.key"] == ["m"] and cells["plan sha256"] == [plan.sha256]


def test_kl_by_position_is_a_line_and_by_kind_a_bar(tmp_path: Path) -> None:
    parts = tuple(PartKL(0.01 * n, 0.001, 100, start=64 * n, stop=64 * n + 64) for n in range(8))
    kinds = (PartKL(0.02, None, 300, kind="code"), PartKL(0.03, 0.001, 500, kind="<prose>"))
    found = row("m", UNIFORM, 0.05, 6)
    save_evaluation(evaluation(found), Folder(tmp_path).evaluation)
    assert "KL by position" not in report_html(Folder(tmp_path))
    text = replace(found.text, kl_by_position=parts, kl_by_kind=kinds)
    save_evaluation(evaluation(replace(found, text=text)), Folder(tmp_path).evaluation)
    shown = require_alone(report_html(Folder(tmp_path))).sections["evaluation"]
    assert "m, tokens 64 to 127: 0.01 ± 0.001" in shown and "m, tokens 448 to 511: 0.07 ± 0.001" in shown
    assert "m: code: 0.02 nats per token" in shown and "m: <prose>: 0.03 ± 0.001 nats per token" in shown


def test_a_search_has_kl_by_kind_pools_side_by_side_and_choices(tmp_path: Path) -> None:
    searched(tmp_path)
    found = require_alone(report_html(Folder(tmp_path)))
    assert list(found.sections) == ["top", "memory", "choices", "kinds", "provenance"]
    for pool in ("select", "validate"):
        assert [pool, "prose", "3", "0.25 ± 0.01", "", "2", "0"] in found.rows
        assert f"code, {pool}: 0.25 ± 0.01 over 3 texts" in found.sections["kinds"]
    hovers = [value for name, value in found.attributes if name == "title"]
    assert "layer 0 K, 2: score 0.4; ± 0.1; 100 B" in hovers and ("class", "heat chosen") in found.attributes
    assert ["kitty (ships)", "2", "1000 B", "0.5000 ± 0.0000", "0.6000 ± 0.1000"] in found.rows


def test_a_comparison_has_both_charts_and_the_time_by_stage(tmp_path: Path) -> None:
    compared(tmp_path)
    save_evaluation(evaluation(row("16-bit", UNIFORM, 1e-7, 8)), Folder(tmp_path).evaluation)
    found = require_alone(report_html(Folder(tmp_path)))
    assert list(found.sections) == ["top", "comparison", "time"]
    assert "a-model @ 3: 3.750 bits" in found.sections["comparison"] and "0.01 ± 0.01" in found.sections["comparison"]
    assert "a-model @ 3, profile: 2.5 s" in found.sections["time"] and found.tags.count("polyline") == 6


def test_a_study_marks_the_chosen_trial(tmp_path: Path) -> None:
    tuned(tmp_path)
    found = require_alone(report_html(Folder(tmp_path)))
    assert [cells for cells in found.rows if "(chosen)" in cells[0]] == [
        ["1 (chosen)", "1.500", "75.0 ± 5.0", "3.000", "", "3 MB"]
    ]
    assert "trial 2: 3.500 bits, 60.0 ± 5.0 %" in found.sections["trials"]


@pytest.mark.parametrize("make", [planned, compared])
def test_hostile_names_stay_text(make, tmp_path: Path) -> None:
    make(tmp_path, HOSTILE)
    found = require_alone(report_html(Folder(tmp_path)))
    assert HOSTILE in "".join(found.sections.values())


def test_an_empty_folder_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nothing to report"):
        write_report(Folder(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_damaged_artifact_is_no_missing_one(tmp_path: Path) -> None:
    planned(tmp_path)
    path = Folder(tmp_path).evaluation
    path.write_text(path.read_text().replace("0.05", "0.06"))
    with pytest.raises(ArtifactError, match="corrupt"):
        write_report(Folder(tmp_path))


def test_marks_and_bars_lie_where_their_values_are() -> None:
    points = [Point(1.0, 0.001, 0.0, "a"), Point(2.0, 0.01, 0.0, "b"), Point(3.0, 0.1, 0.0, "c")]
    drawn = scatter([Series("s", 0, points)], "x", "y", log_y=True)
    places = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn)]
    (ax, ay), (bx, by), (cx, cy) = places
    assert (
        bx - ax == pytest.approx(cx - bx, abs=0.2)
        and by - ay == pytest.approx(cy - by, abs=0.2)
        and ax < bx
        and ay > by
    )
    drawn = bars([("one", [Part("p", 3.0, 0, "3"), Part("q", 1.0, None, "1")]), ("two", [Part("p", 2.0, 0, "2")])], "x")
    widths = [float(width) for width in re.findall(r'class="(?:f0|free)" x="[\d.]+" y="\d+" width="([\d.]+)"', drawn)]
    assert widths[0] / widths[1] == pytest.approx(3, rel=0.01) and widths[0] / widths[2] == pytest.approx(1.5, rel=0.01)
    assert scatter([], "x", "y") == "" and bars([("none", [Part("p", 0.0, 0, "")])], "x") == ""
    assert scatter([Series("s", 0, [Point(1.0, 0.0, 0.0, "alone")])], "x", "y").count("<circle") == 1


def browse(browser: str, path: Path, out: Path, *flags: str) -> str:
    """Opens a page without a network; returns what the browser said."""
    safe = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        "--v=0",
    )
    offline = ("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={out / 'profile'}", "--window-size=1000,1600")
    command = [browser, *safe, *offline, *flags, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


def test_a_browser_shows_it_in_light_and_dark_and_prints_it(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    broken = tmp_path / "broken.html"
    broken.write_text("<script>console.error('seen')</script>")
    assert "CONSOLE" in browse(browser, broken, tmp_path, f"--screenshot={tmp_path / 'broken.png'}")
    searched(tmp_path)
    path, pictures = write_report(Folder(tmp_path)), [tmp_path / "light.png", tmp_path / "dark.png"]
    for picture, flags in zip(pictures, ((), ("--force-dark-mode",)), strict=True):
        assert "CONSOLE" not in browse(browser, path, tmp_path, f"--screenshot={picture}", *flags)
        assert picture.stat().st_size > 10_000
    assert pictures[0].read_bytes() != pictures[1].read_bytes()
    assert "CONSOLE" not in browse(browser, path, tmp_path, f"--print-to-pdf={tmp_path / 'a.pdf'}")
    assert (tmp_path / "a.pdf").read_bytes()[:4] == b"%PDF"


def test_a_page_without_parts_is_whole() -> None:
    assert require_alone(page("t", [])).tags.count("h1") == 1
