"""The client of SGLang's HTTP dialect (0.5.23). One client serves the real SGLang and the embedded engine.

What the dialect hides, found on the real server:
- Without begin and end around it an update is refused; older servers have neither (404): then both are left out.
- "400 Weights were updated, but the cache was not flushed" means that the update was applied.
- With requests paused in place the cache of prefixes cannot be flushed, and what old weights computed would be reused:
  so every version has an `extra_key`, with which requests find their own version's prefixes only.
- More new tokens than fit after the prompt are refused, not cut.
- With requests paused in place, the token in flight is stamped with the new version, though old weights gave it.
- An unknown weight name is ignored with "success", and its checksums are of fused tensors: only what it computes tells.

A server that somebody else runs may be pushed to by another run, or by an attempt that lives on. So the version that
weights are stamped with begins with a word that this client alone knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from runtime.comm.buckets import buckets, is_flat
from runtime.errors import EngineLost, Unauthorized
from runtime.rollout.base import Description
from runtime.rollout.engines._wire import Wire, said
from runtime.types import Completion, GroupAddress, Manifest, SamplingParams

_FLAT: Final[str] = "flattened_bucket"
_DELTA: Final[str] = "sluice_delta"
"""A load format of the embedded engine's own."""
_UNPUSHED: Final[str] = "default"
"""The version of weights that a server has from elsewhere."""
_BUSY: Final = (429, 503)
_BUSY_S: Final[float] = 1.0
"""Between tries at a server with too much to do, such as one with a bound on its queue."""
_PROBE_S: Final[float] = 5.0


class _Span(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Finish(msgspec.Struct, frozen=True):
    type: Literal["stop", "length", "abort"]


_Token = Annotated[int, Meta(ge=0, lt=1 << 31)]


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float, _Token, str | None]] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []
    """The first has no log-prob."""
    weight_version: str = _UNPUSHED
    weight_versions: list[_Span] | None = None
    """None: a server that does not tell spans."""


class _Generated(msgspec.Struct, frozen=True):
    meta_info: _Meta


class Unanswered(EngineLost):
    """A request failed in a server that is there to say so."""


class ServerInfo(msgspec.Struct, frozen=True):
    enable_deterministic_inference: bool = False
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    context_length: int | None = None
    """None: what the model's config says."""
    checks_pushed_tensors: bool = False
    """Of the embedded server alone: others fuse tensors and give them other names."""
    disaggregation_mode: str = "null"
    """Or prefill, decode."""
    disaggregation_bootstrap_port: int = 0
    """Where decode engines ask a prefill engine for what it computed."""
    speculative_algorithm: str | None = None


class _ModelInfo(msgspec.Struct, frozen=True):
    model_path: str = ""
    weight_version: str = _UNPUSHED


