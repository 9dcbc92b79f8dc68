"""The topology file for several hosts and groupings, held against files written by hand and against NCCL's own rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from pcinuma.discover import ReadHost
from pcinuma.model import Options
from pcinuma.nccl_topo import topology_file
from pcinuma.pipeline import transform
from tests.conftest import ROOT
from tests.support import hosts, nccl, nccl_hosts
from tests.support.domains import domain, hostdev

FILES = Path(__file__).with_name("nccl")
EXAMPLE = ROOT / "examples" / "two-sockets"


def two_sockets() -> tuple[str, ReadHost, Options]:
    return (EXAMPLE / "domain.xml").read_text(), hosts.from_file(EXAMPLE / "host.json"), Options()


def root_complex() -> tuple[str, ReadHost, Options]:
    bdfs = ["0000:83:00.0", "0000:41:00.0", "0000:15:00.0", "0000:16:00.0", "0000:19:00.0", "0000:1a:00.0"]
    devices = [hostdev(bdf, f"ua-gpu-d{number}") for number, bdf in enumerate(bdfs)]
    return domain({0: 0, 1: 1}, devices), nccl_hosts.nested_switches(), Options(group_by="root-complex")


def switch() -> tuple[str, ReadHost, Options]:
    """14 bus numbers from f2: expander f2, its port f3 with the upper switch at f3:00.0, whose ports lead to f5 and f9,
    where the two lower ones are: their devices at f7, f8 and fb, fc. The port of the lone GPU is fd; cell 1 has fe, ff."""
    xml, host, _ = root_complex()
    return xml, host, Options(group_by="switch")


def sr_iov() -> tuple[str, ReadHost, Options]:
    bdfs = ["0000:61:00.0", "0000:62:00.2", "0000:62:00.3"]
    devices = [hostdev(bdf, f"ua-sriov-d{number}") for number, bdf in enumerate(bdfs)]
    return domain({0: 1}, devices), nccl_hosts.sr_iov(), Options()


CASES = {"two-sockets": two_sockets, "root-complex": root_complex, "switch": switch, "sr-iov": sr_iov}


@pytest.mark.parametrize("case", CASES)
def test_as_written_by_hand(case: str) -> None:
    xml, host, options = CASES[case]()
    result = transform(xml.encode(), options, host)
    assert result.report.outcome == "changed"
    made = topology_file(result.xml, host)
    assert made.text == (FILES / f"{case}.xml").read_text()
    assert made.findings == ()
    assert nccl.problems(made.text) == []
