"""How text of a picture is made to fit: at a font size of 10 a character is 6.2 wide."""

from __future__ import annotations

import pytest

from pcinuma.picture_text import cut, shortened, text_width, wrapped


@pytest.mark.parametrize(
    "text, characters, expected",
    [
        ("ua-gpu-gpu0", 11, "ua-gpu-gpu0"),
        ("ua-gpu-gpu0", 10, "ua-gp…gpu0"),
        ("ua-gpu-gpu0", 9, "ua-g…gpu0"),
        # the BDF of a mediated device's parent stays whole, and so does the end of its UUID
        ("0000:17:00.0 7f1c2d3e-0000-4000-8000-00c0ffee0002", 24, "0000:17:00.0…00c0ffee0002"[:13] + "0c0ffee0002"),
        ("abcdef", 1, "…"),
        ("abcdef", 2, "a…"),
        ("", 3, ""),
    ],
)
def test_names_are_shortened_in_the_middle(text: str, characters: int, expected: str) -> None:
    assert shortened(text, characters * 6.2, 10) == expected


def test_a_combined_character_is_not_taken_apart() -> None:
    """The tail has room for the accent of the e, not for the e: it does not begin with the accent alone."""
    shown = shortened("aaaaaaaaaae\u0301bb", 5 * 6.2, 10)
    assert shown == "aa…bb"


def test_wide_characters_take_their_room() -> None:
    """A square is 10.5: of four squares and the sign two fit into 30."""
    assert shortened("網路裝置", 30, 10) == "網…置"
    assert text_width("網e\u0301", 10) == pytest.approx(10.5 + 6.2)


def test_sentences_are_cut_at_the_end() -> None:
    assert cut("it has no cell", 7 * 6.2, 10) == "it has…"
    assert wrapped("one two three four", 9 * 6.2, 10, 2) == ("one two", "three fo…")
    assert wrapped("see 0123456789abcdef now", 9 * 6.2, 10, 3) == ("see", "0123…cdef", "now")


def test_long_text_takes_time_in_proportion() -> None:
    """A million characters, in all ways: with a step for each character left out this would take hours."""
    text = "x" * 1_000_000
    assert cut(text, 62, 10) == "xxxxxxxxx…"
    assert shortened(text, 62, 10) == "xxxxx…xxxx"
    assert wrapped("y " * 500_000, 62, 10, 2) == ("y y y y y", "y y y y y…")
