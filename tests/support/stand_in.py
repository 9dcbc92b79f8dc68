"""The domain that a guest boots from: a stand-in with the same PCI controllers and guest addresses, and small devices.

`guest.boot` tells what differs from the domain it is made of.
"""

import copy
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
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
_OVMF_FOLDER = Path("/usr/share/OVMF")
_OVMF_PAIRS = (("OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"), ("OVMF_CODE.fd", "OVMF_VARS.fd"))
_AAVMF = (Path("/usr/share/AAVMF/AAVMF_CODE.fd"), Path("/usr/share/AAVMF/AAVMF_VARS.fd"))
_KERNELS = ("vmlinuz-*-cloud-*", "vmlinuz-*")
_CONSOLES = {"x86_64": "ttyS0", "aarch64": "ttyAMA0"}
# The port driver (hotplug, AER, PME) starts after the buses are scanned, and takes a quarter of the time.
_KERNEL_ARGUMENTS = "quiet rdinit=/init panic=-1 nokaslr mitigations=off initcall_blacklist=pcie_portdrv_init"


class GuestFailed(Exception):
    """The guest did not come up; the message says how, with the ends of the console and of the firmware's log."""


@dataclass(frozen=True)
class Route:
    """The way to a function: the number of its root bus, then slot.function of each bridge and of itself.

    It follows from the domain alone, and the guest's sysfs paths have it too, whatever numbers the buses between got.
    """

    root_bus: int
    steps: tuple[str, ...]


@dataclass(frozen=True)
class Expected:
    alias: str
    passthrough: bool
    route: Route


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


def stand_in_domain(
    xml: str, scratch: Path, ovmf: bool, stand_in: StandIn | None, least_mib: int
) -> tuple[etree._Element, list[Expected]]:
    given = libvirt.parse_domain(xml)
    _name_passthrough(given)
    source = libvirt.parse_domain(libvirt.define_and_dump(libvirt.dump_xml(given)))
    _name_others(source)
    os_type = source.find("os/type")
    arch = os_type.get("arch", "") if os_type is not None else ""
    if os_type is None or arch not in _CONSOLES:
        raise GuestFailed("only x86_64 and aarch64 domains can be booted here")

    domain = etree.Element("domain", {"type": "qemu"}, nsmap={"qemu": _QEMU})
    _add(domain, "name", text=libvirt.unique_domain_name())
    domain.append(_operating_system(os_type, scratch, ovmf))
    domain.extend(_processors_and_memory(source, ovmf, arch, least_mib))
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
            expected.append(Expected(_alias(device), _is_passthrough(device), route))
    _add(_add(devices, "serial", type="file"), "source", path=str(scratch / "console"))
    if arch == "x86_64":
        arguments += ["-chardev", f"file,id=firmware,path={scratch / 'firmware'}"]
        arguments += ["-device", "isa-debugcon,iobase=0x402,chardev=firmware"]
    domain.append(_commandline(arguments))
    return domain, expected


def _operating_system(os_type: etree._Element, scratch: Path, ovmf: bool) -> etree._Element:
    system = etree.Element("os")
    system.append(_copied(os_type))
    arch = os_type.get("arch", "")
    if ovmf or arch == "aarch64":
        code, variables = _ovmf_files() if arch == "x86_64" else _AAVMF
        _add(system, "loader", text=str(code), readonly="yes", type="pflash")
        _add(system, "nvram", text=str(scratch / "variables"), template=str(variables))
    _add(system, "kernel", text=str(_kernel(arch)))
    _add(system, "initrd", text=str(scratch / "initramfs"))
    _add(system, "cmdline", text=f"console={_CONSOLES[arch]} {_KERNEL_ARGUMENTS}")
    return system


def root_of(arch: str) -> Path | None:
    """Where a kernel and a busybox for the architecture are; None where they are not."""
    if arch == "x86_64":
        return Path("/")
    # make test-trixie unpacks them
    return Path(os.environ["PCINUMA_ARM64"]) if arch == "aarch64" and "PCINUMA_ARM64" in os.environ else None


def _kernel(arch: str) -> Path:
    root = root_of(arch)
    for pattern in _KERNELS:
        boot = root / "boot" if root is not None else Path("/nowhere")
        found: list[Path] = sorted(boot.glob(pattern), key=lambda path: path.stat().st_mtime)
        if found:
            return found[-1]
    raise GuestFailed(f"no kernel for {arch} (Debian: linux-image-cloud-{'amd64' if arch == 'x86_64' else 'arm64'})")


def _ovmf_files() -> tuple[Path, Path]:
    for code, variables in _OVMF_PAIRS:
        if (_OVMF_FOLDER / code).exists():
            return _OVMF_FOLDER / code, _OVMF_FOLDER / variables
    raise GuestFailed(f"no OVMF in {_OVMF_FOLDER} (Debian: ovmf)")


def _processors_and_memory(source: etree._Element, ovmf: bool, arch: str, least_mib: int) -> list[etree._Element]:
    """The domain's `<memory>`, `<vcpu>` and `<cpu>`, scaled down; the first cell alone has `least_mib`."""
    cpu = etree.Element("cpu", mode="custom", match="exact", check="none")
    _add(cpu, "model", text="qemu64" if arch == "x86_64" else "cortex-a72", fallback="forbid")
    if arch == "x86_64":
        # OVMF uses no more than 40 address bits on a CPU without 1 GiB pages.
        _add(cpu, "feature", name="pdpe1gb", policy="require")
    # EDK2 for arm64 ends in an exception with 96 MiB in the first cell
    extra_mib = 0 if arch == "x86_64" else 256
    for given in source.iterfind("cpu/maxphysaddr"):
        bits = _emulated_address_bits(given)
        _add(cpu, "maxphysaddr", mode="emulate", bits=str(bits))
        # OVMF before 2023 maps all of the address space by pages of 2 MiB, 8 bytes each, and dies without the memory.
        extra_mib = 5 * 2 ** (bits - 38) // 4 if ovmf and bits > 40 else 0

    extra_mib = max(extra_mib, least_mib - _CELL_MIB)

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


def _route(address: etree._Element, controllers: Mapping[int, etree._Element]) -> Route:
    steps = [f"{_number(address, 'slot'):02x}.{_number(address, 'function'):x}"]
    parent = controllers[_number(address, "bus")]
    while not (parent.get("model", "").endswith("-root") or parent.get("model") == "pcie-expander-bus"):
        address = _pci_address(parent)
        steps.insert(0, f"{_number(address, 'slot'):02x}.{_number(address, 'function'):x}")
        parent = controllers[_number(address, "bus")]
    target = parent.find("target[@busNr]")
    return Route(0 if target is None else int(target.get("busNr", "0"), 0), tuple(steps))
