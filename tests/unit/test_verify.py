"""Every way that an output may differ from what was planned is noticed: good outputs, edited by hand in one place."""

from __future__ import annotations

import pytest

from pcinuma.domain_xml import QEMU_URI, load
from pcinuma.model import Options
from pcinuma.pipeline import Result, transform
from pcinuma.verify import verify
from tests.support import hosts
from tests.support.domains import domain, hostdev

BAR = {"bars": [{"index": 0, "size": 1 << 40, "flags": "0x14220c"}], "vendor": "0x10de", "class": "0x030200"}
BELOW = {**BAR, "bridges": ["0000:90:01.0", "0000:91:00.0"]}
HOST = hosts.host(
    {0: "0-7", 1: "8-15"},
    {"0000:1a:00.0": 0, "0000:1a:00.1": 0, "0000:9a:00.0": 1, "0000:9b:00.0": 1},
    **{
        "0000_9a_00_0": {**BELOW, "bridges": [*BELOW["bridges"], "0000:92:00.0"]},
        "0000_9b_00_0": {**BELOW, "bridges": [*BELOW["bridges"], "0000:92:01.0"]},
    },
)
NAMES = {"0000:1a:00.0": "ua-gpu-a", "0000:1a:00.1": "ua-gpu-b", "0000:9a:00.0": "ua-gpu-c", "0000:9b:00.0": "ua-gpu-d"}
BEFORE = domain({0: 0, 1: 1}, [hostdev(bdf, alias) for bdf, alias in NAMES.items()])
ALL = Options(mmio="apply", distances="host", gpudirect_clique="by-switch", group_by="switch")


def output(options: Options = Options(), before: str = BEFORE) -> Result:
    result = transform(before.encode(), options, HOST)
    assert result.report.outcome == "changed", result.refusal
    return result


def found(text: str, options: Options = Options(), before: str = BEFORE) -> dict[str, str]:
    """What verify says of ``text`` as the output: messages by code."""
    plan = output(options, before).report.plan
    problems = verify(load(before.encode()), load(text.encode()), plan)
    assert {problem.severity for problem in problems} <= {"error"}
    return {problem.code: problem.message for problem in problems}


def edited(old: str, new: str, options: Options = Options()) -> str:
    text = output(options).xml.decode()
    assert text.count(old) == 1, old
    return text.replace(old, new)


@pytest.mark.parametrize("options", [Options(), ALL, Options(group_by="root-complex")])
def test_what_came_out_is_as_planned(options: Options) -> None:
    assert found(output(options).xml.decode(), options) == {}


