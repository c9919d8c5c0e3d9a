"""Finds a model's family by the `model_type` of its Hugging Face config, and makes the table of the whole model."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from runtime import plugins
from runtime.errors import ConfigError
from runtime.trainer.megatron import families
from runtime.trainer.megatron.families._missing import lacking
from runtime.trainer.megatron.table import Row, within


class Family(Protocol):
    """What a file in families/ defines. `hf` is transformers' config of the model."""

    def config(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig, or with multi_latent_attention of MLATransformerConfig.

        Raises:
            ConfigError: the model has a feature that is not supported.
        """
        ...

    def rotary(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Arguments of GPTModel about positions."""
        ...

    def layer(self, hf: PretrainedConfig, number: int) -> list[Row]:
        """The rows of layer `number`, with names relative to it."""
        ...


def names() -> list[str]:
    return plugins.files(families.__name__)


def read_config(folder: Path) -> PretrainedConfig:
    """The Hugging Face config of a model folder.

    Raises:
        ConfigError: it is missing or malformed, or its weights are quantised.
    """
    try:
        hf = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, StrictDataclassError) as e:
        raise ConfigError(f"{folder}/config.json", " ".join(str(e).split()), "give a Hugging Face folder") from e
    if getattr(hf, "quantization_config", None):
        raise ConfigError(f"{folder}/config.json", "the weights are quantised", "convert them to bfloat16 first")
    return hf


def find(hf: PretrainedConfig) -> Family:
    """
    Raises:
        ConfigError: there is no file for this `model_type`; the message says what is missing, where that is known.
    """
    kind = hf.model_type
    if kind in names():
        return importlib.import_module(f"{families.__name__}.{kind}")  # pyright: ignore[reportReturnType]
    fix = f"use the fsdp trainer, or a model of one of: {', '.join(names())}"
    raise ConfigError(f"{hf.name_or_path or kind}/config.json: model_type", f"{kind!r}: {lacking(kind)}", fix)


def table(family: Family, hf: PretrainedConfig) -> list[Row]:
    """The rows of the whole model, in the order in which its weights are given out."""
    embedding = Row(
        megatron="embedding.word_embeddings.weight",
        hf=("model.embed_tokens.weight",),
        shapes=((hf.vocab_size, hf.hidden_size),),
        cut=0,
        is_padded=True,
    )
    rows = [embedding]
    for number in range(hf.num_hidden_layers):
        rows += within(family.layer(hf, number), number)
    rows.append(Row(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",), shapes=((hf.hidden_size,),)))
    head = "model.embed_tokens.weight" if hf.tie_word_embeddings else "lm_head.weight"
    rows.append(
        Row(
            megatron="output_layer.weight",
            hf=(head,),
            shapes=embedding.shapes,
            cut=0,
            is_padded=True,
            is_copy=bool(hf.tie_word_embeddings),
        )
    )
    return rows
