"""From host node to cell: the four rules of the contract, on small domains and hosts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pcinuma.mapping import map_nodes, nearest_cell
from pcinuma.model import (
    Cell,
    CpuSet,
    Device,
    Domain,
    HostFunction,
    HostNode,
    HostTopology,
    Options,
    PciAddress,
    Placement,
    Plan,
)
from pcinuma.plan import plan

GPU = PciAddress(0, 0x41, 0, 0)


def domain(
    cells: Mapping[int, str],
    memnodes: Mapping[int, str] | None = None,
    pins: Mapping[int, str] | None = None,
    *,
    memory: int = 1024,
) -> Domain:
    """Cells with their vCPUs, memnodes and pins with their sets; ``memory`` is that of every cell; one device, GPU."""
    return Domain(
        arch="x86_64",
        machine="q35",
        cells=tuple(Cell(number, CpuSet.parse(cpus), memory) for number, cpus in cells.items()),
        memnodes={number: CpuSet.parse(nodes) for number, nodes in (memnodes or {}).items()},
        pins={number: CpuSet.parse(cpus) for number, cpus in (pins or {}).items()},
        controllers=(),
        devices=(Device(element=1, kind="pci", source=GPU),),
        others=(),
    )


def host(
    cpus: Mapping[int, str], distances: Mapping[int, Mapping[int, int]] | None = None, node: int | None = 0
) -> HostTopology:
    """Nodes with their CPUs and distances; ``node`` is the one of the device."""
    nodes = {n: HostNode(n, CpuSet.parse(text), 1024, (distances or {}).get(n, {})) for n, text in cpus.items()}
    return HostTopology(nodes, {GPU: HostFunction(GPU, node, None if node is not None else "it does not say")})


TWO = {0: "0-3", 1: "4-7"}


def cell_of(made: Domain, seen: HostTopology) -> dict[int, int]:
    return dict(map_nodes(made, seen).cell_of)


def placed(
    made: Domain, seen: HostTopology, *, unmapped: str = "leave", policy: str = "best-effort"
) -> tuple[Plan, Placement]:
    planned = plan(made, seen, Options(unmapped=unmapped, policy=policy))
    (placement,) = planned.placements
    return planned, placement


# --- rule 1 ----------------------------------------------------------------------------------------------------


def test_a_memnode_decides() -> None:
    assert cell_of(domain({0: "0-1", 1: "2-3"}, {0: "0", 1: "1"}), host(TWO)) == {0: 0, 1: 1}


def test_a_memnode_may_cross() -> None:
    assert cell_of(domain({0: "0-1", 1: "2-3"}, {0: "1", 1: "0"}), host(TWO)) == {1: 0, 0: 1}


def test_a_memnode_of_several_nodes() -> None:
    four = {0: "0", 1: "1", 2: "2", 3: "3"}
    assert cell_of(domain({0: "0-1", 1: "2-3"}, {0: "0-1", 1: "2-3"}), host(four)) == {0: 0, 1: 0, 2: 1, 3: 1}


def test_a_memnode_wins_over_pins() -> None:
    made = domain({0: "0-1", 1: "2-3"}, {0: "0", 1: "1"}, {0: "4", 1: "5", 2: "0", 3: "1"})
    assert cell_of(made, host(TWO)) == {0: 0, 1: 1}


def test_a_memnode_makes_a_cell_without_cpus_a_target() -> None:
    assert cell_of(domain({0: "0-3", 1: ""}, {0: "0", 1: "1"}), host(TWO)) == {0: 0, 1: 1}


def test_a_memnode_makes_a_cell_without_memory_a_target() -> None:
    assert cell_of(domain({0: "0-1", 1: "2-3"}, {0: "0", 1: "1"}, memory=0), host(TWO)) == {0: 0, 1: 1}


# --- rule 2 ----------------------------------------------------------------------------------------------------


def test_pins_decide_where_no_memnode_does() -> None:
    made = domain({0: "0-1", 1: "2-3"}, pins={0: "4", 1: "5", 2: "0", 3: "1"})
    assert cell_of(made, host(TWO)) == {1: 0, 0: 1}


def test_the_cell_with_most_vcpus_on_the_node() -> None:
    made = domain({0: "0-2", 1: "3-5"}, pins={0: "0", 1: "4", 2: "5", 3: "1", 4: "2", 5: "6"})
    # host node 0 has one vCPU of cell 0 and two of cell 1; host node 1 two of cell 0 and one of cell 1
    assert cell_of(made, host(TWO)) == {0: 1, 1: 0}


def test_as_many_vcpus_of_two_cells_goes_to_the_lower() -> None:
    made = domain({0: "0-1", 1: "2-3"}, pins={3: "0", 1: "1", 0: "4", 2: "5"})
    assert cell_of(made, host(TWO)) == {0: 0, 1: 0}


def test_a_pin_to_several_cpus_of_one_node_counts() -> None:
    assert cell_of(domain({0: "0"}, pins={0: "4-7"}), host(TWO)) == {1: 0}


def test_memnode_and_pins_together() -> None:
    """Cell 0 has a memnode, cell 1 has none and is pinned to host node 1: each node has its cell."""
    made = domain({0: "0-1", 1: "2-3"}, {0: "0"}, {0: "0", 1: "1", 2: "4", 3: "5"})
    assert cell_of(made, host(TWO)) == {0: 0, 1: 1}


def test_pins_to_a_node_of_no_memnode() -> None:
    """Host node 1 is in no nodeset, so the pins decide, though the cell's memory is on host node 0."""
    made = domain({0: "0-1", 1: "2-3"}, {0: "0"}, {0: "4", 1: "5"})
    assert cell_of(made, host(TWO)) == {0: 0, 1: 0}


