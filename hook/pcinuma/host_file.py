"""The file of ``pcinuma snapshot``: a host's topology as one JSON object, and back (``schemas/host.schema.json``)."""

from __future__ import annotations

import json
from typing import Any

from pcinuma.errors import BadInput, why_not_json
from pcinuma.model import Bar, CpuSet, HostCpu, HostFunction, HostNode, HostQuery, HostTopology, Link, PciAddress
from pcinuma.schema import validate

VERSION = 1
MAX_BYTES = 64 * 1024 * 1024

_HINT = "make one with 'pcinuma snapshot'"


def dump(topology: HostTopology) -> dict[str, Any]:
    """The topology as a JSON object, in ascending order of everything."""
    return {
        "kind": "pcinuma-host",
        "version": VERSION,
        "physicalAddressBits": topology.address_bits,
        "cpu": _dump_cpu(topology.cpu),
        "nodes": [
            {
                "id": node.id,
                "cpus": str(node.cpus),
                "memoryKiB": node.memory_kib,
                "package": node.package,
                "distances": {str(other): node.distances[other] for other in sorted(node.distances)},
            }
            for _, node in sorted(topology.nodes.items())
        ],
        "functions": [_dump_function(function) for _, function in sorted(topology.functions.items())],
        "mdevs": [{"uuid": uuid, "parent": str(parent)} for uuid, parent in sorted(topology.mdev_parents.items())],
        "vdpas": [{"device": name, "parent": str(parent)} for name, parent in sorted(topology.vdpa_parents.items())],
    }


def _dump_cpu(cpu: HostCpu | None) -> dict[str, Any] | None:
    return None if cpu is None else {"vendor": cpu.vendor, "family": cpu.family, "model": cpu.model}


def _dump_function(function: HostFunction) -> dict[str, Any]:
    link = function.link
    return {
        "address": str(function.address),
        "node": function.node,
        "nodeProblem": function.node_problem,
        "rootComplex": function.root_complex,
        "bridges": [str(bridge) for bridge in function.bridges],
        "class": _hex(function.pci_class, 6),
        "vendor": _hex(function.vendor, 4),
        "device": _hex(function.device, 4),
        "subsystemVendor": _hex(function.subsystem_vendor, 4),
        "subsystemDevice": _hex(function.subsystem_device, 4),
        "bars": [{"index": bar.index, "size": bar.size, "flags": f"{bar.flags:#x}"} for bar in function.bars],
        "link": {
            "speed": link.speed,
            "width": link.width,
            "maxSpeed": link.max_speed,
            "maxWidth": link.max_width,
        },
        "physfn": str(function.physfn) if function.physfn else None,
        "iommuGroup": function.iommu_group,
        "driver": function.driver,
    }


def _hex(value: int | None, digits: int) -> str | None:
    return None if value is None else f"0x{value:0{digits}x}"


def load(data: bytes, where: str) -> HostFile:
    """The host recorded in ``data``. Raises BadInput, all schema errors at once, for anything else."""
    if len(data) > MAX_BYTES:
        raise BadInput(f"the host record is larger than {MAX_BYTES // 2**20} MiB", where=where)
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the host record is not JSON: {why_not_json(error)}", where=where, hint=_HINT) from None
    if not isinstance(record, dict) or record.get("kind") != "pcinuma-host":
        raise BadInput('not a host record: "kind" is not "pcinuma-host"', where=where, hint=_HINT)
    if record.get("version") != VERSION or isinstance(record["version"], bool):
        raise BadInput(
            f"the host record has version {record.get('version')!r}, this pcinuma reads version {VERSION}",
            where=where,
            hint="record the host again with this version's 'pcinuma snapshot'",
        )
    validate(record, "host", where)
    return HostFile(record, where)


