"""The model that ships inside the package: real, small, trained (its card: reasoner-10m/README.md)."""

from __future__ import annotations

from pathlib import Path

MODEL_NAME = "reasoner-10m"


def model_folder() -> Path:
    """The embedded model's folder: config, weights (bf16 safetensors) and tokenizer, for
    ``from_pretrained``."""
    return Path(__file__).parent / MODEL_NAME
