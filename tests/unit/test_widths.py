"""Engines that would refuse their model, and GPUs that would stand idle, are told before a job is queued."""

import json
from pathlib import Path

import pytest

from launcher import cli
from runtime.rollout.engines import embedded

SITE = "{scheduler: slurm, name: big, gpus_per_node: 8, slurm: {gpu_request: gpus-per-node, time: '10:00:00'}}"
MODEL = {"model_type": "qwen3", "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 64}


@pytest.fixture
def big(here, monkeypatch):
    """A site with GPUs, and engines that cut their model over them."""
    Path("big.yaml").write_text(SITE)
    Path("model/config.json").write_text(json.dumps(MODEL))
    monkeypatch.setattr(embedded.EmbeddedKind, "runs_on_gpu", True)
    monkeypatch.setattr(embedded.EmbeddedKind, "spans_nodes", True)


def plan(capsys, *changes):
    code = cli.main(["plan", "run.yaml", "--site", "big.yaml", *(x for c in changes for x in ("--set", c))])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(("width", "words"), [(5, "12 attention heads"), (6, "4 key-value heads")])
def test_engines_that_cannot_share_their_model_out(big, capsys, width, words):
    code, told = plan(capsys, f"rollout.gpus_per_engine={width}")
    assert code == 2 and f"rollout.gpus_per_engine: {width} does not divide the model's {words}" in told


def test_gpus_that_no_engine_uses(big, capsys):
    code, told = plan(capsys, "rollout.gpus_per_engine=3", "trainer={kind: fsdp}")
    assert code == 2 and "key-value heads" in told
    Path("model/config.json").write_text(json.dumps(MODEL | {"num_key_value_heads": 3}))
    code, told = plan(capsys, "rollout.gpus_per_engine=3")
    assert code == 0 and "2 of the 8 GPUs of a node with engines are used by none" in told
    assert "used by none" not in plan(capsys, "rollout.gpus_per_engine=1")[1]


def test_lengths_that_the_model_was_not_made_for(big, capsys):
    code, told = plan(capsys, "rollout.engine_options={max_length: 65}")
    assert code == 0 and "rollout.engine_options.max_length is 65, but " in told and "made for 64 tokens" in told
    assert "was made for" not in plan(capsys, "rollout.engine_options={max_length: 64}")[1]


def test_tensor_parallelism_over_the_network(big, capsys):
    Path("big.yaml").write_text(SITE.replace("gpus_per_node: 8", "gpus_per_node: 2"))
    parallel = "trainer={kind: megatron, parallel: {tensor: 4}}"
    code, told = plan(capsys, parallel, "cluster.num_train_nodes=2")
    assert code == 0 and "trainer.parallel.tensor is 4, but a node has 2 GPUs" in told


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"sliding_window": 4096, "attn_logit_softcapping": None}, "has no sliding or linear attention"),
        ({"sliding_window": 4096, "use_sliding_window": False}, ""),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 2}, ""),
        ({"layer_types": ["full_attention", "linear_attention"]}, "has no sliding or linear attention"),
        ({"attn_logit_softcapping": 50.0}, "has no attention softcapping"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "has no rope of type 'dynamic', only default, linear"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ""),
    ],
)
def test_a_model_that_the_embedded_engine_would_compute_wrongly(here, capsys, config, what):
    Path("model/config.json").write_text(json.dumps(MODEL | config))
    code = cli.main(["submit", "run.yaml", "--dry-run"])
    told = capsys.readouterr().err
    assert code == (2 if what else 0), told
    assert not what or ("models.policy.path" in told and f"model: engine 'embedded' {what}" in told)
