"""What a domain's PCI tree is now: which expander is above what, what the guest will call it, what it all takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pcinuma.model import MAX_BUS, Device, Domain, PciAddress, PciController

SPARE_PORTS = 16
"""Root ports that KubeVirt may still append for hotplug (its hotplug ports, at most 16, take a bus each)."""

CHIPSET_SLOT = 0x1F
IMPLIED_DEVICES = 5
"""Devices that libvirt may add of itself: USB, SCSI and serial controllers, balloon, video."""

AUTOMATIC_BUSES = 2
"""An expander without busNr gets the two numbers below the lowest in use (libvirt qemuDomainAddressFindNewBusNr)."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the rest of the domain takes, as if no controller of ours were there.

    ``indexes`` are those that new controllers take first, ``highest_index`` is the highest controller index in use,
    after which come the rest, ``root_buses`` how many bus numbers the root bus and
    everything below it may come to need, ``root_slots`` how many of bus 0's slots are taken, ``blocks`` the bus
    ranges (first, count) of other expanders with a busNr, ``automatic`` the number of expanders without.
    """

    highest_index: int
    root_buses: int
    root_slots: int
    blocks: tuple[tuple[int, int], ...]
    automatic: int
    indexes: tuple[int, ...] = ()


def surroundings(
    domain: Domain,
    placed: Iterable[Device],
    detached: Iterable[Device] = (),
    *,
    refilled: int = 0,
    spare: int = SPARE_PORTS,
) -> Surroundings:
    """What stays of the domain when the devices in ``placed`` and our controllers are taken away.

    libvirt fills every index that is left out below another with a root port. Those of our controllers are left out
    when they go; of them ``refilled`` are not, for controllers of ours take them, or still have them.
    """
    gone = {device.element for device in placed}
    loose = {device.element for device in detached}
    staying = [device for device in domain.devices if device.element not in gone]
    foreign = [controller for controller in domain.controllers if not controller.is_ours]
    addresses = [other.address for other in domain.others]
    addresses += [None if device.element in loose else device.address for device in staying]
    addresses += [controller.address for controller in foreign]
    used = [address.bus for address in addresses if address is not None]
    highest = max(used + [controller.index or 0 for controller in foreign], default=0)
    roots = {controller.index: controller for controller in foreign if controller.is_expander}
    below: dict[int | None, list[int]] = {index: [] for index in roots}
    for controller in foreign:
        top = expander_above(controller, foreign)
        if top is not None and top is not controller and controller.index is not None:
            below[top.index].append(controller.index)
    under = sum(map(len, below.values())) + len(roots)
    unaddressed = sum(address is None for address in addresses[: len(domain.others) + len(staying)])
    indexes = {controller.index for controller in foreign}
    gaps = sum(index not in indexes for index in range(1, highest + 1))
    ports = sum(c.model == "pcie-root-port" and c.address is None for c in foreign)
    free = sorted(c.index for c in domain.controllers if c.is_ours and c.index is not None and 0 < c.index < highest)
    own = len(free[:refilled])
    slots = {0, CHIPSET_SLOT} | {address.slot for address in addresses if address is not None and address.bus == 0}
    automatic = sum(controller.address is None for controller in roots.values())
    return Surroundings(
        highest_index=highest,
        root_buses=1 + highest - under - own + unaddressed + spare,
        # libvirt puts eight of its root ports into a slot
        root_slots=len(slots) + automatic + -(-(ports + gaps - own + unaddressed + IMPLIED_DEVICES) // 8),
        blocks=tuple(
            (controller.bus_nr, 1 + len(below[index]))
            for index, controller in roots.items()
            if controller.bus_nr is not None
        ),
        automatic=sum(controller.bus_nr is None for controller in roots.values()),
        indexes=tuple(free[:refilled]),
    )


def expander_above(controller: PciController, controllers: Sequence[PciController]) -> PciController | None:
    """The expander that the controller is or lies below; None on the root bus or where the way up is broken."""
    by_index = {other.index: other for other in controllers if other.index is not None}
    at: PciController | None = controller
    for _ in range(len(controllers)):
        if at is None or at.is_expander:
            return at
        at = by_index.get(at.address.bus) if at.address is not None and at.address.bus else None
    return None


def whereabouts(address: PciAddress, domain: Domain) -> str:
    """Where a guest address is that is on no cell, or comes to be on none, in words that go on after "is"."""
    at = next((controller for controller in domain.controllers if controller.index == address.bus), None)
    if address.bus == 0:
        return "on bus 0"
    if at is None:  # libvirt makes a root port of an index that is none
        return f"on index {address.bus}, which libvirt makes a root port on bus 0"
    shown = f"{at.model or 'controller'} {address.bus}"
    expander = expander_above(at, domain.controllers)
    if expander is None:
        return f"on {shown}, below no expander"
    if expander.node is None:
        return f"below expander {expander.index}, which names no cell"
    return f"on {shown}, below a controller of pcinuma's that does not stay"


def crowded(domain: Domain) -> frozenset[int]:
    """The elements of other hands' expanders with fewer bus numbers than ports below; without busNr libvirt leaves
    room for one port."""
    expanders = [c for c in domain.controllers if c.is_expander]
    if all(expander.is_ours for expander in expanders):
        return frozenset()
    below: dict[int, int] = {expander.element: 0 for expander in expanders}
    for controller in domain.controllers:
        top = expander_above(controller, domain.controllers)
        if top is not None and top is not controller:
            below[top.element] += 1
    found = set()
    for expander in expanders:
        others = [other.bus_nr for other in expanders if other is not expander and other.bus_nr is not None]
        room = AUTOMATIC_BUSES
        if expander.bus_nr is not None:
            room = min((n for n in others if n >= expander.bus_nr), default=MAX_BUS + 1) - expander.bus_nr
        if 1 + below[expander.element] > room and not expander.is_ours:
            found.add(expander.element)
    return frozenset(found)


def predicted_bdf(address: PciAddress, domain: Domain) -> PciAddress | None:
    """What Linux in the guest calls a guest address; None where firmware may decide otherwise.

    Bus 0 is bus 0. Below an expander with a busNr firmware numbers the buses upwards from it, in the order of slots
    and functions, each bridge's own buses right after it. The rest of the root bus depends on what libvirt adds.
    """
    if address.bus == 0:
        return address
    by_index = {controller.index: controller for controller in domain.controllers}
    at = by_index.get(address.bus)
    expander = expander_above(at, domain.controllers) if at is not None else None
    if at is None or expander is None or expander.bus_nr is None or at is expander:
        return None
    below: dict[int, list[tuple[int, int, PciController]]] = {}
    for controller in domain.controllers:
        if (place := controller.address) is not None:
            below.setdefault(place.bus, []).append((place.slot, place.function, controller))
    limit = min((c.bus_nr for c in domain.controllers if c.bus_nr and c.bus_nr > expander.bus_nr), default=MAX_BUS + 1)
    stack = [expander]
    for number in range(expander.bus_nr, limit):
        bridge = stack.pop()
        if bridge is at:
            return PciAddress(0, number, address.slot, address.function)
        if bridge.is_expander and bridge is not expander:
            return None  # libvirt refuses it there
        children = sorted(below.get(bridge.index or 0, []), key=lambda child: child[:2], reverse=True)
        stack += [child for _, _, child in children]
        if not stack:
            break
    return None
