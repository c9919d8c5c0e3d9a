"""Llama 2 and 3, with the scaled rotary embedding of 3.1 and later."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from runtime.trainer.megatron import parts
from runtime.trainer.megatron.table import Row


def config(hf: PretrainedConfig) -> dict[str, Any]:
    parts.refuse(hf, "attention_bias", False)
    return parts.decoder(hf)


def rotary(hf: PretrainedConfig) -> dict[str, Any]:
    return parts.rotary(hf)


def layer(hf: PretrainedConfig, number: int) -> list[Row]:
    return parts.block_norms(hf) + parts.attention(hf) + parts.mlp(hf)
