"""Every fuzz target from the kept corpus on: some for a minute under CI, all others for seconds, as all of them are in
`make test` elsewhere; `make fuzz MINUTES=n` gives them longer.

This folder is collected before any other, so that what takes a minute is not left for the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SECONDS = 5
MINUTE = ("domain", "grammar", "host", "connection", "hook_process", "webhook_process")
"""What has a minute under CI: bytes of a domain through the whole pipeline, domains and hosts by grammar, bytes of a
host, and bytes through the sidecar's socket and the webhook's."""
TARGETS = (
    "domain", "shown", "grammar", "host", "sysfs", "vmi", "kubelet", "configuration_space", "review", "connection",
    "hook_process", "webhook_process",
)  # fmt: skip

try:
    import atheris

    del atheris
    LACKING = ""
except ImportError as error:  # it has wheels for Linux on x86-64
    LACKING = str(error)

pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)


def fuzz(target: str, place: Path, *flags: object) -> tuple[int, str]:
    """A run of the fuzzer; its exit status and what it said."""
    command = [sys.executable, "-m", "fuzz", target, "--found", place / "found", "--finds", place / "finds", *flags]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(200)
@pytest.mark.parametrize("target", sorted(TARGETS, key=lambda target: target not in MINUTE))
def test_a_target_finds_nothing(target: str, tmp_path: Path) -> None:
    # always the same inputs, so that a change is judged by what it changes; make fuzz looks for new ones
    seconds = 60 if target in MINUTE and os.environ.get("CI") else SECONDS
    status, said = fuzz(target, tmp_path, "--seconds", seconds, "--seed", 1)
    assert status == 0, said[-5000:]
    if not target.endswith("_process"):
        runs = int(said.rpartition("stat::number_of_executed_units:")[2].split()[0])
        corpus = len(list((ROOT / "fuzz" / "corpus" / ("domain" if target == "shown" else target)).iterdir()))
        assert runs > corpus > 0, "the corpus was not even run through"


def test_every_target_is_tested() -> None:
    from fuzz.__main__ import PROCESSES
    from fuzz.__main__ import TARGETS as KNOWN

    from fuzz import processes, targets

    assert (*KNOWN, *PROCESSES) == TARGETS
    assert set(MINUTE) < set(TARGETS)
    assert not [name for name in KNOWN if not hasattr(targets, name)]
    assert not [name for name in PROCESSES if not hasattr(processes, name)]


def planted(data: bytes) -> None:
    """A fault behind three branches, each a byte: chance alone would take 2^24 tries."""
    if data[:1] == b"<" and data[1:2] == b"d" and data[2:3] == b">":
        raise ValueError("planted")


def test_a_planted_fault_is_found_and_kept(tmp_path: Path) -> None:
    status, said = fuzz("tests.fuzz.test_fuzz:planted", tmp_path, "--seconds", 60)
    assert status != 0
    assert "ValueError: planted" in said
    (find,) = (tmp_path / "finds").iterdir()
    assert find.read_bytes().startswith(b"<d>")
    again, said = fuzz("tests.fuzz.test_fuzz:planted", tmp_path, "--input", find)
    assert again != 0
    assert "ValueError: planted" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("domain", "--seconds", "0"), "argument --seconds: '0' is no whole number above 0"),  # libFuzzer: for ever
        (("domain", "--seconds", "-3"), "argument --seconds: '-3' is no whole number above 0"),
        (("domain", "--seed", "0"), "argument --seed: '0' is no whole number above 0"),  # libFuzzer: any
        (("all", "--minutes", "x"), "argument --minutes: 'x' is no number of minutes above 0"),
        (("all", "--minutes", "0"), "argument --minutes: '0' is no number of minutes above 0"),
        (("all", "--minutes", "inf"), "argument --minutes: 'inf' is no number of minutes above 0"),
        (("nosuch",), "no target 'nosuch': all, domain, "),
        (("domain", "--input", "nosuch"), "no file 'nosuch'"),
    ],
)
def test_arguments_that_are_none(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    status, said = fuzz(arguments[0], tmp_path, *arguments[1:])
    assert status == 2
    assert said.splitlines()[-1].startswith(f"python -m fuzz: error: {says}")
    assert not list(tmp_path.iterdir())
