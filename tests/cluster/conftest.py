"""The cluster that the tests here run on. Where there can be none they are left out, and the summary says so.

SLUICE_CLUSTER_TESTS=require makes that a failure.
"""

import os
from collections.abc import Iterator

import pytest

from tests.cluster import testbed

LEFT_OUT: pytest.StashKey[str] = pytest.StashKey()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[testbed.Cluster]:
    """A fresh testbed; one that runs already is ended first."""
    if reason := testbed.obstacle():
        if os.environ.get("SLUICE_CLUSTER_TESTS") == "require":
            pytest.fail(f"the cluster tests are required, but {reason}")
        request.config.stash[LEFT_OUT] = reason
        pytest.skip(reason)
    testbed.install()
    found = testbed.Cluster()
    found.down()
    found.up()
    yield found
    found.down()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if reason := config.stash.get(LEFT_OUT, ""):
        terminalreporter.section("cluster tests left out", yellow=True)
        terminalreporter.line(f"{reason}; the rest says nothing about a real Slurm")
