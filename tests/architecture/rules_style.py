"""Rules about the shape and safety of single files."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final

from tests.architecture.tree import Module, Rule, Tree

MAX_FILE_LINES: Final = 400
MAX_FUNCTION_LINES: Final = 60
MAX_PARAMETERS: Final = 6

PROCESS_EDGES: Final = ("launcher/supervisor.py", "runtime/main.py")
"""Where a process begins: there everything is caught, so that nothing ends without a report."""

EDGE_FUNCTIONS: Final = {
    "runtime/comm/weights/loader.py load": "a foreign server's function calls it, and would end with it: answered",
    "runtime/plugins.py _import": "somebody's module: a mistake in it is the user's to mend",
    "runtime/plugins.py calling": "somebody's module: a mistake in it is the user's to mend",
    "runtime/rollout/agent.py serve": "tells the controller why the agent ends",
    "runtime/rollout/embedded/worker.py _run": "a thread's edge: the server answers with it and exits",
    "runtime/rollout/embedded/worker.py run": "a thread's edge: raised again where the result is awaited",
    "runtime/rollout/sampler.py _play": "somebody's environment: fails that sample only",
    "runtime/rollout/scoring.py _score_here": "somebody's reward: fails that group only",
    "runtime/rollout/tokenizer.py __init__": "a library that raises nothing narrower, on somebody's file",
    "runtime/rollout/tokenizer.py _blamed": "a model's chat template: a mistake in it is the user's to mend",
    "runtime/rollout/reward_host.py _verdict": "somebody's reward: fails that text only",
}
"""Single functions that catch everything -> why they may."""

FOREIGN_SIGNATURES: Final = ("runtime/trainer/attention.py packed_attention",)
"""Functions that another library calls, with the parameters that it passes."""

SPEAKS: Final = (
    *(f"launcher/{name}.py" for name in ("cli", "commands", "logs", "progress", "show")),
    "runtime/quickstart.py",
    "runtime/rollout/embedded/__main__.py",
)
"""What talks to a person; the rest logs."""

MUTABLE_CALLS: Final = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"}
UNPICKLERS: Final = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
PICKLING_COLLECTIVES: Final = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
OPEN_ADDRESSES: Final = ("0.0" + ".0.0", "tcp://" + "*")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(module: Module) -> Iterator[Function]:
    return module.nodes(ast.FunctionDef, ast.AsyncFunctionDef)


def parameters(function: Function) -> list[ast.arg]:
    """All but self and cls."""
    a = function.args
    named = [*a.posonlyargs, *a.args, *a.kwonlyargs]
    named = named[1:] if named and named[0].arg in {"self", "cls"} else named
    return [*named, *(x for x in (a.vararg, a.kwarg) if x)]


def file_size(tree: Tree) -> list[str]:
    """Of tests too."""
    sizes = ((path, text.count("\n")) for path, text in tree.texts() if path.endswith(".py"))
    return [f"{path}: {lines} lines; split it" for path, lines in sizes if lines > MAX_FILE_LINES]


def function_size(tree: Tree) -> list[str]:
    return [
        f"{m.at(f)}: {f.name} has {lines} lines; split it"
        for m in tree.modules
        for f in functions(m)
        if (lines := (f.end_lineno or f.lineno) - f.lineno + 1) > MAX_FUNCTION_LINES
    ]


def few_parameters(tree: Tree) -> list[str]:
    return [
        f"{m.at(f)}: {f.name} takes {n} parameters; some of them are one thing"
        for m in tree.modules
        for f in functions(m)
        if (n := len(parameters(f))) > MAX_PARAMETERS and f"{m.path} {f.name}" not in FOREIGN_SIGNATURES
    ]


def typed(tree: Tree) -> list[str]:
    found = []
    for m in tree.modules:
        for f in functions(m):
            missing = [p.arg for p in parameters(f) if p.annotation is None] + ([] if f.returns else ["return"])
            if missing:
                found.append(f"{m.at(f)}: {f.name} leaves {', '.join(missing)} untyped")
    return found


def documented(tree: Tree) -> list[str]:
    return [f"{m.path}: no docstring that says why it exists" for m in tree.modules if not ast.get_docstring(m.ast)]


def narrow_except(tree: Tree) -> list[str]:
    found = []
    for m in tree.modules:
        if m.path in PROCESS_EDGES:
            continue
        excused = {n for f in functions(m) if f"{m.path} {f.name}" in EDGE_FUNCTIONS for n in ast.walk(f)}
        caught = [n for n in m.nodes(ast.ExceptHandler, ast.Call) if n not in excused and catches_everything(n)]
        found += [f"{m.at(n)}: catches everything, and is no process edge" for n in caught]
    return found


def catches_everything(node: ast.AST) -> bool:
    """`except:`, `except Exception`, `suppress(Exception)` and the like."""
    kinds: Sequence[ast.expr | None] = ()
    if isinstance(node, ast.Call) and called(node) == "suppress":
        kinds = node.args
    elif isinstance(node, ast.ExceptHandler):
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(k is None or (isinstance(k, ast.Name) and k.id in {"Exception", "BaseException"}) for k in kinds)


def called(call: ast.Call) -> str:
    """Last part of the name of what is called."""
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def is_mutable(value: ast.expr | None) -> bool:
    literal = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    return isinstance(value, literal) or (isinstance(value, ast.Call) and called(value) in MUTABLE_CALLS)


def no_globals(tree: Tree) -> list[str]:
    """No module-level mutable value that is no constant, no `global`, no cache without a key."""
    found = []
    for m in tree.modules:
        for statement in m.ast.body:
            if isinstance(statement, ast.Assign):
                names, final = [ast.unparse(t) for t in statement.targets], False
            elif isinstance(statement, ast.AnnAssign):
                names, final = [ast.unparse(statement.target)], "Final" in ast.unparse(statement.annotation)
            else:
                continue
            if is_mutable(statement.value) and not final and not all(name.isupper() for name in names):
                found.append(f"{m.at(statement)}: {', '.join(names)} is mutable; say Final, or give it an owner")
        found += [f"{m.at(g)}: `global`" for g in m.nodes(ast.Global)]
        for f in functions(m):
            caches = any("cache" in ast.unparse(d).split("(")[0].split(".")[-1].split("_") for d in f.decorator_list)
            if caches and not parameters(f) and "cached_property" not in map(ast.unparse, f.decorator_list):
                found.append(f"{m.at(f)}: {f.name} is a singleton behind a cache")
    return found


def nothing_evaluated(tree: Tree) -> list[str]:
    """No unpickling of any kind, no eval, no shell."""
    found = []
    for m in tree.modules:
        found += [f"{m.at(n)}: imports {name}" for n, name in m.imports() if name.split(".")[0] in UNPICKLERS]
        for call in m.nodes(ast.Call):
            name, keywords = ast.unparse(call.func), {k.arg: ast.unparse(k.value) for k in call.keywords}
            bad = name in {"eval", "exec", "os.system", "yaml.load", "yaml.unsafe_load"}
            bad |= called(call) in PICKLING_COLLECTIVES or keywords.get("shell") == "True"
            bad |= name == "torch.load" and keywords.get("weights_only") != "True"
            bad |= name.split(".")[-1] == "load" and keywords.get("allow_pickle") == "True"
            if bad:
                found.append(f"{m.at(call)}: {name} runs what it reads")
    return found


def quiet(tree: Tree) -> list[str]:
    return [
        f"{m.at(call)}: prints; log it"
        for m in tree.modules
        if m.path not in SPEAKS
        for call in m.nodes(ast.Call)
        if isinstance(call.func, ast.Name) and call.func.id == "print"
    ]


def closed_addresses(tree: Tree) -> list[str]:
    return [
        f"{m.at(node)}: listens to the whole network"
        for m in tree.modules
        for node in m.nodes(ast.Constant)
        if isinstance(node.value, str) and any(a in node.value for a in OPEN_ADDRESSES)
    ]


RULES = (
    Rule(
        name="a file has at most 400 lines",
        broken_by=file_size,
        bad={"runtime/x.py": ("x = 1\n" * 401,), "tests/unit/x.py": ("x = 1\n" * 401,)},
        good={"runtime/x.py": ("x = 1\n" * 400,)},
    ),
    Rule(
        name="a function has at most 60 lines",
        broken_by=function_size,
        bad={
            "runtime/x.py": ("def f():\n" + "    x = 1\n" * 60, "class A:\n    async def f():\n" + "        x\n" * 60)
        },
        good={"runtime/x.py": ("def f():\n" + "    x = 1\n" * 59,)},
    ),
    Rule(
        name="a function takes at most six parameters",
        broken_by=few_parameters,
        bad={"runtime/x.py": ("def f(a, b, c, d, e, f, g): ...", "def f(a, b, c, d, e, *f, g=1): ...")},
        good={"runtime/x.py": ("class A:\n    def f(self, a, b, c, d, e, f): ...",)},
    ),
    Rule(
        name="every function is typed",
        broken_by=typed,
        bad={
            "runtime/x.py": (
                "def f() : ...",
                "def f(a) -> int: ...",
                "def f(*a) -> int: ...",
                "def g() -> int:\n    async def f(): ...",
            )
        },
        good={"runtime/x.py": ("class A:\n    def f(self, a: int, *b: int) -> None: ...", "f = lambda x: x")},
    ),
    Rule(
        name="every module says why it exists",
        broken_by=documented,
        bad={"runtime/x.py": ("x = 1", '""""""\nx = 1')},
        good={"runtime/x.py": ('"""Why."""\nx = 1',)},
    ),
    Rule(
        name="everything is caught at process edges only",
        broken_by=narrow_except,
        bad={
            "runtime/x.py": (
                "try:\n    x\nexcept Exception:\n    y",
                "try:\n    x\nexcept:\n    y",
                "try:\n    x\nexcept (OSError, BaseException):\n    y",
                "with suppress(Exception):\n    x",
            )
        },
        good={
            "runtime/x.py": ("try:\n    x\nexcept OSError:\n    y",),
            "runtime/main.py": ("try:\n  x\nexcept:\n  y",),
        },
    ),
    Rule(
        name="no module-level mutable state",
        broken_by=no_globals,
        bad={
            "runtime/x.py": (
                "seen = {}",
                "seen: list[int] = []",
                "seen = collections.defaultdict(list)",
                "def f() -> None:\n    global x\n    x = 1",
                "@functools.lru_cache(maxsize=1)\ndef f() -> int: ...",
            )
        },
        good={
            "runtime/x.py": (
                "NAMES = ['a']",
                "names: Final = {}",
                "Sums = dict[str, int]",
                "@cache\ndef f(a: int) -> int: ...",
                "class A:\n    @cached_property\n    def f(self) -> int: ...",
            )
        },
    ),
    Rule(
        name="nothing that is read is run",
        broken_by=nothing_evaluated,
        bad={
            "runtime/x.py": (
                "import pickle",
                "from pickle import loads",
                "eval(x)",
                "torch.load(p)",
                "yaml.load(x)",
                "subprocess.run(x, shell=True)",
                "dist.broadcast_object_list(x)",
                "np.load(p, allow_pickle=True)",
            )
        },
        good={"runtime/x.py": ("model.eval()", "torch.load(p, weights_only=True)", "yaml.safe_load(x)")},
    ),
    Rule(
        name="only what talks to a person prints",
        broken_by=quiet,
        bad={"runtime/x.py": ("print(1)",)},
        good={"launcher/cli.py": ("print(1)",), "runtime/x.py": ("log.info('print')", "console.print(1)")},
    ),
    Rule(
        name="nothing listens to the whole network",
        broken_by=closed_addresses,
        bad={"runtime/x.py": tuple(f"x = '{address}:5000'" for address in OPEN_ADDRESSES)},
        good={"runtime/x.py": ("x = '127.0.0.1'",)},
    ),
)
