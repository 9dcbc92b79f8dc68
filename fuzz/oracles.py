"""What must hold whatever the input: the contract's claims that can be checked of any domain on any host.

Each raises AssertionError where a claim does not hold. None of them shares code with what it looks at, but for reading.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from lxml import etree

from pcinuma import explain, report, schema, svg, tree
from pcinuma.audit import audit
from pcinuma.check import check
from pcinuma.discover import ReadHost
from pcinuma.domain_xml import Document, load
from pcinuma.errors import BadInput, PcinumaError
from pcinuma.model import ALIAS_PREFIX, HostQuery, HostTopology, Options
from pcinuma.pipeline import Result, transform
from pcinuma.verify import verify

OVERRIDE = "{http://libvirt.org/schemas/domain/qemu/1.0}override"
_MOVED = ("placed", "approximate")
_REFUSING = ("restricted", "single-numa-node")


def must_be_ours(error: PcinumaError) -> None:
    """An error for the user: one line that may go to a terminal, and no fault of the program's own."""
    assert error.code != "internal", error
    assert error.message, repr(error)
    assert str(error).isprintable(), repr(str(error))
    assert error.hint is None or error.hint.isprintable(), repr(error.hint)


@contextlib.contextmanager
def errors_of_ours() -> Iterator[None]:
    """Errors of ours are an answer; anything else passes and is a find."""
    try:
        yield
    except PcinumaError as error:
        must_be_ours(error)


def must_hold(xml: bytes, options: Options, read_host: ReadHost) -> Result | None:
    """A transform: refused for a reason, the very bytes, or a result that verifies and stays as it is when repeated.
    None for a domain that is bad input."""
    with errors_of_ours():
        result = transform(xml, options, read_host)
        _must_be_reported(result)
        if result.refusal is not None:
            assert result.refusal.code == "policy-not-met" or _is_hopeless(xml), result.refusal
            must_be_ours(result.refusal)
        if result.report.outcome != "changed":
            assert result.xml is xml
        else:
            _must_be_placed(xml, result, options, read_host)
        return result
    return None


def _must_be_reported(result: Result) -> None:
    assert schema.problems(report.as_dict(result.report), "report") == []
    for finding in result.report.findings:
        assert report.finding_line(finding).isprintable()
    placements = result.report.plan.placements
    assert len(placements) in (0, len(result.before.devices)), "a device is not reported"
    # what stays unplaced is a finding each
    said = {(finding.code, finding.device) for finding in result.report.findings}
    for placement in placements:
        assert placement.fits or (placement.code, placement.device.label) in said, placement


def _must_be_placed(xml: bytes, result: Result, options: Options, read_host: ReadHost) -> None:
    plan = result.report.plan
    assert options.policy != "none", "changed under policy none"
    assert options.enabled, "changed though switched off"
    assert options.policy not in _REFUSING or all(placement.fits for placement in plan.placements)
    assert verify(load(xml), load(result.xml), plan) == []
    _must_leave_the_rest(xml, result)
    assert transform(xml, options, backwards(read_host)).xml == result.xml, (
        "it depends on the order of the host's parts"
    )

    again = transform(result.xml, options, read_host)
    assert again.xml == result.xml, "not a fixed point"
    assert again.report.outcome == "unchanged"
    assert seats(again) == seats(result), "a second run reports other places"

    placed = {p.device.label for p in plan.placements if p.kind in ("placed", "approximate")}
    for finding in check(result.xml, options, read_host):
        about = finding.code in ("not-placed", "foreign-cell", "numa-unknown") and finding.device in placed
        assert not about, f"check does not agree: {finding}"
        assert finding.code != "stale-set" or not placed, finding


def seats(result: Result) -> list[tuple[object, ...]]:
    """Where each device is, in the guest's terms; of one that was not placed whether it is left or kept does not count,
    as that depends on the set of ours beside it, which may have gone."""
    return [
        (p.device.label, *((p.kind, p.cell) if p.kind in _MOVED else ("stays", None)), p.guest_address, p.guest_bdf)
        for p in result.report.plan.placements
    ]


def must_agree(
    xml: bytes, options: Options, read_host: ReadHost, result: Result | None, *, pictures: bool = True
) -> explain.Explained | None:
    """``check`` and ``explain`` take what ``transform`` takes, and show it; None where it takes nothing."""
    try:
        found = check(xml, options, read_host)
        explained = explain.explain(xml, options, read_host)
    except BadInput as bad:
        must_be_ours(bad)
        if result is not None:
            raise AssertionError("transform takes it") from bad
        return None
    for finding in found:
        assert report.finding_line(finding).isprintable()
    assert result is not None, "transform does not take it"
    assert explained.result.report.outcome == result.report.outcome
    assert explained.result.xml == result.xml
    if not pictures:
        return explained
    etree.fromstring(svg.draw(explained.scene).encode())
    for signs in (tree.UNICODE, tree.ASCII):
        drawn = tree.draw(explained.scene, width=80, signs=signs)
        assert all(line.isprintable() for line in drawn.split("\n")), drawn
    return explained


