"""Seconds, share of the FLOP floor and peak memory of every stage of a calibration, on a random model of a
shape.

    python lab/bench_calibration.py --shape 8b --out calibration.json
    python lab/bench_calibration.py --hidden 256 --layers 8 --samples 4 --seq-len 512 --out small.json

One process, one device. Gradients are timed for several batch sizes, with and without candidates; the
divergence with layers that plans share run once, and run by every plan, on one group of plans at each end of
the model. What 512 sequences take is extrapolated: gradients, Hessians and λ by sequence, the divergence as
it is, since it has its own few texts.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from shared import layers_with, print_table, random_model
from transformers import LlamaConfig

from kvcal.data.sequences import TokenDataset
from kvcal.geometry import ModelIdentity
from kvcal.models.load import LoadedModel
from kvcal.models.supported_layers import geometry_of
from kvcal.plan.page_format import SIDES, Format
from kvcal.plan.plan import Workload
from kvcal.progress import Silent
from kvcal.recipe import AllocateSpec, CacheSpec, ProfileSpec
from kvcal.stages.allocate.stage import allocate
from kvcal.stages.checkpoint import Batch
from kvcal.stages.divergence import LOCKSTEP, Room, kl_texts
from kvcal.stages.measuring.dense_layer import DenseLayer
from kvcal.stages.profile import stage as profile_stage
from kvcal.stages.profile.observers import GradientPass
from kvcal.stages.profile.record import ProfileSetup
from kvcal.systems.aqua_kv import fit as stage
from kvcal.systems.aqua_kv.recipe import PredictorSpec
from kvcal.systems.basis import fit as basis
from kvcal.systems.basis.recipe import FeedbackSpec
from kvcal.systems.pm_kvq.recipe import ReparamSpec
from kvcal.systems.pm_kvq.reparam import run_reparam

PEAK_FLOPS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}  # dense bf16
FULL_LAMBDA_SEQUENCES = ReparamSpec().num_samples


class Clock(Silent):
    """Seconds of each phase of a stage, by its label."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = 0.0

    def __call__(self, done: int, total: int, label: str) -> None:
        synchronize()
        if done == 0:
            self._started = time.perf_counter()
        self.seconds[label] = time.perf_counter() - self._started


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """(seconds, peak GB: of the device's tensors, or of the process on a CPU)."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    seconds = time.perf_counter() - started
    if torch.cuda.is_available():
        return seconds, torch.cuda.max_memory_allocated() / 1e9
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class Bench:
    """A random model, and the rows measured on it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.rows = given, list[dict[str, Any]]()
        config = LlamaConfig(
            vocab_size=given.vocab,
            hidden_size=given.hidden,
            intermediate_size=7 * given.hidden // 2,
            num_hidden_layers=given.layers,
            num_attention_heads=given.heads,
            num_key_value_heads=given.heads // 4,
            head_dim=given.head_dim,
            max_position_embeddings=131072,
        )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        seconds, _ = timed(lambda: setattr(self, "model", random_model(config, device)))
        self.model: Any
        identity = ModelIdentity("random", "llama", "c", "w", "t")
        self.loaded = LoadedModel(self.model, None, identity, geometry_of(self.model), "random")
        generator = torch.Generator().manual_seed(0)
        sequences = tuple(
            torch.randint(3, given.vocab, (given.seq_len,), generator=generator) for _ in range(given.samples)
        )
        self.data = TokenDataset(sequences, tuple(torch.arange(given.seq_len) > 0 for _ in sequences), "f", "random")
        weights = sum(p.numel() for p in self.model.parameters()) - self.model.get_input_embeddings().weight.numel()
        T, channels = given.seq_len, given.heads * given.head_dim
        attention = 2 * T * T * channels * given.layers  # of a causal forward
        self.forward_flops = 2.0 * weights * T + attention
        projections = 2 * given.layers * given.hidden * given.heads // 4 * given.head_dim
        self.gradient_flops = 2 * self.forward_flops + 2.0 * projections * T + 1.5 * attention
        self.peak = next((f for name, f in PEAK_FLOPS.items() if device.type == "cuda" and name in
                          torch.cuda.get_device_name()), None)  # fmt: skip
        self.say("model", f"{weights / 1e9:.2f}e9 weights in matrices", 1, (seconds, 0.0))

    def say(self, stage: str, variant: str, sequences: int, measured: tuple[float, float], flops: float = 0.0) -> None:
        """Add a row, and write all rows: whatever ends the process, they are there."""
        seconds, peak = measured
        row = {
            "stage": stage,
            "variant": variant,
            "sequences": sequences,
            "seconds": seconds,
            "s_each": seconds / sequences,
        }
        row |= {"peak_gb": peak, "flop_share": flops * sequences / seconds / self.peak if self.peak and flops else None}
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self.given.out.write_text(json.dumps(self.rows, indent=1))

    def gradients(self) -> None:
        spec, cache = ProfileSpec(), CacheSpec()
        setup = ProfileSetup(
            self.loaded.identity, self.loaded.geometry, 1, self.given.vocab, spec, cache, "f", "random", 1, 1, 1
        )
        wanted = {side: setup.candidates(side) for side in SIDES}
        full, none = (
            GradientPass(self.model, self.loaded.geometry, candidates, cache)
            for candidates in (wanted, {side: () for side in SIDES})
        )
        variants = [("no candidates", none), ("", full)]
        warm = Batch.of(self.data, (0,))
        full.measure_together([warm])  # compiles what has to be
        for count in self.given.batches:
            batch = Batch.of(self.data, [number % self.given.samples for number in range(count)])
            for name, gradients in variants:
                try:
                    best = min(timed(lambda: gradients.measure_together([batch])) for _ in range(2))  # noqa: B023
                except torch.OutOfMemoryError:
                    print(f"gradients of {count}, {name}: out of memory", flush=True)
                    continue
                self.say("gradients", f"batch of {count} {name}".strip(), count, best, self.gradient_flops)

    def hessians(self) -> None:
        layers = layers_with(self.loaded, Format(2, "channel", 128), Format(2, "token", 128))
        places = basis.feedback_places(layers)
        by_index = {layer.geometry.index: layer for layer in layers}
        spec = FeedbackSpec()
        calibration = basis._Calibration(self.loaded, by_index, {}, places, [], spec, spec.position_scale)
        for count in self.given.batches:
            batch = Batch.of(self.data, [number % self.given.samples for number in range(count)])
            best = min(timed(lambda: calibration.batch_means(batch)) for _ in range(2))  # noqa: B023
            self.say("Hessians", f"batch of {count}", count, best, self.forward_flops)

    def reparam(self) -> None:
        layers = layers_with(self.loaded, Format(2, "token", 128, 4, 64), Format(2, "token", 128, 4, 64))
        data = replace(self.data, sequences=self.data.sequences[:1], loss_masks=self.data.loss_masks[:1])
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "reparam.safetensors"
            measured = timed(lambda: run_reparam(self.loaded, layers, data, ReparamSpec(), {}, path, clock))
        for label, seconds in clock.seconds.items():
            self.say("λ", label.removeprefix("reparam: "), 1, (seconds, measured[1]), self.forward_flops)

    def predictors(self) -> None:
        """Of all layers; seconds of two numbers of sequences tell what a sequence adds, and what solving
        takes."""
        layers = layers_with(self.loaded, Format(2, "channel", 128), Format(2, "token", 128))
        for at_once, count in product(self.given.predictor_batches, self.given.predictor_sequences):
            data = replace(self.data, sequences=self.data.sequences[:count], loss_masks=self.data.loss_masks[:count])
            given = (data, PredictorSpec(drop=False, min_explained=-1e9), Workload(8, 32768), {})
            device, most_tokens = self.model.device.type, at_once * self.given.seq_len
            with (
                tempfile.TemporaryDirectory() as folder,
                patch.dict(stage.BATCH_TOKENS, {device: most_tokens}),
            ):
                path = Path(folder) / "predictors.safetensors"
                measured = timed(lambda: stage.run_fit_predictors(self.loaded, layers, {}, *given, path, Silent()))  # noqa: B023
            self.say("predictors", f"{count} sequences, {at_once} at once", count, measured, self.forward_flops)

    def divergence(self) -> None:
        """Whole, then the first and the last group as if nothing were shared."""
        spec, cache = ProfileSpec(), CacheSpec()
        setup = ProfileSetup(
            self.loaded.identity, self.loaded.geometry, 1, self.given.vocab, spec, cache, "f", "random", 1, 1, 1
        )
        texts = kl_texts(self.data, spec.kl_samples, min(spec.kl_tokens, self.given.seq_len), cache)
        steps = profile_stage._divergence_steps(setup, texts, len(texts))
        num_plans = sum(len(setup.kl_candidates(side)) for places, _ in steps for _, side in places)
        profile_stage.divergence_means(self.loaded, setup, (steps[0][0][:1], texts), Room(LOCKSTEP))  # a warm-up

        for number, step in enumerate(steps):
            if time.perf_counter() < self.given.deadline:
                count = sum(len(setup.kl_candidates(side)) for _, side in step[0])
                measured = timed(lambda: profile_stage.divergence_means(self.loaded, setup, step, Room(LOCKSTEP)))  # noqa: B023
                name = f"group {number + 1} of {len(steps)}, {count} of {num_plans} plans"
                self.say("divergence", name, count, measured)
        whole = patch("kvcal.models.forwards.decoder_layers", lambda _: None)
        paged = patch.object(DenseLayer, "can_stand_for", lambda layer: False)
        with whole, paged:
            places = steps[-1][0][:4]
            count = sum(len(setup.kl_candidates(side)) for _, side in places)
            measured = timed(
                lambda: profile_stage.divergence_means(self.loaded, setup, (places, texts), Room(LOCKSTEP))
            )
            self.say("divergence", f"{count} plans, whole, in pages", count, measured)

    def allocation(self) -> None:
        """A whole profile of two sequences, and the exact solver on it."""
        data = replace(self.data, sequences=self.data.sequences[:2], loss_masks=self.data.loss_masks[:2])
        with tempfile.TemporaryDirectory() as folder:
            spec = ProfileSpec(kl_samples=0)
            clock, path = Clock(), Path(folder) / "profile.safetensors"
            found = profile_stage.run_profile(self.loaded, data, spec, CacheSpec(), {}, path, clock)
        budget = AllocateSpec(bits=3.0, batch=8, context=32768, objective="sensitivity")
        self.say("allocation", "3 bits", 1, timed(lambda: allocate(found, budget, {})))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("8b",), help="an 8B; otherwise the sizes below")
    for name, default in (("hidden", 256), ("layers", 4), ("heads", 8), ("head-dim", 32), ("vocab", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=1e9, help="skip what is left of the divergence after these")
    stages = ("gradients", "hessians", "divergence", "allocation", "reparam", "predictors")
    parser.add_argument("--stages", nargs="+", choices=stages, default=stages)
    parser.add_argument("--predictor-sequences", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--predictor-batches", type=int, nargs="+", default=[8], help="sequences at once")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.deadline = time.perf_counter() + given.seconds
    if given.shape == "8b":
        given.hidden, given.layers, given.heads, given.head_dim, given.vocab = 4096, 32, 32, 128, 128256
    bench = Bench(given)
    for name in given.stages:
        try:
            getattr(bench, name)()
        except torch.OutOfMemoryError as error:
            print(f"{name}: {error}", flush=True)
    print_table("Stages", list(bench.rows[0]), [list(row.values()) for row in bench.rows])


if __name__ == "__main__":
    main()
