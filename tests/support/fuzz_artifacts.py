"""Mutated plans, sealed with a right digest: each is refused with ArtifactError, or good for what it says.

    python tests/support/fuzz_artifacts.py --count 1000000 --seed 0

prints how many files were refused, accepted and held what they say, accepted and did not ("wrong"), raised
another kvcal error than ArtifactError ("other"), raised anything else ("raw"), or took too long ("hang").
Every second file carries two mutations of its JSON or its tensors.
"""

import argparse
import contextlib
import copy
import functools
import hashlib
import json
import random
import re
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from artifact_subjects import open_plan, plans
from torch import Tensor

from kvcal.artifact import METADATA_KEY
from kvcal.errors import ArtifactError, InfeasibleBudget, KvcalError, NonFiniteActivations
from kvcal.plan.plan import Plan, save_plan

OUTCOMES = ("refused", "accepted", "wrong", "other", "raw", "hang")
SECONDS = 5
SPARE_BYTES = 4 << 30
INTEGERS = [-1, 0, 1, 2, 3, 5, 7, 100, 127, 129, 4097, -5, 2**15 + 1, 2**31, 2**40, 2**63, 10**18, 10**30, -(10**18)]
FLOATS = [0.0, -0.0, -1.0, 0.5, 0.9999999, 1.5, 2.0, 1e-300, 3e38, 1e308, -1e308, float("nan"), float("inf")]
STRINGS = ["", "x", "x" * 100_000, "\u0000é\ud83d", "../../etc", "token", "channel", "float64", "bfloat16", "pre"]
OTHERS = [None, True, False, [], {}, [[]], [None], {"": 0}, "1"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


@dataclass(frozen=True)
class Content:
    """An artifact without its digest. ``body``: canonical JSON; ``head``: what else its JSON holds."""

    body: str
    head: dict[str, Any]
    tensors: dict[str, Tensor]


def canonical(value: Any) -> str:
    """JSON as artifacts spell it; NaN and infinity, too."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def content_of(data: bytes) -> Content:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    head = json.loads(header["__metadata__"][METADATA_KEY])
    del head["digest"]
    return Content(canonical(head.pop("body")), head, safetensors.torch.load(data))


def sealed(content: Content) -> bytes:
    """The artifact with the digest that its content deserves, whatever the content."""
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in content.tensors.items()}
    others = canonical(content.head)[1:]  # "body" and "digest" are the first keys
    digest = hashlib.sha256(f'{{"body":{content.body},{others}'.encode("ascii"))
    for name, tensor in sorted(tensors.items()):
        digest.update(canonical([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]).encode("ascii"))
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    text = f'{{"body":{content.body},"digest":"{digest.hexdigest()}",{others}'
    return safetensors.torch.save(tensors, {METADATA_KEY: text})


@functools.lru_cache(64)
def places_in(text: str) -> list[tuple[Any, ...]]:
    """Paths to all values within the JSON value that ``text`` spells, but itself."""
    found: list[tuple[Any, ...]] = []

    def visit(value: Any, at: tuple[Any, ...]) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            found.append((*at, key))
            visit(item, found[-1])

    visit(json.loads(text), ())
    return found


def mutated_json(text: str, rng: random.Random) -> str:
    """Canonical JSON of another object than ``text`` spells, by one change of one value."""
    body = json.loads(text)
    found = places_in(text)
    if not found:
        return text
    *way, key = rng.choice(found)
    parent: Any = body
    for step in way:
        parent = parent[step]
    kind, is_short = rng.randrange(10), len(canonical(parent[key])) < 300
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice(["", "extra", "num_bits", str(key) + "s"])] = parent[key]
    elif kind == 1:
        parent.insert(key, copy.deepcopy(parent[key]))
    elif kind == 2 and isinstance(parent, dict):
        other = rng.choice(list(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif kind == 2:
        rng.shuffle(parent)
    elif kind == 3:
        for _ in range(rng.choice([10, 400 if is_short else 10])):
            parent[key] = [parent[key]]
    else:
        parent[key] = _other(parent[key], is_short, rng)
    return canonical(body)


def _other(value: Any, is_short: bool, rng: random.Random) -> Any:
    """Mostly of the same type: another type is refused by the first line of any parser."""
    if rng.random() < 0.2:
        return rng.choice(OTHERS)
    match value:
        case bool():
            return not value
        case int():
            return rng.choice([*INTEGERS, value + 1, value - 1, 2 * value, float(value)])
        case float():
            return rng.choice([*FLOATS, -value, 2 * value, value / 3])
        case str():
            return rng.choice([*STRINGS, value + "x", value[:-1]])
        case [_, *_]:
            return rng.choice([value * 2, value[:-1], value[1:], [], value * (1000 if is_short else 2)])
    return rng.choice([*OTHERS, *INTEGERS, *FLOATS, *STRINGS])


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
        shapes += [tensor[:-1], tensor[1:]] if tensor.dim() else []
        found[name] = rng.choice([*shapes, *([tensor.mT] if tensor.dim() > 1 else [])])
    else:  # one number replaced, or all
        flat = tensor.clone().reshape(-1)
        is_float = tensor.is_floating_point()
        values = torch.tensor(FLOATS if is_float else [0, 1, -1, 2, 127, 255, 2**31 - 1], dtype=torch.float64)
        value = rng.choice(list(values.to(tensor.dtype)))
        flat[slice(None) if rng.random() < 0.5 or not len(flat) else rng.randrange(len(flat))] = value
        found[name] = flat.view(tensor.shape)
    return found


def write_mutant(sound: bytes, rng: random.Random, path: Path) -> None:
    """Some files are cut off."""
    if rng.random() < 0.02:
        path.write_bytes(sound[: rng.randrange(len(sound))])
        return
    artifact = content_of(sound)
    for _ in range(rng.choice((1, 2))):
        if artifact.tensors and rng.random() < 0.4:
            artifact = replace(artifact, tensors=mutated_tensors(artifact.tensors, rng))
        else:
            artifact = replace(artifact, body=mutated_json(artifact.body, rng))
    path.write_bytes(sealed(artifact))


class TooLong(BaseException):
    """Not to be caught by what is tested."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """TooLong after so many seconds of CPU time."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def limited_memory(spare_bytes: int) -> Iterator[None]:
    """MemoryError beyond what the process has now and so much more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + spare_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def outcome(path: Path) -> tuple[str, str]:
    """(one of OUTCOMES, the message)."""
    try:
        with limited(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            open_plan(path)
    except (ArtifactError, NonFiniteActivations, InfeasibleBudget) as error:
        return "refused", error.message  # the latter two: numbers that a sound file may hold, found out in use
    except AssertionError as error:
        return ("wrong", str(error)) if error.args else ("raw", traceback.format_exc(limit=-4))
    except KvcalError as error:
        return "other", f"{type(error).__name__}: {error.message}"
    except TooLong:
        return "hang", traceback.format_exc(limit=-6)
    except Exception:  # noqa: BLE001
        return "raw", traceback.format_exc(limit=-4)
    return "accepted", ""


def states_other_bytes(path: Path, message: str) -> bool:
    """Whether a plan was refused for stating other bytes than its layers take. It is made to state these: the
    mutation has to fail by something else."""
    taken = re.search(r"but its layers take (\d+)", message)
    if taken:
        content = content_of(path.read_bytes())
        body = json.loads(content.body) | {"predicted_bytes": int(taken[1])}
        path.write_bytes(sealed(replace(content, body=canonical(body))))
    return bool(taken)


def fuzz(name: str, plan: Plan, numbers: Iterable[int], seed: int) -> tuple[Counter[str], list[str]]:
    """How many files of each outcome, and what is wrong with bad ones. Number and seed make a file."""
    counts: Counter[str] = Counter()
    bad = []
    with tempfile.TemporaryDirectory() as folder, limited_memory(SPARE_BYTES):
        path = Path(folder) / "file"
        save_plan(plan, path)
        found = outcome(path)
        assert found[0] == "accepted", found
        sound = path.read_bytes()
        for number in numbers:
            write_mutant(sound, random.Random(f"{seed} plan {name} {number}"), path)
            found = outcome(path)
            if found[0] == "refused" and states_other_bytes(path, found[1]):
                found = outcome(path)
            counts[found[0]] += 1
            if found[0] not in ("refused", "accepted"):
                bad.append(f"{found[0]}, {name} {number}: {found[1]}")
    return counts, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=2000, help="files in all, shared by the plans")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen, totals = plans(), Counter[str]()
    for name, plan in chosen.items():
        counts, bad = fuzz(name, plan, range(-(-options.count // len(chosen))), options.seed)
        totals.update(counts)
        print(*bad[:2], sep="\n", file=sys.stderr)
    print("".join(f"{name:>10}" for name in (*OUTCOMES, "files")))
    print("".join(f"{totals[name]:>10}" for name in OUTCOMES) + f"{totals.total():>10}")
    return int(totals["refused"] + totals["accepted"] < totals.total())


if __name__ == "__main__":
    sys.exit(main())
