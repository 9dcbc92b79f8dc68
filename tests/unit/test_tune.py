"""What is written outside of the devices into domains that have something of it already: qemu:override, distances."""

from __future__ import annotations

import re

import pytest
from lxml import etree

from pcinuma.host_file import HostFile
from pcinuma.model import Options
from pcinuma.pipeline import transform
from tests.support import hosts
from tests.support.domains import domain, hostdev

URI = "http://libvirt.org/schemas/domain/qemu/1.0"
WAY = ["0000:90:01.0", "0000:91:00.0"]
GPU = {"vendor": "0x10de", "class": "0x030200"}
HOST = hosts.host(
    {0: "0-7", 1: "8-15"},
    {"0000:9a:00.0": 1, "0000:9b:00.0": 1},
    **{
        "0000_9a_00_0": {**GPU, "bridges": [*WAY, "0000:92:00.0"]},
        "0000_9b_00_0": {**GPU, "bridges": [*WAY, "0000:92:01.0"]},
    },
)
DOMAIN = domain({0: 0, 1: 1}, [hostdev("0000:9a:00.0", "ua-gpu-a"), hostdev("0000:9b:00.0", "ua-gpu-b")])
CLIQUE = ("x-nv-gpudirect-clique", "unsigned", "0")


def run(xml: str, host: HostFile = HOST, **options: str) -> str:
    result = transform(xml.encode(), Options(**options), host)  # type: ignore[arg-type]
    assert result.refusal is None, result.refusal
    again = transform(result.xml, Options(**options), host)  # type: ignore[arg-type]
    assert again.xml == result.xml
    return result.xml.decode()


def cliqued(root: str, override: str) -> str:
    return run(
        DOMAIN.replace('<domain type="kvm">', root).replace("</domain>", f"{override}</domain>"),
        gpudirect_clique="by-switch",
    )


def properties(xml: str) -> dict[str, list[tuple[str | None, ...]]]:
    """Name, type and value of each property by alias, as libvirt looks for them: by namespace."""
    (override,) = etree.fromstring(xml.encode()).iterfind(f"{{{URI}}}override")
    return {
        device.get("alias", ""): [
            (said.get("name"), said.get("type"), said.get("value"))
            for said in device.iterfind(f"{{{URI}}}frontend/{{{URI}}}property")
        ]
        for device in override.iterfind(f"{{{URI}}}device")
    }


PLAIN = '<domain type="kvm">'
PREFIXED = f'<domain type="kvm" xmlns:q="{URI}">'
DEFAULT = f'<override xmlns="{URI}">{{}}</override>'


def device(alias: str, inside: str, q: str = "q:") -> str:
    return f'<{q}device alias="{alias}">{inside}</{q}device>'


def frontend(*said: str, q: str = "q:") -> str:
    listed = "".join(f"<{q}property {one}/>" for one in said)
    return f"<{q}frontend>{listed}</{q}frontend>"


OTHER = 'name="x-pci-sub-device-id" type="unsigned" value="7"'
WRONG = 'name="x-nv-gpudirect-clique" type="{}" value="{}"'


@pytest.mark.parametrize(
    ("root", "override", "of_a"),
    [
        (PLAIN, "", [CLIQUE]),
        (PREFIXED, "", [CLIQUE]),
        (PREFIXED, "<q:override></q:override>", [CLIQUE]),
        (PREFIXED, "<q:override/>", [CLIQUE]),
        (PREFIXED, f"<q:override>{device('ua-gpu-a', '')}</q:override>", [CLIQUE]),
        (PREFIXED, f"<q:override>{device('ua-gpu-a', frontend())}</q:override>", [CLIQUE]),
        (
            PREFIXED,
            f"<q:override>{device('ua-gpu-a', '<!-- mine -->' + frontend(OTHER))}</q:override>",
            [("x-pci-sub-device-id", "unsigned", "7"), CLIQUE],
        ),
        (PREFIXED, f"<q:override>{device('ua-gpu-a', frontend(WRONG.format('unsigned', 5)))}</q:override>", [(CLIQUE[0], CLIQUE[1], "5")]),
        (PREFIXED, f"<q:override>{device('ua-gpu-a', frontend(WRONG.format('string', 0)))}</q:override>", [CLIQUE]),
        (PREFIXED, f"<q:override>{device('ua-gpu-a', frontend(WRONG.format('unsigned', 0)))}</q:override>", [CLIQUE]),
        (PLAIN, DEFAULT.format(device("ua-gpu-a", "", "")), [CLIQUE]),
        (PLAIN, DEFAULT.format(device("ua-gpu-a", frontend(OTHER, q=""), "")), [("x-pci-sub-device-id", "unsigned", "7"), CLIQUE]),
    ],
)  # fmt: skip
def test_a_clique_beside_what_is_overridden(root: str, override: str, of_a: list[tuple[str, ...]]) -> None:
    """A number that one of them has already is the number of both."""
    assert properties(cliqued(root, override)) == {"ua-gpu-a": of_a, "ua-gpu-b": of_a[-1:]}