# cell 0: expander 1, port 2 (gpu a and b); cell 1: expander 3, ports 4 (c) and 5 (d); busNr 251 and 253
@pytest.mark.parametrize(
    ("old", "new", "code", "message"),
    [
        ('busNr="251"', 'busNr="250"', "plan-missed", "ua-pcinuma-cell0 has index, busNr and node ('1', '250', '0')"),
        ("<node>1</node>", "<node>0</node>", "plan-missed", "ua-pcinuma-cell1 has index, busNr and node"),
        ("<node>1</node>", "", "expander-node", "names no cell"),
        ("<node>1</node>", "<node>1</node> ", "", ""),
        ('name="ua-pcinuma-cell1"', 'name="ua-pcinuma-cell7"', "not-planned", "ua-pcinuma-cell7 is not planned"),
        ('name="ua-pcinuma-cell1"', 'name="ua-pcinuma-cell7"', "plan-missed", "ua-pcinuma-cell1 is missing"),
        (
            'bus="0x03" slot="0x01"',
            'bus="0x03" slot="0x02"',
            "plan-missed",
            "ua-pcinuma-0000-9b-00-0 is at (0, 3, 2, 0)",
        ),
        ('bus="0x03" slot="0x01"', 'bus="3" slot="01"', "", ""),
        (
            'index="5" model="pcie-root-port"',
            'index="5" model="dmi-to-pci-bridge"',
            "plan-missed",
            "is a dmi-to-pci-bridge",
        ),
        ('bus="0x05" slot="0x00"', 'bus="0x05" slot="0x03"', "address-range", "slot 0 only"),
        ('bus="0x05" slot="0x00"', 'bus="0x05" slot="0x03"', "plan-missed", "0000:9b:00.0 is not on"),
        (
            '<address type="pci" domain="0x0000" bus="0x05" slot="0x00" function="0x0"/>',
            "",
            "plan-missed",
            "0000:9b:00.0 is not on",
        ),
        ('function="0x0" multifunction="on"', 'function="0x0"', "plan-missed", "0000:1a:00.0 is not multifunction"),
        ('index="5"', 'index="6"', "plan-missed", "ua-pcinuma-0000-9b-00-0 has index 6"),
        ('bus="0x05" slot="0x00"', 'slot="0x00"', "plan-missed", "0000:9b:00.0 is not on"),
    ],
)
def test_what_differs_from_the_plan(old: str, new: str, code: str, message: str) -> None:
    said = found(edited(old, new))
    if code:
        assert message in said[code]
    else:
        assert said == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<name>ns_vm</name>", "<name>other</name>"),
        ('type="kvm"', 'type="qemu"'),
        ("<acpi></acpi>", "<acpi></acpi><apic></apic>"),
        ("<acpi></acpi>", ""),
        ('<memballoon model="virtio-non-transitional"></memballoon>', ""),
        ('<memballoon model="virtio-non-transitional">', '<memballoon model="virtio">'),
        ("/dev/urandom", "/dev/random"),
        ('name="ua-gpu-d"', 'name="ua-gpu-z"'),
        ('bus="0x9b"', 'bus="0x9c"'),
        ('cpus="2,3"', 'cpus="3"'),
        ("<devices>", '<devices a="b">'),
        ('<controller type="usb" index="0" model="none">', '<!-- --><controller type="usb" index="0" model="none">'),
        ("</devices>", '<rng model="virtio"></rng></devices>'),
        ('index="0" model="none"', 'index="0" model="qemu-xhci"'),
        ("</domain>", "<metadata></metadata></domain>"),
        ("</vcpu>", "</vcpu>text"),
        ("</devices>", "text</devices>"),
        ("<numa>", '<maxphysaddr mode="emulate" bits="42"/><numa>'),
        ('<cell id="1"', '<cell id="9"><distances><sibling id="0" value="10"/></distances></cell><cell id="1"'),
        (
            'id="1" cpus="2,3" memory="1073741824" unit="b">',
            'id="1" cpus="2,3" memory="1073741824" unit="b"><distances/>',
        ),
        ("</domain>", f'<override xmlns="{QEMU_URI}"/></domain>'),
    ],
)
def test_anything_else_that_changed(old: str, new: str) -> None:
    assert "other-change" in found(edited(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (' managed="no"', ' managed="yes"'),
        (' managed="no"', ""),
        (' mode="subsystem"', ' mode="subsystem" other="a"'),
        ("<source>", "<source>text"),
        ("<source>", '<source mode="subsystem">'),
        ("<source>", "text<source>"),
        ('name="ua-gpu-b"', 'name="ua-gpu-x"'),
        ("</hostdev>", "<rom/></hostdev>"),
    ],
)
def test_what_else_changed_in_a_device_that_moved(old: str, new: str) -> None:
    """Its own address and the mode spelled out are all that may; the address stands before the alias here."""
    at = '<address type="pci" domain="0" bus="0" slot="0x09" function="0"></address>'
    options, before = Options(addressed="move"), domain({0: 0}, [hostdev("0000:1a:00.0", "ua-gpu-b", at)])
    good = output(options, before).xml.decode()
    assert found(good, options, before) == {}
    head, device, tail = good.partition("<hostdev")
    assert old in tail
    assert "other-change" in found(head + device + tail.replace(old, new, 1), options, before)


