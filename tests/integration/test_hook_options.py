"""What the owner of a VM chooses by annotations, the cluster's owner by flags, and what the hook leaves as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from lxml import etree

from tests.conftest import ROOT
from tests.support import domains, sidecar
from tests.support.domains import domain, hostdev
from tests.support.sidecar import Client, Sidecar, refused, vmi

SAMPLES = ROOT.parent / "shared" / "samples"
NODES = {0: "0-7", 1: "8-15", 2: "16-23"}
NEAR, FAR, UNKNOWN, UNMAPPED = "0000:41:00.0", "0000:81:00.0", "0000:c1:00.0", "0000:e1:00.0"
FUNCTIONS = {NEAR: 0, FAR: 1, UNKNOWN: -1, UNMAPPED: 2}

ALL_FIT = domain({0: 0, 1: 1}, [hostdev(NEAR, "ua-gpu-near"), hostdev(FAR, "ua-gpu-far")])
ONE_DOES_NOT = domain(
    {0: 0, 1: 1}, [hostdev(NEAR, "ua-gpu-near"), hostdev(UNKNOWN, "ua-gpu-unknown"), hostdev(FAR, "ua-gpu-far")]
)
ONE_UNMAPPED = domain({0: 0, 1: 1}, [hostdev(NEAR, "ua-gpu-near"), hostdev(UNMAPPED, "ua-gpu-unmapped")])
ONE_NODE = domain({0: 0}, [hostdev(NEAR, "ua-gpu-near")])
NO_CELLS = re.sub(r"\t<(cpu|numatune)>.*?</\1>\n", "", ALL_FIT, flags=re.S)
NO_DEVICES = domain({0: 0, 1: 1}, [])
NEITHER = re.sub(r"\t<(cpu|numatune)>.*?</\1>\n", "", NO_DEVICES, flags=re.S)

# by hand: one device a cell, so two blocks of two bus numbers that end at 255
PLACED = {"ua-gpu-near": (2, 0, 0), "ua-gpu-far": (4, 0, 0)}

GUEST = '<address type="pci" domain="0x0000" bus="0x{:02x}" slot="0x{:02x}" function="0x0"></address>\n\t\t\t'

# KubeVirt 1.9 with PCINUMAAwareTopology: an expander for a cell, busNr from 255 down, a port, the GPU behind it
PLACED_BY_KUBEVIRT = domain(
    {0: 0, 1: 1},
    [
        hostdev(NEAR, "ua-gpu-near", GUEST.format(2, 0)),
        hostdev(FAR, "ua-gpu-far", GUEST.format(4, 0)),
        '<controller type="pci" index="1" model="pcie-expander-bus">\n\t\t\t<target busNr="254">\n'
        "\t\t\t\t<node>0</node>\n\t\t\t</target>\n\t\t</controller>",
        '<controller type="pci" index="2" model="pcie-root-port">\n\t\t\t' + GUEST.format(1, 0) + "</controller>",
        '<controller type="pci" index="3" model="pcie-expander-bus">\n\t\t\t<target busNr="252">\n'
        "\t\t\t\t<node>1</node>\n\t\t\t</target>\n\t\t</controller>",
        '<controller type="pci" index="4" model="pcie-root-port">\n\t\t\t' + GUEST.format(3, 0) + "</controller>",
    ],
)
ON_ROOT_COMPLEX = domain(
    {0: 0, 1: 1},
    [hostdev(NEAR, "ua-gpu-near", GUEST.format(0, 2)), hostdev(FAR, "ua-gpu-far", GUEST.format(0, 3))],
)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sidecar.host_file(tmp_path_factory.mktemp("host") / "host.json", NODES, FUNCTIONS)


@pytest.fixture(scope="module")
def hook(host: Path) -> Iterator[Sidecar]:
    with sidecar.running("--host", host) as running:
        yield running


@pytest.fixture
def client(hook: Sidecar) -> Iterator[Client]:
    with Client(hook.socket) as made:
        yield made


def devices(answer: bytes) -> dict[str, tuple[int, ...] | None]:
    return domains.layout(answer)[1]


def last(hook: Sidecar) -> dict[str, Any]:
    return hook.records("OnDefineDomain")[-1]


def finding(record: dict[str, Any], code: str) -> dict[str, Any]:
    found = [one for one in record["findings"] if one["code"] == code]
    assert found, f"no finding {code} in {record['findings']}"
    first: dict[str, Any] = found[0]
    return first


# --- annotations -----------------------------------------------------------------------------------------------


def test_without_annotations_what_fits_is_placed(hook: Sidecar, client: Client) -> None:
    nothing: dict[str, str] = {}
    for given in (None, nothing):
        assert devices(client.define(ONE_DOES_NOT, vmi(given))) == {**PLACED, "ua-gpu-unknown": None}
    record = last(hook)
    assert record["options"]["policy"] == "best-effort"
    assert {device["alias"]: device["placement"] for device in record["devices"]} == {
        "ua-gpu-near": "placed",
        "ua-gpu-far": "placed",
        "ua-gpu-unknown": "left",
    }
    assert finding(record, "numa-unknown")["device"] == UNKNOWN


@pytest.mark.parametrize("policy", ["restricted", "single-numa-node"])
def test_a_refusing_policy(client: Client, policy: str) -> None:
    code, said = refused(lambda: client.define(ONE_DOES_NOT, vmi({"policy": policy})))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert policy in said
    assert UNKNOWN in said
    assert "numa_node is -1" in said or "unknown" in said
    assert NEAR not in said


def test_restricted_places_what_fits(client: Client) -> None:
    assert devices(client.define(ALL_FIT, vmi({"policy": "restricted"}))) == PLACED


def test_single_numa_node(client: Client) -> None:
    code, said = refused(lambda: client.define(ALL_FIT, vmi({"policy": "single-numa-node"})))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert NEAR in said
    assert FAR in said
    assert devices(client.define(ONE_NODE, vmi({"policy": "single-numa-node"}))) == {"ua-gpu-near": (2, 0, 0)}


def test_a_refusal_names_every_device_that_does_not_fit(tmp_path: Path) -> None:
    functions = {f"0000:{0x20 + number:02x}:00.0": -1 for number in range(16)}
    host = sidecar.host_file(tmp_path / "host.json", NODES, functions)
    xml = domain({0: 0}, [hostdev(bdf, f"ua-gpu-{number}") for number, bdf in enumerate(functions)])
    with sidecar.running("--host", host) as hook, Client(hook.socket) as client:
        code, said = refused(lambda: client.define(xml, vmi({"policy": "restricted"})))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert [bdf for bdf in functions if bdf not in said] == []
        found = {one["device"] for one in last(hook)["findings"] if one["code"] == "numa-unknown"}
        assert found == set(functions)


def test_none_says_what_it_would_do(hook: Sidecar, client: Client) -> None:
    assert client.define(ALL_FIT, vmi({"policy": "none"})) == ALL_FIT.encode()
    record = last(hook)
    assert (record["outcome"], record["options"]["policy"]) == ("unchanged", "none")
    assert [(device["alias"], device["placement"], device["cell"]) for device in record["devices"]] == [
        ("ua-gpu-near", "placed", 0),
        ("ua-gpu-far", "placed", 1),
    ]


def test_unmapped_nearest(hook: Sidecar, client: Client) -> None:
    """Host node 2 is of no cell and as far from node 0 as from node 1: a tie, which goes to the lowest cell."""
    assert devices(client.define(ONE_UNMAPPED, vmi()))["ua-gpu-unmapped"] is None
    # by hand: two devices on cell 0, so the expander is 1 and their ports 2 and 3
    nearest = client.define(ONE_UNMAPPED, vmi({"unmapped": "nearest"}))
    assert devices(nearest) == {"ua-gpu-near": (2, 0, 0), "ua-gpu-unmapped": (3, 0, 0)}
    assert [device["placement"] for device in last(hook)["devices"]] == ["placed", "approximate"]
    code, said = refused(lambda: client.define(ONE_UNMAPPED, vmi({"unmapped": "nearest", "policy": "restricted"})))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert UNMAPPED in said


def test_addressed_move(client: Client) -> None:
    assert client.define(ON_ROOT_COMPLEX, vmi({"addressed": "keep"})) == ON_ROOT_COMPLEX.encode()
    assert devices(client.define(ON_ROOT_COMPLEX, vmi({"addressed": "move"}))) == PLACED


SETS = {
    "policy": ("none", "best-effort", "restricted", "single-numa-node"),
    "unmapped": ("leave", "nearest"),
    "addressed": ("keep", "move"),
    "mmio": ("off", "report", "apply"),
    "distances": ("keep", "host"),
    "gpudirect-clique": ("none", "by-switch"),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("value", ["", "Restricted", "sometimes", " none", "leave\n", True, None, 1, ["none"]])
def test_a_value_outside_its_set(client: Client, name: str, value: object) -> None:
    code, said = refused(lambda: client.define(ALL_FIT, vmi({name: value})))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sidecar.PREFIX + name in said
    assert all(allowed in said for allowed in SETS[name])


@pytest.mark.parametrize("name", ["Policy", "polcy", "", "policy/", "group_by", "socket"])
def test_an_unknown_annotation_of_ours(client: Client, name: str) -> None:
    code, said = refused(lambda: client.define(ALL_FIT, vmi({name: "restricted"})))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sidecar.PREFIX + name in said
    assert sidecar.PREFIX + "policy" in said  # what there is


def test_other_annotations_are_none_of_our_business(client: Client) -> None:
    content = json.loads(vmi({"policy": "restricted"}))
    content["metadata"]["annotations"] |= {
        "kubevirt.io/placePCIDevicesOnRootComplex": "true",
        "vm.kubevirt.io/policy": "sometimes",
        "pcinuma.vm.kubevirt.iox/policy": "sometimes",
        "hooks.kubevirt.io/hookSidecars": "[{}]",
    }
    assert devices(client.define(ALL_FIT, json.dumps(content).encode())) == PLACED


# --- the VMI ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [True, False])
def test_a_vmi_with_and_without_its_kind(client: Client, kind: bool) -> None:
    assert devices(client.define(ALL_FIT, vmi(kind=kind))) == PLACED
    code, _ = refused(lambda: client.define(ONE_DOES_NOT, vmi({"policy": "restricted"}, kind=kind)))
    assert code is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("empty", ['"annotations": null', '"annotations": {}', '"labels": null'])
def test_a_vmi_as_go_writes_it_without_annotations(client: Client, empty: str) -> None:
    content = f'{{"metadata": {{"name": "vm", "creationTimestamp": null, {empty}}}, "spec": {{}}, "status": {{}}}}'
    assert devices(client.define(ALL_FIT, content.encode())) == PLACED


# --- flags and the file of defaults ----------------------------------------------------------------------------


def test_flags_are_defaults_under_the_annotations(host: Path, tmp_path: Path) -> None:
    config = tmp_path / "defaults.yaml"
    config.write_text("policy: none\naddressed: move\n")
    with (
        sidecar.running("--host", host, "--config", config, "--policy", "restricted") as hook,
        Client(hook.socket) as client,
    ):
        # the flag wins over the file
        assert refused(lambda: client.define(ONE_DOES_NOT, vmi()))[0] is grpc.StatusCode.FAILED_PRECONDITION
        # what the flags leave open the file decides
        assert devices(client.define(ON_ROOT_COMPLEX, vmi())) == PLACED
        # an annotation wins over both
        assert client.define(ONE_DOES_NOT, vmi({"policy": "none"})) == ONE_DOES_NOT.encode()
        answer = client.define(ONE_DOES_NOT, vmi({"policy": "best-effort"}))
        assert devices(answer) == {**PLACED, "ua-gpu-unknown": None}
        code, _ = refused(lambda: client.define(ON_ROOT_COMPLEX, vmi({"addressed": "keep"})))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        # and one call leaves nothing behind for the next
        assert refused(lambda: client.define(ONE_DOES_NOT, vmi()))[0] is grpc.StatusCode.FAILED_PRECONDITION


def test_the_file_of_defaults_alone(host: Path, tmp_path: Path) -> None:
    config = tmp_path / "defaults.yaml"
    config.write_text("policy: restricted\n")
    with sidecar.running("--host", host, "--config", config) as hook, Client(hook.socket) as client:
        assert refused(lambda: client.define(ONE_DOES_NOT, vmi()))[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert client.define(ONE_DOES_NOT, vmi({"policy": "none"})) == ONE_DOES_NOT.encode()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "sometimes"], ["--policy", "best-effort", "restricted"]),
        (["--addressed", ""], ["--addressed", "keep", "move"]),
        (["--config", "/nonexistent/defaults.yaml"], ["/nonexistent/defaults.yaml"]),
        (["--host", "/nonexistent/host.json"], ["/nonexistent/host.json"]),
        (["--sysfs", "/nonexistent"], ["/nonexistent"]),
        (["--host", "h", "--sysfs", "s"], ["--host", "--sysfs"]),
        (["--log-format", "xml"], ["--log-format", "json", "text"]),
        (["--log-level", "loud"], ["--log-level", "debug"]),
        (["domain.xml"], ["domain.xml"]),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said_at_once(
    tmp_path: Path, arguments: list[str], said: list[str]
) -> None:
    path = tmp_path / "x.sock"
    ended = sidecar.run(sidecar.PROGRAM, "hook", "--socket", path, *arguments)
    errors = ended.stderr.decode()
    assert ended.returncode == 2, errors
    assert errors.startswith("pcinuma: error: ")
    assert [word for word in said if word not in errors] == []
    assert "Traceback" not in errors
    assert not path.exists()


def test_a_file_of_defaults_that_is_none(tmp_path: Path, host: Path) -> None:
    config = tmp_path / "defaults.yaml"
    for text in ("policy: sometimes\n", "polcy: none\n", "- policy\n", "policy: [\n"):
        config.write_text(text)
        path = tmp_path / "x.sock"
        ended = sidecar.run(sidecar.PROGRAM, "hook", "--socket", path, "--host", host, "--config", config)
        assert ended.returncode == 2, text
        assert str(config) in ended.stderr.decode()
        assert not path.exists()


# --- nothing to do ---------------------------------------------------------------------------------------------


def test_no_cells(hook: Sidecar, client: Client) -> None:
    for policy in ("best-effort", "none"):
        assert client.define(NO_CELLS, vmi({"policy": policy})) == NO_CELLS.encode()
        record = last(hook)
        found = finding(record, "no-cells")
        assert record["outcome"] == "unchanged"
        assert "cell" in found["message"]
        for setting in ("dedicatedCpuPlacement", "hugepages", "guestMappingPassthrough"):
            assert setting in found["hint"]
    code, said = refused(lambda: client.define(NO_CELLS, vmi({"policy": "restricted"})))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "guestMappingPassthrough" in said


@pytest.mark.parametrize("policy", ["none", "best-effort", "restricted", "single-numa-node"])
@pytest.mark.parametrize("xml", [NO_DEVICES, NEITHER], ids=["with cells", "without cells"])
def test_no_devices(hook: Sidecar, client: Client, policy: str, xml: str) -> None:
    assert client.define(xml, vmi({"policy": policy})) == xml.encode()
    record = last(hook)
    assert (record["outcome"], record["devices"], record["level"]) == ("unchanged", [], "info")
    assert "device" in finding(record, "no-devices")["message"]


def test_no_devices_says_what_to_set(hook: Sidecar, client: Client) -> None:
    client.define(NO_DEVICES, vmi())
    hint = finding(last(hook), "no-devices")["hint"] or ""
    assert "gpus" in hint
    assert "hostDevices" in hint


def test_the_domain_decides_and_not_the_vmi(client: Client) -> None:
    """A VMI that asks for GPUs and guest NUMA whose domain has neither, and one that asks for nothing whose domain has."""
    asking = json.loads(vmi())
    asking["spec"]["domain"] = {
        "cpu": {"dedicatedCpuPlacement": True, "numa": {"guestMappingPassthrough": {}}},
        "devices": {"gpus": [{"name": "near", "deviceName": "vendor.com/gpu"}]},
    }
    assert client.define(NEITHER, json.dumps(asking).encode()) == NEITHER.encode()
    assert devices(client.define(ALL_FIT, vmi())) == PLACED


def test_an_i440fx_machine(hook: Sidecar, client: Client) -> None:
    xml = ALL_FIT.replace('machine="q35"', 'machine="pc-i440fx-7.2"')
    assert client.define(xml, vmi()) == xml.encode()
    assert "q35" in finding(last(hook), "unsupported-machine")["hint"]
    code, _ = refused(lambda: client.define(xml, vmi({"policy": "restricted"})))
    assert code is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("policy", ["none", "best-effort", "restricted"])
def test_what_kubevirt_placed_already(hook: Sidecar, client: Client, policy: str) -> None:
    assert client.define(PLACED_BY_KUBEVIRT, vmi({"policy": policy})) == PLACED_BY_KUBEVIRT.encode()
    record = last(hook)
    assert record["outcome"] == "unchanged"
    assert {device["alias"]: (device["placement"], device["cell"]) for device in record["devices"]} == {
        "ua-gpu-near": ("kept", 0),
        "ua-gpu-far": ("kept", 1),
    }
    found = [one for one in record["findings"] if one["code"] == "already-placed"]
    assert {one["device"] for one in found} == {NEAR, FAR}
    assert {one["severity"] for one in found} == {"info"}
    assert record["level"] == "info"


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no ../shared/samples: KubeVirt's own domains are not here")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_kubevirt_1_9_placed_itself(tmp_path: Path, number: int) -> None:
    case = "2n-4gpu-2nic-1sriov"
    xml = (SAMPLES / "v1.9.0" / f"{case}.pcinuma-true.pass{number}.xml").read_bytes()
    recorded = json.loads((SAMPLES / "hosts.json").read_text())[case]
    nodes = {int(node): cpus for node, cpus in recorded["nodes"].items()}
    host = sidecar.host_file(tmp_path / "host.json", nodes, recorded["devices"])
    with sidecar.running("--host", host) as hook, Client(hook.socket) as client:
        for policy in ("best-effort", "restricted"):
            assert client.define(xml, vmi({"policy": policy})) == xml
            record = last(hook)
            found = {one["device"] for one in record["findings"] if one["code"] == "already-placed"}
            assert found == set(recorded["devices"])


def test_devices_on_the_root_complex(hook: Sidecar, client: Client) -> None:
    """KubeVirt's own annotation put them on bus 0: their addresses stay, and it is said which annotation is to go."""
    assert client.define(ON_ROOT_COMPLEX, vmi()) == ON_ROOT_COMPLEX.encode()
    record = last(hook)
    assert (record["outcome"], record["level"]) == ("unchanged", "warning")
    assert {device["placement"] for device in record["devices"]} == {"kept"}
    for one in record["findings"]:
        assert (one["code"], one["severity"]) == ("addressed", "warning")
        assert "kubevirt.io/placePCIDevicesOnRootComplex" in f"{one['message']} {one['hint']}"
    assert {one["device"] for one in record["findings"]} == {NEAR, FAR}
    code, said = refused(lambda: client.define(ON_ROOT_COMPLEX, vmi({"policy": "restricted"})))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "kubevirt.io/placePCIDevicesOnRootComplex" in said
    assert NEAR in said
    assert FAR in said


