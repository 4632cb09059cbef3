"""Long answers of a pretrained model with plans: tables of many rows, and text that goes on by itself.

    python lab/long_generation.py --model path/to/model.gguf --data texts --plans default@2.5,default@3,kivi-2

rows       records, a line of JSON each, and the same as the rows of a table, as in LongProc (arXiv 2501.05414): rows
           that the model gets right, letter for letter, each after the true rows before it; and how many come
           before the first wrong one, which greedy decoding writes just so
own text   after the beginnings of texts, tokens are drawn from the plan's distributions, at temperature 1. By quarter
           of what it wrote: KL to 16 bits, along that and along what 16 bits wrote after the same beginnings
           (where errors build up, the first is the larger one); and the negative log-likelihood of it by 16
           bits

The cache is packed all the while; own text is written by the kernels on a GPU. KL and rows are measured as in
real.py, whose --data, --plans and names of models are these, too. Errors are standard errors over texts,
paired where plans are compared. OUT/long.json has the results after every plan; a second run goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from dialogues import JOBS, PLACES
from real import PRICED, RAW, Maker, Text, cell, find_model, machine, texts_of
from rivals import all_rivals, measure_rivals
from shared import mean_and_error, print_table, ratio_and_error
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvcal import Plan, PlanCache, Workload, load_model
from kvcal.artifact import write_text_atomic
from kvcal.cache.attached import attached_for
from kvcal.console import TerminalReporter
from kvcal.data.pools import TokenDataset, require_unseen
from kvcal.data.reading import LINES, Reading
from kvcal.data.word_problems import PEOPLE
from kvcal.folder import tokenizer_of
from kvcal.models.attention import with_cache
from kvcal.models.load import LoadedModel
from kvcal.stages.divergence import kl_divergence, lockstep, unquantized_plan
from kvcal.stages.evaluate.tasks import generation_config, read_answers
from kvcal.stages.measuring.cache import DecodedCache, DenseCache
from kvcal.stages.verify import require_predicted_bytes

SURNAMES = ("Berg", "Costa", "Diaz", "Fischer", "Ito", "Kovacs", "Lopez", "Moreau", "Novak", "Okafor", "Patel", "Rossi")
GIVEN, QUARTERS = 2, 4


def main() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)  # which plans anew for every length of the past
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    path, reporter = given.out / "long.json", TerminalReporter()
    loaded = load_model(find_model(given.model), device=given.device, dtype=given.dtype)
    settings = {name: getattr(given, name) for name in ("tables", "rows", "texts", "tokens", "new_tokens")}
    settings |= machine(loaded) | {"model": loaded.identity.weights_sha256}
    found = json.loads(path.read_text()) if path.exists() else {}
    if found.get("settings") != settings:
        found = {"settings": settings, "plans": {}, "rows": {}, "own": {}}
    maker = Maker(loaded, given, found, reporter)
    with reporter.running():
        groups = texts_of(loaded, given) if given.texts else []
        texts = [text for _, group in groups for text in group if text.kind]
        sequences, masks = tuple(text.tokens_T for text in texts), tuple(text.loss_mask_T for text in texts)
        known = TokenDataset(sequences, masks, "", "the measured texts", purpose="report")
        raw, written_BT = unquantized_plan(loaded.identity, loaded.geometry), torch.empty(0)
        names = RAW, *maker.names
        if given.rivals and given.tables:
            rival_rows(loaded, given, found)
        missing = set(names) - set(found["own"])
        for name in names:
            plan = raw if name == RAW else maker.plan(name, Workload(given.batch, given.tokens + given.new_tokens))
            if plan is None:
                continue
            require_unseen(plan.provenance, known)
            started = time.monotonic()
            if name not in found["rows"] and given.tables:
                texts_read = read_answers(loaded, plan, tables_of(loaded, given), given.batch)
                found["rows"][name] = [one.right_A.tolist() for one in texts_read]
                reporter.say(f"{name}: rows in {time.monotonic() - started:.1f} s")
            if texts and missing and name in missing | {RAW}:  # what 16 bits write is the same each time
                own_BT = written(loaded, plan, torch.stack(sequences), given.new_tokens)
                written_BT = own_BT if name == RAW else written_BT
                both = {"own": own_BT} if name == RAW else {"own": own_BT, RAW: written_BT}
                found["own"][name] = {of: along(loaded, raw, plan, text, given.tokens) for of, text in both.items()}
                reporter.say(f"{name}: {len(texts)} texts in {time.monotonic() - started:.1f} s")
            write_text_atomic(path, json.dumps(found, indent=1) + "\n")
    print_results(found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder, a .gguf file or a hub id")
    parser.add_argument("--out", type=Path, help="folder of results; default: artifacts/long-NAME")
    parser.add_argument("--data", type=Path, help="folder of texts, as for real.py")
    parser.add_argument("--plans", default="default@3,default@2.5,kivi-2", help="comma-separated, as for real.py")
    parser.add_argument("--rivals", help="formats of rivals.py whose rows are measured, too, such as fp8")
    parser.add_argument("--calibrate", action="append", help="source of calibration; default: the recipes' own")
    parser.add_argument("--quick", action="store_true", help="plans from few texts, for a CPU")
    parser.add_argument("--tables", type=int, default=64, help="0 for none")
    parser.add_argument("--rows", type=int, default=60, help="of a table")
    parser.add_argument(
        "--texts", type=int, default=4, help="of each kind whose beginnings are gone on with; 0 for none"
    )
    parser.add_argument("--batch", type=int, default=8, help="tables read at once")
    parser.add_argument("--tokens", type=int, default=1024, help="of a text's beginning, 512 at least")
    parser.add_argument("--new-tokens", type=int, default=2048, help="that are written after it")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    given.name = Path(given.model).stem
    given.out = given.out or Path("artifacts") / f"long-{given.name}"
    given.retrieval, given.problems = [], LINES * given.texts  # of texts_of
    return given


def table(rng: random.Random, count: int, tokenizer: Any) -> Reading:
    """Records and their table, whose rows but the first ones are the answers."""
    records = [
        {
            "number": rng.randint(1000, 9999),
            "name": f"{rng.choice(PEOPLE)} {rng.choice(SURNAMES)}",
            "city": rng.choice(PLACES),
            "job": rng.choice(JOBS).partition(" ")[2],
            "sum": f"{rng.randint(10, 999)}.{rng.randint(0, 99):02d}",
        }
        for _ in range(count + GIVEN)
    ]
    lines, rows = [json.dumps(record) for record in records], [" | ".join(map(str, r.values())) for r in records]
    head = ["", "The same records as a table, in the same order:", " | ".join(records[0])]
    text, spans = "\n".join(["Records:", *lines, *head, *rows[:GIVEN], ""]), []
    for row in rows[GIVEN:]:
        spans.append((len(text), len(text) + len(row)))
        text += row + "\n"
    encoded = tokenizer(text, return_offsets_mapping=True)
    places = [
        [number for number, (first, stop) in enumerate(encoded["offset_mapping"]) if first < end and stop > begin]
        for begin, end in spans
    ]
    answers = tuple((inside[0], inside[-1] + 1) for inside in places)
    return Reading(torch.tensor(encoded["input_ids"]), answers)


def tables_of(loaded: LoadedModel, given: argparse.Namespace) -> tuple[Reading, ...]:
    """Tables of one length, with as many of their first rows as lie within the tokens of the shortest one."""
    rng, tokenizer = random.Random("rows"), tokenizer_of(loaded)
    tables = [table(rng, given.rows, tokenizer) for _ in range(given.tables)]
    length = min(len(one.tokens_T) for one in tables)
    count = min(sum(stop <= length for _, stop in one.answers) for one in tables)
    return tuple(Reading(one.tokens_T[:length], one.answers[:count]) for one in tables)


def rival_rows(loaded: LoadedModel, given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Notes which rows other systems' formats get right, simulated as in rivals.py."""
    tables, shape = tables_of(loaded, given), (len(loaded.geometry.layers), loaded.geometry.layers[0].k_head_dim)
    none_T = torch.zeros(len(tables[0].tokens_T), dtype=torch.bool)
    texts = [Text(one.tokens_T, none_T, "", "rows", one.answers) for one in tables]
    for name, rival in all_rivals(loaded, given.rivals.split(",")).items():
        found["plans"][name] = {"bits": rival.bits(PRICED.context, *shape)}
        found["rows"][name] = [text["answers"] for text in measure_rivals(loaded, texts, {name: rival})[name]]


