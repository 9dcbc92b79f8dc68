"""How much address space BARs take and the guest has, to the byte: SeaBIOS's and OVMF's own rules, worked out by hand."""

from __future__ import annotations

import pytest

from pcinuma.mmio import GIB, MIB, Need, Region, fits, guest_bits, is_high, need, ovmf_window
from pcinuma.model import (
    Attachment,
    Bar,
    Device,
    Domain,
    GuestCpu,
    HostFunction,
    HostTopology,
    PciAddress,
    Placement,
    PlannedExpander,
    PlannedPort,
    PortModel,
)

MEMORY, PREFETCHABLE, WIDE = 0x200, 0x2000, 0x100000


def guest(cpu: GuestCpu = GuestCpu(), machine: str = "q35", arch: str = "x86_64", *, uefi: bool = False) -> Domain:
    return Domain(arch, machine, (), {}, {}, (), (), (), cpu=cpu, is_uefi=uefi)


def host(bits: int | None, *functions: HostFunction) -> HostTopology:
    return HostTopology({}, {function.address: function for function in functions}, address_bits=bits)


@pytest.mark.parametrize(
    ("cpu", "machine", "bits", "expected"),
    [
        (GuestCpu(), "q35", 46, 40),
        (GuestCpu("custom"), "q35", 46, 40),
        (GuestCpu("host-model"), "q35", 46, 40),
        (GuestCpu("host-passthrough"), "q35", 46, 46),
        (GuestCpu("host-passthrough"), "q35", None, None),
        (GuestCpu("maximum"), "q35", 46, 46),
        (GuestCpu("custom"), "pc-q35-rhel9.4.0", 46, 46),
        (GuestCpu("host-passthrough", "emulate", 43), "q35", 46, 43),
        (GuestCpu("custom", "passthrough"), "q35", 46, 46),
        (GuestCpu("custom", "passthrough", None, 42), "q35", 46, 42),
        (GuestCpu("custom", "passthrough", None, 48), "q35", 46, 46),
        (GuestCpu("custom", "passthrough", None, 42), "q35", None, 42),
    ],
)
def test_the_guests_address_bits(cpu: GuestCpu, machine: str, bits: int | None, expected: int | None) -> None:
    assert guest_bits(guest(cpu, machine), host(bits)) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (MEMORY | PREFETCHABLE | WIDE, True),
        (MEMORY | PREFETCHABLE, False),
        (MEMORY | WIDE, False),
        (MEMORY, False),
    ],
)
def test_which_bars_go_above_4_gib(flags: int, expected: bool) -> None:
    assert is_high(Bar(0, MIB, flags)) == expected


@pytest.mark.parametrize(
    ("bits", "memory_end", "gib"),
    [
        (40, 4 * GIB, 128),
        (42, 4 * GIB, 512),
        (39, 4 * GIB, 64),
        (38, 4 * GIB, 32),
        (36, 4 * GIB, 32),
        (40, 896 * GIB - 1, 128),  # 1024 - 128
        (40, 896 * GIB, 32),
    ],
)
def test_ovmfs_window(bits: int, memory_end: int, gib: int) -> None:
    assert ovmf_window(bits, memory_end) == gib * GIB


@pytest.mark.parametrize(
    ("domain", "bits", "size", "align", "expected"),
    [
        # 4 GiB of low memory, then the next multiple of 512 GiB, 1024 in all
        (guest(), 40, 512 * GIB, 512 * GIB, True),
        (guest(), 40, 512 * GIB + MIB, 512 * GIB, False),
        (guest(), 39, 512 * GIB, 512 * GIB, False),
        # a window of 512 GiB, of which one is for the rest
        (guest(uefi=True), 42, 511 * GIB, GIB, True),
        (guest(uefi=True), 42, 511 * GIB + MIB, GIB, False),
        (guest(uefi=True), 41, 511 * GIB, GIB, False),
        (guest(machine="virt", arch="aarch64", uefi=True), 40, 512 * GIB, GIB, True),
        (guest(machine="virt", arch="aarch64", uefi=True), 40, 512 * GIB + MIB, GIB, False),
        (guest(), 32, 0, MIB, True),
    ],
)
def test_what_fits(domain: Domain, bits: int, size: int, align: int, expected: bool) -> None:
    assert fits(Need((Region(size, align),), (), 0), bits, domain) == expected


def test_root_buses_share_one_region_under_seabios_and_follow_each_other_under_ovmf() -> None:
    """Small before large: OVMF keeps the order of the root buses, SeaBIOS sorts by alignment."""
    wanted = Need((Region(GIB, GIB), Region(511 * GIB, 256 * GIB)), (), 0)
    # OVMF: 1, a gap up to 256, 511 more: 767 and one for the rest
    assert not fits(wanted, 42, guest(uefi=True))
    assert fits(wanted, 43, guest(uefi=True))
    # SeaBIOS: from 256 on, 511 and 1: 768
    assert fits(wanted, 40, guest())


def placed(element: int, *bars: Bar) -> tuple[Placement, HostFunction]:
    source = PciAddress(0, 0x20 + element, 0, 0)
    device = Device(element, "pci", source)
    return Placement(device, source, 0, 0, "placed"), HostFunction(source, 0, bars=bars)


def port(index: int, parent: int, model: PortModel, *on_it: Placement) -> PlannedPort:
    attachments = tuple(Attachment(p.device, 0, multifunction=False) for p in on_it)
    return PlannedPort("", index, parent, 0, 0, multifunction=False, attachments=attachments, model=model)


@pytest.mark.parametrize(("rounded", "mib"), [(False, 3), (True, 4)])
def test_seabios_rounds_a_window_up_to_its_alignment(rounded: bool, mib: int) -> None:
    bars = (
        Bar(0, 2 * MIB, MEMORY | PREFETCHABLE | WIDE),
        Bar(2, MIB, MEMORY | PREFETCHABLE | WIDE),
        Bar(4, 64, MEMORY),
    )
    one, function = placed(1, *bars)
    expander = PlannedExpander("", 1, 254, 0, (port(2, 1, "pcie-root-port", one),))
    wanted = need([one], [expander], host(46, function), rounded=rounded)
    assert wanted.high == (Region(mib * MIB, 2 * MIB), Region(0, 1))
    # a bridge's window is a MiB at least
    assert wanted.low == (Region(MIB, MIB), Region(0, 1))


def test_what_is_behind_a_switch_counts_and_what_has_no_bars_on_record_is_said() -> None:
    big = Bar(0, 64 * GIB, MEMORY | PREFETCHABLE | WIDE)
    (one, of_one), (two, of_two), (bare, of_bare) = placed(1, big), placed(2, big), placed(3)
    ports = (
        port(2, 1, "pcie-root-port"),
        port(3, 2, "pcie-switch-upstream-port"),
        port(4, 3, "pcie-switch-downstream-port", one),
        port(5, 3, "pcie-switch-downstream-port", two),
        port(6, 1, "pcie-root-port", bare),
    )
    wanted = need(
        [one, two, bare], [PlannedExpander("", 1, 249, 0, ports)], host(46, of_one, of_two, of_bare), rounded=True
    )
    assert wanted.high == (Region(128 * GIB, 64 * GIB), Region(0, 1))
    assert (wanted.total, wanted.unknown) == (128 * GIB, 1)


def test_a_device_that_stays_is_on_a_port_of_bus_0() -> None:
    one, function = placed(1, Bar(0, 64 * GIB, MEMORY | PREFETCHABLE | WIDE))
    assert need([one], [], host(46, function), rounded=False).high == (Region(64 * GIB, 64 * GIB),)
