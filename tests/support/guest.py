"""Boots a small Linux from a libvirt domain XML, and says what its kernel sees of NUMA and PCI.

The domain that boots is a stand-in: the same PCI controllers and the same guest addresses, other devices behind them,
little memory, no KVM. `boot` tells what differs.
"""

import functools
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import libvirt
from tests.support.stand_in import Expected, GuestFailed, Route, StandIn, root_of, stand_in_domain

_POLL_SECONDS = 0.05
_TAIL_LINES = 25
_EXPANSION_ROM = 6
_FATAL_CONSOLE = re.compile(r"Kernel panic.*|X64 Exception Type.*|Synchronous Exception.*|BdsDxe: failed to load.*")
_FATAL_SEABIOS = re.compile(r"PCI: out of .*address space")
_SEABIOS_BUS = "pci_bios_init_bus_rec bus = "
_MOST_SEABIOS_BUSES = 1000
# QEMU's emulation dies now and then, whatever the guest: of an assertion (10.0), of a segmentation fault (7.2).
_QEMU_BUGS = ("iotlb_to_section", "reason=crashed")
_MOST_QEMU_BUGS = 2  # in a row, as seen; a domain of which QEMU dies always is our fault

# Each line of the report is a word and its values, separated by tabs. The loops use shell builtins alone: to start a
# process is what takes time under emulation.
_INIT = r"""#!/bin/busybox sh
box=/bin/busybox
$box mount -t proc proc /proc
$box mount -t sysfs sysfs /sys
tab="$($box printf '\t')"
echo
for link in /sys/bus/pci/devices/*; do
    cd -P "$link" || continue
    read -r node <numa_node; read -r class <class; read -r vendor <vendor; read -r device <device
    resources=
    while read -r start end flags; do resources="$resources $start"; done <resource
    echo "pci$tab${link##*/}$tab$node$tab$class$tab$vendor$tab$device$tab$PWD$tab$resources"
done
for link in /sys/devices/system/node/node[0-9]*; do
    cd "$link" || continue
    read -r distance <distance; read -r _ _ _ memory _ <meminfo
    cpus="$($box cat cpulist)"  # comes empty when read byte by byte, as read does
    echo "node$tab${link##*/node}$tab$cpus$tab$memory$tab$distance"
done
telling='no space|failed to assign|can.t (assign|claim)|onflict|bridge configuration|PXB|Faking|SRAT: (PXM|Node)'
$box dmesg | $box grep -E "$telling" | $box sed "s/^/kernel$tab/"
echo "@END@"
exec $box sleep 100000
"""
_END = "@END@"


@dataclass(frozen=True)
class GuestPci:
    """One PCI function in the guest's sysfs.

    `pci_class`, `vendor`, `device` as sysfs has them (`0x020000`); `path` is the real path, which names the root bus
    and every bridge above; `bars_assigned` is false when a memory or I/O BAR has no address.
    """

    numa_node: int
    pci_class: str
    vendor: str
    device: str
    path: str
    bars_assigned: bool


@dataclass(frozen=True)
class GuestDevice:
    """A device of the domain as the guest's kernel sees it."""

    bdf: str
    numa_node: int
    bars_assigned: bool


@dataclass(frozen=True)
class GuestNode:
    """A NUMA node of the guest: CPU list as the kernel writes it, memory in KiB, distances by ascending node."""

    cpus: str
    mem_kib: int
    distance: tuple[int, ...]


@dataclass(frozen=True)
class GuestView:
    """What the guest's kernel sees.

    `devices` are the passthrough devices by alias, `others` the emulated ones on PCI; `pci` has every function by BDF,
    bridges included. `missing` are the aliases of devices, of either kind, that the domain has and the guest has not.
    `seconds` is the time from the start of QEMU to the guest's report.
    """

    devices: dict[str, GuestDevice]
    others: dict[str, GuestDevice]
    pci: dict[str, GuestPci]
    nodes: dict[int, GuestNode]
    kernel_messages: list[str]
    missing: list[str]
    seconds: float


