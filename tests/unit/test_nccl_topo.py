"""What goes into the topology file and what does not: one device, one reason, one rule of NCCL's at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pcinuma.discover import ReadHost
from pcinuma.model import HostQuery, HostTopology, Options
from pcinuma.nccl_topo import TooManyNodes, TopologyFile, topology_file
from pcinuma.pipeline import transform
from tests.support import nccl, nccl_hosts
from tests.support.domains import domain, hostdev
from tests.support.nccl_hosts import bridge, gpu, link, nic

NODES = {0: "0-7", 1: "8-15"}
CONTROLLER = '<controller type="pci" index="{}" model="{}">{}</controller>'
AT = '<address type="pci" domain="0x0000" bus="0x{:02x}" slot="0x{:02x}" function="0x0"></address>'
PORT, UP, LEFT, RIGHT = "0000:40:01.0", "0000:41:00.0", "0000:42:00.0", "0000:42:01.0"
SWITCH = {
    PORT: (0, bridge()),
    UP: (0, bridge(PORT)),
    LEFT: (0, bridge(PORT, UP)),
    RIGHT: (0, bridge(PORT, UP)),
    "0000:43:00.0": (0, gpu(PORT, UP, LEFT)),
    "0000:44:00.0": (0, nic(PORT, UP, RIGHT)),
}


def made(xml: str, host: ReadHost, options: Options = Options(), **rules: Any) -> TopologyFile:
    """The file for the transformed domain; whatever it is, NCCL takes it."""
    result = transform(xml.encode(), options, host)
    assert result.refusal is None
    file = topology_file(result.xml, host)
    assert nccl.problems(file.text, **rules) == []
    return file


def with_devices(*bdfs: str, cells: dict[int, int | None] | None = None, **given: Any) -> str:
    devices = [hostdev(bdf, f"ua-gpu-d{number}") for number, bdf in enumerate(bdfs)]
    return domain(cells or {0: 0, 1: 1}, devices, **given)


def a_host(functions: dict[str, tuple[int, dict[str, Any]]], cpu: object = nccl_hosts.INTEL) -> ReadHost:
    return nccl_hosts.host(NODES, functions, cpu=cpu)


def elements(file: TopologyFile) -> list[tuple[str, str]]:
    """Every BDF of the file with the one it is below."""
    system = nccl.read(file.text)
    parents = {id(child): node for node in system.walk() for child in node.children}
    return [
        (
            pci.attributes["busid"],
            parents[id(pci)].attributes.get("busid", parents[id(pci)].attributes.get("numaid", "")),
        )
        for pci in system.all("pci")
    ]


def told(file: TopologyFile) -> list[tuple[str, str | None]]:
    return [(finding.code, finding.device) for finding in file.findings]


# --- the switches ----------------------------------------------------------------------------------------------


def guest_switch(gpu_at: int, nic_at: int, *more: str) -> str:
    """A domain whose guest has a switch of its own at busNr 0xf0: bus f1 the upstream port, f2 the downstream ports,
    f3 and f4 below them; and a root port beside it, whose bus is f5. The devices are at these controllers."""
    devices = [
        CONTROLLER.format(1, "pcie-expander-bus", '<target busNr="240"><node>0</node></target>'),
        CONTROLLER.format(2, "pcie-root-port", AT.format(1, 0)),
        CONTROLLER.format(3, "pcie-switch-upstream-port", AT.format(2, 0)),
        CONTROLLER.format(4, "pcie-switch-downstream-port", AT.format(3, 0)),
        CONTROLLER.format(5, "pcie-switch-downstream-port", AT.format(3, 1)),
        CONTROLLER.format(6, "pcie-root-port", AT.format(1, 1)),
        hostdev("0000:43:00.0", "ua-gpu-a", AT.format(gpu_at, 0)),
        hostdev("0000:44:00.0", "ua-hostdevice-n", AT.format(nic_at, 0)),
        *more,
    ]
    return domain({0: 0, 1: 1}, devices)


def test_a_switch_of_the_guest_stands_for_the_hosts() -> None:
    file = made(guest_switch(4, 5), a_host(SWITCH), Options(policy="none"))
    assert elements(file) == [
        ("0000:f1:00.0", "0"),
        ("0000:f3:00.0", "0000:f1:00.0"),
        ("0000:f4:00.0", "0000:f1:00.0"),
    ]
    assert f"<!-- host switch {UP} -->" in file.text


def test_a_switch_of_the_guest_above_other_devices_does_not() -> None:
    """The host's switch is above both, the guest's above the GPU alone."""
    file = made(guest_switch(4, 6), a_host(SWITCH), Options(policy="none"))
    assert elements(file) == [
        ("ffff:ff:01.0", "0"),
        ("0000:f3:00.0", "ffff:ff:01.0"),
        ("0000:f5:00.0", "ffff:ff:01.0"),
    ]


def test_a_switch_that_only_the_guest_has_is_not_in_the_file() -> None:
    apart = {**SWITCH, "0000:44:00.0": (0, nic("0000:50:01.0")), "0000:50:01.0": (0, bridge())}
    file = made(guest_switch(4, 5), a_host(apart), Options(policy="none"))
    assert elements(file) == [("0000:f3:00.0", "0"), ("0000:f4:00.0", "0")]


def test_a_switch_without_a_known_link_is_written_as_nccl_writes_it() -> None:
    unknown = {bdf: given for bdf, given in SWITCH.items() if bdf not in (UP, PORT)}
    file = made(with_devices("0000:43:00.0", "0000:44:00.0"), a_host(unknown))
    assert 'subsystem_device="0x0000" link_speed="" link_width="0"> <!-- host switch 0000:41:00.0 -->' in file.text
    assert told(file) == [("nccl-link-unknown", UP)]


def test_vfs_behind_one_port_of_a_switch_share_the_port_alone() -> None:
    """The NIC is by itself below the switch, whose uplink is the slower link: two VFs, no switch."""
    vf = {"class": "0x020000", "vendor": "0x15b3", "bridges": [PORT, UP, RIGHT], "physfn": "0000:44:00.0"}
    functions = {**SWITCH, UP: (0, bridge(PORT, **link(8.0))), "0000:44:00.2": (0, vf), "0000:44:01.1": (0, vf)}
    file = made(with_devices("0000:44:00.2", "0000:44:01.1", cells={0: 0}), a_host(functions))
    assert elements(file) == [("0000:fe:00.0", "0"), ("0000:ff:00.0", "0")]
    assert {pci.attributes["link_speed"] for pci in nccl.read(file.text).all("pci")} == {"8.0 GT/s PCIe"}
    both = made(with_devices("0000:43:00.0", "0000:44:00.2", cells={0: 0}), a_host(functions))
    assert [below for _, below in elements(both)] == ["0", "ffff:ff:01.0", "ffff:ff:01.0"]


def test_a_vf_goes_by_its_pf() -> None:
    """Its own node is not known."""
    vf = {"class": "0x020000", "physfn": "0000:44:00.0"}
    functions = {"0000:44:00.0": (1, nic()), "0000:44:00.2": (-1, vf)}
    assert elements(made(with_devices("0000:44:00.2"), a_host(functions))) == [("0000:ff:00.0", "1")]


def test_a_vdpa_device_is_none_of_nccls() -> None:
    vdpa = '<interface type="vdpa"><source dev="/dev/vhost-vdpa-0"/><alias name="ua-v"/></interface>'
    file = made(domain({0: 0}, [hostdev("0000:41:00.0", "ua-gpu-a"), vdpa]), a_host({"0000:41:00.0": (0, gpu())}))
    assert len(elements(file)) == 1
    assert told(file) == []


def test_devices_of_one_switch_on_two_cells() -> None:
    """The GPU's own node is another than the NIC's: they are on two cells, and no cell has the switch."""
    split = {**SWITCH, "0000:44:00.0": (1, nic(PORT, UP, RIGHT))}
    file = made(with_devices("0000:43:00.0", "0000:44:00.0"), a_host(split))
    assert elements(file) == [("0000:fd:00.0", "0"), ("0000:ff:00.0", "1")]


def test_more_switches_than_a_made_up_bus_has_slots() -> None:
    functions: dict[str, tuple[int, dict[str, Any]]] = {}
    wanted = []
    for number in range(33):
        up = f"{number + 1:04x}:01:00.0"
        functions[up] = (0, bridge(f"{number + 1:04x}:00:01.0"))
        for slot in (0, 1):
            port, end = f"{number + 1:04x}:02:0{slot}.0", f"{number + 1:04x}:0{3 + slot}:00.0"
            functions[port] = (0, bridge(f"{number + 1:04x}:00:01.0", up))
            functions[end] = (0, (gpu, nic)[slot](f"{number + 1:04x}:00:01.0", up, port))
            wanted.append(end)
    result = transform(with_devices(*wanted).encode(), Options(), a_host(functions))
    text = topology_file(result.xml, a_host(functions)).text
    # 33 below one cell are more than older versions read, so no made() here
    ids = [line.split('"')[1] for line in text.splitlines() if "host switch" in line]
    assert (ids[0], ids[30], ids[31], ids[32], len(set(ids))) == (
        "ffff:ff:01.0",
        "ffff:ff:1f.0",
        "ffff:fe:01.0",
        "ffff:fe:02.0",
        33,
    )


# --- the devices -----------------------------------------------------------------------------------------------


def test_only_what_nccl_looks_at() -> None:
    """A GPU with its audio function, an NVSwitch, a disk, the Data Direct function of a ConnectX."""
    functions = {
        "0000:41:00.0": (0, gpu()),
        "0000:41:00.1": (0, {"class": "0x040300", "vendor": "0x10de"}),
        "0000:51:00.0": (0, {"class": "0x068000", "vendor": "0x10de", **link()}),
        "0000:52:00.0": (0, {"class": "0x010802", "vendor": "0x144d", **link()}),
        "0000:53:00.0": (0, {"class": "0x080100", "vendor": "0x15b3", **link()}),
    }
    file = made(with_devices(*functions), a_host(functions))
    classes = [pci.attributes["class"] for pci in nccl.read(file.text).all("pci")]
    assert classes == ["0x030200", "0x068000", "0x080100"]
    assert told(file) == []


def test_amd_gpus_are_for_rccl() -> None:
    instinct = {"class": "0x120000", "vendor": "0x1002", "device": "0x74b5", **link()}
    functions = {"0000:41:00.0": (0, instinct), "0000:81:00.0": (1, instinct)}
    file = made(with_devices(*functions), a_host(functions, nccl_hosts.AMD), version=2)
    assert [pci.attributes["class"] for pci in nccl.read(file.text).all("pci")] == ["0x120000"] * 2
    mixed = {**functions, "0000:42:00.0": (0, gpu())}
    assert told(made(with_devices(*mixed), a_host(mixed))) == [("nccl-mixed-gpus", None)]


def test_left_out_with_the_reason() -> None:
    mdev = (
        '<hostdev mode="subsystem" type="mdev" model="vfio-pci"><source>'
        '<address uuid="11111111-2222-3333-4444-555555555555"></address></source></hostdev>'
    )
    functions = {
        "0000:41:00.0": (0, gpu()),
        "0000:42:00.0": (-1, gpu()),
        "0000:43:00.0": (0, {"vendor": "0x10de"}),
        "0000:44:00.0": (0, gpu()),
    }
    devices = [hostdev(bdf, f"ua-gpu-d{bdf[5:7]}") for bdf in ("0000:41:00.0", "0000:42:00.0", "0000:43:00.0")]
    devices.append(hostdev("0000:44:00.0", "ua-gpu-kept", AT.format(7, 0)))
    devices.append(hostdev("0000:4f:00.0", "ua-gpu-none"))
    devices.append(mdev)
    file = made(domain({0: 0, 1: 1}, devices), a_host(functions))
    reasons = {finding.device: finding.message.partition(": ")[2] for finding in file.findings}
    assert {finding.code for finding in file.findings} == {"nccl-left-out"}
    assert reasons == {
        "0000:42:00.0": "its BDF in the guest is decided when the VM starts",
        "0000:43:00.0": "the host does not say its PCI class",
        "0000:44:00.0": "its BDF in the guest is decided when the VM starts",
        "0000:4f:00.0": "there is no such PCI function on this host",
        "mdev 11111111-2222-3333-4444-555555555555": "a mediated device is a share of its parent, and so is its part of "
        "the link",
    }
    assert len(elements(file)) == 1


def test_two_devices_at_one_guest_address() -> None:
    xml = domain({0: 0}, [hostdev(f"0000:4{n}:00.0", f"ua-gpu-{n}", AT.format(0, 5)) for n in (1, 2)])
    host = a_host({"0000:41:00.0": (0, gpu()), "0000:42:00.0": (0, gpu())})
    file = topology_file(xml.encode(), host)
    assert elements(file) == [("0000:00:05.0", "0")]
    assert [finding.message for finding in file.findings] == [
        "0000:42:00.0 is not in the file: its guest address is that of 0000:41:00.0 as well"
    ]


def test_a_device_on_the_root_bus_is_told_its_cell() -> None:
    """It keeps its address, so the guest sees numa_node -1; the file knows better."""
    xml = domain({0: 0, 1: 1}, [hostdev("0000:81:00.0", "ua-gpu-a", AT.format(0, 5))])
    file = made(xml, a_host({"0000:81:00.0": (1, gpu())}))
    assert elements(file) == [("0000:00:05.0", "1")]


@pytest.mark.parametrize(("node", "reason"), [(-1, "its numa_node is -1"), (1, "host node 1 belongs to no guest cell")])
def test_without_a_cell(node: int, reason: str) -> None:
    xml = domain({0: 0}, [hostdev("0000:81:00.0", "ua-gpu-a", AT.format(0, 5))])
    file = made(xml, a_host({"0000:81:00.0": (node, gpu())}))
    assert told(file) == [("nccl-left-out", "0000:81:00.0"), ("nccl-no-gpu", None)]
    assert reason in file.findings[0].message


def test_a_node_that_is_unknown_takes_the_cell_that_the_guest_sees() -> None:
    xml = guest_switch(4, 5)
    unknown = {**SWITCH, "0000:43:00.0": (-1, gpu(PORT, UP, LEFT)), "0000:44:00.0": (-1, nic(PORT, UP, RIGHT))}
    assert ("0000:f3:00.0", "0000:f1:00.0") in elements(made(xml, a_host(unknown), Options(policy="none")))


def test_an_unknown_link_is_left_to_nccl() -> None:
    blank = {"link": {"speed": None, "width": None, "maxSpeed": None, "maxWidth": None}}
    file = made(with_devices("0000:41:00.0"), a_host({"0000:41:00.0": (0, gpu(**blank))}))
    (pci,) = nccl.read(file.text).all("pci")
    assert set(pci.attributes) == {"busid", "class", "vendor", "device"}
    assert told(file) == [("nccl-link-unknown", "0000:41:00.0")]


def test_the_slower_end_of_a_link_counts() -> None:
    functions = {
        "0000:40:01.0": (0, bridge(**link(8.0, 16))),
        "0000:41:00.0": (0, gpu("0000:40:01.0", **link(32.0, 4))),
    }
    (pci,) = nccl.read(made(with_devices("0000:41:00.0"), a_host(functions)).text).all("pci")
    assert (pci.attributes["link_speed"], pci.attributes["link_width"]) == ("8.0 GT/s PCIe", "4")


# --- the cells -------------------------------------------------------------------------------------------------


def cpus(file: TopologyFile) -> list[dict[str, str]]:
    return [cpu.attributes for cpu in nccl.read(file.text).all("cpu")]


def test_no_gpu() -> None:
    file = made(domain({0: 0, 1: 1}, []), a_host({}), cpu_known=False)
    assert [(cpu["numaid"], cpu["affinity"]) for cpu in cpus(file)] == [("0", "00000003"), ("1", "0000000c")]
    assert told(file) == [("nccl-no-gpu", None)]


def test_no_cells() -> None:
    file = made(
        domain({}, [hostdev("0000:41:00.0", "ua-gpu-a", AT.format(0, 5))]), a_host({"0000:41:00.0": (0, gpu())})
    )
    assert cpus(file) == []
    assert told(file) == [("nccl-left-out", "0000:41:00.0"), ("nccl-no-gpu", None)]


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        ({"vendor": "GenuineIntel", "family": 6, "model": 0xCF}, ("GenuineIntel", "6", "207")),
        ({"vendor": "AuthenticAMD", "family": 0x17, "model": 49}, ("AuthenticAMD", "143", "49")),
        ({"vendor": "AuthenticAMD", "family": 0x19, "model": 17}, ("AuthenticAMD", "175", "17")),
        ({"vendor": "AuthenticAMD", "family": 0x1A, "model": 2}, ("AuthenticAMD", "191", "2")),
        ({"vendor": "  Shanghai  ", "family": 7, "model": 0x5B}, ("  Shanghai  ", "7", "91")),
    ],
)
def test_the_processor_as_nccl_counts_it(cpu: dict[str, Any], expected: Sequence[str]) -> None:
    """143, 175 and 191 are the numbers that NCCL's source has for Zen 2, Zen 3 and 4, and Zen 5."""
    file = made(with_devices("0000:41:00.0"), a_host({"0000:41:00.0": (0, gpu())}, cpu))
    assert {(one["vendor"], one["familyid"], one["modelid"]) for one in cpus(file)} == {tuple(expected)}


