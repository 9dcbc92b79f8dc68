"""The webhook under load (wrk) while clients of every bad kind are at it and its certificate changes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.webhook import Authority, Webhook, der, review_of, running, vmi

SECONDS = int(os.environ.get("PCINUMA_LOAD_SECONDS", "8"))
"""Of the load; more by hand."""
CONNECTIONS = 8
MIB = 1024 * 1024
REVIEW = json.dumps(review_of(vmi({"pcinuma.vm.kubevirt.io/enabled": "true"}))).encode()
POST = b"POST /mutate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


# --- bad clients: each does its worst once ---------------------------------------------------------------------


def plain(webhook: Webhook) -> socket.socket:
    return socket.create_connection(("127.0.0.1", webhook.port), timeout=15)


def no_tls(webhook: Webhook) -> None:
    with plain(webhook) as one:
        one.sendall(POST + b"content-length: %d\r\n\r\n" % len(REVIEW) + REVIEW)
        ended(one)


def rubbish(webhook: Webhook) -> None:
    with plain(webhook) as one:
        one.sendall(b"\x16\x03\x01\xff\xff" + os.urandom(2000))
        ended(one)


def distrusting(webhook: Webhook) -> None:
    """Ends the handshake by an alert: it knows another authority."""
    failing(webhook, ssl.create_default_context())


def bad_certificate(webhook: Webhook) -> None:
    """Shows a certificate that has expired, of nobody's making; the server asks for none, so it is as good as any."""
    context = webhook.authority.trusting()
    with tempfile_pair(webhook.authority, timedelta(days=-1)) as (cert, key):
        context.load_cert_chain(cert, key)
    with context.wrap_socket(plain(webhook), server_hostname="localhost") as one:
        one.sendall(POST + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(REVIEW) + REVIEW)
        assert everything(one).startswith(b"HTTP/1.1 200 ")


def vanishing(webhook: Webhook) -> None:
    """Goes in the middle of a handshake, and in the middle of a body, without a word (RST)."""
    for sent in (b"\x16\x03\x01\x02\x00\x01", None):
        one = plain(webhook) if sent is not None else webhook.connect()
        one.sendall(sent if sent is not None else POST + b"content-length: 1000\r\n\r\n{")
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        one.close()


def too_large(webhook: Webhook) -> None:
    with webhook.connect() as one:
        one.sendall(POST + b"content-length: %d\r\nconnection: close\r\n\r\n" % (5 * MIB))
        for _ in range(5):
            one.sendall(b" " * MIB)
        assert everything(one).startswith(b"HTTP/1.1 413 ")


