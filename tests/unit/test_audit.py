"""The rules of libvirt, QEMU and firmware, each on a domain written by hand that breaks it, and on one that does not."""

from __future__ import annotations

import re

import pytest

from pcinuma.audit import audit
from pcinuma.domain_xml import load
from pcinuma.model import Finding

ADDRESS = '<address type="pci" domain="0" bus="{}" slot="{}" function="{}"{}/>'


def at(bus: int, slot: int = 0, function: int = 0, multifunction: str = "") -> str:
    return ADDRESS.format(bus, slot, function, f' multifunction="{multifunction}"' if multifunction else "")


def expander(index: int, bus_nr: int | None, node: int | None = 0, inside: str = "") -> str:
    number = f' busNr="{bus_nr}"' if bus_nr is not None else ""
    cell = f"<node>{node}</node>" if node is not None else ""
    target = f"<target{number}>{cell}</target>"
    model = '<model name="pxb-pcie"/>'  # libvirt writes it first
    return f'<controller type="pci" index="{index}" model="pcie-expander-bus">{model}{target}{inside}</controller>'


def port(index: int, parent: int, slot: int = 0, function: int = 0, *, model: str = "root-port", more: str = "") -> str:
    return (
        f'<controller type="pci" index="{index}" model="pcie-{model}"><model name="any"/>{more}'
        f"{at(parent, slot, function)}</controller>"
    )


def bridge(index: int, parent: int, slot: int, model: str = "pci-bridge", more: str = "") -> str:
    return f'<controller type="pci" index="{index}" model="{model}">{more}{at(parent, slot)}</controller>'


def nic(*inside: str) -> str:
    return f'<interface type="user"><model type="virtio"/>{"".join(inside)}</interface>'


def gpu(*inside: str) -> str:
    return (
        '<hostdev type="pci"><source><address domain="0" bus="0x1a" slot="0" function="0"/></source>'
        f"{''.join(inside)}</hostdev>"
    )


def alias(name: str) -> str:
    return f'<alias name="ua-pcinuma-{name}"/>'


def ours(bus_nr: int | None = 254, *, hotplug: str = ' hotplug="off"', below: str = "", node: int | None = 0) -> str:
    """An expander of ours with index 1 and its port 2."""
    target = f"<target{hotplug}/>" if hotplug else ""
    return (
        expander(1, bus_nr, node, alias("cell0"))
        + port(2, 1, more=target + alias("port"))
        + (below or gpu(at(2), '<alias name="ua-gpu"/>'))
    )


def listed(*devices: str, cells: int = 2, machine: str = "q35") -> list[Finding]:
    """What is found in a domain as libvirt writes it, with these devices."""
    numa = "".join(f'<cell id="{cell}" cpus="{cell}" memory="1"/>' for cell in range(cells))
    first = '<emulator>/usr/bin/qemu</emulator><controller type="pci" index="0" model="pcie-root"/>'
    quiet = '<controller type="usb" model="none"/><memballoon model="none"/>'
    os = f'<name>a</name><os><smbios mode="sysinfo"/><type arch="x86_64" machine="{machine}">hvm</type></os>'
    xml = f"<domain>{os}<cpu><numa>{numa}</numa></cpu><devices>{first}{''.join(devices)}{quiet}</devices></domain>"
    findings = audit(load(xml.encode()))
    for finding in findings:  # what is wrong with one part says with which
        assert (finding.device is None) == (finding.code in ("bus-numbers", "root-bus-slots")), finding
        assert finding.device is None or re.fullmatch(r"[a-z]+( \d+)? \(.+\)", finding.device.replace("-", "")), finding
    return findings


def found(*devices: str, cells: int = 2, machine: str = "q35") -> dict[str, tuple[str, str]]:
    """Severity and message by code."""
    return {
        finding.code: (finding.severity, finding.message) for finding in listed(*devices, cells=cells, machine=machine)
    }


