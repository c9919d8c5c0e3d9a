"""What several kinds of tests need."""

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.tools import kill

ROOT = Path(__file__).parents[1]


class ByFolder(LoadScopeScheduling):
    """Where processes share the tests, a folder stays whole: its tests share what is slow to start."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("/")[1]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFolder:
    return ByFolder(config, log)


@pytest.fixture(scope="session")
def quickstart() -> Path:
    """The quickstart's model and data; made on first use, in under a minute."""
    folder = ROOT / "models/quickstart"
    folder.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "runtime.quickstart", "--out", str(folder)]
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other process may be making it
        subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    return folder


@pytest.fixture(scope="module")
def runs_dir(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for runs that need the quickstart's model; whatever still runs in it at the end is killed."""
    folder = tmp_path_factory.mktemp("runs")
    yield folder
    for run in folder.iterdir():
        kill.kill(run)