def test_pins_to_cpus_of_no_node_decide_nothing() -> None:
    assert cell_of(domain({0: "0"}, pins={0: "100"}), host(TWO)) == {}


def test_pins_of_vcpus_of_no_cell_decide_nothing() -> None:
    assert cell_of(domain({0: "0"}, pins={9: "0"}), host(TWO)) == {}


def test_without_memnodes_and_pins_nothing_is_known() -> None:
    assert cell_of(domain({0: "0-1", 1: "2-3"}), host(TWO)) == {}


def test_pins_do_not_make_a_cell_without_memory_a_target() -> None:
    assert cell_of(domain({0: "0"}, pins={0: "0"}, memory=0), host(TWO)) == {}


# --- rule 3 ----------------------------------------------------------------------------------------------------


def test_one_node_for_two_cells_is_the_lowest_and_said() -> None:
    made = domain({0: "0-1", 1: "2-3"}, {0: "0", 1: "0"})
    assert cell_of(made, host(TWO)) == {0: 0}
    planned, placement = placed(made, host(TWO))
    assert (placement.cell, placement.kind) == (0, "placed")
    (finding,) = [finding for finding in planned.findings if finding.severity != "info"]
    assert "0" in finding.message
    assert "1" in finding.message


def test_the_lowest_whatever_the_order() -> None:
    assert cell_of(domain({1: "2-3", 0: "0-1"}, {1: "1", 0: "1"}), host(TWO)) == {1: 0}


def test_one_node_for_two_cells_by_pins_is_said_too() -> None:
    made = domain({0: "0-1", 1: "2-3"}, pins={0: "0", 1: "1", 2: "2", 3: "3"})
    planned, placement = placed(made, host(TWO))
    assert placement.cell == 0
    assert [finding for finding in planned.findings if finding.severity != "info"] != []


def test_nothing_is_said_of_a_node_that_no_device_is_on() -> None:
    made = domain({0: "0", 1: "1", 2: "2"}, {0: "0", 1: "1", 2: "1"})
    planned, placement = placed(made, host(TWO, node=0))
    assert placement.cell == 0
    assert planned.findings == ()


# --- rule 4 ----------------------------------------------------------------------------------------------------

