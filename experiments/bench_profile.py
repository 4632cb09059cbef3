"""How the time and peak memory of a profile grow with tokens, samples and layers, on a random model and a CPU.

    python experiments/bench_profile.py [--threads 1] [--hidden 256] [--samples 8] [--seq-len 512]

Each row is a fresh process, since peak memory never falls. Three sweeps of four points, about the middle of which the
others are: samples, tokens of a sample, layers. For each, the slope of log time over log size is printed (1 is linear),
and how far the peaks are apart. Two phases: gradients (a forward, a backward, and all candidates' errors), and
divergence (all plans of one layer's side, in the default recipe's spec, on two texts).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared import print_table

PHASES = ("gradients", "divergence")
SWEEPS = ("samples", "seq_len", "layers")
# Freed tensors go back to the system at once: a peak is of what lives, not of how an allocator happens to cut its heap.
ENVIRONMENT = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def measure(given: argparse.Namespace) -> None:
    """Print a JSON object: CPU seconds of each phase, and the peak of the process in MiB, what was loaded included."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvcal.data.sequences import TokenDataset
    from kvcal.geometry import ModelIdentity
    from kvcal.models.load import LoadedModel
    from kvcal.models.supported_layers import geometry_of
    from kvcal.recipe import CacheSpec, ProfileSpec
    from kvcal.stages.profile.stage import run_profile

    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=given.hidden,
        intermediate_size=3 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config).eval()
    loaded = LoadedModel(model, None, ModelIdentity("random", "llama", "c", "w", "t"), geometry_of(model), "random")
    sequences = tuple(torch.randint(3, 1024, (given.seq_len,)) for _ in range(given.samples))
    masks = tuple(torch.arange(given.seq_len) > 0 for _ in sequences)
    spec = replace(ProfileSpec(), kl_samples=2 if given.seq_len > 200 else 0, kl_tokens=given.seq_len)
    started, seconds = time.process_time(), dict.fromkeys(PHASES, 0.0)

    class Clock:
        """A Reporter: notes the CPU seconds of each phase."""

        def say(self, message: str) -> None:
            print(message, file=sys.stderr)

        def __call__(self, done: int, total: int, label: str) -> None:
            nonlocal started
            if done == 0:
                started = time.process_time()
            seconds[label.removeprefix("profile: ")] = time.process_time() - started

    with tempfile.TemporaryDirectory() as folder:
        data, path = TokenDataset(sequences, masks, "f", "random"), Path(folder) / "profile.safetensors"
        run_profile(loaded, data, spec, CacheSpec(), {}, path, Clock())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**seconds, "peak": peak}))


def slope(sizes: list[int], values: list[float]) -> float:
    """Of log value over log size, by least squares; 0 where a value is 0."""
    if min(values) <= 0:
        return 0.0
    x, y = ([math.log(value) for value in column] for column in (sizes, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("threads", 1), ("hidden", 256), ("samples", 8), ("seq-len", 512), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=SWEEPS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        measure(given)
        return
    for name in given.sweeps:
        middle = getattr(given, name)
        sizes = [middle // 2, middle, 2 * middle, 4 * middle]
        rows: list[dict[str, Any]] = []
        for size in sizes:
            numbers = {**vars(given), name: size}
            options = [
                f"--{key.replace('_', '-')}={value}" for key, value in numbers.items() if key not in ("one", "sweeps")
            ]
            command = [sys.executable, __file__, "--one", *options]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=ENVIRONMENT)
            rows.append({name: size, **json.loads(done.stdout)})
            print(rows[-1], file=sys.stderr, flush=True)
        table = [list(row.values()) for row in rows]
        table.append(["slope", *(slope(sizes, [row[phase] for row in rows]) for phase in PHASES), ""])
        print_table(f"By {name}", [name, *(f"{phase}, CPU s" for phase in PHASES), "peak MiB"], table)


if __name__ == "__main__":
    main()
