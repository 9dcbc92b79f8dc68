"""The golden cases: a folder each, see README.md. What is expected is written by hand, never by the program."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from pcinuma import host_file, options, report, schema
from pcinuma.pipeline import Result, transform
from tests.support import libvirt

HERE = Path(__file__).resolve().parent
SCHEMAS = HERE.parent.parent / "schemas"
NAMES = sorted(folder.name for folder in (HERE / "cases").iterdir() if folder.is_dir())
OURS = "ua-pcinuma-"

Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A case's files. ``expected`` is what must come out: the input itself where there is no expected.xml."""

    name: str
    domain: bytes
    host: bytes
    options: bytes
    expected: bytes
    report: Json

    @property
    def outcome(self) -> str:
        return str(self.report["outcome"])

    @property
    def expected_path(self) -> Path:
        return HERE / "cases" / self.name / "expected.xml"

    def transform(self, xml: bytes) -> Result:
        defaults = options.load_defaults(self.options, "options.yaml")
        read_host = host_file.load(self.host, "host.json")
        return transform(xml, options.resolve({}, None, defaults), read_host, where="domain.xml")


def load(name: str, *, regenerating: bool = False) -> Case:
    """The case; the test fails where its folder does not hold what it must."""
    folder = HERE / "cases" / name
    needed = ("domain.xml", "host.json", "options.yaml", "report.json")
    if missing := [file for file in needed if not (folder / file).is_file()]:
        pytest.fail(f"{name}: there is no {', '.join(missing)}")
    if unknown := sorted({file.name for file in folder.iterdir()} - {*needed, "expected.xml"}):
        pytest.fail(f"{name}: {', '.join(unknown)} is no file of a golden case")
    expected_report: Json = json.loads((folder / "report.json").read_text("utf-8"))
    domain = (folder / "domain.xml").read_bytes()
    expected = folder / "expected.xml"
    outcome = expected_report["outcome"]
    if outcome == "refused" and expected.exists():
        pytest.fail(f"{name}: a refused case has no expected.xml")
    if outcome == "unchanged" and expected.exists() and expected.read_bytes() != domain:
        pytest.fail(f"{name}: the outcome is to be unchanged, but expected.xml is not domain.xml")
    if outcome == "changed" and not expected.is_file() and not regenerating:
        pytest.fail(f"{name}: there is no expected.xml; write it by hand (README.md)")
    return Case(
        name=name,
        domain=domain,
        host=(folder / "host.json").read_bytes(),
        options=(folder / "options.yaml").read_bytes(),
        expected=expected.read_bytes() if expected.is_file() else domain,
        report=expected_report,
    )


