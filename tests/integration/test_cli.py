"""The command as a process of its own: what it reads, what it writes where, how it ends and what it says."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from pcinuma import cli

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).with_name("pcinuma")
PREFIX = "pcinuma.vm.kubevirt.io/"

COMMANDS = ("transform", "explain", "nccl-topo", "check", "doctor", "snapshot", "hook")
SETS = {
    "policy": ("none", "best-effort", "restricted", "single-numa-node"),
    "group-by": ("numa", "root-complex", "switch"),
    "unmapped": ("leave", "nearest"),
    "addressed": ("keep", "move"),
    "mmio": ("off", "report", "apply"),
    "distances": ("keep", "host"),
    "gpudirect-clique": ("none", "by-switch"),
}
DEFAULTS = {
    "policy": "best-effort",
    "group-by": "numa",
    "unmapped": "leave",
    "addressed": "keep",
    "mmio": "report",
    "distances": "keep",
    "gpudirect-clique": "none",
}
SHOWN = ("policy", "group-by", "unmapped", "addressed")

# two cells on host nodes 0 and 1; a device of each; {extra} stands among the devices
DOMAIN = """\
<domain type='kvm'>
  <name>vm</name>
  <memory unit='KiB'>4194304</memory>
  <vcpu placement='static'>4</vcpu>
  <numatune>
    <memory mode='strict' nodeset='0-1'/>
    <memnode cellid='0' mode='strict' nodeset='0'/>
    <memnode cellid='1' mode='strict' nodeset='1'/>
  </numatune>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
  </os>
  <cpu mode='host-passthrough'>
    <numa>
      <cell id='0' cpus='0-1' memory='2097152' unit='KiB'/>
      <cell id='1' cpus='2-3' memory='2097152' unit='KiB'/>
    </numa>
  </cpu>
  <devices>
    <hostdev mode='subsystem' type='pci' managed='no'>
      <source>
        <address domain='0x0000' bus='0x41' slot='0x00' function='0x0'/>
      </source>
      <alias name='ua-gpu-a'/>
    </hostdev>
    <hostdev mode='subsystem' type='pci' managed='no'>
      <source>
        <address domain='0x0000' bus='0xc1' slot='0x00' function='0x0'/>
      </source>
      <alias name='ua-gpu-b'/>
    </hostdev>
  </devices>
</domain>
"""

# what the contract makes of DOMAIN on HOST: indexes from 0 + 1; four buses, the last of them 255
PLACED = (
    DOMAIN.replace(
        "  <devices>\n",
        """\
  <devices>
    <controller type='pci' index='1' model='pcie-expander-bus'>
      <target busNr='252'>
        <node>0</node>
      </target>
      <alias name='ua-pcinuma-cell0'/>
    </controller>
    <controller type='pci' index='2' model='pcie-root-port'>
      <target hotplug='off'/>
      <alias name='ua-pcinuma-0000-41-00-0'/>
      <address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/>
    </controller>
    <controller type='pci' index='3' model='pcie-expander-bus'>
      <target busNr='254'>
        <node>1</node>
      </target>
      <alias name='ua-pcinuma-cell1'/>
    </controller>
    <controller type='pci' index='4' model='pcie-root-port'>
      <target hotplug='off'/>
      <alias name='ua-pcinuma-0000-c1-00-0'/>
      <address type='pci' domain='0x0000' bus='0x03' slot='0x00' function='0x0'/>
    </controller>
""",
    )
    .replace(
        "<alias name='ua-gpu-a'/>\n",
        "<alias name='ua-gpu-a'/>\n      <address type='pci' domain='0x0000' bus='0x02' slot='0x00' function='0x0'/>\n",
    )
    .replace(
        "<alias name='ua-gpu-b'/>\n",
        "<alias name='ua-gpu-b'/>\n      <address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>\n",
    )
)

NO_DEVICES = re.sub(r"    <hostdev.*</hostdev>\n", "", DOMAIN, flags=re.S)

HOST: dict[str, Any] = {
    "kind": "pcinuma-host",
    "version": 1,
    "nodes": [
        {"id": 0, "cpus": "0-15", "memoryKiB": 1000000, "distances": {"0": 10, "1": 21}},
        {"id": 1, "cpus": "16-31", "memoryKiB": 1000000, "distances": {"0": 21, "1": 10}},
    ],
    "functions": [
        {"address": "0000:41:00.0", "node": 0, "rootComplex": "pci0000:40", "bridges": ["0000:40:01.1"]},
        {"address": "0000:c1:00.0", "node": 1, "rootComplex": "pci0000:c0", "bridges": ["0000:c0:01.1"]},
        {"address": "0000:e1:00.0", "node": -1},
    ],
}

VMI: dict[str, Any] = {
    "apiVersion": "kubevirt.io/v1",
    "kind": "VirtualMachineInstance",
    "metadata": {"name": "vm", "annotations": {}},
    "spec": {},
}

ONE_ERROR = re.compile(r"pcinuma: error: [^\n]+\n(hint: [^\n]+\n)?\Z")


@dataclass(frozen=True)
class Done:
    """How one run ended."""

    status: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    def succeeded(self, *, err: str = "") -> Done:
        assert (self.status, self.err) == (0, err), self
        return self

    def failed(self, status: int, *said: str) -> Done:
        """It ended so: nothing on stdout, on stderr one error, with ``said`` in it, and at most one hint."""
        assert self.status == status, self
        assert self.out == b"", self
        assert ONE_ERROR.match(self.err), self
        for part in said:
            assert part in self.err, self
        return self


@dataclass
class Place:
    """A folder with the domain, the host and whatever else a test puts there; commands run in it."""

    path: Path
    environment: dict[str, str]

    def write(self, name: str, content: str | bytes | Mapping[str, Any]) -> str:
        data = json.dumps(content) if isinstance(content, Mapping) else content
        (self.path / name).write_bytes(data.encode() if isinstance(data, str) else data)
        return name

    def command(self, arguments: Sequence[str]) -> list[str]:
        return [str(PROGRAM), *arguments]

    def run(
        self,
        *arguments: str,
        stdin: str | bytes = b"",
        timeout: float = 30,
        stdout: int = subprocess.PIPE,
        before: Callable[[], None] | None = None,
        wrapper: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Done:
        done = subprocess.run(
            [*wrapper, *self.command(arguments)],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=self.path,
            env=self.environment | dict(environment or {}),
            timeout=timeout,
            check=False,
            preexec_fn=before,
        )
        return Done(done.returncode, done.stdout or b"", done.stderr.decode())

    def transform(self, *arguments: str, **others: Any) -> Done:
        return self.run("transform", "domain.xml", "--host", "host.json", *arguments, **others)

    def call_transform(self, *arguments: str) -> Done:
        return self.call("transform", "domain.xml", "--host", "host.json", *arguments)

    def report(self, *arguments: str) -> dict[str, Any]:
        """The report of a transformation that goes well or is refused."""
        self.call_transform("--report", "report.json", "-o", os.devnull, *arguments)
        loaded: dict[str, Any] = json.loads((self.path / "report.json").read_text())
        return loaded

    def call(self, *arguments: str, stdin: str | bytes = b"") -> Done:
        """As `run`, but without a process of its own: for what does not need one."""
        streams = (io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin), io.BytesIO(), io.BytesIO())
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.path)
            for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
                patch.setattr(sys, name, io.TextIOWrapper(stream, encoding="utf-8", write_through=True))
            status = cli.main(arguments)
            sys.stdout.flush()
            return Done(status, streams[1].getvalue(), streams[2].getvalue().decode())

    @property
    def names(self) -> set[str]:
        return set(os.listdir(self.path))


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the command sees of the environment: warnings are errors, compiled files are kept between the runs."""
    return {
        "PATH": os.environ["PATH"],
        "LC_ALL": "C.UTF-8",
        "PYTHONWARNINGS": "error",
        "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("pycache")),
    }