@pytest.mark.parametrize(
    "devices",
    [
        [],
        [ours()],
        [ours(node=1)],
        [expander(1, 200), port(2, 1, 31, 7, more=""), port(3, 1, 31), nic(at(2)), nic(at(3))],
        [expander(1, 200), port(2, 1, model="root-port"), port(3, 2, model="switch-upstream-port"),
         port(4, 3, 31, model="switch-downstream-port"), nic(at(4))],
        [expander(1, 1 + 17), port(2, 1), nic(at(2))],
        [port(1, 0, 1), nic(at(1)), nic(at(0, 30, 0)), nic(at(0, 2, 0, "on")), nic(at(0, 2, 1))],
        [nic(at(0, 2)), nic(at(0, 2, 1))],  # libvirt sets multifunction where it is not written
        [expander(1, 100), port(2, 1), nic(at(2)), expander(3, 102), port(4, 3), nic(at(4))],
        [port(1, 0, 1), bridge(2, 1, 0, "pcie-to-pci-bridge"), nic(at(2, 1)), nic(at(2, 31))],
        [bridge(1, 0, 30, "dmi-to-pci-bridge"), bridge(2, 1, 1), nic(at(2, 1)), nic(at(1))],
        [expander(1, 200), bridge(2, 1, 0, "dmi-to-pci-bridge"), bridge(3, 2, 1), nic(at(3, 1))],
    ],
)  # fmt: skip
def test_nothing_is_wrong_with_it(devices: list[str]) -> None:
    assert {code: said for code, said in found(*devices).items() if said[0] == "error"} == {}


@pytest.mark.parametrize(
    ("devices", "code", "message"),
    [
        ([port(1, 0, 1), port(1, 0, 2)], "duplicate-index", "two PCI controllers have index 1"),
        ([port(256, 0, 1)], "index-range", "256"),
        ([expander(2, 200), port(2 - 1, 2), nic(at(1))], "parent-order", "index 1, not above its parent's 2"),
        ([port(2, 2)], "parent-order", "index 2"),
        ([expander(1, 200), port(2, 1, model="switch-upstream-port")], "not-on-expander", "pcie-switch-upstream-port"),
        ([port(1, 0, 1), port(2, 1)], "not-on-expander", "index 1, which is a pcie-root-port"),
        ([port(2, 1)], "not-on-expander", "which is no controller"),
        ([port(2, 0, 1, model="switch-upstream-port")], "switch-port",
         "an upstream port sits on a root port or downstream port, not on pcie-root"),
        ([port(1, 0, 1), port(2, 1, model="switch-downstream-port")], "switch-port", "on an upstream port"),
        (
            [port(1, 0, 1), port(2, 1, model="switch-upstream-port"), port(3, 2, model="to-pci-bridge")],
            "switch-port",
            "not a pcie-to-pci-bridge",
        ),
        ([port(1, 0, 32)], "address-range", "slot 0x20"),
        ([nic(at(0, 1, 8))], "address-range", "function 8"),
        ([nic(at(256))], "address-range", ""),
        ([port(1, 0, 1), nic(at(1, 1))], "address-range", "slot 0 only, not 0x1"),
        ([expander(1, 200, 2)], "expander-node", "cell 2, which the domain does not have"),
        ([ours(node=None)], "expander-node", "names no cell"),
        ([ours(None)], "expander-bus", "has no busNr"),
        ([expander(1, 0)], "expander-bus", "busNr 0"),
        ([expander(1, 255)], "expander-bus", "busNr 255"),
        ([nic(at(0, 9)), nic(at(0, 9))], "address-taken", "0000:00:09.0"),
        ([port(1, 0, 1), nic(at(1, 0, 1))], "no-function-0", "0000:01:00"),
        ([nic(at(0, 9, 1))], "no-function-0", "0000:00:09"),
        ([nic(at(0, 9, 0, "off")), nic(at(0, 9, 1))], "multifunction", "shares its slot"),
        ([expander(1, 254, 0, alias("cell0"))], "empty-expander", "has no port"),
        ([ours(below="<!-- nothing -->")], "empty-port", "is empty"),
        ([ours(hotplug="")], "port-hotplug", "hotplug"),
        ([ours(hotplug=' hotplug="on"')], "port-hotplug", "hotplug"),
        ([port(1, 0, 1, more='<target hotplug="off"/>' + alias("port")), gpu(at(1))], "lost-port", "no expander"),
        ([expander(1, 254), port(2, 1, more='<target hotplug="off"/>' + alias("p")), gpu(at(2))], "lost-port", ""),
        ([ours(below=nic(at(2)))], "foreign-device", "sits on"),
        ([nic('<alias name="ua-x"/>'), nic('<alias name="ua-x"/>')], "duplicate-alias", "ua-x is there twice"),
        ([expander(1, 254), port(2, 1), port(3, 1, 1), nic(at(2)), nic(at(3))], "bus-room", "has 2 bus numbers and needs 3"),
        ([expander(1, 100), port(2, 1), expander(3, 101), port(4, 3)], "bus-room", "has 1 bus numbers and needs 2"),
        ([expander(1, 100), expander(2, 100)], "bus-room", "as another expander has"),
        ([expander(1, None), port(2, 1), port(3, 1, 1)], "bus-room", "libvirt leaves room for one port, it has 2"),
        ([expander(1, 2), port(2, 1), port(3, 0, 1), port(4, 0, 2)], "bus-numbers", "has 2 bus numbers and needs 3"),
        ([expander(1, None), expander(2, 4), port(3, 0, 1), port(4, 0, 2)], "bus-numbers", "has 2 bus numbers and needs 3"),
        ([nic(), port(1, 0, 1, model="bus")], "controller-model", "pcie-bus 1 (line 1): libvirt knows no such model"),
        ([bridge(1, 0, 1, "pcie-to-pci-bridge")], "bridge-parent", "a pcie-to-pci-bridge cannot sit on a pcie-root"),
        (
            [port(1, 0, 1), bridge(2, 1, 0, "dmi-to-pci-bridge")],
            "bridge-parent",
            "a dmi-to-pci-bridge cannot sit on a pcie-root-port",
        ),
        (
            [port(1, 0, 1), bridge(2, 1, 0, "pcie-to-pci-bridge"), nic(at(2, 0, 1))],
            "address-range",
            "a pcie-to-pci-bridge has no slot 0",
        ),
        (
            [bridge(1, 0, 1, "dmi-to-pci-bridge"), bridge(2, 1, 1), nic(at(2))],
            "address-range",
            "a pci-bridge has no slot 0",
        ),
        ([port(1, 0, 9), nic(at(0, 9))], "address-taken", "interface (line 1) and pcie-root-port 1 (line 1) have one"),
        ([nic(at(0, slot)) for slot in range(1, 31)] + [expander(1, 200)], "root-bus-slots", "needs 33"),
        ([nic(at(0, slot)) for slot in range(2, 31)] + [port(1, 0, 1), expander(2, 200)], "root-bus-slots", "needs 33"),
    ],
)  # fmt: skip
def test_what_breaks_a_rule(devices: list[str], code: str, message: str) -> None:
    finding = next(finding for finding in reversed(listed(*devices)) if finding.code == code)
    assert finding.severity == "error"
    assert message in finding.message


