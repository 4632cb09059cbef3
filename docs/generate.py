"""Writes the parts of the documentation that come from the code: recipe keys, supported models, what is served where,
the systems, outputs of commands.

    python docs/generate.py            # recipe-keys.md, models.md (and kvcal/models/families.json), engines.md,
                                       # systems.md, the systems' pages, troubleshooting.md
    python docs/generate.py tutorial   # the outputs in tutorial.md as well: about a minute

Commands are quoted in blocks that begin with ```console and hold `$ kvcal ...` lines, each followed by its output and,
if it fails, by `[exit N]`. tests/docs compares every page with what this script would write.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import rooms
import torch
from pydantic import TypeAdapter

from kvcal import __main__ as cli
from kvcal.errors import UnsupportedModel
from kvcal.models.config import EVERY_COMMAND
from kvcal.plan import served
from kvcal.recipe import Recipe

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FAMILIES = ROOT / "kvcal/models/families.json"
DEFAULT = "default"  # the recipe of kvcal plan
SERVED = re.compile("(<!-- served(?:: (.*?))? -->).*?<!-- end of served -->", re.DOTALL)
ROOMS = re.compile("<!-- rooms -->.*?<!-- end of rooms -->", re.DOTALL)
BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/models")]

KEYS_OPENING = """# Recipe keys

A recipe is one TOML file. It holds every choice of a compilation; an unknown key is an error. `python docs/generate.py`
writes this page from the code.

Exactly one of `[formats]`, `[importance]` and `[allocate]` chooses the formats. `[search]` needs the budget of
`[allocate]`. The name of a recipe is its file's name, unless `name` is given. TOML has no null: leave out a key whose
default is none.
"""
MODELS_OPENING = """# Supported models

kvcal measures a model instead of guessing. It runs the model once, and compares what attention computes with what the
cache receives. Every decoder-only language model of `transformers` that passes is supported. The contract tests build a
small random model of each family below; `python docs/generate.py` writes this page from these tests, and
`kvcal list models` prints it. `kvcal size MODEL` tells the bytes of a model's cache before anything is loaded, unless
it keeps states whose bytes only running it tells (Bamba, Jamba, Falcon-H1).

## Supported

| model type | class | query heads : KV heads | layers | keys before RoPE |
|---|---|---|---|---|"""
REFUSED_OPENING = """
Full-attention layers are quantized. Sliding-window layers keep their window at 16 bits, and state layers keep their
state, as the model stores them; both count towards the budget. Predictors need keys before RoPE.

Some layers have both pages and a state (Falcon-H1, Zamba2): a dynamic cache stores the one and keeps the other. Layers
of Zamba2 call one attention block, so that recipes with [formats] alone serve it. Layers that read what an earlier one
has cached (Gemma 3n) take no bytes, and a static cache refuses them; λ, query scores and error feedback go by the
queries of the layer that caches.

Multi-head latent attention (DeepSeek-V2 and V3, Kimi, GLM-4.7-Flash, MiniCPM3) caches a latent and a rotary key, one of
each for all query heads. A plan stores the latent after its norm, as the model caches it, in the formats of keys: per
channel or per token, rotated, on a lattice, or with more bits for the best channels by magnitude. The rotary key stays
at 16 bits; `formats.rotary` or `allocate.rotary` ask for less. λ, predictors, error feedback and query scores are made
for keys and values of heads: latents have none. The dynamic cache stores latents on any device, in torch; static caches
and engines refuse them. Models that also cache the keys of an indexer (DeepSeek-V3.2, GLM-5) are refused.

## Not supported, with the reason

| class | reason | fails in |
|---|---|---|"""
MODELS_END = """
A model that fails in calibration alone is served by recipes with [formats]: `kvcal run kivi-2 --model MODEL`.

Also not supported: encoder-decoders, models without keys to cache (Mamba, RWKV), checkpoints that lack weights. Remote
code never runs. An unsupported model ends with exit code 4.
"""
EVERY_FAMILY = """
## Every family of transformers {version}

`python tests/support/model_families.py --out docs/families.json` builds every family that transformers lists for causal
language models with a tiny config and random weights, saves and loads it, and runs `kvcal plan` on it as it is, from
the profile to the check of damage; then tokens are generated through the plan's cache. Of {total} families, {supported}
are supported, {others} of them by another recipe than `default`; {refused} are refused, and {unbuilt} are not built:
their configs stay large or inconsistent with sizes made small by name, or need what is not installed. Nothing is said
about them. A checkpoint's own config may differ: the model itself is measured when it is loaded. `kvcal list models`
prints this.

{names}

Of the families above, these are encoders unless config.json says `"is_decoder": true`: {decoders}.

