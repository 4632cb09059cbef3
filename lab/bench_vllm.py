"""Tokens a second inside vLLM at equal memory of the cache: of plans that ship, and of vLLM's own caches.

    python lab/bench_vllm.py --caches kvcal bfloat16 fp8 int4_per_token_head turboquant_4bit_nc --out
    speed.json python lab/bench_vllm.py --plan plan.safetensors --context 8192 --passes 8

Needs vLLM and kvcal[compile] in one environment. The model has Llama-3-8B's shape, maybe fewer layers, and
dummy weights. Plans are those of --plan, or what the default recipe makes of this shape at each of --bits
(``shared``: random where a calibration decides): in bases, with error feedback, sinks and windows. Prefixes
are cached, as they are by default. Prompts are of random lengths, so that requests are at random phases of
their pages.

Every cache has an engine of its own, in its own process as when it serves, and as many sequences as fit with
the whole context. Prompts are computed once, by one engine after the other. Then they take turns, so that
what else happens on the host meets all of them: in a pass, each makes so many steps alone, and the others are
paused. Last, each makes some with a profiler. A cache that vLLM does not start with is reported with vLLM's
reason.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

PAGE = 128
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "rope_theta": 500000.0, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 512, "torch_dtype": "float32",
}  # fmt: skip
WARM_STEPS = 10  # of each pass, after the pause; they are not timed
FIRST_TOKENS = 3
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


def write_model(folder: Path, given: argparse.Namespace) -> dict[str, str]:
    """A configuration in ``folder``, and plans in ``folder`` / plans: what each cache of a plan is, by its
    name."""
    from shared import default_plan

    from kvcal.geometry import AttentionGeometry, Geometry, ModelIdentity
    from kvcal.models.files import config_sha256
    from kvcal.plan.plan import load_plan, save_plan

    shape: dict[str, Any] = SHAPE | {"num_hidden_layers": given.layers} | (TINY if given.shape == "tiny" else {})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "plans").mkdir()
    heads = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"], shape["head_dim"]
    layers = tuple(AttentionGeometry(layer, *heads) for layer in range(given.layers))
    geometry = Geometry("llama", shape["torch_dtype"], layers)
    identity = ModelIdentity("shape", "llama", config_sha256(folder, "shape"), "0" * 64, "0" * 64)
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


class Served:
    """One engine with one cache of ``given.memory`` bytes, and as many sequences of ``given.context`` tokens
    as fit into it, of which the last are made in ``given.passes`` of ``given.steps``, and then with a
    profiler."""

    def __init__(self, folder: Path, cache: str, given: argparse.Namespace) -> None:
        from vllm import LLM

        from kvcal.engines.capacity import capacity as capacity_of
        from kvcal.plan.plan import load_plan

        plan = folder / "plans" / f"{cache}.safetensors"
        is_tiny = given.shape == "tiny"
        nbytes, context = given.memory, given.context
        steps = given.passes * given.steps + PROFILED
        shape = json.loads((folder / "config.json").read_text())
        token = 2 * CACHE_BYTES[shape["torch_dtype"]] * shape["num_key_value_heads"] * shape["head_dim"] * given.layers
        most = nbytes * 16 // BITS.get(cache, 16) // token // context
        if plan.exists():
            capacity = capacity_of("vllm", load_plan(plan), nbytes, 1, context)
            most = (capacity.num_blocks - 1) // capacity.blocks_per_request
        # While later prompts are computed, earlier ones already have new tokens.
        self.room = steps + 2 * WARM_STEPS * (given.passes + 1) + most * -(-context // BATCHED)
        self.prompt = context - self.room
        self.traces = folder / f"{cache}.traces"
        arguments: dict[str, Any] = {
            "model": str(folder), "dtype": "float32" if is_tiny else "bfloat16", "load_format": "dummy",
            "skip_tokenizer_init": True, "max_model_len": context, "max_num_seqs": most,
            "max_num_batched_tokens": BATCHED, "kv_cache_memory_bytes": nbytes, "gpu_memory_utilization": 0.15,
            "enable_prefix_caching": True, "disable_log_stats": True,
            "profiler_config": {
                "profiler": "torch", "torch_profiler_dir": str(self.traces), "torch_profiler_with_stack": False,
                "torch_profiler_activities": ["CPU" if is_tiny else "CUDA"],
            },
        }  # fmt: skip
        if plan.exists():
            arguments |= {"block_size": PAGE, "additional_config": {"kvcal_plan": str(plan)}}
        elif cache != "bfloat16":
            arguments["kv_cache_dtype"] = cache
        if is_tiny:
            arguments |= {"enforce_eager": True, "compilation_config": {"custom_ops": ["none"]}}
        else:
            sizes = sorted({1, *range(8, most, 8), most})  # vLLM captures none above max_num_seqs: more run eager
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
            arguments |= {"compilation_config": graphs, "kernel_config": {"enable_jit_warmup": False}}
            arguments |= {"attention_backend": "KVCAL"} if plan.exists() else {}
        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        config = self.engine.vllm_config
        own = (config.cache_config.num_gpu_blocks - 1) // -(-context // config.cache_config.block_size)
        self.count = most if plan.exists() else min(most, own)
        self.random, self.vocabulary, self.added = random.Random(0), config.model_config.get_vocab_size(), 0

    def add(self, count: int, prompt: int) -> None:
        from vllm import SamplingParams

        ids = [self.random.randrange(3, self.vocabulary) for _ in range(prompt)]
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.added), {"prompt_token_ids": ids}, sampling)
        self.added += 1

    def first_token_seconds(self) -> float:
        """Of one prompt alone."""
        self.add(1, self.prompt)
        start = time.perf_counter()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return time.perf_counter() - start

    def fill(self) -> None:
        """Computes the prompts of all sequences that fit, at random phases of a page."""
        for _ in range(self.count):
            self.add(self.room, self.prompt - self.random.randrange(PAGE))
        begun: set[str] = set()
        while len(begun) < self.count:
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
        total = sum(map(sum, times.values()))
        found = {name: sum(times[name]) / total for name in KERNELS if name in times}
        if "append" in times:  # at its shortest it packs nothing
            found["packing"] = found["append"] - len(times["append"]) * min(times["append"]) / total
        return found


def kernels_in(traces: Path) -> Iterator[tuple[str, float]]:
    """Name and microseconds of every kernel in torch's traces in a folder."""
    for path in traces.rglob("*.json*"):
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            for event in json.load(file)["traceEvents"]:
                if event.get("cat") == "kernel":
                    yield event["name"], event["dur"]


