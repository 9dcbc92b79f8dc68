"""Hosts with PCIe switches, for the tests of the topology file."""

from __future__ import annotations

from typing import Any

from pcinuma.host_file import HostFile
from tests.support import hosts

INTEL = {"vendor": "GenuineIntel", "family": 6, "model": 207}
AMD = {"vendor": "AuthenticAMD", "family": 25, "model": 17}


def link(speed: float = 32.0, width: int = 16, now: float | None = None) -> dict[str, Any]:
    """The most a link can do; ``now`` is the speed it runs at, where that is another."""
    return {"link": {"maxSpeed": speed, "maxWidth": width, "speed": now or speed, "width": width}}


def gpu(*bridges: str, **more: Any) -> dict[str, Any]:
    return {"class": "0x030200", "vendor": "0x10de", "device": "0x2330", "bridges": list(bridges), **link(), **more}


def nic(*bridges: str, **more: Any) -> dict[str, Any]:
    return {"class": "0x020700", "vendor": "0x15b3", "device": "0x1021", "bridges": list(bridges), **link(), **more}


def bridge(*bridges: str, **more: Any) -> dict[str, Any]:
    return {"class": "0x060400", "vendor": "0x1000", "device": "0xc030", "bridges": list(bridges), **link(), **more}


def host(nodes: dict[int, str], functions: dict[str, tuple[int, dict[str, Any]]], **more: Any) -> HostFile:
    """A host with these functions: the node of each, and what the host says of it."""
    details = {bdf.replace(":", "_").replace(".", "_"): given for bdf, (_, given) in functions.items()}
    return hosts.host(nodes, {bdf: node for bdf, (node, _) in functions.items()}, **details, **more)


def nested_switches() -> HostFile:
    """Node 0: a switch above two, a GPU and a NIC below each, and a GPU on a root port of another root complex. Node 1:
    a switch with one GPU, its uplink of 8 lanes."""
    port, top, one, two, far = "0000:10:01.0", "0000:11:00.0", "0000:13:00.0", "0000:17:00.0", "0000:80:01.0"
    in_one, in_two = (port, top, "0000:12:00.0", one), (port, top, "0000:12:01.0", two)
    first = {"rootComplex": "pci0000:10"}
    functions = {
        port: (0, bridge(**link(16.0))),
        top: (0, bridge(port, subsystemVendor="0x1000", subsystemDevice="0x0005")),
        "0000:12:00.0": (0, bridge(port, top)),
        "0000:12:01.0": (0, bridge(port, top)),
        one: (0, bridge(*in_one[:3], subsystemVendor="0x1000", subsystemDevice="0x1005")),
        "0000:14:00.0": (0, bridge(*in_one)),
        "0000:14:01.0": (0, bridge(*in_one)),
        "0000:15:00.0": (0, gpu(*in_one, "0000:14:00.0", **first)),
        "0000:16:00.0": (0, nic(*in_one, "0000:14:01.0", **link(32.0, 8), **first)),
        two: (0, bridge(*in_two[:3], subsystemVendor="0x1000", subsystemDevice="0x1005")),
        "0000:18:00.0": (0, bridge(*in_two)),
        "0000:18:01.0": (0, bridge(*in_two)),
        # it idles at 2.5 GT/s
        "0000:19:00.0": (0, gpu(*in_two, "0000:18:00.0", **link(32.0, 16, now=2.5), **first)),
        "0000:1a:00.0": (0, nic(*in_two, "0000:18:01.0", **first)),
        "0000:40:01.0": (0, bridge()),
        "0000:41:00.0": (0, gpu("0000:40:01.0", **link(16.0), rootComplex="pci0000:40")),
        far: (1, bridge()),
        "0000:81:00.0": (1, bridge(far, **link(32.0, 8))),
        "0000:82:00.0": (1, bridge(far, "0000:81:00.0")),
        "0000:83:00.0": (1, gpu(far, "0000:81:00.0", "0000:82:00.0", rootComplex="pci0000:80")),
    }
    return host({0: "0-7", 1: "8-15"}, functions, cpu=AMD)


def sr_iov() -> HostFile:
    """Node 1: a GPU and two VFs below one switch; the VFs' links say nothing, their PF is of 16 GT/s."""
    port, switch = "0000:5d:01.0", "0000:5e:00.0"
    to_nic = (port, switch, "0000:5f:01.0")
    vf = {"class": "0x020000", "vendor": "0x15b3", "device": "0x101e", "bridges": list(to_nic)}
    functions = {
        port: (1, bridge()),
        switch: (1, bridge(port)),
        "0000:5f:00.0": (1, bridge(port, switch)),
        "0000:5f:01.0": (1, bridge(port, switch)),
        "0000:61:00.0": (1, gpu(port, switch, "0000:5f:00.0")),
        "0000:62:00.0": (1, nic(*to_nic, **link(16.0))),
        "0000:62:00.2": (1, {**vf, "physfn": "0000:62:00.0"}),
        "0000:62:00.3": (1, {**vf, "physfn": "0000:62:00.0"}),
    }
    return host({0: "0-7", 1: "8-15"}, functions, cpu=INTEL)
