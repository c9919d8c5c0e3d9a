"""What the rules look at: the source tree as parsed modules, and as text files."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

CODE = ("launcher", "runtime")
TEXT = (*CODE, "tests", "configs", "docs", "sbatch", "rocm", "constraints", ".ci")
TEXT_SUFFIXES = {"", ".py", ".md", ".yaml", ".toml", ".txt", ".sh", ".sbatch", ".cfg"}


@dataclass(frozen=True)
class Module:
    path: str
    """From the root, with slashes."""
    text: str

    @cached_property
    def ast(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")

    def nodes(self, *kinds: type[Node]) -> Iterator[Node]:
        return (node for node in ast.walk(self.ast) if isinstance(node, kinds))

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    def imports(self) -> Iterator[tuple[ast.AST, str]]:
        """Every name an import statement reaches, wherever it stands: `from a import b` reaches a.b."""
        for node in self.nodes(ast.Import, ast.ImportFrom):
            for alias in node.names:
                if isinstance(node, ast.Import):
                    yield node, alias.name
                else:
                    yield node, f"{node.module or ''}.{alias.name}"


@dataclass(frozen=True)
class Tree:
    root: Path

    @cached_property
    def modules(self) -> list[Module]:
        """The code that ships; tests may do what it may not."""
        paths = sorted(p for top in CODE for p in (self.root / top).rglob("*.py"))
        return [Module(p.relative_to(self.root).as_posix(), p.read_text()) for p in paths]

    def texts(self) -> Iterator[tuple[str, str]]:
        """(path, text) of everything a reader may open."""
        tops = [p for name in TEXT for p in (self.root / name).rglob("*")]
        for path in sorted([*tops, *self.root.glob("*")]):
            if path.is_file() and path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts:
                yield path.relative_to(self.root).as_posix(), path.read_text(errors="replace")


@dataclass(frozen=True)
class Rule:
    """One rule: what breaks it, and examples that prove it can fail and does not always."""

    name: str
    broken_by: Callable[[Tree], list[str]]
    bad: dict[str, tuple[str, ...]]
    """Path -> texts, each refused when the tree holds just that file."""
    good: dict[str, tuple[str, ...]]
    """The same, each allowed."""
