"""Logging of one rank: to standard error, which the launcher keeps in the attempt's folder."""

from __future__ import annotations

import logging
import sys


def set_up(rank: int, role: str) -> None:
    """Lines look like: 12:00:01 rank 1 trainer  fsdp: loaded models/quickstart"""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s rank {rank} {role:<7} %(name)s: %(message)s", datefmt="%H:%M:%S")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("aiohttp.access", "asyncio", "matplotlib", "tensorboard", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
