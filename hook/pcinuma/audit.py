"""The rules of libvirt, QEMU and the guest's firmware, held against a domain XML of any origin, from the XML alone.

It shares no code with the steps that make a plan, so that one misreading does not pass both. Every finding of
severity error names something that libvirt refuses, that the guest loses, or that places a device wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, zip_longest

from pcinuma.domain_xml import Document, Element, attribute, children, find, tag_of, text_of
from pcinuma.model import ALIAS_PREFIX, Finding, Severity

BUSES = 256
SLOTS = 32
AUTOMATIC_BUSES = 2  # what libvirt leaves to an expander without busNr: its own number and one port's
HOTPLUG_SPARE = 16  # ports KubeVirt may append after us (virt-launcher, hotplug root ports)
ROOT_PORT = "pcie-root-port"
EXPANDER = "pcie-expander-bus"
ON_EXPANDER = (ROOT_PORT, "dmi-to-pci-bridge")  # libvirt formatdomain, Controllers: what a pcie-expander-bus takes
_SERIAL = ("channel", "console")
UPSTREAM = "pcie-switch-upstream-port"
DOWNSTREAM = "pcie-switch-downstream-port"
SINGLE_SLOT = (ROOT_PORT, DOWNSTREAM)
# what <target> may say of a controller of each model (libvirt virDomainControllerDefValidate…, measured)
TARGET_OPTIONS = {
    ROOT_PORT: ("hotplug", "chassis", "port"),
    DOWNSTREAM: ("hotplug", "chassis", "port"),
    UPSTREAM: (),
    EXPANDER: ("busNr", "node"),
    "dmi-to-pci-bridge": (),
    "pci-bridge": ("chassisNr",),
}
BRIDGE_PARENTS = {"dmi-to-pci-bridge": ("pcie-root",), "pcie-to-pci-bridge": SINGLE_SLOT}
FROM_SLOT_1 = ("pci-bridge", "pcie-to-pci-bridge")
ROOTS = ("pcie-root", "pci-root")
MODELS = (*TARGET_OPTIONS, *ROOTS, "pcie-to-pci-bridge", "pci-expander-bus", "pxb")
Q35_OWN = {(0, 0x1F, 0): "ISA bridge", (0, 0x1F, 2): "SATA controller", (0, 0x1F, 3): "SMBus"}

Where = tuple[int, int, int]
"""Controller index, slot, function of a guest address."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something in ``<devices>`` with what the rules need of it; ``at`` is its guest address if it has one."""

    element: Element
    name: str
    at: Where | None
    multifunction: str | None
    alias: str | None
    index: int | None = None
    model: str | None = None
    bus_nr: int | None = None
    node: int | None = None

    @property
    def is_controller(self) -> bool:
        return self.index is not None

    @property
    def ours(self) -> bool:
        return self.is_controller and (self.alias or "").startswith(ALIAS_PREFIX)


class _Read:
    """The domain as the rules see it."""

    def __init__(self, document: Document):
        devices = find(document.root, "devices")
        self.parts = _indexed([_part(element) for element in children(devices)] if devices is not None else [])
        self.controllers = {part.index: part for part in self.parts if part.index is not None}
        self.by_bus: dict[int, list[Part]] = {}
        for part in self.parts:
            if part.at is not None and part.index != 0:
                self.by_bus.setdefault(part.at[0], []).append(part)
        numa = find(document.root, "cpu", "numa")
        cells = list(children(numa, "cell")) if numa is not None else []
        self.cells = {int(attribute(cell, "id") or position) for position, cell in enumerate(cells)}
        machine = attribute(find(document.root, "os", "type"), "machine") or ""
        self.is_pcie = "q35" in machine or machine.startswith("virt")
        self.is_q35 = "q35" in machine
        self.has_no_expanders = bool(machine) and not self.is_pcie
        self.ports_to_come = _ports_to_come(self)

    def root_of(self, part: Part) -> Part | None:
        """The expander above a part, None on the root bus."""
        at: Part | None = part
        for _ in range(len(self.controllers) + 1):
            if at is None or at.model == EXPANDER:
                return at
            at = self.controllers.get(at.at[0]) if at.at is not None and at.at[0] else None
        return None


