"""``explain`` as people see it: the trees in a terminal and in a pipe, and the file of the picture."""

from __future__ import annotations

import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from fcntl import ioctl
from pathlib import Path

import pytest
from lxml import etree

from pcinuma import host_file, options, svg, tree
from pcinuma.explain import explain
from pcinuma.model import HostQuery, HostTopology, Options
from tests.support import domains, hosts
from tests.support.pictures import machine

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).with_name("pcinuma")
EXAMPLE = ["examples/two-sockets/domain.xml", "--host", "examples/two-sockets/host.json"]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def environment(**changes: str | None) -> dict[str, str]:
    base = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"} | changes
    return {name: value for name, value in base.items() if value is not None}


def run(*arguments: str, cwd: Path = ROOT, **changes: str | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, "explain", *arguments],
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def in_terminal(*arguments: str, columns: int = 80, changes: Mapping[str, str | None] | None = None) -> str:
    """What a terminal of that many columns gets to show."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [PROGRAM, "explain", *arguments],
        cwd=ROOT,
        env=environment(**changes or {}),
        stdout=theirs,
        stdin=subprocess.DEVNULL,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # a terminal that nobody holds open any more
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.wait(timeout=30) == 0
    return seen.decode().replace("\r\n", "\n")


# --- the trees -------------------------------------------------------------------------------------------------

AFTER = """\
guest after, 7 of 7 on their own cell
  cell 0 (vCPUs 0-7 on host node 0)
  └─ expander 1 (busNr 0xf7)
     ├─ ✓ 0000:1a:00.0 ua-gpu-gpu0 (host node 0) → 0000:f8:00.0, port 2
     ├─ ✓ 0000:1c:00.0 ua-hostdevice-ib0 (host node 0) → 0000:f9:00.0, port 3
     ├─ ✓ 0000:3d:00.0 ua-gpu-gpu1 (host node 0) → 0000:fa:00.0, port 4
     └─ ✓ 0000:5e:02.1 ua-sriov-storage (host node 0) → 0000:fb:00.0, port 5
  cell 1 (vCPUs 8-15 on host node 1)
  └─ expander 6 (busNr 0xfc)
     ├─ ✓ 0000:9a:00.0 ua-gpu-gpu2 (host node 1) → 0000:fd:00.0, port 7
     ├─ ✓ 0000:9c:00.0 ua-hostdevice-ib1 (host node 1) → 0000:fe:00.0, port 8
     └─ ✓ 0000:bd:00.0 ua-gpu-gpu3 (host node 1) → 0000:ff:00.0, port 9
  bus 0 (the guest sees numa_node -1): no device
"""

HOST = """\
host
  host node 0 (CPUs 0-31,64-95)
  ├─ pci0000:15 › switch 0000:16:00.0
  │  ├─ 0000:1a:00.0 ua-gpu-gpu0
  │  └─ 0000:1c:00.0 ua-hostdevice-ib0
  ├─ pci0000:37 › switch 0000:38:00.0
  │  └─ 0000:3d:00.0 ua-gpu-gpu1
  └─ root complex pci0000:59
     └─ 0000:5e:02.1 ua-sriov-storage
