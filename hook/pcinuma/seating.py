"""On which controllers devices come to sit: on those of ours that the domain has already, or on new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from pcinuma.layout import Group, first_bus, groups_of, lay_out, misfit
from pcinuma.model import Device, Domain, PciController, PlannedExpander
from pcinuma.pci_tree import SPARE_PORTS, surroundings
from pcinuma.switches import Candidate


@dataclass(frozen=True, slots=True)
class Seating:
    """The expanders, the controllers of ours that must go, and why there is no room, as a finding's code and the
    reason: for all candidates, or, where there are expanders, for ``without_room`` alone, by element."""

    expanders: tuple[PlannedExpander, ...] = ()
    drop: tuple[PciController, ...] = ()
    misfit: tuple[str, str] | None = None
    without_room: frozenset[int] = frozenset()


def seat(candidates: Sequence[Candidate], detached: Sequence[Device], domain: Domain) -> Seating:
    """Where the candidates go; ``detached`` are devices on a set of ours that lose their place there.

    Where another hand's controller would come to be another one by it, or a device would lose its slot, or function 0
    of it, nothing goes anywhere.
    """
    found = _seat(candidates, detached, domain)
    going = {candidate.device.element for candidate in candidates}
    problem = _harm(found, going, domain) if found.drop else None
    return found if problem is None else Seating(misfit=problem)


def _harm(seating: Seating, going: set[int], domain: Domain) -> tuple[str, str] | None:
    """What others would lose with the controllers of ours that go, as a finding's code and the reason."""
    if (shifted := _shifted(seating, domain)) is not None:
        now, then = shifted
        what = now.model or "a PCI controller"
        return "index-missing", f"{what} has no index: it is controller {now.index} with pcinuma's, {then} without"
    if (first := _first_of_a_slot(seating, going, domain)) is not None:
        slot = str(first.address)[:-2]
        return "slot-shared", f"others are in the slot {slot} of pcinuma's {first.model} {first.index}, which would go"
    dropped = {controller.index: controller for controller in seating.drop}
    for other in domain.others:
        # of an index that is none libvirt makes a root port, and that has slot 0 alone
        if other.address is not None and other.address.slot and (under := dropped.get(other.address.bus)) is not None:
            where = f"slot {other.address.slot:#x} of pcinuma's {under.model} {under.index}"
            return "slot-shared", f"a {other.tag} is in {where}, which would go"
    return None


def _first_of_a_slot(seating: Seating, going: set[int], domain: Domain) -> PciController | None:
    """A controller of ours that would go, and is function 0 of a slot in which others are that stay."""
    dropped = {controller.element for controller in seating.drop}
    staying = [controller.address for controller in domain.controllers if controller.element not in dropped]
    staying += [other.address for other in domain.others]
    staying += [device.address for device in domain.devices if device.element not in going]
    slots = {address.slot_key for address in staying if address is not None and address.function}
    first = (c for c in seating.drop if c.address is not None and not c.address.function)
    return next((c for c in first if c.address is not None and c.address.slot_key in slots), None)


def _shifted(seating: Seating, domain: Domain) -> tuple[PciController, int] | None:
    """A controller without an index that libvirt would give another one than it would now, and which."""
    dropped = {controller.element for controller in seating.drop}
    staying = [controller for controller in domain.controllers if controller.element not in dropped]
    used = {controller.index for controller in staying if not controller.index_is_implied}
    used.update(_indexes(seating.expanders))
    for controller in staying:
        if controller.index_is_implied:
            index = next(number for number in count() if number not in used)
            used.add(index)
            if index != controller.index:
                return controller, index
    return None


