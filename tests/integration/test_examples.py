"""The examples: what each README says is run, what comes out is held against what was worked out by hand.

Numbers of a transformed domain: every expander and every port takes a bus number, and the last one is 255.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from lxml import etree

from pcinuma import host_file, options, pipeline, report
from pcinuma.model import CpuSet
from tests.conftest import ROOT
from tests.support import custom_schemas, domains, kubevirt, libvirt, markdown, sidecar

EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Expected:
    """``expanders``: (index, busNr, cell) by alias. ``devices``: (cell, guest BDF) by alias."""

    owner: str
    policy: str
    expanders: dict[str, tuple[int, int, int]]
    devices: dict[str, tuple[int, str]]
    domain: str = "domain.xml"
    more: tuple[str, ...] = ()


EXPECTED = {
    # 3 + 4 devices, of which the VF is on node 0
    "two-sockets": Expected(
        "vmi.yaml",
        "restricted",
        {"ua-pcinuma-cell0": (1, 0xF7, 0), "ua-pcinuma-cell1": (6, 0xFC, 1)},
        {
            "ua-gpu-gpu0": (0, "0000:f8:00.0"),
            "ua-hostdevice-ib0": (0, "0000:f9:00.0"),
            "ua-gpu-gpu1": (0, "0000:fa:00.0"),
            "ua-sriov-storage": (0, "0000:fb:00.0"),
            "ua-gpu-gpu2": (1, "0000:fd:00.0"),
            "ua-hostdevice-ib1": (1, "0000:fe:00.0"),
            "ua-gpu-gpu3": (1, "0000:ff:00.0"),
        },
    ),
    # 2 x (1 + 8) bus numbers: 0xee to 0xf6 and 0xf7 to 0xff
    "eight-gpus": Expected(
        "vm.yaml",
        "restricted",
        {"ua-pcinuma-cell0": (1, 0xEE, 0), "ua-pcinuma-cell1": (10, 0xF7, 1)},
        {
            "ua-hostdevice-ib0": (0, "0000:ef:00.0"),
            "ua-gpu-gpu0": (0, "0000:f0:00.0"),
            "ua-hostdevice-ib1": (0, "0000:f1:00.0"),
            "ua-gpu-gpu1": (0, "0000:f2:00.0"),
            "ua-hostdevice-ib2": (0, "0000:f3:00.0"),
            "ua-gpu-gpu2": (0, "0000:f4:00.0"),
            "ua-hostdevice-ib3": (0, "0000:f5:00.0"),
            "ua-gpu-gpu3": (0, "0000:f6:00.0"),
            "ua-hostdevice-ib4": (1, "0000:f8:00.0"),
            "ua-gpu-gpu4": (1, "0000:f9:00.0"),
            "ua-hostdevice-ib5": (1, "0000:fa:00.0"),
            "ua-gpu-gpu5": (1, "0000:fb:00.0"),
            "ua-hostdevice-ib6": (1, "0000:fc:00.0"),
            "ua-gpu-gpu6": (1, "0000:fd:00.0"),
            "ua-hostdevice-ib7": (1, "0000:fe:00.0"),
            "ua-gpu-gpu7": (1, "0000:ff:00.0"),
        },
    ),
    "one-node": Expected(
        "vmi.yaml",
        "single-numa-node",
        {"ua-pcinuma-cell0": (1, 0xFD, 0)},
        {"ua-gpu-gpu0": (0, "0000:fe:00.0"), "ua-hostdevice-nic0": (0, "0000:ff:00.0")},
    ),
    "sr-iov": Expected(
        "vmi.yaml",
        "best-effort",
        {"ua-pcinuma-cell0": (1, 0xFA, 0), "ua-pcinuma-cell1": (4, 0xFD, 1)},
        {
            "ua-sriov-west0": (0, "0000:fb:00.0"),
            "ua-sriov-west1": (0, "0000:fc:00.0"),
            "ua-sriov-east0": (1, "0000:fe:00.0"),
            "ua-sriov-east1": (1, "0000:ff:00.0"),
        },
    ),
    # the first mediated device is of the GPU on node 1
    "vgpu": Expected(
        "vmi.yaml",
        "best-effort",
        {"ua-pcinuma-cell0": (1, 0xFC, 0), "ua-pcinuma-cell1": (3, 0xFE, 1)},
        {"ua-gpu-vgpu0": (1, "0000:ff:00.0"), "ua-gpu-vgpu1": (0, "0000:fd:00.0")},
    ),
    "virtual-machine": Expected(
        "vm.yaml",
        "restricted",
        {"ua-pcinuma-cell0": (1, 0xFC, 0), "ua-pcinuma-cell1": (3, 0xFE, 1)},
        {"ua-gpu-gpu0": (0, "0000:fd:00.0"), "ua-gpu-gpu1": (1, "0000:ff:00.0")},
    ),
    # libvirt's own controllers have the indexes 0 to 11 there
    "offline-debug": Expected(
        "vmi.yaml",
        "restricted",
        {"ua-pcinuma-cell0": (12, 0xFC, 0), "ua-pcinuma-cell1": (14, 0xFE, 1)},
        {"ua-gpu-gpu0": (0, "0000:fd:00.0"), "ua-gpu-gpu1": (1, "0000:ff:00.0")},
        domain="dumpxml.xml",
        more=("--addressed", "move"),
    ),
}


def transformed(name: str) -> tuple[str, dict[str, Any]]:
    """The example's domain and report, through the library as the commands use it."""
    expected, folder = EXPECTED[name], EXAMPLES / name
    owner = options.load_object((folder / expected.owner).read_bytes(), expected.owner)
    flags: dict[str, str | None] = dict(zip((f[2:] for f in expected.more[::2]), expected.more[1::2], strict=True))
    chosen = options.resolve(flags, options.from_vmi(owner, expected.owner))
    assert chosen.policy == expected.policy
    host = host_file.load((folder / "host.json").read_bytes(), "host.json")
    result = pipeline.transform((folder / expected.domain).read_bytes(), chosen, host, where=expected.domain)
    assert result.refusal is None
    return result.xml.decode(), report.as_dict(result.report)


