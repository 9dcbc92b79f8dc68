"""How much address space BARs take and the guest has, to the byte: SeaBIOS's and OVMF's own rules, worked out by hand.

And the windows for I/O ports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pcinuma.io_space import io_space
from pcinuma.mmio import GIB, MIB, Need, Region, fits, guest_bits, is_high, judged, memory_end, need, ovmf_window
from pcinuma.model import (
    Attachment,
    Bar,
    Device,
    Domain,
    GuestCpu,
    HostCpu,
    HostFunction,
    HostTopology,
    OtherDevice,
    PciAddress,
    Placement,
    PlannedExpander,
    PlannedPort,
    PortModel,
)

MEMORY, PREFETCHABLE, WIDE = 0x200, 0x2000, 0x100000
HIGH = MEMORY | PREFETCHABLE | WIDE
IO = 0x40101


def guest(
    cpu: GuestCpu = GuestCpu(), machine: str = "q35", arch: str = "x86_64", *, uefi: bool = False, memory: int = 0
) -> Domain:
    return Domain(arch, machine, (), {}, {}, (), (), (), cpu=cpu, is_uefi=uefi, memory=memory)


INTEL, AMD = HostCpu("GenuineIntel", 6, 143), HostCpu("AuthenticAMD", 25, 17)


def host(bits: int | None, *functions: HostFunction, cpu: HostCpu | None = INTEL) -> HostTopology:
    return HostTopology({}, {function.address: function for function in functions}, address_bits=bits, cpu=cpu)


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
        # 4 and 508 GiB of memory end at 512
        (guest(memory=508 * GIB), 40, 512 * GIB, 512 * GIB, True),
        (guest(memory=508 * GIB + 1), 40, 512 * GIB, 512 * GIB, False),
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
    assert fits(Need((Region(size, align),), (), 0), bits, domain, amd=False) == expected


def test_root_buses_share_one_region_under_seabios_and_follow_each_other_under_ovmf() -> None:
    """Small before large: OVMF keeps the order of the root buses, SeaBIOS sorts by alignment."""
    wanted = Need((Region(GIB, GIB), Region(511 * GIB, 256 * GIB)), (), 0)
    # OVMF: 1, a gap up to 256, 511 more: 767 and one for the rest
    assert not fits(wanted, 42, guest(uefi=True), amd=False)
    assert fits(wanted, 43, guest(uefi=True), amd=False)
    # SeaBIOS: from 256 on, 511 and 1: 768
    assert fits(wanted, 40, guest(), amd=False)


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
    wanted = need([one], [expander], host(46, function), least=MIB if rounded else None)
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
        [one, two, bare], [PlannedExpander("", 1, 249, 0, ports)], host(46, of_one, of_two, of_bare), least=MIB
    )
    assert wanted.high == (Region(128 * GIB, 64 * GIB), Region(0, 1))
    assert (wanted.total, wanted.unknown) == (128 * GIB, 1)


def test_a_device_that_stays_is_on_a_port_of_bus_0() -> None:
    one, function = placed(1, Bar(0, 64 * GIB, MEMORY | PREFETCHABLE | WIDE))
    assert need([one], [], host(46, function), least=None).high == (Region(64 * GIB, 64 * GIB),)


MORE_BITS = '--mmio apply (annotation pcinuma.vm.kubevirt.io/mmio) sets <maxphysaddr mode="emulate" bits="41"/>'


def test_what_is_said_of_too_much() -> None:
    """1 TiB in a guest of 40 bits with its memory; 41 bits hold it, if the host has them."""
    (one, of_one), (bare, of_bare) = placed(1, Bar(0, 1 << 40, MEMORY | PREFETCHABLE | WIDE)), placed(2)
    for bits, message, hint in (
        (41, "the guest will lose BARs", f"{MORE_BITS}; or use the CPU model host-passthrough"),
        (None, "the guest will lose BARs", f"{MORE_BITS}; or use the CPU model host-passthrough"),
        (
            40,
            "the guest will lose BARs; it would take 41 bits; the host's CPUs have 40",
            "pass through fewer of these devices",
        ),
    ):
        findings, wanted = judged(guest(), host(bits, of_one, of_bare), [one, bare], [], apply=False)
        assert wanted is None
        assert [(f.code, f.severity) for f in findings] == [("mmio-window", "warning")]
        assert findings[0].message == (
            "the devices' BARs need 1 TiB of address space, 1 devices not counted, the guest has 1 TiB with 40"
            f" address bits, memory included: {message}"
        )
        assert findings[0].hint == hint
    findings, wanted = judged(guest(), host(41, of_one), [one], [], apply=True)
    assert (wanted, findings[0].severity) == (41, "info")
    limited = guest(GuestCpu("host-passthrough", "emulate", 40))
    findings, _ = judged(limited, host(41, of_one), [one], [], apply=False)
    assert [finding.hint for finding in findings] == [MORE_BITS]


def test_nothing_holds_more_than_52_bits() -> None:
    """256 TiB and one GiB for the rest are more than an eighth of 51 bits; 512 TiB are all of an eighth of 52."""
    for size, wanted in ((1 << 48, 52), (1 << 49, None)):
        one, function = placed(1, Bar(0, size, MEMORY | PREFETCHABLE | WIDE))
        findings, bits = judged(guest(uefi=True), host(None, function), [one], [], apply=True)
        assert bits == wanted
        assert findings[0].severity == ("info" if wanted else "warning")


def test_seabios_uses_46_bits_at_most() -> None:
    """32 TiB of 64; and 64 beside the memory, which no number of bits makes room for."""
    for size, wanted in ((1 << 45, 46), (1 << 46, None)):
        one, function = placed(1, Bar(0, size, MEMORY | PREFETCHABLE | WIDE))
        findings, bits = judged(guest(memory=16 * GIB), host(None, function), [one], [], apply=True)
        assert bits == wanted
        assert findings[0].severity == ("info" if wanted else "warning")


@pytest.mark.parametrize(
    ("memory", "amd", "end"),
    [
        (8 * GIB, True, 12 * GIB),
        # 4 and 975 GiB of memory, then 32 for devices: 1011; AMD's range begins at 1012 and ends at 1024
        (975 * GIB, True, 979 * GIB),
        (976 * GIB, True, 2000 * GIB),
        (976 * GIB, False, 980 * GIB),
    ],
)
def test_where_the_memory_ends(memory: int, amd: bool, end: int) -> None:
    assert memory_end(guest(memory=memory), amd=amd) == end


@pytest.mark.parametrize(
    ("cpu", "count", "message", "wanted"),
    [
        # as booted: three of 128 GiB lose one in an AMD guest of 40 bits, two none
        (AMD, 2, None, None),
        (AMD, 3, "for which SeaBIOS from 1.16.3 on finds no room at the end of 40 address bits", 41),
        # who the CPU is from is not known: it may be AMD's
        (None, 3, "for which SeaBIOS from 1.16.3 on finds no room at the end of 40 address bits", 41),
        # of an Intel CPU SeaBIOS does not believe 40 bits
        (INTEL, 3, None, None),
        (INTEL, 7, None, None),
        (INTEL, 8, "the guest has 1 TiB with 40 address bits, memory included", 41),
        # room of 1280 GiB at the end of 2048 would begin below 1024, in AMD's range
        (AMD, 8, "the guest has 1 TiB with 40 address bits, memory included", 42),
    ],
)
def test_newer_seabios_takes_room_at_the_end(
    cpu: HostCpu | None, count: int, message: str | None, wanted: int | None
) -> None:
    made = [placed(number, Bar(0, 128 * GIB, MEMORY | PREFETCHABLE | WIDE)) for number in range(count)]
    topology = host(46, *(function for _, function in made), cpu=cpu)
    findings, bits = judged(guest(memory=16 * GIB), topology, [one for one, _ in made], [], apply=True)
    assert bits == wanted
    assert [message in finding.message for finding in findings if message] == ([True] if message else [])
    assert bool(findings) == bool(message)


def test_the_virt_machine_has_a_window_of_its_own() -> None:
    one, function = placed(1, Bar(0, 1 << 40, MEMORY | PREFETCHABLE | WIDE))
    findings, bits = judged(guest(machine="virt", arch="aarch64", uefi=True), host(48, function), [one], [], apply=True)
    assert bits is None
    assert findings[0].message == (
        "the devices' BARs need 1 TiB of address space, the virt machine has 512 GiB: the guest will lose BARs"
    )


def test_ovmfs_window_is_told_with_the_memory_in_mind() -> None:
    """1 TiB less a window of 128 GiB is 896: memory up to there leaves OVMF 32 GiB."""
    one, function = placed(1, Bar(0, 256 * GIB, MEMORY | PREFETCHABLE | WIDE))
    for memory, window in ((892 * GIB - 1, "128 GiB"), (892 * GIB, "32 GiB")):
        findings, _ = judged(guest(uefi=True, memory=memory), host(46, function), [one], [], apply=False)
        assert findings[0].message.startswith(
            f"the devices' BARs need 256 GiB of address space, OVMF has {window} with 40 address bits"
        )


@pytest.mark.parametrize(("rounded", "mib"), [(False, 3), (True, 4)])
def test_a_window_behind_a_switch_is_rounded_too(rounded: bool, mib: int) -> None:
    one, function = placed(1, Bar(0, 2 * MIB, MEMORY | PREFETCHABLE | WIDE), Bar(2, MIB, MEMORY | PREFETCHABLE | WIDE))
    ports = (
        port(2, 1, "pcie-root-port"),
        port(3, 2, "pcie-switch-upstream-port"),
        port(4, 3, "pcie-switch-downstream-port", one),
    )
    wanted = need([one], [PlannedExpander("", 1, 252, 0, ports)], host(46, function), least=MIB if rounded else None)
    assert wanted.high[0] == Region(mib * MIB, 2 * MIB)


def test_seabios_gives_every_port_the_least_window_above_4_gib() -> None:
    """Behind a port of ours, and of a device that stays; below 4 GiB a MiB remains the least."""
    (one, of_one), (two, of_two) = (placed(n, Bar(0, MIB, HIGH), Bar(2, MIB, MEMORY)) for n in (1, 2))
    expander = PlannedExpander("", 1, 254, 0, (port(2, 1, "pcie-root-port", one),))
    wanted = need([one, two], [expander], host(46, of_one, of_two), least=GIB)
    assert wanted.high == (Region(GIB, GIB), Region(GIB, GIB))
    assert wanted.low == (Region(MIB, MIB), Region(MIB, MIB))


@pytest.mark.parametrize(
    ("sizes", "mib", "align"),
    [
        ((1, 1), 8, 4),  # a window of 4 each
        ((8, 1), 16, 8),  # 8 and 4, which a multiple of 8 holds
    ],
)
def test_seabios_rounds_at_every_bridge_of_a_switch(sizes: tuple[int, int], mib: int, align: int) -> None:
    made = [placed(number, Bar(0, size * MIB, HIGH)) for number, size in enumerate(sizes)]
    ports = (
        port(2, 1, "pcie-root-port"),
        port(3, 2, "pcie-switch-upstream-port"),
        port(4, 3, "pcie-switch-downstream-port", made[0][0]),
        port(5, 3, "pcie-switch-downstream-port", made[1][0]),
    )
    topology = host(46, *(function for _, function in made))
    expander = PlannedExpander("", 1, 251, 0, ports)
    assert need([one for one, _ in made], [expander], topology, least=4 * MIB).high[0] == Region(mib * MIB, align * MIB)


def test_io_ports_are_no_memory() -> None:
    one, function = placed(1, Bar(5, 128, IO))
    wanted = need([one], [], host(46, function), least=None)
    assert (wanted.high, wanted.low, wanted.unknown) == ((Region(0, 1),), (Region(0, 1),), 0)


@pytest.mark.parametrize(
    ("uefi", "message"),
    [
        (True, "the devices' BARs need 513 GiB of address space, OVMF has 128 GiB with 40 address bits"),
        (False, "the devices' BARs need 1 TiB of address space, the guest has 1 TiB with 40 address bits"),
    ],
)
def test_a_window_is_as_the_guests_firmware_has_it(uefi: bool, message: str) -> None:
    """512 GiB and one: SeaBIOS's window is a multiple of 512."""
    one, function = placed(1, Bar(0, 512 * GIB, HIGH), Bar(2, GIB, HIGH))
    findings, _ = judged(guest(uefi=uefi), host(46, function), [one], [], apply=False)
    assert [finding.message.startswith(message) for finding in findings] == [True]


