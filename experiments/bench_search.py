"""Seconds that a search takes to measure plans, on a random model of a shape.

    python experiments/bench_search.py --shape 8b
    python experiments/bench_search.py --shape 70b --layers 8

The problem, the texts (random tokens, in as many kinds as the mixture has) and the groups of plans are those of
``kvcal search`` by the recipe ``best`` on a GPU; λ is 1. Timed on the first tier of texts: whole plans, with one format
for all keys and one for all values, and all single changes of a plan in its first, its middle and its last layer. A
change costs the less the later its layer is, so that the mean of these three is that of all. What the search announces
for the shape's own number of layers, times these seconds, is its time at most, without fits and validation.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from shared import random_model
from transformers import LlamaConfig

from kvcal.data.parts import KINDS
from kvcal.data.sequences import TokenDataset
from kvcal.geometry import ModelIdentity
from kvcal.models.geometry import geometry_of
from kvcal.models.load import LoadedModel
from kvcal.plan.layer import bare_layers
from kvcal.plan.page_format import SIDES
from kvcal.progress import Silent
from kvcal.recipe_files import load_recipe
from kvcal.stages.divergence import LOCKSTEP
from kvcal.stages.search.compose import Candidate, _near, singles_of
from kvcal.stages.search.compositions import OptionTensors
from kvcal.stages.search.fits import SearchData
from kvcal.stages.search.problem import shared_styles, side_choice
from kvcal.stages.search.stage import Search

GQA = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
SHAPES = {
    "tiny": GQA | {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "vocab_size": 128},
    "8b": GQA | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "70b": GQA | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
}
LAYERS = {"tiny": 4, "8b": 32, "70b": 80}


def search_of(shape: str, num_layers: int, num_tokens: int | None, folder: Path) -> Search:
    """A search in a random model that needs no fits."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LlamaConfig(**SHAPES[shape], num_hidden_layers=num_layers, max_position_embeddings=131072)
    torch.manual_seed(0)
    model = random_model(config, device)
    loaded = LoadedModel(model, None, ModelIdentity("random", "llama", "c", "w", "t"), geometry_of(model), "random")
    recipe, generator = load_recipe("best"), torch.Generator().manual_seed(0)
    assert recipe.search is not None
    count, length = recipe.search.kl_samples, num_tokens or recipe.search.kl_tokens
    tokens = tuple(torch.randint(3, config.vocab_size, (length,), generator=generator) for _ in range(count))
    masks, kinds = tuple(torch.arange(length) > 0 for _ in tokens), (*KINDS, *KINDS, *KINDS, *KINDS)[:count]
    data = TokenDataset(tokens, masks, "f", "random tokens", kinds=kinds)
    job = Search(loaded, recipe, SearchData(data, data, data, data, data), folder / "search.safetensors", Silent())
    ones = {layer.geometry.index: torch.ones(8, 128) for layer in bare_layers(loaded.geometry)}
    rescaled = {option.format for options in job.problem.options for option in options if option.style.rescale}
    vars(job)["brought"] = OptionTensors(dict.fromkeys(rescaled, ones), {})
    return job


def uniform(job: Search, k: int, v: int) -> Candidate:
    """The styles of these numbers for all keys and all values."""
    styles = {"k": shared_styles(job.problem, "k")[k], "v": shared_styles(job.problem, "v")[v]}
    choices = {side: side_choice(job.problem, side, styles[side]) for side in SIDES}
    choice = tuple(choices[unit.side][position] for position, unit in enumerate(job.problem.units))
    return job.composed(f"K {styles['k']}, V {styles['v']}", choice, job.brought)


def changes(job: Search, background: Candidate, layer: int, most: int) -> list[Candidate]:
    """Of the layer's keys and values: ``most`` each, nearest in bytes, as if none bettered another, and 16 bits."""
    problem, current, found = job.problem, background.choice, []
    assert current is not None
    for position, unit in enumerate(problem.units):
        if unit.index == layer:
            options = zip(problem.options[position], problem.nbytes[position], strict=True)
            effects = {(unit.side, option.style): -float(nbytes) for option, nbytes in options}
            for option in _near(problem, position, current[position], effects, most):
                choice = (*current[:position], option, *current[position + 1 :])
                found.append(job.composed(f"change {position} to {option}", choice, job.brought))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--tokens", type=int, help="of a text, instead of the recipe's")
    parser.add_argument("--changed", type=int, nargs="*", help="layers that plans change, instead of these three")
    given = parser.parse_args()
    num_layers = given.layers or LAYERS[given.shape]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = search_of(given.shape, num_layers, given.tokens, Path(folder))
        pool = job.pool("select", stack).pool

        def measure(what: str, candidates: Sequence[Candidate]) -> None:
            start = time.perf_counter()
            kl_PN = pool.table(candidates, pool.tiers[0], what)
            seconds = time.perf_counter() - start
            figures = {"seconds": seconds, "plans": len(candidates), "texts": pool.tiers[0]}
            figures |= {"a plan": seconds / len(candidates), "a plan and layer": seconds / len(candidates) / num_layers}
            print(json.dumps({"what": what, **figures, "KL": float(kl_PN.mean())}), flush=True)

        print(job.announcement(pool.tiers))
        background = uniform(job, 1, 5)
        measure("warm-up", [background, uniform(job, 6, 4)])
        measure("whole plans", [uniform(job, number, number) for number in range(LOCKSTEP)])
        most = singles_of(2 * LAYERS[given.shape])
        for layer in given.changed if given.changed is not None else (0, num_layers // 2, num_layers - 1):
            measure(f"changes of layer {layer}", changes(job, background, layer, most))


if __name__ == "__main__":
    main()
