"""Reading configs: what comes out, and what each mistake is answered with."""

import contextlib
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import AlgorithmChoice, Limits, Optimizer, RunConfig, Trainer
from runtime.errors import ConfigError, Mistakes
from runtime.load import dump, load_run, load_site, read_run
from runtime.site import SiteConfig

BASE = """\
name: base
num_steps: 3
models:
  policy: {path: model}
data:
  - path: train.jsonl
rollout:
  num_prompts: 4
  num_samples: 2
"""


TEACHERS = BASE.replace("data:", "  teachers: {a: {path: x}, b: %s}\ndata:")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory beside a folder with a good config."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "base.yaml").write_text(BASE)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "configs"


def write(folder: Path, text: str | bytes, name: str = "run.yaml") -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def refusal(path: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    assert caught.value.fix, "a user's mistake is answered with a fix"
    return caught.value


# ---- what comes out ----------------------------------------------------------------------------------------------


def test_values_and_defaults(here):
    config = load_run(here / "base.yaml")
    assert (config.name, config.num_steps, config.rollout.num_samples) == ("base", 3, 2)
    assert config.trainer == Trainer()


def test_extends_merges_sections_and_replaces_lists(here):
    write(here, "extends: base.yaml\nrollout: {num_samples: 5}\ndata:\n  - {path: a}\n  - {path: b}\n", "middle.yaml")
    config = load_run(write(here, "extends: middle.yaml\nname: top\ntrainer: {optimizer: {clip_norm: 0.5}}\n"))
    assert (config.name, config.num_steps) == ("top", 3)
    assert (config.rollout.num_prompts, config.rollout.num_samples) == (4, 5)
    assert [Path(d.path).name for d in config.data] == ["a", "b"]
    assert config.trainer.optimizer == Optimizer(clip_norm=0.5)


def test_extends_is_relative_to_its_own_file(here):
    (here / "deep").mkdir()
    assert load_run(write(here / "deep", "extends: ../base.yaml\nseed: 4\n")).seed == 4


def test_overrides_reach_everywhere(here):
    sets = [
        "rollout.num_prompts=9",
        "data.0.name=x",
        "trainer.optimizer.learning_rate=1e-4",
        "algorithm.options={a: 1}",
    ]
    config = load_run(here / "base.yaml", [*sets, "deterministic=true", "evaluation.sets=[{path: e}]"])
    assert config.rollout.num_prompts == 9
    assert config.data[0].name == "x"
    assert config.trainer.optimizer.learning_rate == 1e-4
    assert config.algorithm == AlgorithmChoice(options={"a": 1})
    assert config.deterministic and len(config.evaluation.sets) == 1
    named = load_run(here / "base.yaml", ["data.0.name=x", "data.0.name=", "models.policy.path=y"])
    assert named.data[0].name == ""


def test_anchors_and_merge_keys(here):
    extra = "evaluation:\n  sets:\n    - &first {path: a, name: a}\n    - {<<: *first, name: b}\n"
    config = load_run(write(here, BASE + extra))
    assert [(Path(s.path).name, s.name) for s in config.evaluation.sets] == [("a", "a"), ("a", "b")]


def test_paths_are_absolute_and_current_directory_wins(here):
    for folder in (here, Path.cwd()):
        (folder / "train.jsonl").touch()
    (here / "model").mkdir()
    config = load_run(here / "base.yaml")
    assert config.data[0].path == str(Path.cwd() / "train.jsonl")
    assert config.models.policy.path == str(here / "model")
    assert config.runs_dir == str(Path.cwd() / "runs")
    assert load_run(here / "base.yaml", ["data.0.path=none"]).data[0].path == str(Path.cwd() / "none")


def test_paths_may_name_the_home_folder_and_variables(here, monkeypatch):
    """runs_dir: ~/runs would make a folder called ~ in the current one."""
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setenv("SCRATCH", str(here / "scratch"))
    config = load_run(
        write(here, BASE + "runs_dir: $SCRATCH/runs\ncode_dir: ~/code\nsync: {channel: disk, folder: $SCRATCH/w}\n"),
        ["data.0.path=~/train.jsonl", "models.policy.path=$SCRATCH/model"],
    )
    found = [config.runs_dir, config.code_dir, config.sync.folder, config.data[0].path, config.models.policy.path]
    assert found == [str(here / p) for p in ("scratch/runs", "code", "scratch/w", "train.jsonl", "scratch/model")]


def test_a_time_needs_no_quotes(here):
    """YAML 1.1 reads it as a number of seconds."""
    site = write(here, "name: x\nscheduler: slurm\nslurm: {time: 12:30:00}\n")
    assert load_site(str(site)).slurm.time == "12:30:00" and "12:30:00" in dump(load_site(str(site)))
    assert load_site(str(site), ["time=1:00:00"]).slurm.time == "1:00:00"
    with pytest.raises(ConfigError, match=r"env\.A-B: is no name of a variable"):
        load_site(str(site), ["env={A-B: x}"])


def test_path_is_beside_the_file_that_names_it(here):
    (here / "deep").mkdir()
    (here / "train.jsonl").touch()
    config = load_run(write(here / "deep", "extends: ../base.yaml\n"))
    assert config.data[0].path == str(here / "deep/../train.jsonl")


INTEGERS = st.integers(-(2**63), 2**63 - 1)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False) | st.text()
OPTIONS = st.dictionaries(
    st.text(), st.recursive(SCALARS, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=5), max_size=4
)
NAMES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


