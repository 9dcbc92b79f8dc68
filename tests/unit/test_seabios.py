"""Where SeaBIOS 1.16.3 puts windows above 4 GiB. Each case was booted under it, with its log saying the same room."""

from __future__ import annotations

import pytest

from pcinuma.seabios import GIB, fits, least_window, trusts

SMALL, LARGE = 192 << 20, 4 * GIB  # of memory: none above 4 GiB, and some


@pytest.mark.parametrize(
    ("bits", "count", "each", "memory", "expected"),
    [
        # AMD's range is at 1012 to 1024 GiB, the end of 40 bits: the room is moved down by its size.
        # 256 and a little in eighths of 1024: 384 at 640, which ends in it; at 256
        (40, 2, 128, LARGE, True),
        (40, 1, 256, LARGE, True),
        # 384 and a little: 512 at 512, moved to 0, where the memory is
        (40, 3, 128, LARGE, False),
        (40, 1, 512, LARGE, False),  # 640 at 384, moved below 0
        # without memory above 4 GiB nothing is rounded to eighths: 385 at 639, moved to 254
        (40, 3, 128, SMALL, True),
        (40, 4, 128, SMALL, False),  # 513 at 511, moved below 0
        (41, 4, 128, LARGE, True),  # 768 at 1280
        (41, 5, 128, LARGE, True),
        (41, 7, 128, LARGE, True),  # 1024 at 1024, right above AMD's
        (41, 7, 128, SMALL, True),
        (41, 8, 128, LARGE, False),  # 1280 at 768
        (42, 8, 128, LARGE, True),  # 1536 at 2560
        (43, 8, 128, LARGE, True),
        # no more than 46 bits are used
        (47, 4, 128, LARGE, True),
        (48, 2, 128, LARGE, True),
    ],
)
def test_what_fits_in_an_amd_guest(bits: int, count: int, each: int, memory: int, expected: bool) -> None:
    ports = 4 * least_window(bits, memory, amd=True)
    assert fits(count * each * GIB, each * GIB, ports, bits, memory, 4 * GIB + memory, amd=True) == expected


def test_a_port_has_a_2048th_of_the_address_space_where_memory_is_above_4_gib() -> None:
    assert least_window(40, LARGE, amd=True) == GIB // 2
    assert least_window(41, LARGE, amd=False) == GIB
    assert least_window(46, LARGE, amd=False) == 32 * GIB
    assert least_window(52, LARGE, amd=False) == 32 * GIB
    assert least_window(41, 0xB0000000, amd=False) == GIB
    assert least_window(41, 0xB0000000 - 1, amd=False) == 2 << 20
    # bits that it does not believe
    assert least_window(40, LARGE, amd=False) == 2 << 20


def test_which_bits_are_believed() -> None:
    assert [bits for bits in range(32, 53) if trusts(bits, amd=False)] == [36, 39, *range(41, 53)]
    assert all(trusts(bits, amd=True) for bits in range(32, 53))


def test_windows_begin_above_the_memory() -> None:
    assert fits(512 * GIB, 512 * GIB, 2 * GIB, 41, 600 * GIB, 604 * GIB, amd=False)  # 768 at 1280: 1536 to 2048
    assert fits(512 * GIB, 512 * GIB, 2 * GIB, 41, 1500 * GIB, 1504 * GIB, amd=False)  # 1536 to 2048
    assert not fits(512 * GIB, 512 * GIB, 2 * GIB, 41, 1540 * GIB, 1544 * GIB, amd=False)  # 2048 to 2560
    # more than there is: SeaBIOS counts down through zero
    assert not fits(2048 * GIB, GIB, 2 * GIB, 41, LARGE, 8 * GIB, amd=False)