def audit(document: Document) -> list[Finding]:
    """What is wrong with the domain's PCI topology, in document order; nothing is changed."""
    read = _Read(document)
    rules = (
        *(_indexes, _models, _parents, _expanders, _targets, _addresses, _functions),
        *(_ports_of_ours, _aliases, _bus_room, _root_slots),
    )
    return [finding for rule in rules for finding in rule(read)]


# --- reading ---------------------------------------------------------------------------------------------------


def _indexed(parts: list[Part]) -> list[Part]:
    """The parts, where a PCI controller without an index has the one that libvirt gives it: the lowest that is free."""
    used = {part.index for part in parts}
    found = []
    for part in parts:
        if part.index is None and part.model is not None:
            index = next(number for number in count() if number not in used)
            used.add(index)
            part = replace(part, index=index, name=part.name.replace(f"{part.model} None", f"{part.model} {index}", 1))
        found.append(part)
    return found


def _part(element: Element) -> Part:
    tag = tag_of(element)
    address = find(element, "address")
    at: Where | None = None
    if address is not None and attribute(address, "type") in (None, "", "pci"):
        bus, slot, function = (_c_number(attribute(address, name)) for name in ("bus", "slot", "function"))
        at = (bus, slot, function) if bus or slot else None  # 0000:00:00 asks libvirt for an address
    is_pci_controller = tag == "controller" and attribute(element, "type") == "pci"
    target = find(element, "target") if is_pci_controller else None
    node = text_of(find(target, "node"))
    written = attribute(target, "busNr")
    index = attribute(element, "index")
    name = tag if not is_pci_controller else f"{attribute(element, 'model')} {index}"
    alias = attribute(find(element, "alias"), "name")
    return Part(
        element=element,
        name=f"{name} ({alias})" if alias else f"{name} (line {element.sourceline})",
        at=at,
        multifunction=attribute(address, "multifunction"),
        alias=alias,
        index=int(index) if is_pci_controller and index is not None else None,
        model=attribute(element, "model") if is_pci_controller else None,
        bus_nr=_c_number(written) if written else None,
        node=int(node) if node else None,
    )


def _c_number(text: str | None) -> int:
    if text is None:
        return 0
    try:
        return int(text, 0)
    except ValueError:
        return int(text, 8)  # C's octal, 010


def _error(code: str, message: str, part: Part | None = None, hint: str | None = None) -> Finding:
    return Finding(code, "error", message, part.name if part is not None else None, hint)


# --- the rules -------------------------------------------------------------------------------------------------


def _indexes(read: _Read) -> Iterator[Finding]:
    seen: set[int] = set()
    for part in read.parts:
        if part.index is None:
            continue
        if part.index in seen:
            yield _error("duplicate-index", f"two PCI controllers have index {part.index}", part)
        if not 0 <= part.index < BUSES:
            yield _error("index-range", f"controller index {part.index} is above 255", part)
        seen.add(part.index)


def _models(read: _Read) -> Iterator[Finding]:
    """libvirt knows the models below, and takes a root alone at index 0."""
    for part in read.parts:
        if part.model is None:
            continue
        if part.model not in MODELS:
            yield _error("controller-model", f"{part.name}: libvirt knows no such model", part)
        elif part.index == 0 and part.model not in ROOTS:
            hint = (
                "give it an index above 0" if attribute(part.element, "index") else "give it an index: libvirt takes 0"
            )
            yield _error("controller-model", f"{part.name} has index 0, which is the machine's root", part, hint)