@pytest.mark.parametrize(
    ("devices", "code", "message"),
    [
        (
            [expander(1, 200), nic(at(1))],
            "not-on-expander",
            "a device cannot sit on a pcie-expander-bus, only on a port below it",
        ),
        (
            [port(1, 0, 1), port(2, 1, model="switch-upstream-port"), nic(at(2, 1))],
            "switch-port",
            "a device cannot sit on an upstream port, only on a downstream port of it",
        ),
        ([port(1, 0, 1), expander(2, 200, 0, at(1))], "expander-parent", "an expander can sit on bus 0 only"),
    ],
)
def test_where_nothing_or_nothing_else_can_sit(devices: list[str], code: str, message: str) -> None:
    assert found(*devices)[code] == ("error", message)


@pytest.mark.parametrize(("bus_nr", "severity"), [(16, "error"), (17, None)])
def test_hotplug_ports_must_find_room_below_ours(bus_nr: int, severity: str | None) -> None:
    """Bus 0 and 16 ports: 17 numbers, 0 to 16."""
    said = found(ours(bus_nr)).get("bus-numbers")
    assert (said[0] if said else None) == severity


def test_an_expander_of_another_hand_may_be_without_a_node_and_too_low_for_hotplug() -> None:
    assert found(expander(1, 200, None), port(2, 1), nic(at(2)))["expander-node"] == (
        "warning",
        "pcie-expander-bus 1 (line 1) names no cell: the guest sees -1",
    )
    assert found(expander(1, 5), port(2, 1), nic(at(2)))["bus-numbers"][0] == "warning"


def test_an_alias_that_libvirt_forgets_may_be_there_twice() -> None:
    assert found(nic('<alias name="net0"/>'), nic('<alias name="net0"/>')) == {}