"""


def test_the_trees_of_the_example() -> None:
    done = run(*EXAMPLE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("7 passthrough devices: 0 of 7 on their own cell before, 7 of 7 after\n")
    assert "\n  ├─ ✗ 0000:1a:00.0 ua-gpu-gpu0 (host node 0) → no address yet\n" in done.stdout
    assert f"\n{HOST}" in done.stdout
    assert f"\n{AFTER}\n" in done.stdout
    assert done.stdout.endswith("\noutcome: changed\n")


def test_ascii() -> None:
    done = run(*EXAMPLE, "--ascii")
    assert done.stdout.isascii()
    assert "     |- + 0000:1a:00.0 ua-gpu-gpu0 (host node 0) -> 0000:f8:00.0, port 2\n" in done.stdout
    assert "     `- + 0000:bd:00.0 ua-gpu-gpu3 (host node 1) -> 0000:ff:00.0, port 9\n" in done.stdout


def test_ascii_escapes_names(tmp_path: Path) -> None:
    domain = (ROOT / EXAMPLE[0]).read_text().replace("ua-gpu-gpu0", "ua-größe")
    (tmp_path / "domain.xml").write_text(domain, encoding="utf-8")
    done = run("domain.xml", "--host", str(ROOT / EXAMPLE[2]), "--ascii", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert r" 0000:1a:00.0 ua-gr\xf6\xdfe (host node 0) " in done.stdout


SWITCHES = """\
guest before, 3 of 4 on their own cell
  cell 0 (vCPUs 0-1 on host node 0)
  └─ expander 1 (busNr 0x20)
     ├─ pcie-switch-upstream-port 3 (below port 2)
     │  ├─ ✓ 0000:41:00.0 ua-gpu-a (host node 0) → 0000:23:00.0, port 4
     │  └─ pcie-switch-upstream-port 6 (below port 5)
     │     └─ ✓ 0000:42:00.0 ua-gpu-b (host node 0) → 0000:26:00.0, port 7
     └─ ✓ 0000:43:00.0 ua-nic-c (host node 0) → 0000:27:00.0, port 8
  bus 0 (the guest sees numa_node -1)
  └─ ✗ 0000:c1:00.0 ua-nic-d (host node 1) → 0000:00:05.0
  cell 1 (vCPUs 2-3 on host node 1): no device
"""


def controller(index: int, model: str, bus: int, slot: int = 0, target: str = "") -> str:
    address = f'<address type="pci" domain="0" bus="{bus}" slot="{slot}" function="0"/>' if bus else ""
    return f'<controller type="pci" index="{index}" model="{model}">{target}{address}</controller>'


def test_nested_bridges_of_the_guest() -> None:
    """Whoever made them: switch below switch; buses count upwards in the order of slots, a bridge before what is below.

    Expander 0x20; port 2 has bus 0x21, switch 3 0x22, port 4 0x23; port 5 0x24, switch 6 0x25, port 7 0x26; port 8 0x27.
    """

    def device(bus: int, name: str, at: int, slot: int = 0) -> str:
        address = f'<address type="pci" domain="0" bus="{at}" slot="{slot}" function="0"/>'
        return domains.hostdev(f"0000:{bus:02x}:00.0", name, address)

    parts = [
        controller(1, "pcie-expander-bus", 0, target='<target busNr="32"><node>0</node></target>'),
        controller(2, "pcie-root-port", 1, 0),
        controller(3, "pcie-switch-upstream-port", 2),
        controller(4, "pcie-switch-downstream-port", 3, 0),
        controller(5, "pcie-switch-downstream-port", 3, 1),
        controller(6, "pcie-switch-upstream-port", 5),
        controller(7, "pcie-switch-downstream-port", 6, 0),
        controller(8, "pcie-root-port", 1, 1),
        device(0x41, "ua-gpu-a", 4),
        device(0x42, "ua-gpu-b", 7),
        device(0x43, "ua-nic-c", 8),
        device(0xC1, "ua-nic-d", 0, 5),
    ]
    host = hosts.host(
        {0: "0-7", 1: "8-15"}, {"0000:41:00.0": 0, "0000:42:00.0": 0, "0000:43:00.0": 0, "0000:c1:00.0": 1}
    )
    drawn = tree.draw(explain(domains.domain({0: 0, 1: 1}, parts).encode(), Options(), host).scene)
    assert f"\n{SWITCHES.replace('pcie-switch-upstream-port', 'switch')}\n" in drawn


def test_as_deep_as_indexes_go() -> None:
    """Bridge below bridge, 250 of them: no recursion limit, nothing beyond the columns."""
    parts = [controller(1, "pcie-root-port", 0), controller(2, "pcie-to-pci-bridge", 1)]
    parts += [controller(index, "pci-bridge", index - 1, 1) for index in range(3, 251)]
    address = '<address type="pci" domain="0" bus="250" slot="2" function="0"/>'
    parts.append(domains.hostdev("0000:41:00.0", "ua-gpu-a", address))
    host = hosts.host({0: "0-7"}, {"0000:41:00.0": 0})
    scene = explain(domains.domain({0: 0}, parts).encode(), Options(), host).scene
    drawn = tree.draw(scene)
    assert max(map(len, drawn.splitlines())) <= 80
    assert drawn.count("pci-bridge 250\n") == 2
    etree.fromstring(svg.draw(scene).encode())


def test_a_mediated_device() -> None:
    """It is known by its parent's BDF and its UUID."""
    uuid = "c8a7f2d0-1111-4222-8333-0123456789ab"
    mdev = (
        f'<hostdev type="mdev" mode="subsystem" model="vfio-pci"><source><address uuid="{uuid}"/></source>'
        '<alias name="ua-gpu-v"/></hostdev>'
    )
    record = {
        "kind": "pcinuma-host",
        "version": 1,
        "nodes": [{"id": 0, "cpus": "0-7"}],
        "functions": [{"address": "0000:41:00.0", "node": 0}],
        "mdevs": [{"uuid": uuid, "parent": "0000:41:00.0"}],
    }
    host = host_file.load(json.dumps(record).encode(), "a host of the tests")
    drawn = tree.draw(explain(domains.domain({0: 0}, [mdev]).encode(), Options(), host).scene, width=120)
    assert f"✓ 0000:41:00.0 mdev {uuid} ua-gpu-v (host node 0) → 0000:ff:00.0, port 2\n" in drawn


