"""Calls that fail, hosts that fail, and peers that send anything at all: what they are told, and that it lives on."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from lxml import etree

from tests.conftest import ROOT
from tests.support import domains, sidecar
from tests.support.domains import domain, hostdev
from tests.support.sidecar import Client, Raw, Sidecar, enveloped, refused, vmi

EXAMPLE = ROOT / "examples" / "two-sockets"
DOMAIN = (EXAMPLE / "domain.xml").read_bytes()
NEAR, UNKNOWN = "0000:41:00.0", "0000:c1:00.0"
XML = domain({0: 0}, [hostdev(NEAR, "ua-gpu-near")])
ONE_DOES_NOT_FIT = domain({0: 0}, [hostdev(NEAR, "ua-gpu-near"), hostdev(UNKNOWN, "ua-gpu-unknown")])
# Bus 0 is full: 29 disks, the host bridge at 0x00 and the chipset at 0x1f leave a slot for the root ports that the other
# devices need, and none for an expander.
DISK = (
    '<disk type="file" device="disk"><source file="/x"/><target dev="vd{}" bus="virtio"/>'
    '<address type="pci" domain="0x0000" bus="0x00" slot="0x{:02x}" function="0x0"/></disk>\n'
)
DISKS = "".join(DISK.format(chr(ord("a") + number % 26) * (1 + number // 26), number + 1) for number in range(29))
FULL = XML.replace("<rng ", DISKS + "<rng ")
DEFINE = "/kubevirt.hooks.v1alpha3.Callbacks/OnDefineDomain"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("host") / "host.json"
    return sidecar.host_file(path, {0: "0-7"}, {NEAR: 0, UNKNOWN: -1})


@pytest.fixture(scope="module")
def hook(host: Path) -> Iterator[Sidecar]:
    with sidecar.running("--host", host) as running:
        yield running
        assert running.process.poll() is None, running.text()


@pytest.fixture
def client(hook: Sidecar) -> Iterator[Client]:
    with Client(hook.socket) as made:
        yield made


# --- status and message ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["best-effort", "none", "restricted", "single-numa-node"])
@pytest.mark.parametrize(
    "xml",
    [
        b"",
        b"  \n",
        b"no XML",
        b"<domain>",
        b"<domain/><domain/>",
        b"<network/>",
        b"\xff\xfe\x00",
        b'<!DOCTYPE d [<!ENTITY a "b">]><domain>&a;</domain>',
        b"<domain>" + b"<a>" * 100_000 + b"</a>" * 100_000 + b"</domain>",
        XML.replace('slot="0x00"', 'slot="0x99"').encode(),
        XML.replace('bus="0x41"', 'bus="x"').encode(),
        XML.replace('cell id="0"', 'cell id="zero"').encode(),
    ],
    ids=lambda xml: repr(xml[:12]),
)
def test_a_domain_that_is_none(client: Client, xml: bytes, policy: str) -> None:
    code, said = refused(lambda: client.define(xml, vmi({"policy": policy})))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said.startswith("pcinuma: error: ")
    assert said.isprintable()


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"null",
        b"[]",
        b'"vmi"',
        b"no object",
        b"{",
        b"\xff\xfe",
        b'{"metadata": {}}',
        b'{"kind": "Pod", "metadata": {}, "spec": {}}',
        b'{"kind": 7, "metadata": {}, "spec": {}}',
        b'{"kind": "VirtualMachineInstance", "metadata": []}',
        b'{"kind": "VirtualMachineInstance", "metadata": {"annotations": ["a"]}}',
        b'{"a":' * 100_000,
        b"[" * 1_000_000,
        b"- " * 1_000_000,
        b"a: &a [x]\n" + b"".join(b"b%d: &b%d [*a, *a, *a, *a]\n" % (n, n) for n in range(50)),
    ],
    ids=lambda given: repr(given[:12]),
)
def test_a_vmi_that_is_none(client: Client, given: bytes) -> None:
    code, said = refused(lambda: client.define(XML, given))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said.startswith("pcinuma: error: ")
    assert said.isprintable()
    client.info(timeout=1)


def test_what_the_policy_refuses(client: Client) -> None:
    for policy in ("restricted", "single-numa-node"):
        code, said = refused(lambda policy=policy: client.define(ONE_DOES_NOT_FIT, vmi({"policy": policy})))  # type: ignore[misc]
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert UNKNOWN in said


def test_a_guest_without_room_on_bus_0(hook: Sidecar, client: Client) -> None:
    for policy in ("restricted", "single-numa-node"):
        code, said = refused(lambda policy=policy: client.define(FULL, vmi({"policy": policy})))  # type: ignore[misc]
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "bus 0" in said
    assert client.define(FULL, vmi({"policy": "best-effort"})) == FULL.encode()
    record = hook.records("OnDefineDomain")[-1]
    assert (record["level"], record["outcome"]) == ("warning", "unchanged")
    assert [finding["code"] for finding in record["findings"]] == ["root-bus-slots"]


@pytest.fixture
def misplanning(tmp_path: Path) -> dict[str, str]:
    """An environment in which pcinuma plans wrongly: bus numbers that the root bus needs itself."""
    fault = "from pcinuma import layout\nlayout.first_bus = lambda groups, around: 3\n"
    (tmp_path / "sitecustomize.py").write_text(fault)
    return {"PYTHONPATH": str(tmp_path)}


def test_a_result_that_fails_verification(host: Path, tmp_path: Path, misplanning: dict[str, str]) -> None:
    """What a fault of our own would write is not handed out; the message is the command line's."""
    (tmp_path / "domain.xml").write_text(XML)
    command = ["transform", "domain.xml", "--host", str(host), "--policy", "restricted"]
    done = sidecar.run(sidecar.PROGRAM, *command, cwd=tmp_path, env=os.environ | misplanning)
    assert (done.returncode, done.stdout) == (1, b"")
    with sidecar.running("--host", host, environment=misplanning) as faulty, Client(faulty.socket) as client:
        code, said = refused(lambda: client.define(XML, vmi({"policy": "restricted"})))
        assert code is grpc.StatusCode.INTERNAL
        assert "verification" in said
        assert "the root bus has 3 bus numbers" in said
        assert said.startswith(done.stderr.decode().splitlines()[0].replace("domain.xml", "the domain XML"))
        assert client.define(XML, vmi({"policy": "best-effort"})) == XML.encode()
        record = faulty.records("OnDefineDomain")[-1]
        assert (record["level"], record["outcome"]) == ("error", "unchanged")
        assert "the root bus has 3 bus numbers" in record["error"]


