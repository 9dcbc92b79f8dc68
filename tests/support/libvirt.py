"""A real libvirt for tests: define, validate, run domains, through the system's `virsh`.

Nothing here knows what pcinuma does. Domains get unique names, so several test workers can share one libvirtd.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from lxml import etree

URI = "qemu:///system"
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_NO_CONNECTION = re.compile("failed to connect to the hypervisor|Disconnected from|Cannot recv data", re.IGNORECASE)
_DAEMON_START_SECONDS = 30.0
_ANSWER_SECONDS = 120.0
_KILL_SECONDS = 10.0
_LOG_LINES = 8
_POLL_SECONDS = 0.05


class LibvirtUnavailable(Exception):
    """There is no libvirt to talk to, and none could be started."""


class LibvirtRejected(Exception):
    """libvirt, or its schema, refuses the domain; the message is libvirt's own."""


class DomainDied(Exception):
    """A domain that ran is gone; the message is what libvirt and QEMU told of its end."""


def parse_domain(xml: str) -> etree._Element:
    """The root element of a domain XML. A declaration is ignored: the text is decoded already."""
    text = re.sub(r"^\s*<\?xml[^>]*\?>", "", xml)
    return etree.fromstring(text, etree.XMLParser(resolve_entities=False, no_network=True))


def dump_xml(root: etree._Element) -> str:
    return etree.tostring(root, encoding="unicode")


