"""The machines of the corpus: shapes written by hand (``shapes/``), and real ones where their recordings are at hand.

Every machine is a host record as ``pcinuma snapshot`` writes it, read back by pcinuma's own reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pcinuma.host_file import HostFile, load
from pcinuma.model import HostTopology, PciAddress

SHAPES = Path(__file__).parent / "shapes"
ROLES = ("gpu", "nic", "disk", "fabric", "vf")
"""What a VM gets passed through; whatever has another role stays with the host."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BAR = re.compile(r"(\d+)([KMG]?)(p|io|)")
_PREFETCHABLE_64, _MEMORY, _IO = "0x14220c", "0x40200", "0x40101"
VFS_A_SLOT = 8


@dataclass(frozen=True)
class Machine:
    """A host. ``roles`` are of the functions that VMs get; ``source`` says whose recording it is, if it is one."""

    name: str
    record: Mapping[str, Any]
    roles: Mapping[PciAddress, str]
    source: str = ""

    @cached_property
    def read_host(self) -> HostFile:
        return load(json.dumps(self.record).encode(), self.name)

    @cached_property
    def topology(self) -> HostTopology:
        return self.read_host.everything()

    def node_of(self, address: PciAddress) -> int | None:
        """The node of a function, for a VF of unknown node its PF's."""
        function = self.topology.functions[address]
        if function.node is None and function.physfn is not None:
            return self.topology.functions[function.physfn].node
        return function.node

    @property
    def nodes(self) -> list[int]:
        """The nodes that have CPUs: a VM's vCPUs are on those."""
        return sorted(node.id for node in self.topology.nodes.values() if node.cpus)


def shapes() -> list[Machine]:
    """The machines written by hand, by name of file."""
    return [_machine(path) for path in sorted(SHAPES.glob("*.yaml")) if path.name != "devices.yaml"]


def shape(name: str) -> Machine:
    return _machine(SHAPES / f"{name}.yaml")


def _machine(path: Path) -> Machine:
    shape = _read(path)
    like = _read(path.with_name(f"{shape['like']}.yaml")) if "like" in shape else {}
    onto, by_complex = shape.get("onto"), shape.get("by-complex")
    functions = []
    roles: dict[PciAddress, str] = {}
    for name, given in (like or shape)["complexes"].items():
        node = given["node"]
        if onto is not None:
            node = onto[node]
        if by_complex is not None:
            node = by_complex[name]
        for entry, role in _functions(name, given, node):
            functions.append(entry)
            if role in ROLES:
                roles[PciAddress.parse(entry["address"])] = role
    whole = {**like, **shape}
    record = {
        "kind": "pcinuma-host",
        "version": 1,
        "physicalAddressBits": whole["bits"],
        "cpu": {
            "intel": {"vendor": "GenuineIntel", "family": 6, "model": 143},
            "amd": {"vendor": "AuthenticAMD", "family": 25, "model": 17},
        }[whole["cpu"]],
        "nodes": list(_nodes(shape["nodes"], whole["distances"])),
        "functions": functions,
        "mdevs": [],
    }
    return Machine(shape["name"], record, roles)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def _nodes(given: list[tuple[str, int]], distances: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for number, (cpus, socket) in enumerate(given):
        table = {
            str(other): 10 if other == number else distances["near" if of_other == socket else "far"]
            for other, (_, of_other) in enumerate(given)
        }
        yield {"id": number, "cpus": str(cpus).replace(";", ","), "package": socket, "distances": table}


def _functions(complex_: str, given: Mapping[str, Any], node: int) -> Iterator[tuple[dict[str, Any], str]]:
    """The functions below a root complex, each with its role."""
    devices = _read(SHAPES / "devices.yaml")
    for way, ends in given["ways"].items():
        place = {"node": node, "rootComplex": f"pci{complex_}", "bridges": [_full(bridge) for bridge in way.split()]}
        for address, kind in ends.items():
            if address.startswith("vfs of "):
                pf = PciAddress.parse(address.removeprefix("vfs of "))
                for number in range(kind):
                    slot, function = divmod(number + 2, VFS_A_SLOT)
                    own = {"address": str(PciAddress(pf.domain, pf.bus, slot, function)), "physfn": str(pf)}
                    yield {**place, "node": given.get("vf-node", node), **own, **_described(devices["vf"])}, "vf"
            else:
                yield {**place, "address": _full(address), **_described(devices[kind])}, devices[kind]["role"]


def _described(device: Mapping[str, Any]) -> dict[str, Any]:
    bars = []
    index = 0
    for size, unit, kind in _BAR.findall(device["bars"]):
        flags = {"p": _PREFETCHABLE_64, "io": _IO, "": _MEMORY}[kind]
        bars.append({"index": index, "size": int(size) * _UNITS[unit], "flags": flags})
        index += 2 if kind == "p" else 1
    said: dict[str, Any] = {name: device[name] for name in ("class", "vendor", "device")}
    if device["link"]:
        speed, width = device["link"]
        said["link"] = {"speed": speed, "width": width, "maxSpeed": speed, "maxWidth": width}
    return {**said, "bars": bars}


def _full(address: str) -> str:
    return str(PciAddress.parse(address))
