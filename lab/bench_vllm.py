"""Tokens a second inside vLLM at equal memory of the cache: of plans that ship, and of vLLM's own caches.

    python lab/bench_vllm.py --caches kvcal bfloat16 fp8 --context 4096 8192 32768 --out speed.json
    python lab/bench_vllm.py --plan plan.safetensors --caches kvcal turboquant_4bit_nc --context 8192 --passes 8
    python lab/bench_vllm.py --shape hybrid --layers 48 --caches kvcal bfloat16 fp8 --bits 2.5 --context 32768
    python lab/bench_vllm.py --drafts 3 --caches kvcal bfloat16 fp8 --bits 2.5 --context 32768

Needs vLLM and kvcal[compile] in one environment. The model has Llama-3-8B's shape, maybe fewer layers, and
dummy weights; or that of Qwen3-Next, every fourth layer with full attention and the others with a state; but
for dense layers in place of experts, and 4 KV heads of 128 in place of 2 of 256, of which kernels do not read
rotated pages. With drafts a model of one layer guesses tokens, of which random weights
accept next to none: tokens a second are those of steps that verify, and grow by what a real model accepts.

Plans are those of --plan, or what the default recipe makes of this shape at each of --bits (``shared``:
random where a calibration decides): in bases, with error feedback, sinks and windows. Prefixes are cached, as
they are by default. Prompts are of random lengths, so that requests are at random phases of their pages.

Every cache has an engine of its own, in its own process as when it serves. Of each context, the first token
of one prompt is timed, by one engine after the other. Then all compute the prompts of as many sequences as
fit with the whole context, side by side. Then they take turns, so that what else happens on the host meets
all of them: in a pass, each makes so many steps alone, and the others are paused. Last, each makes some with
a profiler. A cache that vLLM does not serve is reported with vLLM's reason. Answers go to stderr and to the
JSON as they come.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcal.artifact import write_text_atomic

PAGE = 128
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "rope_theta": 500000.0, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
EVERY = 4  # layers, of which the last one has full attention
HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "intermediate_size": 5120, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "hidden_act": "silu", "full_attention_interval": EVERY,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 512, "torch_dtype": "float32",
}  # fmt: skip
WARM_STEPS = 10  # of each pass, after the pause; they are not timed
FIRST_TOKENS, FIRST_SECONDS = 3, 6.0  # at most; no more prompts alone after so many seconds
LOG_LINES = 80
BATCHED = 8192  # tokens of a step
BITS = {"fp8": 8, "int4_per_token_head": 4, "turboquant_4bit_nc": 4, "turboquant_3bit_nc": 3}  # scales aside
PROFILED = 20  # steps
KERNELS = (
    "decode",
    "append",
    "append_window",
)  # of kvcal: what attends to packed pages, and what stores tokens and packs
CACHE_BYTES = {"bfloat16": 2, "float32": 4}
LINE = "BENCH "
DRAFT = "draft"  # folder of the model that drafts


def write_model(folder: Path, given: argparse.Namespace) -> dict[str, str]:
    """A configuration in ``folder``, and plans in ``folder`` / plans: what each cache of a plan is, by its
    name."""
    from shared import default_plan

    from kvcal.geometry import AttentionGeometry, Geometry, LayerGeometry, ModelIdentity, StateGeometry
    from kvcal.models.files import config_sha256
    from kvcal.plan.plan import load_plan, save_plan

    shape = shape_of(given)
    for path, layers in ((folder, given.layers), (folder / DRAFT, 1)):
        path.mkdir()
        own = SHAPE | {"vocab_size": shape["vocab_size"]} if path != folder and given.shape == "hybrid" else shape
        (path / "config.json").write_text(json.dumps(own | {"num_hidden_layers": layers}))
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
        return HYBRID | {"num_hidden_layers": given.layers, "mlp_only_layers": list(range(given.layers))}
    return SHAPE | {"num_hidden_layers": given.layers} | (TINY if given.shape == "tiny" else {})


def state_of(shape: dict[str, Any], drafts: int) -> int:
    """Bytes of a layer's state in vLLM; 0 of a model without."""
    from kvcal.engines.states import FAMILIES, state_bytes

    return state_bytes(shape, 1, drafts, shape["torch_dtype"]) if shape["model_type"] in FAMILIES else 0


