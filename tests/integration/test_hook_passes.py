"""virt-launcher's whole start of a VM, call after call over the socket, with a real libvirt between the calls."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support import domains, kubevirt, sidecar
from tests.support.libvirt import define_and_dump
from tests.support.sidecar import Client, Sidecar, vmi
from tests.support.two_sockets import CONTROLLERS, DEVICES, EXAMPLE, SEEN

pytestmark = pytest.mark.libvirt

DOMAIN = (EXAMPLE / "domain.xml").read_text()
PASSES = {"1.4": 2, "1.7": 2, "1.9": 3}
VMI = vmi({"policy": "restricted"}, name="train-0", namespace="ml")

# The example's functions and where its devices sit, by hand: groups ascend by their lowest BDF, indexes from 1 in
# document order, 4 and 3 ports below the expanders, so 5 + 4 bus numbers that end at 255.
NODES = {0: "0-31,64-95", 1: "32-63,96-127"}
FUNCTIONS = {
    "0000:1a:00.0": 0,
    "0000:1c:00.0": 0,
    "0000:3d:00.0": 0,
    "0000:5e:02.1": 0,
    "0000:9a:00.0": 1,
    "0000:9c:00.0": 1,
    "0000:bd:00.0": 1,
}
# The second start gets other functions: the GPUs 0 and 1 and the VF come from node 1, and the lowest BDF with them.
OTHERS = {
    "0000:1a:00.0": ("0000:2a:00.0", 1),
    "0000:1c:00.0": ("0000:c2:00.0", 0),
    "0000:3d:00.0": ("0000:4d:00.0", 1),
    "0000:5e:02.1": ("0000:6e:1f.7", 1),
    "0000:9a:00.0": ("0000:aa:00.0", 0),
    "0000:9c:00.0": ("0000:ac:00.0", 0),
    "0000:bd:00.0": ("0000:cd:00.0", 0),
}
OTHER_CONTROLLERS: dict[str, tuple[object, ...]] = {
    "ua-pcinuma-cell1": (1, 247, 1),
    "ua-pcinuma-0000-2a-00-0": (2, "off", 1, 0, 0),
    "ua-pcinuma-0000-4d-00-0": (3, "off", 1, 1, 0),
    "ua-pcinuma-0000-6e-1f-7": (4, "off", 1, 2, 0),
    "ua-pcinuma-cell0": (5, 251, 0),
    "ua-pcinuma-0000-aa-00-0": (6, "off", 5, 0, 0),
    "ua-pcinuma-0000-ac-00-0": (7, "off", 5, 1, 0),
    "ua-pcinuma-0000-c2-00-0": (8, "off", 5, 2, 0),
    "ua-pcinuma-0000-cd-00-0": (9, "off", 5, 3, 0),
}
OTHER_DEVICES: dict[str, tuple[int, ...] | None] = {
    "ua-gpu-gpu0": (2, 0, 0),
    "ua-gpu-gpu1": (3, 0, 0),
    "ua-sriov-storage": (4, 0, 0),
    "ua-gpu-gpu2": (6, 0, 0),
    "ua-hostdevice-ib1": (7, 0, 0),
    "ua-hostdevice-ib0": (8, 0, 0),
    "ua-gpu-gpu3": (9, 0, 0),
}


def on_other_functions(xml: str) -> str:
    for old, (new, _) in OTHERS.items():
        parts = [re.fullmatch(r"....:(..):(..)\.(.)", bdf) for bdf in (old, new)]
        written = ['bus="0x{}" slot="0x{}" function="0x{}"'.format(*part.groups()) for part in parts if part]
        assert xml.count(written[0]) == 1
        xml = xml.replace(written[0], written[1])
    return xml


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    functions = FUNCTIONS | dict(OTHERS.values())
    host = sidecar.host_file(tmp_path_factory.mktemp("host") / "host.json", NODES, functions)
    with sidecar.running("--host", host, plugin=True) as running:
        yield running


def play(hook: Sidecar, domain: str, version: str, *, plugin: bool = False) -> list[kubevirt.Pass]:
    """A VM's start; virt-launcher dials for every call anew."""

    def call(xml: str) -> str:
        if plugin:
            assert hook.plugin_socket is not None
            with Client(hook.plugin_socket) as client:
                return client.mutate(xml, VMI).decode()
        with Client(hook.socket) as client:
            return client.define(xml, VMI).decode()

    return kubevirt.play(domain, version, call, define_and_dump, count=4 if version == "1.9" else None)


