"""Discovery on trees laid out like /sys, built here file by file; what a kernel writes is written out in full."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pcinuma import discover, host_file, sys_trees
from pcinuma.errors import HostUnreadable
from pcinuma.model import Bar, CpuSet, HostCpu, HostFunction, HostNode, HostQuery, HostTopology, Link, PciAddress

GPU = "pci0000:40/0000:40:01.1/0000:41:00.0"
GPU_ADDRESS = PciAddress(0, 0x41, 0, 0)


class Tree:
    """A tree laid out like /sys under construction."""

    def __init__(self, root: Path):
        self.root = root
        (root / "bus/pci/devices").mkdir(parents=True)

    def node(self, number: int, cpulist: str = "", distance: str = "", meminfo: str = "") -> Tree:
        path = self.root / f"devices/system/node/node{number}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(cpulist + "\n")
        (path / "distance").write_text(distance + "\n")
        (path / "meminfo").write_text(meminfo)
        return self

    def function(self, path: str = GPU, /, **files: str) -> Path:
        """The folder of the function at ``path`` below devices/, with its link below bus/pci/devices."""
        folder = self.root / "devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(content)
        link = self.root / "bus/pci/devices" / folder.name
        if not link.is_symlink():
            link.symlink_to(f"../../../devices/{path}")
        return folder

    def mdev(self, uuid: str, parent: str = GPU) -> None:
        (self.root / "devices" / parent / uuid).mkdir(parents=True)
        (self.root / "bus/mdev/devices").mkdir(parents=True, exist_ok=True)
        (self.root / "bus/mdev/devices" / uuid).symlink_to(f"../../../devices/{parent}/{uuid}")

    def vdpa(self, name: str, device: str, parent: str = GPU) -> None:
        (self.root / "devices" / parent / name / device).mkdir(parents=True)
        (self.root / "bus/vdpa/devices").mkdir(parents=True, exist_ok=True)
        (self.root / "bus/vdpa/devices" / name).symlink_to(f"../../../devices/{parent}/{name}")

    def read(self, *addresses: str, mdevs: tuple[str, ...] = (), vdpas: tuple[str, ...] = ()) -> HostTopology:
        query = HostQuery(frozenset(map(PciAddress.parse, addresses)), frozenset(mdevs), frozenset(vdpas))
        return discover.recorded(str(self.root))(query)

    def gpu(self) -> HostFunction:
        return self.read("0000:41:00.0").functions[GPU_ADDRESS]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path / "sys")
    made.node(0, "0-3", "10 21", "\nNode 0 MemTotal:       131841248 kB\nNode 0 MemFree:        11 kB\n")
    made.node(1, "4-7", "21 10", "\nNode 1 MemTotal:       131841250 kB\n")
    return made


# --- the processor ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modalias", "cpu"),
    [
        ("cpu:type:x86,ven0000fam0006mod008F:feature:,0000,0001", HostCpu("GenuineIntel", 6, 0x8F)),
        ("cpu:type:x86,ven0002fam0019mod0011:feature:,0000", HostCpu("AuthenticAMD", 25, 17)),
        ("cpu:type:x86,ven000Afam0007mod005B:feature:,0000", HostCpu("  Shanghai  ", 7, 91)),
        ("cpu:type:x86,ven0008fam0005mod0004:feature:,0000", None),  # National Semiconductor
        ("cpu:type:aarch64:feature:,0000,0001", None),
        ("cpu:type:x86,ven0000fam0006", None),
        ("", None),
        (None, None),
    ],
)
def test_the_processor(tree: Tree, modalias: str | None, cpu: HostCpu | None) -> None:
    folder = tree.root / "devices/system/cpu"
    folder.mkdir()
    if modalias is not None:
        (folder / "modalias").write_text(modalias + "\n")
    host = tree.read()
    assert host.cpu == cpu
    again = host_file.load(json.dumps(host_file.dump(host)).encode(), "a test")
    assert again(HostQuery()).cpu == cpu


def test_the_processor_is_read_for_the_address_space_not_for_placing(tree: Tree) -> None:
    folder = tree.root / "devices/system/cpu"
    folder.mkdir()
    (folder / "modalias").write_text("cpu:type:x86,ven0000fam0006mod008F:feature:,0000\n")
    read = discover.recorded(str(tree.root))
    assert read(HostQuery(details=False, address_bits=False)).cpu is None
    assert read(HostQuery(details=False)).cpu == HostCpu("GenuineIntel", 6, 143)


def test_this_machines_processor() -> None:
    """As /proc/cpuinfo has it, by udev and from the tree."""
    text = Path("/proc/cpuinfo").read_text()
    found = [re.search(rf"^{name}\s*: (.*)$", text, re.M) for name in ("vendor_id", "cpu family", "model")]
    expected = None
    if all(found):
        vendor, family, model = (match[1] for match in found if match)
        expected = HostCpu(vendor, int(family), int(model))
    assert discover.live()(HostQuery()).cpu == discover.recorded("/sys")(HostQuery()).cpu == expected


# --- numa_node -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, node", (("0\n", 0), ("1\n", 1), ("1", 1)))
def test_the_node_of_a_function(tree: Tree, text: str, node: int) -> None:
    tree.function(numa_node=text)
    gpu = tree.gpu()
    assert (gpu.node, gpu.node_problem) == (node, None)


@pytest.mark.parametrize(
    "text",
    (
        "-1\n", "", "\n", "none\n", "0x1\n", "1 1\n", "1.0\n", "1,\n", "--1\n", "+1\n", "-2\n", "2\n", "1023\n", "1024\n",
        "4294967296\n", "99999999999999999999999999\n", "١\n", "1\x00", "\x00" * 5000, "1" * 100_000,
    ),
)  # fmt: skip
def test_a_node_that_is_not_known_is_not_guessed(tree: Tree, text: str) -> None:
    tree.function(numa_node=text)
    gpu = tree.gpu()
    assert gpu.node is None
    assert gpu.node_problem
    assert len(gpu.node_problem) <= 200
    assert gpu.node_problem.isprintable()


def test_the_reason_tells_apart(tree: Tree) -> None:
    reasons = set()
    for text in ("-1\n", "", "none\n", "7\n"):
        tree.function(numa_node=text)
        reasons.add(tree.gpu().node_problem)
    (tree.root / "devices" / GPU / "numa_node").unlink()
    reasons.add(tree.gpu().node_problem)
    assert len(reasons) == 5
    assert any("-1" in str(reason) for reason in reasons)
    assert any("7" in str(reason) for reason in reasons)


@pytest.mark.parametrize("what", ("missing", "folder", "dangling", "loop", "binary"))
def test_a_numa_node_that_is_no_file(tree: Tree, what: str) -> None:
    path = tree.function() / "numa_node"
    if what == "folder":
        path.mkdir()
    elif what == "dangling":
        path.symlink_to("nowhere")
    elif what == "loop":
        path.symlink_to("numa_node")
    elif what == "binary":
        path.write_bytes(bytes(range(128, 256)))
    gpu = tree.gpu()
    assert gpu.node is None
    assert gpu.node_problem


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may look into, unlike those of pytest."""
    path = Path(tempfile.mkdtemp(prefix="pcinuma-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_a_numa_node_that_may_not_be_read(public: Path) -> None:
    tree = Tree(public / "sys").node(0, "0-3", "10")
    (tree.function(numa_node="0\n") / "numa_node").chmod(0)
    code = (
        "from pcinuma import discover, model\n"
        "a = model.PciAddress.parse('0000:41:00.0')\n"
        "f = discover.recorded('sys')(model.HostQuery(frozenset({a}))).functions[a]\n"
        "assert f.node is None and f.node_problem, f\n"
        "print('unknown:', f.node_problem)\n"
    )
    command = [sys.executable, "-c", code]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv (util-linux), without which root reads every file")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    done = subprocess.run(command, cwd=public, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.startswith("unknown:"), done


def test_a_host_without_nodes_keeps_what_the_function_says(tmp_path: Path) -> None:
    """A kernel without CONFIG_NUMA has no node folder; -1 is then what it shows, and 0 would be believed."""
    tree = Tree(tmp_path / "sys")
    tree.function(numa_node="-1\n")
    host = tree.read("0000:41:00.0")
    assert host.nodes == {}
    assert host.functions[GPU_ADDRESS].node is None


# --- nodes -----------------------------------------------------------------------------------------------------


def test_nodes(tree: Tree) -> None:
    assert tree.read().nodes == {
        0: HostNode(0, CpuSet.parse("0-3"), 131841248, {0: 10, 1: 21}),
        1: HostNode(1, CpuSet.parse("4-7"), 131841250, {0: 21, 1: 10}),
    }


def test_numbers_that_are_not_contiguous(tmp_path: Path) -> None:
    """POWER9: the columns of distance are the online nodes in ascending order, here 0, 8 and 252."""
    tree = Tree(tmp_path / "sys")
    tree.node(252, "", "80 81 10")
    tree.node(8, "88-175", "40 10 81")
    tree.node(0, "0-87", "10 40 80")
    nodes = tree.read().nodes
    assert list(nodes) == [0, 8, 252]
    assert nodes[0].distances == {0: 10, 8: 40, 252: 80}
    assert nodes[8].distances == {0: 40, 8: 10, 252: 81}
    assert nodes[252].distances == {0: 80, 8: 81, 252: 10}


def test_ten_nodes_are_ordered_as_numbers(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys")
    for number in range(12):
        tree.node(number, str(number), " ".join(str(10 + column) for column in range(12)))
    assert tree.read().nodes[0].distances == {number: 10 + number for number in range(12)}


def test_a_node_without_cpus_and_one_without_memory(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys")
    tree.node(0, "0-3", "10 20 30", "\nNode 0 MemTotal:       0 kB\n")
    tree.node(1, "", "20 10 30", "\nNode 1 MemTotal:       15728640 kB\n")
    tree.node(2, "4", "30 30 10", "")
    nodes = tree.read().nodes
    assert [(node.cpus.members, node.memory_kib) for node in nodes.values()] == [
        (frozenset({0, 1, 2, 3}), 0),
        (frozenset(), 15728640),
        (frozenset({4}), None),
    ]


@pytest.mark.parametrize("distance", ("", "10", "10 21 30", "10 x", "10 -1", "10,21", "10 ٢"))
def test_a_distance_table_that_does_not_fit_says_nothing(tmp_path: Path, distance: str) -> None:
    tree = Tree(tmp_path / "sys").node(0, "0", distance).node(1, "1", "21 10")
    nodes = tree.read().nodes
    assert nodes[0].distances == {}
    assert nodes[1].distances == {0: 21, 1: 10}


@pytest.mark.parametrize("cpulist", ("garbage", "3-1", "0-99999999", "0-3,", "\x00"))
def test_a_cpulist_that_is_none(tmp_path: Path, cpulist: str) -> None:
    assert not Tree(tmp_path / "sys").node(0, cpulist, "10").read().nodes[0].cpus


def test_other_entries_beside_the_nodes(tree: Tree) -> None:
    base = tree.root / "devices/system/node"
    for name in ("has_cpu", "online", "possible", "power", "nodes", "node", "nodeX", "node-1", "node99999", "xnode0"):
        (base / name).mkdir()
    assert list(tree.read().nodes) == [0, 1]


# --- where a function hangs ------------------------------------------------------------------------------------


def test_root_complex_and_bridges_from_the_real_path(tree: Tree) -> None:
    tree.function("pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:04.0/0000:43:00.1", numa_node="0\n")
    function = tree.read("0000:43:00.1").functions[PciAddress(0, 0x43, 0, 1)]
    assert function.root_complex == "pci0000:40"
    assert function.bridges == (PciAddress(0, 0x40, 1, 1), PciAddress(0, 0x41, 0, 0), PciAddress(0, 0x42, 4, 0))


def test_a_function_on_the_root_bus(tree: Tree) -> None:
    tree.function("pci0000:00/0000:00:1f.3", numa_node="0\n")
    function = tree.read("0000:00:1f.3").functions[PciAddress(0, 0, 0x1F, 3)]
    assert (function.root_complex, function.bridges) == ("pci0000:00", ())


def test_behind_a_volume_management_device(tree: Tree) -> None:
    """VMD makes a PCI domain of its own, of five digits, with a root bus of its own below one of its functions."""
    tree.function("pci0000:5d/0000:5d:05.5", numa_node="0\n")
    tree.function("pci0000:5d/0000:5d:05.5/pci10000:00/10000:00:02.0/10000:01:00.0", numa_node="1\n")
    function = tree.read("10000:01:00.0").functions[PciAddress(0x10000, 1, 0, 0)]
    assert function.node == 1
    assert function.root_complex == "pci10000:00"
    assert function.bridges == (PciAddress(0x10000, 0, 2, 0),)


def test_a_virtual_function_knows_its_physical_one(tree: Tree) -> None:
    physical = tree.function("pci0000:40/0000:40:01.1/0000:41:00.0", numa_node="0\n")
    virtual = tree.function("pci0000:40/0000:40:01.1/0000:41:02.3", numa_node="0\n")
    (virtual / "physfn").symlink_to("../0000:41:00.0")
    (physical / "virtfn0").symlink_to("../0000:41:02.3")
    functions = tree.read("0000:41:00.0", "0000:41:02.3").functions
    assert functions[PciAddress(0, 0x41, 2, 3)].physfn == GPU_ADDRESS
    assert functions[GPU_ADDRESS].physfn is None


def test_group_and_driver(tree: Tree) -> None:
    gpu = tree.function(numa_node="0\n")
    assert (tree.gpu().iommu_group, tree.gpu().driver) == (None, None)
    (gpu / "iommu_group").symlink_to("../../../../kernel/iommu_groups/27")
    (gpu / "driver").symlink_to("../../../../bus/pci/drivers/vfio-pci")
    assert (tree.gpu().iommu_group, tree.gpu().driver) == (27, "vfio-pci")


@pytest.mark.parametrize("target", ("..", "x", "0000:41:00", "/etc", "0000:41:00.9"))
def test_links_that_lead_elsewhere(tree: Tree, target: str) -> None:
    gpu = tree.function(numa_node="0\n")
    (gpu / "physfn").symlink_to(target)
    (gpu / "iommu_group").symlink_to(target)
    assert (tree.gpu().physfn, tree.gpu().iommu_group) == (None, None)


def test_class_vendor_and_device(tree: Tree) -> None:
    subsystem = {"subsystem_vendor": "0x10de\n", "subsystem_device": "0x16c1\n"}
    tree.function(numa_node="0\n", **{"class": "0x030200\n", "vendor": "0x10de\n", "device": "0x2330\n"}, **subsystem)
    gpu = tree.gpu()
    assert (gpu.pci_class, gpu.vendor, gpu.device) == (0x030200, 0x10DE, 0x2330)
    assert (gpu.subsystem_vendor, gpu.subsystem_device) == (0x10DE, 0x16C1)
    record = host_file.dump(tree.read("0000:41:00.0"))
    again = host_file.load(json.dumps(record).encode(), "a test")(HostQuery(frozenset({GPU_ADDRESS})))
    assert again.functions[GPU_ADDRESS] == gpu


@pytest.mark.parametrize("text", ("", "\n", "nonsense\n", "0x\n", "-1\n", "0x123456789abc\n", "0x3_0\n"))
def test_a_class_that_is_none(tree: Tree, text: str) -> None:
    tree.function(numa_node="0\n", **{"class": text})
    assert tree.gpu().pci_class is None


# --- BARs and links --------------------------------------------------------------------------------------------

# an H100: BAR 0 and 4 are 64-bit, each takes two lines; then an I/O BAR as GPUs for desktops have; ROM; windows
RESOURCE = """\
0x000020bffe000000 0x000020bffeffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x000020a000000000 0x000020bfffffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000000093000000 0x0000000093ffffff 0x0000000000040200
0x000000000000e000 0x000000000000e07f 0x0000000000040101
0x0000000094000000 0x000000009407ffff 0x0000000000046200
0x000020c000000000 0x000020dfffffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
"""


def test_bars(tree: Tree) -> None:
    tree.function(numa_node="0\n", resource=RESOURCE)
    assert tree.gpu().bars == (
        Bar(0, 16 * 2**20, 0x14220C),
        Bar(2, 128 * 2**30, 0x14220C),
        Bar(4, 16 * 2**20, 0x40200),
        Bar(5, 128, 0x40101),
    )


def test_a_bar_that_firmware_left_without_an_address(tree: Tree) -> None:
    """Linux shows start 0 and the size less one, with IORESOURCE_UNSET in the flags: its size is known."""
    tree.function(numa_node="0\n", resource="0x0000000000000000 0x0000001fffffffff 0x000000002014220c\n")
    assert tree.gpu().bars == (Bar(0, 128 * 2**30, 0x2014220C),)


@pytest.mark.parametrize(
    "text",
    (
        "",
        "garbage\n",
        "0x0 0x0 0x0\n" * 13,
        "0x10 0xf 0x200\n",
        "0x1000 0x1fff\n",
        "1000 1fff 200\n",
        "0x1000 0x1fff 0x200 0x1\n",
        "-0x1000 0x1fff 0x200\n",
        "0x" + "f" * 1000 + " 0x1 0x1\n",
    ),
)
def test_bars_that_are_none(tree: Tree, text: str) -> None:
    tree.function(numa_node="0\n", resource=text)
    assert tree.gpu().bars == ()


def test_a_link(tree: Tree) -> None:
    tree.function(
        numa_node="0\n",
        current_link_speed="2.5 GT/s PCIe\n",
        current_link_width="8\n",
        max_link_speed="32.0 GT/s PCIe\n",
        max_link_width="16\n",
    )
    assert tree.gpu().link == Link(2.5, 8, 32.0, 16)


@pytest.mark.parametrize(
    "text, speed",
    (
        ("16.0 GT/s PCIe\n", 16.0),
        ("8.0 GT/s\n", 8.0),
        ("8 GT/s\n", 8.0),
        ("64.0 GT/s PCIe\n", 64.0),
        ("Unknown\n", None),
        ("Unknown speed\n", None),
        ("", None),
        ("0\n", None),
        ("fast\n", None),
        ("nan\n", None),
        ("-8.0 GT/s\n", None),
    ),
)
def test_link_speeds(tree: Tree, text: str, speed: float | None) -> None:
    tree.function(numa_node="0\n", current_link_speed=text, max_link_speed=text)
    assert (tree.gpu().link.speed, tree.gpu().link.max_speed) == (speed, speed)


@pytest.mark.parametrize(
    "text, width", (("1\n", 1), ("16\n", 16), ("255\n", None), ("0\n", None), ("", None), ("x16\n", None), ("63\n", 63))
)
def test_link_widths(tree: Tree, text: str, width: int | None) -> None:
    tree.function(numa_node="0\n", current_link_width=text, max_link_width=text)
    assert (tree.gpu().link.width, tree.gpu().link.max_width) == (width, width)


# --- mediated devices ------------------------------------------------------------------------------------------

UUID = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"


def test_a_mediated_device_is_where_its_parent_is(tree: Tree) -> None:
    tree.function(numa_node="1\n")
    tree.mdev(UUID)
    host = tree.read(mdevs=(UUID,))
    assert host.mdev_parents == {UUID: GPU_ADDRESS}
    assert host.functions[GPU_ADDRESS].node == 1


def test_a_mediated_device_of_a_virtual_function(tree: Tree) -> None:
    path = "pci0000:40/0000:40:01.1/0000:41:00.4"
    tree.function(path, numa_node="-1\n")
    tree.mdev(UUID, path)
    host = tree.read(mdevs=(UUID,))
    assert host.mdev_parents == {UUID: PciAddress(0, 0x41, 0, 4)}
    assert host.functions[PciAddress(0, 0x41, 0, 4)].node is None, "the parent's node is not known: never guessed"


def test_a_mediated_device_without_a_pci_parent(tree: Tree) -> None:
    tree.mdev(UUID, "css0/0.0.0313")
    assert tree.read(mdevs=(UUID,)).mdev_parents == {}


def test_a_mediated_device_that_is_not_there(tree: Tree) -> None:
    assert tree.read(mdevs=(UUID,)) == HostTopology(tree.read().nodes, {}, {})


# --- vDPA devices, and VFs by their PF -------------------------------------------------------------------------


def test_a_vdpa_device_is_where_its_parent_is(tree: Tree) -> None:
    tree.function(numa_node="1\n")
    tree.vdpa("vdpa0", "vhost-vdpa-5")
    tree.vdpa("vdpa1", "vhost-vdpa-6", "virtual/vdpasim")
    host = tree.read(vdpas=("vhost-vdpa-5", "vhost-vdpa-6", "vdpa0"))
    assert host.vdpa_parents == {"vhost-vdpa-5": GPU_ADDRESS}
    assert host.functions[GPU_ADDRESS].node == 1


def test_the_pf_of_a_vf_is_read_only_when_the_vf_does_not_know(tree: Tree) -> None:
    tree.function(numa_node="1\n")
    for number, node in enumerate(("1", "-1"), start=1):
        folder = tree.function(f"pci0000:40/0000:40:01.1/0000:41:00.{number}", numa_node=f"{node}\n")
        (folder / "physfn").symlink_to("../0000:41:00.0")
    assert list(tree.read("0000:41:00.1").functions) == [PciAddress(0, 0x41, 0, 1)]
    assert sorted(tree.read("0000:41:00.2").functions) == [GPU_ADDRESS, PciAddress(0, 0x41, 0, 2)]


def test_a_vf_that_names_itself_as_its_pf(tree: Tree) -> None:
    (tree.function(numa_node="-1\n") / "physfn").symlink_to("../0000:41:00.0")
    assert tree.gpu().node is None


# --- trees that are odd ----------------------------------------------------------------------------------------


def test_a_function_that_is_not_there(tree: Tree) -> None:
    tree.function(numa_node="0\n")
    assert list(tree.read("0000:41:00.0", "0000:42:00.0").functions) == [GPU_ADDRESS]


def test_a_link_to_nowhere(tree: Tree) -> None:
    (tree.root / "bus/pci/devices/0000:41:00.0").symlink_to("../../../devices/pci0000:40/0000:41:00.0")
    assert tree.read("0000:41:00.0").functions == {}


def test_a_plain_folder_instead_of_a_link(tree: Tree) -> None:
    """Some recordings hold the files right below bus/pci/devices: the node is known, what is above it is not."""
    folder = tree.root / "bus/pci/devices/0000:41:00.0"
    folder.mkdir()
    (folder / "numa_node").write_text("1\n")
    gpu = tree.gpu()
    assert (gpu.node, gpu.root_complex, gpu.bridges) == (1, None, ())


def test_a_plain_file_instead_of_a_link(tree: Tree) -> None:
    (tree.root / "bus/pci/devices/0000:41:00.0").write_text("1\n")
    assert tree.read("0000:41:00.0").functions == {}


def test_an_absolute_link_within_the_tree(tree: Tree) -> None:
    tree.function(numa_node="1\n")
    link = tree.root / "bus/pci/devices/0000:41:00.0"
    link.unlink()
    link.symlink_to(tree.root.resolve() / "devices" / GPU)
    assert (tree.gpu().node, tree.gpu().root_complex) == (1, "pci0000:40")


def test_nothing_outside_the_tree_is_read(tree: Tree, tmp_path: Path) -> None:
    """A recorded tree whose links are absolute leads to the machine it is read on, which is another one."""
    outside = tmp_path / "outside/devices" / GPU
    outside.mkdir(parents=True)
    (outside / "numa_node").write_text("1\n")
    (outside / "class").write_text("0x030200\n")
    (tree.root / "bus/pci/devices/0000:41:00.0").symlink_to(outside)
    functions = tree.read("0000:41:00.0").functions
    found = functions.get(GPU_ADDRESS)
    assert found is None or (found.node, found.pci_class) == (None, None)


def test_no_file_outside_the_tree_is_read(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("1\n")
    gpu = tree.function()
    (gpu / "numa_node").symlink_to(tmp_path / "secret")
    assert tree.gpu().node is None


def test_the_tree_may_be_named_through_a_link(tree: Tree, tmp_path: Path) -> None:
    tree.function(numa_node="1\n")
    (tmp_path / "link").symlink_to("sys")
    host = discover.recorded(str(tmp_path / "link"))(HostQuery(frozenset({GPU_ADDRESS})))
    assert (host.functions[GPU_ADDRESS].node, host.functions[GPU_ADDRESS].root_complex) == (1, "pci0000:40")


@pytest.mark.parametrize("what", ("missing", "file", "empty"))
def test_no_tree(tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    reader = discover.recorded(str(tmp_path / what))  # nothing is touched yet
    with pytest.raises(HostUnreadable) as caught:
        reader(HostQuery())
    assert caught.value.where == str(tmp_path / what)
    assert caught.value.hint


def test_the_folder_above_the_tree(tree: Tree) -> None:
    with pytest.raises(HostUnreadable) as caught:
        discover.recorded(str(tree.root.parent))(HostQuery())
    assert str(tree.root) in str(caught.value.hint)


# --- only what is asked for ------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_two_thousand_functions_that_nobody_asks_for(tree: Tree) -> None:
    """Their files are named pipes without a writer: whoever opened one would wait for ever."""
    tree.function(numa_node="1\n")
    for number in range(2000):
        bus, rest = divmod(number, 256)
        folder = tree.function(f"pci0000:80/0000:80:01.0/0000:{0x81 + bus:02x}:{rest >> 3:02x}.{rest & 7}")
        os.mkfifo(folder / "numa_node")
    gpu = tree.gpu()
    assert gpu.node == 1
    assert len(os.listdir(tree.root / "bus/pci/devices")) == 2001


def test_a_reader_touches_nothing_before_it_is_asked(tmp_path: Path) -> None:
    discover.recorded(str(tmp_path / "nowhere"))
    discover.live()


def test_everything_for_a_snapshot(tree: Tree) -> None:
    tree.function("pci0000:40/0000:40:01.1", numa_node="0\n")
    tree.function(numa_node="0\n", resource=RESOURCE, current_link_speed="Unknown\n", **{"class": "0x030200\n"})
    tree.function("pci0000:5d/0000:5d:05.5/pci10000:00/10000:00:02.0", numa_node="7\n")
    tree.mdev(UUID)
    (tree.root / "bus/pci/devices/not-a-function").mkdir()
    (tree.root / "bus/mdev/devices/not-a-uuid").mkdir()
    host = discover.read_all(sys_trees.RecordedTree(str(tree.root)))
    assert [str(address) for address in sorted(host.functions)] == [
        "0000:40:01.1",
        "0000:41:00.0",
        "0000:5d:05.5",
        "10000:00:02.0",
    ]
    assert host.mdev_parents == {UUID: GPU_ADDRESS}
    # what a snapshot writes tells a reader of it the same
    record = host_file.load(json.dumps(host_file.dump(host)).encode(), "host.json")
    query = HostQuery(frozenset(host.functions), frozenset(host.mdev_parents))
    assert record(query) == host


@pytest.mark.parametrize("name", ("0000:41:00.0\n", "0000:41:20.0", "0000:4g:00.0", "00000000:41:00.8", "41:00.0"))
def test_a_snapshot_of_a_tree_with_odd_names(tree: Tree, name: str) -> None:
    (tree.root / "bus/pci/devices" / name).mkdir()
    assert discover.read_all(sys_trees.RecordedTree(str(tree.root))).functions == {}
