"""The proof: a Linux boots from the transformed domain, and sees every device at the BDF and on the node reported."""

from __future__ import annotations

import json

import pytest

from pcinuma.discover import ReadHost
from pcinuma.host_file import load
from pcinuma.model import Options
from pcinuma.pipeline import Result, transform
from tests.support import hosts, kubevirt
from tests.support.domains import domain, hostdev
from tests.support.guest import GuestView, boot
from tests.support.libvirt import define_and_dump
from tests.support.two_sockets import EXAMPLE, SEEN

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

CONTROLLER = '<controller type="pci" index="{}" model="{}">{}</controller>'


def transformed(xml: str, host: ReadHost, options: Options = Options()) -> Result:
    result = transform(xml.encode(), options, host)
    assert result.report.outcome == "changed", result.refusal
    return result


def seen(view: GuestView) -> dict[str, tuple[str, int]]:
    assert view.missing == []
    return {alias: (device.bdf, device.numa_node) for alias, device in view.devices.items()}


def agree(view: GuestView, result: Result) -> None:
    """The report's guest BDFs and cells are what the guest shows; a device that stayed is there, without a node."""
    found = seen(view)
    # OVMF leaves the BARs behind an expander unassigned when hotplug-capable ports want too much: ours want nothing
    assert [alias for alias, device in view.devices.items() if not device.bars_assigned] == []
    for placement in result.report.plan.placements:
        alias = placement.device.alias
        assert alias is not None
        bdf, node = found[alias]
        if placement.guest_bdf is not None:
            assert (bdf, node) == (str(placement.guest_bdf), placement.cell), alias
        else:
            assert node == -1, alias
    in_host_order = [p for p in result.report.plan.placements if p.guest_bdf is not None]
    in_host_order.sort(key=lambda p: str(p.source))
    bdfs = [found[p.device.alias or ""][0] for p in in_host_order]
    # groups of the hosts here do not interleave, so the guest numbers the devices in the host's order
    assert bdfs == sorted(bdfs)


@pytest.mark.parametrize("firmware", ["seabios", "ovmf"])
def test_two_sockets(firmware: str) -> None:
    result = transformed((EXAMPLE / "domain.xml").read_text(), hosts.from_file(EXAMPLE / "host.json"))
    view = boot(result.xml.decode(), firmware=firmware)
    agree(view, result)
    assert seen(view) == SEEN
    assert sorted(view.nodes) == [0, 1]


@pytest.mark.parametrize("version", ["1.4", "1.7", "1.9"])
def test_after_every_pass_of_a_start(version: str) -> None:
    host = hosts.from_file(EXAMPLE / "host.json")
    last: list[Result] = []

    def hook(xml: str) -> str:
        last.append(transform(xml.encode(), Options(policy="restricted"), host))
        return last[-1].xml.decode()

    count = 4 if version == "1.9" else None
    passes = kubevirt.play((EXAMPLE / "domain.xml").read_text(), version, hook, define_and_dump, count=count)
    agree(boot(passes[-1].answer), last[-1])


def test_four_cells_of_an_eight_node_host() -> None:
    """Host nodes 1, 3, 4 and 6; node 6 holds the first GPU, so its cell's group comes first."""
    nodes = {node: f"{node * 8}-{node * 8 + 7}" for node in range(8)}
    functions = {"0000:05:00.0": 6, "0000:26:00.0": 1, "0000:46:00.0": 3, "0000:a6:00.0": 4, "0000:a7:00.0": 4}
    devices = [hostdev(bdf, f"ua-gpu-g{number}") for number, bdf in enumerate(reversed(functions))]
    xml = domain({0: 1, 1: 3, 2: 4, 3: 6}, devices)
    result = transformed(xml, hosts.host(nodes, functions))
    view = boot(result.xml.decode())
    agree(view, result)
    # 2 + 2 + 2 + 3 bus numbers that end at 255: the blocks begin at 247, 249, 251, 253
    assert seen(view) == {
        "ua-gpu-g4": ("0000:f8:00.0", 3),
        "ua-gpu-g3": ("0000:fa:00.0", 0),
        "ua-gpu-g2": ("0000:fc:00.0", 1),
        "ua-gpu-g1": ("0000:fe:00.0", 2),
        "ua-gpu-g0": ("0000:ff:00.0", 2),
    }


