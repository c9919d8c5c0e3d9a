"""Bodies of requests and answers, as SGLang 0.5.23 spells them. Unknown fields are ignored, unknown sampling
parameters are refused, as there."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from runtime.rollout.embedded.decoder import PauseMode, Request
from runtime.rollout.embedded.sampling import Params


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    input_ids: list[int]
    sampling_params: Params = Params()
    return_logprob: bool = False
    logprob_start_len: int = -1
    """From where on log-probs of the prompt are wanted; -1: none."""
    rid: str | None = None
    stream: Literal[False] = False


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    mode: PauseMode = "abort"


class Abort(msgspec.Struct, frozen=True, kw_only=True):
    rid: str | None = None
    abort_all: bool = False
    abort_message: str = "aborted by request"


class InitGroup(msgspec.Struct, frozen=True, kw_only=True):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyGroup(msgspec.Struct, frozen=True, kw_only=True):
    group_name: str = "weight_update_group"


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    base_version: str | None = None
    """A word of ours: the version that a delta starts from."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    load_format: Literal["flattened_bucket", "sluice_delta"] | None
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    weight_version: str | None = None

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError("names, dtypes and shapes differ in length")


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    load_format: Literal["auto", "safetensors", "sluice_delta"] = "auto"
    base_version: str | None = None
    """As in Begin."""
    flush_cache: bool = True
    weight_version: str | None = None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    tags: tuple[Literal["weights", "kv_cache", "cuda_graph"], ...] | None = None
    """None: all."""

    @property
    def which(self) -> frozenset[str]:
        return frozenset(self.tags if self.tags is not None else ("weights", "kv_cache"))


class Version(msgspec.Struct, frozen=True, kw_only=True):
    new_version: str
    abort_all_requests: bool = True


class Check(msgspec.Struct, frozen=True, kw_only=True):
    action: Literal["checksum"] = "checksum"


def scored(body: Generate, logprobs: list[float]) -> dict[str, Any]:
    """The answer to /generate where only the prompt's log-probs were wanted, here all of them."""
    start = body.logprob_start_len
    triples: list[tuple[float | None, int, None]] = [
        (logprob, token, None) for logprob, token in zip(logprobs[start:], body.input_ids[start:], strict=True)
    ]
    triples[0] = (None, triples[0][1], None)
    meta = {"finish_reason": {"type": "length", "length": 0}, "input_token_logprobs": triples}
    return {"output_ids": [], "meta_info": meta}


def completion(request: Request, *, with_logprobs: bool) -> dict[str, Any]:
    """The answer to /generate."""
    starts = [start for _, start in request.versions]
    ends = [*starts[1:], len(request.tokens)]
    meta: dict[str, Any] = {
        "id": request.id,
        "finish_reason": request.finish,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(request.tokens),
        "cached_tokens": 0,
        "num_retractions": request.retractions,
        "weight_version": request.versions[-1][0] if request.versions else "default",
        "weight_versions": [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(request.versions, ends, strict=False)
        ],
    }
    if with_logprobs:
        meta["output_token_logprobs"] = [
            (logprob, token, None) for logprob, token in zip(request.logprobs, request.tokens, strict=True)
        ]
    return {"output_ids": request.tokens, "meta_info": meta}
