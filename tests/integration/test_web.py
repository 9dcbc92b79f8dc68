"""The debug page over a real socket: whom it answers, what it keeps out, that nothing stays behind."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.support import domains
from tests.support.web import PROGRAM, Page, multipart, problem, serving

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/two-sockets"

DOMAIN = (EXAMPLE / "domain.xml").read_text()
HOST = (EXAMPLE / "host.json").read_text()
VMI = (EXAMPLE / "vmi.yaml").read_text()
FORM = {"domain": DOMAIN, "host": HOST, "vmi": VMI}

NASTY = "<img src=x onerror=alert(1)>\"'&{{7*7}}</textarea></script></style></svg>"

HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with serving() as served:
        yield served


def downloads(html: str) -> dict[str, bytes]:
    """The files that the page carries, by name."""
    found = re.findall(r'download="([^"]+)" href="data:[^;]+;base64,([^"]+)"', html)
    return {name: base64.b64decode(unescape(data)) for name, data in found}


def command(*arguments: object) -> bytes:
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


# --- what comes out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [{}, {"policy": "best-effort", "group-by": "switch", "distances": "host"}], ids=str)
def test_downloads_are_the_command_lines_files(page: Page, tmp_path: Path, chosen: dict[str, str]) -> None:
    flags = [part for name, value in chosen.items() for part in (f"--{name}", value)]
    given = [EXAMPLE / "domain.xml", "--host", EXAMPLE / "host.json", "--vmi", EXAMPLE / "vmi.yaml"]
    inputs = [*given, *flags]
    for_nccl = [f"--{name}={value}" for name, value in chosen.items() if name != "distances"]  # no matter of its file
    xml = command("transform", *inputs, "-q", "--report", tmp_path / "report.json")
    command("explain", *inputs, "--svg", tmp_path / "picture.svg")
    expected = {
        "aligned.xml": xml,
        "report.json": (tmp_path / "report.json").read_bytes(),
        "nccl-topo.xml": command("nccl-topo", *given, *for_nccl, "-q"),
        "picture.svg": (tmp_path / "picture.svg").read_bytes(),
        "domain.diff": command("transform", *inputs, "-q", "--format", "diff"),
    }

    status, _, html = page.send("/", {**FORM, **chosen})
    made = downloads(html)
    assert status == 200
    assert made.pop("pcinuma-result.json")
    assert made == expected


@pytest.mark.parametrize(
    "encoding, mark", [("utf-8", b""), ("iso-8859-1", b""), ("utf-16", b""), ("utf-8", b"\xef\xbb\xbf")]
)
def test_a_file_is_taken_byte_for_byte(page: Page, tmp_path: Path, encoding: str, mark: bytes) -> None:
    text = f'<?xml version="1.0" encoding="{encoding}"?>\r\n' + DOMAIN.replace("ml_train-0", "ml_tränk").replace(
        "\n", "\r\n"
    )
    (tmp_path / "domain.xml").write_bytes(mark + text.encode(encoding))
    expected = command("transform", tmp_path / "domain.xml", "--host", EXAMPLE / "host.json", "-q")
    files = {"domain-file": ("domain.xml", (tmp_path / "domain.xml").read_bytes())}
    status, _, html = page.send("/", {"host": HOST}, files)
    assert (status, downloads(html)["aligned.xml"]) == (200, expected)


def test_pasted_text_is_encoded_as_its_declaration_says(page: Page, tmp_path: Path) -> None:
    text = '<?xml version="1.0" encoding="iso-8859-1"?>\n' + DOMAIN.replace("ml_train-0", "ml_tränk")
    (tmp_path / "domain.xml").write_bytes(text.encode("iso-8859-1"))
    expected = command("transform", tmp_path / "domain.xml", "--host", EXAMPLE / "host.json", "-q")
    _, _, html = page.send("/", {"domain": text, "host": HOST})
    assert downloads(html)["aligned.xml"] == expected


def test_a_chosen_option_wins_over_the_annotation(page: Page) -> None:
    for chosen, expected in (({}, "restricted"), ({"policy": "none"}, "none")):
        _, _, html = page.send("/", {**FORM, **chosen})
        assert json.loads(downloads(html)["report.json"])["options"]["policy"] == expected


def test_a_file_that_was_given_comes_back_with_the_page(page: Page) -> None:
    """With an error elsewhere, and with the result: the form that is sent again has the same bytes."""
    exact = DOMAIN.replace("\n", "\r\n").encode()
    _, _, html = page.send("/", {"host": "{}"}, {"domain-file": ("my domain.xml", exact)})
    kept = re.search(r'name="domain-kept" value="([^"]+)"', html)
    assert kept is not None
    assert "my domain.xml" in html
    assert base64.b64decode(kept[1]) == exact
    again = {"host": HOST, "domain-kept": kept[1], "domain-kept-name": "my domain.xml"}
    status, _, html = page.send("/", again)
    assert (status, "domain-kept" in html) == (200, True)
    assert downloads(html)["aligned.xml"].count(b"\r\n") >= exact.count(b"\r\n")

    status, _, html = page.send("/", {**again, "domain-drop": "1"})
    assert (status, problem(html, "domain")[:14]) == (422, "✗no domain XML")
    status, _, html = page.send("/", {**again, "domain-kept": "%%%"})
    assert (status, "come back whole" in problem(html, "domain")) == (422, True)


def test_this_machine_is_the_host(page: Page) -> None:
    """The machine of the test has none of the example's functions: each device is missing, and the page says so."""
    status, _, html = page.send("/", {"domain": DOMAIN, "source": "machine"})
    assert status == 200
    found = json.loads(downloads(html)["report.json"])["findings"]
    assert {finding["code"] for finding in found} >= {"device-missing"}


