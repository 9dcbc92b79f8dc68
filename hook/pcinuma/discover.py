"""Reads the host, of this machine or of a tree laid out like ``/sys``: with :mod:`pcinuma.sys_trees` alone what does.

A reader is made once and then asked for the functions that a domain names; it reads those, their parents and the
host's nodes, and nothing else. The thin reads make records, the pure :func:`topology_from` makes sense of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pcinuma.errors import BadInput
from pcinuma.model import (
    MAX_NODE,
    Bar,
    CpuSet,
    HostCpu,
    HostFunction,
    HostNode,
    HostQuery,
    HostTopology,
    Link,
    PciAddress,
)
from pcinuma.sys_trees import BDF_NAME, ROOT_NAME, LiveTree, RecordedTree, SysTree

ReadHost = Callable[[HostQuery], HostTopology]
"""How the pipeline asks for the host."""

PLACING = (("numa_node", "resource"), ("physfn", "iommu_group"))
"""The attributes and the links of a function that placing it needs."""

_LINK_SPEED = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
_SUBSYSTEM = ("subsystem_vendor", "subsystem_device")
DETAILS = (
    ("numa_node", "class", "vendor", "device", *_SUBSYSTEM, "resource", *_LINK_SPEED),
    ("physfn", "iommu_group", "driver"),
)
"""All that is read of a function."""

_CPU_ALIAS = re.compile(r"cpu:type:x86,ven([0-9A-F]{4})fam([0-9A-F]{4})mod([0-9A-F]{4}):")
_CPU_VENDORS = {0: "GenuineIntel", 2: "AuthenticAMD", 5: "CentaurHauls", 9: "HygonGenuine", 10: "  Shanghai  "}
"""CPUID's vendor string by Linux's number for it (arch/x86/include/asm/processor.h, X86_VENDOR_*)."""
_BAR_COUNT = 6  # /sys/bus/pci/devices/*/resource: six BARs, the ROM, then SR-IOV and bridge windows


@dataclass(frozen=True, slots=True)
class FunctionRecord:
    """What sysfs says of one PCI function, uninterpreted: its real path, attribute texts, last parts of links."""

    path: str
    attributes: Mapping[str, str | None] = field(default_factory=dict)
    links: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What sysfs says of one node: its number, the texts of cpulist, distance and meminfo, its first CPU's package."""

    id: int
    cpulist: str | None
    distance: str | None
    meminfo: str | None
    package: str | None = None


# --- asking ----------------------------------------------------------------------------------------------------


def live() -> ReadHost:
    """A reader of this machine; it opens udev at the first question, not before."""
    return lambda query: read(LiveTree(), query)


def recorded(directory: str) -> ReadHost:
    """A reader of a tree laid out like ``/sys``."""
    return lambda query: read(RecordedTree(directory), query)


def read(tree: SysTree, query: HostQuery) -> HostTopology:
    """The part of the host that ``query`` names. Functions that do not exist are absent from the result."""
    mdevs = _parents({uuid: tree.mdev_path(uuid) for uuid in sorted(query.mdevs)})
    paths = tree.vdpa_paths() if query.vdpas else {}
    vdpas = _parents({name: paths.get(name) for name in sorted(query.vdpas)})
    records: dict[PciAddress, FunctionRecord] = {}
    attribute_names, link_names = _wanted(query)
    waiting = sorted(query.functions.union(mdevs.values(), vdpas.values()), reverse=True)
    while waiting:
        address = waiting.pop()
        path = tree.function_path(address)
        if path is None or address in records:
            continue
        attributes = {name: tree.attribute(path, name) for name in attribute_names}
        records[address] = FunctionRecord(path, attributes, {name: tree.link(path, name) for name in link_names})
        physfn = _bdf(records[address].links.get("physfn"))
        if physfn is not None and node_of(attributes.get("numa_node"), {})[0] is None:
            waiting.append(physfn)
    nodes = []
    for number, path in sorted(tree.node_paths().items()):
        record = NodeRecord(number, *(tree.attribute(path, name) for name in ("cpulist", "distance", "meminfo")))
        nodes.append(replace(record, package=_package(tree, path, record)) if query.packages else record)
    cpuinfo = tree.cpuinfo() if query.address_bits else None
    cpu_path = tree.cpu_path() if query.details or query.address_bits else None
    cpu = cpu_of(tree.attribute(cpu_path, "modalias") if cpu_path is not None else None)
    return replace(topology_from(nodes, records, mdevs, vdpas, cpuinfo), cpu=cpu)


