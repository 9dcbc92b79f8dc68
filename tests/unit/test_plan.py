"""What the plan makes of addresses that libvirt gave since, and how it says why a device goes or stays."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from pcinuma.domain_xml import load
from pcinuma.model import HostQuery, Options, PciAddress, Placement
from pcinuma.parse import parse
from pcinuma.pci_tree import surroundings
from pcinuma.pipeline import Result, transform
from pcinuma.plan import host_query, plan
from tests.support import hosts
from tests.support.domains import domain, hostdev, layout

HOST = hosts.host(
    {0: "0-7", 1: "8-15", 2: "16-23"},
    {
        "0000:1a:00.0": 0,
        "0000:3d:00.0": 0,
        "0000:9a:00.0": 2,
        "0000:9b:00.0": -1,
        "0000:9c:00.1": -1,
        "0000:9c:00.0": 0,
    },
    **{"0000_9c_00_1": {"physfn": "0000:9c:00.0"}},
)
PLACED = hostdev("0000:1a:00.0", "ua-a")


def run(xml: str, options: Options = Options()) -> Result:
    return transform(xml.encode(), options, HOST)


def said(result: Result) -> dict[str, str]:
    return {finding.code: finding.message for finding in result.report.findings}


def placement(result: Result, alias: str) -> Placement:
    return next(p for p in result.report.plan.placements if p.device.alias == alias)


def at(bus: int, slot: int = 0, function: int = 0) -> str:
    return f'<address type="pci" domain="0" bus="{bus}" slot="{slot}" function="{function}"></address>'


def controller(index: int, model: str, inside: str = "") -> str:
    return f'<controller type="pci" index="{index}" model="{model}">{inside}</controller>'


# our set is the expander 1 and the port 2: libvirt's own indexes come after
@pytest.mark.parametrize(
    ("controllers", "address", "kind"),
    [
        ("", at(3), "placed"),
        (controller(3, "pcie-root-port"), at(3), "placed"),
        (controller(3, "pcie-root-port", at(0, 2)), at(3), "placed"),
        (controller(3, "pcie-to-pci-bridge", at(0, 2)), at(3), "kept"),
        (controller(3, "pcie-to-pci-bridge", at(0, 2)), at(3, 1), "kept"),
        (controller(3, "pcie-root-port", at(0, 2)), at(3, 0, 1), "kept"),
        ("", at(0, 5), "kept"),
        (controller(3, "pcie-expander-bus", '<target busNr="100"/>') + controller(4, "pcie-root-port", at(3)), at(4), "kept"),
    ],
)  # fmt: skip
def test_an_address_that_libvirt_gave_behind_a_set_of_ours_is_no_reason_to_stay(
    controllers: str, address: str, kind: str
) -> None:
    first = run(domain({0: 0}, [PLACED])).xml.decode()
    later = hostdev("0000:3d:00.0", "ua-late", address)
    result = run(first.replace("</devices>", f"{controllers}{later}</devices>"))
    assert placement(result, "ua-late").kind == kind
    assert placement(result, "ua-a").kind == "placed"


@pytest.mark.parametrize(("addressed", "kind", "code"), [("keep", "kept", "addressed"), ("move", "placed", None)])
def test_a_device_below_what_hangs_on_a_port_of_ours_is_not_there_already(
    addressed: str, kind: str, code: str | None
) -> None:
    """A bridge of another hand on our port 2: our set does not stay, so the device on the bridge is on no cell."""
    first = run(domain({0: 0}, [PLACED])).xml.decode()
    bridge = controller(3, "pcie-to-pci-bridge", at(2))
    later = hostdev("0000:3d:00.0", "ua-late", at(3, 1))
    options = Options(addressed=addressed)
    result = run(first.replace("</devices>", f"{bridge}{later}</devices>"), options)
    late = placement(result, "ua-late")
    assert (late.kind, late.code) == (kind, code)
    again = run(result.xml.decode(), options)
    assert again.xml == result.xml
    assert (placement(again, "ua-late").kind, placement(again, "ua-late").code) == (kind, code)


@pytest.mark.parametrize(("addressed", "kind", "code"), [("keep", "kept", "addressed"), ("move", "placed", None)])
def test_nor_is_one_whose_port_of_ours_came_to_hang_on_another_hands_expander(
    addressed: str, kind: str, code: str | None
) -> None:
    theirs = controller(7, "pcie-expander-bus", '<target busNr="200"><node>0</node></target>')
    own = controller(8, "pcie-root-port", '<target hotplug="off"/><alias name="ua-pcinuma-0000-1a-00-0"/>' + at(7))
    bridge = controller(9, "pcie-to-pci-bridge", at(8))
    devices = [hostdev("0000:1a:00.0", "ua-a"), hostdev("0000:3d:00.0", "ua-late", at(9, 1))]
    options = Options(addressed=addressed)
    result = run(domain({0: 0}, devices, extra=theirs + own + bridge), options)
    late = placement(result, "ua-late")
    assert (late.kind, late.code) == (kind, code)
    where = "on pcie-to-pci-bridge 9, below a controller of pcinuma's that does not stay"
    assert late.reason == (
        f"its guest address 0000:09:01.0 is {where}: the guest sees numa_node -1, not cell 0" if code else None
    )
    again = run(result.xml.decode(), options)
    assert again.xml == result.xml
    assert (placement(again, "ua-late").kind, placement(again, "ua-late").code) == (kind, code)


def test_the_bdf_of_what_stays_is_that_without_our_stale_port_before_it() -> None:
    """Below another hand's expander at busNr 0xc8 a port of ours comes first. It goes, and the next one's bus is 0xc9."""
    theirs = controller(7, "pcie-expander-bus", '<target busNr="200"><node>1</node></target>')
    own = controller(8, "pcie-root-port", '<target hotplug="off"/><alias name="ua-pcinuma-0000-1a-00-0"/>' + at(7))
    other = controller(9, "pcie-root-port", at(7, 1))
    devices = [hostdev("0000:1a:00.0", "ua-a", at(8)), hostdev("0000:3d:00.0", "ua-stays", at(9))]
    result = run(domain({0: 0, 1: 1}, devices, extra=theirs + own + other))
    assert placement(result, "ua-a").kind == "placed"
    assert str(placement(result, "ua-stays").guest_bdf) == "0000:c9:00.0"
    again = run(result.xml.decode())
    assert str(placement(again, "ua-stays").guest_bdf) == "0000:c9:00.0"


def test_the_bdf_behind_an_expander_on_an_expander_is_not_known() -> None:
    """libvirt refuses it; and what comes after it in the numbers is anyone's guess."""
    theirs = controller(5, "pcie-expander-bus", '<target busNr="200"><node>1</node></target>')
    nested = controller(6, "pcie-expander-bus", f'<target busNr="210"/>{at(5)}') + controller(
        7, "pcie-root-port", at(5, 1)
    )
    for inside, bdf in ((nested, "None"), (controller(7, "pcie-root-port", at(5, 1)), "0000:c9:00.0")):
        devices = [hostdev("0000:3d:00.0", "ua-stays", at(7))]
        result = run(domain({0: 0, 1: 1}, devices, extra=theirs + inside))
        assert str(placement(result, "ua-stays").guest_bdf) == bdf


