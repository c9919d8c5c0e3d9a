"""Runs SGLang's own server, unchanged, with the key that must not stand on a command line, which others can read.

    PYTHON runtime/rollout/sglang_server.py --token-file FILE [--threads N] OPTIONS...

OPTIONS are those of `python -m sglang.launch_server`. PYTHON is the interpreter SGLang is installed for, which may know
nothing of this project: so this is run as a file and imports the standard library and SGLang alone. SGLang's processes
run this file too, since they are started by one another's spawning; in each of them `runtime` can be imported then, for
what SGLang is told to call by a dotted path, and nothing that is installed beside it.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--token-file", type=Path, required=True, help="bearer token, in a file of mode 0600")
    parser.add_argument("--threads", type=int, help="torch threads of an engine on a CPU, of all its ranks")
    return parser.parse_known_args()


def _on_cpu(threads: int, num_ranks: int) -> dict[str, str]:
    """Environment of an engine on a CPU, whose ranks have cores of their own, where there are as many."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, min(threads, len(cores)) // num_ranks)
    shares = [",".join(str(cores[(i * each + j) % len(cores)]) for j in range(each)) for i in range(num_ranks)]
    told = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(each)}
    # Of prefill engines. To hand over from all context-parallel ranks, of which there is one, and nothing before it is
    # all there, changes no result: without it SGLang pins memory for a GPU, and waits for events of one.
    told["SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"] = "1"
    told["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = "0"
    return told | ({"SGLANG_CPU_OMP_THREADS_BIND": "|".join(shares)} if num_ranks > 1 else {})


def _hold_port(host: str) -> socket.socket:
    """A port that nobody else gets while this is open: it does not listen, so a server with SO_REUSEADDR may."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, 0))
    return bound


def main() -> None:
    args, options = _arguments()
    if args.threads:
        os.environ |= _on_cpu(args.threads, int(options[options.index("--tp-size") + 1]))
    from sglang import launch_server  # pyright: ignore[reportMissingImports]  # lives in another environment
    from sglang.srt.utils import kill_process_tree  # pyright: ignore[reportMissingImports]

    launch_server.load_plugins()
    if "--disaggregation-mode" in options:
        host = options[options.index("--host") + 1]
        os.environ["SGLANG_HOST_IP"] = host  # else it hands over at any of the node's addresses
        handover = _hold_port(host)
        options += ["--disaggregation-bootstrap-port", str(handover.getsockname()[1])]
    server_args = launch_server.prepare_server_args([*options, "--api-key", args.token_file.read_text().strip()])
    try:
        launch_server.run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _know_runtime() -> None:
    """Let `runtime` be found where nothing of this project is installed. Where it is, that would hide it: this file is
    run, and never imported."""
    spec = ModuleSpec("runtime", None, is_package=True)
    spec.submodule_search_locations = [str(Path(__file__).resolve().parents[1])]
    sys.modules["runtime"] = module_from_spec(spec)


_know_runtime()
if __name__ == "__main__":
    # This folder's modules would hide others of their names, here and in the processes that SGLang starts.
    sys.path = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]
    main()
