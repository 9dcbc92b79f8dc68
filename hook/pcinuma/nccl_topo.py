"""``nccl-topo``: the file that NCCL reads through ``NCCL_TOPO_FILE``, for the guest of a domain as it stands.

NCCL takes from the file whatever it says and detects the rest (NCCL src/graph/xml.cc ncclTopoGetXmlFromSys, topo.cc
ncclTopoGetSystem). So the file tells what a guest cannot see: which devices share a switch of the host, the speed of
the host's links, the host's processor. Endpoints carry the BDF that the guest shows, by which NCCL finds them. What is
not known is left out, and NCCL looks for it in the guest.

The tree is the one that NCCL would make on the host, where it knows of each PCIe switch the upstream port alone. A
switch matters when devices of the file are in at least two places directly below it (as for ``--group-by switch``);
another tells nothing and is left out, and what is below it takes the slower of the two links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pcinuma.domain_xml import load
from pcinuma.errors import PcinumaError
from pcinuma.mapping import map_nodes
from pcinuma.model import (
    MAX_BUS,
    MAX_SLOT,
    Device,
    Domain,
    Finding,
    HostFunction,
    HostQuery,
    HostTopology,
    Link,
    PciAddress,
    PciController,
)
from pcinuma.nccl_file import NCCL_VERSION, RCCL_VERSION, Endpoint, Switch, elements, in_guest_order, text
from pcinuma.parse import parse
from pcinuma.pci_tree import predicted_bdf

MAX_NODES = 256
"""NCCL_TOPO_XML_MAX_NODES (NCCL src/graph/topo.h): elements of the file and of what NCCL adds to it."""

NVIDIA, MELLANOX, AMD = 0x10DE, 0x15B3, 0x1002

Functions = Mapping[PciAddress, HostFunction]


class TooManyNodes(PcinumaError):
    """NCCL would not read the file: exit status 1."""

    code = "nccl-too-large"


@dataclass(frozen=True, slots=True)
class TopologyFile:
    """``text`` is the file; ``findings`` say what is not in it and why."""

    text: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """A device that goes into the file, of the kind that :func:`_kind` says. ``bridges`` are those above it on the
    host, from the root port down: upstream and downstream ports of switches in turn (PCI Express Base, 1.3.3 Switch).
    ``slot`` tells it from others on its bus, for a VF that of its PF. ``ports`` are the upstream ports above it in the
    guest, by their guest BDF."""

    endpoint: Endpoint
    kind: str
    cell: int
    bridges: tuple[PciAddress, ...]
    slot: tuple[int, int, int]
    ports: tuple[PciAddress, ...]

    def switch(self, depth: int) -> PciAddress | None:
        """The upstream port of the switch that has ``depth`` others above it."""
        return self.bridges[2 * depth + 1] if 2 * depth + 1 < len(self.bridges) else None

    def below(self, depth: int) -> object:
        """Where directly below that switch the way goes on: a downstream port, or its own slot."""
        return self.bridges[2 * depth + 2] if 2 * depth + 2 < len(self.bridges) else self.slot


def topology_file(
    xml: bytes, read_host: Callable[[HostQuery], HostTopology], *, where: str = "domain XML"
) -> TopologyFile:
    """The file for the guest of this domain, as its addresses are.

    Raises BadInput, HostUnreadable, and :class:`TooManyNodes` for a file that NCCL would not read.
    """
    domain = parse(load(xml, where))
    return topology(domain, _read(domain, read_host) if domain.devices else HostTopology({}, {}))


def _read(domain: Domain, read_host: Callable[[HostQuery], HostTopology]) -> HostTopology:
    """The functions that the domain names, and those above them, whose links count as well."""
    wanted = frozenset(device.source for device in domain.devices if device.source is not None)
    uuids = frozenset(device.uuid for device in domain.devices if device.uuid is not None)
    host = read_host(HostQuery(wanted, uuids))
    above = {bridge for function in host.functions.values() for bridge in function.bridges}
    above |= {function.physfn for function in host.functions.values() if function.physfn is not None}
    missing = frozenset(above - host.functions.keys())
    more = read_host(HostQuery(missing)).functions if missing else {}
    return replace(host, functions={**more, **host.functions})


def topology(domain: Domain, host: HostTopology) -> TopologyFile:
    """The file, from the domain and the host with all details of its functions and of those above them."""
    places, findings = _places(domain, host)
    named = _Named(places)
    tree = {
        cell.id: named.branches([place for place in places if place.cell == cell.id], 0, host.functions)
        for cell in in_guest_order(domain.cells)
    }
    findings += named.findings
    gpus = {place.endpoint.vendor == AMD for place in places if place.kind == "gpu"}
    if not gpus:
        hint = "NCCL detects by itself what the file does not name"
        findings.append(Finding("nccl-no-gpu", "warning", "the file has no GPU", None, hint))
    elif len(gpus) > 1:
        message = "the VM has AMD GPUs beside others: the file is for NCCL, RCCL refuses it"
        findings.append(Finding("nccl-mixed-gpus", "warning", message))
    if places and host.cpu is None and domain.arch == "x86_64":
        message = "the host's CPU is not known: its vendor, family and model are not in the file"
        hint = "record the host again with this version's 'pcinuma snapshot', or run on the VM's node"
        findings.append(Finding("nccl-cpu-unknown", "warning", message, None, hint))
    # a process of NCCL adds <gpu> and <nvlink> for its GPU, <nic> and <net> for each NIC, and keeps one to spare
    needed = elements(domain.cells, tree) + 3 + 2 * sum(place.kind == "nic" for place in places)
    if needed > MAX_NODES:
        what = f"NCCL would need {needed} elements for this topology, and takes {MAX_NODES} at most"
        raise TooManyNodes(what, hint="pass fewer network functions to the VM, or run NCCL without a file")
    version = RCCL_VERSION if gpus == {True} else NCCL_VERSION
    return TopologyFile(text(domain.cells, tree, arch=domain.arch, cpu=host.cpu, version=version), tuple(findings))


# --- which devices ---------------------------------------------------------------------------------------------


def _places(domain: Domain, host: HostTopology) -> tuple[list[_Place], list[Finding]]:
    cell_of = map_nodes(domain, host).cell_of
    found: list[_Place] = []
    findings: list[Finding] = []
    taken: dict[PciAddress, Device] = {}
    for device in domain.devices:
        if device.vdpa is not None:
            continue  # the guest has a virtio device of it, which NCCL looks for on no PCI bus
        source = device.source if device.uuid is None else host.mdev_parents.get(device.uuid)
        function = host.functions.get(source) if source is not None else None
        if function is not None and function.pci_class is not None and _kind(function) is None:
            continue  # a disk, the audio function of a GPU: nothing that NCCL looks at
        made = _place(device, function, domain, cell_of, host.functions)
        if not isinstance(made, str) and (other := taken.setdefault(made.endpoint.bdf, device)) is not device:
            made = f"its guest address is that of {other.label} as well"
        if isinstance(made, str):
            message = f"{device.label} is not in the file: {made}"
            hint = "NCCL looks for it in the guest by itself"
            findings.append(Finding("nccl-left-out", "warning", message, device.label, hint))
            continue
        found.append(made)
        if made.endpoint.link.speed is None or made.endpoint.link.width is None:
            message = f"the host does not say the speed and width of the link of {device.label}"
            hint = "NCCL takes them from the guest, where they are those of an emulated port"
            findings.append(Finding("nccl-link-unknown", "warning", message, device.label, hint))
    return found, findings


def _place(
    device: Device, function: HostFunction | None, domain: Domain, cell_of: Mapping[int, int], functions: Functions
) -> _Place | str:
    """The device with its places on the host and in the guest, or why it is not for the file."""
    if device.uuid is not None:
        return "a mediated device is a share of its parent, and so is its part of the link"
    if function is None:
        return "there is no such PCI function on this host"
    if function.pci_class is None:
        return "the host does not say its PCI class"
    bdf = predicted_bdf(device.address, domain) if device.address is not None else None
    if device.address is None or bdf is None:
        return "its BDF in the guest is decided when the VM starts"
    above = _above(device.address, domain)
    pf = functions.get(function.physfn) if function.physfn is not None else None
    node = function.node if function.node is not None or pf is None else pf.node
    cell = cell_of.get(node) if node is not None else None
    if cell is None and above:  # the host does not tell, so what the guest will see
        cell = above[-1].node
    if cell is None or all(cell != known.id for known in domain.cells):
        return f"host node {node} belongs to no guest cell" if node is not None else function.node_problem or "no node"
    ports = [predicted_bdf(port.address, domain) for port in above[1::2] if port.address and not port.is_expander]
    endpoint = Endpoint(
        bdf, function.address, function.pci_class, function.vendor, function.device, _device_link(function, functions)
    )
    slot = (function.physfn or function.address).slot_key
    above_in_guest = tuple(port for port in reversed(ports) if port is not None)
    return _Place(endpoint, _kind(function) or "", cell, function.bridges, slot, above_in_guest)


def _kind(function: HostFunction) -> str | None:
    """``gpu``, ``nic`` or ``nvswitch`` (NCCL src/graph/topo.cc kvDictPciClass); None for what NCCL does not look at."""
    pci_class = function.pci_class or 0
    if pci_class >> 16 == 0x03 or (pci_class >> 16 == 0x12 and function.vendor == AMD):
        return "gpu"
    if pci_class >> 16 == 0x02 or (pci_class == 0x080100 and function.vendor == MELLANOX):  # ConnectX-8 Data Direct
        return "nic"
    return "nvswitch" if pci_class == 0x068000 and function.vendor == NVIDIA else None


def _above(address: PciAddress, domain: Domain) -> list[PciController]:
    """The controllers above a guest address, from its own up; the root bus is none of them."""
    by_index = {controller.index: controller for controller in domain.controllers}
    found: list[PciController] = []
    while address.bus != 0 and (at := by_index.get(address.bus)) is not None and at not in found:
        found.append(at)
        if at.address is None:
            break
        address = at.address
    return found


# --- links -----------------------------------------------------------------------------------------------------


def _device_link(function: HostFunction, functions: Functions) -> Link:
    """A device's link: a VF has none of its own, it uses its PF's."""
    pf = functions.get(function.physfn) if function.physfn is not None else None
    return _hop([pf or function, functions.get(function.bridges[-1]) if function.bridges else None])


def _switch_link(switch: PciAddress, bridges: Sequence[PciAddress], functions: Functions) -> Link:
    """The link from a switch's upstream port to the port above it."""
    at = bridges.index(switch)
    return _hop([functions.get(switch), functions.get(bridges[at - 1]) if at else None])