FOUR = {0: "0", 1: "1", 2: "2", 3: "3"}
# two sockets of two nodes each: 0 and 1, 2 and 3
SOCKETS = {
    0: {0: 10, 1: 12, 2: 32, 3: 32},
    1: {0: 12, 1: 10, 2: 32, 3: 32},
    2: {0: 32, 1: 32, 2: 10, 3: 12},
    3: {0: 32, 1: 32, 2: 12, 3: 10},
}
CELLS_ON_0_AND_2 = ({0: "0", 1: "1"}, {0: "0", 1: "2"})


def test_a_node_of_no_cell_is_left() -> None:
    planned, placement = placed(domain(*CELLS_ON_0_AND_2), host(FOUR, SOCKETS, node=3))
    assert (placement.kind, placement.cell, placement.guest_address) == ("left", None, None)
    assert placement.reason
    assert "3" in placement.reason
    assert [finding.severity for finding in planned.findings] == ["warning"]
    assert planned.expanders == ()


@pytest.mark.parametrize("node, cell", ((1, 0), (3, 1)))
def test_nearest_by_the_distance_table(node: int, cell: int) -> None:
    planned, placement = placed(domain(*CELLS_ON_0_AND_2), host(FOUR, SOCKETS, node=node), unmapped="nearest")
    assert (placement.kind, placement.cell, placement.fits) == ("approximate", cell, False)
    assert [finding.severity for finding in planned.findings] == ["warning"]


def test_a_tie_goes_to_the_lowest_cell() -> None:
    made = domain({0: "0", 1: "1"}, {0: "2", 1: "1"})
    seen = host({0: "0", 1: "1", 2: "2"}, {0: {0: 10, 1: 20, 2: 20}}, node=0)
    assert placed(made, seen, unmapped="nearest")[1].cell == 0


def test_the_nearest_node_of_a_cell_of_several_counts() -> None:
    made = domain({0: "0", 1: "1"}, {0: "1", 1: "2-3"})
    seen = host(FOUR, {0: {0: 10, 1: 21, 2: 40, 3: 15}}, node=0)
    assert placed(made, seen, unmapped="nearest")[1].cell == 1


def test_without_a_distance_table_nothing_is_guessed() -> None:
    _, placement = placed(domain(*CELLS_ON_0_AND_2), host(FOUR, node=3), unmapped="nearest")
    assert (placement.kind, placement.cell) == ("left", None)


def test_restricted_refuses_what_is_only_near() -> None:
    planned, _ = placed(domain(*CELLS_ON_0_AND_2), host(FOUR, SOCKETS, node=1), unmapped="nearest", policy="restricted")
    assert planned.refusal
    assert "0000:41:00.0" in planned.refusal


def test_nearest_does_not_move_what_has_a_cell() -> None:
    planned, placement = placed(domain(*CELLS_ON_0_AND_2), host(FOUR, SOCKETS, node=2), unmapped="nearest")
    assert (placement.kind, placement.cell) == ("placed", 1)
    assert planned.findings == ()


def test_nearest_never_picks_a_cell_that_is_no_target() -> None:
    """Cell 1 has no memory and no memnode: a vCPU pinned to host node 2 does not make it one."""
    made = Domain(
        arch="x86_64",
        machine="q35",
        cells=(Cell(0, CpuSet.parse("0"), 1024), Cell(1, CpuSet.parse("1"), 0)),
        memnodes={0: CpuSet.parse("0")},
        pins={1: CpuSet.parse("2")},
        controllers=(),
        devices=(Device(element=1, kind="pci", source=GPU),),
        others=(),
    )
    seen = host(FOUR, SOCKETS, node=3)
    assert nearest_cell(3, map_nodes(made, seen), seen) == 0


@pytest.mark.parametrize("unmapped", ("leave", "nearest"))
def test_an_unknown_node_is_never_guessed(unmapped: str) -> None:
    made = domain({0: "0"}, {0: "0"})
    planned, placement = placed(made, host({0: "0"}, {0: {0: 10}}, node=None), unmapped=unmapped)
    assert (placement.kind, placement.cell, placement.host_node) == ("left", None, None)
    assert planned.findings[0].code == "numa-unknown"
