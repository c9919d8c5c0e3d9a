"""What is said of a site, and what submit makes of Slurm's refusals."""

import os
import signal
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from launcher import cli, runs, slurm
from runtime import device
from runtime.errors import EXIT_CODES, TRY_LATER
from runtime.load import load_site
from runtime.rollout.engines import embedded

SUBMIT = ["submit", "run.yaml", "--site", "testbed", "--detach"]


@pytest.mark.parametrize("name", ["local", "testbed", "generic-cuda", "generic-rocm"])
def test_sites_load(name):
    assert load_site(name).name == name


def test_values_of_a_site_are_changed_by_short_or_whole_key():
    site = load_site("generic-cuda", ["partition=debug", "slurm.account=me", "gpus_per_node=8", "env.A=b"])
    assert (site.slurm.partition, site.slurm.account, site.gpus_per_node, site.env["A"]) == ("debug", "me", 8, "b")
    site = load_site("generic-cuda", ["account=me", "slurm.account=", "constraint=", "env.B=", "memory=480G"])
    assert (site.slurm.account, site.slurm.constraint, site.env, site.slurm.memory) == ("", "", {"B": ""}, "480G")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("slurm.gpu_request=gres-typed", ["gpu_type", "h100"]),
        ("time=00:01:00", ["slurm.time", "00:01:00 is no longer than", "limits.stop_s"]),
        ("time=soon", ["slurm.time", "soon"]),
        ("partitoin=x", ["--set-site partitoin=x", "did you mean 'partition'"]),
        ("time=30", ["--set-site: slurm.time", "such as 04:00:00"]),
        ("slurm.memory=lots", ["--set-site: slurm.memory", "'lots'", "such as 480G"]),
        ("slurm.cpus_per_node=4", ["slurm.cpus_per_node", "is 4", "hold 5 ranks"]),
        ("slurm.sbatch_args=[--nodes=3]", ["slurm.sbatch_args", "cluster.num_train_nodes"]),
        ("slurm.sbatch_args=[-C gpu]", ["slurm.sbatch_args", "'-C gpu'", "--constraint=gpu"]),
        ("slurm.sbatch_args=[-N3]", ["slurm.sbatch_args", "'-N3'", "--constraint=gpu"]),
        ("slurm.sbatch_args=[--reservation course]", ["slurm.sbatch_args", "'--reservation course'"]),
        ("slurm.srun_args=[-C gpu]", ["slurm.srun_args", "'-C gpu'", "--constraint=gpu"]),
        ("slurm.srun_args=[-C, gpu, '--comment=a b', run, x]", ["-C gpu '--comment=a b' run x", "batch script"]),
        ("gpus_per_node=0", ["batch script"]),
    ],
)
def test_mistakes_in_a_site(config, capsys, override, words):
    sized = ["--set-site", "pretend_gpus=true", "--set-site", override]
    code = cli.main(["plan", "run.yaml", "--site", "generic-cuda", *sized])
    out, err = capsys.readouterr()
    assert code == (0 if "batch script" in words else 2)
    assert all(word in out + err for word in words), err