def serve(folder: Path, given: argparse.Namespace) -> None:
    """The process of one cache: a line of JSON when it has started, and one for each line of its input:
    filled at the first, and profiled at the last."""
    served = Served(folder, given.serve, given)
    print(LINE + json.dumps({"sequences": served.count, "prompt": served.prompt}), flush=True)
    for number, _ in enumerate(sys.stdin):
        if number == 0:
            first = [served.first_token_seconds() for _ in range(1 + FIRST_TOKENS)][1:]
            found: dict[str, Any] = {"first_token_s": first}
            served.fill()
        elif number <= given.passes:
            tokens, seconds = served.make(given.steps)
            found = {"tokens_per_s": tokens / sum(seconds), "step_s": seconds}
        else:
            found = served.profile()
        print(LINE + json.dumps(found), flush=True)


class Server:
    """A process of one cache, as the measuring one has it."""

    def __init__(self, folder: Path, cache: str, given: argparse.Namespace) -> None:
        self.cache, self.passes, self.log = cache, [], folder / f"{cache}.log"
        options = [("--serve", cache), ("--folder", folder), ("--memory", given.memory), ("--context", given.context)]
        options += [("--passes", given.passes), ("--steps", given.steps), ("--shape", given.shape)]
        options += [("--layers", given.layers)]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, *(str(word) for option in options for word in option)], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=os.environ | {"VLLM_NO_USAGE_STATS": "1"},
            )  # fmt: skip

    def line(self) -> dict[str, Any] | None:
        """The next answer; None: the process has ended."""
        assert self.process.stdout is not None
        found = next((line for line in self.process.stdout if line.startswith(LINE)), None)
        return None if found is None else json.loads(found.removeprefix(LINE))

    def turn(self) -> dict[str, Any] | None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.line()

    def reason(self) -> str:
        """Why vLLM did not start."""
        errors = [line.strip() for line in self.log.read_text().splitlines() if "Error: " in line]
        return errors[-1] if errors else f"ended with {self.process.wait()}"


def measure(folder: Path, caches: list[str], given: argparse.Namespace) -> dict[str, Any]:
    servers = [Server(folder, cache, given) for cache in caches]  # they start side by side
    started = [(server, found) for server in servers if (found := server.line()) is not None]
    filled = [(server, found | first) for server, found in started if (first := server.turn()) is not None]
    for _ in range(given.passes):
        for server, _ in filled:
            made = server.turn()
            assert made is not None, f"see {server.log}"
            server.passes.append(made)
    shares = {server.cache: server.turn() for server, _ in filled}
    for server in servers:
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.process.wait()
    results: dict[str, Any] = {server.cache: {"refused": server.reason()} for server in servers}
    return results | {
        server.cache: {**found, "passes": server.passes, "shares": shares[server.cache]} for server, found in filled
    }


def table(results: dict[str, Any], names: dict[str, str]) -> str:
    """In Markdown. Of tokens a second, the median pass, the least and the most; of steps, the median, the
    99th percentile and the longest. Shares are those of the GPU's time."""
    head = "sequences | step: median, 99th percentile, longest | tokens/s (least, most) | first token | kernels"
    lines = [f"| cache | {head} |", "|---|---|---|---|---|---|"]
    for cache, found in results.items():
        name = names.get(cache, cache)
        if "refused" in found:
            lines.append(f"| {name} | did not start: {found['refused']} | | | | |")
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
    parser.add_argument("--context", type=int, default=32768, help="tokens of a sequence, new ones included")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50, help="of a pass")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--shape", choices=["8B", "tiny"], default="8B", help="tiny: for a CPU")
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
        results = measure(folder, caches, given)
    print(table(results, names))
    if given.out:
        given.out.write_text(json.dumps({"plans": names, "results": results}, indent=1))


if __name__ == "__main__":
    main()