def test_a_domain_without_devices_needs_no_host(page: Page) -> None:
    status, _, html = page.send("/", {"domain": domains.domain({0: 0}, [])})
    assert status == 200
    assert json.loads(downloads(html)["report.json"])["findings"][0]["code"] == "no-devices"


# --- errors, each at its field ---------------------------------------------------------------------------------

ANNOTATED = "kind: VirtualMachineInstance\nmetadata:\n  annotations:\n    pcinuma.vm.kubevirt.io/"


@pytest.mark.parametrize(
    "values, field, text",
    [
        ({"domain": ""}, "domain", "no domain XML"),
        ({"domain": "<domain>\n<oops"}, "domain", "not well-formed XML"),
        ({"domain": "<network/>"}, "domain", "the root element is <network>"),
        ({"domain": "<!DOCTYPE domain [<!ENTITY a 'b'>]><domain/>"}, "domain", "DOCTYPE"),
        ({"domain": " " * (2 * 2**20) + "<domain/>"}, "domain", "larger than 2 MiB"),
        ({"host": ""}, "host", "no host"),
        ({"host": "{"}, "host", "not JSON"),
        ({"host": '{"kind": "pcinuma-host", "version": 7}'}, "host", "version 7"),
        ({"host": '{"kind": "pcinuma-host", "version": 1}'}, "host", "not valid against host.schema.json"),
        ({"host": "x" * (8 * 2**20 + 1)}, "host", "larger than 8 MiB"),
        ({"source": "elsewhere"}, "host", "source cannot be 'elsewhere'"),
        ({"vmi": "kind: Pod"}, "vmi", "kind is 'Pod'"),
        ({"vmi": "a: [b"}, "vmi", "not YAML"),
        ({"vmi": f"{ANNOTATED}policy: strict"}, "vmi", "policy cannot be 'strict'"),
        ({"vmi": f"{ANNOTATED}colour: red"}, "vmi", "unknown annotation"),
        ({"vmi": "# " + "x" * 2**20}, "vmi", "larger than 1 MiB"),
        ({"policy": "strict"}, "policy", "policy cannot be 'strict'"),
        ({"gpudirect-clique": "all"}, "gpudirect-clique", "gpudirect-clique cannot be 'all'"),
    ],
)
def test_an_error_stands_at_its_field_and_the_input_is_kept(
    page: Page, values: dict[str, str], field: str, text: str
) -> None:
    sent = {**FORM, **values}
    status, _, html = page.send("/", sent)
    assert status == 422
    assert text in problem(html, field)
    assert len(re.findall(r'class="problem"', html)) == 1
    described = re.search(rf'<(?:textarea|select) id="{field}"[^>]*>', html)
    assert described is not None
    assert f'aria-describedby="{field}-about {field}-error" aria-invalid="true" autofocus' in described[0]
    for name in ("domain", "host", "vmi"):
        shown = re.search(rf'<textarea id="{name}"[^>]*>\n(.*?)</textarea>', html, re.S)
        assert shown is not None
        assert unescape(shown[1]) == (sent[name] if sent[name].strip() else "")
    assert "Traceback" not in html


def test_all_errors_are_told_at_once(page: Page) -> None:
    status, _, html = page.send("/", {"domain": "<", "host": "{}", "vmi": "kind: Pod", "policy": "x", "mmio": "y"})
    assert status == 422
    assert re.findall(r'class="problem" id="([\w-]+)-error"', html) == ["domain", "host", "vmi", "policy", "mmio"]
    assert html.count("autofocus") == 1
    assert "<title>Error: 5 fields to correct" in html


def test_a_refusal_is_a_result(page: Page) -> None:
    host = HOST.replace('"node": 1', '"node": -1')
    status, _, html = page.send("/", {**FORM, "host": host, "policy": "restricted"})
    assert (status, "✗ refused" in html, "policy-not-met" in html) == (200, True, True)
    assert "aligned.xml" not in downloads(html)
    assert "No NCCL file: the domain is refused" in html


