"""What is fuzzed in process: each target takes bytes, and raises when what they give is none of the things it may be.

The fuzzer follows the branches taken in pcinuma's own code. Options are drawn from the bytes' checksum: a saved
input stays a plain file (a domain, a host record, a VMI) that the command line takes as well.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jsonpatch
from lxml import etree

from fuzz.oracles import errors_of_ours, must_agree, must_be_ours, must_hold
from pcinuma import (
    admission,
    doctor,
    doctor_report,
    explain,
    grpc_wire,
    hook_calls,
    hook_server,
    host_file,
    kubelet_config,
    nccl_topo,
    node_reads,
    schema,
    svg,
    tree,
    webhook_config,
)
from pcinuma import options as option_sources
from pcinuma.discover import read, read_all
from pcinuma.errors import PcinumaError
from pcinuma.log import Log
from pcinuma.model import Bar, CpuSet, HostFunction, HostNode, HostQuery, HostTopology, Link, Options, PciAddress
from pcinuma.node_facts import CpuPlace, NodeFacts, PagePool
from pcinuma.pipeline import transform

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "two-sockets"
DOMAIN = (EXAMPLE / "domain.xml").read_bytes()
HOST = host_file.load((EXAMPLE / "host.json").read_bytes(), "host.json")
VMI = json.dumps({"kind": "VirtualMachineInstance", "metadata": {"name": "vm", "namespace": "ns"}, "spec": {}}).encode()
SIDECAR = admission.Sidecar("registry.example/pcinuma:1", "IfNotPresent", ("hook",))
_PIECE = 1000  # bytes of a connection that arrive at once

_CHAINS = ((), (1,), (1, 0, 2), (1, 0, 3), (1, 0, 3, 0, 5), (2, 0, 1))
"""Slots of the bridges above a function, from the root down."""
_BARS = (
    (),
    (Bar(0, 16 << 20, 0x40200), Bar(2, 128 << 30, 0x14220C), Bar(5, 128, 0x40101)),
    (Bar(0, 1 << 40, 0x14220C),),
)

Target = Callable[[bytes], None]


def options_of(data: bytes) -> Options:
    """The options for an input: by its checksum one value of each set."""
    draw = zlib.crc32(data)
    chosen = {}
    for name, values in option_sources.CHOICES.items():
        draw, at = divmod(draw, len(values))
        chosen[name] = values[at]
    return option_sources.resolve(chosen)


def any_host(query: HostQuery) -> HostTopology:
    """A host of four nodes that has whatever is asked for; of which kind and where, the address's checksum says."""
    nodes = {
        number: HostNode(
            number,
            CpuSet(frozenset(range(8 * number, 8 * number + 8))),
            64 << 20,
            {n: 10 + 11 * (n != number) for n in range(4)},
        )
        for number in range(4)
    }
    mdevs = {uuid: _invented(uuid) for uuid in query.mdevs}
    vdpas = {name: _invented(name) for name in query.vdpas}
    functions = {}
    for address in {*query.functions, *mdevs.values(), *vdpas.values()}:
        draw = zlib.crc32(str(address).encode())
        draw, node = divmod(draw, 6)
        draw, chain = divmod(draw, len(_CHAINS))
        draw, bars = divmod(draw, len(_BARS))
        draw, is_gpu = divmod(draw, 2)
        functions[address] = HostFunction(
            address,
            node if node in nodes else None,
            None if node in nodes else "its numa_node is -1",
            root_complex=f"pci0000:{draw % 3:02x}",
            bridges=tuple(PciAddress(0, 0x70 + depth, slot, 0) for depth, slot in enumerate(_CHAINS[chain])),
            pci_class=0x030200 if is_gpu else 0x020000,
            vendor=0x10DE if is_gpu else 0x15B3,
            bars=_BARS[bars],
            link=Link(32.0, 16, 32.0, 16) if draw % 5 else Link(),
            iommu_group=draw % 7 or None,
        )
    return HostTopology(nodes, functions, mdevs, vdpas, 46)


def _invented(name: str) -> PciAddress:
    return PciAddress(0, zlib.crc32(name.encode()) % 256, 0, 0)


# --- the targets -----------------------------------------------------------------------------------------------


def domain(data: bytes) -> None:
    """A domain XML through the pipeline, and through a hook's call."""
    options = options_of(data)
    must_hold(data, options, any_host)
    made = hook_calls.answer(data, VMI, option_sources.as_mapping(options), any_host)
    if made.error is not None:
        must_be_ours(made.error)
    if made.xml is not None and made.xml is not data:
        made.xml.decode("utf-8")
        etree.fromstring(made.xml)


