"""The output held against the plan, against the input and against the rules, from the XML alone.

Nothing that fails here is handed out. It reads the XML anew and shares no code with plan or apply.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from pcinuma.audit import audit
from pcinuma.domain_xml import QEMU, Document, Element, attribute, children, find, serialized, tag_of, text_of
from pcinuma.model import ALIAS_PREFIX, CLIQUE_PROPERTY, Finding, Plan

OVERRIDE = QEMU + "override"


def verify(before: Document, after: Document, plan: Plan) -> list[Finding]:
    """What is wrong with ``after``, as errors; empty when it may be handed out."""
    found = [finding for finding in audit(after) if finding.severity == "error"]
    if found:
        # what was wrong before is not ours to refuse: the VM would have to do without the rest as well
        inherited = {_identity(finding) for finding in audit(before) if finding.severity == "error"}
        found = [finding for finding in found if _identity(finding) not in inherited]
    found += _as_planned(after, plan)
    found += _tuned(before, after, plan)
    found += _nothing_else(before, after, plan)
    return found


_LINE = re.compile(r" \(line [0-9]+\)")  # of a part without an alias; what is inserted before it moves it


def _identity(finding: Finding) -> tuple[str, ...]:
    """What makes an error the same before and after: as a rule the part that it is about. Our expanders take slots of
    bus 0: its count must not grow. A slot without function 0 is named after any of its functions."""
    if finding.code in ("root-bus-slots", "no-function-0"):
        return (finding.code, finding.message)
    return (finding.code, _LINE.sub("", finding.device or ""))


def _wrong(code: str, message: str) -> Finding:
    return Finding(code, "error", message)


# --- what was planned is there ---------------------------------------------------------------------------------


def _as_planned(after: Document, plan: Plan) -> Iterator[Finding]:
    devices = find(after.root, "devices")
    elements = list(children(devices)) if devices is not None else []
    controllers = {_alias(element) or "": element for element in elements if _is_ours(element)}
    wanted = {expander.alias for expander in plan.expanders} | {port.alias for port in plan.ports}
    for alias in sorted(set(controllers) - wanted):
        yield _wrong("not-planned", f"controller {alias} is not planned")
    for alias in sorted(wanted - set(controllers)):
        yield _wrong("plan-missed", f"controller {alias} is missing")
    for expander in plan.expanders:
        element = controllers.get(expander.alias)
        target = find(element, "target")
        if element is None:
            continue
        said = (attribute(element, "index"), attribute(target, "busNr"), text_of(find(target, "node")))
        if any(text is None or not text.strip() for text in said) or (
            int(said[0] or ""),
            _number(said[1] or ""),
            int(said[2]),
        ) != (expander.index, expander.bus_nr, expander.cell):
            yield _wrong("plan-missed", f"{expander.alias} has index, busNr and node {said}")
        for port in expander.ports:
            element = controllers.get(port.alias)
            if element is None:
                continue
            if attribute(element, "model") != port.model:
                yield _wrong("plan-missed", f"{port.alias} is a {attribute(element, 'model')}")
            if attribute(element, "index") is None or int(attribute(element, "index") or "") != port.index:
                yield _wrong("plan-missed", f"{port.alias} has index {attribute(element, 'index')}")
            if (at := _address(element)) != (0, port.parent, port.slot, port.function):
                yield _wrong("plan-missed", f"{port.alias} is at {at}")
    by_source = {_source(element): element for element in elements if _is_passthrough(element)}
    for port in plan.ports:
        for attached in port.attachments:
            device = attached.device
            host = device.source
            named = device.uuid or device.vdpa
            found = by_source.get((host.domain, host.bus, host.slot, host.function) if host else named)
            if found is None or _address(found) != (0, port.index, 0, attached.function):
                yield _wrong("plan-missed", f"{device.label} is not on {port.alias}")
            elif attached.multifunction and attribute(find(found, "address"), "multifunction") != "on":
                yield _wrong("plan-missed", f"{device.label} is not multifunction")


def _is_ours(element: Element) -> bool:
    return (
        tag_of(element) == "controller"
        and attribute(element, "type") == "pci"
        and (_alias(element) or "").startswith(ALIAS_PREFIX)
    )


def _is_passthrough(element: Element) -> bool:
    tag, kind = tag_of(element), attribute(element, "type")
    if tag == "hostdev":
        return kind in ("pci", "mdev") and attribute(element, "mode") in (None, "subsystem")
    return tag == "interface" and kind in ("hostdev", "vdpa")


def _alias(element: Element) -> str | None:
    return attribute(find(element, "alias"), "name")


def _address(element: Element | None) -> Numbers | None:
    address = find(element, "address")
    return None if address is None else _numbers(address)


def _source(element: Element) -> Numbers | str | None:
    """The host BDF, a mediated device's UUID as libvirt writes it, or the name of a vDPA character device."""
    if attribute(element, "type") == "vdpa":
        return (attribute(find(element, "source"), "dev") or "").removeprefix("/dev/")
    address = find(element, "source", "address")
    if address is None:
        return None
    if (uuid := attribute(address, "uuid")) is not None:
        bare = uuid.strip().replace("-", "").lower()
        return "-".join((bare[:8], bare[8:12], bare[12:16], bare[16:20], bare[20:]))
    return _numbers(address)


Numbers = tuple[int, int, int, int]
"""Domain, bus, slot and function of an address."""


def _numbers(address: Element) -> Numbers:
    get = address.get
    said = get("domain", "0"), get("bus", "0"), get("slot", "0"), get("function", "0")
    return _number(said[0]), _number(said[1]), _number(said[2]), _number(said[3])


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return int(text, 8)  # C's octal has no o: 010