@pytest.mark.parametrize(
    ("xml", "annotations"),
    [
        ("<domain>\n<name>", {}),
        ("<domainsnapshot/>", {}),
        ("", {}),
        (XML, {"policy": "sometimes"}),
        (XML, {"polcy": "none"}),
        (ONE_DOES_NOT_FIT, {"policy": "restricted"}),
        (ONE_DOES_NOT_FIT, {"policy": "single-numa-node"}),
        (FULL, {"policy": "restricted"}),
    ],
)
def test_the_message_is_the_command_lines(
    client: Client, host: Path, tmp_path: Path, xml: str, annotations: dict[str, str]
) -> None:
    """Only the names of the files differ, which a call has not; and all of it is one line."""
    (tmp_path / "domain.xml").write_text(xml)
    (tmp_path / "vmi.json").write_bytes(vmi(annotations))
    command = ["transform", "domain.xml", "--host", str(host), "--vmi", "vmi.json"]
    lines = sidecar.run(sidecar.PROGRAM, *command, cwd=tmp_path).stderr.decode().splitlines()
    lines = [line.replace("domain.xml", "the domain XML").replace("vmi.json", "the VMI") for line in lines]
    _, said = refused(lambda: client.define(xml, vmi(annotations)))
    assert lines[0].startswith("pcinuma: error: ")
    assert said.startswith(lines[0])
    for line in lines[1:]:
        assert line.startswith("hint: ")
        assert said.endswith(line)
    assert "\n" not in said


def test_messages_in_other_alphabets_arrive(client: Client) -> None:
    _, said = refused(lambda: client.define(XML, vmi({"policy": "größer % 100 — 高い"})))
    assert "größer % 100 — 高い" in said


# --- the host --------------------------------------------------------------------------------------------------