def _package(tree: SysTree, path: str, node: NodeRecord) -> str | None:
    """The socket of a node, which is that of any CPU of it; a CPU that is offline has no topology."""
    first = re.match(r"[0-9]+", node.cpulist or "")
    return tree.attribute(path, f"cpu{first[0]}/topology/physical_package_id") if first else None


def _wanted(query: HostQuery) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if query.details:
        return DETAILS
    attributes, links = PLACING
    return attributes + ("class", "vendor") * query.ids, links


def _parents(paths: Mapping[str, str | None]) -> dict[str, PciAddress]:
    """The PCI function that each path lies below; those that lie below none are left out."""
    parents = ((name, parent_function(path) if path else None) for name, path in paths.items())
    return {name: parent for name, parent in parents if parent is not None}


def read_all(tree: SysTree) -> HostTopology:
    """Every PCI function, mediated device, vDPA device and node of the host: what a snapshot records."""
    uuids = frozenset(name for name in tree.all_mdevs() if "-" in name)
    return read(tree, HostQuery(frozenset(tree.all_functions()), uuids, frozenset(tree.vdpa_paths())))


# --- making sense, pure ----------------------------------------------------------------------------------------


def topology_from(
    nodes: Iterable[NodeRecord],
    functions: Mapping[PciAddress, FunctionRecord],
    mdev_parents: Mapping[str, PciAddress],
    vdpa_parents: Mapping[str, PciAddress] | None = None,
    cpuinfo: str | None = None,
) -> HostTopology:
    """The topology that the records tell. What a record says wrongly becomes unknown, with the reason."""
    order = list(nodes)
    ids = [node.id for node in order]
    known = {node.id: _node(node, ids) for node in order}
    return HostTopology(
        nodes=known,
        functions={address: _function(address, record, known) for address, record in functions.items()},
        mdev_parents=dict(mdev_parents),
        vdpa_parents=dict(vdpa_parents or {}),
        address_bits=_address_bits(cpuinfo),
    )


def _address_bits(cpuinfo: str | None) -> int | None:
    """The physical address bits that ``/proc/cpuinfo`` tells on x86; other architectures do not say."""
    match = re.search(r"^address sizes\s*: ([0-9]{2}) bits physical", cpuinfo or "", re.MULTILINE)
    return int(match[1]) if match else None


def parent_function(path: str) -> PciAddress | None:
    """The PCI function that a sysfs path lies below: the last part of it that is a BDF."""
    for part in reversed(path.split("/")):
        if BDF_NAME.match(part):
            return PciAddress.parse(part)
    return None


def node_of(text: str | None, known: Mapping[int, HostNode]) -> tuple[int | None, str | None]:
    """The node that a ``numa_node`` text names, or None and why it is unknown. Never guesses."""
    if text is None:
        return None, "its numa_node is missing or cannot be read"
    if not re.fullmatch(r"-?[0-9]{1,12}", text):
        return None, f"its numa_node is no number: {text[:40]!r}" if text else "its numa_node is empty"
    number = int(text)
    if number == -1:
        return None, "its numa_node is -1: the host's firmware does not say"
    if not 0 <= number <= MAX_NODE or (known and number not in known):
        return None, f"its numa_node is {number}, which is no node of this host"
    return number, None