def _is_hopeless(xml: bytes) -> bool:
    """Whether the domain had used up its bus numbers, or the slots of bus 0, before we looked at it, or has a PCI
    controller of a model that nobody knows, so that nobody knows what may be on it: then what comes of taking a stale
    set out of it may be refused as unsafe."""
    codes = {finding.code for finding in audit(load(xml))}
    return bool({"bus-numbers", "root-bus-slots", "controller-model"} & codes)


def backwards(read_host: ReadHost) -> ReadHost:
    """The same host, everything in it in the other order."""

    def read(query: HostQuery) -> HostTopology:
        said = read_host(query)
        return HostTopology(
            dict(list(said.nodes.items())[::-1]),
            dict(list(said.functions.items())[::-1]),
            dict(list(said.mdev_parents.items())[::-1]),
            dict(list(said.vdpa_parents.items())[::-1]),
            said.address_bits,
            said.cpu,
        )

    return read


# --- nothing else has changed ----------------------------------------------------------------------------------


def _must_leave_the_rest(xml: bytes, result: Result) -> None:
    """To the character: the output without what is ours is the input without it. Of a device that was moved its own
    address and the spelled-out mode may change."""
    plan = result.report.plan
    before, after = load(xml), load(result.xml)
    assert before.encoding == after.encoding
    moved = {p.device.element for p in plan.placements if p.kind in ("placed", "approximate")}
    moved |= {device.element for device in plan.detach}
    devices = _guests(before), _guests(after)
    assert len(devices[0]) == len(devices[1]), "a device is lost"
    gone = {controller.element for controller in plan.drop}
    kept = {e.existing.element for e in plan.expanders if e.existing is not None}
    kept |= {port.existing.element for port in plan.ports if port.existing is not None}
    tuned = [path for path, written in (
        ("cpu/maxphysaddr", plan.address_bits), ("cpu/numa/cell/distances", plan.distances), (OVERRIDE, plan.cliques)
    ) if written]  # fmt: skip

    pairs = zip(*devices, strict=True)
    changed = [(old, new) for old, new in pairs if before.ordinal(old) in moved]
    for old, new in changed:
        said_of = _as_said(before, old), _as_said(after, new)
        assert said_of[0] == said_of[1], f"a device has changed: {_difference(*said_of)}"
    said = []
    for document, own, held in (
        (before, [before.elements[number] for number in gone | kept], [old for old, _ in changed]),
        (after, [e for e in after.root.iterfind("devices/controller") if _is_ours(e)], [new for _, new in changed]),
    ):
        own += [element for path in tuned for element in document.root.findall(path)]
        cuts = [_cut(document, element) for element in own]
        spans = [document.spans[document.ordinal(element)] for element in held]
        said.append(_joined(document.text, [*cuts, *((span.start, span.end, "\0") for span in spans)]))
    assert said[0] == said[1], f"something else has changed: {_difference(*said)}"


def _guests(document: Document) -> list[etree._Element]:
    return [element for element in document.root.iterfind("devices/*") if element.tag in ("hostdev", "interface")]


def _is_ours(element: etree._Element) -> bool:
    alias = element.find("alias")
    return alias is not None and alias.get("name", "").startswith(ALIAS_PREFIX) and element.get("type") == "pci"


def _as_said(document: Document, device: etree._Element) -> str:
    """The device's text without its own addresses, and without the mode that is the default."""
    span = document.spans[document.ordinal(device)]
    own = [_cut(document, element) for element in device.findall("address")]
    cuts = [(start - span.start, end - span.start, left) for start, end, left in own]
    text = _joined(document.text[span.start : span.end], cuts)
    return re.sub(r"\A(<hostdev[^>]*?)\s+mode\s*=\s*(['\"])subsystem\2", r"\1", text)


def _cut(document: Document, element: etree._Element) -> tuple[int, int, str]:
    """The element and the white space before it, which go."""
    span = document.spans[document.ordinal(element)]
    return len(document.text[: span.start].rstrip(" \t\r\n")), span.end, ""


def _joined(text: str, cuts: list[tuple[int, int, str]]) -> str:
    """The text with other text for each cut; ``<a></a>`` as ``<a/>``, as one that was empty may come to hold ours."""
    for start, end, left in sorted(cuts, reverse=True):
        text = text[:start] + left + text[end:]
    return re.sub(r"<([^\s/>!?]+)([^<>]*?)\s*(?:>\s*</\1\s*>|/>)", r"<\1\2/>", text)


def _difference(one: str, other: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"{one[max(at - 60, 0) : at + 60]!r} / {other[max(at - 60, 0) : at + 60]!r}"
