"""The host's NUMA distances as the guest's cells would have them, for a domain that says none."""

from __future__ import annotations

from pcinuma.mapping import CellMap
from pcinuma.model import Domain, Finding, HostTopology

LOCAL, UNREACHABLE = 10, 255  # ACPI 6.5, 5.2.17 SLIT; libvirt formatdomain, Guest NUMA topology

Distances = dict[int, dict[int, int]]


def host_distances(domain: Domain, host: HostTopology, cells: CellMap) -> tuple[Distances, list[Finding]]:
    """By cell, the distance to each cell, or nothing and a finding that says why the host's table does not tell.

    Nothing is to be written where the domain has distances of its own, or a single cell.
    """
    if len(domain.cells) < 2 or any(cell.has_distances for cell in domain.cells):
        return {}, []
    nodes: dict[int, int] = {}
    for cell in domain.cells:
        own = cells.nodes_of.get(cell.id, ())
        if len(own) != 1:
            several = f"host nodes {', '.join(map(str, own))}" if own else "no host node that is known"
            return {}, [_unknown(f"cell {cell.id} is on {several}")]
        nodes[cell.id] = own[0]
    found: Distances = {}
    for number, node in nodes.items():
        for other, other_node in nodes.items():
            known = host.nodes[node].distances.get(other_node) if node in host.nodes else None
            distance = LOCAL if number == other else known
            if distance is None:
                return {}, [_unknown(f"the host's table has no distance from node {node} to node {other_node}")]
            if number != other and not LOCAL < distance <= UNREACHABLE:
                return {}, [_unknown(f"the host says {distance} from node {node} to node {other_node}")]
            found.setdefault(number, {})[other] = distance
    return found, []


def _unknown(why: str) -> Finding:
    hint = "write <distances> in the domain's cells yourself, or leave --distances at keep"
    return Finding("distances-unknown", "warning", f"no NUMA distances are written: {why}", None, hint)