def test_without_a_set_of_ours_the_same_address_is_its_owners() -> None:
    result = run(domain({0: 0}, [hostdev("0000:3d:00.0", "ua-late", at(3))]))
    assert placement(result, "ua-late").kind == "kept"


def test_what_is_said_of_each_kind_of_placement() -> None:
    devices = [PLACED, hostdev("0000:9a:00.0", "ua-far"), hostdev("0000:9b:00.0", "ua-unknown")]
    devices += [hostdev("0000:9c:00.1", "ua-vf"), hostdev("0000:77:00.0", "ua-none")]
    found = said(run(domain({0: 0}, devices)))
    assert found["node-unmapped"] == "0000:9a:00.0 stays where it is: host node 2 belongs to no guest cell"
    assert found["numa-unknown"].startswith("0000:9b:00.0 stays where it is: its numa_node is -1")
    assert found["device-missing"] == "0000:77:00.0 stays where it is: there is no such PCI function on this host"
    assert found["node-of-pf"].startswith("0000:9c:00.1 is placed: its numa_node is -1")
    assert found["node-of-pf"].endswith("so it goes by its PF 0000:9c:00.0, which is on host node 0")
    near = said(run(domain({0: 0}, devices[:2]), Options(unmapped="nearest")))
    assert near["approximate"] == (
        "0000:9a:00.0 is placed approximately: host node 2 belongs to no guest cell; cell 0 is the nearest"
    )


