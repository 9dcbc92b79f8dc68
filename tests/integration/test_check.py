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
from tests.support.libvirt import LibvirtRejected, define_and_dump

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


# --- what the guest sees of a device, and why ------------------------------------------------------------------


def test_without_an_address() -> None:
    finding = said(domain({0: 0}, [hostdev(GPU, "ua-gpu-a")]), HOST)["not-placed"]
    assert finding.message == (
        f"{GPU} has no guest address yet, and libvirt gives it one on bus 0: the guest will see numa_node -1 for it,"
        " not cell 0"
    )
    assert finding.hint == "pcinuma transform places it"


BRIDGES = (
    PORT.format(1, 0, 4) + f'<controller type="pci" index="2" model="pcie-to-pci-bridge">{AT.format(1)}</controller>'
)
NAMELESS = EXPANDER.format(1, 250, 0).replace("<node>0</node>", "") + PORT.format(2, 1, 0)


@pytest.mark.parametrize(
    ("address", "controllers", "where"),
    [
        (AT.format(0).replace('slot="0x00"', 'slot="0x08"'), "", "on bus 0"),
        (AT.format(1), PORT.format(1, 0, 4), "on pcie-root-port 1, below no expander"),
        (AT.format(2).replace('slot="0x00"', 'slot="0x03"'), BRIDGES, "on pcie-to-pci-bridge 2, below no expander"),
        (AT.format(5), "", "on index 5, which libvirt makes a root port on bus 0"),
        (AT.format(2), NAMELESS, "below expander 1, which names no cell"),
    ],
    ids=["bus 0", "port", "bridge", "no controller", "expander without a node"],
)
def test_an_address_on_no_cell(address: str, controllers: str, where: str) -> None:
    xml = domain({0: 0}, [hostdev(GPU, "ua-gpu-a", address)], extra=controllers)
    finding = said(xml, HOST)["addressed"]
    assert f"is {where}: the guest sees numa_node -1, not cell 0" in finding.message
    assert finding.severity == "warning"
    assert said(xml, HOST, Options(policy="restricted"))["addressed"].severity == "error"


@pytest.mark.guest
@pytest.mark.timeout(300)
def test_that_is_what_the_guest_sees() -> None:
    """On bus 0, on a port there, below an expander that names no cell, and below one that does."""
    fourth = EXPANDER.format(4, 253, 0) + PORT.format(5, 4, 0)
    ports = NAMELESS.replace('"250"', '"250"') + PORT.format(3, 0, 7) + fourth
    places = {"ua-port": 3, "ua-nameless": 2, "ua-placed": 5}
    bdfs = {name: f"0000:{0x21 + n:02x}:00.0" for n, name in enumerate(("ua-root", *places))}
    addresses = {name: AT.format(bus) for name, bus in places.items()}
    addresses["ua-root"] = AT.format(0).replace('slot="0x00"', 'slot="0x08"')
    xml = domain({0: 0}, [hostdev(bdfs[name], name, at) for name, at in addresses.items()], extra=ports)
    found = check(xml.encode(), Options(), sockets(dict.fromkeys(bdfs.values(), 0)))
    minus_1 = {finding.device for finding in found if finding.code == "addressed"}
    assert minus_1 == {bdfs[name] for name in ("ua-root", "ua-port", "ua-nameless")}
    view = boot(define_and_dump(xml))
    assert {name: device.numa_node for name, device in view.devices.items()} == {
        name: 0 if name == "ua-placed" else -1 for name in bdfs
    }


@pytest.mark.libvirt
def test_an_empty_port_of_another_cell_invites_it() -> None:
    """libvirt does put it there, ours on node 0 too."""
    ports = EXPANDER.format(1, 200, 1) + "".join(PORT.format(2 + slot, 1, slot) for slot in range(4))
    xml = domain({0: 0, 1: 1}, [hostdev(GPU, "ua-gpu-a"), hostdev(FAR, "ua-gpu-b")], extra=ports)
    finding = said(xml, HOST)["not-placed"]
    assert "maybe port 2, where the guest sees cell 1, or one on bus 0, where it sees numa_node -1" in finding.message
    assert said(define_and_dump(xml), HOST)["foreign-cell"].device == GPU


@pytest.mark.parametrize(
    ("xml", "code", "view"),
    [
        (domain({0: 2}, [hostdev(GPU, "ua-gpu-a")]), "node-unmapped", "numa_node -1 for it"),
        (by_another_hand(252, 254).replace('cellid="0"', 'cellid="x"').replace('cellid="1"', 'cellid="0"'), "", ""),
    ],
)
def test_of_no_cell_of_ours(xml: str, code: str, view: str) -> None:
    if code:
        assert said(xml, HOST)[code].message.endswith(f"; the guest will see {view}")
        return
    unknown = sockets({GPU: -1, FAR: 1})
    assert said(by_another_hand(252, 254), unknown)["numa-unknown"].message.endswith(
        "; the guest will see it on cell 0"
    )


