"""At which height each device of a `picture` stands: columns of rows → heights, so that lines run straight where that
costs little blank space, and all columns are compact where it would cost more. Pure numbers; lengths as the picture's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

WORTH = 20.0
"""The blank space that a line kept straight may cost: less than a row, so that no row is skipped for one line alone."""


@dataclass(frozen=True, slots=True)
class Row:
    """A device in a column. ``lead`` is the height of what stands between it and the row above, or the column's top:
    the foots and heads of boxes; ``height`` its own, with the notes below it."""

    number: int
    lead: float
    height: float


def aligned(host: Sequence[Row], guests: Sequence[Sequence[Row]]) -> tuple[dict[int, float], ...]:
    """The heights by number, from the columns' top, of the host's rows and of those of each guest. Each column has each
    number once.

    A guest's row comes to the host's height where the rows of both are in one order, and the blank space for it is
    due to heads and notes alone, or not more than :data:`WORTH` for each line of the run that it puts straight. Else it
    stands right below the row above, and its line is bent. Takes n log n steps.
    """
    middle = _Column(host, set())
    # of the host's order, whatever numbers a result file has
    place = {row.number: place for place, row in enumerate(host)}
    columns = [
        _Column(rows, {host[at].number for at in _longest_ascent([place[row.number] for row in rows])})
        for rows in guests
    ]
    runs = [_runs(host, rows) for rows in guests]
    before: int | None = None
    for row in host:
        number = row.number
        at = middle.reach(number)
        wanted: list[tuple[_Column, float, float]] = []
        for column, run in zip(columns, runs, strict=True):
            if number not in column.in_line:
                continue
            reached = column.reach(number)
            # no order is at odds where both columns had their last row at one height as well
            worth = float("inf") if column.straight and column.last == before else WORTH * run[number]
            if abs(reached - at) <= worth:
                wanted.append((column, reached, worth))
        height = max([at, *(reached for _, reached, _ in wanted)])
        for column, reached, worth in wanted:
            if height - reached <= worth:
                column.place(number, height, straight=True)
        middle.place(number, height, straight=True)
        before = number
    for column in columns:
        column.reach(None)
    return (middle.heights, *(column.heights for column in columns))


class _Column:
    """A column that is filled from the top. ``last`` is the number of the row placed last, None for the top, and
    ``straight`` whether that was put to the host's height; ``in_line`` are the numbers that may be."""

    def __init__(self, rows: Sequence[Row], in_line: set[int]) -> None:
        self._rows = rows
        self._next = 0
        self._y = 0.0
        self.in_line = in_line
        self.last: int | None = None
        self.straight = True
        self.heights: dict[int, float] = {}

    def reach(self, number: int | None) -> float:
        """Place all rows that come before this one, or all; the height at which this one would stand."""
        while self._next < len(self._rows) and self._rows[self._next].number != number:
            row = self._rows[self._next]
            self.place(row.number, self._y + row.lead, straight=False)
        return self._y + (self._rows[self._next].lead if self._next < len(self._rows) else 0.0)

    def place(self, number: int, y: float, *, straight: bool) -> None:
        """Place the next row, which has this number, at this height."""
        row = self._rows[self._next]
        self._next += 1
        self.heights[number] = y
        self._y = y + row.height
        self.last, self.straight = number, straight


def _runs(host: Sequence[Row], guest: Sequence[Row]) -> dict[int, int]:
    """For each number, how many follow it in the same order in both columns with none between, itself counted."""
    following = {row.number: after.number for row, after in pairwise(host)}
    runs: dict[int, int] = {}
    after: int | None = None
    for row in reversed(guest):
        runs[row.number] = 1 + (runs[after] if after is not None and following.get(row.number) == after else 0)
        after = row.number
    return runs


def _longest_ascent(numbers: Sequence[int]) -> set[int]:
    """The longest ascending selection of the numbers (patience sorting)."""
    tops: list[int] = []
    below: dict[int, int | None] = {}
    for number in numbers:
        pile = bisect_left(tops, number)
        below[number] = tops[pile - 1] if pile else None
        tops[pile : pile + 1] = [number]
    found: set[int] = set()
    at = tops[-1] if tops else None
    while at is not None:
        found.add(at)
        at = below[at]
    return found
