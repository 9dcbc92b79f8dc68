"""The debug page in a real Chromium: the whole story, errors, keyboard, no script, both themes, phone and desk."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from tests.support.browser import Watched, violations
from tests.support.pictures import machine_files
from tests.support.web import PROGRAM, Page, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as Tab

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/two-sockets"
DOMAIN, HOST, VMI = EXAMPLE / "domain.xml", EXAMPLE / "host.json", EXAMPLE / "vmi.yaml"

REJECTED = "Failed to load resource: the server responded with a status of 422 ()"
"""What Chromium says of any page with this status, and of nothing else here."""

Scheme = Literal["light", "dark"]
LOOKS: tuple[tuple[Scheme, int], ...] = (("light", 1280), ("light", 390), ("dark", 1280), ("dark", 390))


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with serving() as served:
        yield served


@contextmanager
def opened(browser: Browser, page: Page, path: str = "", **context: Any) -> Iterator[Tab]:
    """A tab on the page, in a profile of its own. It asks nobody but the page, and complains of nothing."""
    profile = browser.new_context(**context)
    tab = profile.new_page()
    watched = Watched(tab)
    try:
        tab.goto(page.url + path)
        yield tab
        assert [line for line in watched.complaints if line != REJECTED] == []
        assert [url for url in watched.requests if not url.startswith((page.url, "data:"))] == []
    finally:
        profile.close()


def downloaded(tab: Tab, name: str) -> bytes:
    with tab.expect_download() as waiting:
        tab.click(f'a[download="{name}"]')
    assert waiting.value.suggested_filename == name
    return Path(waiting.value.path()).read_bytes()


def command(*arguments: object) -> bytes:
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, check=True).stdout


def send(tab: Tab) -> None:
    """Press the main button, and wait for the page that comes."""
    with tab.expect_navigation():
        tab.get_by_role("button", name="Show where devices go").click()


def overflow(tab: Tab) -> int:
    """By how many pixels the page is wider than its window."""
    return int(tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


# --- the story -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [True, False], ids=["with JavaScript", "without JavaScript"])
def test_from_paste_to_download_and_open_again(browser: Browser, page: Page, tmp_path: Path, script: bool) -> None:
    report = tmp_path / "report.json"
    inputs = (DOMAIN, "--host", HOST, "--vmi", VMI, "--group-by", "root-complex")
    aligned = command("transform", *inputs, "-q", "--report", report)
    nccl = command("nccl-topo", *inputs, "-q")

    with opened(browser, page, java_script_enabled=script) as tab:
        tab.get_by_label("Domain XML", exact=True).fill(DOMAIN.read_text())
        tab.get_by_label("Host record", exact=True).fill(HOST.read_text())
        tab.get_by_label("VM or VMI (optional)", exact=True).fill(VMI.read_text())
        tab.get_by_text("Options", exact=True).click()
        tab.get_by_label("group-by").select_option("root-complex")
        send(tab)

        heading = tab.get_by_role("heading", level=1)
        assert "7 passthrough devices: 0 of 7 on their own cell before, 7 of 7 after" in heading.inner_text()
        assert heading.evaluate("h => h === document.activeElement"), "a screen reader does not begin at the result"
        assert tab.title().startswith("Changed: 7 passthrough devices")
        assert tab.get_by_role("img", name="7 passthrough devices").is_visible()
        assert tab.locator("svg text", has_text="0000:1a:00.0").is_visible()
        rows = tab.locator("#devices ~ .scroll tbody tr")
        made = {d["source"]: d for d in json.loads(report.read_text())["devices"]}
        assert rows.count() == len(made) == 7
        for cells in [rows.nth(number).locator("th, td").all_inner_texts() for number in range(7)]:
            device = made[cells[1]]
            cell = str(device["cell"])
            expected = [device["alias"], str(device["hostNode"]), cell, cell, "✓ on its own cell", "placed"]
            assert cells[2:9] == [*expected, device["guestBDF"]]
        diff = tab.locator("#diff-text").inner_text()
        assert "+" in diff
        assert 'alias name="ua-pcinuma-cell0' in diff

        assert downloaded(tab, "aligned.xml") == aligned
        assert downloaded(tab, "report.json") == report.read_bytes()
        assert downloaded(tab, "nccl-topo.xml") == nccl
        assert downloaded(tab, "domain.diff") == command("transform", *inputs, "-q", "--format", "diff")
        share = downloaded(tab, "pcinuma-result.json")
        shown = {part: tab.locator(part).inner_text() for part in ("#devices ~ .scroll table", "#diff-text")}
        drawn = tab.locator("svg").inner_html()
        assert tab.get_by_label("group-by").input_value() == "root-complex", "the form does not hold what was chosen"

    (tmp_path / "pcinuma-result.json").write_bytes(share)
    with opened(browser, page, java_script_enabled=script) as tab:
        tab.get_by_label("Result file").set_input_files(tmp_path / "pcinuma-result.json")
        with tab.expect_navigation():
            tab.get_by_role("button", name="Open", exact=True).click()
        assert "Opened from pcinuma-result.json" in tab.locator("main").inner_text()
        assert {part: tab.locator(part).inner_text() for part in shown} == shown
        assert tab.locator("svg").inner_html() == drawn
        assert downloaded(tab, "nccl-topo.xml") == nccl


def test_the_example_with_the_keyboard_alone(browser: Browser, page: Page) -> None:
    """Tab, Enter and the arrows, from the skip link to a finding's documentation."""
    with opened(browser, page) as tab:

        def reach(what: str) -> None:
            for _ in range(60):
                tab.keyboard.press("Tab")
                if tab.evaluate("s => document.activeElement.matches(s)", what):
                    return
            pytest.fail(f"no way to {what} by the keyboard")

        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.textContent") == "Skip to the content"
        box = tab.locator(":focus").bounding_box()
        assert box is not None
        assert box["y"] >= 0, "the skip link is not seen where it has the focus"
        tab.keyboard.press("Enter")
        reach('a[href="/example"]')
        tab.keyboard.press("Enter")
        tab.wait_for_url("**/example")
        assert "The example is filled in" in tab.get_by_role("status").first.inner_text()
        reach("details.options > summary")
        tab.keyboard.press("Enter")
        reach("#group-by")
        tab.keyboard.press("s")  # switch
        reach("button.primary")
        with tab.expect_navigation():
            tab.keyboard.press("Enter")
        reach(".picture")
        tab.keyboard.press("ArrowRight")
        reach(".finding summary")
        tab.keyboard.press("Enter")
        text = tab.locator(".finding details[open]").first.inner_text()
        assert "--group-by switch rebuilt a switch" in text
        assert "pcinuma nccl-topo" in text
        reach('a[href="/docs/findings#switch-link-speed"]')
        reach("#diff ~ .scroll")


