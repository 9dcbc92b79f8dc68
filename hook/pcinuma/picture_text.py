"""How wide the text of a `picture` is, and how it is made to fit.

Text is measured by estimate, never too small: what draws it has other fonts than what lays it out. Widths are SVG user
units. All of it takes time in proportion to the text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

EM = 0.62
"""The width of a character of the monospaced fonts named in the picture, in font sizes (DejaVu Sans Mono: 0.602)."""
EM_SANS = 0.70
"""The mean width of a line of bold DejaVu Sans, the widest of the fonts that stand in for a system's own."""
SIZE, SMALL = 12, 11
"""Font sizes."""

_MORE = "…"
_NARROW = "…›≈·–"
"""What beside ASCII every monospaced font has, in its own width."""


def is_plain(text: str) -> bool:
    """Whether a monospaced font is sure to have all of it."""
    return text.isascii() or all(c.isascii() or c in _NARROW for c in text)


def text_width(text: str, size: float) -> float:
    """At least the width of monospaced text; what no such font has is taken for a whole square."""
    return (len(text) * EM if text.isascii() else sum(map(_em, text))) * size


def _em(character: str) -> float:
    if character.isascii() or character in _NARROW:
        return EM
    return 0.0 if unicodedata.combining(character) else 1.05


def cut(text: str, width: float, size: float) -> str:
    """A sentence as far as it fits, with … where it does not."""
    if text_width(text, size) <= width:
        return text
    return text[: _reach(text, width - text_width(_MORE, size), size)] + _MORE


def shortened(text: str, width: float, size: float) -> str:
    """A name, with … in its middle where it does not fit: names tell themselves apart by their ends."""
    if text_width(text, size) <= width:
        return text
    room = max(width - text_width(_MORE, size), 0.0)
    # of an odd count the beginning has the one more: a BDF before a name stays whole
    head = _reach(text, min((room + EM * size) / 2, room), size)
    tail = _reach(reversed(text), room - text_width(text[:head], size), size)
    while tail and unicodedata.combining(text[-tail]):
        tail -= 1
    return text[:head] + _MORE + (text[-tail:] if tail else "")


def _reach(characters: Iterable[str], width: float, size: float) -> int:
    """How many of the characters fit, from the first on."""
    used, count = 0.0, 0
    for character in characters:
        used += _em(character) * size
        if used > width + 1e-6:
            break
        count += 1
    return count


def wrapped(text: str, width: float, size: float, limit: int) -> tuple[str, ...]:
    """``text`` in lines that fit, ``limit`` at most; a single word that is too long for a line is shortened."""
    lines: list[str] = []
    words = text.split()
    at = 0
    while at < len(words):
        if len(lines) == limit - 1:
            rest = " ".join(words[at:])
            return (*lines, cut(rest, width, size) if at < len(words) - 1 else shortened(rest, width, size))
        end, used = at + 1, text_width(words[at], size)
        while end < len(words) and (more := used + text_width(f" {words[end]}", size)) <= width:
            end, used = end + 1, more
        lines.append(shortened(" ".join(words[at:end]), width, size))
        at = end
    return tuple(lines)
