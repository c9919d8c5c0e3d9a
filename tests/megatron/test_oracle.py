"""Tables of names against mbridge, which was written by others: the same Hugging Face tensors make the same Megatron
tensors, whole and as pieces of two tensor-parallel ranks. It knows Megatron's names with Transformer Engine."""

import re
from types import SimpleNamespace

import pytest
import torch
from mbridge.core.bridge import _MODEL_REGISTRY

from runtime.trainer.megatron import family, table
from tests.megatron import models

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe", "deepseek_v3", "deepseek_v3_plain", "glm4_moe")


def oracle(hf):
    """mbridge's for this model; the TransformerConfig that it would make is of no use here."""
    known = _MODEL_REGISTRY[hf.model_type]
    config = SimpleNamespace(gated_linear_unit=True, num_layers=hf.num_hidden_layers)
    made = type("Oracle", (known,), {"_build_config": lambda self: config})
    return made(hf, dtype=torch.float32, parallel_states=SimpleNamespace())


def fused(name: str, is_latent: bool, has_experts: bool) -> str:
    """A name of the plain modules -> Transformer Engine's."""
    norms = {
        "self_attention.q_layernorm": "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj.layer_norm_weight",
    }
    if not is_latent:
        norms = {"input_layernorm": "self_attention.linear_qkv.layer_norm_weight"}
    if not has_experts:
        norms["pre_mlp_layernorm"] = "mlp.linear_fc1.layer_norm_weight"
    for plain, own in norms.items():
        name = name.replace(f"{plain}.weight", own)
    return re.sub(r"experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight", r"experts.\2.weight\1", name)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_layouts_are_those_that_others_found(name):
    hf = models.CONFIGS[name]()
    hf.mlp_only_layers = []  # it knows no layer without experts in Qwen3-MoE
    theirs, rows = oracle(hf), family.table(family.find(hf), hf)
    sparse = {row.layer for row in rows if row.megatron.endswith("router.weight")}
    for row in rows:
        own = fused(row.megatron, hasattr(hf, "kv_lora_rank"), row.layer in sparse)
        assert table.global_name(own, 0, 0) == row.megatron
        assert tuple(theirs._weight_name_mapping_mcore_to_hf(own)) == row.hf
        parts = [torch.randn(shape) for shape in row.shapes]
        whole = row.join(parts, 1)
        assert theirs._weight_to_mcore_format(own, parts).equal(whole), own
        if row.cut is None or row.expert is not None:
            continue  # held whole
        pieces = theirs._weight_split_across_tp(own, whole, torch.empty(row.held(2)), 2)
        for rank, piece in enumerate(pieces):
            assert row.join([part.chunk(2, row.cut)[rank] for part in parts], 2).equal(piece), own
