"""The webhook as a process of its own and the API server's side of it: real TLS with certificates made here."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme

PROGRAM = Path(sys.executable).with_name("pcinuma")
IMAGE = "registry.example/infra/pcinuma:1.0"
READY_SECONDS = 20.0
CALL_SECONDS = 20.0

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers with their names in lower case, body."""


# --- certificates ----------------------------------------------------------------------------------------------


class Authority:
    """A certificate authority, and pairs of its making as a Secret's volume shows them: below the symlink ``..data``."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.made = trustme.CA()
        self.cert, self.key = folder / "tls.crt", folder / "tls.key"
        self._count = 0

    def trusting(self) -> ssl.SSLContext:
        """A client's context that trusts this authority and nothing else."""
        context = ssl.create_default_context()
        self.made.configure_trust(context)
        return context

    def pair(self, until: timedelta = timedelta(days=1)) -> tuple[bytes, bytes]:
        """A new certificate with its chain, for localhost, and its key."""
        made = self.made.issue_cert("localhost", "127.0.0.1", not_after=datetime.now(UTC) + until)
        return b"".join(pem.bytes() for pem in made.cert_chain_pems), made.private_key_pem.bytes()

    def mount(self, cert: bytes, key: bytes) -> None:
        """What kubelet does: a new folder, and a symlink that is moved in one step."""
        self._count += 1
        data = self.folder / f"..{self._count}"
        data.mkdir()
        (data / "tls.crt").write_bytes(cert)
        (data / "tls.key").write_bytes(key)
        (self.folder / "..new").symlink_to(data.name)
        os.replace(self.folder / "..new", self.folder / "..data")
        for name in ("tls.crt", "tls.key"):
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")


def der(pem: bytes) -> bytes:
    """The first certificate, as a client sees it in a handshake."""
    end = b"-----END CERTIFICATE-----"
    return ssl.PEM_cert_to_DER_cert((pem.partition(end)[0] + end).decode())


# --- the process -----------------------------------------------------------------------------------------------


class Webhook:
    """A running `pcinuma webhook`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, authority: Authority):
        self.process = process
        self.log = log
        self.authority = authority
        self.trusting = authority.trusting()
        self.port = int(self.wait_for("ready")["listen"].rpartition(":")[2])

    def lines(self, event: str | None = None) -> list[dict[str, Any]]:
        """The log so far, of one event or all: every line is JSON."""
        text = self.log.read_text()
        found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line for line in found if event in (None, line["event"])]

    def wait_for(self, event: str, count: int = 1) -> dict[str, Any]:
        """The newest line of that event, when there are so many."""
        deadline = time.monotonic() + READY_SECONDS
        while len(found := self.lines(event)) < count:
            assert self.process.poll() is None, f"it ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"no {event}:\n{self.log.read_text()}"
            time.sleep(0.02)
        return found[-1]

    def connect(self) -> ssl.SSLSocket:
        """A connection after its handshake."""
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=CALL_SECONDS)
        return self.trusting.wrap_socket(plain, server_hostname="localhost")

    def client(self) -> http.client.HTTPSConnection:
        """A connection that is kept alive, closed by the caller."""
        return http.client.HTTPSConnection("localhost", self.port, timeout=CALL_SECONDS, context=self.trusting)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request on a connection of its own. ``headers`` with underscores for dashes."""
        with contextlib.closing(self.client()) as client:
            return asked(client, method, path, body, **headers)

    def mutate(self, review: object) -> dict[str, Any]:
        """The response to a review, whose answer must be an AdmissionReview with status 200."""
        status, headers, body = self.call("POST", "/mutate", json.dumps(review), content_type="application/json")
        assert (status, headers["content-type"]) == (200, "application/json"), body
        answer = json.loads(body)
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        response: dict[str, Any] = answer["response"]
        return response

    def metrics(self) -> dict[str, float]:
        """The samples of `/metrics`, by name with labels."""
        status, _, body = self.call("GET", "/metrics")
        assert status == 200
        samples = (line.rpartition(" ") for line in body.decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(READY_SECONDS)


def asked(client: http.client.HTTPSConnection, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """One request on a connection."""
    client.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = client.getresponse()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


@contextlib.contextmanager
def running(
    *flags: object, authority: Authority | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Webhook]:
    """A webhook on a free port of loopback, with that added to its environment."""
    with tempfile.TemporaryDirectory(prefix="pcinuma-webhook-") as name:
        folder = Path(name)
        if authority is None:
            (folder / "tls").mkdir()
            authority = Authority(folder / "tls")
            authority.mount(*authority.pair())
        given = flags or ("--image", IMAGE)
        command = [
            PROGRAM,
            "webhook",
            "--listen",
            "127.0.0.1:0",
            "--tls-cert",
            authority.cert,
            "--tls-key",
            authority.key,
        ]
        with (folder / "log").open("wb") as log:
            env = {**os.environ, **(environment or {})}
            process = subprocess.Popen([*map(str, command), *map(str, given)], stdout=log, stderr=log, env=env)
        try:
            yield Webhook(process, folder / "log", authority)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


# --- what it is asked ------------------------------------------------------------------------------------------


def vmi(annotations: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """A VirtualMachineInstance for which there is nothing to warn of; ``spec`` replaces fields of its spec."""
    domain = {
        "cpu": {"cores": 8, "dedicatedCpuPlacement": True, "numa": {"guestMappingPassthrough": {}}},
        "memory": {"guest": "16Gi", "hugepages": {"pageSize": "1Gi"}},
        "machine": {"type": "q35"},
        "devices": {"gpus": [{"name": "gpu0", "deviceName": "nvidia.com/H100"}]},
    }
    metadata: dict[str, Any] = {"name": "train-0", "namespace": "ml"}
    if annotations is not None:
        metadata["annotations"] = dict(annotations)
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": metadata,
        "spec": {"domain": domain, **spec},
    }


def review_of(made: object, operation: str = "CREATE", **request: Any) -> dict[str, Any]:
    """The API server's review of an object; ``request`` replaces fields of its request."""
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": {"group": "kubevirt.io", "version": "v1", "kind": "VirtualMachineInstance"},
            "resource": {"group": "kubevirt.io", "version": "v1", "resource": "virtualmachineinstances"},
            "name": "train-0",
            "namespace": "ml",
            "operation": operation,
            "userInfo": {"username": "system:serviceaccount:kubevirt:kubevirt-controller"},
            "object": made,
            "oldObject": None,
            "dryRun": False,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
            **request,
        },
    }
