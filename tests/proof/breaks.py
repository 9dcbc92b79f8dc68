"""Ways to break a transformed domain: each takes its PCI topology out of order in one place, as a bug of ours might.

A break changes the tree it is given, and returns False where the domain has nothing that it could break.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st
from lxml import etree

Element = etree._Element
Break = Callable[[Element, st.DataObject], bool]

EXPANDER, ROOT_PORT = "pcie-expander-bus", "pcie-root-port"
UPSTREAM, DOWNSTREAM = "pcie-switch-upstream-port", "pcie-switch-downstream-port"
OURS = "ua-pcinuma-"


def _controllers(root: Element, *models: str) -> list[Element]:
    """Our controllers, of these models or of any."""
    found = []
    for controller in root.iterfind("devices/controller[@type='pci']"):
        alias = controller.find("alias")
        if alias is not None and alias.get("name", "").startswith(OURS):
            found.append(controller)
    return [controller for controller in found if not models or controller.get("model") in models]


def _seated(root: Element) -> list[Element]:
    """The addresses of passthrough devices that have one."""
    return [a for tag in ("hostdev", "interface") for a in root.iterfind(f"devices/{tag}/address[@type='pci']")]


def _places(root: Element) -> list[Element]:
    """The addresses of our ports."""
    return [address for controller in _controllers(root) for address in controller.iterfind("address")]


def _pick(data: st.DataObject, of: Sequence[Element]) -> Element:
    return of[data.draw(st.integers(0, len(of) - 1))]


def swapped_indexes(root: Element, data: st.DataObject) -> bool:
    ours = _controllers(root)
    if len(ours) < 2:
        return False
    one, other = data.draw(st.permutations(ours))[:2]
    first, second = one.get("index", ""), other.get("index", "")
    one.set("index", second)
    other.set("index", first)
    return True


def index_taken(root: Element, data: st.DataObject) -> bool:
    ours = _controllers(root)
    if len(ours) < 2:
        return False
    one, other = data.draw(st.permutations(ours))[:2]
    one.set("index", other.get("index", ""))
    return True


def index_out_of_range(root: Element, data: st.DataObject) -> bool:
    _pick(data, _controllers(root)).set("index", str(data.draw(st.sampled_from([0, 256, 300, 65536]))))
    return True


def index_far_up(root: Element, data: st.DataObject) -> bool:
    """With all that refers to it: a gap, which libvirt fills with ports of its own."""
    controller = _pick(data, _controllers(root))
    old, new = int(controller.get("index", "")), data.draw(st.sampled_from([60, 150, 250]))
    controller.set("index", str(new))
    for address in root.iterfind("devices/*/address[@type='pci']"):
        if int(address.get("bus", "0"), 0) == old:
            address.set("bus", f"0x{new:02x}")
    return True


def node_gone(root: Element, data: st.DataObject) -> bool:
    target = _pick(data, _controllers(root, EXPANDER)).find("target")
    assert target is not None
    for node in target.findall("node"):
        target.remove(node)
    return True


def node_of_no_cell(root: Element, data: st.DataObject) -> bool:
    node = _pick(data, _controllers(root, EXPANDER)).find("target/node")
    assert node is not None
    node.text = str(data.draw(st.sampled_from([9, 63, 254])))
    return True


def bus_number(root: Element, data: st.DataObject) -> bool:
    target = _pick(data, _controllers(root, EXPANDER)).find("target")
    assert target is not None
    target.set("busNr", str(data.draw(st.sampled_from([0, 1, 2, 255, 256, 300]))))
    return True


def bus_number_gone(root: Element, data: st.DataObject) -> bool:
    target = _pick(data, _controllers(root, EXPANDER)).find("target")
    assert target is not None
    del target.attrib["busNr"]
    return True


def bus_number_taken(root: Element, data: st.DataObject) -> bool:
    expanders = _controllers(root, EXPANDER)
    if len(expanders) < 2:
        return False
    one, other = (e.find("target") for e in data.draw(st.permutations(expanders))[:2])
    assert one is not None
    assert other is not None
    one.set("busNr", other.get("busNr", ""))
    return True


def bus_room(root: Element, data: st.DataObject) -> bool:
    """An expander moves up until its ports reach beyond 255, or into the next one's numbers."""
    target = _pick(data, _controllers(root, EXPANDER)).find("target")
    assert target is not None
    target.set("busNr", str(min(254, int(target.get("busNr", ""), 0) + data.draw(st.integers(1, 4)))))
    return True


def expander_gone(root: Element, data: st.DataObject) -> bool:
    expander = _pick(data, _controllers(root, EXPANDER))
    _remove(expander)
    return True


def port_gone(root: Element, data: st.DataObject) -> bool:
    _remove(_pick(data, _controllers(root, ROOT_PORT, UPSTREAM, DOWNSTREAM)))
    return True


