"""What the predictor stage adds up from a sequence while its layers come by, and which sequences it holds out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvcal.data.sequences import TokenDataset
from kvcal.errors import UsageError
from kvcal.plan.format import SIDES, Side
from kvcal.plan.layer import LayerPlan
from kvcal.stages.checkpoint import Mean
from kvcal.stages.predictors.choice import Target
from kvcal.stages.predictors.normal_equations import NormalEquations
from kvcal.stages.predictors.reconstruct import LayerPages, Receive, num_page_tokens

FIT, HELD_OUT = "fit", "held_out"

# From a sequence's split and a place for what is found, what receives its layers.
Watch = Callable[[str, dict[str, Mean]], Receive]


def watch_sums(targets: Sequence[Target], split: str, found: dict[str, Mean]) -> Receive:
    """Adds up the normal equations of ``targets``."""
    before: list[LayerPages] = []

    def receive(index: int, exact: LayerPages, read_back: Sequence[LayerPages]) -> None:
        inputs = read_back[0] if read_back else exact
        for target in targets:
            if target.index == index:
                x = before[0].k if target.side == "k" else torch.cat([before[0].v, inputs.k], dim=-1)
                y = exact.side(target.side)
                sums = NormalEquations.empty(x.shape[1], y.shape[1]).update(x, y)
                for name, total in sums.tensors().items():
                    found[f"sums.{target.side}.{split}.{name}"] = Mean(total, sums.count)
        before[:] = [inputs]

    return receive


def watch_errors(targets: Sequence[Target], split: str, found: dict[str, Mean]) -> Receive:
    """Adds up the squared errors of what is read back, in each way."""

    def receive(index: int, exact: LayerPages, read_back: Sequence[LayerPages]) -> None:
        for target in targets:
            if target.index == index:
                wanted = exact.side(target.side).double()
                errors = [(pages.side(target.side).double() - wanted).square().sum(-1) for pages in read_back]
                found[f"errors.{index}.{target.side}"] = Mean.empty((len(errors),)).update(torch.stack(errors, -1))

    return receive


def single_sides(layer: LayerPlan, among: Sequence[Side] = SIDES) -> tuple[Side, ...]:
    """Sides of which all KV heads have one format: those that can be predicted from."""
    return tuple(side for side in among if len(layer.formats(side)) == 1)


def split_sequences(data: TokenDataset, paged: Sequence[LayerPlan], holdout_share: float) -> dict[int, str]:
    """{sequence: FIT or HELD_OUT} of the sequences that fill a page; held-out ones evenly spread, at least one.

    Raises:
        UsageError: fewer than two such sequences.
    """
    lengths = [tokens_T.numel() for tokens_T in data.sequences]
    numbers = [i for i, length in enumerate(lengths) if all(num_page_tokens(layer, length) for layer in paged)]
    if len(numbers) < 2:
        raise UsageError(
            f"{len(numbers)} of {len(lengths)} sequences fill a page behind the sinks; at least 2 are needed, one of "
            "them to hold out",
            hint="give longer sequences, or more of them",
        )
    wanted = min(max(1, round(holdout_share * len(numbers))), len(numbers) - 1)
    held_out = {numbers[(2 * i + 1) * len(numbers) // (2 * wanted)] for i in range(wanted)}
    return {number: HELD_OUT if number in held_out else FIT for number in numbers}