@pytest.fixture
def place(tmp_path: Path, environment: dict[str, str]) -> Place:
    made = Place(tmp_path, environment)
    made.write("domain.xml", DOMAIN)
    made.write("host.json", HOST)
    return made


def schema(name: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(json.loads((ROOT / f"schemas/{name}.schema.json").read_text()))


def vmi(**annotations: object) -> dict[str, Any]:
    """A VMI with annotations of ours: ``group_by="numa"`` for pcinuma.vm.kubevirt.io/group-by."""
    named = {PREFIX + name.replace("_", "-"): value for name, value in annotations.items()}
    return VMI | {"metadata": {"name": "vm", "annotations": named}}


# --- streams and files -----------------------------------------------------------------------------------------


def test_file_to_stdout(place: Place) -> None:
    assert place.transform().succeeded().text == PLACED


@pytest.mark.parametrize("domain", ([], ["-"]), ids=("no-argument", "dash"))
def test_stdin_to_stdout(place: Place, domain: list[str]) -> None:
    done = place.run("transform", *domain, "--host", "host.json", stdin=DOMAIN)
    assert done.succeeded().text == PLACED


def test_the_module_is_the_command(place: Place) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pcinuma", "transform", "domain.xml", "--host", "host.json"],
        capture_output=True,
        cwd=place.path,
        env=place.environment,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, PLACED, b"")


def test_again_gives_it_back_unchanged(place: Place) -> None:
    place.write("placed.xml", PLACED)
    done = place.run("transform", "placed.xml", "--host", "host.json", "--report", "report.json")
    assert done.succeeded().text == PLACED
    assert json.loads((place.path / "report.json").read_text())["outcome"] == "unchanged"


def test_domain_from_a_named_pipe(place: Place) -> None:
    fifo = place.path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_text, args=(DOMAIN,))
    writer.start()
    done = place.run("transform", "fifo", "--host", "host.json")
    writer.join(timeout=10)
    assert done.succeeded().text == PLACED


def test_output_and_report_in_files(place: Place) -> None:
    done = place.transform("-o", "out.xml", "--report", "report.json").succeeded()
    assert done.out == b""
    assert (place.path / "out.xml").read_text() == PLACED
    report = json.loads((place.path / "report.json").read_text())
    schema("report").validate(report)
    assert report["outcome"] == "changed"
    assert [(d["source"], d["cell"], d["placement"]) for d in report["devices"]] == [
        ("0000:41:00.0", 0, "placed"),
        ("0000:c1:00.0", 1, "placed"),
    ]
    # index 2 and 4; busNr 252 + 1 and 254 + 1
    assert [(d["guestAddress"], d["guestBDF"]) for d in report["devices"]] == [
        ("0000:02:00.0", "0000:fd:00.0"),
        ("0000:04:00.0", "0000:ff:00.0"),
    ]
    assert report["cells"] == [{"cell": 0, "hostNodes": [0]}, {"cell": 1, "hostNodes": [1]}]
    assert report["findings"] == []
    assert place.names == {"domain.xml", "host.json", "out.xml", "report.json"}, "a temporary file stayed"


def test_output_dash_is_stdout(place: Place) -> None:
    assert place.transform("-o", "-").succeeded().text == PLACED
    assert "-" not in place.names


def test_report_never_mixes_into_the_result(place: Place) -> None:
    done = place.transform("--report", "-")
    if done.status == 0:
        assert done.text == PLACED, "stdout carries the result and nothing else"
    else:
        done.failed(2)


def test_report_on_stdout_when_the_result_goes_elsewhere(place: Place) -> None:
    done = place.transform("--report", "-", "-o", "out.xml")
    assert (place.path / "out.xml").exists() == (done.status == 0)
    if done.status == 0:
        schema("report").validate(json.loads(done.out))


def test_in_place(place: Place) -> None:
    place.transform("-o", "domain.xml").succeeded()
    assert (place.path / "domain.xml").read_text() == PLACED


INPUTS = {"domain.xml": "the domain", "host.json": "the file of --host", "vmi.yaml": "the file of --vmi"}
INPUTS["config.yaml"] = "the file of --config"


@pytest.mark.parametrize("link", [False, True], ids=["its name", "a link"])
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    "command, flag",
    [
        ("transform", "-o"),
        ("transform", "--report"),
        ("explain", "-o"),
        ("explain", "--report"),
        ("explain", "--svg"),
        ("nccl-topo", "-o"),
        ("check", "-o"),
    ],
)
def test_no_output_replaces_an_input(place: Place, command: str, flag: str, name: str, link: bool) -> None:
    if (command, flag, name) == ("transform", "-o", "domain.xml"):
        return  # in place, which is meant
    place.write("vmi.yaml", "apiVersion: kubevirt.io/v1\nkind: VirtualMachineInstance\nmetadata: {name: vm}\n")
    place.write("config.yaml", "policy: none\n")
    (place.path / "link").symlink_to(name)
    before = {path.name: path.read_bytes() for path in place.path.iterdir()}
    inputs = ["domain.xml", "--host", "host.json", "--vmi", "vmi.yaml", "--config", "config.yaml"]
    out = "link" if link else f"./{name}"
    done = place.run(command, *inputs, flag, out)
    done.failed(2, f"{flag} would overwrite {INPUTS[name]} ({out})")
    assert {path.name: path.read_bytes() for path in place.path.iterdir()} == before


def test_a_diff_does_not_replace_the_domain(place: Place) -> None:
    place.transform("--format", "diff", "-o", "domain.xml").failed(2, "-o would overwrite the domain (domain.xml)")
    assert (place.path / "domain.xml").read_text() == DOMAIN


def test_refused_leaves_the_old_file_and_writes_the_report(place: Place) -> None:
    place.write("domain.xml", DOMAIN.replace("0xc1", "0xe1"))
    place.write("out.xml", "old")
    done = place.transform("--policy", "restricted", "-o", "out.xml", "--report", "report.json")
    done.failed(1, "0000:e1:00.0", "-1")
    assert (place.path / "out.xml").read_text() == "old"
    report = json.loads((place.path / "report.json").read_text())
    schema("report").validate(report)
    assert report["outcome"] == "refused"
    assert place.names == {"domain.xml", "host.json", "out.xml", "report.json"}


def test_bad_input_leaves_the_old_files(place: Place) -> None:
    place.write("domain.xml", DOMAIN[:700])
    place.write("out.xml", "old")
    place.write("report.json", "old")
    place.transform("-o", "out.xml", "--report", "report.json").failed(2, "domain.xml")
    assert (place.path / "out.xml").read_text() == "old"
    assert (place.path / "report.json").read_text() == "old"
    assert place.names == {"domain.xml", "host.json", "out.xml", "report.json"}


@pytest.mark.parametrize("flag", ("-o", "--report"))
def test_written_through_a_symlink(place: Place, flag: str) -> None:
    (place.path / "real").mkdir()
    place.write("real/file", "old")
    (place.path / "link").symlink_to("real/file")
    place.transform(flag, "link").succeeded()
    assert (place.path / "link").is_symlink()
    assert (place.path / "real/file").read_text() != "old"
    assert os.listdir(place.path / "real") == ["file"]


def test_written_through_a_symlink_to_nothing(place: Place) -> None:
    (place.path / "link").symlink_to("fresh.xml")
    place.transform("-o", "link").succeeded()
    assert (place.path / "link").is_symlink()
    assert (place.path / "fresh.xml").read_text() == PLACED


