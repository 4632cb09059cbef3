"""Tensors as files hold them are torch's, bit for bit: bytes, values, and what is not finite."""

import pytest
import torch

from kvcal.stored_tensor import DTYPES, ITEM_BYTES, StoredTensor, StoredTensors, stored

FLOATS = [name for name, dtype in DTYPES.items() if dtype.infinite]
TORCH = {name: getattr(torch, name) for name in DTYPES}


def every_pattern(name: str) -> torch.Tensor:
    """All bit patterns of up to 16 bits, 4,096 random ones of wider dtypes, in the CPU's memory."""
    size = ITEM_BYTES[name]
    if size > 2:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, 256, (4096 * size,), dtype=torch.uint8, generator=generator).view(TORCH[name])
    patterns = torch.arange(256 if size == 1 else 65536, dtype=torch.int32)
    if name == "bool":
        return patterns % 3 == 0
    return patterns.to(torch.uint8 if size == 1 else torch.uint16).view(TORCH[name])


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_has_torchs_size_and_comes_back_as_it_was(name: str) -> None:
    x = every_pattern(name).view(-1, 4)
    kept = StoredTensor.of(x)
    assert (kept.dtype, kept.shape, kept.nbytes) == (name, tuple(x.shape), x.numel() * TORCH[name].itemsize)
    again = StoredTensor(name, kept.shape, bytearray(kept.data)).tensor()
    assert again.dtype == x.dtype and torch.equal(again.view(torch.uint8), x.view(torch.uint8))
    if ITEM_BYTES[name] > 1 or name not in FLOATS:
        values = torch.from_numpy(kept.values().copy())
        assert torch.equal(values.double().nan_to_num(7.5), x.double().nan_to_num(7.5))


@pytest.mark.parametrize("name", FLOATS)
def test_what_is_not_finite_is_counted_as_torch_counts_it(name: str) -> None:
    x = every_pattern(name)
    if ITEM_BYTES[name] == 4:
        x = torch.cat([x, torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4e38])])
    assert StoredTensor.of(x).num_infinite == (~torch.isfinite(x.double())).sum().item() > 0


def test_a_tensor_is_made_once_and_only_when_asked_for() -> None:
    kept = stored({"a": torch.arange(6).view(2, 3), "b": torch.empty(0, 4), "c": torch.tensor(2.5)})
    assert kept["a"] == StoredTensor.of(torch.arange(6).view(2, 3)) != StoredTensor.of(torch.arange(6))
    tensors = StoredTensors({name: StoredTensor(x.dtype, x.shape, bytearray(x.data)) for name, x in kept.items()})
    assert list(tensors) == ["a", "b", "c"] and len(tensors) == 3 and "d" not in tensors
    assert stored(tensors) is tensors.stored
    assert tensors["a"] is tensors["a"] and torch.equal(tensors["a"], torch.arange(6).view(2, 3))
    assert tensors["b"].shape == (0, 4) and tensors["c"].item() == 2.5
    tensors["a"][0, 0] = 9  # in memory of its own
    assert kept["a"].values()[0, 0] == 0
