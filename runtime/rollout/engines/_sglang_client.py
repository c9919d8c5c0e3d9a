"""What is spoken with SGLang alone: deltas, and requests that two servers answer together.

Deltas go through its `--custom-weight-loader`, a function of ours in its own processes, which SGLang calls with named
tensors and without a way to answer. So one call takes a whole push: a name is what is to be done, and the answer comes
in a file of the node's.

A request for two goes to both at once, as SGLang's own router does it, with a number that both know it by:

    prefill engine   computes the prompt ---- its keys and values ----> decode engine   all that follows, and the answer

A server of several ranks mostly answers as soon as the first is done. Where another may still be at it, and what
comes next needs all, they are asked for something that all take part in.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import numpy as np

from runtime.comm.buckets import TAKEN, TakeDelta
from runtime.errors import EngineLost
from runtime.rollout.base import Description
from runtime.rollout.engines._dialect import DialectClient, Unanswered
from runtime.rollout.pool import Pool, Running
from runtime.types import Manifest

LOADER: Final = "runtime.comm.weights.loader.take"
NOBODY: Final = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
"""SGLang's own word for a prompt that is handed over to no decode engine."""
WORD_S: Final = 0.5
"""For the other one's failure to arrive: a connection that broke says more than a prompt that was not handed over."""
ABORTED: Final = b'{"meta_info": {"finish_reason": {"type": "abort"}}}'


class SGLangClient(DialectClient):
    def __init__(self, *, url: str, token: str, timeout_s: float, prefills: Pool | None = None) -> None:
        """
        Args:
            prefills: engines that compute the prompts of this one, which then must be a decode engine.
        """
        super().__init__(url=url, token=token, timeout_s=timeout_s)
        self._prefills = prefills
        self._num_pauses = 0
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
            self._prefixes = self._stamp(version)
        else:
            await super().receive(manifest, version, source)
            if manifest.via == "folder":
                await self._meet()  # whoever asked may delete the folder now
        self._holds = version

    async def take(self, handles: Sequence[str], version: int, *, is_first: bool, is_last: bool) -> None:
        self._holds = -1
        await super().take(handles, version, is_first=is_first, is_last=is_last)
        self._holds = version if is_last else -1

    async def sleep(self) -> None:
        await super().sleep()
        if not self._server.speculative_algorithm:  # else the draft model would be touched, which has no memory now
            await self._meet()  # whoever asked may take the memory

    async def _meet(self) -> None:
        """Wait until each rank is done with what it was told before: they begin an update of the draft model, which
        there seldom is, together."""
        draft = {"selector": "draft"}
        if self._num_ranks > 1 and await self._wire.post("/begin_weight_update", draft, missing_ok=True):
            await self._wire.call("POST", "/end_weight_update", {})

    async def _take(self, manifest: Manifest, version: int, source: str) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="sluice-delta-") as folder:
                said = await self._take_and_say(manifest, version, source, Path(folder) / "answer")
        except OSError as e:
            raise EngineLost(f"it cannot say whether it took a delta: {e}") from e
        if said != TAKEN:
            raise EngineLost(said or "it did not say whether it took a delta, see its log")

    async def _take_and_say(self, manifest: Manifest, version: int, source: str, answer: Path) -> str:
        order = msgspec.json.encode(TakeDelta(manifest=manifest, source=source, answer=str(answer)))
        body = {
            "serialized_named_tensors": [_named_tensors(order)] * self._num_ranks,
            "load_format": LOADER,
            "selector": "target",
            "weight_version": self._stamp(version),
            "flush_cache": self._flushes,
        }
        await self._wire.post("/update_weights_from_tensor", body)
        return answer.read_text()

    # ---- requests that two engines answer

    async def pause(self, mode: str) -> None:
        self._num_pauses += 1
        await super().pause(mode)

    async def score(self, tokens: Sequence[int], start: int = 0) -> np.ndarray:
        if self._prefills is None:
            return await super().score(tokens, start)
        if self._prefills.is_empty:
            raise ValueError("no prefill engine is up")
        prefill = await self._prefills.pick(None, 0)
        try:
            return await prefill.call(prefill.engine.score(tokens, start))
        except EngineLost as e:
            prefill.lose(str(e))
            raise ValueError(f"its prefill engine was lost: {e}") from e

    async def _generate(self, tokens: Sequence[int], sampling: dict[str, Any], **more: Any) -> bytes:
        if self._prefills is None:
            alone = NOBODY if self._server.disaggregation_mode == "prefill" else {}
            return await super()._generate(tokens, sampling, **{**alone, **more})
        prefill = await self._prefills.pick(None, 0)
        with prefill.busy():
            return await self._generate_after(prefill, tokens, sampling)

    async def _generate_after(self, prefill: Running, tokens: Sequence[int], sampling: dict[str, Any]) -> bytes:
        """The answer. The request was aborted if the prefill engine did not do its part, and is lost for that.

        Whatever one of the two makes of a request that the other was paused at, it is aborted.
        """
        other = prefill.engine
        assert isinstance(other, SGLangClient)
        pauses, prefixes = self._num_pauses + other._num_pauses, self._prefixes
        where = {"bootstrap_host": urlsplit(other._wire.url).hostname, "bootstrap_room": secrets.randbits(62)}
        where["bootstrap_port"] = other._server.disaggregation_bootstrap_port
        prompt = asyncio.ensure_future(prefill.call(other._prompt(tokens, sampling, where)))
        rest = asyncio.ensure_future(super()._generate(tokens, sampling, **where))
        both = prompt, rest
        for task in both:
            task.add_done_callback(lambda t: t.cancelled() or t.exception())  # nobody may ask any more
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not rest.done() and not prompt.exception():
                await asyncio.wait([rest])
            if not rest.done() or rest.exception():  # else a prompt that was paused on its way may wait for ever
                await asyncio.wait(both, timeout=WORD_S)
            if rest.done() and not rest.exception():
                is_late = pauses != self._num_pauses + other._num_pauses and self._is_of_others(rest.result(), prefixes)
                return ABORTED if is_late else rest.result()
            failures = {task: e for task in both if task.done() and (e := task.exception())}
        finally:
            for task in both:
                task.cancel()
        for e in failures.values():
            if not isinstance(e, EngineLost):
                raise e
        if pauses != self._num_pauses + other._num_pauses:
            return ABORTED
        if rest in failures and not isinstance(failures[rest], Unanswered):
            raise failures[rest]
        prefill.lose(" and ".join(map(str, failures.values())))
        return ABORTED

    def _is_of_others(self, answer: bytes, stamp: str) -> bool:
        """Whether other weights made it than those of this stamp: requests that arrive in a pause are kept till after
        it, and then find what the old weights computed of their prompts."""
        return any(span.version != stamp for span in self._spans(self._meta(answer)))

    async def _prompt(self, tokens: Sequence[int], sampling: dict[str, Any], where: dict[str, Any]) -> None:
        """Compute this prompt for the decode engine that asks for it."""
        answer = await self._generate(tokens, sampling, **where)
        if self._meta(answer).finish_reason.type == "abort":
            raise Unanswered(f"POST {self._wire.url}/generate: aborted")


def _named_tensors(name: bytes) -> str:
    """[(name, an empty tensor)] as SGLang wants it, pickled by hand, since no torch is loaded here."""
    text = b"X" + struct.pack("<I", len(name)) + name
    return base64.b64encode(b"\x80\x02]" + text + b"ctorch\nByteTensor\n)R\x86a.").decode()