def _seat(candidates: Sequence[Candidate], detached: Sequence[Device], domain: Domain) -> Seating:
    """Where the candidates go.

    A set that has the same shape (the same expanders with the same ports for the same devices) keeps its indexes,
    whatever KubeVirt dropped of it; any other set of ours is stale and goes as a whole. Its indexes go with it, or,
    where the guest has no room for that, to the new set. Where it has none for that either, a set that fits those of
    the candidates that sit on it stays, and the others get no place.
    """
    ours = [controller for controller in domain.controllers if controller.is_ours]
    if not candidates:
        return Seating(drop=tuple(ours))
    groups = groups_of(candidates)
    placed = [candidate.device for candidate in candidates]
    if ours and (kept := _kept(groups, ours, placed, detached, domain)) is not None:
        return Seating(kept)
    around = surroundings(domain, placed, detached)
    problem = misfit(groups, around)
    if problem is not None and ours:
        around = surroundings(domain, placed, detached, refilled=sum(group.buses for group in groups))
        problem = misfit(groups, around)
    if problem is None:
        return Seating(lay_out(groups, around, domain.aliases), tuple(ours))
    indexes = {controller.index for controller in ours}
    seated = [c for c in candidates if c.device.address is not None and c.device.address.bus in indexes]
    if seated and len(seated) < len(candidates):
        devices = [candidate.device for candidate in seated]
        if (kept := _kept(groups_of(seated), ours, devices, detached, domain)) is not None:
            others = {candidate.device.element for candidate in candidates} - {device.element for device in devices}
            return Seating(kept, (), problem, frozenset(others))
    return Seating((), tuple(ours), problem)


def _kept(
    groups: Sequence[Group],
    ours: list[PciController],
    placed: Sequence[Device],
    detached: Sequence[Device],
    domain: Domain,
) -> tuple[PlannedExpander, ...] | None:
    """The groups on the set that is there. It has its indexes and its slots; its bus numbers must still be free. What
    it left for ports to come may have been taken by them since."""
    for spare in (SPARE_PORTS, 0):
        around = surroundings(domain, placed, detached, refilled=len(ours), spare=spare)
        if first_bus(groups, around) is not None:
            return _reused(lay_out(groups, around, domain.aliases), ours, domain)
    return None


def _reused(
    wanted: tuple[PlannedExpander, ...], ours: list[PciController], domain: Domain
) -> tuple[PlannedExpander, ...] | None:
    """``wanted`` on the controllers of ours that the domain has; None when they are not the same."""
    ours = sorted(ours, key=lambda controller: (controller.index is None, controller.index, controller.element))
    wanted_aliases = [
        name for expander in wanted for name in (expander.alias, *(port.alias for port in expander.ports))
    ]
    if [controller.alias for controller in ours] != wanted_aliases or not _well_shaped(wanted, ours, domain):
        return None
    index_of = {planned: own.index or 0 for planned, own in zip(_indexes(wanted), ours, strict=True)}
    kept = iter(ours)
    expanders = []
    for expander in wanted:
        own = next(kept)
        ports = []
        for port in expander.ports:
            existing = next(kept)
            ports.append(replace(port, index=existing.index or 0, parent=index_of[port.parent], existing=existing))
        expanders.append(replace(expander, index=own.index or 0, existing=own, ports=tuple(ports)))
    return tuple(expanders)


def _indexes(expanders: Sequence[PlannedExpander]) -> list[int]:
    return [index for expander in expanders for index in (expander.index, *(port.index for port in expander.ports))]


def _well_shaped(wanted: tuple[PlannedExpander, ...], ours: list[PciController], domain: Domain) -> bool:
    """Whether our controllers have the models, and are on the parents, that those wanted have."""
    if any(controller.index is None for controller in ours):
        return False
    number = {index: position for position, index in enumerate(_indexes(wanted))}
    shape: list[tuple[str, int | None]] = []
    for expander in wanted:
        shape.append(("pcie-expander-bus", None))
        shape += [(port.model, number[port.parent]) for port in expander.ports]
    for controller, (model, parent) in zip(ours, shape, strict=True):
        if controller.model != model:
            return False
        if parent is not None and (controller.address is None or controller.address.bus != ours[parent].index):
            return False
    indexes = {controller.index for controller in ours}
    guests = [other.address for other in domain.others] + [c.address for c in domain.controllers if not c.is_ours]
    return not any(address is not None and address.bus in indexes for address in guests)