def test_what_to_do_is_said_with_it() -> None:
    devices = [hostdev("0000:9a:00.0", "ua-far"), hostdev("0000:9b:00.0", "ua-unknown")]
    hints = {f.code: f.hint for f in run(domain({0: 0}, devices)).report.findings}
    assert hints["node-unmapped"] == "--unmapped nearest puts it on the nearest cell"
    assert (hints["numa-unknown"] or "").startswith("see the host's firmware settings for NUMA")
    # a cell on a node that the host's table does not have
    found = run(domain({0: 5}, devices[:1]), Options(unmapped="nearest")).report.findings
    finding = next(f for f in found if f.code == "node-unmapped")
    assert finding.message.endswith(
        "host node 2 belongs to no guest cell, and the host's distance table does not name a nearest one"
    )
    assert finding.hint is None


def test_why_a_node_is_unknown() -> None:
    """Of a VF it is said that its PF's is unknown too, of another device there is no PF to speak of."""
    on = {"0000:1a:00.0": -1, "0000:1a:00.1": -1}
    host = hosts.host({0: "0-7"}, on, **{"0000_1a_00_1": {"physfn": "0000:1a:00.0"}})
    xml = domain({0: 0}, [hostdev(bdf, f"ua-{bdf[-1]}") for bdf in on])
    first, second = (
        finding.message
        for finding in transform(xml.encode(), Options(), host).report.findings
        if finding.code == "numa-unknown"
    )
    assert "PF" not in first
    assert second.endswith("; that of its PF 0000:1a:00.0 is not known either")


def test_a_mediated_device_without_its_parent() -> None:
    mdev = (
        '<hostdev mode="subsystem" type="mdev" model="vfio-pci"><source>'
        '<address uuid="4b20d080-1b54-4048-85b3-a6a62d165c01"/></source></hostdev>'
    )
    assert said(run(domain({0: 0}, [mdev])))["device-missing"] == (
        "mdev 4b20d080-1b54-4048-85b3-a6a62d165c01 stays where it is: no PCI function of this host is its parent"
    )


def test_a_refusal_of_one_node_names_devices_and_cells_by_node() -> None:
    devices = [hostdev("0000:9a:00.0", "ua-far"), PLACED]
    refusal = run(domain({0: 0, 1: 2}, devices), Options(policy="single-numa-node")).refusal
    assert refusal is not None
    assert refusal.message == (
        "policy single-numa-node: devices and cells are not of one host node: 0000:1a:00.0 on host node 0;"
        " 0000:9a:00.0 on host node 2; cell 0 on host node 0; cell 1 on host node 2"
    )
    assert "single-numa-node" in (refusal.hint or "")


def test_a_cell_of_no_known_node_is_not_of_one_node() -> None:
    refusal = run(domain({0: 0, 1: None}, [PLACED]), Options(policy="single-numa-node")).refusal
    assert refusal is not None
    assert refusal.message.endswith("0000:1a:00.0 on host node 0; cell 0 on host node 0; cell 1 on host node unknown")


def test_a_set_without_its_devices_is_named() -> None:
    left = run(domain({0: 0}, [PLACED])).xml.decode()
    head, tail = left.split("<hostdev", 1)
    result = run(head + tail.split("</hostdev>", 1)[1])
    assert result.report.outcome == "unchanged"
    found = {finding.code: finding for finding in result.report.findings}
    assert found["stale-set"].message.endswith("ua-pcinuma-cell0, ua-pcinuma-0000-1a-00-0")
    assert found["stale-set"].severity == "warning"
    assert found["stale-set"].hint == "remove them: libvirt puts any device without an address on their ports"
    assert found["no-devices"].severity == "info"
    assert found["no-devices"].message == "the domain has no passthrough PCI device: nothing to place"
    assert (found["no-devices"].hint or "").startswith(
        "passthrough devices are the gpus, the hostDevices and the SR-IOV"
    )


def test_a_refusal_of_one_node_counts_nodes_as_numbers() -> None:
    """Node 10 comes after node 2; two devices of a node are named together, as are the nodes that a cell is on."""
    on = {"0000:1a:00.0": 10, "0000:3d:00.0": 2, "0000:3e:00.0": 2}
    host = hosts.host({2: "0-7", 10: "8-15"}, on)
    xml = domain({0: 2, 1: 10}, [hostdev(bdf, f"ua-{bdf[5:7]}") for bdf in on])
    pins = '<cputune><vcpupin vcpu="0" cpuset="0"/><vcpupin vcpu="1" cpuset="8"/></cputune>'
    refusal = transform(
        xml.replace("<numatune>", f"{pins}<numatune>").encode(), Options(policy="single-numa-node"), host
    ).refusal
    assert refusal is not None
    assert refusal.message.endswith(
        ": 0000:3d:00.0, 0000:3e:00.0 on host node 2; 0000:1a:00.0 on host node 10;"
        " cell 0 on host node 2,10; cell 1 on host node 10"
    )