# --- what is changed, and how it is written --------------------------------------------------------------------


def test_devices_that_are_placed_get_the_default_mode_spelled_out(client: Client) -> None:
    root = etree.fromstring(client.define(ONE_DOES_NOT, vmi()))
    devices = root.findall("devices/hostdev")
    modes = {alias.get("name"): one.get("mode") for one in devices for alias in one.iterfind("alias")}
    assert modes == {"ua-gpu-near": "subsystem", "ua-gpu-unknown": None, "ua-gpu-far": "subsystem"}


def test_a_mode_that_is_there_stays_as_it_is(client: Client) -> None:
    spelled = ALL_FIT.replace('<hostdev type="pci" managed="no">', '<hostdev mode="subsystem" type="pci" managed="no">')
    answer = client.define(spelled, vmi()).decode()
    assert answer.count('<hostdev mode="subsystem" type="pci" managed="no">') == 2
    assert answer.count("mode=") - spelled.count("mode=") == 0


@pytest.mark.parametrize(
    ("codec", "declared"),
    [
        ("iso-8859-1", "ISO-8859-1"),
        ("iso-8859-1", "latin1"),
        ("windows-1252", "windows-1252"),
        ("utf-16", "UTF-16"),
        ("utf-16", None),
        ("utf-8-sig", "utf-8"),
    ],
)
def test_the_answer_is_utf_8_and_says_so(client: Client, codec: str, declared: str | None) -> None:
    xml = ALL_FIT.replace("<name>", "<title>übergrößer</title>\n\t<name>", 1)
    declaration = f'<?xml version="1.0" encoding="{declared}"?>\n' if declared else '<?xml version="1.0"?>\n'
    for body in (xml, xml.replace("hostdev", "hostdove")):  # changed, and with nothing to do
        answer = client.define((declaration + body).encode(codec), vmi())
        text = answer.decode("utf-8")
        assert re.match(r'<\?xml version="1\.0"( encoding="(UTF|utf)-8")?\?>\n<domain', text)
        assert "<title>übergrößer</title>" in text
    plain = client.define(xml, vmi()).decode()
    changed = client.define((declaration + xml).encode(codec), vmi()).decode()
    assert changed.partition("\n")[2] == plain