@settings(deadline=None, max_examples=40)
@given(NAMES, INTEGERS, st.floats(0.0, 1e9), OPTIONS)
def test_dump_and_load_give_the_same_config(tmp_path_factory, name, seed, rate, options):
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(BASE)
    base = load_run(path)
    config = msgspec.structs.replace(
        base,
        name=name,
        seed=seed,
        trainer=Trainer(optimizer=Optimizer(learning_rate=rate)),
        algorithm=AlgorithmChoice(options=options),
        limits=Limits(heartbeat_s=1e9),
    )
    path.write_text(dump(config))
    assert load_run(path) == config


def test_sites(here):
    assert load_site("local") == SiteConfig(name="local")
    path = write(here, "name: mine\ngpus_per_node: 2\nenv: {A: b}\n", "mine.yaml")
    assert load_site(path) == SiteConfig(name="mine", gpus_per_node=2, env={"A": "b"})
    with pytest.raises(ConfigError, match="did you mean 'local'"):
        load_site("locl")
    write(Path.cwd(), "name: lumi\n", "lumi.yaml")
    with pytest.raises(ConfigError, match=r"did you mean \./lumi\.yaml\? known sites: "):
        load_site("lumi")


def test_the_environment_of_a_site_is_text_also_where_it_is_numbers(here):
    path = write(here, "name: mine\nenv:\n  FI_CXI_DISABLE_HOST_REGISTER: 1\n  B: 0.5\n  C: '010'\n", "mine.yaml")
    given = {"FI_CXI_DISABLE_HOST_REGISTER": "1", "B": "0.5", "C": "010"}
    site = load_site(path, ["env.NCCL_DEBUG=INFO", "env.NCCL_NET_GDR_LEVEL=3"])
    assert site.env == given | {"NCCL_DEBUG": "INFO", "NCCL_NET_GDR_LEVEL": "3"}
    assert load_site(write(here, dump(site))) == site
    for value, problem, fix in (("true", "cannot be True", '"1" or "true"'), ("[1]", "is a list", "give text")):
        with pytest.raises(ConfigError) as caught:
            load_site(write(here, f"name: mine\nenv:\n  A: {value}\n"))
        assert caught.value.where == f"{here}/run.yaml:3: env.A"
        assert problem in caught.value.problem and fix in caught.value.fix
    with pytest.raises(ConfigError, match="--set-site: env: is a list"):
        load_site(path, ["env=[1]"])