@pytest.mark.parametrize("name", EXPECTED)
def test_where_everything_goes(name: str) -> None:
    expected = EXPECTED[name]
    xml, told = transformed(name)
    controllers, devices = domains.layout(xml)
    assert {alias: found for alias, found in controllers.items() if len(found) == 3} == expected.expanders
    assert {d["alias"]: (d["cell"], d["guestBDF"]) for d in told["devices"]} == expected.devices
    assert {d["placement"] for d in told["devices"]} == {"placed"}
    assert set(devices) == set(expected.devices)
    assert told["outcome"] == "changed"
    assert [finding for finding in told["findings"] if finding["severity"] == "error"] == []


@pytest.mark.libvirt
@pytest.mark.parametrize("name", EXPECTED)
def test_libvirt_defines_it(name: str) -> None:
    xml, _ = transformed(name)
    controllers, devices = domains.layout(libvirt.define_and_dump(xml))
    assert {alias: found for alias, found in controllers.items() if len(found) == 3} == EXPECTED[name].expanders
    assert None not in devices.values()


@pytest.mark.libvirt
@pytest.mark.parametrize("version", ["1.7", "1.9"])
@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "offline-debug"])
def test_kubevirts_passes_end_with_the_same_placement(name: str, version: str) -> None:
    """What libvirt holds after the last call of a VM start, for a version that drops busNr and node, and one that does not."""
    expected, folder = EXPECTED[name], EXAMPLES / name
    owner = options.load_object((folder / expected.owner).read_bytes(), expected.owner)
    chosen = options.resolve({}, options.from_vmi(owner, expected.owner))
    host = host_file.load((folder / "host.json").read_bytes(), "host.json")

    def hook(given: str) -> str:
        result = pipeline.transform(given.encode(), chosen, host, where="pass")
        assert result.refusal is None
        return result.xml.decode()

    passes = kubevirt.play((folder / expected.domain).read_text(), version, hook, libvirt.define_and_dump)
    assert len(passes) == (2 if version == "1.7" else 3)
    _, first = domains.layout(passes[0].answer)
    controllers, devices = domains.layout(passes[-1].defined)
    assert {alias: found for alias, found in controllers.items() if len(found) == 3} == expected.expanders
    assert devices == first


# --- the domains and the objects are of one story, and as KubeVirt has them ------------------------------------


