"""Pages of docs/measured have one form, and tables of the guides have the figures of the JSON that lies
beside them."""

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_claims import table_of

from kvcal.kernels.decode import block_shape

DOCS = Path(__file__).parents[2] / "docs"
MEASURED = sorted((DOCS / "measured").glob("*.md"))
DATA = DOCS / "measured/data"
FIELDS = ("Date", "Machine", "Plans", "Command")
NAMES = {"SmolLM2-135M": "## SmolLM2-135M", "Qwen2.5-Coder-0.5B": "## Qwen2.5-Coder-0.5B"}
BY_LAW = "by squared errors"
NAMED = {BY_LAW: "by layer, costs as squared errors"} | {
    name: name for name in ("keys 3, values 2 or 3", "keys 3 or 4, values 2")
}
FIXED = (("default@2.74", "k3v2"), ("default@3", "k4v2"), ("default@3", "k3v3"))
Texts = list[dict[str, Any]]


def sentences(prose: str) -> list[str]:
    """Sentences of at least two words; a number's point ends none."""
    text = " ".join(prose.split())
    return [one for one in re.split(r"(?<=[.!?])(?<!\d\.)\s+|(?<=\d\.)\s+(?=[A-Z])", text) if one]


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_a_measured_page_has_date_machine_plans_command_table_and_three_sentences(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ") and lines[1] == ""
    fields = dict(line.removeprefix("- ").split(": ", 1) for line in lines[2:6])
    assert tuple(fields) == FIELDS and all(fields.values())
    assert path.name.startswith(f"{fields['Date']}-") and re.fullmatch(r"2\d{3}-\d\d-\d\d", fields["Date"])
    assert any(re.fullmatch(r"\|(-+:?\|)+", line) for line in lines)
    prose = [block for block in "\n".join(lines).split("\n\n") if not block.startswith(("|", "#", "- Date"))]
    last = sentences(prose[-1])
    assert 1 <= len(last) <= 3 and all(len(one.split()) <= 25 for one in last), last
    for caption in prose[:-1]:  # of tables
        assert "\n" not in caption and not caption.endswith("."), caption


def test_the_index_has_every_measured_page_once() -> None:
    linked = re.findall(r"\(measured/([\w.-]+)\.md\)", (DOCS / "measurements.md").read_text())
    assert sorted(linked) == [path.stem for path in MEASURED]


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_a_page_of_earlier_plans_says_what_came_since(path: Path) -> None:
    fields = path.read_text().split("\n\n")[1].splitlines()
    if path.stem.endswith("-earlier") or len(fields) > len(FIELDS):
        assert fields[len(FIELDS)].startswith("- Since: ") and len(fields) == len(FIELDS) + 1


def plans_of(model: str, day: str = "2026-11-29") -> dict[str, Any]:
    return json.loads((DATA / f"{day}-plans-{model}.json").read_text())


def texts(measured: dict[str, Any], name: str) -> Texts:
    return [text for label in sorted(measured[name]) for text in measured[name][label]]


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Sum over sum, and its standard error over texts (delta method)."""
    mean, n = sum(ours) / sum(theirs), len(ours)
    spread = sum((x - mean * y) ** 2 for x, y in zip(ours, theirs, strict=True))
    return mean, math.sqrt(n / (n - 1) * spread) / sum(theirs)


def require_pair(cell: str, pair: tuple[float, ...], scale: float = 1.0) -> None:
    """A cell "1.2 ± .3" has the pair's figures, rounded as it is; no error where that is 0 or not given."""
    figures = re.findall(r"\d*\.?\d+", cell)
    for figure, value in zip(figures, pair, strict=False):
        place = 10.0 ** -len(figure.partition(".")[2])
        assert float(figure) == pytest.approx(scale * value, abs=0.501 * place), cell


def kl_of(measured: dict[str, Any], name: str) -> list[float]:
    return [text["kl"] for text in texts(measured, name) if "kl" in text]


def of_texts(measured: dict[str, Any], name: str, key: str) -> tuple[float, float]:
    found = [text for text in texts(measured, name) if "kl" in text]
    return ratio([text[key] for text in found], [text["count"] for text in found])


def codes_of(measured: dict[str, Any], name: str) -> tuple[float, float]:
    found = [text["answers"] for text in texts(measured, name) if text["task"] == "retrieval:4096"]
    return ratio([sum(answers) for answers in found], [len(answers) for answers in found])


def rows_of(name: str, day: str = "2026-11-29") -> tuple[float, float] | None:
    right = json.loads((DATA / f"{day}-rows-of-tables.json").read_text())["right"]
    return ratio(right[name], right["16-bit"]) if name in right else None


def named(label: str) -> str:
    """The recipe of a row, such as default@3 of **3 bits**."""
    plain = label.replace("*", "")
    if plain == "16 bits":
        return "16-bit"
    if found := re.fullmatch(r"([\d.]+) bits", plain):
        return f"default@{found[1]}"
    sinks = "-sinks" if "8 sinks" in plain else ""
    first = re.split(r"[ ,]", plain)[0].lower()
    return {"k3v2": first, "k3v3": first, "k4v2": first, "fp8": first}.get(first, first + sinks)


@pytest.mark.parametrize("model", NAMES)
def test_the_tables_of_a_real_model_are_measured(model: str) -> None:
    found = plans_of(model)
    measured = found["measured"]
    rows = {named(cells[0]): cells[1:] for cells in table_of((DOCS / "real.md").read_text(), NAMES[model])}
    assert set(rows) == set(found["plans"]) | {"16-bit"}
    for name, (bits, at_4096, kl, share, top, codes, *rest) in rows.items():
        require_pair(codes, codes_of(measured, name), 100)
        if name == "16-bit":
            continue
        noted = found["plans"][name]
        assert (float(bits), float(at_4096)) == pytest.approx(
            (noted["bits"], noted["bits_measured"]["4096"]), abs=0.006
        )
        require_pair(kl, of_texts(measured, name, "kl"), 1000)
        require_pair(top, of_texts(measured, name, "same"), 100)
        if name != "kivi-2":
            require_pair(share, ratio(kl_of(measured, name), kl_of(measured, "kivi-2")))
        for cell in rest:
            right = rows_of(name)
            assert (cell == "–") == (right is None)
            require_pair(cell, right or (0, 0))


def test_the_table_of_which_bits_is_measured() -> None:
    page = (DOCS / "which-bits.md").read_text()
    both = [plans_of(model)["measured"] for model in NAMES]
    for label, _, *cells, rows in table_of(page, "## What each loses"):
        name = named(label)
        for measured, (kl, top, codes) in zip(both, (cells[:3], cells[3:]), strict=True):
            require_pair(codes, codes_of(measured, name), 100)
            if name != "16-bit":
                require_pair(kl, of_texts(measured, name, "kl"), 1000)
                require_pair(top, of_texts(measured, name, "same"), 100)
        if rows not in ("–", "1"):
            require_pair(rows, rows_of(name) or (0, 0))


def test_plans_and_fixed_widths_are_compared_as_measured() -> None:
    table = table_of((DOCS / "which-bits.md").read_text(), "## Fixed widths")
    assert len(table) == len(FIXED)
    for (plan, fixed), (_, *ratios, rows) in zip(FIXED, table, strict=True):
        for model, cell in zip(NAMES, ratios, strict=True):
            measured = plans_of(model)["measured"]
            require_pair(cell, ratio(kl_of(measured, plan), kl_of(measured, fixed)))
        if rows != "–":
            for name, cell in zip((plan, fixed), rows.split(", "), strict=True):
                require_pair(cell, rows_of(name) or (0, 0))


def test_choices_of_bits_are_compared_as_measured() -> None:
    text, found = (DOCS / "measured/2026-11-29-choice-of-bits.md").read_text(), choices()
    for model, kinds in {"Qwen2.5-Coder-0.5B": ["tables"], "SmolLM2-135M": ["rows", "copies", "late", "calls"]}.items():
        plans = found[model]["plans"]
        for name, bits, mean_bits, *cells in table_of(text, f"\n{model}: "):
            plan = plans[name]
            base, answers = plans[plan["against"]], plan["answers"]
            widths = "/".join(f"{statistics.mean(int(one, 16) for one in plan['widths'][side]):.2f}" for side in "kv")
            assert (float(bits), mean_bits) == (pytest.approx(plan["bits"], abs=6e-4), widths)
            of_text = [(1000 * statistics.mean(plan["kl"]), 0.0), ratio(plan["kl"], base["kl"])]
            lost = [ratio(column(answers[kind], 2), column(base["answers"][kind], 2)) for kind in kinds]
            figures = [*of_text, *lost]
            if kinds == ["tables"]:
                of_raw, a_row = (ratio(column(answers["tables"], n), column(answers["tables"], n + 1)) for n in (0, 2))
                figures = [of_raw, a_row, *lost, *of_text]
            for cell, pair in zip(cells, figures, strict=True):
                require_pair(cell, pair)
    contests = found["SmolLM2-135M"]["contests"]
    for bits, name, kl, look_ups, told, error in table_of(text, "what 16 texts of 768 tokens told"):
        row = next(one for one in contests[f"{bits} bits, 16 texts of 768"]["plans"] if NAMED[name] == one["name"])
        pairs = (
            (kl, 1000 * row["kl"]),
            (look_ups, 1000 * row["look_ups"]),
            (told, row["ratio"]),
            (error, row["log_error"]),
        )
        for cell, value in pairs:
            require_pair(cell, (value, 0.0))
    require_contests_of_longer_texts(table_of(text, "what 24 texts of 4,096 tokens told"), found["Qwen2.5-Coder-0.5B"])


def require_contests_of_longer_texts(table: list[list[str]], of_model: dict[str, Any]) -> None:
    names = NAMED | {"by side": "by layer"}
    assert len(table) == sum(len(one["plans"]) for one in of_model["contests"].values())
    for bits, name, kl, look_ups, told, error in table:
        contest = of_model["contests"][f"{bits} bits, 24 texts of 4096"]
        row = next(one for one in contest["plans"] if names.get(name, name) == one["name"])
        require_pair(kl, (1000 * row["kl"], 0.0))
        require_pair(look_ups, (1000 * row["look_ups"], 0.0))
        assert (told == "ships") == (contest["shipped"] == row["name"])
        if told != "ships":
            require_pair(told, (row["ratio"], 0.0))
            require_pair(error, (row["log_error"], 0.0))


@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize(
    ("heading", "parts", "kinds"),
    [
        ("finer choices", ("heads", "levels"), ("rows", "copies", "late", "calls")),
        ("trellis codes in", ("trellis",), ("rows", "copies")),
    ],
)
def test_finer_choices_and_other_codes_are_compared_as_measured(
    model: str, heading: str, parts: tuple[str, ...], kinds: tuple[str, ...]
) -> None:
    found = choices()[model]
    plans = {name: plan for part in parts for name, plan in found.get(part, {}).items()}
    table = table_of((DOCS / "measured/2026-11-29-choice-of-bits.md").read_text(), f"{model}, {heading}")
    assert [cells[0] for cells in table] == list(plans)
    for name, bits, kl, *cells in table:
        plan, base = plans[name], plans[plans[name]["against"]]
        require_pair(bits, (plan["bits"], 0.0))
        require_pair(kl, (1000 * statistics.mean(plan["kl"]), 0.0))
        lost = [[column(one["answers"][kind], 2) for one in (plan, base)] for kind in kinds]
        for cell, (ours, theirs) in zip(cells, [[plan["kl"], base["kl"]], *lost], strict=True):
            assert (cell == "–") == (plan is not base and sum(theirs) < 0)
            require_pair(cell, ratio(ours, theirs))


def choices() -> dict[str, Any]:
    return json.loads((DATA / "2026-11-29-choice-of-bits.json").read_text())


def column(rows: list[list[float]], number: int) -> list[float]:
    return [row[number] for row in rows]


def speeds(part: str) -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads((DATA / "2026-11-28-speed.json").read_text())[part]["rows"]
    return {(row["case"].replace(" ", ""), row["cache"]): row for row in rows}


@pytest.mark.parametrize(
    ("page", "whole"), [("benchmarks.md", "Whole steps of"), ("measured/2026-11-28-speed.md", "Steps of a whole model")]
)
def test_steps_of_plans_that_ship_are_measured(page: str, whole: str) -> None:
    text = (DOCS / page).read_text()
    layers, model = speeds("layers"), speeds("model")
    of_layers = table_of(text, "A step of one layer")
    of_model = table_of(text, whole)
    assert len(of_layers) >= 18 and len(of_model) >= 8
    for case, cache, median, mean, _, longest, in_phase, packing, share in of_layers:
        row = layers[case.replace(" ", "").replace("4K", "4096").replace("32K", "32768"), cache]
        for cell, key in ((median, "us"), (mean, "mean_us"), (longest, "longest_us"), (in_phase, "in_phase_us")):
            if cell not in ("", "–"):
                require_pair(cell.replace(",", ""), (row[key], 0))
        if cache != "16 bits":
            require_pair(packing, (row["packing"], 0), 100)
            require_pair(share, (row["of_16_bits"], 0))
    for case, cache, batch, median, mean, *times, in_phase, packing, tokens, share in of_model:
        row = model[case.replace(" ", "").replace("4K", "4096").replace("32K", "32768"), cache]
        assert int(batch) == row["batch"]
        for cell, key in ((median, "us"), (mean, "mean_us"), (times[-1], "longest_us"), (in_phase, "in_phase_us")):
            require_pair(cell, (row[key], 0), 1e-3)
        require_pair(packing, (row["packing"], 0), 100)
        require_pair(tokens.replace(",", ""), (row["tokens_per_s"], 0))
        require_pair(share, (row.get("of_16_bits", 1), 0))


@pytest.mark.parametrize(("engine", "fp8_name"), [("vllm", "fp8"), ("sglang", "fp8_e4m3")])
def test_tokens_a_second_in_engines_are_measured(engine: str, fp8_name: str) -> None:
    results = json.loads((DATA / f"2026-11-29-{engine}-speed.json").read_text())["results"]

    def medians(context: str, cache: str) -> tuple[float, float]:
        found = results[context][cache]
        return statistics.median(rates_of(context, cache)), statistics.median(found["first_token_s"])

    def rates_of(context: str, cache: str) -> list[float]:
        return sorted(one["tokens_per_s"] for one in results[context][cache]["passes"])

    page = table_of((DOCS / f"measured/2026-11-29-{engine}-speed.md").read_text(), "# Tokens")
    assert len(page) == sum(map(len, results.values()))
    for cells in page:
        context, cache = cells[0].replace(",", ""), cells[1].replace("bf16", "bfloat16")
        found, (rate, first) = results[context][cache], medians(context, cache)
        steps = [1e3 * seconds for one in found["passes"] for seconds in one["step_s"]]
        least, *_, most = rates_of(context, cache)
        _, _, sequences, median, longest, rates, of_bf16, of_fp8, seconds, first_of_bf16, packing = cells
        assert int(sequences) == found["sequences"] and rates == f"{rate:,.0f} ({least:,.0f}, {most:,.0f})"
        others = [medians(context, other) for other in ("bfloat16", fp8_name)]
        for cell, value in (
            (median, statistics.median(steps)), (longest, max(steps)), (of_bf16, rate / others[0][0]),
            (of_fp8, rate / others[1][0]), (seconds, first), (first_of_bf16, first / others[0][1]),
            (packing, 100 * found["shares"].get("packing", 0)),
        ):  # fmt: skip
            require_pair(cell, (value, 0))
    guide = table_of((DOCS / "engines.md").read_text(), "## How fast") if engine == "vllm" else []
    for context, rates, of_fp8, of_bf16, first_of_bf16 in guide:
        rate, first = medians(context.replace(",", ""), "2.5 bits")
        fp8, bf16 = (medians(context.replace(",", ""), other) for other in ("fp8", "bfloat16"))
        assert rates == f"{rate:,.0f} ({results[context.replace(',', '')]['2.5 bits']['sequences']})"
        for cell, value in ((of_fp8, rate / fp8[0]), (of_bf16, rate / bf16[0]), (first_of_bf16, first / bf16[1])):
            require_pair(cell, (value, 0))


def test_packing_and_steps_in_a_basis_are_measured() -> None:
    found = json.loads((DATA / "2026-11-29-packing.json").read_text())
    page = (DOCS / "measured/2026-11-29-packing.md").read_text()
    launches = {
        (one["bits"], one["part_tokens"], one["blocks_of_an_sm"], one["feedback"]): one for one in found["pack"]
    }
    kinds = ((2, 32, 3, True), (2, 64, 2, True), (2, 32, 3, False))
    counts, _, *rows = table_of(page, "# Packing", with_head=True)
    for kind, (_, *cells, prompt) in zip(kinds, rows, strict=True):
        for count, cell in zip(counts[1:-1], cells, strict=True):
            require_pair(cell.replace(",", ""), (launches[kind]["append_us"].get(count, 0), 0))
        # Blocks of an SM are append's alone: a prompt was timed with 3.
        require_pair(prompt, (launches[kind[0], kind[1], 3, kind[3]]["pack_prompt_ms"]["32768"], 0))
    steps = table_of(page, "µs of a layer's step")
    for row, (shape, cache, median, mean, at_99, packing) in zip(found["steps"], steps, strict=True):
        assert (shape.replace(" ", ""), cache) == (row["case"], row["cache"])
        for cell, key in ((median, "us"), (mean, "mean_us"), (at_99, "us_99")):
            require_pair(cell, (row[key], 0))
        require_pair(packing, (row["packing"], 0), 100)
    for row, (_, enter, leave) in zip(found["operators"], table_of(page, "alone; one side"), strict=False):
        require_pair(enter, (row["enter_us"], 0))
        require_pair(leave, (row["leave_us"], 0))
    for guide, heading in (("kernels.md", "layer's step, mean"), ("benchmarks.md", "On 2026-11-29 a layer's step")):
        with_bases, without, *others = table_of((DOCS / guide).read_text(), heading)
        told = [cell for pair in zip(with_bases[1:], without[1:], strict=True) for cell in pair]
        for cell, row in zip(told, found["steps"], strict=True):
            require_pair(cell, (row["mean_us"], 0))
    *earlier, (_, *in_stripes), (_, *by_one_loop) = others
    for (_, *cells), cache in zip(earlier, ("2.5 bits", "16 bits"), strict=True):
        for cell, case in zip(cells, ("1x4096", "8x32768", "38x32768"), strict=True):
            require_pair(cell.replace(",", ""), (speeds("layers")[case, cache]["mean_us"], 0))
    rows = {
        (one["case"], one["cache"]): one for one in json.loads((DATA / "2026-11-29-stripes.json").read_text())["rows"]
    }
    for cell, case in zip(in_stripes, ("1x4096", "8x32768", "38x32768"), strict=True):
        require_pair(cell, (rows[case, "2.5 bits"]["mean_us"], 0))
    for cell, of in zip(by_one_loop, require_eights(page, found["eights"]), strict=True):
        require_pair(cell, (of["mean_us"], 0))
    for case, cache, *cells, packing, _ in table_of((DOCS / "measured/2026-11-29-stripes.md").read_text(), "# Steps"):
        row = rows[case.replace(" ", ""), cache]
        for cell, key in zip(cells, ("us", "mean_us", "us_99", "longest_us"), strict=True):
            require_pair(cell.replace(",", ""), (row.get(key, 0), 0))
        require_pair(packing, (row.get("packing", 0), 0), 100)


def require_eights(page: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Tables of stripes before they were packed by one loop, and now; the rows of stripes of 16 now."""
    counts, *rows = table_of(page, "µs of `append` at 2 bits", with_head=True)
    assert [row[0] for row in rows] == [f"{size}, {when}" for size in (16, 32) for when in found["append"]]
    for label, *cells in rows:
        size, when = label.split(", ")
        for count, cell in zip(counts[1:], cells, strict=True):
            require_pair(cell, tuple(found["append"][when][size]["append_us"][count]))
    before, now = ({(row["case"], row["cache"]): row for row in found["layers"][when]} for when in ("before", "now"))
    own, steps = [], table_of(page, "2.5 bits, before → now")
    for shape, size, *cells in steps:
        key = shape.replace(" ", ""), "2.5 bits" if size == "16" else f"2.5 bits, stripes of {size}"
        for cell, name in zip(cells, ("us", "mean_us", "us_99", "packing"), strict=True):
            require_pair(cell, (before[key][name], now[key][name]), 100 if name == "packing" else 1)
        own += [now[key]] if size == "16" else []
    assert len(steps) == 6
    return own


def test_hybrids_drafts_and_the_hosts_part_are_measured() -> None:
    found = json.loads((DATA / "2026-11-29-hybrids-and-drafts-speed.json").read_text())
    page = (DOCS / "measured/2026-11-29-hybrids-and-drafts-speed.md").read_text()
    rows = table_of(page, "7.45 GiB for each cache")
    assert len(rows) == 6
    for kind, cache, sequences, median, rates, of_bf16, of_fp8, first in rows:
        results = found[kind]["results"]["32768"]
        of = results[cache.replace("bf16", "bfloat16")]
        every = {name: sorted(one["tokens_per_s"] for one in row["passes"]) for name, row in results.items()}
        least, rate, most = every[cache.replace("bf16", "bfloat16")]
        assert int(sequences) == of["sequences"] and rates == f"{rate:,.0f} ({least:,.0f}, {most:,.0f})"
        steps = [1e3 * seconds for one in of["passes"] for seconds in one["step_s"]]
        for cell, value in (
            (median, statistics.median(steps)), (of_bf16, rate / every["bfloat16"][1]),
            (of_fp8, rate / every["fp8"][1]), (first, statistics.median(of["first_token_s"])),
        ):  # fmt: skip
            require_pair(cell, (value, 0))
    parts = ("schedule", "execute", "sample", "update")
    for cache, sequences, waits, count, schedule, host, gpu, whole in table_of(page, "ms of a step's parts"):
        (of,) = (one for one in found["host"]["steps"] if one["cache"].replace("bfloat16", "bf16") == cache)
        steps = [step for step in of["steps_ms"] if (step["wait"] > 0.5) == (waits == "yes")]
        assert (int(sequences), int(count)) == (of["sequences"], len(steps))
        for cell, names in ((schedule, parts[:1]), (host, parts), (gpu, ("gpu",)), (whole, ("period",))):
            require_pair(cell, (statistics.median(sum(step[name] for name in names) for step in steps), 0))
    eager = {(row["case"], row["cache"]): row for row in (*found["generate"], *found["texts"])}
    for tokens, cache, median, mean, share in table_of(page, "ms of an eager step"):
        case = tokens.replace(" ", "").replace(",", "") if "x" in tokens.split() else "4096 tokens"
        name = {"2.5 bits, attached": "2.5 bits", "2 bits, no basis": "2 bits, no basis (reference)"}.get(cache, cache)
        row = eager[case, name]
        cells = ((median, row["ms"]), (mean, row.get("mean_ms", 0)), (share, row.get("of_16_bits", 1)))
        for cell, value in cells:
            require_pair(cell.replace(",", ""), (value, 0))


LOOPS = {
    "a page, 2 bits": "2.5 bits, K2 V2: a page", "keys 3, values 2": "2.5 bits, K3 V2: a page",
    "4 bits": "2.5 bits, K4 V4: a page", "16 tokens of 16 bits": "2.5 bits, K2 V2: 16 tokens",
    "8 tokens enter": "enter: 8 tokens", "8 queries turn": "enter: 8 queries", "8 outputs leave": "leave: 8 outputs",
    "8 tokens packed, of three scales one": "append: 8 tokens, one scale",
}  # fmt: skip


def test_steps_on_consumer_cards_are_computed(lab_script: Callable[..., dict[str, Any]]) -> None:
    """From the counts beside the page, for the blocks that kvcal chooses; and errors are those against an H200."""
    found = json.loads((DATA / "2026-11-29-consumer-cards.json").read_text())
    page, script = (DOCS / "measured/2026-11-29-consumer-cards.md").read_text(), lab_script("expected_steps")
    plans, counts = script["plans"](found["bits"]), found["counts"]
    assert script["rows_of"](counts, plans) == found["rows"]
    for (card, of_card), (plan, variants) in itertools.product(counts.items(), plans.items()):
        assert of_card["fp64"] == {"append": 102, "decode": 0, "enter": 0, "leave": 0}
        for one in set(variants):
            warps, _ = block_shape(one, script["CHIPS"][card].capability)
            assert warps == of_card["warps"][script["named"](plan, one)]
    rows = {(row["card"], row["shape"]): (*row["us"].values(), row["over"]) for row in found["rows"]}
    shown = table_of(page, "# Steps")
    assert [(card, shape.replace(" ", "")) for card, shape, *_ in shown] == [key for key in rows if key[0] != "H200"]
    for card, shape, default, plain, share, decode, enter, leave, append, plain_append, *weights in shown:
        us, of_plain, over = rows[card, shape.replace(" ", "")]
        require_pair(share, tuple(over[name] for name in ("expected", "least", "most")), 100)
        cells = default, plain, decode, enter, leave, append, plain_append
        kernels = (us[name] for name in ("decode", "enter", "leave", "append"))
        for cell, value in zip(
            cells, (sum(us.values()), sum(of_plain.values()), *kernels, of_plain["append"]), strict=True
        ):
            require_pair(cell, (value, 0))
        for cell, name in zip(weights, ("bf16", "4 bits"), strict=True):
            require_pair(cell, (over[name], 0), 100)
    kinds, _, *loops = table_of(page, "Instructions of a warp", with_head=True)
    for card, name, *cells in loops:
        label, warps = re.fullmatch(r"(.*?)(?: \((\d+)\))?", name).groups()  # type: ignore[union-attr]
        loop, (every, *numbers) = counts[card]["loops"][LOOPS[label]], (int(cell.replace(",", "")) for cell in cells)
        assert (every, numbers) == (sum(loop.values()), [loop.get(kind, 0) for kind in kinds[3:]])
        assert warps is None or int(warps) == counts[card]["warps"][LOOPS[label].removesuffix(": a page")]
    whole = {
        (one["case"], one["cache"]): one for one in json.loads((DATA / "2026-11-29-packing.json").read_text())["steps"]
    }
    stripes = json.loads((DATA / "2026-11-29-stripes.json").read_text())["rows"]
    in_stripes = {one["case"]: one["us"] for one in stripes if one["cache"] == "2.5 bits"}
    eights = table_of((DOCS / "measured/2026-11-29-stripes.md").read_text(), "## Eight tokens a block")
    means = {
        shape.replace(" ", ""): (float(mean), float(share[:-2]))
        for shape, of, _, mean, *_, share in eights
        if of == "16"
    }
    checks = [cells for _, *cells in table_of(page, "The same model")]
    for case, of_case in zip(("1x4096", "8x32768", "38x32768"), zip(*checks, strict=True), strict=True):
        us, of_plain, _ = rows["H200", case]
        bases, without = whole[case, "2.5 bits"]["us"], whole[case, "the same without bases"]["us"]
        mean, share = means[case]
        of_bases = us["enter"] + us["leave"]
        pairs = [(mean, sum(us.values())), (without, of_plain["decode"] + script["STORE"]), (bases - without, of_bases)]
        pairs += [(in_stripes[case] - without, of_bases), (mean * share / 100, us["append"] - script["STORE"])]
        for cell, (measured, computed) in zip(of_case, pairs, strict=True):
            require_pair(cell, (measured, computed, 100 * abs(computed / measured - 1)))


def test_the_embedded_models_table_is_the_committed_evaluation() -> None:
    (path,) = (DOCS / "measured").glob("*-embedded-model.md")
    rows = {
        re.split(r"[* (]+", cells[0].strip("*`"))[0].strip("`"): cells[1:] for cells in table_of(path.read_text(), "# ")
    }
    content = json.loads((DOCS.parent / "artifacts/plans/schema-3/evaluation.json").read_text())["body"]["rows"]
    assert {"sensitivity" if row["name"] == "default" else row["name"] for row in content} == set(rows)
    for row in content:
        bits, cache, text_bits, kl, top, perplexity, *tasks = rows[row["name"].replace("default", "sensitivity")]
        for cell, value in ((bits, row["bits_per_value"]), (text_bits, row["text_bits"]["bits_per_value"])):
            require_pair(cell, (value, 0))
        assert float(cache.removesuffix(" MB")) == pytest.approx(row["total_bytes"] / 1e6, rel=2e-3)
        for cell, key in ((kl, "kl"), (perplexity, "perplexity")):
            require_pair(cell.partition(" ±")[0], (row["text"][key], 0))
        right = [task["num_correct"] for task in row["tasks"]]
        asked = [task["num_problems"] for task in row["tasks"]]
        shares = [100 * one / of for one, of in zip(right, asked, strict=True)] + [100 * sum(right) / sum(asked)]
        assert [float(cell.partition(" ±")[0]) for cell in tasks] == pytest.approx(shares, abs=0.051)


@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize("day", ["2026-11-28", "2026-11-29"])
def test_the_page_of_plans_has_the_rows_that_the_script_prints(
    day: str, model: str, lab_script: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    lab_script("real")["print_results"](plans_of(model, day))
    section = (DOCS / f"measured/{day}-plans.md").read_text().split(NAMES[model])[1].split("\n## ")[0]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert printed == [line for line in section.splitlines() if line.startswith("|")]


def test_the_page_of_rows_is_measured() -> None:
    for name, _, right, _, share, _ in table_of((DOCS / "measured/2026-11-28-rows-of-tables.md").read_text(), "# Rows"):
        require_pair(share, rows_of(name, "2026-11-28") or (0, 0))
        found = json.loads((DATA / "2026-11-28-rows-of-tables.json").read_text())
        require_pair(right, ratio(found["right"][name], found["rows_a_table"]), 100)
    for name, _, share in table_of((DOCS / "measured/2026-11-29-plans.md").read_text(), "## Rows"):
        require_pair(share, rows_of(name) or (0, 0))


def test_texts_and_plans_on_a_cpu_are_measured() -> None:
    found = json.loads((DATA / "2026-11-29-texts-on-a-cpu.json").read_text())
    page = (DOCS / "measured/2026-11-29-texts-on-a-cpu.md").read_text()
    rows = table_of(page, "CPU seconds to read texts")
    assert [when for _, when, *_ in rows] == ["before", "now"] * 2
    for texts, when, raw, packed, factor in rows:
        name = texts.replace(" ", "").replace(",", "")
        (row,) = (one for one in found["texts"][when] if one["texts"] == name)
        for cell, key in ((raw, "16_bits_s"), (packed, "packed_s")):
            require_pair(cell, (statistics.mean(row[key]), 0))
        require_pair(factor, ratio(row["packed_s"], row["16_bits_s"]))
    for (_, *cells), seconds in zip(
        table_of(page, "CPU seconds of `kvcal plan`"), found["plans_s"].values(), strict=True
    ):
        assert [int(cell) for cell in cells] == [seconds["before"], seconds["now"]]
    told = table_of((DOCS / "real.md").read_text(), "## How long it takes")
    assert f"{found['plans_s']['--bits 2.5']['now']} s of one core" in [row[1] for row in told]


@pytest.mark.parametrize(("model", "places"), [("SmolLM2-135M", 301), ("Qwen2.5-Coder-0.5B", 986)])
def test_acceptance_is_that_of_the_data(model: str, places: int) -> None:
    found = json.loads((DATA / "2026-11-29-acceptance.json").read_text())["models"][model]
    rows = table_of((DOCS / "measured/2026-11-29-acceptance.md").read_text(), f"\n{model}, ")
    assert len(rows) == len(found["plans"]) == 7
    for name, bits, kl, accepted, change, by_place in rows:
        of = found["plans"][name]
        assert bits == f"{of['bits']:.2f}" and of["num_prefixes"] == places
        require_pair(kl, (1000 * of["kl"][0], 1000 * of["kl"][1]))
        require_pair(accepted, (of["accepted"], of["accepted_se"]))
        assert [float(share) for share in by_place.split(", ")] == pytest.approx(of["by_place"], abs=0.0005)
        if name != "16-bit":
            require_pair(change[1:], (abs(of["change"]), of["change_se"]))
            assert change[0] == "+-"[of["change"] < 0] and (abs(of["change"]) <= 0.006 or name == "kivi-2")
