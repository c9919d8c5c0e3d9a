"""torchvision by name only: SGLang imports it for models that see images."""

__version__ = "0.28.0"
