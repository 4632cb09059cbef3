"""Time and memory of the plans that ship, next to 16 bits: the source of the published figures.

    python lab/bench_product.py --out product.json
    python lab/bench_product.py --part layers --shape 8x32768 --plan plan.safetensors --out product.json

Needs a CUDA device. Plans are those of --plan, or what the default recipe makes at each of --bits
(``shared``); and for reference alone, rotated pages of 2 bits without a basis. Weights are random, rows at
random phases of pages. Parts:

    layers   a step of all layers' caches, for each --shape: microseconds a layer, as ``step_times`` has them
    prompts  milliseconds until the first token of one prompt, at once and in chunks; 16 bits in a
    DynamicCache
    generate an eager step of a dynamic cache, as ``generate`` takes it, for each --generate: by the kernels, and
             without ``attached``, where all pages are decoded
    text     a text of --text tokens through the packed cache of ``kvcal eval``, in chunks as it feeds them; 16 bits
             in chunks of a page
    model    whole steps as CUDA graphs, of --batch sequences and of all that fit in --memory GB of cache: tokens a
             second; 16 bits in a StaticCache that is read without a mask, by the backend that torch chooses

Every row goes to stderr and to the JSON when it is measured; tables come last.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import step_times
import torch
import transformers
from shared import default_plan, print_table, random_model
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, DynamicCache, LlamaConfig, PreTrainedModel, StaticCache

from kvcal.artifact import write_text_atomic
from kvcal.cache.attached import attached
from kvcal.cache.plan_cache import PlanCache
from kvcal.errors import SlowPath
from kvcal.geometry import CACHE_DTYPES
from kvcal.models.attention import with_cache
from kvcal.models.supported_layers import geometry_of
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.plan import Format, LayerPlan, Plan, Workload, load_plan
from kvcal.plan.tensors import layout_tensors
from kvcal.stages.divergence import feed
from kvcal.stages.measuring.cache import DecodedCache

SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
TINY = SHAPE | {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128}  # fmt: skip
DENSE, REFERENCE = "16 bits", "2 bits, no basis (reference)"
SHAPES = [f"{batch}x{context}" for context in (1024, 4096, 32768) for batch in (1, 8, 32, 38)]
WARM = 3  # steps of ``generate`` that do not count
PROMPTS = 3  # of which the shortest counts, after one more
ROOM = 4 * PAGE_TOKENS  # of the dense cache, for the tokens of all replays
TIMES = ("us", "us_99", "longest_us", "in_phase_us", "packing")
COLUMNS = {  # the last is compared with that of 16 bits
    "layers": ("case", "cache", *TIMES, "mean_us"),
    "prompts": ("case", "cache", "ms"),
    "generate": ("case", "cache", "ms", "longest_ms", "mean_ms"),
    "text": ("case", "cache", "ms"),
    "model": ("case", "cache", "batch", *TIMES, "tokens_per_s"),
}
Plans = dict[str, Plan | None]
Rows = Iterator[dict[str, Any]]


def reference_plan(like: Plan) -> Plan:
    """Rotated pages of 2 bits, without a basis, feedback, sinks or windows."""
    pages = Format(2, quantizer="rotated")
    layers = tuple(LayerPlan(layer.geometry, pages, pages) if layer.is_paged else layer for layer in like.layers)
    return replace(like, layers=layers, tensors=layout_tensors(layers))


def measured(times: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """The answer of ``times``, once the caches before it are cleared, whose layers know each other; or why
    not."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        return times(*args)
    except torch.OutOfMemoryError:
        return {"reason": "out of memory"}


def rows_of_layers(plans: Plans, model: PreTrainedModel, given: argparse.Namespace) -> Rows:
    """A mean over the layers that keep pages."""

    def times(plan: Plan | None, workload: Workload) -> dict[str, Any]:
        layers = [layer for layer in (plan or plans[REFERENCE]).layers if layer.is_paged]
        if plan is None:
            us = step_times.dense_us(layers[0], workload, CACHE_DTYPES[plans[REFERENCE].cache_dtype], model.device)
            return {"us": us, "mean_us": us}
        return asdict(step_times.layers_times(step_times.filled_layers(plan, layers, workload, model.device), workload))

    for shape, (name, plan) in itertools.product(given.shape, plans.items()):
        yield {"case": shape, "cache": name} | measured(times, plan, Workload(*map(int, shape.split("x"))))