@pytest.mark.parametrize(("function", "own"), [(0, "ISA bridge"), (2, "SATA controller"), (3, "SMBus")])
def test_what_q35_has_on_bus_0_itself(function: int, own: str) -> None:
    """libvirt: "Attempted double use of PCI Address"."""
    assert found(nic(at(0, 0x1F, function)), machine="pc-q35-7.2")["address-taken"] == (
        "error",
        f"interface (line 1) has the guest address of q35's own {own}, 0000:00:1f.{function}",
    )
    assert "address-taken" not in found(nic(at(0, 0x1F, function)), machine="virt")
    assert "address-taken" not in found(nic(at(0, 0x1F, 4)))


def test_the_sata_controller_stands_where_it_stands() -> None:
    assert found(f'<controller type="sata" index="0">{at(0, 0x1F, 2)}</controller>') == {}


@pytest.mark.parametrize(
    ("controller", "option"),
    [
        (port(1, 0, 1, more='<target busNr="200"/>'), "busNr"),
        (port(1, 0, 1, more="<target><node>0</node></target>"), "node"),
        (port(1, 0, 1, more='<target chassisNr="1"/>'), "chassisNr"),
        (port(1, 0, 1, model="switch-upstream-port", more='<target port="0x8"/>'), "port"),
        ('<controller type="pci" index="1" model="dmi-to-pci-bridge"><target hotplug="off"/></controller>', "hotplug"),
        ('<controller type="pci" index="1" model="pcie-expander-bus"><target hotplug="off"/></controller>', "hotplug"),
        ('<controller type="pci" index="1" model="pci-bridge"><target chassis="1"/></controller>', "chassis"),
    ],
)
def test_what_a_target_may_not_say(controller: str, option: str) -> None:
    """libvirt: "Option 'busNr' is not valid for PCI controller with index '1'"."""
    severity, message = found(controller)["target-option"]
    assert severity == "error"
    assert f"takes no {option}" in message


def test_what_a_target_may_say() -> None:
    said = '<target chassis="1" port="0x8" hotplug="off"/>'
    serial = '<serial type="pty"><target type="isa-serial" port="0"/></serial>'
    assert "target-option" not in found(serial, port(1, 0, 1, more=said), expander(2, 200), port(3, 2, more=said))


# what libvirt puts on PCI when it has no address yet (libvirt pci-addresses; qemuDomainDeviceCalculatePCIConnectFlags)
@pytest.mark.parametrize(
    ("ports", "device"),
    [
        (1, '<disk type="file"><target dev="vda" bus="virtio"/></disk>'),
        (0, '<disk type="file"><target dev="sda" bus="sata"/></disk>'),
        (0, '<disk type="file"><target dev="vda" bus="virtio"/><address type="ccw"/></disk>'),
        (1, '<disk type="file"><target dev="vda" bus="virtio"/><address type="pci"/></disk>'),
        (1, '<controller type="scsi" index="0" model="virtio-scsi"/>'),
        (1, '<controller type="virtio-serial" index="0"/>'),
        (1, '<controller type="usb" index="1" model="qemu-xhci"/>'),
        (0, '<controller type="usb" index="1" model="none"/>'),
        (0, '<controller type="sata" index="0"/>'),
        (1, '<memballoon model="virtio"/>'),
        (1, '<input type="tablet" bus="virtio"/>'),
        (0, '<input type="tablet" bus="usb"/>'),
        (1, gpu()),
        (0, '<hostdev type="usb"/>'),
        (1, '<hostdev type="mdev" model="vfio-pci"/>'),
        (1, '<video><model type="virtio"/></video>'),
        (0, '<video><model type="none"/></video>'),
        (1, '<iommu model="virtio"/>'),
        (0, '<iommu model="intel"/>'),
        (1, '<memory model="virtio-mem"/>'),
        (0, '<memory model="dimm"/>'),
        (1, '<rng model="virtio"/>'),
        (1, '<vsock model="virtio"/>'),
        (1, '<filesystem type="mount"/>'),
        (1, '<sound model="ich9"/>'),
        (0, '<sound model="pcspk"/>'),
        (0, '<sound model="sb16"/>'),
        (0, '<sound model="usb"/>'),
        (1, '<watchdog model="i6300esb"/>'),
        (0, '<watchdog model="itco" action="reset"/>'),
        (0, '<watchdog model="ib700"/>'),
        (1, '<crypto model="virtio"/>'),
        (1, '<shmem name="a"/>'),
        (1, '<controller type="nvme" index="0"/>'),
        (1, '<disk type="file"><driver/><target dev="vda" bus="virtio"/></disk>'),
        (1, '<video><driver/><model type="virtio"/></video>'),
        (0, '<video><driver/><model type="none"/></video>'),
        (1, '<disk type="file"><target dev="vda" bus="virtio"/><address type=""/></disk>'),
        (0, '<tpm model="tpm-crb"/>'),
        (0, '<serial type="pty"/>'),
        (1, nic()),
        (0, nic(at(0, 5))),
    ],
)  # fmt: skip
def test_what_will_take_a_port_of_the_root_bus(ports: int, device: str) -> None:
    """The root bus and the ports to come; the expander that begins at 1 leaves it its own number alone."""
    severity, message = found(expander(1, 1), device)["bus-numbers"]
    assert (severity, message) == (
        ("error", f"the root bus has 1 bus numbers and needs {1 + ports}")
        if ports
        else ("warning", "the root bus has 1 bus numbers and may come to need 17")
    )


