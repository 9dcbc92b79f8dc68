"""A set of an earlier run in a domain whose bus numbers are all but used up: what comes out, a real libvirt takes."""

from __future__ import annotations

import re

import pytest

from pcinuma.check import check
from pcinuma.host_file import HostFile
from pcinuma.model import Options
from pcinuma.pipeline import transform
from tests.support import hosts
from tests.support.domains import domain, hostdev, layout
from tests.support.libvirt import define_and_dump

pytestmark = pytest.mark.libvirt

RNG = '<rng model="virtio"><backend model="random">/dev/urandom</backend></rng>'


def bdf(number: int) -> str:
    return f"0000:{0x20 + number // 8:02x}:{number % 8:02x}.0"


def host(count: int, *, unknown: bool = False) -> HostFile:
    """Devices on node 0 and 1 in turn."""
    return hosts.host({0: "0-7", 1: "8-15"}, {bdf(n): -1 if unknown else n % 2 for n in range(count)})


@pytest.fixture(scope="module")
def defined() -> str:
    """200 devices behind 202 controllers of ours, indexes 1 to 202, and libvirt's own ports from 203 on."""
    xml = domain({0: 0, 1: 1}, [hostdev(bdf(n), f"ua-d{n}") for n in range(200)])
    return define_and_dump(transform(xml.encode(), Options(), host(200)).xml.decode())


def joined(xml: str, devices: int, others: int = 0) -> str:
    """The domain with so many more devices, and others."""
    more = "".join(hostdev(bdf(n), f"ua-d{n}") for n in range(200, 200 + devices))
    return xml.replace("</devices>", f"{more}{RNG * others}</devices>")


def errors(xml: str, of: HostFile) -> list[str]:
    return [f.code for f in check(xml.encode(), Options(), of) if f.severity == "error"]


def test_the_set_that_replaces_it_takes_its_indexes(defined: str) -> None:
    """Left out, libvirt would make root ports of the 202, and there are no others: 203 + 232 is above 255."""
    assert max(map(int, re.findall(r"type='pci' index='(\d+)'", defined))) in range(204, 208)
    result = transform(joined(defined, 28).encode(), Options(policy="restricted"), host(228))
    assert result.refusal is None, result.refusal
    controllers, devices = layout(result.xml)
    assert (len(controllers), len([at for at in devices.values() if at is not None])) == (230, 228)
    again = define_and_dump(result.xml.decode())
    assert layout(again) == layout(result.xml)
    assert errors(again, host(228)) == []
    assert transform(again.encode(), Options(policy="restricted"), host(228)).xml == again.encode()


def test_where_there_is_room_it_takes_indexes_above_all_others() -> None:
    """As ever: the second set of a small domain begins at the highest index in use + 1."""
    three = hosts.host({0: "0-7"}, dict.fromkeys((bdf(0), bdf(1), bdf(2)), 0))
    small = domain({0: 0}, [hostdev(bdf(0), "ua-d0"), hostdev(bdf(2), "ua-d2")])
    first = define_and_dump(transform(small.encode(), Options(), three).xml.decode())
    highest = max(map(int, re.findall(r"type='pci' index='(\d+)'", first)))
    more = first.replace("</devices>", f"{hostdev(bdf(1), 'ua-d1')}</devices>")
    controllers, _ = layout(transform(more.encode(), Options(), three).xml)
    assert sorted(int(str(found[0])) for found in controllers.values()) == list(range(highest + 1, highest + 5))


def test_no_room_for_the_newcomers_costs_the_others_nothing(defined: str) -> None:
    xml = joined(defined, 40)
    result = transform(xml.encode(), Options(), host(240))
    assert (result.report.outcome, result.xml) == ("unchanged", xml.encode())
    placements = [(p.kind, p.code) for p in result.report.plan.placements]
    assert placements == [("placed", None)] * 200 + [("left", "bus-numbers")] * 40
    _, before = layout(defined)
    _, after = layout(define_and_dump(xml))
    assert {name: at for name, at in after.items() if name in before} == before
    refused = transform(xml.encode(), Options(policy="restricted"), host(240)).refusal
    assert refused is not None
    assert "40 of 240 devices do not fit a cell: the guest would need 262 PCI bus numbers of 256" in refused.message


def test_a_set_that_took_the_room_of_ports_to_come_stays(defined: str) -> None:
    """202 of ours and 4 of libvirt's leave 54 numbers with bus 0; 40 others take more than is kept for hotplug."""
    again = define_and_dump(joined(defined, 0, others=40))
    result = transform(again.encode(), Options(policy="restricted"), host(200))
    assert (result.report.outcome, result.xml) == ("unchanged", again.encode())
    assert "stale-set" not in {f.code for f in check(again.encode(), Options(), host(200))}


def test_what_libvirt_cannot_hold_is_refused_with_the_way_out(defined: str) -> None:
    result = transform(joined(defined, 60).encode(), Options(), host(260))
    assert result.refusal is not None
    assert "the guest would need 282 PCI bus numbers of 256" in str(result.refusal.hint)
    assert "take every <controller type='pci'>" in str(result.refusal.hint)


def test_the_way_out_is_one() -> None:
    """192 devices behind 24 expanders, whose nodes are no longer known, and 16 others have come: the set cannot stay, and
    bus 0 has no slots for the ports that libvirt would make of its 216 indexes. For 192 devices it has."""
    bdfs = [bdf(n) for n in range(192)]
    complexes = {name.replace(":", "_").replace(".", "_"): {"rootComplex": f"pci0000:{name[5:7]}"} for name in bdfs}
    known = hosts.host({0: "0-7"}, dict.fromkeys(bdfs, 0), **complexes)
    unknown = hosts.host({0: "0-7"}, dict.fromkeys(bdfs, -1), **complexes)
    options = Options(group_by="root-complex", policy="restricted")
    xml = domain({0: 0}, [hostdev(name, f"ua-d{n}") for n, name in enumerate(bdfs)], extra=RNG * 20)
    made = transform(xml.encode(), options, known)
    assert made.refusal is None, made.refusal
    defined = define_and_dump(made.xml.decode().replace("</devices>", f"{RNG * 16}</devices>"))
    result = transform(defined.encode(), Options(), unknown)
    assert result.refusal is not None
    assert "take every <controller type='pci'>" in str(result.refusal.hint)
    bare = re.sub(r"<controller type='pci'[^>]*?(?:/>|>.*?</controller>)", "", defined, flags=re.S)
    bare = re.sub(r"<address type='pci'[^>]*?/>", "", bare)  # the guest's: a source's has no type in libvirt's dump
    assert transform(bare.encode(), Options(), unknown).xml == bare.encode()
    assert errors(define_and_dump(bare), unknown) == []
