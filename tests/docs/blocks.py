"""The fenced blocks of the README and the pages in docs/, and a shell that runs the commands among them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCUMENTS: Final = ("README.md", *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").glob("*.md")))
COMMAND_LIMIT_S: Final = 240.0

SHORTER: Final = {
    "configs/quickstart.yaml": (
        "num_steps=2",
        "rollout.num_prompts=4",
        "rollout.num_samples=4",
        "evaluation.sets.0.limit=16",
        "limits.attempts=0",
    ),
    "my_run.yaml": (
        "num_steps=1",
        "rollout.num_prompts=4",
        "rollout.num_samples=4",
        "data.0.environment=my_project.second_try",
        "algorithm.name=my_project.rloo",
        "limits.attempts=0",
    ),
}
"""Config -> what a test changes when the documentation submits it. The second run uses everything that is written
in the pages about plugins."""
STEPS_AFTER_RESUME: Final = "num_steps=3"


@dataclass(frozen=True)
class Block:
    document: str
    line: int
    language: str
    text: str
    file: str
    """The file it is to be written to, named at the end of the line before it; or empty."""

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(language: str = "") -> list[Block]:
    """All blocks in a language, or all."""
    return [b for document in DOCUMENTS for b in _blocks_of(document) if language in ("", b.language)]


def _blocks_of(document: str) -> list[Block]:
    text = (ROOT / document).read_text()
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before = text[: match.start()]
        named = re.search(r"`([\w./-]+\.\w+)`:\s*\Z", before)
        line = before.count("\n") + 1
        found.append(Block(document, line, match.group(1), match.group(2), named.group(1) if named else ""))
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class Shell:
    """Runs commands as a reader would who stands in `folder`; each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[str, subprocess.CompletedProcess[str]] = {}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        if command not in self._done:
            self._done[command] = subprocess.run(
                shortened(command),
                cwd=self.folder,
                env=self._env,
                capture_output=True,
                text=True,
                timeout=COMMAND_LIMIT_S,
                check=False,
            )
        return self._done[command]

    def newest(self, name: str) -> Path:
        """The run folder of the newest run of that name."""
        return max((self.folder / "runs").glob(f"{name}-*"), key=lambda run: run.stat().st_mtime)


def shortened(command: str) -> list[str]:
    """The words of a command, with less to train where it trains."""
    words = shlex.split(command)
    if words[:4] == ["python", "-m", "launcher", "resume"]:
        return [re.sub(r"^num_steps=\d+$", STEPS_AFTER_RESUME, word) for word in words]
    if words[:4] == ["python", "-m", "launcher", "submit"] and "--dry-run" not in words:
        return [*words, *(word for change in SHORTER[words[4]] for word in ("--set", change))]
    return words
