"""A pretrained model served over HTTP with a plan, in the engines themselves, against ``generate`` with the
same plan.

    python lab/serve_real.py                                      # SmolLM2-135M, each version of each engine
    python lab/serve_real.py --model path/to/model --engines vllm # a folder; the newest version alone
    python lab/serve_real.py --engines vllm --python PATH         # an engine that is installed, on a GPU

``kvcal plan --for-engine`` makes a plan, ``kvcal serve-args`` prints a command line, which starts the
engine's server. Without --python, engines are those of the tests: on a CPU, in fp32, made once in a folder of
caches. Four checks:

    cold       prompts of 20 to 560 tokens, one after the other
    prefixes   the same again, which begin after the blocks that the first time filled
    chunks     new prompts at once, in chunks of 256 tokens
    shortage   prompts at once, in fewer blocks than they need: requests lose theirs, and are computed again

The engine's steps are recorded and computed again with ``PlanCache``: the same tokens in the same chunks, and
after the same losses. Two comparisons (tests/support/engine_replay.py):

    attention  of every layer and token, on a CPU: from the queries, keys and values that the engine had
    there, the
               engine's and ``PlanCache``'s differ by what eight roundings of a score in fp32 move, at most
    answers    by the whole model: each token is the most likely one, or tied with it, and has ``PlanCache``'s
               log-probability. Single codes come out one step apart where products round otherwise, and all
               later layers and tokens follow. So the same steps are computed with weights changed by 2^-22 of
               themselves, too ("rounding"; in bf16 by 2^-9, and logits are rounded to bf16, as engines have
               them): an engine may be twice as far from ``PlanCache`` as these are

Tokens of cold prompts are compared with ``generate``, too. Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from real import find_model
from shared import print_table

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from attention_recorder import VARIABLE, attended_in
from engine_replay import AttentionReplay, Replay, assert_answers
from engine_server import ON_CPU, Server, serving
from sglang_environment import python_with_sglang, variables_in_sglang, without_discarded
from vllm_environment import python_with_vllm, variables_in

from kvcal import Plan, PlanCache, attached, load_model
from kvcal.cache.attached import attached_for
from kvcal.data.sequences import DataSpec, load_sequences
from kvcal.engines.capacity import VllmPool
from kvcal.engines.shard import HeadShard
from kvcal.engines.support import TESTED
from kvcal.folder import tokenizer_of
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import load_plan

LENGTHS, TOKENS, CONTEXT, REQUESTS = (20, 150, 300, 560), 16, 2048, 4
CHUNK = 256
# Relative change of weights, as other orders of sums (or products in bf16) change what comes out; how often
# drawn.
ROUNDING, DRAWS = {"float32": 2.0**-22, "bfloat16": 2.0**-9}, 2
ATTENTION = 8.0  # roundings of a score, as AttentionReplay counts them: the root of 64 channels
ENGINES = [f"{engine}-{version}" for engine, versions in TESTED.items() for version in versions]
CHECKS = ("cold", "prefixes", "chunks", "shortage")
HEAD = (
    "engine", "check", "requests", "tokens", "most likely", "least tie", "cached", "again", "attention", "distance",
    "most", "rounding", "most by rounding",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder with weights and tokenizer")
    parser.add_argument("--engines", nargs="*", default=ENGINES, help="vllm, sglang, or one with its version")
    parser.add_argument("--checks", nargs="*", default=CHECKS, choices=CHECKS, help="prefixes: after cold")
    parser.add_argument("--python", type=Path, help="interpreter of an environment with kvcal and the engine")
    parser.add_argument(
        "--dtype", default="float32", choices=ROUNDING, help="of the model in the engine; vLLM on a CPU: float32 alone"
    )
    parser.add_argument("--bits", default="3", help="all-in bits per cached value of the plan")
    parser.add_argument("--plan", type=Path, help="a plan that is there, in place of a new one")
    parser.add_argument("--out", type=Path, default=Path("artifacts/serve-real"), help="plans, logs, and the table")
    given = parser.parse_args()
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    folder = folder_of(given.model, given.out)
    loaded = load_model(str(folder), device="cpu", dtype="float32")
    rows, failures = [], []
    for name in given.engines:
        engine, _, version = name.partition("-")
        version = version or TESTED[engine][-1]
        path = given.plan or plan_for(engine, folder, given.bits, given.out, is_cpu=given.python is None)
        checker = Checker(loaded, load_plan(path), path, engine, version, given.out, given.python, given.dtype)
        found, failed = checker.run(given.checks)
        rows += found
        failures += failed
    title = f"{Path(given.model).name} over HTTP, against PlanCache"
    print_table(title, HEAD, rows)
    (given.out / "serve-real.json").write_text(
        json.dumps([dict(zip(HEAD, row, strict=True)) for row in rows], indent=1)
    )
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    sys.exit(bool(failures))


def folder_of(model: str, out: Path) -> Path:
    """A folder that engines load: the model's own, or one that a .gguf file is written to."""
    source = Path(find_model(model))
    if source.is_dir():
        return source.resolve()
    folder = out / source.stem
    if not (folder / "config.json").exists():
        loaded = load_model(str(source), device="cpu", dtype="bfloat16")
        tokenizer_of(loaded).save_pretrained(folder)
        loaded.model.save_pretrained(folder)
    return folder


