"""What the documents point at is there: links, commands and their flags, annotations, finding codes."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pcinuma import cli, options
from pcinuma.arguments import parser_of
from tests.conftest import ROOT
from tests.support import markdown
from tests.support.manifests import KUBECTL

GIT = shutil.which("git")
TRACKED = (
    subprocess.run([GIT, "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if GIT
    else ""
)
DOCUMENTS = sorted(
    {
        *(ROOT / name for name in TRACKED.split()),
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("examples/**/*.md"),
    }
)
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
FOR_USERS = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_links_lead_somewhere(document: Path) -> None:
    for link in markdown.links(document.read_text()):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in markdown.anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_our_commands_are_taken_by_the_parser(document: Path) -> None:
    for words in markdown.commands(document.read_text()):
        parser_of(cli.COMMANDS).parse_args(words)


@functools.cache
def kubectl_flags(command: tuple[str, ...]) -> str:
    """What kubectl's help says of a command, and of the flags that all commands take."""
    done = [
        subprocess.run([KUBECTL, *words], capture_output=True, text=True, check=True)
        for words in ((*command, "--help"), ("options",))
    ]
    return "".join(one.stdout for one in done)


def kubectl_calls() -> list[tuple[str, list[str]]]:
    """Every kubectl command, in code blocks and between backticks in tables."""
    found = []
    for document, name in zip(DOCUMENTS, IDS, strict=True):
        text = document.read_text()
        inline = "\n\n".join(f"    {code}" for code in re.findall(r"`(kubectl [^`]+)`", text))
        found += [(name, words) for words in markdown.commands(f"{text}\n\n{inline}\n", "kubectl")]
    return found


def test_kubectls_commands_and_flags_exist() -> None:
    calls = kubectl_calls()
    assert len(calls) > 20
    for name, words in calls:
        verb = tuple(words[:2]) if words[0] in ("rollout", "create") and words[1] in ("status", "job") else (words[0],)
        known = kubectl_flags(verb)
        for word in words[: words.index("--") if "--" in words else len(words)]:
            if not word.startswith("-"):
                continue
            assert takes(known, word), f"{name}: {' '.join(words)}: {word}"


def takes(known: str, flag: str) -> bool:
    """Whether the help text has the flag; a value after ``=`` left aside."""
    return re.search(rf"(?<![\w-]){re.escape(flag.split('=')[0])}[ ,=:]", known) is not None


def test_a_flag_that_kubectl_lacks_is_seen() -> None:
    known = kubectl_flags(("logs",))
    assert takes(known, "--container=x")
    assert takes(known, "-n")
    assert not takes(known, "--contain")
    assert not takes(known, "--to-file=x")


def test_what_kubectl_is_given_is_there() -> None:
    for name, words in kubectl_calls():
        for flag, value in itertools.pairwise(words):
            if flag in ("-k", "kustomize"):
                assert (ROOT / value / "kustomization.yaml").exists(), f"{name}: {value}"
            if flag == "-p":
                json.loads(value)


def test_yaml_blocks_are_yaml() -> None:
    for document in FOR_USERS:
        for block in re.findall(r"```yaml\n(.*?)```", document.read_text(), re.DOTALL):
            assert yaml.safe_load(block), document


def test_annotations_are_ours() -> None:
    known = {**options.CHOICES, **options.ANNOTATIONS_ONLY}
    for document in FOR_USERS:
        for name, value in re.findall(
            r"(?<![\w.])pcinuma\.vm\.kubevirt\.io/([\w-]+)(?:: \"?([\w-]+))?", document.read_text()
        ):
            assert name in known, f"{document}: {name}"
            assert not value or value in known[name], f"{document}: {name}: {value}"


def test_finding_codes_are_documented() -> None:
    documented = set(re.findall(r"^\| `([a-z-]+)`", (ROOT / "docs/findings.md").read_text(), re.MULTILINE))
    used = set(re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE))
    assert len(used) > 4
    assert used <= documented


def test_every_document_is_reached_from_the_readme() -> None:
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        document = todo.pop()
        if document in reached:
            continue
        reached.add(document)
        paths = (
            link.partition("#")[0] for link in markdown.links(document.read_text()) if not re.match(r"https?:", link)
        )
        todo += [(document.parent / path).resolve() for path in paths if path.endswith(".md")]
    assert {path for path in DOCUMENTS if path.parent == ROOT / "docs"} <= reached


# --- the checks themselves can fail ----------------------------------------------------------------------------


def test_commands_are_found() -> None:
    text = (
        "text `pcinuma no` text\n\n    kubectl exec x -- virsh dumpxml y | pcinuma transform --addressed move > z\n\n"
        "```\n$ .venv/bin/pcinuma check a.xml \\\n  --host h.json\n  bus 0: it's output\n```\n"
    )
    assert markdown.commands(text) == [["transform", "--addressed", "move"], ["check", "a.xml", "--host", "h.json"]]
    assert markdown.links("[a](b.md#c) and [d](https://e)") == ["b.md#c", "https://e"]


def test_anchors_are_githubs() -> None:
    assert "2-switch-kubevirts-gate-on" in markdown.anchors(ROOT / "docs/install.md")
