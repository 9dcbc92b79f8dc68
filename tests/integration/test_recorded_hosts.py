"""Real machines, as hwloc's tests recorded their /sys: what is found on them, and where domains over them go.

The archives stand beside the repo; where they do not, these tests are skipped. The numbers are those of the machines:
they come from the folder's README and from looking at the files, not from pcinuma.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pcinuma import discover, host_file, pipeline, sys_trees
from pcinuma.model import CpuSet, HostQuery, HostTopology, Options, PciAddress, Placement

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ROOT / "../shared/hosts"

ARCHIVES = {
    "32em64t": "hwloc-32em64t-2n8c+dax+nvme+mic+dimms.tar.bz2",
    "32intel64": "hwloc-32intel64-2p8co2t+8ve.tar.bz2",
    "fakepcilocalities": "hwloc-fakepcilocalities.tar.bz2",
    "nvidiagpunumanodes": "hwloc-nvidiagpunumanodes.tar.bz2",
}
WANTED = re.compile(
    r"/sys/bus/(pci|mdev)/devices(/[^/]+)?\Z"
    r"|/sys/(bus/pci/devices|devices/pci.*|devices/system/node)/.*"
    r"/(numa_node|class|vendor|device|resource|(current|max)_link_(speed|width)|physfn|driver|iommu_group"
    r"|cpulist|distance|meminfo)\Z"
)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a short name to the unpacked machine's /sys."""

    @cache
    def unpack(name: str) -> Path:
        archive = HOSTS / ARCHIVES[name]
        if not archive.is_file():
            pytest.skip(f"no {archive.name} in ../shared/hosts beside the repo")
        folder = tmp_path_factory.mktemp(name)
        with tarfile.open(archive) as opened:
            # all 20,000 files would cost ten seconds
            members = [member for member in opened if WANTED.search(member.name)]
            if hasattr(tarfile, "tar_filter"):  # Debian 12's Python 3.11.2 has no filters yet
                opened.extractall(folder, members=members, filter="tar")
            else:
                opened.extractall(folder, members=members)
        (sys_folder,) = folder.glob("*/sys")
        return sys_folder

    return unpack


@pytest.fixture(scope="module")
def host(unpacked: Any) -> Any:
    """A function from a short name to all that discovery finds on the machine."""

    @cache
    def everything(name: str) -> HostTopology:
        return discover.read_all(sys_trees.RecordedTree(str(unpacked(name))))

    return everything


def domain(cells: int, nodesets: dict[int, str], devices: list[str], pins: dict[int, str] | None = None) -> bytes:
    """A domain of that many cells, a vCPU in each, with the functions passed through."""

    def lines(template: str, values: list[tuple[Any, ...]]) -> str:
        return "".join(template.format(*value) for value in values)

    parsed = [PciAddress.parse(device) for device in devices]
    hostdevs = lines(
        "    <hostdev mode='subsystem' type='pci'><source>"
        "<address domain='{:#x}' bus='{:#x}' slot='{:#x}' function='{:#x}'/></source></hostdev>\n",
        [(a.domain, a.bus, a.slot, a.function) for a in parsed],
    )
    cell_lines = lines("    <cell id='{0}' cpus='{0}' memory='1024'/>\n", [(cell,) for cell in range(cells)])
    pin_lines = lines("    <vcpupin vcpu='{}' cpuset='{}'/>\n", list((pins or {}).items()))
    memnodes = lines("    <memnode cellid='{}' mode='strict' nodeset='{}'/>\n", list(nodesets.items()))
    return (
        "<domain type='kvm'>\n  <os><type arch='x86_64' machine='q35'>hvm</type></os>\n"
        f"  <cpu><numa>\n{cell_lines}  </numa></cpu>\n"
        f"  <cputune>\n{pin_lines}  </cputune>\n"
        f"  <numatune>\n{memnodes}  </numatune>\n"
        f"  <devices>\n{hostdevs}  </devices>\n</domain>\n"
    ).encode()


def placements(sys_folder: Path, xml: bytes, **options: str) -> dict[str, Placement]:
    result = pipeline.transform(xml, Options(**options), discover.recorded(str(sys_folder)))  # type: ignore[arg-type]
    return {str(placement.source): placement for placement in result.report.plan.placements}


# --- what is found ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, nodes, functions, with_node",
    (
        ("32em64t", 2, 137, 44),
        ("32intel64", 2, 29, 29),
        ("nvidiagpunumanodes", 8, 6, 0),
    ),
)
def test_how_many_there_are(host: Any, name: str, nodes: int, functions: int, with_node: int) -> None:
    found = host(name)
    assert len(found.nodes) == nodes
    assert len(found.functions) == functions
    assert sum(function.node is not None for function in found.functions.values()) == with_node


