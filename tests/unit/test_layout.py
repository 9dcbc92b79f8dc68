"""Where the numbers end: slots, indexes and bus numbers that are just enough, and one too few."""

from __future__ import annotations

import pytest

from pcinuma.layout import Group, first_bus, groups_of, lay_out, misfit
from pcinuma.model import Device, PciAddress
from pcinuma.pci_tree import Surroundings
from pcinuma.switches import Branch, Candidate


def candidate(bdf: str, cell: int = 0, *, is_vf: bool = False, uuid: str | None = None) -> Candidate:
    source = PciAddress.parse(bdf)
    device = Device(source.bus * 256 + source.slot * 8 + source.function, "pci", None if uuid else source, uuid)
    return Candidate(device, cell, f"cell{cell}", source, is_vf, (), source.slot_key)


def group(ports: int, cell: int = 0) -> Group:
    return Group(f"cell{cell}", cell, tuple(Branch((candidate(f"{n:02x}:00.0", cell),)) for n in range(1, ports + 1)))


def around(
    highest: int = 0, buses: int = 1, slots: int = 2, blocks: tuple[tuple[int, int], ...] = (), automatic: int = 0
) -> Surroundings:
    return Surroundings(highest, buses, slots, blocks, automatic)


# an expander and its ports take a number each; the highest is 255
@pytest.mark.parametrize(
    ("ports", "there", "first"),
    [
        ([1], around(), 254),
        ([1, 3], around(), 250),
        ([1], around(buses=254), 254),  # the root bus has 0 to 253
        ([1], around(buses=255), None),
        ([1], around(buses=252, automatic=1), 254),  # one without busNr takes 252 and 253
        ([1], around(buses=253, automatic=1), None),
        ([1], around(buses=250, automatic=2), 254),
        ([1], around(buses=251, automatic=2), None),
        ([1], around(blocks=((255, 1),)), 253),
        ([1], around(blocks=((253, 2),)), 251),
        ([1], around(blocks=((253, 1),)), 254),
        ([1], around(blocks=((250, 6),)), 248),
        ([1], around(buses=248, blocks=((250, 6),)), 248),
        ([1], around(buses=249, blocks=((250, 6),)), None),
        ([1], around(buses=200, blocks=((200, 40),)), 254),  # the root bus ends below 200 already
        ([1], around(buses=255, blocks=((200, 40),)), 254),  # if it has too few there, that is not by ours
        ([3], around(buses=196, blocks=((200, 53),)), 196),  # 253 to 255 are three, and four are needed
        ([3], around(buses=197, blocks=((200, 53),)), None),
        ([2], around(buses=200, blocks=((200, 53),)), 253),
        ([1], around(blocks=((254, 2), (250, 2))), 252),
        ([2], around(blocks=((254, 2), (250, 2))), 247),
        ([250], around(blocks=((3, 2),)), 5),
        ([251], around(blocks=((3, 2),)), None),
        ([254], around(), 1),
        ([255], around(), None),
    ],
)
def test_the_first_bus_number(ports: list[int], there: Surroundings, first: int | None) -> None:
    assert first_bus([group(count) for count in ports], there) == first


@pytest.mark.parametrize(
    ("groups", "there", "expected"),
    [
        ([group(1)], around(slots=31), None),
        ([group(1)], around(slots=32), ("root-bus-slots", "the guest would need 33 slots on bus 0, which has 32")),
        ([group(1), group(1, 1)], around(slots=30), None),
        ([group(1), group(1, 1)], around(slots=31), ("root-bus-slots", "the guest would need 33 slots on bus 0, which has 32")),
        ([group(1)], around(buses=255), ("bus-numbers", "the guest would need 257 PCI bus numbers of 256")),
        (
            [group(1), group(2, 1)],
            around(buses=240, blocks=((245, 4), (249, 3)), automatic=2),
            ("bus-numbers", "the guest would need 256 PCI bus numbers of 256"),  # 240, 4, 3, two twice and 2 and 3; 252 on are 4
        ),
        ([group(1)], around(highest=253, buses=100), None),  # indexes 254 and 255
        ([group(1)], around(highest=254, buses=255), ("bus-numbers", "the guest would need 257 PCI bus numbers of 256")),
    ],
)  # fmt: skip
def test_what_does_not_fit(groups: list[Group], there: Surroundings, expected: tuple[str, str] | None) -> None:
    assert misfit(groups, there) == expected


def test_an_index_above_255_does_not_fit_whatever_the_bus_numbers() -> None:
    assert misfit([group(1)], around(highest=254, buses=10)) is not None


def test_indexes_that_are_to_be_taken_first() -> None:
    """Those of controllers that go: an expander and three ports get 3, 4 and what comes after the highest."""
    there = Surroundings(9, 1, 2, (), 0, indexes=(3, 4))
    (expander,) = lay_out([group(3)], there, frozenset())
    assert [expander.index, *(port.index for port in expander.ports)] == [3, 4, 10, 11]
    # 7 and 255
    assert misfit([group(1)], Surroundings(254, 10, 2, (), 0, indexes=(7,))) is None
    assert misfit([group(2)], Surroundings(254, 10, 2, (), 0, indexes=(7,))) is not None