Supported by another recipe: `sensitivity` is what `kvcal plan` takes for latent attention by itself; a recipe with
[formats] needs no calibration: `kvcal run kivi-2 --model MODEL`.

| family | class | layers | recipe | why not `default` |
|---|---|---|---|---|
{other_rows}

Refused:

| family | class | reason |
|---|---|---|
{rows}
"""


def recipe_keys() -> str:
    """The page of all recipe keys, from the schema of the recipe's dataclasses."""
    records, top = SCHEMA["$defs"], SCHEMA["properties"]
    lines = [
        KEYS_OPENING,
        *_table({name: key for name, key in top.items() if not _record(key)}, []),
    ]
    for record in [*SECTIONS, *sorted(set(records) - set(SECTIONS))]:
        title = f"[{SECTIONS[record]}]" if record in SECTIONS else record
        lines += ["", f"## {title}", "", *_prose(records[record], title)]
        lines += _table(records[record]["properties"], records[record].get("required", []))
    return "\n".join(lines) + "\n"


def _record(key: dict[str, Any]) -> str:
    """The name of the record that a key holds, "" for another type."""
    choices = [key, *key.get("anyOf", ())]
    return next((choice["$ref"].rpartition("/")[2] for choice in choices if "$ref" in choice), "")


def _prose(record: dict[str, Any], title: str) -> list[str]:
    """A record's docstring without what only its module's reader needs."""
    text = record.get("description", "").replace("``", "`").split("\nRaises")[0].strip()
    text = re.sub(rf"^({re.escape(title)}[:,] )?(See the module's docstring\. )?", "", text)
    return [text[:1].upper() + text[1:], ""] if text else []


def _table(keys: dict[str, Any], required: list[str]) -> list[str]:
    texts = {name: key.get("description", "") for name, key in keys.items()}
    lines = ["| key | type | default |", "|---|---|---|"]
    if any(texts.values()):
        lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, key in keys.items():
        is_required = name in required or "default" not in key
        default = "required" if is_required else f"`{_toml(key['default'], key)}`".replace("`none`", "none")
        meaning = f" {' '.join(texts[name].split())} |" if any(texts.values()) else ""
        lines.append(f"| `{name}` | {_type(key)} | {default} |{meaning}")
    return lines


def _toml(value: Any, key: dict[str, Any]) -> str:
    """A default in TOML; of a record, the keys that differ from its own defaults."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"[{', '.join(_toml(item, key.get('items', {})) for item in value)}]"
    if isinstance(value, dict):
        own = SCHEMA["$defs"][_record(key)]["properties"]
        changed = {name: item for name, item in value.items() if own[name].get("default", own) != item}
        return f"{{ {', '.join(f'{name} = {_toml(item, own[name])}' for name, item in changed.items())} }}"
    return json.dumps(value)


def _type(key: dict[str, Any]) -> str:
    """A JSON schema's type in words."""
    if "anyOf" in key:
        return " or ".join(_type(choice) for choice in key["anyOf"] if choice.get("type") != "null")
    if "$ref" in key:
        section = SECTIONS.get(_record(key), _record(key))
        return f"[{section}](#{section.lower()})"
    if "enum" in key:
        return ", ".join(f"`{json.dumps(value)}`" for value in key["enum"])
    if key.get("type") == "array":
        return f"list of {_type(key['items'])}"
    text = {"integer": "integer", "number": "number", "string": "string", "boolean": "true or false"}[key["type"]]
    low = key.get("minimum", key.get("exclusiveMinimum"))
    high = key.get("maximum", key.get("exclusiveMaximum"))
    if low is not None and high is not None:
        above = "above " if "exclusiveMinimum" in key else ""
        below = "below " if "exclusiveMaximum" in key else ""
        return f"{text}, {above}{low} to {below}{high}"
    if low is not None:
        return f"{text}, {'above' if 'exclusiveMinimum' in key else 'at least'} {low}"
    return text if high is None else f"{text}, {'below' if 'exclusiveMaximum' in key else 'at most'} {high}"


SCHEMA = TypeAdapter(Recipe).json_schema()
SECTIONS = {_record(key): name for name, key in SCHEMA["properties"].items() if _record(key)}