def _tuned(before: Document, after: Document, plan: Plan) -> Iterator[Finding]:
    """What the plan writes outside of the devices is there, once."""
    cpu = find(after.root, "cpu")
    if plan.address_bits is not None:
        said = [dict(element.items()) for element in children(cpu, "maxphysaddr")] if cpu is not None else []
        if said != [{"mode": "emulate", "bits": str(plan.address_bits)}]:
            yield _wrong("plan-missed", f"maxphysaddr is {said}")
    numa = find(cpu, "numa")
    for position, cell in enumerate(children(numa, "cell") if numa is not None and plan.distances else ()):
        number = int(attribute(cell, "id") or position)
        siblings = [sibling for table in children(cell, "distances") for sibling in children(table, "sibling")]
        distances = [(attribute(sibling, "id"), attribute(sibling, "value")) for sibling in siblings]
        if distances != [(str(other), str(value)) for other, value in sorted(plan.distances.get(number, {}).items())]:
            yield _wrong("plan-missed", f"cell {number} has the distances {distances}")
    if plan.cliques:
        ours = [(alias, CLIQUE_PROPERTY, "unsigned", str(number)) for alias, number in plan.cliques.items()]
        old = [said for said in _properties(before) if said[0] not in plan.cliques or said[1] != CLIQUE_PROPERTY]
        if sorted(map(str, _properties(after))) != sorted(map(str, [*old, *ours])):
            yield _wrong("plan-missed", "the properties in qemu:override are not the planned ones")


def _properties(document: Document) -> list[tuple[str | None, ...]]:
    """Alias, name, type and value of every property that is overridden."""
    override = find(document.root, OVERRIDE)
    return [
        (attribute(device, "alias"), *(attribute(said, key) for key in ("name", "type", "value")))
        for device in (children(override, QEMU + "device") if override is not None else ())
        for frontend in children(device, QEMU + "frontend")
        for said in children(frontend, QEMU + "property")
    ]


# --- nothing else changed --------------------------------------------------------------------------------------


def _nothing_else(before: Document, after: Document, plan: Plan) -> Iterator[Finding]:
    touched = {attached.device.element for port in plan.ports for attached in port.attachments}
    touched |= {device.element for device in plan.detach}
    free = {before.elements[number] for number in touched}
    dropped = {before.elements[controller.element] for controller in plan.drop}
    skip = {"maxphysaddr"} if plan.address_bits is not None else set()
    skip |= ({"distances"} if plan.distances else set()) | ({OVERRIDE} if plan.cliques else set())
    old = _outline(before.root, free, dropped, skip)
    new = _outline(after.root, set(), set(), skip)
    for (old_entry, is_free), (new_entry, _) in zip(old, new, strict=False):
        if is_free:
            old_entry, new_entry = _without_address(old_entry), _without_address(new_entry)
        if old_entry != new_entry:
            yield _wrong("other-change", f"something that was not planned has changed: {str(old_entry)[:200]}")
            return
    if len(old) != len(new):
        yield _wrong("other-change", f"the domain had {len(old)} parts besides pcinuma's, now {len(new)}")


Entry = list[object]


def _outline(root: Element, free: set[Element], dropped: set[Element], skip: set[str]) -> list[tuple[Entry, bool]]:
    """Everything but our controllers, in document order: each part of the domain as it is written, a passthrough
    device and the CPU as the list of their nodes, so that what was planned to change can be left out."""
    found: list[tuple[Entry, bool]] = [([*root.items(), _text(root)], False)]
    for part in root:
        if part.tag in skip:
            continue
        if part.tag == "cpu" and skip:
            found.append((_flat(part, skip), False))
        elif part.tag != "devices":
            found.append(([serialized(part)], False))
        if part.tag != "devices":
            continue
        found.append(([*part.items(), _text(part)], False))
        for device in part:
            if device.tag == "controller" and (device in dropped or _is_ours(device)):
                continue
            if device.tag in ("hostdev", "interface"):
                found.append((_flat(device), device in free))
            else:
                found.append(([serialized(device)], False))
    return found


def _flat(element: Element, skip: Collection[str] = ()) -> Entry:
    found: Entry = []
    stack = [(0, element)]
    while stack:
        depth, node = stack.pop()
        if node.tag in skip:
            continue
        found.append((depth, *_said(node)))
        if len(node):
            stack.extend((depth + 1, child) for child in reversed(node))
    return found


def _said(node: Element) -> tuple[object, ...]:
    """What a node says besides its children: a comment's or a processing instruction's tag is a function."""
    return (str(node.tag), tuple(node.items()), _text(node))


def _text(node: Element) -> str:
    """All text that is directly in a node. Between two children it is nobody's: what is inserted may come to stand
    before it or after it, and white space in it may come from either side of what was taken out."""
    if not len(node):
        return (node.text or "").strip()
    return "".join(part for text in (node.text, *(child.tail for child in node)) for part in (text or "").split())


def _without_address(entry: Entry) -> Entry:
    """A device without its own address and the default mode spelled out, the two things that placing it changes."""
    kept: Entry = []
    for item in entry:
        if isinstance(item, tuple) and item[:2] == (1, "address"):
            continue
        if isinstance(item, tuple) and item[0] == 0 and isinstance(item[2], tuple):
            attributes = tuple(pair for pair in item[2] if pair != ("mode", "subsystem"))
            item = (*item[:2], attributes, *item[3:])
        kept.append(item)
    return kept
