"""Domains that a person edited, or that libvirt filled in odd ways: what comes out, libvirt must take as it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from lxml import etree

from pcinuma.check import check
from pcinuma.errors import BadInput
from pcinuma.model import Finding, Options
from pcinuma.pipeline import Result, transform
from tests.support import hosts
from tests.support.domains import domain, hostdev, layout
from tests.support.libvirt import LibvirtRejected, define_and_dump

HOST = hosts.host({0: "0-7", 1: "8-15"}, {"0000:1a:00.0": 0, "0000:3d:00.0": 0, "0000:9a:00.0": 1})
FREE = domain({0: 0, 1: 1}, [hostdev("0000:1a:00.0", "ua-a"), hostdev("0000:9a:00.0", "ua-b")])
PLACED = {"ua-a": (2, 0, 0), "ua-b": (4, 0, 0)}


def run(xml: str, options: Options = Options()) -> Result:
    return transform(xml.encode(), options, HOST)


def base() -> str:
    """Our own output: 1 = expander of cell 0, 2 = its port, 3 = expander of cell 1, 4 = its port."""
    return run(FREE).xml.decode()


def addresses(xml: str | bytes) -> dict[str, tuple[int, ...]]:
    root = etree.fromstring(xml.encode() if isinstance(xml, str) else xml)
    found = {}
    for device in root.iterfind("devices/hostdev"):
        for alias in device.iterfind("alias"):
            for at in device.iterfind("address"):
                found[alias.get("name", "")] = tuple(int(at.get(p, "0"), 0) for p in ("bus", "slot", "function"))
    return found


def holds(result: Result) -> None:
    """libvirt takes the output, leaves our devices where they are, and our second look changes nothing."""
    assert result.report.outcome == "changed", result.refusal
    defined = define_and_dump(result.xml.decode())
    ours = addresses(result.xml)
    assert {name: at for name, at in addresses(defined).items() if name in ours} == ours
    assert errors(result.xml.decode()) == []
    assert errors(defined) == []
    assert run(result.xml.decode()).xml == result.xml


def errors(xml: str, options: Options = Options()) -> Sequence[str]:
    return [f"{f.code}: {f.message}" for f in findings(xml, options) if f.severity == "error"]


def findings(xml: str, options: Options = Options()) -> list[Finding]:
    return check(xml.encode(), options, HOST)


def with_extra(xml: str, extra: str) -> str:
    return xml.replace("\t</devices>", f"\t\t{extra}\n\t</devices>", 1)


@pytest.mark.libvirt
def test_a_strange_port_on_our_expander_goes_with_it() -> None:
    """libvirt itself puts ports there when bus 0 is full; without the expander they could not stay."""
    port = '<controller type="pci" index="20" model="pcie-root-port"><address type="pci" bus="0x01" slot="0x05"/></controller>'
    result = run(with_extra(base(), port))
    holds(result)
    assert addresses(result.xml) == PLACED


@pytest.mark.libvirt
@pytest.mark.parametrize("bdf", ["0000-1a-00-0", "0000-9a-00-0"])
def test_a_port_whose_alias_was_taken_away(bdf: str) -> None:
    edited = base().replace(f'\n\t\t\t<alias name="ua-pcinuma-{bdf}"/>', "")
    assert edited != base()
    result = run(edited)
    holds(result)
    assert addresses(result.xml) == PLACED


@pytest.mark.libvirt
@pytest.mark.parametrize("name", ["switch-0000-11-00-0", "to-switch-0000-11-00-0", "0000-13-00-0"])
def test_a_part_of_a_switch_whose_alias_was_taken_away(name: str) -> None:
    """It is known by where it sits; the set is made anew, and nothing is left hanging on what has gone."""
    above = {
        "0000_13_00_0": {"bridges": ["0000:10:01.0", "0000:11:00.0", "0000:12:00.0"]},
        "0000_14_00_0": {"bridges": ["0000:10:01.0", "0000:11:00.0", "0000:12:01.0"]},
    }
    host = hosts.host({0: "0-7"}, {"0000:13:00.0": 0, "0000:14:00.0": 0}, **above)
    devices = [hostdev("0000:13:00.0", "ua-a"), hostdev("0000:14:00.0", "ua-b")]
    options = Options(group_by="switch", policy="restricted")
    made = transform(domain({0: 0}, devices).encode(), options, host).xml
    edited = made.replace(f'\n\t\t\t<alias name="ua-pcinuma-{name}"/>'.encode(), b"")
    assert edited != made
    result = transform(edited, options, host)
    assert result.refusal is None, result.refusal
    assert layout(define_and_dump(result.xml.decode())) == layout(made)


@pytest.mark.parametrize("given", ['type="scsi"', 'type="nonsense"', 'mode="capabilities" type="pci"'])
def test_a_hostdev_of_another_kind_is_not_read(given: str) -> None:
    """Its source is libvirt's business, numbers that are none included."""
    other = f'<hostdev {given}><source><address type="pci" domain="31x4095" bus="zz" slot="?"/></source></hostdev>'
    result = run(with_extra(FREE, other))
    assert result.report.outcome == "changed", result.refusal
    assert other in result.xml.decode()


