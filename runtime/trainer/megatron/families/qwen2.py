"""Qwen2 and Qwen2.5: a bias on queries, keys and values."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from runtime.trainer.megatron import parts
from runtime.trainer.megatron.table import Row


def config(hf: PretrainedConfig) -> dict[str, Any]:
    return parts.decoder(hf, qkv_bias=True)


def rotary(hf: PretrainedConfig) -> dict[str, Any]:
    return parts.rotary(hf)


def layer(hf: PretrainedConfig, number: int) -> list[Row]:
    return parts.block_norms(hf) + parts.attention(hf, qkv_bias=True) + parts.mlp(hf)