def test_a_host_that_cannot_be_read(tmp_path: Path) -> None:
    tree = sidecar.sysfs(tmp_path / "sys", {0: "0-7"}, {NEAR: 0})
    without_devices = domain({0: 0}, [])
    with sidecar.running("--sysfs", tree) as hook, Client(hook.socket) as client:
        assert domains.layout(client.define(XML, vmi()))[1] == {"ua-gpu-near": (2, 0, 0)}
        shutil.rmtree(tree)
        for annotations in (None, {"policy": "best-effort"}, {"policy": "none"}):
            assert client.define(XML, vmi(annotations)) == XML.encode()
            record = hook.records("OnDefineDomain")[-1]
            assert (record["level"], record["outcome"]) == ("error", "unchanged")
            assert str(tree) in record["error"]
        for policy in ("restricted", "single-numa-node"):
            code, said = refused(lambda policy=policy: client.define(XML, vmi({"policy": policy})))  # type: ignore[misc]
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert str(tree) in said
            record = hook.records("OnDefineDomain")[-1]
            assert (record["level"], record["outcome"]) == ("error", "refused")
        # a VM without passthrough devices never touches the host
        assert client.define(without_devices, vmi({"policy": "restricted"})) == without_devices.encode()
        assert hook.records("OnDefineDomain")[-1]["level"] == "info"
        # and when the host is back, so is the placement
        sidecar.sysfs(tree, {0: "0-7"}, {NEAR: 0})
        assert domains.layout(client.define(XML, vmi()))[1] == {"ua-gpu-near": (2, 0, 0)}


def test_one_function_that_cannot_be_read_is_that_functions_fault_alone(tmp_path: Path) -> None:
    tree = sidecar.sysfs(tmp_path / "sys", {0: "0-7"}, {NEAR: 0, UNKNOWN: 0})
    node = sidecar.fifo(tree, UNKNOWN)
    node.unlink()
    node.mkdir()  # even root cannot read a directory
    with sidecar.running("--sysfs", tree) as hook, Client(hook.socket) as client:
        answer = client.define(ONE_DOES_NOT_FIT, vmi())
        assert domains.layout(answer)[1] == {"ua-gpu-near": (2, 0, 0), "ua-gpu-unknown": None}
        record = hook.records("OnDefineDomain")[-1]
        assert record["level"] == "warning"
        assert [finding["device"] for finding in record["findings"]] == [UNKNOWN]


# --- damaged calls ---------------------------------------------------------------------------------------------


def damaged(data: bytes, dice: random.Random) -> bytes:
    """The data with a few bytes changed, lost, doubled or moved, or cut off."""
    result = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 5, 30))):
        at = dice.randrange(len(result) + 1)
        length = dice.choice((1, 1, 2, 7, 100))
        match dice.randrange(6):
            case 0:
                result[at : at + length] = dice.randbytes(length)
            case 1:
                del result[at : at + length]
            case 2:
                result[at:at] = result[at : at + length]
            case 3:
                result[at:at] = dice.choice((b"<", b">", b'"', b"'", b"&", b"]]>", b"<!--", b"\0", b"\xff", b"{", b"]"))
            case 4:
                other = dice.randrange(len(result) + 1)
                result[at:at] = result[other : other + length]
            case 5 if dice.random() < 0.2:
                del result[at:]
    return bytes(result)


@pytest.mark.parametrize("seed", range(6))
def test_damaged_domains_and_vmis(seed: int) -> None:
    """60 calls a seed. Each has an answer that is XML, or a status that says whose fault it was: never ours."""
    dice = random.Random(seed)
    good = vmi({"policy": dice.choice(("best-effort", "restricted")), "addressed": "move"})
    allowed = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INTERNAL}
    answered = 0
    with sidecar.running("--host", EXAMPLE / "host.json") as hook, Client(hook.socket) as client:
        placed = client.define(DOMAIN, good)
        for _ in range(60):
            xml = damaged(dice.choice((DOMAIN, placed)), dice) if dice.random() < 0.8 else DOMAIN
            content = damaged(good, dice) if dice.random() < 0.3 else good
            call = client.begin_define(xml, content)
            if call.exception() is None:
                answered += 1
                etree.fromstring(call.result().domainXML)
            else:
                assert call.code() in allowed, (call.code(), call.details())
                assert call.details().isprintable()
        client.info(timeout=1)
        assert hook.process.poll() is None
        ours = [record for record in hook.records("OnDefineDomain") if record.get("code") == "internal"]
        assert ours == [], [record["error"] for record in ours]
        assert len(hook.records("OnDefineDomain")) == 61
    assert answered > 5