def plan_for(engine: str, folder: Path, bits: str, out: Path, is_cpu: bool) -> Path:
    """A plan as a user makes it, made once; of few short texts."""
    path = out / f"{engine}-{bits}.safetensors"
    if not path.exists():
        words = ["plan", folder, "--bits", bits, "--for-engine", engine, "-o", path, "--out", out / "plans"]
        words += ["--samples", 2, "--seq-len", 256, "--quiet", *(["--dtype", "float32"] if is_cpu else [])]
        kvcal(*words)
    return path


def kvcal(*words: object) -> str:
    command = [sys.executable, "-m", "kvcal", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


class Checker:
    """One version of an engine with a plan."""

    def __init__(
        self, loaded: LoadedModel, plan: Plan, path: Path, engine: str, version: str, out: Path, python: Path | None,
        dtype: str,
    ) -> None:  # fmt: skip
        self.loaded, self.plan, self.path, self.engine = loaded, plan, path, engine
        self.name = f"{engine} {version}"
        self.folder = out / f"{engine}-{version}"
        self.folder.mkdir(exist_ok=True)
        self.is_exact = python is None and dtype == "float32"  # attention is recorded
        self.dtype = dtype
        self.options = [*([] if python else ON_CPU[engine]), "--dtype", dtype]
        self.python = python or (python_with_vllm if engine == "vllm" else python_with_sglang)(version)
        variables = variables_in if engine == "vllm" else variables_in_sglang
        own = {"SGLANG_CPU_OMP_THREADS_BIND": "0", VARIABLE: str(self.folder / "attention")}
        self.variables = {} if python else variables(self.folder) | own

    def run(self, wanted: Sequence[str]) -> tuple[list[tuple[Any, ...]], list[str]]:
        """Rows of the table, and what failed."""
        failures, texts, rows = [], self.texts(), []
        first = {f"{n}": text[:length] for n, (text, length) in enumerate(zip(texts, LENGTHS, strict=True))}
        checks: list[tuple[list[str], list[tuple[str, dict[str, list[int]], bool]]]] = [
            ([], [("cold", first, False), ("prefixes", {f"p{n}": ids for n, ids in first.items()}, False)]),
            (self.chunked(), [("chunks", {f"c{n}": ids[-400:] for n, ids in enumerate(texts)}, True)]),
            (self.short(), [("shortage", {f"s{n}": ids[-375:] for n, ids in enumerate(texts)}, True)]),
        ]  # fmt: skip
        for options, parts in checks:
            parts = [part for part in parts if part[0] in wanted]
            if not parts:
                continue
            with serving(self.words(options), str(self.model), self.folder, self.python, self.variables) as server:
                served = Served(server, self.loaded, self.plan, self.is_exact, self.dtype)
                for check, prompts, together in parts:
                    try:
                        rows.append((self.name, check, *served.check(check, prompts, together)))
                    except AssertionError as error:
                        failures.append(f"{self.name}, {check}: {error}")
                        print(failures[-1][:1000], file=sys.stderr, flush=True)
                        rows.append((self.name, check, len(prompts), *["failed"] * (len(HEAD) - 3)))
                    print(rows[-1], flush=True)
        return rows, failures

    @property
    def model(self) -> Path:
        return Path(self.loaded.source)

    def words(self, options: list[str]) -> list[str]:
        sizes = ["--context", CONTEXT, "--max-requests", REQUESTS]
        line = kvcal("serve-args", self.path, "--engine", self.engine, "--model", self.model, *sizes, "--json")
        return [*json.loads(line)["arguments"], *self.options, *options]

    def chunked(self) -> list[str]:
        return (
            ["--max-num-batched-tokens", str(CHUNK)]
            if self.engine == "vllm"
            else ["--chunked-prefill-size", str(CHUNK)]
        )

    def short(self) -> list[str]:
        """Blocks for all prompts, of three pages each, and for half of the pages that answers begin. Nothing
        is kept of those that are lost, and SGLang takes requests one after the other, without counting on all
        of their answers."""
        if self.engine == "vllm":
            pool = VllmPool(HeadShard(self.plan), has_prefixes=False)
            blocks = 1 + REQUESTS * (pool.ring_blocks + 3) + 2
            return ["--num-gpu-blocks-override", str(blocks), "--no-enable-prefix-caching"]
        few = ["--max-total-tokens", str(128 * (REQUESTS * 3 + 2)), "--schedule-conservativeness", "0.01"]
        return [*few, "--prefill-max-requests", "1", "--disable-radix-cache"]

    def texts(self) -> list[list[int]]:
        spec = DataSpec("python:docs", REQUESTS, LENGTHS[-1], seed=1, min_len=LENGTHS[-1])
        read = load_sequences(spec, tokenizer_of(self.loaded), self.loaded.max_context, "report")
        return [tokens.tolist() for tokens in read.sequences]


class Served:
    """Checks of one server, whose steps are computed again as they come: once as they are, and as often with
    changed weights as ``DRAWS`` says."""

    def __init__(self, server: Server, loaded: LoadedModel, plan: Plan, is_exact: bool, dtype: str) -> None:
        self.server, self.model, self.plan, self.rounding = server, loaded.model, plan, ROUNDING[dtype]
        drawn = [Replay(loaded.model, plan, logits=getattr(torch, dtype)) for _ in range(DRAWS)]
        self.replays = [Replay(loaded.model, plan), *drawn]
        self.attention = AttentionReplay(loaded.model, plan) if is_exact else None
        self.steps = self.attended = 0  # so many steps, and bytes of recorded attention, are computed again

    def check(self, check: str, prompts: dict[str, list[int]], together: bool) -> tuple[Any, ...]:
        """The rest of the row of a check. AssertionError where the engine answers otherwise than
        ``PlanCache``."""
        answers = self.server.complete(prompts, TOKENS, together)
        requests = {name: [prompts[name], answers[name][0]] for name in prompts}
        every = self.server.recorded()[self.steps :]
        self.steps += len(every)
        kept = [[one for one in step if one[0] in requests] for step in every]
        kept = without_discarded(kept) if self.server.engine == "sglang" else kept
        error = self.attention_error(every, kept)
        found = {"steps": kept, "requests": requests, "outputs": answers}
        replay, *others = self.replays
        ours, *theirs = (self.answered(each, found, draw) for draw, each in enumerate(self.replays))
        rounding = [
            [[float(abs(a[token] - b[token])) for a, b, token in zip(ours[name], one[name], output, strict=False)]
             for name, (_, output) in requests.items()] for one in theirs
        ]  # fmt: skip
        medians = [statistics.median(distances) for one in rounding for distances in one]
        changed = [distance for one in rounding for distances in one for distance in distances]
        before = len(replay.distances)
        limits = 2 * max(changed), 2 * max(medians)
        assert_answers(found, replay, ours, limits=limits)
        if check == "cold":
            self.require_generated(requests, replay.ties)
        number = sum(len(output) for _, output in requests.values())
        ties = [behind for (name, _), behind in replay.ties.items() if name in prompts]
        cached = sum(replay.cached[name] for name in prompts)
        assert check != "prefixes" or cached > 0, "no prefix was cached"
        assert check != "shortage" or replay.restarts > 0, "no request lost its blocks"
        row = len(prompts), number, number - len(ties), f"{max(ties, default=0):.2g}", cached, replay.restarts
        return *row, error, *spread(replay.distances[before:]), *spread(changed)

    def attention_error(self, every: list[Any], kept: list[Any]) -> str:
        if self.attention is None:
            return ""
        found, before = list(attended_in(self.server.attention, self.attended)), len(self.attention.errors)
        self.attended = found[-1][1]
        self.attention.attend(every, kept, [call for call, _ in found])
        error = max(self.attention.errors[before:])
        assert error < ATTENTION, f"attention differs by {error:.2g} roundings"
        return f"{error:.2g}"

    def answered(self, replay: Replay, found: dict[str, Any], draw: int) -> dict[str, list[torch.Tensor]]:
        with attached_for(self.model, self.plan), changed_weights(self.model, draw, self.rounding):
            return replay.run(found)

    @torch.no_grad()
    def require_generated(self, requests: dict[str, list[list[int]]], ties: Mapping[tuple[str, int], float]) -> None:
        """AssertionError unless answers are those of ``generate``, up to the first tie."""
        model: Any = self.model
        for name, (prompt, output) in requests.items():
            cache, tokens = PlanCache(self.plan, model.config), len(output)
            options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
            ids = torch.tensor([prompt])
            with attached(model):  # a mask, because Qwen2.5's prompts begin with the token that pads
                ids = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
            ids = ids[0, len(prompt) :]
            pairs = enumerate(zip(ids.tolist(), output, strict=True))
            first = next((place for place, (ours, theirs) in pairs if ours != theirs), None)
            assert first is None or (name, first) in ties, f"request {name}, token {first}: {ids}, {output}"


@contextmanager
def changed_weights(model: Any, draw: int, rounding: float) -> Iterator[None]:
    """Weights that differ by ``rounding`` of themselves, others for each draw; as they are for draw 0."""
    kept = [weight.clone() for weight in model.parameters()] if draw else []
    torch.manual_seed(draw)
    with torch.no_grad():
        for weight in model.parameters() if draw else ():
            weight.mul_(1 + rounding * torch.randn_like(weight))
        yield
        for weight, before in zip(model.parameters(), kept, strict=False):
            weight.copy_(before)


def spread(distances: Sequence[float]) -> tuple[str, str]:
    """The median, and the largest."""
    return f"{statistics.median(distances):.2g}", f"{max(distances):.2g}"


if __name__ == "__main__":
    main()
