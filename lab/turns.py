"""Shared by benchmarks inside an engine: each cache has an engine of its own, in its own process as when it
serves, and the engines take turns.

Of each context, all get ready side by side. Then the first token of one prompt is timed, by one engine after
the other. Then all compute the prompts of as many sequences as fit with the whole context, side by side. Then
they take turns, so that what else happens on the host meets all of them: in a pass, each makes so many steps
alone, and the others are paused. Last, each makes some with a profiler. A cache that the engine does not serve
is reported with the engine's reason. Answers go to stderr and to the JSON as they come.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

from kvcal.artifact import write_text_atomic

PAGE = 128
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "rope_theta": 500000.0, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
EVERY = 4  # layers of a hybrid, of which the last one has full attention
HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "hidden_act": "silu", "full_attention_interval": EVERY,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "norm_topk_prob": True, "bos_token_id": 1,
    "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 512, "torch_dtype": "float32",
}  # fmt: skip
WARM_STEPS = 10  # of each pass, after the pause; they are not timed
FIRST_TOKENS, FIRST_SECONDS = 3, 6.0  # at most; no more prompts alone after so many seconds
LOG_LINES = 80
BATCHED = 8192  # tokens of a step
PACKAGES = ("torch", "triton", "vllm", "sglang", "sglang-kernel", "kvcal")
PROFILED = 20  # steps
# Of kvcal: what attends to packed pages, and what stores tokens and packs.
KERNELS = ("decode", "append", "append_window")
CACHE_BYTES = {"bfloat16": 2, "float32": 4}
LINE = "BENCH "
DRAFT = "draft"  # folder of the model that drafts


class Served(Protocol):
    """One engine with one cache of ``given.memory`` bytes, in a process of its own."""

    def __init__(self, folder: Path, cache: str, given: argparse.Namespace) -> None:
        """``folder``: see :func:`write_model`; ``cache``: the name of a plan there, or of a cache of the
        engine's own."""

    def answers(self) -> Iterator[dict[str, Any]]:
        """The measurements, in the order in which they are asked for: of each of ``given.context``, when it is
        ready, the first token, the filled cache, each of ``given.passes``, and the profile."""


def write_model(folder: Path, given: argparse.Namespace) -> dict[str, str]:
    """A configuration in ``folder``, one of a model of one layer that drafts, and plans in ``folder`` / plans:
    what each cache of a plan is, by its name."""
    from shared import default_plan

    from kvcal.geometry import AttentionGeometry, Geometry, LayerGeometry, ModelIdentity, StateGeometry
    from kvcal.models.files import config_sha256
    from kvcal.plan.plan import load_plan, save_plan

    shape = shape_of(given)
    draft = SHAPE | {"vocab_size": shape["vocab_size"]} if given.shape == "hybrid" else shape
    for path, own in ((folder, shape), (folder / DRAFT, draft | {"num_hidden_layers": 1})):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(own))
    (folder / "plans").mkdir()
    heads = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"], shape["head_dim"]
    every, state = (EVERY, state_of(shape, 0)) if given.shape == "hybrid" else (1, 0)
    layers: tuple[LayerGeometry, ...] = tuple(
        StateGeometry(layer, state) if (layer + 1) % every else AttentionGeometry(layer, *heads)
        for layer in range(given.layers)
    )
    geometry = Geometry(shape["model_type"], shape["torch_dtype"], layers)
    identity = ModelIdentity("shape", shape["model_type"], config_sha256(folder, "shape"), "0" * 64, "0" * 64)
    plans = {path.stem: load_plan(path) for path in given.plan}
    plans |= {f"{bits:g} bits": default_plan(geometry, bits) for bits in ([] if given.plan else given.bits)}
    names = {}
    for name, plan in plans.items():
        if plan.geometry.layers != layers:
            raise SystemExit(f"{name}: the plan's layers are not {given.layers} of {heads[1]} KV heads of {heads[2]}")
        save_plan(replace(plan, model=identity), folder / "plans" / f"{name}.safetensors")
        origin = plan.model.id if given.plan else "the default recipe's formats"
        names[name] = f"{name}: {plan.bits_per_value():.2f} bits, {origin}, sha256 {plan.sha256[:12]}"
    return names