# --- check -----------------------------------------------------------------------------------------------------

WRONG_CELL = ROOT / "tests/golden/cases/foreign-expander-wrong-cell-keep"


@pytest.mark.parametrize(
    "folder, headline, chip",
    [
        # none of the seven is on an expander
        (EXAMPLE, "The domain as it stands: 7 warnings", "! warnings"),
        (WRONG_CELL, "The domain as it stands: 1 error", "✗ errors"),
    ],
    ids=["warnings", "error"],
)
def test_a_check_is_the_commands(page: Page, folder: Path, headline: str, chip: str) -> None:
    domain, host = folder / "domain.xml", folder / "host.json"
    status, _, html = page.send("/check", {"domain": domain.read_text(), "host": host.read_text()})
    assert status == 200
    assert downloads(html) == {"check.json": command("check", domain, "--host", host, "--json")}
    assert f"<title>{headline}" in html
    assert chip in html
    for finding in json.loads(downloads(html)["check.json"])["findings"]:
        assert finding["message"] in unescape(html)


def test_a_check_takes_annotations_and_options(page: Page) -> None:
    """mmio off: the same domain, and nothing said of its address space."""
    eight = ROOT / "tests/golden/cases/mmio-report-seabios"
    form = {"domain": (eight / "domain.xml").read_text(), "host": (eight / "host.json").read_text()}
    annotated = f"{ANNOTATED}mmio: 'off'"
    for sent, told in (({}, True), ({"mmio": "off"}, False), ({"vmi": annotated}, False)):
        _, _, html = page.send("/check", {**form, **sent})
        codes = {finding["code"] for finding in json.loads(downloads(html)["check.json"])["findings"]}
        assert ("mmio-window" in codes) == told


def test_a_check_without_a_host_is_one_of_the_domain_alone(page: Page) -> None:
    """As with the command: the audit needs no host, and that it had none is a finding."""
    domain = (WRONG_CELL / "domain.xml").read_text()
    status, _, html = page.send("/check", {"domain": domain})
    (finding,) = json.loads(downloads(html)["check.json"])["findings"]
    assert (status, finding["code"], finding["message"]) == (200, "host-unreadable", "the host cannot be read: no host")


@pytest.mark.parametrize(
    "values, field, text",
    [
        ({"domain": ""}, "domain", "no domain XML"),
        ({"domain": "<domain>"}, "domain", "not well-formed XML"),
        ({"host": "{"}, "host", "not JSON"),
        ({"vmi": "kind: Pod"}, "vmi", "kind is 'Pod'"),
        ({"policy": "strict"}, "policy", "policy cannot be 'strict'"),
    ],
)
def test_a_checks_errors_stand_at_their_fields(page: Page, values: dict[str, str], field: str, text: str) -> None:
    status, _, html = page.send("/check", {**FORM, **values})
    assert (status, text in problem(html, field), "check.json" in html) == (422, True, False)


def test_a_check_of_more_devices_than_can_be_shown_is_refused(page: Page) -> None:
    names = [f"{number // 256:04x}:{number % 256:02x}:00.0" for number in range(1001)]
    domain = domains.domain({0: 0}, [domains.hostdev(name, f"ua-{name}") for name in names])
    status, _, html = page.send("/check", {"domain": domain})
    assert status == 422
    assert "1001 passthrough devices: this page shows 1000 at most" in problem(html, "domain")


# --- result files ----------------------------------------------------------------------------------------------


def body_of(html: str) -> str:
    """What is told of a result: from the picture on, up to the form."""
    return html[
        html.index('<section aria-labelledby="picture">') : html.index('<section aria-labelledby="inputs-title"')
    ]


def test_a_result_file_opens_again_and_shows_the_same(page: Page) -> None:
    _, _, html = page.send("/", {**FORM, "unmapped": "nearest"})
    files = downloads(html)
    share = files["pcinuma-result.json"]
    assert b"ml_train-0" not in share, "the whole domain is in it"
    status, _, again = page.send("/open", {}, {"result": ("pcinuma-result.json", share)})
    assert status == 200
    assert "Opened from pcinuma-result.json" in again
    assert body_of(again) == body_of(html)
    del files["aligned.xml"]
    assert downloads(again) == files


@pytest.mark.parametrize("content, status", [(None, 200), (b"{}", 422)])
def test_opening_keeps_what_is_in_the_other_fields(page: Page, content: bytes | None, status: int) -> None:
    share = content or downloads(page.send("/", FORM)[2])["pcinuma-result.json"]
    typed = {"domain": "<domain>mine</domain>", "policy": "restricted"}
    files = {"result": ("r.json", share), "vmi-file": ("my.yaml", b"kind: mine")}
    seen, _, html = page.send("/open", typed, files)
    assert seen == status
    assert "&lt;domain&gt;mine&lt;/domain&gt;</textarea>" in html
    assert "<option selected>restricted</option>" in html
    assert 'name="vmi-kept-name" value="my.yaml"' in html


