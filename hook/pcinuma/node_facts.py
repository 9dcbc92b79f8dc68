"""What ``doctor`` knows of a node: frozen data that the reader fills and the checks judge. None means not known.

A record of ``pcinuma snapshot`` knows less than a machine or a recorded tree; what it lacks stays None and is said to
be unchecked, never taken for absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pcinuma.model import CpuSet, HostTopology, PciAddress


@dataclass(frozen=True, slots=True)
class PagePool:
    """The huge pages of one size on one node, in pages; ``free`` is None where it is not known."""

    size_kib: int
    total: int
    free: int | None = None


@dataclass(frozen=True, slots=True)
class CpuPlace:
    """Where a CPU is: its physical package, and the CPUs of its core, itself included."""

    package: int | None
    core: CpuSet


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node as it was read.

    ``pools`` is by node and holds only nodes whose pools could be read; ``cpus`` is by CPU number and holds online CPUs
    whose core is known. ``iommu_units`` and ``iommu_groups`` are counts. ``vfio_drivers`` are the PCI drivers with vfio
    in their name. ``configs`` are configuration spaces as far as they could be read. ``memory_bytes`` is MemTotal.
    """

    host: HostTopology
    source: str
    pools: Mapping[int, tuple[PagePool, ...]] | None = None
    cpus: Mapping[int, CpuPlace] = field(default_factory=dict)
    present: CpuSet | None = None
    online: CpuSet | None = None
    iommu_units: int | None = None
    iommu_groups: int | None = None
    vfio_drivers: tuple[str, ...] | None = None
    configs: Mapping[PciAddress, bytes] | None = None
    command_line: str | None = None
    memory_bytes: int | None = None

    def nodes_with_cpus(self) -> list[int]:
        """The nodes that hold CPUs, ascending."""
        return [number for number, node in sorted(self.host.nodes.items()) if node.cpus]

    def packages_of_node(self, number: int) -> set[int]:
        """The physical packages of the node's CPUs, as far as they are known."""
        node = self.host.nodes[number]
        found = {self.cpus[cpu].package for cpu in node.cpus.members & self.cpus.keys()}
        return {package for package in (*found, node.package) if package is not None}

    def packages(self) -> set[int]:
        """The physical packages that are known; a record knows one of each node."""
        return {package for number in self.host.nodes for package in self.packages_of_node(number)}

    def node_of_cpu(self, cpu: int) -> int | None:
        """The node that holds the CPU."""
        return next((number for number, node in self.host.nodes.items() if cpu in node.cpus), None)
