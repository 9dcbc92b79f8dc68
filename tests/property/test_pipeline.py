"""Any host and any domain: the output verifies, comes back unchanged when transformed again, and loses nothing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lxml import etree

from pcinuma.audit import audit
from pcinuma.check import check
from pcinuma.discover import ReadHost
from pcinuma.domain_xml import load
from pcinuma.errors import PcinumaError
from pcinuma.model import Bar, CpuSet, HostFunction, HostNode, HostQuery, HostTopology, Options, PciAddress
from pcinuma.pipeline import Result, transform

SETTINGS = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Case:
    xml: bytes
    host: HostTopology
    options: Options

    @property
    def read_host(self) -> ReadHost:
        def read(query: HostQuery) -> HostTopology:
            functions = {a: f for a, f in self.host.functions.items() if a in query.functions}
            return HostTopology(self.host.nodes, functions)

        return read

    def run(self) -> Result:
        return transform(self.xml, self.options, self.read_host)


bdfs = st.builds(
    PciAddress,
    st.sampled_from([0, 0, 0, 1, 0x10000]),
    st.integers(0, 255),
    st.integers(0, 3),
    st.sampled_from([0, 0, 0, 1, 2, 7]),
)


@st.composite
def topologies(draw: st.DrawFn) -> HostTopology:
    ids = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 8, 255]), min_size=1, max_size=4, unique=True))
    nodes = {}
    for position, node in enumerate(sorted(ids)):
        cpus = CpuSet(frozenset(range(position * 8, position * 8 + 8)) if draw(st.booleans()) else frozenset())
        distances = {other: 10 if other == node else draw(st.sampled_from([12, 21, 32])) for other in ids}
        nodes[node] = HostNode(node, cpus, 1024, distances if draw(st.booleans()) else {})
    functions = {}
    for address in draw(st.lists(bdfs, max_size=14, unique=True)):
        of_function: int | None = draw(st.sampled_from([*ids, *ids, *ids, None]))
        physfn = PciAddress(address.domain, address.bus, 0, 0) if draw(st.integers(0, 4)) == 0 else None
        complex_ = draw(st.sampled_from([None, "pci0000:00", "pci0000:80"]))
        above = draw(st.sampled_from(CHAINS))
        functions[address] = HostFunction(
            address,
            of_function,
            None if of_function is not None else "unknown",
            root_complex=complex_,
            bridges=tuple(PciAddress(0, 0x70 + depth, slot, 0) for depth, slot in enumerate(above)),
            physfn=physfn,
            bars=draw(st.sampled_from(BARS)),
            vendor=draw(st.sampled_from([0x10DE, 0x15B3])),
            pci_class=draw(st.sampled_from([0x030200, 0x020000])),
            iommu_group=draw(st.sampled_from([None, 1, 2])),
        )
    return HostTopology(nodes, functions, address_bits=draw(st.sampled_from([None, 39, 46])))


BARS = (
    (),
    (Bar(0, 16 << 20, 0x40200), Bar(2, 128 << 30, 0x14220C), Bar(5, 128, 0x40101)),
    (Bar(0, 1 << 40, 0x14220C),),
)
CHAINS = ((), (1,), (1, 0), (1, 0, 2), (1, 0, 3), (1, 0, 3, 0, 5), (1, 0, 3, 0, 6), (1, 0, 3, 0, 6, 0, 7), (2, 0, 1))
"""The bridges above a function, by their slots on the way down: root port, upstream port, downstream port, and on."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    host = draw(topologies())
    quote = draw(st.sampled_from("\"'"))
    newline = draw(st.sampled_from(["\n", "\r\n", ""]))
    cells = draw(st.lists(st.integers(0, 5), max_size=4, unique=True))
    lines = [f"<domain type={quote}kvm{quote}>", " <name>any</name>"]
    machine = draw(st.sampled_from(["q35", "q35", "q35", "pc-q35-7.2", "pc-i440fx-7.2"]))
    lines.append(f" <os><type arch={quote}x86_64{quote} machine={quote}{machine}{quote}>hvm</type></os>")
    lines.append(" <cpu><numa>")
    for position, cell in enumerate(cells):
        memory = draw(st.sampled_from([0, 1024, 1024]))
        cpus = f"{position * 2}-{position * 2 + 1}" if draw(st.booleans()) else ""
        lines.append(f"  <cell id={quote}{cell}{quote} cpus={quote}{cpus}{quote} memory={quote}{memory}{quote}/>")
    lines.append(" </numa></cpu>")
    lines.append(" <cputune>")
    lines += [
        f"  <vcpupin vcpu={quote}{vcpu}{quote} cpuset={quote}{draw(st.integers(0, 31))}{quote}/>"
        for vcpu in range(2 * len(cells))
        if draw(st.booleans())
    ]
    lines.append(" </cputune>")
    lines.append(" <numatune>")
    for cell in cells:
        if draw(st.integers(0, 3)):
            nodeset = draw(st.sampled_from(sorted(host.nodes)))
            lines.append(
                f"  <memnode cellid={quote}{cell}{quote} mode={quote}strict{quote} nodeset={quote}{nodeset}{quote}/>"
            )
    lines.append(" </numatune>")
    lines.append(" <!-- devices > here --><devices>")
    lines += draw(_devices(host, quote))
    lines += [" </devices>", "</domain>"]
    options = Options(
        policy=draw(st.sampled_from(["none", "best-effort", "best-effort", "restricted", "single-numa-node"])),
        group_by=draw(st.sampled_from(["numa", "root-complex", "switch"])),
        unmapped=draw(st.sampled_from(["leave", "nearest"])),
        addressed=draw(st.sampled_from(["keep", "move"])),
        mmio=draw(st.sampled_from(["off", "report", "apply"])),
        distances=draw(st.sampled_from(["keep", "host"])),
        gpudirect_clique=draw(st.sampled_from(["none", "by-switch"])),
    )
    return Case(newline.join(lines).encode(), host, options)


