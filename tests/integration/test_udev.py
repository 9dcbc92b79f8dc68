"""Discovery of a live host through the real libudev, with a made-up /sys put under it by umockdev."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).with_name("pcinuma")
UUID = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"

# umockdev's format: P path, E uevent, A attribute, L link; \n as a kernel ends its lines
HOST = rf"""
P: /devices/pci0000:40/0000:40:01.1
E: SUBSYSTEM=pci
E: PCI_SLOT_NAME=0000:40:01.1
A: numa_node=1\n
A: class=0x060400\n

P: /devices/pci0000:40/0000:40:01.1/0000:41:00.0
E: SUBSYSTEM=pci
E: DRIVER=vfio-pci
E: PCI_SLOT_NAME=0000:41:00.0
A: numa_node=1\n
A: class=0x030200\n
A: vendor=0x10de\n
A: device=0x2330\n
A: current_link_speed=16.0 GT/s PCIe\n
A: current_link_width=8\n
A: max_link_speed=32.0 GT/s PCIe\n
A: max_link_width=16\n
A: resource=0x000020a000000000 0x000020bfffffffff 0x000000000014220c\n0x0 0x0 0x0\n0xe000 0xe07f 0x40101\n
L: driver=../../../../bus/pci/drivers/vfio-pci
L: iommu_group=../../../../kernel/iommu_groups/27

P: /devices/pci0000:40/0000:40:01.1/0000:41:00.4
E: SUBSYSTEM=pci
E: PCI_SLOT_NAME=0000:41:00.4
A: numa_node=1\n
L: physfn=../0000:41:00.0

P: /devices/pci0000:40/0000:40:01.1/0000:41:00.4/{UUID}
E: SUBSYSTEM=mdev

P: /devices/pci0000:40/0000:40:01.1/0000:41:00.5
E: SUBSYSTEM=pci
E: PCI_SLOT_NAME=0000:41:00.5
A: numa_node=-1\n
L: physfn=../0000:41:00.0

P: /devices/pci0000:40/0000:40:01.1/0000:41:00.5/vdpa7
E: SUBSYSTEM=vdpa
A: vhost-vdpa-2/dev=511:2\n

P: /devices/virtual/vdpasim/vdpa8
E: SUBSYSTEM=vdpa
A: vhost-vdpa-3/dev=511:3\n

P: /devices/pci0000:5d/0000:5d:05.5/pci10000:00/10000:00:02.0
E: SUBSYSTEM=pci
E: PCI_SLOT_NAME=10000:00:02.0
A: numa_node=0\n

P: /devices/pci0000:5d/0000:5d:05.5/pci10000:00/10000:00:02.0/10000:01:00.0
E: SUBSYSTEM=pci
E: PCI_SLOT_NAME=10000:01:00.0
A: numa_node=0\n

P: /devices/pci0000:80/0000:80:00.0
E: SUBSYSTEM=pci
E: PCI_SLOT_NAME=0000:80:00.0
A: numa_node=-1\n

P: /devices/pci0000:80/0000:80:01.0
E: SUBSYSTEM=pci
E: PCI_SLOT_NAME=0000:80:01.0

P: /devices/system/cpu
E: SUBSYSTEM=cpu
A: modalias=cpu:type:x86,ven0000fam0006mod008F:feature:,0000,0001\n

P: /devices/system/node/node0
E: SUBSYSTEM=node
A: cpulist=0-3,8-11\n
A: distance=10 21\n
A: meminfo=\nNode 0 MemTotal:       131841248 kB\nNode 0 MemFree:        1 kB\n

P: /devices/system/node/node8
E: SUBSYSTEM=node
A: cpulist=\n
A: distance=21 10\n
A: meminfo=Node 8 MemTotal:       0 kB\n

