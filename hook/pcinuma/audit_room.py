"""Whether bus numbers and the slots of bus 0 last: what the domain says, and what libvirt and KubeVirt will add.

A part of :mod:`pcinuma.audit`; it shares no code with the steps that make a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from pcinuma.audit_parts import EXPANDER, ROOT_PORT, AsWritten, error
from pcinuma.domain_xml import Element, attribute, find, tag_of
from pcinuma.model import Finding, Severity

BUSES = 256
SLOTS = 32
AUTOMATIC_BUSES = 2  # what libvirt leaves to an expander without busNr: its own number and one port's
HOTPLUG_SPARE = 16  # ports KubeVirt may append after us (virt-launcher, hotplug root ports)
_SERIAL = ("channel", "console")


def room(read: AsWritten) -> Iterator[Finding]:
    """What runs out: bus numbers below an expander and below the root bus, slots of bus 0."""
    ports = _ports_to_come(read)
    yield from _bus_room(read, ports)
    yield from _root_slots(read, ports)


def _bus_room(read: AsWritten, ports_to_come: int) -> Iterator[Finding]:
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
    numbered = sorted(((part.bus_nr, part) for part in expanders if part.bus_nr is not None), key=itemgetter(0))
    ends = [*(number for number, _ in numbered), BUSES][1:]
    for (first, part), end in zip(numbered, ends, strict=True):
        room = end - first
        needed = 1 + below[id(part)]
        if needed > room:
            hint = "the guest silently loses the devices beyond; leave more numbers between the busNr"
            if room == 0:
                yield error("bus-room", f"{part.name} has busNr {first}, as another expander has", part)
            else:
                yield error("bus-room", f"{part.name} has {room} bus numbers and needs {needed}", part, hint)
    for part in expanders:
        if part.bus_nr is None and below[id(part)] > 1:
            message = f"{part.name} has no busNr: libvirt leaves room for one port, it has {below[id(part)]}"
            yield error("bus-room", message, part)
    automatic = AUTOMATIC_BUSES * (len(expanders) - len(numbered))
    limit = (numbered[0][0] if numbered else BUSES) - automatic
    certain = 1 + on_root + ports_to_come
    if certain > limit:
        yield error("bus-numbers", f"the root bus has {limit} bus numbers and needs {certain}")
    elif certain + HOTPLUG_SPARE > limit:
        message = f"the root bus has {limit} bus numbers and may come to need {certain + HOTPLUG_SPARE}"
        severity: Severity = "error" if numbered and numbered[0][1].ours else "warning"
        yield Finding("bus-numbers", severity, message)


def _root_slots(read: AsWritten, ports_to_come: int) -> Iterator[Finding]:
    """Bus 0 has 32 slots: the chipset's, each expander's, and one for every eight root ports that libvirt adds."""
    used = {0x00, 0x1F} | {part.at[1] for part in read.by_bus.get(0, []) if part.at is not None}
    expanders = sum(part.model == EXPANDER and part.at is None for part in read.parts)
    ports = sum(part.model == ROOT_PORT and part.at is None for part in read.parts)
    needed = len(used) + expanders + -(-(ports + ports_to_come) // 8)
    if needed > SLOTS:
        hint = "devices with explicit addresses on bus 0 (kubevirt.io/placePCIDevicesOnRootComplex) take its slots"
        yield error("root-bus-slots", f"bus 0 has {SLOTS} slots and needs {needed}", hint=hint)


def _ports_to_come(read: AsWritten) -> int:
    """Root ports that libvirt will add: for indexes left out, and for devices without an address beyond free ports."""
    highest = max([*read.controllers, *read.by_bus], default=0)
    gaps = sum(index not in read.controllers for index in range(1, highest + 1))
    gap_free = sum(index not in read.controllers and index not in read.by_bus for index in range(1, highest + 1))
    free = sum(
        1
        for index, part in read.controllers.items()
        if part.model == ROOT_PORT and not part.ours and index not in read.by_bus
    )
    waiting = sum(part.at is None and not part.is_controller and _takes_port(part.element) for part in read.parts)
    return gaps + max(0, waiting + _implied(read) - free - gap_free)


def _implied(read: AsWritten) -> int:
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
    if tag == "watchdog":
        return model == "i6300esb"  # itco is a part of q35's chipset, the others are on ISA or no x86
    if tag == "sound":
        return model not in ("sb16", "pcspk", "usb")
    return tag in ("interface", "rng", "filesystem", "vsock", "crypto", "shmem")
