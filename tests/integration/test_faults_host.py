"""A host that goes away, fails or hangs while it is read: a real file system (FUSE) that fails at each step in turn.

What the kernel gives of a device that is unplugged is ENOENT for its names, ENODEV for an attribute that is open or found
already (fs/kernfs/file.c), EIO from a driver that does not get through to it, or an empty read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from lxml import etree

from pcinuma import cli
from tests.support import domains, faulty_tree, sidecar
from tests.support.domains import domain, hostdev
from tests.support.faulty_tree import EMPTY, Fault, FaultyTree
from tests.support.sidecar import Client, Sidecar, refused, vmi

NEAR, AWAY, VF, UUID = "0000:41:00.0", "0000:c1:00.0", "0000:42:00.1", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
PF = "0000:42:00.0"
MDEV = (
    '<hostdev type="mdev" managed="no" mode="subsystem" model="vfio-pci">\n\t\t\t<source>\n\t\t\t\t'
    f'<address uuid="{UUID}"></address>\n\t\t\t</source>\n\t\t\t<alias name="ua-gpu-vgpu"></alias>\n\t\t</hostdev>'
)
DOMAIN = domain(
    {0: 0, 1: 1}, [hostdev(NEAR, "ua-gpu-near"), hostdev(AWAY, "ua-gpu-away"), hostdev(VF, "ua-sriov-vf"), MDEV]
)
CELLS = {"ua-gpu-near": 0, "ua-gpu-away": 1, "ua-sriov-vf": 1, "ua-gpu-vgpu": 1}
"""On what cell each device belongs: the VF by its PF's node, the mediated device by its parent's."""
ERRORS: dict[str, dict[str, Any]] = {
    "unplugged": {"error": "ENOENT"},
    "unplugged when found": {"error": "ENODEV"},
    "unplugged when open": {"error": "ENODEV", "at": ("read",)},
    "driver fails": {"error": "EIO", "at": ("read",)},
    "empty": {"error": EMPTY, "at": ("read",)},
    "denied": {"error": "EACCES", "at": ("open", "list")},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree as the kernel shows it to sysfs' readers and to libudev, which wants a uevent and the subsystem."""
    tree = sidecar.sysfs(
        tmp_path_factory.mktemp("host") / "sys", {0: "0-7", 1: "8-15"}, {NEAR: 0, AWAY: 1, PF: 1, VF: -1}
    )
    function = tree / "devices" / "pci0000:42" / VF
    (function / "physfn").symlink_to(f"../{PF}")
    mdev = tree / "devices" / "pci0000:c1" / AWAY / UUID
    mdev.mkdir()
    (tree / "bus" / "mdev" / "devices").mkdir(parents=True)
    (tree / "bus" / "mdev" / "devices" / UUID).symlink_to(os.path.relpath(mdev, tree / "bus" / "mdev" / "devices"))
    for subsystem, found in {
        "bus/pci": [*tree.glob("devices/pci*/0000:*")],
        "bus/mdev": [mdev],
        "bus/node": [*tree.glob("devices/system/node/node*")],
    }.items():
        for path in found:
            (path / "uevent").touch()
            (path / "subsystem").symlink_to(os.path.relpath(tree / subsystem, path))
    (tree / "bus" / "node" / "devices").mkdir(parents=True)
    for path in tree.glob("devices/system/node/node*"):
        link = tree / "bus" / "node" / "devices" / path.name
        link.symlink_to(os.path.relpath(path, link.parent))
    return tree


@pytest.fixture
def host(source: Path, tmp_path: Path) -> Iterator[FaultyTree]:
    if os.geteuid() != 0 or not Path("/dev/fuse").exists() or shutil.which("fusermount3") is None:
        pytest.skip("needs root, /dev/fuse and libfuse (Debian: fuse3): the test mounts a file system")
    with faulty_tree.mounted(source, tmp_path) as tree:
        yield tree


@contextlib.contextmanager
def reading(host: FaultyTree, how: str) -> Iterator[Sidecar]:
    """A sidecar that reads the tree by --sysfs, or as its own /sys through libudev."""
    if how == "--sysfs":
        with sidecar.running("--sysfs", host.path) as hook:
            yield hook
        return
    with sidecar.folder() as place:
        # libudev looks at the kind of file system otherwise; the mount is this process's own and ends with it
        enter = f'mount --bind {host.path} /sys && exec "$0" "$@"'
        wrapped = ("unshare", "--mount", "sh", "-c", enter)
        with sidecar.running(at=place, before=wrapped, environment={"SYSTEMD_DEVICE_VERIFY_SYSFS": "0"}) as hook:
            yield hook