# --- an address that the device has already --------------------------------------------------------------------


def expander(index: int, bus_nr: int, cell: int) -> str:
    return controller(index, "pcie-expander-bus", f'<target busNr="{bus_nr}"><node>{cell}</node></target>')


@pytest.mark.parametrize(
    ("bus_nr", "bus", "code", "message"),
    [
        # an expander and two ports take three numbers, and the last is 255
        (253, 2, "already-placed", "it is on cell 0 already"),
        (
            254,
            2,
            "no-bus",
            "its guest address 0000:02:00.0 is below expander 1, which has too few buses: the guest may lose it",
        ),
        (253, 1, "no-bus", "its guest address 0000:01:00.0 is on expander 1 itself, which takes ports alone"),
    ],
)
def test_its_cell_is_right_and_its_bus_may_not_be_there(bus_nr: int, bus: int, code: str, message: str) -> None:
    there = expander(1, bus_nr, 0) + controller(2, "pcie-root-port", at(1)) + controller(3, "pcie-root-port", at(1, 1))
    xml = domain({0: 0}, [there, hostdev("0000:1a:00.0", "ua-a", at(bus))])
    assert said(run(xml))[code] == f"0000:1a:00.0 stays where it is: {message}"


def test_what_its_owner_put_below_a_set_of_ours_stays_when_that_is_made_again() -> None:
    """Index 1 was there before ours, 2 and 3: libvirt did not choose it since."""
    there = controller(1, "pcie-root-port", at(0, 2)) + hostdev("0000:3d:00.0", "ua-own", at(1))
    first = run(domain({0: 0}, [PLACED, there]))
    assert placement(first, "ua-own").kind == "kept"
    again = run(first.xml.decode())
    assert placement(again, "ua-own").kind == "kept"
    assert again.xml == first.xml


@pytest.mark.parametrize("bus", [0, 5])
def test_what_lets_it_go(bus: int) -> None:
    """Everything is on bus 0 by an annotation of KubeVirt's; elsewhere that is not to blame."""
    found = run(
        domain({0: 0}, [controller(5, "pcie-root-port"), hostdev("0000:1a:00.0", "ua-a", at(bus, 9 - 9 * (bus > 0)))])
    )
    finding = next(f for f in found.report.findings if f.code == "addressed")
    assert finding.hint is not None
    assert "--addressed move" in finding.hint
    assert ("kubevirt.io/placePCIDevicesOnRootComplex" in finding.hint) is (bus == 0)


@pytest.mark.parametrize(
    ("stays", "slot", "kind"),
    [
        (hostdev("0000:3d:00.0", "ua-b", at(0, 9, 1)), 9, "placed"),  # it goes as well
        (hostdev("0000:9b:00.0", "ua-b", at(0, 9, 1)), 9, "kept"),  # of an unknown node
        (hostdev("0000:9b:00.0", "ua-b", at(0, 8, 1)), 9, "placed"),
        (f'<sound model="ich9">{at(0, 9, 1)}</sound>', 9, "kept"),
        (f'<sound model="ich9">{at(0, 8, 1)}</sound>', 9, "placed"),
    ],
)
def test_function_0_stays_where_others_of_its_slot_stay(stays: str, slot: int, kind: str) -> None:
    """Without function 0 a guest does not look at the others."""
    xml = domain({0: 0}, [hostdev("0000:1a:00.0", "ua-a", at(0, slot)), stays])
    result = run(xml, Options(addressed="move"))
    assert placement(result, "ua-a").kind == kind
    if kind == "kept":
        assert said(result)["addressed"] == (
            "0000:1a:00.0 stays where it is: other functions of its guest slot 0000:00:09 stay, and need it as function 0"
        )
        assert next(f for f in result.report.findings if f.code == "addressed").hint is None  # no flag moves it
    refused = run(xml, Options(addressed="move", policy="restricted")).refusal
    assert ("0000:1a:00.0" in (refused.message if refused else "")) is (kind == "kept")


