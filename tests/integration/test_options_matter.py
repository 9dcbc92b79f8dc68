"""Every option that a command's help lists makes a difference there: the real command with it and without it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import yaml

from tests.conftest import ROOT
from tests.support import sidecar
from tests.support.domains import domain, hostdev
from tests.support.node_tree import NodeTree
from tests.support.sidecar import Client
from tests.support.webhook import Authority

COMMANDS = ("transform", "explain", "check", "nccl-topo", "doctor", "snapshot", "certs", "hook", "webhook", "web")
GIB = 1 << 30
ON_BUS_0 = '<address type="pci" domain="0x0000" bus="0x00" slot="0x0{}" function="0x0"/>'
PREFIX = "pcinuma.vm.kubevirt.io/"

Arguments = tuple[str, ...]
Case = tuple[Arguments, Arguments]
"""What is given without the option, and with it (or with one value, and with another)."""


# --- the place -------------------------------------------------------------------------------------------------


def record(functions: Mapping[str, int], **details: dict[str, Any]) -> str:
    """Three nodes, the third without a cell; GPUs."""
    nodes = [
        {"id": n, "cpus": f"{8 * n}-{8 * n + 7}", "distances": {str(m): 10 if m == n else 21 + m for m in range(3)}}
        for n in range(3)
    ]
    gpu = {"class": "0x030200", "vendor": "0x10de"}
    found = [{"address": bdf, "node": node, **gpu, **details.get(bdf, {})} for bdf, node in functions.items()]
    return json.dumps({"kind": "pcinuma-host", "version": 1, "nodes": nodes, "functions": found})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files for every command: each domain is one that some option decides about, on ``host.json``."""
    folder = tmp_path_factory.mktemp("options")
    near, far = "0000:41:00.0", "0000:81:00.0"
    free = [hostdev(near, "ua-near"), hostdev(far, "ua-far")]
    at_0 = [hostdev(near, "ua-near", ON_BUS_0.format(8)), hostdev(far, "ua-far", ON_BUS_0.format(9))]
    many = [f"0000:{n:02x}:00.0" for n in range(0x20, 0x3F)]  # 31 root complexes: more expanders than bus 0 has slots
    pair = ("0000:43:00.0", "0000:44:00.0")
    big = {"bars": [{"index": 2, "size": 2048 * GIB, "flags": "0x14220c"}]}
    above = ["0000:40:01.0", "0000:41:00.0"]
    details: dict[str, dict[str, Any]] = {bdf: {"rootComplex": f"pci{bdf[:7]}"} for bdf in many}
    details |= {bdf: {"bridges": [*above, f"0000:42:0{n}.0"]} for n, bdf in enumerate(pair)} | {"0000:45:00.0": big}
    functions = {near: 0, far: 1, "0000:c1:00.0": 2, "0000:45:00.0": 0} | dict.fromkeys((*many, *pair), 0)
    files = {
        "free.xml": domain({0: 0, 1: 1}, free),
        "at-0.xml": domain({0: 0, 1: 1}, at_0),
        "unmapped.xml": domain({0: 0, 1: 1}, [hostdev("0000:c1:00.0", "ua-odd"), *free]),
        "many.xml": domain({0: 0}, [hostdev(bdf, f"ua-d{n}") for n, bdf in enumerate(many)]),
        "pair.xml": domain({0: 0}, [hostdev(bdf, f"ua-d{n}") for n, bdf in enumerate(pair)]),
        "big.xml": domain({0: 0}, [hostdev("0000:45:00.0", "ua-big")]),
        "broken.xml": "<domain>",
        "host.json": record(functions, **details),
        "other.json": record({near: 1, far: 0}),
        "restricted.yaml": "policy: restricted\n",
        "vmi.yaml": yaml.safe_dump(vmi(policy="restricted")),
        "kubelet.yaml": "cpuManagerPolicy: none\n",
        "image.yaml": "image: not an image\n",
    }
    (folder / "kubelet.conf.d").mkdir()
    kind = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
    files["kubelet.conf.d/10.conf"] = f"{kind}cpuManagerPolicy: static\n"
    for name, content in files.items():
        (folder / name).write_text(content)
    for name, nodes in (("one", (near, far)), ("two", (far, near))):
        tree = NodeTree(folder / name)
        for number, bdf in enumerate(nodes):
            tree.node(number, f"{8 * number}-{8 * number + 7}", 1, {}, "10 21" if number == 0 else "21 10")
            ids = {"class": "0x030200", "vendor": "0x10de", "device": "0x20b0", "numa_node": str(number)}
            tree.function(f"pci{bdf[:7]}/{bdf}", ids, driver="vfio-pci", group=number)
    done = subprocess.run([sidecar.PROGRAM, "transform", *on("free")], cwd=folder, capture_output=True, check=True)
    (folder / "placed.xml").write_bytes(done.stdout)
    certificate, key = Authority(folder).pair()
    (folder / "tls.crt").write_bytes(certificate)
    (folder / "tls.key").write_bytes(key)
    return folder