@pytest.mark.parametrize(
    ("lines", "built", "words"),
    [
        ("cuda: Optional[str] = None\nhip: str = None\n", "cpu", ["is built for CPUs only", "docs/install.md"]),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda", []),
        ("cuda = None\nhip = '7.1.25424'\n", "rocm", []),
        (None, None, ["has no torch", "docs/install.md"]),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_is_told_before_the_run_waits(here, capsys, monkeypatch, lines, built, words):
    Path("version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{lines}")
    spec = ModuleSpec("torch", None, origin=str(here / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None if lines is None else spec)
    monkeypatch.setattr(embedded.EmbeddedKind, "runs_on_gpu", True)
    assert device.built_for() == built
    Path("big.yaml").write_text("{name: big, scheduler: slurm, gpus_per_node: 2}\n")
    assert cli.main(["plan", "run.yaml", "--site", "big.yaml"]) == 0
    err = capsys.readouterr().err
    told = [line for line in err.splitlines() if line.startswith("warning: site big: gpus_per_node is 2, but")]
    assert len(told) == bool(words) and all(word in err for word in words), err
    assert cli.main(["plan", "run.yaml", "--site", "big.yaml", "--set-site", "pretend_gpus=true"]) == 0
    assert "docs/install.md" not in capsys.readouterr().err


def fails(failure):
    def fail(*_, **__):
        raise failure

    return fail


@pytest.mark.parametrize(
    ("failure", "code", "left", "words"),
    [
        (slurm.SchedulerDown("invalid partition specified: x"), 2, 0, "testbed.yaml:8: slurm.partition: 'cuda'"),
        (slurm.NoAnswer("late"), TRY_LATER, 1, "squeue"),
        (slurm.Away("Unable to contact slurm controller"), TRY_LATER, 1, "try again later"),
    ],
)
def test_a_refused_job_leaves_nothing_and_one_without_an_answer_its_run(
    config, capsys, monkeypatch, failure, code, left, words
):
    monkeypatch.setattr(slurm, "try_out", lambda _: "to start now")
    monkeypatch.setattr(slurm, "submit", fails(failure))
    monkeypatch.setattr(slurm, "number_of", lambda *_, **__: "")
    assert cli.main(SUBMIT) == code
    assert words in capsys.readouterr().err
    assert len(list(Path("runs").iterdir())) == left


@pytest.mark.parametrize(
    ("failure", "away", "code", "words"),
    [
        (slurm.SchedulerDown("Requested node configuration is not available"), False, 2, "cluster.num_train_nodes"),
        (slurm.SchedulerDown("Requested node configuration is not available"), True, 0, "drained"),
        (slurm.SchedulerDown("Invalid qos specification"), False, 2, "slurm.qos"),
        (slurm.SchedulerDown("unrecognized option '--no=1'"), False, 2, "slurm.sbatch_args"),
        (slurm.SchedulerDown("sbatch: No such file or directory"), False, 2, "login node"),
        (slurm.Away("Unable to contact slurm controller"), False, TRY_LATER, "try again later"),
    ],
)
def test_what_could_never_run_is_not_queued(config, capsys, monkeypatch, failure, away, code, words):
    monkeypatch.setattr(slurm, "try_out", fails(failure))
    monkeypatch.setattr(slurm, "nodes_are_away", lambda _: away)
    monkeypatch.setattr(slurm, "submit", lambda *_: "7")
    assert cli.main(SUBMIT) == code
    assert words in "".join(capsys.readouterr())
    assert Path("runs").exists() == (code == 0)


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "sbatch: error: fetch_config: DNS SRV lookup failed\n"
        "sbatch: error: _establish_config_source: failed to fetch config\n"
        "sbatch: fatal: Could not establish a configuration source",
        'sbatch: error: slurm_set_addr: Unable to resolve "head"',
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
    ],
)
def test_a_slurm_that_is_not_reached_is_not_the_configs_fault(config, capsys, monkeypatch, said):
    Path("sbatch").write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}\nEND\nexit 1\n")
    Path("sbatch").chmod(0o700)
    monkeypatch.setenv("PATH", f"{Path.cwd()}:{os.environ['PATH']}")
    assert cli.main(SUBMIT) == TRY_LATER
    err = capsys.readouterr().err
    assert "nothing was queued" in err and "try again later" in err and "login node" in err and "partition" not in err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("failure", "code"),
    [(slurm.Away("Unable to contact"), TRY_LATER), (slurm.NoAnswer("late"), TRY_LATER), (slurm.SchedulerDown("no"), 2)],
)
def test_a_cancel_that_slurm_does_not_hear_may_be_tried_again(run, capsys, monkeypatch, failure, code):
    monkeypatch.setattr(slurm, "call", fails(failure))
    assert cli.main(["cancel", run.name]) == code
    assert "job 7: cannot be cancelled" in capsys.readouterr().err


@pytest.mark.parametrize(("times", "found", "left"), [(1, "", 1), (2, "", 0), (2, "8", 1), (2, "9", 1)])
def test_ctrl_c_while_slurm_takes_the_job_cancels_it(config, capsys, monkeypatch, times, found, left):
    def submitted(file, *_):
        if found == "9":  # it runs already
            Path(file).with_name("job").joinpath("id").write_text("9")
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        return "7"

    called = []
    monkeypatch.setattr(slurm, "try_out", lambda _: "to start now")
    monkeypatch.setattr(slurm, "submit", submitted)
    monkeypatch.setattr(slurm, "number_of", lambda *_, **__: found if found == "8" else "")
    monkeypatch.setattr(slurm, "call", lambda *argv, **_: called.append(argv) or "")
    assert cli.main(SUBMIT) == EXIT_CODES["preempted"]
    out, err = capsys.readouterr()
    folders = list(Path("runs").iterdir())
    assert len(folders) == left
    if left:
        assert ("scancel", found or "7") in called and str(folders[0]) in out and "queues it again" in out
        assert runs.read_status(folders[0]).state == "cancelled"
    else:
        assert "nothing was queued" in err


def test_ctrl_c_during_the_checks_is_one_line(config, capsys, monkeypatch):
    monkeypatch.setattr(slurm, "try_out", fails(KeyboardInterrupt()))
    assert cli.main(SUBMIT) == EXIT_CODES["preempted"]
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
