"""(Domain, HostTopology, Options) → Plan: for each device its cell or the reason why not, and what the policy says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pcinuma import mmio
from pcinuma.clique import cliques
from pcinuma.distances import host_distances
from pcinuma.io_space import io_space
from pcinuma.mapping import CellMap, map_nodes, nearest_cell
from pcinuma.model import (
    Device,
    Domain,
    Finding,
    HostFunction,
    HostQuery,
    HostTopology,
    Options,
    PciAddress,
    PciController,
    Placement,
    Plan,
    PlannedExpander,
)
from pcinuma.pci_tree import crowded, expander_above, predicted_bdf, whereabouts
from pcinuma.seating import Seating, seat
from pcinuma.switches import Candidate

REFUSING = ("restricted", "single-numa-node")

MOVE_HINT = "--addressed move (annotation pcinuma.vm.kubevirt.io/addressed: move) lets pcinuma change its address"
ROOT_HINT = (
    "if the VM has the annotation kubevirt.io/placePCIDevicesOnRootComplex, remove it; "
    "else --addressed move (annotation pcinuma.vm.kubevirt.io/addressed: move)"
)

STUCK_HINTS = {
    "index-missing": "give every PCI controller its index, as virsh dumpxml shows them",
    "slot-shared": "give that controller another alias, or the others another slot",
}
ROOM_HINT = "pass through fewer devices, or give the VM fewer other PCI devices"

SWITCH_LINK_SPEED = Finding(
    "switch-link-speed",
    "warning",
    "the guest's switch ports say 2.5 GT/s x1, whatever the host's do: NCCL takes such links for slow",
    None,
    "give the guest the file of 'pcinuma nccl-topo' (NCCL_TOPO_FILE), or use --group-by numa",
)


def host_query(domain: Domain, options: Options) -> HostQuery | None:
    """What the plan needs to know of the host; None when it needs nothing."""
    if not domain.devices or not options.enabled or _domain_problem(domain) is not None:
        return None
    return HostQuery(
        functions=frozenset(device.source for device in domain.devices if device.source is not None),
        mdevs=frozenset(device.uuid for device in domain.devices if device.uuid is not None),
        vdpas=frozenset(device.vdpa for device in domain.devices if device.vdpa is not None),
        details=False,
        ids=options.gpudirect_clique != "none",
        address_bits=options.mmio != "off",
        packages=False,
    )


def plan(domain: Domain, host: HostTopology | None, options: Options) -> Plan:
    """What is to be done; ``host`` is the answer to :func:`host_query`, None when that asked nothing."""
    cells = map_nodes(domain, host or HostTopology({}, {}))
    if not options.enabled:
        finding = Finding("disabled", "info", "pcinuma is switched off for this VM by its annotation")
        return Plan(cell_nodes=cells.nodes_of, findings=(finding,))
    if not domain.devices:
        return Plan(cell_nodes=cells.nodes_of, findings=_without_devices(domain))
    if (problem := _domain_problem(domain)) is not None:
        code, reason, hint = problem
        placements = [
            Placement(device, device.source, None, None, "left", code=code, reason=reason, hint=hint, fits=False)
            for device in domain.devices
        ]
        placements = _with_addresses(placements, (), domain)
        return _judged(Plan(placements=tuple(placements), cell_nodes=cells.nodes_of), options, cells)
    assert host is not None  # host_query has asked
    without_room = crowded(domain)
    placements = [_place(device, domain, host, cells, options, without_room) for device in domain.devices]
    placements = _holding_slots(placements, domain)
    seating, placements = _seated(domain, host, placements, options)
    expanders, drop = seating.expanders, seating.drop
    placements = _with_addresses(placements, expanders, domain, drop)
    on_port = {attached.device.element for e in expanders for port in e.ports for attached in port.attachments}
    # a set of ours that can neither stay as planned nor go: then nothing is changed at all
    is_stuck = not expanders and not drop and any(controller.is_ours for controller in domain.controllers)
    loose = [device for device in domain.devices if device.element not in on_port and _is_on_ours(device, domain)]
    detach = () if is_stuck else tuple(loose)
    findings = [*_of_the_whole(placements, expanders, cells), *_split_groups(placements, host)]
    if is_stuck and seating.misfit is not None and all(p.code != seating.misfit[0] for p in placements):
        code, reason = seating.misfit  # no device is to be placed that would say it
        findings.append(Finding(code, "warning", f"pcinuma's controllers stay: {reason}", None, STUCK_HINTS[code]))
    findings += io_space(domain, host, placements, expanders)
    made = Plan(expanders, tuple(placements), cells.nodes_of, drop, detach, findings=tuple(findings))
    return _judged(_tuned(made, domain, host, options, cells, is_stuck=is_stuck), options, cells)


def _tuned(made: Plan, domain: Domain, host: HostTopology, options: Options, cells: CellMap, *, is_stuck: bool) -> Plan:
    """The plan with what is set beside the placement: address bits, distances, cliques."""
    writes = options.policy != "none" and not is_stuck
    findings = list(made.findings)
    if options.mmio != "off":
        apply = options.mmio == "apply" and writes
        said, bits = mmio.judged(domain, host, made.placements, made.expanders, apply=apply)
        findings += said
        made = replace(made, address_bits=bits)
    if options.distances == "host" and not is_stuck:
        distances, said = host_distances(domain, host, cells)
        findings += said
        made = replace(made, distances=distances)
    if options.gpudirect_clique == "by-switch" and not is_stuck:
        chosen, said = cliques(domain, host, made.placements, apply=writes)
        findings += said
        made = replace(made, cliques=chosen)
    return replace(made, findings=tuple(findings))


def _of_the_whole(
    placements: Sequence[Placement], expanders: Sequence[PlannedExpander], cells: CellMap
) -> tuple[Finding, ...]:
    """What is to be said of the placement as a whole."""
    findings = [
        Finding(
            "shared-host-node",
            "warning",
            f"host node {node} backs cells {', '.join(map(str, claimed))}: devices go to cell {cells.cell_of[node]}",
        )
        for node, claimed in cells.shared.items()
        if any(placement.host_node == node for placement in placements)
    ]
    if any(port.model == "pcie-switch-upstream-port" for expander in expanders for port in expander.ports):
        findings.append(SWITCH_LINK_SPEED)
    return tuple(findings)


def _split_groups(placements: Sequence[Placement], host: HostTopology) -> Iterator[Finding]:
    """A finding for each IOMMU group whose functions come to sit on different cells, or some of them on none."""
    groups: dict[int, list[Placement]] = {}
    for placement in placements:
        function = host.functions.get(placement.device.source) if placement.device.source is not None else None
        if function is not None and function.iommu_group is not None:
            groups.setdefault(function.iommu_group, []).append(placement)
    for group, members in sorted(groups.items()):
        seats = [p.cell if p.fits or p.kind == "approximate" else None for p in members]
        if len(set(seats)) > 1:
            shown = ", ".join(
                f"{p.device.label} {'on no cell' if cell is None else f'on cell {cell}'}"
                for p, cell in zip(members, seats, strict=True)
            )
            yield Finding("iommu-group-split", "warning", f"devices of IOMMU group {group} come to sit apart: {shown}")


def _without_devices(domain: Domain) -> tuple[Finding, ...]:
    """There is nothing to place, and the domain comes back as it is, with whatever set of ours it has."""
    hint = "passthrough devices are the gpus, the hostDevices and the SR-IOV interfaces of the VM's spec"
    message = "the domain has no passthrough PCI device: nothing to place"
    findings = [Finding("no-devices", "info", message, None, hint)]
    if left := [str(controller.alias) for controller in domain.controllers if controller.has_our_alias]:
        message = f"pcinuma's controllers are left without their devices: {', '.join(left)}"
        hint = "remove them: libvirt puts any device without an address on their ports"
        findings.append(Finding("stale-set", "warning", message, None, hint))
    return tuple(findings)


def _domain_problem(domain: Domain) -> tuple[str, str, str] | None:
    """Why no device of this domain can be placed, as code, reason and hint."""
    if not domain.takes_expanders:
        shown = f"{domain.arch} {domain.machine}".strip() or "unknown"
        reason = f"machine type {shown} takes no PCI expander bus"
        return "unsupported-machine", reason, "use machine type q35 (on arm64: virt)"
    if not domain.cells:
        hint = "set dedicatedCpuPlacement, hugepages and numa.guestMappingPassthrough in the VM's spec"
        return "no-cells", "the domain has no guest NUMA cells", hint
    return None


# --- one device ------------------------------------------------------------------------------------------------


def _place(
    device: Device,
    domain: Domain,
    host: HostTopology,
    cells: CellMap,
    options: Options,
    without_room: frozenset[int],
) -> Placement:
    source = _source_of(device, host)
    if source is None or source not in host.functions:
        what = (
            "there is no such PCI function on this host"
            if device.source
            else "no PCI function of this host is its parent"
        )
        return Placement(device, source, None, None, "left", code="device-missing", reason=what, fits=False)
    function = host.functions[source]
    pf = host.functions.get(function.physfn) if function.physfn is not None else None
    node = function.node if function.node is not None or pf is None else pf.node
    if node is None:
        reason = function.node_problem or "its host node is unknown"
        reason += f"; that of its PF {function.physfn} is not known either" if function.physfn is not None else ""
        hint = "see the host's firmware settings for NUMA and PCI locality; pcinuma never guesses"
        return Placement(device, source, None, None, "left", code="numa-unknown", reason=reason, hint=hint, fits=False)
    cell = cells.cell_of.get(node)
    approximate = False
    if cell is None and options.unmapped == "nearest":
        cell = nearest_cell(node, cells, host)
        approximate = cell is not None
    if cell is None:
        reason = f"host node {node} belongs to no guest cell"
        hint = "--unmapped nearest puts it on the nearest cell"
        if not any(cells.nodes_of.values()):
            reason = f"{reason}: no memnode and no vcpupin binds a cell to a host node"
            hint = "bind the cells: a memnode for each; in a VM's spec numa.guestMappingPassthrough"
        elif options.unmapped == "nearest":
            reason, hint = f"{reason}, and the host's distance table does not name a nearest one", ""
        return Placement(device, source, node, None, "left", code="node-unmapped", reason=reason, hint=hint, fits=False)
    if (kept := _kept(device, source, node, cell, domain, options, without_room)) is not None:
        return kept
    if approximate:
        reason = f"host node {node} belongs to no guest cell; cell {cell} is the nearest"
        return Placement(device, source, node, cell, "approximate", code="approximate", reason=reason, fits=False)
    if function.node is None:
        reason = f"{function.node_problem}, so it goes by its PF {function.physfn}, which is on host node {node}"
        return Placement(device, source, node, cell, "placed", code="node-of-pf", reason=reason)
    return Placement(device, source, node, cell, "placed")


def _source_of(device: Device, host: HostTopology) -> PciAddress | None:
    """The PCI function that the device is, or that a mediated or vDPA device belongs to."""
    if device.uuid is not None:
        return host.mdev_parents.get(device.uuid)
    return device.source if device.vdpa is None else host.vdpa_parents.get(device.vdpa)


def _kept(
    device: Device,
    source: PciAddress,
    node: int,
    cell: int,
    domain: Domain,
    options: Options,
    without_room: frozenset[int],
) -> Placement | None:
    """The placement of a device that keeps the guest address it has; None when it is free to go. ``without_room`` are
    expanders, by element, below which the guest loses devices."""
    address = device.address
    if address is None or _is_on_ours(device, domain) or _came_after_ours(address, domain):
        return None
    at = next((controller for controller in domain.controllers if controller.index == address.bus), None)
    # a set of ours that other hands hung something below does not stay, nor does a port of ours below theirs
    expander = expander_above(at, [c for c in domain.controllers if not c.is_ours]) if at is not None else None
    lost = expander is not None and (at is expander or expander.element in without_room)
    if expander is not None and expander.node == cell and not lost:
        reason = f"it is on cell {cell} already"
        return Placement(device, source, node, cell, "kept", code="already-placed", reason=reason)
    if options.addressed == "move":
        return None
    if expander is not None and expander.node == cell:
        code = "no-bus"
        below = f"below expander {expander.index}, which has too few buses: the guest may lose it"
        on_it = f"on expander {expander.index} itself, which takes ports alone"
        reason = f"its guest address {address} is {on_it if at is expander else below}"
    elif expander is not None and expander.node is not None:
        code = "foreign-cell"
        where = f"below expander {expander.index}: the guest sees it on cell {expander.node}, not on cell {cell}"
        reason = f"its guest address {address} is {where}"
    else:
        code = "addressed"
        where = whereabouts(address, domain)
        reason = f"its guest address {address} is {where}: the guest sees numa_node -1, not cell {cell}"
    hint = ROOT_HINT if address.bus == 0 else MOVE_HINT
    return Placement(device, source, node, cell, "kept", code=code, reason=reason, hint=hint, fits=False)


def _is_on_ours(device: Device, domain: Domain) -> bool:
    address = device.address
    return address is not None and any(c.is_ours and c.index == address.bus for c in domain.controllers)


def _came_after_ours(address: PciAddress, domain: Domain) -> bool:
    """Whether libvirt itself gave this address after a set of ours was made.

    Our indexes begin above every index in use, so an address beyond our highest cannot have been there before; and
    what libvirt chooses is slot 0 of a root port on bus 0.
    """
    ours = [controller.index or 0 for controller in domain.controllers if controller.is_ours]
    if not ours or address.bus <= max(ours) or address.slot or address.function:
        return False
    at = next((controller for controller in domain.controllers if controller.index == address.bus), None)
    return at is None or (at.model == "pcie-root-port" and (at.address is None or at.address.bus == 0))


def _holding_slots(placements: list[Placement], domain: Domain) -> list[Placement]:
    """Keep a device in place that is function 0 of a slot in which others stay: without it the guest would not look
    at them."""
    going = {p.device.element for p in placements if p.kind in ("placed", "approximate")}
    staying = [(d.address, d.element) for d in domain.devices if d.element not in going]
    staying += [(other.address, other.element) for other in domain.others]
    slots = {address.slot_key for address, _ in staying if address is not None and address.function}
    held = []
    for placement in placements:
        address = placement.device.address
        moving = placement.device.element in going and address is not None and address.function == 0
        if moving and address is not None and address.slot_key in slots and not _is_on_ours(placement.device, domain):
            reason = f"other functions of its guest slot {str(address)[:-2]} stay, and need it as function 0"
            placement = replace(placement, kind="kept", code="addressed", reason=reason, hint="", fits=False)
        held.append(placement)
    return held


# --- all of them -----------------------------------------------------------------------------------------------


def _seated(
    domain: Domain, host: HostTopology, placements: Sequence[Placement], options: Options
) -> tuple[Seating, list[Placement]]:
    """Where the placed devices sit, and the placements: left where there is no room for them."""
    candidates = [
        _candidate(p.device, p.cell, host.functions[p.source], options)
        for p in placements
        if p.kind in ("placed", "approximate") and p.cell is not None and p.source is not None
    ]
    going = {candidate.device.element for candidate in candidates}
    seating = seat(candidates, [d for d in domain.devices if d.element not in going and _is_on_ours(d, domain)], domain)
    if seating.misfit is None:
        return seating, list(placements)
    code, reason = seating.misfit
    roomless = seating.without_room or going
    left = [
        replace(
            p,
            kind="left",
            code=code,
            reason=reason,
            hint=STUCK_HINTS.get(code, ROOM_HINT),
            fits=False,
        )
        if p.device.element in roomless
        else p
        for p in placements
    ]
    return seating, left


def _candidate(device: Device, cell: int, function: HostFunction, options: Options) -> Candidate:
    group = f"cell{cell}"
    if options.group_by == "root-complex" and function.root_complex is not None:
        group += f"-{function.root_complex.replace(':', '-')}"
    return Candidate(
        device,
        cell,
        group,
        source=function.address,
        is_vf=function.physfn is not None,
        bridges=function.bridges if options.group_by == "switch" else (),
        slot=(function.physfn or function.address).slot_key,
    )


def _with_addresses(
    placements: Sequence[Placement],
    expanders: Sequence[PlannedExpander],
    domain: Domain,
    drop: Sequence[PciController] = (),
) -> list[Placement]:
    """The placements with their guest addresses, and the BDFs Linux will show: firmware numbers the buses below an
    expander upwards from its busNr in slot order. A device that stays has what its own address says, in the domain
    without what is dropped: below another hand's expander the ports after one of ours move up."""
    found: dict[int, tuple[PciAddress, PciAddress | None]] = {}
    for expander in expanders:
        for number, port in enumerate(expander.ports, start=1):
            for attached in port.attachments:
                found[attached.device.element] = (
                    PciAddress(0, port.index, 0, attached.function),
                    PciAddress(0, expander.bus_nr + number, 0, attached.function),
                )
    gone = {controller.element for controller in drop}
    left = replace(domain, controllers=tuple(c for c in domain.controllers if c.element not in gone))
    for device in domain.devices:
        if device.element not in found and device.address is not None and not _is_on_ours(device, domain):
            found[device.element] = (device.address, predicted_bdf(device.address, left))
    return [
        replace(p, guest_address=found[p.device.element][0], guest_bdf=found[p.device.element][1])
        if p.device.element in found
        else p
        for p in placements
    ]