def virsh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One virsh command on the system's libvirt, messages in English. The caller looks at the status.

    Raises LibvirtUnavailable when there is no connection, or no answer in two minutes.
    """
    command = ["virsh", "--quiet", "--connect", URI, *arguments]
    try:
        result = subprocess.run(
            command,
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_ANSWER_SECONDS,
        )
    except FileNotFoundError:
        raise LibvirtUnavailable("virsh is not installed") from None
    except subprocess.TimeoutExpired:
        raise LibvirtUnavailable(f"no answer to virsh {arguments[0]} in {_ANSWER_SECONDS:.0f} s") from None
    if result.returncode != 0 and _NO_CONNECTION.search(result.stderr):
        raise LibvirtUnavailable(_message(result.stderr))
    return result


def ensure_libvirtd() -> None:
    """Starts virtlogd and libvirtd where they do not run yet, and leaves them running.

    Safe to call at any time from any process: a lock keeps two workers from starting two daemons. The daemons get
    an environment of their own, for one with LD_PRELOAD in it (umockdev) must not become theirs.

    Raises LibvirtUnavailable when libvirt is not installed, or does not answer in time.
    """
    if _answers():
        return
    if shutil.which("virsh", path=_ENVIRONMENT["PATH"]) is None:
        raise LibvirtUnavailable("virsh is not installed (Debian: libvirt-clients libvirt-daemon-system)")
    if os.geteuid() != 0:
        raise LibvirtUnavailable(f"{URI} does not answer, and only root can start libvirtd")
    lock_path = Path(tempfile.gettempdir()) / "pcinuma-test-libvirtd.lock"
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _answers():
            return
        complaints = [_start_daemon("virtlogd"), _start_daemon("libvirtd")]
        deadline = time.monotonic() + _DAEMON_START_SECONDS
        while not _answers():
            if time.monotonic() > deadline:
                raise LibvirtUnavailable(f"libvirtd does not answer: {' '.join(complaints).strip()}")
            time.sleep(_POLL_SECONDS)


def _answers() -> bool:
    try:
        return virsh("version").returncode == 0
    except LibvirtUnavailable:
        return False


def _start_daemon(name: str) -> str:
    """Starts a daemon, and returns what it complains about; "it runs already" is such a complaint, and harmless."""
    # A pipe would stay open in the daemon, and reading it to its end would never come back: hence a file.
    with tempfile.TemporaryFile("w+") as complaints:
        with suppress(FileNotFoundError):
            subprocess.run(
                [name, "--daemon"],
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=complaints,
                stderr=complaints,
                check=False,
            )
        complaints.seek(0)
        return complaints.read()


def define_and_dump(xml: str) -> str:
    """What libvirt makes of a domain: `virsh dumpxml --inactive` after `virsh define`. Nothing is started.

    Changed before defining, because this machine could not define the domain otherwise or two runs would collide:

    - `type="kvm"` becomes `qemu`;
    - `<name>`, `<uuid>` and the UUID in `<sysinfo>` become unique;
    - a machine type this QEMU does not know becomes the plain one of its family (`q35`, `pc`, `virt`);
    - an `<emulator>` that does not exist goes.

    Type, name and UUID are put back in the answer. Controllers, addresses, aliases and every device stay as given.

    Raises LibvirtRejected with libvirt's message when libvirt refuses the domain.
    """
    ensure_libvirtd()
    root = parse_domain(xml)
    original_type, original_name = root.get("type", ""), root.findtext("name", "")
    uuid_holders = [*root.iterfind("uuid"), *root.iterfind("sysinfo/system/entry[@name='uuid']")]
    original_uuid = next((holder.text for holder in uuid_holders if holder.text), None)

    unique_name, unique_uuid = unique_domain_name(), str(uuid.uuid4())
    if original_type == "kvm":
        root.set("type", "qemu")
    name = root.find("name")
    if name is None:
        name = etree.SubElement(root, "name")
    name.text = unique_name
    for holder in uuid_holders:
        holder.text = unique_uuid
    for devices in root.findall("devices"):
        for emulator in devices.findall("emulator"):
            if not Path(emulator.text or "").exists():
                devices.remove(emulator)

    dumped = _define_dump_undefine(root, unique_name)
    if original_type == "kvm":
        dumped = dumped.replace("<domain type='qemu'", "<domain type='kvm'", 1)
    dumped = dumped.replace(unique_name, escape(original_name))
    return dumped.replace(unique_uuid, original_uuid) if original_uuid else dumped


def unique_domain_name() -> str:
    return f"pcinuma-test-{uuid.uuid4().hex[:16]}"


def _define_dump_undefine(root: etree._Element, name: str) -> str:
    os_type = root.find("os/type")
    try:
        defined = _define(root)
        if "does not support machine type" in defined.stderr and os_type is not None:
            os_type.set("machine", _machine_family(os_type.get("machine", "")))
            defined = _define(root)
        if defined.returncode != 0:
            raise LibvirtRejected(_message(defined.stderr))
        dumped = virsh("dumpxml", "--inactive", name)
    finally:
        # Defining makes no NVRAM file, so one at that path belongs to somebody else.
        with suppress(LibvirtUnavailable):
            virsh("undefine", "--keep-nvram", name)
    if dumped.returncode != 0:
        raise LibvirtRejected(_message(dumped.stderr))
    return dumped.stdout


def _define(root: etree._Element) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".xml", encoding="utf-8") as file:
        file.write(dump_xml(root))
        file.flush()
        return virsh("define", file.name)


def _machine_family(machine: str) -> str:
    if "q35" in machine:
        return "q35"
    return "virt" if machine.startswith("virt") else "pc"


def _message(stderr: str) -> str:
    """virsh's complaint without its `error: ` prefixes and the line that only says which command failed."""
    lines = [line.removeprefix("error: ").strip() for line in stderr.splitlines()]
    telling = [line for line in lines if line and not line.startswith(("Failed to define", "Failed to create"))]
    return "\n".join(telling or lines)


