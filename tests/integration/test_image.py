"""The image: its tree made by the Dockerfile's own steps in a Debian root, and run under what a pod imposes."""

from __future__ import annotations

import datetime
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pcinuma import cert_maker
from tests.conftest import ROOT
from tests.support import domains, image, manifests, sidecar

NEEDED = ("debootstrap", "chroot", "setpriv", "unshare")
DOMAIN = """\
<domain type="kvm">
  <name>ns_vm</name>
  <os><type arch="x86_64" machine="q35">hvm</type></os>
  <devices>
    <hostdev type="pci" managed="no">
      <source><address type="pci" domain="0x0000" bus="0x41" slot="0x00" function="0x0"/></source>
      <alias name="ua-gpu-gpu0"/>
    </hostdev>
  </devices>
  <cpu mode="host-passthrough">
    <numa><cell id="0" cpus="0" memory="1048576"/><cell id="1" cpus="1" memory="1048576"/></numa>
  </cpu>
  <vcpu>2</vcpu>
  <numatune><memnode cellid="0" mode="strict" nodeset="0"/><memnode cellid="1" mode="strict" nodeset="1"/></numatune>
</domain>
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() != 0:
        pytest.skip("needs root: the test makes a Debian root")
    if missing := [tool for tool in NEEDED if shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    base = tmp_path_factory.getbasetemp()
    # two workers share one tree
    return image.build((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "image")


# --- what is in it ---------------------------------------------------------------------------------------------


def executables(tree: Path) -> set[str]:
    found = set()
    for folder, _, names in os.walk(tree):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink() and path.stat().st_mode & 0o111:
                found.add(str(path.relative_to(tree)))
    return found


@pytest.mark.timeout(300)  # a first run makes the Debian root
def test_there_is_nothing_to_run_but_python_and_pcinuma(tree: Path) -> None:
    programs = {path for path in executables(tree) if not re.search(r"\.so(\.|$)", path)}
    version = next((tree / "usr/bin").glob("python3*")).name
    ours = {"opt/pcinuma/bin/pcinuma", "opt/pcinuma/bin/onDefineDomain"}
    assert programs == {f"usr/bin/{version}", "usr/sbin/ldconfig", *ours}
    for shell in ("bin/sh", "usr/bin/sh", "bin/busybox", "usr/bin/dash", "usr/bin/env"):
        assert not os.path.lexists(tree / shell)


@pytest.mark.timeout(300)
def test_nothing_is_setuid_nor_writable_for_its_user(tree: Path) -> None:
    for folder, folders, names in os.walk(tree):
        for name in (*folders, *names):
            path = Path(folder, name)
            if path.is_symlink():
                continue
            status = path.stat()
            assert status.st_mode & 0o6000 == 0, path
            assert status.st_uid == 0, path
            assert status.st_gid == 0, path
            assert status.st_mode & 0o022 == 0 or path == tree / "tmp", path


@pytest.mark.timeout(300)
def test_all_python_is_compiled_and_no_clock_decides_whether_it_is_used(tree: Path) -> None:
    sources = list(tree.rglob("*.py"))
    assert len(sources) > 300
    for source in sources:
        (compiled,) = (source.parent / "__pycache__").glob(f"{source.stem}.cpython-3??.pyc")
        # PEP 552: bit 0 hash-based, bit 1 checked against the source
        assert int.from_bytes(compiled.read_bytes()[4:8], "little") == 0b01, compiled


@pytest.mark.timeout(300)
def test_scanners_find_debians_packages(tree: Path) -> None:
    known = {path.name for path in (tree / "var/lib/dpkg/status.d").iterdir()}
    assert {"libc6", "libssl3", "libexpat1", "zlib1g", "libudev1", "python3.11-minimal"} <= known
    assert "Version: " in (tree / "var/lib/dpkg/status.d/libssl3").read_text()


@pytest.mark.timeout(300)
def test_the_size_is_the_one_that_is_told(tree: Path) -> None:
    told = re.search(r"The image has (\d+) MB", (ROOT / "docs/install.md").read_text())
    assert told is not None
    done = subprocess.run(["du", "-sm", "--apparent-size", tree], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[0]) == pytest.approx(int(told[1]), rel=0.15)


# --- what runs in it -------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_every_module_can_be_loaded(tree: Path) -> None:
    modules = [f"pcinuma.{path.stem}" for path in (ROOT / "hook/pcinuma").glob("*.py") if path.stem != "__main__"]
    assert len(modules) > 20
    done = image.run(tree, "python", "-c", f"import {', '.join(modules)}, lxml.etree, yaml, pyudev, jsonschema_rs, ssl")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.timeout(300)
def test_the_root_can_not_be_written_and_the_network_is_not_there(tree: Path) -> None:
    program = (
        "import os, socket\n"
        "for path in ('/x', '/tmp/x', '/opt/pcinuma/x', '/sys/x', '/var/run/x', '/var/run/kubevirt-hooks/x'):\n"
        "    try: open(path, 'w'); print(path)\n"
        "    except OSError as error: print(error.errno)\n"
        "print(os.getresuid(), os.getresgid(), os.getgroups(), [name for _, name in socket.if_nameindex()])\n"
    )
    with sidecar.folder() as sockets:
        os.chown(sockets, 107, 107)
        line, environment = image.command(tree, sockets, "python", "-c", program)
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    *written, user = done.stdout.splitlines()
    assert set(written[:5]) <= {"30", "13", "1"}, done  # EROFS, EACCES, EPERM
    assert written[5] == "/var/run/kubevirt-hooks/x"
    assert user == "(107, 107, 107) (107, 107, 107) [] ['lo']"


@pytest.mark.timeout(300)
def test_the_host_is_read_through_libudev(tree: Path) -> None:
    """From the machine's real /sys: every function that is there."""
    done = image.run(tree, "pcinuma", "snapshot")
    assert (done.returncode, done.stderr) == (0, b"")
    found = {function["address"] for function in json.loads(done.stdout)["functions"]}
    assert found == set(os.listdir("/sys/bus/pci/devices"))


