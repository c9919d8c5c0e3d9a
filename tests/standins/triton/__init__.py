"""Triton by name only: the mock that SGLang itself installs on Apple machines, loaded by its path.

What the mock leaves out of what SGLang 0.5.23 imports on Linux is filled in below.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

_sglang = importlib.util.find_spec("sglang")  # of a top-level package: nothing is imported
_spec = importlib.util.spec_from_file_location("_sglang_stubs", Path(_sglang.origin).parent / "_platform_stubs.py")
_stubs = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _stubs
_spec.loader.exec_module(_stubs)
sys.meta_path.insert(0, _stubs._TritonFinder())


class _Constant:
    def __init__(self, value=None):
        self.value = value


def _a_class(module, name, base=object):
    setattr(module, name, type(name, (base,), {}))


_triton, _language = _stubs._make_mock("triton"), _stubs._make_mock("triton.language")
_triton.__version__ = "3.0.0"
_triton.language, _language.constexpr = _language, _Constant
_triton.cdiv, _triton.next_power_of_2, _triton.Config = _stubs._cdiv, _stubs._next_power_of_2, _stubs._Config
_parts = {name: importlib.import_module(f"triton.{name}") for name in ("runtime.jit", "runtime.autotuner")}
importlib.import_module("triton.runtime.cache")
_compiler = importlib.import_module("triton.compiler.compiler")
for _name in ("OutOfResources", "PTXASError"):
    _a_class(_parts["runtime.autotuner"], _name, Exception)
_a_class(_parts["runtime.jit"], "JITFunction")
_a_class(_parts["runtime.jit"], "KernelInterface", _stubs._StubBase)
_a_class(_compiler, "ASTSource", _stubs._StubBase)
_a_class(sys.modules["triton.compiler"], "CompiledKernel", _stubs._StubBase)
_triton.runtime, _triton.JITFunction = sys.modules["triton.runtime"], _parts["runtime.jit"].JITFunction
_triton.runtime.jit = _parts["runtime.jit"]