# --- the policy ------------------------------------------------------------------------------------------------


def _judged(made: Plan, options: Options, cells: CellMap) -> Plan:
    """The plan with a finding for each device that does not fit, and the refusal if the policy refuses."""
    refusing = options.policy in REFUSING
    findings = list(made.findings)
    for placement in made.placements:
        if placement.code is not None:
            findings.append(_finding(placement, placement.code, refusing))
    made = replace(made, findings=tuple(findings))
    if not refusing:
        return made
    odd = [placement for placement in made.placements if not placement.fits]
    if odd:
        reasons = "; ".join(_reasons(odd))
        count = f"{len(odd)} of {len(made.placements)} devices do" if len(odd) > 1 else "1 device does"
        hint = next((p.hint for p in odd if p.hint), None)
        return replace(made, refusal=f"policy {options.policy}: {count} not fit a cell: {reasons}", refusal_hint=hint)
    if (full := next((finding for finding in findings if finding.code == "io-space"), None)) is not None:
        return replace(made, refusal=f"policy {options.policy}: {full.message}", refusal_hint=full.hint)
    if options.policy == "single-numa-node":
        return _single_node(made, cells)
    return made


def _reasons(odd: Iterable[Placement]) -> Iterator[str]:
    """Every device with its reason. One that many share comes first and once: a line has an end."""
    of_reason: dict[str | None, list[str]] = {}
    for placement in odd:
        of_reason.setdefault(placement.reason, []).append(placement.device.label)
    for reason, labels in of_reason.items():
        names = ", ".join(labels)
        yield f"{names}: {reason}" if len(labels) < 4 else f"{reason}: {names}"


