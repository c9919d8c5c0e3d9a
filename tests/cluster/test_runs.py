"""Whole runs on a real Slurm: where ranks land, what they see, and that they learn there as on one machine."""

import json
import re
import sys
from pathlib import Path

import pytest

from launcher import runs
from tests.cluster import jobs
from tests.cluster.testbed import NODES, Cluster
from tests.tools import kill

LEARNING_STEPS = 15
PLACE = re.compile(
    r"rank (\d+) of (\d+), (\w+), local rank (\d+) on (\w+) \(host (\w+)\), fabric hsn0 (\S+), (.*)", re.MULTILINE
)

SGLANG = jobs.ROOT / ".venv-sglang/bin/python"
TWO_AND_TWO = ("cluster.num_train_nodes=2", "cluster.num_rollout_nodes=2")
TWO_AND_TWO_ROLES = ["control", "trainer", "agent", "trainer", "agent", "agent"]
OPENMPI = ("slurm.mpi=pmix", "env.MPI4PY_MPIABI=openmpi")


def places(run: Path) -> dict[int, tuple[str, ...]]:
    """rank -> (world size, role, local rank, node, host, address, visible devices), as each rank said."""
    found = {}
    for rank, text in jobs.rank_logs(run).items():
        match = PLACE.search(text)
        assert match and int(match.group(1)) == rank, text
        found[rank] = match.groups()[1:]
    return found


def check_places(run: Path, nodes: list[str], roles: list[str], gpus: str = "0") -> None:
    """Ranks stand in order on these nodes, at the fabric's addresses, with one list of GPUs each."""
    topology = json.loads((run / "topology.json").read_text())
    assert topology["nodes"] == sorted(set(nodes))
    found = places(run)
    assert sorted(found) == list(range(len(nodes)))
    for rank, (size, role, local, node, host, address, devices) in found.items():
        assert (int(size), role, node, host) == (len(nodes), roles[rank], nodes[rank], nodes[rank])
        assert int(local) == nodes[:rank].count(node)
        assert address == NODES[node]
        variable = "CUDA_VISIBLE_DEVICES" if node <= "n4" else "ROCR_VISIBLE_DEVICES"
        assert devices == f"{variable}={gpus}"


def test_a_submitted_run_learns_over_two_nodes(cluster: Cluster, quickstart: Path) -> None:
    run = jobs.submit(
        cluster.shared,
        f"num_steps={LEARNING_STEPS}",
        f"evaluation.interval={LEARNING_STEPS}",
        config=jobs.ROOT / "configs/quickstart.yaml",
    )
    jobs.wait_end(run, "done")
    check_places(run, ["n1", "n1", "n2"], ["control", "trainer", "agent"])
    check_learned(run)
    assert "Slurm" not in jobs.said(run)


@pytest.mark.parametrize("steps", [2, pytest.param(LEARNING_STEPS, marks=pytest.mark.long)])
def test_the_quickstart_runs_colocated_over_two_nodes(cluster: Cluster, quickstart: Path, steps: int) -> None:
    """Weights go through files, as they would on GPUs."""
    learns = steps == LEARNING_STEPS
    run = jobs.submit(
        cluster.shared,
        "cluster={mode: colocated, num_train_nodes: 2}",
        "sync.channel=disk",
        f"num_steps={steps}",
        f"evaluation.interval={steps if learns else 0}",
        *([] if learns else ["evaluation.sets=[]", "checkpoint.export=false"]),
        site=("partition=rocm",),
        config=jobs.ROOT / "configs/quickstart.yaml",
    )
    jobs.wait_end(run, "done", 400.0)
    check_places(run, ["n5", "n5", "n6", "n6"], ["control", "trainer", "agent", "trainer"])
    jobs.trained_once(run, steps)
    turns = [phase["phase"] for phase in kill.phases(run) if phase["phase"] in ("rollout", "train", "push")]
    assert turns == ["push", *["rollout", "train", "push"] * steps]
    pushes = [event["engines"] for event in kill.events(run) if event["kind"] == "pushed"]
    assert pushes == [[0, 1]] * (steps + 1), "the engine of each node has every version"
    if learns:
        check_learned(run)


def check_learned(run: Path) -> None:
    """The quickstart's task, over LEARNING_STEPS."""
    first, last = [line["eval/heldout/accuracy"] for line in kill.metrics(run) if "eval/heldout/accuracy" in line]
    assert 0.15 < first < 0.35 < first + 0.1 < last
    jobs.trained_once(run, LEARNING_STEPS)


MEGATRON_AND_SGLANG = (
    "trainer.kind=megatron",
    "trainer.parallel.tensor=2",
    "rollout.engine=sglang",
    "rollout.gpus_per_engine=2",
    f"rollout.engine_options={{python: {SGLANG}, max_length: 64}}",
)


