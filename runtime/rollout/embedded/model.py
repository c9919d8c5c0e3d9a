"""A transformers causal model whose forward decodes over a slot cache; built from its config, without weights.

The forward of one decode step is traced once. For a small model on a CPU most of a step is Python between the kernels:
traced, it takes half the time and runs the same kernels, so that the bits are the same. The trace holds for any number
of rows and any width; that is checked at start, and a model that cannot be traced is decoded as it is.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig

from runtime import output
from runtime.errors import ConfigError
from runtime.rollout.embedded.cache import ATTENTION, Decode, Layers, Prefill, SlotCache, attend
from runtime.rollout.embedded.limits import lacks

_LOG: Final = logging.getLogger(__name__)
_CHUNK: Final[int] = 16
"""Columns of the cache are read in multiples of this: fewer would be read in vain, and rows would be less aligned."""

Step = Callable[[Tensor, Tensor, Tensor, Layers, Layers], Tensor]
"""tokens [rows, 1], mask [rows, 1, 1, columns], positions [rows, 1], keys, values -> logits [rows, vocabulary]."""


class SlotModel:
    """The model, its cache, and the two forwards the decoder needs. Weights are random until they are pushed, or, where
    it is frozen, the folder's."""

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        slots: int,
        max_length: int,
        float32_output: bool = False,
        frozen: bool = False,
    ) -> None:
        config = AutoConfig.from_pretrained(path)
        if what := lacks(config.to_dict()):
            raise ConfigError(f"{path}/config.json", f"the embedded engine {what}", "use another engine")
        AttentionInterface.register(ATTENTION, attend)
        number = getattr(torch, dtype)
        how = {"dtype": number, "attn_implementation": ATTENTION}
        auto = AutoModelForCausalLM
        self.net = auto.from_pretrained(path, **how) if frozen else auto.from_config(config, **how)
        self.net.eval().requires_grad_(False)
        if float32_output:
            output.widen(self.net)
        self.slots, self.chunk = slots, _CHUNK
        self.max_length = min(max_length or config.max_position_embeddings, config.max_position_embeddings)
        self.vocab_size: int = config.vocab_size
        self.stop_ids = _stop_ids(config, path)
        heads = config.num_attention_heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        shape = (slots, shared, -(-self.max_length // _CHUNK) * _CHUNK, size)
        self.cache = SlotCache(config.num_hidden_layers, shape, number)
        self._step: Step = _Step(self.net)
        self._step = self._traced()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Prefill]:
        """Forward of whole prompts, padded on the right: causal attention never looks at the padding.

        Returns:
            logits [prompts, vocabulary] after each prompt's last token, and keys and values.
        """
        lengths = [len(p) for p in prompts]
        longest = max(lengths)
        computed = Prefill()
        ends = sorted(set(lengths))
        logits = self.net(
            input_ids=torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts]),
            position_ids=torch.arange(longest).expand(len(prompts), -1),
            past_key_values=computed,
            use_cache=True,
            logits_to_keep=torch.tensor(ends) - 1,
        ).logits
        column = torch.tensor([ends.index(n) for n in lengths])
        return logits[torch.arange(len(prompts)), column], computed

    @torch.inference_mode()
    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-prob of each token after those before it; 0 for the first."""
        ids = torch.tensor(tokens)
        places = torch.arange(len(ids))[None]
        out = self.net(input_ids=ids[None], position_ids=places, past_key_values=Prefill(), use_cache=True)
        logits = out.logits[0, :-1].float()
        return [0.0, *logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].tolist()]

    def decode(self, tokens: Sequence[int], positions: Sequence[int], *, full_width: bool) -> Tensor:
        """One more token for each of the first slots: logits [rows, vocabulary]. Its key and value are stored."""
        columns = self.cache.width if full_width else -(-(max(positions) + 1) // _CHUNK) * _CHUNK
        place = torch.tensor(positions)[:, None]
        hidden = torch.arange(columns) > place
        mask = torch.zeros(hidden.shape, dtype=self.net.dtype).masked_fill_(hidden, -torch.inf)
        keys, values = self.cache.read(len(tokens), columns)
        # Optimised, a trace is specialised on the shapes it meets and fused: slower when they change, and other bits.
        with torch.jit.optimized_execution(False):  # pyright: ignore[reportPrivateImportUsage]
            return self._step(torch.tensor(tokens)[:, None], mask[:, None, None], place, keys, values)

    @torch.inference_mode()
    def _traced(self) -> Step:
        """The step, traced; as it is where tracing fails or changes a bit."""
        rows = [(5 * i + 3) % self.vocab_size for i in range(self.slots)]
        some = rows[: max(1, self.slots // 3)]
        places = [i % min(self.max_length, 2 * _CHUNK) for i in range(self.slots)]

        def results() -> list[Tensor]:
            few = places[: len(some)]
            return [self.decode(rows, places, full_width=True), self.decode(some, few, full_width=False)]

        plain = self._step
        expected = results()
        place = torch.tensor(places)[:, None]
        mask = torch.zeros(self.slots, 1, 1, self.cache.width, dtype=self.net.dtype)
        example = (torch.tensor(rows)[:, None], mask, place, *self.cache.read(self.slots, self.cache.width))
        try:
            with warnings.catch_warnings(action="ignore"):  # of shapes that might be constants: checked below
                self._step = cast("Step", torch.jit.trace(plain, example, check_trace=False))
            same = all(torch.equal(a, b) for a, b in zip(expected, results(), strict=True))
            problem = "" if same else "the traced step gives other bits"
        except RuntimeError as e:
            problem = str(e).strip().splitlines()[-1]
        self.cache.clear()
        if problem:
            _LOG.warning("decoding without a traced step, more slowly: %s", problem)
        return plain if problem else self._step


class _Step(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor, mask: Tensor, positions: Tensor, keys: Layers, values: Layers) -> Tensor:
        out = self.net(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=Decode(keys, values, positions),
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]


def _stop_ids(config: Any, path: str) -> frozenset[int]:
    """What ends an answer: eos of config.json and generation_config.json."""
    given = [config.eos_token_id]
    if (Path(path) / "generation_config.json").exists():
        given.append(GenerationConfig.from_pretrained(path).eos_token_id)
    return frozenset(i for ids in given if ids is not None for i in ([ids] if isinstance(ids, int) else ids))
