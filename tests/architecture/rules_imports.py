"""Rules about who may import what, where import-linter's contracts (in pyproject.toml) cannot say it."""

from __future__ import annotations

import ast
from typing import Final

from tests.architecture.tree import Module, Rule, Tree

SHARED_WITH_LAUNCHER: Final = ("config", "site", "load", "plugins", "topology", "device", "errors")

HOMES: Final[dict[str, tuple[str, ...]]] = {
    "mpi4py": ("runtime/comm/",),
    "zmq": ("runtime/comm/",),
    "submitit": ("launcher/submit.py",),
    "megatron": ("runtime/trainer/megatron/",),
    "torch": (
        "runtime/trainer/",
        "runtime/rollout/embedded/",
        "runtime/comm/weights/",
        "runtime/comm/rendezvous.py",
        "runtime/device.py",
        "runtime/output.py",
        "runtime/quickstart.py",
    ),
    "transformers": (
        "runtime/trainer/",
        "runtime/rollout/embedded/",
        "runtime/rollout/tokenizer.py",
        "runtime/quickstart.py",
    ),
    "aiohttp": ("runtime/rollout/",),
}
"""A foreign library -> the only places that import it."""

DIALECT: Final = (
    "/generate",
    "/model_info",
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/flush_cache",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weights_from",
    "/weights_checker",
)
"""Paths of SGLang's HTTP server."""

DIALECT_HOMES: Final = ("runtime/rollout/engines/", "runtime/rollout/embedded/")
DEVICE_HOMES: Final = {
    "runtime/device.py": "answers the question for all others",
    "runtime/trainer/megatron/cpu.py": "redirects what Megatron-Core asks of CUDA, and so names it",
}
"""The files that may ask -> why."""


def _inside(module: Module, homes: tuple[str, ...]) -> bool:
    return module.path.startswith(homes)


def launcher_reach(tree: Tree) -> list[str]:
    allowed = tuple(f"runtime.{name}" for name in SHARED_WITH_LAUNCHER)
    return [
        f"{module.at(node)}: imports {name}"
        for module in tree.modules
        if module.path.startswith("launcher/")
        for node, name in module.imports()
        if name.split(".")[0] == "runtime" and not any(name == a or name.startswith(f"{a}.") for a in allowed)
    ]


def foreign_homes(tree: Tree) -> list[str]:
    return [
        f"{module.at(node)}: imports {name}; only {', '.join(HOMES[library])} may"
        for module in tree.modules
        for node, name in module.imports()
        if (library := name.split(".")[0]) in HOMES
        and not _inside(module, HOMES[library])
        and node not in type_checking_only(module)
    ]


def type_checking_only(module: Module) -> set[ast.AST]:
    """Nodes under `if TYPE_CHECKING:`, which load nothing."""
    blocks = [n for n in module.nodes(ast.If) if isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING"]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def absolute_imports(tree: Tree) -> list[str]:
    return [
        f"{module.at(node)}: relative import"
        for module in tree.modules
        for node in module.nodes(ast.ImportFrom)
        if node.level
    ]


def device_question(tree: Tree) -> list[str]:
    return [found for m in tree.modules if m.path not in DEVICE_HOMES for found in asks_about_devices(m)]


def asks_about_devices(module: Module) -> list[str]:
    """`torch.cuda`, `torch.version`, however imported, and the device name "cuda"."""
    found = [node for node, name in module.imports() if name.startswith(("torch.cuda", "torch.version"))]
    for node in module.nodes(ast.Attribute, ast.Constant):
        if isinstance(node, ast.Attribute):
            asks = isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in {"cuda", "version"}
        else:
            asks = isinstance(node.value, str) and (node.value == "cuda" or node.value.startswith("cuda:"))
        if asks:
            found.append(node)
    return [f"{module.at(node)}: asks about CUDA or ROCm; ask runtime.device" for node in found]


def engine_dialect(tree: Tree) -> list[str]:
    return [
        f"{module.at(node)}: {node.value!r} is SGLang's dialect"
        for module in tree.modules
        if not _inside(module, DIALECT_HOMES)
        for node in module.nodes(ast.Constant)
        if isinstance(node.value, str) and node.value.startswith(DIALECT)
    ]


def plain_packages(tree: Tree) -> list[str]:
    return [
        f"{module.path}: holds more than a docstring"
        for module in tree.modules
        if module.is_package and (len(module.ast.body) != 1 or not ast.get_docstring(module.ast))
    ]


RULES = (
    Rule(
        name="the launcher imports from the runtime only config, load, plugins, topology, device, errors",
        broken_by=launcher_reach,
        bad={
            "launcher/x.py": (
                "from runtime.types import Prompt",
                "from runtime import main",
                "def f():\n    import runtime.loop",
            )
        },
        good={"launcher/x.py": ("from runtime.config import RunConfig", "from runtime import load", "import rich")},
    ),
    Rule(
        name="a foreign library lives in one place",
        broken_by=foreign_homes,
        bad={
            "runtime/x.py": ("from mpi4py import MPI", "import zmq.asyncio", "import torch", "import megatron.core"),
            "launcher/cli.py": ("def f():\n    import submitit",),
            "runtime/rollout/agent.py": ("from torch import Tensor",),
        },
        good={
            "runtime/comm/x.py": ("from mpi4py import MPI", "import zmq"),
            "launcher/submit.py": ("import submitit",),
            "runtime/x.py": ("if TYPE_CHECKING:\n    from torch import Tensor",),
        },
    ),
    Rule(
        name="imports are absolute",
        broken_by=absolute_imports,
        bad={"runtime/x.py": ("from . import types", "from .types import Prompt")},
        good={"runtime/x.py": ("from runtime import types",)},
    ),
    Rule(
        name="only runtime.device, and what hides CUDA from Megatron-Core, ask: CUDA or ROCm?",
        broken_by=device_question,
        bad={
            "runtime/trainer/x.py": (
                "x = torch.cuda.is_available()",
                "x = torch.version.hip",
                "from torch import cuda",
                "import torch.cuda",
                "from torch.cuda import is_available",
                "x.to('cuda')",
                "x = 'cuda:0'",
            )
        },
        good={
            "runtime/device.py": ("x = torch.cuda.is_available()",),
            "runtime/trainer/megatron/cpu.py": ("from torch import cuda", "x = torch.cuda.is_available()"),
            "runtime/trainer/x.py": ("torch.zeros(1)", "from torch import Tensor"),
        },
    ),
    Rule(
        name="SGLang's dialect is spoken in the engine folders only",
        broken_by=engine_dialect,
        bad={"runtime/comm/x.py": ("url = '/update_weights_from_distributed'", "url = base + '/generate'")},
        good={"runtime/rollout/engines/x.py": ("url = '/generate'",), "runtime/x.py": ("p = 'samples/generate'",)},
    ),
    Rule(
        name="__init__.py files are docstrings only",
        broken_by=plain_packages,
        bad={"runtime/comm/__init__.py": ('"""Why."""\nfrom runtime.comm import world', "", "x = 1")},
        good={"runtime/comm/__init__.py": ('"""Why."""',)},
    ),
)
