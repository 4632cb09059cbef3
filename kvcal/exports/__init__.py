"""Files and arguments of other programs, written from a plan. A new target is a file of its own and one line here
(docs/exports.md)."""

from __future__ import annotations

from kvcal.exports.compressed_tensors import compressed_tensors
from kvcal.exports.export import Exporter
from kvcal.exports.ik_llama import ik_llama
from kvcal.exports.kvtuner import kvtuner
from kvcal.exports.modelopt import modelopt
from kvcal.exports.vllm_args import vllm_args

EXPORTERS: dict[str, Exporter] = {
    "modelopt": modelopt,
    "compressed-tensors": compressed_tensors,
    "vllm-args": vllm_args,
    "kvtuner": kvtuner,
    "ik-llama": ik_llama,
}