def test_the_address_of_an_opened_result_leads_to_the_page(page: Page) -> None:
    status, headers, _ = page.ask("GET", "/open")
    assert (status, headers["location"]) == (303, "/")


def test_a_report_of_the_command_line_opens(page: Page) -> None:
    report = command("explain", EXAMPLE / "domain.xml", "--host", EXAMPLE / "host.json", "--json")
    status, _, html = page.send("/open", {}, {"result": ("report.json", report)})
    assert (status, html.count("<td>placed</td>"), downloads(html)) == (200, 7, {"report.json": report})


KEPT = """
<controller type="pci" index="0" model="pcie-root"/>
<controller type="pci" index="1" model="pcie-expander-bus"><target busNr="200"><node>1</node></target>
<address type="pci" domain="0" bus="0" slot="4" function="0"/></controller>
<controller type="pci" index="2" model="pcie-root-port"><target chassis="2" port="0"/>
<address type="pci" domain="0" bus="1" slot="0" function="0"/></controller>
<controller type="pci" index="3" model="pcie-root-port"><target chassis="3" port="8"/>
<address type="pci" domain="0" bus="1" slot="1" function="0"/></controller>
<controller type="pci" index="4" model="pcie-root-port"><target chassis="4" port="9"/>
<address type="pci" domain="0" bus="0" slot="5" function="0"/></controller>
"""


def test_the_table_has_the_pictures_marks(page: Page) -> None:
    """Three devices that keep their addresses: on a foreign cell, on their own, on a port of bus 0."""
    at = '<address type="pci" domain="0" bus="{}" slot="0" function="0"/>'
    devices = [domains.hostdev(f"0000:{40 + bus}:00.0", f"ua-{bus}", at.format(bus)) for bus in (2, 3, 4)]
    domain = domains.domain({0: 0, 1: 1}, [KEPT, *devices])
    functions = [{"address": f"0000:{40 + bus}:00.0", "node": int(bus == 3)} for bus in (2, 3, 4)]
    nodes = [{"id": node, "cpus": f"{8 * node}-{8 * node + 7}"} for node in (0, 1)]
    host = {"kind": "pcinuma-host", "version": 1, "nodes": nodes, "functions": functions}
    status, _, html = page.send("/", {"domain": domain, "host": json.dumps(host)})
    assert status == 200, problem(html, "domain") + problem(html, "host")
    rows = re.findall(r"<tr>(.*?)</tr>", html[html.index("<tbody>") : html.index("</tbody>")], re.S)
    cells = [
        [unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in re.findall(r"<td.*?</td>", row)] for row in rows
    ]
    # host node, the cell of that node, the cell that the guest sees, how that fits
    assert [row[2:6] for row in cells] == [
        ["0", "0", "1", "✗ on a foreign cell"],
        ["0", "0", "none", "✗ the guest sees no node"],
        ["1", "1", "1", "✓ on its own cell"],
    ]
    assert '<span class="chip near">! unchanged</span>' in html
    share = downloads(html)["pcinuma-result.json"]
    assert body_of(page.send("/open", {}, {"result": ("r.json", share)})[2]) == body_of(html)


def result_with(page: Page, change: Any) -> bytes:
    _, _, html = page.send("/", FORM)
    content = json.loads(downloads(html)["pcinuma-result.json"])
    change(content)
    return json.dumps(content).encode()


def deep(content: dict[str, Any]) -> None:
    inner = content["picture"]["after"]["boxes"][0]
    for _ in range(40):
        inner = {"kind": "bus", "title": "", "detail": "", "nodes": [], "children": [inner]}
    content["picture"]["after"]["boxes"][0] = inner


def nested(depth: int) -> Any:
    inner: Any = []
    for _ in range(depth):
        inner = [inner]
    return inner


