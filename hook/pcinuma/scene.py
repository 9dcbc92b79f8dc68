"""Two domains, a report and a host → the `picture` of them. Pure.

The guest's trees are read off the domains, whoever made them, and not off the plan, so that what is drawn is what is in
the XML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pcinuma.errors import one_line
from pcinuma.model import Device, Domain, HostTopology, PciAddress, PciController, Placement, Report
from pcinuma.pci_tree import predicted_bdf
from pcinuma.picture import PORTS, Box, Fit, Leaf, Panel, Scene, Shown


def scene(before: Domain, after: Domain, report: Report, host: HostTopology | None, *, would_be: bool = False) -> Scene:
    """What is to be drawn.

    ``host`` is the answer that the plan was made from, None when nothing was asked; ``would_be`` says that ``after`` is
    what best-effort would have made of the domain.
    """
    placements = {placement.device.label: placement for placement in report.plan.placements}
    host_panel = _host_panel(before, placements, report, host)
    shown = {leaf.device.label: leaf.device for leaf in host_panel.leaves}
    by_label = {device.label: shown[_label(device, placements.get(device.label))] for device in before.devices}
    guest = _Guest(report, placements, by_label)
    before_panel = guest.panel("guest before", before, final=False)
    title = "guest, as best-effort would have it" if would_be else "guest after"
    after_panel = guest.panel(title, after, final=True)
    backing = {node for nodes in report.plan.cell_nodes.values() for node in nodes}
    nodes = backing | {device.host_node for device in shown.values() if device.host_node is not None}
    refused = next((f for f in reversed(report.findings) if f.severity == "error"), None)
    return Scene(
        outcome=report.outcome,
        headline=_headline(report, before_panel, after_panel, would_be),
        host=host_panel,
        before=before_panel,
        after=after_panel,
        nodes=tuple(sorted(nodes)),
        findings=report.findings,
        refusal=refused if report.outcome == "refused" else None,
    )


def _headline(report: Report, before: Panel, after: Panel, would_be: bool) -> str:
    total = len(before.leaves)
    if not total:
        return "The domain has no passthrough PCI device"
    devices = f"{total} passthrough devices" if total != 1 else "1 passthrough device"
    now = f"{before.aligned} of {total} on their own cell"
    then = f"{after.aligned} of {total}"
    if report.outcome == "refused":
        end = f", with best-effort {then}" if would_be else ""
        return f"{devices}: refused, nothing is changed; now {now}{end}"
    if would_be:
        return f"{devices}: policy none changes nothing; now {now}, with best-effort {then}"
    if report.outcome == "unchanged":
        return f"{devices}: nothing changed, {now}"
    return f"{devices}: {now} before, {then} after"


# --- the host --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """A device on the host, before it has its number: where it is, from its node inwards."""

    device: Device
    placement: Placement | None
    source: PciAddress | None
    node: int | None
    root_complex: str | None
    bridges: tuple[PciAddress, ...]

    @property
    def order(self) -> tuple[bool, PciAddress, str]:
        return (self.source is None, self.source or PciAddress(0, 0, 0, 0), self.device.label)


def _host_panel(domain: Domain, placements: dict[str, Placement], report: Report, host: HostTopology | None) -> Panel:
    found = sorted((_found(d, placements.get(d.label), host) for d in domain.devices), key=lambda f: f.order)
    by_node = _grouped(found, lambda item: item.node)
    count = iter(range(1, len(found) + 1))
    boxes = []
    # in the order of the PCI addresses, as the guest will have them: then most lines run straight
    for node, items in sorted(by_node.items(), key=lambda group: (group[0] is None, group[1][0].order)):
        children: list[Box | Leaf] = []
        nodes = () if node is None else (node,)
        for name, of_complex in _grouped(items, lambda item: item.root_complex).items():
            inside = _below(of_complex, 1, nodes, count)
            children += (
                inside
                if name is None
                else [_joined(Box("root-complex", f"root complex {name}", "", nodes, tuple(inside)))]
            )
        boxes.append(_host_node(node, host, tuple(children)))
    backing = {node for nodes in report.plan.cell_nodes.values() for node in nodes}
    boxes += [_host_node(node, host, ()) for node in sorted(backing - by_node.keys())]
    return Panel("host", tuple(boxes))


def _host_node(node: int | None, host: HostTopology | None, children: tuple[Box | Leaf, ...]) -> Box:
    if node is None:
        why = "the host does not say" if host is not None else "the host was not asked: nothing to place"
        return Box("host-node", "host node unknown", why, (), children)
    known = host.nodes.get(node) if host is not None else None
    detail = "" if known is None else f"CPUs {known.cpus}" if known.cpus else "no CPUs"
    return Box("host-node", f"host node {node}", detail, (node,), children)


def _found(device: Device, placement: Placement | None, host: HostTopology | None) -> _Found:
    source = placement.source if placement is not None else device.source
    function = host.functions.get(source) if host is not None and source is not None else None
    node = placement.host_node if placement is not None else None
    return _Found(
        device,
        placement,
        source,
        node,
        function.root_complex if function is not None else None,
        function.bridges if function is not None else (),
    )


def _below(items: Sequence[_Found], depth: int, nodes: tuple[int, ...], count: Iterator[int]) -> list[Box | Leaf]:
    """The devices with the switches above them. ``bridges`` runs root port, then by turns a switch's upstream port and
    its downstream port (PCI Express Base Specification, 1.3): ``depth`` is where the next upstream port is."""
    children: list[Box | Leaf] = []
    for switch, group in _grouped(
        items, lambda item: item.bridges[depth] if len(item.bridges) > depth else None
    ).items():
        if switch is None:
            children += [Leaf(_shown(item, next(count))) for item in group]
            continue
        inside = _below(group, depth + 2, nodes, count)
        children.append(_joined(Box("switch", f"switch {switch}", "", nodes, tuple(inside))))
    return children


def _joined(box: Box) -> Box:
    """The box, with the only box in it made one with it: a root complex of one switch, a switch below a switch."""
    if len(box.children) == 1 and isinstance(only := box.children[0], Box):
        return replace(box, title=f"{box.title.removeprefix('root complex ')} › {only.title}", children=only.children)
    return box


def _shown(item: _Found, number: int) -> Shown:
    path = (item.root_complex or "", *(str(bridge) for bridge in item.bridges))
    alias = None if item.device.alias is None else one_line(item.device.alias)
    return Shown(number, _label(item.device, item.placement), alias, item.node, tuple(part for part in path if part))


def _label(device: Device, placement: Placement | None) -> str:
    """The host BDF; for a mediated or vDPA device its parent's, with its own name."""
    if device.source is None and placement is not None and placement.source is not None:
        return f"{placement.source} {device.label}"
    return device.label


