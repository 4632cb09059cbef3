"""The container: same bytes in any process, atomic writes, and one refusal per way to be wrong."""

import errno
import hashlib
import json
import os
import resource
from dataclasses import replace
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

from kvcal import artifact
from kvcal.artifact import Artifact, differing_input, read, require_output, to_bytes, write, write_bytes_atomic
from kvcal.errors import ArtifactError
from kvcal.folder import Folder
from kvcal.stored_tensor import stored

GOLDEN = "8ea1c808f7f09cd4ca074d0a4dfafb0487e5ce1a3ece0e61741b9dcaf4a122bc"
HEAD = {"kind": "demo", "schema": 3, "inputs": {"seed": 1, "model": "é"}, "body": {"b": [1.5, None]}}


def example() -> Artifact:
    tensors = {
        "codes": torch.arange(5, dtype=torch.uint8),
        "scale": torch.tensor([[0.5, -2.0]], dtype=torch.bfloat16),
        "scalar": torch.tensor(3.25, dtype=torch.float64),
        "empty": torch.zeros(0, 4, dtype=torch.int32),
    }
    return Artifact(tensors=tensors, **HEAD)


def save(path, head, tensors=None, metadata=None):
    """Writes a container by hand, whatever is in it; ``head`` is JSON text or an object."""
    text = head if isinstance(head, str) else artifact.canonical_json(head)
    path.write_bytes(safetensors.torch.save(tensors or {}, metadata or {"kvcal": text}))


def sealed(head, tensors=None):
    """``head`` with the digest that its content deserves."""
    return head | {"digest": artifact._digest(head, stored(tensors or {}))}


def test_round_trip(tmp_path):
    path = tmp_path / "demo.safetensors"
    write(path, example())
    again = read(path, "demo", 3)
    assert replace(again, tensors={}) == replace(example(), tensors={})
    assert again.tensors.keys() == example().tensors.keys()
    for name, tensor in example().tensors.items():
        assert again.tensors[name].dtype == tensor.dtype
        assert torch.equal(again.tensors[name], tensor)
    assert os.listdir(tmp_path) == ["demo.safetensors"]


def test_views_and_shared_memory_are_stored_by_value_and_nan_in_json_is_not():
    base = torch.arange(6.0).reshape(2, 3)
    shared = Artifact(tensors={"a": base, "b": base.T, "c": base[:, 1]}, **HEAD)
    own = Artifact(tensors={n: t.contiguous().clone() for n, t in shared.tensors.items()}, **HEAD)
    assert to_bytes(shared) == to_bytes(own)
    with pytest.raises(ArtifactError, match="finite numbers"):
        to_bytes(replace(shared, body={"loss": float("nan")}))


def test_the_digest_is_what_the_format_says():
    raw = to_bytes(Artifact(tensors={"a": torch.tensor([1.0])}, **HEAD))
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert set(header["__metadata__"]) == {"kvcal"}
    text = header["__metadata__"]["kvcal"]
    expected = (
        b'{"body":{"b":[1.5,null]},"inputs":{"model":"\\u00e9","seed":1},"kind":"demo","schema":3}'
        b'["a","float32",[1]]\x00\x00\x80?'
    )
    digest = hashlib.sha256(expected).hexdigest()
    assert json.loads(text)["digest"] == digest
    assert text == text.encode("ascii").decode() and ": " not in text


def test_golden_bytes():
    """They change only with the format or the safetensors layout, never silently."""
    assert hashlib.sha256(to_bytes(example())).hexdigest() == GOLDEN


def test_any_flipped_bit_is_refused(tmp_path):
    path = tmp_path / "demo.safetensors"
    tensors = {"a": torch.tensor([[0.5], [2.0]]), "b": torch.tensor([7], dtype=torch.uint8)}
    raw = to_bytes(replace(example(), tensors=tensors))
    for position in range(len(raw) * 8):
        flipped = bytearray(raw)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(ArtifactError):
            read(path, "demo", 3)
    path.write_bytes(raw)
    read(path, "demo", 3)


def test_any_truncation_is_refused(tmp_path):
    path = tmp_path / "demo.safetensors"
    raw = to_bytes(example())
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(ArtifactError, match="truncated"):
            read(path, "demo", 3)
    path.write_bytes(raw + b"\0")
    with pytest.raises(ArtifactError):
        read(path, "demo", 3)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ArtifactError, match=r"no demo artifact at .*gone") as caught:
        read(tmp_path / "gone", "demo", 3)
    assert caught.value.exit_code == 5 and caught.value.hint == "check the path"
    with pytest.raises(ArtifactError, match="no profile artifact at") as caught:
        read(tmp_path / "gone", "profile", 3)
    assert caught.value.hint == "check the path, or make it first: kvcal profile"
    with pytest.raises(ArtifactError, match="is a folder; expected a regular file"):
        read(tmp_path, "demo", 3)


@pytest.mark.parametrize("metadata", [{"format": "pt"}, {"kvcal": "{}", "other": ""}])
def test_foreign_metadata(tmp_path, metadata):
    path = tmp_path / "a"
    save(path, "", {"w": torch.zeros(1)}, metadata)
    with pytest.raises(ArtifactError, match=r"metadata keys are \['") as caught:
        read(path, "demo", 3)
    assert all(key in caught.value.message for key in metadata)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"b":1,"a":2}', '{"a":NaN}', '{"a":1e999}', '{"a":1,"a":1}', '{"a":"é"}', '{"a":' * 100_000]
)
def test_json_that_is_not_canonical(tmp_path, text):
    path = tmp_path / "a"
    save(path, text, metadata={"kvcal": text})
    with pytest.raises(ArtifactError, match="not canonical JSON"):
        read(path, "demo", 3)


