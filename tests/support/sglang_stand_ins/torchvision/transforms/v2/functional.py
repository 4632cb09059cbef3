from torchvision.io import __getattr__  # noqa: F401
