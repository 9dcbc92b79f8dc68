"""A `picture` as one SVG file: self-contained, no script, real text, light and dark, the same bytes for the same scene.

Nothing is told by colour alone: a host node has a shape as well, a device a number, a fit a mark, a line and words.
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

from pcinuma.errors import one_line
from pcinuma.model import Finding
from pcinuma.picture import Fit, Leaf, Scene
from pcinuma.picture_layout import (
    CHIP,
    MARGIN,
    MARK,
    NOTE,
    PAD,
    PORT_SIZE,
    SPACE,
    Column,
    Layout,
    PlacedBox,
    PlacedLeaf,
    host_words,
    laid_out,
    node_words,
)
from pcinuma.picture_text import EM_SANS, SIZE, SMALL, cut, is_plain, shortened, text_width, wrapped
from pcinuma.svg_looks import DASH, FORMS, MARKS, STYLES, bars_of, css, is_hollow, moved, outline, tone_of, written

_EMPTY = "no device"

_FINDINGS = 12
"""Findings that are written below the picture; the report has them all."""

_LEGEND: tuple[tuple[Fit, str], ...] = (
    ("aligned", "on the cell of its host node"),
    ("approximate", "on the nearest cell"),
    ("unseen", "no node, or a foreign cell"),
    ("unknown", "host node unknown"),
)
_KEY = (
    "A number is a device, the same in all trees; shape and colour are its host node, which each device of a guest has"
    " in words as well. Lines: solid aligned, dashed not."
)


def draw(scene: Scene) -> str:
    """The SVG document, an XML declaration first and a line end last."""
    bars = max(map(bars_of, range(min(len(scene.nodes), FORMS))), default=0.0)
    width_known = laid_out(scene, 0, bars).width
    inner = width_known - 2 * MARGIN
    headline = wrapped(scene.headline, inner * 0.62 / EM_SANS, 20, 2)
    refusal = () if scene.refusal is None else _finding_lines(scene.refusal, inner - 24, 3)
    top = 52 + 26 * len(headline) + (len(refusal) * 17 + 26 if refusal else 0)
    layout = laid_out(scene, top + 32, bars)
    pen = _Pen(scene, layout)
    y = 44.0
    for line in headline:
        pen.text(line, MARGIN, y, "h", size=20, font=EM_SANS)
        y += 26
    if refusal and scene.refusal is not None:
        pen.group(_finding_text(scene.refusal))
        pen.shape("rect", "refusal", x=MARGIN, y=y - 14, width=inner, height=len(refusal) * 17 + 14)
        for number, line in enumerate(refusal):
            pen.text(line, MARGIN + 12, y + 5 + 17 * number, "alarm")
        pen.end()
    for column in (layout.before, layout.host, layout.after):
        pen.heading(column, top)
        for placed in column.boxes:
            pen.box(placed)
    pen.lines()
    for column, side in ((layout.before, -1), (layout.host, 0), (layout.after, 1)):
        for chip in column.leaves:
            pen.chip(chip, side)
    bottom = pen.legend(layout.bottom + 34)
    bottom = pen.findings(bottom)
    return pen.finished(bottom)


class _Pen:
    """Writes elements below the root, in the order of drawing."""

    def __init__(self, scene: Scene, layout: Layout) -> None:
        self._scene, self._layout = scene, layout
        self._style = {node: f"n{number % STYLES}" for number, node in enumerate(scene.nodes)}
        self._form = {node: number % FORMS for number, node in enumerate(scene.nodes)}
        self._root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg"})
        self._at = self._root
        title = ET.SubElement(self._root, "title", {"id": "pcinuma-picture-title"})
        title.text = f"{scene.headline}."
        desc = ET.SubElement(self._root, "desc", {"id": "pcinuma-picture-desc"})
        desc.text = _description(scene)
        ET.SubElement(self._root, "style").text = css()
        self._ground = self.shape("rect", "ground", x=0, y=0, width=0, height=0)

    # --- elements

    def shape(self, tag: str, look: str, **attributes: float | str) -> ET.Element:
        return ET.SubElement(self._at, tag, {"class": look, **{k: written(v) for k, v in attributes.items()}})

    def text(
        self, text: str, x: float, y: float, look: str = "", *, size: int = SIZE, anchor: str = "", font: float = 0
    ) -> None:
        if not text:
            return
        element = self.shape("text", look, x=x, y=y)
        if size != SIZE:
            element.set("font-size", str(size))
        if anchor:
            element.set("text-anchor", anchor)
        if not font:
            # a font that stands in may be of any width; this text has been given room, and keeps to it
            element.set("textLength", written(text_width(text, size)))
            if not is_plain(text):
                element.set("lengthAdjust", "spacingAndGlyphs")
        element.text = text

    def group(self, title: str) -> ET.Element:
        """A group with this tip; what is drawn until :meth:`end` is in it."""
        self._at = ET.SubElement(self._root, "g")
        ET.SubElement(self._at, "title").text = title
        return self._at

    def end(self) -> None:
        self._at = self._root

    def mark(self, fit: Fit, x: float, y: float) -> None:
        ground, sign = MARKS[fit]
        group = ET.SubElement(self._at, "g", {"class": f"mark {tone_of(fit)}", "transform": moved(x, y)})
        ET.SubElement(group, "path", {"class": "markground", "d": ground})
        ET.SubElement(group, "path", {"class": "sign", "d": sign})

    def badge(self, node: int | None, x: float, y: float, label: str = "", width: float = 30) -> None:
        """The shape of a host node about (x, y); ``label`` in it."""
        known = node in self._style if node is not None else False
        look = self._style[node] if node is not None and known else "nx"
        form = self._form[node] if node is not None and known else -1
        self.shape("path", f"badge {look}", d=outline(form, width, 17), transform=moved(x, y))
        if label:
            on_ground = known and not is_hollow(form)
            x += bars_of(form) / 2
            self.text(label, x, y + 4, "badgetext" if on_ground else "plain", size=SMALL, anchor="middle")

    # --- parts

    def heading(self, column: Column, y: float) -> None:
        panel = column.panel
        self.text(panel.title[:1].upper() + panel.title[1:], column.x, y, "h", size=15, font=EM_SANS)
        count = len(panel.leaves)
        if not count:
            return
        if panel is self._scene.host:
            nodes = sum(bool(box.nodes and box.children) for box in panel.boxes)
            text, look = f"{count} device{'s' * (count != 1)} on {nodes} node{'s' * (nodes != 1)}", "dim"
            self.text(text, column.x, y + 19, look)
            return
        fits = {leaf.fit for leaf in panel.leaves}
        worst = next(fit for fit in ("unseen", "astray", "unknown", "approximate", "aligned") if fit in fits)
        self.mark(worst, column.x + 8, y + 15)
        self.text(f"{panel.aligned} of {count} on their own cell", column.x + 22, y + 19, f"b {tone_of(worst)}text")

    def box(self, placed: PlacedBox) -> None:
        box = placed.box
        look = self._style[box.nodes[0]] if box.nodes else "nx"
        kind = "outer" if not placed.depth else "inner"
        self.group(f"{box.title}: {box.detail}" if box.detail else box.title)
        self.shape("rect", f"box {kind} {look}", x=placed.x, y=placed.y, width=placed.width, height=placed.height, rx=5)
        x, room = placed.x + PAD + 2, placed.width - 2 * PAD - 4
        if placed.depth:
            title = shortened(box.title, room, SMALL)
            self.text(title, x, placed.y + 14, "dim b", size=SMALL)
            used = text_width(title, SMALL) + 8
            if box.detail and room - used > 40:
                self.text(shortened(box.detail, room - used, SMALL), x + used, placed.y + 14, "dim", size=SMALL)
        else:
            shown = box.nodes[:3] if box.kind in ("host-node", "cell") else ()
            for node in shown:
                self.badge(node, x + 9, placed.y + 15, width=19)
                x += 24
            title, x = shortened(box.title, room - 24 * len(shown), 14), x + 2 * bool(shown)
            self.text(title, x, placed.y + 20, "b", size=14)
            if not box.children:
                x += text_width(title, 14) + 10
                self.text(cut(_EMPTY, placed.x + placed.width - 6 - x, SMALL), x, placed.y + 20, "dim i", size=SMALL)
            x = placed.x + PAD + 2
            self.text(shortened(box.detail, room, SMALL), x, placed.y + 36, "dim", size=SMALL)
        self.end()

    def lines(self) -> None:
        """From each device on the host to where the guest has it; between the columns only they bend."""
        host = {chip.leaf.device.number: chip for chip in self._layout.host.leaves}
        middle = self._layout.host
        for chip in self._layout.before.leaves:
            at = host[chip.leaf.device.number]
            edge = self._layout.before.x + self._layout.before.width
            self._line(chip.leaf, (chip.x + chip.width, chip.middle), edge, middle.x, (at.x, at.middle))
        for chip in self._layout.after.leaves:
            at = host[chip.leaf.device.number]
            edge = middle.x + middle.width
            self._line(chip.leaf, (at.x + at.width, at.middle), edge, self._layout.after.x, (chip.x, chip.middle))

    def _line(self, leaf: Leaf, start: tuple[float, float], out: float, into: float, end: tuple[float, float]) -> None:
        node = leaf.device.host_node
        look = f"line {self._style.get(node, 'nx') if node is not None else 'nx'}"
        if leaf.fit != "aligned":
            look += " broken"
        half, y1, y2 = written((out + into) / 2), written(start[1]), written(end[1])
        bend = "" if y1 == y2 else f"H{written(out)}C{half},{y1} {half},{y2} {written(into)},{y2}"
        self.group(f"{leaf.device.number}: {leaf.device.label}, {leaf.words}")
        line = self.shape("path", look, d=f"M{written(start[0])},{y1}{bend}H{written(end[0])}")
        if leaf.fit != "aligned":
            # all dashes in step where the bends begin: lines that run in a bundle would fill each other's gaps
            line.set("stroke-dashoffset", written((start[0] - out) % DASH))
        self.end()

    def chip(self, chip: PlacedLeaf, side: int) -> None:
        leaf = chip.leaf
        self.group(_tip(leaf))
        tone = "" if leaf.fit is None else tone_of(leaf.fit)
        self.shape("rect", f"chip {tone}chip".strip(), x=chip.x, y=chip.y, width=chip.width, height=CHIP, rx=3)
        base, x = chip.y + 15.5, chip.x
        if leaf.fit is not None:
            # the mark stands on the side of the host, where the line arrives
            self.mark(leaf.fit, x + MARK / 2 + 1 if side > 0 else x + chip.width - MARK / 2 - 1, chip.middle)
            x += MARK if side > 0 else 0
        widths = self._layout.widths
        self.badge(leaf.device.host_node, x + 4 + widths.badge / 2, chip.middle, str(leaf.device.number), widths.badge)
        x += widths.badge + 9
        if leaf.fit is None:
            self.text(shortened(leaf.device.label, widths.label + 1, SIZE), x, base, "b")
            x += widths.label + SPACE
            self.text(shortened(leaf.device.alias or "", chip.x + chip.width - 5 - x, SIZE), x, base, "dim")
        else:
            self.text(leaf.address, x, base, "b" if leaf.address[0].isdigit() else "dim i")
            self.text(host_words(leaf), x + widths.address + SPACE, base, "dim")
            end = chip.x + chip.width - (MARK + 2 if side < 0 else 6)
            self.text(node_words(leaf), end, base, f"b {tone}text", anchor="end")
            if leaf.port is not None:
                self._port(leaf, chip, side)
        for number, line in enumerate(chip.notes, start=1):
            self.text(line, chip.x + 4, chip.y + CHIP + NOTE * number - 2, f"{tone}text", size=SMALL)
        self.end()

    def _port(self, leaf: Leaf, chip: PlacedLeaf, side: int) -> None:
        index = leaf.port.index if leaf.port is not None else 0
        width = self._layout.widths.port
        x = chip.x - width if side < 0 else chip.x + chip.width
        self.shape("path", "wire", d=f"M{written(x)},{written(chip.middle)}h{written(width)}")
        self.shape("rect", "port", x=x + (0 if side < 0 else 5), y=chip.y + 3, width=width - 5, height=CHIP - 6, rx=2)
        middle = x + width / 2 + (-2.5 if side < 0 else 2.5)
        self.text(f"port {index}", middle, chip.y + 15, "dim", size=PORT_SIZE, anchor="middle")

    def legend(self, y: float) -> float:
        x = float(MARGIN)
        for fit, words in _LEGEND:
            self.mark(fit, x + 9, y - 4)
            self.text(words, x + 24, y, "dim", size=SMALL)
            x += 24 + text_width(words, SMALL) + 22
        for line in wrapped(_KEY, self._layout.width - 2 * MARGIN, SMALL, 3):
            y += 20
            self.text(line, MARGIN, y, "dim", size=SMALL)
        return y

    def findings(self, y: float) -> float:
        """What is not said at a device already."""
        noted = {leaf.device.label for leaf in self._scene.after.leaves if leaf.note}
        found = [f for f in self._scene.findings if f.severity != "info" and f.device not in noted]
        found = [f for f in found if f is not self._scene.refusal]
        if not found:
            return y
        y += 34
        self.text("Findings", MARGIN, y, "h", size=15, font=EM_SANS)
        y += 4
        for finding in found[:_FINDINGS]:
            y += 4
            self.group(_finding_text(finding))
            for line in _finding_lines(finding, self._layout.width - 2 * MARGIN, 3):
                y += 16
                self.text(line, MARGIN, y)
            self.end()
        if len(found) > _FINDINGS:
            y += 20
            self.text(f"and {len(found) - _FINDINGS} more, see the report", MARGIN, y, "dim")
        return y

    def finished(self, bottom: float) -> str:
        width, height = written(self._layout.width), written(bottom + 22)
        for name, value in (("width", width), ("height", height)):
            self._ground.set(name, value)
            self._root.set(name, value)
        self._root.set("viewBox", f"0 0 {width} {height}")
        self._root.set("class", "pcinuma-picture")
        self._root.set("role", "img")
        self._root.set("lang", "en")
        self._root.set("aria-labelledby", "pcinuma-picture-title")
        self._root.set("aria-describedby", "pcinuma-picture-desc")
        body = "\n".join(ET.tostring(child, encoding="unicode") for child in self._root)
        for child in list(self._root):
            self._root.remove(child)
        head = ET.tostring(self._root, encoding="unicode", short_empty_elements=True)
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{head.removesuffix(" />")}>\n{body}\n</svg>\n'


# --- words -----------------------------------------------------------------------------------------------------


def _description(scene: Scene) -> str:
    """The picture told, device by device, for those who do not see it."""
    before = {leaf.device.number: leaf for leaf in scene.before.leaves}
    after = {leaf.device.number: leaf for leaf in scene.after.leaves}
    lines = []
    for leaf in scene.host.leaves:
        device = leaf.device
        parts = [
            f"{scene.before.title}: {_told(before[device.number])}",
            f"{scene.after.title}: {_told(after[device.number])}",
        ]
        node = "host node unknown" if device.host_node is None else f"host node {device.host_node}"
        name = f"{device.label} {device.alias}" if device.alias else device.label
        lines.append(f"Device {device.number}: {name}, {node}; {'; '.join(parts)}.")
    return "\n".join(lines) or "No device."


def _told(leaf: Leaf) -> str:
    port = "" if leaf.port is None else f", port {leaf.port.index}"
    note = f" ({leaf.note})" if leaf.note else ""
    return f"{leaf.address}, numa_node {leaf.numa_node}{port}, {leaf.words}{note}"


def _tip(leaf: Leaf) -> str:
    device = leaf.device
    node = "host node unknown" if device.host_node is None else f"host node {device.host_node}"
    name = f"{device.number}: {device.label} {device.alias}" if device.alias else f"{device.number}: {device.label}"
    if leaf.fit is None:
        return f"{name}, {node}" + (f", path {' › '.join(device.path)}" if device.path else "")
    return f"{name}, {node}; in the guest {_told(leaf)}"


def _finding_lines(finding: Finding, width: float, limit: int) -> tuple[str, ...]:
    return wrapped(_finding_text(finding), width, SIZE, limit)


def _finding_text(finding: Finding) -> str:
    hint = f" ({finding.hint})" if finding.hint else ""
    return one_line(f"{finding.severity}: {finding.code}: {finding.message}{hint}")
