"""At which heights the rows of a picture stand. A row is 27 high unless a test says otherwise, a straight line is worth
20; all heights are reckoned by hand."""

from __future__ import annotations

import pytest

from pcinuma.picture_rows import Row, aligned

HEAD = 60.0


def column(*numbers: int, heads: dict[int, float] | None = None, heights: dict[int, float] | None = None) -> list[Row]:
    """Rows of these numbers; the first has a head above it, others where ``heads`` says so."""
    heads, heights = heads or {}, heights or {}
    return [
        Row(number, heads.get(number, HEAD if place == 0 else 0.0), heights.get(number, 27.0))
        for place, number in enumerate(numbers)
    ]


def test_one_order_is_one_height_whatever_the_heads_and_notes() -> None:
    """The guest's notes below 1 and the host's head above 3 are blank space in the other column."""
    host = column(1, 2, 3, heads={3: 200.0})
    guest = column(1, 2, 3, heights={1: 80.0})
    of_host, of_guest = aligned(host, [guest])
    assert of_host == of_guest == {1: 60, 2: 60 + 80, 3: 60 + 80 + 27 + 200}


def test_columns_that_agree_pull_each_other() -> None:
    """Both guests wait for the host, and the host for the higher of them."""
    host, before, after = aligned(
        column(1, 2), [column(1, 2, heights={1: 40.0}), column(1, 2, heads={1: 90.0, 2: 30.0})]
    )
    # 90: the second guest's head; then its row of 27 and its head of 30 are more than the first guest's row of 40
    assert host == before == after == {1: 90, 2: 147}


def test_a_gap_that_is_worth_its_lines() -> None:
    """3 is at the end in the guest: its place stays blank, a row for the two lines below it that run straight."""
    host, guest = aligned(column(1, 2, 3, 4, 5), [column(1, 2, 4, 5, 3)])
    assert host == {1: 60, 2: 87, 3: 114, 4: 141, 5: 168}
    assert guest == {1: 60, 2: 87, 4: 141, 5: 168, 3: 195}


@pytest.mark.parametrize(
    "straight, head, blank", [(1, 0.0, False), (2, 13.0, True), (2, 14.0, False), (5, 73.0, True), (5, 74.0, False)]
)
def test_what_a_straight_line_is_worth(straight: int, head: float, blank: bool) -> None:
    """The gap for 2 is its row of 27 and its head in the host: 20 for one line, 100 for five, and not a unit more."""
    rest = range(3, 3 + straight)
    host, guest = aligned(column(1, 2, *rest, heads={2: head}), [column(1, *rest, 2)])
    assert guest[3] == (host[3] if blank else 87)
    assert guest[2] == guest[rest[-1]] + 27


def test_swapped_halves_are_compact_on_both_sides() -> None:
    """Four rows and a head are more than the four lines are worth: nothing is torn apart, and all lines are bent."""
    halves = column(5, 6, 7, 8, 1, 2, 3, 4, heads={1: HEAD})
    host, guest = aligned(column(1, 2, 3, 4, 5, 6, 7, 8, heads={5: HEAD}), [halves])
    assert list(host.values()) == [60, 87, 114, 141, 228, 255, 282, 309]
    assert {number: guest[number] for number in (5, 6, 7, 8, 1, 2, 3, 4)} == dict(
        zip((5, 6, 7, 8, 1, 2, 3, 4), host.values(), strict=True)
    )


def test_a_bent_run_leaves_the_other_guest_straight() -> None:
    """One guest keeps the host's order, one has it turned round: they do not pull each other."""
    host, before, after = aligned(column(*range(1, 9)), [column(*range(1, 9)), column(*range(8, 0, -1))])
    assert before == host == {number: 60 + 27 * (number - 1) for number in range(1, 9)}
    assert after == {number: 60 + 27 * (8 - number) for number in range(1, 9)}


def test_lines_are_straight_again_after_what_is_crossed() -> None:
    """2 and 3 are swapped; from 4 on both have placed as much."""
    host, guest = aligned(column(1, 2, 3, 4, 5), [column(1, 3, 2, 4, 5)])
    assert [number for number in host if host[number] == guest[number]] == [1, 4, 5]


def test_numbers_need_not_ascend() -> None:
    """A result file's are whatever it says: it is the order on the host that counts."""
    host, guest, other = aligned(column(30, 7, 11), [column(30, 7, 11), column(7, 11, 30)])
    assert host == guest == {30: 60, 7: 87, 11: 114}
    assert other == {7: 87, 11: 114, 30: 141}


def test_no_columns_and_no_rows() -> None:
    assert aligned([], [[], []]) == ({}, {}, {})
