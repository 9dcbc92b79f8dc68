"""``pcinuma nccl-topo`` as a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pcinuma.schema import problems
from tests.conftest import ROOT
from tests.support import nccl

PROGRAM = Path(sys.executable).with_name("pcinuma")
EXAMPLE = ROOT / "examples" / "two-sockets"
EXPECTED = (ROOT / "tests/golden/nccl/two-sockets.xml").read_text()


def run(folder: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(PROGRAM), "nccl-topo", *arguments],
        input=stdin,
        capture_output=True,
        cwd=folder,
        timeout=30,
        check=False,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "PYTHONWARNINGS": "error"},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("domain.xml", "host.json"):
        shutil.copy(EXAMPLE / name, tmp_path)
    return tmp_path


def host_with(folder: Path, **changes: object) -> None:
    path = folder / "host.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_to_stdout_and_to_a_file(folder: Path) -> None:
    done = run(folder, "domain.xml", "--host", "host.json")
    assert (done.returncode, done.stderr, done.stdout.decode()) == (0, b"", EXPECTED)
    done = run(folder, "-", "--host", "host.json", "-o", "topo.xml", stdin=(folder / "domain.xml").read_bytes())
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", b"")
    assert (folder / "topo.xml").read_text() == EXPECTED
    assert sorted(os.listdir(folder)) == ["domain.xml", "host.json", "topo.xml"]


def test_options_come_from_flags_and_annotations(folder: Path) -> None:
    """An expander per root complex takes more buses, so the GPUs are at other BDFs."""
    by_flag = run(folder, "domain.xml", "--host", "host.json", "--group-by", "root-complex")
    vmi = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "vm", "annotations": {"pcinuma.vm.kubevirt.io/group-by": "root-complex"}},
        "spec": {},
    }
    (folder / "vmi.json").write_text(json.dumps(vmi))
    by_annotation = run(folder, "domain.xml", "--host", "host.json", "--vmi", "vmi.json")
    assert by_flag.stdout == by_annotation.stdout
    assert nccl.problems(by_flag.stdout.decode()) == []
    ends = [pci.attributes["busid"] for pci in nccl.read(by_flag.stdout.decode()).all("pci") if not pci.children]
    # 3 + 2 + 2 + 3 + 2 bus numbers, the last of them 255
    assert ends == [f"0000:{bus}:00.0" for bus in ("f5", "f6", "f8", "fa", "fc", "fd", "ff")]


def test_warnings_and_the_report_that_has_them(folder: Path) -> None:
    host_with(folder, cpu=None)
    done = run(folder, "domain.xml", "--host", "host.json", "--report", "report.json")
    assert done.returncode == 0
    assert done.stderr.decode().splitlines() == [
        "pcinuma: warning: the host's CPU is not known: its vendor, family and model are not in the file",
        "hint: record the host again with this version's 'pcinuma snapshot', or run on the VM's node",
    ]
    assert nccl.problems(done.stdout.decode(), cpu_known=False) == []
    report = json.loads((folder / "report.json").read_text())
    assert problems(report, "report") == []
    assert (report["outcome"], [finding["code"] for finding in report["findings"]]) == ("changed", ["nccl-cpu-unknown"])
    quiet = run(folder, "domain.xml", "--host", "host.json", "-q")
    assert (quiet.returncode, quiet.stderr, quiet.stdout) == (0, b"", done.stdout)


def test_a_refusal_writes_no_file(folder: Path) -> None:
    host = json.loads((folder / "host.json").read_text())
    for function in host["functions"]:
        if function["address"] == "0000:3d:00.0":
            function["node"] = -1
    host_with(folder, functions=host["functions"])
    done = run(
        folder, "domain.xml", "--host", "host.json", "--policy", "restricted", "-o", "t.xml", "--report", "r.json"
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert re.match(rb"pcinuma: error: policy restricted: [^\n]*0000:3d:00\.0[^\n]*\n", done.stderr)
    assert sorted(os.listdir(folder)) == ["domain.xml", "host.json", "r.json"]
    assert json.loads((folder / "r.json").read_text())["outcome"] == "refused"


def test_more_than_nccl_reads_is_refused(folder: Path) -> None:
    """122 VFs of one NIC: 3 elements and, with what NCCL adds, 3 for each."""
    functions = [
        {"address": f"0000:31:{number // 8:02x}.{number % 8}", "node": 0, "class": "0x020000"} for number in range(122)
    ]
    host_with(folder, functions=functions)
    one = '<hostdev type="pci"><source><address bus="0x31" slot="{}" function="{}"/></source></hostdev>'
    text = (folder / "domain.xml").read_text()
    devices = "".join(one.format(number // 8, number % 8) for number in range(122))
    text = re.sub(r"<(hostdev|interface) .*</\1>", "", text, flags=re.S).replace("<devices>", f"<devices>{devices}", 1)
    (folder / "domain.xml").write_text(text)
    done = run(folder, "domain.xml", "--host", "host.json", "-o", "t.xml")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().splitlines() == [
        "pcinuma: error: NCCL would need 372 elements for this topology, and takes 256 at most",
        "hint: pass fewer network functions to the VM, or run NCCL without a file",
    ]
    assert not (folder / "t.xml").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.xml", "--host", "host.json"], "cannot be read: No such file or directory (absent.xml)"),
        (["host.json", "--host", "host.json"], "(host.json"),
        (["domain.xml", "--host", "domain.xml"], "the host record is not JSON"),
        (["domain.xml", "--host", "host.json", "--sysfs", "/sys"], "exclude each other"),
        (["domain.xml", "--host", "host.json", "--group-by", "wish"], "wish"),
        (["domain.xml", "--host", "host.json", "-o", "x", "--report", "x"], "-o and --report name one file"),
        (["domain.xml", "--host", "host.json", "-o", "nowhere/x"], "cannot be written"),
        (["domain.xml", "--host", "host.json", "--format", "diff"], "--format"),
    ],
)
def test_bad_input(folder: Path, arguments: list[str], said: str) -> None:
    done = run(folder, *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert re.fullmatch(r"pcinuma: error: [^\n]+\n(hint: [^\n]+\n)?", done.stderr.decode())
    assert said in done.stderr.decode()
    assert sorted(os.listdir(folder)) == ["domain.xml", "host.json"]


def test_without_devices_the_host_is_not_read(folder: Path) -> None:
    text = re.sub(r"<(hostdev|interface) .*</\1>", "", (folder / "domain.xml").read_text(), flags=re.S)
    (folder / "bare.xml").write_text(text)
    (folder / "sys/bus/pci").mkdir(parents=True)
    done = run(folder, "bare.xml", "--sysfs", "sys")
    assert done.returncode == 0
    assert done.stderr.decode().splitlines() == [
        "pcinuma: warning: the file has no GPU",
        "hint: NCCL detects by itself what the file does not name",
    ]
    assert [cpu.attributes["affinity"] for cpu in nccl.read(done.stdout.decode()).children] == ["000000ff", "0000ff00"]


def test_it_tells_what_real_files_tell() -> None:
    """The shapes that cloud VMs use: switches under cells, a GPU and a NIC below each, the same attributes."""
    ours = nccl.read(EXPECTED)
    for name in ("azure-ndv5-topo.xml", "aws-p4d-24xl-topo.xml"):
        path = ROOT / "../shared/hosts" / name
        if not path.is_file():
            pytest.skip(f"no {name} in ../shared/hosts beside the repo")
        theirs = nccl.read(path.read_text())
        assert set(theirs.attributes) == set(ours.attributes)
        cpu, our_cpu = theirs.all("cpu")[0], ours.all("cpu")[0]
        assert set(cpu.attributes) == set(our_cpu.attributes)
        switch, our_switch = cpu.children[0], our_cpu.children[0]
        assert set(switch.attributes) == set(our_switch.attributes)
        assert (switch.attributes["busid"], switch.attributes["class"]) == ("ffff:ff:01.0", "0x060400")
        assert (our_switch.attributes["busid"], our_switch.attributes["class"]) == ("ffff:ff:01.0", "0x060400")
        kinds = {pci.attributes["class"][:4] for pci in switch.children}
        assert kinds == {pci.attributes["class"][:4] for pci in our_switch.children} == {"0x03", "0x02"}
        # vendor and device are not in Azure's endpoints: NCCL reads them in the guest
        needed = {"busid", "class", "link_speed", "link_width"}
        assert all(needed <= set(pci.attributes) for pci in [*switch.children, *our_switch.children])
