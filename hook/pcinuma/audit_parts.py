"""A domain as the rules of :mod:`pcinuma.audit` see it: what stands in ``<devices>``, with indexes and addresses.

It shares no code with the steps that make a plan: see there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

from pcinuma.domain_xml import Document, Element, attribute, children, find, tag_of, text_of
from pcinuma.model import ALIAS_PREFIX, Finding

ROOT_PORT = "pcie-root-port"
DOWNSTREAM = "pcie-switch-downstream-port"
UPSTREAM = "pcie-switch-upstream-port"
EXPANDER = "pcie-expander-bus"

Where = tuple[int, int, int]
"""Controller index, slot, function of a guest address."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something in ``<devices>`` with what the rules need of it; ``at`` is its guest address if it has one."""

    element: Element
    at: Where | None
    multifunction: str | None
    alias: str | None
    index: int | None = None
    model: str | None = None
    bus_nr: int | None = None
    node: int | None = None

    @property
    def name(self) -> str:
        what = f"{self.model} {self.index}" if self.is_controller else tag_of(self.element)
        return f"{what} ({self.alias or f'line {self.element.sourceline}'})"

    @property
    def is_controller(self) -> bool:
        return self.index is not None

    @property
    def ours(self) -> bool:
        return self.is_controller and (self.alias or "").startswith(ALIAS_PREFIX)


class AsWritten:
    """The domain as the rules see it."""

    def __init__(self, document: Document):
        devices = find(document.root, "devices")
        self.parts = _indexed([_part(element) for element in children(devices)] if devices is not None else [])
        self.controllers = {part.index: part for part in self.parts if part.index is not None}
        self.by_bus: dict[int, list[Part]] = {}
        for part in self.parts:
            if part.at is not None and part.index != 0:
                self.by_bus.setdefault(part.at[0], []).append(part)
        numa = find(document.root, "cpu", "numa")
        cells = list(children(numa, "cell")) if numa is not None else []
        self.cells = {int(attribute(cell, "id") or position) for position, cell in enumerate(cells)}
        machine = attribute(find(document.root, "os", "type"), "machine") or ""
        self.is_pcie = "q35" in machine or machine.startswith("virt")
        self.is_q35 = "q35" in machine
        self.has_no_expanders = bool(machine) and not self.is_pcie

    def model_at(self, index: int) -> str:
        """The model of the controller with an index, also of one that is not written: libvirt adds those."""
        root, other = ("pci-root", "pci-bridge") if self.has_no_expanders else ("pcie-root", ROOT_PORT)
        written = self.controllers.get(index)
        return (written.model if written is not None else None) or (other if index else root)

    def root_of(self, part: Part) -> Part | None:
        """The expander above a part, None on the root bus."""
        at: Part | None = part
        for _ in range(len(self.controllers) + 1):
            if at is None or at.model == EXPANDER:
                return at
            at = self.controllers.get(at.at[0]) if at.at is not None and at.at[0] else None
        return None


def _indexed(parts: list[Part]) -> list[Part]:
    """The parts, where a PCI controller without an index has the one that libvirt gives it: the lowest that is free."""
    used = {part.index for part in parts}
    found = []
    for part in parts:
        if part.index is None and part.model is not None:
            index = next(number for number in count() if number not in used)
            used.add(index)
            part = replace(part, index=index)
        found.append(part)
    return found


def _part(element: Element) -> Part:
    address = find(element, "address")
    at: Where | None = None
    if address is not None and attribute(address, "type") in (None, "", "pci"):
        bus, slot, function = (_c_number(attribute(address, name)) for name in ("bus", "slot", "function"))
        at = (bus, slot, function) if bus or slot else None  # 0000:00:00 asks libvirt for an address
    is_pci_controller = tag_of(element) == "controller" and attribute(element, "type") == "pci"
    target = find(element, "target") if is_pci_controller else None
    node = text_of(find(target, "node"))
    written = attribute(target, "busNr")
    index = attribute(element, "index")
    return Part(
        element=element,
        at=at,
        multifunction=attribute(address, "multifunction"),
        alias=attribute(find(element, "alias"), "name"),
        index=int(index) if is_pci_controller and index is not None else None,
        model=attribute(element, "model") if is_pci_controller else None,
        bus_nr=_c_number(written) if written else None,
        node=int(node) if node else None,
    )


def _c_number(text: str | None) -> int:
    if text is None:
        return 0
    try:
        return int(text, 0)
    except ValueError:
        return int(text, 8)  # C's octal, 010


def error(code: str, message: str, part: Part | None = None, hint: str | None = None) -> Finding:
    return Finding(code, "error", message, part.name if part is not None else None, hint)
