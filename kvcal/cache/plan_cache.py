"""PlanCache: a plan as ``past_key_values``.

    from kvcal import PlanCache, load_plan

    plan = load_plan("plan.safetensors")
    cache = PlanCache(plan, model.config, attention_mask=inputs["attention_mask"])
    model.generate(**inputs, past_key_values=cache)

``attention_mask`` is needed only for batches with padding: without it every column counts as a token. On a
GPU, steps are served by the kernels within ``kvcal.attached(model)``; elsewhere all pages are decoded in each.

With ``max_tokens`` the cache is static: all memory is allocated at the first update, decoding steps are
served by the kernels within ``kvcal.attached(model)``, and can be compiled, or captured in a CUDA graph.
Other batch sizes, and plans that the kernels do not take are refused there, each with its
reason (docs/engines.md has a table). What the fast kernels do not take is slower, and
said so by a ``SlowPath`` warning and ``slow_layers``. ``save`` and ``load`` keep a prompt on disk.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from kvcal.cache import prefix_file
from kvcal.cache.build import cache_layers
from kvcal.cache.plan_layer import DYNAMIC_HINT, NO_PAGE, AttentionLayer, PlanLayer
from kvcal.cache.static_layer import StaticLayer
from kvcal.errors import ArtifactError, KvcalError, NonFiniteActivations, UnsupportedModel, UsageError
from kvcal.geometry import AttentionGeometry
from kvcal.kernels.choice import MAX_STEP_TOKENS, slow_path
from kvcal.plan.plan import Plan
from kvcal.store.padding import Padding
from kvcal.store.state import PlanState, StepState


def _require_type(name: str, value: object, expected: type, usage: str) -> None:
    if not isinstance(value, expected):
        raise UsageError(f"{name} is a {type(value).__name__}, expected a {expected.__name__}", hint=usage)


class PlanCache(Cache):
    """The packed cache of one plan, for one forward pass at a time: threads take a cache each.

    ``nbytes`` equals ``plan.nbytes(lengths, columns)`` at any time, but for one case: while past recording is
    on (assisted decoding), sliding-window layers hold the tokens of the last update on top, until the next
    crop or update. While it stores new tokens, a dynamic cache takes up to
    ``kvcal.store.workspace.transient_bytes`` more. A static cache takes ``plan.nbytes`` of rows of
    ``max_tokens``, from the first update on. Steps by the kernels take ``workspace_nbytes`` on top. With
    ``lookahead``, every sequence of either takes the bytes of so many more tokens at 16 bits in each
    full-attention layer."""

    def __init__(
        self,
        plan: Plan,
        config: PretrainedConfig,
        attention_mask: Tensor | None = None,
        max_tokens: int | None = None,
        lookahead: int = 0,
    ) -> None:
        """config: the model's; attention_mask [B, columns] of the prompt, 0 at padding; max_tokens: tokens
        that every sequence has room for, which makes the cache static; lookahead: draft tokens a step, up to
        7, that can be taken back as if they had never been there (``crop``). A static cache verifies a token
        with as many drafts in one step.

        Raises:
            ArtifactError: the plan's layers are not the model's. UsageError: max_tokens is no integer of 1 or
            more; lookahead is none of 0 to 7; another argument is of another type.
            UnsupportedModel: a static cache cannot hold a layer, with the reason.
        """
        _require_type("plan", plan, Plan, "PlanCache(load_plan(path), model.config)")
        _require_type("config", config, PretrainedConfig, "PlanCache(plan, model.config)")
        self.plan = plan
        self.config = config
        if not isinstance(lookahead, int) or not 0 <= lookahead < MAX_STEP_TOKENS:
            raise UsageError(f"lookahead = {lookahead!r}, expected an integer of 0 to {MAX_STEP_TOKENS - 1}")
        self.state = PlanState(plan, attention_mask, 1 + lookahead)
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise UsageError(f"max_tokens = {max_tokens!r}, expected an integer of 1 or more")
        self.static: StepState | None = None
        indices = [layer.geometry.index for layer in plan.layers if isinstance(layer.geometry, AttentionGeometry)]
        self._first_index, self._last_index = min(indices, default=-1), max(indices, default=-1)
        self._is_unfinished = False  # some layers hold the tokens of a forward pass that did not reach the last one
        if max_tokens is not None:
            self.static = StepState(self.state, max_tokens, in_prompt=attention_mask is not None)
        model_type = config.get_text_config(decoder=True).model_type
        if model_type != plan.model.model_type:
            raise ArtifactError(
                f"the plan is for model type {plan.model.model_type!r}, the model is {model_type!r}",
                hint="compile a plan for this model, or load the model the plan names: " + plan.model.id,
            )
        super().__init__(layers=self.empty_layers())
        self._unseen_states = [layer for layer in self.plan_layers.values() if layer.keeps_state]

    def empty_layers(self) -> list[Any]:
        """Layers without tokens, in the order of the model."""
        return cache_layers(self.config, self.state, self.static, self.allocate)

    def allocate(self, batch: int, device: torch.device | str) -> None:
        """Allocate the memory of a static cache for ``batch`` sequences now; otherwise the first update does.
        Warns with ``SlowPath`` of ``slow_layers``. Refused, the cache is as it was.

        Raises:
            UsageError: the cache is dynamic, or is allocated already.
            UnsupportedModel: the device is CUDA, and the kernels do not take a layer, with the reason.
        """
        if self.static is None or self.static.is_allocated:
            problem = "is allocated already"
            if self.static is None:
                problem = "was built without max_tokens: allocate() is for static caches"
            raise UsageError(f"the cache {problem}")
        in_prompt = self.static.in_prompt
        try:
            with torch.inference_mode(False):  # or nothing could be written to them outside of inference mode
                self.static.allocate(batch, torch.device(device))
                for layer in self._static_layers:
                    layer.create(batch, torch.device(device))
        except BaseException:
            self.padding.reset()
            self.static = StepState(self.state, self.static.max_tokens, in_prompt)
            self.layers = self.empty_layers()
            raise
        if self.slow_layers and self.static.lengths.is_cuda:  # elsewhere there is no other kernel to be slower than
            warnings.warn(slow_path(self.slow_layers), stacklevel=2)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As the layers'.

        Raises:
            UsageError: the last forward pass did not reach the last layer, so that the layers hold different
            tokens. ArtifactError: the model's heads, head sizes or states are not the plan's.
        """
        if torch.compiler.is_compiling():
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._first_index:
            self._require_finished()
        try:
            found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except KvcalError as refused:  # before anything is stored, unless a page could not be packed
            self._is_unfinished |= isinstance(refused, NonFiniteActivations)
            raise
        except BaseException:
            self._is_unfinished = True
            raise
        self._is_unfinished = layer_idx != self._last_index
        if not self._is_unfinished:
            self._require_states()
        return found

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As the layers'. UsageError for no new tokens, of which models make tensors that torch cannot
        reshape."""
        if not query_length:
            raise UsageError(
                f"the model is called with no new tokens: generate() counts the {self.lengths} tokens that the cache "
                "holds as the first ones of the prompt",
                hint="reset() first, for another prompt",
            )
        return super().get_mask_sizes(query_length, layer_idx)

    def __repr__(self) -> str:
        room = "" if self.static is None else f", max_tokens={self.static.max_tokens}"
        bits = self.plan.bits_per_value()
        return f"PlanCache(nbytes={self.nbytes}, lengths={self.lengths}, bits_per_value={bits:.3f}{room})"

    def _require_states(self) -> None:
        """ArtifactError where a state that has come to be is none of the plan's, or not of the plan's size;
        each is looked at once."""
        if self._unseen_states:
            self._unseen_states = [layer for layer in self._unseen_states if not layer.is_as_planned()]

    def _require_finished(self) -> None:
        if self._is_unfinished:
            raise UsageError(
                "the last forward pass did not reach the last layer, so that layers hold different tokens",
                hint="reset() the cache and feed the prompt again, or build a new one",
            )

    @property
    def padding(self) -> Padding:
        return self.state.padding

    @property
    def plan_layers(self) -> dict[int, PlanLayer]:
        """By their index: all but those that transformers keeps for layers without a cache."""
        return {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, PlanLayer)}

    @property
    def paged_layers(self) -> list[AttentionLayer]:
        """Those whose keys and values lie in pages, or in the rings of a static cache."""
        return [layer for layer in self.layers if isinstance(layer, AttentionLayer)]

    @property
    def _static_layers(self) -> list[StaticLayer]:
        return [layer for layer in self.layers if isinstance(layer, StaticLayer)]

    @property
    def slow_layers(self) -> dict[int, list[str]]:
        """Layers of a static cache whose steps take longer than the fast kernels on CUDA, by index, and
        why."""
        reasons = {layer.plan.geometry.index: layer.slow_reasons for layer in self._static_layers}
        return {index: of_layer for index, of_layer in reasons.items() if of_layer}

    @property
    def workspace_nbytes(self) -> int:
        """Bytes beyond ``nbytes`` that steps by the kernels take: lengths, page tables, and scratch."""
        if self.static is None:
            return sum(steps.nbytes for steps in self.state.steps.values())
        if not self.static.is_allocated:
            return 0
        control = (tensor for layer in self._static_layers for tensor in layer.control)
        return self.static.nbytes + sum(tensor.untyped_storage().nbytes() for tensor in control)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of all tensors held, measured, with those of the plan."""
        held = [
            *self.state.tensors.values(),
            *(tensor for layer in self.plan_layers.values() for tensor in layer.tensors),
        ]
        storages = [tensor.untyped_storage() for tensor in held]  # of which layers may share one
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sequence (padding not counted)."""
        rows = self.padding.rows
        return [] if rows is None else rows.lengths(int(self.get_seq_length()))

    def tokens_to_next_page(self) -> int:
        """New tokens until some page is quantized; a chunk of at most this many is exactly like single
        steps."""
        return min((layer.tokens_to_next_page() for layer in self.plan_layers.values()), default=NO_PAGE)

    def check(self) -> None:
        """Wait for the device, and raise what steps by the kernels met; a prompt checks by itself.

        Raises:
            NonFiniteActivations: NaN or infinity in keys or values.
            UsageError: a compiled or captured step beyond ``max_tokens``.
        """
        if self.static is not None:
            self.static.check()
        for steps in self.state.steps.values():
            steps.check()

    def save(self, path: str | Path, tokens_T: Tensor) -> None:
        """Write the sequence that a dynamic cache holds, whose token ids ``tokens_T`` [T] are, to a prefix
        file (kvcal.cache.prefix_file).

        Raises:
            UsageError: the cache is static, has lookahead, or holds no sequence, several ones, or padding; or
            other
                tokens than these.
            UnsupportedModel: a layer keeps a state of linear attention.
            ArtifactError: the file cannot be written.
        """
        self._require_finished()
        if self.static is not None or self.state.step_tokens > 1 or self.lengths != [int(self.get_seq_length())]:
            raise UsageError("a prefix is one sequence without padding, in a dynamic cache without lookahead")
        if self.lengths != [len(tokens_T)]:
            raise UsageError(f"{len(tokens_T)} token ids, and the cache holds {self.lengths[0]} tokens")
        states = [index for index, layer in self.plan_layers.items() if layer.keeps_state]
        if states:
            raise UnsupportedModel(f"layers {states} keep a state of linear attention, which no prefix file holds")
        prefix_file.save(path, self.plan, self.plan_layers, tokens_T)

    @classmethod
    def load(
        cls, path: str | Path, plan: Plan, config: PretrainedConfig, device: torch.device | str = "cpu"
    ) -> tuple[PlanCache, Tensor]:
        """The cache that ``save`` wrote, dynamic, on ``device``, and its token ids int64 [T].

        Raises:
            ArtifactError: no such file, a damaged one, or the prefix of another plan or model.
        """
        cache = cls(plan, config)
        cache.padding.resolve(1)
        return cache, prefix_file.load(path, plan, cache.plan_layers, torch.device(device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """indices: numbers of rows, or bool [B]."""
        rows, is_mask = self.padding.rows, indices.dtype == torch.bool
        if rows is not None and is_mask and len(indices) != rows.batch:
            raise UsageError(f"a mask of {len(indices)} rows for a batch of {rows.batch}")
        self._select((indices.nonzero().flatten() if is_mask else indices).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = self.padding.rows
        if rows is not None:
            self._select([row for row in range(rows.batch) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -n columns (n negative or 0), or keep the first n. A refusal changes nothing.

        Raises:
            UsageError: tokens that would come back into a full sliding window; the last forward pass did not
            reach
                the last layer.
            UnsupportedModel: a layer keeps a state of linear attention.
        """
        self._require_finished()
        tokens, held, rows = int(tokens_to_remove), int(self.get_seq_length()), self.padding.rows
        removed = min(0, tokens - held if tokens > 0 else max(tokens, -held))
        if rows is None:
            return
        for layer in self.plan_layers.values():
            layer.require_croppable(rows, held, held + removed)
        # The last layer first: a predicted layer needs its source's pages to cut its own.
        for layer in reversed(self.plan_layers.values()):
            layer.crop(removed)
        if self.static is not None:
            self.static.set_columns(held + removed)

    def reset(self, attention_mask: Tensor | None = None) -> None:
        """Forget all sequences; the next update may bring another batch (without padding, with the same mask,
        or with the one given). A static cache keeps its memory and its batch.

        Raises:
            UsageError, UnsupportedModel: the mask is no mask, not of a static cache's batch, or padded on the
            right of
                a static sliding window; nothing is changed.
            NonFiniteActivations: a static cache met NaN or infinity; it is reset all the same.
        """
        if attention_mask is not None:
            padding = Padding(attention_mask)
            for layer in self.plan_layers.values():
                layer.require_padding(padding.prompt)
            if self.static is not None and self.static.is_allocated:
                padding.resolve(self.static.batch)
            self.state.padding = padding
        self.padding.reset()
        self._is_unfinished = False
        if self.static is None:
            self.state.steps.clear()
            self.layers = self.empty_layers()
            self._unseen_states = [layer for layer in self.plan_layers.values() if layer.keeps_state]
            return
        for each in self.layers:
            each.reset()
        self.static.in_prompt |= attention_mask is not None
        if self.static.is_allocated:
            self.static.set_columns(0)
            self.static.check()

    def _select(self, indices: list[int]) -> None:
        rows = self.padding.rows
        if rows is None:
            return
        unknown = [index for index in indices if not -rows.batch <= index < rows.batch]
        if unknown:
            raise UsageError(f"no row {unknown[0]} in a batch of {rows.batch}")
        indices = [index % rows.batch for index in indices]
        if self.static is not None and len(indices) != rows.batch:
            raise UsageError(f"{len(indices)} sequences of {rows.batch}: a static batch stays", hint=DYNAMIC_HINT)
        self.padding.rows = rows.select(indices)
        row_indices = torch.LongTensor(indices)
        for layer in self.layers:
            layer.reorder_cache(row_indices)
        if self.static is not None:
            self.static.set_columns(int(self.static.columns))
