"""Modules of a user's own beside the config, where the current directory is another: launcher and ranks find them."""

import sys
from pathlib import Path

import pytest

from launcher import cli, plan, runs
from runtime import plugins, topology
from runtime.config import DataSet
from runtime.errors import ConfigError
from runtime.load import load_run
from runtime.rank import Rank
from runtime.rollout.scoring import RewardPool
from runtime.site import SiteConfig

MODULE = """
import msgspec

class Config(msgspec.Struct):
    pass

def build(options):
    return lambda text, answer: 1.0
"""


@pytest.fixture
def elsewhere(here, monkeypatch):
    """A current directory that holds nothing, beside that of a config with a module of its own."""
    (here / "beside_the_config").mkdir()
    (here / "beside_the_config/rewards.py").write_text(MODULE)
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    yield here
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("beside_the_config")]:
        del sys.modules[name]


def test_they_are_found_by_every_process_and_again_from_the_run_folder(elsewhere, capsys):
    before, change = [*sys.path], "data.0.reward=beside_the_config.rewards"
    assert cli.main(["plan", str(elsewhere / "run.yaml"), "--set", change]) == 0, capsys.readouterr().err
    assert sys.path[:-1] == before, "what stands there hides no package"
    sys.path[:] = before
    forget()
    config = load_run(elsewhere / "run.yaml", [change])
    where = SiteConfig(name="local")
    run = runs.create(config, where)
    names = plan.placeholders(config, where)
    runs.write_topology(run, topology.make(config.cluster, config.rollout, where, names))
    with pytest.raises(ConfigError, match="cannot import"):
        plugins.find("reward", "beside_the_config.rewards", "here")
    assert Rank(run, 0, 0).config.code_dir == str(elsewhere)
    plugins.find("reward", "beside_the_config.rewards", "here")
    data = DataSet(path="none", reward="beside_the_config.rewards")
    RewardPool.start({"own": data}, 1, 5.0).close()


def test_where_they_are_looked_for(elsewhere):
    def code_dir(text: str, *overrides: str) -> str:
        (elsewhere / "top.yaml").write_text(f"extends: base/base.yaml\n{text}")
        return load_run(elsewhere / "top.yaml", overrides).code_dir

    (elsewhere / "base").mkdir()
    (elsewhere / "base/base.yaml").write_text((elsewhere / "run.yaml").read_text())
    assert code_dir("") == str(elsewhere)
    assert code_dir("code_dir: lib\n") == str(elsewhere / "lib")
    assert code_dir("", "code_dir=lib") == str(Path.cwd() / "lib")
    (elsewhere / "base/base.yaml").write_text((elsewhere / "run.yaml").read_text() + "code_dir: ../lib\n")
    assert code_dir("") == str(elsewhere / "lib")
