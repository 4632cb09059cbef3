"""The model that an engine serves, held against the one that a plan was compiled for."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvcal.errors import ArtifactError
from kvcal.models.load import config_sha256
from kvcal.plan.plan import Plan


class ServedModel(NamedTuple):
    """``source``: its folder or hub id. Heads are those of all ranks; ``head_dim`` None: compared layer by layer, by
    the plug-in's attention."""

    source: str
    model_type: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int | None


def require_model(plan: Plan, served: ServedModel, engine: str) -> None:
    """ArtifactError unless the model is the plan's; of a local folder, config.json is compared, too."""
    attention = plan.layers[0].attention
    pairs: dict[str, tuple[object, object]] = {
        "model type": (plan.model.model_type, served.model_type),
        "layers": (len(plan.layers), served.num_layers),
        "query heads": (attention.num_query_heads, served.num_query_heads),
        "KV heads": (attention.num_kv_heads, served.num_kv_heads),
    }
    if served.head_dim is not None:
        pairs["head size"] = attention.k_head_dim, served.head_dim
    folder = Path(served.source)
    if (folder / "config.json").is_file():
        pairs["sha256 of config.json"] = plan.model.config_sha256, config_sha256(folder, served.source)
    for name, (expected, found) in pairs.items():
        if expected != found:
            raise ArtifactError(
                f"the plan is for {plan.model.id}, of {name} {expected}, but {engine} serves {served.source}, of "
                f"{name} {found}",
                hint="compile a plan for this model, or serve the model that the plan names",
            )
