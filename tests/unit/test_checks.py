"""What is checked before anything is started: each mistake is one message, exit code 2, and no run folder."""

import json
import shutil
from pathlib import Path

import pytest

from launcher import check, cli, site
from runtime.config import SiteConfig
from runtime.errors import ConfigError
from runtime.load import read_run
from runtime.rollout.engines import embedded
from tests.unit.inputs import safetensors, write_inputs


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with a good run.yaml and what it names."""
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def refused(capsys, *argv: str) -> str:
    """The one message a command is refused with."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "Traceback" not in err
    assert err.count("error: ") == 1
    assert not Path("runs").exists(), "nothing is made before everything is checked"
    return err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.num_prompt=3", ["rollout.num_prompt", "value 3", "did you mean 'num_prompts'"]),
        ("num_steps=ten", ["num_steps", "'ten'", "an integer"]),
        ("algorithm.name=grop", ["--set: algorithm.name", "'grop'", "did you mean 'grpo'"]),
        ("algorithm.options={clip_hig: 1}", ["algorithm.options.clip_hig", "value 1", "did you mean 'clip_high'"]),
        ("rollout.engine=embeded", ["rollout.engine", "'embeded'", "did you mean 'embedded'"]),
        ("data.0.reward=my.own.reward", ["data.0.reward", "my.own.reward", "PYTHONPATH"]),
        ("data.0.reward_options={x: 1}", ["data.0.reward_options.x", "unknown key"]),
        ("evaluation.sets.0.environment=none", ["evaluation.sets.0.environment", "'none'", "single_turn"]),
        ("cluster.num_rollout_nodes=0", ["cluster.num_rollout_nodes", "is 0", "at least 1"]),
        ("rollout.gpus_per_engine=2", ["rollout.gpus_per_engine", "2", "at most 1"]),
        ("trainer.num_updates=9", ["trainer.num_updates", "9", "8 samples", "lower it"]),
        ("data=[]", ["--set: data", "is empty"]),
        ("evaluation.sets=[{path: held.jsonl}, {path: held.jsonl}]", ["evaluation.sets.1.name", "'held'", "`name`"]),
        ("site=locl", ["'locl'", "did you mean 'local'"]),
        ("data.0.path=trian.jsonl", ["data.0.path", "trian.jsonl", "did you mean 'train.jsonl'"]),
        ("models.policy.path=nowhere", ["models.policy.path", "nowhere", "does not exist"]),
        ("models.policy.path=Qwen/Qwen3-8B", ["models.policy.path", "does not exist", "hf download Qwen/Qwen3-8B"]),
        ("runs_dir=/dev/null/runs", ["runs_dir", "/dev/null is not a folder", "choose a folder"]),
        ("models.policy.path=run.yaml", ["models.policy.path", "is a file, not a folder"]),
        ("trainer.optimizer.beta1=1.0", ["trainer.optimizer.beta1", "1.0"]),
        ("algorithm.name=distill", ["models.teacher", "is not given", "distill learns from one"]),
        ("models.reference={path: nowhere}", ["models.reference.path", "nowhere", "does not exist"]),
        ("algorithm={name: ppo, options: {lam: 2.0}}", ["algorithm.options.lam", "<= 1.0"]),
        ("sync.timeout_s=.inf", ["sync.timeout_s", "inf"]),
        ("rollout.sampling.top_k=-7", ["rollout.sampling.top_k", "-7"]),
        ("trainer.kind=megatrn", ["trainer.kind", "'megatrn'", "fsdp, megatron"]),
        ("trainer.parallel.tensor=2", ["--set: trainer.parallel.tensor", "is 2", "fsdp", "trainer.kind: megatron"]),
        ("trainer={kind: megatron, parallel: {tensor: 2}}", ["trainer.parallel", "tensor 2", "1 trainer ranks"]),
        ("trainer={kind: megatron, parallel: {expert: 2}}", ["trainer.parallel.expert", "2", "1 trainer ranks"]),
        ("trainer={kind: megatron, parallel: {tensr: 2}}", ["trainer.parallel.tensr", "did you mean 'tensor'"]),
        ("rollout.sampling.temperature=0", ["rollout.sampling.temperature", "greedy answers cannot be trained on"]),
        ("rollout.engine=sglang", ["rollout.engine_options", "has no package sglang", "docs/engines.md"]),
        (
            "rollout={engine: sglang, num_prompts: 1, num_samples: 2, engine_options: {server: {port: 1}}}",
            ["rollout.engine_options", "server.port", "the kernel chooses it"],
        ),
    ],
)
def test_mistakes_in_values(here, capsys, override, words):
    message = refused(capsys, "submit", "run.yaml", "--set", override)
    assert all(word in message for word in words), message
    assert "fix: " in message


