"""A WSGI application behind Hypercorn: one event loop for the connections, a thread for each request that is whole.

A client that is slow costs memory, never a thread; an application that is slow costs its client an answer, never the
end of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flask import Flask
from hypercorn.app_wrappers import WSGIWrapper

from pcinuma import http_server
from pcinuma.body_limits import MOST_HELD, BodyLimits, Message, Receive, Send
from pcinuma.body_limits import App as AsgiApp
from pcinuma.errors import one_line
from pcinuma.http_server import Fault
from pcinuma.listen import Listener

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

ANSWER_SECONDS = 60
"""From the head of a request to the end of its answer."""
END_SECONDS = 5
"""For requests in flight when the end comes, unless the caller says otherwise."""


class App(Flask):
    """Flask that answers with one piece of body at least, if an empty one: Hypercorn 0.18 sends no head without it."""

    def wsgi_app(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        pieces = super().wsgi_app(environ, start_response)
        try:
            return list(pieces) or [b""]
        finally:
            if callable(close := getattr(pieces, "close", None)):
                close()


def serve(
    app: Flask,
    listener: Listener,
    *,
    max_body: int,
    ready: Callable[[], None],
    fault: Fault,
    headers: Sequence[tuple[str, str]] = (),
    context: ssl.SSLContext | None = None,
    most_held: int = MOST_HELD,
    at_once: int | None = None,
    end_seconds: float | None = None,
    refused: Callable[[str, str], None] = lambda _path, _line: None,
) -> None:
    """Serve until SIGTERM or SIGINT, over TLS with a ``context``; the listener is closed then. ``headers`` are on every
    answer. Bodies have at most ``max_body`` bytes, and ``most_held`` together; ``refused`` hears path and reason of
    those that have more. ``at_once`` requests at most are with the application; others wait, each with one copy of its
    body, where the application makes several, and takes a heap of its own for each thread.
    ``ready`` is called when a signal ends it cleanly."""
    lowered = [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in headers]
    limited = BodyLimits(_threaded(app, max_body, at_once), max_body, refused, most_held)
    served = _with_headers(_within(limited), lowered)
    seconds = END_SECONDS if end_seconds is None else end_seconds
    asyncio.run(_serve(served, listener, context, ready, fault, seconds))


async def _serve(
    app: AsgiApp,
    listener: Listener,
    context: ssl.SSLContext | None,
    ready: Callable[[], None],
    fault: Fault,
    end_seconds: float,
) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    loop.set_exception_handler(lambda _, told: _tell(fault, told))
    ready()
    await http_server.serve(app, listener, context=context, ended=ended, end_seconds=end_seconds, fault=fault)


# --- around the application ------------------------------------------------------------------------------------


def _threaded(app: Flask, max_body: int, at_once: int | None) -> AsgiApp:
    """The application as an ASGI one, each request in a thread of its own once its body is there."""
    wrapped = WSGIWrapper(app, max_body)
    turn = contextlib.nullcontext() if at_once is None else asyncio.Semaphore(at_once)

    async def called(scope: Any, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()

        def send_now(function: Callable[..., Any], *arguments: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(function(*arguments), loop).result()

        async with turn:
            await wrapped(scope, receive, send, partial(_in_thread, loop), send_now)

    return called


def _in_thread(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
    """Run it in a daemon thread: one that does not end holds up no end of the process, as a pool's would."""
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:  # noqa: BLE001 - it is the awaiter's
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _within(app: AsgiApp) -> AsgiApp:
    """The application with ANSWER_SECONDS for an answer: then its client hears that it took too long."""

    async def called(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        begun = late = False

        async def passed(message: Message) -> None:
            nonlocal begun
            if not late:
                begun = True
                await send(message)

        answering = asyncio.ensure_future(app(scope, receive, passed))
        try:
            done, _ = await asyncio.wait({answering}, timeout=ANSWER_SECONDS)
        except asyncio.CancelledError:
            answering.cancel()
            raise
        if done:
            answering.result()
            return
        late = True
        answering.add_done_callback(lambda task: task.cancelled() or task.exception())
        if not begun:
            line = f"no answer within {ANSWER_SECONDS} seconds: the input is too large or too odd\n".encode()
            length = (b"content-length", b"%d" % len(line))
            plain = [(b"content-type", b"text/plain; charset=utf-8"), length]
            await send({"type": "http.response.start", "status": 503, "headers": plain})
            await send({"type": "http.response.body", "body": line, "more_body": False})

    return called


def _with_headers(app: AsgiApp, headers: list[tuple[bytes, bytes]]) -> AsgiApp:
    """The application with these headers on each answer, those that never reach it included."""
    names = {name for name, _ in headers}

    async def called(scope: Any, receive: Receive, send: Send) -> None:
        async def passed(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name.lower() not in names]
                message = {**message, "headers": [*kept, *headers]}
            await send(message)

        await app(scope, receive, passed)

    return called


def _tell(fault: Fault, context: Mapping[str, Any]) -> None:
    """What asyncio cannot hand to anybody; a connection that breaks off, or is broken off at the end, is no fault. The
    error's own words may hold what somebody sent, so its type is told alone."""
    error = context.get("exception")
    if not isinstance(error, (OSError, asyncio.CancelledError)):
        fault(one_line(f"{context.get('message')}: {type(error).__name__}"))
