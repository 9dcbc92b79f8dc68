"""``pcinuma hook``: the sidecar's life. Sockets that appear when calls are answered, and a clean end.

virt-launcher allows Info one second and no second try, so what a call needs but Info does not (lxml, udev, the
pipeline) is loaded after Info has been answered, in a thread of its own; a call that comes earlier waits for that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pcinuma.errors import BadInput, HostUnreadable, PcinumaError, PolicyNotMet, one_line
from pcinuma.grpc_wire import FAILED_PRECONDITION, INTERNAL, INVALID_ARGUMENT, Handler, RpcError, Server
from pcinuma.log import LOG_SECONDS, Log

if TYPE_CHECKING:
    from pcinuma.discover import ReadHost
    from pcinuma.hook_calls import Answer
    from pcinuma.host_wait import Bounded

NAME = "pcinuma"
SOCKET_FOLDER = "/var/run/kubevirt-hooks"
VERSIONS = ("v1alpha1", "v1alpha2", "v1alpha3")
QEMU_USER = 107
"""The user and group of virt-launcher's compute container; the sidecar has it too, but where KubeVirt runs as root."""

END_SECONDS = 0.7
_BACKLOG = 64
_LONGEST_PATH = 107  # sockaddr_un, less the NUL


@dataclass(frozen=True, slots=True)
class Settings:
    """How one sidecar runs; ``host`` makes the reader of the host when the first call needs it."""

    socket: str
    plugin_socket: str | None
    versions: tuple[str, ...]
    defaults: Mapping[str, str]
    host: Callable[[], ReadHost]
    log: Log


def serve(settings: Settings) -> int:
    """Serve until Shutdown, SIGTERM or SIGINT; the exit status. Raises PcinumaError when it cannot begin."""
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    _end_on_signals(waker)
    calls = _Calls(settings)
    handlers = _handlers(settings, calls, lambda: _wake(waker))
    hooks = {path: handler for path, handler in handlers.items() if "plugins" not in path}
    plugin = {path: handler for path, handler in handlers.items() if "plugins" in path}
    wanted = [(settings.socket, hooks)]
    if settings.plugin_socket is not None:
        if os.path.realpath(settings.plugin_socket) == os.path.realpath(settings.socket):
            raise BadInput("the hook and the plugin cannot share a socket", where=settings.socket)
        wanted.append((settings.plugin_socket, plugin))
    servers: list[tuple[_Socket, Server]] = []
    ready = False
    try:
        for path, served in wanted:
            bound = _Socket(path)
            servers.append((bound, Server(bound.listener, served)))
        for bound, server in servers:
            threading.Thread(target=server.serve, daemon=True).start()
            bound.publish()
        ready = True
        for bound, _ in servers:
            settings.log.write("info", "ready", {"socket": bound.path})
        wake.recv(1)
        return 0
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it is ending already, and says so by its exit status
        for bound, _ in servers:
            bound.withdraw()
        deadline = time.monotonic() + END_SECONDS
        patience = threading.Timer(END_SECONDS / 2, calls.give_up_on_the_host)
        patience.daemon = True
        patience.start()
        for _, server in servers:
            server.stop(max(0.0, deadline - time.monotonic()))
        if ready:
            settings.log.write("info", "ended", {})
        settings.log.flush(LOG_SECONDS)


def _end_on_signals(waker: socket.socket) -> None:
    """SIGTERM and SIGINT wake the main thread, whichever thread the kernel hands them to."""
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def _wake(waker: socket.socket) -> None:
    with contextlib.suppress(OSError):
        waker.send(b"\0")


def new_socket_name(container: str | None, folder: str = SOCKET_FOLDER) -> str:
    """A path in the hook folder that no other container of the pod takes: KubeVirt tells sockets apart by name.

    A container that starts again takes its old name again, so that no dead socket is left behind.
    """
    kept = "".join(c for c in container or "" if c.isalnum() or c in "-_.")[:63]  # as long as a container's name can be
    return os.path.join(folder, f"{NAME}-{kept or os.urandom(4).hex()}.sock")


# --- the socket ------------------------------------------------------------------------------------------------


