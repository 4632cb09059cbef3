"""Profiles a model on your own JSONL: each layer's sensitivity to KV quantization, keys and values apart.

    python examples/own_data.py
    python examples/own_data.py --data texts.jsonl --columns text --model path/to/model

Every line is one JSON object. Without --data, a small file of questions and answers is written first. The example runs
`kvcal profile --json` with a short recipe, and reads what it prints.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from kvcal.data.tasks import problems

RECIPE = """
[profile]
num_bits = [2, 4]
k_axes = ["channel"]
group_sizes = [128]
kl_samples = 0

[allocate]
bits = 3.0
objective = "sensitivity"
"""


def write_sample(path: Path) -> None:
    """200 ledgers as lines of {"question", "answer"}."""
    lines = [json.dumps({"question": p.prompt_text, "answer": p.completion}) for p in problems("ledger", 200, seed=0)]
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile a model on your own JSONL.")
    parser.add_argument("--model", default="reasoner-10m", help="folder, hub id or embedded name")
    parser.add_argument("--data", type=Path, help="a JSONL file")
    parser.add_argument("--columns", help="a column of text or messages, or two: prompt+completion")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=512)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "short.toml").write_text(RECIPE)
        data = arguments.data or folder / "ledgers.jsonl"
        if arguments.data is None:
            write_sample(data)
        source = f"{data},columns={arguments.columns}" if arguments.columns else str(data)
        command = [sys.executable, "-m", "kvcal", "profile", arguments.model, "--json", "--quiet"]
        command += ["--out", str(folder), "--recipe", str(folder / "short.toml"), "--data", source]
        command += ["--samples", str(arguments.samples), "--seq-len", str(arguments.seq_len)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(done.returncode)
        profile = json.loads(done.stdout)

    print(f"sensitivity to 2 bits on {data.name}")
    for layer in profile["layers"]:
        worst = {side: max(map(sum, zip(*layer[side]["sensitivity"], strict=True))) for side in ("k", "v")}
        print(f"layer {layer['layer']}: K {worst['k']:.4g}, V {worst['v']:.4g}")


if __name__ == "__main__":
    main()
