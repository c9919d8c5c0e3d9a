"""The client of SGLang's HTTP dialect (0.5.23). One client serves the real SGLang and the embedded engine.

What the dialect hides, found on the real server:
- Without begin and end around it an update is refused; older servers have neither (404): then both are left out.
- "400 Weights were updated, but the cache was not flushed" means that the update was applied.
- With requests paused in place the cache of prefixes cannot be flushed, and what old weights computed would be reused:
  so every version has an `extra_key`, with which requests find their own version's prefixes only.
- More new tokens than fit after the prompt are refused, not cut.
- With requests paused in place, the token in flight is stamped with the new version, though old weights gave it.
- An unknown weight name is ignored with "success", and its checksums are of fused tensors: only what it computes tells.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np

from runtime.comm.buckets import buckets, is_flat
from runtime.errors import EngineLost
from runtime.rollout.base import Description
from runtime.types import Completion, GroupAddress, Manifest, SamplingParams

_APPLIED: Final[str] = "Weights were updated, but"
_FLAT: Final[str] = "flattened_bucket"
_DELTA: Final[str] = "sluice_delta"
"""A load format of the embedded engine's own."""
_PROBE_S: Final[float] = 5.0
_IDLE_S: Final[float] = 1.0
"""Longest that a connection is kept for another call."""


