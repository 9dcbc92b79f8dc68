"""Configuration space to ACS and ATS: bytes composed by hand after the specification, and any bytes at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcinuma.pci_config import Acs, parse
from tests.support.pci_bytes import DOWNSTREAM, ENDPOINT, ROOT_PORT, UPSTREAM, config_space, word


@pytest.mark.parametrize("port", (ENDPOINT, ROOT_PORT, UPSTREAM, DOWNSTREAM))
def test_the_port_type(port: int) -> None:
    config = parse(config_space(port))
    assert (config.port_type, config.acs, config.ats, config.problem) == (port, None, None, None)


@pytest.mark.parametrize(
    "control, redirects, translated_pass",
    (
        (0x00, False, False),
        (0x01, False, False),  # source validation alone
        (0x04, True, False),  # requests are redirected
        (0x08, True, False),  # completions are redirected
        (0x1D, True, False),  # what Linux switches on: SV, RR, CR, UF
        (0x5D, True, True),  # and direct translated: what NVIDIA's guide asks for
        (0x5F, True, False),  # but translated requests are blocked
    ),
)
def test_acs_bits(control: int, redirects: bool, translated_pass: bool) -> None:
    config = parse(config_space(DOWNSTREAM, acs=(0x5F, control)))
    assert config.acs == Acs(0x5F, control)
    assert (config.acs.redirects, config.acs.lets_translated_pass) == (redirects, translated_pass)


@pytest.mark.parametrize("is_on", (True, False))
def test_ats(is_on: bool) -> None:
    assert parse(config_space(ats=is_on)).ats is is_on
    assert parse(config_space(ats=is_on, acs=(0x5F, 0x1D), serial=b"\x01\x23\x45\x67\x89\xab\xcd\xef")).ats is is_on


def test_no_such_capability_is_not_unknown() -> None:
    config = parse(config_space())
    assert (config.acs, config.ats, config.problem) == (None, None, None)


@pytest.mark.parametrize("size", (64, 128, 256, 0x102))
def test_what_cannot_be_read_is_unknown(size: int) -> None:
    config = parse(config_space(DOWNSTREAM, acs=(0x5F, 0x1D), ats=True, size=size))
    assert (config.acs, config.ats) == (None, None)
    assert config.problem == f"only {size} bytes of configuration space can be read"


def test_a_capability_at_the_end_of_what_was_read_is_unknown() -> None:
    whole = config_space(DOWNSTREAM, acs=(0x5F, 0x1D))
    at = whole.index(word(0x000D), 0x100)
    assert parse(whole[: at + 4]).problem
    assert parse(whole[: at + 8]).acs == Acs(0x5F, 0x1D)


@pytest.mark.parametrize("size", (0, 1, 63))
def test_no_configuration_space(size: int) -> None:
    assert parse(config_space(size=size)).problem == "no configuration space can be read"


def test_a_sleeping_device_answers_all_ones() -> None:
    assert parse(b"\xff" * 4096).problem == "no answer: asleep, or gone from the bus"


def test_conventional_pci_has_no_extended_space() -> None:
    config = parse(config_space(None, size=256))
    assert (config.port_type, config.problem) == (None, None)


def test_without_a_capability_list() -> None:
    space = bytearray(config_space(size=256))
    space[0x06] = 0
    assert parse(bytes(space)).problem is None


def test_lists_that_run_in_circles_end() -> None:
    space = bytearray(config_space(DOWNSTREAM, acs=(0x5F, 0x1D)))
    acs = space.index(word(0x000D), 0x100)
    space[acs + 2 : acs + 4] = word(0x1 | 0x100 << 4)  # the last points to the first
    assert parse(bytes(space)).acs == Acs(0x5F, 0x1D)
    space[0x79] = 0x60  # PCI Express points back to power management
    space[0x78] = 0x05  # and is none any more
    assert parse(bytes(space)).port_type is None


def test_a_list_that_points_into_the_header_ends() -> None:
    space = bytearray(config_space(DOWNSTREAM))
    space[0x61] = 0x04
    assert parse(bytes(space)).port_type is None


@settings(deadline=None)  # a busy machine is slow, which is no failure
@given(st.binary(max_size=4096))
def test_any_bytes_are_taken(data: bytes) -> None:
    config = parse(data)
    assert config.problem is None or config.problem.isprintable()
    assert config.problem is None or (config.acs, config.ats) == (None, None)


@settings(deadline=None)  # a busy machine is slow, which is no failure
@given(
    st.sampled_from((ENDPOINT, ROOT_PORT, UPSTREAM, DOWNSTREAM)),
    st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), max_size=40),
    st.integers(0, 4096),
)
def test_a_damaged_space_is_taken(port: int, changes: list[tuple[int, int]], size: int) -> None:
    space = bytearray(config_space(port, acs=(0x5F, 0x1D), ats=True))
    for at, value in changes:
        space[at] = value
    config = parse(bytes(space[:size]))
    assert config.acs is None or 0 <= config.acs.control <= 0xFFFF
