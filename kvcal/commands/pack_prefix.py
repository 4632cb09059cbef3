"""``kvcal pack-prefix``: keep a prompt's cache on disk, as the plan stores it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcal.artifact import require_file
from kvcal.commands.options import Device, Dtype, Json, ModelOption, Quiet, load, prompt_text
from kvcal.errors import UsageError


def pack_prefix(
    model: ModelOption,
    plan: Annotated[Path, typer.Option(help="A plan.safetensors file.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The prefix file.", show_default=False)],
    prompt: Annotated[str | None, typer.Option(help="The prompt; - reads stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Take a prompt in and write its packed cache to disk, to be loaded instead of computed again.

    Example: `kvcal pack-prefix --plan plan.safetensors --model reasoner-10m --prompt-file manual.txt -o manual.kv`
    """
    from kvcal import console
    from kvcal.plan.plan import load_plan
    from kvcal.quantities import format_bytes
    from kvcal.stages.prefix import pack as stage
    from kvcal.strict import dump

    text = _prompt_text(prompt, prompt_file)
    loaded_plan = load_plan(plan)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = load(model, dtype, device)
        packed = stage.pack_prefix(loaded, loaded_plan, stage.encode_prompt(loaded, text), output)
        reporter.say(f"prefix: {output}")
    if json:
        console.print_json({**dump(packed), "path": str(output)})
        return
    rows = [
        ("tokens", str(packed.num_tokens), ""),
        ("file", format_bytes(packed.file_bytes), str(packed.file_bytes)),
        ("cache in it", format_bytes(packed.packed_bytes), str(packed.packed_bytes)),
        ("at 16 bits", format_bytes(packed.raw_bytes), f"{packed.raw_bytes / packed.file_bytes:.2f}x the file"),
        ("bits per value", f"{packed.bits_per_value:.3f}", "sinks and buffer included"),
    ]
    console.print_table(f"Prefix {output.name}", ("", "size", "bytes"), rows)


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise UsageError("expected exactly one of --prompt and --prompt-file")
    if prompt_file is None:
        assert prompt is not None
        return prompt_text(prompt)
    require_file(prompt_file, UsageError)
    try:
        return prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as refused:
        raise UsageError(f"--prompt-file {prompt_file}: cannot be read: {refused}") from None
