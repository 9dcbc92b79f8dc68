"""VMs over the machines of the corpus: what comes of each, as the rows of the tables in docs/proof.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pcinuma.audit import audit
from pcinuma.domain_xml import load
from pcinuma.model import Options, PciAddress, Placement
from pcinuma.pipeline import Result, transform
from tests.proof.machines import Machine
from tests.support.domains import domain, hostdev
from tests.support.guest import boot
from tests.support.libvirt import define_and_dump

GROUPINGS = ("numa", "root-complex", "switch")
LOADER = '<loader readonly="yes" secure="no" type="pflash">/usr/share/OVMF/OVMF_CODE_4M.fd</loader>'
VCPUS_A_CELL = 2
HEAD = ("machine", "VM", "cells", "devices", "numa", "root-complex", "switch", "order", "verified", "libvirt", "boots")


@dataclass(frozen=True)
class Vm:
    """A VM over some nodes of a machine: a cell for each, with the devices it gets."""

    machine: Machine
    name: str
    nodes: Sequence[int]
    devices: Sequence[PciAddress]

    @property
    def expected(self) -> dict[PciAddress, int]:
        """The cell of every device that has one: the cell of its node, where that is known and the VM is on it."""
        cell_of = {node: cell for cell, node in enumerate(self.nodes)}
        nodes = {device: self.machine.node_of(device) for device in self.devices}
        return {device: cell_of[node] for device, node in nodes.items() if node is not None and node in cell_of}

    @property
    def xml(self) -> bytes:
        """The domain as KubeVirt writes it: host devices first, then GPUs, then VFs; vCPUs pinned, a memnode a cell."""
        kinds = {"gpu": "gpu", "vf": "sriov"}
        order = ["hostdevice", "gpu", "sriov"]
        named = [(kinds.get(self.machine.roles[device], "hostdevice"), device) for device in self.devices]
        named.sort(key=lambda entry: order.index(entry[0]))
        written = domain(
            dict(enumerate(self.nodes)), [hostdev(str(device), f"ua-{kind}-{device.dashed}") for kind, device in named]
        )
        if any(kind == "gpu" for kind, _ in named):  # with UEFI, as VMs with many GPUs need it
            written = written.replace("hvm</type>\n", f"hvm</type>\n\t\t{LOADER}\n")
        pins = "".join(
            f'\t\t<vcpupin vcpu="{VCPUS_A_CELL * cell + number}" cpuset="{cpu}"></vcpupin>\n'
            for cell, node in enumerate(self.nodes)
            for number, cpu in enumerate(list(self.machine.topology.nodes[node].cpus)[:VCPUS_A_CELL])
        )
        return written.replace("\t<numatune>", f"\t<cputune>\n{pins}\t</cputune>\n\t<numatune>").encode()

    def run(self, group_by: str) -> Result:
        return transform(self.xml, Options(group_by=group_by), self.machine.read_host)


def vms(machine: Machine) -> Iterator[Vm]:
    """Over all nodes with all devices; over half of them, and over the one with most, with the devices of these; and
    over half of them with all devices, as where the kubelet does not align."""
    devices = sorted(machine.roles)
    nodes = machine.nodes
    yield Vm(machine, "all nodes", nodes, devices)
    if len(nodes) == 1:
        return
    half = nodes[: len(nodes) // 2]
    of_half = [device for device in devices if machine.node_of(device) in half]
    if len(half) > 1 and of_half:
        yield Vm(machine, "half of them", half, of_half)
    most = max(nodes, key=lambda node: sum(machine.node_of(device) == node for device in devices))
    if own := [device for device in devices if machine.node_of(device) == most]:
        yield Vm(machine, "one node", [most], own)
    if len(of_half) < len(devices):
        yield Vm(machine, "half of them, all devices", half, devices)


@dataclass(frozen=True)
class Row:
    """What came of a VM under each grouping. ``boots`` is the firmware that a guest of it booted with, or nothing."""

    vm: Vm
    placed: tuple[int, ...]
    order: str
    verified: int
    libvirt: int | None
    boots: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row's text, by the columns of HEAD."""
        count = len(self.vm.devices)
        return (
            self.vm.machine.name,
            self.vm.name,
            str(len(self.vm.nodes)),
            str(count),
            *(f"{placed}/{count}" for placed in self.placed),
            self.order,
            f"{self.verified}/{len(GROUPINGS)}",
            "" if self.libvirt is None else f"{self.libvirt}/{len(GROUPINGS)}",
            self.boots,
        )


def row(vm: Vm, *, libvirt: bool) -> Row:
    """Runs the VM under each grouping. Raises AssertionError where a device is not on the cell of its node, or one
    without a cell has been moved."""
    results = {grouping: vm.run(grouping) for grouping in GROUPINGS}
    defined = 0
    for grouping, result in results.items():
        assert result.refusal is None, f"{vm.machine.name}, {vm.name}, {grouping}: {result.refusal}"
        placed = {p.source: p.cell for p in result.report.plan.placements if p.kind == "placed"}
        assert placed == vm.expected, f"{vm.machine.name}, {vm.name}, {grouping}"
        if libvirt:
            dump = define_and_dump(result.xml.decode())
            defined += not _errors(dump.encode())
    return Row(
        vm,
        tuple(sum(p.kind == "placed" for p in result.report.plan.placements) for result in results.values()),
        _order(vm, list(results.values())),
        sum(not _errors(result.xml) for result in results.values()),
        defined if libvirt else None,
    )


def booted(row: Row, group_by: str, firmware: str) -> Row:
    """The row with a guest booted. Raises AssertionError where the guest sees a device elsewhere than reported."""
    assert_boots(row.vm, group_by, firmware)
    return replace(row, boots=f"{firmware} ({group_by})")


def assert_boots(vm: Vm, group_by: str, firmware: str) -> None:
    result = vm.run(group_by)
    view = boot(result.xml.decode(), firmware=firmware, timeout=300)
    assert view.missing == []
    for placement in result.report.plan.placements:
        device = view.devices[placement.device.alias or ""]
        assert device.bars_assigned, placement.device.label
        if placement.kind == "placed":
            assert (device.bdf, device.numa_node) == (str(placement.guest_bdf), placement.cell), placement.device.label
        else:
            assert device.numa_node == -1, placement.device.label


def _errors(xml: bytes) -> list[str]:
    return [finding.message for finding in audit(load(xml)) if finding.severity == "error"]


def _order(vm: Vm, results: Sequence[Result]) -> str:
    """Whether the guest numbers what is placed in the host's order under every grouping: ``all`` of it, the ``GPUs``
    alone, or ``no``; nothing is placed: empty."""
    found = [_sorted(result.report.plan.placements) for result in results]
    if not any(found):
        return ""
    if all(_ascends(placements) for placements in found):
        return "all"
    roles = vm.machine.roles
    gpus = [[p for p in placements if p.source is not None and roles[p.source] == "gpu"] for placements in found]
    return "GPUs" if all(map(_ascends, gpus)) else "no"


def _sorted(placements: Sequence[Placement]) -> list[Placement]:
    return sorted((p for p in placements if p.kind == "placed"), key=lambda p: p.source or PciAddress(0, 0, 0, 0))


def _ascends(placements: Sequence[Placement]) -> bool:
    bdfs = [p.guest_bdf for p in placements if p.guest_bdf is not None]
    return len(bdfs) == len(placements) and bdfs == sorted(bdfs)
