"""What `submit` says of several mistakes at once, of plugins of a wrong shape, and of model folders that hold what no
model is made of: one message, exit code 2, and nothing raised."""

import json
import os
import struct
from pathlib import Path

import pytest

from launcher import cli, runs
from launcher.checks import folders
from runtime.errors import ConfigError
from tests.unit.inputs import safetensors
from tests.unit.test_checks import refused

# ---- several at once ---------------------------------------------------------------------------------------------


def told(message: str) -> list[str]:
    """The lines of a message of several mistakes, without the folder."""
    head, *lines = message.splitlines()
    assert head == f"error: {len(lines)} mistakes"
    return [line.strip().replace(f"{Path.cwd()}/", "") for line in lines]


def test_all_mistakes_of_a_config_are_told_with_their_lines(here, capsys):
    text = Path("run.yaml").read_text().replace("num_steps: 4", "num_steps: many").replace("num_samples", "num_sample")
    Path("run.yaml").write_text(
        text + "trainer:\n  max_tokens: 0\n  optimizr: {}\n  optimizer: [1]\n  lora: {rank: x}\n"
    )
    Path("site.yaml").write_text("name: site\nslurm: {time: soon}\nenv: {A: true, B-C: x}\n")
    message = refused(capsys, "submit", "run.yaml", "--set", "limits.start_s=.inf", "--set", "a..b=1")
    assert told(message) == [
        "--set a..b=1: is not of the form dotted.key=value; fix: for example: --set rollout.num_prompts=16",
        "run.yaml:2: num_steps: cannot be 'many'; fix: give an integer of at least 0 and of at most 1e+12",
        "run.yaml:9: rollout.num_sample: unknown key (value 2); fix: did you mean 'num_samples'?",
        "--set: limits.start_s: cannot be inf; fix: give a finite number",
        "run.yaml:15: trainer.max_tokens: cannot be 0; fix: give an integer of at least 1 and of at most 1e+12",
        "run.yaml:16: trainer.optimizr: unknown key (value {}); fix: did you mean 'optimizer'?",
        "run.yaml:17: trainer.optimizer: is a list; fix: give a section (`key: value` lines)",
        "run.yaml:18: trainer.lora.rank: cannot be 'x'; fix: give an integer of at least 1 and of at most 65536",
    ]
    both = told(refused(capsys, "submit", "run.yaml", "--site", "site.yaml"))
    assert [line.partition(": ")[2].partition(":")[0] for line in both[-3:]] == ["env.A", "env.B-C", "slurm.time"]
    assert len(both) == 9


def test_all_of_what_stands_alone_is_looked_at(here, capsys):
    """Plugins, options, files and folders do not follow from each other."""
    Path("held.jsonl").write_text("no row\n")
    Path("model/config.json").write_text("{")
    changes = (
        "rollout.engine=embeded",
        "algorithm.options={clip_hig: 1, kl: x}",
        "data.0.reward=exact",
        "runs_dir=/proc",
    )
    lines = told(refused(capsys, "plan", "run.yaml", *(word for change in changes for word in ("--set", change))))
    starts = [
        "--set: algorithm.options.clip_hig",
        "--set: algorithm.options.kl",
        "--set: rollout.engine",
        "--set: runs_dir",
    ]
    starts += ["run.yaml:4: models.policy.path", "--set: data.0.reward", "held.jsonl:1"]
    assert len(lines) == len(starts) and all(map(str.startswith, lines, starts)), lines