class _Socket:
    """A listening unix socket that stands under its name from :meth:`publish` to :meth:`withdraw`.

    It is bound in a folder of its own beside that name and moved when it listens: virt-launcher dials whatever it
    finds, so the name must not be there earlier, nor the socket under any other name. The folder is locked while it is
    there: what is in one that nobody has locked was left behind by a process that was killed.
    """

    def __init__(self, path: str):
        self.path = path
        self._inode: int | None = None
        self._folder = os.path.join(os.path.dirname(path) or ".", f".{os.path.basename(path)}.new")
        self._lock: int | None = None
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise BadInput(f"cannot listen: the path is too long, {_LONGEST_PATH} bytes are the most", where=path)
        _refuse_if_served(path)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listen()
        except OSError as error:
            self.withdraw()
            raise BadInput(f"cannot listen: {error.strerror or error}", where=path) from None

    def _listen(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._folder, 0o700)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise BadInput("another process is about to serve this socket", where=self.path) from None
        self._lock = folder
        with contextlib.suppress(FileNotFoundError):
            os.unlink("s", dir_fd=folder)
        old = os.umask(0o177)
        try:
            inside = f"/proc/self/fd/{folder}/s"  # short, however long the folder's name is
            self.listener.bind(inside)
            self._inode = os.stat(inside).st_ino
            if os.geteuid() == 0:
                with contextlib.suppress(OSError):  # without CAP_CHOWN root keeps it, and virt-launcher is root too
                    os.chown(inside, QEMU_USER, QEMU_USER)
            self.listener.listen(_BACKLOG)
        finally:
            os.umask(old)

    def publish(self) -> None:
        """Give the socket its name, in one step, in place of a stale one."""
        try:
            os.rename(os.path.join(self._folder, "s"), self.path)
        except OSError as error:
            raise BadInput(f"cannot listen: {error.strerror or error}", where=self.path) from None
        self._tidy()

    def withdraw(self) -> None:
        """Take the name away, unless another process has taken it over."""
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        self._tidy()

    def _tidy(self) -> None:
        """Take the folder away with what is in it, if it is ours."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):
            os.unlink("s", dir_fd=self._lock)
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)
        os.close(self._lock)
        self._lock = None


def _refuse_if_served(path: str) -> None:
    """Raise BadInput when the name is taken by something other than a socket that nobody listens on."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadInput(f"cannot listen: {error.strerror or error}", where=path) from None
    if not stat.S_ISSOCK(mode):
        raise BadInput("cannot listen: there is something else than a socket", where=path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except OSError as error:
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                return
            raise BadInput(f"cannot listen: {error.strerror or error}", where=path) from None
    raise BadInput("another process serves this socket", where=path, hint="give another --socket, or end that process")


# --- the calls -------------------------------------------------------------------------------------------------


class _Calls:
    """Answers domains; loads what that needs once, beside the serving of Info."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._lock = threading.Lock()
        self._answer: Callable[[bytes, bytes], Answer] | None = None
        self._host: Bounded | None = None

    def give_up_on_the_host(self) -> None:
        """Answer the calls that wait for a host which hangs, as if it could not be read."""
        if self._host is not None:
            self._host.give_up()

    def load(self) -> None:
        """Import the pipeline and what reads the host; does it once, also when calls come first."""
        with self._lock:
            if self._answer is None:
                from pcinuma.hook_calls import answer
                from pcinuma.host_wait import Bounded

                settings, host = self._settings, Bounded(self._settings.host())
                self._host = host
                gc.collect()
                gc.freeze()  # what is loaded stays: no later collection needs to look at it
                self._answer = lambda domain, vmi: answer(domain, vmi, settings.defaults, host)

    @property
    def loaded(self) -> bool:
        return self._answer is not None

    def load_quietly(self) -> None:
        """Load ahead of the first call; what goes wrong is told when that comes."""
        with contextlib.suppress(PcinumaError):
            self.load()

    def define(self, domain: bytes, vmi: bytes, event: str) -> bytes:
        """The domain to use. Raises RpcError with the contract's codes; logs one line either way."""
        started = time.monotonic()
        self._settings.log.whole("given", domain)
        try:
            self.load()
        except PcinumaError as error:
            self._settings.log.write("error", event, {"error": str(error)})
            raise RpcError(FAILED_PRECONDITION, f"pcinuma: error: {error}") from None
        assert self._answer is not None
        answer = self._answer(domain, vmi)
        spent = round((time.monotonic() - started) * 1000, 1)
        self._settings.log.write(answer.level, event, {**answer.record, "milliseconds": spent})
        if answer.xml is None:
            assert answer.error is not None
            raise RpcError(_code(answer.error), str(answer.record["error"]))
        self._settings.log.whole("answered", answer.xml)
        return answer.xml


def _code(error: PcinumaError) -> int:
    """The gRPC status of an error (the contract, Hook)."""
    if isinstance(error, (PolicyNotMet, HostUnreadable)):
        return FAILED_PRECONDITION
    return INVALID_ARGUMENT if isinstance(error, BadInput) else INTERNAL


def _handlers(settings: Settings, calls: _Calls, end: Callable[[], None]) -> dict[str, Handler]:
    """Every method by its path. The protocol's modules are loaded with the first call of their version."""
    from importlib import import_module

    def module(name: str) -> Any:
        return import_module(f"pcinuma.protocol.{name}_pb2")

    def info(request: bytes) -> bytes:
        messages = module("info")
        _parsed(messages.InfoParams, request)
        points = [messages.HookPoint(name=point, priority=0) for point in ("OnDefineDomain", "Shutdown")]
        result = messages.InfoResult(name=NAME, hookPoints=points, versions=settings.versions)
        if not calls.loaded:
            _later(calls.load_quietly)
        answer: bytes = result.SerializeToString()
        return answer

    def on_define_domain(version: str) -> Handler:
        def call(request: bytes) -> bytes:
            messages = module(version)
            params = _parsed(messages.OnDefineDomainParams, request)
            xml = calls.define(params.domainXML, params.vmi, "OnDefineDomain")
            answer: bytes = messages.OnDefineDomainResult(domainXML=xml).SerializeToString()
            return answer

        return call

    def pre_cloud_init_iso(version: str) -> Handler:
        def call(request: bytes) -> bytes:
            messages = module(version)
            params = _parsed(messages.PreCloudInitIsoParams, request)
            answer: bytes = messages.PreCloudInitIsoResult(
                cloudInitNoCloudSource=params.cloudInitNoCloudSource, cloudInitData=params.cloudInitData
            ).SerializeToString()
            return answer

        return call

    def shutdown(request: bytes) -> bytes:
        messages = module("v1alpha3")
        _parsed(messages.ShutdownParams, request)
        settings.log.write("info", "Shutdown", {})
        _later(end)
        answer: bytes = messages.ShutdownResult().SerializeToString()
        return answer

    def mutate_domain(request: bytes) -> bytes:
        messages = module("plugins_v1alpha1")
        params = _parsed(messages.MutateDomainRequest, request)
        if params.domain_type != "libvirt":
            raise RpcError(
                INVALID_ARGUMENT, f"pcinuma: error: domain type '{one_line(params.domain_type, 80)}' is not libvirt"
            )
        context = params.sidecar_context.invocation_context
        xml = calls.define(params.domain, params.vmi, f"MutateDomain {one_line(context, 40)}".rstrip())
        answer: bytes = messages.MutateDomainResponse(domain=xml).SerializeToString()
        return answer

    handlers: dict[str, Handler] = {"/kubevirt.hooks.info.Info/Info": info}
    for version in VERSIONS:
        handlers[f"/kubevirt.hooks.{version}.Callbacks/OnDefineDomain"] = on_define_domain(version)
    for version in VERSIONS[1:]:
        handlers[f"/kubevirt.hooks.{version}.Callbacks/PreCloudInitIso"] = pre_cloud_init_iso(version)
    handlers["/kubevirt.hooks.v1alpha3.Callbacks/Shutdown"] = shutdown
    handlers["/kubevirt.hooks.plugins.v1alpha1.DomainHookService/MutateDomain"] = mutate_domain
    return handlers


def _later(do: Callable[[], None]) -> None:
    """Do it when the answer to the call in hand is on its way."""
    timer = threading.Timer(0.03, do)
    timer.daemon = True
    timer.start()


def _parsed(message: Any, data: bytes) -> Any:
    try:
        return message.FromString(data)
    except Exception as error:  # noqa: BLE001 - protobuf's DecodeError, without importing its module for the name
        raise RpcError(INVALID_ARGUMENT, f"pcinuma: error: not a {message.DESCRIPTOR.name}: {error}") from None