# libvirt qemuDomainDefAddDefaultDevices, virDomainDefAddImplicitDevices
@pytest.mark.parametrize(
    ("ports", "devices"),
    [
        (0, ""),
        (1, '<disk type="file"><target dev="sda" bus="scsi"/></disk>'),
        (1, '<disk type="file"><driver/><target dev="sda" bus="scsi"/></disk>'),
        (1, '<disk type="file"><target dev="sda" bus="scsi"/></disk><controller type="scsi" index="0"/>'),
        (1, '<channel type="unix"><target type="virtio" name="a"/></channel>'),
        (1, '<channel type="unix"><source mode="bind"/><target type="virtio" name="a"/></channel>'),
        (1, '<console type="pty"><target type="virtio"/></console><channel type="unix"><target type="virtio"/></channel>'),
        (1, '<channel type="unix"><target type="virtio"/></channel><controller type="virtio-serial" index="0"/>'),
        (0, '<console type="pty"><target type="serial"/></console>'),
        (1, '<graphics type="vnc"/>'),
        (1, '<graphics type="vnc"/><video><model type="virtio"/></video>'),
        (0, '<graphics type="vnc"/><video><model type="none"/></video>'),
    ],
)  # fmt: skip
def test_what_libvirt_adds_of_itself(ports: int, devices: str) -> None:
    _, message = found(expander(1, 1), devices)["bus-numbers"]
    assert message == (
        f"the root bus has 1 bus numbers and needs {1 + ports}"
        if ports
        else "the root bus has 1 bus numbers and may come to need 17"
    )


def test_usb_and_balloon_come_unless_they_are_there() -> None:
    xml = f"<domain><devices>{expander(1, 1)}</devices></domain>"
    messages = [finding.message for finding in audit(load(xml.encode())) if finding.code == "bus-numbers"]
    assert messages == ["the root bus has 1 bus numbers and needs 3"]


@pytest.mark.parametrize(
    ("ports", "devices"),
    [
        (3, [port(4, 0, 1)]),  # indexes 1 to 3 are left out: ports as well, and the expander is 9
        (1, [port(1, 0, 1), nic(), nic()]),
        (0, [port(1, 0, 1), nic()]),
        (1, [port(1, 0, 1), nic(at(1)), nic()]),
    ],
)
def test_gaps_and_devices_that_wait(ports: int, devices: list[str]) -> None:
    high = 5 if 'index="4"' in devices[0] else 2
    _, message = found(*devices, expander(high, 1))["bus-numbers"]
    assert message.endswith(f"needs {1 + 1 + ports}")


@pytest.mark.parametrize(
    ("ports", "devices"),
    [
        (2, [expander(1, 1), nic(at(3))]),  # 2 and 3 are left out, the last one too
        (3, [expander(1, 1), nic(at(4)), nic(), nic()]),  # what waits comes on 2 and 3
        (4, [expander(1, 1), nic(at(4)), nic(), nic(), nic()]),
        (1, [expander(2, 1), nic()]),
        (2, [expander(2, 1), nic(), nic()]),
    ],
)
def test_what_waits_takes_the_ports_of_indexes_that_are_left_out(ports: int, devices: list[str]) -> None:
    """libvirt makes a root port of every index below the highest that is in use."""
    assert found(*devices)["bus-numbers"][1] == f"the root bus has 1 bus numbers and needs {1 + ports}"


