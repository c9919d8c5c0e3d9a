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
TURNS = {"cluster": 0, "test_kills.py": 2, "runs": 3}
"""Of folders and files; of all others, 1."""


class ByFile(LoadScopeScheduling):
    """Where processes share the tests, files stay whole, and folders with a conftest.py: what that starts is shared."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0])
        return str(file.parent if (ROOT / file.parent / "conftest.py").exists() else file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins. Other whole runs come last, so that few of them meet it: they have limits of time."""
    items.sort(key=lambda item: TURNS.get(item.path.relative_to(ROOT / "tests").parts[0], 1))


@pytest.fixture(scope="session")
def quickstart() -> Path:
    """The quickstart's model and data; made on first use, which `make test` does before the tests."""
    folder = ROOT / "models/quickstart"
    folder.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "runtime.quickstart", "--out", str(folder)]
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other process may be making it
        subprocess.run(command, cwd=ROOT, check=True, timeout=560)
    return folder


@pytest.fixture(scope="module")
def runs_dir(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for runs that need the quickstart's model; whatever still runs in it at the end is killed."""
    folder = tmp_path_factory.mktemp("runs")
    yield folder
    for run in folder.iterdir():
        kill.kill(run)