def test_gpus_of_one_switch_with_two_numbers_get_the_lower() -> None:
    given = [device(f"ua-gpu-{name}", frontend(WRONG.format("unsigned", n))) for name, n in (("a", 6), ("b", 5))]
    xml = cliqued(PREFIXED, f"<q:override>{''.join(given)}</q:override>")
    assert properties(xml) == {"ua-gpu-a": [(*CLIQUE[:2], "5")], "ua-gpu-b": [(*CLIQUE[:2], "5")]}


def test_another_devices_properties_stay() -> None:
    xml = cliqued(PREFIXED, f"<q:override>{device('ua-disk', frontend(OTHER))}</q:override>")
    assert properties(xml) == {
        "ua-disk": [("x-pci-sub-device-id", "unsigned", "7")],
        "ua-gpu-a": [CLIQUE],
        "ua-gpu-b": [CLIQUE],
    }


@pytest.mark.parametrize("quote", ["'", '"'])
def test_an_override_is_written_with_the_quotes_of_the_root(quote: str) -> None:
    root = f"<domain type={quote}kvm{quote}>"
    xml = cliqued(root, "")
    assert f"<qemu:override xmlns:qemu={quote}{URI}{quote}><qemu:device alias={quote}ua-gpu-a{quote}>" in xml


@pytest.mark.parametrize("ids", [("0", "1"), ("1", "0"), (None, None)])
def test_distances_go_by_the_ids_of_cells(ids: tuple[str | None, str | None]) -> None:
    """The first element is cell 1 where its id says so; without ids a cell's place is its number."""
    left = iter(enumerate(ids))

    def renumbered(_: re.Match[str]) -> str:
        place, number = next(left)
        return f'<cell name="{place}"' + (f' id="{number}"' if number is not None else "")

    xml = re.sub(r'<cell id="\d"', renumbered, DOMAIN)
    root = etree.fromstring(run(xml, distances="host").encode())
    found = {
        cell.get("name"): [(s.get("id"), s.get("value")) for s in cell.iterfind("distances/sibling")]
        for cell in root.iterfind("cpu/numa/cell")
    }
    near, far = [("0", "10"), ("1", "21")], [("0", "21"), ("1", "10")]
    assert found == ({"0": far, "1": near} if ids[0] == "1" else {"0": near, "1": far})


def test_distances_are_of_cells_alone() -> None:
    """libvirt has <interconnects> after them."""
    latency = '<latency initiator="0" target="0" type="access" value="5"/>'
    xml = run(DOMAIN.replace("</numa>", f"<interconnects>{latency}</interconnects></numa>"), distances="host")
    assert [cell.get("id") for cell in etree.fromstring(xml.encode()).iterfind(".//distances/..")] == ["0", "1"]


def test_address_bits_that_are_said_twice_are_said_once() -> None:
    """A BAR of 2 TiB ends at 4 TiB, which are 42 bits; libvirt would read the first."""
    bars = {"bars": [{"index": 0, "size": 1 << 41, "flags": "0x14220c"}]}
    host = hosts.host({0: "0-7", 1: "8-15"}, {"0000:9a:00.0": 1}, **{"0000_9a_00_0": bars})
    said = '<maxphysaddr mode="emulate" bits="39"/><maxphysaddr mode="passthrough"/>'
    xml = run(DOMAIN.replace("<cpu>", f"<cpu>{said}"), host, mmio="apply")
    assert [dict(e.items()) for e in etree.fromstring(xml.encode()).iterfind("cpu/maxphysaddr")] == [
        {"mode": "emulate", "bits": "42"}
    ]


@pytest.mark.parametrize(("bus", "hangs"), [(0, False), (None, True)])
def test_ports_of_devices_on_bus_0_itself_take_no_window(bus: int | None, hangs: bool) -> None:
    """SeaBIOS gives 4 KiB to a bridge; fifteen devices on the root bus (KubeVirt's placePCIDevicesOnRootComplex) have none."""
    bdfs = [f"0000:{0x20 + number:02x}:00.0" for number in range(15)]
    bars = {"bars": [{"index": 5, "size": 128, "flags": "0x40101"}]}
    host = hosts.host(
        {0: "0-7"}, dict.fromkeys(bdfs, 0), **{bdf.replace(":", "_").replace(".", "_"): bars for bdf in bdfs}
    )
    at = '<address type="pci" domain="0" bus="0" slot="{:#x}" function="0"></address>'
    devices = [
        hostdev(bdf, f"ua-gpu-{number}", at.format(number + 2) if bus == 0 else "") for number, bdf in enumerate(bdfs)
    ]
    result = transform(domain({0: 0}, devices).encode(), Options(), host)
    assert ("io-space" in {finding.code for finding in result.report.findings}) == hangs
    refused = transform(domain({0: 0}, devices).encode(), Options(policy="restricted"), host).refusal
    if hangs:
        assert refused is not None
        assert refused.message.startswith("policy restricted: the guest will hang at boot: 15 passthrough devices")
        assert refused.hint is not None
        assert refused.hint.startswith("boot the VM with UEFI")
