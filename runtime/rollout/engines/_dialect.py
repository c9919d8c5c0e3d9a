"""The client of SGLang's HTTP dialect (0.5.23). One client serves the real SGLang and the embedded engine.

What the dialect hides, found on the real server:
- Without begin and end around it an update is refused; older servers have neither (404): then both are left out.
- "400 Weights were updated, but the cache was not flushed" means that the update was applied.
- After an update with requests paused in place the prefix cache is stale: it can be flushed only when none runs.
- An unknown weight name is ignored with "success": only checksums tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np

from runtime.comm.buckets import buckets
from runtime.errors import EngineLost
from runtime.rollout.base import Description
from runtime.types import Completion, GroupAddress, Manifest, SamplingParams

_APPLIED: Final[str] = "Weights were updated, but"
_PROBE_S: Final[float] = 5.0


class _Span(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: dict[str, Any]
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    weight_version: str = "default"
    weight_versions: list[_Span] | None = None
    """None: a server that does not tell spans."""


class _Generated(msgspec.Struct, frozen=True):
    meta_info: _Meta


class _ServerInfo(msgspec.Struct, frozen=True):
    enable_deterministic_inference: bool = False


class _ModelInfo(msgspec.Struct, frozen=True):
    model_path: str = ""
    weight_version: str = "default"


class _Rank(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


class _Checked(msgspec.Struct, frozen=True):
    ranks: list[_Rank]


def version_number(weight_version: str) -> int:
    """Policy version behind the dialect's text; -1 where nothing of ours was pushed ("default")."""
    return int(weight_version) if weight_version.isdecimal() else -1


class DialectClient:
    """An Engine over HTTP. Failures are an EngineLost that names the call, the address and the answer."""

    def __init__(self, *, url: str, token: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None
        self._pause_mode = ""
        self._running = 0
        self._stale_cache = False
        """A flush is owed as soon as nothing runs."""

    # ---- the Engine protocol

    async def describe(self) -> Description:
        model = msgspec.json.decode(await self._call("GET", "/model_info"), type=_ModelInfo)
        server = msgspec.json.decode(await self._call("GET", "/server_info"), type=_ServerInfo)
        can = ("seed", "spans") if server.enable_deterministic_inference else ("spans",)
        return Description(model=model.model_path, version=version_number(model.weight_version), can=can)

    async def generate(self, tokens: Sequence[int], params: SamplingParams, session: str = "") -> Completion:
        sampling: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "ignore_eos": params.ignore_eos,
        }
        if params.seed is not None:
            sampling["sampling_seed"] = params.seed
        body = {"input_ids": [int(t) for t in tokens], "sampling_params": sampling, "return_logprob": True}
        self._running += 1
        try:
            status, answer = await self._ask("POST", "/generate", body, self._timeout_s)
        finally:
            self._running -= 1
        if status == 400:  # too long a prompt, say: the engine is well, the request is not
            raise ValueError(f"the engine refused {len(tokens)} tokens: {_text(answer)}")
        if status != 200:
            raise self._error("POST", "/generate", f"status {status}: {_text(answer)}")
        if self._stale_cache and not self._running:
            await self._flush()
        return self._completion(answer)

    async def pause(self, mode: str) -> None:
        await self._call("POST", "/pause_generation", {"mode": mode})
        self._pause_mode = mode

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def connect(self, address: GroupAddress, rank: int) -> None:
        body = {
            "master_address": address.host,
            "master_port": address.port,
            "rank_offset": rank,
            "world_size": address.world_size,
            "group_name": address.name,
            "backend": address.backend,
        }
        await self._call("POST", "/init_weights_update_group", body)

    async def disconnect(self, group: str) -> None:
        await self._call("POST", "/destroy_weights_update_group", {"group_name": group})

    async def receive(self, manifest: Manifest, version: int, group: str) -> None:
        in_place = self._pause_mode == "in_place"
        sessions = await self._post("/begin_weight_update", {}, missing_ok=True) is not None
        try:
            await self._receive_buckets(manifest, version, group, flush=not in_place)
        except EngineLost:
            if sessions:  # when another member broke the group, this engine is still good for the next push
                with contextlib.suppress(EngineLost):
                    await self._post("/end_weight_update", {}, refused_ok=True)
            raise
        if sessions:
            await self._call("POST", "/end_weight_update", {})
        self._stale_cache = in_place

    async def _receive_buckets(self, manifest: Manifest, version: int, group: str, *, flush: bool) -> None:
        for part in buckets(manifest):
            body = {
                "names": manifest.names[part],
                "dtypes": manifest.dtypes[part],
                "shapes": manifest.shapes[part],
                "group_name": group,
                "weight_version": str(version),
                "load_format": "flattened_bucket",
                "flush_cache": flush and part.stop == len(manifest.names),
            }
            await self._post("/update_weights_from_distributed", body)

    async def checksums(self) -> dict[str, str]:
        answer = await self._call("POST", "/weights_checker", {"action": "checksum"})
        ranks = msgspec.json.decode(answer, type=_Checked).ranks
        return {name: digest for rank in ranks for name, digest in rank.checksums.items()}

    async def health(self) -> bool:
        try:
            await self._call("GET", "/health", limit_s=_PROBE_S)
        except EngineLost:
            return False
        return True

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # ---- inside

    def _completion(self, answer: bytes) -> Completion:
        try:
            meta = msgspec.json.decode(answer, type=_Generated).meta_info
        except msgspec.DecodeError as e:
            raise EngineLost(f"POST {self._url}/generate: answered something else: {e}") from e
        spans = meta.weight_versions
        if spans is None:
            spans = [_Span(meta.weight_version, 0, len(meta.output_token_logprobs))]
        return Completion(
            tokens=np.array([token for _, token, _ in meta.output_token_logprobs], dtype=np.int32),
            logprobs=np.array([logprob for logprob, _, _ in meta.output_token_logprobs], dtype=np.float32),
            versions=tuple((span.start, version_number(span.version)) for span in spans if span.end > span.start),
            finish=meta.finish_reason["type"],
        )

    async def _flush(self) -> None:
        if await self._post("/flush_cache", {}, refused_ok=True) is not None:
            self._stale_cache = False

    async def _post(
        self, path: str, body: dict[str, Any], *, missing_ok: bool = False, refused_ok: bool = False
    ) -> bytes | None:
        """Like `_call`; None where the server has no such endpoint, or refuses, and that is all right."""
        status, answer = await self._ask("POST", path, body, self._timeout_s)
        if status == 200 or (status == 400 and _APPLIED.encode() in answer):
            return answer
        if (missing_ok and status == 404) or (refused_ok and status == 400):
            return None
        raise self._error("POST", path, f"status {status}: {_text(answer)}")

    async def _call(self, method: str, path: str, body: Any = None, *, limit_s: float | None = None) -> bytes:
        status, answer = await self._ask(method, path, body, limit_s or self._timeout_s)
        if status != 200:
            raise self._error(method, path, f"status {status}: {_text(answer)}")
        return answer

    async def _ask(self, method: str, path: str, body: Any, limit_s: float) -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)  # how much runs at a time is the agent's to say
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            url = self._url + path
            async with self._session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
                return response.status, await response.read()
        except TimeoutError:
            raise self._error(method, path, f"no answer within {limit_s:g} s") from None
        except aiohttp.ClientError as e:
            raise self._error(method, path, f"{type(e).__name__}: {e}") from e

    def _error(self, method: str, path: str, reason: str) -> EngineLost:
        return EngineLost(f"{method} {self._url}{path}: {reason}")


def _text(answer: bytes) -> str:
    return answer[:500].decode(errors="replace")