def vmi(**options: str) -> dict[str, Any]:
    annotations = {PREFIX + name: value for name, value in options.items()}
    return {"kind": "VirtualMachineInstance", "metadata": {"annotations": annotations}, "spec": {}}


class Done(NamedTuple):
    """All that a run leaves behind: status, what it wrote where, and the files that it made."""

    status: int
    out: bytes
    err: bytes
    files: dict[str, bytes]


@functools.cache
def run(place: Path, command: str, arguments: Arguments) -> Done:
    before = {path.name for path in place.iterdir()}
    done = subprocess.run(
        [str(sidecar.PROGRAM), command, *arguments],
        cwd=place,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )
    made = {path: path.read_bytes() for path in place.iterdir() if path.name not in before}
    for path in made:
        path.unlink()
    return Done(done.returncode, done.stdout, done.stderr, {path.name: data for path, data in made.items()})


# --- what makes a difference -----------------------------------------------------------------------------------


def on(name: str, *arguments: str) -> tuple[str, ...]:
    return (f"{name}.xml", "--host", "host.json", *arguments)


OPTIONS: dict[str, Case] = {
    "--debug": (("broken.xml",), ("broken.xml", "--debug")),
    "--vmi": (on("unmapped"), on("unmapped", "--vmi", "vmi.yaml")),
    "--host": (("free.xml", "--host", "host.json"), ("free.xml", "--host", "other.json")),
    "--sysfs": (("free.xml", "--sysfs", "one/sys"), ("free.xml", "--sysfs", "two/sys")),
    "--config": (on("unmapped"), on("unmapped", "--config", "restricted.yaml")),
    "--policy": (on("unmapped"), on("unmapped", "--policy", "restricted")),
    "--group-by": (on("many"), on("many", "--group-by", "root-complex")),
    "--unmapped": (on("unmapped"), on("unmapped", "--unmapped", "nearest")),
    "--addressed": (on("at-0"), on("at-0", "--addressed", "move")),
    "--mmio": (on("big"), on("big", "--mmio", "off")),
    "-o": (on("free"), on("free", "-o", "result")),
    "--report": (on("free"), on("free", "--report", "report")),
}
HOST: dict[str, Case] = {
    "--host": (("--host", "host.json"), ("--host", "other.json")),
    "--sysfs": (("--sysfs", "one/sys"), ("--sysfs", "two/sys")),
}
ONLY_WRITTEN: dict[str, Case] = {
    "--distances": (on("placed"), on("placed", "--distances", "host")),
    "--gpudirect-clique": (on("pair"), on("pair", "--gpudirect-clique", "by-switch")),
}
QUIET: dict[str, Case] = {"-q": (on("unmapped"), on("unmapped", "-q"))}
CERTS = ("--service-account", ".", "--api", "https://127.0.0.1:9", "--namespace", "a")
WEBHOOK = ("--tls-cert", "host.json", "--tls-key", "host.json", "--listen", "127.0.0.1:0", "--image", "a")
CASES: dict[str, dict[str, Case]] = {
    "transform": {**OPTIONS, **ONLY_WRITTEN, **QUIET, "--format": (on("free"), on("free", "--format", "diff"))},
    "explain": {
        **OPTIONS,
        **ONLY_WRITTEN,
        "--json": (on("free"), on("free", "--json")),
        "--svg": (on("free"), on("free", "--svg", "picture")),
        "--ascii": (on("free"), on("free", "--ascii")),
    },
    "check": {**OPTIONS, "--json": (on("free"), on("free", "--json"))},
    "nccl-topo": {**OPTIONS, **QUIET},
    "doctor": {
        **HOST,
        "--debug": (("--host", "broken.xml"), ("--host", "broken.xml", "--debug")),
        "--kubelet-config": (("--host", "host.json"), ("--host", "host.json", "--kubelet-config", "kubelet.yaml")),
        "--kubelet-config-dir": (
            ("--host", "host.json", "--kubelet-config", "kubelet.yaml"),
            ("--host", "host.json", "--kubelet-config", "kubelet.yaml", "--kubelet-config-dir", "kubelet.conf.d"),
        ),
        "--json": (("--host", "host.json"), ("--host", "host.json", "--json")),
        "-q": (("--host", "host.json"), ("--host", "host.json", "-q")),
        "-o": (("--host", "host.json"), ("--host", "host.json", "-o", "result")),
    },
    "snapshot": {
        "--sysfs": HOST["--sysfs"],
        "-o": (("--sysfs", "one/sys"), ("--sysfs", "one/sys", "-o", "result")),
        "--debug": (("-o", "one"), ("-o", "one", "--debug")),
    },
    # no cluster here: a value that is refused is one that is read; test_certs.py has what they do
    "certs": {
        "--debug": (CERTS, (*CERTS, "--debug")),
        "--namespace": (CERTS, (*CERTS, "--namespace", "a.b")),
        "--secret": (CERTS, (*CERTS, "--secret", "a b")),
        "--service": (CERTS, (*CERTS, "--service", "1st")),
        "--webhook": (CERTS, (*CERTS, "--webhook", "a?b")),
        "--days": (CERTS, (*CERTS, "--days", "0")),
        "--renew-before": (CERTS, (*CERTS, "--renew-before", "91")),
        "--api": (CERTS, (*CERTS, "--api", "http://x")),
        "--service-account": (CERTS, (*CERTS, "--service-account", "nowhere")),
    },
    "webhook": {
        "--debug": (WEBHOOK, (*WEBHOOK, "--debug")),
        "--listen": (WEBHOOK, (*WEBHOOK, "--listen", "nowhere")),
        "--tls-cert": (WEBHOOK, (*WEBHOOK, "--tls-cert", "nowhere")),
        "--tls-key": ((*WEBHOOK, "--tls-cert", "tls.crt"), (*WEBHOOK, "--tls-cert", "tls.crt", "--tls-key", "nowhere")),
        "--image": (WEBHOOK, (*WEBHOOK, "--image", "not an image")),
        "--image-pull-policy": (WEBHOOK, (*WEBHOOK, "--image-pull-policy", "Often")),
        "--config": (WEBHOOK[:-2], (*WEBHOOK[:-2], "--config", "image.yaml")),
    },
    "web": {
        "--listen": (("--listen", "nowhere"), ("--listen", "127.0.0.1:99999")),
        "--debug": (("--listen", "nowhere"), ("--listen", "nowhere", "--debug")),
    },
}
HOOK: dict[str, tuple[str, Arguments]] = {
    "--policy": ("unmapped", ("--policy", "restricted")),
    "--group-by": ("pair", ("--group-by", "switch")),
    "--unmapped": ("unmapped", ("--unmapped", "nearest")),
    "--addressed": ("at-0", ("--addressed", "move")),
    "--mmio": ("big", ("--mmio", "off")),
    "--distances": ("free", ("--distances", "host")),
    "--gpudirect-clique": ("pair", ("--gpudirect-clique", "by-switch")),
    "--config": ("unmapped", ("--config", "restricted.yaml")),
    "--log-format": ("free", ("--log-format", "text")),
    "--log-level": ("free", ("--log-level", "debug")),
    "--version": ("free", ("--version", "v1alpha2")),
    "--host": ("free", ("--host", "other.json")),
    "--sysfs": ("free", ("--sysfs", "two/sys")),
}
ELSEWHERE = {"hook": {"--socket", "--plugin-socket", "--debug"}}
"""`sidecar` gives them to every hook of the tests; ``--debug`` shows where a hook failed to start, as everywhere."""


