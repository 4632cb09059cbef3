"""PM-KVQ's reparameterization on real task text: does λ help, and does it matter at which positions it is calibrated?

    python experiments/show_reparam.py --model reasoner-10m --device auto --out reparam.json [--quick]

Texts of 4 L tokens come in two halves: calibration and test. λ is calibrated on the calibration texts cut into pieces
of L tokens, at positions x 1 and x 4, and on the whole texts: the same tokens each time. What it should be is what the
whole test texts say. The paper's claim (Sec. 3.3, Table 5): positions x 4 make L tokens stand for 4 L.

1. Distance of λ to the test texts' λ, before α (lambda_distances.py): root mean square of the difference of log λ, and
   Spearman's rank correlation of λ within a head; all pairs, slow ones (a period beyond L tokens), the others, and the
   first layer, whose keys before RoPE no position can change. Errors are standard errors over groups of texts.
2. Squared error of the attention blocks' outputs on the test texts, read decode-faithfully, with keys per token at 2
   and at 4 bits: without λ, and with the λ and α that each calibration chose by itself.
3. KL to 16 bits on the test texts through the packed cache with the same λ: keys alone, then keys and values.

Errors of 2 and 3 are standard errors over texts; their differences to "without λ" are paired.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from lambda_distances import STRETCH, Texts, distances
from shared import arguments, layers_with, mean_and_error, print_table, texts_of_length
from torch import Tensor

from kvcal import PlanCache
from kvcal.data.sequences import DataSpec, TokenDataset
from kvcal.models.load import LoadedModel, load
from kvcal.models.rope import rotary_maps
from kvcal.models.taps import rereading
from kvcal.plan.plan import RAW, Format, LayerPlan, Workload, bare_layers
from kvcal.progress import Silent
from kvcal.recipe import ReparamSpec
from kvcal.stages.divergence import kl_divergence, lockstep, unquantized_plan
from kvcal.stages.lambda_candidates import page_segments, read_back
from kvcal.stages.reparam import Reparam, run_reparam
from kvcal.strict import dump

# Name -> layers and plan tensors.
Ways = Mapping[str, tuple[tuple[LayerPlan, ...], dict[str, Tensor]]]


def load_texts(loaded: LoadedModel, source: str, count: int, length: int) -> tuple[Texts, Texts]:
    """(calibration, test): ``count`` texts each, of ``length`` tokens."""
    spec = DataSpec(source, num_samples=40 * count, seq_len=length, seed=3)
    data = texts_of_length(loaded, spec, 2 * count, "fit")
    tokens, masks = data.sequences, data.loss_masks
    return Texts(tokens[:count], masks[:count]), Texts(tokens[count:], masks[count:])


def calibrated(loaded: LoadedModel, fmt: Format, texts: Texts, length: int, steps: int) -> dict[str, Reparam]:
    """Each calibration's λ, by its own search."""
    short, layers = length // STRETCH, layers_with(loaded, fmt, RAW)
    wanted = {f"L tokens x {scale:g}": (short, ReparamSpec(scale, steps)) for scale in (1.0, 4.0)}
    wanted["4 L tokens"] = (length, ReparamSpec(1.0, steps))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (num_tokens, spec) in wanted.items():
            path = Path(folder) / f"{num_tokens}-{spec.position_scale}.safetensors"
            data = TokenDataset(texts.pieces(num_tokens), (), "show", f"pieces of {num_tokens} tokens")
            found[name] = run_reparam(loaded, layers, data, spec, {}, path, Silent())
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
            k_post_BNTD, index = captured.k_post_BNTD, captured.layer
            if not layers["without λ"][index].is_paged:
                return
            segments = page_segments(layers["without λ"][index], k_post_BNTD.shape[2])
            exact = reread(k_post_BNTD, segments).double()
            for name in ways:
                read = reread(read_back(layers[name][index], dtype, tensors[name], k_post_BNTD), segments)
                found[name].append(float((read.double() - exact).square().sum() / exact.square().sum()))

        with rereading(loaded.model, measure, loaded.geometry):
            loaded.model(input_ids=tokens[None].to(device), use_cache=False)
        for name, values in found.items():
            errors[name].append(sum(values) / len(values))
    return errors