def boot(
    xml: str,
    *,
    firmware: str | None = None,
    timeout: float = 150,
    stand_in: StandIn | None = None,
    least_mib: int = 0,
) -> GuestView:
    """Boots a stand-in for the domain under `firmware` (`seabios`, which is the default, or `ovmf`).

    libvirt first defines the domain as it is, so that every device has the guest address it would have in production;
    only then are devices exchanged. Kept: machine type, PCI controllers, cells with their ids and distances,
    `<maxphysaddr>`, `qemu:commandline`. Exchanged, at the same guest address and under the same alias:

    - passthrough (`<hostdev>` pci and mdev, `<interface>` hostdev and vdpa): a virtio NIC, whose BARs are small.
      `stand_in` is asked first, with the element as libvirt dumps it, in its tree: it returns another device, a
      `qemu:commandline` (see `big_bar`), or None for the NIC. A device without an alias of its own is `ua-standin-N`,
      N counting those in document order;
    - any other interface: the same model on a user network. A virtio disk: an empty file;
    - scsi, virtio-serial, usb and sata controllers, rng, balloon, video and virtio inputs stay, without what ties them
      to a host; whatever else sits on PCI becomes a virtio NIC. Those without an alias are called by element and
      address, `ua-standin-rng-12-00-0`.

    What has no PCI address is gone, and so is all that only tunes. A cell has 96 MiB (none stays none), the first one
    `least_mib` at least; and one CPU (none stays none) where the domain has more than four: numa_node depends on neither.

    Emulated CPUs have 40 guest physical address bits, where KVM may give the host's: a domain with large BARs shows
    here what it shows in production only if it has `<maxphysaddr>`; mode `passthrough` becomes `emulate` with this
    machine's bits. Under OVMF more than 42 bits take their time: a minute for 46.

    A device counts as present when QEMU's monitor and the guest's sysfs show the same function at the same BDF and by
    the same bridges as the domain has them. With bus numbers that collide, either alone may show another's.

    Raises libvirt.LibvirtRejected when libvirt refuses the domain, GuestFailed when the guest does not come up.
    """
    if firmware not in (None, "seabios", "ovmf"):
        raise ValueError(f"firmware is 'seabios' or 'ovmf', not {firmware!r}")
    for attempt in range(_MOST_QEMU_BUGS + 1):
        try:
            return _boot_once(xml, firmware == "ovmf", timeout, stand_in, least_mib)
        except GuestFailed as failure:
            # a guest that the busy machine starved comes up the second time; one that hangs of itself hangs again
            is_starved = "no report from the guest" in str(failure) and not attempt
            is_bug = any(told in str(failure) for told in _QEMU_BUGS) and attempt < _MOST_QEMU_BUGS
            if not is_starved and not is_bug:
                raise
    raise AssertionError("the last attempt returns or raises")


def _boot_once(xml: str, ovmf: bool, timeout: float, stand_in: StandIn | None, least_mib: int) -> GuestView:
    with tempfile.TemporaryDirectory(prefix="pcinuma-guest-") as folder:
        scratch = Path(folder)
        domain, expected = stand_in_domain(xml, scratch, ovmf, stand_in, least_mib)
        (scratch / "initramfs").write_bytes(_initramfs(domain.find("os/type").get("arch")))  # type: ignore[union-attr]
        started = time.monotonic()
        with libvirt.running(domain, timeout=timeout) as guest:
            report = _await_report(guest, scratch, timeout)
            seconds = time.monotonic() - started
            monitored = list(_monitored_functions(guest.qmp("query-pci")))
    return _view(report, monitored, expected, seconds)


# The guest's side.


@functools.cache
def _initramfs(arch: str) -> bytes:
    """A cpio archive (`newc`) with busybox and the script that makes the report."""
    root = root_of(arch)
    found = [root / place for place in ("bin/busybox", "usr/bin/busybox")] if root is not None else []
    busybox = next((path for path in found if path.exists()), None)
    if busybox is None:
        raise GuestFailed(f"no busybox for {arch} (Debian: busybox-static)")
    folders = [(name, 0o040755, b"", 0) for name in ("bin", "dev", "proc", "sys")]
    files = [
        ("dev/console", 0o020600, b"", 5),
        ("bin/busybox", 0o100755, busybox.read_bytes(), 0),
        ("init", 0o100755, _INIT.encode(), 0),
        ("TRAILER!!!", 0, b"", 0),
    ]
    archive = bytearray()
    for inode, (name, mode, content, major) in enumerate([*folders, *files], start=1):
        encoded = name.encode() + b"\0"
        numbers = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, major, min(major, 1), len(encoded), 0)
        archive += b"070701" + b"".join(b"%08x" % number for number in numbers) + encoded
        archive += bytes(-len(archive) % 4) + content
        archive += bytes(-len(archive) % 4)
    return bytes(archive)