P: /devices/system/node/node1
E: SUBSYSTEM=node
A: cpulist=4-7\n
A: distance=garbage\n
"""

READ = """\
import sys
from pcinuma import discover, model
query = model.HostQuery(frozenset(map(model.PciAddress.parse, {addresses!r})), frozenset({mdevs!r}), frozenset({vdpas!r}))
print(repr(discover.live()(query)))
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with the file that umockdev-run takes; commands run in it."""
    if shutil.which("umockdev-run") is None:
        pytest.skip("no umockdev-run here (Debian: umockdev)")
    # a \n within a value is umockdev's; one at its end would be ambiguous in a raw string and is meant
    (tmp_path / "host.umockdev").write_text(HOST.lstrip())
    return tmp_path


def on(machine: Path, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["umockdev-run", "-d", "host.umockdev", "--", *command],
        cwd=machine,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
    )


def read(machine: Path, *addresses: str, mdevs: tuple[str, ...] = (), vdpas: tuple[str, ...] = ()) -> Any:
    """What a live reader in a process of its own answers; its repr is read back with the model's own classes."""
    from pcinuma import model

    done = on(machine, sys.executable, "-c", READ.format(addresses=addresses, mdevs=mdevs, vdpas=vdpas))
    assert (done.returncode, done.stderr) == (0, ""), done
    return eval(done.stdout, vars(model) | {"frozenset": frozenset})


