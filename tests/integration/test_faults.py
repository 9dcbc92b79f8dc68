"""Faults of the machine: all files or none, no room, a clock that jumps, many starts and calls."""

from __future__ import annotations

import ast
import json
import os
import resource
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path

import hpack
import pytest

from tests.conftest import ROOT
from tests.support import sidecar
from tests.support.sidecar import PROGRAM, Client

EXAMPLE = ROOT / "examples" / "two-sockets"
DOMAIN, HOST = EXAMPLE / "domain.xml", EXAMPLE / "host.json"
COMMAND = ("transform", DOMAIN, "--host", HOST)
OLD = b"what was there before\n"


def transform(*flags: object, **given: object) -> subprocess.CompletedProcess[bytes]:
    command = list(map(str, (PROGRAM, *COMMAND, *flags)))
    return subprocess.run(command, capture_output=True, timeout=30, check=False, **given)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, bytes]:
    """What the two files hold when all goes well."""
    assert transform("-o", tmp_path / "whole", "--report", tmp_path / "whole-report").returncode == 0
    return {"out": (tmp_path / "whole").read_bytes(), "report": (tmp_path / "whole-report").read_bytes()}


@pytest.mark.parametrize("is_there", (True, False))
@pytest.mark.parametrize("flags", (("-o", "missing/out", "--report", "report"), ("-o", "out", "--report", "missing/r")))
def test_both_files_or_none(tmp_path: Path, flags: tuple[str, ...], is_there: bool) -> None:
    names = ("out", "report")
    for name in names if is_there else ():
        (tmp_path / name).write_bytes(OLD)
    done = transform(*flags, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(b"pcinuma: error: cannot be written: No such file or directory (missing/")
    assert sorted(path.name for path in tmp_path.iterdir()) == (list(names) if is_there else [])
    assert all((tmp_path / name).read_bytes() == OLD for name in names if is_there)


def test_no_report_without_its_result(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [PROGRAM, *COMMAND, "--report", tmp_path / "report"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_gone_leaves_the_report(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:
        done = subprocess.run(
            [PROGRAM, *COMMAND, "--report", tmp_path / "report"], stdout=pipe, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads((tmp_path / "report").read_bytes())["outcome"] == "changed"


def test_a_refusal_has_its_report(tmp_path: Path) -> None:
    done = transform("--policy", "single-numa-node", "-o", tmp_path / "out", "--report", tmp_path / "report")
    assert done.returncode == 1
    assert json.loads((tmp_path / "report").read_bytes())["outcome"] == "refused"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_room_for_one_file_alone(tmp_path: Path, whole: dict[str, bytes]) -> None:
    sizes = sorted(len(data) for data in whole.values())
    assert sizes[0] < sizes[1]
    flags = ("-o", tmp_path / "out", "--report", tmp_path / "report")
    limit = (sizes[0] + 1, sizes[0] + 1)
    done = transform(*flags, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert done.returncode == 2
    assert b"File too large" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole", "whole-report"]


def test_the_clock_may_jump() -> None:
    """No wait, limit or duration goes by the time of day, which only certificates and the log's stamps need."""
    allowed = {"webhook.py", "certificates.py", "log.py"}
    found = set()
    for source in (ROOT / "hook" / "pcinuma").glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "datetime.now", "time.gmtime"):
                found.add(source.name)
    assert found <= allowed
    assert "log.py" in found, "the search finds something"


def test_starts_in_a_row() -> None:
    """Twenty starts on one path, each ended by a kill, so that the next finds a stale socket; `make bench` has more."""
    with sidecar.folder() as place:
        for _ in range(20):
            with sidecar.running("--host", HOST, at=place) as hook:
                hook.await_records("ready", 1)
                with Client(hook.socket) as client:
                    assert client.info().name == "pcinuma"
                hook.process.kill()
                hook.process.wait()
            assert [path.name for path in place.iterdir()] == ["hook.sock"]


def test_calls_on_one_connection_leave_nothing_behind() -> None:
    """Requests that cost little, as each leaves a stream behind as any call does; `make bench` has whole calls."""
    names = {":method": "GET", ":scheme": "http", ":path": "/", ":authority": "a"}
    block = hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*pair) for pair in names.items()])
    with sidecar.running("--host", HOST) as hook, sidecar.Raw(hook.socket) as raw:
        stream = 1

        def requests(count: int) -> None:
            nonlocal stream
            for _ in range(0, count, 50):
                streams = range(stream, stream + 100, 2)
                head = len(block).to_bytes(3, "big") + b"\1\5"  # HEADERS, END_STREAM and END_HEADERS (RFC 9113, 6.2)
                raw.socket.sendall(b"".join(head + number.to_bytes(4, "big") + block for number in streams))
                stream = streams.stop
                answered(raw.socket, streams[-1])

        requests(2000)
        before = resident(hook)
        requests(20_000)
        assert resident(hook) - before < 2_000_000, "190 bytes for each would be 3.8 MB"


def answered(connection: socket.socket, last: int) -> None:
    """Reads frames until the answer on that stream has ended."""
    with connection.makefile("rb", buffering=0) as file:
        while True:
            head = exactly(file, 9)
            exactly(file, int.from_bytes(head[:3], "big"))
            if head[3] == 1 and head[4] & 1 and int.from_bytes(head[5:], "big") == last:
                return


def exactly(file: RawIOBase, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = file.read(count - len(data))
        assert more, "closed"
        data += more
    return data


def resident(hook: sidecar.Sidecar) -> int:
    """Bytes."""
    return int(Path(f"/proc/{hook.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_64_calls_at_once() -> None:
    xml = DOMAIN.read_bytes()
    with sidecar.running("--host", HOST) as hook, Client(hook.socket) as client:
        alone = client.define(xml, sidecar.vmi())
        with ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(lambda number: client.define(xml, sidecar.vmi(name=f"vm-{number}")), range(256)))
        assert answers == [alone] * 256
        names = [record["name"] for record in hook.await_records("OnDefineDomain", 257)[1:]]
        assert sorted(names) == sorted(f"vm-{number}" for number in range(256))
        assert len(os.listdir(f"/proc/{hook.process.pid}/task")) < 20, "threads of calls that have ended"
