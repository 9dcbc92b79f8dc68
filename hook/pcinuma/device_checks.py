"""``doctor`` on the devices that VMs are given: which they are, their node, their links. Pure: facts in, findings out.

VFs are judged by their PF.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pcinuma import pci_config
from pcinuma.model import Finding, HostFunction, PciAddress
from pcinuma.node_facts import NodeFacts
from pcinuma.pci_config import UPSTREAM_PORT, PciConfig

_NVIDIA = 0x10DE
_BOARD_GRAPHICS = {0x1A03, 0x102B}  # ASPEED and Matrox: the management controller's screen, never a VM's


@dataclass(frozen=True, slots=True)
class Watched:
    """A function that may be given to VMs, and the switch upstream ports above it, from the root down."""

    function: HostFunction
    switches: tuple[PciAddress, ...] = ()

    @property
    def name(self) -> str:
        return str(self.function.address)

    @property
    def is_gpu(self) -> bool:
        return (self.function.pci_class or 0) >> 16 in (0x03, 0x12)

    @property
    def is_nic(self) -> bool:
        return is_nic(self.function)


def is_nic(function: HostFunction) -> bool:
    """A network (0x02, InfiniBand 0x0207 in it) or an old InfiniBand (0x0c06) controller."""
    pci_class = function.pci_class or 0
    return pci_class >> 16 == 0x02 or pci_class >> 8 == 0x0C06


def is_watched(function: HostFunction) -> bool:
    """Whether VMs may be given this function: GPUs and accelerators, NICs, NVMe, NVSwitches, whatever VFIO holds."""
    if function.driver is not None and "vfio" in function.driver:
        return True
    pci_class = function.pci_class or 0
    if pci_class >> 16 == 0x03:
        return function.vendor not in _BOARD_GRAPHICS
    if pci_class >> 8 == 0x0680:
        return function.vendor == _NVIDIA  # other bridges of that class are parts of the board
    return pci_class >> 16 == 0x12 or pci_class >> 8 == 0x0108 or is_nic(function)


def watched(facts: NodeFacts, configs: Mapping[PciAddress, PciConfig]) -> list[Watched]:
    """The devices to look at, VFs left out, in the order of their addresses."""
    return [
        Watched(
            function,
            tuple(b for b in function.bridges if (config := configs.get(b)) and config.port_type == UPSTREAM_PORT),
        )
        for _, function in sorted(facts.host.functions.items())
        if function.physfn is None and is_watched(function)
    ]


def parsed_configs(facts: NodeFacts) -> dict[PciAddress, PciConfig]:
    """The configuration space of every function that has one in the facts."""
    return {address: pci_config.parse(data) for address, data in (facts.configs or {}).items()}


def check_devices(facts: NodeFacts, devices: Sequence[Watched]) -> Iterator[Finding]:
    """Every finding about the node and the links of devices that may be given to VMs."""
    for device in devices:
        yield from _node(facts, device)
    yield from _links(facts, devices)


# --- node ------------------------------------------------------------------------------------------------------


def _node(facts: NodeFacts, device: Watched) -> Iterator[Finding]:
    function, nodes = device.function, facts.host.nodes
    if function.node is None:
        if len(nodes) > 1:
            yield Finding(
                "numa-unknown",
                "warning",
                f"the node of {device.name} is unknown: {function.node_problem}; no cell can be chosen for it",
                device.name,
                "firmware: NUMA and PCI locality (_PXM) settings, or a newer version of it",
            )
        return
    node = nodes.get(function.node)
    if node is None or node.cpus:
        return
    nearest = [number for number in facts.nodes_with_cpus() if number in node.distances]
    near = min(nearest, key=lambda number: (node.distances[number], number), default=None)
    where = f"; the nearest with CPUs is node {near}" if near is not None else ""
    yield Finding(
        "device-no-cpus",
        "warning",
        f"{device.name} is on node {function.node}, which has no CPUs, so no VM has a cell of it{where}",
        device.name,
        "--unmapped nearest places it on the nearest cell",
    )


# --- links -----------------------------------------------------------------------------------------------------


def _links(facts: NodeFacts, devices: Sequence[Watched]) -> Iterator[Finding]:
    functions = facts.host.functions
    seen: set[PciAddress | tuple[int, int, int]] = set()
    for device in devices:
        path = [*(functions.get(address) for address in device.function.bridges), device.function]
        for number, below in enumerate(path):
            # root port and what is in its slot, a switch's downstream port and what is in its slot: every second step
            # is a link, the others are inside a switch. A device on the root bus itself has a link of its own to tell.
            is_end = below is device.function
            if below is None or (number % 2 == 0 and not (is_end and number == 0)):
                continue
            key = below.address.slot_key  # the functions of a slot share its link
            if key in seen:
                continue
            seen.add(key)
            above = path[number - 1] if number else None
            if (finding := _link(below, above, is_gpu=is_end and device.is_gpu)) is not None:
                yield finding


def _link(below: HostFunction, above: HostFunction | None, *, is_gpu: bool) -> Finding | None:
    link, name = below.link, str(below.address)
    if link.speed is None or link.width is None or link.max_speed is None or link.max_width is None:
        return None
    speeds = [link.max_speed, *([above.link.max_speed] if above is not None and above.link.max_speed else [])]
    widths = [link.max_width, *([above.link.max_width] if above is not None and above.link.max_width else [])]
    speed, width = min(speeds), min(widths)
    own = _link_name(link.max_speed, link.max_width)
    if link.speed < speed or link.width < width:
        only_speed = link.width >= width
        idle = "; an idle GPU lowers its speed to save power: look again under load" if is_gpu and only_speed else ""
        return Finding(
            "link-slow",
            "info" if idle else "warning",
            f"the link of {name} runs at {_link_name(link.speed, link.width)} of {_link_name(speed, width)}{idle}",
            name,
            None if idle else "reseat the card or riser; firmware: slot speed and bifurcation; dmesg for AER errors",
        )
    if speed < link.max_speed or width < link.max_width:
        return Finding(
            "link-slot",
            "info",
            f"{name} could do {own}, the port above it ({above.address if above else 'unknown'}) gives"
            f" {_link_name(speed, width)}",
            name,
            "a better slot, if there is one",
        )
    return None


def _link_name(speed: float, width: int) -> str:
    return f"{speed:g} GT/s x{width}"
