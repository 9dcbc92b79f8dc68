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


def bounded(read_host: Callable[[HostQuery], HostTopology]) -> Callable[[HostQuery], HostTopology]:
    """The reader, each read in a thread of its own. It raises HostUnreadable when the host has not answered within
    HOST_SECONDS, or when MOST_STUCK reads have not come back yet."""
    room = threading.BoundedSemaphore(MOST_STUCK)

    def read(query: HostQuery) -> HostTopology:
        answers: list[HostTopology] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(read_host(query))
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                errors.append(error)
            finally:
                room.release()

        if not room.acquire(blocking=False):
            raise _silent()
        reader = threading.Thread(target=run, daemon=True)
        reader.start()
        reader.join(HOST_SECONDS)
        if answers:
            return answers[0]
        raise errors[0] if errors else _silent()

    return read


def _silent() -> HostUnreadable:
    what = f"the host has not answered within {HOST_SECONDS} seconds"
    return HostUnreadable(what, hint="a read of /sys hangs: the node's kernel log may name the device or its driver")
