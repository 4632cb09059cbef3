"""Seconds of a profile by one process, and by torchrun's ranks with a GPU each, on a random model of a shape.

    python lab/bench_ranks.py --layers 32 --sequences 32
    torchrun --nproc-per-node 2 lab/bench_ranks.py --layers 32 --sequences 32

and with a 70B's layers streamed from a checkpoint that is written first, where it is missing:

    torchrun --nproc-per-node 2 lab/bench_ranks.py --streamed /dev/shm/llama-70b --layers 11 --of-layers 80

The sha256 of the profile and of its statistics is printed: none may depend on the number of ranks. Gradients
are timed after the first batches of every rank, the divergence as a whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench_streamed import SHAPE, open_model, wait, write_checkpoint
from safetensors.torch import load_file
from shared import random_model
from transformers import LlamaConfig, PreTrainedModel

from kvcal import distributed
from kvcal.data.sequences import TokenDataset
from kvcal.geometry import ModelIdentity
from kvcal.models.load import LoadedModel
from kvcal.models.residence import Residence
from kvcal.models.streamed import copy_threads
from kvcal.models.supported_layers import geometry_of
from kvcal.progress import Silent
from kvcal.quantities import parse_bytes
from kvcal.recipe import CacheSpec, ProfileSpec
from kvcal.stages.profile import stage as profile_stage
from kvcal.stages.profile.stage import run_profile


class Timer(Silent):
    """Times at which a part of each phase was done, by its label."""

    def __init__(self) -> None:
        self.times: dict[str, list[tuple[int, float]]] = {}

    def __call__(self, done: int, total: int, label: str) -> None:
        wait()
        self.times.setdefault(label, []).append((done, time.perf_counter()))


def model_of(given: argparse.Namespace, device: torch.device) -> tuple[PreTrainedModel, Residence | None]:
    if given.streamed is None:
        sizes = {"hidden_size": given.hidden, "intermediate_size": given.hidden * 7 // 2, "vocab_size": given.vocab}
        heads = {
            "num_attention_heads": given.hidden // 128,
            "num_key_value_heads": given.hidden // 512,
            "head_dim": 128,
        }
        config = LlamaConfig(**sizes, **heads, num_hidden_layers=given.layers, max_position_embeddings=131072)
        torch.manual_seed(0)
        return random_model(config, device), None

    def written() -> None:
        if not given.streamed.exists():
            config = LlamaConfig(**SHAPE, num_hidden_layers=given.layers, dtype=torch.bfloat16)
            write_checkpoint(given.streamed, config, torch.bfloat16, device)

    distributed.from_first(written)
    return open_model(given.streamed, parse_bytes(given.memory), given.seq_len, device)


def parts(path: Path) -> dict[str, str]:
    """The first digits of the sha256 of each statistic of a profile."""
    digests: dict[str, Any] = {}
    for name, tensor in sorted(load_file(path).items()):
        digests.setdefault(name.partition(".")[0], hashlib.sha256()).update(tensor.numpy().tobytes())
    return {name: digest.hexdigest()[:8] for name, digest in digests.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 32), ("hidden", 4096), ("vocab", 128256), ("sequences", 32), ("seq-len", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kl-samples", type=int, default=3, help="texts of the divergence; 0: none")
    parser.add_argument("--streamed", type=Path, help="folder of the checkpoint of a 70B's shape")
    parser.add_argument("--memory", default="24GB", help="of a GPU, where layers are streamed")
    parser.add_argument("--of-layers", type=int, help="of the model whose inputs the host's memory is to hold")
    given = parser.parse_args()
    with distributed.joined(), tempfile.TemporaryDirectory() as out:
        name = distributed.device("cuda") if torch.cuda.is_available() else "cpu"
        model, residence = model_of(given, torch.device(name if name != "cuda" else "cuda:0"))
        identity, geometry = ModelIdentity("random", "llama", "c", "w", "t"), geometry_of(model)
        loaded = LoadedModel(model, None, identity, geometry, "random", residence)
        generator = torch.Generator().manual_seed(0)
        vocab, count = model.config.vocab_size, given.sequences
        tokens = tuple(torch.randint(3, vocab, (given.seq_len,), generator=generator) for _ in range(count))
        data = TokenDataset(tokens, tuple(torch.arange(given.seq_len) > 0 for _ in tokens), "f", "random tokens")
        timer, path = Timer(), Path(out) / "profile.safetensors"
        share = profile_stage.INPUTS_SHARE * given.layers / (given.of_layers or given.layers)
        spec, start = ProfileSpec(kl_samples=given.kl_samples), time.perf_counter()
        with patch.object(profile_stage, "INPUTS_SHARE", share):
            at_once = profile_stage.batches_at_once(loaded, profile_stage.batch_tokens(loaded, given.seq_len))
            run_profile(loaded, data, spec, CacheSpec(), {}, path, timer)
        figures = {"ranks": distributed.size(), "seconds": round(time.perf_counter() - start, 2)}
        figures |= {"batches at once": at_once, "copy threads": copy_threads()}
        for label, steps in timer.times.items():
            figures[label] = [(done, round(at - start, 2)) for done, at in steps]
        figures["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        figures["parts"] = parts(path)
        if torch.cuda.is_available():
            figures["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
        if distributed.rank() == 0:
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
