"""The picture in a real Chromium: what it shows, that nothing runs into anything, that all of it can be read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lxml import etree

from pcinuma import options, svg
from pcinuma.explain import explain
from pcinuma.model import Options
from tests.proof import machines
from tests.proof.corpus import vms
from tests.support import domains, hosts
from tests.support.pictures import dealt, kept_on_bus_0, machine

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]

NASTY = "ua-<&\"'>{}-" + "a-very-long-name" * 12
WIDE = "ua-網路{}-" + "裝置卡" * 30 + "\u0301e\u0301 \U0001f600"

BUSES = range(0x20, 0x2C)

SCENES: dict[str, Callable[[], str]] = {
    "1": lambda: drawn(*machine(1, 1)),
    "2": lambda: drawn(*machine(2)),
    "16-refused": lambda: drawn(*machine(16, odd=True), policy="restricted"),
    "40": lambda: drawn(*machine(40, 4, odd=True), group_by="root-complex", unmapped="nearest"),
    "16-on-8": lambda: drawn(*machine(16, 8)),
    "40-switches": lambda: drawn(*machine(40, 2), group_by="switch"),
    "128": lambda: drawn(*machine(128, 8)),
    "128-odd": lambda: drawn(*machine(128, 8, odd=True), policy="none"),
    "nasty-names": lambda: drawn(*machine(16, 4, names=NASTY, odd=True)),
    "wide-names": lambda: drawn(*machine(6, 2, names=WIDE)),
    "crossed": lambda: drawn(
        crossed(), hosts.host({0: "0-7", 1: "8-15"}, {f"0000:{b:02x}:00.0": b % 2 for b in BUSES})
    ),
    "24-dealt": lambda: drawn(*dealt((2, 0, 3, 1), 24)),
    "16-dealt-high": lambda: drawn(*dealt((1, 0), 16, first=200)),
    "12-kept-on-bus-0": lambda: drawn(*kept_on_bus_0(12)),
    "28-half-the-nodes": lambda: half_the_nodes("dgx-a100-nps4"),
    "33-nodes": lambda: drawn(*machine(33, 33)),
    "no-device": lambda: drawn(domains.domain({0: 0, 1: 1}, []).encode(), hosts.host({0: "0", 1: "1"}, {})),
}


def crossed() -> bytes:
    """Twelve devices on expanders already, every second on that of the wrong cell: lines cross."""
    controllers = []
    devices = []
    for cell in (0, 1):
        expander = 1 + 10 * cell
        controllers.append(
            f'<controller type="pci" index="{expander}" model="pcie-expander-bus">'
            f'<target busNr="{100 + 50 * cell}"><node>{cell}</node></target></controller>'
        )
        for slot, bus in enumerate(bus for bus in BUSES if bus // 2 % 2 == cell):
            port = expander + 1 + slot
            controllers.append(
                f'<controller type="pci" index="{port}" model="pcie-root-port"><address type="pci" domain="0" '
                f'bus="{expander}" slot="{slot}" function="0"/></controller>'
            )
            address = f'<address type="pci" domain="0x0000" bus="{port}" slot="0x00" function="0x0"/>'
            devices.append(domains.hostdev(f"0000:{bus:02x}:00.0", f"ua-nic-{bus}", address))
    return domains.domain({0: 0, 1: 1}, [*controllers, *devices]).encode()


def half_the_nodes(shape: str) -> str:
    """A VM over the first half of a machine's nodes, with all its devices, the host's switches rebuilt."""
    of = machines.shape(shape)
    (vm,) = (vm for vm in vms(of) if vm.name == "half of them, all devices")
    return drawn(vm.xml, of.read_host, group_by="switch")


def drawn(xml: bytes, host: Any, **chosen: str) -> str:
    return svg.draw(explain(xml, Options(**chosen), host).scene)  # type: ignore[arg-type]


@cache
def text_of(name: str) -> str:
    return SCENES[name]()


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.new_page()
    yield opened
    opened.close()


@pytest.fixture
def shown(page: Page, tmp_path: Path) -> Callable[..., Any]:
    """Opens a scene in a scheme, in a window of its size; gives back what the page said and asked for."""
    from tests.support.browser import Watched, size_to_content

    def show(name: str, scheme: Any = "light", media: Any = "screen") -> Watched:
        path = tmp_path / "picture.svg"
        path.write_text(text_of(name), encoding="utf-8")
        page.emulate_media(color_scheme=scheme, media=media)
        watched = Watched(page)
        page.goto(path.as_uri())
        size_to_content(page)
        return watched

    return show


# --- nothing runs into anything --------------------------------------------------------------------------------

GEOMETRY = """(root = document.documentElement) => {
  const bad = [];
  const box = e => { const r = e.getBoundingClientRect(); return {e, l: r.left, r: r.right, t: r.top, b: r.bottom}; };
  const name = o => `${o.e.tagName} ${(o.e.textContent || o.e.getAttribute('class')).slice(0, 40)}`;
  const over = (a, b) => a.l < b.r - .5 && b.l < a.r - .5 && a.t < b.b - .5 && b.t < a.b - .5;
  const within = (a, b) => a.l > b.l - .5 && a.r < b.r + .5 && a.t > b.t - .5 && a.b < b.b + .5;
  const all = selector => [...root.querySelectorAll(selector)].map(box);
  const whole = box(root);
  // em boxes are higher than the letters in them
  const texts = all('text').map(o => ({...o, t: o.t + 3, b: o.b - 3}));
  const boxes = all('.box'), chips = all('.chip'), ports = all('.port'), marks = all('.markground');
  const badges = all('.badge'), rects = all('rect:not(.ground)');
  for (const a of texts) {
    if (a.r - a.l < 1) bad.push(`empty: ${name(a)}`);
    if (!within(a, whole)) bad.push(`outside: ${name(a)}`);
    for (const b of texts) if (a.e !== b.e && over(a, b)) bad.push(`text over text: ${name(a)} | ${name(b)}`);
    for (const b of rects) if (over(a, b) && !within(a, b)) bad.push(`leaves its box: ${name(a)} | ${name(b)}`);
    for (const b of marks) if (over(a, b)) bad.push(`text over mark: ${name(a)}`);
    for (const b of badges)
      if (over(a, b) && !(a.e.previousElementSibling === b.e && within(a, b))) bad.push(`text over badge: ${name(a)}`);
  }
  const apart = (list, what) => list.forEach((a, i) => list.slice(i + 1).forEach(b => {
    if (over(a, b)) bad.push(`${what}: ${name(a)} | ${name(b)}`); }));
  apart(chips, 'chips'); apart(ports, 'ports'); apart([...marks, ...badges], 'marks');
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach(b => {
    if (over(a, b) && !within(a, b) && !within(b, a)) bad.push(`boxes cross: ${name(a)} | ${name(b)}`); }));
  for (const a of [...chips, ...ports]) if (!boxes.some(b => within(a, b))) bad.push(`in no box: ${name(a)}`);
  for (const line of root.querySelectorAll('.line')) {
    const length = line.getTotalLength();
    for (let at = 2; at < length - 2; at += 6) {
      const p = line.getPointAtLength(at).matrixTransform(line.getScreenCTM());
      const hit = texts.find(o => p.x > o.l && p.x < o.r && p.y > o.t && p.y < o.b)
        || chips.find(o => p.x > o.l + 1 && p.x < o.r - 1 && p.y > o.t + 1 && p.y < o.b - 1);
      if (hit) { bad.push(`line through ${name(hit)}`); break; }
    }
  }
  return {bad, texts: texts.length, chips: chips.length, lines: root.querySelectorAll('.line').length};
}"""


NATURAL = (
    """() => document.querySelectorAll('text:not([lengthAdjust])').forEach(t => t.removeAttribute('textLength'))"""
)
"""Text in its font's own widths: it must fit so, and is not squeezed into its room."""


