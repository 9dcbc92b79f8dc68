"""Every pass of a VM's start: what KubeVirt's structs drop is restored in place, with a real libvirt in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lxml import etree

from pcinuma.model import Options
from pcinuma.pipeline import transform
from tests.conftest import ROOT
from tests.support import hosts, kubevirt
from tests.support.domains import domain, hostdev, layout
from tests.support.libvirt import define_and_dump
from tests.support.two_sockets import CONTROLLERS, DEVICES, EXAMPLE

pytestmark = pytest.mark.libvirt

SAMPLES = ROOT.parent / "shared" / "samples"


def hook_on(host: Callable[..., object], options: Options = Options()) -> Callable[[str], str]:
    def hook(xml: str) -> str:
        result = transform(xml.encode(), options, host)  # type: ignore[arg-type]
        assert result.refusal is None, result.refusal
        return result.xml.decode()

    return hook


def play(domain: str, version: str, hook: Callable[[str], str]) -> list[kubevirt.Pass]:
    return kubevirt.play(domain, version, hook, define_and_dump, count=4 if version in ("1.8", "1.9") else None)


@pytest.mark.parametrize("version", kubevirt.VERSIONS)
def test_every_pass_of_the_example_has_one_layout(version: str) -> None:
    domain = (EXAMPLE / "domain.xml").read_text()
    passes = play(domain, version, hook_on(hosts.from_file(EXAMPLE / "host.json")))
    assert len(passes) == {"1.4": 2, "1.6": 2, "1.7": 2, "1.8": 3, "1.9": 3}[version]
    for number, one in enumerate(passes, start=1):
        assert layout(one.answer) == (CONTROLLERS, DEVICES), f"pass {number}"
        assert one.answer.count('mode="subsystem"') == 7
        assert layout(one.defined) == (CONTROLLERS, DEVICES), f"libvirt after pass {number}"


@pytest.mark.parametrize("version", kubevirt.VERSIONS)
def test_every_pass_keeps_a_rebuilt_switch(version: str) -> None:
    functions = {"0000:13:00.0": 0, "0000:14:00.0": 0}
    above = {
        "0000_13_00_0": {"bridges": ["0000:10:01.0", "0000:11:00.0", "0000:12:00.0"]},
        "0000_14_00_0": {"bridges": ["0000:10:01.0", "0000:11:00.0", "0000:12:01.0"]},
    }
    devices = [hostdev("0000:14:00.0", "ua-hostdevice-nic"), hostdev("0000:13:00.0", "ua-gpu-gpu0")]
    options = Options(group_by="switch", policy="restricted")
    hook = hook_on(hosts.host({0: "0-7"}, functions, **above), options)
    # by hand: expander, root port, upstream port, two downstream ports: five bus numbers that end at 255
    expected: dict[str, tuple[object, ...]] = {
        "ua-pcinuma-cell0": (1, 251, 0),
        "ua-pcinuma-to-switch-0000-11-00-0": (2, "off", 1, 0, 0),
        "ua-pcinuma-switch-0000-11-00-0": (3, 2, 0, 0),
        "ua-pcinuma-0000-13-00-0": (4, "off", 3, 0, 0),
        "ua-pcinuma-0000-14-00-0": (5, "off", 3, 1, 0),
    }
    for number, one in enumerate(play(domain({0: 0}, devices), version, hook), start=1):
        controllers, placed = layout(one.answer)
        assert controllers == expected, f"pass {number}"
        assert placed == {"ua-gpu-gpu0": (4, 0, 0), "ua-hostdevice-nic": (5, 0, 0)}
        assert layout(one.defined)[0] == expected, f"libvirt after pass {number}"


@pytest.mark.parametrize("version", ["1.4", "1.7", "1.9"])
def test_another_device_never_comes_to_sit_on_a_port_of_ours(version: str) -> None:
    domain = (EXAMPLE / "domain.xml").read_text()
    for one in play(domain, version, hook_on(hosts.from_file(EXAMPLE / "host.json"))):
        root = etree.fromstring(one.defined.encode())
        ours = {
            int(controller.get("index", ""))
            for controller in root.iterfind("devices/controller[@type='pci']")
            for alias in controller.iterfind("alias")
            if "pcinuma" in alias.get("name", "")
        }
        on_ours = [
            element.tag
            for element in root.iterfind("devices/*")
            for address in element.iterfind("address")
            if element.tag != "controller" and int(address.get("bus", "0"), 0) in ours
        ]
        assert on_ours == ["hostdev"] * 7


@pytest.mark.parametrize("version", ["1.4", "1.7", "1.9"])
def test_a_device_that_stays_is_reported_alike_on_every_pass(version: str) -> None:
    nodes = {0: "0-31,64-95", 1: "32-63,96-127"}
    functions = {"0000:1c:00.0": 0, "0000:9c:00.0": 1, "0000:1a:00.0": 0, "0000:3d:00.0": -1, "0000:9a:00.0": 1}
    host = hosts.host(nodes, functions | {"0000:bd:00.0": 1, "0000:5e:02.1": 0})
    outcomes = []

    def hook(xml: str) -> str:
        result = transform(xml.encode(), Options(), host)
        outcomes.append({(p.device.label, p.kind, p.code) for p in result.report.plan.placements})
        return result.xml.decode()

    passes = play((EXAMPLE / "domain.xml").read_text(), version, hook)
    assert ("0000:3d:00.0", "left", "numa-unknown") in outcomes[0]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    layouts = [layout(one.answer)[0] for one in passes]
    assert all(one == layouts[0] for one in layouts)


def test_a_device_that_libvirt_addressed_in_between_is_placed() -> None:
    """A NIC comes to the domain after pass 1: libvirt puts it beyond our set, so no user's address is lost."""
    host = hosts.from_file(EXAMPLE / "host.json")
    hook = hook_on(host)
    late = '<hostdev type="pci" managed="no">\n\t\t\t<source>\n\t\t\t\t<address type="pci" domain="0x0000" bus="0x3d"'
    domain = (EXAMPLE / "domain.xml").read_text()
    start = domain.index(late)
    end = domain.index("</hostdev>", start) + len("</hostdev>\n\t\t")
    without = domain[:start] + domain[end:]
    first = hook(without)
    with_late = first.replace("<hostdev ", domain[start:end] + "<hostdev ", 1)
    defined = define_and_dump(with_late)
    by_libvirt = layout(defined)[1]["ua-gpu-gpu1"]
    again = hook(kubevirt.through_structs(defined, "1.7"))
    controllers, devices = layout(again)
    assert "ua-pcinuma-0000-3d-00-0" in controllers
    assert devices["ua-gpu-gpu1"] != by_libvirt
    assert sum(name.startswith("ua-pcinuma-cell") for name in controllers) == 2
    assert layout(define_and_dump(again)) == layout(again)


