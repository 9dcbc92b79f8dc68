"""Killed at every step, by the kernel (strace): before each system call that changes a file or a socket."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support import sidecar
from tests.support.sidecar import PROGRAM, Client

EXAMPLE = ROOT / "examples" / "two-sockets"
DOMAIN, HOST = EXAMPLE / "domain.xml", EXAMPLE / "host.json"
FILES = ("out", "report", "picture")
EXPLAIN = ("explain", DOMAIN, "--host", HOST, "-o", "out", "--report", "report", "--svg", "picture")
OLD = b"what was there before\n"
BARE = {"PYTHONDONTWRITEBYTECODE": "1"}  # the same calls in each run

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="no strace here (Debian: strace)")


def strace(trace: Path, calls: str, *, kill: tuple[str, int] | None = None) -> tuple[str, ...]:
    """A command before the command: it writes those system calls down, or kills at the n-th of a kind before it is made.

    The tracer is a grandchild, so that the process that is started is the one that is traced.
    """
    common = ("strace", "-D", "-f", "-qq", "-o", str(trace))
    if kill is None:
        return (*common, "--seccomp-bpf", "-e", f"trace={calls}")
    kind, number = kill
    return (*common, "-e", f"trace={kind}", "-e", f"inject={kind}:signal=KILL:when={number}")


def steps(trace: Path, first: str) -> list[tuple[str, int]]:
    """The calls of the main thread from the first line that holds ``first`` on: each with its number of its kind."""
    lines = trace.read_text().splitlines()
    process = lines[0].split()[0]
    seen: Counter[str] = Counter()
    found: list[tuple[str, int]] = []
    begun = False
    for line in lines:
        match = re.match(rf"{process} +([a-z0-9_]+)\(", line)
        if match is None:
            continue
        seen[match[1]] += 1
        begun = begun or first in line
        if begun:
            found.append((match[1], seen[match[1]]))
    return found


# --- files -----------------------------------------------------------------------------------------------------

WRITES = "openat,write,fsync,close,chown,chmod,rename,unlink,exit_group"


def explain(place: Path, *before: str) -> int:
    command = [*before, str(PROGRAM), *map(str, EXPLAIN)]
    done = subprocess.run(command, cwd=place, env={**os.environ, **BARE}, capture_output=True, timeout=60, check=False)
    assert done.stderr == b""
    return done.returncode


def folder_with_old_files(place: Path) -> Path:
    place.mkdir()
    for name in FILES:
        (place / name).write_bytes(OLD)
    return place


def test_killed_before_each_system_call_that_writes(tmp_path: Path) -> None:
    whole = folder_with_old_files(tmp_path / "whole")
    trace = tmp_path / "trace"
    assert explain(whole, *strace(trace, WRITES)) == 0
    new = {name: (whole / name).read_bytes() for name in FILES}
    assert OLD not in new.values()
    at = steps(trace, ".tmp")
    kinds = Counter(kind for kind, _ in at)
    assert (kinds["rename"], kinds["fsync"]) == (3, 3)

    def killed(number: int) -> list[bool]:
        """Which of the files are new after the kill."""
        place = folder_with_old_files(tmp_path / str(number))
        assert explain(place, *strace(tmp_path / f"trace-{number}", WRITES, kill=at[number])) == -9
        found = {name: (place / name).read_bytes() for name in FILES}
        assert all(found[name] in (OLD, new[name]) for name in FILES), (at[number], found)
        # what was left behind is in nobody's way
        assert explain(place) == 0
        assert {name: (place / name).read_bytes() for name in FILES} == new
        return [found[name] != OLD for name in FILES]

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(killed, range(len(at))))
    first_rename = next(number for number, (kind, _) in enumerate(at) if kind == "rename")
    assert not any(any(outcome) for outcome in outcomes[: first_rename + 1])
    assert [sum(outcome) for outcome in outcomes[first_rename : first_rename + 4]] == [0, 1, 2, 3]


# --- the sidecar -----------------------------------------------------------------------------------------------

LIFE = "mkdir,flock,unlinkat,bind,chown,listen,rename,rmdir,unlink,exit_group"


@pytest.fixture
def place() -> Iterator[Path]:
    with sidecar.folder() as made:
        yield made


def test_a_sidecar_killed_before_each_step_of_its_life_starts_again(place: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    given: dict[str, Any] = {"at": place, "environment": BARE}
    with sidecar.running("--host", HOST, before=strace(trace, LIFE), **given) as hook:
        assert hook.end()[0] == 0
    assert list(place.iterdir()) == []
    at = steps(trace, ".hook.sock.new")
    assert {"mkdir", "flock", "bind", "listen", "rename", "rmdir", "unlink"} <= {kind for kind, _ in at}
    for number, step in enumerate(at):
        before = strace(tmp_path / f"trace-{number}", LIFE, kill=step)
        with sidecar.running("--host", HOST, before=before, wait=False, **given) as hook:
            ended = await_end(hook)
            assert ended == -9, step
        with sidecar.running("--host", HOST, wait=False, **given) as hook:
            hook.await_records("ready", 1)
            with Client(hook.socket) as client:
                assert client.info().name == "pcinuma"
            assert [path.name for path in place.iterdir()] == ["hook.sock"], step
            assert hook.end()[0] == 0
        assert list(place.iterdir()) == [], step


def await_end(hook: sidecar.Sidecar) -> int:
    """Its exit status; it is asked to end if it gets as far as to serve."""
    for _ in range(400):
        try:
            return hook.process.wait(0.05)
        except subprocess.TimeoutExpired:
            if hook.records("ready"):
                hook.process.terminate()
    raise AssertionError("it does not end")