@pytest.mark.parametrize(
    "policy, headline, outcome",
    (
        ("restricted", "refused, nothing is changed; now 0 of 2 on their own cell, with best-effort 1 of 2", "refused"),
        ("none", "policy none changes nothing; now 0 of 2 on their own cell, with best-effort 1 of 2", "unchanged"),
    ),
)
def test_what_best_effort_would_do(policy: str, headline: str, outcome: str) -> None:
    listed = [domains.hostdev("0000:41:00.0", "ua-gpu-a"), domains.hostdev("0000:c1:00.0", "ua-gpu-b")]
    host = hosts.host({0: "0-7"}, {"0000:41:00.0": 0, "0000:c1:00.0": -1})
    explained = explain(domains.domain({0: 0}, listed).encode(), Options(policy=policy), host)
    drawn = tree.draw(explained.scene, width=200)
    assert drawn.startswith(f"2 passthrough devices: {headline}\n")
    assert "\nguest, as best-effort would have it, 1 of 2 on their own cell\n" in drawn
    assert re.search(r"\? 0000:c1:00\.0 ua-gpu-b \(host node unknown\) → no address yet: .*-1", drawn)
    assert drawn.endswith(f"outcome: {outcome}\n")


@pytest.mark.parametrize("policy", ("best-effort", "none", "restricted"))
def test_the_host_is_read_once(policy: str) -> None:
    xml, host = machine(4, odd=True)
    asked: list[HostQuery] = []

    def read(query: HostQuery) -> HostTopology:
        asked.append(query)
        return host(query)

    explain(xml, Options(policy=policy), read)
    assert len(asked) == 1


# --- the terminal ----------------------------------------------------------------------------------------------


def test_colours_in_a_terminal_and_nothing_lost_without() -> None:
    seen = in_terminal(*EXAMPLE)
    assert COLOUR.search(seen)
    assert COLOUR.sub("", seen) == run(*EXAMPLE).stdout


