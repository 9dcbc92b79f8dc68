"""The file of a result that the debug page gives and opens again: one JSON object (``schemas/result.schema.json``).

It holds what was shown as data, never as something to be run or put into a page as it is: the report, the picture's
trees, the diff and the NCCL file. The domain itself is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pcinuma.errors import BadInput, one_line, why_not_json
from pcinuma.model import Finding, PciController
from pcinuma.picture import Box, Leaf, Panel, Scene, Shown
from pcinuma.schema import validate

KIND = "pcinuma-result"
VERSION = 1
MAX_BYTES = 8 * 1024 * 1024
MAX_DEVICES = 1000
"""Devices of a picture and rows of a table that a browser still shows; a guest has a few hundred buses at most."""
MAX_DIFF_LINES = 50_000
_MAX_FINDINGS = 5000
_MAX_CELLS = 1024
_MAX_BOXES = 10_000
_MAX_DEPTH = 24
"""Of boxes in each other: a host's bridges are at most that deep on any machine."""

_HINT = "give the result file of this page, or the report of 'pcinuma explain --json'"


@dataclass(frozen=True, slots=True)
class Result:
    """What is shown of a transform. ``report`` is a JSON object as ``schemas/report.schema.json`` describes it;
    ``scene`` is None when only a report is known; ``nccl`` the NCCL file, ``nccl_problem`` why there is none, and
    ``nccl_findings`` what was found in making it, as the report has findings."""

    report: dict[str, Any]
    scene: Scene | None = None
    diff: str = ""
    nccl: str | None = None
    nccl_problem: str | None = None
    nccl_findings: tuple[dict[str, Any], ...] = ()


def dump(result: Result) -> dict[str, Any]:
    """The result as a JSON object. It must have a scene."""
    if result.scene is None:
        raise ValueError("a result without its picture is no result file")
    return {
        "kind": KIND,
        "version": VERSION,
        "report": result.report,
        "picture": _dump_scene(result.scene),
        "diff": result.diff,
        "nccl": {"file": result.nccl, "problem": result.nccl_problem, "findings": list(result.nccl_findings)},
    }


def load(data: bytes, where: str) -> Result:
    """The result in ``data``, or the report. Raises BadInput for anything else."""
    if len(data) > MAX_BYTES:
        raise BadInput(f"larger than {MAX_BYTES // 2**20} MiB", where=where)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {why_not_json(error)}", where=where, hint=_HINT) from None
    try:
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, RecursionError):
        raise BadInput("it holds text that is none, or is nested too deeply", where=where, hint=_HINT) from None
    if not isinstance(content, dict):
        raise BadInput("not a result", where=where, hint=_HINT)
    _bound(content, where)
    if "kind" not in content and {"outcome", "devices"} <= content.keys():
        validate(content, "report", where)
        return Result(content)
    if content.get("kind") != KIND:
        raise BadInput(f'not a result: "kind" is not "{KIND}"', where=where, hint=_HINT)
    if content.get("version") != VERSION or isinstance(content["version"], bool):
        shown = repr(content.get("version"))[:80]
        raise BadInput(f"the result has version {shown}, this pcinuma reads version {VERSION}", where=where)
    validate(content, "result", where)
    validate(content["report"], "report", where)
    report, nccl = content["report"], content["nccl"]
    return Result(
        report,
        _scene(_clean(content["picture"]), report, where),
        content["diff"],
        nccl["file"],
        nccl["problem"],
        tuple(nccl["findings"]),
    )


# --- the picture -----------------------------------------------------------------------------------------------


def _dump_scene(scene: Scene) -> dict[str, Any]:
    return {
        "headline": scene.headline,
        "nodes": list(scene.nodes),
        "devices": [
            {
                "number": device.number,
                "label": device.label,
                "alias": device.alias,
                "hostNode": device.host_node,
                "path": list(device.path),
            }
            for device in (leaf.device for leaf in scene.host.leaves)
        ],
        "host": _dump_panel(scene.host),
        "before": _dump_panel(scene.before),
        "after": _dump_panel(scene.after),
    }


def _dump_panel(panel: Panel) -> dict[str, Any]:
    return {"title": panel.title, "boxes": [_dump_part(box) for box in panel.boxes]}


def _dump_part(part: Box | Leaf) -> dict[str, Any]:
    if isinstance(part, Box):
        return {
            "kind": part.kind,
            "title": part.title,
            "detail": part.detail,
            "nodes": list(part.nodes),
            "children": [_dump_part(child) for child in part.children],
        }
    return {
        "device": part.device.number,
        "fit": part.fit,
        "port": None if part.port is None else {"index": part.port.index, "model": part.port.model},
        "address": part.address,
        "numaNode": part.numa_node,
        "note": part.note,
    }