def has_placeholders(xml: str) -> bool:
    return 'dev="placeholder-0"' in xml and 'dev="placeholder-1"' in xml


@pytest.mark.parametrize(("version", "plugin"), [("1.4", False), ("1.7", False), ("1.9", False), ("1.9", True)])
def test_every_pass_has_one_layout(hook: Sidecar, version: str, plugin: bool) -> None:
    passes = play(hook, DOMAIN, version, plugin=plugin)
    assert len(passes) == PASSES[version]
    assert [has_placeholders(one.given) for one in passes] == [True] + [False] * (PASSES[version] - 1)
    assert has_placeholders(passes[0].answer)
    for number, one in enumerate(passes, start=1):
        assert domains.layout(one.answer) == (CONTROLLERS, DEVICES), f"pass {number}"
        assert domains.layout(one.defined) == (CONTROLLERS, DEVICES), f"libvirt after pass {number}"
    records = [record for record in hook.records() if "devices" in record][-len(passes) :]
    for number, record in enumerate(records, start=1):
        found = {device["alias"]: (device["guestBDF"], device["cell"]) for device in record["devices"]}
        assert found == SEEN, f"pass {number}"
        assert {device["placement"] for device in record["devices"]} == {"placed"}, f"pass {number}"
        assert record["findings"] == [], f"pass {number}"


@pytest.mark.parametrize("version", PASSES)
def test_a_second_start_on_other_host_devices(hook: Sidecar, version: str) -> None:
    first = play(hook, DOMAIN, version)
    second = play(hook, on_other_functions(DOMAIN), version)
    for one in second:
        assert domains.layout(one.answer) == (OTHER_CONTROLLERS, OTHER_DEVICES)
        assert domains.layout(one.defined) == (OTHER_CONTROLLERS, OTHER_DEVICES)
    assert [one.answer for one in play(hook, DOMAIN, version)] == [one.answer for one in first]


@pytest.mark.parametrize("version", ["1.4", "1.9"])
def test_the_next_start_gets_other_devices_under_the_set_that_libvirt_knows(hook: Sidecar, version: str) -> None:
    """The domain of an earlier start, our controllers and all, with other functions in it: the old set goes as a whole."""
    before = play(hook, DOMAIN, version)[-1].defined
    before = before.replace("'", '"')  # libvirt writes single quotes
    given = kubevirt.through_structs(on_other_functions(before), version)
    with Client(hook.socket) as client:
        answer = client.define(given, VMI).decode()
    controllers, devices = domains.layout(answer)
    assert set(controllers) == set(OTHER_CONTROLLERS)
    expanders = {name: at[1:] for name, at in controllers.items() if "cell" in name}
    assert expanders == {"ua-pcinuma-cell1": (247, 1), "ua-pcinuma-cell0": (251, 0)}
    on_cells = {}
    by_index = {at[0]: (name, at) for name, at in controllers.items()}
    for name, at in devices.items():
        assert at is not None
        port = by_index[at[0]][1]
        on_cells[name] = by_index[port[2]][0]
    assert on_cells == {
        name: "ua-pcinuma-cell1" if index in (2, 3, 4) else "ua-pcinuma-cell0"
        for name, (index, _, _) in ((n, a) for n, a in OTHER_DEVICES.items() if a is not None)
    }
    assert domains.layout(define_and_dump(answer)) == (controllers, devices)


@pytest.mark.parametrize("version", ["1.4", "1.9"])
def test_a_migration_target(hook: Sidecar, version: str) -> None:
    """It is asked for a domain of its own, and what it answers is thrown away; no later start may notice."""
    expected = [one.answer for one in play(hook, DOMAIN, version)]
    with Client(hook.socket) as client:
        assert domains.layout(client.define(on_other_functions(DOMAIN), VMI)) == (OTHER_CONTROLLERS, OTHER_DEVICES)
    assert hook.plugin_socket is not None
    with Client(hook.plugin_socket) as client:
        thrown_away = client.mutate(on_other_functions(DOMAIN), VMI, "MigrationTarget")
        assert domains.layout(thrown_away) == (OTHER_CONTROLLERS, OTHER_DEVICES)
        # the source's own domain, which its start has placed
        assert client.mutate(expected[-1], VMI, "MigrationSource").decode() == expected[-1]
    assert [one.answer for one in play(hook, DOMAIN, version)] == expected


def test_the_domain_of_a_start_given_once_more_comes_back_as_it_is(hook: Sidecar) -> None:
    with Client(hook.socket) as client:
        first = client.define(DOMAIN, VMI)
        assert client.define(first, VMI) == first
