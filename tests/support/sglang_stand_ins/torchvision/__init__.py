"""A stand-in for torchvision, whose builds need the torch that they were made with. SGLang imports it for
models of images, which no test serves."""

from torchvision import io, transforms  # noqa: F401

__version__ = "0.0"
