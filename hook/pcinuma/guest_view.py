"""How the guest will see its cells and the order of its devices, in a domain of any origin: what ``check`` adds.

Nothing here costs a boot; all of it makes a guest choose wrong neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from pcinuma.model import Cell, CpuSet, Domain, Finding, HostTopology, PciAddress, PciController
from pcinuma.pci_tree import expander_above, predicted_bdf


def guest_view(domain: Domain, host: HostTopology, sources: Mapping[int, PciAddress]) -> Iterator[Finding]:
    """Warnings about cells and order; ``sources`` are the host BDFs of devices by their element."""
    for cell in domain.cells:
        yield from _absent(cell, domain, host)
        yield from _spread(cell, domain, host)
    yield from _cut(domain)
    yield from _node_numbers(domain)
    yield from _expanders(domain, sources)


# --- cells -----------------------------------------------------------------------------------------------------


def _absent(cell: Cell, domain: Domain, host: HostTopology) -> Iterator[Finding]:
    """A cell that is bound to a node of another host: libvirt defines the domain, and does not start it."""
    absent = [node for node in domain.memnodes.get(cell.id, ()) if node not in host.nodes]
    if absent and host.nodes:
        shown = ", ".join(map(str, absent))
        message = (
            f"cell {cell.id} is bound to host node {shown}, which this host does not have: the VM does not start here"
        )
        yield Finding("memnode-absent", "warning", message, None, "is the host record of the VM's node?")


def _spread(cell: Cell, domain: Domain, host: HostTopology) -> Iterator[Finding]:
    """A cell whose memory and vCPUs are of several host nodes, worse of several sockets: the guest takes it for one."""
    cpus = CpuSet()
    for vcpu, pinned_to in domain.pins.items():
        if vcpu in cell.cpus:
            cpus |= pinned_to
    pinned = {node.id for node in host.nodes.values() if node.cpus.mask & cpus.mask}
    nodes = sorted(pinned | set(domain.memnodes.get(cell.id, ())))
    if len(nodes) < 2:
        return
    packages = {host.nodes[node].package if node in host.nodes else None for node in nodes}
    named = f"cell {cell.id} is on host nodes {', '.join(map(str, nodes))}"
    hint = "let the kubelet give the VM whole nodes: see 'pcinuma doctor --kubelet-config'"
    if None not in packages and len(packages) > 1:
        sockets = ", ".join(map(str, sorted(package for package in packages if package is not None)))
        message = f"{named}, which are of sockets {sockets}: what the guest takes for near is far"
        yield Finding("cell-across-sockets", "warning", message, None, hint)
    else:
        message = f"{named}: the guest sees one node where the host has {len(nodes)}"
        yield Finding("cell-across-nodes", "warning", message, None, hint)


def _cut(domain: Domain) -> Iterator[Finding]:
    """Cells that part what the guest's CPU topology says is one core, or one socket.

    QEMU numbers vCPUs by socket, core and thread. Linux then ignores the caches that they should share ("llc-sibling
    CPU is not on the same node", arch/x86/kernel/smpboot.c).
    """
    cell_of = {vcpu: cell.id for cell in domain.cells for vcpu in cell.cpus}
    for what, size in (("core", domain.cpu.threads), ("socket", domain.cpu.socket_threads)):
        if size < 2 or len(domain.cells) < 2:
            continue
        groups: dict[int, set[int]] = {}
        for vcpu, cell_id in cell_of.items():
            groups.setdefault(vcpu // size, set()).add(cell_id)
        parted = {number: cells for number, cells in groups.items() if len(cells) > 1}
        if parted:
            number, cells = min(parted.items())
            shown = ", ".join(map(str, sorted(cells)))
            message = f"guest {what} {number} is parted between cells {shown}: the guest ignores the caches it shares"
            hint = "set the VM's cpu.sockets to the number of cells" if what == "socket" else "give cells whole cores"
            yield Finding(f"cell-cuts-{what}", "warning", message, None, hint)
            return


def _node_numbers(domain: Domain) -> Iterator[Finding]:
    """Linux numbers the nodes in the order of their first CPUs in the SRAT, not by cell."""
    firsts = [(cell.cpus.first, cell.id) for cell in domain.cells if cell.cpus]
    numbered = [cell for _, cell in sorted(firsts)]
    if numbered != sorted(numbered):
        shown = ", ".join(f"cell {cell} is node {node}" for node, cell in enumerate(numbered))
        message = f"Linux numbers the guest's nodes by their first vCPUs: {shown}"
        yield Finding("cell-order", "warning", message, None, "give the vCPUs to the cells in ascending order")


# --- order -----------------------------------------------------------------------------------------------------


def _expanders(domain: Domain, sources: Mapping[int, PciAddress]) -> Iterator[Finding]:
    devices = [
        (bdf, sources[device.element], _top(device.address, domain))
        for device in domain.devices
        if device.element in sources
        and device.address is not None
        and (bdf := predicted_bdf(device.address, domain)) is not None
    ]
    below = {top.element: sorted(d[:2] for d in devices if d[2] is top) for _, _, top in devices if top is not None}
    expanders = [controller for controller in domain.controllers if controller.is_expander]
    yield from _idle(expanders, domain)
    firsts = sorted((members[0][0], min(source for _, source in members)) for members in below.values())
    for row in (*below.values(), firsts):
        for (_, source), (_, following) in itertools.pairwise(row):
            if following < source:
                message = f"the guest numbers {source} before {following}: devices are not in the host's order"
                hint = "take their addresses and expanders out, and pcinuma transform places them in the host's order"
                yield Finding("reversed-order", "warning", message, None, hint)
                return


def _idle(expanders: Sequence[PciController], domain: Domain) -> Iterator[Finding]:
    """A second set, as a hook leaves that takes each of KubeVirt's passes for the first."""
    addresses = [device.address for device in domain.devices] + [other.address for other in domain.others]
    used = {top.element for address in addresses if (top := _top(address, domain)) is not None}
    by_cell: dict[int | None, list[PciController]] = {}
    for expander in expanders:
        by_cell.setdefault(expander.node, []).append(expander)
    for cell, members in by_cell.items():
        idle = [str(expander.index) for expander in members if expander.element not in used]
        if idle and len(members) > 1:
            message = f"{len(members)} expanders are for cell {cell}; no device is below {', '.join(idle)}"
            hint = "remove it: its bus numbers and its slot of bus 0 are lost to others"
            yield Finding("duplicate-expander", "warning", message, None, hint)


def _top(address: PciAddress | None, domain: Domain) -> PciController | None:
    at = next((c for c in domain.controllers if address is not None and c.index == address.bus), None)
    return expander_above(at, domain.controllers) if at is not None else None
