"""What NCCL takes of a topology file, written down from its source and sharing no code with what writes one.

The source: NVIDIA/nccl at commit 081eafa (2026), src/graph/xml.cc xmlGetNode, xmlGetToken, xmlGetValue, xmlLoadSub and
the ncclTopoXmlLoad* handlers; commit 069a3d4, src/graph/xml.h (MAX_*), src/graph/topo.cc ncclTopoAddCpu, ncclTopoAddPci,
kvDictPciClass, kvDictPciGen, kvDictCpuArch, kvDictCpuVendor, src/graph/topo.h NCCL_TOPO_XML_MAX_NODES. RCCL: ROCm/rccl
src/graph/xml.h and xml.cc (version 2, <xgmi>).

Stricter than NCCL where NCCL is silent and the outcome is wrong: an element or a class that it ignores, a speed that it
takes for 8 GT/s, a BDF twice, devices below a device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_STR_LEN = 255
MAX_ATTR_COUNT = 16
MAX_SUBS = 32  # of RCCL and of older NCCL, which do not even check; 640 in the newest
MAX_NODES = 256

CHILDREN = {
    "": {"system"},
    "system": {"cpu"},
    "cpu": {"pci", "nic"},
    "pci": {"pci", "gpu", "nic", "pcilink"},
    "gpu": {"nvlink", "c2c", "xgmi"},
    "nic": {"net"},
}
BRIDGES = ("0x060400",)
GPUS = ("0x03", "0x12")  # 0x12 is a GPU to RCCL by its <gpu> element
NICS = ("0x02", "0x080100")
NVSWITCHES = ("0x068000",)
IDS = ("vendor", "device", "subsystem_vendor", "subsystem_device")
SPEEDS = (
    "2.5 GT/s",
    "5 GT/s",
    "8 GT/s",
    "16 GT/s",
    "32 GT/s",
    "5.0 GT/s PCIe",
    "8.0 GT/s PCIe",
    "16.0 GT/s PCIe",
    "32.0 GT/s PCIe",
    "64.0 GT/s PCIe",
)
ARCHES = ("x86_64", "arm64", "ppc64")
VENDORS = ("GenuineIntel", "AuthenticAMD", "CentaurHauls", "  Shanghai  ")
NEVER = ("host_hash", "keep")
"""Attributes that NCCL writes itself, each time (topo.cc ncclTopoGetSystem, xml.cc ncclTopoTrimXmlRec)."""


class NcclRefuses(Exception):
    """NCCL's parser ends with an error."""


@dataclass
class Node:
    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()

    def all(self, name: str) -> list[Node]:
        return [node for node in self.walk() if node.name == name]


class Reader:
    """The parser, a character at a time."""

    def __init__(self, text: str):
        self._text = text
        self._at = 0
        self._count = 0

    def read(self) -> Node:
        root = Node("")
        self._inside(root, "OPEN")
        return root

    def _char(self) -> str:
        if self._at == len(self._text):
            raise NcclRefuses("Unexpected EOF")
        self._at += 1
        return self._text[self._at - 1]

    def _value(self) -> tuple[str, str]:
        quote = self._char()
        if quote not in "\"'":
            raise NcclRefuses("Expected (double) quote.")
        value = ""
        while True:
            char = self._char()
            if len(value) == MAX_STR_LEN - 1:
                raise NcclRefuses(f"value {value[:20]}… too long")
            if char == quote:
                return value, self._char()
            value += char

    def _token(self, *, takes_value: bool) -> tuple[str, str, str]:
        name = ""
        while True:
            char = self._char()
            if char == "=":
                if not takes_value:
                    raise NcclRefuses(f"Unexpected value with name {name}")
                return (name, *self._value())
            if len(name) == MAX_STR_LEN - 1:
                raise NcclRefuses(f"name {name[:20]}… too long")
            if char in " >/\n\r":
                return name, "", char
            name += char

    def _element(self) -> tuple[str, Node | None]:
        """The kind of tag, and the element; NONE at the end."""
        char = " "
        while char in " \n\r":
            if self._at == len(self._text):
                return "NONE", None
            char = self._char()
        if char != "<":
            raise NcclRefuses(f"expecting '<', got {char!r}")
        name, _, last = self._token(takes_value=False)
        if name.startswith("!--"):
            last_three = ("..." + name[3:] + last)[-3:]
            while last_three != "-->":
                last_three = last_three[1:] + self._char()
            return self._element()
        if name == "" and last == "/":
            name, _, last = self._token(takes_value=False)
            if last != ">":
                raise NcclRefuses(f"unexpected trailing {last!r} in closing tag {name}")
            return "CLOSE", Node(name)
        node, kind, seen = Node(name), "OPEN", 0
        while last == " ":
            key, value, last = self._token(takes_value=True)
            seen += 1
            if seen > MAX_ATTR_COUNT:
                raise NcclRefuses("extra attributes are ignored")
            if not re.fullmatch(r"[a-z_]+", key) or key in node.attributes:
                raise NcclRefuses(f"attribute {key!r} of {name}: no name, or twice")
            node.attributes[key] = value
        if last == "/":
            kind = "SINGLE"
            _, _, last = self._token(takes_value=False)
        if last != ">":
            raise NcclRefuses(f"expected >, got {last!r}")
        return kind, node

    def _inside(self, head: Node, kind: str) -> None:
        while kind != "SINGLE":
            if self._count == MAX_NODES:
                raise NcclRefuses(f"XML parser is limited to {MAX_NODES} nodes")
            found, node = self._element()
            if node is None:
                if head.name:
                    raise NcclRefuses(f"unterminated {head.name}")
                return
            if found == "CLOSE":
                if node.name != head.name:
                    raise NcclRefuses(f"XML Mismatch : {head.name} / {node.name}")
                return
            if node.name not in CHILDREN.get(head.name, ()):
                raise NcclRefuses(f"Ignoring element {node.name}")
            if len(head.children) == MAX_SUBS:
                raise NcclRefuses(f"XML parser is limited to {MAX_SUBS} subnodes")
            head.children.append(node)
            self._count += 1
            self._inside(node, found)


