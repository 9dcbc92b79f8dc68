"""What virt-launcher speaks: a real gRPC client on the sidecar's real sockets, and requests written byte by byte."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.conftest import ROOT
from tests.support import domains, sidecar
from tests.support.domains import domain, hostdev
from tests.support.sidecar import Client, Raw, Sidecar, enveloped, refused, vmi
from tests.support.two_sockets import DEVICES, EXAMPLE

DOMAIN = (EXAMPLE / "domain.xml").read_bytes()
VERSIONS = ("v1alpha1", "v1alpha2", "v1alpha3")
MEGABYTE = 1024 * 1024


@pytest.fixture(scope="module")
def hook() -> Iterator[Sidecar]:
    with sidecar.running("--host", EXAMPLE / "host.json", plugin=True) as running:
        yield running


@pytest.fixture
def client(hook: Sidecar) -> Iterator[Client]:
    with Client(hook.socket) as made:
        yield made


@pytest.fixture
def plugin(hook: Sidecar) -> Iterator[Client]:
    assert hook.plugin_socket is not None
    with Client(hook.plugin_socket) as made:
        yield made


# --- Info ------------------------------------------------------------------------------------------------------


def test_info(client: Client) -> None:
    answer = client.info()
    assert answer.name == "pcinuma"
    assert sorted(point.name for point in answer.hookPoints) == ["OnDefineDomain", "Shutdown"]
    assert sorted(answer.versions) == ["v1alpha1", "v1alpha2", "v1alpha3"]


@pytest.mark.parametrize("version", VERSIONS)
def test_one_version_alone(version: str) -> None:
    with sidecar.running("--host", EXAMPLE / "host.json", "--version", version) as hook, Client(hook.socket) as client:
        assert list(client.info().versions) == [version]
        assert domains.layout(client.define(DOMAIN, vmi(), version))[1] == DEVICES


@pytest.mark.parametrize("version", ["v1alpha4", "v1", "", "V1ALPHA1", "v1alpha3\nx"])
def test_an_unknown_version(version: str, tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    ended = sidecar.run(sidecar.PROGRAM, "hook", "--socket", path, "--version", version)
    said = ended.stderr.decode()
    assert (ended.returncode, ended.stdout, path.exists()) == (2, b"", False)
    assert said.startswith("pcinuma: error: ")
    assert said.count("\n") == 2  # the error and its hint
    assert all(known in said for known in VERSIONS)


# --- Callbacks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_on_define_domain(client: Client, version: str) -> None:
    answer = client.define(DOMAIN, vmi(), version)
    controllers, devices = domains.layout(answer)
    assert devices == DEVICES
    assert controllers["ua-pcinuma-cell0"] == (1, 247, 0)
    assert controllers["ua-pcinuma-cell1"] == (6, 252, 1)


@pytest.mark.parametrize("version", ["v1alpha2", "v1alpha3"])
@pytest.mark.parametrize("size", [0, 1, 70_000, MEGABYTE + MEGABYTE // 2])
def test_cloud_init_data_comes_back_as_it_came(client: Client, version: str, size: int) -> None:
    source, data = random.Random(size).randbytes(size), random.Random(size + 1).randbytes(size)
    path = f"/kubevirt.hooks.{version}.Callbacks/PreCloudInitIso"
    answer = client.call(path, cloudInitNoCloudSource=source, cloudInitData=data, vmi=vmi())
    assert (answer.cloudInitNoCloudSource, answer.cloudInitData) == (source, data)


def test_shutdown_answers_before_it_ends() -> None:
    with sidecar.running("--host", EXAMPLE / "host.json") as hook, Client(hook.socket) as client:
        answer = client.call("/kubevirt.hooks.v1alpha3.Callbacks/Shutdown")
        assert answer.SerializeToString() == b""
        assert hook.process.wait(timeout=5) == 0


# --- the plugin service ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["Boot", "MigrationSource", "MigrationTarget"])
def test_mutate_domain(plugin: Client, client: Client, context: str) -> None:
    answer = plugin.mutate(DOMAIN, vmi(), context)
    assert domains.layout(answer)[1] == DEVICES
    assert answer == client.define(DOMAIN, vmi())


@pytest.mark.parametrize("kind", ["", "Libvirt", "xen", "libvirt "])
def test_mutate_domain_of_another_hypervisor(plugin: Client, kind: str) -> None:
    code, said = refused(lambda: plugin.mutate(DOMAIN, vmi(), domain_type=kind))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "libvirt" in said
    assert repr(kind) in said


# --- what there is not -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/kubevirt.hooks.v1alpha1.Callbacks/PreCloudInitIso",
        "/kubevirt.hooks.v1alpha1.Callbacks/Shutdown",
        "/kubevirt.hooks.v1alpha2.Callbacks/Shutdown",
        "/kubevirt.hooks.v1alpha3.Callbacks/Migrate",
        "/kubevirt.hooks.v1alpha3.callbacks/OnDefineDomain",
        "/kubevirt.hooks.v1alpha4.Callbacks/OnDefineDomain",
        "/kubevirt.hooks.info.Info",
        "/grpc.health.v1.Health/Check",
        "/",
    ],
)
def test_unknown_methods(client: Client, plugin: Client, path: str) -> None:
    for one in (client, plugin):
        assert refused(lambda one=one: one.raw(path, b""))[0] is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[misc]
    client.info()


def test_a_compressed_request_is_refused_by_its_status(hook: Sidecar) -> None:
    """The gRPC specification: a message encoded as the server does not take it fails with UNIMPLEMENTED."""
    with Client(hook.socket) as client:
        path = "/kubevirt.hooks.v1alpha3.Callbacks/OnDefineDomain"
        request = field(1, DOMAIN) + field(2, vmi())
        code, _ = refused(lambda: client.raw(path, request, compression=grpc.Compression.Gzip))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        client.info()


# --- size, number, impatience ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [MEGABYTE // 10, 9 * MEGABYTE // 10])
def test_a_large_domain(client: Client, size: int) -> None:
    """Beyond every initial flow control window, both ways; the comment comes back to the byte."""
    comment = b"<!--" + random.Random(size).randbytes(size // 2).hex().encode() + b"-->"
    large = DOMAIN.replace(b"<memballoon ", comment + b"<memballoon ", 1)
    answer = client.define(large, vmi())
    assert answer.count(comment) == 1
    assert answer.replace(comment, b"") == client.define(DOMAIN, vmi())


def test_a_domain_that_would_take_the_sidecars_memory(client: Client) -> None:
    """3 MiB would take more than the container's 64 MB: best-effort costs no VM its start, restricted says why."""
    large = DOMAIN.replace(b"<memballoon ", b"<!--" + b"x" * 3 * MEGABYTE + b"--><memballoon ", 1)
    assert client.define(large, vmi()) == large
    code, said = refused(lambda: client.define(large, vmi({"policy": "restricted"})))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "MiB" in said


