"""Attention blocks run again with other keys: the model's own attention to keys read back from a cache.

A calibration forward has exact keys. In decoding, a query reads from pages what was packed before it, and everything
later exactly. So the block's module is called again with the very arguments of the forward, and its attention call gets
other keys for some (query, token) pairs. All else is the model's own: scaling, GQA, soft caps, attention sinks, gates,
the output projection. Queries are taken in segments which read the same tokens from pages, each over the tokens up to
its end, so that all segments together cost one attention.

Left out: models that ``kvcal.models.attention`` leaves out, sliding-window layers (they stay unquantized) and batches
with padding (calibration runs one sequence at a time).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcal.errors import UnsupportedModel
from kvcal.geometry import Geometry
from kvcal.models.attention import attention_modules, base_attention, layer_index, substituted
from kvcal.models.geometry import sharing_layers
from kvcal.models.taps import Captured, tap


@dataclass(frozen=True, eq=False)
class Segment:
    """Queries ``start`` .. ``stop`` - 1 read from pages the tokens where ``is_stored_NT`` (bool [N, T]) is True."""

    start: int
    stop: int
    is_stored_NT: Tensor


# k_read_BNTD, segments that cover all T queries -> the block's output [B, T, hidden].
Reread = Callable[[Tensor, Sequence[Segment]], Tensor]
OnBlock = Callable[[Captured, Reread], None]


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

        def reread(k_read_BNTD: Tensor, segments: Sequence[Segment]) -> Tensor:
            def attend(_: nn.Module, *inputs: Any, **more: Any) -> tuple[Tensor, None]:
                return _attend_in_segments(base, module, k_read_BNTD, segments, *inputs, **more), None

            with substituted(module, attend):
                again = module.forward(*args, **kwargs)
            return again[0] if isinstance(again, tuple) else again

        on_block(captured.pop(), reread)

    with ExitStack() as restore:
        restore.enter_context(torch.no_grad())
        restore.enter_context(tap(model, captured.append, geometry))
        sharing = sharing_layers(model.config)
        for module in attention_modules(model):
            if layer_index(module) not in sharing:
                restore.callback(module.register_forward_hook(run_block, with_kwargs=True).remove)
        yield


def _attend_in_segments(
    base: str,
    module: nn.Module,
    k_read_BNTD: Tensor,
    segments: Sequence[Segment],
    q_BHTD: Tensor,
    k_BNTD: Tensor,
    v_BNTD: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> Tensor:
    """The attention's output, with keys from ``k_read_BNTD`` where the segments say so."""
    parts = []
    for segment in segments:
        until = slice(0, segment.stop)
        is_stored = segment.is_stored_NT[:, until, None].to(k_BNTD.device)
        keys = torch.where(is_stored, k_read_BNTD[:, :, until], k_BNTD[:, :, until])
        queries = q_BHTD[:, :, segment.start : segment.stop]
        mask = _mask_rows(attention_mask, segment, queries, base)
        parts.append(base_attention(base, module)(module, queries, keys, v_BNTD[:, :, until], mask, **more)[0])
    return torch.cat(parts, dim=1)


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