@st.composite
def _devices(draw: st.DrawFn, host: HostTopology, quote: str) -> list[str]:
    sources = draw(st.lists(st.sampled_from(sorted(host.functions)), unique=True)) if host.functions else []
    sources += draw(st.lists(bdfs.filter(lambda bdf: bdf not in host.functions), max_size=1))
    indexes = draw(st.lists(st.integers(1, 40), max_size=4, unique=True))
    taken: set[tuple[int, int, int]] = set()
    found = []
    for index in indexes:
        found.append(
            f"  <controller type={quote}pci{quote} index={quote}{index}{quote} model={quote}pcie-root-port{quote}/>"
        )
    for number, source in enumerate(sources):
        at = (draw(st.sampled_from(indexes or [20])), 0, 0)
        address = ""
        if at not in taken and draw(st.integers(0, 3)) == 0:
            taken.add(at)
            bus = draw(st.sampled_from([f"0x{at[0]:02x}", str(at[0]), f"0{at[0]:o}"]))
            address = (
                f"<address type={quote}pci{quote} domain={quote}0{quote} bus={quote}{bus}{quote} slot={quote}0{quote}/>"
            )
        alias = f"<alias name={quote}ua-dev{number}{quote}></alias>" if draw(st.booleans()) else ""
        mode = f" mode={quote}subsystem{quote}" if draw(st.booleans()) else ""
        said = " ".join(
            f"{name}={quote}{value:#x}{quote}"
            for name, value in zip(("domain", "bus", "slot", "function"), _parts(source), strict=True)
        )
        kind = draw(st.sampled_from(["hostdev", "hostdev", "interface"]))
        if kind == "hostdev":
            found.append(
                f"  <hostdev{mode} type={quote}pci{quote} managed={quote}no{quote}><source><address {said}/></source>"
                f"{address}{alias}</hostdev>"
            )
        else:
            found.append(
                f"  <interface type={quote}hostdev{quote}><source><address type={quote}pci{quote} {said}/></source>"
                f"{alias}{address}</interface>"
            )
    others = [
        "<rng/>",
        "<!-- <hostdev> -->",
        "<memballoon model='virtio'></memballoon>",
        "<x:y xmlns:x='urn:x' a='>'/>",
    ]
    found += [f"  {other}" for other in draw(st.lists(st.sampled_from(others), max_size=4, unique=True))]
    return draw(st.permutations(found))


def _parts(address: PciAddress) -> tuple[int, int, int, int]:
    return address.domain, address.bus, address.slot, address.function


def _run(case: Case) -> Result | None:
    """The result; None for an input that is refused as bad, which costs nothing."""
    try:
        return case.run()
    except PcinumaError as error:
        assert error.exit_status == 2, error
        return None


@given(cases())
@SETTINGS
def test_the_output_verifies_and_is_a_fixed_point(case: Case) -> None:
    result = _run(case)
    if result is None:
        return
    assert result.refusal is None or result.refusal.code == "policy-not-met", result.refusal
    if result.report.outcome != "changed":
        assert result.xml == case.xml
        return
    assert [finding for finding in audit(load(result.xml)) if finding.severity == "error"] == []
    again = transform(result.xml, case.options, case.read_host)
    assert again.xml == result.xml
    assert again.report.outcome == "unchanged"
    placed = [(p.device.label, p.kind, p.guest_bdf) for p in result.report.plan.placements]
    assert [(p.device.label, p.kind, p.guest_bdf) for p in again.report.plan.placements] == placed