@pytest.mark.parametrize(
    ("model", "parallel", "words"),
    [
        ({"model_type": "mamba"}, "{}", ["trainer.kind", "'mamba'", "qwen3", "trainer.kind: fsdp"]),
        ({"model_type": "qwen3_next"}, "{}", ["trainer.kind", "gated delta rule", "trainer.kind: fsdp"]),
        ({"num_attention_heads": 6}, "{tensor: 4}", ["trainer.parallel.tensor", "6 attention heads"]),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, "{tensor: 4}", ["2 key-value heads"]),
        ({"num_hidden_layers": 3}, "{pipeline: 4}", ["trainer.parallel.pipeline", "3 layers"]),
        ({"model_type": "qwen3_moe", "num_experts": 6}, "{expert: 4}", ["trainer.parallel.expert", "6 experts"]),
        (
            {"model_type": "qwen3_moe", "num_experts": 8},
            "{tensor: 2, expert: 4}",
            ["sequence_parallel", "set it to true"],
        ),
    ],
)
def test_models_that_the_megatron_trainer_cannot_cut(here, capsys, model, parallel, words):
    Path("model/config.json").write_text(json.dumps({"model_type": "qwen3"} | model))
    Path("slots.yaml").write_text("name: slots\ncpu_slots_per_node: 4\n")
    changes = ("--set", f"trainer={{kind: megatron, parallel: {parallel}}}", "--site", "slots.yaml")
    message = refused(capsys, "submit", "run.yaml", *changes)
    assert all(word in message for word in words), message


def test_an_engine_that_cannot_stand_on_several_nodes(here, capsys):
    wide = ("--set", "rollout.gpus_per_engine=2", "--set", "cluster.num_rollout_nodes=2")
    message = refused(capsys, "plan", "run.yaml", *wide)
    assert all(word in message for word in ("rollout.gpus_per_engine", "several nodes", "'embedded' is on one"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["staleness.max_versions=1"], ["staleness.max_versions", "is 1", "take turns", "write 0"]),
        (["sync.channel=delta"], ["sync.channel", "'delta'", "give up their weights", "disk"]),
        (["site=slurm.yaml", "sync.channel=broadcast"], ["sync.channel", "two members on one GPU", "disk"]),
        (["site=slurm.yaml", "sync.channel=ipc"], ["sync.channel", "engines on other nodes", "disk"]),
        (["site=slurm.yaml", "cluster.mode=split", "sync.channel=ipc"], ["on the engine's GPU", "colocated"]),
        (["cluster.mode=split", "sync.channel=delta"], ["sync.channel", "'embedded' takes whole weights only", "disk"]),
    ],
)
def test_channels_that_do_not_serve_a_colocated_run(here, capsys, monkeypatch, changes, words):
    Path("slurm.yaml").write_text(
        "{name: big, scheduler: slurm, gpus_per_node: 2, slurm: {gpu_request: gpus-per-node, time: '10:00:00'}}"
    )
    monkeypatch.setattr(embedded.EmbeddedKind, "runs_on_gpu", True)
    monkeypatch.setattr(embedded.EmbeddedKind, "takes_deltas", lambda *_: False)
    given = ["cluster={mode: colocated, num_train_nodes: 2}", *changes]
    message = refused(capsys, "plan", "run.yaml", *(word for change in given for word in ("--set", change)))
    assert all(word in message for word in words), message


