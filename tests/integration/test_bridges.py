"""What can sit on what: every PCI controller of libvirt's on every other, judged by ``check`` as by a real libvirt."""

from __future__ import annotations

import pytest

from pcinuma.check import check
from pcinuma.model import Options
from tests.support import hosts
from tests.support.domains import domain, hostdev
from tests.support.libvirt import LibvirtRejected, define_and_dump

GPU = "0000:21:00.0"
HOST = hosts.host({0: "0-7", 1: "8-15"}, {GPU: 0})
TARGET = '<target busNr="{}"><node>0</node></target>'


def at(bus: int, slot: int) -> str:
    return f'<address type="pci" domain="0x0000" bus="{bus:#04x}" slot="{slot:#04x}" function="0x0"/>'


def controller(index: int, model: str, inside: str = "") -> str:
    return f'<controller type="pci" index="{index}" model="{model}">{inside}</controller>'


PORT = controller(1, "pcie-root-port")
SWITCH = PORT + controller(2, "pcie-switch-upstream-port", at(1, 0))
PARENTS: dict[str, tuple[int, str, tuple[int, ...]]] = {
    "pcie-root": (0, "", (4,)),
    "pcie-root-port": (1, PORT, (0,)),
    "pcie-expander-bus": (1, controller(1, "pcie-expander-bus", TARGET.format(200)), (0,)),
    "dmi-to-pci-bridge": (1, controller(1, "dmi-to-pci-bridge"), (0, 1)),
    "pci-bridge": (2, controller(1, "dmi-to-pci-bridge") + controller(2, "pci-bridge", at(1, 1)), (0, 1)),
    "pcie-to-pci-bridge": (2, PORT + controller(2, "pcie-to-pci-bridge", at(1, 0)), (0, 1)),
    "pcie-switch-upstream-port": (2, SWITCH, (0,)),
    "pcie-switch-downstream-port": (3, SWITCH + controller(3, "pcie-switch-downstream-port", at(2, 0)), (0,)),
}
"""The index of a controller of each model, the controllers that it takes to have it, the slots to try on it."""


@pytest.mark.libvirt
@pytest.mark.parametrize("parent", PARENTS)
def test_what_can_sit_on_it(parent: str) -> None:
    bus, controllers, slots = PARENTS[parent]
    differ = []
    for model in ("<hostdev>", *PARENTS):
        if model == "pcie-root":
            continue
        for slot in slots:
            if model == "<hostdev>":
                xml = domain({0: 0}, [hostdev(GPU, "ua-gpu", at(bus, slot))], extra=controllers)
            else:
                inside = (TARGET.format(220) if model == "pcie-expander-bus" else "") + at(bus, slot)
                child = controller(bus + 1, model, inside)
                xml = domain({0: 0}, [hostdev(GPU, "ua-gpu")], extra=controllers + child)
            said = [finding.message for finding in check(xml.encode(), Options(), HOST) if finding.severity == "error"]
            try:
                define_and_dump(xml)
                refusal = ""
            except LibvirtRejected as error:
                refusal = str(error)
            if bool(said) != bool(refusal):
                differ.append((model, slot, said, refusal))
    assert differ == []