def test_one_cell() -> None:
    devices = [hostdev("0000:17:00.0", "ua-gpu-a"), hostdev("0000:18:00.0", "ua-hostdevice-b")]
    result = transformed(
        domain({0: 1}, devices), hosts.host({0: "0-7", 1: "8-15"}, {"0000:17:00.0": 1, "0000:18:00.0": 1})
    )
    assert seen(boot(result.xml.decode())) == {"ua-gpu-a": ("0000:fe:00.0", 0), "ua-hostdevice-b": ("0000:ff:00.0", 0)}


def test_forty_devices_on_a_cell() -> None:
    functions = {f"0000:{0x20 + number:02x}:00.0": 0 for number in range(40)}
    devices = [hostdev(bdf, f"ua-hostdevice-d{number}") for number, bdf in enumerate(functions)]
    result = transformed(domain({0: 0}, devices), hosts.host({0: "0-7"}, functions))
    view = boot(result.xml.decode())
    agree(view, result)
    # the expander 215, then 40 ports' buses up to 255
    assert seen(view) == {f"ua-hostdevice-d{number}": (f"0000:{216 + number:02x}:00.0", 0) for number in range(40)}


@pytest.mark.parametrize("firmware", ["seabios", "ovmf"])
def test_gpu_with_its_audio_and_usb_functions(firmware: str) -> None:
    functions = {"0000:41:00.0": 0, "0000:41:00.1": 0, "0000:41:00.2": 0, "0000:81:00.0": 1}
    names = ["ua-gpu-video", "ua-gpu-audio", "ua-gpu-usb", "ua-gpu-other"]
    devices = [hostdev(bdf, alias) for bdf, alias in zip(functions, names, strict=True)]
    result = transformed(domain({0: 0, 1: 1}, devices), hosts.host({0: "0-7", 1: "8-15"}, functions))
    view = boot(result.xml.decode(), firmware=firmware)
    agree(view, result)
    assert seen(view) == {
        "ua-gpu-video": ("0000:fd:00.0", 0),
        "ua-gpu-audio": ("0000:fd:00.1", 0),
        "ua-gpu-usb": ("0000:fd:00.2", 0),
        "ua-gpu-other": ("0000:ff:00.0", 1),
    }


def test_every_kind_of_device() -> None:
    """A mediated device, an SR-IOV interface, a vDPA interface on a VF that only its PF places, an NVSwitch, an NVMe."""
    record = {
        "kind": "pcinuma-host",
        "version": 1,
        "nodes": [{"id": 0, "cpus": "0-7"}, {"id": 1, "cpus": "8-15"}],
        "functions": [
            {"address": "0000:97:00.0", "node": 1, "class": "0x030200"},
            {"address": "0000:31:00.0", "node": 0, "class": "0x020000"},
            {"address": "0000:31:00.2", "node": 0, "physfn": "0000:31:00.0"},
            {"address": "0000:31:00.3", "node": -1, "physfn": "0000:31:00.0"},
            {"address": "0000:98:00.0", "node": 1, "class": "0x010802"},
            {"address": "0000:c6:00.0", "node": 1, "class": "0x068000"},
        ],
        "mdevs": [{"uuid": "7f1c2d3e-0a1b-4c5d-8e9f-000000000001", "parent": "0000:97:00.0"}],
        "vdpas": [{"device": "vhost-vdpa-0", "parent": "0000:31:00.3"}],
    }
    devices = [
        '<interface type="vdpa"><source dev="/dev/vhost-vdpa-0"></source><model type="virtio"></model>'
        '<alias name="ua-vdpa"></alias></interface>',
        '<interface type="hostdev" managed="no"><source><address type="pci" domain="0x0000" bus="0x31" slot="0x00"'
        ' function="0x2"></address></source><alias name="ua-vf"></alias></interface>',
        hostdev("0000:c6:00.0", "ua-hostdevice-nvswitch"),
        '<hostdev type="mdev" mode="subsystem" model="vfio-pci"><source>'
        '<address uuid="7f1c2d3e-0a1b-4c5d-8e9f-000000000001"></address></source><alias name="ua-gpu-vgpu"></alias></hostdev>',
        hostdev("0000:98:00.0", "ua-hostdevice-nvme"),
    ]
    host = load(json.dumps(record).encode(), "a host of the tests")
    result = transformed(domain({0: 0, 1: 1}, devices), host, Options(policy="restricted"))
    view = boot(result.xml.decode())
    agree(view, result)
    # cell 0: expander f9, two ports; cell 1: expander fc, three ports
    assert seen(view) == {
        "ua-vf": ("0000:fa:00.0", 0),
        "ua-vdpa": ("0000:fb:00.0", 0),
        "ua-gpu-vgpu": ("0000:fd:00.0", 1),
        "ua-hostdevice-nvme": ("0000:fe:00.0", 1),
        "ua-hostdevice-nvswitch": ("0000:ff:00.0", 1),
    }


