"""How profile time and peak memory grow with tokens, on the embedded model.

    python experiments/bench_profile.py [--threads 1] [--samples 1 2 4] [--seq-len 256 512 1024]

Each row is a fresh process, since peak memory never falls. Time must grow with samples x tokens (attention adds a
little for long sequences), memory with the length of a sequence only. Two phases: gradients (a forward, a backward,
and all candidates' errors), and divergence (60 caches in lockstep, in the default recipe's spec).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEADER = f"{'samples':>7} {'tokens':>7} {'phase':>11} {'seconds':>8} {'CPU s':>7} {'ms/token':>8} {'peak MiB':>8}"


def measure(num_samples: int, seq_len: int, threads: int) -> None:
    """Print the two rows of one data set; the peak is of the process up to then, what was loaded included."""
    import torch

    from kvcal.data.sequences import DataSpec, load_sequences
    from kvcal.models.load import load
    from kvcal.recipe import CacheSpec, ProfileSpec
    from kvcal.stages.profile import run_profile

    torch.set_num_threads(threads)
    loaded = load("reasoner-10m")
    data = load_sequences(DataSpec(num_samples=num_samples, seq_len=seq_len), loaded.tokenizer)
    spec = ProfileSpec(kl_samples=min(num_samples, ProfileSpec().kl_samples), kl_tokens=seq_len)

    class Clock:
        """A Reporter: prints a row when a phase ends."""

        started = (0.0, 0.0)

        def say(self, message: str) -> None:
            print(message, file=sys.stderr)

        def __call__(self, done: int, total: int, label: str) -> None:
            now = (time.perf_counter(), time.process_time())
            if done == 0:
                self.started = now
            if done < total:
                return
            seconds, cpu = (a - b for a, b in zip(now, self.started, strict=True))
            is_kl = "divergence" in label
            used = data.sequences[: spec.kl_samples] if is_kl else data.sequences
            tokens = sum(sequence.numel() for sequence in used)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            phase = label.removeprefix("profile: ")
            print(
                f"{len(used):7} {tokens:7} {phase:>11} {seconds:8.2f} {cpu:7.2f} {1e3 * cpu / tokens:8.2f} {peak:8.0f}",
                flush=True,
            )

    with tempfile.TemporaryDirectory() as folder:
        run_profile(loaded, data, spec, CacheSpec(), {}, Path(folder) / "profile.safetensors", Clock())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seq-len", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        measure(given.samples[0], given.seq_len[0], given.threads)
        return
    print(HEADER, flush=True)
    sizes = [(num, max(given.seq_len)) for num in given.samples]
    sizes += [(max(given.samples), length) for length in given.seq_len if length != max(given.seq_len)]
    for num_samples, seq_len in sizes:
        row = ["--samples", str(num_samples), "--seq-len", str(seq_len), "--threads", str(given.threads)]
        subprocess.run([sys.executable, __file__, "--one", *row], check=True)


if __name__ == "__main__":
    main()