def test_output_to_a_named_pipe(place: Place) -> None:
    fifo = place.path / "fifo"
    os.mkfifo(fifo)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_text()), daemon=True)
    reader.start()
    place.transform("-o", "fifo").succeeded()
    reader.join(timeout=10)
    assert got == [PLACED]
    assert stat.S_ISFIFO(fifo.stat().st_mode), "the pipe was replaced by a file"


@pytest.mark.parametrize("mode", (0o600, 0o664, 0o444))
def test_permissions_of_the_old_file_stay(place: Place, mode: int) -> None:
    place.write("out.xml", "old")
    (place.path / "out.xml").chmod(mode)
    place.transform("-o", "out.xml").succeeded()
    assert stat.S_IMODE((place.path / "out.xml").stat().st_mode) == mode
    assert (place.path / "out.xml").read_text() == PLACED


def test_permissions_of_a_new_file_follow_the_umask(place: Place) -> None:
    place.transform("-o", "out.xml", before=lambda: os.umask(0o027) and None).succeeded()
    assert stat.S_IMODE((place.path / "out.xml").stat().st_mode) == 0o640


@pytest.mark.parametrize("flag", ("-o", "--report"))
@pytest.mark.parametrize(
    "path, said",
    (
        ("nowhere/file", "No such file or directory"),
        ("folder", "Is a directory"),
        ("host.json/file", "Not a directory"),
    ),
)
def test_where_nothing_can_be_written(place: Place, flag: str, path: str, said: str) -> None:
    (place.path / "folder").mkdir()
    place.call_transform(flag, path).failed(2, said, f"({path})")
    assert os.listdir(place.path / "folder") == []


@pytest.mark.parametrize("flag", ("-o", "--report"))
def test_a_full_disk_under_the_file(place: Place, flag: str) -> None:
    place.transform(flag, "/dev/full").failed(2, "No space left on device", "(/dev/full)")


def test_a_full_disk_under_stdout(place: Place) -> None:
    with open("/dev/full", "wb") as full:
        done = place.transform(stdout=full.fileno())
    done.failed(2, "No space left on device")


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(place: Place) -> None:
    place.write("out.xml", "old")

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    place.transform("-o", "out.xml", before=limit, environment={"PYTHONDONTWRITEBYTECODE": "1"}).failed(2, "out.xml")
    assert (place.path / "out.xml").read_text() == "old"
    assert place.names == {"domain.xml", "host.json", "out.xml"}


# --- a reader that goes, a stream that is closed, a key that is pressed ----------------------------------------


def test_a_reader_that_has_gone(place: Place) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = place.transform(stdout=write)
    finally:
        os.close(write)
    assert done.err == ""
    assert done.status >= 0, "killed by a signal"


@pytest.mark.parametrize("command", ("transform", "explain"))
def test_a_reader_that_goes_half_way(place: Place, command: str) -> None:
    many = "".join(f"    <!-- {number:0100} -->\n" for number in range(5000))
    place.write("domain.xml", DOMAIN.replace("  <devices>\n", f"  <devices>\n{many}"))
    line = f'"{PROGRAM}" {command} domain.xml --host host.json | head -n 1'
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, cwd=place.path, env=place.environment, timeout=30, check=False
    )
    assert done.returncode == 0
    assert done.stdout.count(b"\n") == 1
    assert done.stderr == b""


def test_stdout_closed_is_one_clear_line(place: Place) -> None:
    place.transform(before=lambda: os.close(1)).failed(2)


def test_stdout_closed_does_not_matter_to_a_file(place: Place) -> None:
    place.transform("-o", "out.xml", before=lambda: os.close(1)).succeeded()
    assert (place.path / "out.xml").read_text() == PLACED


def test_stdin_closed_is_one_clear_line(place: Place) -> None:
    place.run("transform", "--host", "host.json", before=lambda: os.close(0)).failed(2, "no domain XML", "hint:")


def test_stderr_closed_does_not_matter(place: Place) -> None:
    assert place.transform(before=lambda: os.close(2)).text == PLACED


def test_a_terminal_as_stdin_is_not_waited_for(place: Place) -> None:
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            place.command(["transform", "--host", "host.json"]),
            stdin=theirs,
            capture_output=True,
            cwd=place.path,
            env=place.environment,
            timeout=30,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    Done(done.returncode, done.stdout, done.stderr.decode()).failed(2, "no domain XML", "hint:", "virsh dumpxml")


def _heed_interrupts() -> None:
    """What a shell starts behind it, these tests among it, inherits that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupted_while_it_reads(place: Place) -> None:
    process = subprocess.Popen(
        place.command(["transform", "--host", "host.json", "-o", "out.xml"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=place.path,
        env=place.environment,
        preexec_fn=_heed_interrupts,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(DOMAIN[:100].encode())
    process.stdin.flush()
    deadline = time.monotonic() + 20
    while _waiting_bytes(process.stdin.fileno()) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert process.stdout.read() == b""
    assert b"Traceback" not in process.stderr.read()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
    assert place.names == {"domain.xml", "host.json"}


def _waiting_bytes(pipe: int) -> int:
    """How many bytes stand in the pipe: none once its reader has taken what was written."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


# --- what cannot be read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, said",
    (
        (b"", "empty"),
        (b" \n\t\n", "empty"),
        (bytes(range(256)) * 10, ""),
        (DOMAIN[:700].encode(), "line"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", ""),
        (b"<html><body>502 Bad Gateway</body></html>", "<html>"),
        (b"error: failed to get domain 'vm'\n", "line 1"),
        (b'{"kind": "pcinuma-host"}', "line 1"),
    ),
    ids=("empty", "blank", "binary", "truncated", "gzip", "html", "message", "json"),
)
def test_domains_that_are_none(place: Place, content: bytes, said: str) -> None:
    place.write("domain.xml", content)
    place.call_transform().failed(2, "domain.xml", said)
    place.call("transform", "-", "--host", "host.json", stdin=content).failed(2, "standard input", said)


@pytest.mark.parametrize("flag", ("", "--vmi", "--host", "--config"))
@pytest.mark.parametrize("path, said", (("nothing", "No such file or directory"), ("folder", "Is a directory")))
def test_files_that_are_none(place: Place, flag: str, path: str, said: str) -> None:
    (place.path / "folder").mkdir()
    given = ["domain.xml", flag, path] if flag else [path]
    place.call("transform", *given).failed(2, said, f"({path})")


@pytest.mark.parametrize("flag", ("", "--vmi", "--host", "--config"))
def test_files_that_may_not_be_read(place: Place, flag: str) -> None:
    place.write("secret", DOMAIN)
    (place.path / "secret").chmod(0)
    wrapper: list[str] = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv (util-linux), without which root reads every file")
        wrapper = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    given = ["domain.xml", flag, "secret"] if flag else ["secret"]
    place.run("transform", *given, wrapper=wrapper).failed(2, "Permission denied", "(secret)")


def test_a_link_in_a_circle(place: Place) -> None:
    (place.path / "loop").symlink_to("loop")
    place.run("transform", "loop").failed(2, "symbolic links", "(loop)")


def test_no_byte_of_the_path_forges_a_line(place: Place) -> None:
    name = "a\npcinuma: error: forged\x1b[2J\u202e\x9b31m"
    done = place.run("transform", name).failed(2, "No such file")
    _has_no_controls(done.err)


