"""The testbed is what it says: eight separate nodes of two kinds, that can fail and come back."""

import subprocess
from pathlib import Path

import pytest

from tests.cluster.jobs import output, wait_for
from tests.cluster.testbed import NODES, Cluster

LIMIT_S = 60.0
SLEEP = "sleep 600"


def on(node: str, script: str, *flags: str) -> str:
    """What a shell script says as a job on that node."""
    return output("srun", "-p", "spot", "-w", node, "-N1", "-n1", *flags, "sh", "-c", script)


def test_all_nodes_are_idle(cluster: Cluster) -> None:
    """Soon: a run that has ended may still have its job for a moment."""
    wait_for("all nodes to be idle", lambda: output("sinfo", "-h", "-p", "urgent", "-o", "%D %t") == "8 idle")


def test_a_step_spans_nodes(cluster: Cluster) -> None:
    assert sorted(output("srun", "-N2", "--ntasks-per-node=2", "hostname").split()) == ["n1", "n1", "n2", "n2"]


@pytest.mark.parametrize(("node", "variable"), [("n1", "CUDA_VISIBLE_DEVICES"), ("n5", "ROCR_VISIBLE_DEVICES")])
def test_gpus_are_of_the_nodes_kind(cluster: Cluster, node: str, variable: str) -> None:
    assert on(node, f"echo ${variable}", "--gpus-per-node=4") == "0,1,2,3"


def test_nodes_share_nothing_but_files(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> None:
    marks = ("/tmp/mark", "/dev/shm/mark", f"{cluster.shared}/mark")
    on("n1", " && ".join(f"touch {mark}" for mark in marks))
    assert on("n2", f"ls {' '.join(marks)} 2>&- || true") == f"{cluster.shared}/mark"


@pytest.mark.parametrize("node", NODES)
def test_the_fabric_is_hsn0(cluster: Cluster, node: str) -> None:
    assert on(node, "ls /sys/class/net | xargs") == "hsn0 lo"
    assert f" {NODES[node]}/24 " in on(node, "ip -4 -o addr show hsn0")


def test_a_crashed_node_comes_back(cluster: Cluster) -> None:
    job = output("sbatch", "--parsable", "-p", "spot", "-w", "n4", "--no-requeue", "-o", "/dev/null", "--wrap", SLEEP)
    wait_for("the job to run", lambda: output("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING")
    cluster.kill("n4")
    cluster.revive("n4")
    assert on("n4", "pgrep -c sleep || true") == "0"
    output("scancel", job)


def test_without_accounting(cluster: Cluster) -> None:
    cluster.set_accounting(False)
    refused = subprocess.run(["sacct"], capture_output=True, text=True, timeout=LIMIT_S)
    cluster.set_accounting(True)
    assert "accounting storage is disabled" in refused.stderr
    assert output("srun", "hostname") == "n1"


def test_without_controller(cluster: Cluster) -> None:
    cluster.stop_controller()
    pinged = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=LIMIT_S)
    cluster.start_controller()
    assert "login1 is DOWN" in pinged.stdout
    assert output("srun", "hostname") == "n1"


def test_up_mends_what_is_left_of_a_crash(cluster: Cluster) -> None:
    output("sbatch", "--begin=now+1hour", "-o", "/dev/null", "--wrap", SLEEP)
    cluster.kill("n2")
    cluster.stop_controller()
    assert not cluster.is_well()
    cluster.up()
    assert cluster.is_well()
    assert output("squeue", "-h") == ""


def test_down_leaves_only_logs(cluster: Cluster) -> None:
    cluster.down()
    assert cluster.status() == "nothing runs\n"
    assert "sluice0" not in output("ip", "-o", "link")
    assert "sluice" not in Path("/etc/hosts").read_text()
    assert not Path("/run/slurm/conf").exists()
    assert {path.name for path in cluster.base.iterdir()} == {"log", "shared"}
    cluster.up()