def schema(name: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(json.loads((ROOT / f"schemas/{name}.schema.json").read_text()))


def test_a_function_with_all_that_sysfs_says(machine: Path) -> None:
    (function,) = read(machine, "0000:41:00.0").functions.values()
    assert str(function.address) == "0000:41:00.0"
    assert (function.node, function.node_problem) == (1, None)
    assert (function.pci_class, function.vendor, function.device) == (0x030200, 0x10DE, 0x2330)
    assert function.root_complex == "pci0000:40"
    assert [str(bridge) for bridge in function.bridges] == ["0000:40:01.1"]
    assert [(bar.index, bar.size, bar.flags) for bar in function.bars] == [
        (0, 128 * 2**30, 0x14220C),
        (2, 128, 0x40101),
    ]
    link = function.link
    assert (link.speed, link.width, link.max_speed, link.max_width) == (16.0, 8, 32.0, 16)
    assert (function.iommu_group, function.driver, function.physfn) == (27, "vfio-pci", None)


def test_a_virtual_function_and_a_mediated_device_on_it(machine: Path) -> None:
    host = read(machine, mdevs=(UUID,))
    assert {uuid: str(parent) for uuid, parent in host.mdev_parents.items()} == {UUID: "0000:41:00.4"}
    (function,) = host.functions.values()
    assert (str(function.address), function.node, str(function.physfn)) == ("0000:41:00.4", 1, "0000:41:00.0")


def test_a_vdpa_device_on_a_virtual_function_whose_node_only_its_pf_knows(machine: Path) -> None:
    host = read(machine, vdpas=("vhost-vdpa-2", "vhost-vdpa-3", "vhost-vdpa-4"))
    assert {name: str(parent) for name, parent in host.vdpa_parents.items()} == {"vhost-vdpa-2": "0000:41:00.5"}
    assert {str(address): function.node for address, function in host.functions.items()} == {
        "0000:41:00.0": 1,
        "0000:41:00.5": None,
    }


def test_behind_a_volume_management_device(machine: Path) -> None:
    (function,) = read(machine, "10000:01:00.0").functions.values()
    assert (function.node, function.root_complex) == (0, "pci10000:00")
    assert [str(bridge) for bridge in function.bridges] == ["10000:00:02.0"]


@pytest.mark.parametrize("address", ("0000:80:00.0", "0000:80:01.0"), ids=("minus-one", "no-file"))
def test_a_node_that_is_not_known(machine: Path, address: str) -> None:
    (function,) = read(machine, address).functions.values()
    assert function.node is None
    assert function.node_problem


def test_what_is_not_there(machine: Path) -> None:
    host = read(machine, "0000:42:00.0", "10000:01:00.1", mdevs=("00000000-509f-382f-3c1e-e6bfe0fa1001",))
    assert host.functions == {}
    assert host.mdev_parents == {}


def test_only_what_is_asked_for(machine: Path) -> None:
    assert list(map(str, read(machine, "0000:41:00.0", "0000:80:00.0").functions)) == ["0000:41:00.0", "0000:80:00.0"]


def test_nodes(machine: Path) -> None:
    nodes = read(machine).nodes
    assert {n: (str(node.cpus), node.memory_kib) for n, node in nodes.items()} == {
        0: ("0-3,8-11", 131841248),
        1: ("4-7", None),
        8: ("", 0),
    }
    # three nodes are there and two columns: a table that does not fit says nothing
    assert all(node.distances == {} for node in nodes.values())


def test_distances_are_in_the_order_of_the_nodes(machine: Path) -> None:
    text = HOST.lstrip().replace("distance=10 21", "distance=10 15 80").replace("distance=21 10", "distance=80 85 10")
    (machine / "host.umockdev").write_text(text)
    nodes = read(machine).nodes
    assert nodes[0].distances == {0: 10, 1: 15, 8: 80}
    assert nodes[1].distances == {}
    assert nodes[8].distances == {0: 80, 1: 85, 8: 10}


def test_snapshot(machine: Path) -> None:
    done = on(machine, str(PROGRAM), "snapshot")
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    schema("host").validate(record)
    assert [(function["address"], function["node"]) for function in record["functions"]] == [
        ("0000:40:01.1", 1),
        ("0000:41:00.0", 1),
        ("0000:41:00.4", 1),
        ("0000:41:00.5", None),
        ("0000:80:00.0", None),
        ("0000:80:01.0", None),
        ("10000:00:02.0", 0),
        ("10000:01:00.0", 0),
    ]
    assert record["cpu"] == {"vendor": "GenuineIntel", "family": 6, "model": 143}
    assert [node["id"] for node in record["nodes"]] == [0, 1, 8]
    assert record["mdevs"] == [{"uuid": UUID, "parent": "0000:41:00.4"}]
    assert record["vdpas"] == [{"device": "vhost-vdpa-2", "parent": "0000:41:00.5"}]


DOMAIN = f"""\
<domain type='kvm'>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <cpu><numa><cell id='0' cpus='0' memory='1'/><cell id='1' cpus='1' memory='1'/></numa></cpu>
  <numatune><memnode cellid='0' nodeset='0'/><memnode cellid='1' nodeset='1'/></numatune>
  <devices>
    <hostdev mode='subsystem' type='pci'><source><address domain='0x10000' bus='1' slot='0' function='0'/></source></hostdev>
    <hostdev mode='subsystem' type='pci'><source><address bus='0x41' slot='0' function='0'/></source></hostdev>
    <hostdev mode='subsystem' type='mdev' model='vfio-pci'><source><address uuid='{UUID}'/></source></hostdev>
    <interface type='vdpa'><source dev='/dev/vhost-vdpa-2'/></interface>
  </devices>
</domain>
"""


def test_a_domain_is_placed_on_the_live_host_as_on_its_record(machine: Path) -> None:
    live = on(machine, str(PROGRAM), "explain", "--json", "--policy", "restricted", stdin=DOMAIN)
    assert (live.returncode, live.stderr) == (0, "")
    devices = json.loads(live.stdout)["devices"]
    assert [(device["source"], device["hostNode"], device["cell"], device["placement"]) for device in devices] == [
        ("10000:01:00.0", 0, 0, "placed"),
        ("0000:41:00.0", 1, 1, "placed"),
        ("0000:41:00.4", 1, 1, "placed"),
        ("0000:41:00.5", 1, 1, "placed"),
    ]
    (machine / "host.json").write_text(on(machine, str(PROGRAM), "snapshot").stdout)
    recorded = subprocess.run(
        [PROGRAM, "explain", "--json", "--policy", "restricted", "--host", "host.json"],
        cwd=machine,
        input=DOMAIN,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert recorded.stdout == live.stdout


def test_udev_is_not_loaded_for_a_domain_without_devices(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pcinuma import cli\n"
        "status = cli.main(['transform', 'domain.xml', '-o', 'out.xml'])\n"
        "sys.exit(status or 'pyudev' in sys.modules)\n"
    )
    (tmp_path / "domain.xml").write_text("<domain type='kvm'><devices/></domain>")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_snapshot_of_this_machine(tmp_path: Path) -> None:
    done = subprocess.run([PROGRAM, "snapshot"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    schema("host").validate(record)
    listed = Path("/sys/bus/pci/devices")
    assert {function["address"] for function in record["functions"]} == (
        set(os.listdir(listed)) if listed.is_dir() else set()
    )
    nodes = Path("/sys/devices/system/node")
    assert {f"node{node['id']}" for node in record["nodes"]} == (
        {path.name for path in nodes.glob("node[0-9]*")} if nodes.is_dir() else set()
    )