# ---- mistakes in a file ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "problem", "fix"),
    [
        (BASE + "rolout: {}\n", "run.yaml:10: rolout", "unknown key", "did you mean 'rollout'?"),
        (BASE + "  num_sample: 3\n", "run.yaml:10: rollout.num_sample", "value 3", "did you mean 'num_samples'?"),
        (BASE + "sync:\n  zzz: 1\n", "run.yaml:11: sync.zzz", "unknown key", "known keys here: channel"),
        (BASE.replace("4", "many"), "run.yaml:8: rollout.num_prompts", "'many'", "give an integer of at least 1"),
        (BASE.replace("4", "0"), "run.yaml:8: rollout.num_prompts", "0", "give an integer of at least 1"),
        (BASE.replace("4", ""), "run.yaml:8: rollout.num_prompts", "no value", "give an integer"),
        (BASE.replace("4", "true"), "run.yaml:8: rollout.num_prompts", "True", "give an integer"),
        (BASE.replace("train.jsonl", "3"), "run.yaml:6: data.0.path", "3", "text"),
        (BASE.replace("base", "a/b"), "run.yaml:1: name", "'a/b'", "matches"),
        (BASE + "trainer: {precision: fp8}\n", "run.yaml:10: trainer.precision", "'fp8'", "bfloat16, float32"),
        (BASE + "trainer: [1]\n", "run.yaml:10: trainer", "is a list", "a section"),
        (BASE + "evaluation: {sets: {path: x}}\n", "run.yaml:10: evaluation.sets", "is a section", "a list"),
        (BASE + "deterministic: 1\n", "run.yaml:10: deterministic", "1", "true or false"),
        (BASE + "trainer: {lora: {rank: 0}}\n", "run.yaml:10: trainer.lora.rank", "be 0", "integer of at least 1"),
        (BASE + "trainer: {lora: {rnk: 3}}\n", "run.yaml:10: trainer.lora.rnk", "unknown key", "did you mean 'rank'?"),
        (TEACHERS % "{pth: x}", "run.yaml:5: models.teachers.b.pth", "unknown key", "did you mean 'path'?"),
        (TEACHERS % "{path: x, expert: y}", "run.yaml:5: models.teachers.b.expert", "cannot be 'y'", "integer"),
        (BASE.replace("num_steps: 3\n", ""), "run.yaml:1: num_steps", "is missing", "an integer of at least 0"),
        (BASE.replace("path: train", "name: train"), "run.yaml:6: data.0.path", "is missing", "text"),
        (BASE + "name: again\n", "run.yaml:10", "stands in line 1 too", "remove one"),
        (BASE + "[1, 2]: x\n", "run.yaml:10", "a key is not text", "key: value"),
        (BASE + "trainer: &a {optimizer: *a}\n", "run.yaml:10", "refers to itself", "write the value out"),
        (BASE + "  x: [1, 2\n", "run.yaml:11:1", "not valid YAML", "brackets"),
        (BASE + "\tseed: 3\n", "run.yaml:10:1", "not valid YAML", "tabs"),
        (BASE + "seed: 'a\n", "run.yaml:11:1", "not valid YAML", "quotes"),
        (BASE + "seed: !!python/name:os.system\n", "run.yaml:10:7", "not valid YAML", "fix"),
        (BASE + "---\nname: x\n", "run.yaml:10:1", "not valid YAML", "fix"),
        ("", "run.yaml", "is empty", "quickstart.yaml"),
        ("  \n\n", "run.yaml", "is empty", "quickstart.yaml"),
        ("# nothing\n", "run.yaml", "is empty", "quickstart.yaml"),
        ("- name: x\n", "run.yaml:1", "holds a list", "key: value"),
        ("name\n", "run.yaml:1", "holds only 'name'", "key: value"),
        (b"name: \0\n", "run.yaml", "is a binary file (NUL at byte 6)", "YAML file"),
        (b"name: \xff\n", "run.yaml", "is not UTF-8 text (byte 6)", "UTF-8"),
        ("name: " + "[" * 900, "run.yaml", "is nested too deeply", "a few levels"),
        ("name: \x01\n", "run.yaml", "not valid YAML", "character"),
        ("extends: run.yaml\n", "run.yaml", "goes in a circle", "remove one"),
        ("extends: bse.yml\n", "run.yaml:1: extends", "no such file", "did you mean 'base.yaml'? it is"),
        ("extends: configs/base.yaml\n", "run.yaml:1: extends", "no such file", "did you mean 'base.yaml'? it is"),
        ("extends: ../confgs/base.yaml\n", "run.yaml:1: extends", "no such file", "/configs/base.yaml'? it is"),
        (BASE + "sync: disk\n", "run.yaml:10: sync", "be 'disk'", "a section: did you mean sync.channel?"),
        (BASE + "staleness: 1\n", "run.yaml:10: staleness", "be 1", "did you mean staleness.max_versions?"),
        (BASE + "algorithm: ppo\n", "run.yaml:10: algorithm", "be 'ppo'", "did you mean algorithm.name?"),
        (TEACHERS % "x", "run.yaml:5: models.teachers.b", "be 'x'", "did you mean models.teachers.b.path?"),
        (BASE + "algorithm: {kl: 0.1}\n", "run.yaml:10: algorithm.kl", "unknown", "did you mean algorithm.options.kl?"),
        (BASE + "  slots: 3\n", "run.yaml:10: rollout.slots", "unknown", "did you mean rollout.engine_options.slots?"),
        (BASE + "limits: {start_s: 10m}\n", "run.yaml:10: limits.start_s", "'10m'", "give it in seconds: 600"),
        (BASE + "limits: {start_s: 10ms}\n", "run.yaml:10: limits.start_s", "'10ms'", "give a number"),
        ("extends: none.yaml\n", "run.yaml:1: extends", "no such file", "relative to"),
        ("extends: [a, b]\n", "run.yaml:1: extends", "not a file name", "one file"),
    ],
)
def test_mistakes_in_a_file(here, text, where, problem, fix):
    error = refusal(write(here, text))
    assert error.where.startswith(str(here)), "the file is named"
    assert error.where.removeprefix(f"{here}/") == where
    assert problem in error.problem
    assert fix in f"fix: {error.fix}"