def rows_of_prompts(plans: Plans, model: PreTrainedModel, given: argparse.Namespace) -> Rows:
    ids = torch.randint(model.config.vocab_size, (1, given.prompt), device=model.device)

    def first_token_ms(plan: Plan | None, chunk: int) -> float:
        room = given.prompt + PAGE_TOKENS
        cache = PlanCache(plan, model.config, max_tokens=room) if plan else DynamicCache(config=model.config)
        with torch.inference_mode(), nullcontext() if plan is None else attached(model):
            start = time.perf_counter()
            for part in ids.split(chunk, 1):
                logits = model(input_ids=part, logits_to_keep=1, **with_cache(model, cache)).logits
            float(logits[0, -1].argmax())  # waits for the device
        return 1000 * (time.perf_counter() - start)

    def times(plan: Plan | None, chunk: int) -> dict[str, float]:
        return {"ms": min([first_token_ms(plan, chunk) for _ in range(1 + PROMPTS)][1:])}

    for chunk, (name, plan) in itertools.product((given.prompt, given.chunk), plans.items()):
        yield {"case": f"{given.prompt} tokens, {chunk} at once", "cache": name} | measured(times, plan, chunk)


@torch.inference_mode()
def rows_of_generate(plans: Plans, model: PreTrainedModel, given: argparse.Namespace) -> Rows:
    """Rows are at one phase of their pages, as equal prompts of ``generate`` are."""

    def times(plan: Plan | None, batch: int, context: int, is_attached: bool) -> dict[str, float]:
        cache = PlanCache(plan, model.config) if plan else DynamicCache(config=model.config)
        ids = torch.randint(model.config.vocab_size, (batch, context), device=model.device)
        taken = []
        with attached(model) if is_attached else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore", SlowPath)
            for part in ids.split(given.chunk // batch, 1):
                model(input_ids=part, logits_to_keep=1, **with_cache(model, cache))
            new = ids[:, -1:]
            for _ in range(WARM + given.steps):
                start = time.perf_counter()
                logits = model(input_ids=new, logits_to_keep=1, **with_cache(model, cache)).logits
                new = logits[:, -1:].argmax(-1)
                int(new[0])  # waits for the device, as generate does
                taken.append(1000 * (time.perf_counter() - start))
        counted = taken[WARM:]
        return {"ms": statistics.median(counted), "mean_ms": statistics.mean(counted), "longest_ms": max(counted)}

    for shape, (name, plan) in itertools.product(given.generate, plans.items()):
        batch, context = map(int, shape.split("x"))
        for is_attached in (True, False) if plan else (False,):
            is_slow = plan is not None and not is_attached
            row = {"case": shape, "cache": f"{name}, not attached" if is_slow else name}
            yield row | measured(times, plan, batch, context, is_attached)


@torch.inference_mode()
def rows_of_text(plans: Plans, model: PreTrainedModel, given: argparse.Namespace) -> Rows:
    ids = torch.randint(model.config.vocab_size, (1, given.text), device=model.device)

    def ms(plan: Plan | None) -> float:
        start = time.perf_counter()
        if plan is None:
            cache = DynamicCache(config=model.config)
            for part in ids.split(PAGE_TOKENS, 1):
                logits = model(input_ids=part, **with_cache(model, cache)).logits
        else:
            *_, (_, logits) = feed(model, DecodedCache(plan, model.config), ids)
        float(logits[0, -1, 0])
        return 1000 * (time.perf_counter() - start)

    for name, plan in plans.items():
        yield {"case": f"{given.text} tokens", "cache": name, "ms": min([ms(plan) for _ in range(3)][1:])}


def rows_of_model(plans: Plans, model: PreTrainedModel, given: argparse.Namespace) -> Rows:
    def times(plan: Plan | None, batch: int, context: int) -> dict[str, Any]:
        found = whole_step(plan, model, Workload(batch, context))
        return asdict(found) | {"tokens_per_s": 1e6 * batch / found.mean_us}

    for context, batch, (name, plan) in itertools.product(given.context, (*given.batch, None), plans.items()):
        taken = plans[REFERENCE].raw_nbytes if plan is None else plan.nbytes
        first, second = taken((context,)), taken((context, context))
        most = max(1, 1 + (int(1e9 * given.memory) - first) // (second - first))
        row = {"case": f"{batch or f'{given.memory:g} GB of'} x {context}", "cache": name, "batch": batch or most}
        yield row | measured(times, plan, row["batch"], context)


def whole_step(plan: Plan | None, model: PreTrainedModel, workload: Workload) -> step_times.StepTimes:
    ids = torch.zeros(workload.batch, 1, dtype=torch.int64, device=model.device)
    positions, lengths = torch.full_like(ids, workload.context), torch.zeros_like(ids[:, 0])
    with torch.inference_mode(), warnings.catch_warnings(), caching(plan, model, workload.context) as cache:
        warnings.simplefilter("ignore", SlowPath)

        def step() -> None:
            logits = model(input_ids=ids, position_ids=positions, logits_to_keep=1, **with_cache(model, cache)).logits
            ids.copy_(logits[:, -1:].argmax(-1))

        step()  # allocates
        if plan is not None:
            step_times.fill(cache, workload)
            lengths = cache.static.lengths
        for layer in cache.layers if plan is None else ():
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(workload.context)
        return step_times.step_times(step, lengths, workload, rounds=1)


@contextmanager
def caching(plan: Plan | None, model: PreTrainedModel, context: int) -> Iterator[Any]:
    """A static cache to which the model attends within; at 16 bits to its first ``context`` tokens, without a
    mask, the query heads of a group as rows of one query."""
    if plan is not None:
        with attached(model):
            yield PlanCache(plan, model.config, max_tokens=context + PAGE_TOKENS)
        return

    def unmasked(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, **__: object) -> tuple[Tensor, None]:
        rows = q.unflatten(1, (k.shape[1], -1)).squeeze(3)
        attended = scaled_dot_product_attention(rows, k[:, :, :context], v[:, :, :context])
        return attended.flatten(1, 2).unsqueeze(1).contiguous(), None

    before = model.config._attn_implementation
    AttentionInterface.register("unmasked", unmasked)
    model.set_attn_implementation("unmasked")
    try:
        yield StaticCache(config=model.config, max_cache_len=context + ROOM)
    finally:
        model.set_attn_implementation(before)


def main() -> None:
    parts: dict[str, Callable[[Plans, PreTrainedModel, argparse.Namespace], Rows]] = {
        "layers": rows_of_layers, "prompts": rows_of_prompts, "generate": rows_of_generate, "text": rows_of_text,
        "model": rows_of_model,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=parts, action="append")
    parser.add_argument("--plan", type=Path, action="append", default=[])
    parser.add_argument("--bits", type=float, nargs="+", default=[2.5, 3.0], help="of plans made here")
    parser.add_argument("--stripe-tokens", type=int, nargs="+", default=[16], help="of plans made here: 16, 32")
    parser.add_argument("--model", help="a folder or hub id, whose shape counts; default: Llama-3.1-8B's")
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="of layers: sequences x tokens")
    parser.add_argument("--prompt", type=int, default=32768, help="tokens")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens")
    parser.add_argument("--generate", nargs="+", default=["8x1200", "8x32000"], help="sequences x tokens")
    parser.add_argument("--steps", type=int, default=PAGE_TOKENS, help="of generate")
    parser.add_argument("--text", type=int, default=4096, help="tokens")
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 32768], help="of whole steps")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="of whole steps")
    parser.add_argument("--memory", type=float, default=40.0, help="GB of cache")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--out", type=Path, help="JSON file")
    given = parser.parse_args()
    config = AutoConfig.from_pretrained(given.model) if given.model else LlamaConfig(**(TINY if given.tiny else SHAPE))
    model = random_model(config, torch.device(given.device))
    made = {
        f"{bits:g} bits" + f", stripes of {stripe}" * (stripe != 16): default_plan(
            geometry_of(model), bits, stripe_tokens=stripe
        )
        for bits, stripe in itertools.product([] if given.plan else given.bits, given.stripe_tokens)
    }
    shipped = {path.stem: load_plan(path) for path in given.plan} | made
    plans = {DENSE: None, **shipped, REFERENCE: reference_plan(next(iter(shipped.values())))}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    about = {"device": torch.cuda.get_device_name(), "plans": {name: plan.sha256 for name, plan in shipped.items()}}
    rows: list[dict[str, Any]] = []
    for part in given.part or parts:
        for row in parts[part](plans, model, given):
            metric, same = COLUMNS[part][-1], {"part": part, "case": row["case"], "cache": DENSE}
            dense = next((one.get(metric) for one in rows if same.items() <= one.items()), None)
            factor = {"of_16_bits": row[metric] / dense} if dense and row.get(metric) else {}
            rows.append({"part": part} | row | factor)
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if given.out:
                write_text_atomic(given.out, json.dumps(about | versions | {"rows": rows}, indent=1) + "\n")
    for part in given.part or parts:
        title = f"{part}: {', '.join(shipped)} of {given.model or 'the shape of Llama-3.1-8B'} on {about['device']}"
        head, found = (*COLUMNS[part], "of_16_bits"), [row for row in rows if row["part"] == part]
        print_table(title, head, [[row.get(column, row.get("reason", "")) for column in head] for row in found])


if __name__ == "__main__":
    main()
