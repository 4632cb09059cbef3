"""Mutations of an artifact's JSON and tensors, under a digest that is right again: only its content can betray it.

Every second file carries two of them.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import random
from dataclasses import dataclass, replace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from kvcal.artifact import METADATA_KEY

Place = tuple[Any, ...]
MUTATIONS = (1, 2)  # of a file


@dataclass(frozen=True)
class Content:
    """An artifact without its digest. ``body``: canonical JSON; ``head``: what else its JSON holds."""

    body: str
    head: dict[str, Any]
    tensors: dict[str, Tensor]


SMALL = [-1, 0, 1, 2, 3, 5, 7, 100, 127, 129, 1000, 4097]
NUMBERS = [*SMALL, -5, 2**15 + 1, 2**31, 2**40, 2**63, 10**8, 10**18, 10**30, -(10**18)]
FLOATS = [0.0, -0.0, -1.0, 0.5, 0.9999999, 1.5, 2.0, 1e-300, 3e38, 1e308, -1e308, float("nan"), float("inf")]
STRINGS = [
    "",
    "x",
    "x" * 100_000,
    "\u0000é\ud83d",
    "../../etc",
    "token",
    "channel",
    "float64",
    "bfloat16",
    "pre",
    "post",
]
OTHERS = [None, True, False, [], {}, [[]], [None], {"": 0}, "1"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
VALUES = [0.0, -1.0, 1.0, 2.0, 0.5, 7.0, 1e-30, 1e4, 7e4, 1e9, 3e38, -3e38, 1e308, float("nan"), float("inf")]


@functools.lru_cache(64)
def places_in(text: str) -> list[Place]:
    """Paths to all values within the JSON value that ``text`` spells, but itself."""
    found: list[Place] = []

    def visit(value: Any, at: Place) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            found.append((*at, key))
            visit(item, found[-1])

    visit(json.loads(text), ())
    return found


def mutated_json(text: str, rng: random.Random) -> str:
    """The canonical JSON of another object than ``text`` spells."""
    body = json.loads(text)
    found = places_in(text)
    if not found:
        return text
    *way, key = rng.choice(found)
    parent: Any = body
    for step in way:
        parent = parent[step]
    kind = rng.randrange(10)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice(["", "extra", "num_bits", str(key) + "s"])] = parent[key]
    elif kind == 1:
        parent.insert(key, copy.deepcopy(parent[key]))
    elif kind == 2 and isinstance(parent, dict):  # two values change places
        other = rng.choice(list(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif kind == 2:
        rng.shuffle(parent)
    elif kind == 3:
        parent[key] = _deep(rng.choice([10, 400 if _is_short(parent[key]) else 10]), parent[key])
    else:
        parent[key] = _other(parent[key], rng)
    return canonical(body)


def _deep(depth: int, value: Any) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def _other(value: Any, rng: random.Random) -> Any:
    """Mostly of the same type: another type is refused by the first line of any parser."""
    if rng.random() < 0.2:
        return rng.choice(OTHERS)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([*NUMBERS, value + 1, value - 1, 2 * value, float(value)])
    if isinstance(value, float):
        return rng.choice([*FLOATS, -value, 2 * value, value / 3])
    if isinstance(value, str):
        return rng.choice([*STRINGS, value + "x", value[:-1]])
    if isinstance(value, list) and value:
        return rng.choice([value * 2, value[:-1], value[1:], [], value * (1000 if _is_short(value) else 2)])
    return rng.choice([*OTHERS, *NUMBERS, *FLOATS, *STRINGS])


def _is_short(value: Any) -> bool:
    """Whether a thousand of it are no large file, nor it within 400 lists."""
    return len(canonical(value)) < 300


def mutated_tensors(tensors: dict[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
    found = dict(tensors)
    name = rng.choice(sorted(found))
    tensor, kind = found[name], rng.randrange(8)
    if kind == 0:
        del found[name]
    elif kind == 1:
        found[rng.choice(["", "extra", name + "x", name.replace("0", "1"), "layers.99.rotary"])] = found.pop(name)
    elif kind == 2:
        other = rng.choice(sorted(found))
        found[name], found[other] = found[other], tensor
    elif kind == 3:
        found[name] = tensor.to(rng.choice(DTYPES))
    elif kind == 4:
        shapes = [tensor.flatten(), tensor[None], tensor.new_zeros(0), tensor.new_zeros(0, 4), tensor.new_zeros(1, 4)]
        found[name] = rng.choice(
            [*shapes, *([tensor[:-1], tensor[1:]] if tensor.dim() else []), *([tensor.mT] if tensor.dim() > 1 else [])]
        )
    else:
        found[name] = _with_value(tensor, rng)
    return found


def _with_value(tensor: Tensor, rng: random.Random) -> Tensor:
    """Some or all numbers replaced; those too large for the dtype become its largest."""
    changed, value = tensor.clone(), rng.choice(VALUES)
    if not tensor.is_floating_point():
        whole = rng.choice([0, 1, -1, 2, 100, 127, 128, 255, 2**31 - 1])
        low, high = (
            (0, 1) if tensor.dtype == torch.bool else (torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max)
        )
        value = min(max(whole, low), high)
    elif value == value and abs(value) != float("inf"):
        value = min(max(value, -torch.finfo(tensor.dtype).max), torch.finfo(tensor.dtype).max)
    flat = changed.reshape(-1)
    if rng.random() < 0.5:
        flat.fill_(value)
    elif flat.numel():
        flat[rng.randrange(flat.numel())] = value
    return flat.view(tensor.shape)


def content_of(data: bytes) -> Content:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    head = json.loads(header["__metadata__"][METADATA_KEY])
    del head["digest"]
    return Content(canonical(head.pop("body")), head, safetensors.torch.load(data))


def sealed(content: Content) -> bytes:
    """The artifact with the digest that its content deserves, whatever the content."""
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in content.tensors.items()}
    others = canonical(content.head)[1:]  # "body" and "digest" are the first keys
    head, of_tensors = (
        f'{{"body":{content.body},{others}',
        {name: _described(name, tensors[name]) for name in sorted(tensors)},
    )
    digest = f'"{_sha256(head.encode("ascii"), *of_tensors.values())}"'
    text = f'{{"body":{content.body},"digest":{digest},{others}'
    return safetensors.torch.save(tensors, {METADATA_KEY: text})


def _described(name: str, tensor: Tensor) -> bytes:
    head = canonical([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
    return head.encode("ascii") + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def mutated_artifact(content: Content, rng: random.Random) -> bytes:
    if rng.random() < 0.02:
        raw = sealed(content)
        return raw[: rng.randrange(len(raw))]
    for _ in range(rng.choice(MUTATIONS)):
        if content.tensors and rng.random() < 0.4:
            content = replace(content, tensors=mutated_tensors(content.tensors, rng))
        else:
            content = replace(content, body=mutated_json(content.body, rng))
    return sealed(content)


def mutated_side_file(text: str, rng: random.Random) -> str:
    """A JSON file of kind, schema, digest and body, sealed again."""
    if rng.random() < 0.02:
        return text[: rng.randrange(len(text))]
    content = json.loads(text)
    body = canonical(content["body"])
    for _ in range(rng.choice(MUTATIONS)):
        body = mutated_json(body, rng)
    content |= {"body": json.loads(body), "digest": hashlib.sha256(body.encode("ascii")).hexdigest()}
    indent = None if "[" * 100 in body else 1  # in so many lists it would be blanks, mostly
    return json.dumps(content, indent=indent, sort_keys=True) + "\n"


def canonical(value: Any) -> str:
    """JSON as artifacts spell it; NaN and infinity, too."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
