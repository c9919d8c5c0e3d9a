"""import-linter's contracts hold, and each of them can break."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

VIOLATIONS = {
    "runtime/errors.py": "import launcher",
    "launcher/detour.py": "import runtime.types",
    "runtime/trainer/meets.py": "import runtime.rollout.base",
    "runtime/comm/knows.py": "import runtime.trainer.base",
    "runtime/chicken.py": "import runtime.egg",
    "runtime/egg.py": "import runtime.chicken",
}
"""Together these break every contract."""


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)


def test_the_tree_keeps_the_contracts() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_contract_can_break(tmp_path: Path) -> None:
    for name in ("launcher", "runtime"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, line in VIOLATIONS.items():
        with (tmp_path / path).open("a") as file:
            file.write(f"\n{line}\n")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    broken = re.findall(r"^(.+) BROKEN$", lint(tmp_path).stdout, re.MULTILINE)
    assert sorted(broken) == sorted(contract["name"] for contract in contracts)