def shape_of(given: argparse.Namespace) -> dict[str, Any]:
    """The model's configuration."""
    if given.shape == "hybrid":
        dense = list(range(given.layers - 1))  # the last one has experts: vLLM refuses the family without any
        return HYBRID | {"num_hidden_layers": given.layers, "mlp_only_layers": dense}
    return SHAPE | {"num_hidden_layers": given.layers} | (TINY if given.shape == "tiny" else {})


def state_of(shape: dict[str, Any], drafts: int) -> int:
    """Bytes of a layer's state in vLLM; 0 of a model without."""
    from kvcal.engines.states import FAMILIES, state_bytes

    return state_bytes(shape, 1, 1 + drafts, shape["torch_dtype"]) if shape["model_type"] in FAMILIES else 0


def kernels_in(traces: Path) -> Iterator[tuple[str, float]]:
    """Name and microseconds of every kernel in torch's traces in a folder."""
    for path in traces.rglob("*.json*"):
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            for event in json.load(file)["traceEvents"]:
                if event.get("cat") == "kernel":
                    yield event["name"], event["dur"]


def shares_in(traces: Path) -> dict[str, float]:
    """Of the GPU's time, by kernels, of the traces in a folder, which are removed."""
    times: dict[str, list[float]] = {}
    for name, microseconds in kernels_in(traces):
        times.setdefault(name, []).append(microseconds)
    shutil.rmtree(traces)
    total = sum(map(sum, times.values()))
    found = {name: sum(times[name]) / total for name in KERNELS if name in times}
    if "append" in times:  # at its shortest it packs nothing
        found["packing"] = found["append"] - len(times["append"]) * min(times["append"]) / total
    return found


class Prompts:
    """Random tokens, always the same ones."""

    def __init__(self, folder: Path) -> None:
        self._random = random.Random(0)
        self._vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]

    def of(self, tokens: int) -> list[int]:
        return [self._random.randrange(3, self._vocabulary) for _ in range(tokens)]

    def below(self, tokens: int) -> list[int]:
        """Of so many tokens, or fewer by less than a page."""
        return self.of(tokens - self._random.randrange(PAGE))


def first_tokens(seconds_of_one: Callable[[], float]) -> list[float]:
    """Seconds until the first token of each of some prompts."""
    found: list[float] = []
    while len(found) < FIRST_TOKENS and sum(found) < FIRST_SECONDS:
        found.append(seconds_of_one())
    return found


def serve(served: type[Served], given: argparse.Namespace) -> None:
    """The process of one cache: an answer in a line of JSON for each line of its input."""
    for _, found in zip(sys.stdin, served(given.folder, given.serve, given).answers(), strict=False):
        print(LINE + json.dumps(found), flush=True)


class Server:
    """A process of one cache, as the measuring one has it; without an answer it has ended."""

    def __init__(self, folder: Path, cache: str, given: argparse.Namespace) -> None:
        self.cache, self.log = cache, folder / f"{cache}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *sys.argv, "--serve", cache, "--folder", str(folder)], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def ask(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """The next answer; None: the process has ended."""
        assert self.process.stdout is not None
        found = next((line for line in self.process.stdout if line.startswith(LINE)), None)
        return None if found is None else json.loads(found.removeprefix(LINE))

    def reason(self) -> str:
        """Why the engine has ended."""
        errors = [line.strip() for line in self.log.read_text().splitlines() if "Error: " in line]
        return errors[-1] if errors else f"ended with {self.process.wait()}"

    def told(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text().splitlines()[-LOG_LINES:])


def about(names: dict[str, str], given: argparse.Namespace) -> dict[str, Any]:
    """Of a measurement: when, on what, of what."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    command = " ".join(["python", f"lab/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    shared = {"date": date.today().isoformat(), "device": device, "versions": versions, "command": command}
    return shared | {"memory_bytes_of_a_cache": given.memory, "plans": names}