def test_a_processor_that_is_not_known_is_left_to_nccl() -> None:
    file = made(with_devices("0000:41:00.0"), a_host({"0000:41:00.0": (0, gpu())}, None), cpu_known=False)
    assert all(set(cpu) == {"numaid", "affinity", "arch"} for cpu in cpus(file))
    assert told(file) == [("nccl-cpu-unknown", None)]


def test_arm64() -> None:
    xml = with_devices("0000:41:00.0", machine="virt", arch="aarch64")
    file = made(xml, a_host({"0000:41:00.0": (0, gpu())}, None))
    assert [cpu["arch"] for cpu in cpus(file)] == ["arm64", "arm64"]
    assert told(file) == []


def test_cells_are_numbered_as_linux_numbers_its_nodes() -> None:
    """Cell 0 has the last vCPUs, cell 1 memory alone, cell 2 the first vCPUs: the guest's nodes 1, 2 and 0."""
    functions = {"0000:41:00.0": (0, gpu()), "0000:81:00.0": (1, gpu()), "0000:c1:00.0": (2, gpu())}
    host = nccl_hosts.host({0: "0-7", 1: "8-15", 2: "16-23"}, functions, cpu=nccl_hosts.INTEL)
    xml = with_devices(*functions, cells={0: 0, 1: 1, 2: 2})
    for cell, (old, new) in enumerate((("0,1", "4,5"), ("2,3", ""), ("4,5", "0,1"))):
        xml = xml.replace(f'id="{cell}" cpus="{old}"', f'id="{cell}" cpus="{new}"')
    file = made(xml, host)
    assert [(cpu["numaid"], cpu["affinity"]) for cpu in cpus(file)] == [
        ("0", "00000003"),
        ("1", "00000030"),
        ("2", "00000000"),
    ]
    # buses fa to ff, an expander and a port for each cell in the host's order
    assert elements(file) == [("0000:ff:00.0", "0"), ("0000:fb:00.0", "1"), ("0000:fd:00.0", "2")]


