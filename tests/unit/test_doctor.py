"""``doctor`` on nodes written by hand, file by file: what it finds, and what it does not."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pcinuma import doctor, node_reads
from pcinuma.doctor import Diagnosis
from pcinuma.model import Finding
from tests.support.node_tree import GIB, NodeTree
from tests.support.pci_bytes import DOWNSTREAM, ENDPOINT, ROOT_PORT, UPSTREAM, config_space

LINUX_ACS = 0x1D  # SrcValid, ReqRedir, CmpltRedir, UpstreamFwd: what Linux switches on with an IOMMU
GUIDE_ACS = 0x5D  # and Direct Translated
PORTS = "pci0000:40/0000:40:01.0"
SWITCH = f"{PORTS}/0000:41:00.0"
GPU = f"{SWITCH}/0000:42:00.0/0000:43:00.0"
NIC = f"{SWITCH}/0000:42:01.0/0000:44:00.0"
FULL = {"current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
WIDE = {"current_link_width": "16", "max_link_width": "16"}


def build(
    root: Path,
    *,
    acs: int = GUIDE_ACS,
    acs_capability: int = 0x5F,
    nic_ats: bool | None = True,
    size: int = 4096,
    edit: Callable[[NodeTree], None] = lambda tree: None,
) -> NodeTree:
    """Two sockets, all in order: a GPU and a NIC below one switch, with ACS and ATS as NVIDIA's guide has them."""
    tree = NodeTree(root)
    pools = {2048: (0, 0), GIB: (64, 60)}
    tree.node(0, "0-3,8-11", 128, pools, "10 21")
    tree.node(1, "4-7,12-15", 128, pools, "21 10")
    tree.cpus({0: ["0,8", "1,9", "2,10", "3,11"], 1: ["4,12", "5,13", "6,14", "7,15"]})
    tree.write("sys/devices/system/cpu/present", "0-15\n")
    tree.write("sys/devices/system/cpu/online", "0-15\n")
    tree.write("sys/class/iommu/dmar0/x", "")
    tree.write("proc/cmdline", "BOOT_IMAGE=/vmlinuz ro intel_iommu=on iommu=pt\n")
    tree.write("proc/meminfo", f"MemTotal:       {256 * GIB} kB\nMemFree:  1 kB\n")
    bridge = {"numa_node": "1", "class": "0x060400", **FULL, **WIDE}
    ports = {"acs": (acs_capability, acs), "size": size}
    tree.function(PORTS, bridge, driver="pcieport", config=config_space(ROOT_PORT, acs=(0x1F, 0x1D), size=size))
    tree.function(SWITCH, bridge, driver="pcieport", config=config_space(UPSTREAM, size=size))
    for port in ("0000:42:00.0", "0000:42:01.0"):
        tree.function(f"{SWITCH}/{port}", bridge, driver="pcieport", config=config_space(DOWNSTREAM, **ports))  # type: ignore[arg-type]
    end = {"numa_node": "1", **FULL, **WIDE}
    gpu, nic = config_space(ENDPOINT, size=size), config_space(ENDPOINT, ats=nic_ats, size=size)
    ids = {"vendor": "0x10de", "class": "0x030200"}
    tree.function(GPU, {**ids, **end}, driver="vfio-pci", group=7, config=gpu)
    tree.function(NIC, {"vendor": "0x15b3", "class": "0x020000", **end}, driver="vfio-pci", group=8, config=nic)
    edit(tree)
    return tree


def diagnose(tree: NodeTree) -> Diagnosis:
    return doctor.diagnose(node_reads.recorded(str(tree.sys)), None)


def codes(diagnosis: Diagnosis) -> list[str]:
    """What was found beside the kubelet's configuration, which these nodes are asked without."""
    return sorted(finding.code for finding in diagnosis.findings if finding.code != "not-checked")


def only(diagnosis: Diagnosis, code: str) -> Finding:
    (finding,) = [finding for finding in diagnosis.findings if finding.code == code]
    return finding