BOX = {"kind": "bus", "title": "", "detail": "", "nodes": [], "children": []}


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda c: c.update(version=2), "version 2"),
        (lambda c: c.update(version=True), "version True"),
        (lambda c: c.update(kind="other"), "not a result"),
        (lambda c: c.update(script="alert(1)"), "not valid against result.schema.json"),
        (lambda c: c["report"].update(outcome="<b>"), "not valid against report.schema.json"),
        (lambda c: c["picture"]["devices"].pop(), "no device"),
        (lambda c: c["picture"]["host"]["boxes"].clear(), "does not have each device once"),
        (lambda c: c["picture"]["devices"].append(c["picture"]["devices"][0]), "does not have each device once"),
        (lambda c: c["picture"]["after"].update(c["picture"]["host"]), "wrong fit or address"),
        (lambda c: c["picture"].update(headline="\ud800"), "text that is none"),
        (deep, "nested too deeply"),
        (lambda c: c.update(picture=nested(900)), "nested too deeply"),
        (lambda c: c["report"].update(more=nested(900)), "nested too deeply"),
        (lambda c: c["nccl"].update(more=nested(900)), "nested too deeply"),
        (lambda c: c.update(diff="+\n" * 50_001), "the diff has 50001 lines: 50000 are shown at most"),
        (lambda c: c["report"].update(devices=[1] * 1001), "report has 1001 devices: 1000 are shown at most"),
        (lambda c: c["report"].update(findings=[1] * 5001), "report has 5001 findings: 5000 are shown at most"),
        (lambda c: c["nccl"].update(findings=[1] * 5001), "nccl has 5001 findings: 5000 are shown at most"),
        (lambda c: c["picture"].update(devices=[1] * 1001), "picture has 1001 devices: 1000 are shown at most"),
        (lambda c: c["picture"]["host"]["boxes"].extend([BOX] * 10_001), "boxes and devices: 10000 are shown at most"),
    ],
)
def test_a_result_file_that_is_none_is_refused_at_its_field(page: Page, change: Any, text: str) -> None:
    status, _, html = page.send("/open", {}, {"result": ("r.json", result_with(page, change))})
    assert status == 422
    assert text in problem(html, "result")


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"null", b"[" * 100_000, b"{" * 10, b"1" * 5000, b"x" * (8 * 2**20 + 1)]
)
def test_a_file_that_is_no_result_is_refused(page: Page, data: bytes) -> None:
    status, _, html = page.send("/open", {}, {"result": ("r.json", data)})
    assert (status, bool(problem(html, "result"))) == (422, True)


@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_a_deep_report_or_host_is_refused_at_its_field(page: Page, depth: int) -> None:
    lists = "[" * depth + "]" * depth
    report = f'{{"outcome":"changed","devices":{lists}}}'.encode()
    status, _, html = page.send("/open", {}, {"result": ("r.json", report)})
    assert (status, "nested too deeply" in problem(html, "result")) == (422, True)
    host = f'{{"kind":"pcinuma-host","version":1,"x":{lists}}}'
    status, _, html = page.send("/", {"domain": DOMAIN, "host": host})
    assert (status, "nested too deeply" in problem(html, "host")) == (422, True)


@pytest.mark.parametrize("count, status", [(1000, 200), (1001, 422)])
def test_more_devices_than_can_be_shown_are_refused(page: Page, count: int, status: int) -> None:
    names = [f"{number // 256:04x}:{number % 256:02x}:00.0" for number in range(count)]
    domain = domains.domain({0: 0}, [domains.hostdev(name, f"ua-{name}") for name in names])
    functions = [{"address": name, "node": 0} for name in names]
    host = {"kind": "pcinuma-host", "version": 1, "nodes": [{"id": 0, "cpus": "0-15"}], "functions": functions}
    seen, _, html = page.send("/", {"domain": domain, "host": json.dumps(host)})
    assert seen == status, problem(html, "host")
    told = "1001 passthrough devices: this page shows 1000 at most" in problem(html, "domain")
    assert told == (status == 422)


def test_no_file_is_told(page: Page) -> None:
    status, _, html = page.send("/open", {})
    assert (status, "no file" in problem(html, "result")) == (422, True)


# --- markup in names -------------------------------------------------------------------------------------------