@pytest.mark.parametrize("changes", ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": None}), ids=str)
def test_no_colours_where_they_are_not_wanted(changes: Mapping[str, str | None]) -> None:
    assert "\x1b" not in in_terminal(*EXAMPLE, changes=changes)


def test_an_empty_no_color_says_nothing() -> None:
    """https://no-color.org: present and not an empty string."""
    assert COLOUR.search(in_terminal(*EXAMPLE, changes={"NO_COLOR": ""}))


def test_no_colours_into_a_file(tmp_path: Path) -> None:
    in_terminal(*EXAMPLE, "-o", str(tmp_path / "tree.txt"), columns=200)
    assert (tmp_path / "tree.txt").read_text() == run(*EXAMPLE).stdout


LONG = "ua-gpu-" + "long-name-" * 9


@pytest.fixture
def long(tmp_path: Path) -> list[str]:
    listed = [domains.hostdev("0000:41:00.0", LONG + "網路裝置" * 20)]
    (tmp_path / "domain.xml").write_text(domains.domain({0: 0}, listed))
    function = {"address": "0000:41:00.0", "node": 0, "rootComplex": "pci0000:40", "bridges": ["0000:40:01.0"]}
    host = {"kind": "pcinuma-host", "version": 1, "nodes": [{"id": 0, "cpus": "0-7"}], "functions": [function]}
    (tmp_path / "host.json").write_text(json.dumps(host))
    return [str(tmp_path / "domain.xml"), "--host", str(tmp_path / "host.json")]


def cells_of(text: str) -> int:
    """The columns that a line takes: the characters of this test's names from CJK take two."""
    return sum(2 if "一" <= c <= "鿿" else 1 for c in text)


@pytest.mark.parametrize(
    "columns, changes, limit",
    ((80, {}, 80), (40, {}, 80), (120, {}, 120), (80, {"COLUMNS": "150"}, 150), (80, {"COLUMNS": "x"}, 80)),
)
def test_lines_keep_to_the_columns(long: list[str], columns: int, changes: Mapping[str, str], limit: int) -> None:
    lines = COLOUR.sub("", in_terminal(*long, columns=columns, changes=changes)).splitlines()
    longest = max(map(cells_of, lines))
    assert limit - 20 < longest <= limit
    # nothing is lost: three trees, each with the whole name
    joined = "".join(line.strip("│ ") for line in lines)
    assert joined.count("網路裝置" * 20) == 3


@pytest.mark.parametrize("signs", (tree.UNICODE, tree.ASCII))
def test_a_name_of_many_lines_is_whole(signs: tree.Signs) -> None:
    """Of wide and of narrow characters, of which some are combined; a hundred devices, in seconds."""
    name = "ua-" + "網" * 200 + "e\u0301" * 200 + "x" * 1000 + "-{}"
    xml, host = machine(100, names=name)
    drawn = tree.draw(explain(xml, Options(), host).scene, signs=signs)
    assert max(cells_of(line.replace("\u0301", "")) for line in drawn.splitlines()) <= 80
    joined = re.sub(r"\n[\s│|]*", "", drawn)
    for number in (0, 99):
        told = name.format(number)
        whole = told if signs is tree.UNICODE else told.encode("ascii", "backslashreplace").decode()
        assert joined.count(f"{whole}(host node") + joined.count(f"{whole} (host node") == 2  # in the guest's two trees
        assert joined.count(whole) == 3


@pytest.mark.parametrize(
    "columns, limit", ((None, 80), ("60", 80), ("100", 100), ("99999999999999999999", None), ("0", 80))
)
def test_columns_of_a_pipe(long: list[str], columns: str | None, limit: int | None) -> None:
    done = run(*long, COLUMNS=columns)
    assert done.returncode == 0
    longest = max(map(cells_of, done.stdout.splitlines()))
    assert longest > 250 if limit is None else limit - 20 < longest <= limit


def test_names_move_no_cursor(tmp_path: Path) -> None:
    (tmp_path / "domain.xml").write_text(
        domains.domain({0: 0}, [domains.hostdev("0000:41:00.0", "ua-\u009b2J\u202eb")])
    )
    done = run("domain.xml", "--host", str(ROOT / "examples/two-sockets/host.json"), cwd=tmp_path)
    assert done.returncode == 0
    assert "\u009b" not in done.stdout
    assert "\u202e" not in done.stdout
    assert "ua-\\x9b2J\\x202eb" in done.stdout


# --- the file --------------------------------------------------------------------------------------------------


def test_the_file_beside_the_tree(tmp_path: Path) -> None:
    done = run(*EXAMPLE, "--svg", str(tmp_path / "picture.svg"))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\n{AFTER}\n" in done.stdout
    assert os.listdir(tmp_path) == ["picture.svg"]
    root = etree.fromstring((tmp_path / "picture.svg").read_bytes())
    texts = [text.text for text in root.iter("{*}text")]
    # the host has no guest BDFs, the guest before no addresses yet
    assert texts.count("no address yet") == 7
    for bdf in ("1a:00.0", "bd:00.0", "f8:00.0", "ff:00.0"):
        assert texts.count(f"0000:{bdf}") == 1
    assert [texts.count(f"numa_node {node}") for node in (-1, 0, 1)] == [7, 4, 3]


def test_the_same_bytes_again(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        assert run(*EXAMPLE, "--svg", str(tmp_path / seed), "--json", PYTHONHASHSEED=seed).returncode == 0
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_the_picture_in_the_docs_is_todays(tmp_path: Path) -> None:
    """``make screenshots`` after a change of how it looks."""
    vmi = ["--vmi", "examples/two-sockets/vmi.yaml"]
    assert run(*EXAMPLE, *vmi, "--svg", str(tmp_path / "picture.svg")).returncode == 0
    assert (tmp_path / "picture.svg").read_bytes() == (ROOT / "docs/picture.svg").read_bytes()


def test_an_older_picture_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "picture.svg"
    target.write_text("old")
    assert run("absent.xml", "--svg", str(target)).returncode == 2
    assert target.read_text() == "old"
    assert run(*EXAMPLE, "--svg", str(target)).returncode == 0
    assert target.read_text().endswith("</svg>\n")


@pytest.mark.parametrize(
    "arguments, said",
    (
        (["--svg", "-"], "--svg takes a file"),
        (["--svg", "one", "-o", "one"], "-o and --svg name one file (one)"),
        (["--svg", "one", "--report", "./one"], "--report and --svg name one file (one)"),
        (["--svg", "absent/picture.svg"], "cannot be written: No such file or directory (absent/picture.svg)"),
        (["--svg", "."], "cannot be written: Is a directory (.)"),
        (["--svg", ""], "--svg names no file (--svg)"),
        (["--report", ""], "--report names no file (--report)"),
        (["-o", ""], "-o names no file (-o)"),
    ),
)
def test_where_it_cannot_go(tmp_path: Path, arguments: list[str], said: str) -> None:
    example = [str(ROOT / EXAMPLE[0]), "--host", str(ROOT / EXAMPLE[2])]
    done = run(*example, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"pcinuma: error: {said}")
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


# --- against the report ----------------------------------------------------------------------------------------

CASES = sorted(path.name for path in (ROOT / "tests/golden/cases").iterdir() if (path / "domain.xml").is_file())


@pytest.mark.parametrize("name", CASES)
def test_what_is_drawn_is_what_is_reported(name: str) -> None:
    """The picture is read off the result's XML, the report comes from the plan: they tell of one guest."""
    case = ROOT / "tests/golden/cases" / name
    defaults = options.load_defaults((case / "options.yaml").read_bytes(), "options.yaml")
    chosen = options.resolve({}, None, defaults)
    explained = explain((case / "domain.xml").read_bytes(), chosen, hosts.from_file(case / "host.json"))
    scene, report = explained.scene, explained.result.report
    labels = [leaf.device.label for leaf in scene.host.leaves]
    assert [leaf.device.number for leaf in scene.host.leaves] == list(range(1, len(labels) + 1))
    for panel in (scene.before, scene.after):
        assert sorted(leaf.device.label for leaf in panel.leaves) == sorted(labels)
    assert len(labels) == len(explained.result.before.devices)
    after = {leaf.device.label: leaf for leaf in scene.after.leaves}
    for placement in report.plan.placements:
        label = placement.device.label
        leaf = after[label] if label in after else after[f"{placement.source} {label}"]
        assert leaf.device.host_node == placement.host_node
        if report.outcome == "changed":
            assert placement.guest_bdf is None or leaf.address == str(placement.guest_bdf)
            expected = {"placed": "aligned", "approximate": "approximate"}.get(placement.kind)
            assert expected is None or (leaf.fit, leaf.numa_node) == (expected, placement.cell)
            if placement.kind == "left":
                assert leaf.fit in ("unseen", "unknown", "astray")
                assert leaf.note
    etree.fromstring(svg.draw(scene).encode())
    assert max(map(len, tree.draw(scene).splitlines())) <= 80
