"""Tree → Domain: reads KubeVirt's and libvirt's spellings alike, and refuses what libvirt would refuse.

Numbers are read as libvirt reads them, by C's strtoul: ``0x1f`` hexadecimal, ``31`` decimal, ``010`` octal.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from functools import lru_cache

from pcinuma.domain_xml import QEMU, Document, Element, attribute, children, find, tag_of, text_of
from pcinuma.errors import BadInput
from pcinuma.model import (
    CLIQUE_PROPERTY,
    MAX_BUS,
    MAX_FUNCTION,
    MAX_NODE,
    MAX_SLOT,
    Cell,
    CpuSet,
    Device,
    DeviceKind,
    Domain,
    GuestCpu,
    OtherDevice,
    PciAddress,
    PciController,
)

_NUMBER = re.compile(r"[ \t\r\n]*\+?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)\Z")
_DECIMAL = re.compile(r"[ \t\r\n]*\+?([0-9]+)\Z")
_UNIT = re.compile(r"(?:b|bytes?|(?P<size>[kmgtpe])(?P<tail>i?b)?)\Z", re.IGNORECASE)
_SWITCH_PORTS = ("pcie-switch-upstream-port", "pcie-switch-downstream-port")
_UUID = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}\Z")

_BUS_OF_ITS_OWN = frozenset(("fdc", "ccid", "isa", "xenbus"))
MAX_CELLS = 128
"""What QEMU takes (MAX_NODES in its include/sysemu/numa.h)."""

_MODELS_ELSEWHERE = {
    "watchdog": ("itco", "ib700", "diag288"),
    "sound": ("sb16", "pcspk", "usb"),
    "iommu": ("intel", "smmuv3", "amd"),
}
"""Of devices that may be on PCI the models that are not: a part of the chipset (itco, which libvirt gives every q35
machine from 9.1 on), on ISA, on USB."""

_NEVER_PCI = frozenset(("audio", "channel", "console", "emulator", "graphics", "hub", "lease", "panic", "parallel")) | {
    "redirdev",
    "redirfilter",
    "serial",
    "smartcard",
    "tpm",
}
"""What libvirt gives no PCI address of itself (libvirt formatdomain, Devices); some of it takes one that is written."""


def parse(document: Document) -> Domain:
    """The domain that the document describes. Raises BadInput with the line for what libvirt would refuse."""
    root = document.root
    os_type = find(root, "os", "type")
    devices_element = find(root, "devices")
    if (second := next((e for e in children(root, "devices") if e is not devices_element), None)) is not None:
        raise BadInput("the domain has <devices> twice", where=document.line(second))
    cells = _cells(document)
    controllers: list[PciController] = []
    passed: list[Device] = []
    devices: list[Device] = []  # those of them that the guest gets (not address type unassigned), on PCI
    others: list[OtherDevice] = []
    for element in children(devices_element) if devices_element is not None else ():
        tag = tag_of(element)
        if tag == "controller" and attribute(element, "type") == "pci":
            if len(controllers) > MAX_BUS:
                raise BadInput(f"the domain has more than {MAX_BUS + 1} PCI controllers", where=document.line(element))
            controllers.append(_controller(document, element))
        elif (kind := _passthrough_kind(element)) is not None:
            passed.append(device := _device(document, element, kind))
            if attribute(find(element, "address"), "type") in (None, "", "pci"):
                devices.append(device)
        else:
            address, _ = _guest_address(document, element)
            if address is not None or (tag not in _NEVER_PCI and _may_be_on_pci(element)):
                model = attribute(find(element, "model"), "type") or attribute(element, "model")
                others.append(OtherDevice(document.ordinal(element), tag, address, model))
    _refuse_twice(document, controllers)
    _refuse_same_source(document, passed)
    owned = _with_ownership(controllers)
    return Domain(
        arch=(attribute(os_type, "arch") or "x86_64"),
        machine=(attribute(os_type, "machine") or ""),
        cells=cells,
        memnodes=_memnodes(document, {cell.id for cell in cells}),
        pins=_pins(document),
        controllers=owned,
        devices=tuple(devices),
        others=tuple(others),
        aliases=_aliases(document, devices_element, {c.element for c in owned if c.is_ours and c.has_our_alias}),
        cpu=_cpu(document),
        is_uefi=_is_uefi(root),
        memory=_memory(root),
        cliques=_cliques(root),
    )


def number(text: str, what: str, limit: int, where: str) -> int:
    """The number in ``text`` as C's strtoul with base 0 reads it; BadInput above ``limit`` or when it is none."""
    value = _c_value(text)
    if value is None:
        raise BadInput(f"{what} is no number: {text!r}", where=where)
    if value > limit:
        raise BadInput(f"{what} is {text}, above {limit:#x}", where=where)
    return value