def cells(xml: bytes) -> dict[str, int | None]:
    """The cell that each device of the domain is on."""
    controllers, devices = domains.layout(xml)
    expanders = {one[0]: one[2] for name, one in controllers.items() if len(one) == 3}
    ports = {one[0]: expanders[one[2]] for name, one in controllers.items() if len(one) == 5}
    return {name: None if at is None else ports[at[0]] for name, at in devices.items()}  # type: ignore[misc]


def in_turn(host: FaultyTree, under: str, step: int = 1, **fault: Any) -> Iterator[int]:
    """The fault after 0, 1, 2, … operations (or every ``step``th of those), until it comes too late to be met."""
    for after in range(0, 5000, step):
        host.set(Fault(after=after, under=under, **fault))
        yield after
        if not host.has_failed:
            return
    raise AssertionError("more operations than anybody makes")


BOTH = ("unplugged", "unplugged when open", "denied")


@pytest.mark.parametrize(("how", "kind"), [*(("--sysfs", kind) for kind in ERRORS), *(("udev", kind) for kind in BOTH)])
def test_a_device_that_fails_midway_is_that_devices_fault_alone(host: FaultyTree, how: str, kind: str) -> None:
    with reading(host, how) as hook, Client(hook.socket) as client:
        assert cells(client.define(DOMAIN, vmi())) == CELLS
        outcomes = []
        for _ in in_turn(host, f"/devices/pci0000:41/{NEAR}", **ERRORS[kind]):
            found = cells(client.define(DOMAIN, vmi()))
            record = hook.records("OnDefineDomain")[-1]
            named = [finding["device"] for finding in record["findings"] if finding["severity"] == "warning"]
            outcomes.append(found["ua-gpu-near"])
            assert found == {**CELLS, "ua-gpu-near": outcomes[-1]}
            assert (outcomes[-1], named) in ((0, []), (None, [NEAR]))
        assert None in outcomes, "the fault came in time at least once"
        assert outcomes[-1] == 0, "and too late at last"


@pytest.mark.parametrize(
    ("how", "under", "step", "kind"),
    [
        ("--sysfs", "/", 11, "unplugged"),
        ("--sysfs", "/bus", 2, "unplugged"),
        ("--sysfs", "/devices/system/node", 2, "unplugged"),
        ("--sysfs", "/devices/system/node", 2, "unplugged when open"),
        ("udev", "/", 11, "unplugged"),
        ("udev", "/devices/system/node", 2, "unplugged when open"),
    ],
)
def test_a_host_that_fails_midway_misplaces_nothing(
    host: FaultyTree, how: str, under: str, step: int, kind: str
) -> None:
    """Each device is on its cell or stays with a word about it, or the domain comes back as it was with an error."""
    with reading(host, how) as hook, Client(hook.socket) as client:
        count = 0
        for _ in in_turn(host, under, step, **ERRORS[kind]):
            count += 1
            answer = client.define(DOMAIN, vmi())
            record = hook.records("OnDefineDomain")[-1]
            assert "internal" not in record.get("error", "")
            if record["level"] == "error":
                assert answer == DOMAIN.encode()
                assert record["error"].startswith("pcinuma: error: ")
                continue
            placed = {name: cell for name, cell in cells(answer).items() if cell is not None}
            assert placed == {name: cell for name, cell in CELLS.items() if name in placed}
            warned = [finding for finding in record["findings"] if finding["severity"] != "info"]
            assert bool(warned) == (len(placed) < len(CELLS))
        assert count > 5
        host.set(None)
        assert cells(client.define(DOMAIN, vmi())) == CELLS


def test_a_refusing_policy_refuses_what_it_cannot_read(host: FaultyTree) -> None:
    with reading(host, "--sysfs") as hook, Client(hook.socket) as client:
        for _ in in_turn(host, f"/devices/pci0000:41/{NEAR}", error="ENOENT"):
            try:
                assert cells(client.define(DOMAIN, vmi({"policy": "restricted"}))) == CELLS
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert NEAR in (error.details() or "")
        host.set(None)
        assert cells(client.define(DOMAIN, vmi({"policy": "restricted"}))) == CELLS


@pytest.mark.parametrize("how", ["--sysfs", "udev"])
def test_a_slow_host_is_waited_for(host: FaultyTree, how: str) -> None:
    host.set(Fault(under="/devices", seconds=0.005))
    with reading(host, how) as hook, Client(hook.socket) as client:
        assert cells(client.define(DOMAIN, vmi())) == CELLS
        assert host.has_failed