def test_a_site_that_a_config_names_is_blamed_at_its_key(here, capsys):
    assert "--set: site: no/such.yaml no such file" in refused(capsys, "plan", "run.yaml", "--set", "site=no/such.yaml")
    assert "error: /dev/null: is a device" in refused(capsys, "plan", "/dev/null")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("cluster.num_train_nodes=1000001", ["cluster.num_train_nodes", "at most 1e+06"]),
        ("cluster.num_train_nodes=1000000", ["cluster", "1000001 nodes", "too many devices"]),
        ("rollout.reward_workers=1025", ["rollout.reward_workers", "at most 1024"]),
        ("limits.heartbeat_s=1e300", ["limits.heartbeat_s", "at most 1e+09"]),
        ("data.0.path=pipe", ["data.0.path", "a pipe or a device"]),
        ("rollout.token_file=pipe", ["rollout.token_file", "pipe is no file"]),
        ('rollout.token_file="a\\0b"', ["--set: token_file", "is no path"]),
        (f"name={'a' * 100_000}", ["name: cannot be 'aaa", "aaa...", "text that matches"]),
        ("rollout.sampling.temperature=1e-9", ["rollout.sampling", "temperature is 1e-09", "0 for greedy"]),
        ("trainer.lora={rank: 1000000}", ["trainer.lora.rank", "at most 65536"]),
        ("trainer.optimizer.eps=1e-40", ["trainer.optimizer.eps", "at least 1e-30"]),
        ("site=generic-cuda", ["rollout", "'embedded' runs on CPUs", "fix: write rollout.engine: sglang; or in the"]),
        ("site=nic.yaml", ["fabric_interface", "no network interface 'nic7'", "name one of: "]),
        ("site=nul.yaml", ["env.A", "holds a NUL"]),
        ("site=lines.yaml", ["slurm.partition", "a line break"]),
    ],
)
def test_values_that_no_run_can_have(here, capsys, change, words):
    os.mkfifo("pipe")
    Path("nic.yaml").write_text("name: nic\nfabric_interface: nic7\n")
    Path("nul.yaml").write_text('name: nul\nenv: {A: "x\\0"}\n')
    Path("lines.yaml").write_text('name: nl\nscheduler: slurm\nslurm: {partition: "gpu\\nx", setup: ["a\\nb"]}\n')
    message = refused(capsys, "plan", "run.yaml", "--set", change)
    assert all(word in message for word in words) and len(message) < 600, message


def test_arguments_that_a_command_does_not_know(capsys):
    said = {
        ("submit", "run.yaml", "--set", "num_steps", "5"): "write it with an equals sign: --set num_steps=5",
        ("plan", "--set", "num_steps", "5", "run.yaml"): "write it with an equals sign: --set num_steps=5",
        ("plan", "run.yaml", "num_steps=5"): "did you mean --set num_steps=5?",
        ("submit", "run.yaml", "--dryrun"): "unknown: --dryrun; did you mean --dry-run?",
        ("status", "a", "b"): "unknown: b\n",
    }
    for argv, words in said.items():
        with pytest.raises(SystemExit):
            cli.main(argv)
        assert words in (err := capsys.readouterr().err) and f"usage: python -m launcher {argv[0]} " in err


def test_runs_that_are_looked_for_in_another_folder(run):
    def refusal(name: str, folder: str) -> str:
        with pytest.raises(ConfigError) as caught:
            runs.find(name, Path(folder))
        return str(caught.value)

    for name in ("runs/ti", f"runs/{run.name[:-2]}", f"{run.parent}/tiny"):
        assert runs.find(name, Path("elsewhere")) == run
    assert refusal("", "elsewhere").startswith(
        f"RUN: there are no runs in {Path.cwd()}/elsewhere, which does not exist"
    )
    assert f"there are no runs in {Path.cwd()}\n  fix: did you mean --runs {run.parent}? " in refusal("tiny", ".")
    assert refusal("runs/other", ".").startswith("RUN other: no such run in runs")


