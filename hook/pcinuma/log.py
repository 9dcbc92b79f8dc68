"""The log of what serves: one line a call on standard error, which no reader of it can hold up."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from pcinuma.errors import one_line

LOG_SECONDS = 0.2
_MOST_LINES = 1000
_MOST_TEXT = 1_000_000


class Log:
    """Writes one line a call to standard error: JSON, or text for people.

    A thread of its own writes, so that a standard error that nobody reads holds up no call; lines beyond a thousand
    that wait are dropped, the newest first.
    """

    def __init__(self, form: str, level: str):
        self._text = form == "text"
        self._debug = level == "debug"
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._started = False

    def write(self, level: str, event: str, record: Mapping[str, Any]) -> None:
        """One line. ``level`` is debug, info, warning or error."""
        if self._text:
            line = f"pcinuma: {level}: {event}: {one_line(_as_text(record), _MOST_TEXT)}"
        else:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            line = json.dumps({"time": stamp, "level": level, "event": event, **record})
        with self._changed:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, daemon=True).start()
            if len(self._waiting) < _MOST_LINES:
                self._waiting.append(line.encode("utf-8", "replace") + b"\n")
            self._changed.notify_all()
            if len(self._waiting) == 1:  # nothing is stuck: a call's line is out before its answer
                self._changed.wait_for(lambda: not self._waiting, LOG_SECONDS)

    def whole(self, event: str, xml: bytes) -> None:
        """A whole domain XML, at log level debug alone: it names the VM's disks and secrets' paths."""
        if self._debug:
            self.write("debug", event, {"xml": xml.decode("utf-8", "replace")})

    def flush(self, seconds: float) -> None:
        """Wait until all lines are written, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)

    def _run(self) -> None:
        torn = False  # the line before was cut, as on a full disk: the next is not to be a part of it
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                line = self._waiting[0]
            written, line = 0, b"\n" + line if torn else line
            with contextlib.suppress(OSError):
                while written < len(line):
                    written += os.write(2, line[written:])  # not sys.stderr: its lock would outlive a blocked writer
            torn = line[written - 1 : written] != b"\n" if written else torn
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()


def _as_text(record: Mapping[str, Any]) -> str:
    devices = [
        f"{d['source'] or d['alias']} {d['placement']}"
        + (f" on cell {d['cell']}" if d["cell"] is not None else "")
        + (f" as guest {d['guestBDF']}" if d["guestBDF"] is not None else "")
        for d in record.get("devices", ())
    ]
    findings = [f"{f['severity']}: {f['message']}" for f in record.get("findings", ())]
    who = "/".join(str(record[key]) for key in ("namespace", "name") if record.get(key))
    said = [who, str(record.get("outcome") or ""), *devices, *findings, str(record.get("error") or "")]
    rest = [f"{key}={record[key]}" for key in ("socket", "milliseconds", "xml") if record.get(key) is not None]
    return "; ".join(part for part in [*said, *rest] if part)
