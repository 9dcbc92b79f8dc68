"""``check``: what it says of domains of any origin beyond the rules of libvirt and QEMU, each built by hand."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pcinuma.check import check
from pcinuma.host_file import HostFile, load
from pcinuma.model import Finding, Options
from pcinuma.pipeline import transform
from tests.support import hosts
from tests.support.domains import domain, hostdev
from tests.support.guest import boot
from tests.support.libvirt import define_and_dump

NODES = {0: "0-3", 1: "4-7", 2: "8-11", 3: "12-15"}
GPU, FAR = "0000:21:00.0", "0000:a1:00.0"


def sockets(functions: dict[str, int], packages: dict[int, int] | None = None) -> HostFile:
    """A host of four nodes, two a socket unless said otherwise."""
    packages = packages if packages is not None else {0: 0, 1: 0, 2: 1, 3: 1}
    nodes: list[dict[str, Any]] = [
        {"id": node, "cpus": cpus, "package": packages.get(node)} for node, cpus in NODES.items()
    ]
    record = {"kind": "pcinuma-host", "version": 1, "nodes": nodes}
    record["functions"] = [{"address": bdf, "node": node} for bdf, node in functions.items()]
    return load(json.dumps(record).encode(), "a host of the tests")


def pinned(xml: str, pins: dict[int, str]) -> str:
    lines = "".join(f'<vcpupin vcpu="{vcpu}" cpuset="{cpus}"/>' for vcpu, cpus in pins.items())
    return xml.replace("<numatune>", f"<cputune>{lines}</cputune><numatune>")


def said(xml: str, host: HostFile, options: Options = Options()) -> dict[str, Finding]:
    return {finding.code: finding for finding in check(xml.encode(), options, host)}


# --- cells -----------------------------------------------------------------------------------------------------


def test_a_cell_across_sockets() -> None:
    xml = pinned(domain({0: 1}, [hostdev(GPU, "ua-gpu-a")]), {0: "4", 1: "8"})
    finding = said(xml, sockets({GPU: 1}))["cell-across-sockets"]
    assert finding.severity == "warning"
    assert "cell 0 is on host nodes 1, 2" in finding.message
    assert "sockets 0, 1" in finding.message


@pytest.mark.parametrize("packages", [{0: 0, 1: 0}, {}])
def test_a_cell_across_nodes_of_one_socket_or_of_who_knows(packages: dict[int, int]) -> None:
    xml = pinned(domain({0: 0}, [hostdev(GPU, "ua-gpu-a")]), {0: "0", 1: "5"})
    found = said(xml, sockets({GPU: 0}, packages))
    assert "host nodes 0, 1" in found["cell-across-nodes"].message
    assert "cell-across-sockets" not in found


def test_memory_of_two_nodes_counts_too() -> None:
    xml = domain({0: 0}, [hostdev(GPU, "ua-gpu-a")]).replace('nodeset="0"', 'nodeset="0,3"')
    assert "host nodes 0, 3" in said(xml, sockets({GPU: 0}))["cell-across-sockets"].message


def test_a_cell_on_its_node_is_fine() -> None:
    xml = pinned(domain({0: 0, 1: 2}, [hostdev(GPU, "ua-gpu-a")]), {0: "0", 1: "1", 2: "8", 3: "9-11"})
    assert [code for code in said(xml, sockets({GPU: 0})) if code.startswith("cell")] == []


def topology(xml: str, **counts: int) -> str:
    said = " ".join(f'{name}="{count}"' for name, count in counts.items())
    return xml.replace("<cpu>", f"<cpu><topology {said}/>")


@pytest.mark.parametrize(
    ("counts", "code", "words"),
    [
        ({"sockets": 1, "cores": 2, "threads": 2}, "cell-cuts-socket", "socket 0 is parted between cells 0, 1"),
        ({"sockets": 1, "dies": 2, "cores": 2, "threads": 1}, "cell-cuts-socket", "socket 0"),
        ({"sockets": 1, "cores": 1, "threads": 4}, "cell-cuts-core", "core 0 is parted between cells 0, 1"),
        ({"sockets": 2, "cores": 1, "threads": 2}, None, ""),
        ({"sockets": 2, "cores": 2, "threads": 1}, None, ""),
        ({"sockets": 4, "cores": 1, "threads": 1}, None, ""),
    ],
)
def test_cells_against_the_guests_own_topology(counts: dict[str, int], code: str | None, words: str) -> None:
    """Two cells of two vCPUs each: 0 and 1, 2 and 3."""
    found = said(topology(domain({0: 0, 1: 2}, [hostdev(GPU, "ua-gpu-a")]), **counts), sockets({GPU: 0}))
    assert [name for name in found if name.startswith("cell-cuts")] == ([code] if code else [])
    assert code is None or words in found[code].message


def swapped() -> str:
    """Cell 0 has the later vCPUs."""
    xml = domain({0: 0, 1: 1}, [hostdev(GPU, "ua-gpu-a"), hostdev(FAR, "ua-gpu-b")])
    return xml.replace('cpus="0,1"', 'cpus="x"').replace('cpus="2,3"', 'cpus="0,1"').replace('cpus="x"', 'cpus="2,3"')


def test_cells_whose_vcpus_do_not_ascend() -> None:
    finding = said(swapped(), sockets({GPU: 0, FAR: 1}))["cell-order"]
    assert "cell 1 is node 0, cell 0 is node 1" in finding.message
    assert "cell-order" not in said(domain({0: 0, 1: 1}, [hostdev(GPU, "ua-gpu-a")]), sockets({GPU: 0}))


@pytest.mark.guest
@pytest.mark.timeout(300)
def test_linux_does_number_the_nodes_so() -> None:
    result = transform(swapped().encode(), Options(), hosts.host({0: "0-7", 1: "8-15"}, {GPU: 0, FAR: 1}))
    view = boot(result.xml.decode())
    assert {alias: device.numa_node for alias, device in view.devices.items()} == {"ua-gpu-a": 1, "ua-gpu-b": 0}


# --- order and expanders ---------------------------------------------------------------------------------------

EXPANDER = '<controller type="pci" index="{}" model="pcie-expander-bus"><target busNr="{}"><node>{}</node></target></controller>'
PORT = (
    '<controller type="pci" index="{}" model="pcie-root-port">'
    '<address type="pci" bus="{:#x}" slot="{:#x}" function="0x0"/></controller>'
)
AT = '<address type="pci" domain="0x0000" bus="{:#x}" slot="0x00" function="0x0"/>'


def by_another_hand(first: int, second: int, ports: str = "", *, nodes: tuple[int, int] = (0, 1)) -> str:
    """As KubeVirt's own placement makes it: an expander a cell, GPU on the first, FAR on the second."""
    controllers = EXPANDER.format(1, first, nodes[0]) + PORT.format(2, 1, 0) + EXPANDER.format(3, second, nodes[1])
    controllers += PORT.format(4, 3, 0) + ports
    devices = [hostdev(GPU, "ua-gpu-a", AT.format(2)), hostdev(FAR, "ua-gpu-b", AT.format(4))]
    return domain({0: 0, 1: 1}, devices, extra=controllers)


