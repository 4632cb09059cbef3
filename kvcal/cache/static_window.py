"""A sliding-window layer of a static cache behind the interface of transformers.

Like a full-attention one (``StaticLayer``), but for the past that it holds: the last W - 1 columns, for a window of W,
at 16 bits. A prompt, or a chunk of one, is handed these and its own, under the masks that transformers makes for
its own sliding-window layers; a step takes no mask, since all that a row still holds is in its window.

That is so where a row's tokens lie in neighbouring columns: masks count columns, and a row counts tokens. So padding
behind the tokens of a row is refused, and so is attention in chunks (Llama-4), whose windows begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import PretrainedConfig

from kvcal.cache.static_layer import StaticLayer
from kvcal.errors import UnsupportedModel
from kvcal.plan.layer import LayerPlan
from kvcal.store.rows import Rows
from kvcal.store.static_state import StaticState
from kvcal.store.window_store import WindowStore


class StaticWindow(StaticLayer):
    """See the module's docstring."""

    is_sliding = True

    def __init__(self, plan: LayerPlan, state: StaticState, allocate: Callable[[int, torch.device], None]) -> None:
        super().__init__(plan, state, allocate)
        require_left_padding(state.shared.padding.prompt)

    def past_columns(self, columns: int) -> int:
        window = self.plan.attention.window
        assert window is not None
        return min(columns, window - 1)

    def reset(self) -> None:
        """UnsupportedModel where the padding to come is on the right."""
        require_left_padding(self.state.shared.padding.prompt)
        super().reset()

    def _allocate_stores(self) -> list[WindowStore]:
        return [WindowStore.allocate(self.plan, self.state)]


def require_left_padding(rows: Rows | None) -> None:
    """UnsupportedModel for a prompt with padding behind the tokens of a row."""
    if rows is None:
        return
    for row, (start, stop) in enumerate(rows.runs):
        if start < stop < rows.width:
            raise UnsupportedModel(
                f"row {row} of the prompt is padded behind its tokens (columns {stop} to {rows.width - 1}), which a "
                "static sliding window would count as tokens",
                hint="pad on the left: tokenizer.padding_side = 'left'",
            )


def window_refusals(config: PretrainedConfig, index: int) -> Iterator[str]:
    """Why the window of layer ``index`` is not one of a row's last tokens; nothing if it is."""
    decoder = config.get_text_config(decoder=True)
    layer_types = getattr(decoder, "layer_types", None)
    is_chunked = getattr(decoder, "sliding_window", None) is None
    if layer_types is not None:
        is_chunked = layer_types[index] == "chunked_attention"
    if is_chunked:
        yield "it attends in chunks, which begin anew"
