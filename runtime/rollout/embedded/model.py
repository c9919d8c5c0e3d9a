"""A transformers causal model whose forward decodes over a slot cache; built from its config, without weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig

from runtime.errors import ConfigError
from runtime.rollout.embedded.cache import ATTENTION, SlotCache, attend

_CHUNK: Final[int] = 64
"""Columns of the cache are read in multiples of this, so that shapes seldom change."""
_FIXED_ROPE: Final[tuple[str, ...]] = ("default", "linear", "yarn", "llama3")
"""Rotary embeddings whose frequencies do not depend on the length of the batch."""


class SlotModel:
    """The model, its cache, and the two forwards the decoder needs. Weights are random until they are pushed."""

    def __init__(self, path: str, *, dtype: str, slots: int, max_length: int) -> None:
        config = AutoConfig.from_pretrained(path)
        _check(config, path)
        AttentionInterface.register(ATTENTION, attend)
        number = _dtype(dtype, config)
        self.net = AutoModelForCausalLM.from_config(config, dtype=number, attn_implementation=ATTENTION)
        self.net.eval().requires_grad_(False)
        self.slots = slots
        self.max_length = min(max_length or config.max_position_embeddings, config.max_position_embeddings)
        self.vocab_size: int = config.vocab_size
        self.stop_ids = _stop_ids(config, path)
        heads = config.num_attention_heads
        self.cache = SlotCache(
            config.num_hidden_layers,
            slots,
            getattr(config, "num_key_value_heads", None) or heads,
            -(-self.max_length // _CHUNK) * _CHUNK,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            number,
        )

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Forward of whole prompts, padded on the right: causal attention never looks at the padding.

        Returns:
            logits [prompts, vocabulary] after each prompt's last token, and what `SlotCache.write` takes.
        """
        lengths = [len(p) for p in prompts]
        longest = max(lengths)
        tokens = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts])
        positions = torch.arange(longest).expand(len(prompts), -1)
        ends = sorted(set(lengths))
        self.cache.prefill()
        logits = self._forward(tokens, None, positions, torch.tensor(ends) - 1)
        column = torch.tensor([ends.index(n) for n in lengths])
        return logits[torch.arange(len(prompts)), column], self.cache.take()

    def decode(self, tokens: Sequence[int], positions: Sequence[int], *, full_width: bool) -> Tensor:
        """One more token for each of the first slots: logits [rows, vocabulary]. Its key and value are stored."""
        read = self.cache.width if full_width else -(-(max(positions) + 1) // _CHUNK) * _CHUNK
        place = torch.tensor(positions)
        self.cache.decode(place, read)
        seen = torch.arange(read) <= place[:, None]
        mask = torch.zeros(seen.shape, dtype=self.net.dtype).masked_fill_(~seen, -torch.inf)
        return self._forward(torch.tensor(tokens)[:, None], mask[:, None, None], place[:, None], 1)[:, -1]

    def _forward(self, tokens: Tensor, mask: Tensor | None, positions: Tensor, keep: Tensor | int) -> Tensor:
        out = self.net(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return out.logits


def _check(config: Any, path: str) -> None:
    """Refuse what would be computed wrongly here: this cache knows plain causal attention only."""
    where = f"{path}/config.json"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (getattr(config, "sliding_window", None) and not hasattr(config, "layer_types")):
        raise ConfigError(where, "the embedded engine has no sliding or linear attention", "use engine: sglang")
    if getattr(config, "attn_logit_softcapping", None):
        raise ConfigError(where, "the embedded engine has no attention softcapping", "use engine: sglang")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _FIXED_ROPE:
        raise ConfigError(where, f"rope type {rope!r} depends on the batch", f"one of {', '.join(_FIXED_ROPE)}")


def _dtype(wanted: str, config: Any) -> torch.dtype:
    name = (config.dtype or "float32") if wanted == "auto" else wanted
    return getattr(torch, str(name).removeprefix("torch."))


def _stop_ids(config: Any, path: str) -> frozenset[int]:
    """What ends an answer: eos of config.json and generation_config.json."""
    given = [config.eos_token_id]
    if (Path(path) / "generation_config.json").exists():
        given.append(GenerationConfig.from_pretrained(path).eos_token_id)
    return frozenset(i for ids in given if ids is not None for i in ([ids] if isinstance(ids, int) else ids))
