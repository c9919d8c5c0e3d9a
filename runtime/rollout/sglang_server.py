"""Runs SGLang's own server, unchanged, with the key that must not stand on a command line, which others can read.

    PYTHON runtime/rollout/sglang_server.py --token-file FILE [--threads N] OPTIONS...

OPTIONS are those of `python -m sglang.launch_server`. PYTHON is the interpreter SGLang is installed for, which may know
nothing of this project: so this is run as a file and imports the standard library and SGLang alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--token-file", type=Path, required=True, help="bearer token, in a file of mode 0600")
    parser.add_argument("--threads", type=int, help="torch threads of an engine on a CPU")
    return parser.parse_known_args()


def main() -> None:
    args, options = _arguments()
    if args.threads:
        os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(args.threads)}
    from sglang import launch_server  # pyright: ignore[reportMissingImports]  # lives in another environment
    from sglang.srt.utils import kill_process_tree  # pyright: ignore[reportMissingImports]

    launch_server.load_plugins()
    server_args = launch_server.prepare_server_args([*options, "--api-key", args.token_file.read_text().strip()])
    try:
        launch_server.run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    # This folder's modules would hide others of their names, here and in the processes that SGLang starts.
    sys.path = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]
    main()
