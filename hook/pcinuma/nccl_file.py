"""A topology as the text that NCCL's own small XML parser reads (NCCL src/graph/xml.cc).

That parser knows no XML declaration, no tab, no entity; between attributes stands one space, and a tag ends on the line
it began on. Nothing here needs an escape: the values are numbers, BDFs, and CPUID's vendor string.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pcinuma.model import Cell, CpuSet, HostCpu, Link, PciAddress

NCCL_VERSION, RCCL_VERSION = 1, 2
"""NCCL_TOPO_XML_VERSION of NCCL and of RCCL (src/graph/xml.h): each refuses the other's file."""

MAX_VALUE = 253
"""Characters of an attribute's value that the parser takes (xmlGetValue: MAX_STR_LEN, 255, with its end)."""

ARCHES = {"x86_64": "x86_64", "aarch64": "arm64"}
"""NCCL's name (src/graph/topo.cc kvDictCpuArch) for libvirt's."""

_IDS = ("vendor", "device", "subsystem_vendor", "subsystem_device")
_BRIDGE_CLASS = "0x060400"
_HEADER = "<!-- Made by pcinuma for NCCL_TOPO_FILE: busid is the guest's, the comments name the host's. -->"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A ``<pci>`` element of a device: its BDF in the guest and on the host, ``link`` the host's towards the root."""

    bdf: PciAddress
    host: PciAddress
    pci_class: int
    vendor: int | None
    device: int | None
    link: Link


@dataclass(frozen=True, slots=True)
class Switch:
    """A ``<pci>`` element of a switch of the host; ``bdf`` is its guest counterpart's, or one that no guest has.
    ``ids`` are vendor and device, subsystem vendor and device: by them NCCL knows switches that show themselves as two
    levels and are one (src/graph/topo.cc ncclTopoFlattenBcmSwitches)."""

    bdf: PciAddress
    host: PciAddress
    ids: tuple[int | None, int | None, int | None, int | None]
    link: Link
    branches: tuple[Switch | Endpoint, ...]


def text(
    cells: Sequence[Cell],
    tree: Mapping[int, Sequence[Switch | Endpoint]],
    *,
    arch: str,
    cpu: HostCpu | None,
    version: int,
) -> str:
    """The file: a ``<cpu>`` for each cell, in the order of its node in the guest, below it the branches that ``tree``
    has for its id.

    ``arch`` is the domain's; ``cpu`` None leaves vendor, family and model to NCCL.
    """
    highest = max((vcpu for cell in cells for vcpu in cell.cpus), default=0)
    inside: list[str] = []
    for node, cell in enumerate(in_guest_order(cells)):
        attributes = {"numaid": str(node), **_affinity(cell.cpus, highest), **_processor(arch, cpu)}
        below = [line for branch in tree.get(cell.id, ()) for line in _branch(branch, "    ")]
        inside += _element("  ", "cpu", attributes, below)
    return "".join(f"{line}\n" for line in [_HEADER, *_element("", "system", {"version": str(version)}, inside)])


def in_guest_order(cells: Sequence[Cell]) -> list[Cell]:
    """The cells in the order in which Linux numbers them: by the first vCPU, then what has memory alone.

    A node's number is not its proximity domain, which is the cell's id, but when the SRAT's reader came upon it, and
    that reads processors before memory (linux drivers/acpi/numa/srat.c acpi_map_pxm_to_node, acpi_numa_init).
    """
    return sorted(cells, key=lambda cell: (not cell.cpus, not cell.memory, cell.cpus.first if cell.cpus else cell.id))


def elements(cells: Sequence[Cell], tree: Mapping[int, Sequence[Switch | Endpoint]]) -> int:
    """How many elements the file has."""
    branches = [branch for cell in cells for branch in tree.get(cell.id, ())]
    count = 1 + len(cells)
    while branches:
        branch = branches.pop()
        count += 1
        branches += branch.branches if isinstance(branch, Switch) else ()
    return count


def _branch(branch: Switch | Endpoint, indent: str) -> Iterator[str]:
    if isinstance(branch, Endpoint):
        attributes = {
            "busid": str(branch.bdf),
            "class": f"0x{branch.pci_class:06x}",
            **({"vendor": f"0x{branch.vendor:04x}"} if branch.vendor is not None else {}),
            **({"device": f"0x{branch.device:04x}"} if branch.device is not None else {}),
            **({"link_speed": speed_text(branch.link.speed)} if branch.link.speed is not None else {}),
            **({"link_width": str(branch.link.width)} if branch.link.width is not None else {}),
        }
        yield from _element(indent, "pci", attributes, [], f"host {branch.host}")
        return
    # all attributes: older versions look for what is missing under this BDF in the guest, and fail
    attributes = {
        "busid": str(branch.bdf),
        "class": _BRIDGE_CLASS,
        **{name: f"0x{value or 0:04x}" for name, value in zip(_IDS, branch.ids, strict=True)},
        # "" and 0 are how NCCL itself writes what it does not know
        "link_speed": speed_text(branch.link.speed) if branch.link.speed is not None else "",
        "link_width": str(branch.link.width or 0),
    }
    below = [line for child in branch.branches for line in _branch(child, f"{indent}  ")]
    yield from _element(indent, "pci", attributes, below, f"host switch {branch.host}")


def _element(
    indent: str, name: str, attributes: Mapping[str, str], below: Sequence[str], comment: str = ""
) -> Iterator[str]:
    opening = f"{indent}<{name} " + " ".join(f'{key}="{value}"' for key, value in attributes.items())
    note = f" <!-- {comment} -->" if comment else ""
    if not below:
        yield f"{opening}/>{note}"
        return
    yield f"{opening}>{note}"
    yield from below
    yield f"{indent}</{name}>"


def speed_text(speed: float) -> str:
    """As Linux writes it, ``32.0 GT/s PCIe``: NCCL looks it up by that text (src/graph/topo.cc kvDictPciGen)."""
    return f"{speed:.1f} GT/s PCIe"


def _affinity(cpus: CpuSet, highest: int) -> dict[str, str]:
    """The vCPUs as the guest's sysfs writes a cpumap: words of 32 bits in hex, the highest first.

    Left out where it is longer than NCCL reads (above 896 vCPUs): the guest's own is asked then.
    """
    words = [f"{cpus.mask >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(range(highest // 32 + 1))]
    value = ",".join(words)
    return {"affinity": value} if len(value) <= MAX_VALUE else {}


def _processor(arch: str, cpu: HostCpu | None) -> dict[str, str]:
    """The processor as NCCL counts it, by which it knows how fast two sockets talk: the host's, whatever model the
    guest is shown. The extended family is added shifted (src/graph/xml.cc ncclTopoGetXmlFromCpu): Zen 4, 25, is 175."""
    found = {"arch": ARCHES[arch]} if arch in ARCHES else {}
    if cpu is None or arch != "x86_64":
        return found
    family = cpu.family if cpu.family < 15 else 15 + ((cpu.family - 15) << 4)
    return {**found, "vendor": cpu.vendor, "familyid": str(family), "modelid": str(cpu.model)}
