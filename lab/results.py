"""The JSON beside docs/measured from what rivals.py (or real.py) and long_generation.py have left.

    python lab/results.py 2026-11-30 --plans SmolLM2-135M=DIR Qwen2.5-Coder-0.5B=DIR --rows Qwen2.5-Coder-0.5B=DIR

Writes DATE-plans-NAME.json, figures of every text; DATE-rows-of-tables.json, the rows right in every table; and
DATE-summary.json, means with their errors, in DATA. README's table, and those of the guides, are tested against them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from real import PRICED, RAW, Scores
from shared import Pair, ratio_and_error

DATA = Path(__file__).parents[1] / "docs/measured/data"
BASE = "kivi-4-sinks"  # what users compare with


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("date")
    parser.add_argument("--plans", nargs="+", required=True, help="NAME=FOLDER of rivals.py or real.py")
    parser.add_argument("--rows", help="NAME=FOLDER of long_generation.py")
    parser.add_argument("--out", type=Path, default=DATA)
    given = parser.parse_args()
    models = {name: _read(Path(folder), "rivals", "real") for name, folder in (one.split("=") for one in given.plans)}
    summary = {name: _summary(found) for name, found in models.items()}
    for name, found in models.items():
        _write(given.out / f"{given.date}-plans-{name}.json", _rounded(found))
    if given.rows is not None:
        name, folder = given.rows.split("=")
        long = _read(Path(folder), "long")
        right = {plan: [sum(table) for table in tables] for plan, tables in long["rows"].items()}
        bits = {plan: long["plans"][plan]["bits"] for plan in right if plan != RAW}
        counts = [len(table) for table in long["rows"][RAW]]
        content = {"settings": long["settings"], "rows_a_table": counts, "bits": bits, "right": right}
        _write(given.out / f"{given.date}-rows-of-tables.json", content)
        for plan, tables in right.items():
            pair = ratio_and_error(torch.tensor(tables).double(), torch.tensor(right[RAW]).double())
            summary[name].setdefault(plan, {})["rows_of_16_bits"] = _pair(pair, 3)
    machine = next(iter(models.values()))["machine"]
    versions = {name: machine[name] for name in ("torch", "transformers")}
    about = {"date": given.date, "device": machine["device"], "dtype": machine["dtype"], "versions": versions}
    about |= {
        "priced": f"{PRICED.batch} x {PRICED.context}",
        "tokens": next(iter(models.values()))["settings"]["tokens"],
    }
    _write(given.out / f"{given.date}-summary.json", about | {"models": summary})


def _read(folder: Path, *names: str) -> dict[str, Any]:
    """The first file of these names that is there."""
    found: dict[str, Any] = json.loads(
        next(path for path in (folder / f"{name}.json" for name in names) if path.exists()).read_text(encoding="utf-8")
    )
    return found


def _summary(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    tokens, plans = str(found["settings"]["tokens"]), dict[str, dict[str, Any]]()
    scores = {name: Scores.of(groups, groups) for name, groups in found["measured"].items()}
    base_4 = torch.cat(list(scores[BASE].kl.values()))
    for name, ours in scores.items():
        noted, row = found["plans"].get(name), dict[str, Any]()
        if noted is not None:
            row |= {"bits": round(noted["bits"], 3), "bits_at_4096": round(noted["bits_measured"][tokens], 3)}
            text_4 = torch.cat(list(ours.kl.values()))
            row["kl_1000"] = _pair(ratio_and_error(text_4[:, 0], text_4[:, 2]), 2, 1000)
            row["top1_percent"] = _pair(ratio_and_error(text_4[:, 1], text_4[:, 2]), 2, 100)
            row["kl_of_kivi_4_sinks"] = _pair(ratio_and_error(text_4[:, 0], base_4[:, 0]), 3)
        row |= {task: _pair(ratio_and_error(*right.T), 1, 100) for task, right in ours.right.items()}
        plans[name] = row
    return plans


def _pair(pair: Pair, digits: int, scale: float = 1.0) -> list[float]:
    return [round(scale * one, digits) for one in pair]


def _rounded(found: Any) -> Any:
    """Figures to six digits, and answers as 0 and 1."""
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_rounded(value) for value in found]
    return int(found) if isinstance(found, bool) else float(f"{found:.6g}") if isinstance(found, float) else found


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
