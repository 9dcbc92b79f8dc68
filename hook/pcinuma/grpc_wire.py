"""gRPC's unary calls over HTTP/2 on a unix socket: framing and flow control, no knowledge of what the calls are.

The package h2 speaks HTTP/2; this module adds what gRPC puts on top (PROTOCOL-HTTP2 in the grpc repository): the
five-byte message prefix, and status and message in the trailers. One thread a connection reads, one a call computes,
so that a call that hangs holds up neither its connection nor any other.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions

Handler = Callable[[bytes], bytes]
"""Serialized request in, serialized response out; raises RpcError."""

MAX_MESSAGE = 4 * 1024 * 1024  # what gRPC takes by default, virt-launcher included
MAX_CALLS = 64
MAX_CONNECTIONS = 64
_PREFIX = 5
_READ = 65536
_SEND_SECONDS = 30.0

OK = 0
INVALID_ARGUMENT = 3
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
UNIMPLEMENTED = 12
INTERNAL = 13
UNAVAILABLE = 14


class RpcError(Exception):
    """A call's failure: a gRPC status code and one line."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code
        self.message = message


class Server:
    """Serves ``handlers`` (by path, ``/package.Service/Method``) on a listening socket until it is stopped."""

    def __init__(self, listener: socket.socket, handlers: Mapping[str, Handler]):
        self._listener = listener
        self._handlers = handlers
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def serve(self) -> None:
        """Accept connections until :meth:`stop`; returns then."""
        while not self._stopping:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                if self._stopping:
                    return
                time.sleep(0.05)  # out of descriptors, most likely: those of connections that end come back
                continue
            with self._lock:
                crowded = len(self._connections) >= MAX_CONNECTIONS
                connection = None if crowded else _Connection(peer, self._handlers, self._gone)
                if connection is not None:
                    self._connections.add(connection)
            if connection is None:
                peer.close()
            else:
                threading.Thread(target=connection.run, daemon=True).start()

    def stop(self, seconds: float) -> None:
        """Take no more calls, give those in flight up to ``seconds`` to end, and close everything."""
        self._stopping = True
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.drain()
        for connection in connections:
            connection.finish(max(0.0, deadline - time.monotonic()))

    def _gone(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)


class _Call:
    """One request as it comes in. ``refused`` is the status it gets whatever it says."""

    def __init__(self, handler: Handler | None, refused: RpcError | None):
        self.handler = handler
        self.refused = refused
        self.data = bytearray()


class _Http2(h2.connection.H2Connection):
    """h2, which remembers streams that have ended, for a late frame to be no error: 65,536 of them, in 12 MB."""

    MAX_CLOSED_STREAMS = 1024