def test_files_are_dropped_and_the_diff_is_copied(browser: Browser, page: Page) -> None:
    with opened(browser, page, permissions=["clipboard-read", "clipboard-write"]) as tab:
        for name, path in (("domain", DOMAIN), ("host", HOST)):
            drop(tab, f'[data-drop="{name}-file"]', path)
        assert tab.locator("#domain-file").evaluate("i => i.files[0].name") == "domain.xml"
        assert tab.get_by_role("status").inner_text() == "host.json is chosen"
        drop(tab, "footer", VMI)  # beside all fields: the page stays
        assert tab.url == page.url
        send(tab)
        tab.get_by_role("button", name="Copy the diff").click()
        tab.wait_for_function("document.getElementById('status').textContent === 'Copied'")
        copied = tab.evaluate("navigator.clipboard.readText()")
        assert copied == command("transform", DOMAIN, "--host", HOST, "-q", "--format", "diff").decode()


def drop(tab: Tab, where: str, path: Path) -> None:
    data = tab.evaluate_handle(
        "([name, text]) => { const d = new DataTransfer(); d.items.add(new File([text], name)); return d; }",
        [path.name, path.read_text()],
    )
    for event in ("dragenter", "dragover", "drop"):
        tab.dispatch_event(where, event, {"dataTransfer": data})


