"""Boots a small Linux from a libvirt domain XML, and says what its kernel sees of NUMA and PCI.

The domain that boots is a stand-in: the same PCI controllers and the same guest addresses, other devices behind them,
little memory, no KVM. `boot` tells what differs.
"""

import copy
import functools
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lxml import etree

from tests.support import libvirt

StandIn = Callable[[etree._Element], etree._Element | None]

_QEMU = "http://libvirt.org/schemas/domain/qemu/1.0"
_CELL_MIB = 96
_LONE_NODE_MIB = 192
_MOST_VCPUS = 4
_POLL_SECONDS = 0.05
_TAIL_LINES = 25
_EXPANSION_ROM = 6
_FATAL_CONSOLE = re.compile(r"Kernel panic.*|X64 Exception Type.*|BdsDxe: failed to load.*")
_FATAL_SEABIOS = re.compile(r"PCI: out of .*address space")
_SEABIOS_BUS = "pci_bios_init_bus_rec bus = "
_MOST_SEABIOS_BUSES = 1000
# An assertion that QEMU 10.0's emulation fails now and then, whatever the guest.
_QEMU_BUG = "iotlb_to_section"
_BUSYBOX = Path("/bin/busybox")
_KERNELS = ("vmlinuz-*-cloud-amd64", "vmlinuz-*")
# The port driver (hotplug, AER, PME) starts after the buses are scanned, and takes a quarter of the time.
_KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet rdinit=/init panic=-1 nokaslr mitigations=off initcall_blacklist=pcie_portdrv_init"
)
_OVMF_FOLDER = Path("/usr/share/OVMF")
_OVMF_PAIRS = (("OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"), ("OVMF_CODE.fd", "OVMF_VARS.fd"))

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


class GuestFailed(Exception):
    """The guest did not come up; the message says how, with the ends of the console and of the firmware's log."""


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


@dataclass(frozen=True)
class _Route:
    """The way to a function: the number of its root bus, then slot.function of each bridge and of itself.

    It follows from the domain alone, and the guest's sysfs paths have it too, whatever numbers the buses between got.
    """

    root_bus: int
    steps: tuple[str, ...]


@dataclass(frozen=True)
class _Expected:
    alias: str
    passthrough: bool
    route: _Route


