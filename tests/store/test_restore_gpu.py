"""Prefixes that are reconstructed on a GPU, from host memory while it works: the CPU's bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from cache_cases import NUM_HEADS
from form_cases import NAMES, form_plan
from predictor_runs import fitted_llama, loaded_llama, plan_with, prompt
from restore_cases import LENGTHS, assert_same_bits, filled, grouped, read_and_stored, restored
from torch import Tensor

from kvcal import Plan, artifact
from kvcal.errors import ArtifactError
from kvcal.geometry import AttentionGeometry, Geometry
from kvcal.stages.prefix import KIND, SCHEMA, PrefixLoader, pack_prefix
from kvcal.store.streaming import Source, in_memory, on_device

pytestmark = pytest.mark.gpu

DIM = 64


def plan_for(name: str) -> Plan:
    attention = tuple(AttentionGeometry(index, NUM_HEADS, 2, DIM, DIM) for index in range(3))
    return form_plan(name, geometry=Geometry("llama", "bfloat16", attention))


@pytest.mark.parametrize("name", NAMES)
def test_restored_pages_are_the_cpus(name: str) -> None:
    plan = plan_for(name)
    for num_tokens in LENGTHS:
        cache = filled(plan, num_tokens, DIM)
        given = grouped(cache)
        expected = read_and_stored(cache, plan.unquantized())
        for groups in (given, [in_memory(group, pin=True) for group in given]):
            assert_same_bits(restored(plan, plan.unquantized(), groups, num_tokens, "cuda"), expected)


@pytest.mark.parametrize("way", ["pinned", "memory", "file"])
def test_no_group_overwrites_one_that_is_still_computed_with(way: str, tmp_path: Path) -> None:
    """Forty groups through a few buffers, each summed up by kernels that take longer than its copy."""
    generator = torch.Generator().manual_seed(0)
    sizes = [1 + 99_991 * number % 1_000_000 for number in range(40)]
    groups = [{"a": torch.randint(0, 255, (n,), generator=generator, dtype=torch.uint8)} for n in sizes]
    groups = [{**group, "b": torch.randn(n % 97, generator=generator)} for group, n in zip(groups, sizes, strict=True)]
    load, found = torch.randn(2048, 2048, device="cuda"), []
    with brought(groups, way, tmp_path / "groups") as given:
        for group in on_device(given, torch.device("cuda")):
            for _ in range(20):
                load = load @ load / load.norm()
            found.append({name: tensor.clone() for name, tensor in group.items()})
    for sent, expected in zip(found, groups, strict=True):
        assert all(torch.equal(sent[name].cpu(), tensor) for name, tensor in expected.items())


@contextmanager
def brought(groups: list[dict[str, Tensor]], way: str, path: Path) -> Iterator[Sequence[Source]]:
    """The groups in pinned or other memory, or unread in a file."""
    if way != "file":
        yield [in_memory(group, pin=True) for group in groups] if way == "pinned" else groups
        return
    tensors = {f"{number}.{name}": x for number, group in enumerate(groups) for name, x in group.items()}
    artifact.write(path, artifact.Artifact(KIND, SCHEMA, {}, {}, tensors))
    with artifact.opened(path, KIND, SCHEMA) as (_, unread):
        yield [{name: unread[f"{number}.{name}"] for name in group} for number, group in enumerate(groups)]


def test_a_file_is_loaded_as_on_a_cpu(tmp_path: Path) -> None:
    """As stored, and into 16 bits; a loader serves one prefix after the other, also after a corrupt one."""
    layers, record = fitted_llama()
    loaded, plan = loaded_llama(), plan_with(loaded_llama(), layers, record)
    for number, length in enumerate((200, 390)):
        pack_prefix(loaded, plan, prompt(length), tmp_path / f"{number}.kv")
    expected = [PrefixLoader(loaded, plan, into) for into in (None, plan.unquantized())]
    pages = [[loader.load_file(tmp_path / f"{number}.kv").cache for number in range(2)] for loader in expected]
    loaded.model.to("cuda")
    try:
        for into, on_cpu in zip((None, plan.unquantized()), pages, strict=True):
            loader = PrefixLoader(loaded, plan, into)
            for number, way in itertools.product(range(2), ("memory", "pinned", "corrupt", "file")):
                path = tmp_path / f"{number}.kv"
                held = loader.read(path)
                if way == "corrupt":
                    data = path.read_bytes()
                    (tmp_path / "corrupt.kv").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
                    with pytest.raises(ArtifactError, match="corrupt"):
                        loader.load_file(tmp_path / "corrupt.kv")
                    continue
                held = held.pinned() if way == "pinned" else held
                prefix = loader.load_file(path) if way == "file" else loader.load(held)
                assert_same_bits(prefix.cache, on_cpu[number])
    finally:
        loaded.model.to("cpu")
