"""A limit that many devices run into: told once to people, once a device to programs. The real command."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import sidecar
from tests.support.domains import domain, hostdev
from tests.support.node_tree import NodeTree

COUNT = 250
BDFS = [f"0000:{0x20 + n // 8:02x}:{n % 8:02x}.0" for n in range(COUNT)]
FIRST = "0000:20:00.0, 0000:20:01.0, 0000:20:02.0 and 247 more"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """250 devices for one cell: one bus each, beside the 20 (a root bus, 3 others, 16 to come) of the root bus."""
    folder = tmp_path_factory.mktemp("many")
    sidecar.host_file(folder / "host.json", {0: "0-7"}, dict.fromkeys(BDFS, 0))
    devices = [hostdev(bdf, f"ua-d{number}") for number, bdf in enumerate(BDFS)]
    (folder / "domain.xml").write_text(domain({0: 0}, devices))
    return folder


def run(place: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    whole = [str(sidecar.PROGRAM), command, "domain.xml", "--host", "host.json", *arguments]
    return subprocess.run(whole, cwd=place, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", ["explain", "check"])
def test_people_read_it_once(place: Path, command: str) -> None:
    said = " ".join(run(place, command).stdout.split())
    found = re.findall(r"warning: bus-numbers: 250 devices \((.*?)\): each stays where it is", said)
    assert found == [FIRST]
    assert len(re.findall("warning: bus-numbers: (?!the root bus)", said)) == 1


def test_check_promises_no_place_to_what_has_none(place: Path) -> None:
    assert "pcinuma transform places it" not in run(place, "check").stdout


@pytest.mark.parametrize("command", ["explain", "check"])
def test_programs_read_it_for_each_device(place: Path, command: str) -> None:
    findings = json.loads(run(place, command, "--json").stdout)["findings"]
    assert [f["device"] for f in findings if f["code"] == "bus-numbers" and f["device"]] == BDFS


def test_a_warning_each_on_standard_error_and_the_hint_once(place: Path) -> None:
    lines = run(place, "transform").stderr.splitlines()
    assert len([line for line in lines if line.startswith("pcinuma: warning: 0000:")]) == COUNT
    assert len([line for line in lines if line.startswith("hint: ")]) == 1


def test_a_refusal_says_the_reason_before_the_line_ends(place: Path) -> None:
    done = run(place, "transform", "--policy", "restricted")
    assert done.returncode == 1
    assert "250 of 250 devices do not fit a cell: the guest would need 271 PCI bus numbers of 256: 0000:20:00.0, " in (
        done.stderr
    )


def test_a_refusal_names_a_hundred_devices(place: Path, tmp_path: Path) -> None:
    """On the root bus by their addresses: each has its own reason or one that all share, and none is cut off."""
    hundred = dict.fromkeys(BDFS[:100], -1)
    sidecar.host_file(tmp_path / "host.json", {0: "0-7"}, hundred)
    (tmp_path / "domain.xml").write_text(
        domain({0: 0}, [hostdev(bdf, f"ua-{bdf[5:7]}-{bdf[8:10]}") for bdf in hundred])
    )
    said = run(tmp_path, "transform", "--policy", "restricted").stderr
    assert [bdf for bdf in hundred if bdf not in said] == []
    assert "numa_node" in said


def test_three_are_still_three_lines(tmp_path: Path) -> None:
    three = dict.fromkeys(BDFS[:3], -1)
    sidecar.host_file(tmp_path / "host.json", {0: "0-7"}, three)
    (tmp_path / "domain.xml").write_text(domain({0: 0}, [hostdev(bdf, f"ua-{bdf[8:10]}") for bdf in three]))
    assert re.findall(r"numa-unknown: (0000:\S+)", run(tmp_path, "check").stdout) == BDFS[:3]


def test_doctor_counts_them_too(tmp_path: Path) -> None:
    """Five functions for VMs whose node nobody knows, on a host of two nodes."""
    tree = NodeTree(tmp_path / "node")
    for number, cpus in ((0, "0-3"), (1, "4-7")):
        tree.node(number, cpus, 128, {}, "10 21" if number == 0 else "21 10")
    for number in range(5):
        ids = {"class": "0x030200", "vendor": "0x10de", "numa_node": "-1"}
        tree.function(f"pci0000:40/0000:4{number}:00.0", ids, driver="vfio-pci", group=number)
    command = [str(sidecar.PROGRAM), "doctor", "--sysfs", str(tree.sys)]
    text = " ".join(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.split())
    named = "0000:40:00.0, 0000:41:00.0, 0000:42:00.0 and 2 more"
    assert text.count(f"numa-unknown: 5 devices ({named}): the node of each is unknown") == 1
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False)
    codes = [finding["code"] for finding in json.loads(done.stdout)["findings"]]
    assert codes.count("numa-unknown") == 5
