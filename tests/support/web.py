"""The debug page as a process of its own, which can write no file, and its clients."""

from __future__ import annotations

import contextlib
import http.client
import re
import resource
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from html import unescape
from pathlib import Path

PROGRAM = Path(sys.executable).with_name("pcinuma")
CALL_SECONDS = 30.0

Answer = tuple[int, dict[str, str], str]
"""Status, headers with their names in lower case, body."""


class Page:
    """A running `pcinuma web`."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self.process = process
        self._said = bytearray()
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(20), self.said
        found = re.search(r"http://\S*?:(\d+)/", self.said)
        assert found is not None, self.said
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}/"

    @property
    def said(self) -> str:
        """Standard error so far."""
        return self._said.decode()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._said += line
            if b"http://" in line:
                self._ready.set()
        self._ready.set()

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """One request. ``headers`` with underscores for dashes; Host is the loopback address unless given."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_SECONDS)
        with contextlib.closing(client):
            client.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = client.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()

    def send(
        self, path: str, values: Mapping[str, str], files: Mapping[str, tuple[str, bytes]] | None = None, **headers: str
    ) -> Answer:
        """A form as a browser sends it: fields, and files by name and content."""
        body, kind = multipart(values, files or {})
        return self.ask("POST", path, body, content_type=kind, **headers)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it; the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(20)
        self._reader.join(5)
        return status


@contextlib.contextmanager
def serving(listen: str = "127.0.0.1:0", **environment: str) -> Iterator[Page]:
    """The page as a process that can write no byte to any file: RLIMIT_FSIZE is 0. Its standard error is a pipe."""
    process = subprocess.Popen(
        [PROGRAM, "web", "--listen", listen],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", **environment},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )
    try:
        yield Page(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def multipart(values: Mapping[str, str], files: Mapping[str, tuple[str, bytes]]) -> tuple[bytes, str]:
    """The body of a form and its content type (RFC 7578; line ends of values as browsers send them)."""
    boundary = uuid.uuid4().hex
    parts = []
    for name, value in values.items():
        crlf = value.replace("\r\n", "\n").replace("\n", "\r\n")
        parts.append(f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{crlf}\r\n'.encode())
    for name, (filename, content) in files.items():
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n'
        parts.append(f"{head}Content-Type: application/octet-stream\r\n\r\n".encode() + content + b"\r\n")
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def problem(html: str, field: str) -> str:
    """The text of the error at a field; empty when there is none."""
    found = re.search(rf'id="{field}-error">(.*?)</p>', html, re.S)
    return unescape(re.sub(r"<[^>]+>", "", found[1])) if found else ""