@cache
def validator(name: str) -> Any:
    from jsonschema_rs import Draft202012Validator

    return Draft202012Validator(json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8")))


def schema_errors(instance: object, name: str) -> list[str]:
    return [
        f"{'/'.join(map(str, error.instance_path))}: {error.message}" for error in validator(name).iter_errors(instance)
    ]


# --- text ------------------------------------------------------------------------------------------------------

# Comments and CDATA are matched first, so that what they hold is taken for no element.
_BLOCK = re.compile(
    r"""<!--.*?--> | <!\[CDATA\[.*?\]\]>
      | (?P<space>\s*)(?P<element><(?P<tag>controller|hostdev|interface)\b(?:[^"'>]|"[^"]*"|'[^']*')*?
        (?:/>|>.*?</(?P=tag)\s*>))""",
    re.S | re.X,
)


def decode(xml: bytes) -> str:
    """The document's text, line ends as they are."""
    return xml.decode(etree.fromstring(xml).getroottree().docinfo.encoding or "utf-8")


@dataclass(frozen=True)
class Block:
    """A controller, hostdev or interface as it stands in the text, with the white space before it."""

    space: str
    text: str

    @property
    def element(self) -> etree._Element:
        return etree.fromstring(self.text)

    @property
    def is_ours(self) -> bool:
        return self.text.startswith("<controller") and self.alias.startswith(OURS)

    @property
    def alias(self) -> str:
        alias = self.element.find("alias")
        return "" if alias is None else alias.get("name", "")


def map_blocks(text: str, change: Callable[[Block], str]) -> str:
    """The text with every controller, hostdev and interface replaced by what ``change`` makes of it."""

    def changed(match: re.Match[str]) -> str:
        return match[0] if match["element"] is None else change(Block(match["space"], match["element"]))

    return _BLOCK.sub(changed, text)


def blocks(text: str) -> list[Block]:
    return [Block(found["space"], found["element"]) for found in _BLOCK.finditer(text) if found["element"] is not None]


def canonical(block: Block, *, keep_space: bool) -> str:
    """A controller of ours in one form: attributes sorted, no self-closing tags; its quotes are kept."""
    quotes = "".join(sorted(set(re.findall(r"""=\s*(["'])""", block.text))))

    def said(text: str | None) -> str:
        return (text or "") if keep_space else (text or "").strip()

    def written(element: etree._Element) -> str:
        said_of = {str(name): str(value) for name, value in element.attrib.items()}
        attributes = "".join(f" {name}={quotes}{said_of[name]}{quotes}" for name in sorted(said_of))
        inner = said(element.text) + "".join(written(child) + said(child.tail) for child in element)
        return f"<{element.tag}{attributes}>{inner}</{element.tag}>"

    return block.space + written(block.element)


def comparable(text: str, before: set[str]) -> str:
    """The text with what is free in our controllers made one; ``before`` are the aliases the input had of them."""
    return map_blocks(text, lambda b: canonical(b, keep_space=b.alias not in before) if b.is_ours else b.space + b.text)


def difference(expected: str, actual: str) -> str:
    def lines(text: str) -> list[str]:
        return [line.replace("\r", "\\r") for line in text.splitlines()]

    return "\n".join(
        difflib.unified_diff(lines(expected), lines(actual), "expected.xml", "what came out", lineterm="", n=2)
    )


# --- the report ------------------------------------------------------------------------------------------------


def report_differences(expected: Json, actual: Json) -> Iterator[str]:
    for name in ("version", "outcome", "options", "cells"):
        if actual[name] != expected[name]:
            yield f"{name}: expected {json.dumps(expected[name])}\n{' ' * len(name)}       got {json.dumps(actual[name])}"
    if len(expected["devices"]) != len(actual["devices"]):
        yield f"devices: expected {len(expected['devices'])}, got {len(actual['devices'])}"
    for wanted, got in zip(expected["devices"], actual["devices"], strict=False):
        wrong = [f"{key}: expected {wanted.get(key)}, got {got[key]}" for key in got if not _agrees(key, wanted, got)]
        if wrong or set(wanted) != set(got):
            yield f"device {wanted['source']}: {'; '.join(wrong)}"
    left = list(actual["findings"])
    for finding in expected["findings"]:
        found = next((candidate for candidate in left if _is_finding(finding, candidate)), None)
        if found is None:
            yield f"findings: none is {json.dumps(finding)}"
        else:
            left.remove(found)
    for finding in left:
        yield f"findings: not expected {json.dumps(finding)}"


def _agrees(key: str, wanted: Json, got: Json) -> bool:
    if key == "reason" and wanted.get("reason") is not None:
        return got["reason"] is not None and all(word in got["reason"] for word in wanted["reason"]["says"])
    return bool(key in wanted and wanted[key] == got[key])


def _is_finding(wanted: Json, got: Json) -> bool:
    said = f"{got['message']} {got['hint'] or ''}"
    same = all(wanted[key] == got[key] for key in ("code", "severity", "device"))
    return same and got["message"] != "" and all(word in said for word in wanted.get("says", []))


# --- nothing else changed --------------------------------------------------------------------------------------


def without_ours(text: str) -> str:
    return map_blocks(text, lambda block: "" if block.is_ours else block.space + block.text)


def without_place(block: Block) -> bytes:
    """A device without its guest address and without the default mode, white space aside."""
    element = block.element
    for address in element.findall("address"):
        element.remove(address)
    if element.get("mode") == "subsystem":
        del element.attrib["mode"]
    for part in element.iter():
        part.text, part.tail = (part.text or "").strip(), (part.tail or "").strip()
    return etree.tostring(element, method="c14n")


def source_of(element: etree._Element) -> str | None:
    """The host BDF of a passthrough device, a mediated device's UUID, a vDPA device's path; None for anything else."""
    if element.tag == "interface" and element.get("type") == "vdpa":
        return element.find("source").get("dev")  # type: ignore[union-attr]  # libvirt wants it
    address = element.find("source/address")
    if address is None or element.get("mode", "subsystem") != "subsystem":
        return None
    if (uuid := address.get("uuid")) is not None:
        return uuid
    if element.tag == "hostdev" and element.get("type") != "pci":
        return None
    domain, bus, slot, function = (c_number(address.get(part)) for part in ("domain", "bus", "slot", "function"))
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"


def c_number(text: str | None) -> int:
    """A number as libvirt reads it: 0x hexadecimal, a leading 0 octal, else decimal."""
    text = text or "0"
    return int(text, 8) if re.fullmatch("0[0-7]+", text) else int(text, 0)


def placed_sources(case: Case) -> set[str]:
    """The devices that the report places, mediated ones by UUID and vDPA ones by path."""
    placed = {(d["kind"], d["source"]) for d in case.report["devices"] if d["placement"] in ("placed", "approximate")}
    host = json.loads(case.host)
    children = [("mdev", entry["uuid"], entry["parent"]) for entry in host.get("mdevs", [])]
    children += [("vdpa", f"/dev/{entry['device']}", entry["parent"]) for entry in host.get("vdpas", [])]
    found = {name for kind, name, parent in children if (kind, parent) in placed}
    return found | {source for kind, source in placed if kind not in ("mdev", "vdpa")}


def check_nothing_else_changed(case: Case, before: str, after: str) -> None:
    old, new = (without_tuning(without_ours(text), case) for text in (before, after))
    placed = placed_sources(case)
    assert map_blocks(old, _mask) == map_blocks(new, _mask), "something outside of the devices changed"
    for was, is_ in zip(blocks(old), blocks(new), strict=True):
        if was.text == is_.text:
            continue
        assert source_of(was.element) in placed, f"this is not placed, but changed:\n{was.text}\n{is_.text}"
        assert without_place(was) == without_place(is_), f"more than its place changed:\n{was.text}\n{is_.text}"


# By option: what it may write outside of the devices, with the elements around it that are then empty.
_TUNING = {
    ("mmio", "apply"): [r"\s*<maxphysaddr [^>]*?(/>|></maxphysaddr>)"],
    ("distances", "host"): [r"<distances>.*?</distances>"],
    ("gpudirect-clique", "by-switch"): [
        r'\s*<qemu:property name="x-nv-gpudirect-clique"[^>]*?(/>|></qemu:property>)',
        r"\s*<qemu:frontend>\s*</qemu:frontend>",
        r"\s*<qemu:device alias=[^>]*>\s*</qemu:device>",
        r"\s*<qemu:override>\s*</qemu:override>",
    ],
}


def without_tuning(text: str, case: Case) -> str:
    """The text without what the case's options let the program write outside of the devices."""
    for option, patterns in _TUNING.items():
        if case.report["options"][option[0]] == option[1]:
            for pattern in patterns:
                text = re.sub(pattern, "", text, flags=re.DOTALL)
    return text


def _mask(block: Block) -> str:
    return block.space + (block.text if block.text.startswith("<controller") else "<device/>")


# --- the tests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    regenerating = bool(request.config.getoption("--regenerate-golden"))
    if regenerating and os.environ.get("CI"):
        pytest.fail("--regenerate-golden is for a human who reads the diff; CI is set")
    case = load(name, regenerating=regenerating)
    assert not schema_errors(json.loads(case.host), "host")

    result = case.transform(case.domain)
    actual = report.as_dict(result.report)
    if regenerating and case.outcome == result.report.outcome == "changed" and result.xml != case.expected:
        case.expected_path.write_bytes(result.xml)
        pytest.fail(f"{case.expected_path} was rewritten: look at the diff, then run without --regenerate-golden")

    problems = list(report_differences(case.report, actual))
    problems += [f"report.schema.json: {error}" for error in schema_errors(actual, "report")]
    before, expected, got = decode(case.domain), decode(case.expected), decode(result.xml)
    aliases = {block.alias for block in blocks(before) if block.is_ours}
    if case.outcome != "changed" and result.xml != case.domain:
        problems.append("the input did not come back as it was:\n" + difference(before, got))
    elif comparable(got, aliases) != comparable(expected, aliases):
        problems.append(
            difference(expected, got) or difference(comparable(expected, aliases), comparable(got, aliases))
        )
    if problems:
        pytest.fail("\n".join((f"{name}:", *problems)), pytrace=False)

    check_nothing_else_changed(case, before, got)
    if case.outcome != "refused":
        again = case.transform(result.xml)
        assert again.xml == result.xml, "the output, transformed again, changed:\n" + difference(got, decode(again.xml))
        assert case.transform(case.domain).xml == result.xml


def test_schemas_are_the_packaged_ones() -> None:
    """The program validates against its own copies; the cases against the project's."""
    for name in ("host", "report"):
        assert schema.schema(name) == json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))