@pytest.mark.parametrize("script", [True, False], ids=["with JavaScript", "without JavaScript"])
def test_the_domain_is_checked_as_it_stands(browser: Browser, page: Page, script: bool) -> None:
    """By the keyboard from the form to what a finding means; then the same inputs are transformed."""
    with opened(browser, page, "example", java_script_enabled=script, viewport={"width": 390, "height": 800}) as tab:
        tab.get_by_role("button", name="Check it as it stands").focus()
        with tab.expect_navigation():
            tab.keyboard.press("Enter")
        heading = tab.get_by_role("heading", level=1)
        assert "! warnings" in heading.inner_text()
        assert "The domain as it stands: 7 warnings" in heading.inner_text()
        assert heading.evaluate("h => h === document.activeElement")
        assert tab.title() == "The domain as it stands: 7 warnings – pcinuma"
        assert tab.locator("#findings ~ .findings > li").count() == 1, "not-placed, seven times"
        assert overflow(tab) == 0
        expected = command("check", DOMAIN, "--host", HOST, "--vmi", VMI, "--json")
        assert downloaded(tab, "check.json") == expected
        tab.get_by_text("What not-placed means").focus()
        tab.keyboard.press("Enter")
        assert "transform" in tab.locator(".finding details[open]").inner_text()
        if script:
            assert violations(tab) == []
        send(tab)
        assert "✓ changed" in heading.inner_text(), "the inputs did not come back with the findings"


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [True, False], ids=["with JavaScript", "without JavaScript"])
def test_errors_stand_at_their_fields_and_the_input_stays(browser: Browser, page: Page, script: bool) -> None:
    with opened(browser, page, java_script_enabled=script) as tab:
        vmi = "kind: VirtualMachineInstance\nmetadata: {annotations: {pcinuma.vm.kubevirt.io/policy: strict}}"
        tab.fill("#domain", "<domain>\n  <name>x</nam>")
        tab.fill("#vmi", vmi)
        tab.set_input_files("#host-file", DOMAIN)
        send(tab)

        alert = tab.get_by_role("alert")
        assert alert.locator("a").all_inner_texts() == ["domain XML", "host record", "VMI"]
        for field, text in (
            ("domain", "not well-formed XML"),
            ("host", "not JSON"),
            ("vmi", "policy cannot be 'strict'"),
        ):
            described = tab.locator(f"#{field}").get_attribute("aria-describedby") or ""
            assert tab.locator(f"#{field}").get_attribute("aria-invalid") == "true"
            told = tab.locator(f"#{described.split()[-1]}")
            assert text in told.inner_text()
            below, field_box = told.bounding_box(), tab.locator(f"#{field}").bounding_box()
            assert below is not None
            assert field_box is not None
            assert 0 <= field_box["y"] - (below["y"] + below["height"]) < 110, "the error is not beside its field"
        assert tab.locator("#domain").evaluate("f => f === document.activeElement"), (
            "the focus is not on the first error"
        )
        assert tab.input_value("#domain") == "<domain>\n  <name>x</nam>"
        assert tab.input_value("#vmi") == vmi
        assert "domain.xml, 4.4 KiB, is used unless" in tab.locator(".kept").inner_text()
        alert.get_by_role("link", name="VMI").click()
        assert tab.evaluate("location.hash") == "#vmi"

        # put right one by one, the last by leaving it out
        tab.fill("#domain", DOMAIN.read_text())
        tab.fill("#host", HOST.read_text())
        send(tab)
        assert tab.get_by_role("alert").locator("a").all_inner_texts() == ["VMI"]
        tab.fill("#vmi", "")
        send(tab)
        assert "✓ changed" in tab.locator("h1").inner_text()


def test_a_result_file_that_is_none(browser: Browser, page: Page) -> None:
    with opened(browser, page) as tab:
        tab.set_input_files("#result", DOMAIN)
        with tab.expect_navigation():
            tab.get_by_role("button", name="Open", exact=True).click()
        assert "not JSON" in tab.locator("#result-error").inner_text()
        assert tab.locator("#result").evaluate("f => f === document.activeElement")
        assert violations(tab) == []


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_back_from_a_failure_and_open_lose_nothing(browser: Browser, page: Page, tmp_path: Path, script: bool) -> None:
    result = tmp_path / "r.json"
    result.write_text("{}")
    with opened(browser, page, java_script_enabled=script) as tab:
        tab.fill("#domain", "typed with care")
        tab.goto(f"{page.url}docs/nccl")
        tab.go_back()
        assert tab.input_value("#domain") == "typed with care"
        tab.set_input_files("#result", result)
        tab.get_by_role("button", name="Open", exact=True).click()
        assert "not a result" in tab.inner_text("#result-error")
        assert tab.input_value("#domain") == "typed with care"