@pytest.mark.timeout(300)
def test_a_machine_without_libudev_is_told_what_to_do(tree: Path) -> None:
    bare = tree.parent / f"bare-{os.getpid()}"
    subprocess.run(["cp", "-al", tree, bare], check=True)
    try:
        for library in bare.glob("usr/lib/*/libudev.so*"):
            library.unlink()
        done = image.run(bare, "pcinuma", "snapshot")
        assert done.returncode == 2
        assert done.stderr == (
            b"pcinuma: error: libudev is not installed\nhint: install it (Debian: libudev1), or give --sysfs /sys\n"
        )
        told = json.loads(image.run(bare, "pcinuma", "snapshot", "--sysfs", "/sys").stdout)
        assert {one["address"] for one in told["functions"]} == set(os.listdir("/sys/bus/pci/devices"))
    finally:
        shutil.rmtree(bare)


@pytest.mark.timeout(300)
def test_the_command_line_works_in_it(tree: Path) -> None:
    done = image.run(tree, "pcinuma", "transform", "--policy", "none", "-", given=DOMAIN.encode())
    assert (done.returncode, done.stdout) == (0, DOMAIN.encode())
    assert image.run(tree, "onDefineDomain", "--help").returncode == 0


@pytest.mark.timeout(300)
def test_the_hook_answers_virt_launcher(tree: Path, tmp_path: Path) -> None:
    """No command is given: that is what an entry of hookSidecars with an image alone does."""
    record = sidecar.host_file(tmp_path / "host.json", {0: "0-3", 1: "4-7"}, {"0000:41:00.0": 1}).read_bytes()
    files = {"host.json": record}
    with image.running(tree, "--host", "/var/run/kubevirt-hooks/host.json", files=files) as hook:
        status = Path(f"/proc/{hook.process.pid}/status").read_text()
        with sidecar.Client(hook.socket) as client:
            assert client.info().name == "pcinuma"
            answer = client.define(DOMAIN, sidecar.vmi({}))
        controllers, devices = domains.layout(answer)
        (called,) = hook.await_records("OnDefineDomain", 1)
        ended, _ = hook.end()
    assert re.search(r"^Uid:\t107\t107\t107\t107$", status, re.M)
    assert re.search(r"^CapEff:\t0+$", status, re.M)
    assert re.search(r"^NoNewPrivs:\t1$", status, re.M)
    assert controllers["ua-pcinuma-cell1"][2] == 1
    assert devices["ua-gpu-gpu0"] is not None
    assert called["outcome"] == "changed"
    assert ended == 0
    assert not hook.socket.exists()