def shown(data: bytes) -> None:
    """A domain XML through what people look at: ``check``, ``explain`` as tree and as SVG, ``nccl-topo``."""
    options = options_of(data)
    result = None
    with errors_of_ours():
        result = transform(data, options, any_host)
    explained = must_agree(data, options, any_host, result)
    if explained is None:
        return
    root = etree.fromstring(svg.draw(explained.scene).encode())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not list(root.iter("{*}script", "{*}foreignObject"))
    with errors_of_ours():
        if explained.result.refusal is None:
            made = nccl_topo.topology_file(explained.result.xml, any_host)
            assert etree.fromstring(made.text).tag == "system"


def host(data: bytes) -> None:
    """A host record: read, written and read again; under a domain, and under ``doctor``."""
    with errors_of_ours():
        record = host_file.load(data, "host.json")
        whole = record.everything()
        written = json.dumps(host_file.dump(whole)).encode()
        assert host_file.load(written, "written").everything() == whole
        must_hold(DOMAIN, options_of(data), record)
        diagnosed(node_reads.from_record(record, "host.json"))
    with errors_of_ours():
        tree.draw(explain.explain(DOMAIN, options_of(data), host_file.load(data, "host.json")).scene)
    with errors_of_ours():
        nccl_topo.topology_file(DOMAIN, host_file.load(data, "host.json"))


def vmi(data: bytes) -> None:
    """A VMI as a file and as a hook gets it, the file of defaults, the webhook's file."""
    with errors_of_ours():
        option_sources.resolve({}, option_sources.from_vmi(option_sources.load_object(data, "vmi"), "vmi"))
    with errors_of_ours():
        option_sources.resolve({}, None, option_sources.load_defaults(data, "config"))
    with errors_of_ours():
        webhook_config.sidecar_of(webhook_config.load(data, "config"), "a:1", None, "config")
    made = hook_calls.answer(DOMAIN, data, {}, HOST)
    json.dumps(made.record)
    if made.error is not None:
        must_be_ours(made.error)
    else:
        assert made.xml is not None


def kubelet(data: bytes) -> None:
    """A kubelet's configuration under ``doctor``."""
    with errors_of_ours():
        config = kubelet_config.load(data, "kubelet.yaml")
        diagnosed(_node(), config)


@functools.cache
def _node() -> NodeFacts:
    """The example's host with what else a kubelet's configuration is held against: two threads a core, huge pages."""
    whole = HOST.everything()
    cpus = sorted(cpu for node in whole.nodes.values() for cpu in node.cpus)
    return NodeFacts(
        host=whole,
        source="node",
        pools={number: (PagePool(2048, 0, 0), PagePool(1 << 20, 64, 64)) for number in whole.nodes},
        cpus={cpu: CpuPlace(0, CpuSet(frozenset({cpu & ~1, cpu | 1}))) for cpu in cpus},
        present=CpuSet(frozenset(cpus)),
        online=CpuSet(frozenset(cpus)),
        memory_bytes=256 << 30,
    )


def configuration_space(data: bytes) -> None:
    """The bytes of a function's configuration space under ``doctor``."""
    whole = HOST.everything()
    diagnosed(NodeFacts(host=whole, source="node", configs=dict.fromkeys(whole.functions, data)))


def diagnosed(facts: NodeFacts, config: Mapping[str, Any] | None = None) -> None:
    made = doctor.diagnose(facts, config)
    assert schema.problems(doctor_report.as_dict(made), "doctor") == []
    text = doctor_report.as_text(made)
    assert all(line.isprintable() for line in text.split("\n")), text


