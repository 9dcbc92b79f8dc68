"""The checker of NCCL's rules: it takes the files that cloud providers and RCCL use, and refuses what NCCL refuses."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.support import nccl

HOSTS = ROOT / "../shared/hosts"

SWITCH = 'class="0x060400" vendor="0x0000" device="0x0000" subsystem_vendor="0x0000" subsystem_device="0x0000"'
LINK = 'link_speed="32.0 GT/s PCIe" link_width="16"'
GOOD = f"""\
<!-- a comment -->
<system version="1">
  <cpu numaid="0" affinity="0000000f" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="ffff:ff:01.0" {SWITCH} {LINK}>
      <pci busid="0000:f8:00.0" class="0x030200" {LINK}/> <!-- one -->
      <pci busid="0000:f9:00.0" class="0x020700"/>
    </pci>
  </cpu>
  <cpu numaid="1" affinity="000000f0" arch="arm64"/>
</system>
"""


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("azure-ndv5-topo.xml", 1),
        ("aws-p4d-24xl-topo.xml", 1),
        ("rccl-topo_8p_940.xml", 2),
        ("rccl-topo_8p_940vm.xml", 2),
        ("rccl-topo_8p_ts1_n4.xml", 2),
    ],
)
def test_real_files_are_accepted(name: str, version: int) -> None:
    path = HOSTS / name
    if not path.is_file():
        pytest.skip(f"no {name} in ../shared/hosts beside the repo")
    assert nccl.problems(path.read_text(), version=version) == []
    assert nccl.problems(path.read_text(), version=3 - version) == [f"version {version}, {3 - version} needed"]


def test_a_good_file() -> None:
    assert nccl.problems(GOOD) == []
    system = nccl.read(GOOD)
    assert [pci.attributes["busid"] for pci in system.all("pci")] == ["ffff:ff:01.0", "0000:f8:00.0", "0000:f9:00.0"]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("<!-- a comment -->", '<?xml version="1.0" encoding="UTF-8"?>', "expected >, got '?'"),
        ("  <cpu", "\t<cpu", "expecting '<', got '\\t'"),
        ('"0" affinity', '"0"  affinity', "attribute '' of cpu: no name, or twice"),
        ('"0" affinity', '"0"\naffinity', "expected >, got '\\n'"),
        ('numaid="0"', "numaid=0", "Expected (double) quote."),
        ("0000000f", "0" * 254, "value 00000000000000000000… too long"),
        ("</pci>\n  </cpu>", "</cpu>", "XML Mismatch : pci / cpu"),
        ("</system>", "", "unterminated system"),
        ("<!-- one -->", "<!-- one", "Unexpected EOF"),
        ("/> <!-- one -->", "/>one", "expecting '<', got 'o'"),
        ('arch="arm64"/>', 'arch="arm64"><gpu/></cpu>', "Ignoring element gpu"),
        ('busid="0000:f9:00.0"', "".join(f'a{"a" * n}="" ' for n in range(17))[:-1], "extra attributes are ignored"),
        ('version="1"', 'version="2"', "version 2, 1 needed"),
        ('numaid="1"', 'numaid="0"', "a numaid twice"),
        ('numaid="1"', 'numaid="-1"', "numaid '-1' is no number"),
        ("000000f0", "0-3", "cpu: affinity '0-3' is no cpumap"),
        ("000000f0", "00000018", "cpu 1: shares CPUs with another"),
        ("arm64", "aarch64", "cpu: arch 'aarch64'"),
        ("GenuineIntel", "Intel", "cpu: vendor 'Intel'"),
        (' familyid="6"', "", "cpu: familyid missing"),
        (' modelid="143"', "", "cpu: modelid missing"),
        ("0000:f9:00.0", "0000:f8:00.0", "0000:f8:00.0 twice"),
        ("0000:f8:00.0", "0000:F8:00.0", "pci: busid '0000:F8:00.0' is no BDF in lower case"),
        ("0000:f8:00.0", "f8:00.0", "pci: busid 'f8:00.0' is no BDF in lower case"),
        ('class="0x030200" ', "", "0000:f8:00.0: class ''"),
        ("0x030200", "030200", "0000:f8:00.0: class '030200'"),
        ("0x020700", "0x060400", "0000:f9:00.0: a switch without devices"),
        ("0x060400", "0x030000", "ffff:ff:01.0: devices below a device are lost"),
        (' subsystem_device="0x0000"', "", "ffff:ff:01.0: subsystem_device missing"),
        (' link_width="16">', ">", "ffff:ff:01.0: link_width missing"),
        ("32.0 GT/s PCIe", "32.0GT/s", "ffff:ff:01.0: link_speed '32.0GT/s' is taken for 8 GT/s"),
        ('link_width="16"', 'link_width="x16"', "ffff:ff:01.0: link_width 'x16'"),
        ('arch="arm64"', 'arch="arm64" host_hash="0x1"', "cpu: host_hash is NCCL's own"),
    ],
)
def test_wrong_files_are_refused(old: str, new: str, problem: str) -> None:
    wrong = GOOD.replace(old, new, 1)
    assert wrong != GOOD
    found = nccl.problems(wrong)
    assert found, wrong
    assert found[0].startswith(problem) or problem in found, found


def test_too_many() -> None:
    def file(count: int, cells: int = 1) -> str:
        one = '<pci busid="0000:{:02x}:{:02x}.0" class="0x020000"/>'
        cell = '<cpu numaid="{}" arch="arm64">{}</cpu>'
        inside = [cell.format(c, "".join(one.format(c, n) for n in range(count))) for c in range(cells)]
        return f'<system version="1">{"".join(inside)}</system>'

    assert nccl.problems(file(32)) == []
    assert nccl.problems(file(33).replace("0000:00:20.0", "0000:ff:00.0")) == ["XML parser is limited to 32 subnodes"]
    assert nccl.problems(file(30, 8)) == []  # 1 + 8 + 240 elements
    assert nccl.problems(file(31, 8)) == ["XML parser is limited to 256 nodes"]