def test_vfs_beside_their_kin_are_not_joined() -> None:
    functions = {"0000:31:00.0": 0, "0000:31:02.0": 0, "0000:31:02.1": 0, "0000:31:02.5": 0}
    vf = {"physfn": "0000:31:00.0"}
    host = hosts.host({0: "0-7"}, functions, **dict.fromkeys(("0000_31_02_0", "0000_31_02_1", "0000_31_02_5"), vf))
    names = ["ua-hostdevice-pf", "ua-sriov-a", "ua-sriov-b", "ua-sriov-c"]
    devices = [hostdev(bdf, alias) for bdf, alias in zip(functions, names, strict=True)]
    result = transformed(domain({0: 0}, devices), host)
    assert seen(boot(result.xml.decode())) == {
        "ua-hostdevice-pf": ("0000:fc:00.0", 0),
        "ua-sriov-a": ("0000:fd:00.0", 0),
        "ua-sriov-b": ("0000:fe:00.0", 0),
        "ua-sriov-c": ("0000:ff:00.0", 0),
    }


def test_functions_whose_function_0_stays_behind_have_ports_of_their_own() -> None:
    functions = {"0000:41:00.1": 0, "0000:41:00.2": 0}
    devices = [hostdev("0000:41:00.1", "ua-gpu-audio"), hostdev("0000:41:00.2", "ua-gpu-usb")]
    result = transformed(domain({0: 0}, devices), hosts.host({0: "0-7"}, functions))
    assert seen(boot(result.xml.decode())) == {"ua-gpu-audio": ("0000:fe:00.0", 0), "ua-gpu-usb": ("0000:ff:00.0", 0)}


def test_beside_devices_that_stay() -> None:
    functions = {"0000:41:00.0": 0, "0000:42:00.0": -1, "0000:81:00.0": 1, "0000:c1:00.0": 2}
    names = ["ua-gpu-a", "ua-gpu-unknown", "ua-gpu-b", "ua-gpu-unmapped"]
    devices = [hostdev(bdf, alias) for bdf, alias in zip(functions, names, strict=True)]
    host = hosts.host({0: "0-7", 1: "8-15", 2: "16-23"}, functions)
    result = transformed(domain({0: 0, 1: 1}, devices), host)
    view = boot(result.xml.decode())
    agree(view, result)
    nodes = {alias: node for alias, (_, node) in seen(view).items()}
    assert nodes == {"ua-gpu-a": 0, "ua-gpu-unknown": -1, "ua-gpu-b": 1, "ua-gpu-unmapped": -1}


def test_beside_existing_controllers_and_addresses() -> None:
    """Root ports 1 and 5, a disk's controller at an address of its own, a GPU that keeps its address, one that moves."""
    at = '<address type="pci" domain="0x0000" bus="0x05" slot="0x00" function="0x0"></address>'
    devices = [
        CONTROLLER.format(0, "pcie-root", ""),
        CONTROLLER.format(1, "pcie-root-port", ""),
        CONTROLLER.format(5, "pcie-root-port", ""),
        hostdev("0000:41:00.0", "ua-gpu-kept", at),
        hostdev("0000:42:00.0", "ua-gpu-free"),
        hostdev("0000:81:00.0", "ua-gpu-far"),
    ]
    functions = {"0000:41:00.0": 0, "0000:42:00.0": 0, "0000:81:00.0": 1}
    host = hosts.host({0: "0-7", 1: "8-15"}, functions)
    xml = domain({0: 0, 1: 1}, devices)
    result = transformed(xml, host)
    view = boot(result.xml.decode())
    agree(view, result)
    assert {alias: node for alias, (_, node) in seen(view).items()} == {
        "ua-gpu-kept": -1,
        "ua-gpu-free": 0,
        "ua-gpu-far": 1,
    }
    moved = transformed(xml, host, Options(addressed="move"))
    assert seen(boot(moved.xml.decode())) == {
        "ua-gpu-kept": ("0000:fc:00.0", 0),
        "ua-gpu-free": ("0000:fd:00.0", 0),
        "ua-gpu-far": ("0000:ff:00.0", 1),
    }


