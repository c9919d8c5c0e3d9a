"""The cluster that the tests here run on. Where there can be none they are left out, and the summary says so.

SLUICE_CLUSTER_TESTS=require makes that a failure.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import testbed

LEFT_OUT: pytest.StashKey[str] = pytest.StashKey()
LOCK = Path("/run/sluice-testbed.lock")
LOCK_LIMIT_S = 480.0


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[testbed.Cluster]:
    """A fresh testbed; one that runs already is ended first."""
    if reason := testbed.obstacle():
        if os.environ.get("SLUICE_CLUSTER_TESTS") == "require":
            pytest.fail(f"the cluster tests are required, but {reason}")
        request.config.stash[LEFT_OUT] = reason
        pytest.skip(reason)
    found = testbed.Cluster()
    with only_one_session():
        testbed.install()
        found.down()
        found.up()
        yield found
        found.down()


@contextmanager
def only_one_session() -> Iterator[None]:
    """The machine has one testbed: wait until another session is done with it."""
    end = time.monotonic() + LOCK_LIMIT_S
    with LOCK.open("a+") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                lock.seek(0)
                if time.monotonic() > end:
                    pytest.fail(f"waited {LOCK_LIMIT_S:.0f} s for the testbed, which process {lock.read()} uses")
                time.sleep(0.5)
        lock.truncate(0)
        print(os.getpid(), file=lock, end="", flush=True)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if reason := config.stash.get(LEFT_OUT, ""):
        terminalreporter.section("cluster tests left out", yellow=True)
        terminalreporter.line(f"{reason}; the rest says nothing about a real Slurm")
