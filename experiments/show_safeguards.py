"""What a search ships without each of its safeguards, on texts and kinds of text that calibration never saw.

    python experiments/show_safeguards.py --data "python:docs python:code" --bits 2.5 3 --work FOLDER --out kl.json

One search with all of them at every budget, and one without each, in a folder of its own that starts with what the
first measured. Then the plans that ship, on held-out texts of --kinds: KL x 1,000, and paired differences to the plan
of the whole search. Options are those of show_search.py; the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from shared import mean_and_error, print_table
from show_search import measure, search_arguments, searched

from kvcal.models.load import load
from kvcal.plan.plan import load_plan
from kvcal.stages.search import compose, judge
from kvcal.stages.search import stage as search

Patch = tuple[Any, str, Any]


def on_selection(plan: Any, other: Any, select: Any, validate: Any) -> bool:
    return judge.better(plan, other, select, select)


def of_one_kind(kinds: Sequence[str], *rest: Any) -> judge.Pool[Any]:
    return judge.Pool(("all",) * len(kinds), *rest)


def unshrunk(estimates: Sequence[float], errors: Sequence[float]) -> tuple[list[float], list[float]]:
    return list(estimates), list(errors)


def unguarded(champion: Any, *others: Any) -> Any:
    return champion


WITHOUT: dict[str, tuple[Patch, ...]] = {
    "nothing": (),
    "validation": (
        (compose, "better", on_selection), (search, "better", on_selection), (compose, "guarded", unguarded),
    ),
    "significance": ((judge, "SIGNIFICANT", 0.0), (compose, "SIGNIFICANT", 0.0)),
    "the worst kind": ((search, "Pool", of_one_kind),),
    "shrinking": ((compose, "shrink", unshrunk),),
    "caution": ((compose, "CAUTION", (0.0,)),),
}  # fmt: skip


@contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    with ExitStack() as stack:
        for place, name, other in patches:
            stack.enter_context(mock.patch.object(place, name, other))
        yield


def ship(
    given: argparse.Namespace, loaded: Any, tell: Callable[[str], None]
) -> dict[tuple[str, float], dict[str, Any]]:
    """What the searches found, by what they went without and budget."""
    found, first = {}, given.work / "nothing"
    for name, patches in WITHOUT.items():
        folder = given.work / name.replace(" ", "-")
        if name != "nothing" and not folder.exists():
            shutil.copytree(
                first, folder, ignore=shutil.ignore_patterns("*.json", "*.plan", "*earlier-*", "search.safetensors")
            )
        one = argparse.Namespace(**vars(given) | {"work": folder})
        with patched(patches):
            for bits in sorted(given.bits):
                found[name, bits] = searched(one, loaded, given.data[0], bits)
                tell(f"without {name}, {bits:g} bits: {found[name, bits]['shipped']}")
    return found


def main() -> None:
    given = search_arguments(__doc__).parse_args()
    loaded = load(given.model, device=given.device)
    found = ship(given, loaded, lambda line: print(line, flush=True))
    kl = measure(given, loaded, {body["plans"]["shipped"] for body in found.values()})
    for bits in sorted(given.bits):
        whole, rows = found["nothing", bits]["plans"]["shipped"], []
        for name in WITHOUT:
            body = found[name, bits]
            file = body["plans"]["shipped"]
            cells = [f"{1e3 * body['kl']['shipped'][pool][0]:.1f}" for pool in ("select", "validate")]
            for of_kind in kl.values():
                mine, all_of_them = (torch.tensor(of_kind[one], dtype=torch.float64) for one in (file, whole))
                (mean, error), (change, off) = mean_and_error(1e3 * mine), mean_and_error(1e3 * (mine - all_of_them))
                cells.append(f"{mean:.1f} ± {error:.1f}" + (f" ({change:+.1f} ± {off:.1f})" if change else ""))
            rows.append([name, body["shipped"], f"{load_plan(file).bits_per_value():.3f}", *cells])
        head = ["without", "ships", "bits", "select", "validate", *kl]
        print_table(f"{given.data[0]}, {bits:g} bits: KL x 1,000 (less that of the whole search)", head, rows)


if __name__ == "__main__":
    main()
