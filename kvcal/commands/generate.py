"""``kvcal generate``: text through a plan's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcal.commands.options import Device, Dtype, Json, ModelOption, load, prompt_text
from kvcal.quantities import MAX_CONTEXT, MAX_SEED


def generate(
    model: ModelOption,
    plan: Annotated[Path, typer.Option(help="A plan.safetensors file.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="The prompt; - reads stdin.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1, max=MAX_CONTEXT)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy; else 0.001 to 100.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0, max=MAX_SEED)] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    prefix: Annotated[
        Path | None, typer.Option(help="A file of `kvcal pack-prefix`, made with this plan: how the prompt begins.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Generate text with a plan's packed cache.

    With --prefix, the packed pages of the prompt's beginning are taken from the file instead of computed; what follows
    reads them as every later token does.

    Example: `kvcal generate --model reasoner-10m --plan plan.safetensors --prompt "Times. 12 x 34"`

    Example: `cat manual.txt question.txt | kvcal generate --model M --plan P --prefix manual.kv --prompt -`
    """
    from kvcal import console
    from kvcal.errors import UsageError
    from kvcal.plan.plan import load_plan
    from kvcal.stages.complete import complete
    from kvcal.stages.prefix.load import complete_after, load_prefix
    from kvcal.stages.verify import require_same_model

    if chat and prefix is not None:
        raise UsageError("--chat with --prefix: a prefix is packed without a chat template", "leave out one of them")
    if not (temperature == 0 or 0.001 <= temperature <= 100):
        raise UsageError(f"--temperature {temperature}; allowed: 0 (greedy), or 0.001 to 100")
    text = prompt_text(prompt)
    loaded_plan = load_plan(plan)
    loaded = load(model, dtype, device)
    require_same_model(loaded_plan, loaded)
    if prefix is None:
        result = complete(loaded, loaded_plan, text, max_new_tokens, temperature, seed, chat)
    else:
        known = load_prefix(loaded, loaded_plan, prefix)
        result = complete_after(loaded, known, text, max_new_tokens, temperature, seed)
    if json:
        console.print_json(result)
        return
    console.print_text(result["text"])
    if prefix is not None:
        console.stderr.print(f"{result['prefix_tokens']} tokens of the prompt came from {prefix}", highlight=False)
    console.stderr.print(
        f"{result['new_tokens']} tokens; the cache of {result['cached_tokens']} tokens took {result['cache_bytes']} "
        f"bytes, {result['raw_bytes']} in 16 bits",
        highlight=False,
    )
