"""Groups, ports, indexes and bus numbers: where each device that is to be placed comes to sit in the guest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pcinuma.model import (
    ALIAS_PREFIX,
    MAX_BUS,
    MAX_SLOT,
    Attachment,
    PlannedExpander,
    PlannedPort,
    PortModel,
)
from pcinuma.pci_tree import AUTOMATIC_BUSES, Surroundings
from pcinuma.switches import Branch, Candidate, branches_of


def lay_out(groups: Sequence[Group], around: Surroundings, taken: frozenset[str]) -> tuple[PlannedExpander, ...]:
    """The expanders with their ports in the host's order, of groups for which there is no :func:`misfit`.

    Groups ascend by their lowest host BDF, devices by host BDF; indexes follow from the highest in use + 1, after those
    that are to be taken first; bus numbers ascend, the last block ends at 255 or below another expander's block.
    """
    first = first_bus(groups, around)
    assert first is not None  # else there is a misfit
    names = _Names(taken)
    bus_nr = first
    indexes = itertools.chain(around.indexes, itertools.count(around.highest_index + 1))
    expanders = []
    for group in groups:
        index = next(indexes)
        ports = tuple(_ports(group.branches, "pcie-root-port", index, indexes, names))
        alias = names.unique(ALIAS_PREFIX + group.name)
        expanders.append(PlannedExpander(alias, index, bus_nr, group.cell, ports))
        bus_nr += group.buses
    return tuple(expanders)


def misfit(groups: Sequence[Group], around: Surroundings) -> tuple[str, str] | None:
    """Why the groups find no room in the guest, as a finding's code and the reason; None when they do."""
    slots = around.root_slots + len(groups)
    if slots > MAX_SLOT + 1:
        return "root-bus-slots", f"the guest would need {slots} slots on bus 0, which has {MAX_SLOT + 1}"
    ours = sum(group.buses for group in groups)
    if first_bus(groups, around) is None or around.highest_index + ours - len(around.indexes) > MAX_BUS:
        others = sum(count for _, count in around.blocks) + AUTOMATIC_BUSES * around.automatic
        needed = around.root_buses + others + ours
        return "bus-numbers", f"the guest would need {needed} PCI bus numbers of {MAX_BUS + 1}"
    return None


@dataclass(frozen=True, slots=True)
class Group:
    """What comes below one expander."""

    name: str
    cell: int
    branches: tuple[Branch, ...]

    @property
    def buses(self) -> int:
        """The bus numbers, and the indexes, that the expander and every port below it take."""
        return 1 + sum(branch.ports for branch in self.branches)


def groups_of(candidates: Sequence[Candidate]) -> list[Group]:
    """The candidates by group, groups by their lowest host BDF, ports by theirs; what has one parent by its name, as
    libvirt has its own order of devices."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda c: (c.source, c.device.source is None, c.device.label)):
        groups.setdefault(candidate.group, []).append(candidate)
    return [Group(name, members[0].cell, branches_of(_port_sets(members))) for name, members in groups.items()]


def _port_sets(members: Sequence[Candidate]) -> list[list[Candidate]]:
    """The candidates by port, in order: the functions of one host slot share a port when function 0 is among them.

    Without function 0 a guest would not look at the others, so each then gets a port of its own. VFs share slots by
    accident and are never joined; mediated and vDPA devices are no functions of a slot.
    """
    slots: dict[tuple[int, int, int], list[Candidate]] = {}
    for member in members:
        if not member.is_vf and member.device.source is not None:
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


def _ports(
    branches: Sequence[Branch], model: PortModel, parent: int, indexes: Iterator[int], names: _Names
) -> Iterator[PlannedPort]:
    """The ports that carry the branches, each followed by what is below it, as firmware numbers the buses."""
    packed = len(branches) > MAX_SLOT + 1
    for number, branch in enumerate(branches):
        slot, function = divmod(number, 8) if packed else (number, 0)
        # a slot with a single port needs no multifunction: the last of a packed group may stand alone
        multifunction = packed and function == 0 and number + 1 < len(branches)
        attachments = tuple(_attach(member, joined=len(branch.members) > 1) for member in branch.members)
        alias = names.unique(ALIAS_PREFIX + _purpose(branch))
        port = PlannedPort(alias, next(indexes), parent, slot, function, multifunction, attachments, model)
        yield port
        if branch.switch is not None:
            alias = names.unique(f"{ALIAS_PREFIX}switch-{branch.switch.dashed}")
            upstream = PlannedPort(
                alias, next(indexes), port.index, 0, 0, multifunction=False, model="pcie-switch-upstream-port"
            )
            yield upstream
            yield from _ports(branch.below, "pcie-switch-downstream-port", upstream.index, indexes, names)


def _purpose(branch: Branch) -> str:
    """What an alias says that the port is for."""
    if branch.switch is not None:
        return f"to-switch-{branch.switch.dashed}"
    lead = branch.members[0]
    if lead.device.uuid is not None:
        return f"mdev-{lead.device.uuid}"
    return lead.source.dashed if lead.device.vdpa is None else f"vdpa-{lead.device.vdpa}"


def _attach(member: Candidate, *, joined: bool) -> Attachment:
    function = member.source.function if joined else 0
    return Attachment(member.device, function, multifunction=joined and function == 0)


def first_bus(groups: Sequence[Group], around: Surroundings) -> int | None:
    """The first of the bus numbers that the groups take in a row, as high as they fit, or None."""
    total = sum(group.buses for group in groups)
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
