"""Calls of SGLang's HTTP dialect, and what comes back that is no answer.

Every failure is an EngineLost that names the call, the address and what the server said.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from runtime.errors import EngineLost, Unauthorized

T = TypeVar("T")

_APPLIED: Final[bytes] = b"Weights were updated, but"
"""So begins the message of a status 400 that is none."""
_UNAUTHORIZED: Final = (401, 403)
_IDLE_S: Final[float] = 1.0
"""Longest that a connection is kept for another call: a server may close what was idle for 5 s."""
_ANSWER_BYTES: Final = 1 << 29
"""The most that is read of an answer: one of a million tokens has a tenth of it."""


class Wire:
    """To one server. Its session is made with the first call, as there need be no event loop before."""

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        self.url, self._timeout_s = url, timeout_s
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    async def call(self, method: str, path: str, body: Any = None, *, limit_s: float | None = None) -> bytes:
        status, answer = await self.ask(method, path, body, limit_s=limit_s)
        if status != 200:
            raise self.error(method, path, f"status {status}: {said(answer)}")
        return answer

    async def post(
        self, path: str, body: dict[str, Any], *, missing_ok: bool = False, refused_ok: bool = False
    ) -> bytes | None:
        """Like `call`; None where the server has no such endpoint, or refuses, and that is all right."""
        status, answer = await self.ask("POST", path, body)
        if status == 200 or (status == 400 and _APPLIED in answer):
            return answer
        if (missing_ok and status == 404) or (refused_ok and status == 400):
            return None
        raise self.error("POST", path, f"status {status}: {said(answer)}")

    async def ask(self, method: str, path: str, body: Any = None, *, limit_s: float | None = None) -> tuple[int, bytes]:
        """Status and body of the answer.

        Raises:
            Unauthorized: the server wants another token.
            EngineLost: there is no answer.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)  # how much runs is the agent's to say
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        limit_s = limit_s or self._timeout_s
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            url = self.url + path
            async with self._session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
                status, answer = response.status, await _body(response)
        except TimeoutError:
            raise self.error(method, path, f"no answer within {limit_s:g} s") from None
        except aiohttp.ClientError as e:
            raise self.error(method, path, f"{type(e).__name__}: {e}") from e
        if status in _UNAUTHORIZED:
            what = f"status {status}: it wants another bearer token than it was given, see token_file"
            raise Unauthorized(str(self.error(method, path, what)))
        return status, answer

    def read(self, method: str, path: str, answer: bytes, kind: type[T]) -> T:
        """What that call answered."""
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, RecursionError) as e:
            problem = f"answered what no engine of this kind does ({e}): {said(answer)}"
            raise self.error(method, path, problem) from e

    def error(self, method: str, path: str, reason: str) -> EngineLost:
        return EngineLost(f"{method} {self.url}{path}: {reason}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > _ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"its answer has more than {_ANSWER_BYTES:,} bytes")
    return bytes(body)


def said(answer: bytes) -> str:
    """What it says, if it is an error of the dialect; else its beginning."""
    with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError, LookupError, TypeError):
        answer = str(msgspec.json.decode(answer)["error"]["message"]).encode()
    return answer[:500].decode(errors="replace")
