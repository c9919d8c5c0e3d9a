"""What SGLang is started with: its own options as they are given, beside those that follow from the run."""

import subprocess
import sys
from pathlib import Path

import pytest

from runtime import plugins
from runtime.errors import ConfigError
from runtime.rollout.base import Launch
from runtime.rollout.engines import embedded, sglang
from runtime.rollout.spawning import PEER_PORT, PORT
from runtime.rollout.start import EngineStart
from tests.unit.fakes import engine_settings

LAUNCH = {"model": "m", "dtype": "bfloat16", "host": "10.0.0.1", "token_file": "t", "threads": 3}


def options_of(options, num_gpus=0, deterministic=False):
    kind = sglang.build(plugins.options(sglang, options, "rollout.engine_options"))
    ranks = max(1, num_gpus)
    argv = kind.command(Launch(**LAUNCH, num_gpus=num_gpus, num_ranks=ranks, deterministic=deterministic))
    found = {}
    for word in argv[2:]:
        if word.startswith("--"):
            found[word[2:]] = values = []
        else:
            values.append(word)
    return argv, found


def test_options_pass_as_they_are_and_ours_stand():
    server = {"mem-fraction-static": 0.8, "enable_metrics": True, "cuda-graph-bs": [1, 2], "log-level": "info"}
    server |= {"disable-radix-cache": False, "json-model-override-args": {"a": 1}}
    argv, found = options_of({"python": "/env/bin/python", "max_length": 512, "server": server}, num_gpus=4)
    assert argv[0] == "/env/bin/python" and Path(argv[1]).name == "sglang_server.py" and Path(argv[1]).is_file()
    assert found == {
        "token-file": ["t"],
        "load-format": ["dummy"],
        "log-level": ["info"],
        "mem-fraction-static": ["0.8"],
        "enable-metrics": [],
        "cuda-graph-bs": ["1", "2"],
        "json-model-override-args": ['{"a": 1}'],
        "model-path": ["m"],
        "dtype": ["bfloat16"],
        "weight-version": ["default"],
        "host": ["10.0.0.1"],
        "port": [PORT],
        "nccl-port": [PEER_PORT],
        "tp-size": ["4"],
        "context-length": ["512"],
        "custom-weight-loader": ["runtime.comm.weights.loader.take"],
    }


def test_a_cpu_is_told_and_neither_its_memory_nor_a_core_is_taken():
    argv, found = options_of({"server": {"max-total-tokens": 100}}, deterministic=True)
    assert argv[0] == sys.executable
    wanted = {"device": ["cpu"], "attention-backend": ["torch_native"], "threads": ["3"], "max-total-tokens": ["100"]}
    wanted |= {"sleep-on-idle": [], "enable-deterministic-inference": [], "tp-size": ["1"]}
    assert found.items() >= wanted.items()


@pytest.mark.parametrize(
    "key", ["port", "--host", "tp", "api_key", "model", "dp-size", "nnodes", "context-length", "enable_fp32_lm_head"]
)
def test_what_follows_from_the_run_is_refused_with_the_reason(key):
    with pytest.raises(ConfigError, match=rf"rollout.engine_options: server.{key} is not for a config to set: \w+"):
        options_of({"server": {key: 1}})


def test_an_environment_without_sglang_is_refused(tmp_path):
    where = "run.yaml:3: rollout.engine_options"
    python = tmp_path / "bin/python3"
    kind = sglang.build(sglang.Config(python=str(python)))
    with pytest.raises(ConfigError, match=r"run.yaml:3.*python: there is no .*\n  fix: .*docs/engines.md"):
        kind.check(where)
    python.parent.mkdir()
    python.touch(mode=0o700)
    packages = tmp_path / "lib/python3.11/site-packages"
    (packages / "sglang_router").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has no package sglang under .*\n  fix: "):
        kind.check(where)
    (packages / "sglang").mkdir()
    assert kind.check(where) == []
    with pytest.raises(ConfigError, match=r"has no package torch_memory_saver under .*\n  fix: "):
        kind.check_sleep(where)
    (packages / "torch_memory_saver-0.0.9.dist-info").mkdir()
    kind.check_sleep(where)


