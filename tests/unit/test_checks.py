"""What is checked before anything is started: each mistake is one message, exit code 2, and no run folder."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from launcher import cli, machine, runs
from launcher.checks.run import check_run
from runtime.errors import ConfigError
from runtime.load import read_run
from runtime.rollout.engines import embedded
from runtime.site import SiteConfig
from tests.unit.inputs import safetensors


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
        (
            "rollout.gpus_per_engine=2",
            ["rollout.gpus_per_engine", "2, but a node of site 'local' has 1 CPU slot\n", "at most 1\n"],
        ),
        ("trainer.num_updates=9", ["trainer.num_updates", "9", "8 samples", "lower it"]),
        ("data=[]", ["--set: data", "is empty"]),
        ("evaluation.sets=[{path: held.jsonl}, {path: held.jsonl}]", ["evaluation.sets.1.name", "'held'", "`name`"]),
        ("site=locl", ["'locl'", "did you mean 'local'"]),
        ("data.0.path=trian.jsonl", ["data.0.path", "trian.jsonl", "did you mean 'train.jsonl'"]),
        ("models.policy.path=nowhere", ["models.policy.path", "nowhere", "does not exist"]),
        ("models.policy.path=modle", ["models.policy.path", "does not exist", "did you mean 'model'?"]),
        ("models.policy.path=Qwen/Qwen3-8B", ["models.policy.path", "does not exist", "hf download Qwen/Qwen3-8B"]),
        ("models.policy.path=models/quickstart", ["does not exist", "python -m runtime.quickstart --out models/qu"]),
        ("evaluation={interval: 5}", ["--set: evaluation.interval", "is 5", "no evaluation.sets"]),
        ("runs_dir=/dev/null/runs", ["runs_dir", "/dev/null is not a folder", "choose a folder"]),
        ("models.policy.path=run.yaml", ["models.policy.path", "is a file, not a folder"]),
        ("trainer.optimizer.beta1=1.0", ["trainer.optimizer.beta1", "1.0"]),
        ("algorithm.name=distill", ["models.teacher", "is not given", "distill learns from one"]),
        ("models.reference={path: nowhere}", ["models.reference.path", "nowhere", "does not exist"]),
        ("algorithm={name: ppo, options: {clip_high: none}}", ["options.clip_high", "cannot be 'none'", "a number"]),
        ("algorithm={name: ppo, options: {lam: 2.0}}", ["algorithm.options.lam", "2.0", "at most 1"]),
        ("sync.timeout_s=.inf", ["sync.timeout_s", "inf"]),
        ("rollout.sampling.top_k=-7", ["rollout.sampling.top_k", "-7"]),
        ("evaluation.sets.0.sampling={top_k: 0}", ["evaluation.sets.0.sampling", "top_k is 0", "write -1 for all"]),
        ("rollout.engine_options={max_length: 1}", ["rollout.engine_options", "max_length is 1", "at least 2 tokens"]),
        ("sync={channel: disk, folder: /proc/x}", ["sync.folder", "/proc cannot be written to", "choose a folder"]),
        ("algorithm.options={kl: .inf}", ["algorithm.options.kl", "cannot be inf", "a finite number"]),
        ("algorithm.options={bounds: [2, 0.5]}", ["algorithm.options", "bounds [2.0, 0.5]", "below the second"]),
        ("algorithm.options={bounds: [0.5, .nan]}", ["algorithm.options.bounds.1", "cannot be nan"]),
        ("algorithm.name=runtime.rollout.rewards.numeric", ["algorithm.name", "is no algorithm", "no `needs`"]),
        ("rollout.engine=runtime.trainer.algorithms.ppo", ["rollout.engine", "is no engine", "no `runs_on_gpu`"]),
        ("seed=9223372036854775808", ["--set: seed", "an integer of 64 bits"]),
        ('runs_dir="a\\0b"', ["--set: runs_dir: 'a\\x00b' is no path", "leave the NUL out"]),
        ("learning_rate=1e-5", ["learning_rate", "unknown key", "did you mean trainer.optimizer.learning_rate or"]),
        ("num_steps=1:30", ["num_steps", "cannot be '1:30'", "an integer"]),
        ("runs_dir=$NO_SUCH/runs", ["--set: runs_dir: '$NO_SUCH/runs'", "$NO_SUCH is not set", "write the path out"]),
        ("runs_dir=~no_such_user/runs", ["--set: runs_dir: '~no_such_user/runs'", "write the path out"]),
        (f"runs_dir={'a' * 300}", ["runs_dir", "File name too long"]),
        (f"models.policy.path={'a' * 300}", ["File name too long", "check the path"]),
        ("data.0.path=/dev/zero", ["data.0.path", "/dev/zero is a pipe or a device", "a file of JSON lines"]),
        ("num_steps=1000000000001", ["--set: num_steps", "at most 1e+12"]),
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
        (["site=slurm.yaml", "cluster.mode=split"], ["rollout.engine_options", "two versions of NCCL"]),
        (["site=expandable.yaml", "sync.channel=disk"], ["site big: env.PYTORCH_CUDA_ALLOC_CONF", "memory back"]),
    ],
)
def test_channels_that_do_not_serve_a_colocated_run(here, capsys, monkeypatch, changes, words):
    Path("slurm.yaml").write_text(
        "{scheduler: slurm, name: big, gpus_per_node: 2, slurm: {gpu_request: gpus-per-node, time: '10:00:00'}}"
    )
    expandable = "{scheduler: slurm, env: {PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True'},"
    Path("expandable.yaml").write_text(Path("slurm.yaml").read_text().replace("{scheduler: slurm,", expandable))
    monkeypatch.setattr(embedded.EmbeddedKind, "runs_on_gpu", True)
    monkeypatch.setattr(embedded.EmbeddedKind, "takes_deltas", lambda *_: False)

    def of_two_versions(self, where):
        raise ConfigError(where, "two versions of NCCL", "install one")

    monkeypatch.setattr(embedded.EmbeddedKind, "check_group", of_two_versions)
    given = ["cluster={mode: colocated, num_train_nodes: 2}", *changes]
    message = refused(capsys, "plan", "run.yaml", *(word for change in given for word in ("--set", change)))
    assert all(word in message for word in words), message


def test_mistakes_name_the_line_of_the_file(here, capsys):
    text = Path("run.yaml").read_text()
    Path("run.yaml").write_text(text.replace("num_samples: 2", "gpus_per_engine: 4\n  num_samples: 2"))
    assert "run.yaml:9: rollout.gpus_per_engine" in refused(capsys, "plan", "run.yaml")


def test_links_that_lead_nowhere_are_said_to_be_links(here, capsys):
    """As a copy of a model from a cache of downloads has them."""
    Path("model/model.safetensors").unlink()
    Path("model/model.safetensors").symlink_to("../blobs/1f")
    message = refused(capsys, "submit", "run.yaml")
    assert "model.safetensors is a link to ../blobs/1f, which does not exist" in message and "cp -rL" in message
    Path("held.jsonl").unlink()
    Path("held.jsonl").symlink_to("gone.jsonl")
    Path("model/model.safetensors").unlink()
    Path("model/model.safetensors").write_bytes(safetensors())
    assert "held.jsonl is a link to gone.jsonl, which does not exist" in refused(capsys, "submit", "run.yaml")
    Path("run.yaml").unlink()
    Path("run.yaml").symlink_to("run.yaml")
    assert "run.yaml: cannot be read: Too many levels" in refused(capsys, "submit", "run.yaml")


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
        ("model.safetensors.index.json", b'{"weight_map": null}', ["index.json says of no tensor"]),
        ("config.json", b"[" * 100_000, ["config.json", "cannot be read as JSON"]),
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
    assert machine.num_gpus(tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert machine.num_gpus(tmp_path) == 3
    amd = tmp_path / "amd"
    (amd / "dri").mkdir(parents=True)
    for name in ("kfd", "dri/renderD128", "dri/renderD129", "dri/card0"):
        (amd / name).touch()
    assert machine.num_gpus(amd) == 2
    (amd / "kfd").unlink()
    assert machine.num_gpus(amd) == 0, "render nodes without the compute driver are other graphics cards"


def test_a_mask_of_gpus_is_kept(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.visible_gpus() == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a")
    with pytest.raises(ConfigError, match="by number"):
        machine.visible_gpus()


def test_deterministic_needs_the_embedded_engine(here, monkeypatch):
    loaded = read_run("run.yaml", ["deterministic=true"])
    check_run(loaded, SiteConfig(name="local"))
    (here / "other_engine.py").write_text("from runtime.rollout.engines.embedded import Config, build\n")
    monkeypatch.syspath_prepend(here)
    (here / "outside").mkdir()
    (here / "other_engine.py").rename(here / "outside" / "engine.py")
    with pytest.raises(ConfigError, match=r"'outside\.engine' does not repeat"):
        check_run(read_run("run.yaml", ["deterministic=true", "rollout.engine=outside.engine"]), SiteConfig(name="x"))


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
    words = ("trainer.parallel.tensor", "2 does not divide", "3 attention heads", f"models.teacher ({here}/other)")
    assert all(word in message for word in (*words, "use a factor, or choose another model")), message
    assert cli.main(["plan", "run.yaml", *teacher, *cut]) == 0, "what is not loaded is not cut"
    capsys.readouterr()
    Path("other/config.json").write_text('{"model_type": "gemma3_text"}')
    message = refused(capsys, "submit", "run.yaml", *teacher, *cut, "--set", "algorithm.name=distill")
    assert all(word in message for word in ("trainer.kind", f"models.teacher ({here}/other)", "'gemma3_text'", "fsdp"))
    Path("model/config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 4}')
    Path("other/config.json").write_text('{"model_type": "qwen3"}')
    experts = (*cut[:1], "trainer={kind: megatron, parallel: {expert: 2}}", *cut[2:], "--set", "algorithm.name=distill")
    assert cli.main(["plan", "run.yaml", *teacher, *experts]) == 0, "this teacher has none"


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
        (JUDGE[:2], ["rollout.sets", "take 1", "1 CPU slot,", "an engine of the policy needs 1"]),
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
        ((*EXTERNAL, "rollout.sets.0.token_file=two"), ["sets.0.token_file", "two holds 2 words", "nothing else"]),
        (("rollout.external=['http://far:1', 'http://FAR:01']",), ["rollout.external.1", "is there already", "once"]),
        (("rollout.external=['http://::1:30000']",), ["rollout.external.0", "http://10.0.0.7:30000"]),
        (("rollout.external=['http://[::1]:99999']",), ["rollout.external.0", "no address: Port out of range"]),
        (("rollout.external=['http://[::1]:0']",), ["rollout.external.0", "there is no port 0"]),
        ((*EXTERNAL, "rollout.external=['http://far:30000']"), ["sets.0.external.0", "already", "rollout.external.0"]),
        (("rollout.external=['http://far:30000']", "cluster.mode=colocated"), ["rollout.external", "mode: split"]),
        (("rollout.external=['http://far:30000']", "sync.channel=ipc"), ["sync.channel", "engines on other nodes"]),
    ],
)
def test_engines_of_other_models_and_of_other_people(here, capsys, changes, words):
    Path("slots.yaml").write_text("name: slots\ncpu_slots_per_node: 2\n")
    shutil.copytree("model", "bare")
    Path("bare/model.safetensors").unlink()
    Path("two").write_text("one\ntwo\n")
    Path("two").chmod(0o600)
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


def test_a_plugin_that_cannot_be_imported_is_the_users_to_mend(here, capsys, monkeypatch):
    (here / "broken_rewards").mkdir()
    (here / "broken_rewards/syntax.py").write_text("def build(options)\n")
    monkeypatch.syspath_prepend(here)
    message = refused(capsys, "submit", "run.yaml", "--set", "data.0.reward=broken_rewards.syntax")
    assert "data.0.reward" in message and "SyntaxError" in message and "syntax.py, line 1" in message


def test_a_run_folder_that_cannot_be_made_leaves_nothing(here, capsys, monkeypatch):
    def full(run, status):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runs, "write_status", full)
    assert cli.main(["submit", "run.yaml"]) == 2
    assert "runs_dir: cannot make " in (err := capsys.readouterr().err) and "No space left on device" in err
    assert list(Path("runs").iterdir()) == []