@torch.inference_mode()
def written(loaded: LoadedModel, plan: Plan, tokens_BT: Tensor, count: int) -> Tensor:
    """Tokens [B, T + count]: beginnings, and what is drawn after them, which does not end."""
    torch.manual_seed(0)
    model: Any = loaded.model  # transformers declares no type for generate
    cache = (DecodedCache if model.device.type == "cpu" else PlanCache)(plan, model.config)
    config = generation_config(model, tokenizer_of(loaded))
    config.update(do_sample=True, top_k=0, max_new_tokens=count, min_new_tokens=count)
    tokens_BT = tokens_BT.to(model.device)
    with attached_for(model, plan):
        output_BT: Tensor = model.generate(
            tokens_BT, attention_mask=torch.ones_like(tokens_BT), generation_config=config, **with_cache(model, cache)
        )
    require_predicted_bytes(cache)
    return output_BT.cpu()


@torch.inference_mode()
def along(loaded: LoadedModel, raw: Plan, plan: Plan, tokens_BT: Tensor, first: int) -> dict[str, list[list[float]]]:
    """Along tokens from ``first`` on, of every text and quarter: the mean KL of the plan to 16 bits, and the
    negative log-likelihood by 16 bits, both in nats."""
    model, next_BT = loaded.model, tokens_BT[:, 1:].to(loaded.model.device)
    caches = [DenseCache(one, model.config) for one in ([raw] if plan is raw else [raw, plan])]
    reference_BTV, found = torch.empty(0), dict[str, list[Tensor]]()
    for number, start, logits_BTV in lockstep(model, caches, tokens_BT[:, :-1]):
        if number:
            kl_n = kl_divergence(reference_BTV.flatten(0, 1), logits_BTV.flatten(0, 1))
            found.setdefault("kl", []).append(kl_n.view(len(tokens_BT), -1))
        else:
            reference_BTV = logits_BTV
            expected_BT = next_BT[:, start : start + logits_BTV.shape[1]]
            nll_n = cross_entropy(logits_BTV.float().flatten(0, 1), expected_BT.flatten(), reduction="none")
            found.setdefault("nll", []).append(nll_n.view_as(expected_BT))
    quarters = {key: torch.cat(parts, 1)[:, first - 1 :].chunk(QUARTERS, 1) for key, parts in found.items()}
    return {key: torch.stack([one_BT.mean(1) for one_BT in parts], 1).tolist() for key, parts in quarters.items()}


