"""The sidecar's life as virt-launcher, kubelet and a second container see it: its sockets, its signals, its end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from pcinuma.hook_server import new_socket_name
from tests.conftest import ROOT
from tests.support import domains, sidecar
from tests.support.domains import domain, hostdev
from tests.support.sidecar import Client, Sidecar, enveloped, vmi

EXAMPLE = ROOT / "examples" / "two-sockets"
DOMAIN = (EXAMPLE / "domain.xml").read_bytes()
HOST = ("--host", EXAMPLE / "host.json")
QEMU = 107
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

SLOW, QUICK = "0000:41:00.0", "0000:42:00.0"
SLOW_DOMAIN = domain({0: 0}, [hostdev(SLOW, "ua-gpu-slow")])
QUICK_DOMAIN = domain({0: 0}, [hostdev(QUICK, "ua-gpu-quick")])


@pytest.fixture
def place() -> Iterator[Path]:
    with sidecar.folder() as made:
        yield made


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A host where to ask for the node of one function hangs until somebody writes it."""
    return sidecar.sysfs(tmp_path / "sys", {0: "0-7"}, {SLOW: None, QUICK: 0})


def answers(path: Path) -> bool:
    with Client(path) as client:
        return bool(client.info(timeout=5).name == "pcinuma")


def gone(path: Path, seconds: float = 1.0) -> bool:
    deadline = time.monotonic() + seconds
    while os.path.lexists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


# --- how the socket comes --------------------------------------------------------------------------------------

# virt-launcher's part, without its pauses and as its user: whatever name comes up in the folder it dials at once and
# asks for Info. A folder in there holds nothing to dial.
WATCHER = """
import json, os, socket, sys, time
folder, last, user = sys.argv[1:]
def made(path):
    status = os.lstat(path)
    return status.st_ino, status.st_mtime_ns
request = bytes.fromhex(sys.stdin.read())
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(int(user)); os.setuid(int(user))
seen = {}
known = {made(os.path.join(folder, name)) for name in os.listdir(folder)}  # a dead socket that lies there
deadline = time.monotonic() + 20
print("watching", flush=True)
while last not in seen and time.monotonic() < deadline:
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try:
            new = made(path)
        except FileNotFoundError:
            continue
        if new in known or os.path.isdir(path):
            continue
        known.add(new)
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(1)  # virt-launcher's time for Info
        try:
            peer.connect(path)
            peer.sendall(request)
            got = b""
            while b"pcinuma" not in got:
                data = peer.recv(65536)
                if not data:
                    raise EOFError(repr(got))
                got += data
            seen[name] = "answered"
        except Exception as error:
            seen[name] = f"{type(error).__name__}: {error}"
print(json.dumps(seen), flush=True)
"""

# 200 millicores are 20 of every 100 milliseconds: the process may be stopped for the other 80 between any two of these.
THROTTLED = """
import os, socket, time
def throttled(call):
    def slow(*arguments, **named):
        time.sleep(0.08)
        result = call(*arguments, **named)
        time.sleep(0.08)
        return result
    return slow
for name in ("bind", "listen"):
    setattr(socket.socket, name, throttled(getattr(socket.socket, name)))
for name in ("rename", "replace", "link", "chown", "chmod", "unlink"):
    setattr(os, name, throttled(getattr(os, name)))
"""


def info_request() -> str:
    """The bytes of a client that connects and asks for Info."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs, sidecar.Raw(ours) as client:
        client.send(client.begin("/kubevirt.hooks.info.Info/Info"), enveloped(b""))
        return theirs.recv(65536).hex()


@contextlib.contextmanager
def watched(folder: Path, last: str) -> Iterator[Callable[[], dict[str, str]]]:
    """What tells, once ``last`` has come up in the folder, every name that did, with what came of dialling it."""
    command = [sys.executable, "-c", WATCHER, str(folder), last, str(QEMU)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        watcher.stdin.write(info_request())
        watcher.stdin.close()
        assert watcher.stdout.readline() == "watching\n"
        said = watcher.stdout

        def outcome() -> dict[str, str]:
            found: dict[str, str] = json.loads(said.readline())
            return found

        yield outcome


@pytest.mark.parametrize("stale", [False, True], ids=["first", "again"])
def test_the_socket_appears_when_calls_are_answered_and_no_other_does(place: Path, tmp_path: Path, stale: bool) -> None:
    """virt-launcher would take any name that answers for the sidecar's, and call the hook under that name later."""
    (tmp_path / "sitecustomize.py").write_text(THROTTLED)
    name = "hook.sock"
    if stale:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(place / name))
    slowly = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    with watched(place, name) as seen, sidecar.running(*HOST, at=place, wait=False, environment=slowly) as hook:
        dial_until_it_is_taken(hook)
        assert seen() == {name: "answered"}