@pytest.mark.parametrize(
    "name, by_node",
    (
        ("32intel64", {0}),
        ("fakepcilocalities", {0, 1, 2, 3}),
        ("32em64t", {0, 1, None}),
        ("nvidiagpunumanodes", {None}),
    ),
)
def test_on_which_nodes_they_are(host: Any, name: str, by_node: set[int | None]) -> None:
    assert {function.node for function in host(name).functions.values()} == by_node


def test_how_many_on_each_node(host: Any) -> None:
    found = host("fakepcilocalities")
    assert len(found.nodes) == 4
    count = Counter(function.node for function in found.functions.values())
    assert None not in count
    assert [count[node] >= least for node, least in ((0, 14), (1, 4), (2, 6), (3, 6))] == [True] * 4


def test_every_unknown_node_has_a_reason(host: Any) -> None:
    for name in ARCHIVES:
        for function in host(name).functions.values():
            assert (function.node is None) == bool(function.node_problem)
    reasons = [function.node_problem for function in host("32em64t").functions.values() if function.node is None]
    assert len(reasons) == 137 - 44
    assert all("-1" in reason for reason in reasons)


def test_nodes_of_two_sockets(host: Any) -> None:
    nodes = host("32intel64").nodes
    assert {number: (str(node.cpus), node.memory_kib, node.distances) for number, node in nodes.items()} == {
        0: ("0-7,16-23", 47925628, {0: 10, 1: 21}),
        1: ("8-15,24-31", nodes[1].memory_kib, {0: 21, 1: 10}),
    }


def test_nodes_whose_cpus_interleave(host: Any) -> None:
    nodes = host("fakepcilocalities").nodes
    assert nodes[2].cpus == CpuSet.parse("2,6,10,14,18,22,26,30,34,38")
    assert nodes[2].distances == {0: 20, 1: 20, 2: 10, 3: 20}


def test_gpu_memory_as_nodes(host: Any) -> None:
    """POWER9 with GPUs whose memory is nodes: 0 and 8 have the CPUs, 250 to 255 are the GPUs'."""
    nodes = host("nvidiagpunumanodes").nodes
    assert list(nodes) == [0, 8, 250, 251, 252, 253, 254, 255]
    assert [number for number, node in nodes.items() if not node.cpus] == [250, 251, 252, 253, 254, 255]
    assert (nodes[0].cpus, nodes[8].cpus) == (CpuSet.parse("0-87"), CpuSet.parse("88-175"))
    # the table of node 8 is 40 10 80 80 …: its second column is node 8, not node 1
    assert nodes[8].distances == {0: 40, 8: 10, 250: 80, 251: 80, 252: 80, 253: 80, 254: 80, 255: 80}
    assert nodes[250].distances == {0: 80, 8: 80, 250: 10, 251: 80, 252: 80, 253: 80, 254: 80, 255: 80}
    assert (nodes[250].memory_kib, nodes[0].memory_kib) == (15728640, 129839104)


def test_where_functions_hang(host: Any) -> None:
    function = host("32intel64").functions[PciAddress.parse("0000:60:00.1")]
    assert function.root_complex == "pci0000:5d"
    assert [str(bridge) for bridge in function.bridges] == ["0000:5d:02.0", "0000:5e:00.0", "0000:5f:03.0"]
    function = host("32intel64").functions[PciAddress.parse("0000:1c:00.0")]
    assert function.root_complex == "pci0000:17"
    assert [str(bridge) for bridge in function.bridges] == ["0000:17:00.0", "0000:18:00.0", "0000:19:0c.0"]
    function = host("32em64t").functions[PciAddress.parse("0000:83:00.0")]
    assert (function.root_complex, function.pci_class) == ("pci0000:80", 0x0B4000)
    assert [str(bridge) for bridge in function.bridges] == ["0000:80:03.0"]


def test_folders_instead_of_links(host: Any) -> None:
    """This recording has plain folders below bus/pci/devices: no path, so no root complex."""
    function = host("nvidiagpunumanodes").functions[PciAddress.parse("0004:05:00.0")]
    assert (function.root_complex, function.bridges, function.pci_class) == (None, (), 0x030000)


@pytest.mark.parametrize("name", ARCHIVES)
def test_the_record_says_what_the_machine_says(host: Any, name: str) -> None:
    found = host(name)
    record = host_file.load(json.dumps(host_file.dump(found)).encode(), "host.json")
    assert record(HostQuery(frozenset(found.functions), frozenset())) == found


# --- where domains go ------------------------------------------------------------------------------------------


def test_two_cells_on_two_sockets(unpacked: Any) -> None:
    """An Ethernet function of node 0, a Xeon Phi of node 1, and a SATA controller whose node firmware does not say."""
    xml = domain(2, {0: "0", 1: "1"}, ["0000:83:00.0", "0000:02:00.0", "0000:00:02.0"])
    found = placements(unpacked("32em64t"), xml)
    assert {source: (p.host_node, p.cell, p.kind) for source, p in found.items()} == {
        "0000:02:00.0": (0, 0, "placed"),
        "0000:83:00.0": (1, 1, "placed"),
        "0000:00:02.0": (None, None, "left"),
    }
    # two groups of two buses, the host's order: 252 253, 254 255
    assert str(found["0000:02:00.0"].guest_bdf) == "0000:fd:00.0"
    assert str(found["0000:83:00.0"].guest_bdf) == "0000:ff:00.0"


