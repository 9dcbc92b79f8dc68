"""The hook sidecar as a process of its own, and virt-launcher's side of its protocol: real sockets, a real gRPC client.

The client's messages are built from the `.proto` files while the tests run, in a descriptor pool of their own: nothing
that was generated before, and nothing that the sidecar itself uses, takes part.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

from tests.conftest import ROOT

PROGRAM = Path(sys.executable).with_name("pcinuma")
EXECUTABLE = Path(sys.executable).with_name("onDefineDomain")
PROTOCOL = ROOT / "hook" / "pcinuma" / "protocol"
PREFIX = "pcinuma.vm.kubevirt.io/"
VERSIONS = ("v1alpha1", "v1alpha2", "v1alpha3")

READY_SECONDS = 20.0
CALL_SECONDS = 20.0
_POLL_SECONDS = 0.005


# --- the process -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder with a short name (a socket's path has 107 bytes at most) that every user may pass through."""
    with tempfile.TemporaryDirectory(prefix="pcinuma-hook-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


class Sidecar:
    """A running `pcinuma hook`. ``socket`` is the path of its socket, ``plugin_socket`` of the other one if it has one."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path, plugin_socket: Path | None, log: Path):
        self.process = process
        self.socket = path
        self.plugin_socket = plugin_socket
        self._log = log

    def text(self) -> str:
        """What it wrote to standard error so far."""
        return self._log.read_text()

    def records(self, event: str | None = None, since: int = 0) -> list[dict[str, Any]]:
        """The lines of the log so far, each of which must be one JSON object; those of one event when it is given.

        ``since``: the length that the log had before, to see only what came after.
        """
        found = []
        for line in self.text()[since:].splitlines():
            record = json.loads(line)
            assert isinstance(record, dict), line
            found.append(record)
        return found if event is None else [record for record in found if record.get("event") == event]

    def await_records(self, event: str, count: int) -> list[dict[str, Any]]:
        """The records of an event, once there are as many."""
        deadline = time.monotonic() + 5
        while len(found := self.records(event)) < count:
            assert time.monotonic() < deadline, f"{len(found)} records of {event}, not {count}"
            time.sleep(_POLL_SECONDS)
        return found

    def wait_until_ready(self) -> None:
        """Until its socket is there. Raises AssertionError with its log when it ends instead."""
        deadline = time.monotonic() + READY_SECONDS
        paths = [path for path in (self.socket, self.plugin_socket) if path is not None]
        while not all(path.exists() for path in paths):
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.text()}"
            assert time.monotonic() < deadline, f"no socket: {self.text()}"
            time.sleep(_POLL_SECONDS)
        settled = time.monotonic() + 1
        while self.text().count("\n") < len(paths) and time.monotonic() < settled:
            time.sleep(_POLL_SECONDS)  # it may say so a moment later, and a test is to see what its own call adds

    def end(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Send a signal; the exit status and how many seconds it took."""
        started = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(timeout=5), time.monotonic() - started


def _start(
    place: Path,
    *arguments: str | Path,
    plugin: bool = False,
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    **popen: Any,
) -> Sidecar:
    path = path if path is not None else place / "hook.sock"
    plugin_path = place / "plugin" / "plugin.sock" if plugin else None
    command = [*before, str(PROGRAM), "hook", "--socket", str(path)]
    if plugin_path is not None:
        plugin_path.parent.mkdir(exist_ok=True)
        command += ["--plugin-socket", str(plugin_path)]
    handle, name = tempfile.mkstemp(prefix="pcinuma-hook-log-")
    settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": handle, **popen}
    settings["env"] = {**os.environ, **(environment or {})}
    try:
        process = subprocess.Popen([*command, *map(str, arguments)], **settings)
    finally:
        os.close(handle)
    return Sidecar(process, path, plugin_path, Path(name))


@contextlib.contextmanager
def running(
    *arguments: str | Path, at: Path | None = None, wait: bool = True, check_log: bool = True, **given: Any
) -> Iterator[Sidecar]:
    """`pcinuma hook`, serving if ``wait``, in a folder of its own unless one is given; it is killed with the block.

    ``given``: ``path`` of the socket, ``plugin`` for a plugin socket, ``environment`` to add, a command to start it
    with (``before``), what Popen takes. However a test ends it, every line that it logged must be one JSON object, if ``check_log`` and unless it logs text.
    """
    with contextlib.ExitStack() as stack:
        place = at if at is not None else stack.enter_context(folder())
        sidecar = _start(place, *arguments, **given)
        try:
            if wait:
                sidecar.wait_until_ready()
            yield sidecar
        finally:
            if sidecar.process.poll() is None:
                sidecar.process.kill()
            sidecar.process.wait()
            said = sidecar.text()
            sidecar._log.unlink()
        if check_log and "text" not in arguments and sidecar.process.returncode in (0, -signal.SIGKILL):
            for line in said.splitlines():
                json.loads(line)


def run(program: Path, *arguments: str | bytes | Path, **given: Any) -> subprocess.CompletedProcess[bytes]:
    """A command that is to end by itself."""
    command = [os.fsencode(str(program)), *(a if isinstance(a, bytes) else os.fsencode(str(a)) for a in arguments)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=5, check=False, **given)


# --- the protocol ----------------------------------------------------------------------------------------------


@functools.cache
def _pool() -> tuple[descriptor_pool.DescriptorPool, dict[str, tuple[Any, Any]]]:
    """The protocol's own pool, and by method path the classes of request and response."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "set"
        files = sorted(str(path) for path in PROTOCOL.glob("*.proto"))
        status = protoc.main(["protoc", f"-I{PROTOCOL}", f"--descriptor_set_out={out}", "--include_imports", *files])
        assert status == 0
        described = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in described.file:
        pool.Add(file)
    methods: dict[str, tuple[Any, Any]] = {}
    for file in described.file:
        for name, service in pool.FindFileByName(file.name).services_by_name.items():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                classes = (message_factory.GetMessageClass(m) for m in (method.input_type, method.output_type))
                methods[path] = tuple(classes)  # type: ignore[assignment]
                assert name
    return pool, methods


def methods() -> dict[str, tuple[Any, Any]]:
    """Every method of the `.proto` files by path, with the classes of its request and response."""
    return _pool()[1]


def message(name: str, **fields: Any) -> Any:
    """A message by its full name."""
    return message_factory.GetMessageClass(_pool()[0].FindMessageTypeByName(name))(**fields)


class Client:
    """virt-launcher's side: a channel of its own on a socket."""

    def __init__(self, path: Path, **options: Any):
        chosen = {
            "grpc.use_local_subchannel_pool": 1,  # else channels to one path share a connection
            "grpc.max_send_message_length": -1,
            "grpc.max_receive_message_length": -1,
            **{f"grpc.{name}": value for name, value in options.items()},
        }
        self.channel = grpc.insecure_channel(f"unix:{path}", options=list(chosen.items()))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def begin(self, path: str, timeout: float = CALL_SECONDS, **fields: Any) -> Any:
        """A call that is not waited for: a grpc.Future."""
        given, made = methods()[path]
        stub = self.channel.unary_unary(
            path, request_serializer=given.SerializeToString, response_deserializer=made.FromString
        )
        return stub.future(given(**fields), timeout=timeout)

    def call(self, path: str, timeout: float = CALL_SECONDS, **fields: Any) -> Any:
        """A call's answer. Raises grpc.RpcError."""
        return self.begin(path, timeout, **fields).result()

    def raw(self, path: str, request: bytes, **given: Any) -> bytes:
        """A call whose request and answer are bytes of the test's own making."""
        answer: bytes = self.channel.unary_unary(path)(request, timeout=CALL_SECONDS, **given)
        return answer

    def info(self, timeout: float = CALL_SECONDS) -> Any:
        return self.call("/kubevirt.hooks.info.Info/Info", timeout)

    def define(
        self, domain: str | bytes, vmi: bytes, version: str = "v1alpha3", timeout: float = CALL_SECONDS
    ) -> bytes:
        """The domain that OnDefineDomain answers."""
        return self.begin_define(domain, vmi, version, timeout).result().domainXML  # type: ignore[no-any-return]

    def begin_define(
        self, domain: str | bytes, vmi: bytes, version: str = "v1alpha3", timeout: float = CALL_SECONDS
    ) -> Any:
        xml = domain.encode() if isinstance(domain, str) else domain
        return self.begin(f"/kubevirt.hooks.{version}.Callbacks/OnDefineDomain", timeout, domainXML=xml, vmi=vmi)

    def mutate(self, domain: str | bytes, vmi: bytes, context: str = "Boot", domain_type: str = "libvirt") -> bytes:
        """The domain that MutateDomain answers."""
        answer: bytes = self.call(
            "/kubevirt.hooks.plugins.v1alpha1.DomainHookService/MutateDomain",
            domain_type=domain_type,
            domain=domain.encode() if isinstance(domain, str) else domain,
            vmi=vmi,
            sidecar_context=message("kubevirt.hooks.plugins.v1alpha1.SidecarContext", invocation_context=context),
        ).domain
        return answer


class Raw:
    """A connection that speaks HTTP/2 by hand, for what a gRPC client would never do."""

    def __init__(self, at: Path | socket.socket, **config: Any):
        self.socket = at if isinstance(at, socket.socket) else connected(at)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, **config))
        self.h2.initiate_connection()
        self.flush()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def flush(self) -> None:
        self.socket.sendall(self.h2.data_to_send())

    def begin(self, path: str, *, method: str = "POST", kind: str = "application/grpc", **headers: str) -> int:
        """The headers of a call; its stream."""
        stream: int = self.h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":scheme", "http"), (":authority", "localhost"), (":path", path)]
        self.h2.send_headers(stream, [*pseudo, ("content-type", kind), ("te", "trailers"), *headers.items()])
        self.flush()
        return stream

    def send(self, stream: int, body: bytes, *, end: bool = True) -> None:
        """The body of a call, as fast as the server's flow control allows."""
        while body:
            room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size, len(body))
            if room == 0:
                self.h2.receive_data(self.socket.recv(65536))
                self.flush()
                continue
            self.h2.send_data(stream, body[:room])
            body = body[room:]
            self.flush()
        if end:
            self.h2.end_stream(stream)
            self.flush()

    def headers(self, stream: int) -> dict[str, str]:
        """Reads until the stream ends; all headers and trailers that came."""
        found: dict[str, str] = {}
        while data := self.socket.recv(65536):
            for event in self.h2.receive_data(data):
                if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                    if event.stream_id == stream:
                        found.update({_text(name): _text(value) for name, value in event.headers or ()})
                elif isinstance(event, h2.events.DataReceived):
                    self.h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id or 0)
                elif isinstance(event, h2.events.StreamEnded) and event.stream_id == stream:
                    return found
            self.flush()
        raise AssertionError(f"closed before the answer; so far: {found}")


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection, to see what a client sends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def connected(path: Path) -> socket.socket:
    """A bare connection to a unix socket."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(CALL_SECONDS)
    try:
        made.connect(str(path))
    except OSError:
        made.close()
        raise
    return made


def enveloped(message: bytes) -> bytes:
    """A gRPC message with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """The status code and message with which a call fails."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError("the call did not fail")


# --- what it is given ------------------------------------------------------------------------------------------


def vmi(
    annotations: Mapping[str, Any] | None = None, *, name: str = "vm", namespace: str = "ns", kind: bool = True
) -> bytes:
    """A VirtualMachineInstance as virt-launcher marshals it. ``annotations`` with our prefix left out."""
    metadata: dict[str, Any] = {"name": name, "namespace": namespace}
    if annotations is not None:
        metadata["annotations"] = {PREFIX + key: value for key, value in annotations.items()}
    content: dict[str, Any] = {"metadata": metadata, "spec": {"domain": {"devices": {}}}, "status": {}}
    if kind:
        content = {"kind": "VirtualMachineInstance", "apiVersion": "kubevirt.io/v1", **content}
    return json.dumps(content).encode()


def host_file(path: Path, nodes: Mapping[int, str], functions: Mapping[str, int]) -> Path:
    """A recorded host: its nodes' CPU lists, its functions' nodes (-1: unknown)."""
    record = {
        "kind": "pcinuma-host",
        "version": 1,
        "nodes": [
            {"id": node, "cpus": cpus, "distances": {str(other): 10 if other == node else 21 for other in nodes}}
            for node, cpus in nodes.items()
        ],
        "functions": [{"address": bdf, "node": node} for bdf, node in functions.items()],
        "mdevs": [],
    }
    path.write_text(json.dumps(record))
    return path


def sysfs(path: Path, nodes: Mapping[int, str], functions: Mapping[str, int | None]) -> Path:
    """A tree laid out like `/sys`. A function whose node is None has a FIFO for `numa_node`: to read it hangs."""
    for node, cpus in nodes.items():
        place = path / "devices" / "system" / "node" / f"node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{cpus}\n")
        (place / "distance").write_text(" ".join("10" if other == node else "21" for other in nodes) + "\n")
    links = path / "bus" / "pci" / "devices"
    links.mkdir(parents=True)
    for bdf, node_of_it in functions.items():
        place = path / "devices" / f"pci{bdf[:7]}" / bdf
        place.mkdir(parents=True)
        (links / bdf).symlink_to(os.path.relpath(place, links))
        (place / "class").write_text("0x030200\n")
        if node_of_it is None:
            os.mkfifo(place / "numa_node")
        else:
            (place / "numa_node").write_text(f"{node_of_it}\n")
    return path


def fifo(tree: Path, bdf: str) -> Path:
    """The FIFO that stands for that function's `numa_node`."""
    return tree / "devices" / f"pci{bdf[:7]}" / bdf / "numa_node"


def someone_reads(tree: Path, bdf: str, seconds: float = 10.0) -> int:
    """Waits until a process reads the FIFO; the descriptor to answer through, which the test must close."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return os.open(fifo(tree, bdf), os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < deadline, "nobody reads the FIFO"
            time.sleep(_POLL_SECONDS)


# --- what it answers -------------------------------------------------------------------------------------------
