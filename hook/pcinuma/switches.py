"""The host's PCIe switches above devices that share an expander: which of them matter to the guest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pcinuma.model import Device, PciAddress


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device to place: its cell, what it shares an expander with, the host BDF that orders it, whether it is a VF.

    ``group`` is what the expander's alias says it is for: ``cell0``, or ``cell0-pci0000-40``. ``bridges`` are the
    host's bridges above it from the root port down where switches are to be rebuilt, else nothing; ``slot`` tells
    it from the others on its bus: for a VF that of its PF, since VFs spill into slots by their number.
    """

    device: Device
    cell: int
    group: str
    source: PciAddress
    is_vf: bool
    bridges: tuple[PciAddress, ...] = ()
    slot: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Branch:
    """What one port carries: the functions of one device, or a switch (its host upstream port) with branches of its
    own."""

    members: tuple[Candidate, ...] = ()
    switch: PciAddress | None = None
    below: tuple[Branch, ...] = ()

    @property
    def ports(self) -> int:
        """The ports it takes, each with a bus number: its own, and for a switch the upstream port and those below."""
        return 1 + (self.switch is not None) + sum(branch.ports for branch in self.below)


def branches_of(sets: Sequence[Sequence[Candidate]]) -> tuple[Branch, ...]:
    """The devices of one expander, each set of functions on a port, below the switches that matter to them.

    A switch matters when devices are in at least two places directly below it: with one alone it would only cost bus
    numbers, and devices behind one downstream port (VFs of one NIC) share that port, not the switch. Order is kept.
    """
    places: dict[PciAddress, set[object]] = {}
    for members in sets:
        for switch, place in _switches_above(members[0]):
            places.setdefault(switch, set()).add(place)
    chains = [tuple(switch for switch, _ in _switches_above(members[0]) if len(places[switch]) > 1) for members in sets]
    return _nested(list(zip(sets, chains, strict=True)), 0)


def _switches_above(candidate: Candidate) -> list[tuple[PciAddress, object]]:
    """The upstream ports above a device, from the root down, each with where below it the way goes on.

    Below a root port bridges alternate, upstream port and downstream port (PCI Express Base, 1.3.3 Switch).
    """
    bridges = candidate.bridges
    return [
        (bridges[at], bridges[at + 1] if at + 1 < len(bridges) else candidate.slot) for at in range(1, len(bridges), 2)
    ]


def _nested(sets: Sequence[tuple[Sequence[Candidate], tuple[PciAddress, ...]]], depth: int) -> tuple[Branch, ...]:
    found: list[Branch] = []
    done: set[PciAddress] = set()
    for members, chain in sets:
        if len(chain) <= depth:
            found.append(Branch(tuple(members)))
        elif (switch := chain[depth]) not in done:
            done.add(switch)
            inside = [entry for entry in sets if len(entry[1]) > depth and entry[1][depth] == switch]
            found.append(Branch(switch=switch, below=_nested(inside, depth + 1)))
    return tuple(found)
