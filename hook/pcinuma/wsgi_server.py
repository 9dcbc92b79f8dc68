"""A WSGI application behind Hypercorn: one event loop for the connections, a thread for each request that is whole.

A client that is slow costs memory, never a thread; an application that is slow costs its client an answer, never the
end of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import hypercorn.asyncio.run
from flask import Flask
from hypercorn.app_wrappers import WSGIWrapper
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config, Sockets
from hypercorn.events import Closed

from pcinuma.body_limits import App as AsgiApp
from pcinuma.body_limits import BodyLimits, Message, Receive, Send
from pcinuma.errors import one_line

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

IDLE_SECONDS = 10
"""For a connection without a request, and for the head of one."""
ANSWER_SECONDS = 60
"""From the head of a request to the end of its answer."""
CLOSE_SECONDS = 1
END_SECONDS = 5
"""For requests in flight when the end comes."""

Fault = Callable[[str], None]
"""Hears one line about what went wrong beside any request."""


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
    listener: socket.socket,
    *,
    max_body: int,
    headers: Sequence[tuple[str, str]],
    ready: Callable[[], None],
    fault: Fault,
) -> None:
    """Serve until SIGTERM or SIGINT. ``headers`` are on every answer; bodies have at most ``max_body`` bytes;
    ``ready`` is called when a signal ends it cleanly."""
    lowered = [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in headers]
    asyncio.run(_serve(_with_headers(_within(_threaded(app, max_body)), lowered), listener, ready, fault))


async def _serve(app: AsgiApp, listener: socket.socket, ready: Callable[[], None], fault: Fault) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    loop.set_exception_handler(lambda _, context: _tell(fault, context))
    ready()
    await hypercorn_serve(app, config(listener, fault), shutdown_trigger=ended.wait, mode="asgi")


# --- around the application ------------------------------------------------------------------------------------


def _threaded(app: Flask, max_body: int) -> AsgiApp:
    """The application as an ASGI one, each request in a thread of its own once its body is there."""
    wrapped = WSGIWrapper(app, max_body)

    async def called(scope: Any, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()

        def send_now(function: Callable[..., Any], *arguments: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(function(*arguments), loop).result()

        await wrapped(scope, receive, send, partial(_in_thread, loop), send_now)

    return BodyLimits(called, max_body, lambda _path, _line: None)


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


# --- Hypercorn -------------------------------------------------------------------------------------------------


class _Connection(TCPServer):
    """Hypercorn's connection, without two waits of version 0.18: one that the client has closed lives on, with its
    buffers, until the time for its next request is over; one that is closed here, until the client agrees.

    A connection is closed once: a second close() would take the transport what it aborts by (CPython,
    asyncio/sslproto.py), and the client could hold up the end for half a minute.
    """

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
        finally:
            await self.idle_task.stop()

    async def _initiate_server_close(self) -> None:
        if self.writer.is_closing():
            await self.protocol.handle(Closed())
        else:
            await super()._initiate_server_close()
            self.loop.call_later(CLOSE_SECONDS, self.writer.transport.abort)

    async def _close(self) -> None:
        late = self.loop.call_later(CLOSE_SECONDS, self.writer.transport.abort)
        try:
            if self.writer.is_closing():
                with contextlib.suppress(OSError, RuntimeError, asyncio.CancelledError):
                    await self.writer.wait_closed()
                await self.idle_task.stop()
            else:
                await super()._close()
        finally:
            late.cancel()


hypercorn.asyncio.run.TCPServer = _Connection  # type: ignore[attr-defined]


class _Config(Config):
    """Hypercorn with a socket of ours, and a TLS context where there is to be TLS."""

    def __init__(self, listener: socket.socket, context: ssl.SSLContext | None):
        super().__init__()
        self._listener = listener
        self._context = context

    @property
    def ssl_enabled(self) -> bool:
        return self._context is not None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        return self._context

    def create_sockets(self) -> Sockets:
        return Sockets([self._listener], [], []) if self.ssl_enabled else Sockets([], [self._listener], [])


def config(listener: socket.socket, fault: Fault, context: ssl.SSLContext | None = None) -> Config:
    """Hypercorn's configuration: what it says of errors goes to ``fault``, all else nowhere."""
    made = _Config(listener, context)
    made.keep_alive_timeout = IDLE_SECONDS
    made.graceful_timeout = END_SECONDS
    made.max_app_queue_size = 0  # a full queue would hold up the end of a connection whose body nobody reads further
    made.include_server_header = False
    made.accesslog = None
    made.errorlog = None
    made.logger_class = _logger_class(fault)
    return made


def _logger_class(fault: Fault) -> Any:
    """What Hypercorn says of errors alone."""

    class Logger:
        def __init__(self, _config: Config) -> None:
            pass

        async def access(self, *_: Any) -> None:
            pass

        info = debug = warning = access

        async def error(self, message: str, *_: Any, **__: Any) -> None:
            fault(one_line(message))

        critical = exception = error

        async def log(self, _level: int, message: str, *_: Any, **__: Any) -> None:
            await self.error(message)

    return Logger


def _tell(fault: Fault, context: Mapping[str, Any]) -> None:
    """What asyncio cannot hand to anybody; a connection that breaks off, or is broken off at the end, is no fault. The
    error's own words may hold what somebody sent, so its type is told alone."""
    error = context.get("exception")
    if not isinstance(error, (OSError, asyncio.CancelledError)):
        fault(one_line(f"{context.get('message')}: {type(error).__name__}"))