@pytest.mark.parametrize("name", SCENES)
def test_nothing_runs_into_anything(page: Page, shown: Callable[..., Any], name: str) -> None:
    watched = shown(name)
    assert page.evaluate(f"({GEOMETRY})()")["bad"][:20] == []
    page.evaluate(NATURAL)
    found = page.evaluate(f"({GEOMETRY})()")
    assert found["bad"][:20] == []
    assert watched.complaints == []
    assert [url for url in watched.requests if not url.endswith("/picture.svg")] == []
    count = {"nasty-names": 16, "wide-names": 6, "crossed": 12, "no-device": 0}.get(name)
    devices = int(name.split("-")[0]) if count is None else count
    assert (found["chips"], found["lines"]) == (3 * devices, 2 * devices)


def test_nothing_runs_into_anything_in_the_golden_cases(page: Page) -> None:
    cases = sorted(path for path in (ROOT / "tests/golden/cases").iterdir() if path.is_dir())
    pictures = []
    for case in cases:
        defaults = options.load_defaults((case / "options.yaml").read_bytes(), "options.yaml")
        host = hosts.from_file(case / "host.json")
        scene = explain((case / "domain.xml").read_bytes(), options.resolve({}, None, defaults), host).scene
        pictures.append(svg.draw(scene).partition("?>")[2])
    page.goto("about:blank")
    page.set_content("".join(f"<div>{picture}</div>" for picture in pictures))
    page.evaluate(NATURAL)
    found = page.evaluate(f"[...document.querySelectorAll('svg')].map(svg => ({GEOMETRY})(svg))")
    assert len(found) == len(cases) > 50
    assert {case.name: one["bad"][:3] for case, one in zip(cases, found, strict=True) if one["bad"]} == {}
    assert sum(one["chips"] for one in found) > 500