def _await_report(guest: libvirt.RunningDomain, scratch: Path, timeout: float) -> list[str]:
    """The lines of the guest's report. Raises GuestFailed as soon as it is clear that none will come."""
    deadline = time.monotonic() + timeout
    while True:
        console, firmware = _text(scratch / "console"), _text(scratch / "firmware")
        if _END in console:
            return console.splitlines()
        problem = _visible_problem(console, firmware)
        if not problem and time.monotonic() > deadline:
            problem = f"no report from the guest in {timeout:.0f} s"
        if not problem:
            try:
                guest.check()
            except libvirt.DomainDied as death:
                problem = f"the guest died: {death}"
        if problem:
            raise GuestFailed(f"{problem}\n{_tail('console', console)}\n{_tail('firmware', firmware)}")
        time.sleep(_POLL_SECONDS)


def _visible_problem(console: str, firmware: str) -> str | None:
    """What a console (kernel, OVMF) or firmware log (SeaBIOS) tells of a boot that will come to nothing."""
    if match := _FATAL_CONSOLE.search(console):
        return f"the guest's console says: {match[0]}"
    if match := _FATAL_SEABIOS.search(firmware):
        return f"SeaBIOS gives up: {match[0]}"
    if firmware.count(_SEABIOS_BUS) > _MOST_SEABIOS_BUSES:
        return "SeaBIOS numbers buses without end, as it does when bus numbers collide"
    return None


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _tail(title: str, text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join([f"--- end of {title} ---", *(lines[-_TAIL_LINES:] or ["(empty)"])])


@dataclass(frozen=True)
class _Monitored:
    """A PCI function as QEMU's monitor has it. `bars` are the numbers of its memory and I/O BARs, assigned or not."""

    alias: str
    vendor: str
    device: str
    bars: tuple[int, ...]


_NOTHING = _Monitored("", "", "", ())


def _monitored_functions(buses: Any) -> Iterator[tuple[str, _Monitored]]:
    """Each function in QMP's `query-pci` with its BDF, which is not unique when bus numbers collide."""
    for bus in buses:
        for function in bus.get("devices", ()):
            bdf = f"0000:{function['bus']:02x}:{function['slot']:02x}.{function['function']:x}"
            numbers = function["id"]
            bars = tuple(region["bar"] for region in function["regions"] if region["bar"] < _EXPANSION_ROM)
            vendor, device = f"{numbers['vendor']:#06x}", f"{numbers['device']:#06x}"
            yield bdf, _Monitored(function["qdev_id"], vendor, device, bars)
            if "pci_bridge" in function:
                yield from _monitored_functions([function["pci_bridge"]])


def _view(
    report: Sequence[str],
    monitored: Sequence[tuple[str, _Monitored]],
    expected: Sequence[Expected],
    seconds: float,
) -> GuestView:
    bars = {bdf: function.bars for bdf, function in monitored}
    pci: dict[str, GuestPci] = {}
    nodes: dict[int, GuestNode] = {}
    messages: list[str] = []
    for line in report:
        match line.split("\t"):
            case ["pci", bdf, node, pci_class, vendor, device, path, resources]:
                starts = [int(start, 16) for start in resources.split()]
                # Linux wipes what it cannot assign, size and flags too: that a BAR exists only QEMU tells.
                assigned = all(starts[bar] for bar in bars.get(bdf, ()))
                pci[bdf] = GuestPci(int(node), pci_class, vendor, device, path, assigned)
            case ["node", number, cpus, memory, distance]:
                nodes[int(number)] = GuestNode(cpus, int(memory), tuple(int(d) for d in distance.split()))
            case ["kernel", message]:
                messages.append(message)

    by_alias = {function.alias: (bdf, function) for bdf, function in monitored if function.alias}
    found: dict[bool, dict[str, GuestDevice]] = {True: {}, False: {}}
    missing = []
    for wanted in expected:
        bdf, function = by_alias.get(wanted.alias, ("", _NOTHING))
        shown = pci.get(bdf)
        if shown and _is_same(shown, function) and _route_of_path(shown.path) == wanted.route:
            found[wanted.passthrough][wanted.alias] = GuestDevice(bdf, shown.numa_node, shown.bars_assigned)
        else:
            missing.append(wanted.alias)
    return GuestView(found[True], found[False], pci, nodes, messages, missing, seconds)


def _is_same(shown: GuestPci, function: _Monitored) -> bool:
    return (shown.vendor, shown.device) == (function.vendor, function.device)


def _route_of_path(path: str) -> Route:
    """`/sys/devices/pci0000:f8/0000:f8:00.0/0000:f9:00.0` is root bus 0xf8, then 00.0, 00.0."""
    root, *functions = path.removeprefix("/sys/devices/").split("/")
    return Route(int(root.rpartition(":")[2], 16), tuple(function.rpartition(":")[2] for function in functions))