class _Rank(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


class _Checked(msgspec.Struct, frozen=True):
    ranks: list[_Rank]


class DialectClient:
    """An Engine over HTTP. Failures are an EngineLost that names the call, the address and the answer."""

    def __init__(self, *, url: str, token: str, timeout_s: float) -> None:
        self._wire, self._timeout_s = Wire(url, token, timeout_s), timeout_s
        self._pause_mode = ""
        self._is_paused = False
        self._server = ServerInfo()
        self._mark = secrets.token_hex(4)
        """Of this client's pushes."""
        self._prefixes = ""
        """Requests find the prefixes of earlier ones with this key: those of the same weights."""

    # ---- the Engine protocol

    async def describe(self) -> Description:
        model = self._wire.read("GET", "/model_info", await self._wire.call("GET", "/model_info"), _ModelInfo)
        server = self._wire.read("GET", "/server_info", await self._wire.call("GET", "/server_info"), ServerInfo)
        can = ["spans"] + (["seed"] if server.enable_deterministic_inference else [])
        can += ["digests"] if server.checks_pushed_tensors else []
        version = self._version(model.weight_version)
        self._server = server
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
            raise self._wire.error("POST", "/generate", f"{len(found)} tokens were scored, not {len(tokens) - first}")
        scored = np.array([np.nan if logprob is None else logprob for logprob, _, _ in found], dtype=np.float32)
        if not start:
            scored[0] = 0.0
        return scored[start - first :]

    async def _generate(self, tokens: Sequence[int], sampling: dict[str, Any], **more: Any) -> bytes:
        body = {"input_ids": [int(t) for t in tokens], "sampling_params": sampling, "return_logprob": True, **more}
        now = asyncio.get_running_loop().time
        end = now() + self._timeout_s
        while True:
            body["extra_key"] = self._prefixes
            status, answer = await self._wire.ask("POST", "/generate", body)
            if status not in _BUSY or now() > end:
                break
            await asyncio.sleep(_BUSY_S)
        if status == 400:  # too long a prompt, say: the engine is well, the request is not
            limit = self._server.context_length or len(tokens) + 1
            why = f"fewer than its max_length of {limit} tokens are allowed" if len(tokens) >= limit else said(answer)
            raise ValueError(f"the engine refused {len(tokens)} tokens: {why}")
        if status != 200:
            raise Unanswered(f"POST {self._wire.url}/generate: status {status}: {said(answer)}")
        return answer

    async def pause(self, mode: str) -> None:
        await self._wire.call("POST", "/pause_generation", {"mode": mode})
        self._pause_mode, self._is_paused = mode, True

    async def resume(self) -> None:
        await self._wire.call("POST", "/continue_generation", {})
        self._is_paused = False

    async def connect(self, address: GroupAddress, rank: int) -> None:
        if self._server.dp_size > 1 or self._server.pp_size > 1:
            others = "it has data- or pipeline-parallel ranks, which no weight group reaches"
            raise self._wire.error("GET", "/server_info", f"{others}: start it without, or write sync.channel: disk")
        body = {
            "master_address": address.host,
            "master_port": address.port,
            "rank_offset": rank,
            "world_size": address.world_size,
            "group_name": address.name,
            "backend": address.backend,
        }
        await self._wire.call("POST", "/init_weights_update_group", body)

    async def disconnect(self, group: str) -> None:
        await self._wire.call("POST", "/destroy_weights_update_group", {"group_name": group})

    async def receive(self, manifest: Manifest, version: int, source: str) -> None:
        delta = {"base_version": self._stamp(manifest.base)} if manifest.kind == "delta" else {}
        if manifest.via == "folder":
            body = {"model_path": source, "weight_version": self._stamp(version), "flush_cache": self._flushes}
            body |= {"load_format": _DELTA if delta else "safetensors", **delta}
            await self._wire.post("/update_weights_from_disk", body)
        else:
            async with self._updating(source, delta):
                await self._receive_buckets(manifest, version, source)
        self._prefixes = self._stamp(version)

    @contextlib.asynccontextmanager
    async def _updating(self, group: str, begin: dict[str, str]) -> AsyncIterator[None]:
        """Begin and end around an update over a weight group, or "" without one."""
        sessions = await self._wire.post("/begin_weight_update", begin, missing_ok=True) is not None
        try:
            yield
        except EngineLost:
            # The sender shall not wait for buckets that nobody asks for; and when another member broke the group, this
            # engine is still good for the next push.
            with contextlib.suppress(EngineLost):
                if group:
                    await self._wire.post("/destroy_weights_update_group", {"group_name": group}, refused_ok=True)
                if sessions:
                    await self._wire.post("/end_weight_update", {}, refused_ok=True)
            raise
        if sessions:
            await self._wire.call("POST", "/end_weight_update", {})

    async def _receive_buckets(self, manifest: Manifest, version: int, group: str) -> None:
        for part in buckets(manifest):
            body = {
                "names": manifest.names[part],
                "dtypes": manifest.dtypes[part],
                "shapes": manifest.shapes[part],
                "group_name": group,
                "weight_version": self._stamp(version) if part.stop == len(manifest.names) else None,
                "load_format": _DELTA if manifest.kind == "delta" else _FLAT if is_flat(manifest, part) else None,
                "flush_cache": self._flushes and part.stop == len(manifest.names),
            }
            await self._wire.post("/update_weights_from_distributed", body)

    async def take(self, handles: Sequence[str], version: int, *, is_first: bool, is_last: bool) -> None:
        if is_first:
            await self._wire.post("/begin_weight_update", {}, missing_ok=True)
        body = {
            "serialized_named_tensors": handles,
            "load_format": _FLAT,
            "weight_version": self._stamp(version) if is_last else None,
            "flush_cache": is_last and self._flushes,
        }
        await self._wire.post("/update_weights_from_tensor", body)
        if is_last:
            await self._wire.post("/end_weight_update", {}, missing_ok=True)
            self._prefixes = self._stamp(version)

    async def sleep(self) -> None:
        await self._wire.call("POST", "/release_memory_occupation", {})

    async def wake(self, *, serve: bool) -> None:
        tags = ["kv_cache", "cuda_graph"] if serve else ["weights"]
        await self._wire.call("POST", "/resume_memory_occupation", {"tags": tags})

    async def checksums(self) -> dict[str, str]:
        answer = await self._wire.call("POST", "/weights_checker", {"action": "checksum"})
        ranks = self._wire.read("POST", "/weights_checker", answer, _Checked).ranks
        of = [f" of rank {i}" if len(ranks) > 1 else "" for i in range(len(ranks))]
        return {name + o: digest for o, rank in zip(of, ranks, strict=True) for name, digest in rank.checksums.items()}

    async def health(self) -> bool:
        # SGLang proves its health by generating a token, which it cannot do while it is paused.
        path = "/model_info" if self._is_paused else "/health"
        try:
            await self._wire.call("GET", path, limit_s=_PROBE_S)
        except Unauthorized:  # it is there; the next call says what it wants
            return True
        except EngineLost:
            return False
        return True

    async def take_over(self) -> None:
        for path in ("/end_weight_update", "/continue_generation"):
            with contextlib.suppress(EngineLost):
                await self._wire.post(path, {})

    async def close(self) -> None:
        await self._wire.close()

    # ---- inside

    def _stamp(self, version: int) -> str:
        return f"{self._mark}-{version}"

    def _version(self, stamp: str) -> int:
        """Policy version behind a stamp; -1 where the weights were not pushed from here."""
        mark, _, number = stamp.partition("-")
        return int(number) if mark == self._mark else -1

    @property
    def _flushes(self) -> bool:
        """Whether a push empties the cache of prefixes. It cannot while requests hold some of it: those paused in
        place, or, in a decode engine, those that were aborted before all of their prompt's cache came."""
        return self._pause_mode != "in_place" and self._server.disaggregation_mode == "null"

    def _room(self, wanted: int, num_tokens: int) -> int:
        """How many tokens to ask for: SGLang refuses more than fit. Where none fits, it shall refuse."""
        room = (self._server.context_length or wanted + num_tokens) - num_tokens
        return min(wanted, room) if room > 0 else wanted

    def _meta(self, answer: bytes) -> _Meta:
        return self._wire.read("POST", "/generate", answer, _Generated).meta_info

    def _spans(self, meta: _Meta) -> list[_Span]:
        spans = meta.weight_versions
        if spans is None:
            spans = [_Span(meta.weight_version, 0, len(meta.output_token_logprobs))]
        return [span for span in spans if span.end > span.start]

    def _completion(self, answer: bytes) -> Completion:
        meta = self._meta(answer)
        spans = self._spans(meta)
        for span in spans:
            if self._prefixes and span.version != _UNPUSHED and self._version(span.version) < 0:
                others = f"answered with weights that another run pushed to it, as version {span.version}"
                raise self._wire.error("POST", "/generate", f"{others}: give each run engines of its own")
        return Completion(
            tokens=np.array([token for _, token, _ in meta.output_token_logprobs], dtype=np.int32),
            logprobs=np.array([logprob for logprob, _, _ in meta.output_token_logprobs], dtype=np.float32),
            versions=tuple((span.start, self._version(span.version)) for span in spans),
            finish=meta.finish_reason.type,
        )
