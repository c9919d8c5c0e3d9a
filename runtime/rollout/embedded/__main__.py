"""Runs the embedded engine: `python -m runtime.rollout.embedded --model FOLDER --socket-fd N --token-file FILE`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import torch
from aiohttp import web

from runtime.errors import ConfigError
from runtime.rollout.embedded.decoder import Decoder
from runtime.rollout.embedded.model import SlotModel
from runtime.rollout.embedded.selftest import check_rows, widths_agree
from runtime.rollout.embedded.server import Server
from runtime.rollout.embedded.worker import Worker

_SHUTDOWN_S = 0.5
FROZEN = "default"
"""As the dialect calls weights that came with the server."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="embedded")
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--socket-fd", type=int, required=True, help="listening socket this process inherited")
    parser.add_argument("--token-file", type=Path, required=True, help="bearer token, in a file of mode 0600")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--slots", type=int, default=32, help="requests decoded at a time")
    parser.add_argument("--max-length", type=int, default=0, help="longest prompt and answer; 0: the model's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True, help="of the weights")
    parser.add_argument("--float32-output", action="store_true", help="compute logits in float32")
    parser.add_argument("--deterministic", action="store_true", help="constant shapes")
    parser.add_argument("--frozen", action="store_true", help="the folder's weights, for good: none are pushed")
    return parser.parse_args()


def _token(path: Path) -> str:
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(str(path), "others can read this token", f"chmod 600 {path}")
    return path.read_text().strip()


async def _serve(args: argparse.Namespace, model: SlotModel, decoder: Decoder, token: str) -> int:
    """Serve until SIGTERM (0) or until the decoder dies (1)."""
    worker = Worker(decoder, args.threads)
    server = Server(worker, model, args.model, deterministic=args.deterministic, frozen=args.frozen)
    runner = web.AppRunner(server.app(token), handler_cancellation=True, access_log=None)
    await runner.setup()
    listener = socket.socket(fileno=args.socket_fd)
    await web.SockSite(runner, listener, shutdown_timeout=_SHUTDOWN_S).start()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    print(f"serving {args.model} on {listener.getsockname()}", flush=True)
    waits = {asyncio.create_task(stopped.wait()), asyncio.create_task(worker.died.wait())}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if worker.died.is_set():
        await asyncio.sleep(_SHUTDOWN_S)  # for the answers to those who wait
    return 1 if worker.died.is_set() else 0


def main() -> int:
    args = _arguments()
    torch.set_num_threads(args.threads)
    try:
        token = _token(args.token_file)
        how = {"slots": args.slots, "max_length": args.max_length, "float32_output": args.float32_output}
        model = SlotModel(args.model, dtype=args.dtype, frozen=args.frozen, **how)
        if args.deterministic:
            check_rows(model)
        decoder = Decoder(
            model, deterministic=args.deterministic, full_width=args.deterministic and not widths_agree(model)
        )
        decoder.version = FROZEN if args.frozen else None
    except ConfigError as e:
        print(e, file=sys.stderr)
        return 2
    return asyncio.run(_serve(args, model, decoder, token))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that waits in a collective would keep the interpreter from ending
