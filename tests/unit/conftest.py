"""What tests of the launcher begin with."""

import sys

import pytest

from launcher import runs
from runtime.load import load_run
from runtime.site import SiteConfig
from tests.unit.inputs import write_inputs


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with a good run.yaml and what it names."""
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.fixture
def config(here):
    """Of a run over three nodes."""
    return load_run("run.yaml", ["cluster.num_rollout_nodes=2"])


@pytest.fixture
def run(config):
    """The folder of a run that Slurm has as job 7."""
    folder = runs.create(config, SiteConfig(name="x", scheduler="slurm"))
    (folder / runs.SCRIPT).write_text("")
    (folder / runs.JOB_ID).write_text("7")
    return folder
