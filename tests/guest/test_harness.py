"""The harness itself: a guest tells apart what sits where, and what went wrong is told as what went wrong."""

from __future__ import annotations

import time

import pytest

from tests.support import libvirt
from tests.support.guest import boot
from tests.support.stand_in import GuestFailed, big_bar

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

DOMAIN = """<?xml version="1.0" encoding="UTF-8"?>
<domain type="kvm">
  <name>two cells</name>
  <memory unit="GiB">64</memory>
  <vcpu>16</vcpu>
  <os><type arch="x86_64" machine="pc-q35-of-another-vendor">hvm</type></os>
  <features><acpi/></features>
  <cpu mode="host-passthrough">
    <numa>
      <cell id="0" cpus="0-7" memory="32" unit="GiB">
        <distances><sibling id="0" value="10"/><sibling id="1" value="21"/></distances>
      </cell>
      <cell id="1" cpus="8-15" memory="32" unit="GiB"/>
    </numa>
  </cpu>
  <devices>
    <emulator>/usr/libexec/not-here</emulator>
    <controller type="usb" model="none"/>
    {devices}
  </devices>
</domain>
"""

# Two buses an expander: itself, and its port's. FIRST and SECOND are the two busNr.
EXPANDERS = """
    <controller type="pci" index="1" model="pcie-expander-bus">
      <target busNr="FIRST"><node>0</node></target>
    </controller>
    <controller type="pci" index="2" model="pcie-root-port">
      <target hotplug="off"/><address type="pci" bus="0x01" slot="0x00" function="0x0"/>
    </controller>
    <controller type="pci" index="3" model="pcie-expander-bus">
      <target busNr="SECOND"><node>1</node></target><alias name="ua-second"/>
    </controller>
    <controller type="pci" index="4" model="pcie-root-port">
      <target hotplug="off"/><alias name="ua-port"/><address type="pci" bus="0x03" slot="0x00" function="0x0"/>
    </controller>
    <hostdev type="pci" managed="no">
      <source><address domain="0x0000" bus="0x41" slot="0x00" function="0x0"/></source>
      <alias name="ua-gpu-a"/>
      <address type="pci" bus="0x02" slot="0x00" function="0x0"/>
    </hostdev>
    <hostdev type="mdev" model="vfio-pci">
      <source><address uuid="b155147a-663a-4009-ae7f-e9a96805b3ce"/></source>
      <alias name="ua-gpu-b"/>
      <address type="pci" bus="0x04" slot="0x00" function="0x0"/>
    </hostdev>
"""
ON_BUS_0 = """
    <interface type="hostdev">
      <source><address type="pci" domain="0x0000" bus="0x42" slot="0x02" function="0x1"/></source>
      <address type="pci" bus="0x00" slot="0x05" function="0x0"/>
    </interface>
"""


def two_cells(first: int, second: int, more: str = "") -> str:
    expanders = EXPANDERS.replace("FIRST", str(first)).replace("SECOND", str(second))
    return DOMAIN.format(devices=expanders + more)


@pytest.mark.parametrize("firmware", ["seabios", "ovmf"])
def test_each_device_on_its_node(firmware: str) -> None:
    view = boot(two_cells(252, 254, ON_BUS_0), firmware=firmware)
    assert view.missing == []
    assert {alias: (device.bdf, device.numa_node) for alias, device in view.devices.items()} == {
        "ua-gpu-a": ("0000:fd:00.0", 0),
        "ua-gpu-b": ("0000:ff:00.0", 1),
        "ua-standin-0": ("0000:00:05.0", -1),
    }
    assert all(device.bars_assigned for device in view.devices.values())
    assert view.pci["0000:ff:00.0"].path == "/sys/devices/pci0000:fe/0000:fe:00.0/0000:ff:00.0"
    assert {number: (node.cpus, node.distance) for number, node in view.nodes.items()} == {
        0: ("0", (10, 21)),
        1: ("1", (21, 10)),
    }


def test_a_device_lost_to_too_few_bus_numbers_is_missing() -> None:
    view = boot(two_cells(253, 254))
    assert view.missing == ["ua-gpu-a"]
    assert list(view.devices) == ["ua-gpu-b"]


def test_a_bar_no_window_holds_is_not_assigned() -> None:
    """A BAR as large as the whole address space of the emulated CPU, 40 bits."""
    view = boot(two_cells(252, 254), stand_in=big_bar(1024))
    assert [device.bars_assigned for device in view.devices.values()] == [False, False]
    assert any("failed to assign" in message for message in view.kernel_messages)


def test_a_bar_of_some_size_is_assigned() -> None:
    view = boot(two_cells(252, 254), stand_in=big_bar(4))
    assert [device.bars_assigned for device in view.devices.values()] == [True, True]


def test_firmware_that_hangs_is_noticed() -> None:
    """Sixteen devices with an I/O BAR, 4 KiB of I/O space each: more than the 64 KiB there are."""
    device = (
        '<controller type="pci" index="{0}" model="pcie-root-port"><target hotplug="off"/></controller>'
        '<hostdev type="pci"><source><address domain="0" bus="{0:#x}" slot="0" function="0"/></source>'
        '<address type="pci" bus="{0:#x}" slot="0" function="0"/></hostdev>'
    )
    devices = "".join(device.format(index) for index in range(1, 17))
    started = time.monotonic()
    with pytest.raises(GuestFailed, match="out of I/O address space"):
        boot(DOMAIN.format(devices=devices), stand_in=big_bar(1))
    assert time.monotonic() - started < 60


def test_a_guest_that_dies_is_noticed() -> None:
    name = libvirt.unique_domain_name()
    root = libvirt.parse_domain(
        f'<domain type="qemu"><name>{name}</name><memory unit="MiB">64</memory>'
        '<os><type arch="x86_64" machine="q35">hvm</type></os></domain>'
    )
    with libvirt.running(root, timeout=60) as guest:
        while libvirt.virsh("domstate", name).stdout.strip() != "running":
            guest.check()
            time.sleep(0.1)
        libvirt.virsh("destroy", name)
        with pytest.raises(libvirt.DomainDied, match="terminating on signal"):
            until_it_raises(guest)


def until_it_raises(guest: libvirt.RunningDomain) -> None:
    for _ in range(200):
        guest.check()
        time.sleep(0.1)


def test_a_domain_libvirt_refuses() -> None:
    with pytest.raises(libvirt.LibvirtRejected, match="not present in the domain's <cpu><numa>"):
        boot(two_cells(252, 254).replace("<node>1</node>", "<node>2</node>"))


def test_a_domain_comes_back_from_libvirt_under_its_own_name() -> None:
    uuid = "5d307ca9-b3ef-428c-8861-06e72d69f223"
    given = two_cells(252, 254).replace("<memory ", f"<uuid>{uuid}</uuid><memory ", 1)
    dumped = libvirt.parse_domain(libvirt.define_and_dump(given))
    assert (dumped.get("type"), dumped.findtext("name"), dumped.findtext("uuid")) == ("kvm", "two cells", uuid)
    aliases = [alias.get("name") for alias in dumped.iterfind("devices/*/alias")]
    assert aliases == ["ua-second", "ua-port", "ua-gpu-a", "ua-gpu-b"]
    assert libvirt.virsh("domstate", "two cells").returncode != 0


def test_the_schema() -> None:
    libvirt.validate(two_cells(252, 254, ON_BUS_0))
    with pytest.raises(libvirt.LibvirtRejected, match="fails to validate"):
        libvirt.validate(two_cells(252, 254).replace('hotplug="off"', 'hotplug="perhaps"'))
