from torchvision.io import __getattr__  # noqa: F401
from torchvision.transforms.v2 import functional  # noqa: F401