def test_mistakes_name_the_line_of_the_file(here, capsys):
    text = Path("run.yaml").read_text()
    Path("run.yaml").write_text(text.replace("num_samples: 2", "gpus_per_engine: 4\n  num_samples: 2"))
    assert "run.yaml:9: rollout.gpus_per_engine" in refused(capsys, "plan", "run.yaml")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["data.0.path", "train.jsonl is empty"]),
        (b"\n \n", ["data.0.path", "train.jsonl is empty"]),
        (b'{"prompt": "1", "answer": 1}\n{"prompt": "1", "ans', ["train.jsonl:2", "not valid JSON", '"ans']),
        (b'{"prompt": "1", "answer": 1}\n\n[1]\n', ["train.jsonl:3", "not a JSON object", "[1]"]),
        (b"\x7fELF\0\0\0\n", ["train.jsonl:1", "binary"]),
        (b'{"prompt": "\xff", "answer": 1}\n', ["train.jsonl:1", "not valid JSON"]),
        (b'{"prompt": "1"}\n', ["train.jsonl:1", "no `answer`", "keys: prompt"]),
        (b'{"answer": "1"}\n', ["train.jsonl:1", "neither `messages` nor `prompt`"]),
        (b'{"prompt": "1", "messages": [], "answer": "1"}\n', ["train.jsonl:1", "both"]),
        (b'{"prompt": 1, "answer": "1"}\n', ["train.jsonl:1", "`prompt` is 1"]),
        (b'{"messages": [], "answer": "1"}\n', ["train.jsonl:1", "`messages` is []"]),
        (b'{"messages": "hi", "answer": "1"}\n', ["train.jsonl:1", "'hi'"]),
        (b'{"messages": [{"role": "user"}], "answer": "1"}\n', ["train.jsonl:1", "messages[0]", "content"]),
        (b'{"messages": [{"role": "usr", "content": ""}], "answer": 1}', ["messages[0]", "'usr'", "system, user"]),
        (b'{"messages": [{"role": "user", "content": [1]}], "answer": 1}', ["messages[0]", "object of texts"]),
        (b'{"prompt": "1", "answer": 1, "metadata": 3}', ["train.jsonl:1", "`metadata` is 3"]),
    ],
)
def test_mistakes_in_data(here, capsys, data, words):
    Path("train.jsonl").write_bytes(data)
    message = refused(capsys, "submit", "run.yaml")
    assert all(word in message for word in words), message


def test_data_that_is_a_folder(here, capsys):
    assert "is a folder" in refused(capsys, "submit", "run.yaml", "--set", "data.0.path=model")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("config.json", None, ["config.json", "does not exist"]),
        ("config.json", b"{", ["config.json", "cannot be read as JSON"]),
        ("config.json", b"[]", ["config.json", "not a JSON object"]),
        ("config.json", b"{}", ["config.json", "model_type"]),
        ("model.safetensors", None, ["no weights"]),
        ("model.safetensors", b"", ["(0 bytes)", "no safetensors file"]),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", ["no safetensors file"]),
        ("model.safetensors", safetensors()[:-1], ["its header says"]),
        ("model.safetensors", b"\2\0\0\0\0\0\0\0{}", ["holds no tensors"]),
        ("model.safetensors.index.json", b'{"weight_map": {"w": "b.safetensors"}}', ["b.safetensors"]),
        ("tokenizer.json", None, ["tokenizer.json", "does not exist"]),
        ("tokenizer_config.json", b"{}", ["no chat template"]),
    ],
)
def test_mistakes_in_the_model_folder(here, capsys, name, data, words):
    file = here / "model" / name
    file.unlink(missing_ok=True)
    if data is not None:
        file.write_bytes(data)
    message = refused(capsys, "submit", "run.yaml")
    assert "run.yaml:4: models.policy.path" in message
    assert all(word in message for word in words), message


def test_more_gpus_than_there_are(here, capsys, tmp_path):
    Path("gpus.yaml").write_text("name: gpus\ngpus_per_node: 512\n")
    message = refused(capsys, "submit", "run.yaml", "--site", "gpus.yaml")
    assert "512 GPUs each need 1024 GPUs, this machine has" in message and "lower gpus_per_node" in message


def test_a_site_that_forgot_to_say_that_it_has_slurm(here, capsys):
    """Without a word of its own the run would start on the login node."""
    Path("big.yaml").write_text("name: big\nslurm: {partition: gpu}\n")
    assert "site big: scheduler: is local, the default" in refused(capsys, "submit", "run.yaml", "--site", "big.yaml")


