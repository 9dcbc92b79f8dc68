"""The time of day jumps by years under what serves (libfaketime): limits and waits go by the clock that does not."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support import domains, sidecar
from tests.support.domains import domain, hostdev
from tests.support.sidecar import Client
from tests.support.webhook import Authority, Webhook, asked, der, review_of, running, vmi

HANGS, QUICK = "0000:41:00.0", "0000:42:00.0"
REVIEW = json.dumps(review_of(vmi({"pcinuma.vm.kubevirt.io/enabled": "true"})))
HEAD = b"POST /mutate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"


class Clock:
    """What a process takes for the time of day; its monotonic clock is the kernel's."""

    def __init__(self, file: Path, library: Path):
        self._file = file
        self.set(0)
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, years: int) -> None:
        """So many years from now."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{years:+}y")
        new.rename(self._file)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        pytest.skip("no libfaketime here (Debian: faketime)")
    return Clock(tmp_path / "clock", found[0])


def test_a_sidecar_whose_clock_jumps(clock: Clock, tmp_path: Path) -> None:
    tree = sidecar.sysfs(tmp_path / "sys", {0: "0-7"}, {HANGS: None, QUICK: 0})
    slow, quick = (domain({0: 0}, [hostdev(bdf, "ua-gpu-gpu")]) for bdf in (HANGS, QUICK))
    placed = {"ua-gpu-gpu": (2, 0, 0)}
    year = datetime.now(UTC).year
    with sidecar.running("--sysfs", tree, environment=clock.environment) as hook, Client(hook.socket) as client:
        assert domains.layout(client.define(quick, sidecar.vmi()))[1] == placed
        call = client.begin_define(slow, sidecar.vmi())
        answering = sidecar.someone_reads(tree, HANGS)
        try:
            for years in (10, -20):
                clock.set(years)
                begun = time.monotonic()
                assert domains.layout(client.define(quick, sidecar.vmi()))[1] == placed
                assert client.info().name == "pcinuma"
                assert time.monotonic() - begun < 9
                time.sleep(0.3)
                assert not call.done(), "its ten seconds are not over"
            os.write(answering, b"0\n")
        finally:
            os.close(answering)
        assert domains.layout(call.result().domainXML)[1] == placed
        records = hook.records("OnDefineDomain")
        assert [int(record["time"][:4]) - year for record in records] == [0, 10, -20, -20], "the clock did jump"
        assert 500 < records[-1]["milliseconds"] < 10_000
        clock.set(30)
        status, seconds = hook.end()
        assert (status, hook.socket.exists()) == (0, False)
        assert seconds < 4


def test_a_webhook_whose_clock_jumps(clock: Clock, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.mount(*authority.pair())
    with (
        running(authority=authority, environment=clock.environment) as webhook,
        contextlib.closing(webhook.client()) as kept,
        webhook.connect() as slow,
    ):
        review(kept)
        slow.sendall(HEAD)
        begun = time.monotonic()

        clock.set(10)
        assert ready(webhook)[0] == 503
        assert "the certificate expired at" in ready(webhook)[1]
        told(webhook, ["the certificate expired"])
        good_for_years = authority.pair(timedelta(days=20 * 365))
        review(kept)
        with contextlib.closing(webhook.client()) as new:
            review(new)
        authority.mount(*good_for_years)
        until_shown(webhook, good_for_years[0])
        assert ready(webhook)[0] == 200
        review(kept)

        clock.set(-40)  # trustme's certificates are valid from the year 2000
        assert ready(webhook)[0] == 503
        assert "the certificate is not valid before" in ready(webhook)[1]
        told(webhook, ["the certificate expired", "the certificate is not valid"])
        another = authority.pair()
        authority.mount(*another)
        until_shown(webhook, another[0])
        review(kept)

        clock.set(0)
        assert ready(webhook)[0] == 200
        review(kept)
        assert slow.recv(1000).startswith(b"HTTP/1.1 408 "), "a body has ten seconds, whatever the time of day"
        assert 9 < time.monotonic() - begun < 25
        told(webhook, ["the certificate expired", "the certificate is not valid", "the certificate is not valid"])
        clock.set(5)
        assert webhook.end() == 0
        assert {line["event"] for line in webhook.lines()} == {"ready", "admission", "certificate", "ended"}


def review(client: http.client.HTTPSConnection) -> None:
    begun = time.monotonic()
    status, _, body = asked(client, "POST", "/mutate", REVIEW, content_type="application/json")
    assert (status, json.loads(body)["response"]["allowed"]) == (200, True)
    assert time.monotonic() - begun < 9


def ready(webhook: Webhook) -> tuple[int, str]:
    """Of /readyz; it is alive in any case."""
    assert webhook.call("GET", "/healthz")[0] == 200
    status, _, body = webhook.call("GET", "/readyz")
    return status, body.decode()


def told(webhook: Webhook, starts: list[str]) -> None:
    """Waits for as many errors in the log, and no more: each pair's fault is told once."""
    deadline = time.monotonic() + 10
    while len(errors := [line["error"] for line in webhook.lines() if line["level"] == "error"]) < len(starts):
        assert time.monotonic() < deadline, errors
        time.sleep(0.05)
    assert [error[: len(start)] for error, start in zip(errors, starts, strict=True)] == starts


def until_shown(webhook: Webhook, cert: bytes) -> None:
    deadline = time.monotonic() + 10
    while True:
        with webhook.connect() as connection:
            if connection.getpeercert(binary_form=True) == der(cert):
                return
        assert time.monotonic() < deadline, "the new certificate is not used"
        time.sleep(0.1)
