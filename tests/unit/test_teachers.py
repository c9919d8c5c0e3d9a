"""What is checked of teachers, and of adapters, before anything is started."""

import json
import shutil
from pathlib import Path

import pytest

from launcher import cli
from launcher.checks.run import check_run
from runtime.load import read_run
from runtime.site import SiteConfig
from tests.unit.inputs import safetensors
from tests.unit.test_checks import refused

TEACHERS = ("algorithm.name=distill", "models.teachers={math: {path: model}, code: {path: model}}")
MANY = ("algorithm.name=distill", "trainer.kind=megatron", "site=slots.yaml")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (TEACHERS, ["data.0.teacher", "is empty", "math, code"]),
        ((*TEACHERS, "data.0.teacher=maths"), ["data.0.teacher", "'maths'", "did you mean 'math'"]),
        ((TEACHERS[0], "data.0.teacher=math", "models.teacher={path: model}"), ["data.0.teacher", "'math'", "none"]),
        ((*TEACHERS, "data.0.teacher=math", "models.teachers.code.path=bare"), ["teachers.code.path", "no weights"]),
        ((*TEACHERS, "data.0.teacher=math", "models.teacher={path: model}"), ["models.teachers", "leave one"]),
        (
            (*TEACHERS, "data.0.teacher=math", "algorithm.options={kind: jsd}"),
            ["algorithm.options", "one teacher only", "kind: sampled"],
        ),
        (
            ("algorithm.name=distill", "models.teacher={path: model, expert: 2}"),
            ["models.teacher.expert", "is 2", "fsdp", "trainer.kind: megatron"],
        ),
        ((*MANY, "models.teacher={path: model, expert: 3}"), ["models.teacher.expert", "3 does not divide the 4"]),
        ((*MANY, "models.teacher={path: model, expert: 2}"), ["models.teacher.expert", "no experts", "set it to 1"]),
        (("trainer.lora={targets: [gate_proj]}",), ["trainer.lora.targets.0", "routed experts only", "q_proj"]),
        (("trainer.lora={targets: [q_proj, k_prj]}",), ["trainer.lora.targets.1", "'k_prj'", "did you mean 'k_proj'"]),
        (("trainer.lora={targets: [embed_tokens]}",), ["trainer.lora.targets.0", "no adapters", "k_proj, q_proj"]),
        (
            ("trainer.lora={targets: [embed_out]}",),
            ["trainer.lora.targets.0", "'embed_out' is the emb", "output layer"],
        ),
    ],
)
def test_teachers_and_adapters(here, capsys, changes, words):
    (here / "bare").mkdir()
    Path("bare/config.json").write_text('{"model_type": "qwen3"}')
    Path("slots.yaml").write_text("name: slots\ncpu_slots_per_node: 4\n")
    layers = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate", "mlp.experts.0.gate_proj")
    names = ["model.embed_tokens.weight", *(f"model.layers.0.{layer}.weight" for layer in layers)]
    Path("model/model.safetensors").write_bytes(safetensors(names=names))
    Path("model/head.safetensors").write_bytes(safetensors((0, 8), ["embed_out.weight"], (2, 1)))
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"vocab_size": 2, "hidden_size": 1}))
    message = refused(capsys, "plan", "run.yaml", *(word for change in changes for word in ("--set", change)))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("role", "algorithm"),
    [("teacher", "{name: distill}"), ("reference", "{name: grpo, options: {kl: 0.1}}"), ("critic", "{name: ppo}")],
)
def test_models_that_know_fewer_tokens_than_the_policy(here, capsys, role, algorithm):
    """But padding, of which nothing is sampled, need not be equal."""
    shutil.copytree("model", "small")
    Path("small/config.json").write_text('{"model_type": "qwen3", "text_config": {"vocab_size": 9}}')
    Path("model/config.json").write_text('{"model_type": "qwen3", "vocab_size": 12}')
    argv = ["plan", "run.yaml", "--set", f"algorithm={algorithm}", "--set", f"models.{role}={{path: small}}"]
    Path("model/tokenizer.json").write_text('{"model": {"vocab": {"x": 11}}}')
    message = refused(capsys, *argv)
    assert all(word in message for word in (f"models.{role}.path", "vocab_size is 9, the policy's 12")), message
    for tokens, is_taken in (({"x": 0, "b": 8}, True), ({"x": 0, "b": 9}, False)):
        vocabulary = {"model": {"vocab": tokens}, "added_tokens": [{"id": 3, "content": "c"}]}
        Path("model/tokenizer.json").write_text(json.dumps(vocabulary))
        assert cli.main(argv) == (0 if is_taken else 2)


def test_each_data_set_has_its_teacher(here):
    loaded = read_run("run.yaml", [*TEACHERS, "data.0.teacher=code"])
    assert loaded.config.models.teachers["code"].path == str(here / "model"), "paths are made absolute"
    assert check_run(loaded, SiteConfig(name="x")) == []
    (warning,) = check_run(read_run("run.yaml", ["data.0.teacher=code"]), SiteConfig(name="x"))
    assert "data.0.teacher is 'code', but grpo with its options learns from none" in warning
