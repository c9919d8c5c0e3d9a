"""Which layers a GPU gets: what can be known without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runtime.errors import ConfigError
from runtime.trainer.megatron import spec

GPU = torch.device("cuda:0")


@pytest.mark.parametrize(
    ("device", "dtype", "has_te", "fused"),
    [
        (GPU, torch.bfloat16, True, True),
        (GPU, torch.float32, True, False),
        (GPU, torch.bfloat16, False, False),
        (torch.device("cpu"), torch.bfloat16, True, False),
    ],
)
def test_fused_kernels_are_for_half_precision_on_a_gpu(monkeypatch, device, dtype, has_te, fused) -> None:
    monkeypatch.setattr(spec.transformer_engine, "HAVE_TE", has_te)
    assert spec.has_fused_kernels(device, dtype) is fused


def test_experts_on_a_gpu_need_transformer_engine(monkeypatch) -> None:
    monkeypatch.setattr(spec.transformer_engine, "HAVE_TE", False)
    config = SimpleNamespace(num_moe_experts=8, multi_latent_attention=False, params_dtype=torch.float32)
    with pytest.raises(ConfigError, match="install transformer-engine"):
        spec.layers(config, GPU, None)


def test_only_what_each_rank_holds_whole_is_said_not_to_be_cut() -> None:
    def linear(**parallel_mode: str | None) -> nn.Module:
        made = nn.Linear(2, 2)
        made.weight.tensor_model_parallel = True
        for name, value in parallel_mode.items():
            setattr(made, name, value)
        return made

    whole, column, plain = linear(parallel_mode=None), linear(parallel_mode="column"), linear()
    spec.mark_whole(nn.ModuleList([whole, column, plain]))
    assert [layer.weight.tensor_model_parallel for layer in (whole, column, plain)] == [False, True, True]
