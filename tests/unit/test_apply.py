"""What is there already is changed where it is wrong, and nowhere else: not a character of what is right."""

from __future__ import annotations

import pytest

from pcinuma.model import Options
from pcinuma.pipeline import transform
from tests.support import hosts
from tests.support.domains import domain, hostdev

HOST = hosts.host({0: "0-7"}, {"0000:1a:00.0": 0, "0000:1b:00.1": 0})
FREE = domain({0: 0}, [hostdev("0000:1a:00.0", "ua-a")])


def run(xml: str, options: Options = Options()) -> str:
    return transform(xml.encode(), options, HOST).xml.decode()


def port_edited(old: str, new: str) -> str:
    """Our output with its port, the controller 2 on the expander 1, written otherwise."""
    head, port, tail = run(FREE).partition('<controller type="pci" index="2"')
    assert tail.count(old) >= 1, tail
    return head + port + tail.replace(old, new, 1)


PORT_AT = 'bus="0x01" slot="0x00" function="0x0"'


@pytest.mark.parametrize(
    "written", ['bus="1" slot="0" function="0"', 'function="00" slot="0x0" bus="01"', 'bus="0x01"']
)
def test_a_port_that_is_where_it_should_be_stays_as_it_is_written(written: str) -> None:
    edited = port_edited(PORT_AT, written)
    assert run(edited) == edited


@pytest.mark.parametrize(
    ("edited", "mended"),
    [
        ('bus="1" slot="3" function="0"', 'bus="1" slot="0x00" function="0"'),
        ('bus="1" slot="0" function="4"', 'bus="1" slot="0" function="0x0"'),
        (f'{PORT_AT} multifunction="on"', f'{PORT_AT} multifunction="off"'),
    ],
)
def test_a_port_that_was_moved_or_made_multifunction_is_put_right_in_place(edited: str, mended: str) -> None:
    assert run(port_edited(PORT_AT, edited)) == port_edited(PORT_AT, mended)


@pytest.mark.parametrize(
    ("edited", "mended"),
    [
        ('<target hotplug="on"/>', '<target hotplug="off"/>'),
        ("<target hotplug='on' chassis='2'/>", "<target hotplug='off' chassis='2'/>"),
        ("<target chassis='2'/>", "<target chassis='2' hotplug='off'/>"),
        ("<target hotplug='off' chassis='2'/>", "<target hotplug='off' chassis='2'/>"),
    ],
)
def test_a_port_loses_its_hotplug(edited: str, mended: str) -> None:
    target = '<target hotplug="off"/>'
    assert run(port_edited(target, edited)) == port_edited(target, mended)


@pytest.mark.parametrize(
    ("bus_nr", "stays"),
    [("254", True), ("0xfe", True), ("0376", True), ("253", False)],
)
def test_an_expander_keeps_the_number_it_has_in_the_form_it_has(bus_nr: str, stays: bool) -> None:
    edited = run(FREE).replace('busNr="254"', f'busNr="{bus_nr}"')
    assert run(edited) == (edited if stays else run(FREE))


def test_an_expander_of_another_cell_gets_its_own_again() -> None:
    edited = run(FREE).replace("<node>0</node>", "<node> 0\n</node>")
    assert run(edited) == edited
    two = domain({0: 1, 1: 0}, [hostdev("0000:1a:00.0", "ua-a")])
    made = run(two)
    assert run(made.replace("<node>1</node>", "<node>0</node>")) == made


def test_a_device_that_goes_to_a_port_alone_is_multifunction_no_more() -> None:
    """Function 1 without function 0: at function 0 of a slot of its own, where "on" would say that others are there."""
    was = '<address type="pci" domain="0x0000" bus="0x00" slot="0x05" function="0x1" multifunction="on"/>'
    xml = domain({0: 0}, [hostdev("0000:1b:00.1", "ua-b", was)])
    assert run(xml, Options(addressed="move")).count(
        '<address type="pci" domain="0x0000" bus="0x02" slot="0x00" function="0x0" multifunction="off"/>'
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('bus="7"', 'bus="0x02" type="pci"'),
        ('type="" bus="7"', 'type="pci" bus="0x02"'),
        ('type="pci" bus="7" slot="0"', 'type="pci" bus="0x02" slot="0"'),
    ],
)
def test_an_address_becomes_one_on_pci(written: str, expected: str) -> None:
    """KubeVirt's structs write an empty type where there was none."""
    edited = run(FREE).replace('type="pci" domain="0x0000" bus="0x02" slot="0x00" function="0x0"', written)
    assert edited != run(FREE)
    assert f"<address {expected}/>" in run(edited)


def test_a_device_that_has_no_place_any_more_loses_the_address_that_it_had_there() -> None:
    """Its node is unknown on the next start: what we wrote goes, all but the default mode spelled out."""
    two = domain({0: 0}, [hostdev("0000:1a:00.0", "ua-a"), hostdev("0000:1b:00.1", "ua-b")])
    unknown = hosts.host({0: "0-7"}, {"0000:1a:00.0": -1, "0000:1b:00.1": -1})
    again = transform(run(two).encode(), Options(), unknown).xml.decode()
    assert again == two.replace('managed="no"', 'managed="no" mode="subsystem"')
