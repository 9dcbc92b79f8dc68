"""``onDefineDomain``: what KubeVirt's sidecar-shim starts for every call, and that it answers as the hook does."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import domains, sidecar
from tests.support.domains import domain, hostdev
from tests.support.sidecar import EXECUTABLE, Client, Sidecar, refused, vmi

NEAR, FAR, UNKNOWN = "0000:41:00.0", "0000:81:00.0", "0000:c1:00.0"
FITS = domain({0: 0, 1: 1}, [hostdev(NEAR, "ua-gpu-near"), hostdev(FAR, "ua-gpu-far")])
ONE_DOES_NOT = domain({0: 0, 1: 1}, [hostdev(NEAR, "ua-gpu-near"), hostdev(UNKNOWN, "ua-gpu-unknown")])
LATIN_1 = (
    '<?xml version="1.0" encoding="ISO-8859-1"?>\n' + FITS.replace("<name>", "<title>\xe4\xdf</title><name>")
).encode("latin-1")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("host") / "host.json"
    return sidecar.host_file(path, {0: "0-7", 1: "8-15"}, {NEAR: 0, FAR: 1, UNKNOWN: -1})


@pytest.fixture(scope="module")
def hook(host: Path) -> Iterator[Sidecar]:
    with sidecar.running("--host", host) as running:
        yield running


@pytest.fixture
def client(hook: Sidecar) -> Iterator[Client]:
    with Client(hook.socket) as made:
        yield made


def call(xml: str | bytes, given: bytes, *arguments: str | Path, **popen: Any) -> subprocess.CompletedProcess[bytes]:
    """As the shim does it: both as arguments, no standard input."""
    return sidecar.run(EXECUTABLE, "--vmi", given, "--domain", xml, *arguments, **popen)


def record_of(ended: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    """The line of the log, which is the only JSON on standard error."""
    (line,) = [line for line in ended.stderr.decode().splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize(
    ("xml", "annotations"),
    [
        (FITS, None),
        (FITS, {"policy": "none"}),
        (ONE_DOES_NOT, None),
        (domain({0: 0}, []), {"policy": "restricted"}),
        (LATIN_1, None),
    ],
    ids=range(5),
)
def test_it_answers_as_the_hook_does(
    hook: Sidecar, client: Client, host: Path, xml: str | bytes, annotations: dict[str, str] | None
) -> None:
    ended = call(xml, vmi(annotations), "--host", host)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == client.define(xml, vmi(annotations))
    assert len(ended.stderr.splitlines()) == 1
    differs = ("time", "milliseconds")
    here, there = record_of(ended), hook.records("OnDefineDomain")[-1]
    assert {k: v for k, v in here.items() if k not in differs} == {k: v for k, v in there.items() if k not in differs}


def test_what_it_places(host: Path) -> None:
    ended = call(FITS, vmi(), "--host", host)
    # by hand: one device a cell, so ports 2 and 4
    assert domains.layout(ended.stdout)[1] == {"ua-gpu-near": (2, 0, 0), "ua-gpu-far": (4, 0, 0)}


@pytest.mark.parametrize(
    ("xml", "annotations", "status"),
    [
        (ONE_DOES_NOT, {"policy": "restricted"}, 1),
        (FITS, {"policy": "single-numa-node"}, 1),
        (FITS, {"policy": "sometimes"}, 2),
        (FITS, {"polcy": "none"}, 2),
        ("<domain>", None, 2),
        ("", None, 2),
    ],
    ids=range(6),
)
def test_a_call_that_fails(
    client: Client, host: Path, xml: str, annotations: dict[str, str] | None, status: int
) -> None:
    """The shim fails the call for its status; what it said stands in the sidecar's log, as the hook says it."""
    ended = call(xml, vmi(annotations), "--host", host)
    assert (ended.returncode, ended.stdout) == (status, b"")
    record = record_of(ended)
    assert (record["level"], record["outcome"]) == ("error", "refused")
    _, said = refused(lambda: client.define(xml, vmi(annotations)))
    assert record["error"] == said
    assert "pcinuma: error: " in ended.stderr.decode()
    assert "Traceback" not in ended.stderr.decode()


@pytest.mark.parametrize("given", [b"", b"[]", b"{", b'{"kind": "Pod"}'])
def test_a_vmi_that_is_none(host: Path, given: bytes) -> None:
    ended = call(FITS, given, "--host", host)
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert "the VMI" in ended.stderr.decode()


