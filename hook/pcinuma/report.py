"""Plan and findings → a JSON object, lines of text, the diff. Pure: nothing here writes anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pcinuma.errors import one_line
from pcinuma.model import Finding, Placement, Report
from pcinuma.options import as_mapping

VERSION = 1


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


GROUPED_FROM = 4
_NAMED = 3


def grouped(findings: Iterable[Finding]) -> list[Finding]:
    """The findings as people read them: those that say the same of many devices are one, which counts them and names
    the first few. What is for programs has one for each."""
    findings = tuple(findings)
    alike: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        alike.setdefault(_alike(finding), []).append(finding)
    shown = []
    for finding in findings:
        members = alike[_alike(finding)]
        if len(members) < GROUPED_FROM:
            shown.append(finding)
        elif finding is members[0]:
            shown.append(_as_one(members))
    return shown


def _alike(finding: Finding) -> tuple[object, ...]:
    """What findings of one group share: all but the device, which the message names."""
    device = finding.device or ""
    if device not in finding.message or not device:
        return (id(finding),)
    return (finding.code, finding.severity, finding.hint, finding.message.replace(device, "each"))


def _as_one(members: list[Finding]) -> Finding:
    first = members[0]
    names = ", ".join(str(finding.device) for finding in members[:_NAMED])
    left_out = len(members) - _NAMED
    message = (
        f"{len(members)} devices ({names} and {left_out} more): {first.message.replace(str(first.device), 'each')}"
    )
    return replace(first, message=message, device=None)


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