def test_another_function_may_go_and_function_0_of_a_near_device_stays_too() -> None:
    other = f'<sound model="ich9">{at(0, 9)}</sound>'
    result = run(domain({0: 0}, [other, hostdev("0000:1a:00.0", "ua-a", at(0, 9, 1))]), Options(addressed="move"))
    assert placement(result, "ua-a").kind == "placed"
    far = [hostdev("0000:9a:00.0", "ua-far", at(0, 9)), f'<sound model="ich9">{at(0, 9, 1)}</sound>']
    assert (
        placement(run(domain({0: 0}, far), Options("best-effort", "numa", "nearest", "move")), "ua-far").kind == "kept"
    )


def test_function_0_on_a_port_of_ours_goes_with_it() -> None:
    """What libvirt put beside it since has no claim on that port."""
    first = run(domain({0: 0}, [PLACED])).xml.decode()
    beside = f'<sound model="ich9">{at(2, 0, 1)}</sound>'
    assert placement(run(first.replace("</devices>", f"{beside}</devices>")), "ua-a").kind == "placed"


@pytest.mark.parametrize(
    ("buses", "device"),
    [
        (1, '<watchdog model="i6300esb" action="reset"/>'),
        (
            0,
            '<watchdog model="itco" action="reset"/>',
        ),  # a part of the chipset: every q35 machine of libvirt 9.1 has it
        (0, '<watchdog model="ib700" action="reset"/>'),
        (1, '<sound model="ich9"/>'),
        (0, '<sound model="pcspk"/>'),
        (1, '<iommu model="virtio"/>'),
        (0, '<iommu model="intel"/>'),
    ],
)
def test_what_will_take_a_bus_of_the_root_bus(buses: int, device: str) -> None:
    def needed(*devices: str) -> int:
        return surroundings(parse(load(domain({0: 0}, [PLACED, *devices]).encode())), ()).root_buses

    assert needed(device) == needed() + buses


# --- groups ----------------------------------------------------------------------------------------------------


def test_an_expander_for_each_root_complex_of_a_cell() -> None:
    """Devices whose root complex is not known have the cell's own; nine buses in all, the last is 255."""
    on = {"0000:17:00.0": 0, "0000:18:00.0": 0, "0000:2b:00.0": 0, "0000:9a:00.0": 1}
    complexes = {"0000_17_00_0": "pci0000:15", "0000_18_00_0": "pci0000:15", "0000_9a_00_0": "pci0001:90"}
    host = hosts.host({0: "0-7", 1: "8-15"}, on, **{name: {"rootComplex": found} for name, found in complexes.items()})
    xml = domain({0: 0, 1: 1}, [hostdev(bdf, f"ua-{bdf[5:7]}") for bdf in on])
    controllers, devices = layout(transform(xml.encode(), Options(group_by="root-complex"), host).xml)
    assert {name[len("ua-pcinuma-") :]: found for name, found in controllers.items() if len(found) == 3} == {
        "cell0-pci0000-15": (1, 249, 0),
        "cell0": (4, 252, 0),
        "cell1-pci0001-90": (6, 254, 1),
    }
    assert devices == {"ua-17": (2, 0, 0), "ua-18": (3, 0, 0), "ua-2b": (5, 0, 0), "ua-9a": (7, 0, 0)}


def test_what_is_inside_a_switch_is_told_apart_by_its_slot_and_a_vf_by_its_pfs() -> None:
    """Two NICs inside one switch are in two places below it: the switch matters. VFs of one of them are in one."""
    inside = {"bridges": ["0000:10:01.0", "0000:11:00.0"]}
    nics = {"0000:12:01.0": 0, "0000:12:02.0": 0}
    host = hosts.host({0: "0-7"}, nics, **{"0000_12_01_0": inside, "0000_12_02_0": inside})
    xml = domain({0: 0}, [hostdev(bdf, f"ua-{bdf[8:10]}") for bdf in nics])
    controllers, _ = layout(transform(xml.encode(), Options(group_by="switch"), host).xml)
    assert "ua-pcinuma-switch-0000-11-00-0" in controllers
    of_one = {**inside, "physfn": "0000:12:00.0"}
    host = hosts.host({0: "0-7"}, nics, **{"0000_12_01_0": of_one, "0000_12_02_0": of_one})
    controllers, _ = layout(transform(xml.encode(), Options(group_by="switch"), host).xml)
    assert list(controllers) == ["ua-pcinuma-cell0", "ua-pcinuma-0000-12-01-0", "ua-pcinuma-0000-12-02-0"]


# --- what is said of several -----------------------------------------------------------------------------------