def test_cells_that_cross_the_nodes(unpacked: Any) -> None:
    xml = domain(2, {0: "1", 1: "0"}, ["0000:02:00.0", "0000:83:00.0"])
    found = placements(unpacked("32em64t"), xml)
    assert {source: p.cell for source, p in found.items()} == {"0000:02:00.0": 1, "0000:83:00.0": 0}


def test_eight_accelerators_of_one_node(unpacked: Any) -> None:
    names = [f"0000:{bus}:00.0" for bus in ("1a", "1b", "1c", "1d", "3d", "3e", "3f", "40")]
    found = placements(unpacked("32intel64"), domain(2, {0: "0", 1: "1"}, names[::-1]))
    assert {p.cell for p in found.values()} == {0}
    # one expander and eight ports end at 255; devices stand in the host's order whatever the domain's is
    assert [str(found[name].guest_bdf) for name in names] == [f"0000:{bus:02x}:00.0" for bus in range(0xF8, 0x100)]


def test_four_cells_on_four_nodes(unpacked: Any) -> None:
    devices = ["0000:02:00.0", "0000:02:00.1", "0000:43:00.0", "0000:80:14.0", "0000:c0:14.0"]
    found = placements(unpacked("fakepcilocalities"), domain(4, {0: "0", 1: "1", 2: "2", 3: "3"}, devices))
    assert [found[device].cell for device in devices] == [0, 0, 1, 2, 3]
    assert {p.kind for p in found.values()} == {"placed"}
    # 0000:02:00.0 and .1 are one host slot: one port, two functions. Four expanders and four ports: 248 to 255
    assert [str(found[device].guest_bdf) for device in devices] == [
        "0000:f9:00.0",
        "0000:f9:00.1",
        "0000:fb:00.0",
        "0000:fd:00.0",
        "0000:ff:00.0",
    ]


def test_by_pins_where_there_is_no_memnode(unpacked: Any) -> None:
    """CPU 4n + k is of node k on this machine."""
    xml = domain(2, {}, ["0000:43:00.0", "0000:c0:14.0"], {0: "3,7", 1: "1,5,9"})
    found = placements(unpacked("fakepcilocalities"), xml)
    assert {source: p.cell for source, p in found.items()} == {"0000:c0:14.0": 0, "0000:43:00.0": 1}


def test_nodes_that_no_cell_is_on(unpacked: Any) -> None:
    xml = domain(2, {0: "1", 1: "2"}, ["0000:02:00.0", "0000:43:00.0"])
    left = placements(unpacked("fakepcilocalities"), xml)
    assert {source: (p.kind, p.cell) for source, p in left.items()} == {
        "0000:02:00.0": ("left", None),
        "0000:43:00.0": ("placed", 0),
    }
    # every other node is at distance 20: the tie goes to the lowest cell
    near = placements(unpacked("fakepcilocalities"), xml, unmapped="nearest")
    assert (near["0000:02:00.0"].kind, near["0000:02:00.0"].cell) == ("approximate", 0)


def test_gpus_whose_node_was_not_recorded(unpacked: Any) -> None:
    xml = domain(2, {0: "0", 1: "8"}, ["0004:05:00.0", "0035:04:00.0"])
    result = pipeline.transform(xml, Options(), discover.recorded(str(unpacked("nvidiagpunumanodes"))))
    assert result.xml == xml
    assert {p.kind for p in result.report.plan.placements} == {"left"}
    refused = pipeline.transform(
        xml, Options(policy="restricted"), discover.recorded(str(unpacked("nvidiagpunumanodes")))
    )
    assert refused.refusal is not None
    for bdf in ("0004:05:00.0", "0035:04:00.0"):
        assert bdf in str(refused.refusal)


@pytest.mark.parametrize("policy, refused", (("restricted", False), ("single-numa-node", True)))
def test_policies_on_two_nodes(unpacked: Any, policy: str, refused: bool) -> None:
    xml = domain(2, {0: "0", 1: "1"}, ["0000:02:00.0", "0000:83:00.0"])
    result = pipeline.transform(xml, Options(policy=policy), discover.recorded(str(unpacked("32em64t"))))
    assert (result.refusal is not None) == refused


def test_one_node_alone(unpacked: Any) -> None:
    xml = domain(1, {0: "0"}, ["0000:1a:00.0", "0000:41:00.0"])
    result = pipeline.transform(xml, Options(policy="single-numa-node"), discover.recorded(str(unpacked("32intel64"))))
    assert result.refusal is None
    assert result.report.outcome == "changed"
