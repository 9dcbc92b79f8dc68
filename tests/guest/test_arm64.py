"""An arm64 guest on the machine virt, with EDK2 and Linux of Debian trixie; ``make test-trixie`` has what it takes.

With older firmware Linux gives up NUMA altogether there.
"""

from __future__ import annotations

import pytest

from pcinuma.model import Options
from pcinuma.pipeline import transform
from tests.support import hosts
from tests.support.domains import domain, hostdev
from tests.support.guest import boot

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

FUNCTIONS = {"0000:13:00.0": 0, "0000:14:00.0": 0, "0000:85:00.0": 1}
ABOVE = {
    "0000_13_00_0": {"bridges": ["0000:10:01.0", "0000:11:00.0", "0000:12:00.0"]},
    "0000_14_00_0": {"bridges": ["0000:10:01.0", "0000:11:00.0", "0000:12:01.0"]},
}


@pytest.mark.parametrize(
    ("group_by", "expected"),
    [
        # expanders fb and fe, a bus for each port
        (
            "numa",
            {"ua-gpu-13": ("0000:fc:00.0", 0), "ua-gpu-14": ("0000:fd:00.0", 0), "ua-gpu-85": ("0000:ff:00.0", 1)},
        ),
        # expander f9, root port fa, upstream port fb, two downstream ports; expander fe
        (
            "switch",
            {"ua-gpu-13": ("0000:fc:00.0", 0), "ua-gpu-14": ("0000:fd:00.0", 0), "ua-gpu-85": ("0000:ff:00.0", 1)},
        ),
    ],
)
def test_an_arm64_guest(group_by: str, expected: dict[str, tuple[str, int]]) -> None:
    devices = [hostdev(bdf, f"ua-gpu-{bdf[5:7]}") for bdf in FUNCTIONS]
    xml = domain({0: 0, 1: 1}, devices, machine="virt", arch="aarch64")
    loader = '<loader readonly="yes" type="pflash">/usr/share/AAVMF/AAVMF_CODE.fd</loader>'
    xml = xml.replace("hvm</type>", f"hvm</type>{loader}")
    host = hosts.host({0: "0-7", 1: "8-15"}, FUNCTIONS, **ABOVE)
    result = transform(xml.encode(), Options(policy="restricted", group_by=group_by), host)
    assert result.report.outcome == "changed", result.refusal
    view = boot(result.xml.decode(), timeout=300)
    assert view.missing == []
    assert {alias: (device.bdf, device.numa_node) for alias, device in view.devices.items()} == expected
    assert {p.device.alias: str(p.guest_bdf) for p in result.report.plan.placements} == {
        alias: bdf for alias, (bdf, _) in expected.items()
    }
