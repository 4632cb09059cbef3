"""``kvcal generate``: text with a plan's packed cache, and caches of prompts on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvcal.commands import options, values
from kvcal.commands.decorators import spread
from kvcal.errors import UsageError
from kvcal.lazy_torch import lazy_imports
from kvcal.quantities import MAX_SEED, format_bytes

with lazy_imports():
    from kvcal import artifact
    from kvcal.cache import prefix_file
    from kvcal.plan import damage as damage_file
    from kvcal.plan import plan as plan_file
    from kvcal.stages import generate as generate_stage
    from kvcal.stages import verify as verify_stage


@spread
def generate(
    model: options.ModelOption,
    plan: options.PlanOption,
    given: options.ModelOptions,
    prompt: Annotated[str | None, typer.Option(help="The prompt; - reads stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", **values.TOKENS)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy; else 0.001 to 100.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0, max=MAX_SEED)] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    prefix: Annotated[Path | None, typer.Option(help="A file of --pack, of this plan: how the prompt begins.")] = None,
    pack: Annotated[
        Path | None, typer.Option(help="Instead: write the prompt's packed cache here, a --prefix of longer prompts.")
    ] = None,
) -> None:
    """Generate text with a plan's packed cache.

    With --prefix, the packed pages of the prompt's beginning are taken from the file instead of computed;
    what follows reads them as every later token does.

    Example: `kvcal generate --model reasoner-10m --plan plan.safetensors --prompt "Times. 12 x 34"`

    Example: `kvcal generate --model M --plan P --prompt-file manual.txt --pack manual.kv`

    Example: `cat manual.txt question.txt | kvcal generate --model M --plan P --prefix manual.kv --prompt -`
    """
    if chat and (prefix or pack) is not None:
        raise UsageError(
            f"--chat with {'--pack' if prefix is None else '--prefix'}: a prefix is packed without a chat template",
            "leave out one of them",
        )
    if pack is not None and prefix is not None:
        raise UsageError("--pack with --prefix: the whole prompt is packed", "leave out one of them")
    if not (temperature == 0 or 0.001 <= temperature <= 100):
        raise UsageError(f"--temperature {temperature}; allowed: 0 (greedy), or 0.001 to 100")
    if pack is not None:
        artifact.require_output(pack, prefix_file.KIND)
    text = _prompt_text(prompt, prompt_file)
    loaded_plan = plan_file.load_plan(plan)
    verify_stage.require_same_config(loaded_plan, model)
    loaded = given.load(model)
    verify_stage.require_same_model(loaded_plan, loaded)
    if pack is not None:
        packed = generate_stage.pack(loaded, loaded_plan, text, pack)
        size = f"{packed['file_bytes']} bytes, {packed['raw_bytes']} in 16 bits"
        given.show({**packed, "path": str(pack)}, f"{pack.name}: {packed['num_tokens']} tokens in {size}")
        given.reporter().say(f"prefix: {pack}")
        return
    result = generate_stage.complete(loaded, loaded_plan, text, max_new_tokens, temperature, seed, chat, prefix)
    if (said := damage_file.concern(damage_file.load_damage(plan, loaded_plan))) is not None:
        given.reporter().say(f"warning: {said}")
    given.show(result, result["text"])
    if given.json:
        return
    reporter = given.reporter()
    if prefix is not None:
        reporter.say(f"{result['prefix_tokens']} tokens of the prompt came from {prefix}")
    taken, raw_bytes = format_bytes(result["cache_bytes"]), format_bytes(result["raw_bytes"])
    said = f"the cache of {result['cached_tokens']} tokens took {taken}, {raw_bytes} at 16 bits"
    if result["cache_bytes"] > result["raw_bytes"] and result["pays_from"] is not None:
        fixed = "transforms, sinks, windows and open pages come first"
        said += f": {fixed}, and one sequence pays from {result['pays_from']} tokens on"
    reporter.say(f"{result['new_tokens']} tokens; {said}")


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt that a command was given, by itself or in a file; - reads stdin. UsageError for none or
    both, and for what is not UTF-8."""
    if (prompt is None) == (prompt_file is None):
        raise UsageError("expected exactly one of --prompt and --prompt-file")
    if prompt_file is not None:
        return artifact.read_text(prompt_file)
    assert prompt is not None
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode("utf-8")  # arguments, and a lenient stdin, have surrogates for bytes that are not text
    except UnicodeError as refused:
        raise UsageError(f"--prompt{' -: stdin' if prompt == '-' else ''} is not UTF-8: {refused}") from None
    return text
