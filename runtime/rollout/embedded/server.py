"""The HTTP side of the embedded engine: the part of SGLang 0.5.23's dialect that the project speaks.

Where it differs it is stricter: weights are updated only while generation is paused, a session must bring every weight
and only known ones, and nothing is generated before the first session ended well.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from runtime.comm.weights import BroadcastReceiver
from runtime.errors import SluiceError
from runtime.rollout.embedded import bodies
from runtime.rollout.embedded.decoder import Request
from runtime.rollout.embedded.errors import Refused
from runtime.rollout.embedded.model import SlotModel
from runtime.rollout.embedded.weights import Weights
from runtime.rollout.embedded.worker import DecoderDied, Worker, in_thread
from runtime.types import GroupAddress

B = TypeVar("B", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPEN_PATHS = frozenset({"/health"})
_PEERS_S = 600.0
"""For the members of a weight group; the agent may give up, and end this process, before."""


def guard(token: str) -> Any:
    """Middleware: the token is checked before a body is read, and errors become the dialect's answers."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if request.path not in _OPEN_PATHS and not hmac.compare_digest(given, expected):
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except (Refused, msgspec.DecodeError, SluiceError) as e:
            return _failure(str(e), 400)
        except DecoderDied as e:
            return _failure(f"the decoder died: {e}", 500)

    return check


def _failure(message: str, status: int) -> web.Response:
    return _json({"success": False, "message": message, "error": {"message": message}}, status)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _done(message: str = "ok") -> web.Response:
    return _json({"success": True, "message": message})


async def _body(request: web.Request, kind: type[B]) -> B:
    return msgspec.json.decode(await request.read() or b"{}", type=kind)