@lru_cache(maxsize=1024)  # a domain says 0x00 a thousand times
def _c_value(text: str) -> int | None:
    match = _NUMBER.match(text)
    if match is None or len(match[1]) > 20:
        return None
    digits = match[1]
    return int(digits, 8) if digits.isdigit() and digits[0] == "0" else int(digits, 0)


def decimal(text: str | None, what: str, limit: int, where: str) -> int:
    """The decimal number in ``text``; BadInput above ``limit``, when it is none or absent."""
    match = _DECIMAL.match(text or "")
    if match is None or len(match[1]) > 20 or int(match[1]) > limit:
        raise BadInput(f"{what} is no number up to {limit}: {text!r}", where=where)
    return int(match[1])


def _number_set(text: str, what: str, where: str) -> CpuSet:
    try:
        numbers = CpuSet.parse(text)
    except BadInput as error:
        raise BadInput(f"{what} is {error.message}", where=where, hint=error.hint) from None
    return numbers


# --- CPU, memory, firmware -------------------------------------------------------------------------------------


def _cpu(document: Document) -> GuestCpu:
    cpu = find(document.root, "cpu")
    given = find(cpu, "maxphysaddr")
    if attribute(given, "mode") == "emulate" and not attribute(given, "bits") and given is not None:
        raise BadInput("maxphysaddr's mode is emulate, and there are no bits", where=document.line(given))
    threads, *more = (_count(find(cpu, "topology"), name) for name in ("threads", "cores", "clusters", "dies"))
    return GuestCpu(
        mode=attribute(cpu, "mode"),
        address_mode=attribute(given, "mode"),
        address_bits=_bits(document, given, "bits"),
        address_limit=_bits(document, given, "limit"),
        threads=threads,
        socket_threads=threads * math.prod(more),
    )


def _bits(document: Document, maxphysaddr: Element | None, name: str) -> int | None:
    written = attribute(maxphysaddr, name)
    if maxphysaddr is None or not written:
        return None
    return decimal(written, f"maxphysaddr's {name}", 64, document.line(maxphysaddr))


def _count(topology: Element | None, name: str) -> int:
    """A count of ``<topology>``; 1 where it is not written, or not as libvirt would take it."""
    match = _DECIMAL.match(attribute(topology, name) or "")
    return int(match[1]) or 1 if match and len(match[1]) <= 5 else 1


def _is_uefi(root: Element) -> bool:
    """Whether the guest starts from UEFI: by name or by its image (libvirt formatdomain, BIOS bootloader)."""
    os_element = find(root, "os")
    loader = find(os_element, "loader")
    return attribute(os_element, "firmware") == "efi" or attribute(loader, "type") == "pflash"


def _memory(root: Element) -> int:
    """The most memory that the guest has or may come to have. libvirt takes the sum of the cells for ``<memory>``."""
    numa = find(root, "cpu", "numa")
    cells = children(numa, "cell") if numa is not None else ()
    in_cells = sum(_bytes(attribute(cell, "memory"), attribute(cell, "unit")) for cell in cells)
    written = (find(root, name) for name in ("memory", "maxMemory"))
    return max(in_cells, *(_bytes(text_of(element), attribute(element, "unit")) for element in written))


def _bytes(text: str | None, unit: str | None) -> int:
    """A size with its unit as libvirt reads it: KiB where none is written, in any case (virstring virScaleInteger).

    0 for what it would not take, since libvirt will say that.
    """
    match, scale = _DECIMAL.match(text or ""), _UNIT.match(unit or "KiB")
    if match is None or scale is None or len(match[1]) > 20:
        return 0
    base = 1000 if (scale["tail"] or "").lower() == "b" else 1024
    power = " kmgtpe".index(scale["size"].lower()) if scale["size"] else 0
    return int(match[1]) * int(base**power)


def _cliques(root: Element) -> dict[str, int]:
    """The numbers that ``qemu:override`` sets; what is none is QEMU's to say."""
    override = find(root, QEMU + "override")
    found: dict[str, int] = {}
    for device in children(override, QEMU + "device") if override is not None else ():
        alias = attribute(device, "alias")
        for frontend in children(device, QEMU + "frontend"):
            for said in children(frontend, QEMU + "property"):
                value = attribute(said, "value") or ""
                if alias and attribute(said, "name") == CLIQUE_PROPERTY and re.fullmatch("[0-9]{1,2}", value):
                    found[alias] = int(value)
    return found


# --- cells, pinning --------------------------------------------------------------------------------------------


