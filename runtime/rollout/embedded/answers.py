"""What the handlers of the embedded server share: reading a body, and the dialect's answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

B = TypeVar("B", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def body_of(request: web.Request, kind: type[B]) -> B:
    """
    Raises:
        msgspec.DecodeError: it is not of this kind.
    """
    return msgspec.json.decode(await request.read() or b"{}", type=kind)


def json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def done(message: str = "ok") -> web.Response:
    return json({"success": True, "message": message})


def failure(message: str, status: int) -> web.Response:
    return json({"success": False, "message": message, "error": {"message": message}}, status)
