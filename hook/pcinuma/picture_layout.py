"""Where the boxes and devices of a `picture` stand: three columns, the guest before, the host, the guest after.

A device has one row. Where a column's order allows, its row has one height in all columns, so that the line from the
host runs straight. Lengths are SVG user units, pixels at scale 1; text is measured by estimate, never too small.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from pcinuma.picture import Box, Leaf, Panel, Scene

EM = 0.62
"""The width of a character of the monospaced fonts named in the picture, in font sizes (DejaVu Sans Mono: 0.602)."""
EM_SANS = 0.70
"""The mean width of a line of bold DejaVu Sans, the widest of the fonts that stand in for a system's own."""
SIZE, SMALL = 12, 11
"""Font sizes."""

MARGIN, GAP, PAD = 20, 68, 9
CHIP, ROW, NOTE, LOOSE = 22, 27, 14, 7
"""The height of a device, of its row, of a line of a note below it, and the room after a note."""
HEAD, SUBHEAD, TAIL, BETWEEN = 44, 20, 5, 12
"""The heights of an outer box's head, an inner one's, of a box's foot, the room between outer boxes."""
MARK, BADGE, PORT = 24, 36, 54
"""The widths of the mark, of the badge with its room, of the port beside a guest's device."""
LABEL_LIMIT, ALIAS_LIMIT, NOTE_LIMIT = 20, 22, 3
"""Characters of a host label and of an alias, lines of a note; what is longer is cut."""


@dataclass(frozen=True, slots=True)
class PlacedBox:
    box: Box
    depth: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class PlacedLeaf:
    """The chip of a device, its port left out; ``notes`` are the lines below it."""

    leaf: Leaf
    x: float
    y: float
    width: float
    notes: tuple[str, ...]

    @property
    def middle(self) -> float:
        return self.y + CHIP / 2


@dataclass(frozen=True, slots=True)
class Column:
    panel: Panel
    x: float
    width: float
    boxes: tuple[PlacedBox, ...]
    leaves: tuple[PlacedLeaf, ...]
    bottom: float


@dataclass(frozen=True, slots=True)
class Layout:
    """``label`` and ``address`` are the widths of these texts in the host's and in the guests' chips."""

    before: Column
    host: Column
    after: Column
    width: float
    bottom: float
    label: float
    address: float


def text_width(text: str, size: float) -> float:
    """At least the width of monospaced text; what no such font has is taken for a whole square."""
    return sum(EM if c.isascii() or c in "…›≈·–" else 0.0 if unicodedata.combining(c) else 1.05 for c in text) * size


