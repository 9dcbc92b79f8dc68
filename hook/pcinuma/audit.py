"""The rules of libvirt, QEMU and the guest's firmware, held against a domain XML of any origin, from the XML alone.

It shares no code with the steps that make a plan, so that one misreading does not pass both. Every finding of
severity error names something that libvirt refuses, that the guest loses, or that places a device wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator

from pcinuma.audit_parts import DOWNSTREAM, EXPANDER, ROOT_PORT, UPSTREAM, AsWritten, Part, Where, error
from pcinuma.audit_room import BUSES, SLOTS, room
from pcinuma.domain_xml import Document, Element, attribute, find, tag_of
from pcinuma.model import Finding

ON_EXPANDER = (ROOT_PORT, "dmi-to-pci-bridge")  # libvirt formatdomain, Controllers: what a pcie-expander-bus takes
SINGLE_SLOT = (ROOT_PORT, DOWNSTREAM)
# what <target> may say of a controller of each model (libvirt virDomainControllerDefValidate…, measured)
TARGET_OPTIONS = {
    ROOT_PORT: ("hotplug", "chassis", "port"),
    DOWNSTREAM: ("hotplug", "chassis", "port"),
    UPSTREAM: (),
    EXPANDER: ("busNr", "node"),
    "dmi-to-pci-bridge": (),
    "pci-bridge": ("chassisNr",),
}
BRIDGE_PARENTS = {"dmi-to-pci-bridge": ("pcie-root",), "pcie-to-pci-bridge": SINGLE_SLOT}
FROM_SLOT_1 = ("pci-bridge", "pcie-to-pci-bridge")
ROOTS = ("pcie-root", "pci-root")
MODELS = (*TARGET_OPTIONS, *ROOTS, "pcie-to-pci-bridge", "pci-expander-bus", "pxb")
Q35_OWN = {(0, 0x1F, 0): "ISA bridge", (0, 0x1F, 2): "SATA controller", (0, 0x1F, 3): "SMBus"}


def audit(document: Document) -> list[Finding]:
    """What is wrong with the domain's PCI topology, in document order; nothing is changed."""
    read = AsWritten(document)
    rules = (
        _indexes,
        _models,
        _parents,
        _expanders,
        _targets,
        _addresses,
        _functions,
        _ports_of_ours,
        _aliases,
        room,
    )
    return [finding for rule in rules for finding in rule(read)]


def _indexes(read: AsWritten) -> Iterator[Finding]:
    seen: set[int] = set()
    for part in read.parts:
        if part.index is None:
            continue
        if part.index in seen:
            yield error("duplicate-index", f"two PCI controllers have index {part.index}", part)
        if not 0 <= part.index < BUSES:
            yield error("index-range", f"controller index {part.index} is above 255", part)
        seen.add(part.index)


def _models(read: AsWritten) -> Iterator[Finding]:
    """libvirt knows the models below, and takes a root alone at index 0."""
    for part in read.parts:
        if part.model is None:
            continue
        if part.model not in MODELS:
            yield error("controller-model", f"{part.name}: libvirt knows no such model", part)
        elif part.index == 0 and part.model not in ROOTS:
            hint = (
                "give it an index above 0" if attribute(part.element, "index") else "give it an index: libvirt takes 0"
            )
            yield error("controller-model", f"{part.name} has index 0, which is the machine's root", part, hint)


def _parents(read: AsWritten) -> Iterator[Finding]:
    for part in read.parts:
        if part.index is None or part.at is None or part.index == 0:
            continue
        if part.at[0] >= part.index:
            yield error(
                "parent-order", f"{part.name} has index {part.index}, not above its parent's {part.at[0]}", part
            )
        parent = read.controllers.get(part.at[0])
        if parent is not None and parent.model == EXPANDER and part.model not in ON_EXPANDER:
            yield error("not-on-expander", f"a {part.model} cannot sit on a pcie-expander-bus", part)
        if part.model == ROOT_PORT and part.at[0] and (parent is None or parent.model != EXPANDER):
            what = "no controller" if parent is None else f"a {parent.model}"
            yield error("not-on-expander", f"a {ROOT_PORT} cannot sit on index {part.at[0]}, which is {what}", part)
        on = read.model_at(part.at[0])
        if part.model == UPSTREAM and on not in SINGLE_SLOT:
            yield error("switch-port", f"an upstream port sits on a root port or downstream port, not on {on}", part)
        if (part.model == DOWNSTREAM) != (on == UPSTREAM):
            yield error(
                "switch-port",
                f"on an upstream port sit downstream ports, and only there: not a {part.model} on {on}",
                part,
            )
        if part.model == EXPANDER and part.at[0] != 0:
            yield error("expander-parent", "an expander can sit on bus 0 only", part)
        # what cannot be on an expander is said above
        if part.model in BRIDGE_PARENTS and on not in (*BRIDGE_PARENTS[part.model], EXPANDER):
            yield error("bridge-parent", f"a {part.model} cannot sit on a {on}", part)
    for part in read.parts:
        parent = read.controllers.get(part.at[0]) if part.at is not None else None
        if not part.is_controller and parent is not None and parent.model == EXPANDER:
            yield error("not-on-expander", "a device cannot sit on a pcie-expander-bus, only on a port below it", part)
        if not part.is_controller and parent is not None and parent.model == UPSTREAM:
            yield error("switch-port", "a device cannot sit on an upstream port, only on a downstream port of it", part)
        if part.at is None or part.index == 0:
            continue
        if part.at[1] >= SLOTS or part.at[2] > 7 or part.at[0] >= BUSES:
            yield error("address-range", f"{part.name} has slot {part.at[1]:#x}, function {part.at[2]}", part)
        if parent is not None and parent.model in SINGLE_SLOT and part.at[1] != 0:
            yield error("address-range", f"a {parent.model} has slot 0 only, not {part.at[1]:#x}", part)
        if parent is not None and parent.model in FROM_SLOT_1 and part.at[1] == 0:
            yield error("address-range", f"a {parent.model} has no slot 0", part)
        if parent is None and part.at[0] and part.at[1] and _is_passthrough(part.element):
            message = f"index {part.at[0]} is none: libvirt makes a root port of it, which has slot 0 only"
            yield error("address-range", message, part)


