"""What a Slurm job is started with, and what its words mean; tests/cluster asks a real one."""

import time
from pathlib import Path

import msgspec
import pytest

from launcher import cli, job, plan, runs, script, slurm, srun, submit, verdict
from launcher.plan import Machine
from launcher.runs import Report, Status
from launcher.states import States, report_of
from runtime import topology
from runtime.config import SiteConfig, Slurm
from runtime.load import load_run, load_site
from tests.unit.inputs import write_inputs

GOLDEN = Path(__file__).parents[1] / "golden" / "plan_slurm.txt"


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return load_run(write_inputs(tmp_path), ["cluster.num_rollout_nodes=2"])


def test_the_plan_as_people_read_it(config):
    asked = Slurm(partition="gpu", account="me", mpi="pmi2", modules=("cuda/12",), setup=("ulimit -n 65536",))
    site = SiteConfig(name="big", scheduler="slurm", gpus_per_node=4, fabric_interface="hsn0", slurm=asked)
    run = Path("/runs/RUN")
    text = submit.render(script.make(config, site, run, "/venv/bin/python"), run)
    planned = plan.make(config, site, run, 0, Machine(python="/venv/bin/python"))
    found = plan.describe(planned, config, site, text).replace(str(plan.PROJECT), "PROJECT")
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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5:00", 300), ("1:02:03", 3723), ("2-00:00:01", 172801), ("UNLIMITED", None), ("INVALID", None), ("0:07", 7)],
)
def test_times(text, seconds):
    assert slurm.seconds(text) == seconds


# ---- what Slurm says against what the supervisor said ------------------------------------------------------------


class FakeWatch:
    """Slurm's answer, given."""

    def __init__(self, state: str | None, asked_at: float = 0.0, known: bool = True) -> None:
        self.state, self.asked_at, self.known = state, asked_at, known
        self.trouble = "slurmctld is down" if state is None else ""

    def jobs(self, ids):
        if self.state is None:
            return None
        return {number: slurm.Job(state=self.state) for number in ids} if self.known else {}


@pytest.fixture
def run(config):
    folder = runs.create(config, SiteConfig(name="x", scheduler="slurm"))
    (folder / runs.SCRIPT).write_text("")
    (folder / runs.JOB_ID).write_text("7")
    return folder


def seen(run: Path, said: str, watch: FakeWatch, ago_s: float = 0.0) -> str:
    status = Status(state=said, attempt=0, host="n1", updated=time.time() - ago_s)
    runs.write_atomic(run / "status.json", msgspec.json.encode(status))
    return States(watch).of(run)


LATER = time.time() + 1e6


@pytest.mark.parametrize(
    ("said", "slurms", "state"),
    [
        ("queued", "PENDING", "queued"),
        ("queued", "CONFIGURING", "starting"),
        ("running", "RUNNING", "running"),
        ("running", "COMPLETING", "ending"),
        ("running", "PENDING", "queued"),  # requeued by somebody
        ("running", "REQUEUED", "queued"),
        ("running", "CANCELLED", "cancelled"),
        ("running", "TIMEOUT", "ended"),
        ("running", "PREEMPTED", "ended"),
        ("running", "NODE_FAIL", "failed"),
        ("running", "OUT_OF_MEMORY", "failed"),
        ("running", "FAILED", "died"),
        ("running", "COMPLETED", "died"),
        ("ended", "FAILED", "ended"),  # what a supervisor said last is the truth
        ("cancelled", "COMPLETED", "cancelled"),
        ("running", None, "running"),  # Slurm does not answer
    ],
)
def test_states(run, said, slurms, state):
    assert seen(run, said, FakeWatch(slurms, asked_at=LATER)) == state


def test_a_supervisor_that_spoke_after_slurm_was_asked_knows_better(run):
    assert seen(run, "running", FakeWatch("PENDING", asked_at=1.0)) == "running"


def test_a_job_that_slurm_forgot_is_gone_once_its_supervisor_is_silent(run):
    forgot = FakeWatch("", asked_at=LATER, known=False)
    assert seen(run, "running", forgot, ago_s=10.0) == "running"
    assert seen(run, "running", forgot, ago_s=1000.0) == "died"


def test_slurms_word_stands_in_for_a_report(run):
    (run / "attempts/0").mkdir()
    said = report_of(run, slurm.Job(state="NODE_FAIL"))
    assert said is not None and said.kind == "node_failed" and "job 7" in said.message
    assert report_of(run, slurm.Job(state="RUNNING")) is None


# ---- the end of an attempt ---------------------------------------------------------------------------------------


def slurm_job(run: Path, answer: slurm.Job | None, **asked) -> job.SlurmJob:
    where = SiteConfig(name="x", scheduler="slurm", slurm=Slurm(**asked))
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_RESTART_COUNT": "1"}
    made = job.SlurmJob(run, load_run(run / "config.yaml"), where, environment)
    made._ask = lambda: answer
    return made


GRACE = slurm.Job(state="RUNNING", fields={"PreemptTime": "2026-11-29T23:10:39", "Restarts": "1"})
RUNNING = slurm.Job(state="RUNNING", fields={"PreemptTime": "None", "Restarts": "1"})


