"""Seconds a layer, and memory, of profiling a model of 70B's shape whose layers are streamed through 24 GB of
a GPU.

Writes a Llama checkpoint of random weights with that shape, but as few layers as a disk holds: a layer's time
does not depend on how many there are. Then it measures

- reading a layer's file from the disk of --disk, where it is not in the page cache;
- loads: a forward of few tokens, with the files in memory (the page cache, or a folder of /dev/shm);
- plans that are compared at once: side by side, so that a layer is loaded once for all, and one after the
  other;
- the gradients of a profile, streamed;
- the same with all layers on the device, which is the time without any waiting, and must give the same bytes.

Seconds of all 128 sequences are those of the measured ones, scaled: batches are alike, and take their time in
turn.

Example: python lab/bench_streamed.py /dev/shm/llama-70b-20 --disk /scratch --layers 20 --memory 24GB

Without a GPU, only the comparison of bytes says something: --shrink 8 --layers 8 --sequences 4 --seq-len 256
--memory 320MB
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from kvcal.data.sequences import TokenDataset
from kvcal.geometry import ModelIdentity
from kvcal.models.load import LoadedModel
from kvcal.models.residence import Residence
from kvcal.models.streamed import stream
from kvcal.models.supported_layers import geometry_of
from kvcal.plan.page_format import Format
from kvcal.progress import Silent
from kvcal.quantities import parse_bytes
from kvcal.recipe import CacheSpec, ProfileSpec
from kvcal.stages import divergence
from kvcal.stages.divergence import LOCKSTEP, deviations, unquantized_plan
from kvcal.stages.profile.stage import run_profile

SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
SHRUNK = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
FULL_SEQUENCES = 128


def write_checkpoint(folder: Path, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
    """One shard a layer, and one for the rest."""
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        number = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        shards.setdefault(f"model-{number}.safetensors", {})[name] = parameter
    torch.manual_seed(0)
    for file, parameters in shards.items():
        tensors = {}
        for name, parameter in parameters.items():
            weight = torch.empty(parameter.shape, dtype=dtype, device=device)
            tensors[name] = (weight.fill_(1.0) if weight.ndim == 1 else weight.normal_(0, 0.02)).cpu()
        save_file(tensors, folder / file, {"format": "pt"})
    places = {name: file for file, parameters in shards.items() for name in parameters}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def open_model(folder: Path, memory: int, num_tokens: int, device: torch.device) -> tuple[PreTrainedModel, Residence]:
    """As ``kvcal.models.load`` does, but for the hash of the weights, which takes long and tells nothing
    here."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    residence = stream(model, device, memory, num_tokens)
    print(residence, flush=True)
    return model, residence


def seconds_from_disk(shard: Path, disk: Path) -> float:
    """Of reading a copy of ``shard`` in the folder ``disk`` into pinned memory, as streamed layers are."""
    path = disk / shard.name
    shutil.copyfile(shard, path)
    try:
        with path.open("rb") as written:
            os.fsync(written.fileno())
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with safe_open(path, "pt") as opened:
            mapped = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118
            pinned = [torch.empty_like(tensor, pin_memory=torch.cuda.is_available()) for tensor in mapped]
            start = time.perf_counter()
            for tensor, place in zip(mapped, pinned, strict=True):
                place.copy_(tensor)
            return time.perf_counter() - start
    finally:
        path.unlink()


def seconds_of_forward(model: PreTrainedModel) -> float:
    start = time.perf_counter()
    with torch.no_grad():
        model(input_ids=torch.arange(3, 35, device=model.device)[None], use_cache=False)
    wait()
    return time.perf_counter() - start


