"""What the debug page shows of a transform: the result, the picture, what can be downloaded. Pure but for the host."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pcinuma import edge, explain, finding_docs, nccl_topo, report, result_file, svg, tree
from pcinuma.domain_xml import load
from pcinuma.errors import BadInput, PcinumaError, one_line
from pcinuma.parse import parse
from pcinuma.picture import Fit
from pcinuma.result_file import Result
from pcinuma.web_form import HostProblem, Inputs, Problem

TONES: Mapping[Fit | None, str] = {"aligned": "good", "approximate": "near", None: ""}
"""Of what is neither: alarm."""
CHIPS = {"changed": ("✓", "good"), "unchanged": ("=", "dim"), "refused": ("✗", "alarm")}
"""The sign and the tone of an outcome, where every device ends on its own cell."""


@dataclass(frozen=True, slots=True)
class Download:
    """A file that the page carries whole: what is downloaded is what was shown."""

    name: str
    label: str
    kind: str
    data: bytes

    @property
    def href(self) -> str:
        return f"data:{self.kind};base64,{base64.b64encode(self.data).decode('ascii')}"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the diff; ``sort`` is added, removed, place, file or same."""

    sort: str
    text: str


@dataclass(frozen=True, slots=True)
class Group:
    """Findings of one code, severity and hint; ``docs`` as :func:`pcinuma.finding_docs.of` gives them."""

    code: str
    severity: str
    hint: str | None
    messages: tuple[str, ...]
    docs: tuple[tuple[tuple[str, str], ...], ...]


@dataclass(frozen=True, slots=True)
class View:
    """All that the template shows, plain text but for ``picture``, which is an ``svg`` element, and the documentation
    of findings, which is HTML of ours."""

    outcome: str
    chip: tuple[str, str]
    """The sign of the outcome, and its tone: good, near, dim or alarm."""
    headline: str
    seen: str | None
    """Whose cells the devices' table has beside those they belong on: the title of the guest after; None: not known."""
    picture: str | None
    options: Mapping[str, str]
    cells: tuple[Mapping[str, Any], ...]
    devices: tuple[Mapping[str, Any], ...]
    findings: tuple[Group, ...]
    diff: tuple[Line, ...]
    nccl_problem: str | None
    nccl_findings: tuple[Group, ...]
    downloads: tuple[Download, ...]
    opened: str | None = None
    """The name of the file that it was opened from."""


def of(inputs: Inputs) -> View | Problem:
    """The transform of these inputs, or what is wrong with one of them."""
    try:
        require_few_devices(inputs)
        explained = explain.explain(inputs.domain, inputs.options, inputs.read_host, where=inputs.where)
        made = explained.result
        nccl, problem, found = _nccl(inputs, made)
    except HostProblem as problem_of_host:
        return Problem("host", problem_of_host.error)
    except PcinumaError as error:
        return Problem("domain", error)
    diff = ""
    if made.report.outcome == "changed":
        diff = report.diff(load(inputs.domain).text, load(made.xml).text)
    result = Result(report.as_dict(made.report), explained.scene, diff, nccl, problem, found)
    return _view(result, made.xml if made.refusal is None else None)


def require_few_devices(inputs: Inputs) -> None:
    """Raises BadInput for a domain with more devices than the page shows."""
    count = len(parse(load(inputs.domain, inputs.where)).devices)
    if count > result_file.MAX_DEVICES:
        raise BadInput(
            f"{count} passthrough devices: this page shows {result_file.MAX_DEVICES} at most",
            where=inputs.where,
            hint="pcinuma explain, pcinuma check and pcinuma transform take more",
        )


def opened(data: bytes, name: str) -> View:
    """A result file, or a report, shown again. Raises BadInput."""
    return _view(result_file.load(data, name), None, opened_from=name)


def _nccl(inputs: Inputs, made: Any) -> tuple[str | None, str | None, tuple[dict[str, Any], ...]]:
    """The NCCL file as the command makes it: the file, or why there is none; what was found."""
    if made.refusal is not None:
        return None, "the domain is refused", ()
    try:
        topology = nccl_topo.topology_file(made.xml, inputs.read_host, where=inputs.where)
    except PcinumaError as error:
        return None, str(error), ()
    return topology.text, None, tuple(report.finding_dict(finding) for finding in topology.findings)