@pytest.mark.timeout(300)
def test_the_hook_reads_the_hosts_own_sys(tree: Path) -> None:
    """0000:41:00.0 is not on this machine: only a look at it can tell."""
    assert not Path("/sys/bus/pci/devices/0000:41:00.0").exists()
    with image.running(tree) as hook, sidecar.Client(hook.socket) as client:
        client.info()
        assert client.define(DOMAIN, sidecar.vmi({})) is not None
        (called,) = hook.await_records("OnDefineDomain", 1)
    assert "device-missing" in {finding["code"] for finding in called["findings"]}


@pytest.mark.timeout(300)
def test_the_webhook_serves(tree: Path) -> None:
    """Read-only root and the network: what its Deployment gives it."""
    made = cert_maker.make(("localhost",), datetime.datetime.now(datetime.UTC), 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with sidecar.folder() as folder:
        for name, content in (("tls.crt", made.certificate), ("tls.key", made.key)):
            (folder / name).write_bytes(content)
        files = [
            f"--tls-{kind}=/var/run/kubevirt-hooks/tls.{suffix}" for kind, suffix in (("cert", "crt"), ("key", "key"))
        ]
        arguments = ("webhook", f"--listen=127.0.0.1:{port}", *files, "--image=registry.example/pcinuma:1")
        line, environment = image.command(tree, folder, *image.recipe().entrypoint, *arguments, network=True)
        log = folder / "log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(line, env=environment, stderr=stderr)
        context = ssl.create_default_context(cadata=made.bundle.decode())
        connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=5)
        deadline = time.monotonic() + 20
        try:
            while True:
                try:
                    connection.request("GET", "/readyz")
                    break
                except ConnectionRefusedError:
                    connection.close()
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            assert connection.getresponse().status == 200
            connection.close()
            process.terminate()
            assert process.wait(timeout=20) == 0
        finally:
            connection.close()
            process.kill()
            process.wait()


@pytest.mark.timeout(300)
def test_the_pods_last_sleep_works_without_a_shell(tree: Path) -> None:
    """The kubelet runs it in the container: until it ends, the webhook is not told to end."""
    pod = manifests.one(manifests.overlay("self-signed"), "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    begun = time.monotonic()
    done = image.run(tree, *container["lifecycle"]["preStop"]["exec"]["command"])
    took = time.monotonic() - begun
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert 5 <= took < 8
    assert pod["terminationGracePeriodSeconds"] >= 5 + 15 + 5, "that, what the webhook takes at most, and some"


def test_the_debug_page_serves_with_all_it_shows(tree: Path) -> None:
    with sidecar.folder() as folder:
        arguments = ("web", "--listen=127.0.0.1:0")
        line, environment = image.command(tree, folder, *image.recipe().entrypoint, *arguments, network=True)
        with subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                said = process.stderr.readline()
                found = re.search(r"http://127\.0\.0\.1:(\d+)/", said)
                assert found is not None, said
                for path, text in (
                    ("/example", "ml_train-0"),
                    ("/docs/findings", "mmio-window"),
                    ("/assets/page.css", ""),
                ):
                    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=10)
                    connection.request("GET", path)
                    answer = connection.getresponse()
                    assert (answer.status, text in answer.read().decode()) == (200, True)
                    connection.close()
                process.terminate()
                assert process.wait(timeout=20) == 0
            finally:
                process.kill()


# --- the Dockerfile --------------------------------------------------------------------------------------------


def test_the_base_is_named_by_digest_and_the_user_is_virt_launchers() -> None:
    made = image.recipe()
    assert made.base == "debian:bookworm-slim@${BASE_DIGEST} AS build"
    assert made.user == "107:107"


def test_what_is_copied_passes_the_ignore_file() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert set(image.recipe().copied) == allowed


@pytest.mark.parametrize(
    "change, rule",
    [
        (None, None),
        (('RUN ["/src/scripts/image.sh", "packages"]', "RUN sudo apt-get install -y python3"), "DL3004"),
        (("USER 107:107", "USER root"), "DL3002"),
        (("@${BASE_DIGEST}", ""), None),
        (("debian:bookworm-slim@${BASE_DIGEST}", "debian:latest"), "DL3007"),
    ],
)
def test_hadolint(change: tuple[str, str] | None, rule: str | None) -> None:
    text = image.DOCKERFILE.read_text()
    if change is not None:
        assert change[0] in text
        text = text.replace(*change)
    tool = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([tool, "--no-color", "-"], input=text, capture_output=True, text=True, check=False)
    found = set(re.findall(r"\b(?:DL|SC)\d{4}\b", done.stdout))
    assert (rule in found) if rule else not found, done.stdout