class Server:
    """Handlers, one an endpoint."""

    def __init__(self, worker: Worker, model: SlotModel, path: str, *, deterministic: bool) -> None:
        self._worker, self._decoder, self._model = worker, worker.decoder, model
        self._weights = Weights(model.net)
        self._receiver = BroadcastReceiver(device="cpu", timeout_s=_PEERS_S)
        self._groups: set[str] = set()
        self._next_version = ""
        self._path, self._deterministic = path, deterministic
        self._numbers = count()
        """Names of requests that come without one."""

    def app(self, token: str) -> web.Application:
        app = web.Application(middlewares=[guard(token)], client_max_size=64 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_route("*", "/flush_cache", self._flush_cache)
        posts: dict[str, Handler] = {
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/begin_weight_update": self._begin,
            "/update_weights_from_distributed": self._update,
            "/end_weight_update": self._end,
            "/update_weight_version": self._version,
            "/weights_checker": self._checksums,
        }
        for path, handler in posts.items():
            app.router.add_post(path, handler)
        return app

    # ---- generation

    async def _generate(self, request: web.Request) -> web.Response:
        body = await _body(request, bodies.Generate)
        decoder, model = self._decoder, self._model
        if decoder.version is None and decoder.paused is None:
            return _failure("this engine has no weights: none were pushed, or the last push was not completed", 503)
        room = model.max_length - len(body.input_ids)
        if not body.input_ids or room < 1:
            raise Refused(f"input_ids: {len(body.input_ids)} tokens, of 1 to {model.max_length - 1}")
        if not all(0 <= token < model.vocab_size for token in body.input_ids):
            raise Refused(f"input_ids: a token is outside the vocabulary of {model.vocab_size}")
        params = body.sampling_params
        job = Request(
            id=body.rid or f"request-{next(self._numbers)}",
            prompt=body.input_ids,
            params=params,
            seed=secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed,
            limit=min(params.max_new_tokens, room),
        )
        return _json(bodies.completion(await self._worker.generate(job), with_logprobs=body.return_logprob))

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await _body(request, bodies.Pause)).mode
        await self._worker.call(lambda: self._decoder.pause(mode))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        def resume() -> None:
            if self._decoder.version is None:
                raise Refused("generation cannot go on: the weights are not whole")
            self._decoder.resume()

        await self._worker.call(resume)
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _body(request, bodies.Abort)
        if not body.abort_all and body.rid is None:
            raise Refused("abort_request: give rid, or abort_all")
        which = None if body.abort_all else body.rid
        await self._worker.call(lambda: self._decoder.abort(which, body.abort_message))
        return web.Response()

    async def _flush_cache(self, _: web.Request) -> web.Response:
        if await self._worker.call(self._flush):
            return web.Response(text="Cache flushed.")
        return web.Response(text="Flush cache failed.", status=400)

    def _flush(self) -> bool:
        if self._decoder.num_requests:
            return False
        self._decoder.forget()
        return True

    # ---- about

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._worker.died.is_set() else 200)

    async def _model_info(self, _: web.Request) -> web.Response:
        version = self._decoder.version
        return _json({"model_path": self._path, "weight_version": "default" if version is None else version})

    async def _server_info(self, _: web.Request) -> web.Response:
        return _json(
            {
                "version": "sluice-embedded",
                "max_running_requests": self._model.slots,
                "context_length": self._model.max_length,
                "enable_deterministic_inference": True,  # in the dialect: seeds are honoured
                "constant_shape": self._deterministic,
            }
        )

    # ---- weights

    async def _init_group(self, request: web.Request) -> web.Response:
        body = await _body(request, bodies.InitGroup)
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
        return _done()

    async def _destroy_group(self, request: web.Request) -> web.Response:
        name = (await _body(request, bodies.DestroyGroup)).group_name
        self._check_member(name)
        self._groups.discard(name)
        await in_thread(lambda: self._receiver.leave(name))
        return _done()

    async def _begin(self, request: web.Request) -> web.Response:
        def begin() -> None:
            if self._decoder.paused is None:
                raise Refused("weights are updated only while generation is paused")
            self._weights.begin()
            self._decoder.version = None

        await self._worker.call(begin)
        return _done()

    async def _update(self, request: web.Request) -> web.Response:
        body = await _body(request, bodies.Update)
        await self._worker.call(self._weights.check_session)
        self._check_member(body.group_name)
        # Received before it is checked: the sender is broadcasting already, and would wait for us until its limit.
        what = (body.group_name, body.names, body.dtypes, body.shapes)
        tensors = await in_thread(lambda: self._receiver.receive(*what))
        await self._worker.call(lambda: self._weights.load(tensors))
        self._next_version = body.weight_version or self._next_version
        if body.flush_cache and not await self._worker.call(self._flush_after_update):
            return _failure("Weights were updated, but the cache was not flushed: requests are running", 400)
        return _done()

    def _check_member(self, group: str) -> None:
        if group not in self._groups:
            raise Refused(f"not in a weight group named {group!r}")

    def _flush_after_update(self) -> bool:
        """Retracted requests hold no cache: only those paused in place do."""
        if self._decoder.paused == "in_place" and self._decoder.num_requests:
            return False
        self._decoder.forget()
        return True

    async def _end(self, request: web.Request) -> web.Response:
        def end() -> None:
            self._weights.end()
            self._decoder.version = self._next_version
            self._decoder.forget()

        await self._worker.call(end)
        return _done()

    async def _version(self, request: web.Request) -> web.Response:
        body = await _body(request, bodies.Version)

        def stamp() -> None:
            if self._decoder.version is None:
                raise Refused("there are no whole weights to give a version to")
            if body.abort_all_requests:
                self._decoder.abort(None, "the weight version changed")
            self._decoder.version = body.new_version

        await self._worker.call(stamp)
        return _json({"success": True, "message": "ok", "new_version": body.new_version})

    async def _checksums(self, request: web.Request) -> web.Response:
        await _body(request, bodies.Check)
        if self._weights.in_session:
            raise Refused("a weight update session is open")
        checksums = await self._worker.call(self._weights.digests)
        return _json({"success": True, "message": "ok", "ranks": [{"rank": 0, "checksums": checksums}]})