def _hop(ends: Iterable[HostFunction | None]) -> Link:
    """What both ends can do, as NCCL has it: the lower maximum, not what an idle GPU has slowed down to."""
    links = [end.link for end in ends if end is not None]
    speeds = [speed for link in links if (speed := link.max_speed or link.speed) is not None]
    widths = [width for link in links if (width := link.max_width or link.width) is not None]
    return Link(min(speeds, default=None), min(widths, default=None))


def _slower(one: Link, other: Link) -> Link:
    return min((link for link in (one, other) if link.speed and link.width), key=_bandwidth, default=one)


def _bandwidth(link: Link) -> float:
    return (link.speed or 0) * (link.width or 0)


# --- the tree --------------------------------------------------------------------------------------------------


class _Named:
    """Makes branches, and gives each switch its BDF in the file: that of the guest's own switch above the very same
    devices, else one in a PCI domain that no guest has (``ffff:ff:01.0``, ``ffff:ff:02.0``)."""

    def __init__(self, places: Sequence[_Place]):
        self._below: dict[PciAddress, set[PciAddress]] = {}
        for place in places:
            for port in place.ports:
                self._below.setdefault(port, set()).add(place.endpoint.bdf)
        self._made_up = 0
        self.findings: list[Finding] = []

    def branches(self, places: Sequence[_Place], depth: int, functions: Functions) -> tuple[Switch | Endpoint, ...]:
        """What is below a switch, or a cell at ``depth`` 0, by guest BDF; ``depth`` switches are above."""
        made: list[Switch | Endpoint] = []
        for key, group in _grouped(places, depth).items():
            first = group[0].endpoint
            if key == first.host:
                made.append(first)
                continue
            link = _switch_link(key, functions[first.host].bridges, functions)
            if len({place.below(depth) for place in group}) > 1:
                if link.speed is None or link.width is None:
                    message = f"the host does not say the speed and width of the link of its switch {key}"
                    hint = "NCCL takes 8 GT/s and 16 lanes for it"
                    self.findings.append(Finding("nccl-link-unknown", "warning", message, str(key), hint))
                bdf = self._bdf(group)
                made.append(
                    Switch(bdf, key, _ids(functions.get(key)), link, self.branches(group, depth + 1, functions))
                )
            else:
                made += [_behind(link, branch) for branch in self.branches(group, depth + 1, functions)]
        return tuple(made)

    def _bdf(self, group: Sequence[_Place]) -> PciAddress:
        devices = {place.endpoint.bdf for place in group}
        for port in reversed(group[0].ports):
            if self._below[port] == devices:
                return port
        bus, slot = divmod(self._made_up, MAX_SLOT)
        self._made_up += 1
        return PciAddress(0xFFFF, MAX_BUS - bus, slot + 1, 0)


def _grouped(places: Sequence[_Place], depth: int) -> dict[PciAddress, list[_Place]]:
    """The places by the switch that is next above them, or each by itself where none is, in the guest's order."""
    groups: dict[PciAddress, list[_Place]] = {}
    for place in sorted(places, key=lambda place: place.endpoint.bdf):
        groups.setdefault(place.switch(depth) or place.endpoint.host, []).append(place)
    return groups


def _ids(switch: HostFunction | None) -> tuple[int | None, int | None, int | None, int | None]:
    if switch is None:
        return (None, None, None, None)
    return (switch.vendor, switch.device, switch.subsystem_vendor, switch.subsystem_device)


def _behind(link: Link, branch: Switch | Endpoint) -> Switch | Endpoint:
    return replace(branch, link=_slower(branch.link, link))