def test_what_the_options_would_move() -> None:
    xml = domain({0: 0}, [hostdev(GPU, "ua-gpu-a", AT.format(0).replace('slot="0x00"', 'slot="0x08"'))])
    found = said(xml, HOST, Options(addressed="move", policy="restricted"))
    assert "addressed" not in found
    assert found["not-placed"].severity == "warning"
    assert "the guest sees numa_node -1, not cell 0" in found["not-placed"].message


# --- what libvirt would say ------------------------------------------------------------------------------------


def test_a_cell_of_a_node_that_is_not_here() -> None:
    xml = domain({0: 0, 1: 7}, [hostdev(GPU, "ua-gpu-a")])
    finding = said(xml, HOST)["memnode-absent"]
    assert (finding.severity, "cell 1 is bound to host node 7" in finding.message) == ("warning", True)
    assert "memnode-absent" not in said(domain({0: 0, 1: 3}, [hostdev(GPU, "ua-gpu-a")]), HOST)


def test_cells_that_nothing_binds() -> None:
    xml = domain({0: None, 1: None}, [hostdev(GPU, "ua-gpu-a")])
    finding = said(xml, HOST)["node-unmapped"]
    assert "no memnode and no vcpupin binds a cell" in finding.message
    assert "unmapped" not in str(finding.hint)


ROOT = '<controller type="pci" index="0" model="pcie-root"/>'
INDEXLESS = '<controller type="pci" model="{}">{}</controller>'


@pytest.mark.libvirt
@pytest.mark.parametrize(
    ("controllers", "is_refused"),
    [
        (INDEXLESS.format("pcie-root-port", ""), True),
        (ROOT + INDEXLESS.format("pcie-root-port", "") * 2, False),
        (ROOT + INDEXLESS.format("pcie-expander-bus", "<target busNr='100'><node>0</node></target>") + PORT.format(2, 1, 0), False),
        (PORT.format(1, 0, 4).replace("pcie-root-port", "PCIE-ROOT-PORT"), True),
        (PORT.format(1, 0, 4).replace("pcie-root-port", "pcie-to-pci-bridge"), True),
        (
            PORT.format(2, 1, 0).replace("root-port", "switch-upstream-port")
            + PORT.format(3, 2, 0).replace("root-port", "switch-downstream-port"),
            False,
        ),
        (PORT.format(2, 1, 0).replace("pcie-root-port", "pcie-to-pci-bridge"), False),
        (PORT.format(2, 1, 0).replace("pcie-root-port", "dmi-to-pci-bridge"), True),
    ],
    ids=[
        "index 0", "after the root", "an expander", "no model", "a bridge on the root",
        "a switch on an index left out", "a bridge on it", "a bridge of the root on it",
    ],
)  # fmt: skip
def test_controllers_as_people_write_them(controllers: str, is_refused: bool) -> None:
    xml = domain({0: 0}, [hostdev(GPU, "ua-gpu-a")], extra=controllers)
    found = [finding for finding in check(xml.encode(), Options(), HOST) if finding.severity == "error"]
    if is_refused:
        with pytest.raises(LibvirtRejected):
            define_and_dump(xml)
    else:
        define_and_dump(transform(xml.encode(), Options(), HOST).xml.decode())
    assert bool(found) is is_refused, found


@pytest.mark.libvirt
def test_an_expander_on_i440fx() -> None:
    """As KubeVirt 1.9's own placement writes it for such a VM."""
    xml = by_another_hand(252, 254).replace('machine="q35"', 'machine="pc"')
    with pytest.raises(LibvirtRejected, match="not supported with this machine type"):
        define_and_dump(xml)
    assert said(xml, HOST)["expander-model"].severity == "error"


@pytest.mark.libvirt
def test_a_device_below_an_expander_without_an_index() -> None:
    """libvirt gives it 1, the lowest that is free, and so the port is on it."""
    expander = INDEXLESS.format("pcie-expander-bus", "<target busNr='100'><node>0</node></target>")
    devices = [hostdev(GPU, "ua-gpu-a", AT.format(2))]
    xml = domain({0: 0}, devices, extra=ROOT + expander + PORT.format(2, 1, 0))
    assert set(said(xml, HOST)) == {"already-placed"}
    assert set(said(define_and_dump(xml), HOST)) == {"already-placed"}


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


def test_a_vhost_scsi_device_takes_a_port_too() -> None:
    devices = [hostdev(f"0000:{0x20 + n // 8:02x}:{n % 8:02x}.0", f"ua-d{n}") for n in range(238)]
    vhost = (
        '<hostdev mode="subsystem" type="scsi_host"><source protocol="vhost" wwpn="naa.5001405376e34ea9"/></hostdev>'
    )
    needed = []
    for extra in ("", vhost):
        found = said(domain({0: 0}, devices, extra=extra), sockets({}))["bus-numbers"]
        needed.append(int(found.message.rsplit(" ", 1)[1]))
    assert needed[1] == needed[0] + 1
