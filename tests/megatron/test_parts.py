"""What needs no second rank: the shim, layouts of stages and sequences, tables of names, and what is refused."""

import json

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from runtime import topology
from runtime.config import Parallel
from runtime.errors import ConfigError
from runtime.trainer.megatron import convert, families, family, model, table
from runtime.trainer.megatron.cpu import megatron_on_cpu
from runtime.trainer.megatron.packing import pack, padded_length
from runtime.trainer.megatron.stages import Stages
from runtime.trainer.megatron.weight_files import WeightFiles
from tests.megatron import models

PUBLISHED = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 131072,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "scoring_func": "sigmoid",
        "rope_theta": 10000,
        "max_position_embeddings": 163840,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "GLM-4.5": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 160,
        "first_k_dense_replace": 3,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "rope_scaling": None,
    },
}
"""What these models' own files say, in their spelling."""


@pytest.fixture
def folder(tmp_path):
    """Writes a config.json, and beside it weights if asked."""

    def write(**fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path

    return write


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return models.make("qwen3", tmp_path_factory.mktemp("model"))


def test_the_shim_leaves_nothing_behind():
    from megatron.core.tensor_parallel import random

    before = torch.cuda.current_device, torch.cuda.Stream, random._get_cuda_rng_state, torch._dynamo.config.disable
    with megatron_on_cpu():
        assert torch.zeros(1, device="cuda").cuda().device.type == "cpu"
        assert torch.zeros(1).to("cuda", non_blocking=True).type() == "torch.cuda.FloatTensor"
        assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert before == (
        torch.cuda.current_device,
        torch.cuda.Stream,
        random._get_cuda_rng_state,
        torch._dynamo.config.disable,
    )
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_the_shim_refuses_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="GPU"), megatron_on_cpu():
        pass


@given(num_layers=st.integers(1, 40), pp=st.integers(1, 6), vpp=st.integers(1, 3))
def test_stages_hold_every_layer_once_and_evenly(num_layers, pp, vpp):
    if pp * vpp > num_layers or (vpp > 1 and pp == 1):
        with pytest.raises(ConfigError, match=r"trainer\.parallel"):
            topology.check_cut(Parallel(pipeline=pp, virtual_pipeline=vpp), {}, num_layers, 0)
        return
    stages = Stages(num_layers, pp, vpp)
    held = []
    for chunk in range(vpp):
        for stage in range(pp):
            first, count = stages.first_layer(stage, chunk), stages.counts[chunk * pp + stage]
            held += range(first, first + count)
            for layer in range(first, first + count):
                row = table.Row(megatron=f"decoder.layers.{layer}.x", hf=(), shapes=(), layer=layer)
                assert stages.stage_of(row) == stage
    assert held == list(range(num_layers))
    assert max(stages.counts) - min(stages.counts) <= 1
    if stages.layout():
        assert [len([x for x in place if x == "decoder"]) for place in stages.layout()] == list(stages.counts)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), cp=st.integers(1, 4), tp=st.sampled_from([1, 2, 4]))
