"""The server around the debug page, with an application that takes its time: its client is told, and it ends."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

PROGRAM = textwrap.dedent(
    """
    import sys, time
    from pcinuma import wsgi_server
    from pcinuma.listen import Listener

    wsgi_server.ANSWER_SECONDS = 1
    wsgi_server.END_SECONDS = 1
    app = wsgi_server.App("slow")

    @app.get("/slow")
    def slow():
        time.sleep(300)

    @app.get("/quick")
    def quick():
        return "here"

    with Listener("127.0.0.1", 0, 8) as listener:
        wsgi_server.serve(
            app,
            listener,
            max_body=100,
            headers=[("X-Ours", "yes"), ("Content-Type", "text/ours")],
            ready=lambda: print(listener.getsockname()[1], flush=True),
            fault=lambda line: print(line, file=sys.stderr, flush=True),
        )
    """
)


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def asked(port: int, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        client.request(method, path, body)
        answer = client.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        client.close()


def test_what_takes_too_long_is_told_holds_nobody_up_and_ends(server: tuple[subprocess.Popen[str], int]) -> None:
    process, port = server
    status, headers, body = asked(port, "/slow")
    assert (status, headers["x-ours"]) == (503, "yes")
    assert body == b"no answer within 1 seconds: the input is too large or too odd\n"
    assert asked(port, "/quick")[::2] == (200, b"here")

    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert time.monotonic() - started < 10, "the thread that sleeps held the process up"
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_headers_replace_those_of_the_application(server: tuple[subprocess.Popen[str], int]) -> None:
    _, port = server
    status, headers, _ = asked(port, "/quick")
    assert (status, headers["content-type"]) == (200, "text/ours")
    status, headers, _ = asked(port, "/quick", "POST", b"x" * 101)
    assert (status, headers["x-ours"], headers["content-type"]) == (413, "yes", "text/ours")