# --- the guest -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Guest:
    report: Report
    placements: dict[str, Placement]
    shown: dict[str, Shown]

    def panel(self, title: str, domain: Domain, *, final: bool) -> Panel:
        by_index = {c.index: c for c in domain.controllers if c.index is not None}
        devices = sorted(domain.devices, key=lambda device: self.shown[device.label].number)
        held = [(_chain(device, by_index), device) for device in devices]
        boxes: list[Box] = []
        by_cell = _grouped([item for item in held if item[0] and item[0][0].is_expander], lambda item: item[0][0].node)
        for cell, items in by_cell.items():
            inside = [
                self._box(chain[0], items_of, domain, final)
                for chain, items_of in ((group[0][0], group) for group in _grouped(items, _top_index).values())
            ]
            boxes.append(self._cell(cell, domain, tuple(inside)))
        rest = [item for item in held if not item[0] or not item[0][0].is_expander]
        root = self._inside(rest, 0, domain, final)
        bus = Box("bus", "bus 0", "the guest sees numa_node -1", (), tuple(root))
        empty = [self._cell(cell.id, domain, ()) for cell in domain.cells if cell.id not in by_cell]
        boxes += [bus, *empty] if root else [*empty, bus]
        return Panel(title, tuple(boxes))

    def _cell(self, cell: int | None, domain: Domain, children: tuple[Box | Leaf, ...]) -> Box:
        if cell is None:
            return Box("cell", "no cell", "expanders without a node: the guest sees numa_node -1", (), children)
        nodes = tuple(self.report.plan.cell_nodes.get(cell, ()))
        known = next((c for c in domain.cells if c.id == cell), None)
        cpus = "" if known is None else f"vCPUs {known.cpus}" if known.cpus else "no vCPUs"
        behind = f"host node {','.join(map(str, nodes))}" if nodes else "host node unknown"
        return Box("cell", f"cell {cell}", f"{cpus} on {behind}" if cpus else behind, nodes, children)

    def _box(self, controller: PciController, items: list[_Held], domain: Domain, final: bool) -> Box:
        depth = next(i for i, above in enumerate(items[0][0]) if above is controller) + 1
        inside = tuple(self._inside(items, depth, domain, final))
        cell = items[0][0][0].node if items[0][0][0].is_expander else None
        nodes = tuple(self.report.plan.cell_nodes.get(cell, ())) if cell is not None else ()
        if controller.is_expander:
            bus_nr = "" if controller.bus_nr is None else f"busNr {controller.bus_nr:#x}"
            return Box("expander", f"expander {controller.index}", bus_nr, nodes, inside)
        above = items[0][0][depth - 2] if depth > 1 else None
        below = f"below port {above.index}" if above is not None and above.model in PORTS else ""
        name = (
            "switch" if controller.model == "pcie-switch-upstream-port" else one_line(controller.model or "controller")
        )
        return Box("bridge", f"{name} {controller.index}", below, nodes, inside)

    def _inside(self, items: list[_Held], depth: int, domain: Domain, final: bool) -> list[Box | Leaf]:
        """What the chains hold from ``depth`` on: boxes for bridges, and the devices with their ports."""

        def next_box(item: _Held) -> int | None:
            return next((c.index for c in item[0][depth:] if c.model not in PORTS), None)

        children: list[Box | Leaf] = []
        for index, group in _grouped(items, next_box).items():
            if index is None:
                children += [self._leaf(chain, device, domain, final) for chain, device in group]
            else:
                controller = next(c for c in group[0][0][depth:] if c.index == index)
                children.append(self._box(controller, group, domain, final))
        return children

    def _leaf(self, chain: Chain, device: Device, domain: Domain, final: bool) -> Leaf:
        shown = self.shown[device.label]
        placement = self.placements.get(device.label)
        cell = chain[0].node if chain and chain[0].is_expander else None
        fit = self._fit(shown.host_node, cell, placement)
        note = None
        if final and fit != "aligned" and placement is not None and placement.reason:
            note = one_line(placement.reason)
        elif fit == "astray" and placement is not None and placement.cell is not None:
            note = f"belongs on cell {placement.cell}"
        port = chain[-1] if chain and chain[-1].model in PORTS else None
        return Leaf(shown, fit, port, _guest_name(device, domain), -1 if cell is None else cell, note)

    def _fit(self, node: int | None, cell: int | None, placement: Placement | None) -> Fit:
        if node is None:
            return "unknown"
        if cell is None:
            return "unseen"
        if node in self.report.plan.cell_nodes.get(cell, ()):
            return "aligned"
        return "approximate" if placement is not None and placement.cell == cell else "astray"


Chain = tuple[PciController, ...]
"""The controllers above a device, from the top down, the root bus itself left out."""

_Held = tuple[Chain, Device]


def _top_index(item: _Held) -> int | None:
    return item[0][0].index


def _chain(device: Device, by_index: dict[int, PciController]) -> Chain:
    """Broken where the domain names a controller that is not there (libvirt adds a root port) or runs in a circle."""
    chain: list[PciController] = []
    bus = device.address.bus if device.address is not None else 0
    while bus and (controller := by_index.get(bus)) is not None and controller not in chain:
        chain.insert(0, controller)
        if controller.is_expander:
            break
        bus = controller.address.bus if controller.address is not None else 0
    return tuple(chain)


def _guest_name(device: Device, domain: Domain) -> str:
    """What the guest calls the device; where that is up to libvirt or firmware, who decides."""
    if device.address is None:
        return "no address yet"
    predicted = predicted_bdf(device.address, domain)
    return str(predicted) if predicted is not None else "BDF by firmware"


_T = TypeVar("_T")
_K = TypeVar("_K")


def _grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """The items by key, groups and their items in the order in which they come."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