class Measurement:
    """All servers, and what they have answered: results by context and cache, written after every round of
    answers."""

    def __init__(self, folder: Path, names: dict[str, str], caches: list[str], given: argparse.Namespace) -> None:
        self.given, self.start = given, time.monotonic()
        self.about = about(names, given)
        self.results: dict[str, dict[str, Any]] = {str(context): {} for context in given.context}
        self.servers = [Server(folder, cache, given) for cache in caches]

    def run(self) -> None:
        for results in self.results.values():
            for server in self.servers:
                results[server.cache] = {"passes": []}
            self.all(results)  # get ready
            self.each(results)
            self.all(results)  # fill their caches
            for _ in range(self.given.passes):
                self.each(results, "passes")
            self.each(results, "shares")

    def all(self, results: dict[str, Any]) -> None:
        """The servers work side by side, and answer."""
        for server in self.servers:
            server.ask()
        self.take(results, self.servers)

    def each(self, results: dict[str, Any], key: str = "") -> None:
        """One server after the other answers."""
        for server in list(self.servers):
            server.ask()
            self.take(results, [server], key)

    def take(self, results: dict[str, Any], servers: list[Server], key: str = "") -> None:
        """The answers of servers: items of a result, or under a key of it. A server without one is left out
        from then on."""
        for server in list(servers):
            found, result = server.answer(), results.setdefault(server.cache, {})
            if found is None:
                self.servers.remove(server)
                for of_context in self.results.values():
                    if "shares" not in of_context.get(server.cache, {}):
                        of_context[server.cache] = {"refused": server.reason()}
            elif key == "passes":
                result[key].append(found)
            else:
                result |= {key: found} if key else found
            told = server.told() if found is None else {**found, "step_s": "timed"} if key == "passes" else found
            print(f"{time.monotonic() - self.start:.1f} s: {server.cache}: {told}", file=sys.stderr, flush=True)
        if self.given.out:
            write_text_atomic(self.given.out, json.dumps(self.about | {"results": self.results}, indent=1))

    def close(self) -> None:
        for server in self.servers:
            assert server.process.stdin is not None
            server.process.stdin.close()
            server.process.wait()


def table(results: dict[str, Any], names: dict[str, str]) -> str:
    """Of one context, in Markdown. Of tokens a second, the median pass, the least and the most; of steps, the
    median, the 99th percentile and the longest. Shares are those of the GPU's time."""
    head = "sequences | step: median, 99th percentile, longest | tokens/s (least, most) | first token | kernels"
    lines = [f"| cache | {head} |", "|---|---|---|---|---|---|"]
    for cache, found in results.items():
        name = names.get(cache, cache)
        if "refused" in found:
            lines.append(f"| {name} | ended: {found['refused']} | | | | |")
            continue
        steps = [1e3 * seconds for one in found["passes"] for seconds in one["step_s"]]
        rates = sorted(one["tokens_per_s"] for one in found["passes"])
        longest = statistics.quantiles(steps, n=100, method="inclusive")[98], max(steps)
        shares = ", ".join(f"{kernel} {share:.1%}" for kernel, share in (found["shares"] or {}).items())
        lines.append(
            f"| {name} | {found['sequences']} of up to {found['prompt']:,} tokens "
            f"| {statistics.median(steps):.2f} ms, {longest[0]:.2f}, {longest[1]:.2f} "
            f"| {statistics.median(rates):,.0f} ({rates[0]:,.0f}, {rates[-1]:,.0f}) "
            f"| {statistics.median(found['first_token_s']):.3f} s | {shares} |"
        )
    return "\n".join(lines)


def main(description: str, served: type[Served], own: str) -> None:
    """A benchmark's command line. ``own``: a cache that is not kvcal's."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, nargs="+", default=[], help="plans of this shape, in place of --bits")
    parser.add_argument("--bits", type=float, nargs="*", default=[2.5, 3.0], help="of plans made here")
    parser.add_argument(
        "--caches", nargs="+", default=["kvcal", "bfloat16"], help=f"kvcal (all plans), bfloat16, or {own}"
    )
    parser.add_argument("--memory", type=int, default=12_928_000_000, help="bytes of each cache")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[32768], help="tokens of a sequence, new ones included"
    )
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50, help="of a pass")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--shape", choices=["8B", "hybrid", "tiny"], default="8B", help="tiny: for a CPU")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that a model of one layer guesses a step")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(served, given)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        names = write_model(folder, given)
        caches = [name for cache in given.caches for name in (names if cache == "kvcal" else [cache])]
        measurement = Measurement(folder, names, caches, given)
        measurement.run()
        measurement.close()
    for context, results in measurement.results.items():
        print(f"\n{int(context):,} tokens\n\n{table(results, names)}")
