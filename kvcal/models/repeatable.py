"""Attention whose backward gives the same bits each time, on every GPU of a kind.

The backwards of ``scaled_dot_product_attention`` add up the queries' gradients by atomics. Under
``torch.use_deterministic_algorithms`` FlashAttention's and the memory-efficient one take an order instead; cuDNN's has
none that torch can ask for, and is not chosen within the context. The setting is made for these nodes of the graph
alone: elsewhere it would refuse operations that have no other way (a cumulative sum of a state, a histogram of experts)
and ask for a cuBLAS variable that must be set before a process multiplies its first matrix.

Left out: orders of a forward. Attention's forward, matrix products on one stream, and sums by sorted index repeat their
bits by themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from transformers import PreTrainedModel

from kvcal.models.attention import attention_modules

# The beginning of the names of its nodes in a graph.
ATTENTION = "ScaledDotProduct"
# Nodes that are looked at, from a block's output on: the output projection, gates and reshapes come before attention's.
MAX_NODES = 64


@contextmanager
def repeatable_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, graphs of the model's forwards have attention with a repeatable backward, which must be run
    within it, too. Settings of torch are restored on exit, also after an error. UnsupportedModel: as
    ``attention_modules``."""
    with ExitStack() as restore:
        restore.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
        settings = _Settings()
        restore.callback(settings.restore)
        for module in attention_modules(model):
            restore.callback(module.register_forward_hook(settings.watch).remove)
        yield


class _Settings:
    """torch's setting of deterministic algorithms, as it was and for the backward of attention."""

    def __init__(self) -> None:
        self._mode = torch.get_deterministic_debug_mode()
        self._fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]

    def watch(self, module: nn.Module, args: object, output: object) -> None:
        """After a block's forward."""
        output_BTC = output[0] if isinstance(output, tuple) else output
        node = _attention_node(output_BTC.grad_fn) if isinstance(output_BTC, Tensor) else None
        if node is not None:
            node.register_prehook(lambda _: self.demand())
            node.register_hook(lambda *_: self.restore())

    def demand(self) -> None:
        """Deterministic algorithms or an error, without the filling of all new memory that comes with them."""
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.set_deterministic_debug_mode("error")

    def restore(self) -> None:
        """As it was."""
        torch.set_deterministic_debug_mode(self._mode)
        torch.utils.deterministic.fill_uninitialized_memory = self._fill  # type: ignore[attr-defined]


def _attention_node(output: Node | None) -> Node | None:
    """The nearest node of attention in the graph of a block's output; None for attention that is computed eagerly, by
    operations that repeat their bits, or without a graph."""
    waiting, seen = deque([output]), set[Node]()
    while waiting and len(seen) < MAX_NODES:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        if node.name().startswith(ATTENTION):
            return node
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    return None