def test_groups_ascend_by_their_lowest_device_and_devices_by_theirs() -> None:
    found = groups_of([candidate("41:00.0", 1), candidate("81:00.0"), candidate("21:00.0"), candidate("31:00.0", 1)])
    assert [(group.name, group.cell, group.buses) for group in found] == [("cell0", 0, 3), ("cell1", 1, 3)]
    assert [[str(b.members[0].source)[5:] for b in group.branches] for group in found] == [
        ["21:00.0", "81:00.0"],
        ["31:00.0", "41:00.0"],
    ]


def test_functions_share_a_port_with_function_0_and_vfs_do_not() -> None:
    members = [candidate("21:00.1"), candidate("21:00.0"), candidate("31:00.1"), candidate("31:00.2")]
    members += [candidate("41:00.0"), candidate("41:00.1", is_vf=True), candidate("41:00.2", uuid="b")]
    (found,) = groups_of(members)
    assert [[str(member.source)[5:] for member in branch.members] for branch in found.branches] == [
        ["21:00.0", "21:00.1"],
        ["31:00.1"],
        ["31:00.2"],
        ["41:00.0"],
        ["41:00.1"],
        ["41:00.2"],
    ]


def test_what_has_one_parent_comes_after_it_by_name() -> None:
    """The function itself, then what it gives to others, whatever order the domain has."""
    members = [candidate("21:00.0", uuid="b"), candidate("21:00.0", uuid="a"), candidate("21:00.0")]
    (found,) = groups_of(members)
    assert [branch.members[0].device.uuid for branch in found.branches] == [None, "a", "b"]


# up to 32 ports a slot each; above, eight functions a slot, and a slot with one of them alone is not multifunction
@pytest.mark.parametrize(
    ("ports", "last"), [(32, (31, 0, False)), (33, (4, 0, False)), (34, (4, 1, False)), (40, (4, 7, False))]
)
def test_slots_of_the_ports(ports: int, last: tuple[int, int, bool]) -> None:
    (expander,) = lay_out([group(ports)], around(highest=4), frozenset())
    places = [(port.slot, port.function, port.multifunction) for port in expander.ports]
    assert places[-1] == last
    if ports <= 32:
        assert places == [(slot, 0, False) for slot in range(32)]
    else:
        leaders = [(slot, 0, True) for slot in range(4)] + ([(4, 0, True)] if ports > 33 else [])
        assert [place for place in places if place[2]] == leaders
        assert [place[:2] for place in places] == [divmod(number, 8) for number in range(ports)]
    assert (expander.index, expander.bus_nr) == (5, 255 - ports)
    assert [(port.index, port.parent) for port in expander.ports] == [(6 + n, 5) for n in range(ports)]


def test_an_alias_that_is_taken_gets_a_number() -> None:
    taken = frozenset(("ua-pcinuma-cell0", "ua-pcinuma-cell0-2", "ua-pcinuma-0000-01-00-0"))
    (expander,) = lay_out([group(2)], around(), taken)
    assert expander.alias == "ua-pcinuma-cell0-3"
    assert [port.alias for port in expander.ports] == ["ua-pcinuma-0000-01-00-0-2", "ua-pcinuma-0000-02-00-0"]
    first, second = lay_out([group(1), group(1)], around(), frozenset())
    assert (first.alias, second.alias) == ("ua-pcinuma-cell0", "ua-pcinuma-cell0-2")


def test_what_an_alias_says_the_port_is_for() -> None:
    mdev = candidate("21:00.0", uuid="4b20d080-1b54-4048-85b3-a6a62d165c01")
    source = PciAddress.parse("22:00.0")
    vdpa = Candidate(Device(1, "vdpa", None, vdpa="vhost-vdpa-3"), 0, "cell0", source, False)
    (expander,) = lay_out([Group("cell0", 0, (Branch((mdev,)), Branch((vdpa,))))], around(), frozenset())
    assert [port.alias for port in expander.ports] == [
        "ua-pcinuma-mdev-4b20d080-1b54-4048-85b3-a6a62d165c01",
        "ua-pcinuma-vdpa-vhost-vdpa-3",
    ]


def test_a_switch_and_what_is_below_it() -> None:
    """Root port, upstream port, downstream ports, then the next: indexes as firmware numbers the buses."""
    below = tuple(Branch((candidate(f"3{n}:00.0"),)) for n in range(2))
    branches = (Branch(switch=PciAddress.parse("30:00.0"), below=below), Branch((candidate("41:00.0"),)))
    (expander,) = lay_out([Group("cell0", 0, branches)], around(highest=7), frozenset())
    assert (expander.index, expander.bus_nr) == (8, 250)
    assert [
        (p.alias[11:], p.model, p.index, p.parent, p.slot, p.function, p.multifunction) for p in expander.ports
    ] == [
        ("to-switch-0000-30-00-0", "pcie-root-port", 9, 8, 0, 0, False),
        ("switch-0000-30-00-0", "pcie-switch-upstream-port", 10, 9, 0, 0, False),
        ("0000-30-00-0", "pcie-switch-downstream-port", 11, 10, 0, 0, False),
        ("0000-31-00-0", "pcie-switch-downstream-port", 12, 10, 1, 0, False),
        ("0000-41-00-0", "pcie-root-port", 13, 8, 1, 0, False),
    ]


def test_functions_of_one_port() -> None:
    (found,) = groups_of([candidate("21:00.0"), candidate("21:00.3"), candidate("31:00.2")])
    (expander,) = lay_out([found], around(), frozenset())
    assert [[(a.function, a.multifunction) for a in port.attachments] for port in expander.ports] == [
        [(0, True), (3, False)],
        [(0, False)],
    ]