def test_a_message_over_the_limit(client: Client) -> None:
    large = DOMAIN.replace(b"<memballoon ", b"<!--" + b"x" * 40 * MEGABYTE + b"--><memballoon ", 1)
    code, said = refused(lambda: client.define(large, vmi()))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "MiB" in said
    assert domains.layout(client.define(DOMAIN, vmi()))[1] == DEVICES


def test_many_calls_on_one_channel(client: Client) -> None:
    first = client.define(DOMAIN, vmi())
    for _ in range(300):
        assert client.info().name == "pcinuma"
    assert all(client.define(DOMAIN, vmi()) == first for _ in range(150))


def test_many_calls_at_once(client: Client) -> None:
    """Each has another domain, and gets its own back."""
    calls = {
        number: client.begin_define(DOMAIN.replace(b"ml_train-0", f"ml_train-{number}".encode()), vmi())
        for number in range(64)
    }
    for number, call in calls.items():
        answer = call.result().domainXML
        assert f"<name>ml_train-{number}</name>".encode() in answer
        assert domains.layout(answer)[1] == DEVICES


def test_many_clients_at_once(hook: Sidecar) -> None:
    def one(number: int) -> tuple[bytes, bytes]:
        name = f"<name>ml_train-{number}</name>".encode()
        with Client(hook.socket) as client:
            return name, client.define(DOMAIN.replace(b"<name>ml_train-0</name>", name), vmi())

    with ThreadPoolExecutor(32) as pool:
        for name, answer in pool.map(one, range(96)):
            assert name in answer
            assert domains.layout(answer)[1] == DEVICES


def test_a_client_that_cancels_while_its_call_runs(tmp_path: Path) -> None:
    tree = sidecar.sysfs(tmp_path / "sys", {0: "0-7"}, {"0000:41:00.0": None, "0000:42:00.0": 0})
    slow = domain({0: 0}, [hostdev("0000:41:00.0", "ua-gpu-slow")])
    quick = domain({0: 0}, [hostdev("0000:42:00.0", "ua-gpu-quick")])
    with sidecar.running("--sysfs", tree) as hook, Client(hook.socket) as client:
        cancelled, late = client.begin_define(slow, vmi()), client.begin_define(slow, vmi(), timeout=0.3)
        answering = sidecar.someone_reads(tree, "0000:41:00.0")
        assert cancelled.cancel()
        assert refused(late.result)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert domains.layout(client.define(quick, vmi()))[1] == {"ua-gpu-quick": (2, 0, 0)}
        os.close(answering)  # their answers are ready now, and have nobody to go to
        hook.await_records("OnDefineDomain", 3)
        assert domains.layout(client.define(quick, vmi()))[1] == {"ua-gpu-quick": (2, 0, 0)}
        assert hook.end()[0] == 0