HOST = sockets({GPU: 0, FAR: 1})


def test_the_last_cells_devices_first() -> None:
    """busNr counted down by cell, as KubeVirt's own placement does."""
    finding = said(by_another_hand(254, 252), HOST)["reversed-order"]
    assert (finding.severity, "0000:a1:00.0 before 0000:21:00.0" in finding.message) == ("warning", True)
    assert "reversed-order" not in said(by_another_hand(252, 254), HOST)


def test_reversed_below_one_expander() -> None:
    devices = [hostdev(GPU, "ua-gpu-a", AT.format(3)), hostdev(FAR, "ua-gpu-b", AT.format(2))]
    controllers = EXPANDER.format(1, 250, 0) + PORT.format(2, 1, 0) + PORT.format(3, 1, 1)
    xml = domain({0: 0}, devices, extra=controllers)
    assert "reversed-order" in said(xml, sockets({GPU: 0, FAR: 0}))


def test_a_second_set_of_expanders() -> None:
    xml = by_another_hand(250, 252, EXPANDER.format(5, 254, 0) + PORT.format(6, 5, 0))
    finding = said(xml, HOST)["duplicate-expander"]
    assert "2 expanders are for cell 0" in finding.message
    assert "below 5" in finding.message
    assert "duplicate-expander" not in said(by_another_hand(252, 254), HOST)


def test_too_few_buses_are_an_error_and_a_foreign_cell_is() -> None:
    crowded = by_another_hand(252, 253)
    assert said(crowded, HOST)["bus-room"].severity == "error"
    foreign = said(by_another_hand(252, 254, nodes=(1, 0)), HOST)["foreign-cell"]
    assert (foreign.severity, foreign.device) == ("error", FAR)  # the last of two


@pytest.mark.guest
@pytest.mark.timeout(300)
def test_the_guest_loses_what_has_no_bus() -> None:
    assert boot(define_and_dump(by_another_hand(252, 253))).missing != []


def test_why_a_guest_sees_minus_1() -> None:
    finding = said(domain({0: 0}, [hostdev(GPU, "ua-gpu-a")]), HOST)["not-placed"]
    assert "numa_node -1" in finding.message


def test_a_rebuilt_switch_is_named_whatever_the_options() -> None:
    above = {
        "0000_21_00_0": {"bridges": ["0000:20:01.0", "0000:1e:00.0", "0000:1f:00.0"]},
        "0000_22_00_0": {"bridges": ["0000:20:01.0", "0000:1e:00.0", "0000:1f:01.0"]},
    }
    host = hosts.host({0: "0-7"}, {GPU: 0, "0000:22:00.0": 0}, **above)
    devices = [hostdev(GPU, "ua-gpu-a"), hostdev("0000:22:00.0", "ua-hostdevice-b")]
    made = transform(domain({0: 0}, devices).encode(), Options(group_by="switch"), host).xml.decode()
    assert "switch-link-speed" in said(made, host)
    assert "switch-link-speed" not in said(domain({0: 0}, devices), host, Options(group_by="switch"))


def test_nothing_is_said_to_be_set() -> None:
    bars = [{"index": 2, "size": 1 << 41, "flags": "0x14220c"}]
    host = hosts.host({0: "0-7"}, {GPU: 0}, **{"0000_21_00_0": {"bars": bars}})
    xml = domain({0: 0}, [hostdev(GPU, "ua-gpu-a")])
    options = Options(mmio="apply", distances="host", gpudirect_clique="by-switch")
    finding = said(xml, host, options)["mmio-window"]
    assert (finding.severity, re.search("is set", finding.message)) == ("warning", None)