def boot(xml: str, *, firmware: str | None = None, timeout: float = 240, stand_in: StandIn | None = None) -> GuestView:
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

    What has no PCI address is gone, and so is all that only tunes. A cell has 96 MiB (none stays none), and one CPU
    (none stays none) where the domain has more than four: numa_node depends on neither.

    Emulated CPUs have 40 guest physical address bits, where KVM may give the host's: a domain with large BARs shows
    here what it shows in production only if it has `<maxphysaddr>`; mode `passthrough` becomes `emulate` with this
    machine's bits. Under OVMF more than 42 bits take their time: a minute for 46.

    A device counts as present when QEMU's monitor and the guest's sysfs show the same function at the same BDF and by
    the same bridges as the domain has them. With bus numbers that collide, either alone may show another's.

    Raises libvirt.LibvirtRejected when libvirt refuses the domain, GuestFailed when the guest does not come up.
    """
    if firmware not in (None, "seabios", "ovmf"):
        raise ValueError(f"firmware is 'seabios' or 'ovmf', not {firmware!r}")
    try:
        return _boot_once(xml, firmware == "ovmf", timeout, stand_in)
    except GuestFailed as failure:
        if _QEMU_BUG not in str(failure):
            raise
        return _boot_once(xml, firmware == "ovmf", timeout, stand_in)


def _boot_once(xml: str, ovmf: bool, timeout: float, stand_in: StandIn | None) -> GuestView:
    with tempfile.TemporaryDirectory(prefix="pcinuma-guest-") as folder:
        scratch = Path(folder)
        (scratch / "initramfs").write_bytes(_initramfs())
        domain, expected = _stand_in_domain(xml, scratch, ovmf, stand_in)
        started = time.monotonic()
        with libvirt.running(domain, timeout=timeout) as guest:
            report = _await_report(guest, scratch, timeout)
            seconds = time.monotonic() - started
            monitored = list(_monitored_functions(guest.qmp("query-pci")))
    return _view(report, monitored, expected, seconds)


def big_bar(gibibytes: int) -> StandIn:
    """A stand-in for every passthrough device: a pci-testdev with a 64-bit memory BAR of that size and an I/O BAR.

    libvirt does not know that device, so it comes by `qemu:commandline`.
    """

    def stand_in(device: etree._Element) -> etree._Element:
        address = _pci_address(device)
        index = _number(address, "bus")
        parent = _pci_controllers(device.getroottree().getroot())[index]
        bus = _alias(parent) or ("pcie.0" if parent.get("model") == "pcie-root" else f"pci.{index}")
        properties = {
            "driver": "pci-testdev",
            "id": _alias(device),
            "bus": bus,
            "addr": f"{_number(address, 'slot'):#x}.{_number(address, 'function'):#x}",
            "multifunction": address.get("multifunction") == "on",
            "membar": gibibytes << 30,
        }
        # As JSON, like libvirt's own devices: QEMU makes the others first, when the root ports are not there yet.
        return _commandline(["-device", json.dumps(properties)])

    return stand_in


# The stand-in domain.


def _stand_in_domain(
    xml: str, scratch: Path, ovmf: bool, stand_in: StandIn | None
) -> tuple[etree._Element, list[_Expected]]:
    given = libvirt.parse_domain(xml)
    _name_passthrough(given)
    source = libvirt.parse_domain(libvirt.define_and_dump(libvirt.dump_xml(given)))
    _name_others(source)
    os_type = source.find("os/type")
    if os_type is None or os_type.get("arch") != "x86_64":
        raise GuestFailed("only x86_64 domains can be booted here")

    domain = etree.Element("domain", {"type": "qemu"}, nsmap={"qemu": _QEMU})
    _add(domain, "name", text=libvirt.unique_domain_name())
    domain.append(_operating_system(os_type, scratch, ovmf))
    domain.extend(_processors_and_memory(source, ovmf))
    _add(_add(domain, "features"), "acpi")
    # A panicking kernel reboots, and that must be the domain's end.
    _add(domain, "on_reboot", text="destroy")
    # QEMU runs as root then, may write to scratch, and the host's kernel image keeps its owner.
    _add(_add(domain, "seclabel", type="static", model="dac", relabel="no"), "label", text="+0:+0")

    devices = _add(domain, "devices")
    arguments = _arguments(source.find(f"{{{_QEMU}}}commandline"))
    controllers = _pci_controllers(source)
    expected = []
    for number, device in enumerate(source.iterfind("devices/*")):
        chosen = _chosen(device, number, scratch, stand_in)
        if chosen is None:
            continue
        if chosen.tag == f"{{{_QEMU}}}commandline":
            arguments += _arguments(chosen)
        else:
            devices.append(chosen)
        if _is_endpoint(device):
            route = _route(_pci_address(device), controllers)
            expected.append(_Expected(_alias(device), _is_passthrough(device), route))
    _add(_add(devices, "serial", type="file"), "source", path=str(scratch / "console"))
    arguments += ["-chardev", f"file,id=firmware,path={scratch / 'firmware'}"]
    arguments += ["-device", "isa-debugcon,iobase=0x402,chardev=firmware"]
    domain.append(_commandline(arguments))
    return domain, expected


def _operating_system(os_type: etree._Element, scratch: Path, ovmf: bool) -> etree._Element:
    system = etree.Element("os")
    system.append(_copied(os_type))
    if ovmf:
        code, variables = _ovmf_files()
        _add(system, "loader", text=str(code), readonly="yes", type="pflash")
        _add(system, "nvram", text=str(scratch / "variables"), template=str(variables))
    _add(system, "kernel", text=str(_kernel()))
    _add(system, "initrd", text=str(scratch / "initramfs"))
    _add(system, "cmdline", text=_KERNEL_ARGUMENTS)
    return system


def _kernel() -> Path:
    for pattern in _KERNELS:
        found = sorted(Path("/boot").glob(pattern), key=lambda path: path.stat().st_mtime)
        if found:
            return found[-1]
    raise GuestFailed("no kernel in /boot (Debian: linux-image-cloud-amd64)")


def _ovmf_files() -> tuple[Path, Path]:
    for code, variables in _OVMF_PAIRS:
        if (_OVMF_FOLDER / code).exists():
            return _OVMF_FOLDER / code, _OVMF_FOLDER / variables
    raise GuestFailed(f"no OVMF in {_OVMF_FOLDER} (Debian: ovmf)")


def _processors_and_memory(source: etree._Element, ovmf: bool) -> list[etree._Element]:
    """The domain's `<memory>`, `<vcpu>` and `<cpu>`, scaled down."""
    cpu = etree.Element("cpu", mode="custom", match="exact", check="none")
    _add(cpu, "model", text="qemu64", fallback="forbid")
    # OVMF uses no more than 40 address bits on a CPU without 1 GiB pages.
    _add(cpu, "feature", name="pdpe1gb", policy="require")
    extra_mib = 0
    for given in source.iterfind("cpu/maxphysaddr"):
        bits = _emulated_address_bits(given)
        _add(cpu, "maxphysaddr", mode="emulate", bits=str(bits))
        # OVMF before 2023 maps all of the address space by pages of 2 MiB, 8 bytes each, and dies without the memory.
        extra_mib = 5 * 2 ** (bits - 38) // 4 if ovmf and bits > 40 else 0

    cells = [_copied(cell) for cell in source.iterfind("cpu/numa/cell")]
    with_cpus = [bool(cell.get("cpus")) for cell in cells]
    if with_cpus != sorted(with_cpus, reverse=True):
        raise GuestFailed("libvirtd 9.0 crashes when a cell without CPUs stands before one with CPUs")
    keep_cpus = int(source.findtext("vcpu", "1")) <= _MOST_VCPUS
    vcpus = int(source.findtext("vcpu", "1")) if keep_cpus else 0
    mebibytes = 0
    for cell in cells:
        cell.set("unit", "MiB")
        if int(cell.get("memory", "0")):
            cell.set("memory", str(_CELL_MIB if mebibytes else _CELL_MIB + extra_mib))
            mebibytes += int(cell.get("memory", "0"))
        if cell.get("cpus") and not keep_cpus:
            cell.set("cpus", str(vcpus))
            vcpus += 1
        _drop_attributes(cell, "memAccess", "discard")

    if cells:
        _add(cpu, "numa").extend(cells)
    memory = etree.Element("memory", unit="MiB")
    memory.text = str(mebibytes or _LONE_NODE_MIB + extra_mib)
    vcpu = etree.Element("vcpu")
    vcpu.text = str(max(1, vcpus))
    return [memory, vcpu, cpu]


