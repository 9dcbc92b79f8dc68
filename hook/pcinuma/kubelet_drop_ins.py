"""The files of the kubelet's ``--config-dir``: which it reads, in which order, and what they make of its configuration.

Rules: Kubernetes cmd/kubelet/app/server.go (mergeKubeletConfigurations), kubeletconfig/configfiles (an empty file is an
error) and util/codec (strict for a drop-in file, which the main file is not); Go's path/filepath WalkDir; RFC 7396.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pcinuma.errors import BadInput
from pcinuma.kubelet_config import Config, Loaded, checked, ignored_documents
from pcinuma.kubelet_fields import API_VERSION, FIELDS, KIND
from pcinuma.kubelet_memory import DEFAULT_EVICTION
from pcinuma.kubelet_text import parse_text
from pcinuma.model import Finding

SUFFIX = ".conf"
_FORGOTTEN = (".yaml", ".yml", ".json")
_EVICTION = {
    "memory.available": DEFAULT_EVICTION,
    "nodefs.available": "10%",
    "nodefs.inodesFree": "5%",
    "imagefs.available": "15%",
    "imagefs.inodesFree": "5%",
}
"""evictionHard where the main file has none (kubelet's DefaultEvictionHard on Linux); drop-in files go over it."""


@dataclass(frozen=True, slots=True)
class DropIns:
    """``files`` are the paths that the kubelet reads, in its order; ``others`` those that it passes over; all of it
    where the directory ``is_link``."""

    directory: str
    files: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    is_link: bool = False


def find(directory: str) -> DropIns:
    """The files of a drop-in directory, as the kubelet walks through it. Raises BadInput where it cannot be read.

    Names are sorted byte by byte, a folder stands where its name does, links to folders are not followed.
    """
    if os.path.islink(directory):
        return DropIns(directory, is_link=True)
    files: list[str] = []
    others: list[str] = []
    stack = [directory]
    try:
        while stack:
            path = stack.pop()
            if os.path.isdir(path) and not (path != directory and os.path.islink(path)):
                names = sorted(os.listdir(path), key=os.fsencode, reverse=True)
                stack += [os.path.join(path, name) for name in names]
            elif path == directory:
                os.stat(path)
                raise BadInput("not a directory", where=directory)
            else:
                (files if path.endswith(SUFFIX) else others).append(path)
    except OSError as error:
        raise BadInput(f"cannot be read: {error.strerror or error}", where=error.filename or directory) from None
    return DropIns(directory, tuple(files), tuple(others))


def merged(base: Loaded | None, drop_ins: DropIns, contents: Iterable[bytes]) -> Loaded:
    """The configuration with the ``contents`` of the drop-in files laid over it; ``base`` is the main file's, None
    where the kubelet has none. Raises BadInput for a file that is no part of a KubeletConfiguration."""
    config: dict[str, Any] = {"apiVersion": API_VERSION, "kind": KIND} if base is None else dict(base.config)
    findings = [*(base.findings if base is not None else ()), *_passed_over(drop_ins)]
    for path, data in zip(drop_ins.files, contents, strict=True):
        text = parse_text(data, path)
        findings += [_fatal(path, f"has {name[:80]} twice, which only the main file may") for name in text.twice]
        findings += ignored_documents(text, path)
        if text.content is None:
            findings.append(_fatal(path, "is empty, or only its first YAML document is"))
            continue
        part = checked(text.content, path)
        if (part.get("apiVersion"), part.get("kind")) != (API_VERSION, KIND):
            findings.append(_fatal(path, "has not this apiVersion and kind, which every file needs"))
        findings += _misspelt(path, part)
        known = {name: value for name, value in part.items() if name in FIELDS and name not in ("apiVersion", "kind")}
        if "evictionHard" in known and config.get("evictionHard") is None:
            config["evictionHard"] = _EVICTION
        config = _patched(config, known)
    return Loaded(checked(config, f"{drop_ins.directory}, merged"), tuple(findings))


def _patched(target: Any, patch: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7396: mappings are merged, null takes away, anything else, lists too, takes the place of what was."""
    found = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = _patched(found.get(name), value) if isinstance(value, Mapping) else value
    return found


def _passed_over(drop_ins: DropIns) -> Iterator[Finding]:
    if drop_ins.is_link:
        yield Finding(
            "kubelet-drop-in",
            "warning",
            f"{drop_ins.directory} is a symbolic link: the kubelet does not follow it, and reads no file there",
            None,
            "give the kubelet the directory itself, or a / after its name",
        )
    for path in drop_ins.others:
        if path.endswith(_FORGOTTEN):
            yield Finding(
                "kubelet-drop-in",
                "warning",
                f"{path} does not end in {SUFFIX}: the kubelet passes it over without a word",
                None,
                f"rename it to {os.path.splitext(os.path.basename(path))[0]}{SUFFIX}",
            )


def _fatal(path: str, what: str) -> Finding:
    return Finding(
        "kubelet-drop-in",
        "error",
        f"{path} {what}: the kubelet does not start",
        None,
        f"each file of --config-dir begins with apiVersion: {API_VERSION} and kind: {KIND}, and has a key once",
    )


def _misspelt(path: str, part: Config) -> Iterator[Finding]:
    lower = {field.lower(): field for field in FIELDS}
    for name in part:
        if name in FIELDS:
            continue
        meant = lower.get(name.lower())
        what = "the kubelet ignores it without a word"
        if meant is not None:  # Go's decoder tells no capitals apart where the field is not there as well
            what = f"the kubelet takes it for {meant} only where nothing else sets that"
        hint = f"{meant} is one" if meant is not None else "correct it, or take it away"
        yield Finding("kubelet-field", "warning", f"{path}: {name[:80]} is no field of a {KIND}: {what}", None, hint)