def test_what_changed_is_told() -> None:
    changed = found(edited("<name>ns_vm</name>", "<name>other</name>"))["other-change"]
    assert changed.startswith("something that was not planned has changed: ")
    assert "<name>ns_vm</name>" in changed
    # the root, seven parts and what <devices> says of itself, four devices of the guest's own and four passed through
    more = found(edited("</domain>", "<metadata></metadata></domain>"))["other-change"]
    assert more == "the domain had 17 parts besides pcinuma's, now 18"


def test_a_change_behind_properties_that_were_overridden_is_noticed() -> None:
    before = BEFORE.replace("<name>", f'<override xmlns="{QEMU_URI}"/><name>')
    good = output(ALL, before).xml.decode()
    assert found(good, ALL, before) == {}
    assert "other-change" in found(good.replace("<name>ns_vm", "<name>other"), ALL, before)


def test_a_device_that_was_not_to_move_keeps_its_address() -> None:
    """Address and mode of placed devices alone may change."""
    stays = hostdev(
        "0000:ff:00.0", "ua-x", '<address type="pci" domain="0" bus="0" slot="0x09" function="0"></address>'
    )
    before = domain({0: 0, 1: 1}, [hostdev("0000:1a:00.0", "ua-gpu-a"), stays])
    good = output(before=before).xml.decode()
    assert found(good, before=before) == {}
    assert "other-change" in found(good.replace('slot="0x09"', 'slot="0x0a"'), before=before)
    at = good.index("0xff")
    moded = good[:at].rpartition('managed="no"')
    assert "other-change" in found(f'{moded[0]}managed="no" mode="subsystem"{moded[2]}{good[at:]}', before=before)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('bits="42"', 'bits="43"', "maxphysaddr is"),
        ('mode="emulate"', 'mode="passthrough"', "maxphysaddr is"),
        ("</cpu>", '<maxphysaddr mode="emulate" bits="42"/></cpu>', "maxphysaddr is"),
        ('<distances><sibling id="0" value="10"/>', "<distances>", "cell 0 has the distances"),
        ('<sibling id="1" value="10"/>', '<sibling id="1" value="11"/>', "cell 1 has the distances"),
        ('alias="ua-gpu-c"', 'alias="ua-gpu-a"', "the properties in qemu:override are not the planned ones"),
    ],
)
def test_what_was_to_be_tuned(old: str, new: str, message: str) -> None:
    # two BARs of 1 TiB above 6 GiB end at 3 TiB: 42 bits
    assert found(edited(old, new, ALL), ALL)["plan-missed"].startswith(message)


def test_what_is_gone_as_a_whole() -> None:
    head, _, tail = output(ALL).xml.decode().partition("<devices>")
    without_devices = head + tail.partition("</devices>")[2]
    messages = [
        f.message for f in verify(load(BEFORE.encode()), load(without_devices.encode()), output(ALL).report.plan)
    ]
    assert "controller ua-pcinuma-cell0 is missing" in messages
    assert "0000:1a:00.0 is not on ua-pcinuma-0000-1a-00-0" in messages
    head, _, tail = output(ALL).xml.decode().partition("<cpu>")
    assert found(head + tail.partition("</cpu>")[2], ALL)["plan-missed"] == "maxphysaddr is []"


def test_a_cell_too_many_beside_distances() -> None:
    assert "other-change" in found(edited('<cell id="1"', '<cell id="9"></cell><cell id="1"', ALL), ALL)


def test_distances_beside_a_topology_are_looked_at() -> None:
    before = BEFORE.replace("<cpu>", '<cpu><topology sockets="1" cores="4" threads="1"/>')
    good = output(ALL, before).xml.decode()
    assert found(good, ALL, before) == {}
    bad = good.replace('<sibling id="1" value="10"/>', '<sibling id="1" value="11"/>')
    assert "cell 1 has the distances" in found(bad, ALL, before)["plan-missed"]


