"""What is fuzzed from outside: the real sidecar by its socket, the real webhook over TLS, both by bytes.

No coverage is seen from here; the inputs are the corpora of the targets in process, changed. After every few dozen the
process must still answer as it should, and its log must be one JSON object a line without a fault of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from lxml import etree

from fuzz.mutate import mutated
from fuzz.targets import any_host
from pcinuma import host_file
from pcinuma.domain_xml import load
from pcinuma.errors import PcinumaError
from pcinuma.model import Device, HostQuery
from pcinuma.options import CHOICES
from pcinuma.parse import parse
from tests.support import sidecar, webhook

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
BETWEEN_PROBES = 40
MOST = 64 * 1024
_SECONDS = 5.0
SIDECAR_MEMORY = 64_000_000
"""Bytes that KubeVirt gives a sidecar (pkg/virt-controller/services/renderresources.go sidecarResources)."""
WEBHOOK_MEMORY = 256 * 1024 * 1024
"""The limit in manifests/base/deployment.yaml."""

_ALLOWED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
_REQUESTS = (
    b"POST /mutate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s",
    b"POST /mutate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nhost: a\r\nx-length: %d\r\nconnection: close\r\n\r\n%s",
)

Attempt = Callable[[], None]
"""Makes an input, remembers and sends it, and holds the answer against what it may be."""


class Find(AssertionError):
    """What was sent since the process last answered as it should is in a folder."""


def changed(data: bytes, dice: random.Random) -> bytes:
    """The bytes with some of them changed, lost, doubled or cut off; in half of all cases by tokens."""
    if dice.random() < 0.5:
        return mutated(data, dice, MOST)
    result = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 5, 30))):
        at, length = dice.randrange(len(result) + 1), dice.choice((1, 1, 2, 9, 100))
        match dice.randrange(4):
            case 0:
                result[at : at + length] = dice.randbytes(length)
            case 1:
                del result[at : at + length]
            case 2:
                result[at:at] = result[at : at + length]
            case 3 if dice.random() < 0.3:
                del result[at:]
    return bytes(result[:MOST])


def corpus(name: str) -> list[bytes]:
    """The kept inputs of a target."""
    found = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    assert found, f"no corpus of {name}"
    return found


def hook_process(seconds: float, seed: int, finds: Path) -> int:
    """Connections of damaged bytes, and calls with damaged domains and VMIs. How many inputs there were."""
    dice = random.Random(seed)
    sessions, domains = corpus("connection"), corpus("domain")
    vmis = [data for data in corpus("vmi") if data.lstrip().startswith(b"{")]
    recent: list[bytes] = []
    with contextlib.ExitStack() as stack:
        hook, client = _hook(stack, domains)

        def connect() -> None:
            data = (
                changed(dice.choice(sessions), dice) if dice.random() < 0.9 else dice.randbytes(dice.randrange(1, 3000))
            )
            recent.append(data)
            with sidecar.connected(hook.socket) as peer, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.settimeout(_SECONDS)
                peer.sendall(data)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(65536):
                    pass

        def define() -> None:
            xml = mutated(dice.choice(domains), dice, MOST)
            options = {name: dice.choice(values) for name, values in CHOICES.items() if dice.random() < 0.5}
            given = mutated(dice.choice(vmis), dice, MOST) if dice.random() < 0.2 else sidecar.vmi(options)
            recent.append(xml + b"\n" + given)
            call = client.begin_define(xml, given, timeout=_SECONDS)
            if call.exception() is None:
                etree.fromstring(call.result().domainXML)
            else:
                assert call.code() in _ALLOWED, (call.code(), call.details())
                assert call.details().isprintable(), call.details()

        def probe() -> None:
            assert hook.process.poll() is None, f"ended with {hook.process.returncode}: {hook.text()[-2000:]}"
            _keeps_to(hook.process, SIDECAR_MEMORY)
            with sidecar.Client(hook.socket) as fresh:
                assert fresh.info(timeout=_SECONDS).name == "pcinuma"

        def begin_again() -> bool:
            """One of the sessions is a Shutdown: what it ends, with status 0, is started anew."""
            nonlocal hook, client
            if not hook.records("Shutdown"):
                return False
            assert hook.process.wait(_SECONDS) == 0
            _no_fault_of_its_own(hook)
            hook, client = _hook(stack, domains)
            return True

        count = _run(seconds, dice, recent, (connect, define), probe, finds / "hook_process", begin_again)
        hook.end()
        _no_fault_of_its_own(hook)
        return count


def _hook(stack: contextlib.ExitStack, domains: list[bytes]) -> tuple[sidecar.Sidecar, sidecar.Client]:
    """A sidecar on a host that has the devices of these domains."""
    record = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "host.json"
    record.write_text(json.dumps(host_file.dump(any_host(_devices_of(domains)))))
    hook = stack.enter_context(sidecar.running("--host", record, check_log=False))
    return hook, stack.enter_context(sidecar.Client(hook.socket))


def _devices_of(domains: list[bytes]) -> HostQuery:
    devices: list[Device] = []
    for xml in domains:
        with contextlib.suppress(PcinumaError):
            devices += parse(load(xml)).devices
    return HostQuery(
        frozenset(device.source for device in devices if device.source is not None),
        frozenset(device.uuid for device in devices if device.uuid is not None),
        frozenset(device.vdpa for device in devices if device.vdpa is not None),
    )


def _keeps_to(process: subprocess.Popen[bytes], most: int) -> None:
    """The process has never had more memory than ``most`` bytes."""
    said = Path(f"/proc/{process.pid}/status").read_text()
    peak = int(said.partition("VmHWM:")[2].split()[0]) * 1024
    assert peak <= most, f"it took {peak} bytes"


def _no_fault_of_its_own(hook: sidecar.Sidecar) -> None:
    faults = [record for record in hook.records() if record.get("code") == "internal"]
    assert not faults, faults[0]


def webhook_process(seconds: float, seed: int, finds: Path) -> int:
    """Handshakes, requests and reviews of damaged bytes. How many inputs there were."""
    dice = random.Random(seed)
    reviews, frames = corpus("review"), corpus("connection")
    recent: list[bytes] = []
    with webhook.running() as served:
        speaks_h2 = served.authority.trusting()
        speaks_h2.set_alpn_protocols(["h2"])

        def send(connection: socket.socket, data: bytes) -> bytes:
            answer = b""
            with contextlib.suppress(OSError):  # it may have had enough of it
                connection.sendall(data)
            with contextlib.suppress(ConnectionResetError, BrokenPipeError, ssl.SSLError, TimeoutError):
                connection.settimeout(0.05)  # an incomplete request waits for the rest
                while piece := connection.recv(65536):
                    answer += piece
            return answer

        def without_tls() -> None:
            data = changed(_hello(), dice)
            recent.append(data)
            with socket.create_connection(("127.0.0.1", served.port), timeout=_SECONDS) as plain:
                send(plain, data)

        def request() -> None:
            body = dice.choice(reviews)
            data = changed(dice.choice(_REQUESTS) % (len(body), body), dice)
            recent.append(data)
            with served.connect() as connection:
                answer = send(connection, data)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 "), answer[:200]
            assert not answer.startswith(b"HTTP/1.1 500"), answer[:200]

        def http_2() -> None:
            data = changed(dice.choice(frames), dice)
            recent.append(data)
            plain = socket.create_connection(("127.0.0.1", served.port), timeout=_SECONDS)
            with speaks_h2.wrap_socket(plain, server_hostname="localhost") as connection:
                send(connection, data)

        def review() -> None:
            data = mutated(dice.choice(reviews), dice, MOST)
            recent.append(data)
            status, _, answer = served.call("POST", "/mutate", data, content_type="application/json")
            assert status in (200, 400), (status, answer)
            if status == 200:
                assert json.loads(answer)["kind"] == "AdmissionReview"
            else:
                assert answer.decode().removesuffix("\n").isprintable()

        def probe() -> None:
            assert served.process.poll() is None, f"ended with {served.process.returncode}"
            _keeps_to(served.process, WEBHOOK_MEMORY)
            assert served.call("GET", "/healthz")[0] == 200

        count = _run(
            seconds,
            dice,
            recent,
            (without_tls, request, request, http_2, review, review),
            probe,
            finds / "webhook_process",
        )
        assert served.metrics()['pcinuma_webhook_admissions_total{outcome="failed"}'] == 0
        assert served.end() == 0
        faults = [line for line in served.lines() if line["event"] == "server"]
        assert not faults, faults[0]
        return count


def _hello() -> bytes:
    """What a client's handshake begins with."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def _run(
    seconds: float,
    dice: random.Random,
    recent: list[bytes],
    attempts: tuple[Attempt, ...],
    probe: Callable[[], None],
    finds: Path,
    began_again: Callable[[], bool] = lambda: False,
) -> int:
    """``began_again``: whether the process had ended as it was told to, and is another one now."""
    deadline, count = time.monotonic() + seconds, 0
    probe()
    while time.monotonic() < deadline or recent:
        try:
            if len(recent) < BETWEEN_PROBES and time.monotonic() < deadline:
                dice.choice(attempts)()
            else:
                probe()
                count += len(recent)
                recent.clear()
        except (AssertionError, OSError, grpc.RpcError, etree.XMLSyntaxError, ValueError) as error:
            if began_again():
                recent.clear()
                continue
            raise Find(f"{error}; what was sent before is in {_kept(recent, finds)}") from error
    assert count, "nothing was sent"
    return count


def _kept(recent: list[bytes], finds: Path) -> Path:
    finds.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(recent):
        (finds / f"{os.getpid()}-{number:03}").write_bytes(data)
    return finds
