"""As in `torchvision.transforms` of this folder."""

from torchvision.transforms import InterpolationMode, __getattr__

__all__ = ["InterpolationMode", "__getattr__"]
