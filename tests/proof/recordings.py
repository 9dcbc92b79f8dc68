"""Real machines that other projects published: hwloc's archives and XML, topology files of NCCL and RCCL.

Their files are not part of this project. Where they stand beside it they are read, and else there are none.
"""

from __future__ import annotations

import re
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lxml import etree

from pcinuma import discover, host_file, sys_trees
from pcinuma.model import CpuSet, PciAddress
from tests.conftest import ROOT
from tests.proof.machines import Machine

FOLDER = ROOT.parent / "shared" / "hosts"

HWLOC = {
    "32em64t-2n8c+dax+nvme+mic+dimms": "hwloc-32em64t-2n8c+dax+nvme+mic+dimms.tar.bz2",
    "32intel64-2p8co2t+8ve": "hwloc-32intel64-2p8co2t+8ve.tar.bz2",
    "fakepcilocalities": "hwloc-fakepcilocalities.tar.bz2",
    "nvidiagpunumanodes": "hwloc-nvidiagpunumanodes.tar.bz2",
}
NCCL = {
    "8 MI300X (topo_8p_940)": ("RCCL", "rccl-topo_8p_940.xml"),
    "8 MI300X in a VM (topo_8p_940vm)": ("RCCL", "rccl-topo_8p_940vm.xml"),
    "two EPYC, 8 nodes (topo_8p_ts1_n4)": ("RCCL", "rccl-topo_8p_ts1_n4.xml"),
    "Azure ND v5": ("azhpc-images", "azure-ndv5-topo.xml"),
    "AWS p4d.24xlarge": ("aws-ofi-nccl", "aws-p4d-24xl-topo.xml"),
}
DGX_2 = "hwloc-nvidiaDGX2.xml"

_TOLD = re.compile(
    r"/sys/bus/(pci|mdev)/devices(/[^/]+)?\Z"
    r"|/sys/(bus/pci/devices|devices/pci.*|devices/system/node)/.*"
    r"/(numa_node|class|vendor|device|resource|physfn|iommu_group|cpulist|distance|meminfo)\Z"
)
_ROLES = {0x02: "nic", 0x03: "gpu", 0x0B: "gpu", 0x12: "gpu"}
"""By base class: network, display, processors (coprocessors), processing accelerators (PCI Code and ID Assignment)."""

_NVME, _NVSWITCH = 0x0108, 0x0680


def recordings() -> Iterator[Machine]:
    """Those that are at hand."""
    for name, file in HWLOC.items():
        if (FOLDER / file).is_file():
            yield _from_archive(name, FOLDER / file)
    if (FOLDER / DGX_2).is_file():
        yield _from_hwloc_xml("DGX-2 (nvidiaDGX2)", FOLDER / DGX_2)
    for name, (project, file) in NCCL.items():
        if (FOLDER / file).is_file():
            yield _from_nccl(name, project, FOLDER / file)


def _from_archive(name: str, archive: Path) -> Machine:
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as opened:
        members = [member for member in opened if _TOLD.search(member.name)]
        if hasattr(tarfile, "tar_filter"):  # Debian 12's Python 3.11.2 has no filters yet
            opened.extractall(folder, members=members, filter="tar")
        else:
            opened.extractall(folder, members=members)
        (tree,) = Path(folder).glob("*/sys")
        record = host_file.dump(discover.read_all(sys_trees.RecordedTree(str(tree))))
    return _machine(name, "hwloc", record)


def _from_hwloc_xml(name: str, file: Path) -> Machine:
    """hwloc's own XML: a package holds a node and the bridges above its devices."""
    nodes, functions = [], []
    for package in etree.parse(file).iterfind(".//object[@type='Package']"):
        (memory,) = package.iterfind(".//object[@type='NUMANode']")
        node = int(memory.get("os_index", ""))
        nodes.append({"id": node, "cpus": str(_from_mask(memory.get("cpuset", "").replace("0x", "")))})
        for device in package.iterfind(".//object[@type='PCIDev']"):
            bridges = [a for a in device.iterancestors("object") if a.get("type") == "Bridge"]
            (host_bridge,) = (a for a in bridges if a.get("bridge_type") == "0-1")
            ids = re.match(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]", device.get("pci_type", ""))
            assert ids is not None
            domain, bus = host_bridge.get("bridge_pci", "").split(":")
            functions.append(
                {
                    "address": device.get("pci_busid"),
                    "node": node,
                    "rootComplex": f"pci{domain}:{bus[1:3]}",
                    "bridges": [a.get("pci_busid") for a in reversed(bridges) if a is not host_bridge],
                    "class": f"0x{ids[1]}00" if ids[1] != "0000" else "0x068000",  # one NVSwitch's was not readable
                    "vendor": f"0x{ids[2]}",
                    "device": f"0x{ids[3]}",
                }
            )
    return _machine(name, "hwloc", _record(nodes, functions))


def _from_nccl(name: str, project: str, file: Path) -> Machine:
    """A topology file as NCCL writes and reads it: a ``<cpu>`` is a node, ``<pci>`` nest as the tree does."""
    nodes, functions = [], []
    for cpu in etree.parse(file).iterfind("cpu"):
        node = int(cpu.get("numaid", ""))
        nodes.append({"id": node, "cpus": str(_from_mask(cpu.get("affinity", "")))})
        for device in cpu.iterfind(".//pci"):
            if device.get("class", "").startswith("0x06"):
                continue
            bridges = [a.get("busid", "") for a in device.iterancestors("pci")][::-1]
            # such a file has a switch's upstream port and leaves out the root port above it and the port below it
            way = [f"00fe:{bridge[5:]}" for bridge in bridges]
            top = bridges[0] if bridges else device.get("busid", "")
            functions.append(
                {
                    "address": _lower(device.get("busid", "")),
                    "node": node,
                    "rootComplex": f"pci{top[:7].lower()}",
                    "bridges": [_lower(part) for pair in zip(way, bridges, strict=True) for part in pair],
                    "class": device.get("class"),
                }
            )
    return _machine(name, project, _record(sorted(nodes, key=lambda node: node["id"]), functions))


def _lower(bdf: str) -> str:
    return bdf.lower()


def _record(nodes: list[dict[str, Any]], functions: list[dict[str, Any]]) -> dict[str, Any]:
    return {"kind": "pcinuma-host", "version": 1, "nodes": nodes, "functions": functions}


def _from_mask(text: str) -> CpuSet:
    """The set that a bit mask of 32-bit groups says, as hwloc and NCCL write it."""
    mask = 0
    for group in text.split(","):
        mask = mask << 32 | int(group or "0", 16)
    return CpuSet(frozenset(number for number in range(mask.bit_length()) if mask >> number & 1))


def _machine(name: str, source: str, record: dict[str, Any]) -> Machine:
    roles = {}
    for function in record["functions"]:
        if (role := _role(int(function.get("class") or "0", 16))) is not None:
            roles[PciAddress.parse(function["address"])] = role
    return Machine(name, record, roles, source)


def _role(pci_class: int) -> str | None:
    if pci_class >> 8 == _NVME:
        return "disk"
    if pci_class >> 8 == _NVSWITCH:
        return "fabric"
    return _ROLES.get(pci_class >> 16)
