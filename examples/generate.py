"""Generates text with a packed KV cache: a plan, a PlanCache, and the model's own ``generate``.

    python examples/generate.py
    python examples/generate.py --plan plan.safetensors --model path/to/model --prompt "Once upon a time"

Without options, it takes the embedded model and the newest plan of artifacts/plans.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcal import PlanCache, load_plan
from kvcal.embedded import model_folder

PLAN = sorted((Path(__file__).parents[1] / "artifacts/plans").iterdir())[-1] / "plan.safetensors"
PROMPT = "<eos>Times. 314 x 159\nQuestion: product?\n<think>\n"  # <eos> begins every text of this model


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text with a packed KV cache.")
    parser.add_argument("--model", default=str(model_folder()), help="a folder or a hub id")
    parser.add_argument("--plan", type=Path, default=PLAN, help="a plan.safetensors file for this model")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=400)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    inputs = tokenizer(arguments.prompt, return_tensors="pt")
    plan = load_plan(arguments.plan)
    cache = PlanCache(plan, model.config)
    with torch.inference_mode():
        output = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=arguments.max_new_tokens, do_sample=False
        )

    print(tokenizer.decode(output[0], skip_special_tokens=True))
    tokens = cache.lengths[0]
    assert cache.nbytes == plan.nbytes([tokens]), "a plan predicts the cache's bytes exactly"
    print(f"{tokens} tokens in the cache: {cache.nbytes} bytes, as the plan predicts")


if __name__ == "__main__":
    main()
