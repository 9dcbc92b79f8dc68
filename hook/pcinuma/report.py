"""Plan and findings → a JSON object, lines of text, the tree, the diff. Pure: nothing here writes anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pcinuma.errors import one_line
from pcinuma.model import ALIAS_PREFIX, Device, Domain, Finding, Placement, Report
from pcinuma.options import as_mapping
from pcinuma.pci_tree import expander_above

VERSION = 1

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)  # by cell; the cell is always written as well


def as_dict(report: Report) -> dict[str, Any]:
    """The report as ``schemas/report.schema.json`` describes it."""
    return {
        "version": VERSION,
        "outcome": report.outcome,
        "options": as_mapping(report.options),
        "cells": [{"cell": cell, "hostNodes": list(nodes)} for cell, nodes in report.plan.cell_nodes.items()],
        "devices": [_device(placement) for placement in report.plan.placements],
        "findings": [finding_dict(finding) for finding in report.findings],
    }


def _device(placement: Placement) -> dict[str, Any]:
    return {
        "source": _text(placement.source),
        "alias": placement.device.alias,
        "kind": placement.device.kind,
        "hostNode": placement.host_node,
        "cell": placement.cell,
        "placement": placement.kind,
        "guestAddress": _text(placement.guest_address),
        "guestBDF": _text(placement.guest_bdf),
        "reason": placement.reason,
    }


def finding_dict(finding: Finding) -> dict[str, Any]:
    """One finding as the report, ``check`` and the log carry it."""
    return {
        "code": finding.code,
        "severity": finding.severity,
        "message": finding.message,
        "device": finding.device,
        "hint": finding.hint,
    }


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def finding_line(finding: Finding) -> str:
    """One finding on one line: severity, code, message, hint."""
    hint = f" ({finding.hint})" if finding.hint else ""
    return one_line(f"{finding.severity}: {finding.code}: {finding.message}{hint}")


def diff(before: str, after: str) -> str:
    """A unified diff of the two texts, empty when they are one."""
    import difflib

    lines = difflib.unified_diff(_lines(before), _lines(after), "domain.xml", "domain.xml (pcinuma)")
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """The lines with their ends; only a line feed ends one, as patch has it (str.splitlines knows ten others)."""
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


# --- the tree --------------------------------------------------------------------------------------------------


def explanation(report: Report, before: Domain, *, colour: bool = False) -> str:
    """The guest's PCI tree before and after, each device with where it goes and why, then the findings."""
    plan = report.plan
    lines = ["before", *_tree(_before(report, before), colour), ""]
    if report.outcome == "refused":
        lines.append("refused: nothing is changed")
    else:
        title = "after" if report.options.policy != "none" else "what would be done (policy none changes nothing)"
        lines += [title, *_tree(_after(report), colour)]
    if report.findings:
        lines += ["", "findings", *(f"  {finding_line(finding)}" for finding in report.findings)]
    placed = sum(p.kind in ("placed", "approximate") or (p.kind == "kept" and p.fits) for p in plan.placements)
    lines += ["", f"outcome: {report.outcome}; {placed} of {len(plan.placements)} devices on a cell"]
    return "\n".join(lines) + "\n"


Branch = tuple[str, int | None, list[tuple[str, int | None]]]
"""A branch of the tree: its title, the cell that colours it, and its leaves with theirs."""


def _before(report: Report, domain: Domain) -> list[Branch]:
    placements = {placement.device.element: placement for placement in report.plan.placements}
    by_index = {controller.index: controller for controller in domain.controllers}
    roots: dict[int | None, list[Device]] = {}
    for device in domain.devices:
        at = by_index.get(device.address.bus) if device.address is not None else None
        expander = expander_above(at, domain.controllers) if at is not None else None
        roots.setdefault(expander.index if expander is not None else None, []).append(device)
    branches: list[Branch] = []
    for index, devices in sorted(roots.items(), key=lambda item: -1 if item[0] is None else item[0]):
        expander = by_index.get(index) if index is not None else None
        cell = expander.node if expander is not None else None
        title = "bus 0: the guest sees numa_node -1" if expander is None else _expander_title(index, cell)
        leaves = [(_leaf(device, placements.get(device.element), after=False), cell) for device in devices]
        branches.append((title, cell, leaves))
    return branches


def _after(report: Report) -> list[Branch]:
    plan = report.plan
    placements = {placement.device.element: placement for placement in plan.placements}
    branches: list[Branch] = []
    shown: set[int] = set()
    for expander in plan.expanders:
        leaves: list[tuple[str, int | None]] = []
        for port in expander.ports:
            for attached in port.attachments:
                shown.add(attached.device.element)
                leaves.append((_leaf(attached.device, placements[attached.device.element], after=True), expander.cell))
        what = expander.alias.removeprefix(ALIAS_PREFIX)
        title = f"{_expander_title(expander.index, expander.cell)}, busNr {expander.bus_nr:#x} ({what})"
        branches.append((title, expander.cell, leaves))
    rest = [p for p in plan.placements if p.device.element not in shown]
    if rest:
        branches.append(("where they were", None, [(_leaf(p.device, p, after=True), None) for p in rest]))
    return branches


def _expander_title(index: int | None, cell: int | None) -> str:
    return (
        f"cell {cell}: expander {index}" if cell is not None else f"expander {index} without a cell: the guest sees -1"
    )


def _leaf(device: Device, placement: Placement | None, *, after: bool) -> str:
    node = placement.host_node if placement is not None else None
    name = f"{device.label} {device.alias or ''}".rstrip()
    host = f"host node {node}" if node is not None else "host node unknown"
    if not after:
        return f"{name}  ({host})"
    if placement is None or placement.guest_bdf is None:
        why = placement.reason if placement is not None else None
        return f"{name}  ({host}) {placement.kind if placement else 'left'}: {why}"
    note = ", approximate" if placement.kind == "approximate" else ""
    return f"{name}  ({host}{note}) -> guest {placement.guest_bdf}"


def _tree(branches: list[Branch], colour: bool) -> Iterator[str]:
    if not branches:
        yield "  (no passthrough PCI device)"
    for title, cell, leaves in branches:
        yield f"  {_tint(one_line(title), cell, colour)}"
        for number, (leaf, leaf_cell) in enumerate(leaves, start=1):
            yield f"  {'└─' if number == len(leaves) else '├─'} {_tint(one_line(leaf), leaf_cell, colour)}"


def _tint(text: str, cell: int | None, colour: bool) -> str:
    if not colour:
        return text
    return f"\033[{31 if cell is None else _COLOURS[cell % len(_COLOURS)]}m{text}\033[0m"