@pytest.mark.parametrize("name", EXPECTED)
def test_the_manifest_asks_for_the_devices_that_the_domain_has(name: str) -> None:
    folder = EXAMPLES / name
    content = yaml.safe_load((folder / EXPECTED[name].owner).read_text())
    spec = content["spec"]["template"]["spec"] if content["kind"] == "VirtualMachine" else content["spec"]
    devices = spec["domain"]["devices"]
    wanted = {f"ua-gpu-{gpu['name']}" for gpu in devices.get("gpus", ())}
    wanted |= {f"ua-hostdevice-{device['name']}" for device in devices.get("hostDevices", ())}
    wanted |= {f"ua-sriov-{interface['name']}" for interface in devices["interfaces"] if "sriov" in interface}
    root = libvirt.parse_domain((folder / EXPECTED[name].domain).read_text())
    assert {alias.get("name") for alias in root.iterfind("devices/hostdev/alias")} == wanted
    assert root.findtext("name") == f"{content['metadata']['namespace']}_{content['metadata']['name']}"
    cpu, cells = spec["domain"]["cpu"], root.findall("cpu/numa/cell")
    assert int(root.findtext("vcpu") or 0) == cpu.get("sockets", 1) * cpu["cores"]
    assert cpu.get("sockets", 1) == max(len(cells), 1), (
        "a socket for each cell, or the guest ignores the caches it shares"
    )
    assert {interface["name"] for interface in devices["interfaces"]} == {
        network["name"] for network in spec["networks"]
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_the_manifest_is_one_that_kubevirt_takes(name: str) -> None:
    content = yaml.safe_load((EXAMPLES / name / EXPECTED[name].owner).read_text())
    if content["kind"] == "VirtualMachineInstance":  # the same spec as a template's
        template = {"metadata": {"annotations": content["metadata"]["annotations"]}, "spec": content["spec"]}
        metadata = {key: content["metadata"][key] for key in ("name", "namespace")}
        content = {**content, "kind": "VirtualMachine", "metadata": metadata, "spec": {"template": template}}
        content.pop("status", None)
    schema = custom_schemas.schema("kubevirt.io/v1", "VirtualMachine")
    assert schema is not None
    jsonschema_rs.validate(schema, content)


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "offline-debug"])
def test_the_domain_is_of_kubevirts_shape(name: str) -> None:
    """What Go's encoding/xml writes: double quotes, tabs, no self-closing tag, no mode on a PCI hostdev."""
    text = (EXAMPLES / name / EXPECTED[name].domain).read_text()
    assert text.startswith('<domain type="kvm" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">\n\t<name>')
    assert "'" not in text
    assert "/>" not in text
    root = libvirt.parse_domain(text)
    for hostdev in root.iterfind("devices/hostdev"):
        assert (hostdev.get("mode") is None) is (hostdev.get("type") == "pci")
        assert hostdev.find("address") is None
    assert [controller.get("type") for controller in root.iterfind("devices/controller")] == [
        "usb",
        "scsi",
        "virtio-serial",
    ]
    cells = root.findall("cpu/numa/cell")
    assert len(root.findall("numatune/memnode")) == len(cells)
    pins = {int(pin.get("vcpu", "-1")) for pin in root.iterfind("cputune/vcpupin")}
    assert pins == {int(n) for cell in cells for n in str(cell.get("cpus")).split(",")}


# --- what the READMEs say --------------------------------------------------------------------------------------

STATUS = {
    ("virtual-machine", "misplaced.yaml"): 2,
}
# `pcinuma snapshot` there records another machine's host
NOT_HERE = {"snapshot"}


def readme_commands() -> list[tuple[str, tuple[str, ...]]]:
    return [
        (path.parent.name, tuple(words))
        for path in sorted(EXAMPLES.glob("*/README.md"))
        for words in markdown.commands(path.read_text())
        if words[0] not in NOT_HERE
    ]


