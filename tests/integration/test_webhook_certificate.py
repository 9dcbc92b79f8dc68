"""The webhook of the manifests with the certificate of `pcinuma certs`, from the first to the one after, over real TLS.

The API server's part is played by tests/support/api_server.py, the kubelet's by `hand_over`: a Secret's files change all
at once, by one symbolic link.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import api_server, manifests, sidecar

SECRET = "/api/v1/namespaces/pcinuma/secrets/pcinuma-webhook-tls"
WEBHOOK = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/pcinuma"
IMAGE = "ghcr.io/pcinuma/pcinuma:0.1.0"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[api_server.ApiServer]:
    if shutil.which("openssl") is None:
        pytest.skip("not installed: openssl")
    objects = manifests.overlay("self-signed")
    with api_server.serving(tmp_path) as server:
        server.store(SECRET, manifests.one(objects, "Secret"))
        server.store(WEBHOOK, manifests.one(objects, "MutatingWebhookConfiguration"))
        yield server


def certs(api: api_server.ApiServer, tmp_path: Path, *more: str) -> None:
    command: list[str | Path] = [sidecar.PROGRAM, "certs", "--api", api.url, "--service-account", tmp_path, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a new certificate"), done.stdout


def hand_over(api: api_server.ApiServer, mount: Path) -> None:
    """The Secret's files, as the kubelet lays and exchanges them."""
    fresh = Path(tempfile.mkdtemp(prefix="..", dir=mount))
    for name, value in api.objects[SECRET]["data"].items():
        (fresh / name).write_bytes(base64.b64decode(value))
        if not (mount / name).is_symlink():
            (mount / name).symlink_to(f"..data/{name}")
    (mount / "..data_tmp").symlink_to(fresh.name)
    os.rename(mount / "..data_tmp", mount / "..data")


@contextlib.contextmanager
def webhook(mount: Path, config: Path) -> Iterator[int]:
    """`pcinuma webhook` with the Deployment's arguments, but for where it listens and its files are; its port."""
    (container,) = manifests.one(manifests.overlay("self-signed"), "Deployment")["spec"]["template"]["spec"][
        "containers"
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    arguments = []
    for argument in container["args"]:
        for name, value in environment.items():
            argument = argument.replace(f"$({name})", value)
        argument = argument.replace("0.0.0.0:8443", f"127.0.0.1:{port}").replace("/etc/pcinuma/tls", str(mount))
        arguments.append(argument.replace("/etc/pcinuma/config/config.yaml", str(config)))
    log = config.with_name("log")
    with log.open("wb") as stderr:
        process = subprocess.Popen([sidecar.PROGRAM, *arguments], stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


class _ToPort(http.client.HTTPSConnection):
    """HTTPS that calls the service by its name, at a port of this machine."""

    def __init__(self, name: str, port: int, context: ssl.SSLContext):
        super().__init__(name, port, context=context, timeout=10)
        self._context_of_ours = context

    def connect(self) -> None:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        self.sock = self._context_of_ours.wrap_socket(plain, server_hostname=self.host)


def call(api: api_server.ApiServer, port: int, method: str, path: str, body: object = None) -> tuple[int, bytes, bytes]:
    """What the API server does: status, body and the certificate that was served. Raises ssl.SSLError when not trusted."""
    client = api.objects[WEBHOOK]["webhooks"][0]["clientConfig"]
    context = ssl.create_default_context(cadata=base64.b64decode(client["caBundle"]).decode())
    connection = _ToPort(f"{client['service']['name']}.{client['service']['namespace']}.svc", port, context)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        served = connection.sock.getpeercert(binary_form=True)
        answer = connection.getresponse()
        return answer.status, answer.read(), served or b""
    finally:
        connection.close()


def review() -> object:
    vmi = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "vm", "namespace": "ns", "annotations": {"pcinuma.vm.kubevirt.io/enabled": "true"}},
        "spec": {"domain": {"devices": {"gpus": [{"name": "gpu0", "deviceName": "nvidia.com/x"}]}}},
    }
    request = {
        "uid": "0a1b",
        "kind": {"group": "kubevirt.io", "version": "v1", "kind": "VirtualMachineInstance"},
        "resource": {"group": "kubevirt.io", "version": "v1", "resource": "virtualmachineinstances"},
        "operation": "CREATE",
        "namespace": "ns",
        "object": vmi,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def test_the_webhook_answers_before_during_and_after_a_renewal(api: api_server.ApiServer, tmp_path: Path) -> None:
    mount, config = tmp_path / "tls", tmp_path / "config.yaml"
    mount.mkdir()
    config.write_bytes((manifests.MANIFESTS / "base/config.yaml").read_bytes())
    certs(api, tmp_path, "--days", "40", "--renew-before", "1")
    hand_over(api, mount)
    with webhook(mount, config) as port:
        status, _, first = call(api, port, "GET", "/readyz")
        assert status == 200
        # the API server trusts the new one, the pod has not got it yet
        certs(api, tmp_path, "--renew-before", "60")
        status, _, served = call(api, port, "GET", "/readyz")
        assert (status, served) == (200, first)
        hand_over(api, mount)
        deadline = time.monotonic() + 60
        while served == first:
            assert time.monotonic() < deadline, "the new certificate was never loaded"
            status, _, served = call(api, port, "GET", "/readyz")
            assert status == 200
        status, body, _ = call(api, port, "POST", "/mutate", review())
    assert status == 200
    response = json.loads(body)["response"]
    assert response["allowed"] is True, response
    patch = json.loads(base64.b64decode(response["patch"]))
    (added,) = [operation["value"] for operation in patch if isinstance(operation.get("value"), str)] or [
        value for operation in patch for value in operation["value"].values()
    ]
    (entry,) = json.loads(added)
    assert entry["image"] == IMAGE
    assert entry["imagePullPolicy"] == "IfNotPresent"
    assert [word for word in (*entry.get("command", ()), *entry["args"]) if word != "pcinuma"] == [
        "hook",
        "--policy=best-effort",
    ]


def test_before_there_is_a_certificate_nothing_is_trusted(api: api_server.ApiServer) -> None:
    """The check above can fail: without a bundle there is nobody to trust."""
    assert "caBundle" not in api.objects[WEBHOOK]["webhooks"][0]["clientConfig"]
    api.objects[WEBHOOK]["webhooks"][0]["clientConfig"]["caBundle"] = ""
    with pytest.raises((ssl.SSLError, ValueError, OSError)):
        call(api, 1, "GET", "/readyz")
