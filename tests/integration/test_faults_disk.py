"""No room: a real file system (tmpfs) that is full, under everything that pcinuma writes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support import sidecar
from tests.support.domains import domain, hostdev
from tests.support.sidecar import EXECUTABLE, PROGRAM, Client
from tests.support.webhook import Authority, Webhook, review_of, vmi

EXAMPLE = ROOT / "examples" / "two-sockets"
DOMAIN, HOST = EXAMPLE / "domain.xml", EXAMPLE / "host.json"
GIVEN = (DOMAIN, "--host", HOST)
OLD = b"what was there before\n"
PAGE = os.sysconf("SC_PAGE_SIZE")
NO_ROOM = "No space left on device"
UNPLACED = domain({0: 0}, [hostdev("0000:ff:00.0", "ua-gpu-none")])
"""What a warning is about."""


class Disk:
    """A small file system."""

    def __init__(self, path: Path):
        self.path = path
        self._filler = path / "filler"
        self._names = path / "names"

    def fill(self, pages: int = 0) -> None:
        """Leave room for so many pages."""
        with self._filler.open("ab", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(PAGE))
            if pages:
                file.truncate(file.tell() - pages * PAGE)
        free = os.statvfs(self.path)
        assert free.f_bavail * free.f_frsize == pages * PAGE

    def fill_names(self, left: int = 0) -> None:
        """Leave room for so many files."""
        self._names.mkdir()
        for number in range(10_000):
            try:
                (self._names / str(number)).touch()
            except OSError as error:
                assert error.errno == errno.ENOSPC
                break
        for number in range(left):
            (self._names / str(number)).unlink()

    def empty(self) -> None:
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("needs root: the test mounts a file system")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=40", "tmpfs", str(place)], check=True)
    try:
        yield Disk(place)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def run(*command: object, **given: object) -> subprocess.CompletedProcess[str]:
    arguments = list(map(str, command))
    return subprocess.run(arguments, text=True, timeout=30, check=False, **{"capture_output": True, **given})  # type: ignore[call-overload,no-any-return]


WRITING = {
    "transform -o": ("transform", *GIVEN, "-o", "{}"),
    "transform --report": ("transform", *GIVEN, "--report", "{}", "-o", "/dev/null"),
    "transform --report, refused": ("transform", *GIVEN, "--policy", "single-numa-node", "--report", "{}"),
    "explain --svg": ("explain", *GIVEN, "--svg", "{}", "-o", "/dev/null"),
    "explain -o": ("explain", *GIVEN, "--json", "-o", "{}"),
    "check -o": ("check", *GIVEN, "--json", "-o", "{}"),
    "nccl-topo -o": ("nccl-topo", *GIVEN, "-q", "-o", "{}"),
    "doctor -o": ("doctor", "--host", HOST, "-o", "{}"),
    "snapshot -o": ("snapshot", "-o", "{}"),
}


@pytest.mark.parametrize("room", ["none", "a page", "no name"])
@pytest.mark.parametrize("what", WRITING)
def test_a_full_disk_keeps_the_old_file(disk: Disk, what: str, room: str) -> None:
    """Without a byte of room, with some for the beginning, and with room but none for a further file."""
    target = disk.path / "out"
    target.write_bytes(OLD)
    if room == "no name":
        disk.fill_names()
    else:
        disk.fill(1 if room == "a page" else 0)
    there = sorted(os.listdir(disk.path))
    done = run(PROGRAM, *(str(part).format(target) for part in WRITING[what]))
    if room == "a page" and done.returncode != 2:
        assert target.read_bytes() != OLD
        assert target.stat().st_size <= PAGE, "small enough"
    else:
        assert done.returncode == 2
        assert done.stderr == f"pcinuma: error: cannot be written: {NO_ROOM} ({target})\n"
        assert target.read_bytes() == OLD
    assert done.stdout == ""
    assert sorted(os.listdir(disk.path)) == there


def test_standard_output_on_a_full_disk(disk: Disk, tmp_path: Path) -> None:
    disk.fill()
    with (disk.path / "out").open("wb") as full:
        done = run(PROGRAM, "transform", *GIVEN, "--report", tmp_path / "report", capture_output=False, stdout=full, stderr=subprocess.PIPE)  # fmt: skip
    assert (done.returncode, done.stderr) == (2, f"pcinuma: error: cannot be written: {NO_ROOM} (standard output)\n")
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("where", ["full", "gone"])
def test_messages_that_cannot_be_written_cost_nothing_else(disk: Disk, tmp_path: Path, where: str) -> None:
    """Standard error on a full disk, or a pipe whose reader has gone: same result, same status."""
    disk.fill()
    (tmp_path / "domain.xml").write_text(UNPLACED)
    warned = ("transform", tmp_path / "domain.xml", "--host", HOST)
    assert "warning" in run(PROGRAM, *warned).stderr
    called = ("--vmi", sidecar.vmi().decode(), "--domain", DOMAIN.read_text(), "--host", HOST)
    with contextlib.ExitStack() as stack:
        if where == "full":
            error = stack.enter_context((disk.path / "err").open("wb"))
        else:
            reading, writing = os.pipe()
            os.close(reading)
            error = stack.enter_context(open(writing, "wb"))
        for command, status in (
            ((PROGRAM, *warned), 0),
            ((PROGRAM, "transform", tmp_path / "none"), 2),
            ((PROGRAM, "transform", *GIVEN, "--policy", "single-numa-node"), 1),
            ((EXECUTABLE, *called), 0),
        ):
            heard = run(*command)
            deaf = run(*command, capture_output=False, stdout=subprocess.PIPE, stderr=error)
            assert (deaf.returncode, deaf.stdout) == (status, heard.stdout), command
            assert heard.returncode == status
            assert bool(heard.stdout) == (status == 0)


@pytest.mark.parametrize("names", [0, 1])
def test_a_socket_without_room(disk: Disk, names: int) -> None:
    """None for its folder, and one for the folder and none for the socket."""
    disk.fill_names(names)
    there = sorted(os.listdir(disk.path))
    path = disk.path / "hook.sock"
    done = run(PROGRAM, "hook", "--socket", path, "--host", HOST)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"pcinuma: error: cannot listen: {NO_ROOM} ({path})\n"
    assert sorted(os.listdir(disk.path)) == there


def test_a_socket_with_just_enough_room(disk: Disk) -> None:
    disk.fill()
    disk.fill_names(2)
    with sidecar.running("--host", HOST, path=disk.path / "hook.sock") as hook, Client(hook.socket) as client:
        assert b"ua-pcinuma-cell0" in client.define(DOMAIN.read_bytes(), sidecar.vmi())
        assert hook.end()[0] == 0
        assert not hook.socket.exists()


def test_a_sidecars_log_on_a_full_disk(disk: Disk) -> None:
    """Calls are answered; when there is room again, the log goes on, and a line that was cut spoils no other."""
    with (
        (disk.path / "log").open("ab") as log,
        sidecar.running("--host", HOST, stderr=log) as hook,
        Client(hook.socket) as client,
    ):
        right = client.define(DOMAIN.read_bytes(), sidecar.vmi(name="before"))
        disk.fill()
        for number in range(20):  # the last page of the log has some room: one of these is cut
            assert client.define(DOMAIN.read_bytes(), sidecar.vmi(name=f"during-{number}")) == right
        disk.empty()
        for number in range(3):
            assert client.define(DOMAIN.read_bytes(), sidecar.vmi(name=f"after-{number}")) == right
        assert hook.end()[0] == 0
    lines = (disk.path / "log").read_text().splitlines()
    whole, cut = [], []
    for line in lines:
        try:
            whole.append(json.loads(line))
        except ValueError:
            cut.append(line)
    assert len(cut) == 1
    assert cut[0].startswith('{"time": ')
    names = [record["name"] for record in whole if record["event"] == "OnDefineDomain"]
    assert names[0] == "before"
    assert names[-3:] == ["after-0", "after-1", "after-2"]
    assert whole[-1]["event"] == "ended"


def test_a_webhooks_log_on_a_full_disk(disk: Disk, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.mount(*authority.pair())
    flags = (
        "--listen",
        "127.0.0.1:0",
        "--tls-cert",
        authority.cert,
        "--tls-key",
        authority.key,
        "--image",
        "a.example/b:1",
    )
    log = disk.path / "log"
    with log.open("ab") as file:
        process = subprocess.Popen([str(part) for part in (PROGRAM, "webhook", *flags)], stderr=file)
    try:
        webhook = Webhook(process, log, authority)
        disk.fill()
        for _ in range(40):
            answer = webhook.mutate(review_of(vmi({"pcinuma.vm.kubevirt.io/enabled": "true"})))
            assert answer["allowed"] is True
        disk.empty()
        assert webhook.end() == 0
    finally:
        process.kill()
        process.wait()
    assert json.loads(log.read_text().splitlines()[-1])["event"] == "ended"
