"""Every rule holds in the tree, refuses each of its bad examples and allows each of its good ones."""

import ast
from pathlib import Path

import pytest

from tests.architecture import rules_imports, rules_style, rules_words
from tests.architecture.tree import Module, Rule, Tree

ROOT = Path(__file__).parents[2]
RULES = (*rules_imports.RULES, *rules_style.RULES, *rules_words.RULES)
TREE = Tree(ROOT)


def examples(kind: str) -> list:
    return [
        pytest.param(rule, path, text, id=f"{rule.name} {path} {number}")
        for rule in RULES
        for path, texts in getattr(rule, kind).items()
        for number, text in enumerate(texts)
    ]


def broken(rule: Rule, folder: Path, path: str, text: str) -> list[str]:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)
    return rule.broken_by(Tree(folder))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_tree_obeys(rule: Rule) -> None:
    assert TREE.modules
    assert not (found := rule.broken_by(TREE)), "\n".join([rule.name, *found])


@pytest.mark.parametrize(("rule", "path", "text"), examples("bad"))
def test_the_rule_refuses(rule: Rule, path: str, text: str, tmp_path: Path) -> None:
    assert broken(rule, tmp_path, path, text)


@pytest.mark.parametrize(("rule", "path", "text"), examples("good"))
def test_the_rule_allows(rule: Rule, path: str, text: str, tmp_path: Path) -> None:
    assert not broken(rule, tmp_path, path, text)


def test_no_excuse_is_stale() -> None:
    """Every exception that a rule makes is still made use of."""
    modules = {module.path: module for module in TREE.modules}
    named = {f"{m.path} {f.name}": f for m in TREE.modules for f in rules_style.functions(m)}
    assert set(rules_style.FOREIGN_SIGNATURES) <= set(named)
    for excuse in rules_style.EDGE_FUNCTIONS:
        assert any(map(rules_style.catches_everything, ast.walk(named[excuse]))), excuse
    for path in rules_style.PROCESS_EDGES:
        assert any(map(rules_style.catches_everything, ast.walk(modules[path].ast))), path
    for path in rules_imports.DEVICE_HOMES:
        elsewhere = ast.unparse(modules[path].ast)
        assert rules_imports.asks_about_devices(Module("runtime/elsewhere.py", elsewhere)), path
    for path in rules_style.SPEAKS:
        assert any(rules_style.called(call) == "print" for call in modules[path].nodes(ast.Call)), path