@pytest.mark.parametrize(("gib", "is_said"), [(1, False), (2, True)])
def test_of_a_gib_nothing_is_said(gib: int, is_said: bool) -> None:
    """As much as there is, whatever the address bits: below 4 GiB at the worst."""
    one, function = placed(1, Bar(0, gib * GIB, HIGH))
    narrow = guest(GuestCpu("host-passthrough", "emulate", 32))
    assert bool(judged(narrow, host(46, function), [one], [], apply=False)[0]) == is_said


@pytest.mark.parametrize(("gib", "is_said"), [(32, False), (64, True)])
def test_address_bits_that_nobody_knows(gib: int, is_said: bool) -> None:
    """OVMF has 32 GiB whatever they are."""
    one, function = placed(1, Bar(0, gib * GIB, HIGH))
    findings, bits = judged(guest(GuestCpu("host-passthrough")), host(None, function), [one], [], apply=True)
    assert bits is None
    assert [(f.code, f.severity, f.message, f.hint) for f in findings] == (
        [
            (
                "mmio-window",
                "info",
                "the devices need 64 GiB of address space; the host's address bits are not known",
                "record the host again with 'pcinuma snapshot', or set <maxphysaddr>",
            )
        ]
        if is_said
        else []
    )


@pytest.mark.parametrize(("cpu", "lost"), [(INTEL, False), (AMD, True)])
def test_memory_that_qemu_moves_above_amds_range_leaves_ovmf_less(cpu: HostCpu, lost: bool) -> None:
    """976 GiB end at 980, or, moved, at 2000: of 2048 OVMF takes the last 256 if memory leaves them, else 32."""
    one, function = placed(1, Bar(0, 64 * GIB, HIGH))
    domain = guest(GuestCpu("custom", "emulate", 41), uefi=True, memory=976 * GIB)
    findings, _ = judged(domain, host(46, function, cpu=cpu), [one], [], apply=False)
    said = "the devices' BARs need 64 GiB of address space, OVMF has 32 GiB with 41 address bits"
    assert [finding.message for finding in findings] == ([f"{said}: the guest will lose BARs"] if lost else [])