def pass_until(path: Path) -> None:
    deadline = time.monotonic() + sidecar.READY_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.2)  # time for the watcher's call


def test_nothing_else_is_in_the_folder(place: Path) -> None:
    with sidecar.running(*HOST, at=place, plugin=True) as hook, Client(hook.socket) as client:
        client.define(DOMAIN, vmi())
        assert sorted(path.name for path in place.rglob("*")) == ["hook.sock", "plugin", "plugin.sock"]
        assert hook.end()[0] == 0
    assert sorted(path.name for path in place.rglob("*")) == ["plugin"]


def test_info_does_not_wait_for_what_a_call_needs(place: Path) -> None:
    with sidecar.running(*HOST, at=place) as hook, Client(hook.socket) as client:
        call = client.begin_define(DOMAIN, vmi())
        client.info(timeout=1)
        assert b"ua-pcinuma-cell0" in call.result().domainXML


# --- who may dial ----------------------------------------------------------------------------------------------

DIALLER = """
import os, socket, sys
user = int(sys.argv[2])
os.setgroups([]); os.setgid(user); os.setuid(user)
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except OSError as error:
    sys.exit(error.strerror)
"""


@AS_ROOT
def test_the_other_container_may_dial_and_nobody_else(place: Path) -> None:
    with sidecar.running(*HOST, at=place, plugin=True) as hook:
        assert hook.plugin_socket is not None
        for path in (hook.socket, hook.plugin_socket):
            status = path.stat()
            assert stat.S_IMODE(status.st_mode) == 0o600
            assert (status.st_uid, status.st_gid) == (QEMU, QEMU)
            said = {
                user: subprocess.run(
                    [sys.executable, "-c", DIALLER, str(path), str(user)], capture_output=True, text=True, check=False
                ).stderr.strip()
                for user in (QEMU, 0, 1000, 65534)
            }
            assert said == {QEMU: "", 0: "", 1000: "Permission denied", 65534: "Permission denied"}


@AS_ROOT
def test_a_generous_umask_changes_nothing(place: Path) -> None:
    with sidecar.running(*HOST, at=place, umask=0) as hook:
        assert stat.S_IMODE(hook.socket.stat().st_mode) == 0o600


# --- names -----------------------------------------------------------------------------------------------------


def test_names_differ_by_container() -> None:
    names = [new_socket_name(container) for container in ("hook-sidecar-0", "hook-sidecar-1", "a", "A", "a.b", "ab")]
    assert len(set(names)) == len(names)
    for name in names:
        assert os.path.dirname(name) == "/var/run/kubevirt-hooks"


def test_names_differ_for_containers_of_the_longest_names() -> None:
    """A container's name is a DNS label, 63 characters at most."""
    stem = "x" * 62
    one, other = new_socket_name(stem + "a"), new_socket_name(stem + "b")
    assert one != other
    assert len(one) <= 107  # sockaddr_un


def test_names_differ_without_a_container() -> None:
    names = {new_socket_name(None) for _ in range(100)} | {new_socket_name("") for _ in range(100)}
    assert len(names) == 200


@pytest.mark.parametrize("container", ["../../etc/x", "a/b", "/", "..", ".", "a\nb", "a\0b"])
def test_a_name_stays_in_the_folder(container: str) -> None:
    name = new_socket_name(container)
    assert os.path.dirname(os.path.normpath(name)) == "/var/run/kubevirt-hooks"
    assert name.isprintable()
    assert len(os.fsencode(name)) <= 107


