"""Where the boxes and devices of a `picture` stand: three columns, the guest before, the host, the guest after.

A device has one row. Where the order of a guest agrees with the host's its row has one height in both, so that the line
from the host runs straight; where it would tear the columns apart they are compact, and the lines cross between them
(`picture_rows`). Lengths are SVG user units, pixels at scale 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pcinuma.picture import Box, Leaf, Panel, Scene
from pcinuma.picture_rows import Row, aligned
from pcinuma.picture_text import EM, SIZE, SMALL, text_width, wrapped

MARGIN, PAD = 20, 9
GAP, GAP_MOST, GAP_A_BEND = 56, 200, 0.2
"""The room between columns: with straight lines, at most, and what it grows by for each unit that a line falls."""
CHIP, ROW, NOTE, LOOSE = 22, 27, 14, 7
"""The height of a device, of its row, of a line of a note below it, and the room after a note."""
HEAD, SUBHEAD, TAIL, BETWEEN = 44, 20, 5, 12
"""The heights of an outer box's head, an inner one's, of a box's foot, the room between outer boxes."""
MARK, BADGE, PORT = 24, 30, 54
"""The widths of the mark; the least ones of the badge, of the port beside a guest's device."""
PORT_SIZE = 10
"""The font size of a port's name."""
SPACE = 10
"""The room between the texts of a device."""
EDGES = 17
"""The room before and after a device's badge, and after its last text."""
LABEL_LIMIT, ALIAS_LIMIT, NOTE_LIMIT = 24, 26, 3
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
class Widths:
    """Of parts that are equal in all devices: the badge, the port with its wire, the label of the host's devices, the
    guest's address, the host node in words, the guest's node in words."""

    badge: float
    port: float
    label: float
    address: float
    host: float
    node: float


@dataclass(frozen=True, slots=True)
class Layout:
    before: Column
    host: Column
    after: Column
    width: float
    bottom: float
    widths: Widths


def host_words(leaf: Leaf) -> str:
    """The host node of a guest's device, for its shape and its colour may be another's too."""
    return f"host {'?' if leaf.device.host_node is None else leaf.device.host_node}"


def node_words(leaf: Leaf) -> str:
    return f"numa_node {leaf.numa_node}"


def laid_out(scene: Scene, top: float, bars: float) -> Layout:
    """The columns, from ``top`` down. ``bars`` is the width that a badge needs beside its number."""
    widths = _widths(scene, bars)
    alias = max((text_width(leaf.device.alias or "", SIZE) for leaf in scene.host.leaves), default=0)
    both = EDGES + widths.badge + SPACE
    host_width = max(230.0, both + widths.label + min(alias, ALIAS_LIMIT * SIZE * EM))
    guest_width = both + MARK + widths.address + widths.host + SPACE + widths.node + widths.port
    sides = ((scene.host, host_width, 0), (scene.before, guest_width, -1), (scene.after, guest_width, 1))
    flows = [_Flow(panel, _column_width(panel, content), side, widths) for panel, content, side in sides]
    host_rows, *guest_rows = (flow.rows for flow in flows)
    heights = aligned(host_rows, guest_rows)
    tallest: dict[tuple[int, float], float] = {}
    for flow, placed in zip(flows, heights, strict=True):
        for number, heads in flow.heads.items():
            at = (number, placed[number])
            tallest[at] = max(heads, tallest.get(at, 0.0))
    for flow, placed in zip(flows, heights, strict=True):
        flow.fill(top, placed, tallest)
    host, before, after = flows
    before.x = MARGIN
    host.x = before.x + before.width + _gap(heights[0], heights[1])
    after.x = host.x + host.width + _gap(heights[0], heights[2])
    columns = (before.column(), host.column(), after.column())
    bottom = max(column.bottom for column in columns)
    return Layout(*columns, after.x + after.width + MARGIN, bottom, widths)


def _widths(scene: Scene, bars: float) -> Widths:
    guests = [*scene.before.leaves, *scene.after.leaves]
    last = str(max((leaf.device.number for leaf in scene.host.leaves), default=0))
    ports = [f"port {leaf.port.index}" for leaf in guests if leaf.port is not None]
    label = max((text_width(leaf.device.label, SIZE) for leaf in scene.host.leaves), default=0)

    def widest(texts: list[str]) -> float:
        return max((text_width(text, SIZE) for text in texts), default=0)

    return Widths(
        badge=max(BADGE, text_width(last, SMALL) + 12 + bars),
        port=max(PORT, *(text_width(port, PORT_SIZE) + 11 for port in ports), 0),
        label=min(max(label, 12 * SIZE * EM), LABEL_LIMIT * SIZE * EM),
        address=max(widest([leaf.address for leaf in guests]), 12 * SIZE * EM),
        host=widest([host_words(leaf) for leaf in guests]),
        node=widest([node_words(leaf) for leaf in guests]),
    )


def _gap(host: Mapping[int, float], guest: Mapping[int, float]) -> float:
    """The room between the host's column and a guest's: more where the lines between them are steep."""
    falls = max((abs(host[number] - y) for number, y in guest.items()), default=0.0)
    return round(min(GAP + GAP_A_BEND * falls, GAP_MOST), 1)


