"""A `picture` as lines of text for a terminal: the same three trees, the findings, the outcome.

Marks and words carry the meaning; colour, where it is wanted, repeats it. Nothing is cut: what is too long goes on in
the next line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pcinuma.errors import one_line
from pcinuma.picture import Box, Fit, Leaf, Panel, Scene
from pcinuma.report import finding_line, grouped

WIDTH = 80
"""Columns of the narrowest terminal that is drawn for."""

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_ALARM, _DIM, _BOLD = 31, 2, 1


@dataclass(frozen=True, slots=True)
class Signs:
    """What the trees are drawn with: a branch, the last one, the line beside what follows, an arrow, a step of a path,
    the marks."""

    branch: str
    last: str
    line: str
    arrow: str
    step: str
    marks: dict[Fit, str]


UNICODE = Signs(
    "├─ ", "└─ ", "│  ", "→", "›", {"aligned": "✓", "approximate": "≈", "astray": "✗", "unseen": "✗", "unknown": "?"}
)
ASCII = Signs(
    "|- ", "`- ", "|  ", "->", ">", {"aligned": "+", "approximate": "~", "astray": "x", "unseen": "x", "unknown": "?"}
)


def draw(scene: Scene, *, width: int = WIDTH, colour: bool = False, signs: Signs = UNICODE) -> str:
    """The trees in lines of ``width`` columns at most, the last line ended."""
    pen = _Pen(scene, width, colour, signs)
    lines = [*pen.wrapped(scene.headline, "", "", _BOLD), ""]
    for panel in (scene.before, scene.host, scene.after):
        lines += [*pen.panel(panel), ""]
    if scene.findings:
        lines.append("findings")
        for finding in grouped(scene.findings):
            lines += pen.wrapped(finding_line(finding), "  ", "  ", 0)
        lines.append("")
    if scene.before.leaves:
        lines += pen.wrapped("  ".join(f"{signs.marks[fit]} {words}" for fit, words in _KEY), "", "", _DIM)
    return "\n".join([*lines, f"outcome: {scene.outcome}"]) + "\n"


_KEY: tuple[tuple[Fit, str], ...] = (
    ("aligned", "own cell"),
    ("approximate", "nearest cell"),
    ("unseen", "no node or a foreign cell"),
    ("unknown", "host node unknown"),
)


_GO_ON = "    "
"""What a line begins with that goes on with the one above."""


def _parts(text: str, room: int) -> Iterator[str]:
    """The text in parts that each are wrapped alone: a word of many lines is cut into lines here, for the library looks
    at all that is left of it for each line of it."""
    import wcwidth

    short: list[str] = []
    for word in text.split(" "):
        if len(word) <= 4 * room:
            short.append(word)
            continue
        if short:
            yield " ".join(short)
            short = []
        line, used = "", 0
        for character in wcwidth.iter_graphemes(word):
            width = wcwidth.width(character)
            if line and used + width > room:
                yield line
                line, used = "", 0
            line, used = line + character, used + width
        yield line
    yield " ".join(short)


class _Pen:
    def __init__(self, scene: Scene, width: int, colour: bool, signs: Signs) -> None:
        self._scene, self._width, self._colour, self._signs = scene, width, colour, signs
        self._tints = {node: _COLOURS[number % len(_COLOURS)] for number, node in enumerate(scene.nodes)}

    def panel(self, panel: Panel) -> Iterator[str]:
        count = f", {panel.aligned} of {len(panel.leaves)} on their own cell" if panel is not self._scene.host else ""
        yield from self.wrapped(f"{panel.title}{count if panel.leaves else ''}", "", "", _BOLD)
        for box in panel.boxes:
            yield from self._box(box, "  ", "  ")

    def _box(self, box: Box, first: str, rest: str) -> Iterator[str]:
        detail = f" ({box.detail})" if box.detail else ""
        empty = "" if box.children else ": no device"
        tint = self._tints[box.nodes[0]] if box.nodes else 0
        yield from self.wrapped(f"{box.title}{detail}{empty}".replace("›", self._signs.step), first, rest, tint)
        for number, child in enumerate(box.children, start=1):
            last = number == len(box.children)
            begin, go_on = (self._signs.last, "   ") if last else (self._signs.branch, self._signs.line)
            if len(rest) > self._width // 2:  # too deep to go on to the right
                begin = go_on = ""
            if isinstance(child, Box):
                yield from self._box(child, rest + begin, rest + go_on)
            else:
                node = child.device.host_node
                wrong = child.fit is not None and child.fit != "aligned"
                tint = _ALARM if wrong else self._tints[node] if node is not None else 0
                yield from self.wrapped(self._leaf(child), rest + begin, rest + go_on, tint)

    def _leaf(self, leaf: Leaf) -> str:
        device = leaf.device
        name = f"{device.label} {device.alias}" if device.alias else device.label
        if leaf.fit is None:
            return name
        node = "unknown" if device.host_node is None else device.host_node
        place = leaf.address if leaf.port is None else f"{leaf.address}, port {leaf.port.index}"
        words = f", {leaf.words}" if leaf.fit in ("approximate", "astray") else ""
        note = f": {leaf.note}" if leaf.note else ""
        return f"{self._signs.marks[leaf.fit]} {name} (host node {node}) {self._signs.arrow} {place}{words}{note}"

    def wrapped(self, text: str, first: str, rest: str, tint: int) -> Iterator[str]:
        """The text in lines that fit, each tinted on its own, the branches before it not."""
        import wcwidth  # only where a tree is drawn

        room = max(self._width - wcwidth.width(first), 20)
        shown = one_line(text, 4 * len(text) + 1)  # a control character becomes four
        if self._signs is ASCII:
            shown = shown.encode("ascii", "backslashreplace").decode("ascii")
        lines: list[str] = []
        for part in _parts(shown, room - len(_GO_ON)):
            begin = _GO_ON if lines else ""
            lines += wcwidth.wrap(part, room, initial_indent=begin, subsequent_indent=_GO_ON, break_on_hyphens=False)
        for number, line in enumerate(lines or [""]):
            before = rest if number else first
            yield before + (f"\033[{tint}m{line}\033[0m" if self._colour and tint else line)