def too_large_in_chunks(webhook: Webhook) -> None:
    with webhook.connect() as one:
        one.sendall(POST + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        for _ in range(5):
            one.sendall(b"100000\r\n" + b" " * MIB + b"\r\n")
        one.sendall(b"0\r\n\r\n")
        assert everything(one).startswith(b"HTTP/1.1 413 ")


def too_large_and_never_sent(webhook: Webhook) -> None:
    with webhook.connect() as one:
        one.sendall(POST + b"content-length: 99999999999\r\n\r\n" + b" " * 1000)


def wrong_length(webhook: Webhook) -> None:
    for line in (b"content-length: -1", b"content-length: 1\r\ncontent-length: 2", b"transfer-encoding: gzip, chunked"):
        with webhook.connect() as one:
            one.sendall(POST + line + b"\r\n\r\n" + REVIEW)
            assert not everything(one).startswith(b"HTTP/1.1 200 ")


def no_review(webhook: Webhook) -> None:
    for body in (b"{", b"[" * 100_000, b"\xff" * 1000, b'{"apiVersion": "admission.k8s.io/v1"}'):
        assert webhook.call("POST", "/mutate", body, content_type="application/json")[0] == 400


BAD: tuple[Callable[[Webhook], None], ...] = (
    no_tls, rubbish, distrusting, bad_certificate, vanishing, too_large, too_large_in_chunks,
    too_large_and_never_sent, wrong_length, no_review,
)  # fmt: skip


def ended(one: socket.socket) -> None:
    """Closed by the other side, however."""
    with contextlib.suppress(ConnectionError):
        while one.recv(65536):
            pass


def everything(one: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := one.recv(65536):
            found += data
    return found


def failing(webhook: Webhook, context: ssl.SSLContext) -> None:
    with plain(webhook) as one, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(one, server_hostname="localhost" if context.check_hostname else None)


@contextlib.contextmanager
def tempfile_pair(authority: Authority, until: timedelta) -> Iterator[tuple[Path, Path]]:
    cert, key = (authority.folder / f"client-{threading.get_ident()}.{kind}" for kind in ("crt", "key"))
    for path, pem in zip((cert, key), authority.pair(until), strict=True):
        path.write_bytes(pem)
    yield cert, key


def trickling(webhook: Webhook, stop: threading.Event) -> None:
    """Three connections that send a byte now and then: in the handshake, in the head, in the body; opened anew when
    they have been ended."""
    hello = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    said = (hello.read(), POST, POST + b"content-length: 1000\r\n\r\n")
    open_now: list[socket.socket | None] = [None] * 3
    at = [0] * 3
    while not stop.wait(0.05):
        for number, text in enumerate(said):
            try:
                one = open_now[number]
                if one is None:
                    open_now[number] = one = plain(webhook) if number == 0 else webhook.connect()
                    if number == 2:
                        one.sendall(text)
                    at[number] = 0
                one.sendall(text[at[number] : at[number] + 1] if number < 2 else b" ")
                at[number] = min(at[number] + 1, len(text) - 2)
            except OSError:
                with contextlib.suppress(OSError, AttributeError):
                    open_now[number].close()  # type: ignore[union-attr]
                open_now[number] = None
    for each in open_now:
        if each is not None:
            each.close()


# --- the test --------------------------------------------------------------------------------------------------


def test_good_reviews_are_answered_whatever_else_comes(tmp_path: Path) -> None:
    if shutil.which("wrk") is None:
        pytest.skip("no wrk here (Debian: wrk)")
    authority = Authority(tmp_path)
    authority.mount(*authority.pair())
    with running(authority=authority) as webhook:
        right = answer(webhook)
        load(webhook, tmp_path, right, 1)  # what is made once is made now
        at_rest = settled(webhook)
        stop, faults, rounds = threading.Event(), [], dict.fromkeys((bad.__name__ for bad in BAD), 0)

        def over_and_over(bad: Callable[[Webhook], None]) -> None:
            try:
                while not stop.wait(0.05):
                    bad(webhook)
                    rounds[bad.__name__] += 1
            except BaseException as error:  # noqa: BLE001 - the test's own thread reads them
                faults.append(f"{bad.__name__}: {error!r}")

        def checking() -> None:
            while not stop.wait(0.2):
                for path in ("/healthz", "/readyz"):
                    begun = time.monotonic()
                    status = webhook.call("GET", path)[0]
                    if status != 200 or time.monotonic() - begun > 10:
                        faults.append(f"{path}: {status} after {time.monotonic() - begun:.1f} s")

        threads = [threading.Thread(target=over_and_over, args=(bad,)) for bad in BAD]
        threads += [threading.Thread(target=trickling, args=(webhook, stop)) for _ in range(4)]
        threads += [threading.Thread(target=checking), threading.Thread(target=rotating, args=(webhook, stop, faults))]
        for thread in threads:
            thread.start()
        try:
            result = load(webhook, tmp_path, right, SECONDS)
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert faults == []
        assert min(rounds.values()) > 0, rounds
        assert result.pop("answers") > 5 * SECONDS
        assert result == {"wrong": 0, "connect": 0, "read": 0, "write": 0, "status": 0, "timeout": 0}
        assert answer(webhook) == right
        descriptors, threads_now, memory = settled(webhook, at_rest)
        assert (descriptors, threads_now) == at_rest[:2]
        assert peak(webhook) < 256 * MIB, "the manifest's limit"
        assert memory - at_rest[2] < 40 * MIB
        levels = {line["level"] for line in webhook.lines() if line["event"] not in ("admission", "certificate")}
        assert levels == {"info"}, [line for line in webhook.lines() if line["event"] == "server"][:3]
        assert webhook.end() == 0
        assert "Traceback" not in webhook.log.read_text()


def test_a_flood_of_connections_cuts_no_review_off_and_fills_no_memory(tmp_path: Path) -> None:
    """A thousand that say nothing, far more than are held at one time."""
    if shutil.which("wrk") is None:
        pytest.skip("no wrk here (Debian: wrk)")
    with running() as webhook, contextlib.ExitStack() as stack:
        right = answer(webhook)
        stop = threading.Event()
        opened = []

        def flood() -> None:
            time.sleep(1.5)  # wrk has connected: a handshake among a thousand others would be another question
            while not stop.is_set():
                opened.append(stack.enter_context(plain(webhook)))
                time.sleep(0.001)
                if len(opened) > 400:
                    opened[-400].close()

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            result = load(webhook, tmp_path, right, 5)
            deadline = time.monotonic() + 20
            while len(opened) < 1000 and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            stop.set()
            thread.join(30)
        assert len(opened) >= 1000
        assert result.pop("answers") > 5
        assert result == {"wrong": 0, "connect": 0, "read": 0, "write": 0, "status": 0, "timeout": 0}
        assert peak(webhook) < 160 * MIB, "each of 128 takes 0.3 MB; held until collected, they were 290"


def answer(webhook: Webhook) -> bytes:
    status, _, body = webhook.call("POST", "/mutate", REVIEW, content_type="application/json")
    assert status == 200
    response = json.loads(body)["response"]
    assert response["allowed"] is True
    assert response["patchType"] == "JSONPatch"
    return body


def load(webhook: Webhook, scratch: Path, right: bytes, seconds: int) -> dict[str, int]:
    """wrk's count of answers and of what was wrong with them."""
    (scratch / "review").write_bytes(REVIEW)
    (scratch / "answer").write_bytes(right)
    url = f"https://localhost:{webhook.port}/mutate"
    script = ROOT / "tests" / "support" / "review.lua"
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--timeout", "10s", "-s", str(script), url]
    files = {"REVIEW": str(scratch / "review"), "ANSWER": str(scratch / "answer")}
    done = subprocess.run(command, env={**os.environ, **files}, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    found: dict[str, int] = json.loads(lines[0])
    return found


def rotating(webhook: Webhook, stop: threading.Event, faults: list[str]) -> None:
    """A new pair, then a broken one, again and again: the first is used within seconds, the second never."""
    authority = webhook.authority
    while not stop.is_set():
        cert, key = authority.pair()
        authority.mount(cert, key)
        deadline = time.monotonic() + 20
        while shown(webhook) != der(cert):
            if time.monotonic() > deadline:
                faults.append("a new certificate is not used")
                return
            time.sleep(0.1)
        told = len(refusals(webhook))
        authority.mount(authority.pair()[0], key)
        while len(refusals(webhook)) == told:
            if time.monotonic() > deadline:
                faults.append("a broken pair is not told")
                return
            time.sleep(0.1)
        if shown(webhook) != der(cert):
            faults.append("a broken pair is used")


def refusals(webhook: Webhook) -> list[str]:
    """What the log says of pairs that are not used."""
    return [line["error"] for line in webhook.lines("certificate") if line["level"] == "error"]


def shown(webhook: Webhook) -> bytes:
    with webhook.connect() as connection:
        return connection.getpeercert(binary_form=True) or b""


def settled(webhook: Webhook, like: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
    """Open descriptors, threads and resident bytes, once the first two are ``like`` those, or have rested."""
    process = f"/proc/{webhook.process.pid}"
    found, deadline = None, time.monotonic() + 25
    while time.monotonic() < deadline:
        counts = len(os.listdir(f"{process}/fd")), len(os.listdir(f"{process}/task"))
        if counts == (found if like is None else like[:2]):
            break
        found = counts
        time.sleep(0.3)
    return *counts, field(webhook, "VmRSS")


def peak(webhook: Webhook) -> int:
    return field(webhook, "VmHWM")


def field(webhook: Webhook, name: str) -> int:
    status = Path(f"/proc/{webhook.process.pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024