def test_markup_in_names_runs_nothing(browser: Browser, page: Page) -> None:
    name = "ua-&lt;/title&gt;&lt;img src=x onerror=&quot;document.title='got'&quot;&gt;&lt;script&gt;document.title='got'&lt;/script&gt;"
    with opened(browser, page) as tab:
        tab.fill("#domain", DOMAIN.read_text().replace("ua-gpu-gpu0", name))
        tab.fill("#host", HOST.read_text())
        send(tab)
        assert "<script>document.title='got'</script>" in tab.locator("#devices ~ .scroll table").inner_text()
        assert tab.title().startswith("Changed:")
        assert tab.locator("main img, main script").count() == 0


# --- looks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme, width", LOOKS)
def test_every_view_is_accessible_and_fits(
    browser: Browser, page: Page, tmp_path: Path, scheme: Scheme, width: int
) -> None:
    domain, host = machine_files(40, 4, odd=True)
    (tmp_path / "domain.xml").write_bytes(domain)
    (tmp_path / "host.json").write_bytes(host)
    viewport = {"width": width, "height": 800}

    def holds(view: str) -> None:
        assert overflow(tab) == 0, f"{view} is wider than the window"
        # colours go by the theme alone, so each view is judged in both, on the desk and on the phone
        if (scheme, width) in (("light", 1280), ("dark", 390)):
            assert violations(tab) == [], view
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}[scheme], view

    with opened(browser, page, color_scheme=scheme, viewport=viewport) as tab:
        tab.click("details.options > summary")
        holds("empty")
        tab.goto(f"{page.url}example")
        holds("example")
        send(tab)
        tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        holds("result")
        tab.goto(page.url)
        tab.fill("#domain", "<domain>" + "x" * 500)
        tab.fill("#host", "{}")
        tab.fill("#vmi", "kind: " + "Pod" * 500)
        send(tab)
        holds("errors")
        tab.goto(f"{page.url}docs/findings#mmio-window")
        holds("findings")
        assert tab.locator("#mmio-window").evaluate("e => e.matches(':target')")
        tab.goto(f"{page.url}docs/nccl")
        holds("nccl")
        tab.goto(page.url)
        tab.set_input_files("#domain-file", tmp_path / "domain.xml")
        tab.set_input_files("#host-file", tmp_path / "host.json")
        send(tab)
        assert tab.locator("#devices ~ .scroll tbody tr").count() == 40
        tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        holds("40 devices")


def test_wide_parts_scroll_in_their_own_boxes(browser: Browser, page: Page) -> None:
    with opened(browser, page, "example", viewport={"width": 390, "height": 800}) as tab:
        send(tab)
        boxes = tab.locator(".scroll")
        assert boxes.count() == 3
        for number in range(3):
            box = boxes.nth(number)
            assert box.get_attribute("tabindex") == "0"
            assert box.get_attribute("aria-label")
            assert box.evaluate("b => { b.scrollLeft = 1e6; return b.scrollLeft; }") > 0


def test_print_has_the_result_alone(browser: Browser, page: Page) -> None:
    with opened(browser, page, "example", color_scheme="dark") as tab:
        send(tab)
        tab.emulate_media(media="print")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        for hidden in ("#inputs", "#open", ".top", ".downloads", "#downloads"):
            assert not tab.locator(hidden).is_visible(), hidden
        for shown in ("h1", "svg", "#devices ~ .scroll table", "#diff-text"):
            assert tab.locator(shown).is_visible(), shown
        assert tab.pdf().startswith(b"%PDF")


def test_landmarks_headings_and_tables(browser: Browser, page: Page) -> None:
    with opened(browser, page, "example") as tab:
        send(tab)
        for role in ("banner", "main", "contentinfo"):
            assert tab.get_by_role(role).count() == 1, role
        assert tab.locator("h1").count() == 1
        levels = [int(tag[1]) for tag in tab.locator("h1, h2, h3").evaluate_all("hs => hs.map(h => h.tagName)")]
        assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
        assert tab.get_by_role("columnheader").all_inner_texts() == [
            "No.", "Source", "Alias", "Host node", "Target cell", "Cell, guest after", "Fit", "Placement", "Guest BDF", "Reason",
        ]  # fmt: skip
        assert tab.get_by_role("rowheader").count() == 7
        unlabelled = tab.locator("input:not([type=hidden]), select, textarea").evaluate_all(
            "fields => fields.filter(f => !f.labels.length).map(f => f.outerHTML)"
        )
        assert unlabelled == []
        assert re.search(r"neither stored nor logged", tab.get_by_role("contentinfo").inner_text())