def test_values_that_may_not_be_meant_so(here, capsys):
    def warned(*changes: str) -> list[str]:
        assert cli.main(["plan", "run.yaml", *(word for change in changes for word in ("--set", change))]) == 0
        return capsys.readouterr().err.splitlines()

    Path("slots.yaml").write_text("name: slots\ncpu_slots_per_node: 100000\n")
    assert warned() == []
    (told,) = warned("site=slots.yaml")
    assert told.startswith("warning: site slots: cpu_slots_per_node is 100000, each a process of its own, but this ")
    (told,) = warned("limits.heartbeat_s=29")
    assert told == "warning: --set: limits.heartbeat_s is 29: under 30 s healthy ranks may be declared lost"
    stale = "staleness.max_versions=1"
    (told,) = warned(stale)
    assert told.startswith("warning: --set: staleness.max_versions is 1, but nothing corrects for it: write algorithm.")
    assert warned(stale, "algorithm.options={correction: tis}") == []
    short = "evaluation.sets.0.sampling={max_new_tokens: 9}"
    (told,) = warned("rollout.engine_options={max_length: 64}", "rollout.sampling.max_new_tokens=64", short)
    assert told.startswith(
        "warning: --set: rollout.sampling.max_new_tokens is 64, but rollout.engine_options.max_length"
    )
    assert warned("rollout.engine_options={max_length: 64}", "rollout.sampling.max_new_tokens=63", short) == []
    Path("model/config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 200}')
    long = "evaluation.sets.0.sampling={max_new_tokens: 300}"
    (told,) = warned("rollout.sampling.max_new_tokens=63", long)
    words = "evaluation.sets.0.sampling.max_new_tokens is 300, but the policy's max_position_embeddings is 200"
    assert told.startswith(f"warning: --set: {words}")


# ---- plugins -----------------------------------------------------------------------------------------------------

ENGINE = "from runtime.rollout.engines.embedded import Config, EmbeddedKind\nclass Mine(EmbeddedKind):\n    "
ALGORITHM = "from runtime.trainer.algorithms.grpo import Config, Grpo\nclass Mine(Grpo):\n    "
PLAIN = "import msgspec\nclass Config(msgspec.Struct): pass\nclass Mine:\n    def __init__(self, options): pass\n    "
OPTIONS = "import msgspec\nclass Config(msgspec.Struct):\n    "
INIT = "def __init__(self, options):\n        super().__init__(options)\n        "


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("engine", f"{ENGINE}splits = 5", ["its `splits` is 5, neither True nor False"]),
        ("engine", f"{ENGINE}check = None", ["its `check` is None, no function"]),
        ("engine", f"{ENGINE}check = lambda self: []", ["its `check` cannot be called with (where)"]),
        ("engine", f"{ENGINE}async def client(self, **_): pass", ["its `client` is async"]),
        ("engine", f"{ENGINE}client = lambda self, url: 0", ["its `client` cannot be", "(url=, token=, timeout_s=)"]),
        ("engine", f"{ENGINE}splits = True", ["its `fed_by` is None, no function"]),
        ("engine", f"{ENGINE}check = lambda self, where: [5]", ["`check` of 'mine.", "returned [5]", "Expected `str`"]),
        ("engine", f"{ENGINE}check = lambda self, where: 1 / 0", ["`check` of 'mine.", "ZeroDivisionError"]),
        ("engine", f"{ENGINE}splits = property(lambda self: 1 / 0)", ["what engine 'mine.", "ZeroDivisionError"]),
        ("algorithm", f"{ALGORITHM}advantages = 5", ["its `advantages` is 5, no function"]),
        ("algorithm", f"{ALGORITHM}refine = lambda self: 5", ["its `refine` cannot be called with (share, all_sum)"]),
        ("algorithm", f"{ALGORITHM}advantages = lambda self, r: None", ["`advantages` of", "TypeError"]),
        ("algorithm", f"{ALGORITHM}advantages = lambda self, r: [1.0]", ["gives [1.0] for 2 rewards [1.0, 0.0]"]),
        ("algorithm", f"{ALGORITHM}advantages = lambda self, r: [float('nan')] * len(r)", ["gives [nan, nan]"]),
        ("algorithm", f"{ALGORITHM}{INIT}self.needs = ['old']", ["its `needs` is ['old'], no frozenset"]),
        ("algorithm", f"{ALGORITHM}{INIT}self.needs = 5", ["its `needs` is 5, no frozenset"]),
        ("algorithm", f"{ALGORITHM}{INIT}self.losses = None", ["its `losses` is None, no dict of functions"]),
        ("algorithm", f"{ALGORITHM}{INIT}self.losses = {{'policy': 5}}", ["its loss of the policy is 5, no function"]),
        ("algorithm", f"{ALGORITHM}{INIT}self.losses = {{'x': max}}", ["no dict of functions by policy and critic"]),
        ("environment", f"{PLAIN}run = 5", ["its `run` is 5, no function"]),
        ("environment", f"{PLAIN}async def run(self): pass", ["its `run` cannot be called with (prompt, index, "]),
        ("reward", f"{PLAIN}score = []", ["its `score` is [], no function"]),
        ("reward", f"{PLAIN}pass\nMine.score = property(lambda self: 1 / 0)", ["ZeroDivisionError"]),
        ("reward", f"{OPTIONS}x: 'NoSuch' = 1\nMine = max", ["`Config` of", "NoSuch"]),
        ("reward", f"{OPTIONS}asks: int = 5\nMine = lambda options: lambda text, answer: 1.0", ["`asks` of"]),
    ],
)  # fmt: skip
def test_plugins_of_a_wrong_shape(here, capsys, request, kind, source, words):
    module = f"mine.case_{abs(hash(request.node.name))}"  # modules stay, also when their files are gone
    (here / "mine").mkdir()
    Path(f"{module.replace('.', '/')}.py").write_text(f"{source}\ndef build(options): return Mine(options)\n")
    key = {"engine": "rollout.engine", "algorithm": "algorithm.name"}.get(kind, f"data.0.{kind}")
    message = refused(capsys, "submit", "run.yaml", "--dry-run", "--set", f"{key}={module}")
    assert all(word in message for word in (key.rpartition(".")[0], *words, "fix: ")), message


