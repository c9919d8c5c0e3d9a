"""The MPI world: four ranks run all of cases.py in one launch; two more launches are meant to fail."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
CASES = [
    line.split()[1].partition("(")[0]
    for line in (HERE / "cases.py").read_text().splitlines()
    if line.startswith("def ") and line.endswith("(world):")
]


def launch(num_ranks, argument):
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    command = [mpiexec, "-n", str(num_ranks), sys.executable, "-m", "mpi4py", str(HERE / "cases.py"), argument]
    return subprocess.run(command, cwd=HERE.parents[1], env=ENVIRONMENT, capture_output=True, text=True, timeout=90)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    done = launch(4, str(folder))
    return done, [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_the_world_ends_well(results):
    done, by_rank = results
    assert done.returncode == 0, done.stderr
    assert len(by_rank) == 4


@pytest.mark.parametrize("case", CASES)
def test_case(results, case):
    done, by_rank = results
    assert by_rank, done.stderr
    assert [rank.get(case, "not reached") for rank in by_rank] == ["ok"] * 4


def test_a_world_of_another_size_says_what_is_wrong():
    done = launch(2, "--any")
    assert done.returncode != 0
    for words in ("2 ranks, but the topology has 4", "MPICH Version: ", "slurm.mpi: pmi2"):
        assert words in done.stderr


def test_one_rank_alone_says_so_too():
    """What a wrong --mpi makes of each rank."""
    command = [sys.executable, "-m", "mpi4py", str(HERE / "cases.py"), "--any"]
    done = subprocess.run(command, cwd=HERE.parents[1], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "1 ranks, but the topology has 4" in done.stderr
    assert "many worlds of size 1" in done.stderr


def test_ranks_on_the_wrong_nodes_say_so():
    done = launch(4, "--nodes")
    assert done.returncode != 0
    assert re.search(r"of 4 ranks on host .* the topology makes it \d of [13] on node [ab] \(MPICH", done.stderr)


def test_an_exception_in_one_rank_ends_all_within_five_seconds():
    start = time.monotonic()
    done = launch(4, "--raise")
    assert time.monotonic() - start < 5.0
    assert done.returncode != 0
    assert "RuntimeError: rank 2 fails" in done.stderr