@AS_ROOT
def test_two_containers_of_one_pod() -> None:
    """Before KubeVirt 1.6 they share the folder. It is a file system of its own here, as it is in a pod."""
    begin = "mount -t tmpfs none /run && mkdir /run/kubevirt-hooks && echo $$ && "
    both = 'for name in one two; do CONTAINER_NAME=$name "$0" "$@" & done; wait'
    pod = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", begin + both, str(sidecar.PROGRAM), "hook", *map(str, HOST)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert pod.stdout is not None
        inside = Path("/proc") / pod.stdout.readline().strip() / "root" / "run" / "kubevirt-hooks"
        deadline = time.monotonic() + sidecar.READY_SECONDS
        while len(names := [name for name in os.listdir(inside) if not name.startswith(".")]) < 2:
            assert time.monotonic() < deadline, names
            time.sleep(0.01)
        assert len({name for name in names if "one" in name}) == 1
        assert len({name for name in names if "two" in name}) == 1
        assert all(answers(inside / name) for name in names)
    finally:
        os.killpg(pod.pid, signal.SIGKILL)
        pod.communicate()


# --- what stands in the way ------------------------------------------------------------------------------------


def refusal(path: Path | str, *arguments: str | Path) -> str:
    """Standard error of a sidecar that must refuse to serve there: exit 2, one line and perhaps a hint."""
    ended = sidecar.run(sidecar.PROGRAM, "hook", "--socket", path, *HOST, *arguments)
    said = ended.stderr.decode()
    assert (ended.returncode, ended.stdout) == (2, b""), said
    lines = said.splitlines()
    assert lines[0].startswith("pcinuma: error: ")
    assert [line for line in lines[1:] if not line.startswith("hint: ")] == []
    return said


def test_a_stale_socket_is_replaced(place: Path) -> None:
    path = place / "hook.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with sidecar.running(*HOST, at=place, wait=False) as hook:
        dial_until_it_is_taken(hook)
        assert answers(path)
        assert os.listdir(place) == ["hook.sock"]
        assert hook.end()[0] == 0
    assert os.listdir(place) == []


def test_a_sidecar_that_was_killed_starts_again(place: Path) -> None:
    with sidecar.running(*HOST, at=place, plugin=True) as first:
        first.process.kill()
        first.process.wait()
        assert first.socket.exists()
        with sidecar.running(*HOST, at=place, plugin=True, wait=False) as second:
            dial_until_it_is_taken(second)
            assert answers(second.socket)
            assert sorted(path.name for path in place.rglob("*")) == ["hook.sock", "plugin", "plugin.sock"]
            assert second.end()[0] == 0
        assert [path for path in place.rglob("*") if not path.is_dir()] == []


def dial_until_it_is_taken(hook: Sidecar) -> None:
    """What virt-launcher does where a stale socket is."""
    deadline = time.monotonic() + sidecar.READY_SECONDS
    for path in (hook.socket, hook.plugin_socket):
        while path is not None:
            assert hook.process.poll() is None, hook.text()
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError):
                sidecar.connected(path).close()
                break
            time.sleep(0.005)


def test_a_second_instance_refuses_and_the_first_goes_on(place: Path) -> None:
    with sidecar.running(*HOST, at=place) as first:
        inode = first.socket.stat().st_ino
        assert str(first.socket) in refusal(first.socket)
        assert first.socket.stat().st_ino == inode
        with Client(first.socket) as client:
            assert b"ua-pcinuma-cell0" in client.define(DOMAIN, vmi())
        assert os.listdir(place) == ["hook.sock"]


def test_a_second_instance_refuses_while_a_call_hangs(place: Path, slow: Path) -> None:
    with sidecar.running("--sysfs", slow, at=place) as first, Client(first.socket) as client:
        call = client.begin_define(SLOW_DOMAIN, vmi())
        answering = sidecar.someone_reads(slow, SLOW)
        refusal(first.socket)
        os.close(answering)
        call.result()


def test_the_end_of_one_leaves_the_socket_of_another(place: Path) -> None:
    with sidecar.running(*HOST, at=place) as first:
        first.socket.unlink()
        with sidecar.running(*HOST, at=place) as second:
            assert first.end()[0] == 0
            assert answers(second.socket)


def test_a_regular_file_is_in_the_way(place: Path) -> None:
    path = place / "hook.sock"
    path.write_text("mine")
    assert str(path) in refusal(path)
    assert path.read_text() == "mine"
    assert os.listdir(place) == ["hook.sock"]


def test_a_link_is_in_the_way(place: Path) -> None:
    target = place / "target"
    target.write_text("mine")
    (place / "hook.sock").symlink_to(target)
    refusal(place / "hook.sock")
    assert target.read_text() == "mine"
    assert sorted(os.listdir(place)) == ["hook.sock", "target"]