@pytest.mark.parametrize(
    ("mib", "fits"),
    [
        # 16 ports that KubeVirt may add have 512 MiB each: 8 GiB. 376 and 8 are three eighths of 1024: from 640 on that
        # ends in AMD's range, so SeaBIOS goes to 256. A little more is four eighths, and begins at 0
        ([size * 1024 for size in (256, 64, 32, 16, 8)], True),
        ([size * 1024 for size in (256, 64, 32, 16, 8)] + [512], False),
        # two ports of 512, whatever they hold
        ([size * 1024 for size in (256, 64, 32, 16, 4, 2, 1)] + [512, 256], True),
        ([size * 1024 for size in (256, 64, 32, 16, 4, 2, 1)] + [512, 256, 256], False),
    ],
)
def test_newer_seabios_counts_empty_ports_and_whole_windows(mib: list[int], fits: bool) -> None:
    made = [placed(number, Bar(0, size * MIB, HIGH)) for number, size in enumerate(mib)]
    topology = host(46, *(function for _, function in made), cpu=AMD)
    findings, _ = judged(guest(memory=16 * GIB), topology, [one for one, _ in made], [], apply=False)
    assert ["SeaBIOS from 1.16.3 on finds no room" in finding.message for finding in findings] == [True] * (not fits)


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [([1 << 60], "1 EiB"), ([1 << 59], "512 PiB"), ([1 << 50], "1 PiB"), ([1 << 49], "512 TiB"), ([1 << 40, 1 << 39], "1.5 TiB")],
)  # fmt: skip
def test_sizes_are_told_in_their_unit(sizes: list[int], shown: str) -> None:
    one, function = placed(1, *(Bar(number, size, HIGH) for number, size in enumerate(sizes)))
    findings, _ = judged(guest(uefi=True), host(40, function), [one], [], apply=False)
    assert findings[0].message.startswith(f"the devices' BARs need {shown} of address space, OVMF has")


