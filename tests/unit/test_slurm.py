"""What a Slurm job is started with; tests/cluster asks a real one."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from launcher import cli, plan, runs, script, slurm, srun, submit, supervisor
from launcher.checks import allocation
from launcher.plan import Machine
from runtime import topology
from runtime.errors import ConfigError
from runtime.load import read_run, read_site
from runtime.site import SiteConfig, Slurm

GOLDEN = Path(__file__).parents[1] / "golden" / "plan_slurm.txt"
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "8(x2)", "SLURM_GPUS_ON_NODE": "4"}


def test_the_plan_as_people_read_it(config, here):
    asked = Slurm(partition="gpu", account="me", mpi="pmi2", modules=("cuda/12",), setup=("ulimit -n 65536",))
    site = SiteConfig(name="big", scheduler="slurm", gpus_per_node=4, fabric_interface="hsn0", slurm=asked)
    run = Path("/runs/RUN")
    text = submit.render(script.make(config, site, run, "/venv/bin/python"), run)
    planned = plan.make(config, site, run, 0, Machine(python="/venv/bin/python"))
    found = plan.describe(planned, config, site, text).replace(str(plan.PROJECT), "PROJECT").replace(f"{here}/", "")
    assert found.rstrip("\n") + "\n" == GOLDEN.read_text()


def test_the_host_file_puts_every_rank_on_its_node(config):
    site = SiteConfig(name="x", scheduler="slurm", gpus_per_node=2)
    world = topology.make(config.cluster, config.rollout, site, ["a", "b", "c"])
    assert srun.host_file(world).split() == ["a", "a", "a", "b", "c"]


@pytest.mark.parametrize(
    ("request_", "step", "words"),
    [
        ("gpus-per-node", True, ["--gpus-per-node=4"]),
        ("gres", True, ["--gres=gpu:4"]),
        ("gres-typed", False, ["--gres=gpu:h100:4"]),
        ("none", True, []),
    ],
)
def test_gpus_are_spelt_as_the_site_wants(request_, step, words):
    asked = Slurm(gpu_request=request_, gpu_type="h100")
    assert srun.gpu_request(asked, 4, step=step) == words


def test_without_gpus_a_step_says_so_and_a_job_does_not():
    assert srun.gpu_request(Slurm(), 0, step=True) == ["--gres=none"]
    assert srun.gpu_request(Slurm(), 0, step=False) == []


def test_site_options_reach_the_script(config):
    asked = Slurm(cpus_per_node=64, sbatch_args=("--reservation=course", "--hold"), requeue=False, network="job_vni")
    site = SiteConfig(name="x", scheduler="slurm", slurm=asked)
    options = script.make(config, site, Path("/r"), "python").options
    assert options["cpus-per-task"] == "64" and "exclusive" not in options
    assert options["reservation"] == "course" and options["hold"] is True
    assert options["no-requeue"] is True and "requeue" not in options
    assert options["network"] == "job_vni" and options["signal"] == "B:USR1@80"


def test_a_job_with_spares_outlives_a_node(config):
    site = SiteConfig(name="x", scheduler="slurm")
    plain, spared = (
        script.make(msgspec.structs.replace(config, cluster=cluster), site, Path("/r"), "python").options
        for cluster in (config.cluster, msgspec.structs.replace(config.cluster, num_spare_nodes=2))
    )
    assert (plain["nodes"], spared["nodes"]) == ("3", "5")
    assert "no-kill" not in plain and spared["no-kill"] is True


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5:00", 300), ("1:02:03", 3723), ("2-00:00:01", 172801), ("UNLIMITED", None), ("INVALID", None), ("0:07", 7)],
)
def test_times(text, seconds):
    assert slurm.seconds(text) == seconds


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ""),
        (
            {"SLURM_JOB_CPUS_PER_NODE": "1(x2)"},
            "1 CPU on a node that is to hold 5 ranks\n  fix: #SBATCH --exclusive",
        ),
        ({"SLURM_JOB_NUM_NODES": "1"}, "sbatch --nodes=2"),
        ({"SLURM_GPUS_ON_NODE": "2"}, "generic-cuda.yaml:7: gpus_per_node is 4"),
        ({"SLURM_JOB_NUM_NODES": "3"}, "holds 3 nodes, the run uses 2: sbatch --nodes=2 asks"),
    ],
)
def test_a_job_with_too_little_is_refused(here, given, words):
    loaded, site = read_run("run.yaml"), read_site("generic-cuda")
    try:
        said = "".join(allocation.check(loaded, site, {**JOB, **given}))
    except ConfigError as e:
        said = str(e)
    assert words in said and bool(words) == bool(said)


def test_cpus_per_node_as_slurm_writes_them():
    assert slurm.per_node("8(x2),4") == (8, 8, 4)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"setup": ("true", "x=1 # why not")}, "-m launcher.supervisor /r\n"),
        ({"setup": ("true", "test a = b", "true")}, "-m launcher.supervisor /r slurm.setup: test a = b\n"),
        ({"setup": ("if true", "then", "echo 'in'", "fi")}, "in\n-m launcher.supervisor /r\n"),
        ({"setup": ("if false\nthen\n  false\nfi\nx=2 # why not\n",)}, "-m launcher.supervisor /r\n"),
        ({"setup": ("test a = b\ntrue\n",)}, "-m launcher.supervisor /r slurm.setup: test a = b\n"),
        ({"setup": ("true\ntest a = b && true\n",)}, "-m launcher.supervisor /r slurm.setup: test a = b && true\n"),
        ({"setup": ("source sourced\ntrue\n",)}, "-m launcher.supervisor /r\n"),
        ({"modules": ("good", "bad")}, "loaded good\n-m launcher.supervisor /r slurm.modules: bad\n"),
    ],
)
def test_a_line_of_the_setup_that_fails_ends_the_job(config, asked, said):
    made = script.make(config, SiteConfig(name="x", scheduler="slurm", slurm=Slurm(**asked)), Path("/r"), "echo")
    module = 'module() { [ $2 = good ] && echo "loaded $2"; }'
    Path("script").write_text("\n".join([module, *made.setup, made.command]))
    Path("sourced").write_text("false\ntrue\n")
    done = subprocess.run(["bash", "script"], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (said, 0)


def test_a_job_that_cannot_be_set_up_ends_as_config(run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (run / "job/7.log").write_text("first\nno such module\n")
    assert supervisor.main(str(run), "slurm.modules: bad") == 2
    report = runs.read_report(run, 0)
    assert report is not None and report.kind == "config"
    assert "slurm.modules: bad: failed" in report.message and "no such module" in report.message
    assert runs.read_status(run).state == "failed"


def test_run_belongs_into_a_job(config, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert cli.main(["run", "run.yaml", "--site", "testbed"]) == 2
    assert "no Slurm job" in capsys.readouterr().err
