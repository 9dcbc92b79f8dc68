"""(document, Plan) → new text: the only writer. Edits are spliced into the text; what the plan does not name stays."""

from __future__ import annotations

from dataclasses import dataclass

from pcinuma.domain_xml import Document, Editor, children, find, tag_of
from pcinuma.model import Attachment, PciAddress, Plan, PlannedExpander, PlannedPort
from pcinuma.tune import tune


def apply(document: Document, plan: Plan) -> str:
    """The document's text with the plan carried out; the same text when there is nothing to do."""
    editor = Editor(document)
    fresh = [expander for expander in plan.expanders if expander.existing is None]
    if fresh:
        devices = find(document.root, "devices")
        assert devices is not None  # a domain with passthrough devices has <devices>
        writer = _Writer(editor, document.ordinal(devices))
        editor.insert_first(document.ordinal(devices), [xml for expander in fresh for xml in writer.expander(expander)])
    for controller in plan.drop:
        editor.remove(controller.element)
    for device in plan.detach:
        # libvirt reads the first one, and would read the second then
        for address in children(document.elements[device.element], "address"):
            editor.remove(document.ordinal(address))
    for expander in plan.expanders:
        if expander.existing is not None:
            _restore_expander(document, editor, expander)
        for port in expander.ports:
            if port.existing is not None:
                _restore_port(document, editor, port)
            for attached in port.attachments:
                _attach(document, editor, attached, port.index)
    tune(document, editor, plan)
    return editor.result()


class _Writer:
    """Writes new controllers with the quotes and the indentation of ``<devices>``."""

    def __init__(self, editor: Editor, devices: int):
        self._quote = editor.quote(devices)
        self._child, self._grandchild = editor.indent(devices)

    def expander(self, expander: PlannedExpander) -> list[str]:
        inner = self._grandchild
        step = inner[len(self._child) :]
        target = (
            f"{inner}<target {self._attributes(busNr=str(expander.bus_nr))}>"
            f"{inner}{step}<node>{expander.cell}</node>{inner}</target>"
        )
        own = self._controller("pcie-expander-bus", expander.index, expander.alias, target, "")
        return [own, *map(self._port, expander.ports)]

    def _port(self, port: PlannedPort) -> str:
        target = f"{self._grandchild}<target {self._attributes(hotplug='off')}/>" if _has_slot(port) else ""
        at = _address(_place_of(port), port.multifunction)
        address = f"{self._grandchild}<address {self._attributes(**at)}/>"
        return self._controller(port.model, port.index, port.alias, target, address)

    def _controller(self, model: str, index: int, alias: str, target: str, address: str) -> str:
        return (
            f"<controller {self._attributes(type='pci', index=str(index), model=model)}>{target}"
            f"{self._grandchild}<alias {self._attributes(name=alias)}/>{address}{self._child}</controller>"
        )

    def _attributes(self, **values: str) -> str:
        return " ".join(f"{name}={self._quote}{value}{self._quote}" for name, value in values.items())


def _has_slot(port: PlannedPort) -> bool:
    """Whether something could be plugged into the port (libvirt formatdomain, Controllers: target hotplug)."""
    return port.model != "pcie-switch-upstream-port"


def _place_of(port: PlannedPort) -> PciAddress:
    return PciAddress(0, port.parent, port.slot, port.function)


def _address(address: PciAddress, multifunction: bool) -> dict[str, str]:
    written = {
        "type": "pci",
        "domain": f"0x{address.domain:04x}",
        "bus": f"0x{address.bus:02x}",
        "slot": f"0x{address.slot:02x}",
        "function": f"0x{address.function:x}",
    }
    return written | ({"multifunction": "on"} if multifunction else {})


# --- what is there already -------------------------------------------------------------------------------------


def _restore_expander(document: Document, editor: Editor, expander: PlannedExpander) -> None:
    existing = expander.existing
    assert existing is not None
    element = document.elements[existing.element]
    quote = editor.quote(existing.element)
    target = find(element, "target")
    node = f"<node>{expander.cell}</node>"
    if target is None:
        editor.append(existing.element, f"<target busNr={quote}{expander.bus_nr}{quote}>{node}</target>")
        return
    number = document.ordinal(target)
    if existing.bus_nr != expander.bus_nr:
        editor.set_attributes(number, {"busNr": str(expander.bus_nr)})
    if existing.node != expander.cell:
        found = find(target, "node")
        if found is None:
            editor.append(number, node)
        else:
            editor.replace(document.ordinal(found), node)


def _restore_port(document: Document, editor: Editor, port: PlannedPort) -> None:
    existing = port.existing
    assert existing is not None
    if _has_slot(port):
        target = find(document.elements[existing.element], "target")
        if target is None:
            quote = editor.quote(existing.element)
            editor.append(existing.element, f"<target hotplug={quote}off{quote}/>")
        else:
            editor.set_attributes(document.ordinal(target), {"hotplug": "off"})
    present = _Present(existing.element, existing.address, existing.multifunction)
    _set_address(document, editor, present, _place_of(port), port.multifunction)


def _attach(document: Document, editor: Editor, attached: Attachment, index: int) -> None:
    device = attached.device
    if tag_of(document.elements[device.element]) == "hostdev" and device.mode is None:
        editor.set_attributes(device.element, {"mode": "subsystem"})
    present = _Present(device.element, device.address, device.multifunction)
    _set_address(document, editor, present, PciAddress(0, index, 0, attached.function), attached.multifunction)


@dataclass(frozen=True, slots=True)
class _Present:
    """An element with the guest address that it has now."""

    element: int
    address: PciAddress | None
    multifunction: bool


def _set_address(
    document: Document, editor: Editor, present: _Present, wanted: PciAddress, multifunction: bool
) -> None:
    """Give the element its guest address; attributes whose value is right already stay as they are written."""
    address = find(document.elements[present.element], "address")
    values = _address(wanted, multifunction)
    if address is None:
        quote = editor.quote(present.element)
        attributes = " ".join(f"{name}={quote}{value}{quote}" for name, value in values.items())
        editor.append(present.element, f"<address {attributes}/>")
        return
    values["multifunction"] = "on" if multifunction else "off"
    if present.multifunction == multifunction:
        del values["multifunction"]
    if present.address is not None:
        for name in ("domain", "bus", "slot", "function"):
            if getattr(present.address, name) == getattr(wanted, name):
                del values[name]
    editor.set_attributes(document.ordinal(address), values)
