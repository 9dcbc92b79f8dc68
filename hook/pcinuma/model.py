"""Frozen data that the steps hand to each other: what a domain is, what a host is, what is planned, what was found.

Nothing here reads or writes anything. Units: memory in KiB, link speed in GT/s, sizes in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pcinuma.errors import BadInput

ALIAS_PREFIX = "ua-pcinuma-"
"""How a PCI controller of ours is known again: libvirt keeps only aliases that begin ``ua-``."""

CLIQUE_PROPERTY = "x-nv-gpudirect-clique"
"""QEMU's property of vfio-pci that tells NVIDIA's driver which GPUs are peers (hw/vfio/pci-quirks.c)."""

MAX_BUS = 0xFF
MAX_SLOT = 0x1F
MAX_FUNCTION = 7
MAX_NODE = 1023  # Linux has at most 2^10 nodes (NODES_SHIFT)

Severity = Literal["info", "warning", "error"]
Outcome = Literal["changed", "unchanged", "refused"]
DeviceKind = Literal["pci", "mdev", "interface", "vdpa"]
PlacementKind = Literal["placed", "kept", "left", "approximate"]

_BDF = re.compile(r"\s*(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})\.([0-7])\s*\Z")
_RANGE = re.compile(r"(\^?)\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6}))?\Z")


@dataclass(frozen=True, order=True, slots=True)
class PciAddress:
    """A PCI address ``dddd:bb:ss.f``; in a libvirt guest address ``bus`` is a controller *index*, not a bus number."""

    domain: int
    bus: int
    slot: int
    function: int

    @classmethod
    def parse(cls, text: str) -> PciAddress:
        """The address written in ``text`` (``0000:41:00.0``, domain optional and up to 8 hex digits).

        Raises BadInput when it is none.
        """
        match = _BDF.match(text)
        if match is None:
            raise BadInput(f"not a PCI address: {text!r}", hint="write it as 0000:41:00.0")
        domain, bus, slot, function = (int(part or "0", 16) for part in match.groups())
        if slot > MAX_SLOT:
            raise BadInput(f"not a PCI address: {text!r}: slot {slot:#x} is above 0x1f")
        return cls(domain, bus, slot, function)

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.slot:02x}.{self.function:x}"

    @property
    def slot_key(self) -> tuple[int, int, int]:
        """Domain, bus and slot: what the functions of one device share."""
        return (self.domain, self.bus, self.slot)

    @property
    def dashed(self) -> str:
        """The address in the characters that an alias may have: ``0000-41-00-0``."""
        return f"{self.domain:04x}-{self.bus:02x}-{self.slot:02x}-{self.function:x}"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class CpuSet:
    """A set of CPU or node numbers, as libvirt (``0-3,^2,5``) and the kernel (``0-31,64-95``) write it.

    ``mask`` has the bit of each member: 2 KiB for the largest set, where a frozenset takes a megabyte, and a domain may
    have one for each of thousands of vCPUs.
    """

    mask: int

    LIMIT = 16384  # libvirt's VIR_DOMAIN_CPUMASK_LEN; also keeps "0-999999" from costing memory

    def __init__(self, members: Iterable[int] = ()):
        mask = 0
        for number in members:
            mask |= 1 << number
        object.__setattr__(self, "mask", mask)

    @classmethod
    def parse(cls, text: str) -> CpuSet:
        """The set written in ``text``; the empty text is the empty set. Raises BadInput when it does not parse."""
        mask = 0
        for part in text.split(",") if text.strip() else ():
            match = _RANGE.match(part.strip())
            if match is None:
                raise BadInput(f"not a set of numbers: {text!r}", hint="write it as 0-3,8,^2")
            first = int(match[2])
            last = int(match[3]) if match[3] is not None else first
            if last < first or last >= cls.LIMIT:
                raise BadInput(f"not a set of numbers: {text!r}: {part.strip()!r} is out of order or out of range")
            span = ((1 << (last - first + 1)) - 1) << first
            mask = mask & ~span if match[1] else mask | span
        return cls._of(mask)

    @classmethod
    def _of(cls, mask: int) -> CpuSet:
        made = cls()
        object.__setattr__(made, "mask", mask)
        return made

    @property
    def members(self) -> frozenset[int]:
        return frozenset(self)

    @property
    def first(self) -> int | None:
        """The lowest member; None of the empty set."""
        return (self.mask & -self.mask).bit_length() - 1 if self.mask else None

    def __or__(self, other: CpuSet) -> CpuSet:
        return self._of(self.mask | other.mask)

    def __le__(self, other: CpuSet) -> bool:
        """Whether all members are the other's as well."""
        return not self.mask & ~other.mask

    def __contains__(self, number: int) -> bool:
        return bool(self.mask >> number & 1)

    def __iter__(self) -> Iterator[int]:
        return (number for number, bit in enumerate(reversed(f"{self.mask:b}")) if bit == "1")

    def __bool__(self) -> bool:
        return bool(self.mask)

    def __repr__(self) -> str:
        return f"CpuSet.parse({str(self)!r})"

    def __str__(self) -> str:
        runs: list[list[int]] = []
        for number in self:
            if runs and runs[-1][1] == number - 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# --- the domain ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """A guest NUMA cell, ``/domain/cpu/numa/cell``. ``memory`` is the number as written, whatever its unit."""

    id: int
    cpus: CpuSet
    memory: int
    element: int = 0
    has_distances: bool = False