@given(cases())
@SETTINGS
def test_nothing_is_lost_and_nothing_else_changes(case: Case) -> None:
    result = _run(case)
    if result is None or result.report.outcome != "changed":
        return
    before, after = etree.fromstring(case.xml), etree.fromstring(result.xml)
    touched = {p.device.label for p in result.report.plan.placements if p.kind in ("placed", "approximate")}
    for controller in after.findall("devices/controller"):
        alias = controller.find("alias")
        if alias is not None and alias.get("name", "").startswith("ua-pcinuma-"):
            _drop(controller)
    plan = result.report.plan
    for named, path in ((plan.address_bits, "maxphysaddr"), (plan.distances, "distances"), (plan.cliques, "override")):
        written = after.findall(f".//{{*}}{path}")
        assert len(written) == (0 if not named else len(plan.distances) if path == "distances" else 1)
        for element in written:
            _drop(element)
    for root in (before, after):
        for device in [*root.iterfind("devices/hostdev"), *root.iterfind("devices/interface")]:
            source = device.find("source/address")
            assert source is not None
            bdf = PciAddress(*(int(source.get(name, "0"), 16) for name in ("domain", "bus", "slot", "function")))
            if str(bdf) in touched:
                for address in device.findall("address"):
                    _drop(address)
                if "mode" in device.attrib:
                    del device.attrib["mode"]
    assert etree.tostring(before, method="c14n") == etree.tostring(after, method="c14n")


def _drop(element: etree._Element) -> None:
    """Take the element out with its white space; our insertions stand before what was there, after a copy of it."""
    parent = element.getparent()
    assert parent is not None
    previous = element.getprevious()
    if previous is not None:
        previous.tail = element.tail
    else:
        parent.text = element.tail
    parent.remove(element)


@given(cases())
@SETTINGS
def test_placement_follows_the_mapping_and_the_policy(case: Case) -> None:
    result = _run(case)
    if result is None:
        return
    plan = result.report.plan
    for placement in plan.placements:
        if placement.kind == "placed":
            assert placement.host_node in plan.cell_nodes[placement.cell or 0], placement
        if placement.kind == "left":
            assert placement.guest_bdf is None
    if result.report.outcome == "changed" and case.options.policy in ("restricted", "single-numa-node"):
        assert {placement.kind for placement in plan.placements} <= {"placed", "kept"}
    indexes = [i for e in plan.expanders for i in (e.index, *(port.index for port in e.ports))]
    assert indexes == list(range(indexes[0], indexes[0] + len(indexes))) if indexes else True
    buses = [(e.bus_nr, 1 + len(e.ports)) for e in plan.expanders]
    assert all(bus + size == following[0] for (bus, size), following in itertools.pairwise(buses))
    if buses:
        assert sum(buses[-1]) == 256
    for expander in plan.expanders:
        lowest = {expander.index: PciAddress(0, 0, 0, 0)}
        for port in reversed(expander.ports):
            own = [attached.device.source for attached in port.attachments if attached.device.source]
            own += [lowest[below.index] for below in expander.ports if below.parent == port.index]
            lowest[port.index] = min(own)
        for parent in {port.parent for port in expander.ports}:
            lead = [lowest[port.index] for port in expander.ports if port.parent == parent]
            assert lead == sorted(lead)


@given(cases())
@SETTINGS
def test_a_check_of_any_domain_ends(case: Case) -> None:
    try:
        check(case.xml, case.options, case.read_host)
    except PcinumaError as error:
        assert error.exit_status == 2, error


@given(cases(), st.data())
@SETTINGS
def test_damage_ends_in_an_error_of_ours(case: Case, data: st.DataObject) -> None:
    """Any bytes: a result, the input untouched, or one of our own errors."""
    at = data.draw(st.integers(0, len(case.xml) - 1))
    piece = data.draw(
        st.sampled_from([b"", b"<", b"'", b'"', b"\x00", b"&", b"0x", b"-1", b"99999999999", b"\xff", b"<!--"])
    )
    broken = case.xml[:at] + piece + case.xml[at + data.draw(st.integers(0, 30)) :]
    try:
        result = transform(broken, case.options, case.read_host)
    except PcinumaError as error:
        assert "\n" not in str(error)
        return
    if result.report.outcome != "changed":
        assert result.xml == broken
    else:
        assert transform(result.xml, case.options, case.read_host).xml == result.xml


@pytest.mark.parametrize("count", [1, 32, 33, 200])
def test_many_devices_on_one_cell(count: int) -> None:
    """200 devices, their expander and the root bus with its spare ports: 1 + 200 + 1 + 16 of 256 bus numbers."""
    functions = {PciAddress(0, 1 + number, 0, 0): 0 for number in range(count)}
    host = HostTopology(
        {0: HostNode(0, CpuSet.parse("0-7"), 1024)},
        {address: HostFunction(address, node) for address, node in functions.items()},
    )
    hostdevs = "".join(
        f"<hostdev type='pci'><source><address domain='0' bus='{a.bus}' slot='0' function='0'/></source></hostdev>"
        for a in functions
    )
    xml = (
        "<domain><os><type arch='x86_64' machine='q35'>hvm</type></os><cpu><numa><cell id='0' cpus='0' memory='1'/></numa>"
        "</cpu><numatune><memnode cellid='0' nodeset='0'/></numatune>"
        f"<devices>{hostdevs}</devices></domain>"
    )
    result = transform(xml.encode(), Options(policy="restricted"), lambda query: host)
    assert result.report.outcome == "changed"
    assert [finding.code for finding in audit(load(result.xml))] == []
    last = etree.fromstring(result.xml).findall("devices/hostdev/address")[-1]
    assert last.get("bus") == f"0x{1 + count:02x}"