def seconds_of_plans(model: PreTrainedModel, num_texts: int, num_tokens: int) -> float:
    """Of ``LOCKSTEP`` plans, all different in the first layer, and the reference, on texts of random
    tokens."""
    geometry = geometry_of(model)
    reference = unquantized_plan(ModelIdentity("70b", "llama", "c", "w", "t"), geometry)
    plans = []
    for number in range(LOCKSTEP):
        k = Format(2 + number % 3, "channel", 128, 4, 128)
        v = Format(2 + number // 3 % 3, "token", 128 if number < 9 else 64, 4, 128)
        layers = tuple(replace(layer, k=k, v=v) for layer in reference.layers)
        plans.append(replace(reference, layers=layers))
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(3, model.config.vocab_size, (num_texts, num_tokens), generator=generator)
    wait()
    start = time.perf_counter()
    deviations(model, reference, plans, tokens_BT, torch.arange(num_tokens).expand(num_texts, -1) > 200)
    wait()
    return time.perf_counter() - start


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Timer(Silent):
    """Times at which sequences were done."""

    def __init__(self) -> None:
        self.times: list[tuple[int, float]] = []

    def __call__(self, done: int, total: int, label: str) -> None:
        if label == "profile: gradients":
            wait()
            self.times.append((done, time.perf_counter()))


def measure(
    model: PreTrainedModel, residence: Residence, num_sequences: int, seq_len: int
) -> tuple[bytes, dict[str, Any]]:
    """The profile's bytes; seconds and memory of its gradients."""
    identity = ModelIdentity("70b", "llama", "c", "w", "t")
    loaded = LoadedModel(model, None, identity, geometry_of(model), "70b", residence)
    generator = torch.Generator().manual_seed(0)
    tokens = tuple(
        torch.randint(3, model.config.vocab_size, (seq_len,), generator=generator) for _ in range(num_sequences)
    )
    data = TokenDataset(tokens, tuple(torch.arange(seq_len) > 0 for _ in tokens), "f", "random tokens")
    timer = Timer()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as out:
        path = Path(out) / "profile.safetensors"
        run_profile(loaded, data, ProfileSpec(kl_samples=0), CacheSpec(), {}, path, timer)
        content = path.read_bytes()
    (_, first), *steps = timer.times
    seconds = [(done, round(at - first, 2)) for done, at in steps]
    return content, {
        "seconds": seconds[-1][1],
        "steps": seconds,
        "peak GB": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="of the checkpoint; written where it is missing, and then removed at the end"
    )
    parser.add_argument("--disk", type=Path, help="a folder on the disk whose speed is measured")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=16, help="of the gradients; 0: none")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--plan-texts", type=int, default=4, help="texts of the plans; 0: no plans")
    parser.add_argument("--plan-orders", nargs="*", default=["side by side", "one by one"])
    parser.add_argument("--plan-tokens", type=int, default=768, help="tokens of each of these texts")
    parser.add_argument("--memory", default="24GB")
    parser.add_argument("--shrink", type=int, default=1, help="divides the shape, for a CPU: in fp32 there")
    given = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    shape = SHAPE | {name: SHAPE[name] // given.shrink for name in SHRUNK}

    def show(what: str, **figures: object) -> None:
        print(json.dumps({"what": what, **figures}), flush=True)

    start, is_mine = time.perf_counter(), not given.folder.exists()
    if is_mine:
        write_checkpoint(given.folder, LlamaConfig(**shape, num_hidden_layers=given.layers, dtype=dtype), dtype, device)
    nbytes = sum(path.stat().st_size for path in given.folder.glob("*.safetensors"))
    show("written", seconds=time.perf_counter() - start, nbytes=nbytes)
    try:
        if given.disk is not None:
            shard = given.folder / "model-0.safetensors"
            seconds = seconds_from_disk(shard, given.disk)
            show("a layer read from the disk", seconds=seconds, GB_s=shard.stat().st_size / seconds / 1e9)
        model, residence = open_model(given.folder, parse_bytes(given.memory), given.seq_len, device)
        num_streamed = given.layers - residence.num_kept
        if num_streamed == 0:
            parser.error(f"--memory {given.memory} holds all {given.layers} layers: nothing is streamed")
        for number in (1, 2):
            seconds = seconds_of_forward(model) / num_streamed
            show(f"loads, forward {number}", seconds_a_layer=seconds, GB_s=residence.shapes.layer / seconds / 1e9)
        if given.plan_texts:
            for name in ("warm-up", *given.plan_orders):
                with patch.object(divergence, "is_streamed", lambda _: name != "one by one"):  # noqa: B023
                    seconds = seconds_of_plans(model, given.plan_texts, given.plan_tokens)
                show(
                    f"{LOCKSTEP} plans, {name}",
                    seconds=seconds,
                    a_plan_text_layer=seconds / LOCKSTEP / given.plan_texts / given.layers,
                )
        if not given.sequences:
            return
        bytes_streamed, figures = measure(model, residence, given.sequences, given.seq_len)
        scale = FULL_SEQUENCES / given.sequences / given.layers
        show("streamed", **figures, seconds_a_layer_of_all_sequences=figures["seconds"] * scale)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        model, residence = open_model(given.folder, 1 << 40, given.seq_len, device)
        bytes_whole, whole = measure(model, residence, given.sequences, given.seq_len)
        show("on the device", **whole, seconds_a_layer_of_all_sequences=whole["seconds"] * scale)
        show("compared", same_bytes=bytes_streamed == bytes_whole, waiting=1 - whole["seconds"] / figures["seconds"])
    finally:
        if is_mine:
            shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