@pytest.mark.parametrize("head", [{}, HEAD, sealed(HEAD) | {"more": 1}, sealed(HEAD | {"inputs": []})])
def test_wrong_fields(tmp_path, head):
    path = tmp_path / "a"
    save(path, head)
    with pytest.raises(ArtifactError, match="not canonical JSON with the fields"):
        read(path, "demo", 3)


def test_wrong_kind_and_schema(tmp_path):
    path = tmp_path / "a"
    write(path, example())
    with pytest.raises(ArtifactError, match='of the kind "demo", expected "plan"'):
        read(path, "plan", 3)
    with pytest.raises(ArtifactError, match="schema version 3; this kvcal reads version 4 only"):
        read(path, "demo", 4)
    write(path, replace(example(), kind="profile"))
    with pytest.raises(ArtifactError, match="schema version 3") as caught:
        read(path, "profile", 4)
    assert "make it again with this version of kvcal (kvcal profile)" in caught.value.hint
    save(path, sealed(HEAD | {"schema": True}))
    with pytest.raises(ArtifactError, match="schema version"):
        read(path, "demo", 1)


def test_renamed_extra_reshaped_or_recast_tensor_breaks_the_digest(tmp_path):
    path = tmp_path / "a"
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(2)}
    head = sealed(HEAD, tensors)
    save(path, head, tensors)
    read(path, "demo", 3)
    for other in (
        {"a": tensors["a"], "c": tensors["b"]},
        {"a": tensors["a"]},
        tensors | {"c": torch.zeros(0)},
        tensors | {"a": torch.zeros(3, 2)},
        tensors | {"b": torch.zeros(2, dtype=torch.int32)},
    ):
        save(path, head, other)
        with pytest.raises(ArtifactError, match="digest"):
            read(path, "demo", 3)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float64, float("nan")), (torch.float16, -float("inf")), (torch.bfloat16, float("nan")),
        (torch.float8_e5m2, float("inf")),
    ],
)  # fmt: skip
def test_non_finite_tensors_are_neither_written_nor_read(tmp_path, dtype, value):
    path = tmp_path / "a"
    tensors = {"bad": torch.tensor([1.0, value, 2.0]).to(dtype)}
    with pytest.raises(ArtifactError, match="'bad' holds NaN or infinity in 1 of 3 values"):
        write(path, Artifact(tensors=tensors, **HEAD))
    assert not path.exists()
    save(path, sealed(HEAD, tensors), tensors)
    with pytest.raises(ArtifactError, match="'bad' holds NaN or infinity in 1 of 3 values"):
        read(path, "demo", 3)


class TestFailedWrites:
    """Whatever interrupts a write, the old file stays and no temporary file does."""

    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "a"
        path.write_bytes(b"old")
        yield path
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["a"]

    def test_file_too_large_for_the_system(self, path):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(ArtifactError, match="File too large") as caught:
                write_bytes_atomic(path, bytes(200_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert str(path) in caught.value.message and caught.value.hint == "free some space"

    @pytest.mark.parametrize("step", ["fsync", "replace"])
    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
    def test_disk_full_or_ctrl_c(self, path, monkeypatch, step, error):
        monkeypatch.setattr(os, step, Mock(side_effect=error))
        with pytest.raises((ArtifactError, KeyboardInterrupt), match="No space left|^$"):
            write(path, example())

    def test_no_such_folder(self, path):
        with pytest.raises(ArtifactError, match="cannot write .*No such file or directory"):
            write(path.parent / "none" / "a", example())


def test_an_output_replaces_no_artifact_of_another_kind(tmp_path):
    path = tmp_path / "plan.safetensors"
    write(path, example())
    before = path.read_bytes()
    with pytest.raises(ArtifactError, match=f"{path} is a .*, which a plan would replace"):
        require_output(path, "plan")
    assert path.read_bytes() == before


def test_stale_files_are_removed_where_a_folder_is_opened(tmp_path):
    """Those of killed processes; what a living one writes is new."""
    new, old, other = (tmp_path / name for name in (".kvcal-new.tmp", ".kvcal-old.tmp", "mine.tmp"))
    for path in (new, old, other):
        path.write_bytes(b"x")
    os.utime(old, (1.0, 1.0))
    os.utime(other, (1.0, 1.0))
    Folder.create(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([new, other])


def test_differing_input():
    old = {"seq_len": 512, "data": "x", "weights": "a" * 64}
    assert differing_input(old, dict(old)) is None and differing_input({"a": (1, 2)}, {"a": [1, 2]}) is None
    assert differing_input(old | {"seq_len": 2048, "z": 1}, old) == "seq_len is 512, expected 2048"
    assert differing_input(old, old | {"a": 1}) == "a is 1, expected absent"
    assert differing_input({"a": 1}, {"a": True}) == "a is true, expected 1"
    late = differing_input(old | {"weights": "a" * 50 + "b" * 14}, old)
    assert late.startswith("weights is …") and len(late) < 120 and "b" * 14 in late
