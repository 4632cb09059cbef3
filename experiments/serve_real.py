"""A pretrained model served over HTTP with a plan, in the engines themselves, against ``generate`` with the same plan.

    python experiments/serve_real.py                                      # SmolLM2-135M, each version of each engine
    python experiments/serve_real.py --model path/to/model --engines vllm # a folder; the newest version alone
    python experiments/serve_real.py --engines vllm --python PATH         # an engine that is installed, on a GPU

``kvcal plan --for-engine`` makes a plan, ``kvcal serve-args`` prints a command line, which starts the engine's server.
Without --python, engines are those of the tests: on a CPU, in fp32, made once in a folder of caches. Four checks:

    cold       prompts of 20 to 560 tokens, one after the other
    prefixes   the same again, which begin after the blocks that the first time filled
    chunks     new prompts at once, in chunks of 256 tokens
    shortage   prompts at once, in fewer blocks than they need: requests lose theirs, and are computed again

The engine's steps are recorded and computed again with ``PlanCache``: the same tokens in the same chunks. Each token
must be the most likely one, or tied with it, and have ``PlanCache``'s log-probability (tests/support/engine_replay.py).
An engine's products round otherwise, so that single codes come out one step apart. How much that is, the row "rounding"
says: distances of ``PlanCache`` to itself, where weights are changed by 2^-22. An engine's may be twice the largest of
these, over all tokens and in the middle of a request; the row "16 bits" has the distances of the model without a plan.
Tokens of cold prompts are compared with ``generate``, too. Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from real import find_model
from shared import print_table

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from engine_replay import assert_replayed
from engine_server import ON_CPU, Server, serving
from sglang_environment import python_with_sglang, variables_in_sglang, without_discarded
from vllm_environment import python_with_vllm, variables_in

from kvcal import Plan, PlanCache, attached, load_model
from kvcal.data.sequences import DataSpec, load_sequences
from kvcal.engines.capacity import capacity
from kvcal.engines.support import TESTED
from kvcal.folder import tokenizer_of
from kvcal.models.load import LoadedModel
from kvcal.plan.plan import load_plan

LENGTHS, TOKENS, CONTEXT, REQUESTS = (20, 150, 300, 560), 16, 2048, 4
CHUNK = 256
ROUNDING = 2.0**-22  # relative change of weights, which other orders of sums change products by
ENGINES = [f"{engine}-{version}" for engine, versions in TESTED.items() for version in versions]
HEAD = ("engine", "check", "requests", "tokens", "most likely", "least tie", "cached", "again", "distance", "most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder with weights and tokenizer")
    parser.add_argument("--engines", nargs="*", default=ENGINES, help="vllm, sglang, or one with its version")
    parser.add_argument("--python", type=Path, help="interpreter of an environment with kvcal and the engine")
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
        path = given.plan or plan_for(engine, folder, given.bits, given.out, is_cpu=given.python is None)
        checker = Checker(loaded, load_plan(path), path, engine, version or TESTED[engine][-1], given.out, given.python)
        found, failed = checker.run()
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
        self, loaded: LoadedModel, plan: Plan, path: Path, engine: str, version: str, out: Path, python: Path | None
    ) -> None:
        self.loaded, self.plan, self.path, self.engine = loaded, plan, path, engine
        self.name = f"{engine} {version}"
        self.folder = out / f"{engine}-{version}"
        self.folder.mkdir(exist_ok=True)
        self.known: dict[str, list[list[int]]] = {}  # prompt and answer of every request of a server
        self.answered: dict[str, list[Any]] = {}
        self.limits = 0.0, 0.0  # of distances, at most and in the middle of a request
        self.options = [] if python else ON_CPU[engine]
        self.python = python or (python_with_vllm if engine == "vllm" else python_with_sglang)(version)
        variables = variables_in if engine == "vllm" else variables_in_sglang
        self.variables = {} if python else variables(self.folder) | {"SGLANG_CPU_OMP_THREADS_BIND": "0"}
        self.ring_blocks = capacity(engine, plan, 10**12, 1, CONTEXT, max_requests=REQUESTS).ring_blocks

    def run(self) -> tuple[list[tuple[Any, ...]], list[str]]:
        """Rows of the table, and what failed."""
        failures, texts = [], self.texts()
        first = {f"{n}": text[:length] for n, (text, length) in enumerate(zip(texts, LENGTHS, strict=True))}
        rows = [(*row, *[""] * 5, *distances) for row, distances in self.yardsticks(first)]
        for row in rows:
            print(row, flush=True)
        checks: list[tuple[list[str], list[tuple[str, dict[str, list[int]], bool]]]] = [
            ([], [("cold", first, False), ("prefixes", {f"p{n}": ids for n, ids in first.items()}, False)]),
            (self.chunked(), [("chunks", {f"c{n}": ids[-400:] for n, ids in enumerate(texts)}, True)]),
            (self.short(), [("shortage", {f"s{n}": ids[-375:] for n, ids in enumerate(texts)}, True)]),
        ]  # fmt: skip
        for options, parts in checks:
            self.known, self.answered = {}, {}
            with serving(self.words(options), str(self.model), self.folder, self.python, self.variables) as server:
                for check, prompts, together in parts:
                    try:
                        rows.append((self.name, check, *self.check(server, check, prompts, together)))
                    except AssertionError as error:
                        failures.append(f"{self.name}, {check}: {error}")
                        print(failures[-1][:1000], file=sys.stderr, flush=True)
                        rows.append((self.name, check, len(prompts), *["failed"] * 7))
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
        """Blocks for all prompts, of three pages each, and for half of the pages that answers begin."""
        if self.engine == "vllm":
            return ["--num-gpu-blocks-override", str(1 + REQUESTS * (self.ring_blocks + 3) + 2)]
        return ["--max-total-tokens", str(128 * (REQUESTS * 3 + 2))]

    def texts(self) -> list[list[int]]:
        spec = DataSpec("python:docs", REQUESTS, LENGTHS[-1], seed=1, min_len=LENGTHS[-1])
        read = load_sequences(spec, tokenizer_of(self.loaded), self.loaded.max_context, "report")
        return [tokens.tolist() for tokens in read.sequences]

    def check(self, server: Server, check: str, prompts: dict[str, list[int]], together: bool) -> tuple[Any, ...]:
        """What follows in the row of a check. AssertionError where the engine answers otherwise than ``PlanCache``."""
        answers = server.complete(prompts, TOKENS, together)
        requests = {name: [prompts[name], answers[name][0]] for name in prompts}
        self.known |= requests
        self.answered |= answers
        steps = [[one for one in step if one[0] in self.known] for step in server.recorded()]
        steps = without_discarded(steps) if self.engine == "sglang" else steps
        found = {"steps": steps, "requests": self.known, "outputs": self.answered}
        replay = assert_replayed(found, self.loaded.model, self.plan, limits=self.limits)
        if check == "cold":
            self.require_generated(requests, replay.ties)
        number = sum(len(output) for _, output in requests.values())
        ties = [behind for (name, _), behind in replay.ties.items() if name in prompts]
        cached = sum(replay.cached[name] for name in prompts)
        assert check != "prefixes" or cached > 0, "no prefix was cached"
        assert check != "shortage" or replay.restarts > 0, "no request lost its blocks"
        least = f"{max(ties, default=0):.2g}"
        distances = spread(replay.distances)
        return len(prompts), number, number - len(ties), least, cached, replay.restarts, *distances

    def yardsticks(self, prompts: dict[str, list[int]]) -> list[tuple[tuple[Any, ...], tuple[str, str]]]:
        """Names, requests and distances of two rows, of cold prompts."""
        model, others = self.loaded.model, {"rounding": self.plan, "16 bits": self.plan.unquantized()}
        ours = {name: self.chances(ids, self.plan, []) for name, ids in prompts.items()}
        rows = []
        for check, plan in others.items():
            kept = {name: weight.clone() for name, weight in model.named_parameters()}
            if check == "rounding":
                torch.manual_seed(0)
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.mul_(1 + ROUNDING * torch.randn_like(weight))
            theirs = {name: self.chances(ids, plan, ours[name][0])[1] for name, ids in prompts.items()}
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.copy_(kept[name])
            distances = [abs(a - b) for name in prompts for a, b in zip(ours[name][1], theirs[name], strict=True)]
            if check == "rounding":
                medians = [statistics.median(distances[at : at + TOKENS]) for at in range(0, len(distances), TOKENS)]
                self.limits = 2 * max(distances), 2 * max(medians)
            rows.append(((self.name, check, len(prompts)), spread(distances)))
        return rows

    @torch.no_grad()
    def chances(self, prompt: list[int], plan: Plan, tokens: list[int]) -> tuple[list[int], list[float]]:
        """Tokens, greedy ones where none are given, and the log-probability of each; the prompt in chunks."""
        model, cache, found = self.loaded.model, PlanCache(plan, self.loaded.model.config), []
        ids, chosen = torch.tensor([prompt]), []
        with attached(model):
            *before, ids = ids.split(CHUNK, dim=1)
            for part in before:
                model(part, past_key_values=cache, logits_to_keep=1)
            for place in range(TOKENS):
                row = model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].log_softmax(-1)
                chosen.append(tokens[place] if tokens else int(row.argmax()))
                found.append(float(row[chosen[-1]]))
                ids = torch.tensor([chosen[-1:]])
        return chosen, found

    @torch.no_grad()
    def require_generated(self, requests: dict[str, list[list[int]]], ties: Mapping[tuple[str, int], float]) -> None:
        """AssertionError unless answers are those of ``generate``, up to the first tie."""
        model: Any = self.loaded.model
        options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
        for name, (prompt, output) in requests.items():
            cache = PlanCache(self.plan, model.config)
            with attached(model):
                ids = model.generate(torch.tensor([prompt]), past_key_values=cache, **options)[
                    0, len(prompt) :
                ].tolist()
            pairs = enumerate(zip(ids, output, strict=True))
            first = next((place for place, (ours, theirs) in pairs if ours != theirs), None)
            assert first is None or (name, first) in ties, f"request {name}, token {first}: {ids}, {output}"


def spread(distances: Sequence[float]) -> tuple[str, str]:
    """The median, and the largest."""
    return f"{statistics.median(distances):.2g}", f"{max(distances):.2g}"


if __name__ == "__main__":
    main()
