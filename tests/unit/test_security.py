"""What SECURITY.md and docs/dependencies.md promise of the code and of what it runs with."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import pcinuma
from tests.conftest import ROOT

SOURCES = sorted((ROOT / "hook" / "pcinuma").rglob("*.py"))
RUNNING_THINGS = {
    "subprocess",
    "multiprocessing",
    "pty",
    "commands",
    "popen2",
    "ctypes",
    "pickle",
    "marshal",
    "shelve",
    "code",
}
NO_CALLS = {"eval", "exec", "compile", "__import__", "input", "breakpoint"}
NO_OS = re.compile(r"(system|popen|exec[lv]\w*|spawn\w*|posix_spawn\w*|fork\w*)\Z")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wrong_in(tree: ast.AST) -> Iterator[str]:
    """Whatever runs a program, a shell or code that is made at run time."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"line {node.lineno}: {name}" for name in names if name.partition(".")[0] in RUNNING_THINGS)
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in NO_CALLS:
                yield f"line {node.lineno}: {function.id}"
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                named = f"{function.value.id}.{function.attr}"
                if (function.value.id == "os" and NO_OS.match(function.attr)) or named in (
                    "yaml.load",
                    "yaml.unsafe_load",
                ):
                    yield f"line {node.lineno}: {named}"
            yield from (f"line {node.lineno}: {word.arg}" for word in node.keywords if word.arg == "shell")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_no_program_no_shell_no_eval(source: Path) -> None:
    assert list(wrong_in(ast.parse(source.read_text()))) == []


@pytest.mark.parametrize(
    "text",
    (
        "import subprocess", "from subprocess import run", "import os\nos.system('x')", "os.execv('a', [])", "eval('1')",
        "exec('1')", "__import__('os')", "run('x', shell=True)", "import pickle", "yaml.load(x)",
    ),
)  # fmt: skip
def test_that_would_be_seen(text: str) -> None:
    assert list(wrong_in(ast.parse(text))) != []


def test_a_linter_is_silenced_with_a_reason_alone() -> None:
    """ruff's S rules are bandit's; one that is off in the program is off in one line, which says why."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "S" in settings["select"]
    assert [rule for rule in settings["ignore"] if rule.startswith("S1")] == ["S101"]
    for place, rules in settings["per-file-ignores"].items():
        assert not place.startswith("hook/") or not [rule for rule in rules if rule.startswith("S")], place
    for source in SOURCES:
        if "_pb2" not in source.name:
            for line in source.read_text().splitlines():
                if re.search(r"noqa(?!: [A-Z])|noqa: .*\b(S[0-9]|BLE)", line):
                    assert re.search(r"# noqa: [A-Z]+[0-9]+ - \w+", line), f"{source.name}: {line.strip()}"


SECRETS = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\n[A-Za-z0-9+/=\n]{64}|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36}|eyJhbGciOi[\w-]{20}"
)


def test_no_secret_is_kept() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode == 0:
        names = [ROOT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    else:  # an unpacked archive
        names = [
            path for folder in ("hook", "tests", "fuzz", "examples", "docs") for path in (ROOT / folder).rglob("*")
        ]
    files = [path for path in names if path.is_file()]
    assert len(files) > 100
    assert [path.name for path in files if SECRETS.search(path.read_bytes())] == []
    assert SECRETS.search(b"-----BEGIN PRIVATE KEY-----\n" + b"A" * 64)


# --- what it runs with -----------------------------------------------------------------------------------------


def direct() -> set[str]:
    return {normal(line) for line in (ROOT / "requirements" / "run.in").read_text().split()}


def locked() -> set[str]:
    text = (ROOT / "requirements" / "run.txt").read_text()
    return {normal(name) for name in re.findall(r"^([A-Za-z0-9._-]+)==", text, re.M)}


def test_every_dependency_is_justified() -> None:
    first, _, second = (ROOT / "docs" / "dependencies.md").read_text().partition("Those bring along")
    rows = [line.strip("|").split("|") for line in first.splitlines() if line.startswith("| ")][1:]
    assert {normal(row[0].strip()) for row in rows} == direct()
    assert all(len(cell.split()) >= 2 for row in rows for cell in row[1:]), "a reason is a sentence"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {normal(re.split(r"[<>=~!]", line)[0]) for line in project} == direct()
    rows = [line.strip("|").split("|") for line in second.splitlines() if line.startswith("| ")][1:]
    brought = {normal(name.strip()) for row in rows for name in row[0].split(",")}
    assert brought == locked() - direct()
    assert {normal(row[1].strip()) for row in rows} <= direct()


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_every_licence_is_allowed() -> None:
    done = run("scripts/licences.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    listed = {normal(line.split()[0]) for line in done.stdout.splitlines()[1:] if line.strip()}
    assert listed == locked()


def test_a_licence_that_is_not_allowed_is_told(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("certifi==1 \\\n")  # MPL-2.0
    done = run("scripts/licences.sh", tmp_path / "requirements.txt")
    assert done.returncode != 0
    assert "certifi" in done.stderr


def test_the_bill_of_materials_is_what_is_locked(tmp_path: Path) -> None:
    out = tmp_path / "bill.json"
    done = run(sys.executable, "scripts/sbom.py", out)
    assert done.returncode == 0, done.stderr
    bill = json.loads(out.read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    root = bill["metadata"]["component"]
    assert (root["name"], root["version"]) == ("pcinuma", pcinuma.__version__)
    assert [part["name"] for part in bill["components"] if not part.get("licenses")] == []
    text = (ROOT / "requirements" / "run.txt").read_text()
    versions = {normal(name): version for name, version in re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.M)}
    assert {normal(part["name"]): part["version"] for part in bill["components"]} == versions
    assert all(part["purl"].startswith("pkg:pypi/") for part in bill["components"])
    (root,) = (entry for entry in bill["dependencies"] if entry["ref"] == root["bom-ref"])
    names = {part["bom-ref"]: normal(part["name"]) for part in bill["components"]}
    assert {names[ref] for ref in root["dependsOn"]} == direct()
    assert str(ROOT) not in out.read_text()


def test_an_audit_that_could_not_look_is_none() -> None:
    done = run(sys.executable, "scripts/audit.py", "run", HTTPS_PROXY="http://127.0.0.1:9", NO_PROXY="", no_proxy="")
    assert done.returncode == 2
    assert "error: run.txt: the vulnerability database cannot be reached: nothing was checked\n" in done.stderr
    assert "looked up" not in done.stdout