@pytest.mark.parametrize(("old", "new"), [('type="unsigned"', 'type="string"'), ('value="0"', 'value="1"')])
def test_a_property_of_another_type_or_value(old: str, new: str) -> None:
    head, alias, tail = output(ALL).xml.decode().partition('alias="ua-gpu-c"')
    assert old in tail
    assert "plan-missed" in found(head + alias + tail.replace(old, new, 1), ALL)


def test_what_was_wrong_before_is_not_ours_to_refuse() -> None:
    """Two devices at one address, without aliases: they are told by their lines, which our insertions move."""
    at = '<address type="pci" domain="0" bus="0" slot="0x09" function="0"/>'
    sounds = f'<sound model="ich9">{at}</sound><watchdog model="i6300esb">{at}</watchdog>\n'
    wrong = domain({0: 0, 1: 1}, [hostdev("0000:1a:00.0", "ua-gpu-a")], extra=sounds)
    assert found(output(before=wrong).xml.decode(), before=wrong) == {}
    # another error of the same kind is not that one
    more = output(before=wrong).xml.decode().replace("</devices>", f'<sound model="es1370">{at}</sound></devices>')
    assert "address-taken" in found(more, before=wrong)


def test_a_slot_that_had_no_function_0_before_is_none_of_ours() -> None:
    """Two functions without a first one: the error is of the slot, whichever of the two stays."""
    port = '<controller type="pci" index="1" model="pcie-root-port"></controller>'
    at = '<address type="pci" domain="0" bus="1" slot="0" function="{}"></address>'
    devices = [
        hostdev("0000:1a:00.0", "ua-gpu-a", at.format(7)),
        hostdev("0000:9a:00.0", "ua-gpu-c", at.format(1)).replace('bus="0x9a"', 'bus="0x77"'),  # the host has none such
    ]
    wrong = domain({0: 0, 1: 1}, devices, extra=port)
    result = output(Options(addressed="move"), before=wrong)
    assert [(p.device.label, p.kind) for p in result.report.plan.placements] == [
        ("0000:1a:00.0", "placed"), ("0000:77:00.0", "left"),
    ]  # fmt: skip


def test_bus_0_was_full_before_and_must_not_come_to_need_more() -> None:
    taken = "".join(
        f'<sound model="ich9"><address type="pci" domain="0" bus="0" slot="{slot:#x}" function="0"/></sound>'
        for slot in range(1, 0x1F)
    )
    before = domain({0: 0, 1: 1}, [hostdev("0000:1a:00.0", "ua-gpu-a")], extra=taken)
    free = domain({0: 0, 1: 1}, [hostdev("0000:1a:00.0", "ua-gpu-a")])
    plan = output(before=free).report.plan
    after = output(before=free).xml.decode().replace("</devices>", f"{taken}</devices>")
    codes = {finding.code for finding in verify(load(before.encode()), load(after.encode()), plan)}
    assert "root-bus-slots" in codes


def test_what_is_wrong_beside_a_missing_controller_is_noticed_as_well() -> None:
    """An expander and a port are missing, each before another of its kind that is wrong."""
    text = edited("ua-pcinuma-cell0", "ua-pcinuma-cell7").replace('busNr="253"', 'busNr="252"')
    text = text.replace("ua-pcinuma-0000-9a-00-0", "ua-pcinuma-x").replace(
        'bus="0x03" slot="0x01"', 'bus="0x03" slot="0x02"'
    )
    messages = [f.message for f in verify(load(BEFORE.encode()), load(text.encode()), output().report.plan)]
    assert "controller ua-pcinuma-cell0 is missing" in messages
    assert "controller ua-pcinuma-0000-9a-00-0 is missing" in messages
    assert any(message.startswith("ua-pcinuma-cell1 has index, busNr and node") for message in messages)
    assert any(message.startswith("ua-pcinuma-0000-9b-00-0 is at") for message in messages)