def xml(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")


def test_markup_in_the_domain_comes_out_as_text(page: Page) -> None:
    domain = DOMAIN.replace("ua-gpu-gpu0", f"ua-{xml(NASTY)}").replace("<name>", f"<title>{xml(NASTY)}</title><name>")
    for path in ("/", "/check"):
        status, _, html = page.send(path, {"domain": domain, "host": HOST})
        assert status == 200
        assert harmless(html)


@pytest.mark.parametrize(
    "values, files",
    [
        ({"vmi": json.dumps({"kind": NASTY})}, {}),
        ({"vmi": json.dumps({"kind": "VirtualMachineInstance", "metadata": {"annotations": {f"pcinuma.vm.kubevirt.io/{NASTY}": "x"}}})}, {}),
        ({"host": json.dumps({"kind": "pcinuma-host", "version": NASTY})}, {}),
        ({"host": json.dumps({**json.loads(HOST), NASTY: 1})}, {}),
        ({"domain": f"<{NASTY}"}, {}),
        ({"policy": NASTY}, {}),
        ({"source": NASTY}, {}),
        ({"domain-kept": base64.b64encode(b"<x/>").decode(), "domain-kept-name": NASTY, "domain": ""}, {}),
        ({"domain": ""}, {"domain-file": (NASTY.replace('"', "%22"), b"<x/>")}),
    ],
)  # fmt: skip
def test_markup_in_what_is_wrong_comes_out_as_text(
    page: Page, values: dict[str, str], files: dict[str, tuple[str, bytes]]
) -> None:
    status, _, html = page.send("/", {**FORM, **values}, files)
    assert status == 422
    assert harmless(html)


def test_markup_in_a_result_file_comes_out_as_text(page: Page) -> None:
    def change(content: dict[str, Any]) -> None:
        report, picture = content["report"], content["picture"]
        report["devices"][0].update(alias=NASTY, reason=NASTY)
        for severity, code in (("warning", "mmio-window"), ("error", "no-such-code"), ("info", "node-of-pf")):
            report["findings"].append(
                {"code": code, "severity": severity, "message": NASTY, "device": NASTY, "hint": NASTY}
            )
        picture["headline"] = NASTY
        picture["devices"][0].update(alias=NASTY, label=NASTY, path=[NASTY])
        for part in ("host", "before", "after"):
            picture[part]["title"] = NASTY
            picture[part]["boxes"][0].update(title=NASTY, detail=NASTY)
        content["diff"] = f"--- a\n+++ b\n@@ -1 +1 @@\n-{NASTY}\n+\u202e{NASTY}\n"
        content["nccl"].update(file=NASTY, problem=NASTY, findings=report["findings"])

    status, _, html = page.send("/open", {}, {"result": (NASTY.replace('"', "%22"), result_with(page, change))})
    assert status == 200
    assert harmless(html)
    assert "\u202e" not in html, "a character that turns the text around is shown as it is"


def harmless(html: str) -> bool:
    """No markup of NASTY's is markup in the page."""
    from lxml.html import document_fromstring

    assert "49" not in re.findall(r"(?<!\d)49(?!\d)", html) or "{{7*7}}" in html
    tree = document_fromstring(html)
    assert [image.get("src") for image in tree.iter("img")] == ["/assets/icon.svg"]
    assert [script.get("src") for script in tree.iter("script")] == ["/assets/page.js"]
    assert not tree.xpath("//@*[starts-with(name(), 'on')]")
    assert "<img src=x" not in html
    return True


# --- whom it answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:9", "127.9.9.9"])
def test_loopback_names_are_answered_under_any_port(page: Page, host: str) -> None:
    assert page.ask("GET", "/", host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "localhost.evil.example", "10.0.0.1", "", "127.0.0.1.evil.example", "[::1", "::1:80"])  # fmt: skip
def test_other_names_are_not(page: Page, host: str) -> None:
    status, headers, body = page.ask("GET", "/example", host=host)
    assert (status, "hugepages" in body) == (421, False)
    assert headers["x-frame-options"] == "DENY"
    assert page.ask("GET", "/assets/page.css", host=host)[0] == 421


def test_the_name_that_listen_says_is_answered() -> None:
    name = socket.gethostname()
    try:
        bound = socket.getaddrinfo(name, 0, socket.AF_INET)[0][4][0]
    except OSError:
        pytest.fail(f"this machine does not know its own name {name}")
    with serving(f"{name}:0") as page:
        client = http.client.HTTPConnection(str(bound), page.port, timeout=10)
        client.request("GET", "/", headers={"Host": f"{name.upper()}:{page.port}"})
        assert client.getresponse().status == 200
        client.close()


def test_on_all_addresses_it_warns_and_does_not_read_this_machine() -> None:
    with serving("0.0.0.0:0") as page:
        assert "warning: the page is served on 0.0.0.0:" in page.said
        assert "without encryption and without a login" in page.said
        status, _, html = page.ask("GET", "/", host="10.1.2.3:80")
        assert (status, 'value="machine"' in html) == (200, False)
        assert page.ask("GET", "/", host="evil.example")[0] == 421
        status, _, html = page.send("/", {"domain": DOMAIN, "source": "machine"})
        assert (status, "this machine is not read" in problem(html, "host")) == (422, True)
        assert page.end() == 0


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", ":0", "127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_the_address_that_it_prints_answers(listen: str) -> None:
    with serving(listen) as page:
        url = re.search(r"is at (http://\S+)", page.said)
        assert url is not None
        with urllib.request.urlopen(url[1], timeout=20) as answer:
            assert answer.status == 200


def test_no_host_in_listen_is_loopback() -> None:
    with serving(":0") as page:
        assert page.said.startswith("pcinuma: the debug page is at http://127.0.0.1:")
        assert 'value="machine"' in page.ask("GET", "/")[2]


def test_on_loopback_it_does_not_warn(page: Page) -> None:
    assert page.said.startswith("pcinuma: the debug page is at http://127.0.0.1:")
    assert 'value="machine"' in page.ask("GET", "/")[2]