def test_the_measure_sees_what_runs_into_something(page: Page, shown: Callable[..., Any]) -> None:
    """The test above, tested: a text moved onto another, one made too long, a line through a chip."""
    shown("2")
    page.evaluate(
        """() => {
          const texts = [...document.querySelectorAll('text')];
          const [a, b] = texts.filter(t => t.textContent.startsWith('0000:'));
          b.setAttribute('x', a.getAttribute('x')); b.setAttribute('y', a.getAttribute('y'));
          const long = texts.find(t => t.textContent == 'ua-gpu-gpu1');
          long.textContent = 'x'.repeat(60); long.removeAttribute('textLength');
          document.querySelector('.line').setAttribute('d', 'M0,0L1000,480');
        }"""
    )
    found = " ".join(page.evaluate(f"({GEOMETRY})()")["bad"])
    assert all(part in found for part in ("text over text", "leaves its box: text xxx", "line through"))


@pytest.mark.parametrize(
    "name, media",
    [
        ("16-refused", "screen"),
        ("24-dealt", "screen"),
        ("nasty-names", "print"),
        ("wide-names", "print"),
        ("33-nodes", "screen"),
    ],
)
def test_a_wide_font_stands_in(page: Page, shown: Callable[..., Any], name: str, media: str) -> None:
    """Where there is no monospaced font: the widest bold face there is here, its letters set apart to be wider still."""
    shown(name, "dark", media)
    wide = "text:not(.h){font-family:'DejaVu Sans'!important;font-weight:700!important;letter-spacing:2px}"
    page.evaluate(
        """css => document.documentElement.append(Object.assign(
          document.createElementNS('http://www.w3.org/2000/svg', 'style'), {textContent: css}))""",
        wide,
    )
    assert page.evaluate(f"({GEOMETRY})()")["bad"][:20] == []
    if name == "nasty-names":
        page.evaluate(NATURAL)
        assert page.evaluate(f"({GEOMETRY})()")["bad"] != [], "the font is not wider than what there is room for"


# --- lines and rows --------------------------------------------------------------------------------------------

JOINED = """() => {
  const at = e => { const r = e.getBoundingClientRect(); return {l: r.left, r: r.right, y: (r.top + r.bottom) / 2}; };
  const columns = {};
  for (const chip of document.querySelectorAll('.chip')) {
    const mark = chip.parentNode.querySelector('.mark'), box = at(chip);
    const column = !mark ? 'host' : at(mark).l - box.l < 10 ? 'after' : 'before';
    columns[column] = {...columns[column], [chip.parentNode.querySelector('.badge + text').textContent]: box};
  }
  const end = (line, length) => line.getPointAtLength(length).matrixTransform(line.getScreenCTM());
  const near = (p, x, y) => Math.abs(p.x - x) < 1 && Math.abs(p.y - y) < 1;
  return [...document.querySelectorAll('.line')].map(line => {
    const number = line.parentNode.querySelector('title').textContent.split(':')[0];
    const a = end(line, 0), b = end(line, line.getTotalLength());
    const {before, host, after} = Object.fromEntries(Object.entries(columns).map(([k, v]) => [k, v[number]]));
    const joins = near(a, before.r, before.y) && near(b, host.l, host.y) ? 'before'
      : near(a, host.r, host.y) && near(b, after.l, after.y) ? 'after' : 'nothing';
    return [joins, Number(number), line.getAttribute('d').includes('C') ? 'bent' : 'straight'];
  });
}"""


