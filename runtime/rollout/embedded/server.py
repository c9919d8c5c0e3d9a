"""The HTTP side of the embedded engine: the part of SGLang 0.5.23's dialect that the project speaks.

Where it differs it is stricter: weights are updated only while generation is paused, a session must bring every weight
and only known ones, and nothing is generated before the first session ended well.
"""

from __future__ import annotations

import hmac
import secrets
from itertools import count
from typing import Any

import msgspec
from aiohttp import web

from runtime.errors import SluiceError
from runtime.rollout.embedded import bodies
from runtime.rollout.embedded.answers import Handler, body_of, failure, json
from runtime.rollout.embedded.decoder import Request
from runtime.rollout.embedded.errors import Refused
from runtime.rollout.embedded.model import SlotModel
from runtime.rollout.embedded.updates import Updates
from runtime.rollout.embedded.worker import DecoderDied, Worker

_OPEN_PATHS = frozenset({"/health"})


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
            return failure(str(e), 400)
        except DecoderDied as e:
            return failure(f"the decoder died: {e}", 500)

    return check


class Server:
    """Handlers, one an endpoint."""

    def __init__(
        self, worker: Worker, model: SlotModel, path: str, *, deterministic: bool, frozen: bool = False
    ) -> None:
        self._worker, self._decoder, self._model = worker, worker.decoder, model
        self._updates = Updates(worker, model, frozen=frozen)
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
            **self._updates.posts,
        }
        for path, handler in posts.items():
            app.router.add_post(path, handler)
        return app

    # ---- generation

    async def _generate(self, request: web.Request) -> web.Response:
        body = await body_of(request, bodies.Generate)
        decoder, model = self._decoder, self._model
        if model.cache.is_released:
            return failure("this engine sleeps", 503)
        if decoder.version is None and decoder.paused is None:
            return failure("this engine has no weights: none were pushed, or the last push was not completed", 503)
        room = model.max_length - len(body.input_ids)
        if not body.input_ids or room < 1:
            raise Refused(f"input_ids: {len(body.input_ids)} tokens, of 1 to {model.max_length - 1}")
        if not all(0 <= token < model.vocab_size for token in body.input_ids):
            raise Refused(f"input_ids: a token is outside the vocabulary of {model.vocab_size}")
        params = body.sampling_params
        if not params.max_new_tokens:
            if not 0 <= body.logprob_start_len < len(body.input_ids):
                raise Refused("max_new_tokens is 0, and no logprob_start_len within input_ids says what is wanted else")
            return json(bodies.scored(body, await self._worker.call(lambda: model.score(body.input_ids))))
        job = Request(
            id=body.rid or f"request-{next(self._numbers)}",
            prompt=body.input_ids,
            params=params,
            seed=secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed,
            limit=min(params.max_new_tokens, room),
        )
        return json(bodies.completion(await self._worker.generate(job), with_logprobs=body.return_logprob))

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await body_of(request, bodies.Pause)).mode
        await self._worker.call(lambda: self._decoder.pause(mode))
        return json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        def resume() -> None:
            if self._model.cache.is_released:
                raise Refused("generation cannot go on: this engine sleeps")
            if self._decoder.version is None:
                raise Refused("generation cannot go on: the weights are not whole")
            self._decoder.resume()

        await self._worker.call(resume)
        return json({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await body_of(request, bodies.Abort)
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
        return json({"model_path": self._path, "weight_version": "default" if version is None else version})

    async def _server_info(self, _: web.Request) -> web.Response:
        return json(
            {
                "version": "sluice-embedded",
                "max_running_requests": self._model.slots,
                "context_length": self._model.max_length,
                "enable_deterministic_inference": True,  # in the dialect: seeds are honoured
                "constant_shape": self._deterministic,
                "checks_pushed_tensors": True,  # no word of the dialect: checksums by the names that are pushed
            }
        )
