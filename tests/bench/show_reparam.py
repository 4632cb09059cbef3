"""PM-KVQ's reparameterization on real task text: does λ help, and does it matter at which positions it is calibrated?

    python tests/bench/show_reparam.py --model reasoner-10m --device auto --out reparam.json [--quick]

Texts of 4 L tokens come in two halves: calibration and test. λ is calibrated on the first L tokens of the calibration
texts at positions x 1, 2, 4 and 8, and on all 4 L of their tokens; what it should be is what all tokens of the test
texts say. The paper's claim (Sec. 3.3, Table 5): positions x 4 make L tokens stand for 4 L.

1. Distance of λ to the test texts' λ, before α: root mean square of the difference of log λ, and Spearman's rank
   correlation of λ within a head; for slow pairs (a period beyond L tokens), the others, and all. Errors are standard
   errors over groups of texts. The row "4 L tokens" is how well real long text does.
2. Squared error of the attention blocks' outputs on the test texts, read decode-faithfully, with keys per token at 2
   and at 4 bits: without λ, and with the λ and α that each calibration chose by itself.
3. KL to 16 bits on the test texts through the packed cache with the same λ: keys alone, then keys and values.

Errors of 2 and 3 are standard errors over texts; their differences to "without λ" are paired.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kvcal.data import DataSpec, TokenDataset, load_sequences
from kvcal.models.load import LoadedModel, load
from kvcal.models.reread import rereading
from kvcal.models.rotary import RotaryMap, rotary_maps
from kvcal.plan import RAW, Format, LayerPlan, Plan, Workload, bare_layers
from kvcal.progress import Silent
from kvcal.specs import ReparamSpec
from kvcal.stages.divergence import divergences, unquantized_plan
from kvcal.stages.reparam import Reparam, run_reparam
from kvcal.stages.reparam_search import lambda_of, page_segments, read_back
from kvcal.stages.reparam_statistics import KeyStatistics, key_statistics
from kvcal.strict import dump

STRETCH = 4
SCALES = (1.0, 2.0, 4.0, 8.0)
# Name -> layers and plan tensors.
Ways = Mapping[str, tuple[tuple[LayerPlan, ...], dict[str, Tensor]]]


@dataclass(frozen=True)
class Texts:
    """int64 [4 L] each; ``is_loss`` bool [4 L] each: tokens whose prediction counts."""

    tokens: tuple[Tensor, ...]
    is_loss: tuple[Tensor, ...]

    def dataset(self, length: int) -> TokenDataset:
        """The first ``length`` tokens of every text."""
        tokens = tuple(text[:length] for text in self.tokens)
        return TokenDataset(tokens, tuple(mask[:length] for mask in self.is_loss), "show", f"{length} tokens")


def load_texts(loaded: LoadedModel, source: str, count: int, length: int) -> tuple[Texts, Texts]:
    """(calibration, test): ``count`` texts each, of ``length`` tokens."""
    assert loaded.tokenizer is not None
    data = load_sequences(DataSpec(source, num_samples=24 * count, seq_len=length, seed=3), loaded.tokenizer)
    long = [number for number, tokens in enumerate(data.sequences) if len(tokens) == length][: 2 * count]
    if len(long) < 2 * count:
        raise SystemExit(f"{len(long)} texts of {source} have {length} tokens, {2 * count} were asked for")
    halves = (long[:count], long[count:])
    found = [Texts(*(tuple(part[i] for i in half) for part in (data.sequences, data.loss_masks))) for half in halves]
    return found[0], found[1]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    found = torch.tensor(values, dtype=torch.float64)
    return float(found.mean()), float(found.std() / math.sqrt(len(found))) if len(found) > 1 else 0.0


def ranks(values: Tensor) -> Tensor:
    """Ranks along the last dimension; ties (the channels of a pair) share their mean rank."""
    below = (values[..., None, :] < values[..., :, None]).sum(-1)
    equal = (values[..., None, :] == values[..., :, None]).sum(-1)
    return (below + (equal - 1) / 2).double()


def spearman(one_ND: Tensor, other_ND: Tensor) -> float:
    """Mean over heads."""
    pair = torch.stack([ranks(one_ND), ranks(other_ND)])
    pair = pair - pair.mean(-1, keepdim=True)
    return float((pair.prod(0).sum(-1) / pair.square().sum(-1).prod(0).sqrt()).mean())


def log_lambdas(
    loaded: LoadedModel, maps: Mapping[int, RotaryMap], texts: Sequence[Tensor], num_tokens: int, scale: float
) -> dict[int, Tensor]:
    """log λ at α = 1, {layer: fp64 [N, D]}."""
    total: dict[int, KeyStatistics] = {}
    for tokens in texts:
        for index, found in key_statistics(loaded, tokens[:num_tokens], scale, dict.fromkeys(maps, 1)).items():
            total[index] = total[index].merge(found) if index in total else found
    return {
        index: lambda_of(found.magnitude(torch.zeros_like(found.offset)), maps[index].pairs, 1.0, False).double().log()
        for index, found in total.items()
    }


def distances(
    loaded: LoadedModel, maps: Mapping[int, RotaryMap], texts: Texts, test: Texts, length: int, group: int
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Calibration -> part -> [(distance, error), (Spearman, error)] to the λ of the test texts, by groups of texts."""
    calibrations = {f"L tokens x {scale:g}": (length // STRETCH, scale) for scale in SCALES}
    calibrations["4 L tokens"] = (length, 1.0)
    slow = {index: 2 * math.pi / found.frequency > length // STRETCH for index, found in maps.items()}
    channels = {"slow": {index: found.pairs[slow[index]].flatten() for index, found in maps.items()}}
    channels["fast"] = {index: found.pairs[~slow[index]].flatten() for index, found in maps.items()}
    channels["all"] = {index: found.pairs.flatten() for index, found in maps.items()}
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for first in range(0, len(texts.tokens) - group + 1, group):
        target = log_lambdas(loaded, maps, test.tokens[first : first + group], length, 1.0)
        for name, (num_tokens, scale) in calibrations.items():
            found = log_lambdas(loaded, maps, texts.tokens[first : first + group], num_tokens, scale)
            for part, of_layer in channels.items():
                both = [(found[i][:, of_layer[i]], target[i][:, of_layer[i]]) for i in maps if len(of_layer[i]) > 2]
                squares = torch.cat([(a - b).square().flatten() for a, b in both])
                correlation = sum(spearman(a, b) for a, b in both) / len(both)
                measured.setdefault((name, part), []).append((float(squares.mean().sqrt()), correlation))
    rows: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in calibrations}
    for (name, part), values in measured.items():
        rows[name][part] = [mean_and_error([value[i] for value in values]) for i in (0, 1)]
    return rows


def layers_with(loaded: LoadedModel, k: Format, v: Format) -> tuple[LayerPlan, ...]:
    bare = bare_layers(loaded.geometry)
    return tuple(replace(layer, k=(k,), v=(v,)) if layer.is_paged else layer for layer in bare)


def calibrated(loaded: LoadedModel, fmt: Format, texts: Texts, length: int, steps: int) -> dict[str, Reparam]:
    """Each calibration's λ, by its own search."""
    short, layers = length // STRETCH, layers_with(loaded, fmt, RAW)
    wanted = {f"L tokens x {scale:g}": (short, ReparamSpec(scale, steps)) for scale in SCALES}
    wanted["4 L tokens"] = (length, ReparamSpec(1.0, steps))
    wanted["L tokens x 4, offset"] = (short, ReparamSpec(4.0, steps, offset=True))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (num_tokens, spec) in wanted.items():
            path = Path(folder) / f"{num_tokens}-{spec.position_scale}-{spec.offset}.safetensors"
            found[name] = run_reparam(loaded, layers, {}, texts.dataset(num_tokens), spec, {}, path, Silent())
            print(f"calibrated: {fmt.num_bits} bits, {name}", flush=True)
    return found


def attention_errors(loaded: LoadedModel, ways: Ways, texts: Texts) -> dict[str, list[float]]:
    """Way -> for each text, the mean over layers of (squared error / energy) of the block's output."""
    device, dtype = loaded.model.device, loaded.geometry.cache_dtype
    tensors = {name: {key: t.to(device) for key, t in found.items()} for name, (_, found) in ways.items()}
    layers = {name: {layer.geometry.index: layer for layer in way} for name, (way, _) in ways.items()}
    errors: dict[str, list[float]] = {name: [] for name in ways}
    for tokens in texts.tokens:
        found: dict[str, list[float]] = {name: [] for name in ways}

        def measure(captured, reread, found=found):  # type: ignore[no-untyped-def]
            some = layers["without λ"][captured.layer]
            if some.is_paged:
                segments = page_segments(some, captured.k_post_BNTD.shape[2])
                exact = reread(captured.k_post_BNTD, segments).double()
                for name in ways:
                    layer = layers[name][captured.layer]
                    read = reread(read_back(layer, dtype, tensors[name], captured.k_post_BNTD), segments)
                    found[name].append(float((read.double() - exact).square().sum() / exact.square().sum()))

        with rereading(loaded.model, measure, loaded.geometry):
            loaded.model(input_ids=tokens[None].to(device), use_cache=False)
        for name, values in found.items():
            errors[name].append(sum(values) / len(values))
    return errors


def text_kl(loaded: LoadedModel, ways: Ways, texts: Texts) -> dict[str, list[float]]:
    """Way -> KL to 16 bits in nats per loss token of each text, through the packed cache."""
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    workload = Workload(1, len(texts.tokens[0]))
    plans = [
        Plan(loaded.identity, reference.cache_dtype, layers, workload, {}, tensors) for layers, tensors in ways.values()
    ]
    found: dict[str, list[float]] = {name: [] for name in ways}
    for tokens, is_loss in zip(texts.tokens, texts.is_loss, strict=True):
        means = divergences(loaded.model, reference, plans, tokens[None], is_loss[None]).mean(1)
        for name, value in zip(ways, means.tolist(), strict=True):
            found[name].append(value)
    return found


def show(title: str, values: Mapping[str, Mapping[str, list[float]]]) -> dict[str, object]:
    """A table of columns x ways, with the paired difference of each to the first way."""
    columns = list(values)
    print(f"\n### {title}\n\n| λ | " + " | ".join(f"{name} | less than without" for name in columns) + " |")
    print("|---" * (1 + 2 * len(columns)) + "|")
    rows: dict[str, object] = {}
    for way in values[columns[0]]:
        cells, row = [], {}
        for column in columns:
            plain, found = values[column]["without λ"], values[column][way]
            row[column] = [mean_and_error(found), mean_and_error([p - f for p, f in zip(plain, found, strict=True)])]
            cells += [f"{mean:.5f} ± {error:.5f}" for mean, error in row[column]]
        print(f"| {way} | " + " | ".join(cells) + " |")
        rows[way] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="reasoner-10m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--source", default="tasks")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=12, help="texts to calibrate on, and as many to test on")
    parser.add_argument("--length", type=int, default=2048, help="4 L")
    parser.add_argument("--quick", action="store_true", help="two short texts and a coarse grid: a smoke run")
    args = parser.parse_args()
    count, length, steps, bits = (2, 1024, 4, (2,)) if args.quick else (args.texts, args.length, 20, (2, 4))
    loaded = load(args.model, device=args.device)
    texts, test = load_texts(loaded, args.source, count, length)
    maps = rotary_maps(loaded.model, loaded.geometry)
    paged = {layer.geometry.index for layer in bare_layers(loaded.geometry) if layer.is_paged}
    maps = {index: found for index, found in maps.items() if index in paged and len(found.pairs)}
    result: dict[str, object] = {"model": args.model, "texts": count, "length": length, "steps": steps}

    rows = distances(loaded, maps, texts, test, length, max(1, count // 4))
    result["distances"] = rows
    print(f"\n### Distance to λ of test texts of {length} tokens (root mean square of log λ at α = 1; Spearman)\n")
    print("| calibrated on | slow pairs | Spearman | fast pairs | Spearman | all | Spearman |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        cells = [f"{mean:.4f} ± {error:.4f}" for part in row.values() for mean, error in part]
        print(f"| {name} | " + " | ".join(cells) + " |")

    for num_bits in bits:
        fmt = Format(num_bits, "token", 128, 1, 32 if args.quick else 128, "float32")
        records = calibrated(loaded, fmt, texts, length, steps)
        result[f"records.{num_bits}"] = {name: [dump(layer) for layer in r.layers] for name, r in records.items()}
        for name, record in records.items():
            print(f"{name}: α by layer {[layer.alpha for layer in record.layers]}")
        columns: dict[str, dict[str, list[float]]] = {}
        for what, v in (("K alone", RAW), ("K and V", fmt)):
            layers = layers_with(loaded, fmt, v)
            ways = {"without λ": (layers, {})} | {name: (r.apply(layers), r.tensors()) for name, r in records.items()}
            if v is RAW:
                columns["attention error"] = attention_errors(loaded, ways, test)
            columns[f"KL, {what}"] = text_kl(loaded, ways, test)
        result[f"errors.{num_bits}"] = show(f"Keys per token at {num_bits} bits", columns)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