@pytest.mark.parametrize(
    "name, devices",
    [("2", 2), ("40-switches", 40), ("crossed", 12), ("24-dealt", 24), ("12-kept-on-bus-0", 12), ("128-odd", 128)],
)
def test_each_line_joins_a_device_with_itself(page: Page, shown: Callable[..., Any], name: str, devices: int) -> None:
    shown(name)
    joined = [(joins, number) for joins, number, _ in page.evaluate(JOINED)]
    assert sorted(joined) == sorted((side, number) for side in ("before", "after") for number in range(1, devices + 1))


@pytest.mark.parametrize("name", ("2", "16-on-8", "40-switches", "28-half-the-nodes"))
def test_lines_are_straight_where_the_orders_agree(page: Page, shown: Callable[..., Any], name: str) -> None:
    """Whatever heads and notes the columns have; what is left on bus 0 comes last on this host as well."""
    shown(name)
    assert {form for _, _, form in page.evaluate(JOINED)} == {"straight"}


def test_a_cell_begins_beside_its_host_node(page: Page, shown: Callable[..., Any]) -> None:
    """Where their devices are in one order: whatever is nested in either. Node 7 and bus 0 follow them."""
    shown("28-half-the-nodes")
    tops = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('.outer')].map(box => [
          box.parentNode.querySelector('title').textContent.split(':')[0] + (box.getAttribute('x') < 300 ? ' before' : ''),
          box.getBoundingClientRect().top]))"""
    )
    assert tops["host node 3"] == tops["cell 3"] == tops["bus 0 before"]
    for of_host, of_guest in (
        ("host node 2", "cell 2"),
        ("host node 1", "cell 1"),
        ("host node 0", "cell 0"),
        ("host node 7", "bus 0"),
    ):
        assert tops[of_host] == tops[of_guest], of_host


def test_one_device_out_of_order_bends_one_line(page: Page, shown: Callable[..., Any]) -> None:
    """The seventh is on a node without a cell, between the nodes of both cells, and bus 0 comes last in the guest. The
    two of unknown node come last on the host as well."""
    shown("16-refused")
    bent = [(joins, number) for joins, number, form in page.evaluate(JOINED) if form == "bent"]
    assert bent == [("after", 7)]


ROWS = """() => [...document.querySelectorAll('.chip')].map(chip => {
  const lines = [...chip.parentNode.querySelectorAll('text')].filter(
    t => t.getBoundingClientRect().top > chip.getBoundingClientRect().bottom - 4);
  const r = chip.getBoundingClientRect();
  const boxes = [...document.querySelectorAll('.box')].filter(box => {
    const b = box.getBoundingClientRect();
    return b.left < r.left && b.right > r.right && b.top < r.top && b.bottom > r.bottom; });
  return [boxes.map(box => box.parentNode.querySelector('title').textContent).join(' / ') + ' ' + r.left, r.top, lines.length];
})"""


@pytest.mark.parametrize(
    "name, rows", [("24-dealt", 72 - 3 * 4), ("12-kept-on-bus-0", 36 - 1 - 2 - 3), ("crossed", 36 - 6)]
)
def test_columns_whose_order_differs_are_compact(page: Page, shown: Callable[..., Any], name: str, rows: int) -> None:
    """In each box a device stands right below the one before: 27 for its row, 14 for a line of its note, 7 after it."""
    shown(name)
    found = page.evaluate(ROWS)
    below = [(a, b) for a, b in pairwise(found) if a[0] == b[0]]
    loose = [
        (one[0], next_[1] - one[1], one[2])
        for one, next_ in below
        if abs(next_[1] - one[1] - (27 + 14 * one[2] + 7 * (one[2] > 0))) > 0.5
    ]
    if name == "12-kept-on-bus-0":
        # bus 0 of the guest before has them all, in the host's order, and leaves room for the head of host node 1
        assert [(line[0].startswith("bus 0"), line[2]) for line in loose] == [(True, 0)]
        loose = []
    assert loose == []
    assert len(below) == rows


# --- it can be read --------------------------------------------------------------------------------------------

CONTRASTS = """() => {
  const parsed = text => { const m = text.match(/[\\d.]+/g).map(Number); return m.length > 3 ? m : [...m, 1]; };
  const linear = c => { c /= 255; return c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4; };
  const light = c => .2126 * linear(c[0]) + .7152 * linear(c[1]) + .0722 * linear(c[2]);
  return [...document.querySelectorAll('text')].map(text => {
    const r = text.getBoundingClientRect();
    const under = document.elementsFromPoint((r.left + r.right) / 2, (r.top + r.bottom) / 2).reverse();
    let ground = null;
    for (const e of under) {
      const style = getComputedStyle(e);
      if (e.tagName === 'text' || e.tagName === 'svg' || style.fill === 'none') continue;
      const c = parsed(style.fill), a = c[3] * Number(style.fillOpacity);
      ground = ground ? ground.map((g, i) => g * (1 - a) + c[i] * a) : c.slice(0, 3);
    }
    const [a, b] = [light(parsed(getComputedStyle(text).fill)), light(ground)].sort((x, y) => y - x);
    return {text: text.textContent, ratio: (a + .05) / (b + .05), ground: light(ground)};
  });
}"""


@pytest.mark.parametrize("name", ("16-refused", "16-on-8", "40", "crossed"))
@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_contrast(page: Page, shown: Callable[..., Any], name: str, scheme: str) -> None:
    """4.5:1 for every text (WCAG 2.2, 1.4.3): luminances, so that it holds in grey as well."""
    shown(name, scheme)
    found = page.evaluate(CONTRASTS)
    assert len(found) > 50
    assert [one for one in found if one["ratio"] < 4.5] == []
    grounds = [one["ground"] for one in found if one["text"].startswith("Guest")]
    assert grounds
    assert all(ground < 0.05 if scheme == "dark" else ground > 0.9 for ground in grounds)


def test_the_contrast_measure_sees_what_is_faint(page: Page, shown: Callable[..., Any]) -> None:
    shown("2")
    page.evaluate(
        "() => { [...document.querySelectorAll('text')].find(t => t.textContent == '2 devices on 2 nodes')"
        ".style.fill = '#808080'; }"
    )
    # (1 + 0.05) / (0.2159 + 0.05)
    assert [round(one["ratio"], 1) for one in page.evaluate(CONTRASTS) if one["ratio"] < 4.5] == [3.9]


def test_print_is_on_white_in_dark_mode_too(page: Page, shown: Callable[..., Any]) -> None:
    shown("40", "dark", "print")
    found = page.evaluate(CONTRASTS)
    assert [one for one in found if one["ratio"] < 4.5] == []
    assert next(one["ground"] for one in found if one["text"] == "Host") == 1


BADGES = """() => [...document.querySelectorAll('text.b')]
  .filter(t => /^(host node|cell) [0-9]$/.test(t.textContent))
  .map(t => t.parentNode.querySelector('.badge').getAttribute('d'))"""


def test_host_nodes_are_told_apart_without_colour(page: Page, shown: Callable[..., Any]) -> None:
    """The shapes of eight, all in one grey: each differs from each, and a cell has its host node's."""
    shown("16-on-8")
    paths = page.evaluate(BADGES)
    assert len(paths) == 8 + 8 + 8  # the cells before, the host nodes, the cells after
    page.goto("about:blank")
    page.set_content(
        "".join(f'<svg width="40" height="30"><path transform="translate(20 15)" d="{d}"/></svg>' for d in paths)
    )
    seen = [shape.screenshot() for shape in page.locator("svg").all()]
    assert seen[:8] == seen[8:16] == seen[16:]
    assert len(set(seen)) == 8