def test_gpus_are_counted_by_device_files(tmp_path):
    assert site.num_gpus(tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert site.num_gpus(tmp_path) == 3
    amd = tmp_path / "amd"
    (amd / "dri").mkdir(parents=True)
    for name in ("kfd", "dri/renderD128", "dri/renderD129", "dri/card0"):
        (amd / name).touch()
    assert site.num_gpus(amd) == 2
    (amd / "kfd").unlink()
    assert site.num_gpus(amd) == 0, "render nodes without the compute driver are other graphics cards"


def test_a_mask_of_gpus_is_kept(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert site.visible_gpus() == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a")
    with pytest.raises(ConfigError, match="by number"):
        site.visible_gpus()


def test_deterministic_needs_the_embedded_engine(here, monkeypatch):
    loaded = read_run("run.yaml", ["deterministic=true"])
    check.everything(loaded, SiteConfig(name="local"))
    (here / "other_engine.py").write_text("import msgspec\nclass Config(msgspec.Struct): pass\nbuild = None\n")
    monkeypatch.syspath_prepend(here)
    (here / "outside").mkdir()
    (here / "other_engine.py").rename(here / "outside" / "engine.py")
    with pytest.raises(ConfigError, match=r"'outside\.engine' does not repeat"):
        check.everything(
            read_run("run.yaml", ["deterministic=true", "rollout.engine=outside.engine"]), SiteConfig(name="x")
        )


def test_warnings_do_not_stop_a_run(here, capsys):
    Path("held.jsonl").write_text(Path("train.jsonl").read_text() + '{"prompt": "new", "answer": 1}\n')
    sets = ["--set", "rollout.num_samples=1", "--set", "rollout.num_prompts=50", "--set", "cluster.num_spare_nodes=1"]
    assert cli.main(["plan", "run.yaml", *sets]) == 0
    err = capsys.readouterr().err
    assert "--set: cluster.num_spare_nodes is 1, but one machine has no nodes to lose" in err
    assert "--set: rollout.num_samples is 1" in err
    assert "only 10 different prompts" in err
    assert "10 of 11 prompts of 'held' are in the training data" in err
    assert err.count("warning: ") == 4


def test_models_beside_the_policy(here, capsys):
    """A teacher whose vocabulary is another may score sampled tokens, but not be compared with as a whole."""
    shutil.copytree("model", "other")
    Path("other/config.json").write_text('{"model_type": "qwen3", "vocab_size": 9}')
    (here / "other/tokenizer_config.json").unlink()
    teacher = ["--set", "models.teacher={path: other}", "--set", "rollout.num_samples=1"]
    assert cli.main(["plan", "run.yaml", *teacher, "--set", "algorithm.name=distill"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["plan", "run.yaml", *teacher, "--set", "algorithm.name=ppo"]) == 0
    assert "--set: models.teacher is given, but ppo" in capsys.readouterr().err
    message = refused(
        capsys, "submit", "run.yaml", *teacher, "--set", "algorithm={name: distill, options: {kind: jsd}}"
    )
    assert "models.teacher.path" in message and "vocab_size is 9" in message
    cut = ("--set", "trainer={kind: megatron, parallel: {tensor: 2}}", "--site", "slots.yaml")
    Path("slots.yaml").write_text("name: slots\ncpu_slots_per_node: 4\n")
    Path("other/config.json").write_text('{"model_type": "qwen3", "num_attention_heads": 3}')
    message = refused(capsys, "submit", "run.yaml", *teacher, *cut, "--set", "algorithm.name=distill")
    assert "trainer.parallel.tensor" in message and "3 attention heads" in message


JUDGE = ("models.judge={path: model}", "rollout.sets=[{model: judge}]", "site=slots.yaml")
EXTERNAL = ("models.judge={path: model}", "rollout.sets=[{model: judge, external: ['http://far:30000']}]")
ASKING = ("data.0.reward=judge",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (ASKING, ["data.0.reward", "'judge' asks the judge", "rollout.sets: [{model: judge}]", "models.judge"]),
        (
            (*JUDGE, "data.0={path: train.jsonl, reward: judge, reward_options: {model: critic}}"),
            ["asks the critic", "one of: judge, teacher"],
        ),
        (JUDGE[1:], ["models.judge", "is not given", "judge: {path: ...}"]),
        (JUDGE[:2], ["rollout.sets", "take 1", "1 CPU slots", "an engine of the policy needs 1"]),
        ((*JUDGE, "rollout.sets=[{model: judge}, {model: judge}]"), ["rollout.sets.1.model", "two sets of the judge"]),
        ((*JUDGE, "rollout.sets.0.model=critic"), ["rollout.sets.0.model", "'critic'", "one of: judge, teacher"]),
        ((*JUDGE, "rollout.sets.0.engine=sglang"), ["rollout.sets.0.engine_options", "has no package sglang"]),
        ((*JUDGE, "rollout.sets.0.engine=embeded"), ["rollout.sets.0.engine", "did you mean 'embedded'"]),
        ((*JUDGE, "rollout.sets.0.engine_options={slot: 1}"), ["rollout.sets.0.engine_options.slot", "'slots'"]),
        ((*JUDGE, "models.judge.path=bare"), ["models.judge.path", "no weights"]),
        ((*JUDGE, "cluster.num_rollout_nodes=0"), ["cluster.num_rollout_nodes", "external"]),
        (
            (*JUDGE, "cluster.num_rollout_nodes=0", "rollout.external=['http://far:30000']"),
            ["rollout.sets", "the judge's engines need rollout nodes"],
        ),
        ((*EXTERNAL, "rollout.sets.0.external=['far:30000']"), ["external", "'far:30000'", "http://10.0.0.7:30000"]),
        ((*EXTERNAL, "deterministic=true"), ["rollout.sets.0.external", "nobody knows", "deterministic: false"]),
        ((*EXTERNAL, "rollout.sets.0.token_file=none"), ["rollout.sets.0.token_file", "none cannot be read"]),
        ((*EXTERNAL, "rollout.sets.0.token_file=run.yaml"), ["rollout.sets.0.token_file", "others can read", "chmod"]),
        (("rollout.external=['http://far:30000']", "cluster.mode=colocated"), ["rollout.external", "mode: split"]),
        (("rollout.external=['http://far:30000']", "sync.channel=ipc"), ["sync.channel", "engines on other nodes"]),
    ],
)
def test_engines_of_other_models_and_of_other_people(here, capsys, changes, words):
    Path("slots.yaml").write_text("name: slots\ncpu_slots_per_node: 2\n")
    shutil.copytree("model", "bare")
    Path("bare/model.safetensors").unlink()
    message = refused(capsys, "plan", "run.yaml", *(word for change in changes for word in ("--set", change)))
    assert all(word in message for word in words), message
    assert "fix: " in message


def test_models_that_are_served_are_shown_in_the_plan(here, capsys):
    """Of one that somebody else serves only the tokenizer is needed."""
    Path("slots.yaml").write_text("name: slots\ncpu_slots_per_node: 2\n")
    Path("token").write_text("secret\n")
    Path("token").chmod(0o600)
    shutil.copytree("model", "bare")
    Path("bare/model.safetensors").unlink()
    Path("bare/config.json").unlink()
    external = "{model: teacher, external: ['http://far:30000'], token_file: token}"
    changes = (*JUDGE, *ASKING, "models.teacher={path: bare}", f"rollout.sets=[{{model: judge}}, {external}]")
    assert cli.main(["plan", "run.yaml", *(word for change in changes for word in ("--set", change))]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    table = out.split("engine  model ")[1].split("environment")[0]
    rows = [row.split() for row in table.splitlines()[1:] if row]
    assert rows == [
        ["0", "policy", "local-1", "cpu"],
        ["1", "judge", "local-1", "cpu"],
        ["2", "teacher", "local-1", "http://far:30000"],
    ]
    assert cli.main(["plan", "run.yaml", "--set", JUDGE[0]]) == 0
    assert "--set: models.judge is given, but no set of rollout.sets serves it" in capsys.readouterr().err


def test_the_same_prompt_is_recognised_in_both_spellings(here, capsys):
    row = {"messages": [{"content": "3+1", "role": "user"}], "answer": "4"}
    Path("held.jsonl").write_text(json.dumps(row))
    assert cli.main(["plan", "run.yaml"]) == 0
    assert "1 of 1 prompts of 'held'" in capsys.readouterr().err


def test_a_plugin_that_cannot_be_imported_is_the_users_to_mend(here, capsys, monkeypatch):
    (here / "broken_rewards").mkdir()
    (here / "broken_rewards/syntax.py").write_text("def build(options)\n")
    monkeypatch.syspath_prepend(here)
    message = refused(capsys, "submit", "run.yaml", "--set", "data.0.reward=broken_rewards.syntax")
    assert "data.0.reward" in message and "SyntaxError" in message and "syntax.py, line 1" in message


def test_data_that_anybody_can_write_is_refused(here, capsys):
    (here / "train.jsonl").chmod(0o666)
    message = refused(capsys, "submit", "run.yaml")
    assert "can be written by anybody" in message and "chmod o-w" in message