@pytest.mark.parametrize(
    ("kind", "answer", "then"),
    [
        ("done", RUNNING, "end"),
        ("bug", RUNNING, "end"),
        ("config", GRACE, "end"),
        ("peer_lost", RUNNING, "restart"),
        ("peer_lost", None, "restart"),
        ("peer_lost", GRACE, "queued"),
        ("preempted", GRACE, "queued"),
        ("timeout", RUNNING, "queued"),
        ("preempted", slurm.Job(state="CANCELLED", fields={"Restarts": "1"}), "end"),
        ("preempted", slurm.Job(state="COMPLETING", fields={"Restarts": "1"}), "end"),  # being cancelled
        ("preempted", slurm.Job(state="COMPLETING", fields={"Restarts": "2"}), "queued"),  # being requeued
        ("preempted", slurm.Job(state="COMPLETING", reason="TimeLimit", fields={"Restarts": "1"}), "queued"),
    ],
)
def test_what_follows_an_attempt(run, kind, answer, then):
    assert slurm_job(run, answer).outlook(Report(kind=kind, message=""), stopped=True).next == then


def test_a_cancelled_run_does_not_go_on(run):
    (run / runs.CANCEL_MARK).touch()
    assert slurm_job(run, RUNNING).outlook(Report(kind="preempted", message=""), stopped=True).next == "end"


def test_a_site_may_forbid_going_on(run):
    assert (
        slurm_job(run, GRACE, requeue=False).outlook(Report(kind="preempted", message=""), stopped=False).next == "end"
    )


@pytest.mark.parametrize(
    ("words", "kind", "rank", "said"),
    [
        ("srun: error: n2: task 2: Killed\nsrun: error: n1: tasks 0-1: Killed\n", "peer_lost", 2, "SIGKILL"),
        (
            "srun: error: n1: task 0: Exited with exit code 3\nsrun: error: n1: task 1: Killed\n",
            "bug",
            0,
            "exit code 3",
        ),
        ("srun: error: n1: task 1: Segmentation fault (core dumped)\n", "peer_lost", 1, "SIGSEGV"),
        ("srun: error: n1: tasks 0-1: Terminated\n", "peer_lost", None, "ranks 0, 1"),
    ],
)
def test_sruns_words(tmp_path, words, kind, rank, said):
    (tmp_path / srun.STEP_LOG).write_text("srun: cluster configuration lacks support for cpu binding\n" + words)
    report = verdict.judge(tmp_path, verdict.Evidence(code=137, log=srun.STEP_LOG))
    assert (report.kind, report.rank) == (kind, rank) and said in report.message


def test_a_rank_that_ends_within_mpi_init_is_understood(tmp_path):
    (tmp_path / "rank-1.log").write_text("Abort: Runtime environment uses unsupported PMI version PMIx. Aborting.\n")
    report = verdict.judge(tmp_path, verdict.Evidence(code=16, log=srun.STEP_LOG))
    assert report.kind == "config" and "slurm.mpi: pmi2" in report.message


def test_a_rank_that_mpi_ended_lost_a_peer(tmp_path):
    abort = "Abort(875229327) on node 0 (rank 0 in comm 16): Fatal error in internal_Test: Other MPI error"
    (tmp_path / "rank-0.log").write_text(abort + "\nOFI poll failed\n")
    (tmp_path / srun.STEP_LOG).write_text("srun: error: n1: task 0: Exited with exit code 143\n")
    report = verdict.judge(tmp_path, verdict.Evidence(code=143, log=srun.STEP_LOG))
    assert report.kind == "peer_lost" and "internal_Test" in report.message


# ---- sites -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["local", "testbed", "generic-cuda", "generic-rocm"])
def test_sites_load(name):
    assert load_site(name).name == name


def test_values_of_a_site_are_changed_by_short_or_whole_key():
    site = load_site("generic-cuda", ["partition=debug", "slurm.account=me", "gpus_per_node=8", "env.A=b"])
    assert (site.slurm.partition, site.slurm.account, site.gpus_per_node, site.env["A"]) == ("debug", "me", 8, "b")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("slurm.gpu_request=gres-typed", ["gpu_type", "h100"]),
        ("time=00:01:00", ["slurm.time", "00:01:00 is no longer than", "limits.stop_s"]),
        ("time=soon", ["slurm.time", "soon"]),
        ("partitoin=x", ["partitoin", "unknown key"]),
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
    ("failure", "left", "words"),
    [(slurm.SchedulerDown("invalid partition"), 0, "invalid partition"), (slurm.NoAnswer("late"), 1, "squeue")],
)
def test_a_refused_job_leaves_nothing_and_one_without_an_answer_its_run(
    config, capsys, monkeypatch, failure, left, words
):
    def fail(*_):
        raise failure

    monkeypatch.setattr(slurm, "submit", fail)
    assert cli.main(["submit", "run.yaml", "--site", "testbed", "--detach"]) == 2
    assert words in capsys.readouterr().err
    assert len(list(Path("runs").iterdir())) == left


def test_run_belongs_into_a_job(config, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert cli.main(["run", "run.yaml", "--site", "testbed"]) == 2
    assert "no Slurm job" in capsys.readouterr().err