def cpu_of(modalias: str | None) -> HostCpu | None:
    """The processor that ``/sys/devices/system/cpu/modalias`` names; None for another architecture or vendor.

    Its form is Linux's CPU_FEATURE_TYPEFMT (arch/x86/include/asm/cpufeature.h).
    """
    match = _CPU_ALIAS.match(modalias or "")
    if match is None:
        return None
    vendor, family, model = (int(part, 16) for part in match.groups())
    return HostCpu(_CPU_VENDORS[vendor], family, model) if vendor in _CPU_VENDORS else None


def _node(record: NodeRecord, order: list[int]) -> HostNode:
    try:
        cpus = CpuSet.parse(record.cpulist or "")
    except BadInput:
        cpus = CpuSet()
    numbers = (record.distance or "").split()
    # the columns are in the order of the online nodes, which need not be contiguous
    distances = dict(zip(order, map(int, numbers), strict=True)) if _fits(numbers, order) else {}
    match = re.search(r"MemTotal:\s*([0-9]{1,18}) kB", record.meminfo or "")
    package = re.fullmatch(r"([0-9]{1,9})", record.package or "")
    return HostNode(
        record.id, cpus, int(match[1]) if match else None, distances, package=int(package[1]) if package else None
    )


def _fits(numbers: list[str], order: list[int]) -> bool:
    return len(numbers) == len(order) and all(number.isascii() and number.isdigit() for number in numbers)


def _function(address: PciAddress, record: FunctionRecord, known: Mapping[int, HostNode]) -> HostFunction:
    node, problem = node_of(record.attributes.get("numa_node"), known)
    parts = record.path.split("/")
    roots = [number for number, part in enumerate(parts) if ROOT_NAME.match(part)]
    above = [part for part in parts[roots[-1] + 1 : -1] if BDF_NAME.match(part)] if roots else []
    group = record.links.get("iommu_group")
    return HostFunction(
        address=address,
        node=node,
        node_problem=problem,
        root_complex=parts[roots[-1]] if roots else None,
        bridges=tuple(PciAddress.parse(part) for part in above),
        physfn=_bdf(record.links.get("physfn")),
        pci_class=_hex(record.attributes.get("class")),
        vendor=_hex(record.attributes.get("vendor")),
        device=_hex(record.attributes.get("device")),
        subsystem_vendor=_hex(record.attributes.get("subsystem_vendor")),
        subsystem_device=_hex(record.attributes.get("subsystem_device")),
        bars=_bars(record.attributes.get("resource")),
        link=_link(record.attributes),
        iommu_group=int(group) if group and group.isascii() and group.isdigit() else None,
        driver=record.links.get("driver"),
    )


def _bdf(name: str | None) -> PciAddress | None:
    return PciAddress.parse(name) if name and BDF_NAME.match(name) else None


def _hex(text: str | None) -> int | None:
    return int(text, 16) if text and re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text) else None


def _bars(text: str | None) -> tuple[Bar, ...]:
    found = []
    for index, line in enumerate((text or "").splitlines()[:_BAR_COUNT]):
        match = re.fullmatch(r"0x([0-9a-fA-F]{1,16}) 0x([0-9a-fA-F]{1,16}) 0x([0-9a-fA-F]{1,16})", line.strip())
        if match is None:
            continue
        start, end, flags = (int(part, 16) for part in match.groups())
        if flags and end > start:
            found.append(Bar(index, end - start + 1, flags))
    return tuple(found)


def _link(attributes: Mapping[str, str | None]) -> Link:
    def value(name: str) -> float | None:
        match = re.match(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)", attributes.get(name) or "")
        return float(match[1]) if match and float(match[1]) > 0 else None

    def width(name: str) -> int | None:
        lanes = value(name)
        # Linux shows 255 or 0 where the width is not known
        return int(lanes) if lanes is not None and 0 < lanes <= 64 else None

    return Link(
        value("current_link_speed"), width("current_link_width"), value("max_link_speed"), width("max_link_width")
    )
