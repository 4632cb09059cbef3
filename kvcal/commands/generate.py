"""``kvcal generate``: text through a plan's cache."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvcal.commands.options import Device, Dtype, Json, ModelOption, load


def generate(
    model: ModelOption,
    plan: Annotated[Path, typer.Option(help="A plan.safetensors file.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="The prompt; - reads stdin.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Generate text with a plan's packed cache.

    Example: `kvcal generate --model reasoner-10m --plan plan.safetensors --prompt "Times. 12 x 34"`
    """
    from kvcal import console
    from kvcal.plan import load_plan
    from kvcal.stages.complete import complete
    from kvcal.stages.verify import require_same_model

    loaded_plan = load_plan(plan)
    loaded = load(model, dtype, device)
    require_same_model(loaded_plan, loaded)
    text = sys.stdin.read() if prompt == "-" else prompt
    result = complete(loaded, loaded_plan, text, max_new_tokens, temperature, seed, chat)
    if json:
        console.print_json(result)
        return
    print(result["text"])
    console.stderr.print(
        f"{result['new_tokens']} tokens; the cache of {result['cached_tokens']} tokens took {result['cache_bytes']} "
        f"bytes, {result['raw_bytes']} in 16 bits",
        highlight=False,
    )
