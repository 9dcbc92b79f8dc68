"""`pcinuma webhook` as the API server, kubelet and Prometheus meet it: the real process over real TLS."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.support import manifests
from tests.support.webhook import IMAGE, PROGRAM, Authority, Webhook, asked, der, review_of, running, vmi

ENABLED = "pcinuma.vm.kubevirt.io/enabled"
SIDECARS = "hooks.kubevirt.io/hookSidecars"
MIB = 1024 * 1024
OPTED_IN = json.dumps(review_of(vmi({ENABLED: "true"}))).encode()
JSON = "application/json"
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def webhook() -> Iterator[Webhook]:
    with running() as made:
        yield made


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path)
    made.mount(*made.pair())
    return made


def post(webhook: Webhook, body: Any, **headers: str) -> tuple[int, str]:
    """Status and text of an answer to `POST /mutate`."""
    status, _, answer = webhook.call("POST", "/mutate", body, **headers)
    return status, answer.decode()


def one_line(text: str) -> bool:
    return text.endswith("\n") and text[:-1].isprintable() and len(text) > 1


# --- reviews ---------------------------------------------------------------------------------------------------


def test_a_vm_that_opts_in_gets_the_sidecar(webhook: Webhook) -> None:
    made = vmi({ENABLED: "true", SIDECARS: '[{"image": "a"}]'})
    response = webhook.mutate(review_of(made))
    assert (response["allowed"], response["patchType"]) == (True, "JSONPatch")
    patched = jsonpatch.apply_patch(made, json.loads(base64.b64decode(response["patch"])))
    assert json.loads(patched["metadata"]["annotations"][SIDECARS]) == [
        {"image": "a"},
        {"image": IMAGE, "imagePullPolicy": "IfNotPresent", "args": ["hook"]},
    ]


def test_a_refusal_is_a_normal_answer(webhook: Webhook) -> None:
    response = webhook.mutate(review_of(vmi({ENABLED: "maybe"})))
    assert response["allowed"] is False
    assert response["status"]["message"] == (
        f"enabled cannot be 'maybe' (metadata.annotations, annotation {ENABLED}); one of: true, false"
    )


def test_the_file_and_the_flags_say_what_is_added(authority: Authority, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("image: a:1\nimage-pull-policy: Always\nversion: v1alpha3\noptions: {policy: restricted}\n")
    with running("--config", config, "--image", "b:2", authority=authority) as webhook:
        patch = json.loads(base64.b64decode(webhook.mutate(review_of(vmi({ENABLED: "true"})))["patch"]))
    assert json.loads(patch[0]["value"]) == [
        {"image": "b:2", "imagePullPolicy": "Always", "args": ["hook", "--version", "v1alpha3", "--policy=restricted"]}
    ]


def test_what_is_added_is_a_command_line_that_pcinuma_takes(tmp_path: Path) -> None:
    # the container runs the image's entrypoint, pcinuma, with these arguments
    args = ["hook", "--version", "v1alpha3", "--policy=restricted", "--socket", str(tmp_path / "s")]
    with subprocess.Popen([PROGRAM, *args], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["event"] == "ready"
        process.terminate()
        assert process.wait(10) == 0


def test_many_at_once(webhook: Webhook) -> None:
    def one(number: int) -> str:
        uid = f"uid-{number}"
        response = webhook.mutate(review_of(vmi({ENABLED: "true"}), uid=uid))
        assert response["allowed"] is True
        answered: str = response["uid"]
        return answered

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(200))) == [f"uid-{number}" for number in range(200)]


def test_a_kept_connection_answers_without_delay(webhook: Webhook) -> None:
    # an answer is two writes: held back until the first is acknowledged the second takes 40 ms
    took = []
    with contextlib.closing(webhook.client()) as client:
        for _ in range(15):
            begun = time.monotonic()
            assert asked(client, "POST", "/mutate", OPTED_IN, content_type=JSON)[0] == 200
            took.append(time.monotonic() - begun)
    assert sorted(took)[7] < 0.03


# --- what is no review -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, part",
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"\xff\xfe\xfd", "the body is not JSON"),
        (b"[" * 90_000, "nested too deeply"),
        (b"[]", "not an AdmissionReview: no JSON object"),
        (b'{"kind": "Pod\\n\\u001b[2J"}', "kind is 'Pod"),
        (b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1beta1"}', "admission.k8s.io/v1beta1"),
        (b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}', "no request"),
        (json.dumps(review_of("no object")).encode(), "there is none (request.object)"),
    ],
)
def test_a_malformed_review_is_one_line_and_400(webhook: Webhook, body: bytes, part: str) -> None:
    status, text = post(webhook, body, content_type=JSON)
    assert status == 400
    assert part in text
    assert one_line(text)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/yaml", ""])
def test_another_content_type_is_415(webhook: Webhook, kind: str) -> None:
    status, text = post(webhook, OPTED_IN, content_type=kind)
    assert (status, one_line(text)) == (415, True)
    assert post(webhook, OPTED_IN)[0] == 415


def test_a_content_type_with_a_charset_is_taken(webhook: Webhook) -> None:
    assert post(webhook, OPTED_IN, content_type="application/json; charset=utf-8")[0] == 200


def test_other_methods_and_paths(webhook: Webhook) -> None:
    status, headers, body = webhook.call("GET", "/mutate")
    assert (status, one_line(body.decode())) == (405, True)
    assert "POST" in headers["allow"]
    status, _, body = webhook.call("GET", "/%0d%0a%1b[2J")
    assert (status, one_line(body.decode())) == (404, True)
    assert webhook.call("POST", "/healthz")[0] == 405
    assert webhook.call("HEAD", "/healthz")[::2] == (200, b"")
    status, headers, _ = webhook.call("OPTIONS", "/mutate")
    assert (status, "POST" in headers["allow"]) == (200, True)
    assert webhook.lines("server") == []


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_has_four_mebibytes_at_most(webhook: Webhook, chunked: bool) -> None:
    def body(size: int) -> Any:
        data = OPTED_IN + b" " * (size - len(OPTED_IN))
        return iter([data[at : at + MIB] for at in range(0, size, MIB)]) if chunked else data

    headers = {"content_type": JSON, **({"transfer_encoding": "chunked"} if chunked else {})}
    with contextlib.closing(webhook.client()) as client:
        for size, expected in ((4 * MIB, 200), (4 * MIB + 1, 413), (20 * MIB, 413)):
            client.request(
                "POST",
                "/mutate",
                body(size),
                {name.replace("_", "-"): value for name, value in headers.items()},
                encode_chunked=chunked,
            )
            answer = client.getresponse()
            text = answer.read().decode()
            assert answer.status == expected, text
        assert text == "the body is larger than 4 MiB\n"


def test_bodies_at_once_have_14_mebibytes_together() -> None:
    body = OPTED_IN + b" " * (4 * MIB - len(OPTED_IN))
    whole = request_of(body)
    with running() as webhook, contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(webhook.connect()) for _ in range(3)]
        for one in waiting:
            one.sendall(whole[:-1])
        deadline = time.monotonic() + 8
        while (answer := post(webhook, body, content_type=JSON))[0] == 200:  # until the others are read
            assert time.monotonic() < deadline
        assert answer == (503, "too many large requests at once\n")
        assert webhook.mutate(review_of(vmi()))["allowed"] is True, "a small one finds room"
        waiting[0].sendall(whole[-1:])
        assert waiting[0].recv(100).startswith(b"HTTP/1.1 200 ")
        deadline = time.monotonic() + 8
        while post(webhook, body, content_type=JSON)[0] == 503:  # until the first one's room is free again
            assert time.monotonic() < deadline


def test_a_review_has_a_hundred_thousand_values_at_most(webhook: Webhook) -> None:
    for fits, values in ((True, 99_900), (False, 100_000)):
        body = json.dumps(review_of(vmi({ENABLED: "true"}, tolerations=[0] * values))).encode()
        status, text = post(webhook, body, content_type=JSON)
        assert status == (200 if fits else 413), text
    assert text == "the review holds more than 100000 values (the request)\n"


PARTS = {
    "objects": b"{},",
    "objects with a key": b'{"":0},',
    "lists": b"[0],",
    "one long text": b"x",
    "wide text": "\U0001f600".encode() * 1024,
}


@pytest.mark.parametrize("part", PARTS)
def test_the_worst_bodies_at_once_fit_into_the_memory_of_the_manifest(part: str) -> None:
    (container,) = manifests.one(manifests.overlay("self-signed"), "Deployment")["spec"]["template"]["spec"][
        "containers"
    ]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Mi")) * MIB
    unit = PARTS[part]
    most = 4 * MIB - 10_000
    if b"," in unit:
        # as much as is parsed, and much more, which is not
        bodies = [
            unit * (size // len(unit))
            for size in (most, 95_000 * len(unit) // sum(map(unit.count, (b"{", b"[", b","))))
        ]
        values = [b"[" + body + b"0]" for body in bodies]
    else:
        values = [b'"' + unit * (most // len(unit)) + b'"']
    holed = json.dumps(review_of(vmi({ENABLED: "true"}, tolerations="HOLE"))).encode()
    reviews = [holed.replace(b'"HOLE"', value) for value in values]
    with running() as webhook, ThreadPoolExecutor(8) as pool, contextlib.ExitStack() as stack:
        for _ in range(100):  # and connections that cost as much as they may
            stack.enter_context(webhook.connect())
        answers = list(
            pool.map(lambda number: post(webhook, reviews[number % len(reviews)], content_type=JSON)[0], range(60))
        )
        assert 200 in answers
        assert set(answers) <= {200, 413, 503}
        assert peak(webhook) < limit * 0.8, f"{peak(webhook) / MIB:.0f} MiB"
        assert webhook.mutate(review_of(vmi({ENABLED: "true"})))["allowed"] is True


def peak(webhook: Webhook) -> int:
    """Bytes that were resident at the most."""
    status = Path(f"/proc/{webhook.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_a_head_is_bounded(webhook: Webhook) -> None:
    with webhook.connect() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\nx: " + b"x" * MIB)
        with contextlib.suppress(OSError):
            assert b" 431 " in connection.recv(100) or connection.recv(100) == b""
    assert webhook.call("GET", "/healthz")[0] == 200


# --- TLS -------------------------------------------------------------------------------------------------------


def versions(webhook: Webhook, highest: ssl.TLSVersion) -> str | None:
    context = webhook.authority.trusting()
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = highest
    context.set_ciphers("ALL:@SECLEVEL=0")
    with socket.create_connection(("127.0.0.1", webhook.port), timeout=10) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as connection:
                return connection.version()
        except (ssl.SSLError, ConnectionResetError):
            return None


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_tls_is_1_2_or_newer(webhook: Webhook) -> None:
    assert versions(webhook, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    assert versions(webhook, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    assert versions(webhook, ssl.TLSVersion.TLSv1_1) is None


def test_plain_http_is_no_trouble(webhook: Webhook) -> None:
    before = len(webhook.lines())
    with socket.create_connection(("127.0.0.1", webhook.port), timeout=10) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while plain.recv(1000):
                pass
    assert webhook.call("GET", "/healthz")[0] == 200
    assert len(webhook.lines()) == before


def shown(webhook: Webhook, name: str | None = "localhost", version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """The certificate that a new connection is shown; ``name`` None for a client that names no server, as kubelet."""
    context = webhook.authority.trusting()
    context.check_hostname = name is not None
    context.maximum_version = version
    plain = socket.create_connection(("127.0.0.1", webhook.port), timeout=10)
    with context.wrap_socket(plain, server_hostname=name) as connection:
        return connection.getpeercert(binary_form=True) or b""


def test_a_new_pair_is_used_without_a_restart(authority: Authority) -> None:
    first, second = authority.pair(), authority.pair()
    authority.mount(*first)
    with running("--image", IMAGE, authority=authority) as webhook, contextlib.closing(webhook.client()) as kept:
        assert shown(webhook) == der(first[0])
        assert asked(kept, "GET", "/healthz")[0] == 200
        authority.mount(*second)
        line = webhook.wait_for("certificate")
        assert line["level"] == "info"
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            assert shown(webhook, version=version) == der(second[0])
            assert shown(webhook, None, version) == der(second[0])
        assert asked(kept, "GET", "/healthz")[0] == 200, "a connection of before lives on"


def test_a_broken_pair_is_told_once_and_the_old_one_stays(authority: Authority) -> None:
    good, other = authority.pair(), authority.pair()
    authority.mount(*good)
    with running("--image", IMAGE, authority=authority) as webhook:
        authority.mount(good[0], other[1])
        line = webhook.wait_for("certificate")
        assert line["level"] == "error"
        assert line["error"] == f"the key is not the certificate's ({authority.key})"
        time.sleep(2.5)  # looked at twice more
        assert len(webhook.lines("certificate")) == 1
        assert shown(webhook) == der(good[0])
        assert webhook.call("GET", "/readyz")[0] == 200, "what is in use is good"
        authority.mount(*other)
        assert webhook.wait_for("certificate", 2)["level"] == "info"
        assert shown(webhook) == der(other[0])


def test_files_that_vanish_are_told_and_the_old_pair_stays(authority: Authority) -> None:
    with running("--image", IMAGE, authority=authority) as webhook:
        (authority.folder / "..data").unlink()
        line = webhook.wait_for("certificate")
        assert line["error"] == f"cannot be read: No such file or directory ({authority.cert})"
        assert webhook.mutate(review_of(vmi({ENABLED: "true"})))["allowed"] is True


def test_an_expired_certificate_is_not_ready_but_alive(authority: Authority) -> None:
    authority.mount(*authority.pair(timedelta(seconds=-5)))
    with running("--image", IMAGE, authority=authority) as webhook:
        assert "the certificate expired at 20" in webhook.wait_for("certificate")["error"]
        webhook.trusting = ssl._create_unverified_context()  # as kubelet probes
        status, _, body = webhook.call("GET", "/readyz")
        assert (status, body.startswith(b"the certificate expired at 20")) == (503, True)
        assert webhook.call("GET", "/healthz")[0] == 200
        authority.mount(*authority.pair())
        webhook.wait_for("certificate", 2)
        webhook.trusting = authority.trusting()
        assert webhook.call("GET", "/readyz")[::2] == (200, b"ok\n")


def test_a_pair_that_is_worse_does_not_replace_a_good_one(authority: Authority) -> None:
    good = authority.pair()
    authority.mount(*good)
    private = ec.generate_private_key(ec.SECP256R1())
    with running("--image", IMAGE, authority=authority) as webhook:
        authority.mount(*authority.pair(timedelta(seconds=-5)))
        line = webhook.wait_for("certificate")
        assert line["level"] == "error"
        assert line["error"].startswith("the certificate expired at 20")
        assert line["error"].endswith(f": the one before stays in use ({authority.cert})")
        time.sleep(1.5)
        assert len(webhook.lines("certificate")) == 1
        assert shown(webhook) == der(good[0])
        assert webhook.call("GET", "/readyz")[0] == 200

        soon = self_signed(private, datetime.now(UTC) + timedelta(seconds=5), NOW + DAY)
        authority.mount(soon, pem_of(private))
        line = webhook.wait_for("certificate", 2)
        assert (line["level"], line["error"][:33]) == ("error", "the certificate is not valid befo")
        assert shown(webhook) == der(good[0])
        assert webhook.wait_for("certificate", 3)["level"] == "info", "its time has come"
        webhook.trusting = ssl._create_unverified_context()
        with webhook.connect() as connection:
            assert connection.getpeercert(binary_form=True) == der(soon)


def test_a_certificate_that_expires_in_use_is_told_once(authority: Authority) -> None:
    authority.mount(*authority.pair(timedelta(seconds=4)))
    with running("--image", IMAGE, authority=authority) as webhook:
        assert webhook.lines("certificate") == []
        assert webhook.call("GET", "/readyz")[0] == 200
        line = webhook.wait_for("certificate")
        assert (line["level"], line["error"][:30]) == ("error", "the certificate expired at 20" + line["error"][29])
        time.sleep(2.5)
        assert len(webhook.lines("certificate")) == 1


def test_http_is_1_1_whatever_a_client_asks_for(webhook: Webhook) -> None:
    context = webhook.authority.trusting()
    context.set_alpn_protocols(["h2", "http/1.1"])
    plain = socket.create_connection(("127.0.0.1", webhook.port), timeout=10)
    with context.wrap_socket(plain, server_hostname="localhost") as connection:
        assert connection.selected_alpn_protocol() == "http/1.1"
    upgrade = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMAAABkAAQAAP__"}
    assert webhook.call("GET", "/healthz", **upgrade)[::2] == (200, b"ok\n")
    with webhook.connect() as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        assert connection.recv(100)[:9] in (b"", b"HTTP/1.1 ")
    assert webhook.lines("server") == []


# --- how it does not begin -------------------------------------------------------------------------------------


def started(*flags: object) -> tuple[int, str]:
    command = [str(PROGRAM), "webhook", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr


def broken(authority: Authority, what: str) -> tuple[Path, Path]:
    """Certificate and key where something is amiss."""
    cert, key = authority.folder / "c", authority.folder / "k"
    pem, secret = authority.pair()
    cert.write_bytes(b"no PEM" if what == "cert" else pem)
    key.write_bytes({"key": b"no PEM", "mismatch": authority.pair()[1]}.get(what, secret))
    if what == "other kind":
        key.write_bytes(pem_of(rsa.generate_private_key(65537, 2048)))
    if what == "weak":
        weak = rsa.generate_private_key(65537, 1024)
        key.write_bytes(pem_of(weak))
        cert.write_bytes(self_signed(weak, NOW - DAY, NOW + DAY))
    if what == "encrypted":
        private = serialization.load_pem_private_key(secret, None)
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
        key.write_bytes(private.private_bytes(*form, serialization.BestAvailableEncryption(b"x")))
    if what == "clients":
        cert.write_bytes(for_clients_only(secret))
    return cert, key


NOW = datetime.now(UTC)


def pem_of(private: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    return private.private_bytes(*form, serialization.NoEncryption())


def self_signed(private: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, begin: datetime, end: datetime) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a")])
    made = x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number(), begin, end)
    return made.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def for_clients_only(secret: bytes) -> bytes:
    """A certificate of that key by itself, which its extensions keep from being a server's."""
    private = serialization.load_pem_private_key(secret, None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    name, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a")]), datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number(), now, now + DAY)
    made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=True)
    return made.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    "what, line",
    [
        ("clients", "no client would take the certificate: unsuitable certificate purpose ({cert})"),
        ("cert", "no certificate in PEM format ({cert})"),
        ("key", "no private key in PEM format that can be used with the certificate ({key})"),
        ("mismatch", "the key is not the certificate's ({key})"),
        ("other kind", "the key is not the certificate's ({key})"),
        ("weak", "the certificate's key is too weak for TLS ({cert})"),
        ("encrypted", "the key is encrypted, and there is nobody to ask for its password ({key})"),
    ],
)
def test_a_pair_that_cannot_be_used(authority: Authority, what: str, line: str) -> None:
    cert, key = broken(authority, what)
    status, error = started("--listen", "127.0.0.1:0", "--tls-cert", cert, "--tls-key", key, "--image", IMAGE)
    assert (status, error.splitlines()[0]) == (2, f"pcinuma: error: {line.format(cert=cert, key=key)}")
    assert all(line.startswith("hint: ") for line in error.splitlines()[1:])


