"""The topology file beside a booted guest: NCCL finds its devices by the BDF, so each must be what Linux shows."""

from __future__ import annotations

import re

import pytest

from pcinuma.model import CpuSet, Options
from pcinuma.nccl_topo import topology_file
from pcinuma.pipeline import transform
from tests.conftest import ROOT
from tests.support import hosts, nccl, nccl_hosts
from tests.support.domains import domain, hostdev
from tests.support.guest import GuestView, boot

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

EXAMPLE = ROOT / "examples" / "two-sockets"
CONTROLLER = '<controller type="pci" index="{}" model="{}">{}</controller>'
AT = '<address type="pci" domain="0x0000" bus="0x{:02x}" slot="0x{:02x}" function="0x0"></address>'


def agree(text: str, view: GuestView) -> dict[str, str]:
    """The BDF in the file of each device of the host; the guest shows whatever the file names, made-up switches apart,
    on the node of its ``<cpu>``."""
    assert nccl.problems(text) == []
    system = nccl.read(text)
    assert [int(cpu.attributes["numaid"]) for cpu in system.children] == sorted(view.nodes)
    for cpu in system.children:
        named = [pci.attributes["busid"] for pci in cpu.all("pci") if not pci.attributes["busid"].startswith("ffff:")]
        assert {bdf: view.pci[bdf].numa_node for bdf in named} == dict.fromkeys(named, int(cpu.attributes["numaid"]))
    return {host: bdf for bdf, host in re.findall(r'busid="([^"]+)".*<!-- host ([^ ]+) -->', text)}


def same_vcpus(text: str, view: GuestView) -> None:
    """Each ``<cpu>`` has the CPUs of the guest's node; the stand-in keeps the vCPUs of a small domain."""
    for cpu in nccl.read(text).children:
        mask = int(cpu.attributes["affinity"], 16)
        seen = CpuSet.parse(view.nodes[int(cpu.attributes["numaid"])].cpus)
        assert [vcpu for vcpu in range(32) if mask >> vcpu & 1] == list(seen) != []


@pytest.mark.parametrize("group_by", ["numa", "switch"])
def test_two_sockets(group_by: str) -> None:
    host = hosts.from_file(EXAMPLE / "host.json")
    result = transform((EXAMPLE / "domain.xml").read_bytes(), Options(group_by=group_by), host)
    view = boot(result.xml.decode())
    text = topology_file(result.xml, host).text
    by_host = agree(text, view)
    assert text.count('busid="ffff:') == (2 if group_by == "numa" else 0)
    names = {
        "ua-gpu-gpu0": "0000:1a:00.0",
        "ua-hostdevice-ib0": "0000:1c:00.0",
        "ua-gpu-gpu1": "0000:3d:00.0",
        "ua-sriov-storage": "0000:5e:02.1",
        "ua-gpu-gpu2": "0000:9a:00.0",
        "ua-hostdevice-ib1": "0000:9c:00.0",
        "ua-gpu-gpu3": "0000:bd:00.0",
    }
    assert by_host == {bdf: view.devices[alias].bdf for alias, bdf in names.items()}


def test_a_guest_with_a_switch_of_its_own() -> None:
    """The host's switch above the GPU and the NIC of node 0 is in the guest as well, at its upstream port's BDF."""
    port = "0000:5d:01.0"
    functions = {
        port: (1, nccl_hosts.bridge()),
        "0000:5e:00.0": (1, nccl_hosts.bridge(port)),
        "0000:5f:00.0": (1, nccl_hosts.bridge(port, "0000:5e:00.0")),
        "0000:5f:01.0": (1, nccl_hosts.bridge(port, "0000:5e:00.0")),
        "0000:60:00.0": (1, nccl_hosts.gpu(port, "0000:5e:00.0", "0000:5f:00.0")),
        "0000:61:00.0": (1, nccl_hosts.nic(port, "0000:5e:00.0", "0000:5f:01.0")),
        "0000:21:00.0": (0, nccl_hosts.gpu()),
    }
    host = nccl_hosts.host({0: "0-7", 1: "8-15"}, functions, cpu=nccl_hosts.INTEL)
    devices = [
        CONTROLLER.format(1, "pcie-expander-bus", '<target busNr="240"><node>1</node></target>'),
        CONTROLLER.format(2, "pcie-root-port", AT.format(1, 0)),
        CONTROLLER.format(3, "pcie-switch-upstream-port", AT.format(2, 0)),
        CONTROLLER.format(4, "pcie-switch-downstream-port", AT.format(3, 0)),
        CONTROLLER.format(5, "pcie-switch-downstream-port", AT.format(3, 1)),
        hostdev("0000:60:00.0", "ua-gpu-a", AT.format(4, 0)),
        hostdev("0000:61:00.0", "ua-hostdevice-n", AT.format(5, 0)),
        hostdev("0000:21:00.0", "ua-gpu-b"),
    ]
    result = transform(domain({0: 0, 1: 1}, devices).encode(), Options(policy="restricted"), host)
    assert result.report.outcome == "changed", result.refusal
    view = boot(result.xml.decode())
    text = topology_file(result.xml, host).text
    assert agree(text, view) == {
        "0000:60:00.0": view.devices["ua-gpu-a"].bdf,
        "0000:61:00.0": view.devices["ua-hostdevice-n"].bdf,
        "0000:21:00.0": view.devices["ua-gpu-b"].bdf,
    }
    # Linux's path: root bus, root port, upstream port, downstream port, device; NCCL takes the second above a device
    (switch,) = re.findall(r'busid="([^"]+)".*<!-- host switch 0000:5e:00.0 -->', text)
    for alias in ("ua-gpu-a", "ua-hostdevice-n"):
        assert view.pci[view.devices[alias].bdf].path.split("/")[-3] == switch
    same_vcpus(text, view)


def test_cells_whose_vcpus_do_not_ascend() -> None:
    """Linux's node 0 is the cell of vCPU 0, which is cell 1 here."""
    functions = {"0000:41:00.0": (0, nccl_hosts.gpu()), "0000:81:00.0": (1, nccl_hosts.gpu())}
    host = nccl_hosts.host({0: "0-7", 1: "8-15"}, functions, cpu=nccl_hosts.INTEL)
    xml = domain({0: 0, 1: 1}, [hostdev("0000:41:00.0", "ua-gpu-a"), hostdev("0000:81:00.0", "ua-gpu-b")])
    xml = xml.replace('id="0" cpus="0,1"', 'id="0" cpus="2,3"').replace('id="1" cpus="2,3"', 'id="1" cpus="0,1"')
    result = transform(xml.encode(), Options(policy="restricted"), host)
    view = boot(result.xml.decode())
    text = topology_file(result.xml, host).text
    agree(text, view)
    same_vcpus(text, view)