class Served:
    """One engine with one cache of ``given.memory`` bytes, and of each of ``given.context``, one after the
    other, as many sequences as fit, of which the last tokens are made in ``given.passes`` of ``given.steps``,
    and then with a profiler."""

    def __init__(self, folder: Path, cache: str, given: argparse.Namespace) -> None:
        from vllm import LLM

        from kvcal.engines.capacity import capacity as capacity_of
        from kvcal.engines.capacity import vllm_pool
        from kvcal.engines.shard import HeadShard
        from kvcal.plan.plan import load_plan

        self.given, self.traces = given, folder / f"{cache}.traces"
        path = folder / "plans" / f"{cache}.safetensors"
        plan = load_plan(path) if path.exists() else None
        is_tiny = given.shape == "tiny"
        shape = json.loads((folder / "config.json").read_text())
        layer = 2 * CACHE_BYTES[shape["torch_dtype"]] * shape["num_key_value_heads"] * shape["head_dim"]
        full = given.layers // EVERY if given.shape == "hybrid" else given.layers
        draft = json.loads((folder / DRAFT / "config.json").read_text())
        drafted = 2 * CACHE_BYTES[draft["torch_dtype"]] * draft["num_key_value_heads"] * draft["head_dim"]
        counted = given.drafts, 0, state_of(shape, given.drafts), drafted if given.drafts else 0

        def most_of(context: int) -> int:
            if plan is None:
                return given.memory * 16 // BITS.get(cache, 16) // (layer * full) // context
            capacity = capacity_of("vllm", plan, given.memory, 1, context, *counted)
            return (capacity.num_blocks - 1) // capacity.blocks_per_request

        self.counts = {context: most_of(context) for context in given.context}
        most = max(self.counts.values())
        arguments: dict[str, Any] = {
            "model": str(folder), "dtype": "float32" if is_tiny else "bfloat16", "load_format": "dummy",
            "skip_tokenizer_init": True, "max_model_len": max(given.context), "max_num_seqs": most,
            "max_num_batched_tokens": BATCHED, "kv_cache_memory_bytes": given.memory, "gpu_memory_utilization": 0.15,
            "enable_prefix_caching": True, "disable_log_stats": True,
            "profiler_config": {
                "profiler": "torch", "torch_profiler_dir": str(self.traces), "torch_profiler_with_stack": False,
                "torch_profiler_activities": ["CPU" if is_tiny else "CUDA"],
            },
        }  # fmt: skip
        if given.drafts:
            drafts = {"method": "draft_model", "model": str(folder / DRAFT), "num_speculative_tokens": given.drafts}
            reads = {} if plan is None or is_tiny else {"attention_backend": "TRITON_ATTN"}  # blocks side by side
            arguments["speculative_config"] = drafts | reads
        if plan is not None:
            tokens = vllm_pool(HeadShard(plan, lookahead=given.drafts), counted[2], draft_bytes=counted[3]).block_tokens
            arguments |= {"block_size": tokens, "additional_config": {"kvcal_plan": str(path)}}
        elif cache != "bfloat16":
            arguments["kv_cache_dtype"] = cache
        if is_tiny:
            arguments |= {"enforce_eager": True, "compilation_config": {"custom_ops": ["none"]}}
        else:
            # vLLM captures none above max_num_seqs: more run eager.
            sizes = [(1 + given.drafts) * count for count in sorted({1, *range(8, most, 8), *self.counts.values()})]
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
            arguments |= {"compilation_config": graphs, "kernel_config": {"enable_jit_warmup": False}}
            arguments |= {"attention_backend": "KVCAL"} if plan is not None else {}
        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        config = self.engine.vllm_config
        if plan is None:
            blocks, size = config.cache_config.num_gpu_blocks - 1, config.cache_config.block_size
            # Of states vLLM has a group for each layer between two with full attention, and two blocks of each.
            beside = 2 * (EVERY - 1) if given.shape == "hybrid" else 0
            self.counts = {
                context: min(most, blocks // (-(-context // size) + beside)) for context, most in self.counts.items()
            }
        self.random, self.vocabulary, self.running = random.Random(0), config.model_config.get_vocab_size(), list[str]()
        self.added = 0

    def answers(self) -> Iterator[dict[str, Any]]:
        """What is measured, in the order in which it is asked for: of each context the first token, the filled
        cache, the passes, and the profile."""
        steps = self.given.passes * self.given.steps + PROFILED
        self.first_token_seconds(min(self.counts) // 2)  # warms up
        for context, count in self.counts.items():
            # While later prompts are computed, earlier ones already have new tokens.
            room = steps + 2 * WARM_STEPS * (self.given.passes + 1) + count * -(-context // BATCHED)
            yield {"first_token_s": self.first_tokens(context - room)}
            start = time.perf_counter()
            self.fill(count, context - room, room)
            yield {"sequences": count, "prompt": context - room, "fill_s": time.perf_counter() - start}
            for _ in range(self.given.passes):
                tokens, seconds = self.make(self.given.steps)
                yield {"tokens_per_s": tokens / sum(seconds), "step_s": seconds}
            yield self.profile()
            self.finish()

    def add(self, count: int, prompt: int) -> None:
        from vllm import SamplingParams

        ids = [self.random.randrange(3, self.vocabulary) for _ in range(prompt)]
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        self.running.append(str(self.added))
        self.engine.add_request(self.running[-1], {"prompt_token_ids": ids}, sampling)
        self.added += 1

    def first_tokens(self, prompt: int) -> list[float]:
        """Seconds until the first token of each of some prompts."""
        found: list[float] = []
        while len(found) < FIRST_TOKENS and sum(found) < FIRST_SECONDS:
            found.append(self.first_token_seconds(prompt))
        return found

    def first_token_seconds(self, prompt: int) -> float:
        """Of one prompt alone."""
        self.add(1, prompt)
        start = time.perf_counter()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.running.clear()
        return time.perf_counter() - start

    def fill(self, count: int, prompt: int, room: int) -> None:
        """Computes the prompts of all sequences that fit, at random phases of a page."""
        for _ in range(count):
            self.add(room, prompt - self.random.randrange(PAGE))
        begun: set[str] = set()
        while len(begun) < count:
            begun |= {output.request_id for output in self.engine.step()}
        self.llm.sleep(level=0, mode="keep")

    def make(self, steps: int) -> tuple[int, list[float]]:
        """New tokens, and seconds of each step. The engine is paused before and after; it may be a step or
        two ahead of what it has said."""
        tokens, seconds = 0, []
        self.llm.wake_up(["scheduling"])
        for _ in range(WARM_STEPS):
            self.engine.step()
        for _ in range(steps):
            start = time.perf_counter()
            tokens += len(self.engine.step())
            seconds.append(time.perf_counter() - start)
        self.llm.sleep(level=0, mode="keep")
        return tokens, seconds

    def profile(self) -> dict[str, float]:
        """Shares of the GPU's time in some steps, by kernels."""
        self.llm.start_profile()
        self.make(PROFILED)
        self.llm.stop_profile()
        times: dict[str, list[float]] = {}
        for name, microseconds in kernels_in(self.traces):
            times.setdefault(name, []).append(microseconds)
        shutil.rmtree(self.traces)
        total = sum(map(sum, times.values()))
        found = {name: sum(times[name]) / total for name in KERNELS if name in times}
        if "append" in times:  # at its shortest it packs nothing
            found["packing"] = found["append"] - len(times["append"]) * min(times["append"]) / total
        return found

    def finish(self) -> None:
        """Ends all sequences."""
        self.engine.abort_request(self.running)
        self.running.clear()
        self.llm.wake_up(["scheduling"])
        while self.engine.has_unfinished_requests():
            self.engine.step()


def kernels_in(traces: Path) -> Iterator[tuple[str, float]]:
    """Name and microseconds of every kernel in torch's traces in a folder."""
    for path in traces.rglob("*.json*"):
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            for event in json.load(file)["traceEvents"]:
                if event.get("cat") == "kernel":
                    yield event["name"], event["dur"]


def serve(folder: Path, given: argparse.Namespace) -> None:
    """The process of one cache: a line of JSON when it has started, and an answer for each line of its
    input."""
    served = Served(folder, given.serve, given)
    print(LINE + json.dumps({"started": True}), flush=True)
    for _, found in zip(sys.stdin, served.answers(), strict=False):
        print(LINE + json.dumps(found), flush=True)


class Server:
    """A process of one cache, as the measuring one has it; without an answer it has ended."""

    def __init__(self, folder: Path, cache: str, given: argparse.Namespace) -> None:
        self.cache, self.log = cache, folder / f"{cache}.log"
        options = [("--serve", cache), ("--folder", folder), ("--memory", given.memory), ("--passes", given.passes)]
        options += [("--steps", given.steps), ("--shape", given.shape), ("--layers", given.layers)]
        options += [("--drafts", given.drafts)]
        options += [("--context", *given.context)]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, *(str(word) for option in options for word in option)], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=os.environ | {"VLLM_NO_USAGE_STATS": "1"},
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
        """Why vLLM has ended."""
        errors = [line.strip() for line in self.log.read_text().splitlines() if "Error: " in line]
        return errors[-1] if errors else f"ended with {self.process.wait()}"

    def told(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text().splitlines()[-LOG_LINES:])


class Measurement:
    """All servers, and what they have answered: results by context and cache, written after every round of
    answers."""

    def __init__(self, folder: Path, names: dict[str, str], caches: list[str], given: argparse.Namespace) -> None:
        self.names, self.given, self.start = names, given, time.monotonic()
        self.results: dict[str, dict[str, Any]] = {str(context): {} for context in given.context}
        self.servers = [Server(folder, cache, given) for cache in caches]

    def run(self) -> None:
        self.take({}, self.servers)  # they start side by side
        for results in self.results.values():
            for server in self.servers:
                results[server.cache] = {"passes": []}
            self.each(results)
            for server in self.servers:
                server.ask()
            self.take(results, self.servers)  # all fill their caches side by side
            for _ in range(self.given.passes):
                self.each(results, "passes")
            self.each(results, "shares")

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
            write_text_atomic(self.given.out, json.dumps({"plans": self.names, "results": self.results}, indent=1))

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, nargs="+", default=[], help="plans of this shape, in place of --bits")
    parser.add_argument("--bits", type=float, nargs="*", default=[2.5, 3.0], help="of plans made here")
    parser.add_argument(
        "--caches", nargs="+", default=["kvcal", "bfloat16"], help="kvcal (all plans), bfloat16, or a --kv-cache-dtype"
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
        return serve(given.folder, given)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        names = write_model(folder, given)
        caches = [name for cache in given.caches for name in (names if cache == "kvcal" else [cache])]
        measurement = Measurement(folder, names, caches, given)
        measurement.run()
        measurement.close()
    for context, results in measurement.results.items():
        print(f"\n{int(context):,} tokens\n\n{table(results, names)}")


if __name__ == "__main__":
    main()
