"""A VM's whole start through the sidecar, and then the guest: it sees what the log of the last call said."""

from __future__ import annotations

import pytest

from tests.support import kubevirt, sidecar
from tests.support.guest import boot
from tests.support.libvirt import define_and_dump
from tests.support.sidecar import Client, vmi
from tests.support.two_sockets import EXAMPLE, SEEN

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("version", "calls"), [("1.4", 2), ("1.7", 2), ("1.9", 3)])
def test_the_guest_of_a_start(version: str, calls: int) -> None:
    with sidecar.running("--host", EXAMPLE / "host.json") as hook:

        def call(xml: str) -> str:
            with Client(hook.socket) as client:
                return client.define(xml, vmi({"policy": "restricted"})).decode()

        count = 4 if version == "1.9" else None
        passes = kubevirt.play((EXAMPLE / "domain.xml").read_text(), version, call, define_and_dump, count=count)
        records = hook.records("OnDefineDomain")
        assert len(records) == calls
    view = boot(passes[-1].answer)
    assert view.missing == []
    seen = {alias: (device.bdf, device.numa_node) for alias, device in view.devices.items()}
    logged = {device["alias"]: (device["guestBDF"], device["cell"]) for device in records[-1]["devices"]}
    assert seen == logged == SEEN
