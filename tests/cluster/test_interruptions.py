"""What clusters do to jobs: preempt, requeue, cancel them, end them at their walltime, lose a rank of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import cli, runs, slurm
from tests.cluster import jobs
from tests.cluster.testbed import Cluster

STEPS = 60
MORE = ("num_steps=60", "checkpoint.interval=5")


def job_of(run: Path) -> slurm.Job:
    found = slurm.job(runs.job_id(run))
    assert found is not None
    return found


def attempts(run: Path) -> list[str]:
    """How each attempt ended so far."""
    reports = [runs.read_report(run, n) for n in range(runs.last_attempt(run) + 1)]
    return [report.kind for report in reports if report is not None]


def rank_pids(run: Path, rank: int) -> list[int]:
    """Processes of a rank, seen from the machine that holds all nodes."""
    wanted = (str(run).encode(), f"SLURM_PROCID={rank}\0".encode())
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        if b"runtime.main" in command and wanted[0] in command and wanted[1] in environment:
            found.append(int(process.name))
    return found


def preempt() -> str:
    """Take all nodes for two seconds; the job's number."""
    wanted = ["-p", "urgent", "-N8", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "sleep 2"]
    return jobs.output("sbatch", "--parsable", *wanted)


@pytest.fixture
def tidy() -> Iterator[None]:
    """No job outlives its test."""
    yield
    jobs.output("scancel", "--user", str(os.getuid()))
    jobs.wait_for("all jobs to end", lambda: not jobs.output("squeue", "-h"))


def test_one_run_is_preempted_requeued_and_loses_a_rank(cluster: Cluster, quickstart: Path, tidy: None) -> None:
    """Each time it saves what it can and goes on by itself; at its end nothing is lost or doubled."""
    run = jobs.submit(cluster.shared, *MORE, site=("partition=spot",))
    jobs.wait_step(run, 3)
    assert jobs.state(run) == "running"

    preempt()
    jobs.wait_for("the preemption to be seen", lambda: attempts(run) == ["preempted"])
    jobs.wait_for("the job to wait", lambda: jobs.state(run) == "queued")
    saved = runs.last_step(run)
    jobs.wait_step(run, saved + 2)
    assert int(job_of(run).fields["Restarts"]) == 1 and jobs.state(run) == "running"

    (rank,) = rank_pids(run, 1)
    os.kill(rank, signal.SIGKILL)
    jobs.wait_for("the lost rank to be seen", lambda: attempts(run) == ["preempted", "peer_lost"])
    jobs.wait_step(run, runs.last_step(run) + 2)
    assert int(job_of(run).fields["Restarts"]) == 1, "a lost rank is restarted in the same job"

    jobs.output("scontrol", "requeue", runs.job_id(run))
    jobs.wait_for("the requeue to be seen", lambda: attempts(run) == ["preempted", "peer_lost", "preempted"])
    jobs.wait_end(run, "done")
    assert jobs.state(run) == "ended"
    jobs.trained_once(run, STEPS)


@pytest.mark.long
@pytest.mark.parametrize("heartbeat_s", [10, 60])
def test_a_spare_node_takes_the_place_of_one_that_crashes(
    cluster: Cluster, quickstart: Path, tidy: None, heartbeat_s: int
) -> None:
    """In the same job, whether the run's own heartbeat notices it first or Slurm."""
    words = ("cluster.num_spare_nodes=1", f"limits.heartbeat_s={heartbeat_s}", "num_steps=30")
    run = jobs.submit(cluster.shared, *words, site=("time=00:20:00",))
    jobs.wait_step(run, 3)
    begun = time.monotonic()
    cluster.kill("n2")
    try:
        jobs.wait_for("the loss to be seen", lambda: len(attempts(run)) == 1)
        print(f"seen after {time.monotonic() - begun:.0f} s: {attempts(run)}")
        jobs.wait_step(run, runs.last_step(run) + 1)
        print(f"a new step after {time.monotonic() - begun:.0f} s")
        jobs.wait_end(run, "done")
    finally:
        cluster.revive("n2")
    assert attempts(run) in (["peer_lost", "done"], ["node_failed", "done"])
    assert json.loads((run / "topology.json").read_text())["nodes"] == ["n1", "n3"]
    assert int(job_of(run).fields["Restarts"]) == 0
    jobs.trained_once(run, 30)


@pytest.mark.long
def test_without_a_spare_a_crashed_node_is_replaced_through_the_queue(
    cluster: Cluster, quickstart: Path, tidy: None
) -> None:
    """Whoever finds it first: Slurm queues the job again, the run has a further job follow."""
    run = jobs.submit(cluster.shared, "limits.heartbeat_s=10", "num_steps=20")
    jobs.wait_step(run, 3)
    first = runs.job_id(run)
    cluster.kill("n2")
    try:
        jobs.wait_end(run, "done")
    finally:
        cluster.revive("n2")
    assert "n2" not in json.loads((run / "topology.json").read_text())["nodes"]
    if runs.job_id(run) == first:
        assert job_of(run).fields["Restarts"] == "1"
    else:
        assert "lost n2, and 2 nodes are needed: 1 left" in jobs.said(run)
        assert job_of(run).fields["Restarts"] == "0"
    jobs.trained_once(run, 20)