def megatron_and_sglang(cluster: Cluster, *words: str, config: Path, limit_s: float) -> Path:
    """A run that is done, with Megatron on two GPUs of one node and SGLang on another."""
    site = ("gpus_per_node=2", "slurm.gpu_request=gres")
    run = jobs.submit(cluster.shared, *MEGATRON_AND_SGLANG, *words, site=site, config=config)
    jobs.wait_end(run, "done", limit_s)
    check_places(run, ["n1", "n1", "n1", "n2"], ["control", "trainer", "trainer", "agent"], gpus="0,1")
    assert max(line["mismatch"] for line in kill.metrics(run) if "mismatch" in line) < 1e-5
    return run


def test_megatron_and_sglang_on_a_node_each_train(cluster: Cluster, quickstart: Path) -> None:
    run = megatron_and_sglang(cluster, "num_steps=2", config=jobs.TINY, limit_s=240)
    jobs.trained_once(run, 2)


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_megatron_and_sglang_on_a_node_each_learn(cluster: Cluster, quickstart: Path) -> None:
    steps = (f"num_steps={LEARNING_STEPS}", f"evaluation.interval={LEARNING_STEPS}")
    check_learned(megatron_and_sglang(cluster, *steps, config=jobs.ROOT / "configs/quickstart.yaml", limit_s=900))


def test_a_template_trains_on_cuda_nodes(cluster: Cluster, quickstart: Path) -> None:
    run = by_template(cluster, "cuda", "--gpus-per-node=2", site=("gpus_per_node=2",))
    check_places(run, ["n1", "n1", "n1", "n2"], ["control", "trainer", "trainer", "agent"], gpus="0,1")
    jobs.trained_once(run, 2)


def test_a_template_trains_on_four_rocm_nodes_with_openmpi(cluster: Cluster, quickstart: Path) -> None:
    run = by_template(cluster, "rocm", "--nodes=4", "--gpus-per-node=1", site=OPENMPI, sizes=TWO_AND_TWO)
    check_places(run, ["n5", "n5", "n6", "n6", "n7", "n8"], TWO_AND_TWO_ROLES)
    jobs.trained_once(run, 2)


def by_template(cluster: Cluster, kind: str, *options: str, site: tuple[str, ...], sizes: tuple[str, ...] = ()) -> Path:
    """The run folder of two steps that sbatch started from the template as it is, and that are done."""
    shared = cluster.shared / f"template-{kind}"
    shared.mkdir()
    told = ["-p", kind, f"--output={shared}/%j.log", *options]
    words = [x for word in ("slurm.gpu_request=gres", *site) for x in ("--set-site", word)]
    words += [x for word in ("num_steps=2", f"runs_dir={shared}/runs", *sizes) for x in ("--set", word)]
    template = f"sbatch/generic-{kind}.sbatch"
    number = jobs.output("sbatch", "--parsable", *told, template, str(jobs.TINY), *words, "--site", "testbed")
    jobs.wait_for("the template's run", lambda: any((shared / "runs").glob("*/job/id")))
    (run,) = (shared / "runs").iterdir()
    jobs.wait_end(run, "done")
    assert runs.job_id(run) == number
    jobs.wait_for("its last words", lambda: "ended" in (shared / f"{number}.log").read_text())
    return run


@pytest.mark.long
def test_a_submitted_run_trains_on_four_cuda_nodes(cluster: Cluster, quickstart: Path) -> None:
    run = jobs.submit(cluster.shared, "num_steps=2", *TWO_AND_TWO)
    jobs.wait_end(run, "done")
    check_places(run, ["n1", "n1", "n2", "n2", "n3", "n4"], TWO_AND_TWO_ROLES)
    jobs.trained_once(run, 2)


@pytest.mark.parametrize(
    ("site", "advice"),
    [
        (("slurm.mpi=pmix",), "pmi2"),  # MPICH aborts in MPI_Init
        (("slurm.mpi=none",), "pmi2"),  # MPICH makes worlds of one rank
        (("slurm.mpi=pmi2", "env.MPI4PY_MPIABI=openmpi"), "pmix"),  # OpenMPI aborts in MPI_Init
    ],
)
def test_a_wrong_pairing_of_mpi_is_refused_with_advice(
    cluster: Cluster, quickstart: Path, site: tuple[str, ...], advice: str
) -> None:
    run = jobs.submit(cluster.shared, site=site)
    jobs.wait_end(run, "config")
    report = runs.read_report(run, 0)
    assert report is not None and advice in report.message and "different PMIs" in report.message
    assert runs.last_attempt(run) == 0


@pytest.mark.parametrize("what", ["runs", "python"])
def test_a_node_that_sees_less_than_the_first_is_named_at_once(cluster: Cluster, quickstart: Path, what: str) -> None:
    shared = cluster.shared / "seen-by-one"
    shared.mkdir(exist_ok=True)
    with jobs.hidden(shared if what == "runs" else Path(sys.prefix), "n2"):
        run = jobs.submit(shared, site=('slurm.sbatch_args=["--nodelist=n1,n2"]',))
        jobs.wait_end(run, "config", 60.0)
    report = runs.read_report(run, 0)
    assert report is not None and report.node == "n2" and runs.last_attempt(run) == 0
    assert "could not be started on n2" in report.message and "--exclude=n2" in report.message