def changed_cases() -> list[str]:
    return [name for name in NAMES if (HERE / "cases" / name / "expected.xml").is_file()]


@pytest.mark.libvirt
@pytest.mark.parametrize("name", changed_cases())
def test_libvirt_takes_it(name: str) -> None:
    """A real libvirt keeps what we wrote and puts nothing of its own on our ports."""
    case = load(name)
    text = decode(case.expected)
    written = libvirt.parse_domain(text)
    try:
        libvirt.ensure_libvirtd()
    except libvirt.LibvirtUnavailable as unavailable:
        pytest.skip(str(unavailable))
    arch = next(written.iterfind("os/type")).get("arch", "x86_64")
    if shutil.which(f"qemu-system-{arch}") is None:
        pytest.skip(f"no qemu-system-{arch}, without which libvirt defines no such domain")
    libvirt.validate(text)
    dumped = libvirt.parse_domain(libvirt.define_and_dump(text))

    ours, kept = our_controllers(written), our_controllers(dumped)
    assert kept == ours
    assert ours, "a transformed domain has controllers of ours"

    placed = placed_sources(case)
    places = {
        source: place_of(device) for device in written.iterfind("devices/*") if (source := source_of(device)) in placed
    }
    assert set(places) == placed
    by_report = [d["guestAddress"] for d in case.report["devices"] if d["placement"] in ("placed", "approximate")]
    assert sorted(map(str, places.values())) == sorted(by_report)

    ports = {f"{int(c['index'] or 0):02x}" for c in ours.values() if c["model"] != "pcie-expander-bus"}
    for device in dumped.iterfind("devices/*"):
        source, place, alias = source_of(device), place_of(device), device.find("alias")
        if source in placed:
            assert place == places[source]
        elif place is not None and (alias is None or not alias.get("name", "").startswith(OURS)):
            assert place.split(":")[1] not in ports, etree.tostring(device, encoding="unicode")


def our_controllers(root: etree._Element) -> dict[str, dict[str, str | None]]:
    """By alias, what must stay of each of our controllers; of an expander its address is libvirt's to choose."""
    found: dict[str, dict[str, str | None]] = {}
    for controller in root.iterfind("devices/controller[@type='pci']"):
        alias = controller.find("alias")
        if alias is None or not alias.get("name", "").startswith(OURS):
            continue
        target = controller.find("target")
        model = controller.get("model")
        found[alias.get("name", "")] = {
            "index": controller.get("index"),
            "model": model,
            "busNr": None if target is None else target.get("busNr"),
            "node": controller.findtext("target/node"),
            "hotplug": None if target is None else target.get("hotplug"),
            "address": place_of(controller) if model != "pcie-expander-bus" else None,
        }
    return found


def place_of(element: etree._Element) -> str | None:
    """The guest PCI address, None where there is none."""
    address = element.find("address")
    if address is None or address.get("type", "pci") != "pci" or address.get("bus") is None:
        return None
    domain, bus, slot, function = (c_number(address.get(part)) for part in ("domain", "bus", "slot", "function"))
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"
