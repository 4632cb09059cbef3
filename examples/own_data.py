"""Profiles a model on your own JSONL: the KL that 2 bits cost in each layer, keys and values apart.

    python examples/own_data.py
    python examples/own_data.py --data texts.jsonl --columns text --model path/to/model

Every line is one JSON object. Without --data, a small file of questions and answers is written first. The example runs
`kvcal profile --json` with the default recipe on short text, and reads what it prints.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from kvcal.data.tasks import problems

# One text for the KL, which is enough to show the layers apart; `kvcal plan` reads more.
SHORT = ("profile.kl_samples=1", "profile.kl_tokens=320")


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
        data = arguments.data or folder / "ledgers.jsonl"
        if arguments.data is None:
            write_sample(data)
        source = f"{data},columns={arguments.columns}" if arguments.columns else str(data)
        command = [sys.executable, "-m", "kvcal", "profile", arguments.model, "--json", "--quiet"]
        command += ["--out", str(folder), "--data", source]
        command += ["--samples", str(arguments.samples), "--seq-len", str(arguments.seq_len)]
        command += [word for knob in SHORT for word in ("--set", knob)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(done.returncode)
        profile = json.loads(done.stdout)

    print(f"KL to 16 bits of 2 bits on {data.name}")
    for layer in profile["layers"]:
        kl = {side: layer[side]["kl"][0] for side in ("k", "v")}
        print(f"layer {layer['layer']}: K {kl['k']:.4g}, V {kl['v']:.4g}")


if __name__ == "__main__":
    main()
