"""VMs of any number of devices to draw, over hosts written out here: sockets, root complexes, switches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from xml.sax.saxutils import escape

from pcinuma.domain_xml import load
from pcinuma.host_file import HostFile, dump
from pcinuma.model import HostQuery
from pcinuma.parse import parse
from tests.support import domains, hosts


def machine_files(devices: int, nodes: int, *, odd: bool = False) -> tuple[bytes, bytes]:
    """The same as files: the domain, and the record of the host."""
    xml, host = machine(devices, nodes, odd=odd)
    everything = HostQuery(frozenset(device.source for device in parse(load(xml)).devices if device.source is not None))
    return xml, json.dumps(dump(host(everything))).encode()


def machine(devices: int, nodes: int = 2, *, names: str = "ua-gpu-gpu{}", odd: bool = False) -> tuple[bytes, HostFile]:
    """A domain of that many devices over host nodes that each back a cell, and its host.

    Each node has root complexes of four devices, two of them at a time below one switch. With ``odd`` every seventh
    device is on a node that the host does not tell, and every eleventh on a node that no cell has.
    """
    functions: dict[str, int] = {}
    details: dict[str, dict[str, object]] = {}
    each = -(-devices // nodes)
    for number in range(devices):
        node = number // each
        bus = 8 + number if devices > 56 else 8 + 4 * number
        bdf = f"0000:{bus:02x}:00.0"
        functions[bdf] = -1 if odd and number % 7 == 3 else nodes if odd and number % 11 == 5 else node
        first = number - (number - node * each) % 4
        pair = number - (number - first) % 2
        complex_of = f"{(8 + first) % 256:02x}"
        details[bdf.replace(":", "_").replace(".", "_")] = {
            "rootComplex": f"pci00{node:02x}:{complex_of}",
            "bridges": [
                f"00{node:02x}:{complex_of}:{1 + pair - first:02x}.0",
                f"00{node:02x}:{(8 + pair) % 256:02x}:1f.0",
                f"00{node:02x}:{(8 + pair) % 256:02x}:{number % 2:02x}.1",
            ],
        }
    cpus = {node: f"{16 * node}-{16 * node + 15}" for node in range(nodes + odd)}
    listed = [
        domains.hostdev(bdf, escape(names.format(number), {'"': "&quot;"})) for number, bdf in enumerate(functions)
    ]
    xml = domains.domain({node: node for node in range(nodes)}, listed)
    return xml.encode(), hosts.host(cpus, functions, **details)


def dealt(cells: Sequence[int], devices: int, *, first: int = 1) -> tuple[bytes, HostFile]:
    """Devices that the user's own expanders hold already, dealt out to the cells like cards, and their host.

    ``cells`` are in the order of the expanders, as many as host nodes; a node's devices are next to each other on the
    host. ``first`` is the index of the first expander.
    """
    controllers, listed = [], []
    each = devices // len(cells)
    for place, cell in enumerate(cells):
        expander = first + (each + 1) * place
        controllers.append(
            f'<controller type="pci" index="{expander}" model="pcie-expander-bus">'
            f'<target busNr="{30 + 40 * place}"><node>{cell}</node></target></controller>'
        )
        for slot in range(each):
            port, number = expander + 1 + slot, slot * len(cells) + place
            controllers.append(
                f'<controller type="pci" index="{port}" model="pcie-root-port"><address type="pci" domain="0" '
                f'bus="{expander}" slot="{slot}" function="0"/></controller>'
            )
            address = f'<address type="pci" domain="0x0000" bus="{port}" slot="0x00" function="0x0"/>'
            listed.append(domains.hostdev(f"0000:{0x20 + number:02x}:00.0", f"ua-nic-{number}", address))
    nodes = range(len(cells))
    xml = domains.domain({node: node for node in nodes}, [*controllers, *listed])
    functions = {f"0000:{0x20 + number:02x}:00.0": number // each for number in range(devices)}
    return xml.encode(), hosts.host({node: f"{8 * node}-{8 * node + 7}" for node in nodes}, functions)


def kept_on_bus_0(devices: int) -> tuple[bytes, HostFile]:
    """Devices over two nodes, every second with an address on bus 0 already, where ``--addressed keep`` leaves it."""
    listed = [
        domains.hostdev(
            f"0000:{0x20 + number:02x}:00.0",
            f"ua-nic-{number}",
            f'<address type="pci" domain="0x0000" bus="0x00" slot="{0x10 + number:#x}" function="0x0"/>' * (number % 2),
        )
        for number in range(devices)
    ]
    functions = {f"0000:{0x20 + number:02x}:00.0": number * 2 // devices for number in range(devices)}
    return domains.domain({0: 0, 1: 1}, listed).encode(), hosts.host({0: "0-7", 1: "8-15"}, functions)
