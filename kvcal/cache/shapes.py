"""Shapes of what a model hands to its cache: keys and values of every update, and states."""

from __future__ import annotations

from torch import Tensor

from kvcal.errors import ArtifactError, UsageError
from kvcal.geometry import AttentionGeometry, StateGeometry

_ANOTHER_MODEL = "the plan was compiled for another model"


def require_shapes(geometry: AttentionGeometry, key_states: Tensor, value_states: Tensor) -> None:
    """Checks key_states [B, N, T, k_head_dim] and value_states [B, N, T, v_head_dim], for N and head sizes of the plan.

    Raises:
        ArtifactError: other heads or head sizes.
        UsageError: values of other sequences, heads or tokens than the keys.
    """
    expected = (geometry.num_kv_heads, geometry.k_head_dim, geometry.v_head_dim)
    found = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
    if found != expected:
        raise ArtifactError(
            f"layer {geometry.index} caches {found[0]} KV heads of size {found[1]} (K) and {found[2]} (V), but the "
            f"plan is for {expected[0]} of {expected[1]} and {expected[2]}",
            hint=_ANOTHER_MODEL,
        )
    if value_states.shape[:-1] != key_states.shape[:-1]:
        raise UsageError(
            f"layer {geometry.index} is given keys {list(key_states.shape)} and values {list(value_states.shape)}, "
            "expected the same sequences, heads and tokens"
        )


def require_state(geometry: StateGeometry, states: list[Tensor]) -> None:
    """ArtifactError unless the state of a layer, tensors [B, ...], takes the plan's bytes per sequence."""
    found = sum(state.nbytes // state.shape[0] for state in states)
    if found != geometry.bytes_per_sequence:
        raise ArtifactError(
            f"layer {geometry.index} keeps a state of {found} bytes per sequence, but the plan is for "
            f"{geometry.bytes_per_sequence}",
            hint=f"{_ANOTHER_MODEL}, or with the model in another dtype",
        )
