"""Profiles a model on your own JSONL: each layer's sensitivity to KV quantization, keys and values apart.

    python examples/own_data.py
    python examples/own_data.py --data texts.jsonl --columns text --model path/to/model

Every line is one JSON object. Without --data, a small file of questions and answers is written first.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from kvcal.data.sequences import DataSpec
from kvcal.data.tasks import problems
from kvcal.folder import Folder
from kvcal.models.load import load
from kvcal.progress import Silent
from kvcal.recipe import AllocateSpec, ProfileSpec, Recipe
from kvcal.run.pipeline import profile_recipe


def write_sample(path: Path) -> None:
    """200 ledgers as lines of {"question", "answer"}."""
    lines = [json.dumps({"question": p.prompt_text, "answer": p.completion}) for p in problems("ledger", 200, seed=0)]
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile a model on your own JSONL.")
    parser.add_argument("--model", default="reasoner-10m", help="folder, hub id or embedded name")
    parser.add_argument("--data", type=Path, help="a JSONL file")
    parser.add_argument("--columns", help="a column of text or messages, or two: prompt,completion")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=512)
    arguments = parser.parse_args()

    loaded = load(arguments.model)
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(Path(name))
        path = arguments.data or folder.path / "ledgers.jsonl"
        if arguments.data is None:
            write_sample(path)
        columns = tuple((arguments.columns or "").split(",")) if arguments.columns else ()
        recipe = Recipe(
            name="own-data",
            data=DataSpec(str(path), num_samples=arguments.samples, seq_len=arguments.seq_len, columns=columns),
            profile=ProfileSpec(num_bits=(2, 4), k_axes=("channel",), group_sizes=(128,), kl_samples=0),
            allocate=AllocateSpec(bits=3.0, objective="sensitivity"),
        )
        profile = profile_recipe(recipe, loaded, folder, Silent())

    subject = profile.subject
    print(f"{subject.num_samples} sequences, {subject.num_tokens} tokens of {subject.data_description}")
    for layer in subject.layers:
        worst = {side: float(profile.sensitivity(layer.index, side).sum(0).max()) for side in ("k", "v")}
        print(f"layer {layer.index}: sensitivity at 2 bits: K {worst['k']:.4g}, V {worst['v']:.4g}")


if __name__ == "__main__":
    main()