def test_beside_an_expander_of_another_hand() -> None:
    """KubeVirt's own shape for one device, at busNr 254; ours must end below it."""
    devices = [
        CONTROLLER.format(1, "pcie-expander-bus", '<target busNr="254"><node>1</node></target>'),
        CONTROLLER.format(2, "pcie-root-port", '<address type="pci" bus="0x01" slot="0x00" function="0x0"></address>'),
        hostdev(
            "0000:81:00.0", "ua-gpu-theirs", '<address type="pci" bus="0x02" slot="0x00" function="0x0"></address>'
        ),
        hostdev("0000:41:00.0", "ua-gpu-ours"),
    ]
    host = hosts.host({0: "0-7", 1: "8-15"}, {"0000:41:00.0": 0, "0000:81:00.0": 1})
    result = transformed(domain({0: 0, 1: 1}, devices), host, Options(policy="restricted"))
    assert seen(boot(result.xml.decode())) == {"ua-gpu-theirs": ("0000:ff:00.0", 1), "ua-gpu-ours": ("0000:fd:00.0", 0)}


def test_nearest_cell() -> None:
    """Host node 2 is of no cell, 12 away from node 1 and 32 from node 0."""
    record = hosts.host({0: "0-7", 1: "8-15", 2: "16-23"}, {"0000:41:00.0": 2})
    devices = [hostdev("0000:41:00.0", "ua-gpu-a")]
    # hosts.host has 21 everywhere: a tie, which goes to the lowest cell
    result = transformed(domain({0: 0, 1: 1}, devices), record, Options(unmapped="nearest"))
    assert [placement.kind for placement in result.report.plan.placements] == ["approximate"]
    assert seen(boot(result.xml.decode())) == {"ua-gpu-a": ("0000:ff:00.0", 0)}


def test_a_stale_set_is_repaired() -> None:
    """A transformed domain whose GPU was exchanged for one on the other node."""
    host = hosts.host({0: "0-7", 1: "8-15"}, {"0000:41:00.0": 0, "0000:42:00.0": 0, "0000:81:00.0": 1})
    devices = [hostdev("0000:41:00.0", "ua-gpu-a"), hostdev("0000:42:00.0", "ua-gpu-b")]
    first = transformed(domain({0: 0, 1: 1}, devices), host).xml.decode()
    exchanged = first.replace('bus="0x42" slot="0x00"', 'bus="0x81" slot="0x00"')
    result = transformed(exchanged, host)
    view = boot(result.xml.decode())
    agree(view, result)
    assert seen(view) == {"ua-gpu-a": ("0000:fd:00.0", 0), "ua-gpu-b": ("0000:ff:00.0", 1)}


def test_an_expander_for_each_root_complex() -> None:
    """Two root complexes on host node 0, one on node 1: the guest sees which devices share a host bridge."""
    result = transformed(
        (EXAMPLE / "domain.xml").read_text(), hosts.from_file(EXAMPLE / "host.json"), Options(group_by="root-complex")
    )
    view = boot(result.xml.decode())
    agree(view, result)
    # by hand: 3 + 2 + 2 bus numbers for cell 0's pci0000:15, :37, :59, then 3 + 2 for cell 1's :95, :b7; the last is 255
    assert seen(view) == {
        "ua-gpu-gpu0": ("0000:f5:00.0", 0),
        "ua-hostdevice-ib0": ("0000:f6:00.0", 0),
        "ua-gpu-gpu1": ("0000:f8:00.0", 0),
        "ua-sriov-storage": ("0000:fa:00.0", 0),
        "ua-gpu-gpu2": ("0000:fc:00.0", 1),
        "ua-hostdevice-ib1": ("0000:fd:00.0", 1),
        "ua-gpu-gpu3": ("0000:ff:00.0", 1),
    }
    # the guest's sysfs path begins with the root bus: what shares one shares a host bridge on the host
    roots = {alias: view.pci[device.bdf].path.split("/")[3] for alias, device in view.devices.items()}
    assert roots["ua-gpu-gpu0"] == roots["ua-hostdevice-ib0"] != roots["ua-gpu-gpu1"]