def test_stray_text_between_elements_stays_and_refuses_nothing() -> None:
    xml = (
        FREE.replace("</hostdev>", "</hostdev>stray1")
        .replace("<source>", "stray2<source>")
        .replace("</cell>", "x</cell>y")
    )
    xml = xml.replace("</numatune>", "</numatune>31").replace("<devices>", "<devices>stray3")
    options = Options(distances="host", policy="restricted")
    result = run(xml, options)
    assert result.report.outcome == "changed", result.refusal
    for text in ("stray1", "stray2", "stray3", ">x<", "31"):
        assert result.xml.decode().count(text) == xml.count(text) > 0


def full_bus_0(*, implied: bool) -> str:
    rngs = "".join(
        f'<rng model="virtio"><backend model="random">/dev/urandom</backend><address type="pci" bus="0" slot="{slot}"/></rng>'
        for slot in range(1, 0x1D)
    )
    xml = with_extra(FREE, rngs)
    if implied:
        for explicit in ('\t\t<controller type="usb" index="0" model="none"></controller>\n', "memballoon"):
            start = xml.index(explicit if "controller" in explicit else "\t\t<memballoon")
            xml = xml[:start] + xml[xml.index("\n", start) + 1 :]
    return xml


@pytest.mark.libvirt
def test_a_bus_0_that_what_libvirt_adds_would_overflow_is_left() -> None:
    """28 slots taken, two by the chipset, two expanders: the balloon's and USB's ports would land on our expanders."""
    result = run(full_bus_0(implied=True))
    assert result.report.outcome == "unchanged"
    assert [finding.code for finding in result.report.findings] == ["root-bus-slots"] * 2


def test_check_sees_devices_on_the_wrong_cell() -> None:
    swapped_nodes = base().replace("<node>0</node>", "<node>x</node>").replace("<node>1</node>", "<node>0</node>")
    swapped_nodes = swapped_nodes.replace("<node>x</node>", "<node>1</node>")
    swapped_devices = base().replace('bus="0x02"', 'bus="0xxx"').replace('bus="0x04"', 'bus="0x02"')
    swapped_devices = swapped_devices.replace('bus="0xxx"', 'bus="0x04"')
    assert errors(base()) == []
    for edited in (swapped_nodes, swapped_devices):
        wrong = {f.device for f in findings(edited) if f.code == "foreign-cell" and f.severity == "error"}
        assert wrong == {"0000:1a:00.0", "0000:9a:00.0"}
        assert addresses(run(edited).xml) == PLACED


def test_check_follows_the_options() -> None:
    grouped = run(FREE, Options(group_by="root-complex")).xml.decode()
    assert [f.code for f in findings(grouped, Options(group_by="root-complex"))] == []
    unknown = hosts.host({0: "0-7", 1: "8-15"}, {"0000:1a:00.0": -1, "0000:9a:00.0": 1})
    found = check(FREE.encode(), Options(policy="restricted"), unknown)
    assert [f.severity for f in found if f.code == "numa-unknown"] == ["error"]
    assert [f.code for f in findings(FREE, Options(enabled=False))] == ["disabled"]


@pytest.mark.libvirt
def test_what_was_wrong_before_costs_no_placement() -> None:
    """A balloon alone at function 1, which libvirt takes; the line it stands on moves by what is inserted."""
    odd = FREE.replace(
        '<memballoon model="virtio-non-transitional"></memballoon>',
        '<memballoon model="virtio"><address type="pci" bus="0x00" slot="0x05" function="0x1"/></memballoon>',
    )
    assert odd != FREE
    result = run(odd)
    assert result.report.outcome == "changed", result.refusal
    assert addresses(define_and_dump(result.xml.decode())) == PLACED