def validate(xml: str) -> None:
    """Holds a domain against libvirt's schema with `virt-xml-validate`.

    libvirt is more lenient than its schema, and KubeVirt relies on it. What KubeVirt writes against the schema is
    taken out first, and nothing else: empty `<bios>`, `<baseBoard>`, `<chassis>` in `<sysinfo>`; the `type` and an
    empty `bus` of a hostdev's source address; the `name` of a block disk's source.

    Raises LibvirtRejected with the validator's message.
    """
    root = parse_domain(xml)
    for sysinfo in root.findall("sysinfo"):
        for block in list(sysinfo):
            if len(block) == 0:
                sysinfo.remove(block)
    for address in root.iterfind("devices/hostdev/source/address"):
        if "type" in address.attrib:
            del address.attrib["type"]
        if address.get("bus") == "":
            del address.attrib["bus"]
    for source in root.iterfind("devices/disk[@type='block']/source[@dev][@name]"):
        del source.attrib["name"]
    with tempfile.NamedTemporaryFile("w", suffix=".xml", encoding="utf-8") as file:
        file.write(dump_xml(root))
        file.flush()
        command = ["virt-xml-validate", file.name, "domain"]
        result = subprocess.run(command, env=_ENVIRONMENT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise LibvirtRejected(result.stderr.replace(file.name, "domain").strip())


@dataclass(frozen=True)
class RunningDomain:
    """A transient domain that ends with the block that started it."""

    name: str
    _watcher: subprocess.Popen[str]

    def check(self) -> None:
        """Raises what became of the domain, if it does not run.

        LibvirtRejected: libvirt did not start it; DomainDied: it started and is gone; LibvirtUnavailable: nobody knows.
        """
        if self._watcher.poll() is None:
            return
        told = self._watcher.communicate()[0]
        if _NO_CONNECTION.search(told):
            raise LibvirtUnavailable(_message(told))
        if "Failed to create domain" in told:
            raise LibvirtRejected(_message(told.replace(f"failed to get domain '{self.name}'", "")))
        raise DomainDied(f"{_message(told)}\n{_qemu_log_tail(self.name)}")

    def qmp(self, command: str) -> Any:
        """Asks QEMU's monitor. Raises DomainDied when no answer comes."""
        answer = virsh("qemu-monitor-command", self.name, json.dumps({"execute": command}))
        if answer.returncode != 0:
            raise DomainDied(_message(answer.stderr))
        return json.loads(answer.stdout)["return"]


@contextmanager
def running(root: etree._Element, *, timeout: float) -> Iterator[RunningDomain]:
    """Starts a transient domain under its own `<name>`, which must be unique, and destroys it at the end of the block.

    The connection that starts the domain stays open to watch it, for `timeout` seconds at most, and libvirt destroys
    the domain when it closes: a killed test run leaves no guest behind for longer.
    """
    ensure_libvirtd()
    name = root.findtext("name", "")
    with tempfile.NamedTemporaryFile("w", suffix=".xml", encoding="utf-8") as file:
        file.write(dump_xml(root))
        file.flush()
        watch = f"event --domain {name} --event lifecycle --timeout {max(1, round(timeout))}"
        watcher = subprocess.Popen(
            ["virsh", "--quiet", "--connect", URI, f"create --autodestroy {file.name}; {watch}"],
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield RunningDomain(name, watcher)
        finally:
            _destroy(name, watcher)


def _qemu_log(name: str) -> Path:
    return Path(f"/var/log/libvirt/qemu/{name}.log")


def _qemu_log_tail(name: str) -> str:
    """What QEMU said last, without the command line libvirt logs before."""
    try:
        lines = _qemu_log(name).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines[-_LOG_LINES:] if not line.startswith("-"))


def _destroy(name: str, watcher: subprocess.Popen[str]) -> None:
    """Returns once QEMU is dead. libvirt also waits for PID 1 to reap it, which in a container can take seconds."""
    with suppress(OSError, ValueError):
        process = int(Path(f"/run/libvirt/qemu/{name}.pid").read_text())
        os.kill(process, signal.SIGTERM)
        deadline = time.monotonic() + _KILL_SECONDS
        while not _is_dead(process) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    threading.Thread(target=_tidy, args=(name, watcher)).start()


def _is_dead(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _tidy(name: str, watcher: subprocess.Popen[str]) -> None:
    with suppress(subprocess.TimeoutExpired):
        watcher.wait(timeout=_KILL_SECONDS)
    with suppress(LibvirtUnavailable):
        virsh("destroy", name)
    watcher.terminate()
    watcher.wait()
    if watcher.stdout is not None:
        watcher.stdout.close()
    with suppress(OSError):
        _qemu_log(name).unlink()
