"""Whole domains on whole hosts, for the target ``grammar``: everything a domain may have that pcinuma looks at.

The random cases of the property tests are made of what must work, so that libvirt can be asked about them as well. Here
is also what another hand left: expanders of KubeVirt's own placement, addresses of every kind, aarch64, vGPUs and vDPA,
an output of ours that someone has edited since, or that went through KubeVirt's structs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hypothesis import strategies as st
from lxml import etree

from fuzz.oracles import must_agree, must_hold, seats
from pcinuma.discover import ReadHost
from pcinuma.errors import PcinumaError
from pcinuma.model import CpuSet, HostFunction, HostNode, HostQuery, HostTopology, Options, PciAddress
from pcinuma.options import CHOICES
from pcinuma.pipeline import Result, transform
from tests.property.test_pipeline import BARS, CHAINS, bdfs
from tests.support import kubevirt

_UUID = "c0ffee00-0000-4000-8000-{:012x}"
_MACHINES = (
    *[("x86_64", "q35")] * 8, ("x86_64", "pc-q35-9.2"), ("aarch64", "virt"), ("aarch64", "virt-9.2"),
    ("x86_64", "pc-i440fx-9.2"), ("s390x", "s390-ccw-virtio"),
)  # fmt: skip
_EXPANDERS = ("pcie-expander-bus",) * 6 + ("pxb", "pci-expander-bus")
_NUMBERS: dict[str, Callable[[int], str]] = {
    "hex": "{:#x}".format,
    "padded": "0x{:02x}".format,
    "decimal": str,
    "octal": lambda n: f"0{n:o}",
    "spaced": " {}".format,
}
_OTHERS = (
    "<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>",
    "<!-- <hostdev> ]]> -->",
    "<?keep <hostdev>?>",
    "<memballoon model='virtio-non-transitional'>\n<stats period='10'></stats></memballoon>",
    "<memballoon model='none'/>",
    "<x:y xmlns:x='urn:x' a='>'><![CDATA[ <address> ]]></x:y>",
    "<disk type='file' device='disk'><target dev='vda' bus='virtio'/></disk>",
    "<disk type='file' device='disk'><target dev='sda' bus='scsi'/></disk>",
    "<controller type='scsi' index='0' model='virtio-scsi'/>",
    "<controller type='usb' index='0' model='none'/>",
    "<controller type='pci' index='0' model='pcie-root'><pcihole64 unit='KiB'>0</pcihole64></controller>",
    "<video><model type='vga' heads='1'/></video>",
    "<graphics type='vnc' port='-1'/>",
    "<interface type='ethernet'><target dev='placeholder-0' managed='no'/></interface>",
    "<hostdev mode='subsystem' type='usb'><source><address bus='1' device='2'/></source></hostdev>",
    "<hostdev mode='subsystem' type='scsi_host'><source protocol='vhost' wwpn='naa.5'/></hostdev>",
    "<iommu model='smmuv3'><driver pciBus='1'/></iommu>",
    "<rng><alias name='ua-pcinuma-cell0'/></rng>",
    "<watchdog model='itco' action='reset'/>",
)


T = TypeVar("T")


@functools.cache
def _below(count: int) -> st.SearchStrategy[int]:
    return st.integers(0, count - 1)


def _one(draw: st.DrawFn, values: Sequence[T]) -> T:
    """As ``st.sampled_from``, of which a case would make hundreds: half of its time."""
    return values[draw(_below(len(values)))]


@dataclass(frozen=True)
class Case:
    """``version`` is the KubeVirt whose structs the output goes through; None where it does not. ``pictures``: whether
    it is drawn as well, which takes as long as all the rest."""

    xml: bytes
    host: HostTopology
    options: Options
    version: str | None = None
    pictures: bool = True

    @property
    def read_host(self) -> ReadHost:
        return _reader(self.host)


def _reader(host: HostTopology) -> ReadHost:
    """The host, that says only what it is asked for, as a real one does."""

    def read(query: HostQuery) -> HostTopology:
        mdevs = {uuid: parent for uuid, parent in host.mdev_parents.items() if uuid in query.mdevs}
        vdpas = {name: parent for name, parent in host.vdpa_parents.items() if name in query.vdpas}
        wanted = query.functions.union(mdevs.values(), vdpas.values())
        functions = {address: found for address, found in host.functions.items() if address in wanted}
        pfs = {f.physfn for f in functions.values() if f.node is None and f.physfn in host.functions}
        functions.update({address: host.functions[address] for address in pfs if address is not None})
        bits = host.address_bits if query.address_bits else None
        return HostTopology(host.nodes, functions, mdevs, vdpas, bits)

    return read


def must_hold_of(case: Case) -> None:
    """All that must hold of a domain, and that it comes through KubeVirt's structs with every device in its place."""
    result = must_hold(case.xml, case.options, case.read_host)
    must_agree(case.xml, case.options, case.read_host, result, pictures=case.pictures)
    if case.version is None or result is None or result.report.outcome != "changed":
        return
    if any(controller.is_expander and not controller.is_ours for controller in result.before.controllers):
        return  # the structs drop the node of those too, which nobody restores
    try:
        given = kubevirt.through_structs(result.xml.decode(), case.version)
    except (kubevirt.GoParseError, UnicodeDecodeError):
        return
    again = must_hold(given.encode(), case.options, case.read_host)
    if again is None:
        # the structs write index="" and bus="" for what was not there, which they would of the input as well
        given = kubevirt.through_structs(case.xml.decode(), case.version)
        assert must_hold(given.encode(), case.options, case.read_host) is None, "our answer is bad input"
        return
    assert placed(again) == placed(result), "KubeVirt's structs have moved a device"