# --- KubeVirt's own converter's domains ------------------------------------------------------------------------


def _samples() -> list[tuple[str, str, Path]]:
    found = []
    for version, pattern in (("1.7", "v1.7.0/*.pass1.xml"), ("1.9", "v1.9.0/*.pcinuma-false.pass1.xml")):
        found += [(version, path.name.split(".")[0], path) for path in sorted(SAMPLES.glob(pattern))]
    return found


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no ../shared/samples: KubeVirt's own domains are not here")
@pytest.mark.parametrize(("version", "case", "path"), _samples(), ids=lambda value: getattr(value, "name", value))
def test_samples_converge(version: str, case: str, path: Path) -> None:
    # a case without passthrough devices has no host recorded; its hook must not ask for one
    recorded = json.loads((SAMPLES / "hosts.json").read_text()).get(case, {"nodes": {}, "devices": {}})
    host = hosts.host({int(node): cpus for node, cpus in recorded["nodes"].items()}, recorded["devices"])
    passes = play(path.read_text(), version, hook_on(host))
    first = layout(passes[0].answer)
    for one in passes:
        controllers, devices = layout(one.answer)
        assert controllers == first[0]
        for name, at in first[1].items():
            if at is not None:
                assert devices[name] == at, name
        assert layout(one.defined)[0] == controllers