def test_files_that_are_not_there(authority: Authority) -> None:
    flags = ("--listen", "127.0.0.1:0", "--image", IMAGE)
    assert started(*flags, "--tls-cert", "/none", "--tls-key", authority.key) == (
        2,
        "pcinuma: error: cannot be read: No such file or directory (/none)\n",
    )
    assert started(*flags, "--tls-cert", authority.cert, "--tls-key", authority.folder) == (
        2,
        f"pcinuma: error: cannot be read: Is a directory ({authority.folder})\n",
    )
    assert started(*flags, "--tls-cert", authority.cert, "--tls-key", authority.key, "--config", "/none") == (
        2,
        "pcinuma: error: cannot be read: No such file or directory (/none)\n",
    )


def test_an_address_that_cannot_be_had(webhook: Webhook) -> None:
    tls = ("--tls-cert", webhook.authority.cert, "--tls-key", webhook.authority.key, "--image", IMAGE)
    assert started("--listen", f"127.0.0.1:{webhook.port}", *tls) == (
        2,
        f"pcinuma: error: cannot listen: Address already in use (127.0.0.1:{webhook.port})\n",
    )
    status, error = started("--listen", "192.0.2.1:0", *tls)
    assert (status, error.startswith("pcinuma: error: cannot listen: ")) == (2, True)
    status, error = started("--listen", "8443", *tls)
    assert (status, error.splitlines()[0]) == (2, "pcinuma: error: listen cannot be '8443' (--listen)")