def test_a_rank_lost_within_the_grace_is_no_ordinary_loss(cluster: Cluster, quickstart: Path, tidy: None) -> None:
    """Its job is not restarted on nodes it is losing, but queued again."""
    run = jobs.submit(cluster.shared, *MORE, "limits.stop_s=60", site=("partition=spot",))
    jobs.wait_step(run, 1)
    (rank,) = rank_pids(run, 1)
    os.kill(rank, signal.SIGSTOP)  # so that it cannot save before it dies
    preempt()
    jobs.wait_for("the grace to begin", lambda: job_of(run).is_preempted)
    os.kill(rank, signal.SIGKILL)
    jobs.wait_for("the job to wait", lambda: jobs.state(run) == "queued")
    assert attempts(run) == ["peer_lost"]
    assert runs.last_attempt(run) == 0
    assert cli.main(["cancel", str(run)]) == 0
    assert jobs.state(run) == "cancelled"


@pytest.mark.long
def test_a_preempted_job_of_a_partition_that_cancels_goes_on(cluster: Cluster, quickstart: Path, tidy: None) -> None:
    run = jobs.submit(cluster.shared, *MORE, site=("partition=spotcancel",))
    jobs.wait_step(run, 1)
    preempt()
    jobs.wait_for("the preemption to be seen", lambda: attempts(run) == ["preempted"])
    jobs.wait_step(run, runs.last_step(run) + 1)
    assert runs.last_attempt(run) == 1


@pytest.mark.long
def test_a_run_goes_on_over_walltimes(cluster: Cluster, quickstart: Path, tidy: None) -> None:
    """Slurm says 65 s (and up to 30 s more) before the end of two minutes that time is short."""
    run = jobs.submit(cluster.shared, "num_steps=10000", "limits.stop_s=5", site=("time=00:02:00",))
    jobs.wait_for("the walltime to be seen", lambda: attempts(run) == ["timeout"])
    done = runs.last_step(run)
    assert done > 0
    jobs.wait_step(run, done + 1)
    assert int(job_of(run).fields["Restarts"]) == 1
    assert "timeout" in jobs.said(run)


def test_cancelled_by_others_or_by_its_owner_a_run_saves_and_can_go_on(
    cluster: Cluster, quickstart: Path, tidy: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = jobs.submit(cluster.shared, *MORE)
    jobs.wait_step(run, 1)
    jobs.output("scancel", runs.job_id(run))
    jobs.wait_for("the run to end", lambda: jobs.state(run) == "cancelled")
    assert attempts(run) == ["preempted"], jobs.story()
    done = runs.last_step(run)

    assert cli.main(["resume", str(run), "--detach", "--set", f"num_steps={done + 30}"]) == 0
    jobs.wait_step(run, done + 1)
    capsys.readouterr()
    assert cli.main(["cancel", str(run)]) == 0
    assert "cancelled" in capsys.readouterr().out
    assert attempts(run) == ["preempted", "preempted"]
    jobs.wait_for("Slurm to forget the job", lambda: not jobs.output("squeue", "-h"))
    jobs.trained_once(run, runs.last_step(run))


def test_a_waiting_run_says_why_and_is_cancelled_at_once(
    cluster: Cluster, quickstart: Path, tidy: None, capsys: pytest.CaptureFixture[str]
) -> None:
    other = jobs.output("sbatch", "--parsable", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 100")
    run = jobs.submit(cluster.shared)
    assert cli.main(["status", str(run)]) == 0
    said = capsys.readouterr().out
    assert "state    queued" in said and "waits: " in said
    assert cli.main(["cancel", str(run)]) == 0
    assert jobs.state(run) == "cancelled" and not (run / "attempts/0").exists()
    jobs.output("scancel", other)


def test_status_is_right_without_accounting_and_while_slurm_is_away(
    cluster: Cluster, quickstart: Path, tidy: None, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.set_accounting(False)
    try:
        run = jobs.submit(cluster.shared, "num_steps=10000")
        jobs.wait_step(run, 1)
        cluster.stop_controller()
        try:
            assert cli.main(["status", str(run)]) == 0
            said = capsys.readouterr().out
            assert "state    running" in said and "Slurm does not answer" in said
            done = runs.last_step(run)
            jobs.wait_step(run, done + 2)
        finally:
            cluster.start_controller()
        assert jobs.state(run) == "running"
        jobs.output("scancel", "--signal=KILL", "--full", runs.job_id(run))
        jobs.wait_for("the end to be seen", lambda: jobs.state(run) in ("cancelled", "failed", "died"))
    finally:
        cluster.set_accounting(True)


def test_a_refused_job_leaves_nothing(cluster: Cluster, quickstart: Path, tidy: None) -> None:
    before = set((cluster.shared / "runs").iterdir())
    command = ["submit", str(jobs.TINY), "--site", "testbed", "--set", f"runs_dir={cluster.shared / 'runs'}"]
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *command, "--set-site", "partition=nowhere"],
        cwd=jobs.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "invalid partition" in done.stderr and "--set-site partition" in done.stderr
    assert set((cluster.shared / "runs").iterdir()) == before
