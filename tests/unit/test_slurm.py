"""What a Slurm job is started with, and what its words mean; tests/cluster asks a real one."""

import os
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from launcher import allocation, cli, job, plan, runs, script, slurm, srun, submit, supervisor, verdict
from launcher.plan import Machine
from launcher.runs import Report, Status
from launcher.states import States, report_of
from runtime import topology
from runtime.config import SiteConfig, Slurm
from runtime.errors import EXIT_CODES, TRY_LATER, ConfigError
from runtime.load import load_run, load_site, read_run, read_site
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


@pytest.mark.parametrize(("log", "said"), [("", "cannot see"), ("python: not found\n", "ends with: python: not found")])
def test_a_job_that_never_spoke_is_explained(run, log, said):
    if log:
        (run / "job/7.log").write_text(log)
    assert seen(run, "queued", FakeWatch("FAILED", asked_at=LATER)) == "failed"
    report = report_of(run, slurm.Job(state="FAILED"), "failed")
    assert report is not None and report.kind == "config" and said in report.message and "job 7" in report.message


def test_a_job_that_ends_by_an_order_before_it_could_speak_is_cancelled(run):
    (run / runs.CANCEL_MARK).touch()
    assert seen(run, "starting", FakeWatch("FAILED", asked_at=LATER)) == "cancelled"
    report = report_of(run, slurm.Job(state="FAILED"), "cancelled")
    assert report is not None and report.kind == "preempted"


# ---- the end of an attempt ---------------------------------------------------------------------------------------


@pytest.fixture
def dead(monkeypatch) -> set[str]:
    """Nodes of n[1-3] that start no process, though Slurm still lists them."""
    nodes: set[str] = set()

    def call(*argv, env=None, **_):
        if argv[0] == "srun":
            assert env is not None and env["SLURM_JOB_ID"] == "7" and "SLURM_NTASKS" not in env
            if nodes & {word.removeprefix("--nodelist=") for word in argv}:
                raise slurm.NoAnswer("srun gave no answer within 30 s")
        return "n1\nn2\nn3\n" if argv[-1] == "n[1-3]" else argv[-1].replace(",", "\n")

    monkeypatch.setattr(slurm, "call", call)
    return nodes


def slurm_job(run: Path, answer: slurm.Job | None, **asked) -> job.SlurmJob:
    where = SiteConfig(name="x", scheduler="slurm", slurm=Slurm(**asked))
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_RESTART_COUNT": "1", "SLURM_NTASKS": "3"}
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
def test_what_follows_an_attempt(run, kind, answer, then, dead):
    assert slurm_job(run, answer).outlook(Report(kind=kind, message=""), stopped=True).next == then


@pytest.mark.parametrize(
    ("lost", "listed", "nodes"),
    [
        (set(), "n[1-3]", ["n1", "n2"]),
        ({"n2"}, "n[1-3]", ["n1", "n3"]),  # Slurm does not know it yet
        (set(), "n1,n3", ["n1", "n3"]),  # it does
        ({"n1", "n2", "n3"}, "n[1-3]", ["n1", "n2"]),  # probes that say nothing: one of these nodes asks
        ({"n2", "n3"}, "n[1-3]", []),
        ({"n3"}, "n1,n3", []),
    ],
)
def test_a_spare_takes_the_place_of_a_lost_node_and_without_one_the_job_is_queued_again(
    tmp_path, monkeypatch, dead, lost, listed, nodes
):
    monkeypatch.chdir(tmp_path)
    config = load_run(write_inputs(tmp_path), ["cluster.num_spare_nodes=1"])
    run = runs.create(config, SiteConfig(name="x", scheduler="slurm"))
    found = slurm_job(run, slurm.Job(state="RUNNING", nodes=listed))
    dead |= lost
    outlook = found.outlook(Report(kind="peer_lost", message=""), stopped=False)
    if nodes:
        assert outlook.next == "restart"
        assert list(found.plan(1).topology.nodes) == nodes
    else:
        assert outlook.next == "queued" and "2 nodes are needed: 1 left" in outlook.reason