def test_flags_that_are_missing(webhook: Webhook) -> None:
    tls = ("--tls-cert", webhook.authority.cert, "--tls-key", webhook.authority.key)
    assert started(*tls)[1].startswith("pcinuma: error: no image for the sidecar\nhint: give --image")
    status, error = started("--image", IMAGE)
    assert (status, "--tls-cert, --tls-key" in error) == (2, True)


def request_of(body: bytes) -> bytes:
    head = f"POST /mutate HTTP/1.1\r\nhost: a\r\ncontent-type: {JSON}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


# --- slow clients ----------------------------------------------------------------------------------------------


def test_slow_clients_keep_nobody_waiting_and_are_ended(webhook: Webhook) -> None:
    begun = time.monotonic()
    head = b"POST /mutate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n"
    with contextlib.ExitStack() as stack:
        mute = [socket.create_connection(("127.0.0.1", webhook.port), timeout=20) for _ in range(40)]
        in_head, in_body = ([webhook.connect() for _ in range(40)] for _ in range(2))
        for connection in (*mute, *in_head, *in_body):
            stack.callback(connection.close)
        for one in in_head:
            one.sendall(head)
        for one in in_body:
            one.sendall(head + b"\r\n{")
        for _ in range(10):
            asked_at = time.monotonic()
            assert webhook.mutate(review_of(vmi({ENABLED: "true"})))["allowed"] is True
            assert time.monotonic() - asked_at < 1
        with contextlib.suppress(ConnectionResetError):
            assert mute[0].recv(100) == b""
        assert time.monotonic() - begun < 9, "a handshake has five seconds"
        assert in_body[0].recv(1000).startswith(b"HTTP/1.1 408 ")
        assert in_head[0].recv(1000) == b""
        assert time.monotonic() - begun < 18