def test_a_node_of_two_cells_is_named_with_both() -> None:
    found = said(run(domain({0: 0, 1: 0}, [PLACED])))
    assert found["shared-host-node"] == "host node 0 backs cells 0, 1: devices go to cell 0"


def test_an_iommu_group_is_apart_where_one_of_it_stays_and_not_where_one_is_near() -> None:
    group = {"0000_1a_00_0": {"iommuGroup": 7}, "0000_9a_00_0": {"iommuGroup": 7}}
    host = hosts.host({0: "0-7", 1: "8-15"}, {"0000:1a:00.0": 0, "0000:9a:00.0": 1}, **group)
    near = domain({0: 0}, [PLACED, hostdev("0000:9a:00.0", "ua-b")])
    stays = domain({0: 0}, [PLACED, hostdev("0000:9a:00.0", "ua-b", at(0, 9))])
    for xml, apart in ((near, False), (stays, True)):
        found = said(transform(xml.encode(), Options(unmapped="nearest"), host))
        assert ("iommu-group-split" in found) is apart
    assert found["iommu-group-split"] == (
        "devices of IOMMU group 7 come to sit apart: 0000:1a:00.0 on cell 0, 0000:9a:00.0 on no cell"
    )


# --- what is asked of the host, and what is said of the whole ---------------------------------------------------


VGPU = """<hostdev mode="subsystem" type="mdev" model="vfio-pci">
    <source><address uuid="fd0e9b8c-1d4f-4b3a-9e57-2f6a0c1b7d84"></address></source><alias name="ua-vgpu"></alias></hostdev>"""


@pytest.mark.parametrize(
    ("options", "ids", "address_bits"),
    [
        (Options(), False, True),
        (Options(mmio="apply"), False, True),
        (Options(mmio="off"), False, False),
        (Options(gpudirect_clique="by-switch"), True, True),
    ],
)
def test_what_is_asked_of_the_host(options: Options, ids: bool, address_bits: bool) -> None:
    """The sidecar reads no more than it needs: neither all that sysfs has of a function, nor the sockets."""
    xml = domain({0: 0}, [PLACED, VGPU])
    assert host_query(parse(load(xml.encode())), options) == HostQuery(
        functions=frozenset([PciAddress(0, 0x1A, 0, 0)]),
        mdevs=frozenset(["fd0e9b8c-1d4f-4b3a-9e57-2f6a0c1b7d84"]),
        details=False,
        ids=ids,
        address_bits=address_bits,
        packages=False,
    )


@pytest.mark.parametrize(
    ("xml", "options"),
    [
        (domain({0: 0}, []), Options()),
        (domain({0: 0}, [PLACED]), Options(enabled=False)),
        (domain({}, [PLACED]), Options()),
        (domain({0: 0}, [PLACED]).replace("q35", "pc"), Options()),
    ],
    ids=["no-devices", "switched-off", "no-cells", "no-expanders"],
)
def test_a_host_that_is_not_needed_is_not_read(xml: str, options: Options) -> None:
    assert host_query(parse(load(xml.encode())), options) is None


@pytest.mark.parametrize(
    ("xml", "code", "reason", "hint"),
    [
        (
            domain({}, [PLACED]),
            "no-cells",
            "the domain has no guest NUMA cells",
            "set dedicatedCpuPlacement, hugepages and numa.guestMappingPassthrough in the VM's spec",
        ),
        (
            domain({0: 0}, [PLACED]).replace("q35", "pc"),
            "unsupported-machine",
            "machine type x86_64 pc takes no PCI expander bus",
            "use machine type q35 (on arm64: virt)",
        ),
    ],
)
def test_a_domain_in_which_nothing_can_be_placed(xml: str, code: str, reason: str, hint: str) -> None:
    result = run(xml)
    (finding,) = result.report.findings
    assert (finding.code, finding.severity, finding.hint) == (code, "warning", hint)
    assert finding.message == f"0000:1a:00.0 stays where it is: {reason}"
    refused = run(xml, Options(policy="restricted")).refusal
    assert refused is not None
    assert refused.message == f"policy restricted: 1 device does not fit a cell: 0000:1a:00.0: {reason}"
    assert refused.hint == hint


def test_switched_off_by_the_owner() -> None:
    xml = domain({0: 0}, [PLACED])
    result = run(xml, Options(enabled=False, policy="restricted"))
    assert (result.xml, result.refusal) == (xml.encode(), None)
    assert said(result) == {"disabled": "pcinuma is switched off for this VM by its annotation"}
    assert dict(result.report.plan.cell_nodes) == {0: (0,)}


