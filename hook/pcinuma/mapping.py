"""From host node to cell: the four rules of the contract, and the nearest cell for a node that has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pcinuma.model import CpuSet, Domain, HostTopology


@dataclass(frozen=True, slots=True)
class CellMap:
    """``cell_of`` maps host node to cell; ``nodes_of`` gives the host nodes that belong to each cell; ``shared`` the
    cells that one host node belongs to, where they are several. ``touched`` are all host nodes that a cell's memory
    or any vCPU of it is on, whether they belong to it or not."""

    cell_of: Mapping[int, int]
    nodes_of: Mapping[int, tuple[int, ...]]
    shared: Mapping[int, tuple[int, ...]]
    touched: Mapping[int, CpuSet]


def map_nodes(domain: Domain, host: HostTopology) -> CellMap:
    """Which cell each host node belongs to.

    1. A host node in a memnode's nodeset belongs to that cell.
    2. Else the cell with most vCPUs pinned to it (a vCPU counts where all its CPUs are the node's), of the cells
       that have CPUs and memory.
    3. Several cells: the lowest id.
    """
    owners: dict[int, list[int]] = {}
    for cell, nodes in sorted(domain.memnodes.items()):
        for node in nodes:
            owners.setdefault(node, []).append(cell)
    by_pins = _pinned(domain, host)
    for node, counts in by_pins.items():
        most = max(counts.values())
        owners.setdefault(node, sorted(cell for cell, count in counts.items() if count == most))
    nodes_of: dict[int, list[int]] = {cell.id: [] for cell in domain.cells}
    touched = {cell.id: domain.memnodes.get(cell.id, CpuSet()) for cell in domain.cells}
    for node, cells in sorted(owners.items()):
        for cell in cells:
            nodes_of[cell].append(node)
    for node, counts in by_pins.items():
        for cell in counts:
            touched[cell] |= CpuSet((node,))
    return CellMap(
        cell_of={node: cells[0] for node, cells in owners.items()},
        nodes_of={cell: tuple(nodes) for cell, nodes in nodes_of.items()},
        shared={node: tuple(cells) for node, cells in sorted(owners.items()) if len(cells) > 1},
        touched=touched,
    )


def _pinned(domain: Domain, host: HostTopology) -> dict[int, dict[int, int]]:
    """For each host node the number of vCPUs pinned to it, by cell."""
    node_of_cpu = {cpu: node for node in host.nodes.values() for cpu in node.cpus}
    cell_of_vcpu = {vcpu: cell.id for cell in domain.cells if cell.memory > 0 for vcpu in cell.cpus}
    found: dict[int, dict[int, int]] = {}
    for vcpu, cpus in domain.pins.items():
        node = node_of_cpu.get(cpus.first) if cpus.first is not None else None
        cell = cell_of_vcpu.get(vcpu)
        if node is not None and cpus <= node.cpus and cell is not None:
            counts = found.setdefault(node.id, {})
            counts[cell] = counts.get(cell, 0) + 1
    return found


def nearest_cell(node: int, cells: CellMap, host: HostTopology) -> int | None:
    """The cell whose host node is nearest to ``node`` by the host's distance table, ties to the lowest cell.

    None when the table does not say.
    """
    known = host.nodes.get(node)
    distances = known.distances if known is not None else {}
    ranked = [
        (distances[other], cell) for cell, backing in cells.nodes_of.items() for other in backing if other in distances
    ]
    return min(ranked)[1] if ranked else None