def test_connections_beyond_what_it_holds_end_the_oldest() -> None:
    with running() as webhook, contextlib.ExitStack() as stack:
        held = [stack.enter_context(webhook.connect()) for _ in range(128)]
        held[0].settimeout(0.3)
        with pytest.raises(TimeoutError):
            held[0].recv(1)
        assert webhook.mutate(review_of(vmi({ENABLED: "true"})))["allowed"] is True
        held[0].settimeout(5)
        with contextlib.suppress(OSError):
            assert held[0].recv(1) == b""
        held[60].sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
        assert held[60].recv(100).startswith(b"HTTP/1.1 200 ")


# --- metrics and log -------------------------------------------------------------------------------------------


def test_metrics_count_reviews_by_outcome() -> None:
    with running() as webhook:
        webhook.mutate(review_of(vmi({ENABLED: "true"})))
        webhook.mutate(review_of(vmi({ENABLED: "true", SIDECARS: f'[{{"image": "{IMAGE}"}}]'})))
        webhook.mutate(review_of(vmi({ENABLED: "true", SIDECARS: "[]"})))
        webhook.mutate(review_of(vmi()))
        webhook.mutate(review_of(vmi({ENABLED: "maybe"})))
        post(webhook, b"{", content_type=JSON)
        post(webhook, b" " * (4 * MIB + 1), content_type=JSON)
        webhook.call("GET", "/mutate")
        webhook.call("GET", "/healthz")
        metrics = webhook.metrics()
        counted = {
            outcome: metrics[f'pcinuma_webhook_admissions_total{{outcome="{outcome}"}}']
            for outcome in ("added", "present", "untouched", "refused", "malformed", "failed")
        }
        assert counted == {"added": 2, "present": 1, "untouched": 1, "refused": 1, "malformed": 2, "failed": 0}
        assert metrics["pcinuma_webhook_admission_seconds_count"] == 7
        assert metrics['pcinuma_webhook_admission_seconds_bucket{le="+Inf"}'] == 7
        assert 0 < metrics["pcinuma_webhook_admission_seconds_sum"] < 5
        tomorrow = time.time() + 86400
        assert abs(metrics["pcinuma_webhook_certificate_not_after_seconds"] - tomorrow) < 60


