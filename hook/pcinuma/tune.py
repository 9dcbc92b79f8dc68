"""What a plan writes outside of ``<devices>``: the CPU's address bits, NUMA distances, properties of QEMU devices."""

from __future__ import annotations

from pcinuma.domain_xml import QEMU, QEMU_URI, Document, Editor, Element, attribute, children, escaped, find
from pcinuma.model import CLIQUE_PROPERTY, Plan


def tune(document: Document, editor: Editor, plan: Plan) -> None:
    """Add the plan's edits of the domain itself to the editor's; none where everything is there already."""
    if plan.address_bits is not None:
        _set_address_bits(document, editor, plan.address_bits)
    if plan.distances:
        _set_distances(document, editor, plan)
    if plan.cliques:
        _set_cliques(document, editor, plan)


def _set_address_bits(document: Document, editor: Editor, bits: int) -> None:
    """``<cpu><maxphysaddr mode="emulate" bits="N"/>`` in place of what is there."""
    cpu = find(document.root, "cpu")
    assert cpu is not None  # a domain with cells has <cpu>
    quote = editor.quote(document.ordinal(cpu))
    xml = f"<maxphysaddr mode={quote}emulate{quote} bits={quote}{bits}{quote}/>"
    present = [document.ordinal(element) for element in children(cpu, "maxphysaddr")]
    if not present:
        editor.append(document.ordinal(cpu), xml)
        return
    editor.replace(present[0], xml)
    for element in present[1:]:  # libvirt reads the first one
        editor.remove(element)


def _set_distances(document: Document, editor: Editor, plan: Plan) -> None:
    numa = find(document.root, "cpu", "numa")
    assert numa is not None  # where the distances come from
    for position, cell in enumerate(children(numa, "cell")):
        number = document.ordinal(cell)
        quote = editor.quote(number)
        distances = plan.distances[int(attribute(cell, "id") or position)]
        siblings = (f"<sibling id={quote}{n}{quote} value={quote}{d}{quote}/>" for n, d in sorted(distances.items()))
        editor.append(number, f"<distances>{''.join(siblings)}</distances>")


# --- qemu:override ---------------------------------------------------------------------------------------------


def _set_cliques(document: Document, editor: Editor, plan: Plan) -> None:
    """The property for each GPU (libvirt drvqemu, Overriding properties of QEMU devices), beside what is overridden."""
    override = find(document.root, QEMU + "override")
    quote = editor.quote(0)
    if override is None:
        prefix = document.prefix(QEMU_URI)
        declared = "" if prefix else f" xmlns:qemu={quote}{QEMU_URI}{quote}"
        writer = _Override(quote, prefix or "qemu")
        inside = "".join(writer.device(alias, number) for alias, number in plan.cliques.items())
        editor.append(0, f"<{writer.prefix}:override{declared}>{inside}</{writer.prefix}:override>")
        return
    writer = _Override(quote, override.prefix or "")
    known = {attribute(device, "alias"): device for device in children(override, QEMU + "device")}
    fresh = [writer.device(alias, number) for alias, number in plan.cliques.items() if alias not in known]
    if fresh:
        editor.append(document.ordinal(override), "".join(fresh))
    for alias, number in plan.cliques.items():
        if alias in known:
            _set_clique(document, editor, writer, known[alias], number)


def _set_clique(document: Document, editor: Editor, writer: _Override, device: Element, number: int) -> None:
    frontend = find(device, QEMU + "frontend")
    if frontend is None:
        editor.append(document.ordinal(device), writer.frontend(number))
        return
    own = [e for e in children(frontend, QEMU + "property") if attribute(e, "name") == CLIQUE_PROPERTY]
    if not own:
        editor.append(document.ordinal(frontend), writer.clique(number))
    else:
        editor.set_attributes(document.ordinal(own[0]), {"type": "unsigned", "value": str(number)})


class _Override:
    """Writes parts of a ``qemu:override`` with the document's quotes and its prefix, empty for a default namespace."""

    def __init__(self, quote: str, prefix: str):
        self._quote = quote
        self.prefix = prefix

    def device(self, alias: str, number: int) -> str:
        return self._element("device", self.frontend(number), alias=escaped(alias))

    def frontend(self, number: int) -> str:
        return self._element("frontend", self.clique(number))

    def clique(self, number: int) -> str:
        return self._element("property", "", name=CLIQUE_PROPERTY, type="unsigned", value=str(number))

    def _element(self, tag: str, inside: str, **attributes: str) -> str:
        tag = f"{self.prefix}:{tag}" if self.prefix else tag
        said = "".join(f" {key}={self._quote}{value}{self._quote}" for key, value in attributes.items())
        return f"<{tag}{said}>{inside}</{tag}>" if inside else f"<{tag}{said}/>"
