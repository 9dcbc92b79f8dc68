"""``pcinuma doctor`` as a process: on recorded nodes, through a real libudev, on this machine, and without privilege."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from tests.support.node_tree import GIB, NodeTree
from tests.support.pci_bytes import DOWNSTREAM, ROOT_PORT, UPSTREAM, config_space

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ROOT / "../shared/hosts"
PROGRAM = Path(sys.executable).with_name("pcinuma")
SERIAL = bytes.fromhex("0123456789abcdef")
SECRETS = ("SN-1234567", "1650522012345", "01-23-45-67-89-ab-cd-ef")

KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "cpuManagerPolicy": "static",
    "reservedSystemCPUs": "0,8,4,12",
    "memoryManagerPolicy": "Static",
    "kubeReserved": {"memory": "1Gi"},
    "systemReserved": {"memory": "1Gi"},
    "evictionHard": {"memory.available": "100Mi"},
    "reservedMemory": [{"numaNode": n, "limits": {"memory": "1074Mi"}} for n in (0, 1)],
    "topologyManagerPolicy": "restricted",
    "topologyManagerScope": "pod",
}


def doctor(*arguments: object, wrapper: Sequence[str] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*wrapper, str(PROGRAM), "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON of a run, valid against the schema; nothing but it was written, and the status says what it says."""
    assert done.stderr == ""
    content: dict[str, Any] = json.loads(done.stdout)
    schema = json.loads((ROOT / "schemas/doctor.schema.json").read_text())
    jsonschema_rs.Draft202012Validator(schema).validate(content)
    assert done.returncode == any(finding["severity"] == "error" for finding in content["findings"])
    return content


def codes(content: dict[str, Any]) -> list[str]:
    """What was found; options that would help the kubelet are not what these tests are about."""
    found = ((finding["code"], finding["severity"]) for finding in content["findings"])
    return sorted(code for code, severity in found if (code, severity) != ("kubelet-options", "info"))


@pytest.fixture
def node(tmp_path: Path) -> NodeTree:
    """Two sockets in order; below one switch a GPU and a NIC, ACS as Linux has it. Serial numbers everywhere."""
    tree = NodeTree(tmp_path / "node")
    for number, cpus in ((0, "0-3,8-11"), (1, "4-7,12-15")):
        tree.node(number, cpus, 128, {2048: (0, 0), GIB: (64, 64)}, "10 21" if number == 0 else "21 10")
    tree.cpus({0: ["0,8", "1,9", "2,10", "3,11"], 1: ["4,12", "5,13", "6,14", "7,15"]})
    tree.write("sys/class/iommu/dmar0/x", "")
    tree.write("proc/cmdline", "ro intel_iommu=on\n")
    base = "pci0000:40/0000:40:01.0"
    bridge = {"class": "0x060400", "numa_node": "1"}
    tree.function(base, bridge, config=config_space(ROOT_PORT))
    tree.function(f"{base}/0000:41:00.0", bridge, config=config_space(UPSTREAM, serial=SERIAL))
    for number, ids in enumerate(
        ({"class": "0x030200", "vendor": "0x10de"}, {"class": "0x020000", "vendor": "0x15b3"})
    ):
        port = f"{base}/0000:41:00.0/0000:42:0{number}.0"
        tree.function(port, bridge, config=config_space(DOWNSTREAM, acs=(0x5F, 0x1D)))
        folder = tree.function(
            f"{port}/0000:4{3 + number}:00.0",
            {**ids, "numa_node": "1", "serial_number": SECRETS[2]},
            driver="vfio-pci",
            group=number,
            config=config_space(ats=True, serial=SERIAL),
        )
        (folder / "vpd").write_bytes(b"\x82\x05\x00Board\x90\x0f\x00SN\x0dSN-1234567\x00\x00\x00\x78")
        (folder / "infiniband/mlx5_0").mkdir(parents=True)
        (folder / "infiniband/mlx5_0/serial").write_text("1650522012345\n")
    return tree


