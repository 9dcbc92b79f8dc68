"""What the plan makes of addresses that libvirt gave since, and how it says why a device goes or stays."""

from __future__ import annotations

import pytest

from pcinuma.model import Options, Placement
from pcinuma.pipeline import Result, transform
from tests.support import hosts
from tests.support.domains import domain, hostdev

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
    assert found["no-devices"].severity == "info"