def test_a_directory_is_in_the_way(place: Path) -> None:
    (place / "hook.sock").mkdir()
    assert str(place / "hook.sock") in refusal(place / "hook.sock")
    assert str(place) in refusal(place)
    assert os.listdir(place) == ["hook.sock"]


def test_the_folder_is_missing(place: Path) -> None:
    path = place / "none" / "hook.sock"
    assert str(path) in refusal(path)
    assert os.listdir(place) == []


@pytest.mark.parametrize("path", ["/sys/pcinuma.sock", "/proc/pcinuma.sock", "/dev/null/pcinuma.sock"])
def test_the_folder_cannot_be_written(path: str) -> None:
    assert path in refusal(path)


@pytest.mark.parametrize(("folder", "name"), [(100, 10), (10, 100), (0, 107), (60, 60)])
def test_the_path_is_too_long(place: Path, folder: int, name: int) -> None:
    """A unix socket's path has 107 bytes at most, whichever part of it is the long one."""
    within = place / ("f" * folder) if folder else place
    within.mkdir(exist_ok=True)
    path = within / ("n" * name)
    assert len(str(path)) > 107
    assert "long" in refusal(path)
    assert os.listdir(within) == []


@pytest.mark.parametrize("name", [1, 30, 70])
def test_the_longest_path_there_can_be(place: Path, name: int) -> None:
    within = place / ("f" * (107 - len(str(place)) - name - 2))
    within.mkdir()
    path = within / ("n" * name)
    assert len(str(path)) == 107
    with sidecar.running(*HOST, at=place, path=path) as hook:
        assert answers(hook.socket)
        assert os.listdir(within) == ["n" * name]


def test_one_path_for_both_sockets(place: Path) -> None:
    path = place / "hook.sock"
    assert str(path) in refusal(path, "--plugin-socket", path)
    assert os.listdir(place) == []


def test_a_plugin_socket_that_cannot_be_takes_the_hook_socket_with_it(place: Path) -> None:
    (place / "plugin.sock").write_text("mine")
    assert "plugin.sock" in refusal(place / "hook.sock", "--plugin-socket", place / "plugin.sock")
    assert os.listdir(place) == ["plugin.sock"]


def test_a_relative_path(place: Path) -> None:
    with sidecar.running(*HOST, at=place, path=Path("hook.sock"), cwd=place, wait=False):
        pass_until(place / "hook.sock")
        assert answers(place / "hook.sock")


# --- how it ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(place: Path, number: signal.Signals) -> None:
    with sidecar.running(*HOST, at=place, plugin=True) as hook, Client(hook.socket) as client:
        client.define(DOMAIN, vmi())
        status, seconds = hook.end(number)
        assert status == 0
        assert seconds < 1
        assert [path for path in place.rglob("*") if not path.is_dir()] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_right_after_the_start_ends_it(place: Path, number: signal.Signals) -> None:
    """What a call needs is still being loaded then."""
    with sidecar.running(*HOST, at=place) as hook:
        status, seconds = hook.end(number)
        assert status == 0
        assert seconds < 1
        assert os.listdir(place) == []


def test_shutdown_ends_it(place: Path) -> None:
    with sidecar.running(*HOST, at=place, plugin=True) as hook, Client(hook.socket) as client:
        client.define(DOMAIN, vmi())
        started = time.monotonic()
        client.call("/kubevirt.hooks.v1alpha3.Callbacks/Shutdown")
        assert hook.process.wait(timeout=5) == 0
        assert time.monotonic() - started < 1
        assert [path for path in place.rglob("*") if not path.is_dir()] == []


def test_signals_upon_signals(place: Path) -> None:
    """virt-launcher's Shutdown and kubelet's SIGTERM meet: it is still a clean end."""
    for _ in range(3):
        with sidecar.running(*HOST, at=place) as hook, Client(hook.socket) as client:
            client.call("/kubevirt.hooks.v1alpha3.Callbacks/Shutdown")
            deadline = time.monotonic() + 5
            while hook.process.poll() is None:
                assert time.monotonic() < deadline
                with contextlib.suppress(ProcessLookupError):
                    hook.process.send_signal(signal.SIGTERM)
                time.sleep(0.0005)
            assert hook.process.returncode == 0
            assert os.listdir(place) == []