def _parents(read: _Read) -> Iterator[Finding]:
    for part in read.parts:
        if part.index is None or part.at is None or part.index == 0:
            continue
        if part.at[0] >= part.index:
            yield _error(
                "parent-order", f"{part.name} has index {part.index}, not above its parent's {part.at[0]}", part
            )
        parent = read.controllers.get(part.at[0])
        if parent is not None and parent.model == EXPANDER and part.model not in ON_EXPANDER:
            yield _error("not-on-expander", f"a {part.model} cannot sit on a pcie-expander-bus", part)
        if part.model == ROOT_PORT and part.at[0] and (parent is None or parent.model != EXPANDER):
            what = "no controller" if parent is None else f"a {parent.model}"
            yield _error("not-on-expander", f"a {ROOT_PORT} cannot sit on index {part.at[0]}, which is {what}", part)
        on = parent.model if parent is not None else "no controller"
        if part.model == UPSTREAM and on not in SINGLE_SLOT:
            yield _error("switch-port", f"an upstream port sits on a root port or downstream port, not on {on}", part)
        if (part.model == DOWNSTREAM) != (on == UPSTREAM):
            yield _error(
                "switch-port",
                f"on an upstream port sit downstream ports, and only there: not a {part.model} on {on}",
                part,
            )
        if part.model == EXPANDER and part.at[0] != 0:
            yield _error("expander-parent", "an expander can sit on bus 0 only", part)
        if part.model in BRIDGE_PARENTS and part.at[0] in (0, *read.controllers):
            at = read.controllers[part.at[0]].model if part.at[0] else ROOTS[0]
            if at not in (*BRIDGE_PARENTS[part.model], EXPANDER):  # what cannot be on an expander is said above
                yield _error("bridge-parent", f"a {part.model} cannot sit on a {at}", part)
    for part in read.parts:
        parent = read.controllers.get(part.at[0]) if part.at is not None else None
        if not part.is_controller and parent is not None and parent.model == EXPANDER:
            yield _error("not-on-expander", "a device cannot sit on a pcie-expander-bus, only on a port below it", part)
        if not part.is_controller and parent is not None and parent.model == UPSTREAM:
            yield _error(
                "switch-port", "a device cannot sit on an upstream port, only on a downstream port of it", part
            )
        if part.at is None or part.index == 0:
            continue
        if part.at[1] >= SLOTS or part.at[2] > 7 or part.at[0] >= BUSES:
            yield _error("address-range", f"{part.name} has slot {part.at[1]:#x}, function {part.at[2]}", part)
        if parent is not None and parent.model in SINGLE_SLOT and part.at[1] != 0:
            yield _error("address-range", f"a {parent.model} has slot 0 only, not {part.at[1]:#x}", part)
        if parent is not None and parent.model in FROM_SLOT_1 and part.at[1] == 0:
            yield _error("address-range", f"a {parent.model} has no slot 0", part)
        if parent is None and part.at[0] and part.at[1] and _is_passthrough(part.element):
            message = f"index {part.at[0]} is none: libvirt makes a root port of it, which has slot 0 only"
            yield _error("address-range", message, part)


def _expanders(read: _Read) -> Iterator[Finding]:
    for part in read.parts:
        if part.model in ("pci-expander-bus", "pxb") and read.is_pcie:
            yield _error(
                "expander-model", f"{part.name} is for i440fx: on this machine libvirt takes {EXPANDER} only", part
            )
        if part.model != EXPANDER:
            continue
        if read.has_no_expanders:
            yield _error(
                "expander-model", f"{part.name}: this machine type takes no expander, libvirt refuses it", part
            )
        if part.node is None:
            hint = (
                "pcinuma transform --addressed move places its devices anew; KubeVirt before 1.8 drops the node between"
                " its passes"
            )
            if part.ours:
                yield _error("expander-node", f"{part.name} names no cell", part, hint)
            else:
                yield Finding(
                    "expander-node", "warning", f"{part.name} names no cell: the guest sees -1", part.name, hint
                )
        elif part.node not in read.cells:
            yield _error("expander-node", f"{part.name} names cell {part.node}, which the domain does not have", part)
        if part.bus_nr is None and part.ours:
            yield _error("expander-bus", f"{part.name} has no busNr", part)
        if part.bus_nr is not None and not 1 <= part.bus_nr < BUSES - 1:  # libvirt takes 1 to 254
            yield _error("expander-bus", f"{part.name} has busNr {part.bus_nr}", part)


def _targets(read: _Read) -> Iterator[Finding]:
    for part in read.parts:
        allowed = TARGET_OPTIONS.get(part.model or "")
        target = find(part.element, "target") if part.is_controller else None
        if target is None or allowed is None:
            continue
        said = [name for name in ("hotplug", "busNr", "chassis", "chassisNr", "port") if attribute(target, name)]
        said += ["node"] if find(target, "node") is not None else []
        for name in said:
            if name not in allowed:
                yield _error("target-option", f"a {part.model} takes no {name}", part)


def _addresses(read: _Read) -> Iterator[Finding]:
    seen: dict[Where, Part] = {}
    for part in read.parts:
        if part.at is None or part.index == 0:
            continue
        if part.at in seen:
            other = seen[part.at].name
            yield _error("address-taken", f"{part.name} and {other} have one guest address {_shown(part.at)}", part)
        seen[part.at] = part
        own = Q35_OWN.get(part.at) if read.is_q35 else None
        if own is not None and (own, attribute(part.element, "type")) != ("SATA controller", "sata"):
            yield _error(
                "address-taken", f"{part.name} has the guest address of q35's own {own}, {_shown(part.at)}", part
            )


