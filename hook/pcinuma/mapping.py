"""From host node to cell: the four rules of the contract, and the nearest cell for a node that has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pcinuma.model import Domain, HostTopology


@dataclass(frozen=True, slots=True)
class CellMap:
    """``cell_of`` maps host node to cell; ``nodes_of`` gives the host nodes that back each cell; ``shared`` the
    cells that claim one host node, where there are several."""

    cell_of: Mapping[int, int]
    nodes_of: Mapping[int, tuple[int, ...]]
    shared: Mapping[int, tuple[int, ...]]


def map_nodes(domain: Domain, host: HostTopology) -> CellMap:
    """Which cell each host node belongs to.

    1. A host node in a memnode's nodeset belongs to that cell.
    2. Else the cell with most vCPUs pinned to it (a vCPU counts where all its CPUs are the node's), of the cells
       that have CPUs and memory.
    3. Several cells: the lowest id.
    """
    by_memnode: dict[int, list[int]] = {}
    for cell, nodes in sorted(domain.memnodes.items()):
        for node in nodes:
            by_memnode.setdefault(node, []).append(cell)
    by_pins = _pinned(domain, host)
    cell_of: dict[int, int] = {}
    for node, counts in by_pins.items():
        cell_of[node] = min(counts, key=lambda cell: (-counts[cell], cell))
    cell_of |= {node: cells[0] for node, cells in by_memnode.items()}
    nodes_of: dict[int, set[int]] = {cell.id: set(domain.memnodes.get(cell.id, ())) for cell in domain.cells}
    for node, counts in by_pins.items():
        for cell_id in counts:
            if cell_id not in domain.memnodes:
                nodes_of[cell_id].add(node)
    for node, cell_id in cell_of.items():
        nodes_of[cell_id].add(node)
    claims: dict[int, list[int]] = {}
    for cell_id, claimed in sorted(nodes_of.items()):
        for node in claimed:
            claims.setdefault(node, []).append(cell_id)
    return CellMap(
        cell_of=cell_of,
        nodes_of={cell: tuple(sorted(nodes)) for cell, nodes in sorted(nodes_of.items())},
        shared={node: tuple(cells) for node, cells in sorted(claims.items()) if len(cells) > 1},
    )


def _pinned(domain: Domain, host: HostTopology) -> dict[int, dict[int, int]]:
    """For each host node the number of vCPUs pinned to it, by cell."""
    node_of_cpu = {cpu: node.id for node in host.nodes.values() for cpu in node.cpus.members}
    cell_of_vcpu = {vcpu: cell.id for cell in domain.cells if cell.memory > 0 for vcpu in cell.cpus.members}
    found: dict[int, dict[int, int]] = {}
    for vcpu, cpus in domain.pins.items():
        nodes = {node_of_cpu.get(cpu) for cpu in cpus.members}
        node = nodes.pop() if len(nodes) == 1 else None
        cell = cell_of_vcpu.get(vcpu)
        if node is not None and cell is not None:
            counts = found.setdefault(node, {})
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
