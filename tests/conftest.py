"""What several kinds of tests need."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def quickstart() -> Path:
    """The quickstart's model and data; made on first use, in under a minute."""
    folder = ROOT / "models/quickstart"
    command = [sys.executable, "-m", "runtime.quickstart", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    return folder
