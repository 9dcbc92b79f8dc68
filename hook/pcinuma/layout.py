"""Groups, ports, indexes and bus numbers: where each device that is to be placed comes to sit in the guest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pcinuma.model import (
    ALIAS_PREFIX,
    MAX_BUS,
    MAX_SLOT,
    Attachment,
    Device,
    Domain,
    PciAddress,
    PciController,
    PlannedExpander,
    PlannedPort,
)
from pcinuma.pci_tree import AUTOMATIC_BUSES, Surroundings


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device to place: its cell, what it shares an expander with, the host BDF that orders it, whether it is a VF.

    ``group`` is what the expander's alias says it is for: ``cell0``, or ``cell0-pci0000-40``.
    """

    device: Device
    cell: int
    group: str
    source: PciAddress
    is_vf: bool


def lay_out(
    candidates: Sequence[Candidate], around: Surroundings, taken: frozenset[str]
) -> tuple[PlannedExpander, ...]:
    """The expanders with their ports in the host's order, or nothing when they do not fit in 256 bus numbers.

    Groups ascend by their lowest host BDF, devices by host BDF; indexes follow from the highest in use + 1; bus
    numbers ascend, the last block ends at 255 or below another expander's block.
    """
    groups = _groups(candidates)
    sizes = [1 + len(sets) for sets in groups.values()]
    first = _first_bus(sum(sizes), around)
    last_index = around.highest_index + sum(sizes)
    if first is None or last_index > MAX_BUS:
        return ()
    names = _Names(taken)
    index, bus_nr = around.highest_index + 1, first
    expanders = []
    for group, sets in groups.items():
        ports = _ports(sets, index + 1, names)
        cell = sets[0][0].cell
        expanders.append(PlannedExpander(names.unique(ALIAS_PREFIX + group), index, bus_nr, cell, ports))
        index += 1 + len(sets)
        bus_nr += 1 + len(sets)
    return tuple(expanders)


def buses_needed(candidates: Sequence[Candidate], around: Surroundings) -> int:
    """How many bus numbers the whole guest would need with the candidates placed."""
    ours = sum(1 + len(sets) for sets in _groups(candidates).values())
    others = sum(count for _, count in around.blocks) + AUTOMATIC_BUSES * around.automatic
    return around.root_buses + others + ours


def reuse(
    wanted: tuple[PlannedExpander, ...], domain: Domain
) -> tuple[tuple[PlannedExpander, ...], tuple[PciController, ...]]:
    """``wanted`` on the controllers of ours that the domain has already, and those of them that must go.

    A set that has the same shape (the same expanders with the same ports for the same devices) keeps its indexes,
    whatever KubeVirt dropped of it; any other set of ours is stale and goes as a whole.
    """
    ours = [controller for controller in domain.controllers if controller.is_ours]
    ours.sort(key=lambda controller: (controller.index is None, controller.index, controller.element))
    wanted_aliases = [
        name for expander in wanted for name in (expander.alias, *(port.alias for port in expander.ports))
    ]
    if [controller.alias for controller in ours] != wanted_aliases or not _well_shaped(wanted, ours, domain):
        return wanted, tuple(ours)
    kept = iter(ours)
    expanders = []
    for expander in wanted:
        own = next(kept)
        ports = []
        for port in expander.ports:
            existing = next(kept)
            ports.append(replace(port, index=existing.index or 0, existing=existing))
        expanders.append(replace(expander, index=own.index or 0, existing=own, ports=tuple(ports)))
    return tuple(expanders), ()


def _well_shaped(wanted: tuple[PlannedExpander, ...], ours: list[PciController], domain: Domain) -> bool:
    if any(controller.index is None for controller in ours):
        return False
    models = [m for expander in wanted for m in ("pcie-expander-bus", *("pcie-root-port" for _ in expander.ports))]
    if [controller.model for controller in ours] != models:
        return False
    parents: list[PciController | None] = []
    for controller in ours:
        parents.append(controller if controller.model == "pcie-expander-bus" else parents[-1])
    for controller, parent in zip(ours, parents, strict=True):
        lost = controller.address is None or parent is None
        if controller is not parent and (lost or controller.address.bus != parent.index):  # type: ignore[union-attr]
            return False
    indexes = {controller.index for controller in ours}
    guests = [other.address for other in domain.others] + [c.address for c in domain.controllers if not c.is_ours]
    return not any(address is not None and address.bus in indexes for address in guests)


def _groups(candidates: Sequence[Candidate]) -> dict[str, list[list[Candidate]]]:
    """The candidates by group and port, groups by their lowest host BDF, ports by theirs."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda c: (c.source, c.device.element)):
        groups.setdefault(candidate.group, []).append(candidate)
    return {group: _port_sets(members) for group, members in groups.items()}


def _port_sets(members: Sequence[Candidate]) -> list[list[Candidate]]:
    """The candidates by port, in order: the functions of one host slot share a port when function 0 is among them.

    Without function 0 a guest would not look at the others, so each then gets a port of its own. VFs share slots by
    accident and are never joined; a mediated device is no function of a slot.
    """
    slots: dict[tuple[int, int, int], list[Candidate]] = {}
    for member in members:
        if not member.is_vf and member.device.kind != "mdev":
            slots.setdefault(member.source.slot_key, []).append(member)
    joined = {key: found for key, found in slots.items() if found[0].source.function == 0}
    sets: list[list[Candidate]] = []
    for member in members:
        found = joined.get(member.source.slot_key)
        if found is None or member not in found:
            sets.append([member])
        elif member is found[0]:
            sets.append(found)
    return sets


def _ports(sets: Sequence[Sequence[Candidate]], first_index: int, names: _Names) -> tuple[PlannedPort, ...]:
    packed = len(sets) > MAX_SLOT + 1
    ports = []
    for number, members in enumerate(sets):
        slot, function = divmod(number, 8) if packed else (number, 0)
        lead = members[0]
        what = f"mdev-{lead.device.uuid}" if lead.device.kind == "mdev" else lead.source.dashed
        attachments = tuple(_attach(member, joined=len(members) > 1) for member in members)
        # a slot with a single port needs no multifunction: the last of a packed group may stand alone
        multifunction = packed and function == 0 and number + 1 < len(sets)
        alias = names.unique(ALIAS_PREFIX + what)
        ports.append(PlannedPort(alias, first_index + number, slot, function, multifunction, attachments))
    return tuple(ports)


def _attach(member: Candidate, *, joined: bool) -> Attachment:
    function = member.source.function if joined else 0
    return Attachment(member.device, function, multifunction=joined and function == 0)


def _first_bus(total: int, around: Surroundings) -> int | None:
    """The first bus number of ``total`` in a row, as high as they fit, or None."""
    for top in sorted({MAX_BUS, *(first - 1 for first, _ in around.blocks)}, reverse=True):
        start = top - total + 1
        if any(first <= top and start < first + count for first, count in around.blocks):
            continue
        # where another expander ends the root bus's numbers already, ours take none of them
        bounded = any(first < start for first, _ in around.blocks)
        if bounded or start - AUTOMATIC_BUSES * around.automatic >= around.root_buses:
            return start
    return None


class _Names:
    """Hands out aliases that nothing else in the domain has."""

    def __init__(self, taken: frozenset[str]):
        self._taken = set(taken)

    def unique(self, name: str) -> str:
        candidate, number = name, 2
        while candidate in self._taken:
            candidate, number = f"{name}-{number}", number + 1
        self._taken.add(candidate)
        return candidate