def test_a_path_that_is_not_utf_8(place: Place) -> None:
    arguments = [os.fsencode(argument) for argument in place.command(["transform"])]
    done = subprocess.run(
        [*arguments, b"\xff\xfe.xml"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=place.path,
        env=place.environment,
        timeout=30,
        check=False,
    )
    Done(done.returncode, done.stdout, done.stderr.decode()).failed(2, "No such file")


# --- usage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, said",
    (
        ([], ""),
        (["transfrom"], "transfrom"),
        (["transform", "--nonsense"], "--nonsense"),
        (["transform", "a", "b"], "b"),
        (["transform", "--policy"], "--policy"),
        (["transform", "--format", "pdf"], "pdf"),
        (["snapshot", "extra"], "extra"),
    ),
    ids=("nothing", "command", "flag", "two-domains", "no-value", "format", "snapshot"),
)
def test_usage(place: Place, arguments: list[str], said: str) -> None:
    place.run(*arguments).failed(2, said, "hint:")


WRITTEN = ("distances", "gpudirect-clique")
"""What only a domain shows that is written: check and nccl-topo refuse it (test_options_matter.py)."""


@pytest.mark.parametrize(
    ("command", "name"),
    [(c, name) for c in ("transform", "explain", "check") for name in SETS if c != "check" or name not in WRITTEN],
)
def test_a_value_outside_its_set(place: Place, command: str, name: str) -> None:
    done = place.call(command, "domain.xml", "--host", "host.json", f"--{name}", "foo").failed(2, "foo", f"--{name}")
    for value in SETS[name]:
        assert value in done.err


@pytest.mark.parametrize("name, value", [(name, value) for name, values in SETS.items() for value in values])
def test_every_value_of_a_set_counts(place: Place, name: str, value: str) -> None:
    assert place.report(f"--{name}", value)["options"][name] == value


def test_flags_are_not_abbreviated_into_others(place: Place) -> None:
    place.transform("--pol", "none").failed(2, "--pol")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(place: Place, command: str) -> None:
    done = place.run(command, "--help").succeeded()
    assert re.search(r"^\s*(?:.*\| )?pcinuma " + command, done.text, re.M), "no example"
    assert "example" in done.text
    assert max(map(len, done.text.splitlines())) <= 120


def test_help_lists_the_commands(place: Place) -> None:
    for arguments in (["--help"], ["-h"]):
        text = place.run(*arguments).succeeded().text
        assert [command for command in COMMANDS if not re.search(rf"^\s+{command}\s", text, re.M)] == []


def test_version(place: Place) -> None:
    assert re.fullmatch(r"pcinuma \d+\.\d+\.\d+\n", place.run("--version").succeeded().text)


@pytest.mark.parametrize("command", ("transform", "explain", "check"))
def test_the_flags_that_commands_share(place: Place, command: str) -> None:
    text = place.run(command, "--help").succeeded().text
    options = [name for name in SETS if command != "check" or name not in WRITTEN]
    flags = ["--vmi", "--host", "--sysfs", "--config", "-o", "--report", *(f"--{name}" for name in options)]
    assert [flag for flag in flags if not re.search(rf"(?<!\S){re.escape(flag)}\b", text)] == []


def test_debug_shows_the_traceback_and_ends_alike(place: Place) -> None:
    place.write("domain.xml", "<domain>")
    done = place.transform("--debug")
    assert "Traceback" in done.err
    assert "pcinuma: error: " in done.err
    assert (done.status, done.out) == (2, b"")


def test_debug_changes_nothing_that_goes_well(place: Place) -> None:
    assert place.transform("--debug").succeeded().text == PLACED


# --- options: where they come from -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag, annotation, config, expected",
    (
        (None, None, None, "best-effort"),
        (None, None, "none", "none"),
        (None, "restricted", "none", "restricted"),
        ("single-numa-node", "restricted", "none", "single-numa-node"),
        ("best-effort", None, "none", "best-effort"),
        ("none", "restricted", None, "none"),
    ),
)
def test_flag_over_annotation_over_file_over_default(
    place: Place, flag: str | None, annotation: str | None, config: str | None, expected: str
) -> None:
    arguments = [] if flag is None else ["--policy", flag]
    if annotation is not None:
        arguments += ["--vmi", place.write("vmi.json", vmi(policy=annotation))]
    if config is not None:
        arguments += ["--config", place.write("config.yaml", f"policy: {config}\n")]
    assert place.report(*arguments)["options"]["policy"] == expected


def test_each_option_by_itself(place: Place) -> None:
    place.write("config.yaml", "policy: none\nunmapped: nearest\n")
    place.write("vmi.json", vmi(unmapped="leave", addressed="move"))
    options = place.report("--config", "config.yaml", "--vmi", "vmi.json")["options"]
    assert [options[name] for name in SHOWN] == ["none", "numa", "leave", "move"]


@pytest.mark.parametrize("name", SETS)
def test_the_default_of_every_option(place: Place, name: str) -> None:
    assert place.report()["options"][name] == DEFAULTS[name]


@pytest.mark.parametrize("name", SETS)
def test_every_option_as_annotation_and_in_the_file(place: Place, name: str) -> None:
    value = next(value for value in SETS[name] if value != DEFAULTS[name])
    place.write("vmi.json", VMI | {"metadata": {"annotations": {PREFIX + name: value}}})
    place.write("config.yaml", f"{name}: {value}\n")
    assert place.report("--vmi", "vmi.json")["options"][name] == value
    assert place.report("--config", "config.yaml")["options"][name] == value


@pytest.mark.parametrize(
    "content",
    [
        "policy: none\nunmapped: nearest\npolicy: restricted\n",
        '{"policy": "none", "policy": "restricted"}',
        "{policy: none, policy: restricted}",
    ],
)
def test_a_key_that_is_there_twice_is_not_one_of_the_two(place: Place, content: str) -> None:
    place.write("config.yaml", content)
    place.call_transform("--config", "config.yaml").failed(2, "policy is there twice (config.yaml)")
    place.write("vmi.yaml", VMI_YAML + f"  annotations: {{{PREFIX}policy: none}}\n")
    place.call_transform("--vmi", "vmi.yaml").failed(2, "metadata.annotations is there twice (vmi.yaml)")


VMI_YAML = f"""\
# kubectl get vmi vm -o yaml
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata:
  annotations:
    kubevirt.io/latest-observed-api-version: v1
    {PREFIX}policy: restricted
  name: vm
"""


@pytest.mark.parametrize(
    "content",
    (
        VMI_YAML,
        VMI_YAML.replace("\n", "\r\n"),
        "\ufeff" + VMI_YAML,
        "---\n" + VMI_YAML,
        json.dumps(vmi(policy="restricted")),
        json.dumps(vmi(policy="restricted"), indent=4),
        json.dumps({"apiVersion": "v1", "kind": "List", "items": [vmi(policy="restricted")]}),
        "apiVersion: v1\nkind: List\nitems:\n- " + VMI_YAML.replace("\n", "\n  "),
        json.dumps(
            {
                "apiVersion": "kubevirt.io/v1",
                "kind": "VirtualMachine",
                "metadata": {"name": "vm", "annotations": {"else.where/policy": "x"}},
                "spec": {"template": {"metadata": {"annotations": {PREFIX + "policy": "restricted"}}}},
            }
        ),
    ),
    ids=("yaml", "crlf", "bom", "document-mark", "json", "json-indented", "list-json", "list-yaml", "vm-template"),
)
def test_annotations_in_every_form(place: Place, content: str) -> None:
    place.write("vmi", content)
    assert place.report("--vmi", "vmi")["options"]["policy"] == "restricted"


@pytest.mark.parametrize(
    "content",
    (
        VMI | {"metadata": {"name": "vm"}},
        VMI | {"metadata": None},
        VMI | {"metadata": {"annotations": None}},
        {"kind": "VirtualMachine", "spec": {"template": {"spec": {}}}},
        {"kind": "VirtualMachine", "spec": {"template": None}},
        {"kind": "VirtualMachine"},
    ),
)
def test_without_annotations_the_defaults_count(place: Place, content: dict[str, Any]) -> None:
    place.write("vmi.json", content)
    options = place.report("--vmi", "vmi.json")["options"]
    assert [options[name] for name in SHOWN] == [DEFAULTS[name] for name in SHOWN]