def _emulated_address_bits(maxphysaddr: etree._Element) -> int:
    if maxphysaddr.get("mode") == "emulate":
        return int(maxphysaddr.get("bits", "40"))
    match = re.search(r"address sizes\s*: (\d+) bits physical", Path("/proc/cpuinfo").read_text())
    return min(int(match.group(1)) if match else 40, int(maxphysaddr.get("limit", "64")))


# Devices: which become what.


def _chosen(device: etree._Element, number: int, scratch: Path, stand_in: StandIn | None) -> etree._Element | None:
    """What stands for the device, or None when the stand-in domain does without it."""
    if not _has_pci_address(device):
        # libvirt would add a USB controller and a balloon to a domain that does not say it has none.
        keep = device.tag in ("controller", "memballoon") and device.get("model") == "none"
        return _copied(device) if keep or _is_pci_controller(device) else None
    if _is_pci_controller(device):
        return _copied(device)
    if _is_passthrough(device):
        chosen = None if stand_in is None else stand_in(device)
        return _network_card(device, number, "virtio-non-transitional") if chosen is None else chosen
    match device.tag, device.get("type"):
        case "controller", "scsi" | "virtio-serial" | "usb" | "sata" | "ide":
            return _stripped(device, "master")
        case "interface", _:
            return _network_card(device, number, _model(device))
        case "disk", _:
            return _disk(device, scratch / f"disk{number}")
        case "memballoon", _:
            return _stripped(device)
        case "rng", _:
            card = _stripped(device)
            _add(card, "backend", text="/dev/urandom", model="random")
            return card
        case "input", "keyboard" | "mouse" | "tablet":
            return _stripped(device)
        case "video", _ if _model(device) in ("bochs", "vga", "cirrus"):
            return _stripped(device, "model")
    return _network_card(device, number, "virtio-non-transitional")


def _network_card(device: etree._Element, number: int, model: str) -> etree._Element:
    card = etree.Element("interface", type="user")
    _add(card, "mac", address=f"52:54:00:00:{number >> 8:02x}:{number & 0xFF:02x}")
    _add(card, "model", type=model)
    _add(card, "rom", enabled="no")
    card.extend(_copied(child) for child in device if child.tag in ("alias", "address"))
    return card


def _disk(device: etree._Element, path: Path) -> etree._Element:
    with path.open("wb") as file:
        file.truncate(1 << 20)
    disk = _stripped(device, "target")
    disk.set("type", "file")
    disk.set("device", "disk")
    _drop_attributes(disk, "snapshot")
    _add(disk, "driver", name="qemu", type="raw")
    _add(disk, "source", file=str(path))
    return disk


def _stripped(device: etree._Element, *kept: str) -> etree._Element:
    """The device with its attributes, alias, address, and of its other children the `kept` ones."""
    result = _copied(device)
    for child in list(result):
        if child.tag not in ("alias", "address", *kept):
            result.remove(child)
    return result


def _name_passthrough(domain: etree._Element) -> None:
    number = 0
    for device in domain.iterfind("devices/*"):
        # libvirt forgets aliases without the prefix.
        if _is_passthrough(device) and not _alias(device).startswith("ua-"):
            _set_alias(device, f"ua-standin-{number}")
            number += 1


