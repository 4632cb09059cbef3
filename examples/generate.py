"""Generates text with a packed KV cache: a plan, a PlanCache, and the model's own ``generate``.

    python examples/generate.py
    python examples/generate.py --plan plan.safetensors --model path/to/model --prompt "Once upon a time"

Without --plan, the recipe `kitty` is compiled for the model first; it needs no calibration.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from kvcal import PlanCache, load_plan
from kvcal.folder import Folder
from kvcal.models.load import load
from kvcal.progress import Silent
from kvcal.recipe import load_recipe
from kvcal.run.pipeline import build_plan

PROMPT = "Times. 4071 x 268\nQuestion: product?\n<think>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text with a packed KV cache.")
    parser.add_argument("--model", default="reasoner-10m", help="folder, hub id or embedded name")
    parser.add_argument("--plan", type=Path, help="a plan.safetensors file for this model")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=400)
    arguments = parser.parse_args()

    loaded = load(arguments.model)
    if arguments.plan is not None:
        plan = load_plan(arguments.plan)
    else:
        with tempfile.TemporaryDirectory() as folder:
            plan = build_plan(load_recipe("kitty"), loaded, Folder(Path(folder)), None, Silent())

    inputs = loaded.tokenizer(loaded.tokenizer.eos_token + arguments.prompt, return_tensors="pt").to(
        loaded.model.device
    )
    cache = PlanCache(plan, loaded.model.config)
    with torch.inference_mode():
        output = loaded.model.generate(
            **inputs, past_key_values=cache, max_new_tokens=arguments.max_new_tokens, do_sample=False
        )

    print(loaded.tokenizer.decode(output[0], skip_special_tokens=True))
    tokens = cache.lengths[0]
    assert cache.nbytes == plan.nbytes([tokens]), "a plan predicts the cache's bytes exactly"
    print(f"{tokens} tokens in the cache: {cache.nbytes} bytes, as the plan predicts")


if __name__ == "__main__":
    main()