@pytest.mark.libvirt
def test_function_0_stays_where_others_need_it() -> None:
    at = '<address type="pci" bus="0x00" slot="0x05" function="0x{}"{}></address>'
    devices = [
        hostdev("0000:1a:00.0", "ua-a", at.format(0, ' multifunction="on"')),
        hostdev("0000:77:00.0", "ua-absent", at.format(1, "")),
        hostdev("0000:9a:00.0", "ua-b"),
    ]
    result = run(domain({0: 0, 1: 1}, devices), Options(addressed="move"))
    assert result.report.outcome == "changed", result.refusal
    placements = {p.device.alias: (p.kind, p.code) for p in result.report.plan.placements}
    assert placements == {
        "ua-a": ("kept", "addressed"),
        "ua-absent": ("left", "device-missing"),
        "ua-b": ("placed", None),
    }
    assert addresses(define_and_dump(result.xml.decode())) == {
        "ua-a": (0, 5, 0),
        "ua-absent": (0, 5, 1),
        "ua-b": (2, 0, 0),
    }


def test_numbers_of_ours_in_another_spelling() -> None:
    edited = base().replace('busNr="252"', 'busNr="0xfc"').replace("<node>1</node>", "")
    assert "0xfc" in edited
    result = run(edited)
    assert result.report.outcome == "changed", result.refusal
    assert addresses(result.xml) == PLACED
    assert b"<node>1</node>" in result.xml


@pytest.mark.libvirt
@pytest.mark.parametrize(
    "written", ['domain="0x0000" bus="0x00" slot="0x00" function="0x0"', 'bus="0x00"', 'domain="0"']
)
def test_an_address_of_zeros_asks_for_one(written: str) -> None:
    """libvirt takes 0000:00:00 for no address (virPCIDeviceAddressIsEmpty)."""
    address = f'<address type="pci" {written}></address>'
    xml = domain({0: 0, 1: 1}, [hostdev("0000:1a:00.0", "ua-a", address), hostdev("0000:9a:00.0", "ua-b", address)])
    result = run(xml, Options(policy="restricted"))
    holds(result)
    assert addresses(result.xml) == PLACED


def test_a_set_without_devices_is_told() -> None:
    root = etree.fromstring(base().encode())
    devices = root.find("devices")
    assert devices is not None
    for device in devices.findall("hostdev"):
        devices.remove(device)
    bare = etree.tostring(root)
    result = transform(bare, Options(), HOST)
    assert result.xml == bare
    assert [f.severity for f in result.report.findings if f.code == "stale-set"] == ["warning"]


@pytest.mark.libvirt
def test_a_device_on_a_users_expander_stays_there() -> None:
    """Its indexes are beyond ours, and libvirt would not have chosen it."""
    extra = (
        '<controller type="pci" index="9" model="pcie-expander-bus"><target busNr="240"><node>1</node></target></controller>'
        '<controller type="pci" index="10" model="pcie-root-port"><address type="pci" bus="0x09" slot="0x00"/></controller>'
        + hostdev("0000:3d:00.0", "ua-own", '<address type="pci" bus="0x0a" slot="0x00"></address>')
    )
    result = run(with_extra(base(), extra))
    placements = {p.device.alias: (p.kind, p.code) for p in result.report.plan.placements}
    assert placements["ua-own"] == ("kept", "foreign-cell")
    assert addresses(define_and_dump(result.xml.decode()))["ua-own"] == (10, 0, 0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('busNr="252"', 'busNr="240"'),
        ('<target busNr="252">', "<target>"),
        ("<node>0</node>", "<node>1</node>"),
        ('<target hotplug="off"/>', '<target hotplug="on"/>'),
        ('<target hotplug="off"/>', '<target chassis="9"/>'),
    ],
)
def test_what_was_changed_on_a_controller_of_ours_is_put_right_in_place(old: str, new: str) -> None:
    """Nothing else changes: neither the index nor what else the element says."""
    good = base()
    assert old in good
    again = run(good.replace(old, new, 1))
    assert again.report.outcome == "changed"
    root, wanted = etree.fromstring(again.xml), etree.fromstring(good.encode())
    for target in root.iterfind("devices/controller/target[@chassis]"):
        assert target.attrib.pop("chassis") == "9"
    assert [etree.tostring(c, method="c14n") for c in root.iterfind("devices/*")] == [
        etree.tostring(c, method="c14n") for c in wanted.iterfind("devices/*")
    ]


