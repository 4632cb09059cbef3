"""Look-ups in long texts by where the looked-up record lies in its page: is any place worse than the others?

    python lab/phases.py --model path/to/model.gguf --tokens 16384 32768 --plans default@3,default@2.5,k3v2

Orders as JSON lines, then the same as CSV (kvcal.data.lookup_tasks.rows), which fill a text. An answer is a row; its
place is that of its record's first token in a page of 128 tokens, in eighths. Rows right, of 16 bits', and nats lost:
of all, and of each eighth; errors are standard errors over rows. OUT/phases.json has every row.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from quality import looked_up, maker, read_tokens
from real import PRICED, Maker, cell, find_model, machine
from shared import mean_and_error, print_table, ratio_and_error
from torch import Tensor

from kvcal import load_model
from kvcal.artifact import write_text_atomic
from kvcal.console import TerminalReporter
from kvcal.folder import tokenizer_of
from kvcal.models.load import LoadedModel
from kvcal.pages.layout_protocol import PAGE_TOKENS

KIND, EIGHTHS = "rows", 8


def main() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)  # which plans anew for every length of the past
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    path, reporter = given.out / "phases.json", TerminalReporter()
    loaded = load_model(find_model(given.model), device=given.device, dtype=given.dtype)
    found: dict[str, Any] = {"machine": machine(loaded), "plans": {}, "rows": {}}
    found |= json.loads(path.read_text()) if path.exists() else {}
    maker_of = Maker(loaded, given, found, reporter)
    with reporter.running():
        for num_tokens in given.lengths:
            noted = found["rows"].setdefault(str(num_tokens), {})
            for name in given.plans.split(","):
                plan = None if name in noted else maker_of.plan(name, PRICED)
                if plan is not None:
                    started, texts = time.monotonic(), looked_up(loaded, KIND, given.texts, num_tokens)
                    noted[name] = rows_of(loaded, texts, read_tokens(loaded, [maker(plan, loaded)], texts))
                    write_text_atomic(path, json.dumps(found, indent=1) + "\n")
                    reporter.say(f"{name}: {given.texts} texts of {num_tokens} in {time.monotonic() - started:.1f} s")
    print_results(found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder, a .gguf file or a hub id")
    parser.add_argument("--out", type=Path, help="folder of results; default: artifacts/phases-NAME")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768], dest="lengths")
    parser.add_argument("--texts", type=int, default=8, help="of each length")
    parser.add_argument("--plans", default="default@3,default@2.5", help="as for real.py")
    parser.add_argument("--quick", action="store_true", help="plans from few texts, for a CPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    given.name, given.calibrate = Path(given.model).stem, None
    given.out = given.out or Path("artifacts") / f"phases-{given.name}"
    given.tokens, given.retrieval = given.lengths[0], given.lengths[1:]  # of the bits that are noted
    return given


def rows_of(loaded: LoadedModel, texts: Any, read: Any) -> list[list[float]]:
    """Of every answer: the place of its record in a page, whether it is right, and at 16 bits, and nats lost."""
    found = []
    for row, answers in enumerate(texts.answers):
        for begin, (start, stop) in zip(records(loaded, texts.tokens_BT[row], len(answers)), answers, strict=True):
            right, exact = (bool(read.right_PBT[cache, row, start:stop].all()) for cache in (1, 0))
            found.append([begin % PAGE_TOKENS, right, exact, float(read.lost_PBT[0, row, start:stop].sum())])
    return found


def records(loaded: LoadedModel, tokens_T: Tensor, count: int) -> list[int]:
    """Where the last ``count`` records begin, in tokens. They are ASCII, of which each token is its own text."""
    tokenizer = tokenizer_of(loaded)
    parts = [str(tokenizer.decode([token])) for token in tokens_T.tolist()]
    ends, text = list(accumulate(map(len, parts))), "".join(parts)
    return [bisect_right(ends, match.start()) for match in re.finditer(r'\{"order"', text)][-count:]


def print_results(found: dict[str, Any]) -> None:
    for num_tokens, plans in found["rows"].items():
        shown = []
        for name, rows in plans.items():
            place_n, right_n, exact_n, lost_n = torch.tensor(rows).double().T
            parts = [place_n * EIGHTHS // PAGE_TOKENS == number for number in range(EIGHTHS)]
            shares = [float(right_n[part].sum() / exact_n[part].sum().clamp_min(1)) for part in parts]
            lost = [float(lost_n[part].mean()) for part in parts]
            share = cell(ratio_and_error(right_n, exact_n), digits=3) if exact_n.any() else ""
            whole = share, cell(mean_and_error(lost_n), digits=3)
            eighths = " ".join(f"{share:.3f}" for share in shares), " ".join(f"{one:.3f}" for one in lost)
            shown.append((name, len(rows), whole[0], f"{min(shares):.3f}", whole[1], f"{max(lost):.3f}", *eighths))
        head = ("plan", "rows", "of 16 bits'", "worst eighth", "nats lost", "worst", "of 16 bits', by eighths", "nats")
        print_table(f"Rows in texts of {num_tokens} tokens", head, shown)


if __name__ == "__main__":
    main()