def _single_node(made: Plan, cells: CellMap) -> Plan:
    of_devices: dict[int, list[str]] = {}
    for placement in made.placements:
        assert placement.host_node is not None  # every device fits a cell, by its node
        of_devices.setdefault(placement.host_node, []).append(placement.device.label)
    if len(set(of_devices).union(*cells.touched.values())) == 1 and all(cells.touched.values()):
        return made
    devices = "; ".join(f"{', '.join(labels)} on host node {node}" for node, labels in sorted(of_devices.items()))
    of_cells = {cell: str(touched) for cell, touched in cells.touched.items()}
    shown = "; ".join(f"cell {cell} on host node {nodes or 'unknown'}" for cell, nodes in of_cells.items())
    return replace(
        made,
        refusal=f"policy single-numa-node: devices and cells are not of one host node: {devices}; {shown}",
        refusal_hint="give the VM CPUs and devices of one host node (kubelet: topologyManagerPolicy single-numa-node)",
    )


def _finding(placement: Placement, code: str, refusing: bool) -> Finding:
    label = placement.device.label
    if placement.fits:
        verb = "is placed" if placement.kind == "placed" else "stays where it is"
        return Finding(code, "info", f"{label} {verb}: {placement.reason}", label)
    verb = "is placed approximately" if placement.kind == "approximate" else "stays where it is"
    return Finding(
        code,
        "error" if refusing else "warning",
        f"{label} {verb}: {placement.reason}",
        label,
        placement.hint or None,
    )