def families() -> str:
    """kvcal/models/families.json: the tiny models that the contract tests build, as they are measured; and
    every family of docs/families.json."""
    import test_models_contract as contract
    from tiny_models import TINY_MODELS, built

    supported, refused = [], []
    for name in sorted(contract.SHAPES):
        heads, kv_heads, _, windows = contract.SHAPES[name]
        model = built(name)
        pre = "no: keys are normalised after RoPE" if name in contract.WITHOUT_K_PRE else "yes"
        if name in contract.LATENTS:
            pre = "none: a latent and a rotary key"
        without = len(contract.WITHOUT_ROPE.get(name, ()))
        if without:
            pre += ", without RoPE in " + ("all layers" if without == len(windows) else "some layers")
        layers = _layers(windows) + (", with a state each" if name in contract.BESIDE else "")
        about = _about(name, model) | {"heads": f"{heads} : {kv_heads}", "layers": layers}
        supported.append(about | {"keys_before_rope": pre})
    for name in sorted(contract.REFUSED):
        refuse = contract.REFUSED[name][0]
        about = _about(name, TINY_MODELS[name]())
        fails_in = EVERY_COMMAND if refuse is contract.geometry_of else "calibration"
        refused.append(about | {"reason": _reason(name, refuse), "fails_in": fails_in})
    every = json.loads((DOCS / "families.json").read_text())
    return json.dumps({"supported": supported, "refused": refused, **every}, indent=1) + "\n"


def _about(name: str, model: Any) -> dict[str, str]:
    return {"name": name, "model_type": model.config.model_type, "class": type(model).__name__}


def models(content: str) -> str:
    """The page of supported and refused models, from the contents of kvcal's families.json and of this folder's."""
    listed = json.loads(content)
    lines = [MODELS_OPENING]
    lines += [
        f"| `{one['model_type']}` ({one['name']}) | `{one['class']}` | {one['heads']} | {one['layers']} | "
        f"{one['keys_before_rope']} |"
        for one in listed["supported"]
    ]
    lines.append(REFUSED_OPENING)
    for one in listed["refused"]:
        reason = one["reason"].replace("|", "\\|")
        lines.append(f"| `{one['class']}` | {reason} | {one['fails_in']} |")
    return "\n".join([*lines, MODELS_END]) + every_family((DOCS / "families.json").read_text())


def every_family(content: str) -> str:
    """The page's part on all families, from the content of docs/families.json."""
    listed = json.loads(content)
    of_outcome: dict[str, list[dict[str, Any]]] = {"supported": [], "refused": [], "not built": []}
    for one in listed["families"]:
        of_outcome[one["outcome"]].append(one)
    by_layers: dict[str, list[str]] = {}
    for one in of_outcome["supported"]:
        if one["recipe"] == DEFAULT:
            by_layers.setdefault(one["layers"], []).append(f"`{one['model_type']}`")
    parts = [f"Supported, with {layers} layers: {', '.join(names)}." for layers, names in sorted(by_layers.items())]
    parts.append(f"Not built: {', '.join(one['model_type'] for one in of_outcome['not built'])}.")
    others = [one for one in of_outcome["supported"] if one["recipe"] != DEFAULT]
    supported, refused, unbuilt = map(len, of_outcome.values())
    return EVERY_FAMILY.format(
        version=listed["transformers"], total=len(listed["families"]), supported=supported, refused=refused,
        unbuilt=unbuilt, others=len(others), names="\n\n".join(parts),
        decoders=", ".join(f"`{one['model_type']}`" for one in of_outcome["supported"] if one["is_decoder"]),
        other_rows="\n".join(
            f"| `{one['model_type']}` | `{one['model_class']}` | {one['layers']} | `{one['recipe']}` | {_why(one)} |"
            for one in others
        ),
        rows="\n".join(
            f"| `{one['model_type']}` | `{one['model_class']}` | {_why(one)} |" for one in of_outcome["refused"]
        ),
    )  # fmt: skip


def _why(family: dict[str, Any]) -> str:
    return str(family["reason"] or "latent attention takes no basis").replace("|", "/")


def _layers(windows: list[Any]) -> str:
    kinds = ["state" if window == "state" else "full" if window is None else "sliding" for window in windows]
    return " and ".join(kind for kind in ("full", "sliding", "state") if kind in kinds)