def test_a_signal_that_another_thread_gets(place: Path) -> None:
    """The kernel gives a process's signal to any thread that does not block it: to one that is just making a thread
    for a call, for example. A main thread that sleeps then must not sleep on."""
    with sidecar.running(*HOST, at=place) as hook, Client(hook.socket) as client:
        client.define(DOMAIN, vmi())
        process = hook.process.pid
        for task in map(int, os.listdir(f"/proc/{process}/task")):
            blocked = Path(f"/proc/{process}/task/{task}/status").read_text().partition("SigBlk:")[2].split()[0]
            if task != process and not int(blocked, 16) >> (signal.SIGTERM - 1) & 1:
                tgkill(process, task, signal.SIGTERM)
                break
        else:
            hook.process.send_signal(signal.SIGTERM)  # only the main thread can get it
        assert hook.process.wait(timeout=3) == 0
        assert os.listdir(place) == []


def tgkill(process: int, thread: int, number: int) -> None:
    """Send a signal to one thread (tgkill(2), which Python has no function for)."""
    system_call = {"x86_64": 234, "aarch64": 131}[os.uname().machine]
    assert ctypes.CDLL(None, use_errno=True).syscall(system_call, process, thread, number) == 0


@pytest.mark.parametrize("how", ["SIGTERM", "Shutdown"])
def test_calls_in_flight_are_finished(place: Path, slow: Path, how: str) -> None:
    with (
        sidecar.running("--sysfs", slow, at=place) as hook,
        Client(hook.socket) as client,
        Client(hook.socket) as other,
    ):
        call = client.begin_define(SLOW_DOMAIN, vmi())
        answering = sidecar.someone_reads(slow, SLOW)
        started = time.monotonic()
        if how == "SIGTERM":
            hook.process.send_signal(signal.SIGTERM)
        else:
            other.call("/kubevirt.hooks.v1alpha3.Callbacks/Shutdown")
        assert gone(hook.socket)  # no new caller finds it
        time.sleep(0.2)
        assert hook.process.poll() is None
        os.write(answering, b"0\n")
        os.close(answering)
        assert domains.layout(call.result().domainXML)[1] == {"ua-gpu-slow": (2, 0, 0)}
        assert hook.process.wait(timeout=5) == 0
        assert time.monotonic() - started < 1


def test_a_call_that_hangs_holds_up_nobody_else(place: Path, slow: Path) -> None:
    with sidecar.running("--sysfs", slow, at=place) as hook, Client(hook.socket) as client:
        hanging = [client.begin_define(SLOW_DOMAIN, vmi()) for _ in range(10)]
        answering = sidecar.someone_reads(slow, SLOW)
        try:
            for one in (client, Client(hook.socket)):  # the same connection, and another
                one.info(timeout=1)
                assert domains.layout(one.define(QUICK_DOMAIN, vmi(), timeout=1))[1] == {"ua-gpu-quick": (2, 0, 0)}
            assert not any(call.done() for call in hanging)
            started = time.monotonic()
            hook.process.send_signal(signal.SIGTERM)
            assert gone(hook.socket)
            assert hook.process.wait(timeout=5) == 0
            assert time.monotonic() - started < 1.3
        finally:
            os.close(answering)
        for call in hanging:  # at the end nobody waits for the host any more
            assert call.result().domainXML == SLOW_DOMAIN.encode()


@pytest.mark.parametrize("window", [65535, 2**31 - 1], ids=["no window", "full buffer"])
def test_a_client_that_does_not_read_its_answer_holds_up_no_end(place: Path, window: int) -> None:
    """It is virt-launcher that has died, or been stopped: its socket takes nothing any more."""
    request = sidecar.message("kubevirt.hooks.v1alpha3.PreCloudInitIsoParams", cloudInitData=b"x" * 3_000_000)
    with sidecar.running(*HOST, at=place) as hook, sidecar.Raw(hook.socket) as raw:
        stream = raw.begin("/kubevirt.hooks.v1alpha3.Callbacks/PreCloudInitIso")
        raw.send(stream, enveloped(request.SerializeToString()))
        if window > 65535:
            raw.h2.update_settings({4: window})  # SETTINGS_INITIAL_WINDOW_SIZE
            raw.h2.increment_flow_control_window(window - 65535)
            raw.flush()
        time.sleep(0.3)
        assert answers(hook.socket)
        started = time.monotonic()
        hook.process.send_signal(signal.SIGTERM)
        assert hook.process.wait(timeout=5) == 0
        assert time.monotonic() - started < 1.3


