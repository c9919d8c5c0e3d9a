"""Megatron-Core against transformers, on gloo: every family, every way of cutting a model."""