def test_a_host_that_hangs_costs_ten_seconds_and_no_start(host: FaultyTree) -> None:
    with contextlib.ExitStack() as stack:
        hooks = [stack.enter_context(reading(host, how)) for how in ("--sysfs", "udev")]
        clients = [stack.enter_context(Client(hook.socket)) for hook in hooks]
        for client in clients:
            assert cells(client.define(DOMAIN, vmi())) == CELLS
        host.set(Fault(under=f"/devices/pci0000:41/{NEAR}", seconds=3600))
        try:
            begun = time.monotonic()
            easy = [client.begin_define(DOMAIN, vmi()) for client in clients]
            strict = [client.begin_define(DOMAIN, vmi({"policy": "restricted"})) for client in clients]
            without = domain({0: 0}, [])
            for client in clients:
                assert client.define(without, vmi(), timeout=3) == without.encode()
            assert [call.result().domainXML for call in easy] == [DOMAIN.encode()] * 2
            for call in strict:
                code, said = refused(call.result)
                assert code is grpc.StatusCode.FAILED_PRECONDITION
                assert "the host has not answered within 10 seconds" in said
            assert 9 < time.monotonic() - begun < 20
            for hook in hooks:
                records = hook.records("OnDefineDomain")[-2:]
                assert sorted(record["outcome"] for record in records) == ["refused", "unchanged"]
                assert {record["code"] for record in records} == {"host-unreadable"}
            # told to end, it answers the calls that wait
            last = [client.begin_define(DOMAIN, vmi()) for client in clients]
            time.sleep(0.3)
            for hook, call in zip(hooks, last, strict=True):
                hook.process.terminate()
                assert call.result(timeout=2).domainXML == DOMAIN.encode()
                (record,) = hook.await_records("ended", 1) and hook.records("OnDefineDomain")[-1:]
                assert (record["outcome"], record["code"]) == ("unchanged", "host-unreadable")
                assert record["error"].startswith("pcinuma: error: the host had not answered when it was time to end")
                assert gone(hook.socket)
        finally:
            host.abort()  # a thread that hangs in the kernel holds up the end of any process, even of one that is killed
        assert [hook.process.wait(5) for hook in hooks] == [0, 0]


def gone(path: Path, seconds: float = 2.0) -> bool:
    deadline = time.monotonic() + seconds
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not path.exists()


COMMANDS = {
    "snapshot": ("snapshot",),
    "doctor": ("doctor", "--json"),
    "explain": ("explain", "{domain}", "--json"),
    "nccl-topo": ("nccl-topo", "{domain}"),
    "check": ("check", "{domain}", "--json"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["unplugged", "driver fails"])
def test_commands_on_a_host_that_fails_midway(
    host: FaultyTree, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, kind: str
) -> None:
    """A result, or an error of our own on one line; never both, never a fault."""
    (tmp_path / "domain.xml").write_text(DOMAIN)
    given = [part.format(domain=tmp_path / "domain.xml") for part in COMMANDS[command]]
    statuses = set()
    for _ in in_turn(host, "/", 151 if command == "doctor" else 41, **ERRORS[kind]):
        status = cli.main([*given, "--sysfs", str(host.path)])
        said = capfd.readouterr()
        statuses.add(status)
        assert "internal" not in said.err
        if status == 2:
            assert said.out == ""
            assert said.err.startswith("pcinuma: error: ")
        elif command == "nccl-topo":
            etree.fromstring(said.out.encode())
        else:
            json.loads(said.out)
    assert statuses <= {0, 1, 2}
    assert min(statuses) < 2, "the last one read it all"


def test_attributes_that_may_not_be_read(tmp_path: Path) -> None:
    """Real permissions, and a process that is held by them: without capabilities, as virt-launcher's containers are."""
    if os.geteuid() != 0:
        pytest.skip("needs root: the test takes the capabilities from the sidecar")
    tree = sidecar.sysfs(tmp_path / "sys", {0: "0-7", 1: "8-15"}, {NEAR: 0, AWAY: 1})
    (tree / "devices" / "pci0000:41" / NEAR / "numa_node").chmod(0)
    xml = domain({0: 0, 1: 1}, [hostdev(NEAR, "ua-gpu-near"), hostdev(AWAY, "ua-gpu-away")])
    held = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    with sidecar.running("--sysfs", tree, before=held) as hook, Client(hook.socket) as client:
        assert cells(client.define(xml, vmi())) == {"ua-gpu-near": None, "ua-gpu-away": 1}
        (finding,) = hook.records("OnDefineDomain")[-1]["findings"]
        assert finding["device"] == NEAR
        assert "its numa_node is missing or cannot be read" in finding["message"]
        (tree / "devices").chmod(0)
        assert set(cells(client.define(xml, vmi())).values()) == {None}
        (tree / "devices").chmod(0o755)