def test_a_circle_names_its_chain(here):
    write(here, "extends: b.yaml\n", "a.yaml")
    write(here, "extends: c.yaml\n", "b.yaml")
    write(here, "extends: ../configs/a.yaml\n", "c.yaml")
    chain = " -> ".join(str(here / name) for name in ("a.yaml", "b.yaml", "c.yaml", "../configs/a.yaml"))
    assert chain in refusal(str(here / "a.yaml")).problem


def test_an_error_names_the_file_of_the_chain_it_stands_in(here):
    write(here, BASE.replace("num_prompts: 4", "num_prompts: x"), "base.yaml")
    top = write(here, "extends: base.yaml\nrollout:\n  num_samples: y\n")
    with pytest.raises(Mistakes) as several:
        load_run(top)
    places = (f"{here}/base.yaml:8: rollout.num_prompts", f"{here}/run.yaml:3: rollout.num_samples")
    assert tuple(one.where for one in several.value.found) == places
    assert refusal(top, "rollout.num_prompts=4").where == f"{here}/run.yaml:3: rollout.num_samples"
    error = refusal(top, "rollout.num_prompts=4", "rollout.num_samples=z")
    assert error.where == "--set: rollout.num_samples"


def test_missing_folder_and_forbidden_files(here):
    assert f"did you mean '{here}/base.yaml'" in refusal(str(here / "bse.yaml")).fix
    assert "did you mean '../configs/base.yaml'" in refusal("../config/base.yaml").fix
    assert refusal(str(here / "far.yaml")).fix == "check the path"
    assert "no such file" in refusal(str(here / "none" / "x.yaml")).problem
    assert "is a folder" in refusal(str(here)).problem
    (here / "base.yaml").chmod(0o666)
    assert f"chmod o-w {here}/base.yaml" in refusal(str(here / "base.yaml")).fix
    if os.geteuid():
        (here / "base.yaml").chmod(0o000)
        assert "Permission denied" in refusal(str(here / "base.yaml")).problem


@pytest.mark.parametrize(
    ("override", "where", "problem"),
    [
        ("rollout.num_prompt=3", "--set: rollout.num_prompt", "unknown key"),
        ("rollout.num_prompts=x", "--set: rollout.num_prompts", "'x'"),
        ("rollout=", "--set: rollout", "no value"),
        ("num_steps", "--set num_steps", "not of the form"),
        ("=3", "--set =3", "not of the form"),
        ("a..b=3", "--set a..b=3", "not of the form"),
        ("data.1.path=x", "--set data.1.path=x", "has 1 entries"),
        ("data.first.path=x", "--set data.first.path=x", "'first' is none of them"),
        ("name.x=3", "--set name.x=3", "which has no keys"),
        ("num_steps=[1", "--set num_steps=[1:1:3", "not valid YAML"),
    ],
)
def test_mistakes_in_overrides(here, override, where, problem):
    error = refusal(str(here / "base.yaml"), override)
    assert error.where == where
    assert problem in error.problem


@settings(deadline=None, max_examples=80)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_refused_and_nothing_else_is_raised(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        load_run(path)


@settings(deadline=None, max_examples=80)
@given(st.text(max_size=40))
def test_any_override_is_taken_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(BASE)
    with contextlib.suppress(ConfigError):
        assert isinstance(load_run(path, [text]), RunConfig)


def test_places_of_values(here):
    loaded = read_run(write(here, "extends: base.yaml\nrollout:\n  num_samples: 2\n"), ["seed=1"])
    assert loaded.where("rollout", "num_samples") == f"{here}/run.yaml:3: rollout.num_samples"
    assert loaded.where("data", 0, "path") == f"{here}/base.yaml:6: data.0.path"
    assert loaded.where("seed") == "--set: seed"
    assert loaded.where("rollout", "engine") == f"{here}/run.yaml:2: rollout.engine", "a default: its section"