@dataclass(frozen=True, slots=True)
class PciController:
    """A ``<controller type="pci">``. ``element`` is its place in document order; what is not written is None.

    ``is_ours`` is set for one with our alias, for whatever else sits on an expander of ours, and for switch ports below
    one of ours: libvirt puts nothing there but when bus 0 is full, and with ours gone it could not stay.
    """

    element: int
    index: int | None
    model: str | None
    address: PciAddress | None = None
    multifunction: bool = False
    alias: str | None = None
    bus_nr: int | None = None
    node: int | None = None
    is_ours: bool = False
    index_is_implied: bool = False
    """``index`` is not written, but what libvirt will make it: the lowest that is free."""

    @property
    def has_our_alias(self) -> bool:
        return self.alias is not None and self.alias.startswith(ALIAS_PREFIX)

    @property
    def is_expander(self) -> bool:
        return self.model in ("pcie-expander-bus", "pxb", "pci-expander-bus")


@dataclass(frozen=True, slots=True)
class Device:
    """A passthrough PCI function: a ``<hostdev>`` of type pci or mdev, or an ``<interface>`` of type hostdev or vdpa.

    ``source`` is the host BDF; None for a mediated device, whose ``uuid`` is set, and for a vDPA device, whose
    ``vdpa`` is the name of its character device (``vhost-vdpa-0``). ``address`` is the libvirt guest address.
    """

    element: int
    kind: DeviceKind
    source: PciAddress | None
    uuid: str | None = None
    address: PciAddress | None = None
    multifunction: bool = False
    alias: str | None = None
    mode: str | None = None
    vdpa: str | None = None

    @property
    def label(self) -> str:
        """How messages name the device: its host BDF, its mdev UUID or its vDPA character device."""
        if self.source is not None:
            return str(self.source)
        return f"mdev {self.uuid}" if self.uuid is not None else f"vdpa {self.vdpa}"


@dataclass(frozen=True, slots=True)
class OtherDevice:
    """Any other device that has a guest PCI address, or that libvirt may give one; ``model`` as it is written."""

    element: int
    tag: str
    address: PciAddress | None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class GuestCpu:
    """What the domain says of its CPU: ``mode`` of ``<cpu>``; of ``<maxphysaddr>`` its mode (None where there is none),
    bits and limit; of ``<topology>`` the threads of a core and of a socket, 1 where it has none."""

    mode: str | None = None
    address_mode: str | None = None
    address_bits: int | None = None
    address_limit: int | None = None
    threads: int = 1
    socket_threads: int = 1


@dataclass(frozen=True, slots=True)
class Domain:
    """What the steps need to know of a domain XML. ``memnodes`` and ``pins`` are by cell id and by vCPU number."""

    arch: str
    machine: str
    cells: tuple[Cell, ...]
    memnodes: Mapping[int, CpuSet]
    pins: Mapping[int, CpuSet]
    controllers: tuple[PciController, ...]
    devices: tuple[Device, ...]
    others: tuple[OtherDevice, ...]
    aliases: frozenset[str] = frozenset()
    """Those of everything but the controllers of ours."""
    cpu: GuestCpu = GuestCpu()
    is_uefi: bool = False
    memory: int = 0
    """Bytes of memory that the guest has or may come to have."""
    cliques: Mapping[str, int] = field(default_factory=dict)
    """GPUDirect cliques that the domain sets already, by the alias of the device."""

    @property
    def takes_expanders(self) -> bool:
        """libvirt allows pcie-expander-bus on x86 q35 and aarch64 virt only."""
        if self.arch == "x86_64":
            return self.machine == "q35" or self.machine.startswith("pc-q35-")
        return self.arch == "aarch64" and (self.machine == "virt" or self.machine.startswith("virt-"))


# --- the host --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostQuery:
    """What is asked of the host: PCI functions by BDF, mediated devices by UUID, vDPA devices by the name of their
    character device, nothing else.

    Without ``details`` only what placing them needs is read: their node, their place in the tree, their BARs, their
    IOMMU group and their PF; with ``ids`` also what they are. ``address_bits`` asks for those of the host's CPU
    and for what it is, ``packages`` for the sockets of the nodes.
    """

    functions: frozenset[PciAddress] = frozenset()
    mdevs: frozenset[str] = frozenset()
    vdpas: frozenset[str] = frozenset()
    details: bool = True
    ids: bool = False
    address_bits: bool = True
    packages: bool = True


@dataclass(frozen=True, slots=True)
class HostNode:
    """A NUMA node of the host. ``memory_kib`` is None where it is not known, 0 for a node without memory; ``package``
    is its socket, None where that was not asked for or is not known."""

    id: int
    cpus: CpuSet
    memory_kib: int | None = None
    distances: Mapping[int, int] = field(default_factory=dict)
    package: int | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    """A base address register: ``index`` as in sysfs ``resource``, ``size`` in bytes, Linux resource ``flags``."""

    index: int
    size: int
    flags: int