def test_connections_without_a_call_hold_up_no_end(place: Path) -> None:
    with sidecar.running(*HOST, at=place) as hook:
        idle = [sidecar.connected(hook.socket) for _ in range(20)]
        status, seconds = hook.end()
        assert status == 0
        assert seconds < 1
        for one in idle:
            one.close()


def test_a_log_that_nobody_reads_holds_up_neither_info_nor_the_end(place: Path) -> None:
    reading, writing = os.pipe()
    try:
        with sidecar.running(*HOST, at=place, stderr=writing) as hook, Client(hook.socket) as client:
            os.close(writing)
            for call in [client.begin_define(DOMAIN, vmi(), timeout=1) for _ in range(60)]:
                call.exception()  # more than a pipe holds
            client.info(timeout=1)
            started = time.monotonic()
            hook.process.send_signal(signal.SIGTERM)
            assert hook.process.wait(timeout=5) == 0
            assert time.monotonic() - started < 1.3
            assert os.listdir(place) == []
    finally:
        os.close(reading)


def test_a_log_that_is_gone(place: Path) -> None:
    reading, writing = os.pipe()
    with sidecar.running(*HOST, at=place, stderr=writing) as hook, Client(hook.socket) as client:
        os.close(writing)
        os.close(reading)
        assert b"ua-pcinuma-cell0" in client.define(DOMAIN, vmi())
        assert hook.end()[0] == 0


def test_standard_error_that_is_closed(place: Path) -> None:
    shell = subprocess.Popen(
        ["sh", "-c", 'exec "$0" "$@" 2>&-', str(sidecar.PROGRAM), "hook", "--socket", place / "hook.sock", *HOST]
    )
    try:
        deadline = time.monotonic() + sidecar.READY_SECONDS
        while not (place / "hook.sock").exists():
            assert shell.poll() is None, f"ended with {shell.returncode}"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with Client(place / "hook.sock") as client:
            assert b"ua-pcinuma-cell0" in client.define(DOMAIN, vmi())
        shell.terminate()
        assert shell.wait(timeout=5) == 0
    finally:
        shell.kill()
        shell.wait()


def test_a_busy_sidecar_ends(place: Path) -> None:
    """What it has begun is answered; what comes later is refused, and may be tried again elsewhere."""
    for pause in (0.0, 0.02, 0.05):
        with sidecar.running(*HOST, at=place) as hook, Client(hook.socket) as client:
            client.define(DOMAIN, vmi())
            calls = [client.begin_define(DOMAIN, vmi()) for _ in range(60)]
            time.sleep(pause)
            status, seconds = hook.end()
            assert status == 0
            assert seconds < 1.3
            codes = {call.code() if call.exception() else grpc.StatusCode.OK for call in calls}
            assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
            answered = sum(call.exception() is None for call in calls)
            assert len(hook.records("OnDefineDomain")) == answered + 1


def test_the_process_prints_nothing(place: Path) -> None:
    out = place / "out"
    with out.open("wb") as file, sidecar.running(*HOST, at=place, stdout=file) as hook, Client(hook.socket) as client:
        client.define(DOMAIN, vmi())
        hook.end()
    assert out.read_bytes() == b""


def test_no_handle_is_left_of_a_call(place: Path) -> None:
    with sidecar.running(*HOST, at=place) as hook:
        open_files = Path(f"/proc/{hook.process.pid}/fd")
        threads = Path(f"/proc/{hook.process.pid}/task")

        def counts() -> tuple[int, int]:
            return len(os.listdir(open_files)), len(os.listdir(threads))

        for _ in range(3):
            one_call(hook)
        before = settled(counts)
        for _ in range(40):
            one_call(hook)
        assert settled(counts) == before


def one_call(hook: Sidecar) -> None:
    with Client(hook.socket) as client:
        client.define(DOMAIN, vmi())


def settled(counts: object) -> tuple[int, int]:
    """The counts once they have not changed for a fifth of a second."""
    assert callable(counts)
    last, since = counts(), time.monotonic()
    while time.monotonic() - since < 0.2:
        time.sleep(0.01)
        if (now := counts()) != last:
            last, since = now, time.monotonic()
    return last  # type: ignore[no-any-return]