class _Span(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: dict[str, Any]
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []
    """The first has no log-prob."""
    weight_version: str = "default"
    weight_versions: list[_Span] | None = None
    """None: a server that does not tell spans."""


class _Generated(msgspec.Struct, frozen=True):
    meta_info: _Meta


class _ServerInfo(msgspec.Struct, frozen=True):
    enable_deterministic_inference: bool = False
    tp_size: int = 1
    context_length: int | None = None
    """None: what the model's config says."""
    checks_pushed_tensors: bool = False
    """Of the embedded server alone: others fuse tensors and give them other names."""


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
        self._is_paused = False
        self._context_length: int | None = None
        self._prefixes = ""
        """Requests find the prefixes of earlier ones with this key: those of the same weights."""

    # ---- the Engine protocol

    async def describe(self) -> Description:
        model = msgspec.json.decode(await self._call("GET", "/model_info"), type=_ModelInfo)
        server = msgspec.json.decode(await self._call("GET", "/server_info"), type=_ServerInfo)
        can = ["spans"]
        can += ["seed"] if server.enable_deterministic_inference else []
        can += ["digests"] if server.checks_pushed_tensors else []
        version = version_number(model.weight_version)
        self._context_length = server.context_length
        return Description(model=model.model_path, version=version, can=tuple(can), num_ranks=server.tp_size)

    async def generate(self, tokens: Sequence[int], params: SamplingParams, session: str = "") -> Completion:
        sampling: dict[str, Any] = {
            "max_new_tokens": self._room(params.max_new_tokens, len(tokens)),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "ignore_eos": params.ignore_eos,
        }
        if params.seed is not None:
            sampling["sampling_seed"] = params.seed
        return self._completion(await self._generate(tokens, sampling))

    async def score(self, tokens: Sequence[int], start: int = 0) -> np.ndarray:
        # A server gives no log-prob to the first token it is asked for, so it is asked for one more.
        first = max(0, start - 1)
        answer = await self._generate(tokens, {"max_new_tokens": 0, "temperature": 0.0}, logprob_start_len=first)
        found = self._meta(answer).input_token_logprobs
        if len(found) != len(tokens) - first:  # their ids are no proof: the last of the vocabulary is reported as 0
            raise self._error("POST", "/generate", f"{len(found)} tokens were scored, not {len(tokens) - first}")
        scored = np.array([np.nan if logprob is None else logprob for logprob, _, _ in found], dtype=np.float32)
        if not start:
            scored[0] = 0.0
        return scored[start - first :]

    async def _generate(self, tokens: Sequence[int], sampling: dict[str, Any], **more: Any) -> bytes:
        body = {"input_ids": [int(t) for t in tokens], "sampling_params": sampling, "return_logprob": True, **more}
        body["extra_key"] = self._prefixes
        status, answer = await self._ask("POST", "/generate", body, self._timeout_s)
        if status == 400:  # too long a prompt, say: the engine is well, the request is not
            raise ValueError(f"the engine refused {len(tokens)} tokens: {_text(answer)}")
        if status != 200:
            raise self._error("POST", "/generate", f"status {status}: {_text(answer)}")
        return answer

    async def pause(self, mode: str) -> None:
        await self._call("POST", "/pause_generation", {"mode": mode})
        self._pause_mode, self._is_paused = mode, True

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})
        self._is_paused = False

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

    async def receive(self, manifest: Manifest, version: int, source: str) -> None:
        in_place = self._pause_mode == "in_place"
        delta = {"base_version": str(manifest.base)} if manifest.kind == "delta" else {}
        if manifest.via == "folder":
            body = {"model_path": source, "weight_version": str(version), "flush_cache": not in_place, **delta}
            await self._post("/update_weights_from_disk", body | {"load_format": _DELTA if delta else "safetensors"})
        else:
            await self._receive_over_group(manifest, version, source, delta, flush=not in_place)
        self._prefixes = str(version)

    async def _receive_over_group(
        self, manifest: Manifest, version: int, group: str, delta: dict[str, str], *, flush: bool
    ) -> None:
        async with self._updating(group, delta):
            await self._receive_buckets(manifest, version, group, flush=flush)

    @contextlib.asynccontextmanager
    async def _updating(self, group: str, begin: dict[str, str]) -> AsyncIterator[None]:
        """Begin and end around an update over a weight group, or "" without one."""
        sessions = await self._post("/begin_weight_update", begin, missing_ok=True) is not None
        try:
            yield
        except EngineLost:
            # The sender shall not wait for buckets that nobody asks for; and when another member broke the group, this
            # engine is still good for the next push.
            with contextlib.suppress(EngineLost):
                if group:
                    await self._post("/destroy_weights_update_group", {"group_name": group}, refused_ok=True)
                if sessions:
                    await self._post("/end_weight_update", {}, refused_ok=True)
            raise
        if sessions:
            await self._call("POST", "/end_weight_update", {})

    async def _receive_buckets(self, manifest: Manifest, version: int, group: str, *, flush: bool) -> None:
        for part in buckets(manifest):
            body = {
                "names": manifest.names[part],
                "dtypes": manifest.dtypes[part],
                "shapes": manifest.shapes[part],
                "group_name": group,
                "weight_version": str(version) if part.stop == len(manifest.names) else None,
                "load_format": _DELTA if manifest.kind == "delta" else _FLAT if is_flat(manifest, part) else None,
                "flush_cache": flush and part.stop == len(manifest.names),
            }
            await self._post("/update_weights_from_distributed", body)

    async def take(self, handles: Sequence[str], version: int, *, is_first: bool, is_last: bool) -> None:
        if is_first:
            await self._post("/begin_weight_update", {}, missing_ok=True)
        body = {
            "serialized_named_tensors": handles,
            "load_format": _FLAT,
            "weight_version": str(version) if is_last else None,
            "flush_cache": is_last and self._pause_mode != "in_place",
        }
        await self._post("/update_weights_from_tensor", body)
        if is_last:
            await self._post("/end_weight_update", {}, missing_ok=True)
            self._prefixes = str(version)

    async def sleep(self) -> None:
        await self._call("POST", "/release_memory_occupation", {})

    async def wake(self, *, serve: bool) -> None:
        tags = ["kv_cache", "cuda_graph"] if serve else ["weights"]
        await self._call("POST", "/resume_memory_occupation", {"tags": tags})

    async def checksums(self) -> dict[str, str]:
        answer = await self._call("POST", "/weights_checker", {"action": "checksum"})
        ranks = msgspec.json.decode(answer, type=_Checked).ranks
        of = [f" of rank {i}" if len(ranks) > 1 else "" for i in range(len(ranks))]
        return {name + o: digest for o, rank in zip(of, ranks, strict=True) for name, digest in rank.checksums.items()}

    async def health(self) -> bool:
        # SGLang proves its health by generating a token, which it cannot do while it is paused.
        path = "/model_info" if self._is_paused else "/health"
        try:
            await self._call("GET", path, limit_s=_PROBE_S)
        except EngineLost:
            return False
        return True

    async def take_over(self) -> None:
        for path in ("/end_weight_update", "/continue_generation"):
            with contextlib.suppress(EngineLost):
                await self._post(path, {})

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # ---- inside

    def _room(self, wanted: int, num_tokens: int) -> int:
        """How many tokens to ask for: SGLang refuses more than fit. Where none fits, it shall refuse."""
        room = wanted if self._context_length is None else self._context_length - num_tokens
        return min(wanted, room) if room > 0 else wanted

    def _meta(self, answer: bytes) -> _Meta:
        try:
            return msgspec.json.decode(answer, type=_Generated).meta_info
        except msgspec.DecodeError as e:
            raise EngineLost(f"POST {self._url}/generate: answered something else: {e}") from e

    def _completion(self, answer: bytes) -> Completion:
        meta = self._meta(answer)
        spans = meta.weight_versions
        if spans is None:
            spans = [_Span(meta.weight_version, 0, len(meta.output_token_logprobs))]
        return Completion(
            tokens=np.array([token for _, token, _ in meta.output_token_logprobs], dtype=np.int32),
            logprobs=np.array([logprob for logprob, _, _ in meta.output_token_logprobs], dtype=np.float32),
            versions=tuple((span.start, version_number(span.version)) for span in spans if span.end > span.start),
            finish=meta.finish_reason["type"],
        )

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
            # How much runs at a time is the agent's to say; and a server may close what was idle for 5 s.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
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
