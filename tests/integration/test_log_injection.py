"""Names that a VM's owner or a file decides: none forges a line or moves a cursor on what people and programs read.

The sidecar's log has tests of its own (test_hook_log.py); here are the command line's output and the webhook's.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.sidecar import PROGRAM
from tests.support.webhook import Webhook, review_of, running, vmi

EXAMPLE = ROOT / "examples" / "two-sockets"
OURS = "pcinuma.vm.kubevirt.io/"
HOSTILE = (
    "x\npcinuma: error: forged",
    "x\r\nhint: forged",
    "x\x1b[2J\x1b]0;forged\x07",
    "x\x9b31m\x85",
    "x\u202egnp.exe\u2066",
    "x\u2028forged\u2029",
    "x\x00\x7f\x08",
)
FIRST = ("pcinuma: ", "hint: ")


def run(*arguments: str | Path, domain: bytes | None = None) -> tuple[int, list[str], list[str]]:
    """Status, and the lines of both outputs, which only a line feed ends and which hold nothing that cannot be seen."""
    given = domain if domain is not None else (EXAMPLE / "domain.xml").read_bytes()
    done = subprocess.run([PROGRAM, *arguments], input=given, capture_output=True, timeout=30, check=False)
    outputs = [text.decode().removesuffix("\n").split("\n") for text in (done.stdout, done.stderr)]
    for line in (*outputs[0], *outputs[1]):
        assert line.isprintable(), ascii(line)
    return done.returncode, *outputs  # type: ignore[return-value]


def references(text: str) -> str:
    """The text in an XML attribute; what XML has no character for is left out."""
    return "".join(f"&#{ord(c)};" for c in text if c not in "\x00\x07\x08\x1b")


def must_be_ours(lines: list[str]) -> None:
    assert lines != [""]
    assert all(line.startswith(FIRST) for line in lines), lines


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_names_in_a_domain(text: str, tmp_path: Path) -> None:
    domain = (EXAMPLE / "domain.xml").read_text()
    assert "ua-gpu-gpu0" in domain
    hostile = domain.replace("ua-gpu-gpu0", references(f"ua-{text}")).replace("<name>", f"<name>{references(text)}")
    unmapped = hostile.encode()
    bare = tmp_path / "bare.json"  # no function is known there
    bare.write_text(json.dumps({**json.loads((EXAMPLE / "host.json").read_text()), "functions": []}))
    host = ("--host", EXAMPLE / "host.json")
    for command in (("explain",), ("explain", "--ascii"), ("check",)):
        run(*command, *host, domain=hostile.encode())
        run(*command, "--host", bare, domain=unmapped)
    status, out, _ = run("explain", "--json", *host, domain=hostile.encode())
    assert status == 0
    json.loads("\n".join(out))
    status, _, err = run("transform", "--policy", "restricted", "-o", "/dev/null", "--host", bare, domain=unmapped)
    assert status == 1
    must_be_ours(err)


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_names_in_files(text: str, tmp_path: Path) -> None:
    def written(content: object) -> Path:
        (tmp_path / "file").write_text(json.dumps(content))
        return tmp_path / "file"

    object_of = {"kind": "VirtualMachineInstance", "metadata": {"annotations": {OURS + text: "x"}}, "spec": {}}
    host = json.loads((EXAMPLE / "host.json").read_text())
    for flag, content in (
        ("--vmi", object_of),
        ("--vmi", {**object_of, "metadata": {"annotations": {OURS + "policy": text}}}),
        ("--vmi", {"kind": text}),
        ("--config", {text: "x"}),
        ("--config", {"policy": text}),
        ("--host", {**host, text: 1}),
        ("--host", {**host, "nodes": [{"id": text}]}),
        ("--host", {**host, "functions": [{"address": text}]}),
    ):
        status, _, err = run("transform", flag, written(content))
        assert status == 2, (flag, content)
        must_be_ours(err)
    for config in ({"kind": text}, {"cpuManagerPolicy": text, text: text, "reservedSystemCPUs": text}):
        run("doctor", "--host", EXAMPLE / "host.json", "--kubelet-config", written(config))
    host["functions"] = [
        {**function, "driver": text, "nodeProblem": text, "node": None} for function in host["functions"]
    ]
    for command in ("doctor", "explain", "check"):
        run(command, "--host", written(host))


@pytest.mark.parametrize("text", [text for text in HOSTILE if "\0" not in text], ids=ascii)
def test_names_on_the_command_line(text: str) -> None:
    for arguments in (("transform", text), ("transform", "--policy", text), (text,), ("transform", "--host", text),
                      ("webhook", "--listen", text, "--tls-cert", text, "--tls-key", text, "--image", "a"),
                      ("hook", "--version", text)):  # fmt: skip
        status, _, err = run(*arguments)
        assert status == 2
        must_be_ours(err)


@pytest.fixture(scope="module")
def webhook() -> Iterator[Webhook]:
    with running() as made:
        yield made


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_names_in_a_review(webhook: Webhook, text: str) -> None:
    before = len(webhook.log.read_bytes())
    opted = {OURS + "enabled": "true"}
    for review in (
        review_of(vmi({**opted, OURS + text: "x"}), name=text, namespace=text, uid=text),
        review_of(vmi({**opted, "hooks.kubevirt.io/hookSidecars": text}), name=text),
        review_of({**vmi(opted), "metadata": {"name": text, "namespace": text, "annotations": opted}, "spec": {"domain": {"machine": {"type": text}}}}),
    ):  # fmt: skip
        response = webhook.mutate(review)
        shown = [response.get("status", {}).get("message", ""), *response.get("warnings", ())]
        assert all(line.isprintable() for line in shown), shown
    lines = webhook.log.read_bytes()[before:].removesuffix(b"\n").split(b"\n")
    assert len(lines) == 3
    for line in lines:
        assert line.decode("ascii").isprintable()
        assert json.loads(line)["event"] == "admission"
