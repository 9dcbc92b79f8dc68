"""Which of the host's switches matter: shapes that real switches have beyond a device behind each downstream port."""

from __future__ import annotations

from pcinuma.model import Device, PciAddress
from pcinuma.switches import Branch, Candidate, branches_of

ROOT, UP = PciAddress(0, 0x10, 1, 0), PciAddress(0, 0x11, 0, 0)
DOWN = [PciAddress(0, 0x12, slot, 0) for slot in range(4)]


def candidate(bus: int, slot: int, *bridges: PciAddress, pf_slot: int | None = None) -> Candidate:
    source = PciAddress(0, bus, slot, 0)
    of_slot = (0, bus, slot if pf_slot is None else pf_slot)
    return Candidate(Device(bus, "pci", source), 0, "cell0", source, pf_slot is not None, bridges, of_slot)


def shape(branches: tuple[Branch, ...]) -> list[object]:
    """A branch with a switch as the list of what is below it, a device as its bus and slot."""
    return [
        shape(branch.below)
        if branch.switch is not None
        else (branch.members[0].source.bus, branch.members[0].source.slot)
        for branch in branches
    ]


def test_endpoints_inside_a_switch_are_below_it_as_well() -> None:
    """A switch may have an endpoint of its own beside its downstream ports, on the bus below the upstream port."""
    inside, behind = candidate(0x12, 9, ROOT, UP), candidate(0x20, 0, ROOT, UP, DOWN[0])
    assert shape(branches_of([[inside], [behind]])) == [[(0x12, 9), (0x20, 0)]]


def test_two_endpoints_inside_a_switch_are_in_two_places() -> None:
    assert shape(branches_of([[candidate(0x12, 9, ROOT, UP)], [candidate(0x12, 10, ROOT, UP)]])) == [
        [(0x12, 9), (0x12, 10)]
    ]


def test_vfs_inside_a_switch_are_in_the_place_of_their_pf() -> None:
    vfs = [candidate(0x12, slot, ROOT, UP, pf_slot=9) for slot in (10, 11)]
    assert shape(branches_of([[vf] for vf in vfs])) == [(0x12, 10), (0x12, 11)]


def test_devices_behind_one_downstream_port_share_that_and_not_the_switch() -> None:
    one, two = candidate(0x20, 0, ROOT, UP, DOWN[0]), candidate(0x20, 1, ROOT, UP, DOWN[0])
    assert shape(branches_of([[one], [two]])) == [(0x20, 0), (0x20, 1)]


def test_root_ports_are_no_switches() -> None:
    one, two = candidate(0x11, 0, ROOT), candidate(0x11, 1, ROOT)
    assert shape(branches_of([[one], [two]])) == [(0x11, 0), (0x11, 1)]


def test_a_switch_keeps_the_place_of_its_first_device() -> None:
    """Order is the host's, also where a device of another way stands between two of one switch."""
    first, other, last = (
        candidate(0x20, 0, ROOT, UP, DOWN[0]),
        candidate(0x30, 0, PciAddress(0, 0, 2, 0)),
        candidate(0x40, 0, ROOT, UP, DOWN[1]),
    )
    branches = branches_of([[first], [other], [last]])
    assert shape(branches) == [[(0x20, 0), (0x40, 0)], (0x30, 0)]
    assert [branch.ports for branch in branches] == [4, 1]
