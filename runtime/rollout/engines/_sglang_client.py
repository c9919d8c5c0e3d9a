"""What is spoken with SGLang alone: it takes deltas through a function of ours in its own processes.

That function is its `--custom-weight-loader`, which SGLang calls with named tensors and without a way to answer. So one
call takes a whole push: a name is what is to be done, and the answer comes in a file of the node's.
"""

from __future__ import annotations

import base64
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from runtime.comm.buckets import TakeDelta
from runtime.errors import EngineLost
from runtime.rollout.base import Description
from runtime.rollout.engines._dialect import DialectClient
from runtime.types import Manifest

LOADER: Final = "runtime.comm.weights.loader.take"


class SGLangClient(DialectClient):
    def __init__(self, *, url: str, token: str, timeout_s: float) -> None:
        super().__init__(url=url, token=token, timeout_s=timeout_s)
        self._holds, self._num_ranks = -1, 1
        """Version of the weights that it has whole; -1: none."""

    async def describe(self) -> Description:
        description = await super().describe()
        self._num_ranks = description.num_ranks
        return msgspec.structs.replace(description, can=(*description.can, "handles"))

    async def receive(self, manifest: Manifest, version: int, source: str) -> None:
        held, self._holds = self._holds, -1
        if manifest.kind == "delta":
            async with self._updating(source if manifest.via == "group" else "", {}):
                if held != manifest.base:
                    raise EngineLost(f"the delta is of version {manifest.base}, this engine holds {held}")
                await self._take(manifest, version, source)
            self._prefixes = str(version)
        else:
            await super().receive(manifest, version, source)
        self._holds = version

    async def take(self, handles: Sequence[str], version: int, *, is_first: bool, is_last: bool) -> None:
        self._holds = -1
        await super().take(handles, version, is_first=is_first, is_last=is_last)
        self._holds = version if is_last else -1

    async def _take(self, manifest: Manifest, version: int, source: str) -> None:
        with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
            answer = Path(folder) / "answer"
            order = msgspec.json.encode(TakeDelta(manifest=manifest, source=source, answer=str(answer)))
            body = {
                "serialized_named_tensors": [_named_tensors(order)] * self._num_ranks,
                "load_format": LOADER,
                "selector": "target",
                "weight_version": str(version),
                "flush_cache": self._pause_mode != "in_place",
            }
            await self._post("/update_weights_from_tensor", body)
            if problem := answer.read_text():
                raise EngineLost(problem)


def _named_tensors(name: bytes) -> str:
    """[(name, an empty tensor)] as SGLang wants it, pickled by hand, since no torch is loaded here."""
    text = b"X" + struct.pack("<I", len(name)) + name
    return base64.b64encode(b"\x80\x02]" + text + b"ctorch\nByteTensor\n)R\x86a.").decode()
