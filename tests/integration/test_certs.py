"""`pcinuma certs` against a small API server over real TLS; its certificates are judged by openssl and by handshakes."""

from __future__ import annotations

import base64
import datetime
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pcinuma import certs, kube_api
from tests.support import api_server, manifests, sidecar

SECRET = "/api/v1/namespaces/pcinuma/secrets/pcinuma-webhook-tls"
WEBHOOK = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/pcinuma"
NAME = "pcinuma-webhook.pcinuma.svc"
NOW = datetime.datetime.now(datetime.UTC)
SETTINGS = certs.Settings("pcinuma", "pcinuma-webhook-tls", "pcinuma-webhook", "pcinuma", days=90, renew_before=30)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[api_server.ApiServer]:
    """As after `kubectl apply`: a Secret without data, a webhook configuration without a bundle."""
    if shutil.which("openssl") is None:
        pytest.skip("not installed: openssl")
    with api_server.serving(tmp_path) as server:
        server.store(SECRET, {"kind": "Secret", "metadata": {"name": "pcinuma-webhook-tls", "labels": {"a": "b"}}})
        server.store(WEBHOOK, configuration())
        yield server


def configuration() -> dict[str, Any]:
    client = {"service": {"name": "pcinuma-webhook", "namespace": "pcinuma", "path": "/mutate"}}
    webhook = {"name": "vmi.pcinuma.vm.kubevirt.io", "clientConfig": client, "timeoutSeconds": 5}
    return {"kind": "MutatingWebhookConfiguration", "metadata": {"name": "pcinuma"}, "webhooks": [webhook]}


def ensure(api: api_server.ApiServer, tmp_path: Path, *, days: float = 0) -> str:
    """One run, so many days from now."""
    return certs.ensure(kube_api.Api(api.url, str(tmp_path)), SETTINGS, NOW + datetime.timedelta(days=days))


def held(api: api_server.ApiServer, name: str) -> bytes:
    return base64.b64decode(api.objects[SECRET]["data"][name])


def trusted(api: api_server.ApiServer) -> bytes:
    return base64.b64decode(api.objects[WEBHOOK]["webhooks"][0]["clientConfig"]["caBundle"])


def authorities(bundle: bytes) -> list[bytes]:
    return [part + b"-----END CERTIFICATE-----" for part in bundle.split(b"-----END CERTIFICATE-----")[:-1]]


def accepts(bundle: bytes, certificate: bytes, key: bytes, tmp_path: Path, name: str = NAME) -> bool:
    """Whether a client that trusts the bundle shakes hands with a server of that certificate, calling it so."""
    (tmp_path / "served.pem").write_bytes(certificate + key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "served.pem")
    client = ssl.create_default_context(cadata=bundle.decode())
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as made:
                made.recv(1)
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=name):
            return True
    except ssl.SSLCertVerificationError:
        return False
    finally:
        ours.close()
        thread.join()


def test_the_first_run_makes_a_certificate_that_the_api_server_trusts(
    api: api_server.ApiServer, tmp_path: Path
) -> None:
    said = ensure(api, tmp_path)
    end = NOW + datetime.timedelta(days=90)
    assert said == f"a new certificate, valid until {end:%Y-%m-%dT%H:%M:%SZ}: there is none yet"
    assert accepts(trusted(api), held(api, "tls.crt"), held(api, "tls.key"), tmp_path)
    assert not accepts(trusted(api), held(api, "tls.crt"), held(api, "tls.key"), tmp_path, "other.pcinuma.svc")
    assert len(authorities(trusted(api))) == 1
    assert trusted(api) == held(api, "ca.crt")
    # nothing else of the objects changed, and the Secret came last
    assert api.objects[SECRET]["metadata"]["labels"] == {"a": "b"}
    assert api.objects[WEBHOOK]["webhooks"][0]["timeoutSeconds"] == 5
    assert api.written() == [WEBHOOK, SECRET]