def cut(text: str, width: float, size: float) -> str:
    """``text`` as far as it fits, with … where it does not."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text + "…"


def wrapped(text: str, width: float, size: float, limit: int) -> tuple[str, ...]:
    """``text`` in lines that fit, ``limit`` at most."""
    lines: list[str] = []
    rest = text.split()
    while rest:
        if len(lines) == limit - 1:
            return (*lines, cut(" ".join(rest), width, size))
        count = 1
        while count < len(rest) and text_width(" ".join(rest[: count + 1]), size) <= width:
            count += 1
        lines.append(cut(" ".join(rest[:count]), width, size))
        rest = rest[count:]
    return tuple(lines)


def laid_out(scene: Scene, top: float) -> Layout:
    """The columns, from ``top`` down."""
    devices = [leaf.device for leaf in scene.host.leaves]
    label = max((min(len(d.label), LABEL_LIMIT) for d in devices), default=12) * SIZE * EM
    alias = max((min(text_width(d.alias or "", SIZE), ALIAS_LIMIT * SIZE * EM) for d in devices), default=0)
    guests = [*scene.before.leaves, *scene.after.leaves]
    address = max((text_width(leaf.address, SIZE) for leaf in guests), default=12 * SIZE * EM)
    host_width = max(230.0, BADGE + label + 10 + alias + 8)
    guest_width = MARK + BADGE + address + 10 + text_width("numa_node -1", SIZE) + 8
    widths = [
        _column_width(scene.before, guest_width + PORT),
        _column_width(scene.host, host_width),
        _column_width(scene.after, guest_width + PORT),
    ]
    flows = []
    x = float(MARGIN)
    for panel, width, side in zip((scene.before, scene.host, scene.after), widths, (-1, 0, 1), strict=True):
        flows.append(_Flow(panel, x, width, top, side))
        x += width + GAP
    _align(flows, [device.number for device in devices])
    before, host, after = (flow.column() for flow in flows)
    bottom = max(column.bottom for column in (before, host, after))
    return Layout(before, host, after, x - GAP + MARGIN, bottom, label, address)


def _column_width(panel: Panel, content: float) -> float:
    def depth(box: Box) -> int:
        return 1 + max((depth(child) for child in box.children if isinstance(child, Box)), default=0)

    return round(content + 2 * PAD * max((depth(box) for box in panel.boxes), default=1), 1)


class _Flow:
    """One column, filled from the top. ``side`` says where the ports stand: left (-1), right (1), nowhere (0)."""

    def __init__(self, panel: Panel, x: float, width: float, top: float, side: int) -> None:
        self._panel, self._x, self._width, self._side = panel, x, width, side
        self._y = top
        self._boxes: list[PlacedBox] = []
        self._leaves: list[PlacedLeaf] = []
        self._open: list[tuple[Box, float]] = []
        self._items: list[Box | Leaf | None] = []
        for box in panel.boxes:
            self._unroll(box)
        self._next = 0

    def _unroll(self, box: Box) -> None:
        self._items.append(box)
        for child in box.children:
            if isinstance(child, Box):
                self._unroll(child)
            else:
                self._items.append(child)
        self._items.append(None)

    def order(self) -> list[int]:
        return [item.device.number for item in self._items if isinstance(item, Leaf)]

    def advance(self, number: int | None) -> float:
        """Place all that comes before the device of this number, or all; the height that is reached."""
        while self._next < len(self._items):
            item = self._items[self._next]
            if isinstance(item, Leaf) and item.device.number == number:
                break
            self._step(item)
        return self._y

    def place(self, y: float) -> None:
        """Place the next device at this height."""
        self._y = y
        self._step(self._items[self._next])

    def _step(self, item: Box | Leaf | None) -> None:
        self._next += 1
        if isinstance(item, Box):
            self._open.append((item, self._y))
            self._y += SUBHEAD if len(self._open) > 1 else HEAD
        elif isinstance(item, Leaf):
            self._place_leaf(item)
        else:
            box, y = self._open.pop()
            depth = len(self._open)
            self._y += 0 if box.children and isinstance(box.children[-1], Box) else TAIL - (ROW - CHIP)
            width = self._width - 2 * PAD * depth
            self._boxes.append(PlacedBox(box, depth, self._x + PAD * depth, y, width, self._y - y))
            self._y += TAIL if depth else BETWEEN

    def _place_leaf(self, leaf: Leaf) -> None:
        depth = len(self._open)
        port = PORT if self._side and leaf.port is not None else 0
        width = self._width - 2 * PAD * depth
        x = self._x + PAD * depth + (port if self._side < 0 else 0)
        notes = wrapped(leaf.note or "", width - port - 8, SMALL, NOTE_LIMIT)
        self._leaves.append(PlacedLeaf(leaf, x, self._y, width - port, notes))
        self._y += ROW + NOTE * len(notes) + (LOOSE if notes else 0)

    def column(self) -> Column:
        boxes = sorted(self._boxes, key=lambda placed: placed.depth)
        return Column(self._panel, self._x, self._width, tuple(boxes), tuple(self._leaves), self._y - BETWEEN)


def _align(flows: Sequence[_Flow], numbers: Sequence[int]) -> None:
    """Give each device one height in every column whose order keeps it in line with the host's."""
    held = [set(_longest_ascent(flow.order())) for flow in flows]
    for number in numbers:
        here = [flow for flow, in_line in zip(flows, held, strict=True) if number in in_line]
        y = max(flow.advance(number) for flow in here)
        for flow in here:
            flow.place(y)
    for flow in flows:
        flow.advance(None)


def _longest_ascent(numbers: Sequence[int]) -> list[int]:
    """The longest ascending selection of the numbers, in order (patience sorting)."""
    tops: list[int] = []
    below: dict[int, int | None] = {}
    for number in numbers:
        pile = bisect_left(tops, number)
        below[number] = tops[pile - 1] if pile else None
        tops[pile : pile + 1] = [number]
    found: list[int] = []
    at = tops[-1] if tops else None
    while at is not None:
        found.append(at)
        at = below[at]
    return found[::-1]