UNKNOWN = "its numa_node is -1: the host's firmware does not say"


@pytest.mark.parametrize(
    ("unknown", "message"),
    [
        (1, f"1 device does not fit a cell: 0000:40:00.0: {UNKNOWN}"),
        (2, f"2 of 3 devices do not fit a cell: 0000:40:00.0, 0000:41:00.0: {UNKNOWN}"),
        (3, f"3 of 4 devices do not fit a cell: 0000:40:00.0, 0000:41:00.0, 0000:42:00.0: {UNKNOWN}"),
        (
            4,
            f"4 of 5 devices do not fit a cell: {UNKNOWN}: 0000:40:00.0, 0000:41:00.0, 0000:42:00.0, 0000:43:00.0",
        ),
    ],
)
def test_a_refusal_names_every_device_and_a_reason_that_many_share_once(unknown: int, message: str) -> None:
    lost = [f"0000:{0x40 + number:02x}:00.0" for number in range(unknown)]
    host = hosts.host({0: "0-7"}, {"0000:1a:00.0": 0, **dict.fromkeys(lost, -1)})
    xml = domain({0: 0}, [PLACED, *(hostdev(bdf, f"ua-{bdf[5:7]}") for bdf in lost)])
    refused = transform(xml.encode(), Options(policy="restricted"), host).refusal
    assert refused is not None
    assert refused.message == f"policy restricted: {message}"
    assert refused.hint is not None
    assert refused.hint.startswith("see the host's firmware settings for NUMA")


def test_every_part_of_the_plan_has_its_say() -> None:
    """A group that is split, BARs that do not fit, no distances on record, a clique: none takes the word of another."""
    gpu: dict[str, Any] = {
        "vendor": "0x10de", "class": "0x030200", "iommuGroup": 7, "bridges": ["0000:16:01.0", "0000:17:00.0", "0000:18:00.0"],
        "bars": [{"index": 2, "size": 2**40, "flags": "0x14220c"}],
    }  # fmt: skip
    cells = {"0000:1a:00.0": 0, "0000:1b:00.0": 0, "0000:9b:00.0": -1}
    details: dict[str, dict[str, Any]] = {
        "0000_1a_00_0": gpu,
        "0000_1b_00_0": {**gpu, "bridges": ["0000:16:01.0", "0000:17:00.0", "0000:18:01.0"]},
        "0000_9b_00_0": {"iommuGroup": 7},
    }
    host = hosts.host({0: "0-7"}, cells, **details)
    xml = domain({0: 0}, [hostdev(bdf, f"ua-{bdf[5:7]}") for bdf in cells])
    document = parse(load(xml.encode()))
    options = Options(mmio="apply", distances="host", gpudirect_clique="by-switch")
    made = plan(document, host(host_query(document, options) or HostQuery()), options)
    assert {"iommu-group-split", "mmio-window", "gpudirect-clique", "numa-unknown"} <= {f.code for f in made.findings}
    assert made.address_bits is not None
    assert made.cliques == {"ua-1a": 0, "ua-1b": 0}
    assert any(f.message.startswith("2 GPUs get a GPUDirect clique") for f in made.findings)
    # policy none tells what would be done
    idle = replace(options, policy="none")
    made = plan(document, host(host_query(document, idle) or HostQuery()), idle)
    assert {"iommu-group-split", "mmio-window", "gpudirect-clique", "numa-unknown"} <= {f.code for f in made.findings}
    assert made.address_bits is None
    assert any(f.message.startswith("2 GPUs would get a GPUDirect clique") for f in made.findings)


def test_the_cells_say_where_they_are_not_bound() -> None:
    """No memnode and no pin: what helps is the VM's spec."""
    xml = domain({0: 0}, [PLACED])
    bare = xml[: xml.index("<numatune>")] + xml[xml.index("</numatune>") + len("</numatune>") :]
    result = run(bare)
    finding = next(f for f in result.report.findings if f.device == "0000:1a:00.0")
    assert finding.code == "node-unmapped"
    assert finding.hint == "bind the cells: a memnode for each; in a VM's spec numa.guestMappingPassthrough"


