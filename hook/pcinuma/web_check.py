"""What the debug page shows of a domain that is checked as it stands: the findings, and their file. Pure but for the
host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pcinuma import check, edge, report
from pcinuma.errors import HostUnreadable, PcinumaError
from pcinuma.model import Finding, HostQuery, HostTopology, Severity
from pcinuma.web_form import HostProblem, Inputs, Problem
from pcinuma.web_result import Download, Group, grouped, require_few_devices

_NOUNS: Mapping[Severity, str] = {"error": "error", "warning": "warning", "info": "note"}


@dataclass(frozen=True, slots=True)
class Checked:
    """All that the template shows. ``chip`` is a sign, a word and a tone: good, near or alarm."""

    chip: tuple[str, str, str]
    headline: str
    findings: tuple[Group, ...]
    download: Download


def of(inputs: Inputs) -> Checked | Problem:
    """What ``pcinuma check`` finds in the domain, or what is wrong with one of the inputs."""

    def read_host(query: HostQuery) -> HostTopology:
        try:
            return inputs.read_host(query)
        except HostProblem as problem:
            if isinstance(problem.error, HostUnreadable):
                raise problem.error from None  # a finding: the audit needs no host
            raise

    try:
        require_few_devices(inputs)
        found = check.check(inputs.domain, inputs.options, read_host, where=inputs.where)
    except HostProblem as problem:
        return Problem("host", problem.error)
    except PcinumaError as error:
        return Problem("domain", error)
    findings = [report.finding_dict(finding) for finding in found]
    content = {"version": report.VERSION, "findings": findings}
    return Checked(
        _chip(found),
        _headline(found),
        grouped(findings),
        Download("check.json", "Findings", "application/json", edge.json_text(content).encode()),
    )


def _chip(found: Sequence[Finding]) -> tuple[str, str, str]:
    severities = {finding.severity for finding in found}
    if "error" in severities:
        return ("✗", "errors", "alarm")
    return ("!", "warnings", "near") if "warning" in severities else ("✓", "no errors", "good")


def _headline(found: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in found)
    told = [f"{counts[s]} {noun}{'s' * (counts[s] != 1)}" for s, noun in _NOUNS.items() if counts[s]]
    return f"The domain as it stands: {', '.join(told) or 'nothing found'}"