def test_a_job_with_spares_outlives_a_node(config):
    site = SiteConfig(name="x", scheduler="slurm")
    plain, spared = (
        script.make(msgspec.structs.replace(config, cluster=cluster), site, Path("/r"), "python").options
        for cluster in (config.cluster, msgspec.structs.replace(config.cluster, num_spare_nodes=2))
    )
    assert (plain["nodes"], spared["nodes"]) == ("3", "5")
    assert "no-kill" not in plain and spared["no-kill"] is True


def test_a_cancelled_run_does_not_go_on(run):
    (run / runs.CANCEL_MARK).touch()
    assert slurm_job(run, RUNNING).outlook(Report(kind="preempted", message=""), stopped=True).next == "end"


def test_a_site_may_forbid_going_on(run):
    assert (
        slurm_job(run, GRACE, requeue=False).outlook(Report(kind="preempted", message=""), stopped=False).next == "end"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "srun: unrecognized option '--nosuch=1'\nTry \"srun --help\" for more information\n",
            "'--nosuch=1'; change slurm.srun_args",
        ),
        (
            "srun: error: Unable to create step: Invalid generic resource (gres) specification\n",
            "gpus_per_node",
        ),
        ("srun: error: Unable to create step for job 3: More processors requested than permitted\n", "--exclusive"),
        ("srun: error: cannot find mpi plugin for mpi/foo\n", "slurm.mpi"),
    ],
)
def test_what_srun_refuses_is_to_be_changed(tmp_path, words, said):
    (tmp_path / srun.STEP_LOG).write_text("srun: cluster configuration lacks support for cpu binding\n" + words)
    report = verdict.judge(tmp_path, verdict.Evidence(code=1, log=srun.STEP_LOG))
    assert report.kind == "config" and said in report.message


def test_a_stop_before_ranks_can_hear_it_is_no_lost_peer(tmp_path):
    (tmp_path / srun.STEP_LOG).write_text("srun: error: n2: task 2: User defined signal 1\n")
    assert verdict.judge(tmp_path, verdict.Evidence(code=1, log=srun.STEP_LOG, order="stop")).kind == "preempted"
    assert verdict.judge(tmp_path, verdict.Evidence(code=1, log=srun.STEP_LOG)).kind == "peer_lost"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("srun: error: Node failure on n2\n", "node_failed"),
        ("slurmstepd: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-11-30T03:00:00 DUE TO TIME LIMIT\n", "timeout"),
        ("srun: error: n2: task 2: Killed\n", "node_failed"),
    ],
)
def test_an_attempt_that_lost_its_supervisor_gets_a_report(run, words, kind):
    (run / "attempts/0").mkdir()
    (run / "attempts/0" / srun.STEP_LOG).write_text(words)
    supervisor.Supervisor(run, slurm_job(run, RUNNING), load_run(run / "config.yaml").limits)._account_for(0)
    report = runs.read_report(run, 0)
    assert report is not None and report.kind == kind and words.split("error: ")[1].strip() in report.message


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
        ("partitoin=x", ["--set-site partitoin=x", "did you mean 'partition'"]),
        ("time=30", ["--set-site: slurm.time", "such as 04:00:00"]),
        ("slurm.cpus_per_node=4", ["slurm.cpus_per_node", "is 4", "hold 5 ranks"]),
        ("slurm.sbatch_args=[--nodes=3]", ["slurm.sbatch_args", "cluster.num_train_nodes"]),
        ("gpus_per_node=0", ["batch script"]),
    ],
)
def test_mistakes_in_a_site(config, capsys, override, words):
    sized = ["--set-site", "pretend_gpus=true", "--set-site", override]
    code = cli.main(["plan", "run.yaml", "--site", "generic-cuda", *sized])
    out, err = capsys.readouterr()
    assert code == (0 if "batch script" in words else 2)
    assert all(word in out + err for word in words), err


def fails(failure):
    def fail(*_, **__):
        raise failure

    return fail


SUBMIT = ["submit", "run.yaml", "--site", "testbed", "--detach"]


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


# ---- a job's own script -------------------------------------------------------------------------------------------


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "8(x2)", "SLURM_GPUS_ON_NODE": "4"}


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
def test_a_job_with_too_little_is_refused(tmp_path, given, words):
    loaded, site = read_run(write_inputs(tmp_path)), read_site("generic-cuda")
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
