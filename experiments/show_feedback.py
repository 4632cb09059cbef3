"""Error feedback and rotated pages against plain pages: KL to 16 bits through the packed cache, on texts of kinds that
no Hessian was calibrated on.

    python experiments/show_feedback.py --fit wikitext2/wiki.test.raw --on gutenberg --on tasks --out feedback.json

Errors are standard errors over texts; a row's "of plain" is the ratio of mean KL to the plain page of the same bits and
boosted channels, with the paired error of the difference in units of the plain KL. Damping is 0.03 and positions are
stretched by 4, unless a row names others. There are 4 sinks and no windows, so that nearly everything that is read was
quantized.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from shared import arguments, layers_with, print_table, ratio_and_error, texts_of_length
from torch import Tensor

from kvcal.data.sequences import DataSpec, TokenDataset
from kvcal.models.load import LoadedModel, load
from kvcal.models.projections import output_weights
from kvcal.models.taps import Captured, tap
from kvcal.pages.error_feedback import feedback_factor, round_with_feedback
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.pages.uniform import quantize
from kvcal.plan.page_format import Boost, Format, Side, Tier
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import lattice_tensors
from kvcal.progress import Silent
from kvcal.recipe import FeedbackSpec
from kvcal.stages.basis import run_basis
from kvcal.stages.divergence import deviations, unquantized_plan
from kvcal.stages.hessians import output_products, query_products

DAMPINGS = (0.003, 0.01, 0.1)
SINKS = 4


@dataclass(frozen=True)
class Case:
    """One plan; ``sides``: those with feedback."""

    name: str
    num_bits: int
    k: Format
    v: Format
    sides: tuple[Side, ...] = ()
    damping: float = 0.03
    position_scale: float = 4.0


def cases() -> list[Case]:
    boost = Boost("magnitude", (Tier(4, 0.125),))
    found = []
    for bits in (2, 3, 4):
        k = Format(bits, "channel", 128, SINKS)
        v = Format(bits, "token", 128, SINKS)
        turned = replace(v, quantizer="rotated")
        found += [
            Case("plain", bits, k, v),
            Case("feedback on K", bits, k, v, ("k",)),
            Case("feedback on V", bits, k, v, ("v",)),
            Case("feedback on both", bits, k, v, ("k", "v")),
            Case("V rotated", bits, k, turned),
            Case("V rotated, feedback on both", bits, k, turned, ("k", "v")),
        ]
        if bits == 4:
            boosted = replace(k, boost=Boost("magnitude", (Tier(8, 0.125),)))
            found += [
                Case("12.5 % of K at 8 bits", bits, boosted, v),
                Case("12.5 % of K at 8 bits, feedback on both", bits, boosted, v, ("k", "v")),
            ]
        if bits == 2:
            boosted = replace(k, boost=boost)
            found += [
                Case("K and V rotated, feedback on both", bits, turned, turned, ("k", "v")),
                Case("K and V rotated", bits, turned, turned),
                Case("12.5 % of K at 4 bits", bits, boosted, v),
                Case("12.5 % of K at 4 bits, V rotated", bits, boosted, turned),
                Case("12.5 % of K at 4 bits, feedback on both", bits, boosted, v, ("k", "v")),
                Case("12.5 % of K at 4 bits, V rotated, feedback on both", bits, boosted, turned, ("k", "v")),
            ]
            found += [Case(f"feedback on both, damping {d}", bits, k, v, ("k", "v"), d) for d in DAMPINGS]
            found += [Case("feedback on both, positions x 1", bits, k, v, ("k", "v"), 0.03, 1.0)]
    return found


def plan_of(loaded: LoadedModel, case: Case, fit: TokenDataset) -> Plan:
    layers = layers_with(loaded, case.k, case.v)
    tensors = lattice_tensors(layers)
    if case.sides:
        spec = FeedbackSpec(case.sides, damping=case.damping, position_scale=case.position_scale)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "feedback.safetensors"
            record = run_basis(loaded, layers, tensors, fit, spec, {}, path, Silent())
        layers, tensors = record.apply(layers), tensors | record.tensors()
    return Plan(loaded.identity, loaded.geometry.cache_dtype, layers, Workload(8, 32768), {}, tensors)


def number_of_plain(every: Sequence[Case], case: Case) -> int:
    """The row that a row is compared with: without feedback and rotation, of the same channels."""
    boosted = case.k.boost is not None
    alike = [other.num_bits == case.num_bits and (other.k.boost is not None) == boosted for other in every]
    names = ("plain", "12.5 % of K at 4 bits", "12.5 % of K at 8 bits")
    return next(n for n, other in enumerate(every) if alike[n] and other.name in names)


def measure(loaded: LoadedModel, plans: Sequence[Plan], data: TokenDataset) -> tuple[Tensor, Tensor]:
    """Sums of KL [P, texts] and counts [texts] of the loss tokens; texts of equal length are fed together."""
    reference = unquantized_plan(loaded.identity, loaded.geometry)
    tokens_BT, mask_BT = torch.stack(list(data.sequences)), torch.stack(list(data.loss_masks))
    found = deviations(loaded.model, reference, plans, tokens_BT, mask_BT)
    sums = torch.zeros(len(plans), len(tokens_BT), dtype=torch.float64)
    return sums.index_add_(1, found.sequence_n, found.kl_Pn), mask_BT.sum(1).double()


def weighted_errors(loaded: LoadedModel, fit: TokenDataset, data: TokenDataset) -> list[list[object]]:
    """e H e' of unseen keys and values with feedback, relative to without: a mean over layers, by side and bits."""
    found: dict[tuple[Side, int], list[list[float]]] = {}
    weights = output_weights(loaded.model, loaded.geometry)
    captured = [_captured(loaded, texts) for texts in (fit, data)]
    for index, weight in weights.items():
        (queries, _, _), (unseen, keys, values) = (of[index] for of in captured)
        heads = keys.shape[1]
        position_T = torch.arange(queries.shape[1])
        hessians = [query_products(q, heads, position_T) for q in (queries, unseen)]
        for side, x, (of_fit, of_unseen) in (
            ("k", keys, hessians),
            ("v", values, [output_products(weight, heads)] * 2),
        ):
            for bits in (2, 3):
                codes, *grid = quantize(x, bits, PAGE_TOKENS, -2 if side == "k" else -1, torch.float16)
                step, zero = (part.float().expand_as(x) for part in grid)
                levels, ratios = torch.tensor(2.0**bits - 1), []
                plain = _weighted(codes * step + zero - x, of_unseen)
                diagonal = of_fit.diagonal(dim1=1, dim2=2)
                natural = torch.arange(x.shape[-1]).expand(heads, -1)
                for damping, order in (
                    *((damping, natural) for damping in (*DAMPINGS[:2], 0.03, *DAMPINGS[2:], 0.3)),
                    (0.03, diagonal.argsort(-1, descending=True)),
                    (0.03, diagonal.argsort(-1)),
                ):
                    ordered = torch.stack([H[row][:, row] for H, row in zip(of_fit, order, strict=True)])
                    factor, _ = feedback_factor(ordered, damping)
                    place = order[None, :, None].expand_as(x)
                    values, steps, zeros = (part.gather(-1, place) for part in (x, step, zero))
                    chosen, _ = round_with_feedback(values, steps, zeros, levels, factor)
                    back = chosen.gather(-1, order.argsort(-1)[None, :, None].expand_as(x))
                    ratios.append(_weighted(back * step + zero - x, of_unseen) / plain)
                found.setdefault((side, bits), []).append(ratios)
    means = {place: torch.tensor(ratios).mean(0).tolist() for place, ratios in found.items()}
    return [[side, bits, *(f"{ratio:.3f}" for ratio in row)] for (side, bits), row in sorted(means.items())]


