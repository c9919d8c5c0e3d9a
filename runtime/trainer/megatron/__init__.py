"""Megatron-Core below a trainer: the model of a Hugging Face folder, its weights in and out, and its forward passes."""
