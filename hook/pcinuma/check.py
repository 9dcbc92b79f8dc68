"""``check``: the audit of a domain as it stands, and for each device what the guest will see of its node."""

from __future__ import annotations

from collections.abc import Callable

from pcinuma.audit import audit
from pcinuma.domain_xml import load
from pcinuma.errors import HostUnreadable
from pcinuma.model import Domain, Finding, HostQuery, HostTopology, Options, Placement
from pcinuma.parse import parse
from pcinuma.plan import host_query, plan


def check(
    xml: bytes, options: Options, read_host: Callable[[HostQuery], HostTopology], *, where: str = "domain XML"
) -> list[Finding]:
    """Everything found in the domain, errors first. Raises BadInput for a domain that libvirt would refuse.

    A host that cannot be read is a finding: the audit needs no host.
    """
    document = load(xml, where)
    domain = parse(document)
    found = audit(document)
    # a check reports and never refuses: what a policy would refuse is a finding each
    reporting = Options(policy="best-effort", unmapped=options.unmapped, addressed="keep")
    query = host_query(domain, reporting)
    try:
        host = read_host(query) if query is not None else None
    except HostUnreadable as error:
        found.append(Finding("host-unreadable", "warning", f"the host cannot be read: {error}", None, error.hint))
    else:
        made = plan(domain, host, reporting)
        found += made.findings
        found += [finding for placement in made.placements if (finding := _unplaced(placement, domain)) is not None]
        if made.drop:
            names = ", ".join(str(controller.alias) for controller in made.drop)
            found.append(Finding("stale-set", "warning", f"controllers of an earlier placement do not fit: {names}"))
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda finding: order[finding.severity])


def _unplaced(placement: Placement, domain: Domain) -> Finding | None:
    """A device that could be on its cell and is not: it has no address yet, or one that libvirt chose."""
    if placement.kind not in ("placed", "approximate"):
        return None
    address = placement.device.address
    if address is not None and any(c.is_ours and c.index == address.bus for c in domain.controllers):
        return None
    label = placement.device.label
    message = f"{label} is on no expander: the guest will see numa_node -1 for it, not cell {placement.cell}"
    return Finding("not-placed", "warning", message, label, "pcinuma transform places it")