def test_a_script_that_starts_sglang_is_taken_as_it_is(tmp_path, monkeypatch):
    """In a container, say: nobody sees from here which packages it will find, not even beside the script."""
    for version in ("2.29.7", "2.30.7"):
        python = tmp_path / version / "bin/python"
        (tmp_path / version / f"lib/python3.11/site-packages/nvidia_nccl_cu13-{version}.dist-info").mkdir(parents=True)
        python.parent.mkdir()
        python.touch(mode=0o700)
        monkeypatch.setattr("sys.executable", str(python))
    script = tmp_path / "2.29.7/bin/sglang.sh"
    kind = sglang.build(sglang.Config(python=str(script)))
    script.write_text('#!/bin/sh\nA=passed exec python3 "$@"\n')
    with pytest.raises(ConfigError, match=r"there is no .*sglang\.sh' that can be started"):
        kind.check("here")
    script.chmod(0o700)
    (warning,) = kind.check("here")
    assert "here: python: " in warning and f"`{script} -c 'import sglang'`" in warning
    kind.check_sleep("here")
    kind.check_split("here")
    kind.check_group("here")
    argv = kind.command(Launch(**LAUNCH, num_gpus=1, deterministic=False))
    assert argv[:2] == [str(script), str(sglang.LAUNCHER)]
    words = "import os, sys; print(os.environ['A'], sys.argv[1])"
    assert subprocess.check_output([argv[0], "-c", words, "--x"], text=True, timeout=20) == "passed --x\n"


def test_two_versions_of_nccl_are_refused_before_they_meet(tmp_path, monkeypatch):
    pythons = [tmp_path / of / "bin/python3" for of in ("run", "sglang")]
    for python in pythons:
        python.parent.mkdir(parents=True)
        python.touch(mode=0o700)
    monkeypatch.setattr("sys.executable", str(pythons[0]))
    kind = sglang.build(sglang.Config(python=str(pythons[1])))
    kind.check_group("here")  # nobody knows
    for python, version in zip(pythons, ("2.29.7", "2.30.7"), strict=True):
        packages = python.parents[1] / "lib/python3.11/site-packages"
        (packages / f"nvidia_nccl_cu13-{version}.dist-info").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"here: .*2\.30\.7.* 2\.29\.7.*\n  fix: .*nvidia-nccl-cu13==2\.30\.7 .*disk"):
        kind.check_group("here")
    packages.joinpath("nvidia_nccl_cu13-2.30.7.dist-info").rename(packages / "nvidia_nccl_cu13-2.29.7.dist-info")
    kind.check_group("here")


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_an_engine_that_nothing_is_pushed_to_reads_its_weights_and_keeps_them_in_its_sleep(num_gpus):
    launch = Launch(**LAUNCH, num_gpus=num_gpus, deterministic=False, sleeps=True, is_frozen=True)
    argv = sglang.build(sglang.Config()).command(launch)
    assert argv[argv.index("--load-format") + 1] == "auto"
    assert ("--enable-weights-cpu-backup" in argv) == ("--enable-memory-saver" in argv) == (num_gpus > 0)


@pytest.mark.parametrize("is_wide", [True, False])
def test_logits_are_float32_in_the_policys_engines_alone(tmp_path, is_wide):
    settings = engine_settings(tmp_path, dtype="bfloat16", float32_output=is_wide)
    sglangs, own = sglang.build(sglang.Config()), embedded.build(embedded.Config())
    for option, kind in (("--enable-fp32-lm-head", sglangs), ("--float32-output", own)):
        for model in ("policy", "judge"):
            argv = kind.command(EngineStart(id=0, model=model, path="m", env={}).launch(settings))
            assert (option in argv) == (is_wide and model == "policy")


@pytest.mark.parametrize(
    ("server", "model", "takes"),
    [
        ({"mem-fraction-static": 0.8, "quantization": False}, {"num_experts": 0}, True),
        ({"quantization": "fp8"}, {}, False),
        ({"speculative_algorithm": "EAGLE"}, {}, False),
        ({}, {"n_routed_experts": 64}, False),
        ({"moe_runner_backend": "auto"}, {"num_experts": 64}, False),
        ({"moe_runner_backend": "triton"}, {"num_experts": 64}, True),
        ({"moe_runner_backend": "triton", "quantization": "fp8"}, {"num_experts": 64}, False),
    ],
)
def test_deltas_are_for_weights_that_are_held_as_they_are_sent(server, model, takes):
    assert sglang.build(sglang.Config(server=server)).takes_deltas(model) == takes


def test_in_sglangs_processes_the_runtime_can_be_imported_and_nothing_beside_it():
    """Also where the project is not installed: as spawned processes run the server's file."""
    server = Path(sglang.LAUNCHER)
    program = f"""
import importlib.util, runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.path[:] = [place for place in sys.path if place != {str(server.parents[2])!r}]
assert importlib.util.find_spec("runtime") is None
runpy.run_path({str(server)!r}, run_name="__mp_main__")
from runtime.comm.buckets import TakeDelta
assert importlib.util.find_spec("launcher") is None
"""
    subprocess.run([sys.executable, "-I", "-c", program], check=True, timeout=20)
