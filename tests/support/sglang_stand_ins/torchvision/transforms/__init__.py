"""Names that are imported and never used, but for one that transformers makes tables of."""

import enum

from torchvision.io import __getattr__  # noqa: F401
from torchvision.transforms import functional, v2  # noqa: F401

InterpolationMode = enum.Enum(
    "InterpolationMode", ["NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"]
)