@pytest.mark.parametrize("name", SETS)
def test_annotation_outside_its_set(place: Place, name: str) -> None:
    place.write("vmi.json", VMI | {"metadata": {"annotations": {PREFIX + name: "foo"}}})
    done = place.call_transform("--vmi", "vmi.json").failed(2, "foo", PREFIX + name, "vmi.json", "hint:")
    assert [value for value in SETS[name] if value not in done.err] == []


@pytest.mark.parametrize("value", (True, 1, None, ["none"], {"a": "b"}, "", " none", "None"))
def test_annotation_that_is_no_string_of_the_set(place: Place, value: object) -> None:
    place.write("vmi.json", vmi(policy=value))
    place.call_transform("--vmi", "vmi.json").failed(2, "policy", "single-numa-node")


@pytest.mark.parametrize("name", ("polcy", "Policy", "", "policy/x"))
def test_unknown_annotation_with_our_prefix(place: Place, name: str) -> None:
    place.write("vmi.json", VMI | {"metadata": {"annotations": {PREFIX + name: "none"}}})
    place.call_transform("--vmi", "vmi.json").failed(2, f"{PREFIX}{name}", "vmi.json", "hint:")


def test_annotation_on_the_vm_itself(place: Place) -> None:
    vm = {"kind": "VirtualMachine", "metadata": {"annotations": {PREFIX + "policy": "none"}}, "spec": {"template": {}}}
    place.write("vm.json", vm)
    place.call_transform("--vmi", "vm.json").failed(2, f"{PREFIX}policy", "spec.template.metadata.annotations")


@pytest.mark.parametrize(
    "content, said",
    (
        ("", "vmi"),
        ("[]", "vmi"),
        ("- kind: VirtualMachineInstance\n", "vmi"),
        ("just text", "vmi"),
        ("42", "vmi"),
        ("kind: Pod\nmetadata: {}\n", "Pod"),
        ("metadata: {}\n", "kind"),
        ("kind: VirtualMachineInstance\nmetadata: [1]\n", "metadata"),
        ("kind: VirtualMachineInstance\nmetadata: {annotations: [1]}\n", "annotations"),
        ("kind: VirtualMachineInstance\nmetadata: {annotations: {1: a}}\n", "annotations"),
        ("kind: VirtualMachine\nspec: [1]\n", "spec"),
        ("kind: [VirtualMachineInstance]\n", "kind"),
        ("kind: List\nitems: []\n", "vmi"),
        ("kind: List\nitems: [{kind: VirtualMachineInstance}, {kind: VirtualMachineInstance}]\n", "vmi"),
        (VMI_YAML + "---\n" + VMI_YAML, "vmi"),
        ("kind: VirtualMachineInstance\n\tmetadata: {}\n", "line 2"),
        ("a: b: c\n", "line 1"),
        ('{"kind": "VirtualMachineInstance",', "vmi"),
        ("a: &a\nb: *c\n", "line 2"),
        ("!!python/object/apply:os.system [echo no]", "line 1"),
        ("? [1, 2]\n: 3\n", "vmi"),
        ("? {a: b}\n: 3\n", "vmi"),
        ("<<: 1\n", "vmi"),
        ("kind: 2024-13-45\n", "vmi"),
        ("kind: \x07\n", "vmi"),
        (b"kind: VirtualMachineInstance\nname: \xff\xfe\n", "UTF-8"),
        (bytes(range(256)), "vmi"),
    ),
)
def test_vmis_that_are_none(place: Place, content: str | bytes, said: str) -> None:
    place.write("vmi", content)
    place.call_transform("--vmi", "vmi").failed(2, "vmi", said)


@pytest.mark.parametrize(
    "content, said",
    (
        ("policy: foo\n", "single-numa-node"),
        ("polcy: none\n", "polcy"),
        ("policy: [none]\n", "single-numa-node"),
        ("policy:\n", "single-numa-node"),
        ("[policy]\n", "config"),
        ("none\n", "config"),
        ("1: 2\n", "config"),
        ("policy: none: none\n", "line 1"),
        (b"\xff\xfe", "UTF-8"),
        (b"policy: none\x00\n", "config"),
    ),
)
def test_files_of_defaults_that_are_none(place: Place, content: str | bytes, said: str) -> None:
    place.write("config", content)
    place.call_transform("--config", "config").failed(2, "config", said)


@pytest.mark.parametrize("content", ("", "# nothing\n", "---\n", "{}"))
def test_empty_files_of_defaults(place: Place, content: str) -> None:
    place.write("config", content)
    options = place.report("--config", "config")["options"]
    assert [options[name] for name in SHOWN] == [DEFAULTS[name] for name in SHOWN]


# --- input that is made to hurt --------------------------------------------------------------------------------

LAUGHS = "a0: &a0 lol\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)
MERGES = "a0: &a0 {k: v}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}\n" for level in range(1, 12)
)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))


@pytest.mark.parametrize(
    "content",
    (
        LAUGHS + "kind: *a11\n",
        LAUGHS + f"kind: VirtualMachineInstance\nmetadata: {{annotations: {{{PREFIX}policy: *a11}}}}\n",
        LAUGHS + "kind: VirtualMachineInstance\nmetadata: *a11\n",
        LAUGHS + "kind: VirtualMachineInstance\nmetadata: {annotations: {? *a11 : x}}\n",
        "a: &a [*a]\nkind: *a\n",
        "&a {kind: *a}\n",
    ),
    ids=("kind", "value", "metadata", "key", "circle", "root-circle"),
)
def test_yaml_bombs(place: Place, content: str) -> None:
    place.write("vmi", content)
    done = place.transform("--vmi", "vmi", timeout=6, before=_limit_memory)
    done.failed(2, "vmi")
    assert len(done.err) < 5000


@pytest.mark.parametrize("content", (LAUGHS + "policy: *a11\n", LAUGHS, "? [*a]\n: 1\n"))
def test_yaml_bombs_among_the_defaults(place: Place, content: str) -> None:
    place.write("config", content)
    done = place.transform("--config", "config", timeout=6, before=_limit_memory)
    done.failed(2, "config")
    assert len(done.err) < 5000


@pytest.mark.parametrize("flag", ("--vmi", "--config"))
@pytest.mark.parametrize("number", ("1" + ":1" * 200 + ".5", "1" + ":1" * 1_000_000), ids=("beyond-a-float", "long"))
def test_numbers_to_base_60(place: Place, flag: str, number: str) -> None:
    """YAML 1.1 has them. The first is none that a float can hold, the second takes the square of its length."""
    place.write("numbers", f"policy: {number}\n")
    done = place.transform(flag, "numbers", timeout=6, before=_limit_memory)
    done.failed(2, "numbers")
    assert len(done.err) < 5000


def test_merge_keys_that_multiply(place: Place) -> None:
    """Each level merges the one before nine times; what comes of it is one key, so it may be read or refused."""
    place.write("vmi", MERGES + "kind: VirtualMachineInstance\nmetadata: *a11\n")
    done = place.transform("--vmi", "vmi", timeout=6, before=_limit_memory)
    if done.status:
        done.failed(2, "vmi")


