"""A reader of the host that a hook waits for so long and no longer.

A read of ``/sys`` is answered by a driver. One that hangs cannot be ended from here, and virt-launcher gives a call of
a sidecar 60 seconds, one of a plugin 30: without an answer by then the VM does not start, whatever its policy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from pcinuma.errors import HostUnreadable

if TYPE_CHECKING:
    from pcinuma.model import HostQuery, HostTopology

HOST_SECONDS = 10
MOST_STUCK = 64
"""Reads that hang at one time, each with its thread: as many as there are calls at one time."""


class Bounded:
    """The reader, each read in a thread of its own. It raises HostUnreadable when the host has not answered within
    HOST_SECONDS, when MOST_STUCK reads have not come back yet, or when it is told to give up."""

    def __init__(self, read_host: Callable[[HostQuery], HostTopology]):
        self._read_host = read_host
        self._room = threading.BoundedSemaphore(MOST_STUCK)
        self._waiting: set[threading.Event] = set()
        self._has_given_up = False

    def __call__(self, query: HostQuery) -> HostTopology:
        answers: list[HostTopology] = []
        errors: list[BaseException] = []
        woken = threading.Event()

        def run() -> None:
            try:
                answers.append(self._read_host(query))
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                errors.append(error)
            finally:
                self._room.release()
                woken.set()

        if not self._room.acquire(blocking=False):
            raise _silent()
        self._waiting.add(woken)
        try:
            threading.Thread(target=run, daemon=True).start()
            woken.wait(0 if self._has_given_up else HOST_SECONDS)
        finally:
            self._waiting.discard(woken)
        if answers:
            return answers[0]
        if errors:
            raise errors[0]
        if self._has_given_up:
            raise HostUnreadable("the host had not answered when it was time to end", hint=_HINT)
        raise _silent()

    def give_up(self) -> None:
        """Wait no longer, now or later: whoever waits is told at once."""
        self._has_given_up = True
        for woken in list(self._waiting):
            woken.set()


_HINT = "a read of /sys hangs: the node's kernel log may name the device or its driver"


def _silent() -> HostUnreadable:
    return HostUnreadable(f"the host has not answered within {HOST_SECONDS} seconds", hint=_HINT)