@pytest.mark.parametrize("firmware", ["seabios", "ovmf"])
def test_the_hosts_switches_rebuilt(firmware: str) -> None:
    """A GPU and a NIC below one switch, a lone NVMe below another, and on cell 1 a switch below a switch."""
    outer = ["0000:80:01.0", "0000:81:00.0"]
    inner = [*outer, "0000:82:00.0", "0000:83:00.0"]
    host = hosts.host(
        {0: "0-7", 1: "8-15"},
        {
            **dict.fromkeys(("0000:13:00.0", "0000:14:00.0", "0000:23:00.0"), 0),
            **dict.fromkeys(("0000:85:00.0", "0000:86:00.0", "0000:87:00.0"), 1),
        },
        **{
            "0000_13_00_0": {"bridges": ["0000:10:01.0", "0000:11:00.0", "0000:12:00.0"]},
            "0000_14_00_0": {"bridges": ["0000:10:01.0", "0000:11:00.0", "0000:12:01.0"]},
            "0000_23_00_0": {"bridges": ["0000:10:02.0", "0000:21:00.0", "0000:22:00.0"]},
            "0000_85_00_0": {"bridges": [*inner, "0000:84:00.0"]},
            "0000_86_00_0": {"bridges": [*inner, "0000:84:01.0"]},
            "0000_87_00_0": {"bridges": [*outer, "0000:82:01.0"]},
        },
    )
    names = {"23": "nvme", "87": "far", "14": "near", "85": "gpu1", "13": "gpu0", "86": "nic"}
    devices = [hostdev(f"0000:{bus}:00.0", f"ua-hostdevice-{name}") for bus, name in names.items()]
    result = transformed(domain({0: 0, 1: 1}, devices), host, Options(group_by="switch"))
    view = boot(result.xml.decode(), firmware=firmware)
    agree(view, result)
    # cell 0: expander f2, root f3, upstream f4, downstream f5 and f6, root f7;
    # cell 1: expander f8, root f9, upstream fa, downstream fb with upstream fc, downstream fd and fe, downstream ff
    assert seen(view) == {
        "ua-hostdevice-gpu0": ("0000:f5:00.0", 0),
        "ua-hostdevice-near": ("0000:f6:00.0", 0),
        "ua-hostdevice-nvme": ("0000:f7:00.0", 0),
        "ua-hostdevice-gpu1": ("0000:fd:00.0", 1),
        "ua-hostdevice-nic": ("0000:fe:00.0", 1),
        "ua-hostdevice-far": ("0000:ff:00.0", 1),
    }


def test_a_switch_with_more_ports_than_slots() -> None:
    """Downstream ports of 35 devices take eight functions a slot."""
    functions = [f"0000:{0x20 + number:02x}:00.0" for number in range(35)]
    details = {}
    for number, bdf in enumerate(functions):
        bridges = ["0000:10:01.0", "0000:11:00.0", f"0000:12:{number % 32:02x}.{number // 32}"]
        details[bdf.replace(":", "_").replace(".", "_")] = {"bridges": bridges}
    devices = [hostdev(bdf, f"ua-hostdevice-d{number}") for number, bdf in enumerate(functions)]
    host = hosts.host({0: "0-7"}, dict.fromkeys(functions, 0), **details)
    result = transformed(domain({0: 0}, devices), host, Options(group_by="switch"))
    view = boot(result.xml.decode())
    agree(view, result)
    # expander, root port and upstream port are 218, 219 and 220
    assert seen(view) == {f"ua-hostdevice-d{number}": (f"0000:{221 + number:02x}:00.0", 0) for number in range(35)}