def _captured(loaded: LoadedModel, data: TokenDataset) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """{layer: queries [H, T, D] of all texts in a row, keys and values [M, N, 128, D] of their pages, bf16 in fp32}."""
    found: dict[int, list[Captured]] = {}
    for tokens_T in data.sequences:
        with torch.no_grad(), tap(loaded.model, lambda c: found.setdefault(c.layer, []).append(c), loaded.geometry):
            loaded.model(input_ids=tokens_T[None], use_cache=False)

    def pages(parts: list[Tensor]) -> Tensor:
        whole = [part[0, :, : part.shape[2] // PAGE_TOKENS * PAGE_TOKENS] for part in parts]
        return torch.cat(whole, 1).unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1).bfloat16().float()

    return {
        index: (
            torch.cat([c.q_post_BHTD[0] for c in every], 1),
            pages([c.k_post_BNTD for c in every]),
            pages([c.v_BNTD for c in every]),
        )
        for index, every in found.items()
    }


def _weighted(error: Tensor, hessian_NDD: Tensor) -> float:
    return float(torch.einsum("mntd,nde,mnte->", error.double(), hessian_NDD, error.double()))


def main() -> None:
    parser = arguments(__doc__, is_out_required=False)
    parser.add_argument("--fit", required=True, help="text that Hessians are calibrated on: a source as in [data]")
    parser.add_argument("--on", required=True, action="append", help="texts to measure on; may be repeated")
    parser.add_argument("--texts", type=int, default=6, help="of each kind")
    parser.add_argument("--tokens", type=int, default=512, help="of each text")
    parser.add_argument(
        "--fit-tokens", type=int, default=512, help="of each of 8 texts that Hessians are calibrated on"
    )
    parser.add_argument("--only", action="append", help="rows of this name at 2 bits alone; may be repeated")
    parser.add_argument("--weighted", action="store_true", help="weighted errors of keys and values alone, on a CPU")
    given = parser.parse_args()
    loaded = load(given.model, device=given.device)
    fit_spec = DataSpec(given.fit, 4 * 8, given.fit_tokens, min_len=given.fit_tokens)
    fit = texts_of_length(loaded, fit_spec, 8, "fit")
    if given.weighted:
        unseen = texts_of_length(loaded, DataSpec(given.on[0], 4 * 4, given.tokens, seed=1), 4, "report")
        head = ["side", "bits", *(f"damping {d}" for d in (0.003, 0.01, 0.03, 0.1, 0.3)), "loud first", "quiet first"]
        print_table("Weighted error with feedback, relative to without", head, weighted_errors(loaded, fit, unseen))
        return
    every = [case for case in cases() if given.only is None or (case.num_bits == 2 and case.name in given.only)]
    plans = [plan_of(loaded, case, fit) for case in every]
    results = []
    for source in given.on:
        spec = DataSpec(source, 4 * given.texts, given.tokens, seed=1)
        data = texts_of_length(loaded, spec, given.texts, "report")
        sums, counts = measure(loaded, plans, data)
        rows = []
        for number, (case, plan) in enumerate(zip(every, plans, strict=True)):
            plain = number_of_plain(every, case)
            kl, error = ratio_and_error(sums[number], counts)
            plain_kl, _ = ratio_and_error(sums[plain], counts)
            _, change_error = ratio_and_error(sums[number] - sums[plain], counts)
            ratio, ratio_error = kl / plain_kl, change_error / plain_kl
            bits = plan.bits_per_value()
            results.append(
                {"source": Path(source).name, "case": case.name, "num_bits": case.num_bits, "bits": bits, "kl": kl,
                 "error": error, "ratio": ratio, "ratio_error": ratio_error}
            )  # fmt: skip
            told = "" if number == plain else f"{ratio:.2f} ± {ratio_error:.2f}"
            rows.append([case.num_bits, case.name, f"{bits:.3f}", f"{kl:.5f} ± {error:.5f}", told])
        head = ["bits", "pages", "all-in bits, 8 x 32,768", "KL", "of plain"]
        print_table(f"{Path(source).name}: {given.texts} x {given.tokens} tokens", head, rows)
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