def text_kl(loaded: LoadedModel, ways: Ways, texts: Texts) -> dict[str, list[float]]:
    """Way -> KL to 16 bits in nats per loss token of each text, through the packed cache."""
    tokens_BT, wanted_BT = torch.stack(texts.tokens), torch.stack(texts.is_loss)[:, 1:]
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    workload = Workload(len(tokens_BT), tokens_BT.shape[1])
    plans = [replace(reference, layers=layers, tensors=tensors) for layers, tensors in ways.values()]
    caches = [PlanCache(replace(plan, workload=workload), loaded.model.config) for plan in (reference, *plans)]
    sums = torch.zeros(len(caches), len(tokens_BT), dtype=torch.float64)
    expected = torch.empty(0)
    for number, start, logits_BTV in lockstep(loaded.model, caches, tokens_BT):
        stop = min(start + logits_BTV.shape[1], wanted_BT.shape[1])
        logits = logits_BTV[:, : stop - start].flatten(0, 1)
        expected = logits if number == 0 else expected
        kl_BT = kl_divergence(expected, logits).view(len(tokens_BT), -1).cpu()
        sums[number] += (kl_BT * wanted_BT[:, start:stop]).sum(1)
    return dict(zip(ways, (sums[1:] / wanted_BT.sum(1)).tolist(), strict=True))


def show(title: str, values: Mapping[str, Mapping[str, list[float]]]) -> dict[str, object]:
    """A table of columns x ways, with the paired difference of each to the first way."""
    columns = list(values)
    lines, rows = [], {}
    for way in values[columns[0]]:
        cells, row = [], {}
        for column in columns:
            plain, found = values[column]["without λ"], values[column][way]
            row[column] = [mean_and_error(found), mean_and_error([p - f for p, f in zip(plain, found, strict=True)])]
            cells += [f"{mean:.5f} ± {error:.5f}" for mean, error in row[column]]
        lines.append((way, *cells))
        rows[way] = row
    print_table(title, ("λ", *(head for name in columns for head in (name, "less than without"))), lines)
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--source", default="tasks")
    parser.add_argument("--texts", type=int, default=12, help="texts to calibrate on, and as many to test on")
    parser.add_argument("--length", type=int, default=2048, help="4 L")
    parser.add_argument("--steps", type=int, default=20, help="of the grid of α")
    parser.add_argument("--quick", action="store_true", help="two short texts and a coarse grid: a smoke run")
    args = parser.parse_args()
    count, length, steps, bits = (2, 640, 2, (2,)) if args.quick else (args.texts, args.length, args.steps, (2, 4))
    loaded = load(args.model, device=args.device)
    texts, test = load_texts(loaded, args.source, count, length)
    paged = [layer.geometry.index for layer in bare_layers(loaded.geometry) if layer.is_paged]
    maps = {
        i: found for i, found in rotary_maps(loaded.model, loaded.geometry).items() if i in paged and len(found.pairs)
    }
    result: dict[str, object] = {"model": args.model, "texts": count, "length": length, "steps": steps}

    result["distances"] = rows = distances(loaded, maps, texts, test, length, max(1, count // 4))
    print_table(
        f"Distance to λ of test texts of {length} tokens (root mean square of log λ at α = 1; Spearman)",
        (
            "calibrated on",
            *(head for part in ("all", "slow pairs", "fast pairs", "first layer") for head in (part, "Spearman")),
        ),
        [(name, *(f"{m:.4f} ± {e:.4f}" for part in row.values() for m, e in part)) for name, row in rows.items()],
    )

    for num_bits in bits:
        fmt = Format(num_bits, "token", 128, 1, 16 if args.quick else 128, "float32")
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