@pytest.mark.parametrize(
    ("ports", "waiting", "fits"),
    [(8, 0, True), (9, 0, False), (0, 8, True), (0, 9, False), (4, 8, True), (4, 9, False)],
)
def test_eight_root_ports_share_a_slot_of_bus_0(ports: int, waiting: int, fits: bool) -> None:
    """One slot is left. What waits takes the ports that are free, and for the rest libvirt adds some: eight in all, or
    nine. The SATA controller stands in the chipset's own slot."""
    free = [f'<controller type="pci" index="{index + 1}" model="pcie-root-port"/>' for index in range(ports)]
    taken = [f'<controller type="sata" index="0">{at(0, 0x1F, 2)}</controller>', *(nic(at(0, n)) for n in range(1, 30))]
    busy = [nic(at(index + 1)) for index in range(ports if not waiting else 0)]
    said = found(*free, *taken, *busy, *[nic()] * waiting).get("root-bus-slots")
    assert said == (None if fits else ("error", "bus 0 has 32 slots and needs 33"))


@pytest.mark.parametrize(
    ("devices", "code", "hint"),
    [
        (
            devices,
            "expander-node",
            "pcinuma transform --addressed move places its devices anew; KubeVirt before 1.8 drops the node between"
            " its passes",
        )
        for devices in ([ours(node=None)], [expander(1, 200, None), port(2, 1)])
    ]
    + [
        (
            [expander(1, 254), port(2, 1), port(3, 1, 1)],
            "bus-room",
            "the guest silently loses the devices beyond; leave more numbers between the busNr",
        ),
        (
            [nic(at(0, slot)) for slot in range(1, 31)] + [expander(1, 200)],
            "root-bus-slots",
            "devices with explicit addresses on bus 0 (kubevirt.io/placePCIDevicesOnRootComplex) take its slots",
        ),
    ],
)
def test_what_to_do_is_said(devices: list[str], code: str, hint: str) -> None:
    finding = next(finding for finding in listed(*devices) if finding.code == code)
    assert finding.hint == hint
    if code == "expander-node":
        assert finding.device is not None


def test_a_fault_that_has_a_remedy_says_it() -> None:
    xml = f"<domain><devices>{ours(node=None)}</devices></domain>"
    finding = next(f for f in audit(load(xml.encode())) if f.code == "expander-node")
    assert finding.hint is not None
    assert "pcinuma transform" in finding.hint


def test_a_passthrough_device_on_an_index_that_libvirt_will_make_a_root_port_of() -> None:
    """Index 20 is left out below 21: libvirt fills it with a root port and refuses slot 1 on it."""
    xml = (
        b"<domain><devices><controller type='pci' index='21' model='pcie-root-port'/>"
        b"<hostdev type='pci'><source><address bus='1'/></source><address type='pci' bus='20' slot='SLOT'/></hostdev>"
        b"</devices></domain>"
    )
    (finding,) = (f for f in audit(load(xml.replace(b"SLOT", b"1"))) if f.code == "address-range")
    assert finding.message == "index 20 is none: libvirt makes a root port of it, which has slot 0 only"
    assert (finding.severity, finding.device) == ("error", "hostdev (line 1)")
    assert "address-range" not in {f.code for f in audit(load(xml.replace(b"SLOT", b"0")))}
    # the root bus has slots, whether its controller is written or not
    assert audit(load(xml.replace(b"bus='20' slot='SLOT'", b"bus='0' slot='1'"))) == []


def test_controllers_without_an_index_take_the_lowest_that_are_free() -> None:
    """As libvirt numbers them; by that they are named."""
    nameless = port(9, 0, 1).replace(' index="9"', "")
    messages = [finding.message for finding in listed(port(2, 0, 3), nameless, nameless, nameless)]
    assert messages == [
        "pcie-root-port 3 (line 1) and pcie-root-port 1 (line 1) have one guest address 0000:00:01.0",
        "pcie-root-port 4 (line 1) and pcie-root-port 3 (line 1) have one guest address 0000:00:01.0",
    ]


def test_domains_with_little_in_them() -> None:
    assert audit(load(b"<domain/>")) == []
    # of other devices' targets nothing is read
    assert audited('<memory model="dimm"><target><node>none</node></target></memory>') == []