def _reason(name: str, refuse: Any) -> str:
    import test_models_contract as contract

    try:
        if refuse is contract.geometry_of:
            refuse(contract.built(name))
        elif refuse is contract.kv_projections:
            refuse(contract.built(name), contract.measured(name))
        else:
            with contract.tap(contract.built(name), lambda captured: None, contract.measured(name)):
                pass
    except UnsupportedModel as refused:
        return refused.message
    raise AssertionError(f"{name} is supported")


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """An empty folder, made the working directory; without a GPU and a network."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as name, mock.patch.object(torch.cuda, "is_available", lambda: False):
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


def furnish(folder: Path) -> None:
    """What the commands of troubleshooting name: a plan, a folder with a profile, data of three lines, a recipe with a
    typing error, and two tiny models."""
    from cli_cases import save_family, save_llama
    from transformers import AutoTokenizer

    from kvcal.embedded import model_folder

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    save_llama(folder / "tiny-llama", tokenizer)
    save_family(folder / "tiny-falcon", tokenizer, "falcon", 2048)
    recipe_text = (ROOT / "recipes/sensitivity.toml").read_text()
    short = {"num_samples = 8": "num_samples = 2", "seq_len = 1536": "seq_len = 512", "[1, 2, 3, 4, 8]": "[2, 4]"}
    for old, new in short.items():
        recipe_text = recipe_text.replace(old, new, 1)
    (folder / "short.toml").write_text(recipe_text.replace("[profile]", "[profile]\nkl_samples = 1\nkl_tokens = 256"))
    (folder / "mine.toml").write_text("[allocate]\nbits = 2.5\n\n[cache]\nnum_sink_token = 4\n")
    (folder / "few.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    run("kvcal profile reasoner-10m --out artifacts/mine --recipe short.toml --quiet", True)
    run("kvcal allocate artifacts/mine --bits 4 --quiet", True)
    run("kvcal compile artifacts/mine -o plan.safetensors --quiet", True)
    (folder / "cut.safetensors").write_bytes((folder / "plan.safetensors").read_bytes()[:4000])


def run(line: str, must_work: bool = False) -> str:
    """What a command line of kvcal prints, both streams together, with its exit code if it fails."""
    printed, code = io.StringIO(), 0
    argv = shlex.split(line)
    assert argv[0] == "kvcal", line
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        mock.patch.object(sys, "argv", argv),
    ):
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
    text = printed.getvalue().replace(f"torch {torch.__version__}", "torch")
    text = "".join(f"{row.rstrip()}\n" for row in text.splitlines() if "Loading weights" not in row)
    assert not (must_work and code), f"{line}\n{text}"
    return text + (f"[exit {code}]\n" if code else "")


def with_outputs(page: str) -> str:
    """A page with the output of every command in its console blocks as it is now. Call it within ``workplace``."""
    return BLOCK.sub(lambda block: "".join(f"$ {line}\n{run(line)}" for line in commands(block.group())), page)


def commands(block: str) -> list[str]:
    """The command lines of a console block."""
    return [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]


def with_served(page: str) -> str:
    """A page with the table of what is served where, between its marks: of all ways to store keys and values,
    or of those that the mark names."""

    def filled(found: re.Match[str]) -> str:
        rows = served.table()
        names = found[2].split("; ") if found[2] else [row[0] for row in rows]
        table = _served([row for name in names for row in rows if row[0] == name])
        return f"{found[1]}\n\n{table}\n<!-- end of served -->"

    return SERVED.sub(filled, page)


def _served(rows: list[tuple[str, ...]]) -> str:
    """The table of these rows, with the reasons below it."""
    reasons = dict.fromkeys(cell for row in rows for cell in row[2:] if cell != "yes")
    numbers = {reason: number for number, reason in enumerate(reasons, 1)}
    cells = [
        [way, needs or "–", *(cell if cell == "yes" else f"no ({numbers[cell]})" for cell in places)]
        for way, needs, *places in rows
    ]
    lines = [list(served.HEADER), ["---"] * len(served.HEADER), *cells]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = " ".join(f"({number}) {reason}." for reason, number in numbers.items())
    return f"{text}\n{textwrap.fill(notes, 130)}\n" if notes else text


def with_rooms(page: str) -> str:
    """The overview of systems with their pages, between its marks."""
    lines = ["| system | what it does |", "|---|---|"]
    for uri, path in rooms.PAGES.items():
        title, text = path.read_text().split("\n\n", 2)[:2]
        first = re.split(r"(?<=\.) ", " ".join(text.split()))[0]
        lines.append(f"| [{title.removeprefix('# ')}](../kvcal/{uri.removesuffix('.md')}/README.md) | {first} |")
    return ROOMS.sub("<!-- rooms -->\n\n" + "\n".join(lines) + "\n\n<!-- end of rooms -->", page)


def main() -> None:
    (DOCS / "engines.md").write_text(with_served((DOCS / "engines.md").read_text()))
    (DOCS / "systems.md").write_text(with_rooms((DOCS / "systems.md").read_text()))
    for path in rooms.PAGES.values():
        path.write_text(with_served(path.read_text()))
    (DOCS / "recipe-keys.md").write_text(recipe_keys())
    FAMILIES.write_text(families())
    (DOCS / "models.md").write_text(models(FAMILIES.read_text()))
    pages = ["troubleshooting.md", *(f"{name}.md" for name in sys.argv[1:])]
    for name in pages:
        with workplace() as folder:
            if name == "troubleshooting.md":
                furnish(folder)
            text = with_outputs((DOCS / name).read_text())
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