def _shown(at: Where) -> str:
    return f"0000:{at[0]:02x}:{at[1]:02x}.{at[2]}"


def _functions(read: _Read) -> Iterator[Finding]:
    """QEMU wants function 0 of a slot with several functions to be multifunction; a guest probes function 0 first.

    libvirt sets multifunction itself where it is not written (virDomainPCIAddressSetMulti), not over an "off".
    """
    slots: dict[tuple[int, int], list[Part]] = {}
    for bus, members in read.by_bus.items():
        for part in members:
            slots.setdefault((bus, part.at[1] if part.at else 0), []).append(part)
    for (bus, slot), members in slots.items():
        first = next((part for part in members if part.at is not None and part.at[2] == 0), None)
        several = len(members) > 1
        if first is None:
            if bus or slot not in (0x1F, 0x1D, 0x1A):  # functions of q35's own chipset devices
                yield _error("no-function-0", f"slot {_shown((bus, slot, 0))[:-2]} has no function 0", members[0])
        elif several and (first.multifunction == "off" or (first.ours and first.multifunction != "on")):
            yield _error("multifunction", f"{first.name} shares its slot but is not multifunction", first)


def _ports_of_ours(read: _Read) -> Iterator[Finding]:
    for part in read.parts:
        if not part.ours or part.index is None:
            continue
        members = read.by_bus.get(part.index, [])
        if part.model == EXPANDER:
            if not members:
                yield _error("empty-expander", f"{part.name} has no port", part)
            continue
        if part.model not in (ROOT_PORT, UPSTREAM, DOWNSTREAM):
            continue
        if not members:
            yield _error("empty-port", f"{part.name} is empty: libvirt puts any unaddressed device there", part)
        if part.model in SINGLE_SLOT and attribute(find(part.element, "target"), "hotplug") != "off":
            yield _error("port-hotplug", f"{part.name} is without hotplug='off'", part)
        root = read.root_of(part)
        if root is None or not root.ours:
            yield _error("lost-port", f"{part.name} is below no expander of pcinuma's", part)
        for member in members:
            if not (member.ours if member.is_controller else _is_passthrough(member.element)):
                yield _error("foreign-device", f"{member.name} sits on {part.name}", member)


def _is_passthrough(element: Element) -> bool:
    if tag_of(element) == "interface":
        return attribute(element, "type") in ("hostdev", "vdpa")
    return tag_of(element) == "hostdev" and attribute(element, "type") in ("pci", "mdev")


def _aliases(read: _Read) -> Iterator[Finding]:
    seen: set[str] = set()
    for part in read.parts:
        if part.alias and part.alias in seen and part.alias.startswith("ua-"):
            yield _error("duplicate-alias", f"the alias {part.alias} is there twice", part)
        if part.alias:
            seen.add(part.alias)


def _bus_room(read: _Read) -> Iterator[Finding]:
    """Every root bus must have a number for each bridge below it before the next root bus begins; what does not fit
    the guest loses without a word."""
    expanders = [part for part in read.parts if part.model == EXPANDER]
    below = {id(part): 0 for part in expanders}
    on_root = 0
    for part in read.parts:
        if part.index and part.model != EXPANDER:
            root = read.root_of(part)
            if root is None:
                on_root += 1
            else:
                below[id(root)] += 1
    numbered = sorted((part for part in expanders if part.bus_nr is not None), key=lambda part: part.bus_nr or 0)
    for part, following in zip_longest(numbered, numbered[1:]):
        first = part.bus_nr or 0
        room = (following.bus_nr or 0 if following is not None else BUSES) - first
        needed = 1 + below[id(part)]
        if needed > room:
            hint = "the guest silently loses the devices beyond; leave more numbers between the busNr"
            if room == 0:
                yield _error("bus-room", f"{part.name} has busNr {first}, as another expander has", part)
            else:
                yield _error("bus-room", f"{part.name} has {room} bus numbers and needs {needed}", part, hint)
    for part in expanders:
        if part.bus_nr is None and below[id(part)] > 1:
            message = f"{part.name} has no busNr: libvirt leaves room for one port, it has {below[id(part)]}"
            yield _error("bus-room", message, part)
    automatic = AUTOMATIC_BUSES * (len(expanders) - len(numbered))
    limit = (numbered[0].bus_nr or 0 if numbered else BUSES) - automatic
    certain = 1 + on_root + read.ports_to_come
    if certain > limit:
        yield _error("bus-numbers", f"the root bus has {limit} bus numbers and needs {certain}")
    elif certain + HOTPLUG_SPARE > limit:
        message = f"the root bus has {limit} bus numbers and may come to need {certain + HOTPLUG_SPARE}"
        severity: Severity = "error" if numbered and numbered[0].ours else "warning"
        yield Finding("bus-numbers", severity, message)