def test_openssl_takes_it_for_a_serving_certificate(api: api_server.ApiServer, tmp_path: Path) -> None:
    ensure(api, tmp_path)
    (tmp_path / "bundle.pem").write_bytes(held(api, "ca.crt"))
    (tmp_path / "leaf.pem").write_bytes(held(api, "tls.crt"))
    verify = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", NAME]
    done = subprocess.run(
        [*verify, "-CAfile", tmp_path / "bundle.pem", tmp_path / "leaf.pem"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    key = subprocess.run(
        ["openssl", "pkey", "-noout", "-text"], input=held(api, "tls.key"), capture_output=True, check=True
    )
    assert b"prime256v1" in key.stdout


def test_a_second_run_writes_nothing(api: api_server.ApiServer, tmp_path: Path) -> None:
    ensure(api, tmp_path)
    api.log.clear()
    assert ensure(api, tmp_path, days=59).endswith("nothing to do")
    assert api.written() == []


def test_a_certificate_near_its_end_is_renewed_and_the_old_one_stays_trusted(
    api: api_server.ApiServer, tmp_path: Path
) -> None:
    ensure(api, tmp_path, days=-61)
    old = held(api, "tls.crt"), held(api, "tls.key")
    assert "expires at" in ensure(api, tmp_path)
    new = held(api, "tls.crt"), held(api, "tls.key")
    assert new != old
    assert accepts(trusted(api), *old, tmp_path)
    assert accepts(trusted(api), *new, tmp_path)
    # and once the old one has expired, its authority goes with the next renewal
    ensure(api, tmp_path, days=61)
    assert not accepts(trusted(api), *old, tmp_path)
    assert accepts(trusted(api), *new, tmp_path)


def test_after_years_the_bundle_is_no_longer(api: api_server.ApiServer, tmp_path: Path) -> None:
    for day in range(0, 1500, 50):
        ensure(api, tmp_path, days=day)
        assert 1 <= len(authorities(trusted(api))) <= 4


def test_the_old_certificate_is_trusted_between_the_two_writes(api: api_server.ApiServer, tmp_path: Path) -> None:
    """A run that dies after the first write leaves a webhook that is trusted, and the next run mends the rest."""
    ensure(api, tmp_path, days=-61)
    old = held(api, "tls.crt"), held(api, "tls.key")
    api.rights = {("get", SECRET), ("get", WEBHOOK), ("update", WEBHOOK)}
    with pytest.raises(kube_api.ApiRefused, match="403"):
        ensure(api, tmp_path)
    assert (held(api, "tls.crt"), held(api, "tls.key")) == old
    assert accepts(trusted(api), *old, tmp_path)
    api.rights = None
    ensure(api, tmp_path)
    assert held(api, "tls.crt") != old[0]
    assert accepts(trusted(api), *old, tmp_path)
    assert accepts(trusted(api), held(api, "tls.crt"), held(api, "tls.key"), tmp_path)


def test_a_bundle_that_was_lost_is_set_again(api: api_server.ApiServer, tmp_path: Path) -> None:
    """What `kubectl replace` of the manifests does."""
    ensure(api, tmp_path)
    kept = held(api, "tls.crt")
    api.store(WEBHOOK, configuration())
    assert ensure(api, tmp_path).endswith("its bundle is set in the webhook configuration")
    assert accepts(trusted(api), kept, held(api, "tls.key"), tmp_path)
    assert held(api, "tls.crt") == kept


@pytest.mark.parametrize(
    "data, reason",
    [
        ({"tls.crt": "bm9uZQ==", "tls.key": "bm9uZQ==", "ca.crt": "bm9uZQ=="}, "no certificate with its key"),
        ({"tls.crt": "%%%", "tls.key": 7}, "there is none yet"),
        ("text", "there is none yet"),
    ],
)
def test_rubbish_in_the_secret_is_replaced(api: api_server.ApiServer, tmp_path: Path, data: Any, reason: str) -> None:
    api.store(SECRET, {**api.objects[SECRET], "data": data})
    assert reason in ensure(api, tmp_path)
    assert accepts(trusted(api), held(api, "tls.crt"), held(api, "tls.key"), tmp_path)


def test_another_services_certificate_is_replaced(api: api_server.ApiServer, tmp_path: Path) -> None:
    ensure(api, tmp_path)
    moved = certs.Settings("pcinuma", "pcinuma-webhook-tls", "renamed", "pcinuma", days=90, renew_before=30)
    said = certs.ensure(kube_api.Api(api.url, str(tmp_path)), moved, NOW)
    assert "it is not for renamed" in said


def test_another_ones_key_is_replaced(api: api_server.ApiServer, tmp_path: Path) -> None:
    ensure(api, tmp_path)
    first = api.objects[SECRET]["data"]["tls.key"]
    ensure(api, tmp_path, days=61)
    api.objects[SECRET]["data"]["tls.key"] = first
    assert "its key is another's" in ensure(api, tmp_path, days=61)


def test_two_runs_at_once_agree(api: api_server.ApiServer, tmp_path: Path) -> None:
    """The other one writes between our look and our write: ours is refused, looks again and finds nothing to do."""
    done: list[str] = []

    def meddle(method: str, path: str) -> None:
        if (method, path) == ("PUT", SECRET) and not done:
            done.append("")
            done[0] = ensure(api, tmp_path)

    api.before = meddle
    said = ensure(api, tmp_path)
    assert done[0].startswith("a new certificate")
    assert not said.startswith("a new certificate")
    assert ("PUT", SECRET, 409) in api.log
    assert accepts(trusted(api), held(api, "tls.crt"), held(api, "tls.key"), tmp_path)


def test_objects_that_never_rest_are_given_up(api: api_server.ApiServer, tmp_path: Path) -> None:
    def meddle(method: str, path: str) -> None:
        if method == "PUT":
            api.store(path, api.objects[path])

    api.before = meddle
    with pytest.raises(kube_api.ApiRefused, match="changed 5 times"):
        ensure(api, tmp_path)


# --- the command -----------------------------------------------------------------------------------------------


def run(api: api_server.ApiServer | None, tmp_path: Path, *more: str, **environment: str) -> tuple[int, str, str]:
    address = ["--api", api.url] if api is not None else []
    done = subprocess.run(
        [sidecar.PROGRAM, "certs", *address, "--service-account", tmp_path, *more],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        timeout=30,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command(api: api_server.ApiServer, tmp_path: Path) -> None:
    status, said, complaint = run(api, tmp_path, "--days", "7", "--renew-before", "2")
    assert (status, complaint) == (0, "")
    assert said.startswith("a new certificate, valid until ")
    assert accepts(trusted(api), held(api, "tls.crt"), held(api, "tls.key"), tmp_path)
    host, port = api.url.removeprefix("https://").split(":")
    status, said, _ = run(None, tmp_path, KUBERNETES_SERVICE_HOST=host, KUBERNETES_SERVICE_PORT=port)
    assert (status, said.split(";")[0][:20]) == (0, "a new certificate, v")  # 7 days are less than 30


@pytest.mark.parametrize(
    "arguments, status, says",
    [
        (
            ("--secret", "other"),
            1,
            'the API server says 404: "other" not found (GET /api/v1/namespaces/pcinuma/secrets/other)',
        ),
        (("--service", "é"), 2, "service cannot be 'é', which is not a DNS label"),
        (("--service", "1st"), 2, "service cannot be '1st', which is not a DNS label that begins with a letter"),
        (("--namespace", "../x"), 2, "namespace cannot be '../x', which is not a DNS label"),
        (("--namespace", "a.b"), 2, "namespace cannot be 'a.b', which is not a DNS label"),
        (("--secret", "a b"), 2, "secret cannot be 'a b', which is not a DNS name"),
        (("--secret", "a/../b"), 2, "secret cannot be 'a/../b', which is not a DNS name"),
        (("--webhook", "a?b"), 2, "webhook cannot be 'a?b', which is not a DNS name"),
        (("--secret", "a" * 254), 2, "secret cannot be 'aaaa"),
        (("--api", "http://x"), 2, "not an address of an API server: http://x"),
        (("--days", "0"), 2, "days cannot be 0 (--days)"),
        (("--days", "5"), 2, "renew-before cannot be 30 (--renew-before)"),
        (("--api", "http://127.0.0.1"), 2, "not an address of an API server: http://127.0.0.1"),
        (("--api", "https://[x"), 2, "not an address of an API server: https://[x"),
        (("--api", "https://127.0.0.1:9"), 1, "the API server cannot be reached: "),
        (("--service-account", "/nowhere"), 2, "cannot be read: No such file or directory (/nowhere/namespace)"),
    ],
)
def test_what_goes_wrong_is_one_line(
    api: api_server.ApiServer, tmp_path: Path, arguments: tuple[str, ...], status: int, says: str
) -> None:
    done, out, complaint = run(api, tmp_path, *arguments)
    assert (done, out) == (status, "")
    assert complaint.startswith(f"pcinuma: error: {says}"), complaint
    assert all(line.startswith("hint: ") for line in complaint.splitlines()[1:])
    assert api.written() == []


def test_a_server_that_is_not_the_clusters_gets_no_token(api: api_server.ApiServer, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with api_server.serving(tmp_path / "elsewhere") as other:
        status, _, complaint = run(other, tmp_path)
        assert other.log == []
    assert status == 1
    assert "CERTIFICATE_VERIFY_FAILED" in complaint


def test_a_refused_token_and_a_missing_right_say_what_to_do(api: api_server.ApiServer, tmp_path: Path) -> None:
    api.rights = {("get", SECRET)}
    status, _, complaint = run(api, tmp_path)
    assert status == 1
    assert "says 403" in complaint
    assert "hint: the service account lacks a right: apply its Role and ClusterRole again" in complaint
    (tmp_path / "token").write_text("expired")
    status, _, complaint = run(api, tmp_path)
    assert (status, "says 401" in complaint) == (1, True)


def test_a_pod_without_a_cluster_is_told(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("pcinuma")
    status, _, complaint = run(None, tmp_path, KUBERNETES_SERVICE_HOST="")
    assert status == 2
    assert "this is no pod: KUBERNETES_SERVICE_HOST is not set" in complaint


def test_the_rights_of_the_manifests_are_enough(api: api_server.ApiServer, tmp_path: Path) -> None:
    """And the objects are those that the manifests make; the command is that of the Job."""
    objects = manifests.overlay("self-signed")
    secret = manifests.one(objects, "Secret", "pcinuma-webhook-tls")
    webhook = manifests.one(objects, "MutatingWebhookConfiguration", "pcinuma")
    api.store(SECRET, secret)
    api.store(WEBHOOK, webhook)
    api.rights = set()
    for kind, place in (("Role", "/api/v1/namespaces/pcinuma"), ("ClusterRole", WEBHOOK.rsplit("/", 2)[0])):
        for rule in manifests.one(objects, kind)["rules"]:
            (resource,), (name,) = rule["resources"], rule["resourceNames"]
            api.rights |= {(verb, f"{place}/{resource}/{name}") for verb in rule["verbs"]}
    (container,) = manifests.one(objects, "Job")["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["certs"]
    status, said, complaint = run(api, tmp_path)
    assert (status, complaint) == (0, "")
    assert said.startswith("a new certificate")
    service = webhook["webhooks"][0]["clientConfig"]["service"]
    name = f"{service['name']}.{service['namespace']}.svc"
    assert accepts(trusted(api), held(api, "tls.crt"), held(api, "tls.key"), tmp_path, name)