@pytest.mark.parametrize(("more", "said"), [((), None), ((1,), "897 MiB")])
def test_what_there_is_below_4_gib(more: tuple[int, ...], said: str | None) -> None:
    """896 MiB beside the 64 for the rest are all of 960."""
    one, function = placed(1, *(Bar(number, size * MIB, MEMORY) for number, size in enumerate((512, 256, 128, *more))))
    findings, bits = judged(guest(uefi=True), host(46, function), [one], [], apply=True)
    assert bits is None
    message = f"the devices need {said} below 4 GiB, where the guest has 960 MiB for all"
    assert [(f.code, f.severity, f.message, f.hint) for f in findings] == (
        [("mmio-window", "warning", message, "pass through fewer of these devices")] if said else []
    )


@pytest.mark.parametrize(
    ("ours", "left", "others", "counted"),
    [
        (10, 4, (), None),
        (10, 5, (), "15 passthrough devices with I/O ports need 15 windows"),
        (10, 3, ("e1000e", "rtl8139"), "13 passthrough devices with I/O ports and 2 for other devices need 15 windows"),
        (10, 3, ("pcnet", "rtl8139"), None),  # behind one bridge
        (12, 0, ("e1000e", "e1000e"), None),
        (13, 0, ("e1000e", "e1000e"), "13 passthrough devices with I/O ports and 2 for other devices need 15 windows"),
    ],
)
def test_windows_of_io_ports(ours: int, left: int, others: tuple[str, ...], counted: str | None) -> None:
    """A q35 guest boots with 14 of them; what stays is on a port as well."""
    made = [placed(number, Bar(5, 128, IO)) for number in range(ours + left)]
    ports = tuple(port(2 + n, 1, "pcie-root-port", one) for n, (one, _) in enumerate(made[:ours]))
    topology = host(46, *(function for _, function in made))
    domain = replace(guest(), others=tuple(OtherDevice(n, "interface", None, model) for n, model in enumerate(others)))
    found = io_space(domain, topology, [one for one, _ in made], [PlannedExpander("", 1, 240, 0, ports)])
    message = f"the guest will hang at boot: {counted} of 4 KiB, SeaBIOS has room for 14"
    hint = "boot the VM with UEFI (domain.firmware.bootloader.efi), or pass through fewer of these devices"
    assert [(f.code, f.severity, f.message, f.hint) for f in found] == (
        [("io-space", "error", message, hint)] if counted else []
    )