@pytest.mark.parametrize(
    "name, words", readme_commands(), ids=lambda value: value if isinstance(value, str) else value[0]
)
def test_the_readmes_commands_run(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    place = tmp_path / "examples" / name
    shutil.copytree(EXAMPLES, place.parent)
    done = subprocess.run([sidecar.PROGRAM, *words], cwd=place, capture_output=True, text=True, check=False)
    expected = max((status for (n, word), status in STATUS.items() if n == name and word in words), default=0)
    assert done.returncode == expected, done.stderr
    if expected == 0 and "-o" in words:
        etree.parse(place / words[words.index("-o") + 1])
    elif expected == 0:
        assert done.stdout
    else:
        assert done.stderr.startswith(
            "pcinuma: error: the annotation pcinuma.vm.kubevirt.io/enabled is on the VirtualMachine"
        )


def run(name: str, *words: str) -> str:
    done = subprocess.run([sidecar.PROGRAM, *words], cwd=EXAMPLES / name, capture_output=True, text=True, check=False)
    return done.stdout


def test_every_example_is_told_of_and_tested() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    assert folders == set(EXPECTED) | {"kubelet"}
    listed = set(re.findall(r"^\| \[([\w-]+)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == folders
    assert {name for name, _ in readme_commands()} == folders


def test_pairs_of_gpu_and_nic_by_root_complex() -> None:
    """eight-gpus: eight root complexes of a GPU and a NIC each, three bus numbers apiece."""
    folder = EXAMPLES / "eight-gpus"
    host = host_file.load((folder / "host.json").read_bytes(), "host.json")
    chosen = options.resolve({"group-by": "root-complex"})
    result = pipeline.transform((folder / "domain.xml").read_bytes(), chosen, host, where="domain.xml")
    controllers, _ = domains.layout(result.xml)
    expanders = sorted((found for found in controllers.values() if len(found) == 3), key=lambda found: str(found[1]))
    assert [found[1:] for found in expanders] == [(256 - 3 * (8 - n), 0 if n < 4 else 1) for n in range(8)]


def test_the_wrong_gpu_is_refused() -> None:
    said = run("one-node", "explain", "wrong-gpu.xml", "--vmi", "vmi.yaml", "--host", "host.json")
    assert "refused, nothing is changed" in " ".join(said.split())
    assert "0000:41:00.0" in said
    command = ("transform", "wrong-gpu.xml", "--vmi", "vmi.yaml", "--host", "host.json")
    done = subprocess.run([sidecar.PROGRAM, *command], cwd=EXAMPLES / "one-node", capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_the_running_vm_is_seen_to_be_unaligned() -> None:
    said = run("offline-debug", "check", "dumpxml.xml", "--host", "host.json")
    assert len(re.findall(r"^warning: addressed: 0000:(?:41|c1):00\.0 ", said, re.MULTILINE)) == 2
    assert "ua-pcinuma-" not in (EXAMPLES / "offline-debug/dumpxml.xml").read_text()
    refused = run("offline-debug", "explain", "dumpxml.xml", "--vmi", "vmi.yaml", "--host", "host.json")
    assert "--addressed move" in refused
    assert "outcome: refused" in refused


def test_doctor_has_nothing_against_the_kubelets_configuration(tmp_path: Path) -> None:
    said = run("kubelet", "doctor", "--json", "--kubelet-config", "config.yaml", "--host", "../one-node/host.json")
    findings = json.loads(said)["findings"]
    assert {finding["code"] for finding in findings if finding["severity"] != "info"} == set()
    worse = (EXAMPLES / "kubelet/config.yaml").read_text().replace("topologyManagerPolicy: restricted\n", "")
    (tmp_path / "worse.yaml").write_text(worse)
    said = run(
        "kubelet",
        "doctor",
        "--json",
        "--kubelet-config",
        str(tmp_path / "worse.yaml"),
        "--host",
        "../one-node/host.json",
    )
    assert {finding["severity"] for finding in json.loads(said)["findings"]} & {"error", "warning"}


# --- the kubelet -----------------------------------------------------------------------------------------------


def test_the_kubelets_configuration() -> None:
    """Names and values of kubelet.config.k8s.io/v1beta1; the sum is what the kubelet checks when it starts."""
    content = yaml.safe_load((EXAMPLES / "kubelet/config.yaml").read_text())
    text: dict[str, Any] = {"type": "string"}
    amounts = {"type": "object", "additionalProperties": {"type": "string", "pattern": "^[0-9]+(Gi|Mi|m)?$"}}
    schema = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "apiVersion": {"const": "kubelet.config.k8s.io/v1beta1"},
            "kind": {"const": "KubeletConfiguration"},
            "cpuManagerPolicy": {"enum": ["none", "static"]},
            "cpuManagerPolicyOptions": {"type": "object", "additionalProperties": text},
            "memoryManagerPolicy": {"enum": ["None", "Static"]},
            "topologyManagerPolicy": {"enum": ["none", "best-effort", "restricted", "single-numa-node"]},
            "topologyManagerScope": {"enum": ["container", "pod"]},
            "topologyManagerPolicyOptions": {"type": "object", "additionalProperties": text},
            "reservedSystemCPUs": text,
            "kubeReserved": amounts,
            "systemReserved": amounts,
            "evictionHard": amounts,
            "reservedMemory": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["numaNode", "limits"],
                    "properties": {"numaNode": {"type": "integer"}, "limits": amounts},
                    "additionalProperties": False,
                },
            },
        },
    }
    jsonschema_rs.validate(schema, content)
    assert content["cpuManagerPolicy"] == "static"
    assert content["memoryManagerPolicy"] == "Static"
    assert content["topologyManagerScope"] == "pod"

    def mib(amount: str) -> int:
        return int(amount[:-2]) * {"Gi": 1024, "Mi": 1}[amount[-2:]]

    per_node = sum(mib(node["limits"]["memory"]) for node in content["reservedMemory"])
    held_back = (content["kubeReserved"]["memory"], content["systemReserved"]["memory"])
    assert per_node == sum(map(mib, held_back)) + mib(content["evictionHard"]["memory.available"])
    # CPUs of both sockets stay with the host, each core with its sibling, 64 CPUs further on this machine
    reserved = CpuSet.parse(content["reservedSystemCPUs"])
    host = json.loads((EXAMPLES / "one-node/host.json").read_text())
    for node in host["nodes"]:
        assert len(set(CpuSet.parse(node["cpus"])) & set(reserved)) == 4
    assert {cpu ^ 64 for cpu in reserved} == set(reserved)
    readme = (EXAMPLES / "kubelet/README.md").read_text()
    for setting in ("cpuManagerPolicy: static", "memoryManagerPolicy: Static", "topologyManagerScope: pod"):
        assert setting in readme
