"""Small trained models of other families than the embedded one's: instruments to judge a plan on a model that took part
in no decision.

    python experiments/train_models.py texts TEXT_FOLDER text.npy       # once: prose, mathematics, solved problems
    python experiments/train_models.py train qwen2 OUT --text text.npy --seconds 200

Families: ``qwen2`` (biases; key biases are large where RoPE turns slowly, as in published checkpoints), ``qwen3``
(QK-norm), ``gemma`` (Gemma 3: QK-norm, norms on both sides, two RoPE bases; windows of 512 in every other layer, as in
Gemma 2) and ``gpt-oss`` (attention sinks, windows of 128 in every other layer, 4 experts of which 2 compute). All have
the embedded model's tokenizer and 4,096 positions.

A row is a piece of text, or problems of kvcal.data.tasks from the start of a problem on; none is of the pool "report".
Prompts of problems are random, so their tokens weigh PROMPT_WEIGHT. Lengths grow with the share of the wall-clock
budget that is spent, then rows become MAX_LEN long; the learning rate follows the same clock, so that any budget ends
annealed. Matrices learn by Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), the rest by AdamW.

Held out of the texts: in every folder, the files 1, 5, 9, ... in the order of their names, counted from 0.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import shutil
import time
from collections import defaultdict
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcal.data.pools import pool_of
from kvcal.data.tasks import TASKS, Problem, chain, extract_answer, ledger, problems, times
from kvcal.embedded import model_folder

ROW_LEN, MAX_LEN, ROWS_A_BLOCK = 1024, 4096, 8
TEXT_SHARE, PROMPT_WEIGHT = 0.25, 0.1
LR, WEIGHT_DECAY, MOMENTUM, WARMUP_STEPS = 3e-3, 0.05, 0.95, 50
HARDEST_AT, LONG_ROWS_AT, DECAY_AT = 0.6, 0.86, 0.5  # shares of the budget
EASY = {"max_steps": 10, "max_size": 28, "max_hops": 6, "max_digits": 3}
IDS = {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
SLOW_CHANNELS, SLOW_BIAS_STD = 8, 4.0


@dataclass(frozen=True)
class Family:
    """A configuration class and its arguments; ``attention``: what computes attention in training."""

    config: type[hf.PreTrainedConfig]
    arguments: dict[str, Any]
    attention: str = "sdpa"


def shape(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """The sizes that all families have."""
    return {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "max_position_embeddings": MAX_LEN,
    }  # fmt: skip


def rope(theta: float) -> dict[str, Any]:
    """RoPE of one base."""
    return {"rope_type": "default", "rope_theta": theta}


FAMILIES = {
    "qwen2": Family(
        hf.Qwen2Config,
        shape(384, 1024, 10, 6, 2, 128) | {"tie_word_embeddings": True, "rope_parameters": rope(1e6)},
    ),
    "qwen3": Family(
        hf.Qwen3Config, shape(256, 640, 8, 8, 4, 64) | {"tie_word_embeddings": True, "rope_parameters": rope(1e4)}
    ),
    "gemma": Family(
        hf.Gemma3TextConfig,
        shape(384, 1024, 12, 4, 2, 128)
        | {
            "query_pre_attn_scalar": 128,
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"] * 6,
            "rope_parameters": {"sliding_attention": rope(1e4), "full_attention": rope(1e6)},
        },
    ),
    "gpt-oss": Family(
        hf.GptOssConfig,
        shape(384, 384, 8, 8, 2, 64)
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "rope_parameters": rope(1e4),
        },
        attention="sinks",
    ),
}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32}


def sink_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, s_aux: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention with a sink [H] of each query head, by SDPA: query [B, H, T, D], key and value [B, N, T, D], mask
    [1, 1, T, T] or None (causal); returns [B, T, H, D]. An extra first key meets every query with the logit ``s_aux``,
    by means of 8 extra channels, and has the value 0."""
    (batch, heads, length, head_dim), groups = query.shape, query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    extra = query.new_ones(batch, heads, length + 1, 8)
    query = torch.cat([functional.pad(query, (0, 0, 1, 0)), extra], -1)
    sinks = (s_aux / (8 * scaling)).to(key.dtype)[None, :, None, None].expand(batch, heads, 1, 8)
    key = torch.cat([functional.pad(sinks, (head_dim, 0)), functional.pad(key, (0, 8))], 2)
    out = functional.scaled_dot_product_attention(
        query, key, functional.pad(value, (0, 8, 1, 0)),
        attn_mask=None if mask is None else functional.pad(mask, (1, 0, 1, 0), value=True),
        is_causal=mask is None, scale=scaling,
    )  # fmt: skip
    return out[:, :, 1:, :head_dim].transpose(1, 2).contiguous(), None


