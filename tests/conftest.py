"""What several kinds of tests need."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools import kill

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def quickstart() -> Path:
    """The quickstart's model and data; made on first use, in under a minute."""
    folder = ROOT / "models/quickstart"
    command = [sys.executable, "-m", "runtime.quickstart", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    return folder


@pytest.fixture(scope="module")
def runs_dir(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for runs that need the quickstart's model; whatever still runs in it at the end is killed."""
    folder = tmp_path_factory.mktemp("runs")
    yield folder
    for run in folder.iterdir():
        kill.kill(run)