class HostFile:
    """A recorded host; calling it is a :data:`pcinuma.discover.ReadHost`."""

    def __init__(self, record: dict[str, Any], where: str):
        self._where = where
        self._nodes = {node.id: node for node in map(self._node, record["nodes"])}
        cpu = record.get("cpu")
        self._cpu = HostCpu(cpu["vendor"], cpu["family"], cpu["model"]) if cpu is not None else None
        self._functions = self._by_address(record["functions"])
        self._mdevs = {entry["uuid"].lower(): PciAddress.parse(entry["parent"]) for entry in record.get("mdevs", [])}
        self._address_bits: int | None = record.get("physicalAddressBits")
        self._vdpas = {entry["device"]: PciAddress.parse(entry["parent"]) for entry in record.get("vdpas", [])}
        if len(self._vdpas) != len(record.get("vdpas", [])):
            raise BadInput("the host record has a vDPA device twice", where=where)
        if len(self._nodes) != len(record["nodes"]):
            raise BadInput("the host record has a node twice", where=where)
        if len(self._mdevs) != len(record.get("mdevs", [])):
            raise BadInput("the host record has a mediated device twice", where=where)

    def __call__(self, query: HostQuery) -> HostTopology:
        mdevs = {uuid: self._mdevs[uuid] for uuid in sorted(query.mdevs) if uuid in self._mdevs}
        vdpas = {name: self._vdpas[name] for name in sorted(query.vdpas) if name in self._vdpas}
        wanted = sorted(query.functions.union(mdevs.values(), vdpas.values()))
        functions = {address: self._function(address) for address in wanted if address in self._functions}
        for function in list(functions.values()):
            if function.node is None and function.physfn in self._functions:
                functions[function.physfn] = self._function(function.physfn)
        return HostTopology(self._nodes, functions, mdevs, vdpas, self._address_bits, self._cpu)

    def everything(self) -> HostTopology:
        """All that the record holds."""
        return self(HostQuery(frozenset(self._functions), frozenset(self._mdevs), frozenset(self._vdpas)))

    def _by_address(self, entries: list[dict[str, Any]]) -> dict[PciAddress, dict[str, Any]]:
        found: dict[PciAddress, dict[str, Any]] = {}
        for entry in entries:
            address = PciAddress.parse(entry["address"])
            if address in found:
                raise BadInput(f"the host record has {address} twice", where=self._where)
            found[address] = entry
        return found

    def _node(self, entry: dict[str, Any]) -> HostNode:
        try:
            cpus = CpuSet.parse(entry.get("cpus", ""))
        except BadInput as error:
            raise BadInput(f"node {entry['id']}: {error.message}", where=self._where) from None
        distances = {int(other): distance for other, distance in entry.get("distances", {}).items()}
        return HostNode(entry["id"], cpus, entry.get("memoryKiB"), distances, entry.get("package"))

    def _function(self, address: PciAddress) -> HostFunction:
        entry = self._functions[address]
        link = entry.get("link", {})
        physfn = entry.get("physfn")
        node: int | None = entry.get("node")
        problem: str | None = entry.get("nodeProblem")
        if node == -1:
            node, problem = None, "its numa_node is -1: the host's firmware does not say"
        elif node is None:
            problem = problem or "the host record does not say its node"
        elif self._nodes and node not in self._nodes:
            node, problem = None, f"its numa_node is {node}, which is no node of this host"
        return HostFunction(
            address=address,
            node=node,
            node_problem=problem if node is None else None,
            root_complex=entry.get("rootComplex"),
            bridges=tuple(PciAddress.parse(bridge) for bridge in entry.get("bridges", [])),
            pci_class=_number(entry.get("class")),
            vendor=_number(entry.get("vendor")),
            device=_number(entry.get("device")),
            subsystem_vendor=_number(entry.get("subsystemVendor")),
            subsystem_device=_number(entry.get("subsystemDevice")),
            bars=tuple(Bar(bar["index"], bar["size"], int(bar["flags"], 16)) for bar in entry.get("bars", [])),
            link=Link(link.get("speed"), link.get("width"), link.get("maxSpeed"), link.get("maxWidth")),
            physfn=PciAddress.parse(physfn) if physfn else None,
            iommu_group=entry.get("iommuGroup"),
            driver=entry.get("driver"),
        )


def _number(text: str | None) -> int | None:
    return None if text is None else int(text, 16)