@pytest.mark.parametrize(
    ("bdf", "source", "at", "said"),
    [
        ("0000:9a:00.0", 'bus="0x1x"', "unassigned", "bus"),
        ("0000:9a:00.0", 'bus="0x100"', "unassigned", "bus"),
        ("0000:9a:00.0", 'bus=""', "unassigned", "bus"),
        ("0000:1a:00.0", 'bus="0x1a"', "unassigned", "twice"),
    ],
)
def test_what_the_guest_does_not_get_is_read_as_libvirt_reads_it(bdf: str, source: str, at: str, said: str) -> None:
    """Refused by both; and by neither, when the source is another that can be read."""
    left = hostdev(bdf, "ua-b", f'<address type="{at}"/>').replace(f'bus="0x{bdf[5:7]}"', source)
    with pytest.raises(LibvirtRejected):
        define_and_dump(domain({0: 0, 1: 1}, [hostdev("0000:1a:00.0", "ua-a"), left]))
    with pytest.raises(BadInput, match=said):
        run(domain({0: 0, 1: 1}, [hostdev("0000:1a:00.0", "ua-a"), left]))
    fine = hostdev("0000:9a:00.0", "ua-b", f'<address type="{at}"/>')
    holds(run(domain({0: 0, 1: 1}, [hostdev("0000:1a:00.0", "ua-a"), fine])))


def test_a_second_address_does_not_come_to_count() -> None:
    """libvirt reads the first address of a device alone: taken away from a port of ours, the device has none."""
    stale = base().replace('bus="0x1a"', 'bus="0x1b"')  # a device that the host does not have, on our port 2
    own = '<address type="pci" domain="0x0000" bus="0x02" slot="0x00" function="0x0"/>'
    assert own in stale
    twice = stale.replace(own, own + '<address type="pci" domain="0x0000" bus="0x00" slot="0x09" function="0x0"/>')
    assert addresses(define_and_dump(twice))["ua-a"] == (2, 0, 0)
    result = run(twice)
    assert "ua-a" not in addresses(result.xml)
    assert run(result.xml.decode()).xml == result.xml


@pytest.mark.libvirt
@pytest.mark.parametrize(
    "options",
    [Options(), Options(policy="restricted"), Options(mmio="apply", distances="host", gpudirect_clique="by-switch")],
)
@pytest.mark.parametrize(
    ("hung", "model"),
    [
        ('<controller type="pci" model="pcie-to-pci-bridge">{on_2}</controller>', "pcie-to-pci-bridge"),
        # the upstream port is a switch below ours, and goes; what somebody hung elsewhere would be another one then
        ('<controller type="pci" model="pcie-root-port"/>', "pcie-root-port"),
    ],
)
def test_a_controller_without_an_index_does_not_become_another_one(hung: str, model: str, options: Options) -> None:
    """libvirt gives it the lowest index that is free: 5 beside our set of four, 1 where that goes."""
    on_2 = '<address type="pci" domain="0x0000" bus="0x02" slot="0x00" function="0x0"/>'
    moved = base().replace(on_2, "").replace('bus="0x1a"', 'bus="0x3d"')  # another device: our set is stale
    xml = with_extra(moved, f'<controller type="pci" index="0" model="pcie-root"/>{hung.format(on_2=on_2)}')
    by_index = {
        c.get("index"): c.get("model") for c in etree.fromstring(define_and_dump(xml)).iterfind("devices/controller")
    }
    assert by_index["5"] == model
    result = run(xml, options)
    assert result.xml == xml.encode()
    found = {f.device: f for f in result.report.findings if f.code == "index-missing"}
    assert set(found) == {"0000:3d:00.0", "0000:9a:00.0"}
    says = f"{model} has no index: it is controller 5 with pcinuma's, 1 without"
    assert found["0000:3d:00.0"].message == f"0000:3d:00.0 stays where it is: {says}"
    assert found["0000:3d:00.0"].hint == "give every PCI controller its index, as virsh dumpxml shows them"
    assert (result.refusal is not None and says in result.refusal.message) is (options.policy == "restricted")
    written = xml.replace(
        f'<controller type="pci" model="{model}"', f'<controller type="pci" index="5" model="{model}"'
    )
    holds(run(written))


@pytest.mark.libvirt
@pytest.mark.parametrize("other", ["port", "sound", "left"])
@pytest.mark.parametrize("function", [0, 2])
def test_an_alias_of_ours_on_the_first_port_of_a_slot(function: int, other: str) -> None:
    """libvirt puts eight of its root ports into a slot: without function 0 the guest finds none of them."""
    at = '<address type="pci" bus="0x00" slot="0x02" function="{}"{}/>'
    port = '<controller type="pci" index="{}" model="pcie-root-port">{}{}</controller>'
    alias = '<alias name="ua-pcinuma-0000-3d-00-0"/>'
    first = port.format(9, alias, at.format(function, ' multifunction="on"'))
    there = at.format(3, "")
    others = port.format(10, "", at.format(2 - function, ' multifunction="on"')) if function else ""
    others += {
        "port": port.format(11, "", there),
        "sound": f'<sound model="ich9">{there}</sound>',
        "left": hostdev("0000:77:00.0", "ua-left", there),  # the host does not have it
    }[other]
    xml = with_extra(base(), f'<controller type="pci" index="0" model="pcie-root"/>{first}{others}')
    define_and_dump(xml)
    result = run(xml)
    found = {f.code: f for f in result.report.findings}
    if function:
        assert "slot-shared" not in found
        holds(result)
    else:
        assert result.xml == xml.encode()
        says = "others are in the slot 0000:00:02 of pcinuma's pcie-root-port 9, which would go"
        assert found["slot-shared"].message.endswith(f"stays where it is: {says}")
        assert found["slot-shared"].hint == "give that controller another alias, or the others another slot"