def test_sixty_four_host_nodes_are_told_apart(page: Page, tmp_path: Path) -> None:
    """From the ninth on colours come again, from the 33rd on the shapes are hollow: neither in the heads of boxes nor at
    the devices are two alike. From the 65th on it is the words alone."""
    path = tmp_path / "picture.svg"
    path.write_text(drawn(*machine(66, 66)), encoding="utf-8")
    page.goto(path.as_uri())
    heads = """() => [...document.querySelectorAll('text.b')].filter(t => /^host node [0-9]+$/.test(t.textContent))
      .map(t => t.parentNode.querySelector('.badge').getAttribute('d'))"""
    chips = """() => [...document.querySelectorAll('.chip')].filter(c => !c.parentNode.querySelector('.mark'))
      .map(c => c.parentNode.querySelector('.badge').getAttribute('d'))"""
    for shapes in (page.evaluate(heads), page.evaluate(chips)):
        assert (len(shapes), len(set(shapes))) == (66, 64)
        assert shapes[64:] == shapes[:2]
    assert page.evaluate(WORDS) == [f"host {node}" for node in range(66)] * 2
    page.goto("about:blank")
    grey = "fill:#555;fill-rule:evenodd"
    page.set_content(
        "".join(
            f'<svg width="50" height="30"><path style="{grey}" transform="translate(25 15)" d="{d}"/></svg>'
            for d in (shapes[node] for node in (0, 8, 32, 40, 63))
        )
    )
    assert len({shape.screenshot() for shape in page.locator("svg").all()}) == 5