def _view(result: Result, xml: bytes | None, opened_from: str | None = None) -> View:
    content = result.report
    picture = svg.draw(result.scene) if result.scene is not None else None
    return View(
        outcome=content["outcome"],
        chip=_chip(result),
        seen=None if result.scene is None else result.scene.after.title,
        headline=one_line(result.scene.headline if result.scene is not None else _headline(content)),
        # an element of a page has no XML declaration
        picture=None if picture is None else picture.partition("?>\n")[2],
        options=content["options"],
        cells=tuple(content["cells"]),
        devices=tuple(_devices(result)),
        findings=grouped(content["findings"]),
        diff=tuple(_lines(result.diff)),
        nccl_problem=None if result.nccl_problem is None else one_line(result.nccl_problem),
        nccl_findings=grouped(result.nccl_findings),
        downloads=tuple(_downloads(result, picture, xml)),
        opened=opened_from,
    )


def _chip(result: Result) -> tuple[str, str]:
    """A result that leaves devices elsewhere is none to be shown as good."""
    outcome = result.report["outcome"]
    if outcome == "refused":
        return CHIPS[outcome]
    if result.scene is not None:
        # as best-effort would have it is not as it is
        panel = result.scene.after if outcome == "changed" else result.scene.before
        aligned = panel.aligned == len(panel.leaves)
    else:
        placements = {device["placement"] for device in result.report["devices"]}
        if placements <= {"placed", "kept"} and "kept" in placements:
            return ("=", "dim")  # where what was kept is, no report says
        aligned = placements <= {"placed"}
    return CHIPS[outcome] if aligned else ("!", "near")


def _headline(content: Mapping[str, Any]) -> str:
    """For a report without a picture."""
    count = len(content["devices"])
    placed = sum(device["placement"] == "placed" for device in content["devices"])
    return f"{count} passthrough device{'s' * (count != 1)}: {content['outcome']}, {placed} placed"


def _devices(result: Result) -> Iterator[Mapping[str, Any]]:
    """The rows of the table, in the order of the numbers that the picture gives the devices."""
    leaves = {leaf.device.number: leaf for leaf in result.scene.after.leaves} if result.scene is not None else {}
    by_label = {leaf.device.label: number for number, leaf in leaves.items()}
    by_alias = {leaf.device.alias: number for number, leaf in leaves.items() if leaf.device.alias is not None}
    rows = []
    for device in result.report["devices"]:
        number = by_label.get(device["source"]) or by_alias.get(device["alias"])
        leaf = leaves.get(number) if number is not None else None
        fit = leaf.fit if leaf is not None else None
        row = {name: one_line(value) if isinstance(value, str) else value for name, value in device.items()}
        row |= {"number": number, "tone": TONES.get(fit, "alarm"), "fit": "", "mark": "", "seen": None}
        if leaf is not None and fit is not None:
            row |= {"mark": tree.UNICODE.marks[fit], "fit": leaf.words}
            row["seen"] = leaf.numa_node if leaf.numa_node >= 0 else None
        rows.append(row)
    return iter(sorted(rows, key=lambda row: (row["number"] is None, row["number"] or 0)))


def grouped(findings: Iterable[Mapping[str, Any]]) -> tuple[Group, ...]:
    """The findings that differ in their messages alone together, in the order of the first of each."""
    messages: dict[tuple[str, str, str | None], list[str]] = {}
    for finding in findings:
        hint = None if finding["hint"] is None else one_line(finding["hint"])
        messages.setdefault((finding["code"], finding["severity"], hint), []).append(one_line(finding["message"]))
    return tuple(
        Group(code, severity, hint, tuple(texts), finding_docs.of(code, severity))
        for (code, severity, hint), texts in messages.items()
    )


def _lines(diff: str) -> Iterator[Line]:
    sorts = {"+": "added", "-": "removed", "@": "place", "\\": "place"}
    for number, line in enumerate(diff.split("\n")[:-1] if diff else ()):
        sort = "file" if number < 2 else sorts.get(line[:1], "same")
        yield Line(sort, "\t".join(one_line(part, 20_000) for part in line.split("\t")))


def _downloads(result: Result, picture: str | None, xml: bytes | None) -> Iterator[Download]:
    if xml is not None:
        yield Download("aligned.xml", "Domain XML", "application/xml", xml)
    yield Download("report.json", "Report", "application/json", edge.json_text(result.report).encode())
    if result.nccl is not None:
        yield Download("nccl-topo.xml", "NCCL topology file", "application/xml", result.nccl.encode())
    if picture is not None:
        yield Download("picture.svg", "Picture", "image/svg+xml", picture.encode())
    if result.diff:
        yield Download("domain.diff", "Diff", "text/x-diff", result.diff.encode())
    if result.scene is not None:
        share = edge.json_text(result_file.dump(result)).encode()
        yield Download("pcinuma-result.json", "Result, to share and open again", "application/json", share)
