"""The weights' side of the embedded server: groups, update sessions, versions in folders, checksums.

A session replaces all weights, over a group bucket by bucket or from a folder at once. A delta replaces what changed
since the version that it names, which must be the one held. Whatever goes wrong in a session leaves the engine without
usable weights, and it generates nothing until a whole session went well.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

from aiohttp import web

from runtime.comm.weights.broadcast import BroadcastReceiver
from runtime.rollout.embedded import bodies
from runtime.rollout.embedded.answers import Handler, body_of, done, failure, json
from runtime.rollout.embedded.errors import Refused
from runtime.rollout.embedded.model import SlotModel
from runtime.rollout.embedded.weights import Weights
from runtime.rollout.embedded.worker import Worker, in_thread
from runtime.types import GroupAddress

DELTA: Final[str] = "sluice_delta"
"""A load format of ours: what changed, see comm.weights.delta."""

_PEERS_S: Final[float] = 600.0
"""For the members of a weight group; the agent may give up, and end this process, before."""


class Updates:
    """Handlers, one an endpoint."""

    def __init__(self, worker: Worker, model: SlotModel, *, frozen: bool = False) -> None:
        """
        Args:
            frozen: the weights came with the model: they are never replaced, and kept while it sleeps.
        """
        self._worker, self._decoder, self._frozen = worker, worker.decoder, frozen
        self._weights, self._cache = Weights(model.net), model.cache
        self._receiver = BroadcastReceiver(device="cpu", timeout_s=_PEERS_S)
        self._groups: set[str] = set()
        self._next_version = ""

    @property
    def posts(self) -> dict[str, Handler]:
        return {
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/begin_weight_update": self._begin,
            "/update_weights_from_distributed": self._update,
            "/end_weight_update": self._end,
            "/update_weights_from_disk": self._from_disk,
            "/update_weight_version": self._version,
            "/weights_checker": self._checksums,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
        }

    # ---- over a group

    async def _init_group(self, request: web.Request) -> web.Response:
        body = await body_of(request, bodies.InitGroup)
        if body.group_name in self._groups:
            raise Refused(f"already in a weight group named {body.group_name!r}")
        address = GroupAddress(
            name=body.group_name,
            host=body.master_address,
            port=body.master_port,
            world_size=body.world_size,
            backend=body.backend,
        )
        await in_thread(lambda: self._receiver.join(address, body.rank_offset))
        self._groups.add(body.group_name)
        return done()

    async def _destroy_group(self, request: web.Request) -> web.Response:
        name = (await body_of(request, bodies.DestroyGroup)).group_name
        self._check_member(name)
        self._groups.discard(name)
        await in_thread(lambda: self._receiver.leave(name))
        return done()

    async def _begin(self, request: web.Request) -> web.Response:
        base = (await body_of(request, bodies.Begin)).base_version
        await self._worker.call(lambda: self._open(base))
        return done()

    async def _update(self, request: web.Request) -> web.Response:
        body = await body_of(request, bodies.Update)
        self._weights.check_session()
        self._check_member(body.group_name)
        # Received before it is checked: the sender is broadcasting already, and would wait for us until its limit.
        group = body.group_name
        if body.load_format == DELTA:
            payload = await in_thread(lambda: self._receiver.receive_delta(group))
            await self._worker.call(lambda: self._weights.change(payload))
        else:
            what, flat = (group, body.names, body.dtypes, body.shapes), body.load_format is not None
            tensors = await in_thread(lambda: self._receiver.receive(*what, flat=flat, held=self._weights.held))
            await self._worker.call(lambda: self._weights.load(tensors))
        self._next_version = body.weight_version or self._next_version
        return await self._flushed(body.flush_cache)

    async def _end(self, request: web.Request) -> web.Response:
        await self._worker.call(self._close)
        return done()

    def _check_member(self, group: str) -> None:
        if group not in self._groups:
            raise Refused(f"not in a weight group named {group!r}")

    # ---- from a folder

    async def _from_disk(self, request: web.Request) -> web.Response:
        """One whole session."""
        body = await body_of(request, bodies.Disk)
        is_delta = body.load_format == DELTA

        def session() -> None:
            self._open(body.base_version)
            self._next_version = body.weight_version or self._next_version
            self._weights.take(Path(body.model_path), is_delta=is_delta)
            self._stamp()

        await self._worker.call(session)
        return await self._flushed(body.flush_cache)

    # ---- both

    def _open(self, base: str | None) -> None:
        if self._frozen:
            raise Refused("this engine was started with weights of its own: it takes no others")
        if self._decoder.paused is None:
            raise Refused("weights are updated only while generation is paused")
        if base is not None and base != self._decoder.version:
            raise Refused(f"the delta is of version {base}, this engine holds {self._decoder.version or 'none whole'}")
        self._weights.begin()
        self._decoder.version = None

    def _close(self) -> None:
        self._weights.end()
        self._stamp()

    def _stamp(self) -> None:
        self._decoder.version = self._next_version
        self._decoder.forget()

    async def _flushed(self, wanted: bool) -> web.Response:
        """The answer to an update that went well. It is where the session ends that the cache is emptied, once."""
        if wanted and await self._worker.call(self._is_cache_held):
            return failure("Weights were updated, but the cache was not flushed: requests are running", 400)
        return done()

    def _is_cache_held(self) -> bool:
        """Retracted requests hold no cache: only those paused in place do."""
        return self._decoder.paused == "in_place" and self._decoder.num_requests > 0

    async def _version(self, request: web.Request) -> web.Response:
        body = await body_of(request, bodies.Version)

        def stamp() -> None:
            if self._decoder.version is None:
                raise Refused("there are no whole weights to give a version to")
            if body.abort_all_requests:
                self._decoder.abort(None, "the weight version changed")
            self._decoder.version = body.new_version

        await self._worker.call(stamp)
        return json({"success": True, "message": "ok", "new_version": body.new_version})

    async def _checksums(self, request: web.Request) -> web.Response:
        await body_of(request, bodies.Check)
        checksums = await self._worker.call(self._weights.digests)
        return json({"success": True, "message": "ok", "ranks": [{"rank": 0, "checksums": checksums}]})

    # ---- sleep

    async def _release(self, request: web.Request) -> web.Response:
        tags = (await body_of(request, bodies.Memory)).which

        def release() -> None:
            if self._decoder.num_requests or self._decoder.paused is None:
                raise Refused("memory is released only while generation is paused and no request is held")
            self._decoder.forget()
            if "weights" in tags and not self._frozen:
                self._weights.release()
                self._decoder.version = None
            if "kv_cache" in tags:
                self._cache.release()
            _trim()

        await self._worker.call(release)
        return json(None)

    async def _resume(self, request: web.Request) -> web.Response:
        tags = (await body_of(request, bodies.Memory)).which

        def resume() -> None:
            if "weights" in tags:
                self._weights.resume()
            if "kv_cache" in tags:
                self._cache.resume()

        await self._worker.call(resume)
        return json(None)


def _trim() -> None:
    """Give what the C library keeps for later back to the system, where it can."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
