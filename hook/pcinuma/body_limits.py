"""What stands between the web server and the application: bodies bounded in bytes and seconds.

An ASGI middleware. The application inside gets a request when its body is there: a slow client holds up a task of the
event loop and none of the threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Message = Any  # ASGI's, a dict whose keys hang on its "type"
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

BODY_SECONDS = 10
MOST_HELD = 64 * 1024 * 1024
"""Bytes of bodies that are in memory at one time, of all requests together, unless the caller says otherwise. Each is
there about four times, as server and application hand it on."""


class _Refused(Exception):
    def __init__(self, status: int, line: str):
        super().__init__(line)
        self.status = status


class BodyLimits:
    """``most`` bytes a body, ``held`` together, and BODY_SECONDS for it to come.

    ``told`` hears the path of a request that was refused here, and why.
    """

    def __init__(self, app: App, most: int, told: Callable[[str, str], None], held: int = MOST_HELD):
        self._app = app
        self._most_held = held
        self._most = most
        self._told = told
        self._held = 0

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()

        async def whole() -> Message:
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        try:
            if not await self._read(receive, body):
                return
            await self._app(_with_length(scope, len(body)), whole, send)
        except _Refused as refused:
            self._told(scope["path"], str(refused))
            for message in _answer(refused.status, str(refused)):
                await send(message)
        finally:
            self._held -= len(body)

    async def _read(self, receive: Receive, body: bytearray) -> bool:
        """The body into ``body``; False when the client has gone. What is refused is read to its end, as a client that
        still writes would not see the answer."""
        refused: _Refused | None = None
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return False
                    refused = refused or self._keep(message.get("body", b""), body)
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            refused = refused or _Refused(408, f"the body has not come within {BODY_SECONDS} seconds")
        if refused is not None:
            raise refused
        return True

    def _keep(self, data: bytes, body: bytearray) -> _Refused | None:
        """Add to the body; why it is not to be kept, if it is not."""
        if len(body) + len(data) > self._most:
            refused = _Refused(413, f"the body is larger than {self._most >> 20} MiB")
        elif self._held + len(data) > self._most_held:
            refused = _Refused(503, "too many large requests at once")
        else:
            body += data
            self._held += len(data)
            return None
        self._held -= len(body)
        body.clear()
        return refused


def _with_length(scope: Any, length: int) -> Any:
    """The request as one with a body of known length: WSGI has no other (PEP 3333)."""
    framing = (b"content-length", b"transfer-encoding")
    kept = [(name, value) for name, value in scope["headers"] if name not in framing]
    return {**scope, "headers": [*kept, (b"content-length", b"%d" % length)]}


def _answer(status: int, line: str) -> list[Message]:
    text = f"{line}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(text))]
    return [
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": text, "more_body": False},
    ]
