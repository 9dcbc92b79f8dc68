"""HTTP/1.1 on one listening socket: Hypercorn reads and writes a connection; it begins and ends here.

Hypercorn's own end of a server (0.18) is none that a client can live with: connections that wait are cut,
one error of one connection ends the process, and nothing says how long it takes at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from pcinuma.body_limits import App, Message, Receive, Send
from pcinuma.errors import one_line
from pcinuma.listen import Listener, Use

IDLE_SECONDS = 10
"""For a connection without a request, and for the head of one."""
HANDSHAKE_SECONDS = 5
LAST_SECONDS = 1
"""When the end comes: for a connection without a request to bring one that is on its way."""
CLOSE_SECONDS = 1
_MOST_AT_ONCE = 64
_PAUSE_SECONDS = 1  # after an accept for which there is no file descriptor

Fault = Callable[[str], None]
"""Hears one line about what went wrong beside any request."""


async def serve(
    app: App,
    listener: Listener,
    *,
    context: ssl.SSLContext | None,
    ended: asyncio.Event,
    end_seconds: float,
    fault: Fault,
) -> None:
    """Serve until ``ended``; then answer what has arrived, ``end_seconds`` at most, and close.

    No connection that a client has made by then is cut: the queue is emptied before the listener is closed (here),
    and one that has brought no request yet has LAST_SECONDS for it. Each answer says that it is the last.
    """
    server = _Server(app, listener, context, fault)
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    loop.add_reader(listener, server.accept)
    try:
        await ended.wait()
    finally:
        server.accept()
        loop.remove_reader(listener)
        listener.close()
        await server.end(end_seconds)


class _Server:
    """The connections, each with a task of its own from its handshake to its close."""

    def __init__(self, app: App, listener: Listener, context: ssl.SSLContext | None, fault: Fault):
        self._listener = listener
        self._work = WorkerContext(None)
        self._app = ASGIWrapper(_last_answers(app, self._work))
        self._context = context
        self._fault = fault
        self._config = _config(fault)
        self._open: dict[asyncio.Task[None], asyncio.BaseTransport | None] = {}

    def accept(self) -> None:
        """Take every connection that waits."""
        loop = asyncio.get_running_loop()
        for _ in range(_MOST_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # it has gone while it waited
            except OSError as error:
                self._fault(one_line(f"no connection can be taken: {error.strerror}"))
                loop.remove_reader(self._listener)
                loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            connection.setblocking(False)
            task = loop.create_task(self._attend(connection))
            self._open[task] = None
            task.add_done_callback(self._forget)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self.accept)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            for one in _leaves(error):
                if not isinstance(one, (OSError, asyncio.CancelledError)):  # one that breaks off is no fault
                    self._fault(one_line(f"a connection ended: {type(one).__name__}"))

    async def _attend(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        tls = {"ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": CLOSE_SECONDS}
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, **(tls if self._context else {})
            )
        except OSError as error:
            # no client of ours: no TLS, none that it takes, or none in time. The error holds on to asyncio's frames,
            # those to it and to 0.3 MB, until the garbage collector comes by, which is seldom
            traceback.clear_frames(error.__traceback__)
            return
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = transport
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        served = _Connection(self._app, loop, self._config, self._work, ConnectionState({}), reader, writer)
        served.used = partial(self._listener.used, connection)
        await served.run()
        transport.close()  # again: only then asyncio's two halves of TLS let go of each other, and of 0.3 MB

    async def end(self, seconds: float) -> None:
        """``seconds`` at most for the requests that are there, and twice CLOSE_SECONDS for connections to close."""
        await self._work.terminated.set()
        await self._wait(seconds)
        for transport in self._open.values():
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
        await self._wait(CLOSE_SECONDS)
        for task in self._open:
            task.cancel()
        await self._wait(CLOSE_SECONDS)

    async def _wait(self, seconds: float) -> None:
        if self._open:
            await asyncio.wait(list(self._open), timeout=seconds)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in _leaves(one)]
    return [error]


def _last_answers(app: App, work: WorkerContext) -> App:
    """The application whose answers say, once the end has come, that none follows on their connection."""

    async def called(scope: Any, receive: Receive, send: Send) -> None:
        async def passed(message: Message) -> None:
            if message["type"] == "http.response.start" and work.terminated.is_set():
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        await app(scope, receive, passed)

    return called


# --- Hypercorn -------------------------------------------------------------------------------------------------


class _Http1(H11Protocol):
    """HTTP/1.1 that nobody can turn into HTTP/2, whose bounds are others."""

    async def _check_protocol(self, event: Any) -> None:
        pass


class _Connection(TCPServer):
    """Hypercorn's connection, without some waits of version 0.18: one that the client has closed lives on, with its
    buffers, until the time for its next request is over; one that is closed here, until the client agrees. And without
    its errors: a client that still writes when the connection is closed is no fault.

    A connection is closed once: a second close() would take the transport what it aborts by (CPython,
    asyncio/sslproto.py), and the client could hold up the end for half a minute.
    """

    used: Callable[[Use], None]

    async def run(self) -> None:
        peer = self.writer.get_extra_info("socket")
        try:
            client, server = (parse_socket_addr(peer.family, at) for at in (peer.getpeername(), peer.getsockname()))
            tls = self.writer.get_extra_info("ssl_object") is not None
            async with TaskGroup(self.loop) as group:
                self._task_group = group
                # a context of its own, which never ends: only an answer that says so is the last on its connection
                endless, state = WorkerContext(None), ConnectionState({})
                self.protocol = _Http1(  # type: ignore[assignment]
                    self.app, self.config, endless, group, state, tls, client, server, self.protocol_send
                )
                await self.protocol.initiate()
                await self.idle_task.restart(group, self._idle_timeout)
                await self._read_data()
        except OSError:
            pass
        finally:
            await self._close()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated):
            self.used(Use.BETWEEN_REQUESTS if event.idle else Use.REQUEST)
        try:
            await super().protocol_send(event)
        except OSError:  # of TLS, which Hypercorn does not expect here
            await self.protocol.handle(Closed())

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
        finally:
            await self.idle_task.stop()

    async def _idle_timeout(self) -> None:
        with contextlib.suppress(TimeoutError):
            # no wait_for: Python 3.11's takes no cancellation once the event is set, which a request brings about
            async with asyncio.timeout(self.config.keep_alive_timeout):
                await self.context.terminated.wait()
            await asyncio.sleep(LAST_SECONDS)
        await asyncio.shield(self._initiate_server_close())

    async def _initiate_server_close(self) -> None:
        if self.writer.is_closing():
            await self.protocol.handle(Closed())
        else:
            await super()._initiate_server_close()
            self.loop.call_later(CLOSE_SECONDS, self.writer.transport.abort)

    async def _close(self) -> None:
        late = self.loop.call_later(CLOSE_SECONDS, self.writer.transport.abort)
        try:
            with contextlib.suppress(OSError, RuntimeError, asyncio.CancelledError):
                if self.writer.is_closing():
                    await self.writer.wait_closed()
                else:
                    await super()._close()
            await self.idle_task.stop()
        finally:
            late.cancel()


def _config(fault: Fault) -> Config:
    """Hypercorn's configuration: what it says of errors goes to ``fault``, all else nowhere."""
    made = Config()
    made.keep_alive_timeout = IDLE_SECONDS
    made.keep_alive_max_requests = 100_000
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