def _column_width(panel: Panel, content: float) -> float:
    def depth(box: Box) -> int:
        return 1 + max((depth(child) for child in box.children if isinstance(child, Box)), default=0)

    return round(content + 2 * PAD * max((depth(box) for box in panel.boxes), default=1), 1)


_Item = Box | Leaf | None
"""A box that begins, a device, the end of the box that began last."""


class _Flow:
    """One column. ``side`` says where the ports stand: left (-1), right (1), nowhere (0). ``x`` is given to it last."""

    def __init__(self, panel: Panel, width: float, side: int, widths: Widths) -> None:
        self.x = 0.0
        self.width = width
        self._panel, self._side, self._widths = panel, side, widths
        self._items = [item for box in panel.boxes for item in _unrolled(box)]
        self._notes: dict[int, tuple[str, ...]] = {}
        self._boxes: list[tuple[Box, int, float, float]] = []
        self._leaves: list[tuple[Leaf, int, float]] = []
        self._bottom = 0.0
        self.rows = self._measured()
        self._begins = dict(self._first_boxes())
        self.heads = dict(self._begins.values())
        """The height of the heads right above a device, by its number, where there are any."""

    def _measured(self) -> list[Row]:
        """The rows, when nothing is kept apart."""
        rows = []
        open_boxes: list[Box] = []
        lead = 0.0
        for item in self._items:
            if isinstance(item, Leaf):
                depth = len(open_boxes)
                room = self.width - 2 * PAD * depth - self._port(item) - 8
                notes = wrapped(item.note or "", room, SMALL, NOTE_LIMIT)
                self._notes[item.device.number] = notes
                rows.append(Row(item.device.number, lead, ROW + NOTE * len(notes) + (LOOSE if notes else 0)))
                lead = 0.0
            elif isinstance(item, Box):
                lead += _head(len(open_boxes))
                open_boxes.append(item)
            else:
                box = open_boxes.pop()
                lead += _foot(box) + _after(len(open_boxes))
        return rows

    def _port(self, leaf: Leaf) -> float:
        return self._widths.port if self._side and leaf.port is not None else 0.0

    def fill(self, top: float, heights: Mapping[int, float], tallest: Mapping[tuple[int, float], float]) -> None:
        """Place all from ``top`` down, the devices at these heights below it. ``tallest`` is, for a device at a height,
        the height of the heads right above it in the column where that is greatest."""
        y, bottom = top, top
        open_boxes: list[tuple[Box, float]] = []
        row = iter(self.rows)
        for number, item in enumerate(self._items):
            if number in self._begins:
                # blank space is before the outermost box, whose head stays with its device; but boxes of one device
                # begin at one height, those with lower heads with blank space in them
                device, _ = self._begins[number]
                y = max(y, top + heights[device] - tallest[device, heights[device]])
            if isinstance(item, Box):
                open_boxes.append((item, y))
                y += _head(len(open_boxes) - 1)
            elif isinstance(item, Leaf):
                y = top + heights[item.device.number]
                self._leaves.append((item, len(open_boxes), y))
                y += next(row).height
            else:
                box, began = open_boxes.pop()
                y += _foot(box)
                self._boxes.append((box, len(open_boxes), began, y))
                bottom = y
                y += _after(len(open_boxes))
        self._bottom = bottom

    def _first_boxes(self) -> Iterator[tuple[int, tuple[int, float]]]:
        """The place of the outermost box that begins right before a device, the device, the height of the heads."""
        depth, first, heads = 0, -1, 0.0
        for number, item in enumerate(self._items):
            if isinstance(item, Box):
                first, heads = (number, 0.0) if first < 0 else (first, heads)
                heads += _head(depth)
                depth += 1
            elif isinstance(item, Leaf):
                if first >= 0:
                    yield first, (item.device.number, heads)
                first = -1
            else:
                depth -= 1
                first = -1

    def column(self) -> Column:
        boxes = [
            PlacedBox(box, depth, self.x + PAD * depth, y, self.width - 2 * PAD * depth, end - y)
            for box, depth, y, end in sorted(self._boxes, key=lambda placed: placed[1])
        ]
        leaves = []
        for leaf, depth, y in self._leaves:
            port = self._port(leaf)
            x = self.x + PAD * depth + (port if self._side < 0 else 0)
            width = self.width - 2 * PAD * depth - port
            leaves.append(PlacedLeaf(leaf, x, y, width, self._notes[leaf.device.number]))
        return Column(self._panel, self.x, self.width, tuple(boxes), tuple(leaves), self._bottom)


def _unrolled(box: Box) -> Iterator[_Item]:
    yield box
    for child in box.children:
        if isinstance(child, Box):
            yield from _unrolled(child)
        else:
            yield child
    yield None


def _head(depth: int) -> float:
    return SUBHEAD if depth else HEAD


def _foot(box: Box) -> float:
    """What a box has below its last device; a box in it has a foot of its own, and room after it."""
    return 0 if box.children and isinstance(box.children[-1], Box) else TAIL - (ROW - CHIP)


def _after(depth: int) -> float:
    return TAIL if depth else BETWEEN