def test_a_device_below_the_expander_of_another_cell() -> None:
    theirs = controller(5, "pcie-expander-bus", '<target busNr="200"><node>1</node></target>')
    port = controller(6, "pcie-root-port", at(5))
    result = run(domain({0: 0, 1: 1}, [theirs, port, hostdev("0000:1a:00.0", "ua-a", at(6))]))
    assert said(result)["foreign-cell"] == (
        "0000:1a:00.0 stays where it is: its guest address 0000:06:00.0 is below expander 5:"
        " the guest sees it on cell 1, not on cell 0"
    )


def test_where_there_is_no_room_what_helps_is_said() -> None:
    """250 ports, two expanders, the root bus with what KubeVirt and libvirt may add: more than 256 numbers."""
    bdfs = [f"0000:{0x20 + number // 8:02x}:{number % 8:02x}.0" for number in range(250)]
    host = hosts.host({0: "0-7", 1: "8-15"}, {bdf: number % 2 for number, bdf in enumerate(bdfs)})
    xml = domain({0: 0, 1: 1}, [hostdev(bdf, f"ua-{number}") for number, bdf in enumerate(bdfs)])
    result = transform(xml.encode(), Options(), host)
    assert result.report.outcome == "unchanged"
    found = [f for f in result.report.findings if f.code == "bus-numbers"]
    assert [f.device for f in found] == bdfs
    assert {f.hint for f in found} == {"pass through fewer devices, or give the VM fewer other PCI devices"}


def test_a_set_that_may_not_go_stays_as_it_is() -> None:
    """Without our two controllers the bridge, 3 as it stands, would be 1: nothing is changed, not the address bits either."""
    root = controller(0, "pcie-root")
    first = run(domain({0: 0}, [PLACED], extra=root)).xml.decode()
    bridge = '<controller type="pci" model="pcie-to-pci-bridge"/>'
    xml = first.replace('bus="0x1a"', 'bus="0x3d"').replace("</devices>", f"{bridge}</devices>")
    bars = {"0000_3d_00_0": {"bars": [{"index": 2, "size": 2**40, "flags": "0x14220c"}]}}
    host = hosts.host({0: "0-7"}, {"0000:3d:00.0": 0}, **bars)
    result = transform(xml.encode(), Options(mmio="apply", distances="host", gpudirect_clique="by-switch"), host)
    assert result.xml == xml.encode()
    assert "mmio-window" in said(result)
    plan = result.report.plan
    assert (plan.expanders, plan.drop, plan.detach, plan.address_bits) == ((), (), (), None)
    assert (dict(plan.distances), dict(plan.cliques)) == ({}, {})
    found = next(f for f in result.report.findings if f.code == "index-missing")
    assert found.hint == "give every PCI controller its index, as virsh dumpxml shows them"
    # nor is it silent where no device is left that would be placed
    gone = transform(xml.encode(), Options(), hosts.host({0: "0-7"}, {"0000:3d:00.0": -1}))
    assert gone.xml == xml.encode()
    (finding,) = [f for f in gone.report.findings if f.code == "index-missing"]
    assert finding.message == (
        "pcinuma's controllers stay: pcie-to-pci-bridge has no index: it is controller 3 with pcinuma's, 1 without"
    )
    assert (finding.severity, finding.device) == ("warning", None)


def test_a_device_that_loses_its_place_takes_a_bus_of_the_root_bus() -> None:
    """As one without an address does: libvirt makes a port for it."""
    bdfs = [f"0000:{0x40 + number // 8:02x}:{number % 8:02x}.0" for number in range(250)]
    unknown = "0000:9b:00.0"
    host = hosts.host({0: "0-7", 1: "8-15"}, {**{bdf: n % 2 for n, bdf in enumerate(bdfs)}, unknown: -1})
    ours = controller(
        1, "pcie-expander-bus", '<target busNr="254"><node>0</node></target><alias name="ua-pcinuma-cell0"/>'
    )
    ours += controller(2, "pcie-root-port", f'<alias name="ua-pcinuma-0000-9b-00-0"/><target hotplug="off"/>{at(1)}')

    def needed(set_of_ours: str, *odd: str) -> int:
        xml = domain({0: 0, 1: 1}, [*(hostdev(bdf, f"ua-{n}") for n, bdf in enumerate(bdfs)), *odd], extra=set_of_ours)
        message = said(transform(xml.encode(), Options(), host))["bus-numbers"]
        return int(re.findall(r"would need (\d+) PCI bus numbers", message)[0])

    assert needed(ours, hostdev(unknown, "ua-odd", at(2))) == needed("", hostdev(unknown, "ua-odd")) == needed("") + 1
