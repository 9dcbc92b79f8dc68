"""GPUDirect cliques: which NVIDIA GPUs may talk to each other directly, since one host switch is above them.

QEMU shows the guest's driver a capability with the number (vfio-pci x-nv-gpudirect-clique, hw/vfio/pci-quirks.c).
"""

from __future__ import annotations

from collections.abc import Sequence

from pcinuma.model import Domain, Finding, HostFunction, HostTopology, PciAddress, Placement

NVIDIA = 0x10DE
DISPLAY = 0x03
MOST = 16  # the number has four bits


def cliques(
    domain: Domain, host: HostTopology, placements: Sequence[Placement], *, apply: bool
) -> tuple[dict[str, int], list[Finding]]:
    """The clique of each GPU by the alias of its hostdev, in the order of host BDFs, and what is to be said.

    The outermost switch counts: within it peer traffic need not pass the root complex. A lone GPU has no clique. A
    number that the domain gives to one of them is taken for all; one that it gives to another GPU is not used.
    """
    below: dict[PciAddress, list[Placement]] = {}
    for placement in sorted(placements, key=lambda p: p.device.source or PciAddress(0, 0, 0, 0)):
        source = placement.device.source
        function = host.functions.get(source) if source is not None and placement.device.kind == "pci" else None
        if function is not None and _is_gpu(function) and len(function.bridges) > 1:
            below.setdefault(function.bridges[1], []).append(placement)
    groups = [members for members in below.values() if len(members) > 1]
    ours = {p.device.alias for members in groups for p in members}
    taken = {number for alias, number in domain.cliques.items() if alias not in ours}
    chosen: dict[str, int] = {}
    findings: list[Finding] = []
    for members in groups:
        names = ", ".join(p.device.label for p in members)
        aliases = [p.device.alias for p in members if p.device.alias is not None]
        given = sorted({domain.cliques[alias] for alias in aliases if alias in domain.cliques} - taken)
        free = (number for number in (*given, *range(MOST)) if number not in taken)
        number = next(free, None)
        if len(aliases) < len(members):
            nameless = ", ".join(p.device.label for p in members if p.device.alias is None)
            message = f"no GPUDirect clique for {names}: {nameless} has no alias to say it by"
            findings.append(Finding("gpudirect-clique", "warning", message, None, "give the hostdev an alias ua-…"))
        elif number is None:
            message = f"no GPUDirect clique for {names}: there are {MOST} already"
            findings.append(Finding("gpudirect-clique", "warning", message))
        else:
            taken.add(number)
            chosen |= dict.fromkeys(aliases, number)
            if len(given) > 1:
                message = f"the GPUs {names} had the GPUDirect cliques {', '.join(map(str, given))}: all get {number}"
                findings.append(Finding("gpudirect-clique", "warning", message))
    if chosen:
        verb = "get" if apply else "would get"
        message = (
            f"{len(chosen)} GPUs {verb} a GPUDirect clique by qemu:override, which libvirt before 8.2 drops"
            " without a word"
        )
        hint = "in the guest, 'nvidia-smi topo -p2p r' shows whether it came through"
        findings.append(Finding("gpudirect-clique", "warning", message, None, hint))
    elif not findings:
        message = "no GPUDirect cliques: the host shows no two of the VM's NVIDIA GPUs below one switch"
        findings.append(Finding("gpudirect-clique", "info", message))
    return chosen, findings


def _is_gpu(function: HostFunction) -> bool:
    return function.vendor == NVIDIA and (function.pci_class or 0) >> 16 == DISPLAY