def placed(result: Result) -> list[tuple[object, ...]]:
    """The devices that have been placed, and where, in any order."""
    return sorted((seat for seat in seats(result) if seat[1] in ("placed", "approximate")), key=str)


# --- hosts -----------------------------------------------------------------------------------------------------


@st.composite
def hosts(draw: st.DrawFn) -> HostTopology:
    """PFs with their VFs, several functions of a slot, parents of vGPUs and vDPA; sockets and distances, or none."""
    ids = _one(draw, [[0], [0, 1], [0, 1], [0, 1, 2, 3], [1, 0, 7], [255, 2]])
    nodes = {}
    for position, number in enumerate(sorted(ids)):
        cpus = CpuSet(range(position * 8, position * 8 + 8)) if draw(_below(5)) else CpuSet()
        distances = {other: 10 if other == number else _one(draw, [12, 21, 32, 255]) for other in ids}
        package = _one(draw, [None, 0, 1])
        nodes[number] = HostNode(number, cpus, 1 << 20, distances if draw(_below(5)) else {}, package)
    functions: dict[PciAddress, HostFunction] = {}
    for address in draw(st.lists(bdfs, min_size=_one(draw, [1, 2, 5]), max_size=9, unique=True)):
        node: int | None = _one(draw, [*ids, *ids, *ids, None])
        above = _one(draw, CHAINS)
        function = HostFunction(
            address,
            node,
            None if node is not None else "its numa_node is -1",
            root_complex=_one(draw, [None, "pci0000:00", "pci0000:80", "pci10000:00"]),
            bridges=tuple(PciAddress(0, 0x70 + depth, slot, 0) for depth, slot in enumerate(above)),
            bars=_one(draw, BARS),
            vendor=_one(draw, [None, 0x10DE, 0x15B3]),
            pci_class=_one(draw, [None, 0x030200, 0x030000, 0x020000]),
            iommu_group=_one(draw, [None, 1, 2]),
        )
        functions[address] = function
        for number in range(_one(draw, [0, 0, 0, 1, 3])):
            vf = PciAddress(address.domain, address.bus, 1 + (number + 2) // 8, (number + 2) % 8)
            own = _one(draw, [node, node, None])
            problem = None if own is not None else "its numa_node is -1"
            functions.setdefault(vf, replace(function, address=vf, node=own, node_problem=problem, physfn=address))
    parents = [*functions, PciAddress(0, 0xFE, 0, 0)]  # one that the host does not say more of
    mdevs = {_UUID.format(n): _one(draw, parents) for n in range(draw(_below(4)))}
    vdpas = {f"vhost-vdpa-{n}": _one(draw, parents) for n in range(draw(_below(3)))}
    return HostTopology(nodes, functions, mdevs, vdpas, _one(draw, [None, 39, 46, 52]))


# --- domains ---------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    host = draw(hosts())
    xml = draw(_domains(host))
    for _ in range(_one(draw, [0, 0, 1, 1, 2])):
        xml = draw(_later(xml, host))
    written = _as_written(draw, xml)
    version = _one(draw, [None, *kubevirt.VERSIONS])
    return Case(written, host, draw(_options()), version, draw(_below(4)) == 0)


@st.composite
def _options(draw: st.DrawFn) -> Options:
    chosen = {name.replace("-", "_"): _one(draw, values) for name, values in CHOICES.items()}
    # what changes most most often
    policy = _one(draw, ["best-effort", "best-effort", chosen["policy"]])
    return Options(**{**chosen, "policy": policy}, enabled=draw(_below(31)) != 7)


def _as_written(draw: st.DrawFn, xml: str) -> bytes:
    """The text with one hand's quotes, line breaks, empty elements and encoding."""
    if draw(st.booleans()):
        xml = re.sub(r"='([^'\"<>]*)'", r'="\1"', xml)
    if draw(st.booleans()):
        xml = re.sub(r"<(\w+)((?:\s+\w+=(?:'[^']*'|\"[^\"]*\"))*)\s*/>", r"<\1\2></\1>", xml)
    xml = _one(draw, [xml, xml, xml.replace("\n", "\r\n"), xml.replace("\n", ""), xml.replace("  ", "\t")])
    encoding = _one(draw, [None, None, None, "UTF-8", "utf-16", "iso-8859-1"])
    if encoding is None:
        return xml.encode()
    return f"<?xml version='1.0' encoding='{encoding}'?>\n{xml}".encode(encoding)


@st.composite
def _domains(draw: st.DrawFn, host: HostTopology) -> str:
    ids = _one(draw, [[0], *[[0, 1]] * 4, [1, 0], [0, 1, 2], [0, 1, 2, 3], [3, 5], []])
    arch, machine = _one(draw, _MACHINES)
    declared = _one(draw, ["", " xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'"])
    lines = [f"<domain type='kvm'{declared}>"]
    lines += ["  <name>any</name>", "  <memory unit='GiB'>64</memory>"]
    firmware = _one(draw, ["", " firmware='efi'"])
    lines.append(f"  <os{firmware}><type arch='{arch}' machine='{machine}'>hvm</type></os>")
    late = draw(st.booleans())  # KubeVirt writes the devices first, libvirt last
    devices = draw(_devices(host, ids))
    if not late:
        lines += devices
    lines.append(_one(draw, ["  <cpu mode='host-passthrough'>", "  <cpu mode='custom'>", "  <cpu>"]))
    if bits := _one(draw, ["", "", "", "mode='passthrough'", "mode='emulate' bits='40'"]):
        lines.append(f"    <maxphysaddr {bits}/>")
    if ids:
        lines += ["    <topology sockets='1' cores='4' threads='2'/>", "    <numa>"]
        for position, cell in enumerate(ids):
            memory = _one(draw, ["1024", "8", "0"])
            cpus = _one(draw, [f"{2 * position}-{2 * position + 1}", f"{position},{position + 4}", ""])
            within = _one(draw, ["", "", f"<distances><sibling id='{cell}' value='10'/></distances>"])
            lines.append(
                f"      <cell id='{cell}' cpus='{cpus}' memory='{memory}' unit='GiB'" + f">{within}</cell>"
                if within
                else f"      <cell id='{cell}' cpus='{cpus}' memory='{memory}'/>"
            )
        lines.append("    </numa>")
    lines.append("  </cpu>")
    nodes = sorted(host.nodes)
    pins = _one(draw, ["none", "own", "wide"])
    if pins != "none":
        sets = [f"{n}" if pins == "own" else f"{n}-{n + 9},^{n + 1}" for n in range(0, 8 * len(nodes), 3)]
        lines.append("  <cputune>")
        lines += [f"    <vcpupin vcpu='{v}' cpuset='{_one(draw, sets)}'/>" for v in range(2 * len(ids))]
        lines.append("  </cputune>")
    if draw(_below(6)):
        lines.append("  <numatune>")
        for cell in ids:
            if draw(_below(5)):
                backing = nodes[cell % len(nodes)]
                nodeset = _one(draw, [*[f"{backing}"] * 3, f"{nodes[0]},{nodes[-1]}", "0-1"])
                lines.append(f"    <memnode cellid='{cell}' mode='strict' nodeset='{nodeset}'/>")
        lines.append("  </numatune>")
    if late:
        lines += devices
    if draw(_below(5)) == 0:
        alias = _one(draw, ["ua-dev0", "ua-dev1", "other"])
        own = _one(draw, ["x-nv-gpudirect-clique", "x-other"])
        lines.append(
            "  <qemu:override xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>"
            f"<qemu:device alias='{alias}'><qemu:frontend><qemu:property name='{own}' type='unsigned' value='1'/>"
            "</qemu:frontend></qemu:device></qemu:override>"
        )
    return "\n".join([*lines, "</domain>"])


@st.composite
def _devices(draw: st.DrawFn, host: HostTopology, ids: Sequence[int]) -> list[str]:
    controllers, buses = draw(_controllers(ids))
    found = draw(_passthrough(host, buses))
    found += draw(st.lists(st.sampled_from(_OTHERS), max_size=4, unique=True))
    # KubeVirt's order, libvirt's, or anyone's
    arranged = _one(draw, ["devices", "controllers", "mixed"])
    rows = found + controllers if arranged == "devices" else controllers + found
    if arranged == "mixed":
        rows = draw(st.permutations(rows))
    return ["  <devices>", *[f"    {row}" for row in rows], "  </devices>"]


@st.composite
def _controllers(draw: st.DrawFn, ids: Sequence[int]) -> tuple[list[str], list[int]]:
    """What is there already, by libvirt, by KubeVirt's own placement or by hand; and the buses a device may be on."""
    rows: list[str] = []
    buses: list[int] = [0]
    index = _one(draw, [*[1] * 9, 2, 10, 30, 240])

    def controller(model: str, at: str = "", target: str = "", alias: str = "") -> int:
        nonlocal index
        rows.append(f"<controller type='pci' index='{index}' model='{model}'>{target}{alias}{at}</controller>")
        index += _one(draw, [1, 1, 1, 1, 2, 5])
        return index

    def address(bus: int, slot: int, function: int = 0) -> str:
        return f"<address type='pci' domain='0x0000' bus='0x{bus:02x}' slot='0x{slot:02x}' function='0x{function:x}'/>"

    for number in range(_one(draw, [0, 0, 1, 3, 9])):
        buses.append(index)
        hotplug = _one(draw, ["", "", "<target chassis='1' port='0x10' hotplug='off'/>"])
        controller("pcie-root-port", _one(draw, ["", address(0, 2 + number // 8, number % 8)]), hotplug)
    bus_nr = 255
    for number in range(_one(draw, [0, 0, 0, 1, 2])):
        expander, ports = index, draw(_below(4))
        bus_nr -= _one(draw, [ports + 1, ports + 1, 2, 1, 60])
        said = _one(draw, ["busNr", "busNr", ""]) and f" busNr='{max(bus_nr, 1)}'"
        node = _one(draw, [*ids, *ids, 7, None])
        inside = "" if node is None else f"<node>{node}</node>"
        model = _one(draw, _EXPANDERS)
        controller(
            model,
            _one(draw, ["", address(0, 16 + number)]),
            f"<target{said}>{inside}</target>" if said or inside else "",
        )
        buses.append(expander)
        for slot in range(ports):
            port = index
            buses.append(port)
            controller("pcie-root-port", address(expander, slot))
            if draw(_below(5)) == 0:
                upstream = index
                controller("pcie-switch-upstream-port", address(port, 0))
                for below in range(draw(_below(3))):
                    buses.append(index)
                    controller("pcie-switch-downstream-port", address(upstream, below))
    if draw(_below(7)) == 0:
        controller("dmi-to-pci-bridge")
        buses.append(index)
        controller("pci-bridge", _one(draw, ["", address(max(index - 1, 0), 1)]))
    if draw(_below(9)) == 0:
        rows.append("<controller type='pci' model='pcie-root-port'/>")
    return rows, [*buses, index + 3]


@st.composite
def _passthrough(draw: st.DrawFn, host: HostTopology, buses: Sequence[int]) -> list[str]:
    known = sorted(host.functions)
    least = _one(draw, [0, 1, min(4, len(known))])
    sources = draw(st.lists(st.sampled_from(known), min_size=least, max_size=9, unique=True))
    if draw(_below(7)) == 0:
        sources.append(draw(bdfs.filter(lambda bdf: bdf not in host.functions)))
    form = _one(draw, sorted(_NUMBERS))
    taken: set[tuple[int, int, int]] = set()
    rows: list[str] = []

    def guest() -> str:
        kind = _one(draw, ["none"] * 6 + ["some"] * 4 + ["odd"])
        if kind == "none":
            return ""
        if kind == "odd":
            odd = "type='unassigned'", "type='pci'", "type='pci' domain='0' bus='0' slot='0' function='0'", "type='ccw'"
            return f"<address {_one(draw, odd)}/>"
        slot = _one(draw, [0, 0, 0, 1, 31])
        function = _one(draw, [0, 0, 0, 1, 7])
        at = (_one(draw, buses), slot, function)
        if at in taken:
            return ""
        taken.add(at)
        more = _one(draw, ["", "", " multifunction='on'", " multifunction='off'"])
        said = zip(("bus", "slot", "function"), at, strict=True)
        return "<address type='pci' " + " ".join(f"{k}='{_NUMBERS[form](v)}'" for k, v in said) + f"{more}/>"

    def alias() -> str:
        return _one(draw, ["", f"<alias name='ua-dev{len(rows)}'></alias>", "<alias name='hostdev0'/>"])

    for source in sources:
        parts = (source.domain, source.bus, source.slot, source.function)
        said = zip(("domain", "bus", "slot", "function"), parts, strict=True)
        kind = _one(draw, ["", " type='pci'", " type=''"])
        at = "<source><address" + kind + "".join(f" {k}='{_NUMBERS[form](v)}'" for k, v in said) + "/></source>"
        mode = _one(draw, ["", " mode='subsystem'", " mode='subsystem'", " mode='capabilities'"])
        if draw(_below(5)):
            extra = _one(draw, ["", "<driver name='vfio'/>", "<rom bar='off'/>", "<boot order='1'/>"])
            rows.append(f"<hostdev type='pci'{mode} managed='no'>{at}{extra}{guest()}{alias()}</hostdev>")
        else:
            rows.append(f"<interface type='hostdev'>{at}<mac address='52:54:00:0:0:1'/>{alias()}{guest()}</interface>")
    for uuid in _some(draw, host.mdev_parents, _UUID.format(0xDEAD)):
        uuid = _one(draw, [uuid, uuid.upper(), uuid.replace("-", "")])
        model = _one(draw, [" model='vfio-pci'", " model='vfio-pci'", "", " model='vfio-ap'"])
        at = f"<source><address type='' bus='' uuid='{uuid}'/></source>"
        rows.append(f"<hostdev type='mdev' mode='subsystem'{model}>{at}{alias()}{guest()}</hostdev>")
    for name in _some(draw, host.vdpa_parents, "vhost-vdpa-9"):
        model = _one(draw, ["", "<model type='virtio'/>", "<model type='virtio-transitional'/>"])
        rows.append(f"<interface type='vdpa'><source dev='/dev/{name}'/>{model}{alias()}{guest()}</interface>")
    return rows


def _some(draw: st.DrawFn, known: Iterable[str], unknown: str) -> list[str]:
    found = [name for name in known if draw(st.booleans())]
    return [*found, unknown] if draw(_below(10)) == 0 else found


# --- an output of ours, later ----------------------------------------------------------------------------------


@st.composite
def _later(draw: st.DrawFn, xml: str, host: HostTopology) -> str:
    """What a run made of the domain, with a few things changed by hand, or as KubeVirt's structs give it back."""
    options = replace(draw(_options()), policy="best-effort", enabled=True)
    try:
        made = transform(xml.encode(), options, _reader(host)).xml.decode()
    except PcinumaError:
        return xml
    if draw(_below(4)) == 0:
        try:
            return kubevirt.through_structs(made, _one(draw, kubevirt.VERSIONS))
        except kubevirt.GoParseError:
            return made
    root = etree.fromstring(made)
    for _ in range(draw(_below(4))):
        _edit(draw, root)
    return etree.tostring(root, encoding="unicode")


def _edit(draw: st.DrawFn, root: etree._Element) -> None:
    """What people do: take a device out, put one in, renumber, copy, and delete what they do not know."""
    devices = root.find("devices")
    if devices is None or not len(devices):
        return
    rows = [row for row in devices if row.tag in ("controller", "hostdev", "interface")]
    ours = [row for row in rows if row.tag == "controller"]
    if not rows:
        return
    row = _one(draw, [ours or rows, rows][draw(_below(2))])
    inside = list(row.iter("alias", "target", "address", "node", "source"))
    match _one(draw, ["remove", "lose", "number", "move", "copy", "attribute", "model", "hang", "alias"]):
        case "remove":
            devices.remove(row)
        case "lose" if inside:
            gone = _one(draw, inside)
            above = gone.getparent()
            if above is not None:
                above.remove(gone)
        case "number":
            for element in [row, *inside]:
                for name in ("index", "bus", "slot", "function", "busNr"):
                    if name in element.attrib and draw(_below(3)) == 0:
                        value = _one(draw, ["0", "1", "2", "3", "5", "0x08", "31", "254", "255"])
                        element.set(name, str(int(value, 0)) if name == "index" else value)
        case "move":
            devices.insert(draw(_below(len(devices))), row)
        case "copy":
            twin = etree.fromstring(etree.tostring(row, with_tail=False))
            if "index" in twin.attrib:
                twin.set("index", str(_one(draw, [9, 40, 100, 200, 255])))
            devices.append(twin)
        case "attribute":
            for element in [row, *inside]:
                for name in ("multifunction", "hotplug", "mode", "model", "name"):
                    if name in element.attrib and draw(_below(3)) == 0:
                        del element.attrib[name]
        case "hang" if ours:
            bus = _one(draw, ours).get("index", "0")
            index = str(_one(draw, [40, 41, 99]))
            model = _one(draw, ["pcie-root-port", "pcie-to-pci-bridge", "pcie-switch-upstream-port"])
            below = etree.SubElement(devices, "controller", {"type": "pci", "index": index, "model": model})
            etree.SubElement(below, "address", {"type": "pci", "bus": bus, "slot": "0"})
            if draw(_below(3)) == 0:
                del below.attrib["index"]  # libvirt chooses
                return
            guest = _one(draw, [row, *devices.findall("hostdev")])
            for address in guest.findall("address"):
                address.set("bus", index)
        case "alias" if names := [alias.get("name", "") for alias in root.iterfind("devices/controller/alias")]:
            for alias in row.findall("alias"):
                row.remove(alias)
            etree.SubElement(row, "alias", {"name": _one(draw, names)})
        case "model" if "model" in row.attrib:
            row.set("model", _one(draw, ["pcie-root-port", "pcie-expander-bus", "pcie-to-pci-bridge"]))