def test_only_cells_are_cells() -> None:
    """libvirt has <interconnects> after them."""
    numa = '<cell cpus="0" memory="1"/><interconnects/>'
    devices = f"<devices>{expander(1, 200, 1)}</devices>"
    found = audit(load(f"<domain><cpu><numa>{numa}</numa></cpu>{devices}</domain>".encode()))
    assert [finding.message for finding in found if finding.code == "expander-node"] == [
        "pcie-expander-bus 1 (line 1) names cell 1, which the domain does not have"
    ]


@pytest.mark.parametrize(
    ("index", "hint"), [("", "give it an index: libvirt takes 0"), (' index="0"', "give it an index above 0")]
)
def test_index_0_is_the_roots(index: str, hint: str) -> None:
    (finding,) = audited(f'<controller type="pci"{index} model="pcie-root-port"/>')
    assert (finding.code, finding.severity, finding.hint) == ("controller-model", "error", hint)
    assert finding.message == "pcie-root-port 0 (line 1) has index 0, which is the machine's root"
    assert finding.device == "pcie-root-port 0 (line 1)"


ROOTS = ("", '<controller type="pci" index="0"/>')


@pytest.mark.parametrize("root", ROOTS, ids=["not written", "without a model"])
def test_what_is_on_a_root_that_libvirt_adds(root: str) -> None:
    assert audited(root, bridge(1, 0, 4, "dmi-to-pci-bridge")) == []
    (finding,) = audited(root, bridge(1, 0, 4, "pcie-to-pci-bridge"))
    assert (finding.code, finding.message) == ("bridge-parent", "a pcie-to-pci-bridge cannot sit on a pcie-root")


def test_what_is_on_an_index_that_is_left_out() -> None:
    """libvirt makes a root port of it: a switch can be there, a bridge to PCI, and no other."""
    switch = (port(2, 1, model="switch-upstream-port"), port(3, 2, model="switch-downstream-port"))
    assert audited(*switch) == []
    assert audited(bridge(2, 1, 0, "pcie-to-pci-bridge")) == []
    (finding,) = audited(bridge(2, 1, 0, "dmi-to-pci-bridge"))
    assert (finding.code, finding.message) == ("bridge-parent", "a dmi-to-pci-bridge cannot sit on a pcie-root-port")
    (finding,) = audited(port(2, 1, model="switch-downstream-port"))
    assert (finding.code, finding.severity) == ("switch-port", "error")


def test_what_is_on_indexes_that_are_left_out_of_i440fx() -> None:
    """libvirt makes a pci-root and PCI bridges of them."""
    os = '<os><type machine="pc-i440fx-9.2">hvm</type></os>'
    for parent, model in ((0, "pci-root"), (1, "pci-bridge")):
        devices = f"<devices>{bridge(2, parent, 4, 'dmi-to-pci-bridge')}</devices>"
        findings = audit(load(f"<domain>{os}{devices}</domain>".encode()))
        assert [finding.message for finding in findings] == [f"a dmi-to-pci-bridge cannot sit on a {model}"]


# --- where a rule begins ---------------------------------------------------------------------------------------


def audited(*devices: str) -> list[Finding]:
    """What is found in a domain that is these devices alone."""
    return audit(load(f"<domain><devices>{''.join(devices)}</devices></domain>".encode()))


def codes(*devices: str, machine: str = "q35") -> set[str]:
    return set(found(*devices, machine=machine))


def test_the_highest_numbers_that_there_are() -> None:
    ranges = {"index-range", "address-range"}
    assert not ranges & codes(port(255, 0, 31, 7), port(254, 0, 31), nic(at(255, 0, 7)), nic(at(255)))
    assert "index-range" in codes(port(256, 0, 31))
    assert "address-range" in codes(nic(at(0, 31, 8)))
    assert "address-range" in codes(nic(at(0, 32, 7)))
    assert "expander-bus" not in codes(expander(1, 1)) | codes(expander(1, 254))


@pytest.mark.parametrize("model", ["pxb", "pci-expander-bus"])
def test_expanders_of_i440fx(model: str) -> None:
    other = f'<controller type="pci" index="1" model="{model}"/>'
    assert found(other)["expander-model"][1].endswith("on this machine libvirt takes pcie-expander-bus only")
    assert "expander-model" in codes(other, machine="virt")
    assert "expander-model" not in codes(other, machine="pc-i440fx-9.2")


