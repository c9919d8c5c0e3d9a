"""The supervisor over a stand-in world: which ends are restarted, what signals do, and that nothing is left."""

import errno
import fcntl
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import cli, commands, job, plan, processes, runs, supervisor, verdict
from launcher.plan import Machine
from runtime.load import load_run
from runtime.site import SiteConfig
from tests.unit.inputs import write_inputs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder as submit makes it."""
    monkeypatch.chdir(tmp_path)
    config = load_run(write_inputs(tmp_path))
    site = SiteConfig(name="local")
    return runs.create(config, site)


def state(run: Path) -> str:
    return runs.local_state(runs.read_status(run))


def supervise(run: Path, *parts: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.unit.world", "supervise", str(run), *parts]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(child: subprocess.Popen[str]) -> str:
    """Kind of the last report."""
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    return out.strip()


def wait_for(condition, what: str, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"waited {limit_s} s for {what}"
        time.sleep(0.05)


def below(pid: int) -> list[int]:
    return [child for child in processes.descendants(pid) if processes.started(child)]


def test_done(run):
    assert finish(supervise(run, "steps")) == "done"
    assert state(run) == "ended"
    assert runs.last_attempt(run) == 0
    assert (run / "attempts/0/config.yaml").read_text() == (run / "config.yaml").read_text()
    assert (run / "reward.png").stat().st_size > 1000
    assert "had to be killed" in (run / "supervisor.log").read_text(), "the child of the world that stayed"


def test_lost_peers_are_restarted_until_done(run):
    assert finish(supervise(run, "peer_lost", "killed", "done")) == "done"
    assert [runs.read_report(run, n).kind for n in range(3)] == ["peer_lost", "peer_lost", "done"]


def test_restarts_end_without_progress(run):
    assert finish(supervise(run, "engine_lost")) == "engine_lost"
    assert runs.last_attempt(run) == 2, "the first attempt and limits.attempts more"
    assert state(run) == "failed"
    assert "gave up" in (run / "supervisor.log").read_text()


def test_a_new_step_gives_new_attempts(run):
    assert finish(supervise(run, *["progress"] * 5, "bug")) == "bug"
    assert runs.last_attempt(run) == 5


@pytest.mark.parametrize("kind", ["config", "out_of_memory", "bug", "preempted"])
def test_other_ends_are_final(run, kind):
    assert finish(supervise(run, kind)) == kind
    assert runs.last_attempt(run) == 0
    assert state(run) == ("ended" if kind == "preempted" else "failed")


def test_a_world_without_a_report_gets_one(run):
    assert finish(supervise(run, "silent")) == "bug"
    report = runs.read_report(run, 0)
    assert "exit code 3" in report.message and "ValueError: seven" in report.message


def test_a_world_that_hangs_after_its_report_is_killed(run):
    began = time.monotonic()
    assert finish(supervise(run, "reports_and_hangs")) == "bug"
    assert time.monotonic() - began < 20
    assert "after its report" in (run / "supervisor.log").read_text()


def test_what_a_rank_said_inside_mpi_init_is_the_cause_of_what_others_report(run):
    assert finish(supervise(run, "wrong_pmi")) == "config"
    assert "different PMIs" in runs.read_report(run, 0).message
    assert "what ranks reported as they were ended: bug" in (run / "supervisor.log").read_text()


def test_cancel_lets_the_world_save(run, capsys):
    child = supervise(run, "saves")
    wait_for(lambda: state(run) == "running", "the world to run")
    assert cli.main(["cancel", str(run)]) == 0
    assert finish(child) == "preempted"
    assert state(run) == "cancelled"
    out = capsys.readouterr().out
    assert f"resume {run}` starts it from the beginning" in out or "resume` starts it from the beginning" in out
    assert cli.main(["cancel", str(run)]) == 0, "a second cancel finds nothing to do"


def test_a_second_signal_kills_a_world_that_hangs(run):
    child = supervise(run, "hangs")
    wait_for(lambda: state(run) == "running", "the world to run")
    family = below(child.pid)
    assert len(family) == 2
    commands.ask_to_stop(run, state(run))
    wait_for(lambda: state(run) == "ending", "the supervisor to pass the signal on")
    os.kill(child.pid, signal.SIGHUP)  # an order like others
    assert finish(child) == "preempted"
    assert runs.read_report(run, 0).message == "told to stop twice, so it was killed before it could save"
    assert not [pid for pid in family if processes.started(pid)]


def test_cancel_kills_when_the_world_does_not_stop_in_time(run):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("stop_s: 20.0", "stop_s: 0.5"))
    child = supervise(run, "hangs")
    wait_for(lambda: state(run) == "running", "the world to run")
    assert cli.main(["cancel", str(run)]) == 0
    assert finish(child) == "preempted"
    assert state(run) == "cancelled"


def test_on_a_full_disk_the_report_takes_the_place_of_a_checkpoint_that_was_begun(run, monkeypatch):
    begun, whole = (run / "checkpoints" / name for name in ("step-000002", "step-000001"))
    for folder in (begun, whole):
        folder.mkdir()
    (whole / "COMPLETE").touch()
    (run / "attempts/0").mkdir()
    write = Path.write_bytes

    def full(path, data):
        if begun.exists():
            write(path, b"")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    config = load_run(run / "config.yaml")
    watcher = supervisor.Supervisor(run, job.of(run, config, SiteConfig(name="local")), config.limits)
    watcher._say("running")
    assert begun.exists(), "a world may be writing it"
    watcher._write(run / "attempts/0", runs.Report(kind="config", message="the disk is full"))
    assert runs.read_report(run, 0).kind == "config" and whole.exists()
    assert [p.name for p in (run / "attempts/0").iterdir()] == ["report.json"]


def test_death_of_the_supervisor_takes_the_world_down(run, capsys):
    child = supervise(run, "mpiexec_sleeps")
    wait_for(lambda: len(below(child.pid)) == 5, "mpiexec, its proxy and three ranks")
    family = below(child.pid)
    child.kill()
    child.wait()
    wait_for(lambda: not any(processes.started(pid) for pid in family), "the world to end", limit_s=5)
    assert runs.read_status(run).state == "starting", "it had no time to say so"
    assert state(run) == "died"
    assert cli.main(["status", str(run)]) == 0
    out = capsys.readouterr().out
    assert "died" in out and "resume" in out
    assert cli.main(["cancel", str(run)]) == 0
    assert state(run) == "cancelled"


def test_a_killed_rank_ends_the_world_and_the_next_attempt_starts(run):
    assert finish(supervise(run, "mpiexec_loses_a_rank", "done")) == "done"
    report = runs.read_report(run, 0)
    assert (report.kind, report.rank) in (("peer_lost", 1), ("peer_lost", None))
    assert "SIGKILL" in report.message


def test_a_run_that_was_cancelled_while_it_waited_starts_nothing(run):
    (run / runs.CANCEL_MARK).touch()
    assert finish(supervise(run, "steps")) == "preempted"
    assert state(run) == "cancelled" and runs.last_attempt(run) == -1


def test_two_supervisors_never_share_a_run(run):
    first = supervise(run, "saves")
    wait_for(lambda: state(run) == "running", "the first supervisor")
    with (run / "supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.run([sys.executable, "-m", "tests.unit.world", "main", str(run)], cwd=ROOT, timeout=60)
    assert second.returncode == 2
    assert runs.read_status(run).pid == first.pid
    first.terminate()
    assert finish(first) == "preempted"


# ---- judging a world that left no report -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "seen", "kind", "rank", "words"),
    [
        ("[mpiexec@n] Exit codes: [localhost] 0,9,0\n", {"code": 9}, "peer_lost", 1, "SIGKILL"),
        (
            "[mpiexec@n] Exit codes: [localhost] 9,9,9\nEXIT STRING: Killed (signal 9)\n",
            {"code": 9},
            "peer_lost",
            None,
            "one of the ranks 0, 1, 2 was killed",
        ),
        ("[mpiexec@n] Exit codes: [localhost] 9,256,9\n", {"code": 1}, "bug", 1, "exit code 1"),
        ("[mpiexec@n] Exit codes: [localhost] 0,9,0\n", {"code": 9, "oom_killed": True}, "out_of_memory", 1, "memory"),
        ("[mpiexec@n] Exit codes: [localhost] 0,0,11\n", {"code": 11}, "peer_lost", 2, "SIGSEGV"),
        ("[mpiexec@n] Exit codes: [localhost] 256,0,0\n", {"code": 1}, "bug", 0, "exit code 1; its last line: bad"),
        ("[mpiexec@n] Exit codes: [n1] 0,0 [n2] 0,1792\n", {"code": 7}, "bug", 3, "exit code 7"),
        ("EXIT STRING: Killed (signal 9)\n", {"code": 9}, "peer_lost", None, "SIGKILL"),
        ("", {"code": -9}, "peer_lost", None, "mpiexec was killed by SIGKILL"),
        ("no such program\n", {"code": 127}, "bug", None, "exit code 127; its last line: no such program"),
        ("", {"code": 0}, "bug", None, "without a report"),
        ("", {"code": 0, "order": "stop"}, "preempted", None, "told to stop"),
        (
            "[mpiexec@n] Exit codes: [localhost] 15,15,15\n",
            {"code": 15, "order": "stop"},
            "preempted",
            0,
            "told to stop",
        ),
        ("", {"code": -9, "order": "stop", "overdue_s": 3.0}, "preempted", None, "not at a boundary after 3 s"),
        ("", {"code": -9, "order": "timeout", "overdue_s": 3.0}, "timeout", None, "not at a boundary after 3 s"),
        ("[mpiexec@n] Exit codes: [localhost] 0,256,0\n", {"code": 1, "order": "stop"}, "bug", 1, "exit code 1"),
        (
            "[mpiexec@n] Exit codes: [localhost] 9,9,10\n",
            {"code": 9, "order": "stop"},
            "preempted",
            None,
            "told to stop",
        ),
        (
            "[mpiexec@n] Exit codes: [localhost] 9,9,9\n",
            {"code": 9, "order": "stop", "early": True},
            "preempted",
            None,
            "before there was anything",
        ),
    ],
)
def test_judge(tmp_path, output, seen, kind, rank, words):
    (tmp_path / "mpiexec.log").write_text(output)
    (tmp_path / "rank-0.log").write_text("first\nbad\n")
    report = verdict.judge(tmp_path, verdict.Evidence(**seen))
    assert report.kind == kind
    assert report.rank == (None if kind in ("preempted", "timeout") else rank)
    assert words in report.message


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_command_covers_every_rank_once_and_gives_each_node_its_gpus(tmp_path):
    config = load_run(write_inputs(tmp_path), ["cluster.num_rollout_nodes=2"])
    site = SiteConfig(name="x", gpus_per_node=2, env={"NCCL_DEBUG": "WARN"})
    machine = Machine(python="/py", mpiexec="/mpiexec", gpus=(1, 3, 4, 5, 6, 7))
    planned = plan.make(config, site, Path("/a%b/run"), 7, machine)
    sections = " ".join(planned.command).split(" : ")
    counts = [int(section.split("-n ")[1].split()[0]) for section in sections]
    assert counts == [3, 1, 1] and sum(counts) == planned.topology.world_size
    masks = [section.split("CUDA_VISIBLE_DEVICES ")[1].split()[0] for section in sections]
    assert masks == ["1,3", "4,5", "6,7"]
    assert all("-m mpi4py -m runtime.main --run-dir /a%b/run --attempt 7" in section for section in sections)
    assert "/a%%b/run/attempts/7/rank-%r.log" in sections[0]
    assert planned.env["NCCL_DEBUG"] == "WARN" and planned.env["HF_HUB_OFFLINE"] == "1"
    assert planned.env["NCCL_CUMEM_ENABLE"] == "0", "as SGLang has it"


def test_the_plan_as_people_read_it(tmp_path):
    config = load_run(write_inputs(tmp_path))
    machine = Machine(python="/venv/bin/python", mpiexec="/venv/bin/mpiexec", gpus=())
    site = SiteConfig(name="local", env={"A": "two words"})
    text = plan.describe(plan.make(config, site, Path("/runs/RUN"), 0, machine), config, site)
    golden = Path(__file__).parents[1] / "golden" / "plan_local.txt"
    text = text.replace(str(plan.PROJECT), "PROJECT").replace(f"{tmp_path}/", "")
    assert text + "\n" == golden.read_text()


def test_a_world_inherits_nothing_of_another_one():
    inherited = {"PMI_RANK": "1", "PMIX_ID": "2", "OMPI_X": "3", "SLURM_NTASKS": "4", "HOME": "/h", "PYTHONPATH": "/p"}
    env = plan.clean_env(inherited, {"PYTHONPATH": "/q", "A": "b"})
    assert env == {"HOME": "/h", "PYTHONPATH": "/q:/p", "A": "b"}


def test_files_of_a_run_are_private(run):
    assert run.stat().st_mode & 0o777 == 0o700
    assert (run / "secrets").stat().st_mode & 0o777 == 0o700
    assert load_run(run / "config.yaml").name == "tiny"
    assert list((run / "attempts").iterdir()) == []


def test_a_process_is_known_by_pid_and_start():
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    identity = processes.started(child.pid)
    assert identity > 0
    assert processes.signal_process(child.pid, signal.SIGKILL)
    wait_for(lambda: processes.started(child.pid) == 0, "a zombie to count as gone")
    child.communicate()
    assert not processes.signal_process(child.pid, signal.SIGKILL)


def test_shared_memory_that_nobody_maps_is_deleted(tmp_path):
    for name in ("mpich_shm_dead_0", "mpich_shm_alive_0", "other"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    with (tmp_path / "mpich_shm_alive_0").open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert processes.remove_stale_shared_memory(tmp_path) == []  # too young
        assert processes.remove_stale_shared_memory(tmp_path, min_age_s=-1.0) == ["mpich_shm_dead_0"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mpich_shm_alive_0", "other"]


def test_topologies_are_deleted_when_no_process_manager_lives(tmp_path):
    (tmp_path / "hydra_hwloc_xmlfile_aB3").touch()
    (tmp_path / "manager").symlink_to(shutil.which("sleep"))
    with subprocess.Popen([tmp_path / "manager", "60"]) as manager:
        wait_for(lambda: Path(f"/proc/{manager.pid}/comm").read_text() == "manager\n", "exec")
        assert processes.remove_stale_topologies(tmp_path, "manager") == []
        manager.kill()
    assert processes.remove_stale_topologies(tmp_path, "manager") == ["hydra_hwloc_xmlfile_aB3"]
    assert [path.name for path in tmp_path.iterdir()] == ["manager"]