def test_packing_finds_every_token_again(sizes, cp, tp):
    starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    tokens = torch.arange(1, starts[-1] + 1)
    for length in (padded_length(starts, cp, tp), padded_length(starts, cp, tp) + 2 * cp * tp):
        ranks = [pack(tokens, starts, rank=rank, cp=cp, length=length) for rank in range(cp)]
        assert {p.tokens.shape for p in ranks} == {(1, length // cp)}
        assert length // cp % tp == 0
        rows, targets, positions = (
            torch.cat([getattr(p, name)[0] for p in ranks]) for name in ("tokens", "targets", "positions")
        )
        for p in ranks:
            later = ~p.is_start
            assert torch.equal(p.is_start.nonzero()[:, 0], torch.tensor(starts[:-1]))
            assert torch.equal(targets[p.source][later], tokens[later])
            assert torch.equal(rows[p.source][later], tokens[later] - 1)
            assert torch.equal(positions[p.source][later], torch.cat([torch.arange(n) for n in sizes])[later] - 1)
        assert sorted(rows.tolist()) == sorted([*tokens.tolist(), *[0] * (length - len(tokens))])


def test_chunks_go_to_context_parallel_ranks_in_zig_zag():
    first, second = (pack(torch.arange(1, 13), [0, 8, 12], rank=r, cp=2, length=12) for r in range(2))
    assert first.tokens.tolist() == [[1, 2, 7, 8, 9, 12]]
    assert second.tokens.tolist() == [[3, 4, 5, 6, 10, 11]]
    assert first.params.cu_seqlens_q.tolist() == [0, 8, 12]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_queries_keys_and_values_alternate_by_key_head(num_ranks):
    row = table.Row(megatron="x", hf=("q", "k", "v"), shapes=((8, 1), (4, 1), (4, 1)), cut=0, groups=2)
    whole = [torch.arange(8).view(8, 1), torch.arange(10, 14).view(4, 1), torch.arange(20, 24).view(4, 1)]
    pieces = [row.join([x.chunk(num_ranks)[r] for x in whole], num_ranks) for r in range(num_ranks)]
    assert torch.cat(pieces)[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    for r, piece in enumerate(pieces):
        assert tuple(piece.shape) == row.held(num_ranks)
        for part, expected in zip(row.split(piece, num_ranks), whole, strict=True):
            assert torch.equal(part, expected.chunk(num_ranks)[r])


@pytest.mark.parametrize(
    ("own", "known"),
    [
        ("module.module.decoder.layers.1.input_layernorm.weight", "decoder.layers.5.input_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.4.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.4.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight",
            "decoder.layers.4.self_attention.kv_layernorm.weight",
        ),
        (
            "decoder.layers.0.mlp.experts.linear_fc1.weight3",
            "decoder.layers.4.mlp.experts.local_experts.11.linear_fc1.weight",
        ),
        (
            "decoder.layers.2.mlp.experts.local_experts.0.linear_fc2.weight",
            "decoder.layers.6.mlp.experts.local_experts.8.linear_fc2.weight",
        ),
    ],
)
def test_names_of_fused_and_wrapped_modules_are_translated(own, known):
    assert table.global_name(own, first_layer=4, first_expert=8) == known


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_the_tensors_that_transformers_has(folder, name):
    hf = family.read_config(folder(**PUBLISHED[name]))
    kind = family.find(hf)
    kind.config(hf), kind.rotary(hf)
    rows = family.table(kind, hf)
    assert len({row.megatron for row in rows}) == len(rows)
    with torch.device("meta"):
        known = transformers.AutoModelForCausalLM.from_config(hf)
    expected = {}
    for key, tensor in known.state_dict().items():
        expected |= {k: x.shape for k, x in models.on_disk(key, tensor).items()}
    assert {n: torch.Size(s) for row in rows for n, s in zip(row.hf, row.shapes, strict=True)} == expected


def test_published_positions_are_understood(folder):
    def rotary(name):
        hf = family.read_config(folder(**PUBLISHED[name]))
        return family.find(hf).rotary(hf)

    assert rotary("Llama-3.1-8B")["rope_scaling_factor"] == 8.0
    assert rotary("Llama-3.1-8B")["rotary_base"] == 500000.0
    assert rotary("GLM-4.5")["rotary_percent"] == 0.5
    assert "rope_scaling" not in rotary("Qwen2.5-7B")
    hf = family.read_config(folder(**PUBLISHED["DeepSeek-V3"]))
    fields = family.find(hf).config(hf)
    assert (fields["rope_type"], fields["rotary_scaling_factor"], fields["mscale_all_dim"]) == ("yarn", 40, 1.0)


REFUSED = {
    "qwen3_next": ({"model_type": "qwen3_next"}, "linear attention"),
    "qwen3_5": ({"model_type": "qwen3_5_text"}, "linear attention"),
    "qwen3_5 with pictures": ({"model_type": "qwen3_5_moe"}, "linear attention"),
    "glm 5": ({"model_type": "glm_moe_dsa"}, "sparse attention"),
    "deepseek 3.2": ({"model_type": "deepseek_v32"}, "sparse attention"),
    "deepseek 4": ({"model_type": "deepseek_v4"}, "hyper-connections"),
    "unknown": ({"model_type": "gpt2"}, "no table"),
    "window": ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
    "quantised": (
        {**PUBLISHED["DeepSeek-V3"], "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "quantised",
    ),
    "other scaling": (
        {"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1e6},
        "rope_parameters",
    ),
    "low frequencies": (
        {
            **PUBLISHED["Llama-3.1-8B"],
            "rope_scaling": {**PUBLISHED["Llama-3.1-8B"]["rope_scaling"], "low_freq_factor": 2},
        },
        "low_freq_factor",
    ),
    "groups": ({**PUBLISHED["DeepSeek-V3"], "topk_group": 2}, "topk_group"),
    "malformed": ({"model_type": "qwen3", "hidden_size": "wide"}, "hidden_size"),
    "activation": ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_be_computed_wrongly_is_refused(folder, name):
    fields, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        hf = family.read_config(folder(**fields))
        kind = family.find(hf)
        kind.config(hf), kind.rotary(hf)


@pytest.mark.parametrize(
    ("parallel", "name", "words"),
    [
        (Parallel(tensor=4), "qwen3", "key-value heads"),
        (Parallel(tensor=3), "qwen3", "attention heads"),
        (Parallel(expert=2), "qwen3", "no experts"),
        (Parallel(expert=3), "qwen3_moe", "4 experts"),
        (Parallel(tensor=2), "qwen3_moe", "sequence_parallel"),
        (Parallel(sequence_parallel=True), "qwen3", "sequence_parallel"),
    ],
)
def test_a_cut_that_does_not_come_out_is_refused(parallel, name, words):
    hf = models.CONFIGS[name]()
    with pytest.raises(ConfigError, match=words):
        model.check(hf, family.find(hf).config(hf), parallel)


def test_a_family_is_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    (tmp_path / "mistral.py").write_text("from runtime.trainer.megatron.families.llama import config, layer, rotary\n")
    hf = transformers.MistralConfig(**models.DENSE, sliding_window=None)
    rows = family.table(family.find(hf), hf)
    assert rows[-1].hf == ("lm_head.weight",)


def test_slices_are_read_as_such(qwen3):
    with WeightFiles(qwen3) as files:
        name = "model.layers.3.mlp.down_proj.weight"
        whole = files.read(name, None, 0, 1)
        assert files.shape(name) == tuple(whole.shape) == (32, 48)
        assert torch.equal(files.read(name, 0, 1, 4), whole[8:16])
        assert torch.equal(files.read(name, 1, 3, 4), whole[:, 36:])


def altered(source, target, change):
    """The model with its tensors changed, in one file."""
    tensors = {k: v for file in source.glob("*.safetensors") for k, v in load_file(file).items()}
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is not there"),
        (lambda t: t.update({"model.norm.weight": torch.ones(33)}), r"\[33\].*\[32\]"),
        (lambda t: t.update({"model.extra.weight": torch.ones(1)}), "model.extra.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}), "F8_E4M3"),
    ],
)
def test_files_that_do_not_fit_are_refused(qwen3, tmp_path, change, words):
    path = altered(qwen3, tmp_path, change)
    hf = family.read_config(path)
    rows = family.table(family.find(hf), hf)
    with WeightFiles(path) as files, pytest.raises(ConfigError, match=words):
        convert.listing(rows, files)
        convert.check_known(rows, files)


def test_layers_of_multi_token_prediction_are_left_alone(qwen3, tmp_path):
    path = altered(qwen3, tmp_path, lambda t: t.update({"model.layers.4.eh_proj.weight": torch.ones(1)}))
    hf = family.read_config(path)
    rows = family.table(family.find(hf), hf)
    with WeightFiles(path) as files:
        convert.check_known(rows, files)
        assert "model.layers.4.eh_proj.weight" not in {x.name for x in convert.listing(rows, files)}


def test_a_listing_moves_no_weight_and_may_name_another_dtype(qwen3, monkeypatch):
    monkeypatch.setattr(WeightFiles, "read", None)
    hf = family.read_config(qwen3)
    rows = family.table(family.find(hf), hf)
    with WeightFiles(qwen3) as files:
        stored, cast = convert.listing(rows, files), convert.listing(rows, files, torch.bfloat16)
    assert {x.dtype for x in stored} == {torch.float32}
    assert {x.dtype for x in cast} == {torch.bfloat16}
    assert stored[0].name == "model.embed_tokens.weight"
    assert [(x.name, x.shape) for x in stored] == [(x.name, x.shape) for x in cast]


def test_a_folder_without_weights_is_refused(folder):
    path = folder(model_type="qwen3")
    with pytest.raises(ConfigError, match=r"model\.safetensors is not there"):
        WeightFiles(path)
    with pytest.raises(ConfigError, match=r"config\.json"):
        family.read_config(path / "nowhere")