@pytest.mark.parametrize("flag", ("--vmi", "--config"))
@pytest.mark.parametrize(
    "content",
    (
        "[" * 100_000,
        "{a: " * 100_000,
        '{"a": ' * 100_000 + "1" + "}" * 100_000,
        "".join(" " * level + "a:\n" for level in range(1500)),
        "- " * 100_000,
        "? " * 20_000,
        "{" + '"a": [' * 3_000 + "]" * 3_000 + "}",
    ),
    ids=("flow-list", "flow-map", "json", "block-map", "block-list", "keys", "not-closed"),
)
def test_deep_yaml(place: Place, flag: str, content: str) -> None:
    place.write("deep", content)
    place.transform(flag, "deep", timeout=15).failed(2, "deep")


def test_a_deep_host_record(place: Place) -> None:
    place.write("host.json", "[" * 1_000_000)
    place.transform(timeout=15).failed(2, "host.json")


@pytest.mark.parametrize("flag", ("", "--vmi", "--config", "--host"))
def test_files_without_end(place: Place, flag: str) -> None:
    given = ["domain.xml", flag, "/dev/zero"] if flag else ["/dev/zero"]
    place.run("transform", *given, timeout=20, before=_limit_memory).failed(2, "/dev/zero")


# --- the host --------------------------------------------------------------------------------------------------


def changed_host(**changes: object) -> dict[str, Any]:
    return HOST | changes


@pytest.mark.parametrize(
    "content, said",
    (
        (changed_host(version=2), "version"),
        (changed_host(version=0), "version"),
        (changed_host(version=True), "version"),
        (changed_host(version="1"), "version"),
        ({key: value for key, value in HOST.items() if key != "version"}, "version"),
        (changed_host(kind="List"), "pcinuma snapshot"),
        ({key: value for key, value in HOST.items() if key != "kind"}, "pcinuma snapshot"),
        (changed_host(nodes={}), "nodes"),
        (changed_host(nodes=[{"id": "0"}]), "nodes/0/id"),
        (changed_host(nodes=[{"id": -1}]), "nodes/0/id"),
        (changed_host(nodes=[{"id": 0, "cpus": "3-1"}]), "3-1"),
        (changed_host(functions=[{"address": "41:00.0"}]), "functions/0/address"),
        (changed_host(functions=[{"address": "0000:41:00.0", "node": 1.5}]), "functions/0/node"),
        (changed_host(functions=[{}]), "address"),
        (changed_host(extra=1), "extra"),
        (changed_host(nodes=[*HOST["nodes"], HOST["nodes"][0]]), "twice"),
        (changed_host(functions=[*HOST["functions"], HOST["functions"][0]]), "0000:41:00.0 twice"),
        (
            changed_host(
                mdevs=[
                    {"uuid": "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001", "parent": bdf}
                    for bdf in ("0000:41:00.0", "0000:c1:00.0")
                ]
            ),
            "twice",
        ),
        ("", "pcinuma snapshot"),
        ("not JSON", "pcinuma snapshot"),
        (json.dumps(HOST)[:-20], "pcinuma snapshot"),
        ("[]", "pcinuma snapshot"),
        ("null", "pcinuma snapshot"),
        (b"\xff\xfe\x00", "pcinuma snapshot"),
        (DOMAIN, "pcinuma snapshot"),
    ),
)
def test_host_records_that_are_none(place: Place, content: Any, said: str) -> None:
    place.write("host.json", content)
    place.call_transform().failed(2, "host.json", said)


def test_all_that_is_wrong_with_a_host_record_at_once(place: Place) -> None:
    place.write("host.json", changed_host(nodes=[{"id": "0"}], functions=[{"address": "x"}], more=1))
    place.call_transform().failed(2, "nodes/0/id", "functions/0/address", "more")


def test_a_host_record_with_half_a_character(place: Place) -> None:
    place.write("host.json", changed_host(functions=[{"address": "\ud800"}]))  # JSON has an escape for it
    place.call_transform().failed(2, "host.json", "half of a surrogate pair")


def test_a_host_record_with_a_byte_order_mark(place: Place) -> None:
    place.write("host.json", "\ufeff" + json.dumps(HOST))
    assert place.call_transform().succeeded().text == PLACED


def test_host_and_sysfs_exclude_each_other(place: Place) -> None:
    place.transform("--sysfs", "/sys").failed(2, "--host", "--sysfs")


@pytest.mark.parametrize("what", ("missing", "file", "empty", "parent"))
def test_sysfs_of_nothing(place: Place, what: str) -> None:
    (place.path / "empty").mkdir()
    (place.path / "parent/sys/bus/pci/devices").mkdir(parents=True)
    place.write("file", "text")
    done = place.run("transform", "domain.xml", "--sysfs", what).failed(2, f"({what})", "hint:")
    if what == "parent":
        assert "parent/sys" in done.err, "the tree is one level below: the hint should say so"
    place.run("snapshot", "--sysfs", what).failed(2, f"({what})", "hint:")


def test_a_vm_without_devices_does_not_ask_the_host(place: Place) -> None:
    done = place.run("transform", "--sysfs", "/nonexistent", "--policy", "restricted", stdin=NO_DEVICES)
    assert done.succeeded().text == NO_DEVICES


def test_devices_that_this_machine_does_not_have(place: Place) -> None:
    text = DOMAIN.replace("0x0000", "0xfffe0000")
    done = place.run("transform", "-", stdin=text)
    assert (done.status, done.text) == (0, text)
    assert done.err.count("pcinuma: warning: ") == 2
    place.run("transform", "-", "--policy", "restricted", stdin=text).failed(1, "fffe0000:41:00.0", "fffe0000:c1:00.0")


# --- warnings and refusals -------------------------------------------------------------------------------------


def test_a_warning_for_what_stays_unplaced(place: Place) -> None:
    place.write("domain.xml", DOMAIN.replace("0xc1", "0xe1"))
    done = place.transform()
    assert done.status == 0
    assert re.fullmatch(r"pcinuma: warning: [^\n]*0000:e1:00\.0[^\n]*\n(hint: [^\n]+\n)?", done.err)
    assert "ua-pcinuma-cell0" in done.text
    assert "ua-pcinuma-cell1" not in done.text
    quiet = place.transform("-q")
    assert (quiet.status, quiet.err, quiet.out) == (0, "", done.out)


def test_quiet_does_not_silence_errors(place: Place) -> None:
    place.write("domain.xml", DOMAIN.replace("0xc1", "0xe1"))
    place.transform("-q", "--policy", "restricted").failed(1, "0000:e1:00.0")


def test_a_refusal_names_every_device(place: Place) -> None:
    place.write("domain.xml", DOMAIN.replace("0xc1", "0xe1").replace("0x41", "0xa1"))
    place.transform("--policy", "restricted").failed(1, "0000:a1:00.0", "0000:e1:00.0", "restricted")


def test_refused_for_two_nodes(place: Place) -> None:
    place.transform("--policy", "single-numa-node").failed(1, "single-numa-node", "0000:41:00.0", "0000:c1:00.0")


@pytest.mark.parametrize(
    "policy, status", (("none", 0), ("best-effort", 0), ("restricted", 1), ("single-numa-node", 1))
)
def test_a_machine_that_takes_no_expander(place: Place, policy: str, status: int) -> None:
    text = DOMAIN.replace("machine='q35'", "machine='pc-i440fx-9.0'")
    place.write("domain.xml", text)
    done = place.call_transform("--policy", policy)
    if status:
        done.failed(1, "pc-i440fx-9.0")
    else:
        assert (done.status, done.text) == (0, text)
        assert "Traceback" not in done.err


def test_policy_none_changes_nothing_and_says_what_would_be_done(place: Place) -> None:
    assert place.transform("--policy", "none").succeeded().text == DOMAIN
    report = place.report("--policy", "none")
    assert report["outcome"] == "unchanged"
    assert [(device["cell"], device["placement"]) for device in report["devices"]] == [(0, "placed"), (1, "placed")]