def _expanders(read: AsWritten) -> Iterator[Finding]:
    for part in read.parts:
        if part.model in ("pci-expander-bus", "pxb") and read.is_pcie:
            yield error(
                "expander-model", f"{part.name} is for i440fx: on this machine libvirt takes {EXPANDER} only", part
            )
        if part.model != EXPANDER:
            continue
        if read.has_no_expanders:
            yield error("expander-model", f"{part.name}: this machine type takes no expander, libvirt refuses it", part)
        if part.node is None:
            hint = (
                "pcinuma transform --addressed move places its devices anew; KubeVirt before 1.8 drops the node between"
                " its passes"
            )
            if part.ours:
                yield error("expander-node", f"{part.name} names no cell", part, hint)
            else:
                yield Finding(
                    "expander-node", "warning", f"{part.name} names no cell: the guest sees -1", part.name, hint
                )
        elif part.node not in read.cells:
            yield error("expander-node", f"{part.name} names cell {part.node}, which the domain does not have", part)
        if part.bus_nr is None and part.ours:
            yield error("expander-bus", f"{part.name} has no busNr", part)
        if part.bus_nr is not None and not 1 <= part.bus_nr < BUSES - 1:  # libvirt takes 1 to 254
            yield error("expander-bus", f"{part.name} has busNr {part.bus_nr}", part)


def _targets(read: AsWritten) -> Iterator[Finding]:
    for part in read.parts:
        allowed = TARGET_OPTIONS.get(part.model or "")
        if allowed is None:
            continue
        target = find(part.element, "target")
        said = [name for name in ("hotplug", "busNr", "chassis", "chassisNr", "port") if attribute(target, name)]
        said += ["node"] if find(target, "node") is not None else []
        for name in said:
            if name not in allowed:
                yield error("target-option", f"a {part.model} takes no {name}", part)


def _addresses(read: AsWritten) -> Iterator[Finding]:
    seen: dict[Where, Part] = {}
    for part in read.parts:
        if part.at is None or part.index == 0:
            continue
        if part.at in seen:
            other = seen[part.at].name
            yield error("address-taken", f"{part.name} and {other} have one guest address {_shown(part.at)}", part)
        seen[part.at] = part
        own = Q35_OWN.get(part.at) if read.is_q35 else None
        if own is not None and (own, attribute(part.element, "type")) != ("SATA controller", "sata"):
            yield error(
                "address-taken", f"{part.name} has the guest address of q35's own {own}, {_shown(part.at)}", part
            )


def _shown(at: Where) -> str:
    return f"0000:{at[0]:02x}:{at[1]:02x}.{at[2]}"


def _functions(read: AsWritten) -> Iterator[Finding]:
    """QEMU wants function 0 of a slot with several functions to be multifunction; a guest probes function 0 first.

    libvirt sets multifunction itself where it is not written (virDomainPCIAddressSetMulti), not over an "off".
    """
    slots: dict[tuple[int, int], list[Part]] = {}
    for bus, members in read.by_bus.items():
        for part in members:
            slots.setdefault((bus, part.at[1] if part.at else 0), []).append(part)
    for (bus, slot), members in slots.items():
        first = next((part for part in members if part.at is not None and part.at[2] == 0), None)
        several = len(members) > 1
        if first is None:
            if bus or slot not in (0x1F, 0x1D, 0x1A):  # functions of q35's own chipset devices
                yield error("no-function-0", f"slot {_shown((bus, slot, 0))[:-2]} has no function 0", members[0])
        elif several and (first.multifunction == "off" or (first.ours and first.multifunction != "on")):
            yield error("multifunction", f"{first.name} shares its slot but is not multifunction", first)


def _ports_of_ours(read: AsWritten) -> Iterator[Finding]:
    for part in read.parts:
        if not part.ours or part.index is None:
            continue
        members = read.by_bus.get(part.index, [])
        if part.model == EXPANDER:
            if not members:
                yield error("empty-expander", f"{part.name} has no port", part)
            continue
        if part.model not in (ROOT_PORT, UPSTREAM, DOWNSTREAM):
            continue
        if not members:
            yield error("empty-port", f"{part.name} is empty: libvirt puts any unaddressed device there", part)
        if part.model in SINGLE_SLOT and attribute(find(part.element, "target"), "hotplug") != "off":
            yield error("port-hotplug", f"{part.name} is without hotplug='off'", part)
        root = read.root_of(part)
        if root is None or not root.ours:
            yield error("lost-port", f"{part.name} is below no expander of pcinuma's", part)
        for member in members:
            if not (member.ours if member.is_controller else _is_passthrough(member.element)):
                yield error("foreign-device", f"{member.name} sits on {part.name}", member)


def _is_passthrough(element: Element) -> bool:
    if tag_of(element) == "interface":
        return attribute(element, "type") in ("hostdev", "vdpa")
    return tag_of(element) == "hostdev" and attribute(element, "type") in ("pci", "mdev")


def _aliases(read: AsWritten) -> Iterator[Finding]:
    seen: set[str] = set()
    for part in read.parts:
        if part.alias and part.alias in seen and part.alias.startswith("ua-"):
            yield error("duplicate-alias", f"the alias {part.alias} is there twice", part)
        if part.alias:
            seen.add(part.alias)