def _ports_to_come(read: _Read) -> int:
    """Root ports that libvirt will add: for indexes left out, and for devices without an address beyond free ports."""
    highest = max([*(index or 0 for index in read.controllers), *read.by_bus], default=0)
    gaps = sum(index not in read.controllers for index in range(1, highest + 1))
    gap_free = sum(index not in read.controllers and index not in read.by_bus for index in range(1, highest + 1))
    free = sum(
        1
        for index, part in read.controllers.items()
        if part.model == ROOT_PORT and not part.ours and index not in read.by_bus
    )
    waiting = sum(part.at is None and not part.is_controller and _takes_port(part.element) for part in read.parts)
    return gaps + max(0, waiting + _implied(read) - free - gap_free)


def _implied(read: _Read) -> int:
    """How many devices libvirt adds of itself: USB and balloon unless there is one, and the controllers and video
    that other devices imply (libvirt qemuDomainDefAddDefaultDevices, virDomainDefAddImplicitDevices)."""
    by_tag: dict[str, list[Element]] = {}
    for part in read.parts:
        by_tag.setdefault(tag_of(part.element), []).append(part.element)
    tags = by_tag.keys()
    controllers = {attribute(element, "type") for element in by_tag.get("controller", ())}
    buses = {attribute(find(element, "target"), "bus") for element in by_tag.get("disk", ())}
    serial = [element for tag in _SERIAL for element in by_tag.get(tag, ())]
    ports = {attribute(find(element, "target"), "type") for element in serial}
    return sum(
        (
            "usb" not in controllers,
            "memballoon" not in tags,
            "scsi" not in controllers and "scsi" in buses,
            "virtio-serial" not in controllers and "virtio" in ports,
            "video" not in tags and "graphics" in tags,
        )
    )


def _takes_port(element: Element) -> bool:
    """Whether libvirt gives this device, unaddressed, a slot of its own on PCI (libvirt pci-addresses)."""
    tag, model = tag_of(element), attribute(element, "model")
    address = find(element, "address")
    if address is not None and attribute(address, "type") not in (None, "", "pci"):
        return False
    if tag == "disk":
        return attribute(find(element, "target"), "bus") == "virtio"
    if tag == "controller":
        return attribute(element, "type") in ("scsi", "virtio-serial", "usb", "nvme") and model != "none"
    if tag == "memballoon":
        return model != "none"
    if tag == "input":
        return attribute(element, "bus") == "virtio"
    if tag == "hostdev":
        return attribute(element, "type") in ("pci", "mdev", "scsi_host")
    if tag == "video":
        return attribute(find(element, "model"), "type") != "none"
    if tag in ("iommu", "memory"):
        return (model or "").startswith("virtio")
    return tag in ("interface", "rng", "sound", "watchdog", "filesystem", "vsock", "crypto", "shmem")


def _root_slots(read: _Read) -> Iterator[Finding]:
    """Bus 0 has 32 slots: the chipset's, each expander's, and one for every eight root ports that libvirt adds."""
    used = {0x00, 0x1F} | {part.at[1] for part in read.by_bus.get(0, []) if part.at is not None}
    expanders = sum(part.model == EXPANDER and part.at is None for part in read.parts)
    ports = sum(part.model == ROOT_PORT and part.at is None and part.index != 0 for part in read.parts)
    needed = len(used) + expanders + -(-(ports + read.ports_to_come) // 8)
    if needed > SLOTS:
        hint = "devices with explicit addresses on bus 0 (kubevirt.io/placePCIDevicesOnRootComplex) take its slots"
        yield _error("root-bus-slots", f"bus 0 has {SLOTS} slots and needs {needed}", hint=hint)