# --- damaged connections ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def abused(host: Path) -> Iterator[Sidecar]:
    with sidecar.running("--host", host, check_log=False) as running:
        yield running
        assert running.process.poll() is None


@pytest.fixture
def wild(abused: Sidecar) -> Iterator[Sidecar]:
    """A sidecar that must serve on after the test, its log still one JSON object a line: no traceback in between."""
    before = len(abused.text())
    yield abused
    still_serves(abused)
    abused.records(since=before)


def still_serves(hook: Sidecar) -> None:
    with Client(hook.socket) as client:
        assert client.info(timeout=5).name == "pcinuma"
        assert domains.layout(client.define(XML, vmi()))[1] == {"ua-gpu-near": (2, 0, 0)}


def send(hook: Sidecar, data: bytes) -> None:
    """Send that on a connection of its own, and wait until the sidecar has had enough of it."""
    with sidecar.connected(hook.socket) as peer, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        peer.settimeout(5)
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(65536):
            pass


def a_session() -> bytes:
    """The bytes of a client that makes two calls."""
    ours, theirs = sidecar.pair()
    with theirs, Raw(ours) as client:
        for path, body in (("/kubevirt.hooks.info.Info/Info", b""), (DEFINE, bytes([10, 3]) + b"<d>")):
            client.send(client.begin(path), enveloped(body))
        return theirs.recv(65536)


@pytest.mark.parametrize("seed", range(4))
def test_raw_garbage(wild: Sidecar, seed: int) -> None:
    dice = random.Random(seed)
    session = a_session()
    preface = session[:24]
    assert preface.startswith(b"PRI * HTTP/2.0")
    for _ in range(15):
        send(wild, dice.randbytes(dice.randrange(1, 3000)))
        send(wild, preface + dice.randbytes(dice.randrange(1, 3000)))
        send(wild, damaged(session, dice))
        frame = dice.randrange(1, 40).to_bytes(3, "big") + bytes([dice.randrange(0, 12), dice.randrange(256), 0, 0, 0])
        send(wild, preface + b"\0\0\0\4\0\0\0\0\0" + frame + bytes([dice.randrange(4)]) + dice.randbytes(60))


def test_headers_that_are_no_text(wild: Sidecar) -> None:
    """gRPC allows binary only in headers whose names say so, but who sends it all the same must not upset the log."""
    with Raw(wild.socket, header_encoding=None, validate_outbound_headers=False) as raw:
        pseudo = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x"), (b":path", b"/\xff\xfe")]
        raw.h2.send_headers(1, [*pseudo, (b"content-type", b"application/grpc"), (b"x-name", b"\xff\xfe")])
        with contextlib.suppress(AssertionError, OSError):  # whether it is answered or cut off is all the same
            raw.send(1, enveloped(b""))
            raw.headers(1)


def test_half_open_connections(wild: Sidecar) -> None:
    session = a_session()
    with contextlib.ExitStack() as stack:
        for number in range(30):
            peer = stack.enter_context(sidecar.connected(wild.socket))
            peer.sendall(session[: number * 7])
        still_serves(wild)


def test_more_connections_than_anybody_needs(wild: Sidecar) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            with contextlib.suppress(OSError):
                stack.enter_context(sidecar.connected(wild.socket))
    deadline = time.monotonic() + 5
    while True:  # it may take a moment to see that they have gone
        with contextlib.suppress(grpc.RpcError), Client(wild.socket) as client:
            client.info(timeout=1)
            break
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "request_line",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"POST /kubevirt.hooks.info.Info/Info HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n"],
)
def test_http_1(wild: Sidecar, request_line: bytes) -> None:
    started = time.monotonic()
    with sidecar.connected(wild.socket) as peer:
        peer.sendall(request_line + b"\r\n" * 20)
        peer.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            while peer.recv(65536):
                pass
    assert time.monotonic() - started < 2  # told, and let go