@dataclass(frozen=True, slots=True)
class Link:
    """A PCIe link, speed in GT/s and width in lanes; None where the device does not say."""

    speed: float | None = None
    width: int | None = None
    max_speed: float | None = None
    max_width: int | None = None


@dataclass(frozen=True, slots=True)
class HostFunction:
    """A PCI function of the host. ``node`` is None when unknown, ``node_problem`` then says why.

    ``root_complex`` is the sysfs name (``pci0000:40``), ``bridges`` the bridges above it from the root down.
    """

    address: PciAddress
    node: int | None
    node_problem: str | None = None
    root_complex: str | None = None
    bridges: tuple[PciAddress, ...] = ()
    pci_class: int | None = None
    vendor: int | None = None
    device: int | None = None
    subsystem_vendor: int | None = None
    subsystem_device: int | None = None
    bars: tuple[Bar, ...] = ()
    link: Link = Link()
    physfn: PciAddress | None = None
    iommu_group: int | None = None
    driver: str | None = None


@dataclass(frozen=True, slots=True)
class HostCpu:
    """The host's x86 processor: CPUID's vendor string, family and model as Linux counts them (``/proc/cpuinfo``)."""

    vendor: str
    family: int
    model: int


@dataclass(frozen=True, slots=True)
class HostTopology:
    """The part of the host that was asked for. ``mdev_parents`` is by lower-case UUID, ``vdpa_parents`` by the name
    of the character device. The PF of a VF whose own node is unknown is among the functions. ``address_bits`` are the
    physical ones of its CPUs, None where they are not known; ``cpu`` is None where neither details nor address bits
    were asked for, where it is not known, or is not x86."""

    nodes: Mapping[int, HostNode]
    functions: Mapping[PciAddress, HostFunction]
    mdev_parents: Mapping[str, PciAddress] = field(default_factory=dict)
    vdpa_parents: Mapping[str, PciAddress] = field(default_factory=dict)
    address_bits: int | None = None
    cpu: HostCpu | None = None


# --- options ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """What the owner of the VM chose; the contract's defaults."""

    policy: str = "best-effort"
    group_by: str = "numa"
    unmapped: str = "leave"
    addressed: str = "keep"
    mmio: str = "report"
    distances: str = "keep"
    gpudirect_clique: str = "none"
    enabled: bool = True


# --- plan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a user should know; ``code`` is stable, ``device`` a host BDF or a place in the domain."""

    code: str
    severity: Severity
    message: str
    device: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Attachment:
    """A device on a port of ours, at slot 0 and its ``function``."""

    device: Device
    function: int
    multifunction: bool


PortModel = Literal["pcie-root-port", "pcie-switch-upstream-port", "pcie-switch-downstream-port"]


@dataclass(frozen=True, slots=True)
class PlannedPort:
    """A port of ours: at ``slot`` and ``function`` below the controller with index ``parent``, with devices on it, or
    with the ports of a switch. ``existing`` is the controller in the domain that is this port already, if any."""

    alias: str
    index: int
    parent: int
    slot: int
    function: int
    multifunction: bool
    attachments: tuple[Attachment, ...] = ()
    model: PortModel = "pcie-root-port"
    existing: PciController | None = None


@dataclass(frozen=True, slots=True)
class PlannedExpander:
    """An expander of ours for one cell. All ports below it follow it in index and in bus number, each bridge's own
    right after it."""

    alias: str
    index: int
    bus_nr: int
    cell: int
    ports: tuple[PlannedPort, ...]
    existing: PciController | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one device goes and why. ``code`` is the finding's code when it does not go to a cell of its own."""

    device: Device
    source: PciAddress | None
    host_node: int | None
    cell: int | None
    kind: PlacementKind
    guest_address: PciAddress | None = None
    guest_bdf: PciAddress | None = None
    code: str | None = None
    reason: str | None = None
    hint: str | None = None
    fits: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done to a domain. ``drop`` are controllers of ours that go, ``detach`` devices that lose the
    guest address which an earlier set of ours gave them. ``address_bits`` is the ``<maxphysaddr>`` to set,
    ``distances`` are to be written by cell and other cell, ``cliques`` by the alias of a hostdev.
    ``refusal`` is set when the policy refuses."""

    expanders: tuple[PlannedExpander, ...] = ()
    placements: tuple[Placement, ...] = ()
    cell_nodes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    drop: tuple[PciController, ...] = ()
    detach: tuple[Device, ...] = ()
    address_bits: int | None = None
    distances: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    cliques: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    refusal: str | None = None
    refusal_hint: str | None = None

    @property
    def ports(self) -> Iterable[PlannedPort]:
        for expander in self.expanders:
            yield from expander.ports


# --- report ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome with everything that led to it; `report` turns it into JSON, text and pictures."""

    outcome: Outcome
    options: Options
    plan: Plan
    findings: tuple[Finding, ...]
