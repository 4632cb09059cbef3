"""Time to read texts on a CPU through the packed cache, as ``kvcal eval`` reads them, next to the 16-bit cache.

    OMP_NUM_THREADS=1 python lab/bench_text.py plan.safetensors --model path/to/model --out text.json

CPU seconds of the process, so that other jobs of the machine count less. Each round reads the texts
through transformers' own cache in chunks of a page, then through the packed cache in the chunks that it asks for,
with the count of its bytes, which packs the last tokens. Token ids are random.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from shared import mean_and_error, print_table
from transformers import DynamicCache

from kvcal import load_model, load_plan
from kvcal.models.attention import with_cache
from kvcal.models.load import LoadedModel
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.plan import Plan
from kvcal.stages.divergence import feed
from kvcal.stages.measuring.cache import DecodedCache


@torch.inference_mode()
def seconds(loaded: LoadedModel, plan: Plan | None, ids_BT: torch.Tensor) -> float:
    """CPU seconds to read texts; without a plan at 16 bits."""
    model, start = loaded.model, time.process_time()
    if plan is None:
        cache = DynamicCache(config=model.config)
        for part_Bt in ids_BT.split(PAGE_TOKENS, 1):
            model(input_ids=part_Bt, **with_cache(model, cache))
    else:
        packed = DecodedCache(plan, model.config)
        for _ in feed(model, packed, ids_BT):
            pass
        assert packed.nbytes
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", nargs="+", default=["1x4096", "8x1024"], help="texts x tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file")
    given = parser.parse_args()
    loaded, plan, rows = load_model(given.model, device="cpu"), load_plan(given.plan), []
    for texts in given.texts:
        ids_BT = torch.randint(loaded.vocab_size, tuple(map(int, texts.split("x"))))
        pairs = [(seconds(loaded, None, ids_BT), seconds(loaded, plan, ids_BT)) for _ in range(given.rounds)]
        rows.append({"texts": texts, "16_bits_s": [raw for raw, _ in pairs], "packed_s": [own for _, own in pairs]})
    if given.out:
        about = {"plan": plan.sha256, "torch": torch.__version__, "rows": rows}
        given.out.write_text(json.dumps(about, indent=1) + "\n")
    table = []
    for row in rows:
        raw, packed = torch.tensor(row["16_bits_s"]), torch.tensor(row["packed_s"])
        means = (mean_and_error(x) for x in (raw, packed, packed / raw))
        table.append((row["texts"], *(f"{mean:.2f} ± {error:.2f}" for mean, error in means)))
    print_table(f"{given.plan.name} of {given.model}", ("texts", "16 bits, s", "packed, s", "ratio"), table)


if __name__ == "__main__":
    main()
