"""What follows an attempt of a Slurm job, and what srun's words mean."""

import sys
from pathlib import Path

import pytest

from launcher import job, runs, slurm, srun, supervisor, verdict
from launcher.runs import Report
from runtime.load import load_run
from runtime.site import SiteConfig, Slurm
from runtime.topology import RankSlot, Topology

GRACE = slurm.Job(state="RUNNING", fields={"PreemptTime": "2026-11-29T23:10:39", "Restarts": "1"})
RUNNING = slurm.Job(state="RUNNING", fields={"PreemptTime": "None", "Restarts": "1"})


@pytest.fixture
def dead(monkeypatch) -> set[str]:
    """Nodes of n[1-3] that start no process, though Slurm still lists them."""
    nodes: set[str] = set()

    def call(*argv, env=None, **_):
        if argv[0] == "srun":
            assert env is not None and env["SLURM_JOB_ID"] == "7" and "SLURM_NTASKS" not in env
            assert argv[-2].endswith("/config.yaml") and argv[-1] == sys.executable, "it must see these"
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
    here, dead, lost, listed, nodes
):
    config = load_run("run.yaml", ["cluster.num_spare_nodes=1"])
    run = runs.create(config, SiteConfig(name="x", scheduler="slurm"))
    found = slurm_job(run, slurm.Job(state="RUNNING", nodes=listed))
    dead |= lost
    outlook = found.outlook(Report(kind="peer_lost", message=""), stopped=False)
    if nodes:
        assert outlook.next == "restart"
        assert list(found.plan(1).topology.nodes) == nodes
    else:
        assert outlook.next == "queued" and "2 nodes are needed: 1 left" in outlook.reason


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


@pytest.mark.parametrize(
    ("srun_said", "rank_said", "node", "words"),
    [
        ("srun: error: task 2 launch failed: Slurmd could not connect IO\n", "", "n2", "--exclude=n2"),
        (
            "srun: error: n2: task 2: Exited with exit code 2\n",
            "slurmstepd-n2: error: execve(): /p: No such",
            "n2",
            "all",
        ),
        (
            "srun: error: n2: task 2: Exited with exit code 1\n",
            "ImportError: No module named runtime.main",
            "n2",
            "all",
        ),
    ],
)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_node_that_sees_less_than_the_first_is_named(run, srun_said, rank_said, node, words, steps):
    """A user can mend it; a run that was under way goes on elsewhere."""
    ranks = [RankSlot(rank=i, node=n, local_rank=0, role="agent", device=None) for i, n in enumerate((0, 0, 1))]
    runs.write_topology(run, Topology(nodes=("n1", "n2"), ranks=tuple(ranks), engines=()))
    (run / "metrics.jsonl").write_text(f'{{"step": {steps}, "reward": 0.1}}\n' if steps else "")
    folder = run / "attempts/0"
    folder.mkdir()
    (folder / srun.HOST_FILE).write_text("n1\nn1\nn2\n")
    (folder / srun.STEP_LOG).write_text(srun_said)
    (folder / "rank-2.log").write_text(f"{rank_said}\nslurmstepd-n2: error: STEP CANCELLED\n")
    assert verdict.launch_failed(folder) == (not rank_said)
    report = verdict.judge(folder, verdict.Evidence(code=1, log=srun.STEP_LOG))
    assert (report.kind, report.node) == ("node_failed" if steps else "config", node)
    assert (
        f"could not be started on {node}" in report.message and words in report.message and "runs_dir" in report.message
    )


def test_a_node_that_is_gone_as_ranks_start_is_a_lost_peer(tmp_path):
    (tmp_path / srun.STEP_LOG).write_text(
        "srun: error: Task launch for StepId=7.0 failed on node n2: Communication connection failure\n"
    )
    assert verdict.launch_failed(tmp_path), "the others wait for it"
    assert verdict.judge(tmp_path, verdict.Evidence(code=-15, log=srun.STEP_LOG)).kind == "peer_lost"


def test_a_program_that_no_node_has_is_the_sites(run):
    runs.write_topology(run, Topology(nodes=("n1",), ranks=(), engines=()))
    folder = run / "attempts/0"
    folder.mkdir()
    (folder / srun.HOST_FILE).write_text("n1\n")
    (folder / "rank-0.log").write_text("slurmstepd: error: execve(): apptainer: No such file or directory\n")
    report = verdict.judge(folder, verdict.Evidence(code=2, log=srun.STEP_LOG))
    assert report.kind == "config" and "apptainer" in report.message and "slurm.srun_args" in report.message


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
