"""``check``: the audit of a domain as it stands, and for each device what the guest will see of its node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pcinuma.audit import audit
from pcinuma.domain_xml import load
from pcinuma.errors import HostUnreadable
from pcinuma.guest_view import guest_view
from pcinuma.model import Domain, Finding, HostQuery, HostTopology, Options, Placement
from pcinuma.options import CHOICES
from pcinuma.parse import parse
from pcinuma.pci_tree import expander_above
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
        seen = [finding for placement in made.placements if (finding := _seen(placement, domain)) is not None]
        wrong = {finding.device for finding in seen}
        found += seen
        found += [
            finding
            for finding in made.findings
            if (finding.code != "foreign-cell" or finding.device not in wrong)
            and finding.code != SWITCH_LINK_SPEED.code
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


def _seen(placement: Placement, domain: Domain) -> Finding | None:
    """What is wrong with the cell that the guest will see for a device; None when nothing is, or nobody knows."""
    if placement.cell is None:
        return None
    label, address = placement.device.label, placement.device.address
    at = next((c for c in domain.controllers if address is not None and c.index == address.bus), None)
    expander = expander_above(at, domain.controllers) if at is not None else None
    if expander is not None and expander.node is not None:
        if expander.node == placement.cell:
            return None
        message = (
            f"the guest will see {label} on cell {expander.node}, not on cell {placement.cell} as its host node says"
        )
        return Finding("foreign-cell", "error", message, label, "pcinuma transform --addressed move places it")
    if placement.kind == "kept":
        return None  # the plan's own finding says it
    message = f"{label} is on no expander: the guest will see numa_node -1 for it, not cell {placement.cell}"
    return Finding("not-placed", "warning", message, label, "pcinuma transform places it")