def kubelet_file(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "kubelet.yaml"
    path.write_text(yaml.safe_dump({**KUBELET, **changes}))
    return path


# --- recorded nodes --------------------------------------------------------------------------------------------


def test_findings_as_json(node: NodeTree, tmp_path: Path) -> None:
    content = result(doctor("--sysfs", node.sys, "--kubelet-config", kubelet_file(tmp_path), "--json"))
    assert codes(content) == ["acs-redirect"]
    assert content["findings"][0]["device"] == "0000:41:00.0"
    assert [(n["id"], n["cpus"], n["memoryKiB"]) for n in content["node"]["nodes"]] == [
        (0, "0-3,8-11", 128 * GIB),
        (1, "4-7,12-15", 128 * GIB),
    ]
    assert [(d["address"], d["node"], d["ats"]) for d in content["node"]["devices"]] == [
        ("0000:43:00.0", 1, "on"),
        ("0000:44:00.0", 1, "on"),
    ]
    assert [(b["address"], b["type"], b["acs"]) for b in content["node"]["bridges"]] == [
        ("0000:40:01.0", "root port", None),
        ("0000:41:00.0", "switch upstream port", None),
        ("0000:42:00.0", "switch downstream port", {"capability": 0x5F, "control": 0x1D}),
        ("0000:42:01.0", "switch downstream port", {"capability": 0x5F, "control": 0x1D}),
    ]


def test_an_error_is_status_1(node: NodeTree, tmp_path: Path) -> None:
    done = doctor("--sysfs", node.sys, "--kubelet-config", kubelet_file(tmp_path, cpuManagerPolicy="none"), "--json")
    assert done.returncode == 1
    assert codes(result(done)) == ["acs-redirect", "kubelet-cpu-manager"]


def test_text_for_people(node: NodeTree, tmp_path: Path) -> None:
    done = doctor("--sysfs", node.sys, "--kubelet-config", kubelet_file(tmp_path, topologyManagerPolicy="none"))
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    titles = [line for line in lines if line in ("node", "devices", "findings", "kubelet: what fits this node")]
    assert titles == ["node", "devices", "findings", "kubelet: what fits this node"]
    assert any(line.startswith("  error: kubelet-topology-policy: ") for line in lines)
    assert any(line.startswith("  warning: acs-redirect: ") for line in lines)
    assert lines[-1] == "outcome: not set up for aligned VMs; errors 1, warnings 1, notes 2"


def test_the_shown_fragment_mends_the_configuration(node: NodeTree, tmp_path: Path) -> None:
    bad = {"cpuManagerPolicy": "none", "evictionHard": {"memory.available": "7%"}, "memoryManagerPolicy": "Static"}
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(bad))
    done = doctor("--sysfs", node.sys, "--kubelet-config", file)
    assert done.returncode == 1
    shown = done.stdout.split("kubelet: what fits this node\n")[1].rsplit("\noutcome: ", 1)[0]
    file.write_text(yaml.safe_dump({**bad, **yaml.safe_load(shown)}))
    assert codes(result(doctor("--sysfs", node.sys, "--kubelet-config", file, "--json"))) == ["acs-redirect"]


def test_the_proposal_of_the_json_mends_it_too(node: NodeTree, tmp_path: Path) -> None:
    first = result(doctor("--sysfs", node.sys, "--json"))
    file = tmp_path / "configz.json"
    file.write_text(json.dumps({"kubeletconfig": first["proposal"]}))
    assert codes(result(doctor("--sysfs", node.sys, "--kubelet-config", file, "--json"))) == ["acs-redirect"]