@pytest.mark.parametrize("policy", SETS["policy"])
def test_nothing_to_place_gives_the_very_bytes(place: Place, policy: str) -> None:
    text = NO_DEVICES.replace("\n", "\r\n").rstrip().encode("utf-16")
    done = place.call("transform", "--policy", policy, stdin=text)
    assert done.succeeded().out == text


# --- explain, check, snapshot, diff ----------------------------------------------------------------------------


def test_explain(place: Place) -> None:
    text = place.run("explain", "domain.xml", "--host", "host.json").succeeded().text
    before, after = text.index("before"), text.index("after")
    assert before < after
    for bdf in ("0000:41:00.0", "0000:c1:00.0"):
        assert text.count(bdf) >= 2, "each device stands in both trees"
    for shown in ("cell 0", "cell 1", "0000:fd:00.0", "0000:ff:00.0", "ua-gpu-a", "ua-gpu-b"):
        assert text.index(shown, after)
    assert "\x1b" not in text, "colours into a pipe"


def test_explain_says_why_not(place: Place) -> None:
    place.write("domain.xml", DOMAIN.replace("0xc1", "0xe1"))
    text = place.run("explain", "domain.xml", "--host", "host.json").text
    assert re.search(r"0000:e1:00\.0.*-1", text)


@pytest.mark.parametrize("policy", ("best-effort", "restricted", "none"))
def test_explain_json(place: Place, policy: str) -> None:
    place.write("domain.xml", DOMAIN.replace("0xc1", "0xe1"))
    done = place.call("explain", "domain.xml", "--host", "host.json", "--json", "--policy", policy)
    assert done.status == 0
    report = json.loads(done.out)
    schema("report").validate(report)
    assert report["outcome"] == {"best-effort": "changed", "restricted": "refused", "none": "unchanged"}[policy]
    assert report == place.report("--policy", policy)


def test_explain_shows_a_refusal(place: Place) -> None:
    place.write("domain.xml", DOMAIN.replace("0xc1", "0xe1"))
    done = place.run("explain", "domain.xml", "--host", "host.json", "--policy", "restricted")
    assert done.status == 0
    assert "refused" in done.text
    assert "0000:e1:00.0" in done.text


def test_explain_is_no_output_of_transform(place: Place) -> None:
    place.run("explain", "domain.xml", "--host", "host.json", "-o", "tree.txt").succeeded()
    assert "<domain" not in (place.path / "tree.txt").read_text()


def test_check_finds_nothing_in_what_transform_writes(place: Place) -> None:
    place.write("domain.xml", PLACED)
    done = place.run("check", "domain.xml", "--host", "host.json", "--json").succeeded()
    assert [f for f in json.loads(done.out)["findings"] if f["severity"] != "info"] == []


def test_check_ends_with_1_for_an_error(place: Place) -> None:
    # two expanders with one busNr: QEMU says "Bus 254 is already in use"
    place.write("domain.xml", PLACED.replace("busNr='252'", "busNr='254'"))
    done = place.run("check", "domain.xml", "--host", "host.json")
    assert (done.status, done.err) == (1, "")
    assert "error" in done.text
    assert "254" in done.text
    as_json = place.run("check", "domain.xml", "--host", "host.json", "--json")
    assert (as_json.status, as_json.err) == (1, "")
    findings = json.loads(as_json.out)["findings"]
    assert any(finding["severity"] == "error" for finding in findings)
    for finding in findings:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", finding["code"])
        assert finding["message"] == finding["message"].strip() != ""
        assert set(finding) == {"code", "severity", "message", "device", "hint"}


def test_check_without_an_error_ends_with_0(place: Place) -> None:
    done = place.run("check", "domain.xml", "--host", "host.json")
    assert (done.status, done.err) == (0, "")
    assert "0000:41:00.0" in done.text, "devices without a node are worth a word"


def test_check_of_bad_input(place: Place) -> None:
    place.write("domain.xml", "<domain>")
    place.run("check", "domain.xml", "--host", "host.json").failed(2, "domain.xml")


def test_check_needs_no_host(place: Place) -> None:
    place.write("domain.xml", PLACED.replace("busNr='252'", "busNr='254'"))
    done = place.run("check", "domain.xml", "--sysfs", "/nonexistent", "--json")
    assert done.status == 1
    assert any("254" in finding["message"] for finding in json.loads(done.out)["findings"])


@pytest.mark.parametrize("written", ("+0x1", "+01", " 0x1", "0X01"))
def test_check_reads_numbers_as_c_does(place: Place, written: str) -> None:
    place.write("domain.xml", PLACED.replace("bus='0x01'", f"bus='{written}'"))
    done = place.call("check", "domain.xml", "--host", "host.json", "--json").succeeded()
    assert [f for f in json.loads(done.out)["findings"] if f["severity"] != "info"] == []


@pytest.mark.parametrize("tag", ("serial", "channel", "panic", "console"))
@pytest.mark.parametrize("command", ("check", "transform"))
def test_a_bad_address_of_any_device(place: Place, command: str, tag: str) -> None:
    text = DOMAIN.replace("  </devices>", f"    <{tag}><address type='pci' bus='zz'/></{tag}>\n  </devices>")
    place.write("domain.xml", text)
    done = place.call(command, "domain.xml", "--host", "host.json")
    done.failed(2, "zz", "line")


def _sysfs(root: Path) -> Path:
    """The host of HOST as a tree laid out like /sys."""
    devices = root / "devices"
    for number, cpus, distance in ((0, "0-15", "10 21"), (1, "16-31", "21 10")):
        node = devices / f"system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpus + "\n")
        (node / "distance").write_text(distance + "\n")
        (node / "meminfo").write_text(f"\nNode {number} MemTotal:        1000000 kB\n")
    listed = root / "bus/pci/devices"
    listed.mkdir(parents=True)
    for path, node_text in (
        ("pci0000:40/0000:40:01.1", "0"),
        ("pci0000:40/0000:40:01.1/0000:41:00.0", "0"),
        ("pci0000:c0/0000:c0:01.1", "1"),
        ("pci0000:c0/0000:c0:01.1/0000:c1:00.0", "1"),
    ):
        function = devices / path
        function.mkdir(parents=True)
        (function / "numa_node").write_text(node_text + "\n")
        (function / "class").write_text("0x030200\n")
        (listed / function.name).symlink_to(f"../../../devices/{path}")
    return root


def test_snapshot_is_what_host_takes(place: Place) -> None:
    _sysfs(place.path / "sys")
    done = place.run("snapshot", "--sysfs", "sys").succeeded()
    record = json.loads(done.out)
    schema("host").validate(record)
    assert [function["address"] for function in record["functions"]] == [
        "0000:40:01.1",
        "0000:41:00.0",
        "0000:c0:01.1",
        "0000:c1:00.0",
    ]
    place.write("host.json", done.out)
    assert place.transform().succeeded().text == PLACED
    assert place.run("transform", "domain.xml", "--sysfs", "sys").succeeded().text == PLACED


def test_snapshot_into_a_file(place: Place) -> None:
    _sysfs(place.path / "sys")
    assert place.run("snapshot", "--sysfs", "sys", "-o", "host.json").succeeded().out == b""
    schema("host").validate(json.loads((place.path / "host.json").read_text()))


def test_diff(place: Place) -> None:
    done = place.transform("--format", "diff").succeeded()
    body = [line for line in done.text.splitlines(keepends=True) if not line.startswith(("---", "+++", "@@"))]
    assert [line for line in body if line[0] == "-"] == []
    added = [line[1:] for line in body if line[0] == "+"]
    assert len(added) == PLACED.count("\n") - DOMAIN.count("\n")
    assert [line for line in added if line not in PLACED.splitlines(keepends=True)] == []