def _remove(element: Element) -> None:
    parent = element.getparent()
    assert parent is not None
    parent.remove(element)


def parent_elsewhere(root: Element, data: st.DataObject) -> bool:
    """A port below another controller, or below one that is not there."""
    known = [int(controller.get("index", "")) for controller in _controllers(root)]
    place = _pick(data, _places(root))
    place.set("bus", f"0x{data.draw(st.sampled_from([0, *known, max(known) + 3, 0xFF])):02x}")
    return True


def port_slot(root: Element, data: st.DataObject) -> bool:
    _pick(data, _places(root)).set("slot", f"0x{data.draw(st.sampled_from([1, 0x1F, 0x20, 0x40])):02x}")
    return True


def port_function(root: Element, data: st.DataObject) -> bool:
    _pick(data, _places(root)).set("function", f"0x{data.draw(st.sampled_from([1, 7, 8])):x}")
    return True


def model(root: Element, data: st.DataObject) -> bool:
    other = data.draw(
        st.sampled_from([ROOT_PORT, UPSTREAM, DOWNSTREAM, EXPANDER, "dmi-to-pci-bridge", "pcie-to-pci-bridge"])
    )
    controller = _pick(data, _controllers(root))
    if controller.get("model") == other:
        return False
    controller.set("model", other)
    return True


def device_slot(root: Element, data: st.DataObject) -> bool:
    _pick(data, _seated(root)).set("slot", f"0x{data.draw(st.sampled_from([1, 0x1F, 0x20])):02x}")
    return True


def device_function(root: Element, data: st.DataObject) -> bool:
    _pick(data, _seated(root)).set("function", f"0x{data.draw(st.sampled_from([1, 7, 8])):x}")
    return True


def device_elsewhere(root: Element, data: st.DataObject) -> bool:
    """A device on another of our controllers, an expander or a port in use among them, or on one that is not there."""
    known = [int(controller.get("index", "")) for controller in _controllers(root)]
    address = _pick(data, _seated(root))
    address.set("bus", f"0x{data.draw(st.sampled_from([*known, max(known) + 3, 0xFF])):02x}")
    return True


def device_domain(root: Element, data: st.DataObject) -> bool:
    _pick(data, _seated(root)).set("domain", f"0x{data.draw(st.sampled_from([1, 0xFFFF])):04x}")
    return True


def device_address_gone(root: Element, data: st.DataObject) -> bool:
    _remove(_pick(data, _seated(root)))
    return True


def multifunction_off(root: Element, data: st.DataObject) -> bool:
    shared = [a for a in (*_places(root), *_seated(root)) if a.get("multifunction") == "on"]
    if not shared:
        return False
    address = _pick(data, shared)
    if data.draw(st.booleans()):
        address.set("multifunction", "off")
    else:
        del address.attrib["multifunction"]
    return True


def hotplug(root: Element, data: st.DataObject) -> bool:
    targets = [t for c in _controllers(root, ROOT_PORT, DOWNSTREAM) for t in c.iterfind("target")]
    target = _pick(data, targets)
    if data.draw(st.booleans()):
        target.set("hotplug", "on")
    else:
        del target.attrib["hotplug"]
    return True


def alias_twice(root: Element, data: st.DataObject) -> bool:
    aliases = [alias for controller in _controllers(root) for alias in controller.iterfind("alias")]
    if len(aliases) < 2:
        return False
    one, other = data.draw(st.permutations(aliases))[:2]
    one.set("name", other.get("name", ""))
    return True


def expander_off_bus_0(root: Element, data: st.DataObject) -> bool:
    expander = _pick(data, _controllers(root, EXPANDER))
    known = [int(controller.get("index", "")) for controller in _controllers(root)]
    bus = data.draw(st.sampled_from(known))
    etree.SubElement(expander, "address", type="pci", domain="0x0000", bus=f"0x{bus:02x}", slot="0x05", function="0x0")
    return True


def expander_on_a_taken_slot(root: Element, data: st.DataObject) -> bool:
    expanders = _controllers(root, EXPANDER)
    slot = data.draw(st.sampled_from(["0x00", "0x1f", "0x20", "0x07"]))
    for expander in expanders[:2]:
        etree.SubElement(expander, "address", type="pci", domain="0x0000", bus="0x00", slot=slot, function="0x0")
    return True


BREAKS: tuple[Break, ...] = (
    swapped_indexes,
    index_taken,
    index_out_of_range,
    index_far_up,
    node_gone,
    node_of_no_cell,
    bus_number,
    bus_number_gone,
    bus_number_taken,
    bus_room,
    expander_gone,
    port_gone,
    parent_elsewhere,
    port_slot,
    port_function,
    model,
    device_slot,
    device_function,
    device_elsewhere,
    device_domain,
    device_address_gone,
    multifunction_off,
    hotplug,
    alias_twice,
    expander_off_bus_0,
    expander_on_a_taken_slot,
)