class _Connection:
    """One peer: reads its frames, runs its calls, sends their answers."""

    def __init__(self, peer: socket.socket, handlers: Mapping[str, Handler], gone: Callable[[_Connection], None]):
        # a peer that does not read may hold up its own connection, not for ever
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_SEND_SECONDS), 0))
        self._socket = peer
        self._handlers = handlers
        self._gone = gone
        config = h2.config.H2Configuration(client_side=False, header_encoding=None)
        self._h2 = _Http2(config=config)
        self._changed = threading.Condition()  # guards _h2, _calls, _running and what is sent
        self._calls: dict[int, _Call] = {}
        self._running = 0
        self._draining = False
        self._closed = False

    def run(self) -> None:
        try:
            with self._changed:
                self._h2.initiate_connection()
                self._flush()
            while data := self._socket.recv(_READ):
                with self._changed:
                    if self._closed:
                        return
                    for event in self._h2.receive_data(data):
                        self._handle(event)
                    self._flush()
                    self._changed.notify_all()
        except (OSError, h2.exceptions.ProtocolError):
            with self._changed:
                self._flush_quietly()  # h2 has prepared the GOAWAY that says what was wrong
        finally:
            self.close()
            self._gone(self)
            gc.collect()  # h2's objects refer to each other and would pile up until a full collection

    def drain(self) -> None:
        """Take no further call."""
        self._draining = True

    def finish(self, seconds: float) -> None:
        """Wait until no call runs, at most ``seconds``, say goodbye and close."""
        deadline = time.monotonic() + seconds
        # a peer that does not read may hold a sender, and with it the lock: it gets no goodbye
        if self._changed.acquire(timeout=seconds):
            try:
                self._changed.wait_for(lambda: self._running == 0, max(0.0, deadline - time.monotonic()))
                with contextlib.suppress(OSError, h2.exceptions.ProtocolError):  # the peer has gone, or does not read
                    self._socket.setblocking(False)
                    self._h2.close_connection()
                    self._flush()
            finally:
                self._changed.release()
        self.close()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a send or a read that waits
        with self._changed:
            self._changed.notify_all()
        self._socket.close()

    # --- what comes in; called with _changed held -------------------------------------------------------------

    def _handle(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            self._begin(event)
        elif isinstance(event, h2.events.DataReceived):
            self._h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id or 0)
            call = self._calls.get(event.stream_id or 0)
            if call is not None and call.refused is None:
                call.data += event.data or b""
                if len(call.data) > MAX_MESSAGE + _PREFIX:
                    call.data.clear()
                    call.refused = RpcError(RESOURCE_EXHAUSTED, f"the message is larger than {MAX_MESSAGE >> 20} MiB")
        elif isinstance(event, h2.events.StreamEnded):
            self._end(event.stream_id or 0)
        elif isinstance(event, h2.events.StreamReset):
            self._calls.pop(event.stream_id or 0, None)

    def _begin(self, event: h2.events.RequestReceived) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers or ()}
        stream = event.stream_id or 0
        kind = headers.get("content-type", "")
        if headers.get(":method") != "POST" or not kind.startswith("application/grpc"):
            self._h2.send_headers(stream, [(":status", "415")], end_stream=True)
            return
        path = headers.get(":path", "")
        handler = self._handlers.get(path)
        refused = None
        if handler is None:
            refused = RpcError(UNIMPLEMENTED, f"unknown method {path[:200]}")
        elif self._draining:
            refused = RpcError(UNAVAILABLE, "the server is ending")
        elif len(self._calls) + self._running >= MAX_CALLS:
            refused = RpcError(RESOURCE_EXHAUSTED, "too many calls at once")
        self._calls[stream] = _Call(handler, refused)

    def _end(self, stream: int) -> None:
        call = self._calls.pop(stream, None)
        if call is None:
            return
        if call.refused is not None or call.handler is None:
            self._answer(stream, b"", call.refused)
            return
        self._running += 1
        threading.Thread(target=self._compute, args=(stream, call.handler, bytes(call.data)), daemon=True).start()

    # --- what goes out ----------------------------------------------------------------------------------------

    def _compute(self, stream: int, handler: Handler, data: bytes) -> None:
        answer, error = b"", None
        try:
            answer = handler(_message(data))
        except RpcError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - no input may end the process; the peer learns of it
            error = RpcError(INTERNAL, f"internal error: {type(failure).__name__}: {failure}")
        with self._changed:
            try:
                self._answer(stream, answer, error)
            except (OSError, h2.exceptions.ProtocolError):
                pass  # the peer has gone, or has reset the stream
            finally:
                self._running -= 1
                self._changed.notify_all()

    def _answer(self, stream: int, answer: bytes, error: RpcError | None) -> None:
        head = [(":status", "200"), ("content-type", "application/grpc")]
        if error is not None:
            status = [
                ("grpc-status", str(error.code)),
                ("grpc-message", _percent_encoded(error.message[:4000])),
            ]
            self._h2.send_headers(stream, head + status, end_stream=True)
            self._flush()
            return
        self._h2.send_headers(stream, head)
        self._send(stream, b"\0" + len(answer).to_bytes(4, "big") + answer)
        self._h2.send_headers(stream, [("grpc-status", str(OK))], end_stream=True)
        self._flush()

    def _send(self, stream: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            room = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size, len(view))
            if room > 0:
                self._h2.send_data(stream, bytes(view[:room]))
                self._flush()
                view = view[room:]
            elif self._closed or not self._changed.wait(_SEND_SECONDS):
                raise OSError("the peer does not read its answer")

    def _flush(self) -> None:
        if data := self._h2.data_to_send():
            self._socket.sendall(data)

    def _flush_quietly(self) -> None:
        with contextlib.suppress(OSError):
            self._flush()


def _message(data: bytes) -> bytes:
    """The one message of a unary request."""
    if len(data) < _PREFIX or len(data) != _PREFIX + int.from_bytes(data[1:_PREFIX], "big"):
        raise RpcError(INVALID_ARGUMENT, "the request is not one gRPC message")
    if data[0] != 0:
        raise RpcError(UNIMPLEMENTED, "compressed messages are not taken")
    return data[_PREFIX:]


def _percent_encoded(text: str) -> str:
    """The grpc-message header's form: printable ASCII but % as it is, all else %XX (PROTOCOL-HTTP2, Responses)."""
    return "".join(chr(b) if 0x20 <= b <= 0x7E and b != 0x25 else f"%{b:02X}" for b in text.encode("utf-8"))
