"""docs/proof.md: the parts of it that are written by ``make proof``, between their marks; the rest is written by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "proof.md"


def read(part: str) -> str:
    """What the page says in a part."""
    return _pattern(part).search(PAGE.read_text())[2]  # type: ignore[index]


def write(part: str, text: str) -> None:
    page, count = _pattern(part).subn(lambda found: f"{found[1]}{text.rstrip()}\n{found[3]}", PAGE.read_text())
    assert count == 1, part
    PAGE.write_text(page)


def _pattern(part: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {part} -->\n)(.*?)(<!-- end of {part} -->)", re.DOTALL)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rows_of(part: str) -> list[tuple[str, ...]]:
    """The rows of the table in a part, without its head."""
    lines = [line for line in read(part).splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]