@pytest.mark.parametrize(
    ("written", "mask"),
    [
        ("0-31", "00000000,ffffffff"),
        ("32,40", "00000101,00000000"),
        ("", "00000000,00000000"),
    ],
)
def test_affinity_is_a_cpumap(written: str, mask: str) -> None:
    """Words of 32 bits, as many for each cell, the highest first."""
    xml = with_devices("0000:41:00.0").replace('cpus="0,1"', f'cpus="{written}"').replace('cpus="2,3"', 'cpus="63"')
    file = made(xml, a_host({"0000:41:00.0": (0, gpu())}))
    assert {cpu["affinity"] for cpu in cpus(file)} == {mask, "80000000,00000000"}


def test_affinity_that_nccl_could_not_read_is_left_to_it() -> None:
    """28 words are 251 characters, 29 would be 260: NCCL reads 253."""
    host = a_host({"0000:41:00.0": (0, gpu())})
    at_most = with_devices("0000:41:00.0").replace('cpus="2,3"', 'cpus="895"')
    assert [len(cpu["affinity"]) for cpu in cpus(made(at_most, host))] == [251, 251]
    above = with_devices("0000:41:00.0").replace('cpus="2,3"', 'cpus="896"')
    assert all("affinity" not in cpu for cpu in cpus(made(above, host)))