@pytest.mark.parametrize("listen", ["", "8080", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", "::1:8080"])
def test_a_listen_that_is_none_is_told(listen: str) -> None:
    done = subprocess.run([PROGRAM, "web", "--listen", listen], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"pcinuma: error: listen cannot be '{listen}' (--listen)"
    assert done.stderr.splitlines()[1] == "hint: write it as 127.0.0.1:8080 or [::1]:8080"


def test_an_address_in_use_is_told(page: Page) -> None:
    at = f"127.0.0.1:{page.port}"
    done = subprocess.run([PROGRAM, "web", "--listen", at], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (2, f"pcinuma: error: cannot listen: Address already in use ({at})\n")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"origin": "http://localhost:1"},
    ],
    ids=str,
)
def test_another_sites_form_is_refused(page: Page, headers: dict[str, str]) -> None:
    for path in ("/", "/check", "/open"):
        status, _, html = page.send(path, FORM, None, **headers)
        assert (status, "another site sent this form" in html, downloads(html)) == (400, True, {})


def test_its_own_form_is_taken(page: Page) -> None:
    at = f"127.0.0.1:{page.port}"
    assert page.send("/", FORM, host=at, origin=f"http://{at}", sec_fetch_site="same-origin")[0] == 200


# --- every answer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, path, status, kind",
    [
        ("GET", "/", 200, "text/html; charset=utf-8"),
        ("HEAD", "/", 200, "text/html; charset=utf-8"),
        ("GET", "/example", 200, "text/html; charset=utf-8"),
        ("GET", "/docs/findings", 200, "text/html; charset=utf-8"),
        ("GET", "/docs/nccl", 200, "text/html; charset=utf-8"),
        ("GET", "/assets/page.css", 200, "text/css; charset=utf-8"),
        ("GET", "/assets/page.js", 200, "text/javascript; charset=utf-8"),
        ("GET", "/assets/icon.svg", 200, "image/svg+xml; charset=utf-8"),
        ("GET", "/nothing", 404, "text/html; charset=utf-8"),
        ("GET", "/docs/../../etc/passwd", 404, "text/html; charset=utf-8"),
        ("GET", "/assets/..%2f..%2fweb.py", 404, "text/html; charset=utf-8"),
        ("GET", "/docs/%3Cscript%3E", 404, "text/html; charset=utf-8"),
        ("PUT", "/", 405, "text/html; charset=utf-8"),
        ("DELETE", "/example", 405, "text/html; charset=utf-8"),
        ("GET", "/open", 303, "text/html; charset=utf-8"),
        ("GET", "/check", 303, "text/html; charset=utf-8"),
        ("POST", "/check", 415, "text/html; charset=utf-8"),
        ("POST", "/", 415, "text/html; charset=utf-8"),
    ],
)
def test_headers_are_on_every_answer(page: Page, method: str, path: str, status: int, kind: str) -> None:
    got, headers, body = page.ask(method, path)
    assert (got, headers["content-type"]) == (status, kind)
    assert {name: headers.get(name) for name in HEADERS} == HEADERS
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert "unsafe" not in headers["content-security-policy"]
    assert "server" not in headers
    assert "Traceback" not in body
    if status == 405:
        assert headers["allow"]


@pytest.mark.parametrize(
    "body, kind",
    [
        (b"x", "multipart/form-data"),
        (b"x", "multipart/form-data; boundary=a"),
        (b"--a\r\nx", "multipart/form-data; boundary=a"),
        (b"--a\r\n\r\nx\r\n--a--\r\n", "multipart/form-data; boundary=a"),
        (b'--a\r\nContent-Disposition: form-data; name="domain"\r\n\r\nx', "multipart/form-data; boundary=a"),
        (b"domain=%ff&\xff", "application/x-www-form-urlencoded"),
        (b"x", "multipart/form-data; boundary=\xc3\xa4"),
    ],
)
def test_a_malformed_form_is_told(page: Page, body: bytes, kind: str) -> None:
    status, _, html = page.ask("POST", "/", body, content_type=kind)
    assert status in (400, 422), html
    assert "Traceback" not in html
    assert "internal error" not in html


def test_more_parts_than_a_form_has_are_refused(page: Page) -> None:
    assert page.send("/", {f"f{number}": "x" for number in range(100)})[0] == 413


def test_more_bytes_than_all_inputs_may_have_are_refused(page: Page) -> None:
    status, headers, body = page.send("/", {"domain": "x" * (24 * 2**20)})
    assert (status, body) == (413, "the body is larger than 24 MiB\n")
    assert {name: headers.get(name) for name in HEADERS} == HEADERS


def test_the_inputs_at_their_limits_are_taken(page: Page) -> None:
    """As kept files, so in base64: what the limit of a request allows for."""
    domain = DOMAIN.encode() + b"<!--" + b"x" * (2 * 2**20 - len(DOMAIN.encode()) - 7) + b"-->"
    host = HOST.encode() + b" " * (8 * 2**20 - len(HOST.encode()))
    vmi = VMI.encode() + b"#" * (2**20 - len(VMI.encode()))
    kept = {f"{n}-kept": base64.b64encode(d).decode() for n, d in (("domain", domain), ("host", host), ("vmi", vmi))}
    status, _, html = page.send("/", kept)
    assert (status, "✓ changed" in html) == (200, True)
    status, _, html = page.send(
        "/", {}, {"domain-file": ("d", domain), "host-file": ("h", host), "vmi-file": ("v", vmi)}
    )
    assert (status, "✓ changed" in html) == (200, True)


