"""``doctor`` on the node as a whole: nodes and CPUs, IOMMU and VFIO, huge pages. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pcinuma.model import CpuSet, Finding, HostNode
from pcinuma.node_facts import NodeFacts
from pcinuma.quantity import format_bytes

_NO_VFIO_NEEDED = ("pci-stub", "pcieport")  # what the kernel's vfio lets stand beside a function of its own


def check_node(facts: NodeFacts) -> Iterator[Finding]:
    """Every finding about the node that is about no single device."""
    yield from _nodes(facts)
    yield from _iommu(facts)
    yield from _groups(facts)
    yield from _huge_pages(facts)


# --- nodes and CPUs --------------------------------------------------------------------------------------------


def _nodes(facts: NodeFacts) -> Iterator[Finding]:
    nodes = facts.host.nodes
    if not nodes:
        yield Finding(
            "no-nodes",
            "error",
            "no NUMA node can be read",
            None,
            "a kernel with CONFIG_NUMA shows them in /sys/devices/system/node",
        )
        return
    if len(facts.nodes_with_cpus()) == 1:
        yield from _one_node(facts, len(facts.packages()))
    yield from _without_cpus(nodes)
    for number, node in sorted(nodes.items()):
        if node.cpus and node.memory_kib == 0:
            yield Finding(
                "node-no-memory",
                "warning",
                f"node {number} has CPUs ({node.cpus}) and no memory: a cell pinned there has its memory elsewhere",
                None,
                "populate its memory channels, or keep VMs off its CPUs with reservedSystemCPUs",
            )
    for package, members in _nodes_of_packages(facts).items():
        if len(members) > 1:
            yield Finding(
                "split-socket",
                "info",
                f"package {package} is split into nodes {_listed(members)} (SNC, NPS or L3 as NUMA): each device"
                " belongs to one of them, and a VM on another node of the socket backs no cell for it",
                None,
                "firmware: SNC off, or NPS1, makes one node a socket; else --unmapped nearest",
            )
    if facts.present is not None and facts.online is not None:
        offline = CpuSet(facts.present.members - facts.online.members)
        if offline:
            yield Finding(
                "cpus-offline",
                "warning",
                f"{len(offline.members)} of {len(facts.present.members)} CPUs are offline: {offline}; no VM can"
                " have them",
                None,
                "echo 1 > /sys/devices/system/cpu/cpuN/online, unless SMT was switched off on purpose",
            )


def _one_node(facts: NodeFacts, packages: int) -> Iterator[Finding]:
    off = "numa=off" in (facts.command_line or "").split()
    if off or packages > 1:
        why = (
            "the kernel runs with numa=off"
            if off
            else f"there are {packages} packages: the firmware interleaves memory"
        )
        yield Finding(
            "numa-hidden",
            "error",
            f"the host shows one NUMA node with CPUs, but {why}; devices and memory cannot be aligned",
            None,
            "take numa=off from the kernel's command line" if off else "firmware: node interleaving off, NUMA on",
        )
    else:
        yield Finding("single-node", "info", "the host has one NUMA node with CPUs: there is nothing to align")


def _without_cpus(nodes: Mapping[int, HostNode]) -> Iterator[Finding]:
    with_memory = [number for number, node in nodes.items() if not node.cpus and node.memory_kib]
    empty = [number for number, node in nodes.items() if not node.cpus and not node.memory_kib]
    if with_memory:
        total = sum(nodes[number].memory_kib or 0 for number in with_memory)
        yield Finding(
            "node-no-cpus",
            "info",
            f"{_named(with_memory)} no CPUs, but memory ({_gib(total)} together), as memory of GPUs and CXL has: no"
            " cell is backed by it unless a memnode names it",
        )
    if empty:
        yield Finding(
            "node-no-cpus", "info", f"{_named(empty)} neither CPUs nor memory that is known: no cell is backed by it"
        )


def _named(numbers: list[int]) -> str:
    return f"node {numbers[0]} has" if len(numbers) == 1 else f"nodes {_listed(numbers)} have"


def _nodes_of_packages(facts: NodeFacts) -> Mapping[int, list[int]]:
    found: dict[int, set[int]] = {}
    for number in facts.host.nodes:
        for package in facts.packages_of_node(number):
            found.setdefault(package, set()).add(number)
    return {package: sorted(members) for package, members in sorted(found.items())}


# --- IOMMU and VFIO --------------------------------------------------------------------------------------------


def _iommu(facts: NodeFacts) -> Iterator[Finding]:
    functions = facts.host.functions.values()
    if facts.iommu_groups == 0 and not any(function.iommu_group is not None for function in functions):
        words = (facts.command_line or "").split()
        off = next((word for word in words if word in ("iommu=off", "intel_iommu=off", "amd_iommu=off")), None)
        why = f" (the kernel's command line has {off})" if off else ""
        yield Finding(
            "iommu-off",
            "error",
            f"there are no IOMMU groups and {facts.iommu_units or 0} IOMMU units{why}: VFIO can pass no device to a VM",
            None,
            f"take {off} away" if off else "firmware: VT-d or AMD-Vi on; kernel: intel_iommu=on iommu=pt",
        )
    drivers = {function.driver for function in functions if function.driver and "vfio" in function.driver}
    if facts.vfio_drivers is not None and not facts.vfio_drivers and not drivers:
        yield Finding(
            "vfio-missing",
            "error",
            "no VFIO driver is loaded: no PCI function can be passed to a VM",
            None,
            "modprobe vfio-pci, and load it at boot (/etc/modules-load.d)",
        )
    elif functions and not drivers and not facts.host.mdev_parents and not facts.host.vdpa_parents:
        yield Finding(
            "nothing-bound",
            "info",
            "no PCI function is bound to a VFIO driver and there are no mediated devices: nothing is offered to"
            " VMs yet",
            None,
            "driverctl set-override BDF vfio-pci, or the GPU and SR-IOV operators, bind them",
        )
    if "pcie_acs_override" in (facts.command_line or ""):
        yield Finding(
            "acs-override",
            "warning",
            "the kernel's command line has pcie_acs_override: IOMMU groups look smaller than the isolation that"
            " the hardware gives, and VMs may reach each other's devices",
            None,
            "take it away where VMs of different owners run",
        )


def _groups(facts: NodeFacts) -> Iterator[Finding]:
    groups: dict[int, list[tuple[str, str | None, bool]]] = {}
    for address, function in sorted(facts.host.functions.items()):
        if function.iommu_group is not None:
            is_bridge = function.pci_class is not None and function.pci_class >> 8 == 0x0604
            groups.setdefault(function.iommu_group, []).append((str(address), function.driver, is_bridge))
    for number, members in sorted(groups.items()):
        passed = [name for name, driver, _ in members if driver is not None and "vfio" in driver]
        held = [
            f"{name} ({driver})"
            for name, driver, is_bridge in members
            if driver is not None and "vfio" not in driver and driver not in _NO_VFIO_NEEDED and not is_bridge
        ]
        if passed and held:
            yield Finding(
                "group-not-viable",
                "error",
                f"IOMMU group {number} holds {', '.join(passed[:4])} for VMs and {', '.join(held[:4])} with a"
                " driver of the host: a VM with one of them does not start (group is not viable)",
                passed[0],
                "bind every function of the group to vfio-pci, or none",
            )


# --- huge pages ------------------------------------------------------------------------------------------------


def _huge_pages(facts: NodeFacts) -> Iterator[Finding]:
    pools = facts.pools
    with_cpus = facts.nodes_with_cpus()
    if pools is None or not with_cpus or not all(node in pools for node in with_cpus):
        return  # said to be unchecked elsewhere
    sizes = sorted({pool.size_kib for node in pools.values() for pool in node})
    totals = {
        size: {node: next((p.total for p in pools.get(node, ()) if p.size_kib == size), 0) for node in facts.host.nodes}
        for size in sizes
    }
    if not any(total for by_node in totals.values() for total in by_node.values()):
        yield Finding(
            "hugepages-none",
            "error",
            "no node has huge pages: guestMappingPassthrough demands them, so no VM on this node can have cells",
            None,
            "kernel: hugepagesz=1G hugepages=N (early, spread over the nodes), or hugepages=0:N,1:N for each node",
        )
        return
    for size, by_node in totals.items():
        yield from _pools_of(facts, size, by_node, with_cpus)


def _pools_of(facts: NodeFacts, size: int, by_node: Mapping[int, int], with_cpus: list[int]) -> Iterator[Finding]:
    name = size_name(size)
    if not any(by_node.values()):
        return
    shown = ", ".join(f"node {node} {by_node[node]} ({_gib(by_node[node] * size)})" for node in with_cpus)
    missing = [node for node in with_cpus if not by_node[node]]
    per_node = f"hugepages-{size}kB/nr_hugepages below /sys/devices/system/node/nodeN/hugepages sets a node's pool"
    if missing:
        yield Finding(
            "hugepages-missing",
            "warning",
            f"{name} pages are missing on node {_listed(missing)}: {shown}; a VM with a cell there and {name} pages"
            " does not start",
            None,
            per_node,
        )
    elif len({by_node[node] for node in with_cpus}) > 1:
        smallest = min(with_cpus, key=lambda node: by_node[node])
        yield Finding(
            "hugepages-uneven",
            "warning",
            f"{name} pages differ between nodes: {shown}; KubeVirt gives every cell of a VM the same memory, so a"
            f" VM over all {len(with_cpus)} nodes gets {len(with_cpus)} times what node {smallest} has,"
            f" {_gib(by_node[smallest] * size * len(with_cpus))}",
            None,
            per_node,
        )
    lost = [node for node in sorted(by_node) if node not in with_cpus and by_node[node]]
    if lost:
        yield Finding(
            "hugepages-no-cpus",
            "warning",
            f"{name} pages lie on node {_listed(lost)}, which has no CPUs:"
            f" {_gib(sum(by_node[node] for node in lost) * size)} that no cell uses",
            None,
            "kernel: hugepages=0:N,1:N names the nodes instead of spreading over all",
        )
    used_up = [
        node
        for node in with_cpus
        for pool in (facts.pools or {}).get(node, ())
        if pool.size_kib == size and pool.total and pool.free == 0
    ]
    if used_up:
        yield Finding(
            "hugepages-used-up",
            "info",
            f"no {name} page is free on node {_listed(used_up)}: no further VM with a cell there starts",
        )


def size_name(size_kib: int) -> str:
    """A page size in words: ``2 MiB``."""
    text = format_bytes(size_kib * 1024)
    return f"{text[:-2]} {text[-2:]}B"


def _gib(kib: int) -> str:
    return f"{kib / 2**20:.1f} GiB"


def _listed(numbers: list[int]) -> str:
    return str(CpuSet(frozenset(numbers)))
