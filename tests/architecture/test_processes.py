"""What a fresh process loads: plugins and the launcher's help bring no heavy library along."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime import plugins

ROOT = Path(__file__).parents[2]
HELP = ["-m", "launcher", "--help"]
HELP_LIMIT_S = 0.25

IMPORT_PLUGIN = """
import importlib, msgspec
plugin = importlib.import_module({name!r})
assert issubclass(plugin.Config, msgspec.Struct), "Config is no Struct"
assert plugin.Config.__struct_config__.frozen, "Config is not frozen"
assert callable(plugin.build), "build is no function"
"""


def python(arguments: Sequence[str], path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def loaded(arguments: Sequence[str], path: Path = ROOT) -> set[str]:
    """Top-level names of all that a Python process with these arguments imports."""
    result = python(["-X", "importtime", *arguments], path)
    assert result.returncode == 0, result.stderr[-2000:]
    timings = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in timings}


def import_plugin(name: str) -> set[str]:
    return loaded(["-c", IMPORT_PLUGIN.format(name=name)])


def test_plugins_load_without_torch() -> None:
    modules = [f"{package}.{name}" for kind, package in plugins.PACKAGES.items() for name in plugins.names(kind)]
    assert len(modules) >= len(plugins.PACKAGES)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(modules, pool.map(import_plugin, modules), strict=True))
    heavy = {name: libraries & {"torch", "transformers", "mpi4py"} for name, libraries in found.items()}
    assert not any(heavy.values()), heavy


def test_help_loads_nothing_heavy() -> None:
    assert not loaded(HELP) & {"torch", "numpy", "mpi4py", "transformers", "submitit", "matplotlib"}


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(10):
        started = time.perf_counter()
        result = python(HELP)
        times.append(time.perf_counter() - started)
        assert result.returncode == 0, result.stderr
        assert "submit" in result.stdout
    assert min(times) < HELP_LIMIT_S, f"best of ten was {min(times):.3f} s"


@pytest.mark.parametrize("code", ["import torch", "def f():\n    import torch.nn\nf()", "from helping import x"])
def test_a_heavy_import_is_seen(code: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/nn.py").touch()
    (tmp_path / "helping.py").write_text("import torch\nx = 1\n")
    assert "torch" in loaded(["-c", code], tmp_path)


@pytest.mark.parametrize("name", ["runtime.errors", "runtime.rollout.base"])
def test_a_module_that_is_no_plugin_is_refused(name: str) -> None:
    with pytest.raises(AssertionError, match="Config"):
        import_plugin(name)