def test_what_an_engine_says_of_itself_where_that_is_asked_for(here, capsys):
    (here / "mine").mkdir()
    Path("mine/deltas.py").write_text(
        f"{ENGINE}takes_deltas = lambda self, model: None\ndef build(options): return Mine(options)\n"
    )
    changes = ("--set", "rollout.engine=mine.deltas", "--set", "sync.channel=delta")
    assert "`takes_deltas` of 'mine.deltas' returned None" in refused(capsys, "plan", "run.yaml", *changes)


def test_a_max_length_of_another_meaning_is_left_to_its_plugin(here, capsys):
    (here / "mine").mkdir()
    Path("mine/lengths.py").write_text(
        "import msgspec\nfrom runtime.rollout.engines import embedded\nclass Config(msgspec.Struct):\n"
        "    max_length: str\ndef build(options): return embedded.build(embedded.Config())\n"
    )
    Path("model/config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 64}')
    changes = ("--set", "rollout.engine=mine.lengths", "--set", "rollout.engine_options.max_length=long")
    assert cli.main(["plan", "run.yaml", *changes]) == 0, capsys.readouterr().err


# ---- model folders -----------------------------------------------------------------------------------------------


def test_values_of_a_wrong_type_in_a_models_config(here):
    """As an int that is text, which would be found out when the model is built."""
    keys = ["model_type", "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
    keys += ["num_key_value_heads", "max_position_embeddings", "n_routed_experts", "rope_scaling", "eos_token_id"]
    keys += ["intermediate_size", "layer_types", "quantization_config", "text_config", "tie_word_embeddings", "dtype"]
    for key in keys:
        for value in (-0.5, [None], 10**30):
            inner = {"text_config": {key: value}} if key != "text_config" else {key: value}
            for config in ({key: value}, inner):
                Path("model/config.json").write_text(json.dumps({"model_type": "qwen3"} | config))
                with pytest.raises(ConfigError) as caught:
                    folders.check_weights("model", "here")
                assert caught.value.problem.startswith(f"model/config.json: {key}"), str(caught.value)
                shown = ("is a list", "has no value") if value == [None] else (str(value),)
                assert any(text in caught.value.problem for text in shown) and caught.value.fix


def test_all_wrong_values_of_a_models_config_are_told(here, capsys):
    Path("model/config.json").write_text('{"model_type": 5, "vocab_size": "x", "time_step_limit": [0.0, Infinity]}')
    lines = told(refused(capsys, "plan", "run.yaml"))
    assert [line.split("config.json: ")[1] for line in lines] == [
        "model_type cannot be 5; fix: give text (in quotes if it looks like a number), as in the original file",
        "vocab_size cannot be 'x'; fix: give an integer of at least 1 and of at most 1e+09, as in the original file",
    ]


HEAD = {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}


def weights(**changes) -> bytes:
    head = json.dumps({"w": HEAD | changes}).encode()
    return struct.pack("<Q", len(head)) + head + bytes(4)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("config.json", b'{"model_type": "x", "vocab_size": ' + b"9" * 5000 + b"}", ["cannot be read as JSON"]),
        ("config.json", None, ["config.json is a pipe"]),
        ("generation_config.json", b"[]", ["generation_config.json is not a JSON object"]),
        ("generation_config.json", b'{"eos_token_id": "x"}', ["eos_token_id cannot be 'x': Expected `int | array"]),
        ("tokenizer.json", b"{}", ["tokenizer.json: model is missing"]),
        ("tokenizer.json", b'{"model": {"vocab": 5}}', ["tokenizer.json: model.vocab"]),
        ("tokenizer.json", b'{"model": {"vocab": {"x": "y"}}}', ["model.vocab is a section (keys x): Expected `int`"]),
        ("tokenizer.json", b'{"model": {"vocab": []}, "added_tokens": [5]}', ["added_tokens.0 cannot be 5"]),
        ("tokenizer.json", b'{"model": {"vocab": [["y", 0]]}}', ["eos_token 'x' is no token of tokenizer.json"]),
        ("tokenizer_config.json", b'{"chat_template": 5}', ["tokenizer_config.json: chat_template"]),
        ("tokenizer_config.json", b'{"chat_template": "x", "eos_token": {}}', ["tokenizer_config.json: eos_token"]),
        ("tokenizer_config.json", b'{"chat_template": "x"}', ["eos_token None is no token"]),
        ("tokenizer_config.json", b'{"chat_template": "{% for m in messages %}"}', ["the chat template in", "line 1"]),
        ("tokenizer_config.json", b'{"chat_template": "{% if x %}\\n{{ m "}', ["the chat template in", "line 2"]),
        ("chat_template.jinja", b"\xff", ["chat_template.jinja cannot be read"]),
        ("chat_template.jinja", b" \n", ["no chat template"]),
        ("chat_template.jinja", None, ["chat_template.jinja is a pipe"]),
        ("model.safetensors", None, ["model.safetensors is a pipe"]),
        ("model.safetensors", weights(shape="x"), ["no safetensors file"]),
        ("model.safetensors", weights(data_offsets=[0]), ["no safetensors file"]),
        ("model.safetensors", weights(data_offsets=[0, "x"]), ["no safetensors file"]),
        ("model.safetensors", weights(shape=[1, 2]), ["says of w another shape"]),
        ("model.safetensors", weights(data_offsets=[2, 4]), ["says of w another shape"]),
    ],
)
def test_files_of_a_model_folder_that_are_damaged(here, capsys, name, data, words):
    file = here / "model" / name
    file.unlink(missing_ok=True)
    file.write_bytes(data) if data is not None else os.mkfifo(file)
    message = refused(capsys, "submit", "run.yaml")
    assert all(word in message for word in ("models.policy.path", *words, "fix: ")), message


def test_chat_templates_that_are_in_use_are_taken(here, capsys):
    """Marks of what an assistant wrote, and loops that are left early, are no part of Jinja itself."""
    source = "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    Path("model/chat_template.jinja").write_text(source)
    named = [{"name": "default", "template": source}, {"name": "tools", "template": "{{"}]
    assert cli.main(["plan", "run.yaml"]) == 0, capsys.readouterr().err
    Path("model/chat_template.jinja").unlink()
    Path("model/tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": {"content": "x"}}))
    Path("model/model.safetensors").write_bytes(safetensors())
    assert cli.main(["plan", "run.yaml"]) == 0, capsys.readouterr().err