WORDS = """() => [...document.querySelectorAll('.chip')].filter(c => c.parentNode.querySelector('.mark'))
  .map(c => [...c.parentNode.querySelectorAll('text')].map(t => t.textContent).find(t => t.startsWith('host ')))"""


def test_every_device_of_a_guest_says_its_host_node_in_words(page: Page, shown: Callable[..., Any]) -> None:
    """Of the sixteen in the host's order: six of node 0, one of node 2, which has no cell, seven of node 1, and two that
    nobody knows; in the guest after bus 0 comes last."""
    shown("16-refused")
    of_host = ["host 0"] * 6 + ["host 2"] + ["host 1"] * 7 + ["host ?"] * 2
    after = ["host 0"] * 6 + ["host 1"] * 7 + ["host 2"] + ["host ?"] * 2
    assert page.evaluate(WORDS) == of_host + after


def test_bundled_broken_lines_are_in_step(page: Page, shown: Callable[..., Any]) -> None:
    """At the edge where the bends begin each dash begins anew, so that no line fills another's gaps."""
    shown("128-odd")
    phases = page.evaluate(
        """() => [...document.querySelectorAll('.line.broken')].filter(l => l.getAttribute('d').includes('C')).map(l => {
          const [from, to] = l.getAttribute('d').match(/M([-0-9.]+),.*?H([-0-9.]+)C/).slice(1).map(Number);
          const style = getComputedStyle(l), dash = style.strokeDasharray.split(',').map(parseFloat);
          const phase = (parseFloat(style.strokeDashoffset) + to - from) % (dash[0] + dash[1]);
          return Math.min(phase, dash[0] + dash[1] - phase); })"""
    )
    assert len(phases) > 5
    assert all(phase < 0.2 for phase in phases)


def test_what_is_not_aligned_stands_out_without_colour(page: Page, shown: Callable[..., Any]) -> None:
    """Another mark, a thicker broken edge, a broken line, and words; beside them those that are aligned."""
    shown("40")
    rows = page.evaluate(
        """() => [...document.querySelectorAll('.chip')].filter(c => c.parentNode.querySelector('.mark')).map(c => ({
          mark: c.parentNode.querySelector('.sign').getAttribute('d'),
          ground: c.parentNode.querySelector('.markground').getAttribute('d'),
          edge: getComputedStyle(c).strokeDasharray, width: getComputedStyle(c).strokeWidth,
          tip: c.parentNode.querySelector('title').textContent,
        }))"""
    )
    ways = {
        words: {(row["mark"], row["ground"], row["edge"], row["width"]) for row in rows if row["tip"].endswith(words)}
        for words in ("on its own cell",)
    }
    assert len(ways["on its own cell"]) == 1
    (aligned,) = ways["on its own cell"]
    others = {(r["mark"], r["ground"], r["edge"], r["width"]) for r in rows if not r["tip"].endswith("on its own cell")}
    assert len(others) == 3, "no node, host node unknown, nearest cell: a mark each"
    for mark, _, edge, width in others:
        assert mark != aligned[0]
        assert (edge, width) == ("5px, 3px", "2px")
    assert aligned[2:] == ("none", "1px")
    lines = page.evaluate("() => [...document.querySelectorAll('.line')].map(l => getComputedStyle(l).strokeDasharray)")
    # of 40: numbers 3, 10, 17, 24, 31, 38 are unknown, 5, 16, 27 on a node without a cell
    assert (lines.count("none"), len(lines)) == (40 - 6 - 3, 80)


