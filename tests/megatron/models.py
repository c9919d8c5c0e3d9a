"""Tiny models of every family, micro-batches for them, and what transformers makes of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY = 96
ENTROPY_WEIGHT = 0.1
TEMPERATURE = 0.8
CLIP_NORM = 0.01
ADAM = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-4}
"""An eps that gradients feel: without, AdamW moves by their signs, and a wrong norm would not show."""
LENGTHS = ((7, 12, 5), (9,), (3, 1, 16), (11, 2), (6, 6, 6), (1,))
"""Of the sequences of six micro-batches."""

DENSE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
LATENT = {
    **DENSE,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 20000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MIXTURE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}

CONFIGS: dict[str, Any] = {
    "qwen3": lambda: hf.Qwen3Config(**DENSE, head_dim=16),
    "qwen3_tied": lambda: hf.Qwen3Config(**{**DENSE, "tie_word_embeddings": True, "num_hidden_layers": 5}, head_dim=16),
    "qwen3_odd": lambda: hf.Qwen3Config(
        **{**DENSE, "tie_word_embeddings": True, "vocab_size": VOCABULARY + 1}, head_dim=16
    ),
    "qwen2": lambda: hf.Qwen2Config(**DENSE),
    "qwen2_tied": lambda: hf.Qwen2Config(**{**DENSE, "tie_word_embeddings": True}),
    "llama": lambda: hf.LlamaConfig(**{**DENSE, "max_position_embeddings": 16384}, head_dim=16, rope_parameters=LLAMA3),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**DENSE, **MIXTURE, head_dim=8, mlp_only_layers=[1]),
    "qwen3_moe_raw": lambda: hf.Qwen3MoeConfig(**DENSE, **{**MIXTURE, "norm_topk_prob": False}, decoder_sparse_step=2),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**LATENT, rope_parameters=YARN),
    "deepseek_v3_plain": lambda: hf.DeepseekV3Config(**{**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek_v3_late": lambda: hf.DeepseekV3Config(**{**LATENT, "first_k_dense_replace": 2}, rope_parameters=YARN),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **{k: v for k, v in LATENT.items() if not k.endswith(("_rank", "nope_head_dim", "rope_head_dim", "v_head_dim"))}
        | {"n_group": 1, "topk_group": 1, "num_key_value_heads": 2},
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
    ),
}
HALF = {"qwen3_tied", "deepseek_v3"}
"""Written in bfloat16."""


def make(name: str, folder: Path) -> Path:
    """A model with weights far enough from their start that a wrong one shows."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(1 + 0.2 * torch.randn_like(p) if p.dim() == 1 else 0.15 * torch.randn_like(p))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    if name in HALF:
        for p in model.parameters():
            p.data = p.data.bfloat16()  # the router's bias stays float32, as in the real ones
    model.save_pretrained(folder / name, max_shard_size="60KB")
    return folder / name


def batches(num: int) -> list[tuple[Tensor, list[int]]]:
    """The first `num` micro-batches: tokens [T], starts [S+1]."""
    random = torch.Generator().manual_seed(1)
    made = []
    for lengths in LENGTHS[:num]:
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        made.append((torch.randint(0, VOCABULARY, (starts[-1],), generator=random), starts))
    return made


def weights(number: int, num_tokens: int) -> Tensor:
    """[T] what the loss multiplies the log-probs of micro-batch `number` with."""
    return torch.randn(num_tokens, generator=torch.Generator().manual_seed(100 + number)) / 50


def loss(number: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
    factors = weights(number, len(logprobs)).to(logprobs)
    return (factors * logprobs).sum() + ENTROPY_WEIGHT * (factors.roll(1) * entropy).sum()


def rows_of(model: Any, tokens: Tensor, starts: list[int]) -> Tensor:
    """[T, V] logits by transformers, a sequence at a time; 0 at starts."""
    rows = torch.zeros(len(tokens), model.config.vocab_size)
    for a, b in pairwise(starts):
        if b - a > 1:
            logits = model(input_ids=tokens[a : b - 1][None]).logits[0]
            rows = torch.cat([rows[: a + 1], logits, rows[b:]])
    return rows


def reference(folder: Path, num: int) -> None:
    """Writes what transformers makes of the first `num` micro-batches: logits, log-probs, entropies, gradients,
    and the weights after one clipped update."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.train()
    found: dict[str, Tensor] = {}
    for number, (tokens, starts) in enumerate(batches(num)):
        rows = rows_of(model, tokens, starts)
        is_start = torch.zeros(len(tokens), dtype=torch.bool)
        is_start[starts[:-1]] = True
        logp = torch.log_softmax(rows / TEMPERATURE, -1)
        logprobs = logp.gather(1, tokens[:, None])[:, 0].masked_fill(is_start, 0)
        entropy = -(logp.exp() * logp).sum(-1).masked_fill(is_start, 0)
        if len(tokens) > 1:
            loss(number, logprobs, entropy).backward()
        found |= {f"logits.{number}": rows, f"logprobs.{number}": logprobs, f"entropy.{number}": entropy}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        found |= {f"grad.{key}": value.clone() for key, value in on_disk(name, p.grad).items()}
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, weight_decay=0.0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    for name, p in model.named_parameters():
        found |= {f"updated.{key}": value.clone() for key, value in on_disk(name, p.data).items()}
    save_file({name: value.detach().contiguous() for name, value in found.items()}, folder / f"reference-{num}.bin")


def on_disk(name: str, value: Tensor) -> dict[str, Tensor]:
    """transformers holds experts stacked; its files hold them one by one."""
    stem, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        gate, up = value.chunk(2, dim=1)
        halves = {"gate_proj": gate, "up_proj": up}
        return {f"{stem}.{e}.{kind}.weight": x for kind, half in halves.items() for e, x in enumerate(half)}
    if last == "down_proj":
        return {f"{stem}.{e}.down_proj.weight": x for e, x in enumerate(value)}
    return {name: value}
