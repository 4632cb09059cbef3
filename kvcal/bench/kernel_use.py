"""Which kernel served a measurement: one short name for every row, and how it was launched.

    decode          the folded kernel, on tensor cores (csrc/decode.cu)
    decode_plain    the one that takes every head size and pair of formats (csrc/decode_plain.cu)
    reconstruct +   before it, in every step: pages that no kernel reads as they are stored become pages of 16 bits

A row of somebody else's attention has that one's name.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic.dataclasses import dataclass

from kvcal.bench.shape import CACHE_DTYPE
from kvcal.cache.static_layer import StaticLayer
from kvcal.geometry import CACHE_DTYPES
from kvcal.kernels.choice import is_plain
from kvcal.kernels.decode import launch_of
from kvcal.strict import STRICT

DECODE, DECODE_PLAIN, RECONSTRUCT = "decode", "decode_plain", "reconstruct + "


@dataclass(frozen=True, config=STRICT)
class KernelUse:
    """``reasons``: why it is not ``decode`` alone, of all layers. Of ``decode`` or ``decode_plain``, in the last layer:
    blocks of the ``grid``, ``threads`` and ``shared_bytes`` of a block, ``registers`` of a thread; None where no kernel
    of ours ran."""

    name: str
    reasons: tuple[str, ...] = ()
    grid: int | None = None
    threads: int | None = None
    shared_bytes: int | None = None
    registers: int | None = None


def kernel_use(layers: Sequence[StaticLayer]) -> KernelUse:
    """What serves a step of these layers, whose stores are allocated; compiles the last one's kernel on CUDA."""
    name = ", ".join(dict.fromkeys(_name(layer) for layer in layers))
    reasons = tuple(dict.fromkeys(reason for layer in layers for reason in layer.slow_reasons))
    store = layers[-1].stores[-1]
    if not store.state.lengths.is_cuda:  # the reference
        return KernelUse(name, reasons)
    launch = launch_of(store.variant, CACHE_DTYPES[CACHE_DTYPE], store.state.lengths.get_device())
    return KernelUse(name, reasons, launch.grid, launch.threads, launch.shared_bytes, launch.kernel.registers)


def _name(layer: StaticLayer) -> str:
    is_any_plain = any(is_plain(store.variant) for store in layer.stores)
    return (RECONSTRUCT if layer.form_reasons else "") + (DECODE_PLAIN if is_any_plain else DECODE)