def test_quiet_leaves_errors_and_warnings(node: NodeTree) -> None:
    done = doctor("--sysfs", node.sys, "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("  warning: acs-redirect: ")
    assert "info: " not in done.stdout
    assert "outcome" not in done.stdout
    assert "cpuManagerPolicy" not in done.stdout


def test_to_a_file(node: NodeTree, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = doctor("--sysfs", node.sys, "--json", "-o", out)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert codes(json.loads(out.read_text())) == ["acs-redirect", "not-checked"]


def test_a_snapshot_knows_less_and_that_is_said(node: NodeTree, tmp_path: Path) -> None:
    record = tmp_path / "host.json"
    subprocess.run([PROGRAM, "snapshot", "--sysfs", node.sys, "-o", record], check=True, timeout=60)
    content = result(doctor("--host", record, "--kubelet-config", kubelet_file(tmp_path), "--json"))
    assert codes(content) == ["not-checked"]
    (unchecked,) = [finding["message"] for finding in content["findings"] if finding["code"] == "not-checked"]
    for what in ("huge pages", "ACS and ATS", "the VFIO driver", "cores", "command line"):
        assert what in unchecked
    assert "packages" not in unchecked  # the record has the package of each node
    assert content["node"]["packages"] == 2
    assert "kubelet" not in unchecked
    assert "IOMMU" not in unchecked  # the record has IOMMU groups
    assert [device["ats"] for device in content["node"]["devices"]] == ["unknown", "unknown"]
    assert "reservedSystemCPUs" not in content["proposal"]  # whole cores cannot be known


def test_packages_of_a_snapshot(node: NodeTree, tmp_path: Path) -> None:
    record = tmp_path / "host.json"
    subprocess.run([PROGRAM, "snapshot", "--sysfs", node.sys, "-o", record], check=True, timeout=60)
    assert "packages: 2" in " ".join(doctor("--host", record).stdout.split())
    host = json.loads(record.read_text())
    for entry in host["nodes"]:
        entry["package"] = 0
    record.write_text(json.dumps(host))
    content = result(doctor("--host", record, "--json"))
    assert content["node"]["packages"] == 1
    (split,) = [finding for finding in content["findings"] if finding["code"] == "split-socket"]
    assert split["message"].startswith("package 0 is split into nodes 0-1 ")
    del host["nodes"][1]["package"]
    record.write_text(json.dumps(host))
    (unchecked,) = [f for f in result(doctor("--host", record, "--json"))["findings"] if f["code"] == "not-checked"]
    assert "packages" in unchecked["message"]


# --- where the kubelet's configuration comes from --------------------------------------------------------------


def test_from_standard_input(node: NodeTree) -> None:
    given = json.dumps({"kubeletconfig": {**KUBELET, "cpuManagerPolicy": "none"}})
    done = doctor("--sysfs", node.sys, "--kubelet-config", "-", "--json", input=given)
    assert codes(result(done)) == ["acs-redirect", "kubelet-cpu-manager"]


def test_bad_standard_input_is_named(node: NodeTree) -> None:
    done = doctor("--sysfs", node.sys, "--kubelet-config", "-", input="kind: Pod")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pcinuma: error: not a KubeletConfiguration: kind is 'Pod' (standard input)\n")


def test_a_terminal_is_no_configuration(node: NodeTree) -> None:
    ours, theirs = os.openpty()
    try:
        done = doctor("--sysfs", node.sys, "--kubelet-config", "-", stdin=theirs)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "pcinuma: error: no KubeletConfiguration",
        "hint: give a file, or pipe one in: kubectl get --raw /api/v1/nodes/NODE/proxy/configz |"
        " pcinuma doctor --kubelet-config -",
    ]


def test_from_a_config_map(node: NodeTree, tmp_path: Path) -> None:
    file = tmp_path / "cm.yaml"
    inside = yaml.safe_dump({**KUBELET, "CPUManagerPolicy": "static"})
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "ConfigMap", "data": {"kubelet": inside}}))
    content = result(doctor("--sysfs", node.sys, "--kubelet-config", file, "--json"))
    assert codes(content) == ["acs-redirect", "kubelet-field"]


def test_the_fragment_mends_reservations_that_are_none(node: NodeTree, tmp_path: Path) -> None:
    bad = {**KUBELET, "kubeReserved": {"memory": "1GB", "gpu": "1"}, "systemReserved": {"memory": "1Gi", "cpu": 2}}
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(bad))
    first = result(doctor("--sysfs", node.sys, "--kubelet-config", file, "--json"))
    assert codes(first) == ["acs-redirect", "kubelet-value", "kubelet-value", "kubelet-value"]
    file.write_text(yaml.safe_dump({**bad, **first["proposal"]}))
    assert codes(result(doctor("--sysfs", node.sys, "--kubelet-config", file, "--json"))) == ["acs-redirect"]


def test_a_proc_beside_the_tree_is_read_and_its_absence_is_said(node: NodeTree) -> None:
    (node.root / "proc/cmdline").write_text("ro pci=noats\n")
    content = result(doctor("--sysfs", node.sys, "--json"))
    assert codes(content) == ["acs-redirect", "ats-off", "not-checked"]
    shutil.rmtree(node.root / "proc")
    (unchecked,) = [f for f in result(doctor("--sysfs", node.sys, "--json"))["findings"] if f["code"] == "not-checked"]
    assert "the kernel's command line" in unchecked["message"]