def listed(place: Path, command: str) -> set[str]:
    """The options in the help's own list; the shorter name where an option has two."""
    text = run(place, command, ("--help",)).out.decode()
    return set(re.findall(r"^  (--?[a-z][a-z-]*)", text, re.MULTILINE)) - {"-h"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_lists_nothing_else(place: Path, command: str) -> None:
    known = set(HOOK) if command == "hook" else set(CASES[command])
    assert listed(place, command) == known | ELSEWHERE.get(command, set())


def test_these_are_all_commands(place: Path) -> None:
    text = run(place, "--help", ()).out.decode()
    assert set(re.findall(r"^    ([a-z][a-z-]+)(?: |$)", text, re.MULTILINE)) == set(COMMANDS)


@pytest.mark.parametrize(
    ("command", "option"), [(command, option) for command, cases in CASES.items() for option in cases]
)
def test_it_makes_a_difference(place: Path, command: str, option: str) -> None:
    without, with_it = CASES[command][option]
    assert option in with_it
    first, second = run(place, command, without), run(place, command, with_it)
    assert first != second
    assert b"unrecognized" not in second.err


@pytest.mark.parametrize("option", HOOK)
def test_it_makes_a_difference_to_the_hook(place: Path, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    name, flags = HOOK[option]
    xml = (place / f"{name}.xml").read_text()

    def answers(*arguments: str) -> tuple[object, ...]:
        host = () if {"--host", "--sysfs"} & set(arguments) else ("--host", "host.json")
        with sidecar.running(*host, *arguments, check_log=False) as running, Client(running.socket) as client:
            versions = sorted(client.info().versions)
            try:
                said: object = client.define(xml, sidecar.vmi({}), versions[-1])
            except grpc.RpcError as error:
                said = (error.code(), error.details())
            (line,) = running.text().splitlines()[-1:]
        with contextlib.suppress(ValueError):
            known = json.loads(line)
            return versions, said, sorted(known), known.get("findings")
        return versions, said, "text"

    assert answers() != answers(*flags)


@pytest.mark.parametrize("command", ["check", "nccl-topo"])
@pytest.mark.parametrize(("option", "value"), [("--distances", "host"), ("--gpudirect-clique", "by-switch")])
def test_what_only_a_written_domain_has_is_refused(place: Path, command: str, option: str, value: str) -> None:
    done = run(place, command, on("free", option, value))
    lines = done.err.decode().splitlines()
    assert (done.status, done.out, len(lines)) == (2, b"", 2)
    assert lines[0].startswith(f"pcinuma: error: {option} has no effect here: ")
    assert lines[1] == f"hint: see pcinuma {command} --help"


@pytest.mark.parametrize("command", ["check", "nccl-topo"])
def test_an_annotation_of_the_vm_is_no_error_there(place: Path, command: str) -> None:
    """It is for the hook, and the VM is what is looked at."""
    options = yaml.safe_dump(vmi(**{"distances": "host", "gpudirect-clique": "by-switch"}))
    (place / "for-the-hook.yaml").write_text(options)
    assert run(place, command, on("free", "--vmi", "for-the-hook.yaml")).status == 0


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("doctor", ("--host", "host.json", "--json", "-q")), ("explain", on("free", "--json", "--ascii"))],
)
def test_two_options_of_which_one_would_do_nothing(place: Path, command: str, arguments: Arguments) -> None:
    done = run(place, command, arguments)
    assert (done.status, done.out) == (2, b"")
    assert b"not allowed with" in done.err


def test_readme_lists_the_options() -> None:
    """The README's table of options is the help of transform, which has them all."""
    readme = (ROOT / "README.md").read_text()
    table = set(re.findall(r"^\| `(--[a-z-]+)` \|", readme, re.MULTILINE))
    inputs = {"--debug", "--vmi", "--host", "--sysfs", "--config", "-o", "--report"}
    assert table == ({*OPTIONS, *ONLY_WRITTEN}) - inputs
