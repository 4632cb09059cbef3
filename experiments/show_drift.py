"""How far AQUA-KV's predictions drift when pages are written with fp64 products and read with fp32 ones.

    python experiments/show_drift.py --model MODEL --data TEXT [--texts 6]

Layers follow one another as in the cache: keys are predicted from the keys of the layer before, values from its values
and the layer's own keys, all as they are read back; residuals lie on HIGGS's lattice (2 bits, dimension 2). Predictors
are fitted on all texts but the last, and stored in bfloat16. Two readers of the last text's records: one with the
encoder's fp64 products, and one with the runtime's fp32. Prints, for each layer and side, the root mean square of the
quantization error, and that of the difference between the readers, relative to it.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from kvcal.data.sequences import DataSpec, load_sequences
from kvcal.models.load import load
from kvcal.models.taps import Captured, tap
from kvcal.pages.predictor import LinearPredictor
from kvcal.plan.page_format import SIDES, Format, Side
from kvcal.plan.plan import LayerPlan
from kvcal.plan.tensors import lattice_tensors
from kvcal.stages.predictors.regression import NormalEquations, to_linear

TOKENS = 1024


def captured_rows(source: str, data: str, texts: int) -> tuple[list[dict[Side, Tensor]], tuple[LayerPlan, ...]]:
    """Keys before RoPE and values of every layer, fp32 [texts * 1024, N D]; and layers on the lattice."""
    loaded = load(source, device="cpu")
    assert loaded.tokenizer is not None
    spec = DataSpec(source=data, num_samples=texts, seq_len=TOKENS)
    found: list[dict[Side, list[Tensor]]] = [{"k": [], "v": []} for _ in loaded.geometry.layers]

    def take(captured: Captured) -> None:
        for side, x in zip(SIDES, (captured.k_pre_BNTD, captured.v_BNTD), strict=True):
            assert x is not None
            found[captured.layer][side].append(x[0].float().transpose(0, 1).flatten(1))

    with torch.no_grad(), tap(loaded.model, take, loaded.geometry):
        for tokens_T in load_sequences(spec, loaded.tokenizer, purpose="fit").sequences:
            loaded.model(tokens_T[None, :TOKENS], use_cache=False)
    lattice = Format(2, lattice_dim=2)
    layers = tuple(LayerPlan(geometry, (lattice,), (lattice,)) for geometry in loaded.geometry.layers)
    return [{side: torch.cat(rows) for side, rows in layer.items()} for layer in found], layers


def read(values: Tensor, predictor: LinearPredictor | None, inputs: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Decoded residuals [T, N D] with the prediction from ``inputs``, by products in ``dtype``."""
    if predictor is None:
        return values
    x = torch.cat(inputs, dim=-1)
    if dtype == torch.float32:
        return values + predictor.apply(x.float())
    weight, bias = predictor.dense()
    return values + (x.double() @ weight.T + bias)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--texts", type=int, default=6)
    given = parser.parse_args()
    rows, layers = captured_rows(given.model, given.data, given.texts)
    tensors = lattice_tensors(layers)
    exact, before = torch.float64, {dtype: dict[Side, Tensor]() for dtype in (torch.float64, torch.float32)}
    ratios = []
    for layer, mine in zip(layers, rows, strict=True):
        index, heads, line = layer.geometry.index, layer.attention.num_kv_heads, ""
        now = {dtype: dict[Side, Tensor]() for dtype in before}
        for side in SIDES:
            inputs = {
                dtype: [before[dtype][side], *([now[dtype]["k"]] if side == "v" else [])] if before[dtype] else []
                for dtype in before
            }
            predictor = None
            if inputs[exact]:
                x, fit = torch.cat(inputs[exact], dim=-1), slice(0, -TOKENS)
                sums = NormalEquations.empty(x.shape[1], mine[side].shape[1])
                predictor = to_linear(sums.update(x[fit], mine[side][fit]).solve(), "bfloat16")
            residual = mine[side] - read(torch.zeros_like(mine[side]), predictor, inputs[exact], exact)
            (layout,) = layer.layouts(side, "bfloat16")
            operands = {name: tensors[key] for name, (key, _) in layout.plan_tensors(f"layers.{index}.{side}").items()}
            pages = residual.float().unflatten(0, (-1, 128)).unflatten(-1, (heads, -1)).transpose(1, 2)
            decoded = layout.decode_pages(layout.encode_pages(pages, operands), heads, operands)
            values = decoded.transpose(1, 2).flatten(2).flatten(0, 1)
            for dtype in before:
                now[dtype][side] = read(values, predictor, inputs[dtype], dtype)
            wide, narrow, true = now[exact][side][-TOKENS:], now[torch.float32][side][-TOKENS:], mine[side][-TOKENS:]
            error, drift = ((a.double() - b).square().mean().sqrt() for a, b in ((wide, true), (narrow, wide)))
            ratios.append(float(drift / error))
            line += (
                f"  {side}: largest {float(true.abs().max()):.4g}, error {error:.3g}, drift / error {ratios[-1]:.1e}"
            )
        before = now
        print(f"layer {index}{line}", flush=True)
    print(f"largest drift / error: {max(ratios):.1e}")


if __name__ == "__main__":
    main()