# --- limits and reads ------------------------------------------------------------------------------------------


def test_more_than_nccl_reads_is_refused() -> None:
    """1 system, 2 cells, a GPU, and 3 elements for each NIC with what NCCL adds: 83 NICs are the most."""
    nics = {f"0000:{0x20 + number // 8:02x}:{number % 8:02x}.0": (number % 2, nic()) for number in range(84)}
    functions = {"0000:10:00.0": (0, gpu()), **nics}
    xml = with_devices("0000:10:00.0", *list(nics)[:83])
    host = a_host(functions)
    result = transform(xml.encode(), Options(), host)
    assert topology_file(result.xml, host).text.count("<pci ") == 84
    more = transform(with_devices("0000:10:00.0", *nics).encode(), Options(), host)
    with pytest.raises(TooManyNodes, match="would need 259 elements for this topology, and takes 256 at most"):
        topology_file(more.xml, host)


def test_the_host_is_asked_for_the_devices_and_what_is_above_them_alone() -> None:
    asked: list[HostQuery] = []
    host = a_host(SWITCH)

    def read(query: HostQuery) -> HostTopology:
        asked.append(query)
        return host(query)

    result = transform(with_devices("0000:43:00.0").encode(), Options(), host)
    topology_file(result.xml, read)
    assert [sorted(map(str, query.functions)) for query in asked] == [["0000:43:00.0"], [PORT, UP, LEFT]]
    assert all(query.details for query in asked)
    asked.clear()
    topology_file(domain({0: 0}, []).encode(), read)
    assert asked == []