def _name_others(domain: etree._Element) -> None:
    for device in domain.iterfind("devices/*"):
        if _is_endpoint(device) and not _alias(device):
            address = _pci_address(device)
            place = "-".join(address.get(part, "0").removeprefix("0x") for part in ("bus", "slot", "function"))
            _set_alias(device, f"ua-standin-{device.tag}-{place}")


def _is_passthrough(device: etree._Element) -> bool:
    kinds: Mapping[Any, Sequence[str]] = {"hostdev": ("pci", "mdev"), "interface": ("hostdev", "vdpa")}
    return device.get("type") in kinds.get(device.tag, ())


def _is_pci_controller(device: etree._Element) -> bool:
    return device.tag == "controller" and device.get("type") == "pci"


def _is_endpoint(device: etree._Element) -> bool:
    """A PCI device that QEMU's monitor shows by an alias: the machine's own disk controllers have none."""
    built_in = device.tag == "controller" and device.get("type") in ("sata", "ide") and device.get("index") == "0"
    return _has_pci_address(device) and not _is_pci_controller(device) and not built_in


# Elements and their parts.


def _add(parent: etree._Element, tag: str, text: str | None = None, **attributes: str) -> etree._Element:
    child = etree.SubElement(parent, tag, attributes)
    child.text = text
    return child


def _copied(element: etree._Element) -> etree._Element:
    return copy.deepcopy(element)


def _alias(device: etree._Element) -> str:
    alias = device.find("alias")
    return "" if alias is None else alias.get("name", "")


def _model(device: etree._Element) -> str:
    model = device.find("model")
    return "" if model is None else model.get("type", "")


def _set_alias(device: etree._Element, name: str) -> None:
    for alias in device.findall("alias"):
        device.remove(alias)
    _add(device, "alias", name=name)


def _drop_attributes(element: etree._Element, *names: str) -> None:
    for name in names:
        if name in element.attrib:
            del element.attrib[name]


def _has_pci_address(device: etree._Element) -> bool:
    return device.find("address[@type='pci']") is not None


def _pci_address(device: etree._Element) -> etree._Element:
    address = device.find("address[@type='pci']")
    if address is None:
        raise GuestFailed(f"libvirt gave {device.tag} {_alias(device)} no PCI address")
    return address


def _pci_controllers(domain: etree._Element) -> dict[int, etree._Element]:
    found = domain.iterfind("devices/controller[@type='pci']")
    return {int(controller.get("index", "0")): controller for controller in found}


def _number(address: etree._Element, part: str) -> int:
    return int(address.get(part, "0"), 0)


def _arguments(commandline: etree._Element | None) -> list[str]:
    return [] if commandline is None else [argument.get("value", "") for argument in commandline]


def _commandline(arguments: Sequence[str]) -> etree._Element:
    commandline = etree.Element(f"{{{_QEMU}}}commandline", nsmap={"qemu": _QEMU})
    for argument in arguments:
        _add(commandline, f"{{{_QEMU}}}arg", value=argument)
    return commandline


def _route(address: etree._Element, controllers: Mapping[int, etree._Element]) -> _Route:
    steps = [f"{_number(address, 'slot'):02x}.{_number(address, 'function'):x}"]
    parent = controllers[_number(address, "bus")]
    while not (parent.get("model", "").endswith("-root") or parent.get("model") == "pcie-expander-bus"):
        address = _pci_address(parent)
        steps.insert(0, f"{_number(address, 'slot'):02x}.{_number(address, 'function'):x}")
        parent = controllers[_number(address, "bus")]
    target = parent.find("target[@busNr]")
    return _Route(0 if target is None else int(target.get("busNr", "0"), 0), tuple(steps))


# The guest's side.


@functools.cache
def _initramfs() -> bytes:
    """A cpio archive (`newc`) with busybox and the script that makes the report."""
    if not _BUSYBOX.exists():
        raise GuestFailed("no /bin/busybox (Debian: busybox-static)")
    folders = [(name, 0o040755, b"", 0) for name in ("bin", "dev", "proc", "sys")]
    files = [
        ("dev/console", 0o020600, b"", 5),
        ("bin/busybox", 0o100755, _BUSYBOX.read_bytes(), 0),
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
    expected: Sequence[_Expected],
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


def _route_of_path(path: str) -> _Route:
    """`/sys/devices/pci0000:f8/0000:f8:00.0/0000:f9:00.0` is root bus 0xf8, then 00.0, 00.0."""
    root, *functions = path.removeprefix("/sys/devices/").split("/")
    return _Route(int(root.rpartition(":")[2], 16), tuple(function.rpartition(":")[2] for function in functions))
