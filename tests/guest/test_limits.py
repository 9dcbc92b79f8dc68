"""The limits that cost a boot: what the guest makes of BARs beyond its address space, and of too many I/O ports."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from pcinuma.model import Options
from pcinuma.pipeline import Result, transform
from tests.support import hosts
from tests.support.domains import domain, hostdev
from tests.support.guest import GuestView, boot
from tests.support.stand_in import GuestFailed, big_bar

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

BUSES = ("21", "22", "23", "24", "a1", "a2", "a3", "a4")
GIB = 1 << 30


def with_bars(
    buses: tuple[str, ...], bars: list[dict[str, Any]], options: Options, *, uefi: bool, cell_gib: int = 1
) -> Result:
    """GPUs with these BARs, those below bus 0x80 on node 0, the others on node 1, each cell with so much memory."""
    functions = {f"0000:{bus}:00.0": int(bus >= "80") for bus in buses}
    details = {f"0000_{bus}_00_0": {"bars": bars} for bus in buses}
    devices = [hostdev(bdf, f"ua-gpu-{bus}") for bus, bdf in zip(buses, functions, strict=True)]
    xml = domain({0: 0, 1: 1}, devices).replace(f'memory="{GIB}"', f'memory="{cell_gib * GIB}"')
    if uefi:
        loader = '<loader readonly="yes" type="pflash">/usr/share/OVMF/OVMF_CODE_4M.fd</loader>'
        xml = xml.replace("hvm</type>", f"hvm</type>{loader}")
    result = transform(xml.encode(), options, hosts.host({0: "0-7", 1: "8-15"}, functions, **details))
    assert result.report.outcome == "changed", result.refusal
    return result


def lost(view: GuestView) -> list[str]:
    assert view.missing == []
    return sorted(alias for alias, device in view.devices.items() if not device.bars_assigned)


def mmio(result: Result) -> list[tuple[str, str]]:
    return [(f.code, f.severity) for f in result.report.findings if f.code == "mmio-window"]


def qemu_version() -> int:
    """The major version, which tells Debian 12's SeaBIOS (7.2's) from a newer one."""
    said = subprocess.run(["qemu-system-x86_64", "--version"], capture_output=True, text=True, check=True).stdout
    return int(said.partition("version ")[2].partition(".")[0])


@pytest.mark.parametrize("firmware", ["seabios", "ovmf"])
@pytest.mark.parametrize("choice", ["report", "apply"])
def test_eight_bars_of_128_gib(firmware: str, choice: str) -> None:
    """Without more address bits than QEMU's 40 SeaBIOS leaves out one BAR of the eight, OVMF all; with them none."""
    bars = [{"index": 2, "size": 128 * GIB, "flags": "0x14220c"}]
    result = with_bars(BUSES, bars, Options(mmio=choice), uefi=firmware == "ovmf")
    without = lost(boot(result.xml.decode(), firmware=firmware, stand_in=big_bar(128)))
    if choice == "apply":
        assert mmio(result) == [("mmio-window", "info")]
        assert without == []
    else:
        assert mmio(result) == [("mmio-window", "warning")]
        assert len(without) == (1 if firmware == "seabios" else 8)


@pytest.mark.parametrize("choice", ["report", "apply"])
@pytest.mark.parametrize("count", [2, 3])
def test_newer_seabios_loses_a_third_bar_in_an_amd_guest_of_40_bits(count: int, choice: str) -> None:
    """512 GiB from 1012 down, in eighths, would be at 0: QEMU reserves 1012 to 1024 GiB for AMD's CPUs."""
    bars = [{"index": 2, "size": 128 * GIB, "flags": "0x14220c"}]
    result = with_bars(BUSES[:count], bars, Options(mmio=choice), uefi=False, cell_gib=2)
    assert mmio(result) == ([("mmio-window", "info" if choice == "apply" else "warning")] if count == 3 else [])
    newer = qemu_version() >= 8
    left_out = 1 if newer and count == 3 and choice == "report" else 0
    assert len(lost(boot(result.xml.decode(), stand_in=big_bar(128), least_mib=4096))) == left_out


@pytest.mark.parametrize(("firmware", "size", "count"), [("seabios", 128, 3), ("ovmf", 64, 1)])
def test_what_fits_has_no_finding_and_is_all_there(firmware: str, size: int, count: int) -> None:
    bars = [{"index": 2, "size": size * GIB, "flags": "0x14220c"}]
    result = with_bars(BUSES[:count], bars, Options(), uefi=firmware == "ovmf")
    assert mmio(result) == []
    assert lost(boot(result.xml.decode(), firmware=firmware, stand_in=big_bar(size))) == []


def with_io_ports(count: int, *, uefi: bool = False) -> Result:
    bars = [{"index": 0, "size": 16 << 20, "flags": "0x40200"}, {"index": 5, "size": 128, "flags": "0x40101"}]
    buses = tuple(f"{0x20 + number:02x}" for number in range(count))
    return with_bars(buses, bars, Options(), uefi=uefi)


def io_space(result: Result) -> list[str]:
    return [finding.severity for finding in result.report.findings if finding.code == "io-space"]


def test_fourteen_devices_with_io_ports_boot_under_seabios() -> None:
    result = with_io_ports(14)
    assert io_space(result) == []
    assert boot(result.xml.decode(), stand_in=big_bar(1)).missing == []


def test_fifteen_hang_seabios_and_the_finding_says_so() -> None:
    result = with_io_ports(15)
    assert io_space(result) == ["error"]
    with pytest.raises(GuestFailed, match="out of I/O address space"):
        boot(result.xml.decode(), stand_in=big_bar(1))


def test_fifteen_boot_under_ovmf() -> None:
    result = with_io_ports(15, uefi=True)
    assert io_space(result) == []
    assert boot(result.xml.decode(), firmware="ovmf", stand_in=big_bar(1)).missing == []


def test_the_guest_has_the_hosts_distances() -> None:
    functions = {"0000:21:00.0": 0, "0000:a1:00.0": 1}
    devices = [hostdev("0000:21:00.0", "ua-gpu-a"), hostdev("0000:a1:00.0", "ua-gpu-b")]
    host = hosts.host({0: "0-7", 1: "8-15"}, functions)  # 10 to itself, 21 to the other
    result = transform(domain({0: 0, 1: 1}, devices).encode(), Options(distances="host"), host)
    view = boot(result.xml.decode())
    assert {number: node.distance for number, node in view.nodes.items()} == {0: (10, 21), 1: (21, 10)}