@pytest.mark.libvirt
def test_stray_text_around_what_goes_stays_as_well() -> None:
    """Our controllers go from between, and the white space of both sides is one text then."""
    gone = base().replace('bus="0x1a"', 'bus="0x77"').replace('bus="0x9a"', 'bus="0x78"')  # the host has neither
    xml = gone.replace('<controller type="pci" index="1"', 'stray1 <controller type="pci" index="1"')
    xml = xml.replace("<hostdev", "stray2 <hostdev", 1)
    assert xml.count("stray") == 2
    result = run(xml)
    assert result.report.outcome == "changed", result.refusal
    assert b"pcinuma" not in result.xml
    define_and_dump(result.xml.decode())
    assert result.xml.index(b"stray1") < result.xml.index(b"stray2")


@pytest.mark.libvirt
@pytest.mark.parametrize("slot", [1, 4])
def test_an_alias_of_ours_on_a_bridge_with_a_device(slot: int) -> None:
    """Without the bridge its index would be a root port of libvirt's, with slot 0 alone."""
    bridge = '<controller type="pci" index="9" model="pcie-to-pci-bridge"><alias name="ua-pcinuma-0000-3d-00-0"/></controller>'
    sound = f'<sound model="ich6"><address type="pci" bus="0x09" slot="{slot}" function="0x0"/></sound>'
    xml = with_extra(base(), f'<controller type="pci" index="0" model="pcie-root"/>{bridge}{sound}')
    define_and_dump(xml)
    result = run(xml)
    assert result.xml == xml.encode()
    found = {f.code: f for f in result.report.findings}
    says = f"a sound is in slot {slot:#x} of pcinuma's pcie-to-pci-bridge 9, which would go"
    assert found["slot-shared"].message.endswith(f"stays where it is: {says}")


@pytest.mark.libvirt
@pytest.mark.parametrize("group_by", ["numa", "root-complex", "switch"])
def test_another_device_that_has_the_alias_of_our_port_keeps_it(group_by: str) -> None:
    """libvirt refuses an alias that is there twice: ours gets another."""
    disk = '<disk type="file"><source file="/a"/><target dev="sda" bus="sata"/><alias name="ua-pcinuma-0000-1a-00-0"/></disk>'
    xml = with_extra(base(), disk)
    with pytest.raises(LibvirtRejected, match="alias"):
        define_and_dump(xml)
    result = run(xml, Options(group_by=group_by))
    holds(result)
    names = [alias.get("name") for alias in etree.fromstring(result.xml).iterfind("devices/*/alias")]
    assert (names.count("ua-pcinuma-0000-1a-00-0"), names.count("ua-pcinuma-0000-1a-00-0-2")) == (1, 1)


PORT = '<address type="pci" domain="0x0000" bus="0x01" slot="0x00" function="0x0"/>'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('index="2" model="pcie-root-port"', 'index="2" model="pcie-to-pci-bridge"'),
        ('index="1" model="pcie-expander-bus"', 'index="1" model="pcie-root-port"'),
        (PORT, PORT.replace('bus="0x01"', 'bus="0x03"')),
        (PORT, ""),
        ("ua-pcinuma-cell0", "ua-pcinuma-cell9"),
    ],
)
def test_a_set_of_another_shape_is_made_anew(old: str, new: str) -> None:
    """What comes out is what comes of the domain without that set."""
    good = base()
    assert old in good
    again = run(good.replace(old, new, 1))
    assert again.report.outcome == "changed"
    assert outline(again.xml) == outline(good.encode())


def outline(xml: bytes) -> list[bytes]:
    """Our controllers and the devices, without white space."""
    root = etree.fromstring(xml, etree.XMLParser(remove_blank_text=True))
    devices = [d for d in root.iterfind("devices/*") if d.tag in ("controller", "hostdev")]
    return [etree.tostring(device, method="c14n", with_tail=False) for device in devices]