def _cells(document: Document) -> tuple[Cell, ...]:
    numa = find(document.root, "cpu", "numa")
    cells: dict[int, Cell] = {}
    for position, element in enumerate(children(numa, "cell") if numa is not None else ()):
        where = document.line(element)
        written = attribute(element, "id")
        # libvirt numbers cells without id by their position (formatdomain, CPU model and topology)
        cell_id = position if written is None else decimal(written, "the cell's id", CpuSet.LIMIT, where)
        if cell_id in cells:
            raise BadInput(f"cell {cell_id} is there twice", where=where)
        if len(cells) == MAX_CELLS:
            raise BadInput(f"the domain has more than {MAX_CELLS} NUMA cells, QEMU's most", where=where)
        cpus = _number_set(attribute(element, "cpus") or "", "the cell's cpus", where)
        memory = attribute(element, "memory")
        cells[cell_id] = Cell(
            cell_id,
            cpus,
            memory=decimal(memory, "the cell's memory", 2**64, where) if memory else 0,
            element=document.ordinal(element),
            has_distances=find(element, "distances") is not None,
        )
    return tuple(cells[cell_id] for cell_id in sorted(cells))


def _memnodes(document: Document, cells: set[int]) -> dict[int, CpuSet]:
    numatune = find(document.root, "numatune")
    found: dict[int, CpuSet] = {}
    for element in children(numatune, "memnode") if numatune is not None else ():
        where = document.line(element)
        cell_id = decimal(attribute(element, "cellid"), "the memnode's cellid", CpuSet.LIMIT, where)
        nodes = _number_set(attribute(element, "nodeset") or "", "the memnode's nodeset", where)
        if not nodes:
            raise BadInput("the memnode's nodeset is empty", where=where)
        if nodes.mask >> (MAX_NODE + 1):
            raise BadInput(f"the memnode's nodeset goes beyond {MAX_NODE}, Linux's last node", where=where)
        if cell_id in found:
            raise BadInput(f"memnode for cell {cell_id} is there twice", where=where)
        if cell_id not in cells:
            raise BadInput(f"memnode names cell {cell_id}, which the domain does not have", where=where)
        found[cell_id] = nodes
    return found


def _pins(document: Document) -> dict[int, CpuSet]:
    cputune = find(document.root, "cputune")
    pins: dict[int, CpuSet] = {}
    for element in children(cputune, "vcpupin") if cputune is not None else ():
        where = document.line(element)
        vcpu = decimal(attribute(element, "vcpu"), "the vcpupin's vcpu", CpuSet.LIMIT, where)
        if vcpu in pins:
            raise BadInput(f"vcpupin for vCPU {vcpu} is there twice", where=where)
        pins[vcpu] = _number_set(attribute(element, "cpuset") or "", "the vcpupin's cpuset", where)
    return pins


# --- controllers -----------------------------------------------------------------------------------------------


def _controller(document: Document, element: Element) -> PciController:
    where = document.line(element)
    index = attribute(element, "index")
    target = find(element, "target")
    bus_nr = attribute(target, "busNr")
    node = text_of(find(target, "node"))
    address, multifunction = _guest_address(document, element)
    return PciController(
        element=document.ordinal(element),
        index=None if index is None else decimal(index, "the controller's index", MAX_BUS, where),
        model=attribute(element, "model"),
        address=address,
        multifunction=multifunction,
        alias=attribute(find(element, "alias"), "name"),
        bus_nr=number(bus_nr, "busNr", MAX_BUS, where) if bus_nr else None,
        node=decimal(node, "the expander's node", CpuSet.LIMIT, where) if node else None,
    )


def _with_ownership(controllers: list[PciController]) -> tuple[PciController, ...]:
    """Ours are those with our alias, what sits on an expander of ours, and every part of a switch below one of ours."""
    ours = {c.element for c in controllers if c.has_our_alias}
    while True:
        expanders = {c.index for c in controllers if c.element in ours and c.is_expander and c.index is not None}
        ports = {c.index for c in controllers if c.element in ours and c.index is not None}
        more = {
            c.element
            for c in controllers
            if c.address is not None
            and (c.address.bus in expanders or (c.address.bus in ports and c.model in _SWITCH_PORTS))
        }
        if more <= ours:
            return _with_indexes([replace(c, is_ours=True) if c.element in ours else c for c in controllers])
        ours |= more


def _with_indexes(controllers: list[PciController]) -> tuple[PciController, ...]:
    """A controller of another hand that says no index has the lowest that is free (libvirt's
    virDomainControllerFindUnusedIndex). One of ours has lost it, and has none."""
    used = {controller.index for controller in controllers}
    found = []
    for controller in controllers:
        if controller.index is None and not controller.is_ours:
            index = next(number for number in itertools.count() if number not in used)
            used.add(index)
            controller = replace(controller, index=index, index_is_implied=True)
        found.append(controller)
    return tuple(found)


def _refuse_twice(document: Document, controllers: list[PciController]) -> None:
    seen: set[int] = set()
    for controller in controllers:
        if controller.index is None:
            continue
        if controller.index in seen:
            where = document.line(document.elements[controller.element])
            raise BadInput(f"two PCI controllers have index {controller.index}", where=where)
        seen.add(controller.index)


