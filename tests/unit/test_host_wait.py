"""How long a hook waits for the host; test_faults_host.py has the same with a file system that hangs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pcinuma import host_wait
from pcinuma.errors import HostUnreadable
from pcinuma.model import HostQuery, HostTopology

QUERY = HostQuery(frozenset(), frozenset())
HOST = HostTopology({}, {})


def test_the_answer_comes_through() -> None:
    asked = []

    def read(query: HostQuery) -> HostTopology:
        asked.append(query)
        return HOST

    assert host_wait.Bounded(read)(QUERY) is HOST
    assert asked == [QUERY]


def test_so_does_an_error_as_it_is() -> None:
    error = HostUnreadable("not a /sys tree", where="/nowhere", hint="give another")

    def read(_: HostQuery) -> HostTopology:
        raise error

    with pytest.raises(HostUnreadable) as raised:
        host_wait.Bounded(read)(QUERY)
    assert raised.value is error


def test_reads_that_hang_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_wait, "HOST_SECONDS", 0.3)
    back, begun = threading.Event(), []

    def read(_: HostQuery) -> HostTopology:
        begun.append(1)
        assert back.wait(60)
        return HOST

    bounded = host_wait.Bounded(read)

    def refused(_: int) -> str:
        with pytest.raises(HostUnreadable) as raised:
            bounded(QUERY)
        return raised.value.message

    with ThreadPoolExecutor(64) as pool:
        said = set(pool.map(refused, range(64)))
    assert said == {"the host has not answered within 0.3 seconds"}
    refused_at = time.monotonic()
    refused(65)
    assert time.monotonic() - refused_at < 0.2, "not even asked"
    assert len(begun) == 64
    back.set()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            assert bounded(QUERY) is HOST
            return
        except HostUnreadable:
            time.sleep(0.01)
    raise AssertionError("never asked again")


def test_told_to_give_up_it_waits_no_longer() -> None:
    back = threading.Event()

    def read(_: HostQuery) -> HostTopology:
        assert back.wait(60)
        return HOST

    bounded = host_wait.Bounded(read)
    began = time.monotonic()
    threading.Timer(0.2, bounded.give_up).start()
    for _ in range(2):  # the one that waits, and the next
        with pytest.raises(HostUnreadable, match="the host had not answered when it was time to end"):
            bounded(QUERY)
    assert time.monotonic() - began < 5
    back.set()
