"""The server's certificate and key: loaded, tried, and loaded again when the files change, without a restart.

A Secret's volume changes by the swap of one symlink above both files (``..data``), whoever rotates the Secret.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from pcinuma.errors import BadInput

MAX_BYTES = 1024 * 1024
_NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python's ssl has no name for
_STRONG = "RSA of 2048 bits or more, or ECDSA P-256, signed with SHA-256"
_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A pair that servers can use, and when: seconds since the epoch."""

    context: ssl.SSLContext
    not_before: float
    not_after: float

    def problem(self, now: float) -> str | None:
        """Why clients will not take it at that time; None when they will."""
        if now > self.not_after:
            return f"the certificate expired at {stamp(self.not_after)}"
        return f"the certificate is not valid before {stamp(self.not_before)}" if now < self.not_before else None


class Certificates:
    """The pair in use. ``context`` is what a server listens with: each new connection gets the newest pair.

    Raises BadInput when the first pair cannot be used. ``failed`` is told why a later one cannot, once each; the last
    good pair stays in use then. A pair that clients would not take now does not replace one that they do; it does when
    its time has come, or when the one in use is no better. ``failed`` also hears, once, that the pair in use expired.
    """

    def __init__(self, cert: str, key: str, failed: Callable[[BadInput], None]):
        self._paths = (cert, key)
        self._failed = failed
        self._seen = _state(cert, key)
        self._next: Certificate | None = None
        self._told: Certificate | None = None
        self.current = load(cert, key)
        self.context = self.current.context
        self.context.sni_callback = self._choose

    def refresh(self) -> bool:
        """Look whether the files have changed, or a time has come; True when a new pair is in use."""
        now = time.time()
        changed = self._load(now) or self._turn(now)
        problem = self.current.problem(now)
        if problem is not None and self._told is not self.current:
            self._told = self.current
            self._failed(BadInput(problem, where=self._paths[0]))
        return changed

    def _load(self, now: float) -> bool:
        state = _state(*self._paths)
        if state == self._seen:
            return False
        try:
            new = load(*self._paths)
        except BadInput as error:
            if _state(*self._paths) == state:  # else they were changing just now: next time
                self._seen = state
                self._next = None
                self._failed(error)
            return False
        self._seen = state
        self._next = new
        if self._turn(now):
            return True
        self._failed(BadInput(f"{new.problem(now)}: the one before stays in use", where=self._paths[0]))
        return False

    def _turn(self, now: float) -> bool:
        """Take the next pair into use, if there is one and it is not worse."""
        if self._next is None or (self._next.problem(now) is not None and self.current.problem(now) is None):
            return False
        self.current, self._next = self._next, None
        return True

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """OpenSSL asks this in every handshake, before it needs a certificate, also when the client named no server."""
        connection.context = self.current.context


def load(cert: str, key: str) -> Certificate:
    """The pair, proven by a handshake with itself. Raises BadInput with one line that names the file at fault."""
    text = _read(cert)
    _read(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0  # a resumed session would show no certificate, so none of a new one either
    context.set_alpn_protocols(["http/1.1"])

    def no_password() -> NoReturn:
        raise BadInput("the key is encrypted, and there is nobody to ask for its password", where=key)

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError, TypeError):
        raise BadInput("no certificate in PEM format", where=cert) from None
    try:
        context.load_cert_chain(cert, key, password=no_password)
    except ssl.SSLError as error:
        # the second: of another kind than the certificate's
        if error.reason in ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED", "KEY_TYPE_MISMATCH"):
            raise BadInput("the key is not the certificate's", where=key) from None
        if error.reason in ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
            what = "signature" if error.reason == "CA_MD_TOO_WEAK" else "key"
            raise BadInput(f"the certificate's {what} is too weak for TLS", where=cert, hint=_STRONG) from None
        raise BadInput("no private key in PEM format that can be used with the certificate", where=key) from None
    except OSError as error:
        raise BadInput(f"cannot be read: {error.strerror or error}", where=cert) from None
    return Certificate(context, *_validity(context, text, cert))


def _read(path: str) -> str:
    try:
        # a pipe or a device could keep us for ever, and the pair in use would never be looked at again
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadInput("no file", where=path)
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(f"cannot be read: {reason}", where=path) from None
    if len(data) > MAX_BYTES:
        raise BadInput("larger than 1 MiB", where=path)
    return data.decode("ascii", "replace")


def _validity(context: ssl.SSLContext, text: str, where: str) -> tuple[float, float]:
    """From when until when the certificate is valid, as a client of ours reads it that trusts just this certificate."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
    client.load_verify_locations(cadata=text.partition(_END)[0] + _END)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server)
    sides = (ours, context.wrap_bio(to_server, to_client, server_side=True))
    try:
        for side in sides * 3:  # TLS 1.2 takes no more flights than that
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise BadInput(f"no client would take the certificate: {error.verify_message}", where=where) from None
    except ssl.SSLError as error:
        raise BadInput(f"no handshake is possible with it: {error.reason or error}", where=where) from None
    shown = ours.getpeercert() or {}
    before, after = (ssl.cert_time_to_seconds(str(shown[name])) for name in ("notBefore", "notAfter"))
    return before, after


def _state(*paths: str) -> tuple[object, ...]:
    """What changes when a file is replaced or written, or a symlink on the way to it moves."""
    found: list[object] = []
    for path in paths:
        try:
            status = os.stat(path)
            found.append((os.path.realpath(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError as error:
            found.append(error.errno)
    return tuple(found)


def stamp(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def watch(certificates: Certificates, seconds: float, reloaded: Callable[[], None]) -> Callable[[], None]:
    """Refresh every so many seconds in a thread of its own, until the function that comes back is called."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            if certificates.refresh():
                reloaded()

    threading.Thread(target=run, daemon=True).start()
    return ended.set
