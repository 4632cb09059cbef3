"""An attention block run again with other keys: what the model's own attention makes of keys read back from a cache.

A calibration forward sees exact keys. To know what quantized ones do, the block's module is called again with the very
arguments of the forward, and its attention call gets other keys for some (query, token) pairs: in decoding, a query
reads from pages what was packed before it, and everything later exactly. Everything else is the model's own: scaling,
GQA, soft caps, attention sinks, gates, the output projection.

Queries are taken in segments which read the same tokens from pages, each over the tokens up to its end, so that all
segments together cost one attention.

Left out: sliding-window layers (they stay unquantized), batches with padding (calibration runs one sequence at a time).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kvcal.errors import UnsupportedModel
from kvcal.geometry import Geometry
from kvcal.models.attention import attention_modules, forward_of
from kvcal.models.taps import Captured, tap

_REREAD = "kvcal_reread"


@dataclass(frozen=True, eq=False)
class Segment:
    """Queries ``start`` .. ``stop`` - 1 read from pages the tokens where ``is_stored_NT`` (bool [N, T]) is True."""

    start: int
    stop: int
    is_stored_NT: Tensor


# k_read_BNTD, segments that cover all T queries -> the block's output [B, T, hidden].
Reread = Callable[[Tensor, Sequence[Segment]], Tensor]
OnBlock = Callable[[Captured, Reread], None]

# What a module that runs again attends with; holds an entry only meanwhile.
_READING: dict[nn.Module, Callable[..., tuple[Tensor, None]]] = {}


@contextmanager
def rereading(model: PreTrainedModel, on_block: OnBlock, geometry: Geometry) -> Iterator[None]:
    """Within the context, every ``model(..., use_cache=False)`` calls ``on_block`` once per attention layer, after the
    layer's block has run, with what was captured and a function that runs the block again. No gradients.

    Raises what ``tap`` raises; UnsupportedModel for a block that attends more than once.
    """
    base = model.config.get_text_config(decoder=True)._attn_implementation
    captured: list[Captured] = []

    def run_block(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: object) -> None:
        if len(captured) != 1:
            raise UnsupportedModel(f"{type(module).__name__} attends {len(captured)} times in one forward")
        on_block(captured.pop(), lambda k_read, segments: _reread(module, args, kwargs, base, k_read, segments))

    AttentionInterface.register(_REREAD, lambda module, *args, **more: _READING[module](module, *args, **more))
    with ExitStack() as restore:
        restore.enter_context(torch.no_grad())
        restore.enter_context(tap(model, captured.append, geometry))
        for module in attention_modules(model):
            restore.callback(module.register_forward_hook(run_block, with_kwargs=True).remove)
        yield


def _reread(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], base: str, k_read_BNTD: Tensor, segments: Sequence[Segment]
) -> Tensor:
    """The block's output with keys from ``k_read_BNTD`` where the segments say so."""
    namespace = forward_of(module).__globals__
    attention = namespace["ALL_ATTENTION_FUNCTIONS"].get_interface(base, namespace["eager_attention_forward"])

    def attend(
        module: nn.Module, q_BHTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        parts = []
        for segment in segments:
            until = slice(0, segment.stop)
            is_stored = segment.is_stored_NT[:, until, None].to(k_BNTD.device)
            keys = torch.where(is_stored, k_read_BNTD[:, :, until], k_BNTD[:, :, until])
            queries = q_BHTD[:, :, segment.start : segment.stop]
            mask = _mask_rows(attention_mask, segment, queries, base)
            parts.append(attention(module, queries, keys, v_BNTD[:, :, until], mask, **more)[0])
        return torch.cat(parts, dim=1), None

    config = vars(module)["config"]
    implementation = config._attn_implementation
    config._attn_implementation, _READING[module] = _REREAD, attend
    try:
        output = module.forward(*args, **kwargs)
    finally:
        config._attn_implementation = implementation
        del _READING[module]
    return output[0] if isinstance(output, tuple) else output


def _mask_rows(mask: Tensor | None, segment: Segment, queries: Tensor, base: str) -> Tensor:
    """The rows of a mask [B, 1, T, T] for a segment's queries; None stands for plain causality."""
    if mask is not None:
        return mask[:, :, segment.start : segment.stop, : segment.stop]
    tokens = torch.arange(segment.stop, device=queries.device)
    allowed = tokens <= tokens[segment.start :, None]
    if base == "sdpa":
        return allowed[None, None]
    blocked = torch.finfo(queries.dtype).min
    return torch.where(allowed, 0.0, blocked).to(queries.dtype)[None, None]
