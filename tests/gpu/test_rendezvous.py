"""NCCL, where a member of a weight group is lost before they meet: what its sender does then, to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SENDER = """
import time
import torch
from runtime.comm.rendezvous import listen_store, make_group
from runtime.errors import PeerLost
from runtime.types import GroupAddress

tensor = torch.ones(1 << 20, device="cuda:0")
for name in ("first", "second"):
    store, port = listen_store("127.0.0.1", 10.0)
    address = GroupAddress(name=name, host="127.0.0.1", port=port, world_size=2, backend="nccl")
    group, start = make_group(address, 0, store, 5.0), time.monotonic()
    try:
        group.broadcast(tensor)
    except PeerLost as e:
        print(e)
    group.close()
    assert 4.5 < time.monotonic() - start < 30.0
    assert float((2 * tensor).sum().cpu()) == 2 << 20, "the GPU works on"
"""


def test_nobody_waits_for_a_member_that_never_comes_and_the_process_ends_as_it_should() -> None:
    """Though a thread of it waits in NCCL."""
    made = subprocess.run(
        [sys.executable, "-c", SENDER], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stderr
    said = [f"weight group {n} broke: not all of its members met within 5 s" for n in ("first", "second")]
    assert made.stdout.splitlines() == said
