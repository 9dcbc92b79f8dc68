"""The guest's I/O ports: SeaBIOS gives every bridge with an I/O BAR behind it 4 KiB, and hangs when they run out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pcinuma.model import Domain, Finding, HostTopology, Placement, PlannedExpander

WINDOWS = 14
"""The windows of 4 KiB that a q35 guest boots with (measured); SeaBIOS keeps what is below 0x1000 (fw/pciinit.c)."""

_IO = 0x100  # linux ioport.h, IORESOURCE_IO
_ON_A_PORT = ("e1000e",)  # PCI Express NICs with an I/O BAR, on a root port each
_BEHIND_ONE_BRIDGE = ("e1000", "ne2k_pci", "pcnet", "rtl8139", "virtio-transitional")  # on a PCI bridge together


def io_space(
    domain: Domain, host: HostTopology, placements: Sequence[Placement], expanders: Sequence[PlannedExpander]
) -> Iterator[Finding]:
    """An error where the guest would hang at boot. UEFI leaves I/O BARs unassigned instead, and boots."""
    if domain.is_uefi or domain.arch != "x86_64":
        return
    with_io = {p.device.element for p in placements if _has_io(p, host)}
    on_ours = [{a.device.element for a in port.attachments} for e in expanders for port in e.ports]
    windows = sum(bool(with_io & members) for members in on_ours)
    with_io -= set().union(*on_ours)
    windows += sum(p.device.element in with_io and not _on_bus_0(p) for p in placements)
    passed = windows
    models = [other.model for other in domain.others if other.address is None or other.address.bus]
    windows += sum(model in _ON_A_PORT for model in models) + any(model in _BEHIND_ONE_BRIDGE for model in models)
    if windows > WINDOWS:
        more = f" and {windows - passed} for other devices" if windows > passed else ""
        message = (
            f"the guest will hang at boot: {passed} passthrough devices with I/O ports{more} need {windows} windows"
            f" of 4 KiB, SeaBIOS has room for {WINDOWS}"
        )
        hint = "boot the VM with UEFI (domain.firmware.bootloader.efi), or pass through fewer of these devices"
        yield Finding("io-space", "error", message, None, hint)


def _has_io(placement: Placement, host: HostTopology) -> bool:
    function = host.functions.get(placement.device.source) if placement.device.source is not None else None
    return function is not None and any(bar.flags & _IO for bar in function.bars)


def _on_bus_0(placement: Placement) -> bool:
    """Whether the device sits on the root bus itself, where its ports need no window of a bridge."""
    address = placement.guest_address
    return address is not None and address.bus == 0