# --- devices ---------------------------------------------------------------------------------------------------


def _passthrough_kind(element: Element) -> DeviceKind | None:
    if tag_of(element) == "hostdev" and attribute(element, "mode") in (None, "subsystem"):
        if attribute(element, "type") == "pci":
            return "pci"
        if attribute(element, "type") == "mdev" and attribute(element, "model") in (None, "", "vfio-pci"):
            return "mdev"
    if tag_of(element) == "interface":
        if attribute(element, "type") == "hostdev":
            return "interface"
        # a transitional virtio device is no PCIe endpoint: libvirt takes none on a root port
        if attribute(element, "type") == "vdpa" and attribute(find(element, "model"), "type") != "virtio-transitional":
            return "vdpa"
    return None


def _device(document: Document, element: Element, kind: DeviceKind) -> Device:
    where = document.line(element)
    source_address = find(element, "source", "address")
    source: PciAddress | None = None
    uuid: str | None = None
    vdpa: str | None = None
    if kind == "vdpa":
        vdpa = (attribute(find(element, "source"), "dev") or "").removeprefix("/dev/")
        if not vdpa:
            raise BadInput("the vDPA interface has no <source dev=…>", where=where)
    elif source_address is None:
        raise BadInput(f"the passthrough <{tag_of(element)}> has no <source><address>", where=where)
    elif kind == "mdev":
        written = (attribute(source_address, "uuid") or "").strip()
        if not _UUID.match(written):
            raise BadInput(f"the mediated device's uuid is none: {written!r}", where=where)
        bare = written.replace("-", "").lower()
        uuid = "-".join((bare[:8], bare[8:12], bare[12:16], bare[16:20], bare[20:]))
    else:
        if attribute(source_address, "type") not in (None, "", "pci"):
            raise BadInput("the passthrough device's source is no PCI address", where=where)
        source = _pci_address(source_address, where, domain_limit=2**32 - 1)
    address, multifunction = _guest_address(document, element)
    return Device(
        element=document.ordinal(element),
        kind=kind,
        source=source,
        uuid=uuid,
        address=address,
        multifunction=multifunction,
        alias=attribute(find(element, "alias"), "name"),
        mode=attribute(element, "mode"),
        vdpa=vdpa,
    )


def _may_be_on_pci(element: Element) -> bool:
    """Whether libvirt may give a device without an address a place on PCI, by what it hangs on."""
    tag, model = tag_of(element), attribute(element, "model")
    if attribute(find(element, "address"), "type") not in (None, "", "pci") or model == "none":
        return False
    if model in _MODELS_ELSEWHERE.get(tag, ()):
        return False
    if tag == "disk":
        return attribute(find(element, "target"), "bus") in (None, "virtio")
    if tag == "input":
        return attribute(element, "bus") in (None, "virtio")
    if tag == "memory":
        return (model or "").startswith("virtio")
    return tag != "controller" or attribute(element, "type") not in _BUS_OF_ITS_OWN


def _guest_address(document: Document, element: Element) -> tuple[PciAddress | None, bool]:
    """The guest PCI address and its multifunction; None when libvirt is to choose (no address, or a bare type)."""
    found = find(element, "address")
    if found is None or attribute(found, "type") not in (None, "", "pci"):
        return None, False
    multifunction = attribute(found, "multifunction") == "on"
    if all(attribute(found, name) is None for name in ("domain", "bus", "slot", "function")):
        return None, multifunction
    address = _pci_address(found, document.line(element), domain_limit=0)
    # to libvirt 0000:00:00 is no address but a request for one (virPCIDeviceAddressIsEmpty)
    return (address if address.bus or address.slot else None), multifunction


def _pci_address(element: Element, where: str, *, domain_limit: int) -> PciAddress:
    limits = {"domain": domain_limit, "bus": MAX_BUS, "slot": MAX_SLOT, "function": MAX_FUNCTION}
    written = {name: attribute(element, name) for name in limits}
    return PciAddress(
        *(
            0 if text is None else number(text, f"the address's {name}", limits[name], where)
            for name, text in written.items()
        )
    )


def _refuse_same_source(document: Document, devices: list[Device]) -> None:
    seen: set[object] = set()
    for device in devices:
        key: object = device.source or device.uuid or device.vdpa
        if key in seen:
            where = document.line(document.elements[device.element])
            raise BadInput(f"{device.label} is passed through twice", where=where)
        seen.add(key)


def _aliases(document: Document, devices: Element | None, ours: set[int]) -> frozenset[str]:
    if devices is None:
        return frozenset()
    others = (element for element in children(devices) if document.ordinal(element) not in ours)
    names = (attribute(find(element, "alias"), "name") for element in others)
    return frozenset(name for name in names if name)