# --- slow clients, and the end ---------------------------------------------------------------------------------


def begun(page: Page, body: bytes, kind: str, sent: int) -> socket.socket:
    """A request whose body stops in its middle."""
    head = f"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", page.port), timeout=20)
    connection.sendall(head.encode() + body[:sent])
    return connection


def test_slow_clients_hold_nobody_up_and_are_told() -> None:
    body, kind = multipart(FORM, {})
    with serving() as page, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(begun(page, body, kind, 100)) for _ in range(40)]
        started = time.monotonic()
        assert page.send("/", FORM)[0] == 200
        assert time.monotonic() - started < 5
        answer = slow[0].recv(4096)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"x-frame-options: DENY" in answer
        stack.close()
        assert page.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_cleanly_with_a_request_in_flight(number: int) -> None:
    with serving() as page, begun(page, *multipart(FORM, {}), 100):
        first = page.said
        started = time.monotonic()
        assert page.end(number) == 0
        assert time.monotonic() - started < 8
        assert page.said == first, "it said something at its end"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", page.port), timeout=1)


# --- nothing stays ---------------------------------------------------------------------------------------------


def test_nothing_is_stored_or_logged() -> None:
    """The process can write no file at all (RLIMIT_FSIZE), large uploads included; standard error has its first line."""
    marker = "zq8marker"
    large = DOMAIN.encode() + f"<!--{marker}".encode() + b"x" * 1_500_000 + b"-->"
    with serving() as page:
        first = page.said
        results = [
            page.send("/", {"host": HOST}, {"domain-file": (f"{marker}.xml", large)})[0],
            page.send("/", {**FORM, "domain": f"<{marker}", "host": marker, "vmi": marker, "policy": marker})[0],
            page.send("/open", {}, {"result": (marker, marker.encode())})[0],
            page.ask("GET", f"/{marker}?{marker}")[0],
            page.ask("POST", f"/{marker}", marker.encode(), content_type=marker, cookie=marker)[0],
            page.ask("GET", "/", host=marker)[0],
        ]
        assert results == [200, 422, 422, 404, 415, 421]
        open_files = [path.resolve() for path in Path(f"/proc/{page.process.pid}/fd").iterdir()]
        assert not [path for path in open_files if path.is_file()]
        assert page.end() == 0
        assert page.said == first


def test_nobody_who_reads_what_it_says_is_no_reason_to_end() -> None:
    process = subprocess.Popen([PROGRAM, "web", "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr is not None
        found = re.search(r":(\d+)/", process.stderr.readline())
        process.stderr.close()
        assert found is not None
        client = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=10)
        client.request("GET", "/")
        assert client.getresponse().status == 200
        client.close()
        process.terminate()
        assert process.wait(20) == 0


def test_many_at_once_are_answered(page: Page) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(page.send("/", FORM)[0])) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [200] * 12


# --- what is installed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["source", "sdist"])
def test_the_wheel_has_all_that_the_page_shows(tmp_path: Path, of: str) -> None:
    """Made by the build backend as pip would, of the source or of its sdist, and run from where it is unpacked."""
    made = tmp_path / "made"
    made.mkdir()
    code = "import sys, hatchling.build as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"

    def build(what: str, source: Path) -> Path:
        done = subprocess.run(
            [sys.executable, "-c", code, what, made], cwd=source, capture_output=True, text=True, check=True
        )
        return made / done.stdout.split()[-1]

    source = ROOT
    if of == "sdist":
        with tarfile.open(build("build_sdist", ROOT)) as archive:
            archive.extractall(tmp_path, filter="data")
        source = next(path for path in tmp_path.iterdir() if path.name.startswith("pcinuma-"))
    with zipfile.ZipFile(build("build_wheel", source)) as wheel:
        wheel.extractall(tmp_path / "site")
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    where = subprocess.run(
        [sys.executable, "-c", "import pcinuma; print(pcinuma.__file__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(tmp_path))

    with serving(**environment) as page:
        for path in ("", "assets/page.css", "assets/page.js", "assets/icon.svg", "docs/findings", "docs/nccl"):
            assert page.ask("GET", f"/{path}")[0] == 200
        html = page.ask("GET", "/example")[2]
        filled = {
            name: unescape(text) for name, text in re.findall(r'<textarea id="(\w+)".*?>\n(.*?)</textarea>', html, re.S)
        }
        assert filled == FORM
        status, _, html = page.send("/", filled)
        share = downloads(html)["pcinuma-result.json"]
        assert (status, page.send("/open", {}, {"result": ("r", share)})[0]) == (200, 200)
