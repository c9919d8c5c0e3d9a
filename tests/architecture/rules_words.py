"""Rules about words: one word a thing, and no text that only makes sense on one machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from tests.architecture.rules_style import functions
from tests.architecture.tree import Module, Rule, Tree

SYNONYMS: Final[dict[str, str]] = {
    "actor": "policy",
    "cfg": "config",
    "ckpt": "checkpoint",
    "episode": "sample",
    "minibatch": "micro-batch or update",
    "rollouts": "samples, groups",
    "traj": "sample",
    "trajectory": "sample",
    "trajectories": "samples",
}
"""A word that names here do not use -> the one that they do."""

UNIT_ENDINGS: Final = {"sec": "_s", "secs": "_s", "seconds": "_s"}
"""Last word of a name -> how it should end."""

SOMEBODYS_DISK: Final = re.compile(r"(?<![\w.$}~])/(?:work|root|home|Users|mnt|scratch)/\w+")
TRACKER: Final = re.compile(r"\bissues? #?\d+\b|(?<![\w&])#\d+\b(?!\s*[;}])", re.IGNORECASE)
DOCUMENT: Final = re.compile(r"\bdocs/[\w/-]+\.md\b")


def defined_names(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Names this module makes: classes, functions, parameters, variables, fields."""
    for node in module.nodes(ast.ClassDef):
        yield node, node.name
    for function in functions(module):
        yield function, function.name
    for arg in module.nodes(ast.arg):
        yield arg, arg.arg
    for name in module.nodes(ast.Name):
        if isinstance(name.ctx, ast.Store):
            yield name, name.id


def words(identifier: str) -> list[str]:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower().strip("_").split("_")


def one_word_a_thing(tree: Tree) -> list[str]:
    found = []
    for module in tree.modules:
        for node, name in defined_names(module):
            first, *rest = words(name)
            found += [f"{module.at(node)}: {name}: say {SYNONYMS[w]}" for w in (first, *rest) if w in SYNONYMS]
            if first == "n" and rest:
                found.append(f"{module.at(node)}: {name}: counts start with num_")
            if rest and rest[-1] in UNIT_ENDINGS:
                found.append(f"{module.at(node)}: {name}: times end in {UNIT_ENDINGS[rest[-1]]}")
    return found


def at_home_anywhere(tree: Tree) -> list[str]:
    """No path on somebody's disk and no ticket number: neither means anything in another checkout."""
    found = []
    for path, text in tree.texts():
        if path == "tests/architecture/rules_words.py":
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := SOMEBODYS_DISK.search(line) or TRACKER.search(line):
                found.append(f"{path}:{number}: {match.group()!r}")
    return found


def documents_exist(tree: Tree) -> list[str]:
    return [
        f"{path}: sends the reader to {name}, which is not there"
        for path, text in tree.texts()
        if path != "tests/architecture/rules_words.py"
        for name in sorted(set(DOCUMENT.findall(text)))
        if not (tree.root / name).is_file()
    ]


RULES = (
    Rule(
        name="one word a thing",
        broken_by=one_word_a_thing,
        bad={
            "runtime/x.py": (
                "class ActorWorker: ...",
                "def f(ckpt: int) -> None: ...",
                "wait_seconds = 1",
                "n_prompts = 1",
                "for trajectory in x: ...",
            )
        },
        good={"runtime/x.py": ("wait_s = seconds = 1", "factor = n = 1", "x.actor(seconds=1)")},
    ),
    Rule(
        name="the text makes sense in any checkout",
        broken_by=at_home_anywhere,
        bad={
            "README.md": ("Look at /work/x first.", "see issue 12", "fixes #12"),
            "runtime/x.py": ("x = '/home/me/models'",),
        },
        good={"README.md": ("<a href='x#12'>", "$HOME/work/x", "runs/work/x", "https://host/home/x", "# 12 nodes")},
    ),
    Rule(
        name="a document that the text names exists",
        broken_by=documents_exist,
        bad={"README.md": ("See docs/nowhere.md.",)},
        good={"docs/a.md": ("See docs/a.md.",)},
    ),
)