@pytest.mark.parametrize(("method", "kind"), [("GET", "application/grpc"), ("POST", "application/json"), ("PUT", "")])
def test_http_2_that_is_no_grpc(wild: Sidecar, method: str, kind: str) -> None:
    with Raw(wild.socket) as raw:
        stream = raw.begin(DEFINE, method=method, kind=kind)
        raw.send(stream, b"{}")
        headers = raw.headers(stream)
        assert headers[":status"] in ("405", "415") or headers.get("grpc-status", "0") != "0"


def test_endless_headers(wild: Sidecar) -> None:
    """A header block that never ends is not collected for ever."""

    def memory() -> int:
        status = Path(f"/proc/{wild.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    still_serves(wild)
    before = memory()
    session = a_session()
    start = session[:24] + b"\0\0\0\4\0\0\0\0\0"
    headers = (16384).to_bytes(3, "big") + b"\x01\0" + (1).to_bytes(4, "big") + b"\0" * 16384
    more = (16384).to_bytes(3, "big") + b"\x09\0" + (1).to_bytes(4, "big") + b"\0" * 16384
    with sidecar.connected(wild.socket) as peer, contextlib.suppress(OSError):
        peer.sendall(start + headers)
        for _ in range(2000):
            peer.sendall(more)
        assert memory() < before + 10_000


def test_a_header_of_a_megabyte(wild: Sidecar) -> None:
    code = grpc.StatusCode.OK
    with Client(wild.socket, max_metadata_size=8 * 2**20, absolute_max_metadata_size=8 * 2**20) as client:
        call = client.channel.unary_unary("/kubevirt.hooks.info.Info/Info")
        try:
            call(b"", metadata=[("x-long", "y" * 2**20)], timeout=5)
        except grpc.RpcError as error:
            code = error.code()
    assert code is not grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        b"\0\0\0\0\5abc",
        b"\0\0\0\0\1abc",
        enveloped(b"") + enveloped(b""),
        b"\7\0\0\0\0",
        b"\0\xff\xff\xff\xff",
    ],
)
def test_a_request_that_is_not_one_message(wild: Sidecar, body: bytes) -> None:
    with Raw(wild.socket) as raw:
        stream = raw.begin("/kubevirt.hooks.info.Info/Info")
        raw.send(stream, body)
        headers = raw.headers(stream)
        assert headers[":status"] == "200"
        assert headers["grpc-status"] not in ("0", "")
        stream = raw.begin("/kubevirt.hooks.info.Info/Info")  # and the connection goes on
        raw.send(stream, enveloped(b""))
        assert raw.headers(stream)["grpc-status"] == "0"


def test_calls_that_never_end(wild: Sidecar) -> None:
    """Requests begun and left open, on many streams of many connections."""
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            raw = stack.enter_context(Raw(wild.socket))
            for _ in range(60):
                raw.send(raw.begin(DEFINE), enveloped(b"x" * 50)[:20], end=False)
        still_serves(wild)


def freezing() -> bytes:
    return ("<domain><!--" + "<?xml " * 60_000 + "--></domain>").encode("utf-16")


@pytest.mark.parametrize(
    "make",
    [
        freezing,
        lambda: b"<domain>" + b"<a " * 100_000 + b"</domain>",
        lambda: b"<domain a='" + b" " * 1_000_000,
        lambda: b"<domain>" + b"<!-- -->" * 100_000 + b"</domain>",
        lambda: b" " * 1_000_000 + b"<?xml" + b" " * 1_000_000,
        lambda: b"<domain " + b" ".join(b"a%d='b'" % n for n in range(50_000)) + b"/>",
        lambda: b"<domain><name>" + b"<![CDATA[x]]>" * 100_000 + b"</name></domain>",
    ],
    ids=["declarations", "tags", "attribute", "comments", "spaces", "attributes", "cdata"],
)
def test_domains_made_to_take_long(host: Path, make: Callable[[], bytes]) -> None:
    """However long such a call takes, Info has its second, and SIGTERM its own."""
    with sidecar.running("--host", host) as hook, Client(hook.socket) as client:
        client.define(XML, vmi())
        call = client.begin_define(make(), vmi())
        time.sleep(0.1)
        started = time.monotonic()
        client.info(timeout=1)
        assert time.monotonic() - started < 1
        call.cancel()
        status, seconds = hook.end()
        assert status == 0
        assert seconds < 1.3