def test_one_line_an_admission() -> None:
    with running() as webhook:
        made = vmi({ENABLED: "true"}, evictionStrategy="LiveMigrate", secret="s3cret")
        webhook.mutate(review_of(made, dryRun=True))
        webhook.mutate(review_of(vmi({ENABLED: "no\n\x1b[2J"}), name="a\nb\u202e"))
        post(webhook, b'{"kind": "s3cret\\n"}', content_type=JSON)
        assert webhook.end() == 0
        lines = webhook.lines("admission")
        assert [(line["level"], line["outcome"]) for line in lines] == [
            ("warning", "added"),
            ("warning", "refused"),
            ("warning", "malformed"),
        ]
        first = lines[0]
        assert (first["namespace"], first["name"], first["dryRun"]) == ("ml", "train-0", True)
        assert first["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
        assert len(first["warnings"]) == 1
        assert 0 <= first["milliseconds"] < 1000
        assert lines[1]["name"] == "a\\nb\\x202e"
        assert "\\n\\x1b[2J" in lines[1]["error"]
        text = webhook.log.read_text()
        assert all(line.isprintable() and line.isascii() for line in text.splitlines())
        assert text.count("s3cret") == 1, "the kind that was named, and nothing of the objects"
        assert [line["event"] for line in webhook.lines()][-1] == "ended"


# --- the end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_in_flight_is_answered_before_the_end(number: int) -> None:
    with running() as webhook:
        idle = webhook.connect()
        with idle, webhook.connect() as connection:
            whole = request_of(OPTED_IN)
            connection.sendall(whole[:-10])
            time.sleep(0.3)
            webhook.process.send_signal(number)
            time.sleep(0.5)
            assert webhook.process.poll() is None, "it waits for the request"
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", webhook.port), timeout=2)
            connection.sendall(whole[-10:])
            answer = b""
            while data := connection.recv(65536):
                answer += data
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b'"allowed": true' in answer
            ended = time.monotonic()
            assert webhook.process.wait(10) == 0
            assert time.monotonic() - ended < 3
        assert webhook.lines()[-1]["event"] == "ended"
        assert [line["outcome"] for line in webhook.lines("admission")] == ["added"]


def test_it_ends_at_once_when_nothing_is_in_flight() -> None:
    with running() as webhook, webhook.connect(), contextlib.closing(webhook.client()) as kept:
        assert asked(kept, "GET", "/healthz")[0] == 200
        begun = time.monotonic()
        assert webhook.end() == 0
        assert time.monotonic() - begun < 3


def test_busy_clients_lose_nothing_at_the_end() -> None:
    """Each request on a kept connection gets its answer, until one says that it is the last; new ones find no server."""

    def busy(webhook: Webhook, number: int) -> list[object]:
        seen: list[object] = []
        with contextlib.closing(webhook.client()) as client:
            while True:
                try:
                    status, headers, _ = asked(client, "POST", "/mutate", OPTED_IN, content_type=JSON)
                except ConnectionRefusedError:
                    return seen
                except OSError as error:
                    return [*seen, error]
                seen.append((status, headers.get("connection")))
                time.sleep(number % 4 * 0.02)  # from none at all to some: a connection is idle, or never

    with running() as webhook, ThreadPoolExecutor(20) as pool:
        clients = [pool.submit(busy, webhook, number) for number in range(20)]
        time.sleep(1.5)
        begun = time.monotonic()
        assert webhook.end() == 0
        assert time.monotonic() - begun < 10
        seen = [answer for client in clients for answer in client.result(10)]
        assert set(seen) <= {(200, None), (200, "close")}
        assert (200, "close") in seen
        assert {line["event"] for line in webhook.lines()} == {"ready", "admission", "ended"}
        assert len(webhook.lines("admission")) == len(seen)


def test_a_client_that_writes_on_a_closed_connection_is_no_fault() -> None:
    with running() as webhook, contextlib.ExitStack() as stack:
        quiet = [stack.enter_context(webhook.connect()) for _ in range(5)]
        webhook.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while webhook.process.poll() is None:
            assert time.monotonic() < deadline
            for one in quiet:  # as the server closes one second later, and never reads that TLS has ended here
                with contextlib.suppress(OSError):
                    one.sendall(b"G")
            time.sleep(0.01)
        assert webhook.process.returncode == 0
        assert [line["event"] for line in webhook.lines()] == ["ready", "ended"]


def test_a_body_that_never_comes_does_not_hold_up_the_end() -> None:
    with running() as webhook, webhook.connect() as connection:
        connection.sendall(request_of(OPTED_IN)[:-10])
        time.sleep(0.3)
        begun = time.monotonic()
        assert webhook.end() == 0
        assert time.monotonic() - begun < 15
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


# --- ten thousand ----------------------------------------------------------------------------------------------


def resident(webhook: Webhook) -> int:
    """Bytes."""
    status = Path(f"/proc/{webhook.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def test_a_client_that_does_not_close_holds_up_no_end() -> None:
    # what is no HTTP is answered 400 and closed, and TLS waits half a minute for the client to agree (asyncio's default)
    with running() as webhook, webhook.connect() as connection:
        connection.sendall(b"\0\0no HTTP\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
        begun = time.monotonic()
        assert webhook.end() == 0
        assert time.monotonic() - begun < 4
        assert webhook.lines("server") == []


def test_ten_thousand_reviews_leak_nothing() -> None:
    """And connections neither: each that is closed would leave 0.3 MB behind for ten seconds, were it Hypercorn's own."""

    def some(webhook: Webhook, count: int) -> None:
        with contextlib.closing(webhook.client()) as client:
            for _ in range(count):
                status, _, body = asked(client, "POST", "/mutate", OPTED_IN, content_type=JSON)
                assert (status, b'"allowed": true' in body) == (200, True)

    with running() as webhook, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: some(webhook, 250), range(4)))
        before = resident(webhook)
        list(pool.map(lambda _: some(webhook, 2500), range(4)))
        assert resident(webhook) - before < 4 * MIB
        list(pool.map(lambda _: some(webhook, 1), range(300)))
        assert resident(webhook) - before < 8 * MIB
        assert webhook.metrics()['pcinuma_webhook_admissions_total{outcome="added"}'] == 11_300