def print_results(found: dict[str, Any]) -> None:
    settings, plans = found["settings"], found["plans"]
    print(", ".join(f"{key} {value}" for key, value in settings.items() if key != "model"))
    bits = {name: f"{plans[name]['bits']:.2f}" if name in plans else "16" for name in (RAW, *plans)}
    right = {name: torch.tensor(texts).double() for name, texts in found["rows"].items()}
    rows = []
    for name, right_BN in right.items():
        before_B, share_B, raw_B = right_BN.cumprod(1).sum(1), right_BN.mean(1), right[RAW].mean(1)
        cells = (cell(mean_and_error(of_B), 100) for of_B in (share_B, share_B - raw_B))
        of_raw = cell(ratio_and_error(share_B, raw_B), digits=3) if raw_B.any() else ""
        rows.append((name, bits[name], *cells, of_raw, cell(mean_and_error(before_B))))
    head = "rows right, %", "less 16 bits'", "of 16 bits'", "before the first wrong one"
    print_table("Tables", ("plan", "bits", *head), rows)
    rows = []
    for name, texts in found["own"].items():
        columns = ("own", "kl", 1000, 1), (RAW, "kl", 1000, 1), ("own", "nll", 1, 3)
        rows.append((name, bits[name], *(quarters(texts.get(of, {}).get(key), *how) for of, key, *how in columns)))
    titles = "1,000 KL along its own text", "along that of 16 bits", "NLL of its own text by 16 bits"
    print_table("By quarter of the text", ("plan", "bits", *titles), rows)


def quarters(texts: list[list[float]] | None, scale: float, digits: int) -> str:
    return ", ".join(cell(mean_and_error(quarter), scale, digits) for quarter in torch.tensor(texts).T) if texts else ""


if __name__ == "__main__":
    main()
