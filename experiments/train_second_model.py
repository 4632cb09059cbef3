"""Train a small model of another family (Qwen3: QK-norm, 8 layers, 4 KV heads) on the embedded tasks.

The figures of docs/measurements.md for "a second model" are taken on what this writes; it is not part of the package.
Needs a GPU; about nine minutes on an H100:

    python experiments/train_second_model.py OUT_FOLDER --minutes 8.5
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import shutil
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

EMBEDDED = Path(__file__).parents[1] / "kvcal" / "embedded" / "reasoner-10m"
SEQ_LEN, BATCH, PEAK_LR, WARMUP = 2048, 48, 2.5e-3, 200


def produce(seed: int, queue: multiprocessing.Queue) -> None:
    """Endless packed rows [16, SEQ_LEN + 1] of task documents separated by the end-of-sequence token."""
    from kvcal.data.tasks import mixture

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    rng, tokens = random.Random(f"second model {seed}"), []
    needed = 16 * (SEQ_LEN + 1)
    while True:
        while len(tokens) < needed:
            for ids in tokenizer([mixture(rng).text for _ in range(64)], add_special_tokens=False)["input_ids"]:
                tokens += [tokenizer.eos_token_id, *ids]
        queue.put(torch.tensor(tokens[:needed], dtype=torch.int16).view(16, SEQ_LEN + 1).numpy())
        tokens = tokens[needed:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(64)
    for seed in range(args.workers):
        context.Process(target=produce, args=(seed, queue), daemon=True).start()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = Qwen3Config(
        vocab_size=4096, hidden_size=256, intermediate_size=640, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, rope_theta=10000.0,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=1, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).cuda()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    forward = torch.compile(model)
    rows: list[torch.Tensor] = []
    step, started, budget_s = 0, time.monotonic(), 60 * args.minutes
    while (elapsed := time.monotonic() - started) < budget_s:
        while len(rows) < BATCH:
            rows += list(torch.from_numpy(queue.get()).long())
        batch, rows = torch.stack(rows[:BATCH]).cuda(non_blocking=True), rows[BATCH:]
        decay = 0.5 * (1 + math.cos(math.pi * elapsed / budget_s))
        optimizer.param_groups[0]["lr"] = PEAK_LR * min(1.0, (step + 1) / WARMUP) * max(0.02, decay)
        with torch.autocast("cuda", torch.bfloat16):
            logits = forward(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 200 == 0:
            print(
                f"step {step} {elapsed:.0f} s loss {loss.item():.4f} {step * BATCH * SEQ_LEN / 1e6:.0f} M tokens",
                flush=True,
            )
    model.to(torch.bfloat16).save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, args.out / name)
    print(f"{step} steps, {step * BATCH * SEQ_LEN / 1e6:.0f} M tokens, final loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
