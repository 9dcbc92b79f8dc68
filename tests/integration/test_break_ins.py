"""What newcomers found who tried to break it: domains and hosts that no case of ours had."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pcinuma.check import check
from pcinuma.errors import BadInput
from pcinuma.host_file import HostFile, load
from pcinuma.model import Options
from pcinuma.pipeline import Result, transform
from tests.support import hosts, kubevirt
from tests.support.domains import domain, hostdev, layout
from tests.support.libvirt import define_and_dump

GIB = 1 << 30


def codes(result: Result) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in result.report.findings]


# --- many devices ----------------------------------------------------------------------------------------------


@pytest.mark.libvirt
@pytest.mark.parametrize("version", ["1.7", "1.9"])
def test_a_second_pass_over_120_devices_keeps_the_set_of_the_first(version: str) -> None:
    """Our own indexes below libvirt's ports are no gaps for it to fill: the set is there and stays."""
    functions = {f"0000:{0x20 + n // 8:02x}:{n % 8:02x}.0": n // 60 for n in range(120)}
    devices = [hostdev(bdf, f"ua-hostdevice-d{n}") for n, bdf in enumerate(functions)]
    host = hosts.host({0: "0-7", 1: "8-15"}, functions)
    options = Options(policy="restricted")
    first = transform(domain({0: 0, 1: 1}, devices).encode(), options, host)
    defined = define_and_dump(first.xml.decode())
    assert transform(defined.encode(), options, host).xml == defined.encode()
    lossy = kubevirt.through_structs(defined, version)
    again = transform(lossy.encode(), options, host)
    assert again.refusal is None
    assert layout(again.xml) == layout(first.xml)


# --- expanders of another hand ---------------------------------------------------------------------------------

EXPANDER = '<controller type="pci" index="{}" model="pcie-expander-bus"><target{}><node>{}</node></target></controller>'
PORT = (
    '<controller type="pci" index="{}" model="pcie-root-port">'
    '<address type="pci" bus="{:#x}" slot="{:#x}" function="0x0"/></controller>'
)
AT = '<address type="pci" domain="0x0000" bus="{:#x}" slot="0x00" function="0x0"/>'
TWO = {"0000:21:00.0": 0, "0000:22:00.0": 0}


def crowded(bus_nr: str, other: str = "") -> str:
    """Two devices below an expander; ``other`` is another one's busNr."""
    controllers = EXPANDER.format(1, bus_nr, 0) + PORT.format(2, 1, 0) + PORT.format(3, 1, 1)
    if other:
        controllers += EXPANDER.format(4, other, 1) + PORT.format(5, 4, 0)
    devices = [hostdev("0000:21:00.0", "ua-gpu-a", AT.format(2)), hostdev("0000:22:00.0", "ua-gpu-b", AT.format(3))]
    return domain({0: 0, 1: 1}, devices, extra=controllers)


@pytest.mark.parametrize(
    ("xml", "fits"),
    [
        (crowded(' busNr="250"', ' busNr="252"'), False),
        (crowded(""), False),
        (crowded(' busNr="250"', ' busNr="250"'), False),
        (crowded(' busNr="250"', ' busNr="253"'), True),
        (crowded(' busNr="253"'), True),
    ],
    ids=["too few", "automatic", "one number twice", "enough", "enough at the end"],
)
def test_devices_below_an_expander_with_too_few_buses_are_not_on_their_cell(xml: str, fits: bool) -> None:
    host = hosts.host({0: "0-7", 1: "8-15"}, TWO)
    lenient = transform(xml.encode(), Options(), host)
    assert lenient.xml == xml.encode()
    assert {p.code for p in lenient.report.plan.placements} == {"already-placed" if fits else "no-bus"}
    assert (("bus-room", "error") in codes(lenient)) is not fits
    assert (transform(xml.encode(), Options(policy="restricted"), host).refusal is None) is fits
    moved = transform(xml.encode(), Options(addressed="move"), host)
    assert {p.kind for p in moved.report.plan.placements} == {"kept" if fits else "placed"}


def test_an_expander_of_the_other_machine_type() -> None:
    xml = crowded(' busNr="250"').replace("pcie-expander-bus", "pci-expander-bus")
    found = {finding.code: finding.severity for finding in check(xml.encode(), Options(), hosts.host({0: "0-7"}, TWO))}
    assert found["expander-model"] == "error"


# --- check -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_by", ["numa", "root-complex", "switch"])
def test_check_takes_no_set_of_ours_for_stale_that_another_grouping_made(group_by: str) -> None:
    above: dict[str, dict[str, Any]] = {
        "0000_21_00_0": {"rootComplex": "pci0000:20", "bridges": ["0000:20:01.0", "0000:1e:00.0", "0000:1f:00.0"]},
        "0000_22_00_0": {"rootComplex": "pci0000:20", "bridges": ["0000:20:01.0", "0000:1e:00.0", "0000:1f:01.0"]},
        "0000_32_00_0": {"rootComplex": "pci0000:30"},
    }
    host = hosts.host({0: "0-7"}, TWO | {"0000:32:00.0": 0}, **above)
    devices = [hostdev(bdf, f"ua-gpu-{bdf[5:7]}") for bdf in ("0000:21:00.0", "0000:22:00.0", "0000:32:00.0")]
    made = transform(domain({0: 0}, devices).encode(), Options(group_by=group_by), host).xml
    assert "stale-set" not in {finding.code for finding in check(made, Options(), host)}
    one_less = made.replace(b'bus="0x32" slot', b'bus="0x33" slot')
    assert "stale-set" in {finding.code for finding in check(one_less, Options(), host)}


# --- memory as libvirt reads it --------------------------------------------------------------------------------


def big(xml: str) -> Result:
    """One BAR of 512 GiB: with 2 TB of memory 41 bits are one too few for SeaBIOS."""
    bars = [{"index": 2, "size": 512 * GIB, "flags": "0x14220c"}]
    cpu = {"vendor": "GenuineIntel", "family": 6, "model": 143}
    host = hosts.host({0: "0-7"}, {"0000:21:00.0": 0}, **{"0000_21_00_0": {"bars": bars}}, cpu=cpu)
    return transform(xml.encode(), Options(mmio="apply"), host)


@pytest.mark.parametrize(
    ("memory", "cell"),
    [
        ('<memory unit="GiB">2000</memory>', ""),
        ('<memory unit="gib">2000</memory>', ""),
        ('<memory unit="g">2000</memory>', ""),
        ('<memory unit="TB">2</memory>', ""),
        ("<memory>2097152000</memory>", ""),
        ("", 'memory="2000" unit="GiB"'),
        ('<memory unit="GiB">1</memory>', 'memory="2097152000"'),
        ('<memory unit="GiB">1</memory><maxMemory slots="2" unit="TiB">2</maxMemory>', ""),
    ],
)
def test_the_end_of_the_memory(memory: str, cell: str) -> None:
    xml = domain({0: 0}, [hostdev("0000:21:00.0", "ua-gpu-a")])
    assert "maxphysaddr" not in big(xml).xml.decode()
    xml = re.sub(r"<memory unit.*?</memory>", memory, xml)
    if cell:
        xml = xml.replace('memory="1073741824" unit="b"', cell)
    assert 'bits="42"' in big(xml).xml.decode()


def test_maxphysaddr_twice_and_without_bits() -> None:
    xml = domain({0: 0}, [hostdev("0000:21:00.0", "ua-gpu-a")]).replace('<memory unit="b">', '<memory unit="KiB">')
    twice = xml.replace("<cpu>", '<cpu><maxphysaddr mode="emulate" bits="38"/><maxphysaddr mode="emulate" bits="46"/>')
    out = big(twice).xml.decode()
    assert re.findall("<maxphysaddr.*?>", out) == ['<maxphysaddr mode="emulate" bits="41"/>']
    with pytest.raises(BadInput, match="there are no bits"):
        big(xml.replace("<cpu>", '<cpu><maxphysaddr mode="emulate"/>'))


# --- order -----------------------------------------------------------------------------------------------------


@pytest.mark.libvirt
def test_libvirts_order_of_devices_makes_no_set_stale() -> None:
    """Two devices of one parent, the hostdev before the interface: libvirt writes interfaces first."""
    record: dict[str, Any] = {
        "kind": "pcinuma-host",
        "version": 1,
        "nodes": [{"id": 0, "cpus": "0-7"}],
        "functions": [{"address": "0000:31:00.0", "node": 0}],
        "vdpas": [{"device": "vhost-vdpa-0", "parent": "0000:31:00.0"}],
    }
    host: HostFile = load(json.dumps(record).encode(), "a host of the tests")
    vdpa = '<interface type="vdpa"><source dev="/dev/vhost-vdpa-0"/><model type="virtio"/><alias name="ua-vdpa"/></interface>'
    first = transform(domain({0: 0}, [hostdev("0000:31:00.0", "ua-nic"), vdpa]).encode(), Options(), host)
    defined = define_and_dump(first.xml.decode()).encode()
    again = transform(defined, Options(), host)
    assert again.xml == defined
    assert layout(defined)[0] == layout(first.xml)[0]


# --- cliques ---------------------------------------------------------------------------------------------------

QEMU = 'xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0"'


def with_cliques(given: dict[str, int], options: Options = Options(gpudirect_clique="by-switch")) -> Result:
    """Two GPUs below one switch, a third below none; ``given`` are the domain's own numbers."""
    gpu = {"vendor": "0x10de", "class": "0x030200"}
    above = ["0000:20:01.0", "0000:1e:00.0"]
    details: dict[str, dict[str, Any]] = {
        "0000_21_00_0": {**gpu, "bridges": [*above, "0000:1f:00.0"]},
        "0000_22_00_0": {**gpu, "bridges": [*above, "0000:1f:01.0"]},
        "0000_32_00_0": {**gpu, "bridges": ["0000:30:01.0"]},
    }
    host = hosts.host({0: "0-7"}, TWO | {"0000:32:00.0": 0}, **details)
    names = {"0000:21:00.0": "ua-a", "0000:22:00.0": "ua-b", "0000:32:00.0": "ua-c"}
    xml = domain({0: 0}, [hostdev(bdf, name) for bdf, name in names.items()])
    said = "".join(
        f'<qemu:device alias="{alias}"><qemu:frontend><qemu:property name="x-nv-gpudirect-clique" type="unsigned"'
        f' value="{number}"/></qemu:frontend></qemu:device>'
        for alias, number in given.items()
    )
    override = f"<qemu:override>{said}</qemu:override>" if given else ""
    xml = xml.replace("</domain>", f"{override}</domain>").replace("<domain ", f"<domain {QEMU} ")
    return transform(xml.encode(), options, host)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"ua-a": 0, "ua-b": 0}),
        ({"ua-c": 0}, {"ua-a": 1, "ua-b": 1}),
        ({"ua-b": 7}, {"ua-a": 7, "ua-b": 7}),
        ({"ua-b": 7, "ua-c": 7}, {"ua-a": 0, "ua-b": 0}),
        ({"ua-a": 3, "ua-b": 5}, {"ua-a": 3, "ua-b": 3}),
    ],
)
def test_a_number_that_the_domain_has_given(given: dict[str, int], expected: dict[str, int]) -> None:
    result = with_cliques(given)
    assert result.report.plan.cliques == expected
    conflict = [f for f in result.report.findings if "had the GPUDirect cliques 3, 5" in f.message]
    assert len(conflict) == ("ua-a" in given)


def test_no_clique_at_all_is_said() -> None:
    devices = [hostdev("0000:21:00.0", "ua-a")]
    host = hosts.host({0: "0-7"}, TWO)
    result = transform(domain({0: 0}, devices).encode(), Options(gpudirect_clique="by-switch"), host)
    assert ("gpudirect-clique", "info") in codes(result)


def test_policy_none_says_what_would_be() -> None:
    result = with_cliques({}, Options(gpudirect_clique="by-switch", policy="none"))
    assert any("would get a GPUDirect clique" in finding.message for finding in result.report.findings)