class _Tree:
    """A `/sys` from lines of ``PLACE NAME VALUE``: a function's BDF, ``nodeN``, ``cpu``; ``>`` before a link's name."""

    def __init__(self, text: str):
        self._said: dict[tuple[str, str], str] = {}
        for line in text.split("\n"):
            place, _, rest = line.partition(" ")
            name, _, value = rest.partition(" ")
            self._said[(place, name)] = value
        self._places = sorted({place for place, _ in self._said})

    def function_path(self, address: PciAddress) -> str | None:
        return self._said.get((str(address), "path"), str(address) if str(address) in self._places else None)

    def mdev_path(self, uuid: str) -> str | None:
        return self._said.get((uuid, "path"))

    def vdpa_paths(self) -> Mapping[str, str]:
        return {name: path for name in self._places if (path := self._said.get((name, "vdpa"))) is not None}

    def node_paths(self) -> Mapping[int, str]:
        return {int(p[4:8]): p for p in self._places if p[:4] == "node" and p[4:8].isascii() and p[4:8].isdigit()}

    def cpu_path(self) -> str | None:
        return "cpu" if "cpu" in self._places else None

    def all_functions(self) -> Iterable[PciAddress]:
        for place in self._places:
            with contextlib.suppress(PcinumaError):
                yield PciAddress.parse(place)

    def all_mdevs(self) -> Iterable[str]:
        return [place for place in self._places if ("mdev" in place)]

    def cpuinfo(self) -> str | None:
        return self._said.get(("cpu", "cpuinfo"))

    def attribute(self, path: str, name: str) -> str | None:
        return self._said.get((path.rpartition("/")[2], name))

    def link(self, path: str, name: str) -> str | None:
        return self._said.get((path.rpartition("/")[2], ">" + name))


def sysfs(data: bytes) -> None:
    """What a kernel may say in `/sys`, and what it never would: recorded, and under a domain."""
    made = _Tree(data.decode("utf-8", "replace"))
    with errors_of_ours():
        whole = read_all(made)
        assert host_file.load(json.dumps(host_file.dump(whole)).encode(), "snapshot").everything() == whole
        diagnosed(NodeFacts(host=whole, source="node"))
    with errors_of_ours():
        must_hold(DOMAIN, options_of(data), lambda query: read(made, query))


def review(data: bytes) -> None:
    """The body of an admission review; what is added must be a list that the webhook knows again."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return  # the webhook's edge says that the body is not JSON
    with errors_of_ours():
        made = admission.decide(content, SIDECAR)
        json.dumps(made.record)
        response = json.loads(json.dumps(made.review))["response"]
        if made.outcome != "added":
            assert "patch" not in response
            return
        patch = json.loads(base64.b64decode(response["patch"]))
        content["request"]["object"] = jsonpatch.apply_patch(content["request"]["object"], patch)
        entries = json.loads(content["request"]["object"]["metadata"]["annotations"][admission.HOOK_SIDECARS])
        assert entries[-1] == json.loads(SIDECAR.entry())
        assert admission.decide(content, SIDECAR).outcome == "present"


class _Quiet(Log):
    def write(self, _level: str, _event: str, record: Mapping[str, Any]) -> None:
        assert json.dumps(record).isprintable()
        assert record.get("code") != "internal", record


@functools.cache
def _handlers() -> Mapping[str, grpc_wire.Handler]:
    settings = hook_server.Settings(
        socket="",
        plugin_socket=None,
        versions=hook_server.VERSIONS,
        defaults={},
        host=lambda: HOST,
        log=_Quiet("json", "info"),
    )
    calls = hook_server._Calls(settings)
    calls.load()
    return hook_server._handlers(settings, calls, lambda: None)


def connection(data: bytes) -> None:
    """The bytes of a connection to the sidecar's socket, with the real calls behind it; it must come to an end."""
    ours, theirs = socket.socketpair()
    faults: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, faults.append
    try:
        served = grpc_wire._Connection(theirs, _handlers(), lambda _: None)
        thread = threading.Thread(target=served.run, daemon=True)
        thread.start()
        ours.settimeout(10)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for at in range(0, len(data), _PIECE):
                ours.sendall(data[at : at + _PIECE])
            ours.shutdown(socket.SHUT_WR)
            while ours.recv(65536):
                pass
        thread.join(10)
        assert not thread.is_alive(), "the connection does not end"
    finally:
        ours.close()
        threading.excepthook = before
    assert not faults, faults[0].exc_value


def grammar(data: bytes) -> None:
    """Whole domains on whole hosts by ``fuzz.grammar``: hypothesis makes them of the fuzzer's bytes."""
    _grammar()(data)


@functools.cache
def _grammar() -> Callable[[bytes], object]:
    from hypothesis import HealthCheck, given, settings

    from fuzz.grammar import Case, cases, must_hold_of

    @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases())
    def each(case: Case) -> None:
        must_hold_of(case)

    fuzzed: Callable[[bytes], object] = each.hypothesis.fuzz_one_input  # type: ignore[attr-defined]
    return fuzzed