def test_a_node_in_order(tmp_path: Path) -> None:
    diagnosis = diagnose(build(tmp_path))
    assert codes(diagnosis) == []
    unchecked = only(diagnosis, "not-checked")
    assert unchecked.message.endswith(": the kubelet")
    assert not diagnosis.has_errors


# --- nodes and CPUs --------------------------------------------------------------------------------------------


def test_several_nodes_a_socket(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        tree.node(0, "0-1,8-9", 64, {GIB: (32, 32)})
        tree.node(1, "4-7,12-15", 128, {GIB: (32, 32)})
        tree.node(2, "2-3,10-11", 64, {GIB: (32, 32)})

    diagnosis = diagnose(build(tmp_path, edit=edit))
    assert codes(diagnosis) == ["split-socket"]
    assert only(diagnosis, "split-socket").message.startswith("package 0 is split into nodes 0,2 ")


def test_one_node_on_two_packages_is_an_error(tmp_path: Path) -> None:
    tree = NodeTree(tmp_path)
    tree.node(0, "0-3", 64, {GIB: (32, 32)})
    tree.cpus({0: ["0,1"], 1: ["2,3"]})
    finding = only(diagnose(tree), "numa-hidden")
    assert finding.severity == "error"
    assert "2 packages" in finding.message


def test_numa_off_is_an_error(tmp_path: Path) -> None:
    tree = NodeTree(tmp_path)
    tree.node(0, "0-3", 64, {GIB: (32, 32)})
    tree.cpus({0: ["0,1", "2,3"]})
    assert only(diagnose(tree), "single-node").severity == "info"
    tree.write("proc/cmdline", "ro numa=off quiet\n")
    assert "numa=off" in only(diagnose(tree), "numa-hidden").message


def test_nodes_without_cpus_and_without_memory(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        tree.node(2, "", 96, distance="80 80 10")
        tree.node(3, "", 96)
        tree.node(1, "4-7,12-15", 0, {GIB: (64, 60)})

    diagnosis = diagnose(build(tmp_path, edit=edit))
    assert codes(diagnosis) == ["node-no-cpus", "node-no-memory"]
    assert only(diagnosis, "node-no-cpus").message.startswith("nodes 2-3 have no CPUs, but memory (192.0 GiB together)")
    assert only(diagnosis, "node-no-memory").message.startswith("node 1 has CPUs (4-7,12-15) and no memory")


def test_offline_cpus(tmp_path: Path) -> None:
    diagnosis = diagnose(build(tmp_path, edit=lambda tree: tree.write("sys/devices/system/cpu/present", "0-19\n")))
    assert only(diagnosis, "cpus-offline").message.startswith("4 of 20 CPUs are offline: 16-19")


# --- IOMMU and VFIO --------------------------------------------------------------------------------------------


def test_no_iommu_is_an_error_that_names_the_kernel_argument(tmp_path: Path) -> None:
    tree = NodeTree(tmp_path)
    tree.node(0, "0-3", 64, {GIB: (32, 32)})
    (tree.sys / "kernel/iommu_groups").mkdir(parents=True)
    tree.function("pci0000:00/0000:00:01.0", {"class": "0x030000", "numa_node": "0", "vendor": "0x10de"})
    tree.write("proc/cmdline", "ro intel_iommu=off\n")
    finding = only(diagnose(tree), "iommu-off")
    assert finding.severity == "error"
    assert "intel_iommu=off" in finding.message


def test_an_iommu_that_is_not_recorded_is_not_off(tmp_path: Path) -> None:
    tree = NodeTree(tmp_path)
    tree.node(0, "0-3", 64, {GIB: (32, 32)})
    diagnosis = diagnose(tree)
    assert "iommu-off" not in codes(diagnosis)
    assert "the IOMMU" in only(diagnosis, "not-checked").message


def test_no_vfio_driver(tmp_path: Path) -> None:
    tree = NodeTree(tmp_path)
    tree.node(0, "0-3", 64, {GIB: (32, 32)})
    (tree.sys / "bus/pci/drivers/nvme").mkdir(parents=True)
    assert only(diagnose(tree), "vfio-missing").severity == "error"
    (tree.sys / "bus/pci/drivers/mlx5_vfio_pci").mkdir()
    assert "vfio-missing" not in codes(diagnose(tree))


def test_nothing_bound(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        for path, driver in ((GPU, "nvidia"), (NIC, "mlx5_core")):
            (tree.sys / "devices" / path / "driver").unlink()
            tree.function(path, driver=driver)

    tree = build(tmp_path, edit=edit)
    assert codes(diagnose(tree)) == ["nothing-bound"]
    (tree.sys / "devices" / NIC / "vdpa0/vhost-vdpa-0").mkdir(parents=True)
    (tree.sys / "bus/vdpa/devices").mkdir(parents=True)
    (tree.sys / "bus/vdpa/devices/vdpa0").symlink_to(f"../../../devices/{NIC}/vdpa0")
    assert codes(diagnose(tree)) == []


def test_a_group_that_is_not_viable(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        tree.function(f"{GPU[:-1]}1", {"class": "0x040300", "numa_node": "1"}, driver="snd_hda_intel", group=7)

    diagnosis = diagnose(build(tmp_path, edit=edit))
    finding = only(diagnosis, "group-not-viable")
    assert (finding.severity, finding.device) == ("error", "0000:43:00.0")
    assert "0000:43:00.1 (snd_hda_intel)" in finding.message


def test_a_group_with_a_bridge_or_an_unbound_function_is_viable(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        tree.function(f"{GPU[:-1]}1", {"class": "0x040300", "numa_node": "1"}, group=7)
        tree.function(f"{GPU[:-1]}2", {"class": "0x0c0330", "numa_node": "1"}, group=7, driver="pci-stub")
        (tree.sys / "devices" / SWITCH / "iommu_group").symlink_to("/sys/kernel/iommu_groups/7")

    assert codes(diagnose(build(tmp_path, edit=edit))) == []


# --- huge pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pools, found",
    (
        ({0: (0, 0), 1: (0, 0)}, {"hugepages-none": "no node has huge pages"}),
        ({0: (64, 64), 1: (0, 0)}, {"hugepages-missing": "1 GiB pages are missing on node 1: node 0 64 (64.0 GiB)"}),
        ({0: (64, 64), 1: (48, 48)}, {"hugepages-uneven": "2 times what node 1 has, 96.0 GiB"}),
        ({0: (64, 0), 1: (64, 64)}, {"hugepages-used-up": "no 1 GiB page is free on node 0"}),
        ({0: (64, 64), 1: (64, 64), 2: (8, 8)}, {"hugepages-no-cpus": "1 GiB pages lie on node 2", "node-no-cpus": ""}),
    ),
    ids=("none", "missing", "uneven", "used-up", "no-cpus"),
)
def test_huge_pages(tmp_path: Path, pools: dict[int, tuple[int, int]], found: dict[str, str]) -> None:
    def edit(tree: NodeTree) -> None:
        for node, cpus in ((0, "0-3,8-11"), (1, "4-7,12-15"), (2, "")):
            if node in pools:
                tree.node(node, cpus, 128, {2048: (0, 0), GIB: pools[node]})

    diagnosis = diagnose(build(tmp_path, edit=edit))
    assert codes(diagnosis) == sorted(found)
    for code, text in found.items():
        assert text in only(diagnosis, code).message


def test_each_page_size_is_looked_at(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        tree.node(0, "0-3,8-11", 128, {2048: (1024, 1024), GIB: (64, 64)})
        tree.node(1, "4-7,12-15", 128, {2048: (512, 512), GIB: (64, 64)})

    diagnosis = diagnose(build(tmp_path, edit=edit))
    assert codes(diagnosis) == ["hugepages-uneven"]
    assert "2 MiB pages differ between nodes: node 0 1024 (2.0 GiB), node 1 512 (1.0 GiB)" in (
        only(diagnosis, "hugepages-uneven").message
    )


# --- devices ---------------------------------------------------------------------------------------------------


def test_which_devices_are_looked_at(tmp_path: Path) -> None:
    classes = {
        "0000:00:01.0": ("0x030000", "0x10de", True),  # VGA
        "0000:00:02.0": ("0x030200", "0x10de", True),  # 3D controller
        "0000:00:03.0": ("0x020700", "0x15b3", True),  # InfiniBand
        "0000:00:04.0": ("0x0c0600", "0x15b3", True),  # InfiniBand, old
        "0000:00:05.0": ("0x120000", "0x1002", True),  # processing accelerator
        "0000:00:06.0": ("0x010802", "0x144d", True),  # NVMe
        "0000:00:07.0": ("0x068000", "0x10de", True),  # NVSwitch
        "0000:00:08.0": ("0x068000", "0x8086", False),  # a part of the board
        "0000:00:09.0": ("0x030000", "0x1a03", False),  # the management controller's screen
        "0000:00:0a.0": ("0x010601", "0x8086", False),  # SATA
        "0000:00:0b.0": ("0x0c0330", "0x8086", False),  # USB
    }
    tree = NodeTree(tmp_path)
    tree.node(0, "0-3", 64, {GIB: (32, 32)})
    for address, (pci_class, vendor, _) in classes.items():
        tree.function(f"pci0000:00/{address}", {"class": pci_class, "vendor": vendor, "numa_node": "0"})
    tree.function("pci0000:00/0000:00:0c.0", {"class": "0x0c0330", "numa_node": "0"}, driver="vfio-pci")
    (tree.sys / "devices/pci0000:00/0000:00:03.1").mkdir()
    vf = tree.function("pci0000:00/0000:00:03.1", {"class": "0x020700", "numa_node": "0"})
    (vf / "physfn").symlink_to("../0000:00:03.0")
    looked_at = {device.name for device in diagnose(tree).devices}
    assert looked_at == {address for address, (*_, wanted) in classes.items() if wanted} | {"0000:00:0c.0"}


def test_an_unknown_node(tmp_path: Path) -> None:
    diagnosis = diagnose(build(tmp_path, edit=lambda tree: tree.write(f"sys/devices/{GPU}/numa_node", "-1\n")))
    assert codes(diagnosis) == ["numa-unknown"]
    finding = only(diagnosis, "numa-unknown")
    assert (finding.severity, finding.device) == ("warning", "0000:43:00.0")


def test_on_one_node_an_unknown_node_is_no_matter(tmp_path: Path) -> None:
    tree = NodeTree(tmp_path)
    tree.node(0, "0-3", 64, {GIB: (32, 32)})
    tree.function("pci0000:00/0000:00:01.0", {"class": "0x030000", "numa_node": "-1", "vendor": "0x10de"})
    assert "numa-unknown" not in codes(diagnose(tree))


def test_a_node_without_cpus(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        tree.node(2, "", 96, distance="40 30 10")
        tree.write(f"sys/devices/{GPU}/numa_node", "2\n")
        for node, cpus, distance in ((0, "0-3,8-11", "10 21 40"), (1, "4-7,12-15", "21 10 30")):
            tree.node(node, cpus, 128, {GIB: (64, 60)}, distance)

    diagnosis = diagnose(build(tmp_path, edit=edit))
    assert codes(diagnosis) == ["device-no-cpus", "node-no-cpus"]
    assert "nearest with CPUs is node 1" in only(diagnosis, "device-no-cpus").message


@pytest.mark.parametrize(
    "path, files, severity, text",
    (
        (NIC, {"current_link_speed": "16.0 GT/s PCIe"}, "warning", "0000:44:00.0 runs at 16 GT/s x16 of 32 GT/s x16"),
        (NIC, {"current_link_width": "8"}, "warning", "0000:44:00.0 runs at 32 GT/s x8 of 32 GT/s x16"),
        (GPU, {"current_link_speed": "2.5 GT/s PCIe"}, "info", "an idle GPU lowers its speed"),
        (GPU, {"current_link_width": "8"}, "warning", "0000:43:00.0 runs at 32 GT/s x8 of 32 GT/s x16"),
        (
            SWITCH,
            {"current_link_speed": "16.0 GT/s PCIe"},
            "warning",
            "0000:41:00.0 runs at 16 GT/s x16 of 32 GT/s x16",
        ),
    ),
    ids=("nic-speed", "nic-width", "gpu-speed", "gpu-width", "switch"),
)
def test_a_slow_link(tmp_path: Path, path: str, files: dict[str, str], severity: str, text: str) -> None:
    def edit(tree: NodeTree) -> None:
        for name, content in files.items():
            tree.write(f"sys/devices/{path}/{name}", content + "\n")

    diagnosis = diagnose(build(tmp_path, edit=edit))
    assert codes(diagnosis) == ["link-slow"]
    finding = only(diagnosis, "link-slow")
    assert (finding.severity, finding.device) == (severity, path.rsplit("/", 1)[1])
    assert text in finding.message


def test_a_slow_link_on_the_root_bus(tmp_path: Path) -> None:
    tree = NodeTree(tmp_path)
    tree.node(0, "0-3", 64, {GIB: (32, 32)})
    slow = {**FULL, **WIDE, "current_link_width": "1"}
    tree.function("pci0000:00/0000:00:01.0", {"class": "0x020000", "numa_node": "0", **slow})
    assert only(diagnose(tree), "link-slow").device == "0000:00:01.0"


def test_a_slot_that_is_smaller_than_the_card(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        port = f"sys/devices/{NIC.rsplit('/', 1)[0]}"
        for name in ("current_link_speed", "max_link_speed"):
            tree.write(f"{port}/{name}", "16.0 GT/s PCIe\n")
        tree.write(f"sys/devices/{NIC}/current_link_speed", "16.0 GT/s PCIe\n")

    diagnosis = diagnose(build(tmp_path, edit=edit))
    assert codes(diagnosis) == ["link-slot"]
    assert "could do 32 GT/s x16, the port above it (0000:42:01.0) gives 16 GT/s x16" in (
        only(diagnosis, "link-slot").message
    )


def test_a_port_that_is_faster_than_the_card_is_no_finding(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        for name in ("current_link_speed", "max_link_speed"):
            tree.write(f"sys/devices/{NIC}/{name}", "16.0 GT/s PCIe\n")
        tree.write(f"sys/devices/{NIC.rsplit('/', 1)[0]}/current_link_speed", "16.0 GT/s PCIe\n")

    assert codes(diagnose(build(tmp_path, edit=edit))) == []


def test_the_functions_of_a_slot_share_a_finding(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        second = {"numa_node": "1", "class": "0x020000", **FULL, **WIDE, "current_link_width": "4"}
        tree.write(f"sys/devices/{NIC}/current_link_width", "4\n")
        tree.function(f"{NIC[:-1]}1", second, config=config_space(ats=True))

    assert codes(diagnose(build(tmp_path, edit=edit))) == ["link-slow"]


# --- ACS and ATS -----------------------------------------------------------------------------------------------


def test_acs_redirect_names_the_switch_the_ports_and_both_sides(tmp_path: Path) -> None:
    diagnosis = diagnose(build(tmp_path, acs=LINUX_ACS))
    assert codes(diagnosis) == ["acs-redirect"]
    finding = only(diagnosis, "acs-redirect")
    assert (finding.severity, finding.device) == ("warning", "0000:41:00.0")
    for text in (
        "0000:42:00.0, 0000:42:01.0",
        "0000:43:00.0, 0000:44:00.0",
        "root complex",
        "keeps devices of different",
    ):
        assert text in finding.message
    assert finding.hint is not None
    assert "setpci -s 0000:42:00.0 ECAP_ACS+6.w=005d" in finding.hint


def test_ports_that_cannot_do_direct_translated(tmp_path: Path) -> None:
    finding = only(diagnose(build(tmp_path, acs=LINUX_ACS, acs_capability=0x1F)), "acs-redirect")
    assert finding.hint is not None
    assert "cannot do Direct Translated" in finding.hint
    assert "setpci" not in finding.hint


@pytest.mark.parametrize("control", (0x00, 0x01))
def test_acs_off_is_fast_and_no_isolation(tmp_path: Path, control: int) -> None:
    finding = only(diagnose(build(tmp_path, acs=control)), "acs-off")
    assert finding.severity == "info"
    assert "no isolation" in finding.message


def test_translation_blocking(tmp_path: Path) -> None:
    diagnosis = diagnose(build(tmp_path, acs=0x5F))
    assert codes(diagnosis) == ["acs-blocks-ats", "acs-redirect"]
    assert "0000:42:00.0, 0000:42:01.0" in only(diagnosis, "acs-blocks-ats").message


def test_ports_without_acs(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        for port in ("0000:42:00.0", "0000:42:01.0"):
            tree.write(f"sys/devices/{SWITCH}/{port}/config", config_space(DOWNSTREAM))

    assert codes(diagnose(build(tmp_path, edit=edit))) == ["acs-missing"]


def test_below_different_root_ports_acs_costs_nothing(tmp_path: Path) -> None:
    tree = NodeTree(tmp_path)
    tree.node(0, "0-3", 64, {GIB: (32, 32)})
    for slot in (1, 2):
        port = f"pci0000:40/0000:40:0{slot}.0"
        tree.function(port, {"class": "0x060400"}, config=config_space(ROOT_PORT, acs=(0x1F, 0x1D)))
        device = {"class": "0x030200" if slot == 1 else "0x020000", "numa_node": "0"}
        tree.function(f"{port}/0000:4{slot}:00.0", device, driver="vfio-pci", group=slot, config=config_space())
    assert codes(diagnose(tree)) == ["single-node"]


def test_without_a_gpu_below_the_switch_acs_is_no_finding(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        tree.write(f"sys/devices/{GPU}/class", "0x010802\n")

    assert codes(diagnose(build(tmp_path, acs=LINUX_ACS, nic_ats=None, edit=edit))) == []


def test_one_slot_below_a_switch_has_no_peer(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        shutil.rmtree(tree.sys / "devices" / NIC)
        (tree.sys / "bus/pci/devices/0000:44:00.0").unlink()
        tree.function(f"{GPU[:-1]}1", {"numa_node": "1"}, driver="vfio-pci", group=7, config=config_space())

    assert codes(diagnose(build(tmp_path, acs=LINUX_ACS, edit=edit))) == []


def test_ats_that_the_nic_does_not_offer(tmp_path: Path) -> None:
    finding = only(diagnose(build(tmp_path, nic_ats=None)), "ats-missing")
    assert (finding.severity, finding.device) == ("warning", "0000:44:00.0")
    assert finding.hint is not None
    assert "mlxconfig" in finding.hint


def test_ats_that_is_off(tmp_path: Path) -> None:
    finding = only(diagnose(build(tmp_path, nic_ats=False)), "ats-off")
    assert (finding.severity, finding.device) == ("warning", "0000:44:00.0")


def test_pci_noats(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        tree.write("proc/cmdline", "ro pci=nocrs,noats\n")

    finding = only(diagnose(build(tmp_path, nic_ats=False, edit=edit)), "ats-off")
    assert "pci=noats" in finding.message


@pytest.mark.parametrize("size", (64, 256))
def test_a_short_configuration_space_is_told_and_not_guessed(tmp_path: Path, size: int) -> None:
    diagnosis = diagnose(build(tmp_path, acs=LINUX_ACS, nic_ats=None, size=size))
    assert codes(diagnosis) == ["config-unreadable"]
    finding = only(diagnosis, "config-unreadable")
    assert f"only {size} bytes" in finding.message
    assert "and 2 more" in finding.message  # of the six functions four are named


def test_a_sleeping_device_is_told(tmp_path: Path) -> None:
    diagnosis = diagnose(build(tmp_path, edit=lambda tree: tree.write(f"sys/devices/{NIC}/config", b"\xff" * 4096)))
    finding = only(diagnosis, "config-unreadable")
    assert (finding.device, finding.message.endswith("0000:44:00.0: no answer: asleep, or gone from the bus")) == (
        "0000:44:00.0",
        True,
    )
    assert finding.hint is not None
    assert "root" not in finding.hint


def test_a_tree_without_configuration_spaces(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        for path in tree.sys.rglob("config"):
            path.unlink()

    assert codes(diagnose(build(tmp_path, edit=edit))) == ["config-unreadable"]


def test_the_acs_override(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        tree.write("proc/cmdline", "ro pcie_acs_override=downstream,multifunction\n")

    assert codes(diagnose(build(tmp_path, edit=edit))) == ["acs-override"]


def test_virtual_functions_are_judged_by_their_pf(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        for number in range(1, 8):
            vf = tree.function(
                f"{NIC[:-1]}{number}", driver="vfio-pci", group=20 + number, config=config_space(size=64)
            )
            (vf / "physfn").symlink_to("../0000:44:00.0")
            tree.function(f"{NIC[:-1]}{number}", {"class": "0x020000", "numa_node": "1"})

    facts = node_reads.recorded(str(build(tmp_path, edit=edit).sys))
    assert facts.configs is not None
    assert sorted(map(str, facts.configs))[-1] == "0000:44:00.0"
    assert codes(doctor.diagnose(facts, None)) == []


# --- reading ---------------------------------------------------------------------------------------------------


def test_links_out_of_a_recorded_tree_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/nr_hugepages").write_text("512\n")
    (tmp_path / "outside/cmdline").write_text("numa=off\n")

    def edit(tree: NodeTree) -> None:
        pool = tree.sys / "devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"
        pool.unlink()
        pool.symlink_to(tmp_path / "outside/nr_hugepages")
        (tree.root / "proc/cmdline").unlink()
        (tree.root / "proc/cmdline").symlink_to(tmp_path / "outside/cmdline")

    facts = node_reads.recorded(str(build(tmp_path / "node", edit=edit).sys))
    assert facts.pools is not None
    assert [pool.size_kib for pool in facts.pools[0]] == [GIB]
    assert facts.command_line is None


def test_odd_files_are_unknown(tmp_path: Path) -> None:
    def edit(tree: NodeTree) -> None:
        for name in ("present", "online"):
            tree.write(f"sys/devices/system/cpu/{name}", "garbage\n")
        tree.write("sys/devices/system/cpu/cpu0/topology/core_cpus_list", "4-2\n")
        tree.write("sys/devices/system/cpu/cpu1/topology/physical_package_id", "-1\n")
        tree.write("sys/devices/system/node/node0/hugepages/hugepages-x/nr_hugepages", "1\n")
        tree.write("sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "many\n")
        tree.write("proc/meminfo", "garbage")

    facts = node_reads.recorded(str(build(tmp_path, edit=edit).sys))
    assert (facts.present, facts.online, facts.memory_bytes) == (None, None, None)
    assert 0 not in facts.cpus
    assert facts.cpus[1].package is None
    assert facts.pools is not None
    assert [pool.size_kib for pool in facts.pools[0]] == [GIB]
    diagnosis = doctor.diagnose(facts, None)
    assert Counter(codes(diagnosis)) == Counter()
    assert "cores" in only(diagnosis, "not-checked").message