def _patched(before: bytes, diff: bytes) -> bytes:
    """What `patch` makes of it: the hunks of a unified diff applied, each line to the byte."""
    old, new, at = before.splitlines(keepends=True), [], 0
    lines = diff.splitlines(keepends=True)
    assert [line[:4] for line in lines[:2]] == [b"--- ", b"+++ "]
    for number, line in enumerate(lines[2:], start=2):
        if head := re.match(rb"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@", line):
            new += old[at : int(head[1]) - 1]
            at = int(head[1]) - 1
            continue
        if line.startswith(b"\\"):
            continue
        follows = lines[number + 1] if number + 1 < len(lines) else b""
        content = line[1:].rstrip(b"\n") if follows.startswith(b"\\") else line[1:]
        if line[:1] in b" -":
            assert content == old[at]
            at += 1
        if line[:1] in b" +":
            new.append(content)
    return b"".join(new + old[at:])


@pytest.mark.parametrize("ending", ("\n", "\r\n", ""), ids=repr)
def test_diff_is_one_for_patch(place: Place, ending: str) -> None:
    text = DOMAIN.rstrip("\n") if ending == "" else DOMAIN.replace("\n", ending)
    place.write("domain.xml", text)
    expected = place.transform().succeeded().out
    assert _patched(text.encode(), place.transform("--format", "diff").succeeded().out) == expected


def test_diff_that_reaches_the_last_line_without_an_end(place: Place) -> None:
    """All on one line: what comes before and after has no line break at its end."""
    text = re.sub(r"\n\s*", "", DOMAIN)
    place.write("domain.xml", text)
    diff = place.transform("--format", "diff").succeeded().out
    assert diff.count(b"\\ No newline at end of file\n") == 2
    assert _patched(text.encode(), diff) == place.transform().succeeded().out


def test_diff_of_nothing_is_empty(place: Place) -> None:
    place.write("domain.xml", NO_DEVICES)
    assert place.transform("--format", "diff").succeeded().out == b""


# --- what a terminal or a log makes of it ----------------------------------------------------------------------


def _has_no_controls(text: str) -> None:
    """Nothing but printable characters and the ends of lines that are ours."""
    assert all(character.isprintable() or character == "\n" for character in text), ascii(text)
    assert not re.search(r"^(pcinuma: error: )?forged", text, re.M), text


NASTY = "x&#10;forged&#x9b;2J&#x202e;&#x2028;&#13;&#9;"


@pytest.mark.parametrize(
    "old, new",
    (
        ("ua-gpu-a", f"ua-{NASTY}"),
        ("<name>vm</name>", f"<name>{NASTY}</name>"),
        ("machine='q35'", f"machine='{NASTY}'"),
        ("arch='x86_64'", f"arch='{NASTY}'"),
        ("cpus='0-1'", f"cpus='{NASTY}'"),
        ("nodeset='0'", f"nodeset='{NASTY}'"),
        ("bus='0x41'", f"bus='{NASTY}'"),
        ("cellid='0'", f"cellid='{NASTY}'"),
        ("type='pci' managed", f"type='mdev' model='{NASTY}' managed"),
        ("<domain ", "<domain x='&forged\x9b2J;' "),
        ("<name>vm</name>", "<forged\u00b7\u202e:x/>"),
        (
            "  <devices>\n",
            f"  <devices>\n<controller type='pci' index='1' model='{NASTY}'><alias name='ua-{NASTY}'/>"
            "<address type='pci' bus='0x40'/></controller>\n",
        ),
        (
            "  <devices>\n",
            f"  <devices>\n<controller type='pci' index='1' model='pcie-expander-bus'>"
            f"<target busNr='{NASTY}'/></controller>\n",
        ),
        (
            "  <devices>\n",
            f"  <devices>\n<controller type='pci' index='1' model='pcie-expander-bus'>"
            f"<target><node>{NASTY}</node></target></controller>\n",
        ),
    ),
)
@pytest.mark.parametrize("command", (["transform", "-o", "/dev/null"], ["explain"], ["check"]), ids=" ".join)
def test_control_characters_of_the_domain(place: Place, command: list[str], old: str, new: str) -> None:
    assert old in DOMAIN
    place.write("domain.xml", DOMAIN.replace(old, new, 1))
    done = place.call(*command, "--policy", "restricted", "--host", "host.json", "domain.xml")
    assert "internal error" not in done.err
    _has_no_controls(done.err)
    _has_no_controls(done.text)


NASTY_YAML = '"forged\\e[2J\\n\\x9bforged\\L\\u202e"'


@pytest.mark.parametrize(
    "flag, content",
    (
        ("--vmi", f"kind: {NASTY_YAML}\n"),
        ("--vmi", f"kind: VirtualMachineInstance\nmetadata: {{annotations: {{{PREFIX}policy: {NASTY_YAML}}}}}\n"),
        (
            "--vmi",
            "kind: VirtualMachineInstance\n"
            f"metadata: {{annotations: {{{NASTY_YAML.replace('forged', PREFIX, 1)}: x}}}}\n",
        ),
        ("--config", f"policy: {NASTY_YAML}\n"),
        ("--config", f"{NASTY_YAML}: none\n"),
        ("--config", "policy: \x1b[2J\n"),
        ("--host", json.dumps({"kind": "pcinuma-host", "version": "\x1b[2J\nforged"})),
        ("--host", json.dumps(changed_host(**{"\x1b[2J\nforged\x9b": 1}))),
    ),
)
def test_control_characters_of_other_files(place: Place, flag: str, content: str) -> None:
    place.write("file", content)
    done = place.call("transform", "domain.xml", flag, "file").failed(2, "file")
    _has_no_controls(done.err)


@pytest.mark.parametrize(
    "arguments", (["--policy", "\x1b[2J\nforged"], ["--\x1b[2J\nforged"], ["a", "\x1b[2J\nforged"]), ids=repr
)
def test_control_characters_of_arguments(place: Place, arguments: list[str]) -> None:
    _has_no_controls(place.run("transform", *arguments).failed(2).err)


def test_control_characters_of_a_host_record(place: Place) -> None:
    place.write(
        "host.json",
        changed_host(
            functions=[
                {"address": "0000:41:00.0", "node": None, "nodeProblem": "its\x1b[2J\nforged\x9b", "driver": "\x1b\n"}
            ]
        ),
    )
    for command in (["transform", "-o", "/dev/null"], ["explain"], ["check"]):
        done = place.run(*command, "domain.xml", "--host", "host.json")
        _has_no_controls(done.err)
        _has_no_controls(done.text)


def test_a_terminal_that_knows_no_utf_8(place: Place) -> None:
    environment = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    place.run("transform", "größe.xml", environment=environment).failed(2, "No such file")
    assert place.run("explain", "domain.xml", "--host", "host.json", environment=environment).status == 0


def test_yaml_of_kubectl_is_read_with_all_its_parts(place: Place) -> None:
    """The samples of real VMIs, where they are: none is refused."""
    folder = ROOT / "../shared/samples/vmi"
    files = sorted(folder.glob("*")) if folder.is_dir() else []
    if not files:
        pytest.skip("no folder ../shared/samples beside the repo")
    for file in files[:5]:
        kind = yaml.safe_load(file.read_text()).get("kind")
        assert kind in ("VirtualMachineInstance", "VirtualMachine")
        place.transform("--vmi", str(file)).succeeded()


@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_a_host_record_that_is_nested_too_deeply(place: Place, depth: int) -> None:
    lists = "[" * depth + "]" * depth
    place.write("deep.json", f'{{"kind":"pcinuma-host","version":1,"x":{lists}}}')
    place.transform("--host", "deep.json").failed(2, "nested too deeply", "deep.json")