def dense_experts(experts: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """GPT-OSS's experts, every one over every token, without a loop: hidden [T, C], indices and weights [T, K]."""
    routing = torch.zeros(len(hidden), experts.num_experts, dtype=weights.dtype, device=hidden.device)
    routing = routing.scatter(1, indices, weights)
    inner = torch.einsum("tc,ecf->etf", hidden, experts.gate_up_proj) + experts.gate_up_proj_bias[:, None]
    out = torch.einsum("etf,efc->etc", experts._apply_gate(inner), experts.down_proj) + experts.down_proj_bias[:, None]
    return torch.einsum("etc,te->tc", out, routing.to(out.dtype)).to(hidden.dtype)


def build(name: str, is_tiny: bool, device: str) -> hf.PreTrainedModel:
    """A family's model with random weights, fp32, as it is trained."""
    ALL_ATTENTION_FUNCTIONS.register("sinks", sink_attention)
    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
    family = FAMILIES[name]
    arguments = family.arguments | (TINY if is_tiny else {})
    if "layer_types" in arguments:
        arguments["layer_types"] = arguments["layer_types"][: arguments["num_hidden_layers"]]
    config = family.config(**IDS, **arguments)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.config._attn_implementation, model.config._experts_implementation = family.attention, "dense"
    if name == "qwen2":
        half = config.head_dim // 2
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.data.view(config.num_key_value_heads, 2, half)
            bias[..., -SLOW_CHANNELS:].normal_(std=SLOW_BIAS_STD)
    return model.to(device)


def masks_of(config: hf.PreTrainedConfig, length: int, device: str) -> dict[str, Tensor | None]:
    """A mask for each type of layer, bool [1, 1, T, T]; None: causal, which SDPA knows."""
    offsets = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    window = getattr(config, "sliding_window", None)
    is_seen = (offsets >= 0) & (offsets < window) if window else None
    return {"full_attention": None, "sliding_attention": None if is_seen is None else is_seen[None, None]}


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, nearly: five Newton-Schulz steps in bf16 over [n, R, C]."""
    x = matrices.bfloat16()
    x = x.mT if (is_tall := x.shape[1] > x.shape[2]) else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon:
    """Momentum whose updates are orthogonal, over matrices [R, C] and stacks of them; those of one shape in one go. An
    update's entries have a root mean square of 0.4 learning rates; Moonlight's have 0.2 (arXiv 2502.16982)."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.groups: defaultdict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            self.groups[parameter.shape].append(parameter)
        self.momenta = {shape: torch.zeros_like(torch.stack(group)) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for shape, group in self.groups.items():
            gradients = torch.stack([parameter.grad for parameter in group])
            momentum = self.momenta[shape].lerp_(gradients, 1 - MOMENTUM)
            update = orthogonal(gradients.lerp(momentum, MOMENTUM).flatten(0, -3)).view(gradients.shape)
            torch._foreach_mul_(group, 1 - lr * WEIGHT_DECAY)
            scale = 0.4 * math.sqrt(max(shape[-2:]))
            torch._foreach_add_(group, list(update.to(momentum.dtype).unbind()), alpha=-lr * scale)


def draw(rng: random.Random, progress: float, limits: float) -> Problem:
    """A problem of the mixture: short at first, of up to ``limits`` of the full lengths from HARDEST_AT on."""
    share = limits * min(1.0, progress / HARDEST_AT)
    if progress >= LONG_ROWS_AT and rng.random() < 0.2:
        share = 1.0
    name = rng.choices(list(TASKS), weights=(3, 5, 2))[0]
    while True:
        if name == "ledger":
            problem = ledger(rng, max_steps=round(8 + 62 * share))
        elif name == "chain":
            problem = chain(rng, max_size=round(24 + 136 * share), max_hops=round(6 + 34 * share))
        else:
            problem = times(rng, max_digits=round(2 + 5 * share))
        if pool_of(problem.prompt) != "report":
            return problem


def produce(seed: int, limits: float, progress: Synchronized, queue: multiprocessing.Queue) -> None:
    """Endless blocks of task rows, int16 [ROWS_A_BLOCK, length + 1]; a prompt's token t is -1 - t."""
    tokenizer = hf.AutoTokenizer.from_pretrained(model_folder())
    rng = random.Random(f"train {seed}")
    while True:
        length = row_length(progress.value)
        rows = np.empty((ROWS_A_BLOCK, length + 1), np.int16)
        for row in rows:
            tokens: list[int] = []
            while len(tokens) <= length:
                problem = draw(rng, progress.value, limits)
                prompt, completion = tokenizer(
                    [problem.prompt_text, problem.completion], add_special_tokens=False
                )["input_ids"]  # fmt: skip
                tokens += [-1 - token for token in (tokenizer.eos_token_id, *prompt)] + completion
            row[:] = tokens[: length + 1]
        queue.put(rows)


def row_length(progress: float) -> int:
    return MAX_LEN if progress >= LONG_ROWS_AT else ROW_LEN


def held_out(text: Path) -> Path:
    """Where ``write_texts`` puts rows of the texts that are held out."""
    return text.with_stem(text.stem + "-held-out")


def write_texts(folder: Path, out: Path) -> None:
    """Tokens of the files that are not held out, int16, with an end-of-sequence token before each file; and
    16 rows [16, MAX_LEN + 1] of those that are."""
    tokenizer = hf.AutoTokenizer.from_pretrained(model_folder())
    kept: list[int] = []
    held: list[int] = []
    for subfolder in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(path for path in subfolder.iterdir() if path.suffix in {".txt", ".tex", ".raw", ".jsonl"})
        for number, path in enumerate(files):
            tokens = held if number % 4 == 1 else kept
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".jsonl":
                text = "\n\n".join("\n".join(json.loads(line).values()) for line in text.splitlines())
            paragraphs = [part + "\n\n" for part in text.split("\n\n")]
            tokens.append(tokenizer.eos_token_id)
            for ids in tokenizer(paragraphs, add_special_tokens=False)["input_ids"]:
                tokens += ids
    np.save(out, np.array(kept, np.int16))
    starts = np.linspace(0, len(held) - MAX_LEN - 1, 16).astype(int)
    np.save(held_out(out), np.stack([np.array(held[start : start + MAX_LEN + 1], np.int16) for start in starts]))
    print(f"{len(kept)} tokens to train on, {len(held)} held out")


class Rows:
    """Batches of text and task rows: tokens int64 [B, T + 1], weights fp32 [B, T] of the targets, text rows first."""

    def __init__(self, text: Path | None, workers: int, limits: float, seed: int) -> None:
        self.text = None if text is None else np.load(text)
        self.generator, self.progress = np.random.default_rng(seed), multiprocessing.get_context("spawn").Value("d", 0)
        self.queue = multiprocessing.get_context("spawn").Queue(4 * workers)
        self.tasks: list[np.ndarray] = []
        for number in range(workers):
            arguments = (seed * 1000 + number, limits, self.progress, self.queue)
            multiprocessing.get_context("spawn").Process(target=produce, args=arguments, daemon=True).start()

    def batch(self, progress: float, batch_tokens: int) -> tuple[Tensor, Tensor, int]:
        """Also returns the number of text rows."""
        self.progress.value, length = progress, row_length(progress)
        num_rows = max(2, batch_tokens // length)
        num_text = 0 if self.text is None else math.ceil(TEXT_SHARE * num_rows)
        starts = self.generator.integers(0, len(self.text) - length - 1, num_text) if num_text else ()
        rows = [self.text[start : start + length + 1] for start in starts]
        while len(rows) < num_rows:
            if self.tasks and len(self.tasks[-1]) == length + 1:
                rows.append(self.tasks.pop())
            else:
                self.tasks = list(self.queue.get())
        signed = torch.from_numpy(np.stack(rows)).long()
        weights = torch.where(signed[:, 1:] < 0, PROMPT_WEIGHT, 1.0)
        return torch.where(signed < 0, -1 - signed, signed), weights, num_text


def token_losses(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats of every token: hidden [B, T, C], targets [B, T]."""
    logits = head(hidden).float().flatten(0, 1)
    return functional.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)


def train(
    model: hf.PreTrainedModel, rows: Rows, seconds: float, batch_tokens: int, is_compiled: bool, record: dict
) -> None:
    """Train in place until ``seconds`` have passed; ``record`` gets the steps, the tokens and the log of losses."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if name.endswith(("_proj", "_proj.weight")) else others).append(parameter)
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    losses_of = torch.compile(token_losses, dynamic=False) if is_compiled else token_losses
    if is_compiled:
        for layer in model.model.layers:  # one by one: compiled once for each type of layer and row length
            layer.compile(dynamic=False)
    device, embed, masks = model.device, model.get_input_embeddings(), {}
    rows.batch(0.0, batch_tokens)  # the workers have started before the clock does
    started = logged_at = time.monotonic()
    step, num_tokens, record["log"] = 0, 0, []
    while (progress := (time.monotonic() - started) / seconds) < 1:
        tokens, weights, num_text = rows.batch(progress, batch_tokens)
        tokens, weights = tokens.to(device, non_blocking=True), weights.to(device, non_blocking=True)
        length = tokens.shape[1] - 1
        if length not in masks:
            masks[length] = masks_of(model.config, length, str(device))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            embedded = embed(tokens[:, :-1])
            hidden = model.model(
                inputs_embeds=embedded.bfloat16() if device.type == "cuda" else embedded,
                attention_mask=masks[length],
                use_cache=False,
            ).last_hidden_state
            losses = losses_of(model.lm_head, hidden, tokens[:, 1:])
        ((losses * weights).sum() / weights.sum()).backward()
        nn.utils.clip_grad_norm_(others, 1.0)
        lr = LR * min(1.0, (step + 1) / WARMUP_STEPS, max(0.01, (1 - progress) / (1 - DECAY_AT)))
        adam.param_groups[0]["lr"] = lr
        adam.step()
        muon.step(lr)
        model.zero_grad(set_to_none=True)
        step, num_tokens = step + 1, num_tokens + weights.numel()
        record |= {"steps": step, "tokens": num_tokens}
        if time.monotonic() - logged_at > 4 or step == 1:
            logged_at = time.monotonic()
            entry = {"seconds": round(logged_at - started, 1), "steps": step, "tokens": num_tokens}
            entry["tasks"] = losses[num_text:][weights[num_text:] == 1].mean().item()
            if num_text:
                entry["text"] = losses[:num_text].mean().item()
            record["log"].append(entry)
            print(" ".join(f"{name} {value:.8g}" for name, value in entry.items()), flush=True)


def save(model: hf.PreTrainedModel, record: dict, out: Path) -> None:
    """A folder for ``from_pretrained``, in bf16, with the tokenizer and the training's record."""
    model.config._attn_implementation, model.config._experts_implementation = "eager", None
    model.to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder() / name, out / name)
    (out / "training.json").write_text(json.dumps(record))


@torch.no_grad()
def measure(folder: Path, device: str, text: Path | None, count: int) -> dict[str, float]:
    """Of the saved model: its loss on held-out text, in nats a token, and how many of ``count`` easy problems of each
    task it solves, decoding greedily."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder, padding_side="left")
    found: dict[str, float] = {}
    if text is not None:
        rows = torch.from_numpy(np.load(held_out(text))).long().to(device)
        losses = [model(row[None], labels=row[None], use_cache=False).loss.item() for row in rows[:, :MAX_LEN]]
        found["held-out text"] = sum(losses) / len(losses)
    for task in TASKS:
        asked = problems(task, count, 0, **EASY)
        prompts = [tokenizer.eos_token + problem.prompt_text for problem in asked]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        longest = max(map(len, tokenizer([problem.completion for problem in asked])["input_ids"]))
        ids = model.generate(**inputs, max_new_tokens=longest + 8, do_sample=False)
        answers = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        found[task] = sum(
            extract_answer(answer) == problem.answer for answer, problem in zip(answers, asked, strict=True)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("texts", help="tokens of a folder of folders of texts")
    texts.add_argument("folder", type=Path)
    texts.add_argument("out", type=Path)
    training = commands.add_parser("train", help="train a model")
    training.add_argument("family", choices=FAMILIES)
    training.add_argument("out", type=Path)
    training.add_argument("--text", type=Path, help="tokens of texts; without them, tasks alone")
    training.add_argument("--seconds", type=float, default=200)
    training.add_argument("--limits", type=float, default=0.35, help="hardest problems, as a share of the full lengths")
    training.add_argument("--batch-tokens", type=int, default=32 * ROW_LEN)
    training.add_argument("--workers", type=int, default=4)
    training.add_argument("--device", default="cuda")
    training.add_argument("--tiny", action="store_true", help="a narrow model, not compiled, to try things on a CPU")
    training.add_argument("--problems", type=int, default=32, help="easy problems of each task to solve at the end")
    args = parser.parse_args()
    if args.command == "texts":
        write_texts(args.folder, args.out)
        return
    torch.manual_seed(0)
    hf.utils.logging.disable_progress_bar()
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention where there is no mask, else memory-efficient
    rows = Rows(args.text, args.workers, args.limits, seed=0)
    model = build(args.family, args.tiny, args.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.family}: {num_parameters / 1e6:.1f} M parameters", flush=True)
    record = {"family": args.family, "parameters": num_parameters}
    try:
        train(model, rows, args.seconds, args.batch_tokens, not args.tiny, record)
    finally:  # whatever there is
        save(model, record, args.out)
    print(f"saved after {record['steps']} steps, {record['tokens'] / 1e6:.1f} M tokens", flush=True)
    if args.problems:
        record["measured"] = measure(args.out, args.device, args.text, args.problems)
        (args.out / "training.json").write_text(json.dumps(record))
        print(f"loss on held-out text, and solved of {args.problems}: {record['measured']}", flush=True)


if __name__ == "__main__":
    main()
