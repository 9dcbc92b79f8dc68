"""GPUDirect cliques: which NVIDIA GPUs may talk to each other directly, since one host switch is above them.

QEMU shows the guest's driver a capability with the number (vfio-pci x-nv-gpudirect-clique, hw/vfio/pci-quirks.c).
"""

from __future__ import annotations

from collections.abc import Sequence

from pcinuma.model import Finding, HostFunction, HostTopology, PciAddress, Placement

NVIDIA = 0x10DE
DISPLAY = 0x03
MOST = 16  # the number has four bits


def cliques(host: HostTopology, placements: Sequence[Placement]) -> tuple[dict[str, int], list[Finding]]:
    """The clique of each GPU by the alias of its hostdev, numbered by the lowest host BDF, and what is to be said.

    The outermost switch counts: within it peer traffic need not pass the root complex. A lone GPU has no clique.
    """
    below: dict[PciAddress, list[Placement]] = {}
    for placement in sorted(placements, key=lambda p: p.device.source or PciAddress(0, 0, 0, 0)):
        source = placement.device.source
        function = host.functions.get(source) if source is not None and placement.device.kind == "pci" else None
        if function is not None and _is_gpu(function) and len(function.bridges) > 1:
            below.setdefault(function.bridges[1], []).append(placement)
    chosen: dict[str, int] = {}
    findings: list[Finding] = []
    for members in (members for members in below.values() if len(members) > 1):
        names = ", ".join(p.device.label for p in members)
        nameless = [p.device.label for p in members if p.device.alias is None]
        number = len(set(chosen.values()))
        if nameless:
            message = f"no GPUDirect clique for {names}: {', '.join(nameless)} has no alias to say it by"
            findings.append(Finding("gpudirect-clique", "warning", message, None, "give the hostdev an alias ua-…"))
        elif number == MOST:
            message = f"no GPUDirect clique for {names}: there are {MOST} already"
            findings.append(Finding("gpudirect-clique", "warning", message))
        else:
            chosen |= {p.device.alias: number for p in members if p.device.alias is not None}
    if chosen:
        message = (
            f"{len(chosen)} GPUs get a GPUDirect clique by qemu:override, which libvirt before 8.2 drops without a word"
        )
        hint = "in the guest, 'nvidia-smi topo -p2p r' shows whether it came through"
        findings.append(Finding("gpudirect-clique", "warning", message, None, hint))
    return chosen, findings


def _is_gpu(function: HostFunction) -> bool:
    return function.vendor == NVIDIA and (function.pci_class or 0) >> 16 == DISPLAY
