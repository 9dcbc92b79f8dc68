"""``check``: the audit of a domain as it stands, and for each device what the guest will see of its node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from pcinuma.audit import audit
from pcinuma.domain_xml import load
from pcinuma.errors import HostUnreadable
from pcinuma.guest_view import guest_view
from pcinuma.model import (
    Device,
    Domain,
    Finding,
    HostQuery,
    HostTopology,
    Options,
    PciController,
    Placement,
    Plan,
)
from pcinuma.options import CHOICES
from pcinuma.parse import parse
from pcinuma.pci_tree import expander_above, whereabouts
from pcinuma.plan import SWITCH_LINK_SPEED, host_query, plan


def check(
    xml: bytes, options: Options, read_host: Callable[[HostQuery], HostTopology], *, where: str = "domain XML"
) -> list[Finding]:
    """Everything found in the domain, errors first. Raises BadInput for a domain that libvirt would refuse.

    A host that cannot be read is a finding: the audit needs no host.
    """
    document = load(xml, where)
    domain = parse(document)
    found = audit(document)
    # the domain as it stands: what has an address has it, and nothing is set, whatever the options would allow
    mmio = "report" if options.mmio == "apply" else options.mmio
    as_it_stands = replace(options, addressed="keep", mmio=mmio, distances="keep", gpudirect_clique="none")
    query = host_query(domain, as_it_stands)
    if query is not None:
        query = replace(query, packages=True)
    try:
        host = read_host(query) if query is not None else None
    except HostUnreadable as error:
        found.append(Finding("host-unreadable", "warning", f"the host cannot be read: {error}", None, error.hint))
    else:
        made = plan(domain, host, as_it_stands)
        moved = _moved(plan(domain, host, replace(as_it_stands, addressed=options.addressed)), made)
        seen = [finding for p in made.placements if (finding := _seen(p, domain, moved)) is not None]
        wrong = {finding.device for finding in seen}
        found += seen
        found += [
            _with_view(finding, made.placements, domain)
            for finding in made.findings
            if (finding.code not in _SEEN or finding.device not in wrong) and finding.code != SWITCH_LINK_SPEED.code
        ]
        if any(controller.model == "pcie-switch-upstream-port" for controller in domain.controllers):
            found.append(SWITCH_LINK_SPEED)
        if host is not None:
            sources = {p.device.element: p.source for p in made.placements if p.source is not None}
            found += guest_view(domain, host, sources)
        # whatever grouping the set was made with
        if all(plan(domain, host, replace(as_it_stands, group_by=group)).drop for group in CHOICES["group-by"]):
            names = ", ".join(str(controller.alias) for controller in made.drop)
            message = f"controllers of an earlier placement do not fit: {names}"
            found.append(Finding("stale-set", "warning", message, None, "pcinuma transform replaces them"))
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda finding: order[finding.severity])


_SEEN = ("foreign-cell", "addressed", "no-bus")
"""Findings of the plan about an address; where `_seen` has one of its own for the device, that says it all."""


def _moved(under_options: Plan, as_it_stands: Plan) -> frozenset[int]:
    """The devices, by element, that keep their address as it stands, and lose it under the options."""
    kept = {p.device.element for p in as_it_stands.placements if p.kind == "kept" and not p.fits}
    return frozenset(p.device.element for p in under_options.placements if p.kind != "kept") & kept


def _seen(placement: Placement, domain: Domain, moved: frozenset[int]) -> Finding | None:
    """What is wrong with the cell that the guest will see for a device; None when nothing is, nobody knows, or the
    plan's own finding says it. ``moved`` are those that pcinuma would give another address."""
    if placement.cell is None:
        return None
    label, address = placement.device.label, placement.device.address
    expander = _expander(placement.device, domain)
    if expander is not None and expander.node is not None and expander.node != placement.cell:
        message = (
            f"the guest will see {label} on cell {expander.node}, not on cell {placement.cell} as its host node says"
        )
        return Finding("foreign-cell", "error", message, label, "pcinuma transform --addressed move places it")
    if placement.device.element in moved:
        return Finding(
            "not-placed", "warning", f"{label} is to be moved: {placement.reason}", label, "pcinuma transform places it"
        )
    if placement.kind == "kept" or (expander is not None and expander.node is not None):
        return None
    cell = placement.cell
    if address is not None:
        where = f"the guest address {address} of {label} is {whereabouts(address, domain)}"
    else:
        where = f"{label} has no guest address yet, and libvirt gives it one on bus 0"
    message = f"{where}: the guest will see numa_node -1 for it, not cell {cell}"
    if address is None and (inviting := _inviting(domain)):
        port, other = inviting
        message = (
            f"{label} has no guest address yet, and belongs on cell {cell}: libvirt gives it a free port, maybe port"
            f" {port}, where the guest sees cell {other}, or one on bus 0, where it sees numa_node -1"
        )
    has_room = placement.kind in ("placed", "approximate")  # else the plan says what stands in the way
    return Finding("not-placed", "warning", message, label, "pcinuma transform places it" if has_room else None)


def _inviting(domain: Domain) -> tuple[int, int] | None:
    """A root port below an expander that is empty, and the expander's cell: libvirt may put a device there."""
    addresses = [device.address for device in domain.devices] + [other.address for other in domain.others]
    addresses += [controller.address for controller in domain.controllers]
    taken = {address.bus for address in addresses if address is not None}
    for controller in domain.controllers:
        expander = expander_above(controller, domain.controllers)
        if controller.model != "pcie-root-port" or controller.index is None or controller.index in taken:
            continue
        if expander is not None and expander.node is not None:
            return controller.index, expander.node
    return None


def _expander(device: Device, domain: Domain) -> PciController | None:
    at = next((c for c in domain.controllers if device.address is not None and c.index == device.address.bus), None)
    return expander_above(at, domain.controllers) if at is not None else None


def _with_view(finding: Finding, placements: Iterable[Placement], domain: Domain) -> Finding:
    """The finding of a device that belongs to no cell, with what the guest will see of it all the same."""
    placement = next((p for p in placements if p.device.label == finding.device and p.code == finding.code), None)
    if placement is None or placement.cell is not None:
        return finding
    expander = _expander(placement.device, domain)
    cell = expander.node if expander is not None else None
    view = "numa_node -1 for it" if cell is None else f"it on cell {cell}"
    return replace(finding, message=f"{finding.message}; the guest will see {view}")