def test_text_of_the_node_forges_no_line(node: NodeTree, tmp_path: Path) -> None:
    file = kubelet_file(tmp_path, topologyManagerPolicy="x\n  error: forged: \x1b[31m")
    done = doctor("--sysfs", node.sys, "--kubelet-config", file)
    assert "\x1b" not in done.stdout
    assert not any(line.startswith("  error: forged") for line in done.stdout.splitlines())


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, what",
    (
        (("--kubelet-config", "absent.yaml"), "cannot be read"),
        (("--kubelet-config", "pod.yaml"), "kind is 'Pod'"),
        (("--kubelet-config", "broken.yaml"), "not YAML"),
        (("--kubelet-config", "list.yaml"), "no mapping"),
        (("--kubelet-config", "."), "cannot be read"),
        (("--sysfs", "absent"), "no such directory"),
        (("--sysfs", "."), "not a /sys tree"),
        (("--host", "pod.yaml"), "not JSON"),
        (("--host", "a", "--sysfs", "b"), "exclude each other"),
        (("--nonsense",), "unrecognized arguments"),
        (("-o", "absent/out"), "cannot be written"),
    ),
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_status_2(tmp_path: Path, arguments: tuple[str, ...], what: str) -> None:
    (tmp_path / "pod.yaml").write_text("kind: Pod\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    (tmp_path / "list.yaml").write_text("- a\n")
    done = doctor(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    first, *rest = done.stderr.splitlines()
    assert first.startswith("pcinuma: error: ")
    assert what in first
    assert len(rest) <= 1
    assert all(line.startswith("hint: ") for line in rest)


# --- this machine ----------------------------------------------------------------------------------------------


def test_on_this_machine() -> None:
    content = result(doctor("--json"))
    assert content["source"] == "this machine"
    nodes = Path("/sys/devices/system/node")
    assert {f"node{node['id']}" for node in content["node"]["nodes"]} == {
        path.name for path in nodes.glob("node[0-9]*")
    }
    done = doctor()
    assert done.returncode in (0, 1)
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 80


AS_NOBODY = """\
import os, sys
import jsonschema_rs, pyudev, yaml
import pcinuma.cli, pcinuma.doctor_report, pcinuma.host_file, pcinuma.kubelet, pcinuma.node_reads, pcinuma.schema
pcinuma.schema.problems({}, "doctor")
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(pcinuma.cli.main(["doctor", *sys.argv[1:]]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become nobody")
def test_as_nobody_on_this_machine() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", AS_NOBODY, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    content = result(run("--json"))
    assert "error" not in run("--nonsense").stdout
    for device in content["node"]["devices"]:
        config = Path(f"/sys/bus/pci/devices/{device['address']}/config").read_bytes()  # as root
        if config[6] & 0x10:  # it has capabilities, which nobody does not see
            assert device["ats"] == "unknown"
            assert "config-unreadable" in codes(content)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become nobody")
def test_files_that_may_not_be_read(node: NodeTree) -> None:
    for path in node.sys.rglob("config"):
        path.chmod(0o000)
    for path in (node.sys, *node.sys.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    command = [sys.executable, "-c", AS_NOBODY, "--json", "--sysfs", str(node.sys)]
    content = result(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False))
    assert codes(content) == ["config-unreadable", "not-checked"]


# --- through libudev -------------------------------------------------------------------------------------------


def _umockdev(node: NodeTree) -> str:
    """The tree as umockdev's device description; binary files are written as hex (H:)."""
    blocks = []
    for folder in sorted((node.sys / "devices").rglob("*")):
        is_function = (folder / "numa_node").is_file()
        if not is_function and not (folder / "cpulist").is_file():
            continue
        lines = [f"P: /{folder.relative_to(node.sys)}", f"E: SUBSYSTEM={'pci' if is_function else 'node'}"]
        for file in sorted(folder.iterdir()):
            if file.is_symlink() and os.readlink(file).startswith("/sys/"):
                lines.append(f"L: {file.name}=../../../..{os.readlink(file).removeprefix('/sys')}")
            elif file.is_file() and file.name in ("config", "vpd"):
                lines.append(f"H: {file.name}={file.read_bytes().hex().upper()}")
            elif file.is_file():
                escaped = file.read_text().replace("\n", "\\n")
                lines.append(f"A: {file.name}={escaped}")
        for file in sorted(folder.glob("hugepages/*/*")):
            lines.append(f"A: {file.relative_to(folder)}={file.read_text().strip()}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def test_through_libudev(node: NodeTree, tmp_path: Path) -> None:
    if shutil.which("umockdev-run") is None:
        pytest.skip("no umockdev-run here (Debian: umockdev)")
    (tmp_path / "host.umockdev").write_text(_umockdev(node))
    wrapper = ("umockdev-run", "-d", str(tmp_path / "host.umockdev"), "--")
    content = result(doctor("--json", wrapper=wrapper))
    assert content["source"] == "this machine"
    assert [n["cpus"] for n in content["node"]["nodes"]] == ["0-3,8-11", "4-7,12-15"]
    assert [n["hugePages"] for n in content["node"]["nodes"]] == [
        [{"sizeKiB": 2048, "total": 0, "free": 0}, {"sizeKiB": GIB, "total": 64, "free": 64}]
    ] * 2
    assert [(d["address"], d["ats"]) for d in content["node"]["devices"]] == [
        ("0000:43:00.0", "on"),
        ("0000:44:00.0", "on"),
    ]
    assert "acs-redirect" in codes(content)


# --- serial numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ("snapshot", "doctor"))
def test_no_serial_number_is_written(node: NodeTree, command: str) -> None:
    extra = ["--json"] if command == "doctor" else []
    done = subprocess.run(
        [PROGRAM, command, "--sysfs", node.sys, *extra], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "0000:44:00.0" in done.stdout
    digits = "".join(character for character in done.stdout.lower() if character in "0123456789abcdef")
    for secret in (*SECRETS, SERIAL.hex(), SERIAL[::-1].hex()):
        assert secret not in done.stdout
        assert secret.lower().replace("-", "") not in digits


def test_snapshot_opens_no_file_with_a_serial_number(node: NodeTree) -> None:
    """What is not read cannot be written: every file that the process opens is seen by the interpreter's audit hook."""
    code = (
        "import sys\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, about: opened.append(str(about[0])) if event == 'open' else None)\n"
        "from pcinuma.cli import main\n"
        "assert main(['snapshot', '--sysfs', sys.argv[1], '-o', '/dev/null']) == 0\n"
        "print('\\n'.join(path for path in opened if path.startswith(sys.argv[1])))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, node.sys], capture_output=True, text=True, timeout=60, check=True
    )
    names = {Path(path).name for path in done.stdout.splitlines()}
    assert {"numa_node", "class", "meminfo"} <= names
    assert names & {"config", "vpd", "serial", "serial_number"} == set()


# --- real machines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "archive, status, found, missing",
    (
        ("hwloc-32em64t-2n8c+dax+nvme+mic+dimms.tar.bz2", 1, ("config-unreadable", "hugepages-none", "numa-unknown"),
         ("kernel's command line", "IOMMU")),
        ("hwloc-32intel64-2p8co2t+8ve.tar.bz2", 0, ("config-unreadable", "link-slot"), ("IOMMU",)),
        ("hwloc-nvidiagpunumanodes.tar.bz2", 1, ("hugepages-none", "node-no-cpus", "numa-unknown"), ("IOMMU",)),
    ),
    ids=("32em64t", "32intel64", "nvidiagpunumanodes"),
)  # fmt: skip
def test_a_recorded_machine(
    tmp_path: Path, archive: str, status: int, found: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    if not (HOSTS / archive).is_file():
        pytest.skip(f"no {archive} in ../shared/hosts beside the repo")
    subprocess.run(["tar", "-xjf", HOSTS / archive, "-C", tmp_path], check=True, timeout=60)
    (folder,) = tmp_path.glob("*/sys")
    done = doctor("--sysfs", folder, "--json")
    assert done.returncode == status
    content = result(done)
    assert set(found) <= set(codes(content))
    (unchecked,) = [finding for finding in content["findings"] if finding["code"] == "not-checked"]
    assert all(what in unchecked["message"] for what in missing)
    assert content["proposal"]["reservedMemory"]