def read(text: str) -> Node:
    """The ``<system>`` that NCCL reads. Raises NcclRefuses."""
    systems = Reader(text).read().children
    if len(systems) != 1:
        raise NcclRefuses(f"{len(systems)} system elements")
    return systems[0]


def problems(text: str, *, version: int = 1, cpu_known: bool = True) -> list[str]:
    """What is wrong with a topology file; ``cpu_known`` False lets vendor, family and model be absent, as NCCL does
    for a cell that it finds a device of."""
    try:
        system = read(text)
    except NcclRefuses as error:
        return [str(error)]
    found = []
    if system.attributes.get("version") != str(version):
        found.append(f"version {system.attributes.get('version')}, {version} needed")
    numas = [cpu.attributes.get("numaid", "") for cpu in system.children]
    found += [f"numaid {numa!r} is no number" for numa in numas if not re.fullmatch(r"[0-9]+", numa)]
    if len(set(numas)) < len(numas):
        found.append("a numaid twice")
    taken = 0
    for cpu in system.children:
        found += _cpu_problems(cpu, cpu_known)
        mask = int(cpu.attributes.get("affinity", "0").replace(",", "") or "0", 16) if not found else 0
        if mask & taken:
            found.append(f"cpu {cpu.attributes['numaid']}: shares CPUs with another")
        taken |= mask
        for child in cpu.children:
            found += _pci_problems(child) if child.name == "pci" else []
    ids = [pci.attributes.get("busid") for pci in system.all("pci")]
    found += [f"{busid} twice" for busid in sorted({str(i) for i in ids if ids.count(i) > 1})]
    for node in system.walk():
        found += [f"{node.name}: {name} is NCCL's own" for name in NEVER if name in node.attributes]
    return found


def _cpu_problems(cpu: Node, known: bool) -> list[str]:
    given = cpu.attributes
    found = [] if given.get("arch") in ARCHES else [f"cpu: arch {given.get('arch')!r}"]
    if "affinity" in given and not re.fullmatch(r"[0-9a-f]{1,8}(,[0-9a-f]{8}){0,31}", given["affinity"]):
        found.append(f"cpu: affinity {given['affinity']!r} is no cpumap")
    if given.get("arch") == "x86_64":
        if not known and "vendor" not in given and "familyid" not in given and "modelid" not in given:
            return found
        if given.get("vendor") not in VENDORS:
            found.append(f"cpu: vendor {given.get('vendor')!r}")
        found += [f"cpu: {key} missing" for key in ("familyid", "modelid") if not given.get(key, "").isdigit()]
    return found


def _pci_problems(pci: Node) -> list[str]:
    given = pci.attributes
    busid = given.get("busid", "")
    if not re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", busid):
        return [f"pci: busid {busid!r} is no BDF in lower case"]
    found = []
    pci_class, below = given.get("class", ""), [child for child in pci.children if child.name == "pci"]
    if pci_class.startswith(BRIDGES):
        if not below:
            found.append(f"{busid}: a switch without devices")
        if busid.startswith("ffff:"):  # made up: no machine has one of that BDF to fill in from
            found += [f"{busid}: {key} missing" for key in IDS if not _is_hex(given.get(key, ""))]
        found += [f"{busid}: {key} missing" for key in ("link_speed", "link_width") if key not in given]
    elif pci_class.startswith((*GPUS, *NICS, *NVSWITCHES)):
        if below:
            found.append(f"{busid}: devices below a device are lost")
    else:
        found.append(f"{busid}: class {pci_class!r}")
    speed = given.get("link_speed")
    if speed and not speed.startswith(SPEEDS):
        found.append(f"{busid}: link_speed {speed!r} is taken for 8 GT/s")
    width = given.get("link_width", "16")
    if width not in ("0", "1", "2", "4", "8", "12", "16", "32"):
        found.append(f"{busid}: link_width {width!r}")
    return found + [problem for child in below for problem in _pci_problems(child)]


def _is_hex(text: str) -> bool:
    return re.fullmatch(r"0x[0-9a-f]{4}", text) is not None
