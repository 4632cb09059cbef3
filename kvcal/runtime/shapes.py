"""What only shows when tokens come: whether the model's heads, head sizes and states are those of the plan."""

from __future__ import annotations

from torch import Tensor

from kvcal.errors import ArtifactError
from kvcal.geometry import AttentionGeometry, StateGeometry

_ANOTHER_MODEL = "the plan was compiled for another model"


def require_heads(geometry: AttentionGeometry, key_states: Tensor, value_states: Tensor) -> None:
    """ArtifactError unless key_states [B, N, T, k_head_dim] and value_states [B, N, T, v_head_dim] have the plan's N
    and head sizes."""
    expected = (geometry.num_kv_heads, geometry.k_head_dim, geometry.v_head_dim)
    found = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
    if found != expected:
        raise ArtifactError(
            f"layer {geometry.index} caches {found[0]} KV heads of size {found[1]} (K) and {found[2]} (V), but the "
            f"plan is for {expected[0]} of {expected[1]} and {expected[2]}",
            hint=_ANOTHER_MODEL,
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