def test_i440fx_takes_no_expander_of_pci_express() -> None:
    assert found(expander(1, 200), machine="pc-i440fx-9.2")["expander-model"] == (
        "error",
        "pcie-expander-bus 1 (line 1): this machine type takes no expander, libvirt refuses it",
    )
    assert "expander-model" not in codes(expander(1, 200))
    # nobody says which machine it is
    assert "expander-model" not in {finding.code for finding in audited(expander(1, 200))}


def test_a_controller_of_ours_that_is_no_port_hides_no_fault() -> None:
    other = bridge(1, 0, 2, "dmi-to-pci-bridge", alias("other"))
    empty = port(3, 2, more='<target hotplug="off"/>' + alias("port"))
    assert found(other, expander(2, 254, 0, alias("cell0")), empty)["empty-port"][0] == "error"


@pytest.mark.parametrize(
    ("bus", "slot", "wrong"), [(0, 0x1F, 0), (0, 0x1D, 0), (0, 0x1A, 0), (0, 0x1E, 1), (9, 0x1F, 1)]
)
def test_chipset_slots_need_no_function_0(bus: int, slot: int, wrong: bool) -> None:
    assert ("no-function-0" in codes(nic(at(bus, slot, 5)))) == wrong


@pytest.mark.parametrize("written", [None, "on", "off"])
def test_ports_of_ours_in_one_slot_say_that_there_are_several(written: str | None) -> None:
    """libvirt sets it for others where it is not written; ours are written whole."""
    inside = '<target hotplug="off"/>'
    more = f' multifunction="{written}"' if written else ""
    first = port(2, 1, more=inside + alias("a")).replace('function="0"', f'function="0"{more}')
    devices = [expander(1, 253, 0, alias("cell0")), first, port(3, 1, 0, 1, more=inside + alias("b"))]
    said = found(*devices, gpu(at(2)), gpu(at(3)))
    assert ("multifunction" in said) == (written != "on")


@pytest.mark.parametrize(
    ("device", "foreign"),
    [
        ('<interface type="hostdev">{}</interface>', False),
        ('<interface type="vdpa">{}</interface>', False),
        ('<interface type="bridge">{}</interface>', True),
        ('<hostdev type="mdev">{}</hostdev>', False),
        ('<hostdev type="pci">{}</hostdev>', False),
        ('<hostdev type="scsi_host">{}</hostdev>', True),
        ('<disk type="file">{}</disk>', True),
        ('<controller type="scsi" index="0">{}</controller>', True),
        ('<controller type="pci" index="3" model="pcie-to-pci-bridge">{}</controller>', True),
    ],
)
def test_what_may_sit_on_a_port_of_ours(device: str, foreign: bool) -> None:
    assert ("foreign-device" in codes(ours(253, below=device.format(at(2))))) == foreign


def test_numbers_as_libvirt_reads_them() -> None:
    """Hexadecimal, decimal, and C's octal; an address of zeros asks libvirt for one, as does none."""
    said = found(
        '<sound model="ich9"><address type="pci" bus="0" slot="0x09"/></sound>',
        '<watchdog model="i6300esb"><address type="" bus="0" slot="011"/></watchdog>',
    )
    assert said["address-taken"][1].endswith("have one guest address 0000:00:09.0")
    asks = '<sound model="ich9"><address type="pci" domain="0x0000" bus="0x00" slot="0x00" function="0x0"/></sound>'
    assert codes(asks, asks) == set()


def test_parts_are_named_by_their_alias_or_line() -> None:
    xml = (
        b'<domain><devices>\n<sound model="ich9"><address bus="0" slot="9"/></sound>\n'
        b'<interface type="user"><alias name="net0"/><address bus="0" slot="9"/></interface>\n'
        b'<controller type="pci" index="3" model="pcie-root-port"><address bus="0" slot="9"/></controller>'
        b"</devices></domain>"
    )
    finding, other = (finding for finding in audit(load(xml)) if finding.code == "address-taken")
    assert finding.message == "interface (net0) and sound (line 2) have one guest address 0000:00:09.0"
    assert finding.device == "interface (net0)"
    assert other.device == "pcie-root-port 3 (line 4)"


def test_a_device_of_another_bus_has_no_place_on_pci() -> None:
    """Drives, USB ports and CCW channels have addresses of their own kind."""
    drive = '<disk type="file"><target dev="sda" bus="sata"/><address type="drive" bus="0" slot="9"/></disk>'
    assert (
        codes(drive, drive, drive.replace("drive", "usb"), '<interface type="user"><address type="ccw"/></interface>')
        == set()
    )
