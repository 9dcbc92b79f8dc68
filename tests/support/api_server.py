"""A small API server: real HTTPS, objects by path, optimistic locking by resourceVersion, tokens and rights.

It stands where a cluster's would: the shapes of its answers (objects, Status) are those of the Kubernetes API.
"""

from __future__ import annotations

import copy
import json
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "a-token"


class ApiServer:
    """``objects`` by path; ``log`` of what was asked, as (method, path, status); ``rights``: what the token may do.

    ``before``: called with method and path ahead of each answer, for a test to meddle.
    """

    def __init__(self, url: str):
        self.url = url
        self.objects: dict[str, dict[str, Any]] = {}
        self.log: list[tuple[str, str, int]] = []
        self.rights: set[tuple[str, str]] | None = None
        self.before: Callable[[str, str], None] = lambda method, path: None

    def store(self, path: str, content: dict[str, Any]) -> None:
        """Puts an object there, as a user would, with a new resourceVersion."""
        version = int(self.objects.get(path, {}).get("metadata", {}).get("resourceVersion", "100")) + 1
        kept = copy.deepcopy(content)
        kept.setdefault("metadata", {})["resourceVersion"] = str(version)
        self.objects[path] = kept

    def written(self) -> list[str]:
        return [path for method, path, status in self.log if method == "PUT" and status == 200]

    def answer(self, method: str, path: str, token: str | None, body: bytes) -> tuple[int, dict[str, Any]]:
        self.before(method, path)
        if token != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized", "Unauthorized")
        verb = {"GET": "get", "PUT": "update"}.get(method, method)
        if self.rights is not None and (verb, path) not in self.rights:
            return _status(403, "Forbidden", f'cannot {verb} resource at "{path}"')
        if path not in self.objects:
            return _status(404, "NotFound", f'"{path.rsplit("/", 1)[-1]}" not found')
        if method == "PUT":
            given = json.loads(body)
            if given["metadata"].get("resourceVersion") != self.objects[path]["metadata"]["resourceVersion"]:
                return _status(409, "Conflict", "the object has been modified; please apply your changes")
            self.store(path, given)
        return 200, self.objects[path]


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message}


@contextmanager
def serving(folder: Path) -> Iterator[ApiServer]:
    """One, with the service account's folder (token, ca.crt, namespace) made in ``folder``."""
    key, certificate = folder / "server.key", folder / "ca.crt"
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    subject = ("-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ["openssl", "req", *kind, *subject, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "token").write_text(f"{TOKEN}\n")
    (folder / "namespace").write_text("pcinuma")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._serve()

        def do_PUT(self) -> None:
            self._serve()

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            status, content = api.answer(self.command, self.path, self.headers.get("Authorization"), body)
            api.log.append((self.command, self.path, status))
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    api = ApiServer(f"https://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