# --- and heard -------------------------------------------------------------------------------------------------


def test_name_and_description(page: Page, shown: Callable[..., Any]) -> None:
    shown("2")
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    images = [node for node in nodes if node.get("role", {}).get("value") in ("image", "img")]
    assert len(images) == 1
    assert images[0]["name"]["value"] == "2 passthrough devices: 0 of 2 on their own cell before, 2 of 2 after."
    # buses 252 and 254 are the expanders', the last block ends at 255
    told = re.sub(r"\s+", " ", images[0]["description"]["value"])
    assert told == (
        "Device 1: 0000:08:00.0 ua-gpu-gpu0, host node 0; "
        "guest before: no address yet, numa_node -1, the guest sees no node; "
        "guest after: 0000:fd:00.0, numa_node 0, port 2, on its own cell. "
        "Device 2: 0000:0c:00.0 ua-gpu-gpu1, host node 1; "
        "guest before: no address yet, numa_node -1, the guest sees no node; "
        "guest after: 0000:ff:00.0, numa_node 1, port 4, on its own cell."
    )


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_axe(page: Page, scheme: Any) -> None:
    """In a page, where axe-core looks at it."""
    from tests.support.browser import violations

    page.emulate_media(color_scheme=scheme, media="screen")
    body = text_of("16-refused").partition("?>")[2]
    page.goto("about:blank")
    page.set_content(f'<!doctype html><html lang="en"><title>t</title><main><h1>picture</h1>{body}</main></html>')
    assert violations(page) == []
    page.evaluate("() => { for (const a of ['aria-labelledby', 'aria-describedby']) "
                  "document.querySelector('svg').removeAttribute(a); document.querySelector('svg > title').remove(); }")  # fmt: skip
    assert any(found.startswith("svg-img-alt") for found in violations(page)), "axe looks at the picture"


# --- the file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("16-refused", "nasty-names", "wide-names"))
def test_self_contained(name: str) -> None:
    root = etree.fromstring(text_of(name).encode())
    assert {etree.QName(e).localname for e in root.iter()} == {
        "svg", "title", "desc", "style", "g", "rect", "path", "text",
    }  # fmt: skip
    names = {str(attribute) for e in root.iter() for attribute in e.attrib}
    assert not {n for n in names if "href" in n or n.startswith("on") or n == "style"}
    style = root.find("{*}style").text or ""  # type: ignore[union-attr]
    assert not re.search(r"url\(|@import|@font-face|http", style)


def test_long_names_are_cut_in_the_middle_and_whole_in_the_tip(page: Page, shown: Callable[..., Any]) -> None:
    shown("nasty-names")
    full = NASTY.format(0)
    written = page.evaluate("() => [...document.querySelectorAll('text')].map(t => t.textContent)")
    # 26 characters: of the 25 beside the sign the beginning has one more
    assert written.count("ua-<&\"'>0-a-v…ry-long-name") == 1
    tips = page.evaluate("() => [...document.querySelectorAll('g > title')].map(t => t.textContent)")
    assert any(full in tip for tip in tips)


def test_a_mediated_device_keeps_its_parent_and_the_end_of_its_uuid(page: Page, tmp_path: Path) -> None:
    case = ROOT / "tests/golden/cases/mdev-by-parent"
    path = tmp_path / "picture.svg"
    path.write_text(drawn((case / "domain.xml").read_bytes(), hosts.from_file(case / "host.json")), encoding="utf-8")
    page.goto(path.as_uri())
    groups = page.evaluate(
        "() => [...document.querySelectorAll('.chip')].filter(c => !c.parentNode.querySelector('.mark'))"
        ".map(c => [c.parentNode.querySelector('text.b').textContent, c.parentNode.querySelector('title').textContent])"
    )
    uuid = "7f1c2d3e-0a1b-4c5d-8e9f-000000000002"
    label, tip = groups[0]
    assert label == "0000:17:00.0…00000000002"
    assert f"0000:17:00.0 mdev {uuid}" in tip