def test_a_client_that_resets_its_call_half_way(hook: Sidecar, client: Client) -> None:
    body = enveloped(field(1, DOMAIN) + field(2, vmi()))
    with Raw(hook.socket) as raw:
        for _ in range(200):  # more than may run at once: none of them may leave anything behind
            stream = raw.begin("/kubevirt.hooks.v1alpha3.Callbacks/OnDefineDomain")
            raw.send(stream, body[:1000], end=False)
            raw.h2.reset_stream(stream)
            raw.flush()
        stream = raw.begin("/kubevirt.hooks.v1alpha3.Callbacks/OnDefineDomain")
        raw.send(stream, body)
        assert raw.headers(stream)["grpc-status"] == "0"
    client.info()


# --- the bytes -------------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protobuf message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def fields(data: bytes) -> list[tuple[int, bytes | int]]:
    """The fields of a protobuf message as (number, content)."""

    def number() -> int:
        nonlocal data
        value = shift = 0
        while True:
            byte, data = data[0], data[1:]
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    found: list[tuple[int, bytes | int]] = []
    while data:
        tag = number()
        assert tag & 7 in (0, 2), tag
        if tag & 7 == 0:
            found.append((tag >> 3, number()))
        else:
            size = number()
            found.append((tag >> 3, data[:size]))
            data = data[size:]
    return found


def test_the_bytes_of_info(client: Client) -> None:
    answer = fields(client.raw("/kubevirt.hooks.info.Info/Info", b""))
    assert [content for number, content in answer if number == 1] == [b"pcinuma"]
    points = [dict(fields(content)) for number, content in answer if number == 3 and isinstance(content, bytes)]
    assert sorted(str(point[1]) for point in points) == ["b'OnDefineDomain'", "b'Shutdown'"]
    assert sorted(str(content) for number, content in answer if number == 4) == [str(v.encode()) for v in VERSIONS]
    assert {number for number, _ in answer} == {1, 3, 4}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_bytes_of_on_define_domain(client: Client, version: str) -> None:
    path = f"/kubevirt.hooks.{version}.Callbacks/OnDefineDomain"
    for request in (field(1, DOMAIN) + field(2, vmi()), field(2, vmi()) + field(1, DOMAIN) + field(15, b"to come")):
        ((number, xml),) = fields(client.raw(path, request))
        assert number == 1
        assert isinstance(xml, bytes)
        assert domains.layout(xml)[1] == DEVICES
    # the VMI is read from 2
    code, _ = refused(lambda: client.raw(path, field(1, DOMAIN) + field(2, vmi({"policy": "sometimes"}))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("version", ["v1alpha2", "v1alpha3"])
def test_the_bytes_of_pre_cloud_init_iso(client: Client, version: str) -> None:
    path = f"/kubevirt.hooks.{version}.Callbacks/PreCloudInitIso"
    answer = client.raw(path, field(1, b"the source") + field(2, vmi()) + field(3, b"the data"))
    assert fields(answer) == [(1, b"the source"), (3, b"the data")]


def test_the_bytes_of_shutdown() -> None:
    with sidecar.running("--host", EXAMPLE / "host.json") as hook, Client(hook.socket) as client:
        assert client.raw("/kubevirt.hooks.v1alpha3.Callbacks/Shutdown", b"") == b""
        assert hook.process.wait(timeout=5) == 0


def test_the_bytes_of_mutate_domain(plugin: Client, hook: Sidecar) -> None:
    path = "/kubevirt.hooks.plugins.v1alpha1.DomainHookService/MutateDomain"
    rest = field(2, DOMAIN) + field(3, vmi()) + field(4, field(1, b"MigrationTarget"))
    ((number, xml),) = fields(plugin.raw(path, field(1, b"libvirt") + rest))
    assert number == 1
    assert isinstance(xml, bytes)
    assert domains.layout(xml)[1] == DEVICES
    assert "MigrationTarget" in hook.text().splitlines()[-1]
    assert refused(lambda: plugin.raw(path, field(1, b"xen") + rest))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert refused(lambda: plugin.raw(path, rest))[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("request_bytes", [b"\xff\xff\xff", b"\x0a\x7f", b"\x09", b"\x0b"])
def test_bytes_that_are_no_message(client: Client, request_bytes: bytes) -> None:
    path = "/kubevirt.hooks.v1alpha3.Callbacks/OnDefineDomain"
    assert refused(lambda: client.raw(path, request_bytes))[0] is grpc.StatusCode.INVALID_ARGUMENT
    client.info()


# --- the generated files ---------------------------------------------------------------------------------------


def test_the_generated_files_are_what_protoc_makes_now(tmp_path: Path) -> None:
    sources = sorted(f"pcinuma/protocol/{path.name}" for path in sidecar.PROTOCOL.glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    made = subprocess.run([*command, *sources], cwd=ROOT / "hook", capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    new = {path.name: path.read_text() for path in (tmp_path / "pcinuma" / "protocol").iterdir()}
    kept = {path.name: path.read_text() for path in sidecar.PROTOCOL.glob("*_pb2.py*")}
    assert sorted(new) == sorted(kept)
    assert [name for name, text in new.items() if kept[name] != text] == []
