"""Where a server listens: the text of ``--listen`` → host and port → a socket with bounded connections."""

from __future__ import annotations

import contextlib
import enum
import itertools
import socket
import weakref
from typing import Any

from pcinuma.errors import BadInput, BadOption

_BACKLOG = 256


def address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, ``[IPv6]:PORT`` or ``:PORT``. Raises BadOption."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    # as int() takes more than digits, and a bare IPv6 address has no port to tell from its last group
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 0xFFFF or (":" in host and bare == host):
        raise BadOption(
            f"listen cannot be {text[:80]!r}", where="--listen", hint="write it as 0.0.0.0:8443 or [::]:8443"
        )
    return bare or "0.0.0.0", int(port)  # noqa: S104 - a webhook is for the API server, from wherever it calls


def shown(host: str, port: int) -> str:
    """Host and port as ``--listen`` takes them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Use(enum.IntEnum):
    """What a connection has been good for, the least first."""

    NONE_YET = 0
    BETWEEN_REQUESTS = 1
    REQUEST = 2


class Listener(socket.socket):
    """A listening TCP socket. Beyond ``most`` open connections it ends one for each new one, of the least use and of
    those the one that is so longest: who opens them and sends nothing keeps nobody out, and cuts nobody off.

    An IPv6 socket takes IPv4 as well. Raises BadInput when the address cannot be had.
    """

    def __init__(self, host: str, port: int, most: int):
        self._most = most
        self._open: weakref.WeakKeyDictionary[socket.socket, tuple[Use, int]] = weakref.WeakKeyDictionary()
        self._turns = itertools.count()
        try:
            family, kind, protocol, _, at = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            super().__init__(family, kind, protocol)  # the protocol, as asyncio sets TCP_NODELAY where it sees TCP only
        except (OSError, UnicodeError) as error:
            raise _unusable(error, host, port) from None
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                self.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self.bind(at)
            self.listen(_BACKLOG)
        except OSError as error:
            self.close()
            raise _unusable(error, host, port) from None

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection, and where it is from."""
        connection, peer = super().accept()
        for closed in [one for one in self._open if one.fileno() < 0]:
            del self._open[closed]
        while len(self._open) >= self._most:
            least = min(self._open, key=self._open.__getitem__)
            del self._open[least]
            with contextlib.suppress(OSError):
                least.shutdown(socket.SHUT_RDWR)  # its owner sees the end and closes it
        self._open[connection] = (Use.NONE_YET, next(self._turns))
        return connection, peer

    def used(self, connection: socket.socket, use: Use) -> None:
        """Say what a connection is good for from now on."""
        if connection in self._open:
            self._open[connection] = (use, next(self._turns))


def _unusable(error: OSError | UnicodeError, host: str, port: int) -> BadInput:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return BadInput(f"cannot listen: {reason}", where=shown(host, port))