def test_flags_are_defaults_under_the_annotations(host: Path, tmp_path: Path) -> None:
    config = tmp_path / "defaults.yaml"
    config.write_text("policy: none\n")
    flags = ("--host", host, "--config", config)
    assert call(FITS, vmi(), *flags).stdout == FITS.encode()
    assert call(ONE_DOES_NOT, vmi(), *flags, "--policy", "restricted").returncode == 1
    assert call(ONE_DOES_NOT, vmi({"policy": "none"}), *flags, "--policy", "restricted").stdout == ONE_DOES_NOT.encode()


def test_a_host_that_cannot_be_read(tmp_path: Path) -> None:
    """Our own fault costs a best-effort VM nothing."""
    tree = tmp_path / "sys"
    (tree / "devices" / "system" / "node").mkdir(parents=True)
    sysfs = ("--sysfs", tree / "nothing")
    ended = call(FITS, vmi(), *sysfs)
    assert (ended.returncode, ended.stdout) == (0, FITS.encode())
    assert record_of(ended)["level"] == "error"
    ended = call(FITS, vmi({"policy": "restricted"}), *sysfs)
    assert ended.returncode != 0
    assert ended.stdout == b""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--vmi"),
        (["--vmi", "{}"], "--domain"),
        (["--domain", "<domain/>"], "--vmi"),
        (["--vmi", "{}", "--domain"], "--domain"),
        (["--vmi", "{}", "--domain", "<domain/>", "--polcy", "none"], "--polcy"),
        (["--vmi", "{}", "--domain", "<domain/>", "--policy", "sometimes"], "restricted"),
        (["--vmi", "{}", "--domain", "<domain/>", "--host", "/nonexistent"], "/nonexistent"),
        (["--vmi", "{}", "--domain", "<domain/>", "--host", "a", "--sysfs", "b"], "--sysfs"),
        (["--vmi", "{}", "--domain", "<domain/>", "more"], "more"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str) -> None:
    ended = sidecar.run(EXECUTABLE, *arguments)
    errors = ended.stderr.decode()
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert errors.startswith("pcinuma: error: ")
    assert said in errors
    assert "Traceback" not in errors


def test_help() -> None:
    ended = sidecar.run(EXECUTABLE, "--help")
    assert ended.returncode == 0
    assert b"--vmi" in ended.stdout
    assert b"--domain" in ended.stdout
    assert ended.stderr == b""


def test_a_value_that_looks_like_a_flag(host: Path) -> None:
    for given in ("--domain=--policy", "--domain=-"):
        ended = sidecar.run(EXECUTABLE, "--vmi", vmi(), given, "--host", host)
        assert ended.returncode == 2
        assert "the domain XML" in ended.stderr.decode()


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX", "en_US.ISO-8859-1"])
@pytest.mark.parametrize("coercion", ["0", "1"])
def test_the_bytes_arrive_whatever_the_locale(host: Path, locale: str, coercion: str) -> None:
    environment = {**os.environ, "LC_ALL": locale, "PYTHONCOERCECLOCALE": coercion, "PYTHONUTF8": coercion}
    for xml in (LATIN_1, FITS.replace("<name>", "<title>äß\u4e16</title><name>").encode()):
        ended = call(xml, vmi(name="größe"), "--host", host, env=environment)
        assert ended.returncode == 0, ended.stderr
        assert "<title>äß" in ended.stdout.decode()
        assert record_of(ended)["name"] == "größe"


def test_any_bytes(host: Path) -> None:
    """An argument may be any bytes but NUL."""
    dice = random.Random(0)
    for _ in range(8):
        noise = dice.randbytes(300).replace(b"\0", b"")
        for xml, given in ((noise, vmi()), (FITS.encode(), noise), (FITS.encode()[:200] + noise, vmi())):
            ended = call(xml, given, "--host", host)
            assert (ended.returncode, ended.stdout) == (2, b""), ended.stderr
            assert "Traceback" not in ended.stderr.decode()
            assert record_of(ended)["outcome"] == "refused"


def test_no_file_is_left_and_none_is_needed(tmp_path: Path, host: Path) -> None:
    """The image may be read-only, and the user is not root."""
    ended = call(FITS, vmi(), "--host", host, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"})
    assert ended.returncode == 0
    assert os.listdir(tmp_path) == []


def test_nobody_reads_the_answer(host: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [str(EXECUTABLE), "--vmi", vmi().decode(), "--domain", str(FITS), "--host", str(host)]
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False, timeout=10)
    finally:
        os.close(writing)
    assert b"Traceback" not in ended.stderr