def _scene(picture: Mapping[str, Any], report: Mapping[str, Any], where: str) -> Scene:
    """The scene, whose trees each have every device once. Raises BadInput where they do not."""
    devices = {
        entry["number"]: Shown(entry["number"], entry["label"], entry["alias"], entry["hostNode"], tuple(entry["path"]))
        for entry in picture["devices"]
    }
    panels = []
    for name in ("host", "before", "after"):
        panel = Panel(picture[name]["title"], tuple(_box(box, devices, where) for box in picture[name]["boxes"]))
        numbers = sorted(leaf.device.number for leaf in panel.leaves)
        if numbers != sorted(devices) or len(devices) != len(picture["devices"]):
            raise BadInput(f"the picture does not have each device once in its part {name!r}", where=where)
        if any((leaf.fit is None) != (name == "host") or bool(leaf.address) != bool(leaf.fit) for leaf in panel.leaves):
            raise BadInput(f"the picture has a device with a wrong fit or address in its part {name!r}", where=where)
        if any(node not in picture["nodes"] for box in _boxes(panel.boxes) for node in box.nodes):
            raise BadInput(f"the picture has a host node that it does not list, in its part {name!r}", where=where)
        panels.append(panel)
    findings = tuple(Finding(**finding) for finding in report["findings"])
    refused = next((finding for finding in reversed(findings) if finding.severity == "error"), None)
    return Scene(
        outcome=report["outcome"],
        headline=picture["headline"],
        host=panels[0],
        before=panels[1],
        after=panels[2],
        nodes=tuple(picture["nodes"]),
        findings=findings,
        refusal=refused if report["outcome"] == "refused" else None,
    )


def _box(box: Mapping[str, Any], devices: Mapping[int, Shown], where: str) -> Box:
    children = tuple(
        _box(child, devices, where) if "children" in child else _leaf(child, devices, where)
        for child in box["children"]
    )
    return Box(box["kind"], box["title"], box["detail"], tuple(box["nodes"]), children)


def _boxes(parts: Iterable[Box | Leaf]) -> Iterator[Box]:
    for part in parts:
        if isinstance(part, Box):
            yield part
            yield from _boxes(part.children)


def _leaf(leaf: Mapping[str, Any], devices: Mapping[int, Shown], where: str) -> Leaf:
    if leaf["device"] not in devices:
        raise BadInput(f"the picture has no device {leaf['device']}", where=where)
    port = leaf["port"]
    return Leaf(
        devices[leaf["device"]],
        leaf["fit"],
        None if port is None else PciController(0, port["index"], port["model"]),
        leaf["address"],
        leaf["numaNode"],
        leaf["note"],
    )


def _clean(content: Any) -> Any:
    """The same, its texts without control characters: they stand in no SVG."""
    if isinstance(content, dict):
        return {name: _clean(part) for name, part in content.items()}
    if isinstance(content, list):
        return [_clean(part) for part in content]
    return one_line(content) if isinstance(content, str) else content


def _bound(content: Mapping[str, Any], where: str) -> None:
    """Raise BadInput when it holds more than can be shown. Before it is validated: of millions of parts, each wrong,
    the validator would make as many messages."""
    parts = {"file": content} | {name: content.get(name) for name in ("report", "picture", "nccl")}
    for part, name, most in (
        ("file", "devices", MAX_DEVICES),
        ("file", "cells", _MAX_CELLS),
        ("file", "findings", _MAX_FINDINGS),
        ("report", "devices", MAX_DEVICES),
        ("report", "cells", _MAX_CELLS),
        ("report", "findings", _MAX_FINDINGS),
        ("picture", "devices", MAX_DEVICES),
        ("picture", "nodes", _MAX_CELLS),
        ("nccl", "findings", _MAX_FINDINGS),
    ):
        inside = parts[part]
        held = inside.get(name) if isinstance(inside, dict) else None
        if isinstance(held, list) and len(held) > most:
            raise BadInput(f"{part} has {len(held)} {name}: {most} are shown at most", where=where)
    diff = content.get("diff")
    if isinstance(diff, str) and (lines := diff.count("\n")) > MAX_DIFF_LINES:
        raise BadInput(f"the diff has {lines} lines: {MAX_DIFF_LINES} are shown at most", where=where)
    depth, boxes = _size(content.get("picture"))
    if depth > 2 * _MAX_DEPTH:
        raise BadInput("the picture is nested too deeply", where=where)
    if boxes > _MAX_BOXES:
        raise BadInput(f"the picture has {boxes} boxes and devices: {_MAX_BOXES} are shown at most", where=where)


def _size(content: object) -> tuple[int, int]:
    """How many lists and objects are in each other, and how many objects there are in lists."""
    depth, count, level = 0, 0, [content]
    while level:
        depth += 1
        count += sum(isinstance(part, dict) for item in level if isinstance(item, list) for part in item)
        parts = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [part for inside in parts for part in inside]
    return depth, count
