"""What a hook answers: (domain, VMI) → the domain to use, or an error, and the record that goes to the log. Pure.

The hook sidecar, the plugin and the executable for KubeVirt's sidecar-shim share it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pcinuma import options as option_sources
from pcinuma import report
from pcinuma.domain_xml import encoding_of
from pcinuma.errors import BadInput, PcinumaError, PolicyNotMet, TooLarge
from pcinuma.model import Finding, HostQuery, HostTopology, Options, Outcome, Plan, Report
from pcinuma.pipeline import Result, transform
from pcinuma.plan import REFUSING

MAX_DOMAIN = 1024 * 1024
"""Bytes. Twenty times a large VM's domain; working on one of this size takes 51 MB of the 64 that KubeVirt gives."""

Level = Literal["info", "warning", "error"]

_DECLARATION = re.compile(r"""\A\ufeff?(<\?xml\s[^>]*?encoding\s*=\s*)(["'])[A-Za-z0-9._-]+\2""")


@dataclass(frozen=True, slots=True)
class Answer:
    """``xml`` is what virt-launcher is to use, None when the call fails with ``error``. ``record`` is for the log."""

    xml: bytes | None
    error: PcinumaError | None
    level: Level
    record: dict[str, Any]


def answer(
    domain: bytes,
    vmi: bytes,
    defaults: Mapping[str, str],
    read_host: Callable[[HostQuery], HostTopology],
) -> Answer:
    """The answer to one call. ``defaults`` are the options that hold where the VMI's annotations say nothing.

    Under best-effort, and none, a fault of our own or of the host gives the input back untouched. Under a refusing
    policy, and for a domain or VMI that is not what it must be, the call fails.
    """
    name: dict[str, str | None] = {"namespace": None, "name": None}
    chosen: Options | None = None
    try:
        content = option_sources.load_json_object(vmi, "the VMI")
        name = _name(content)
        chosen = option_sources.resolve({}, option_sources.from_vmi(content, "the VMI"), defaults)
        if len(domain) > MAX_DOMAIN:
            raise TooLarge(f"the domain XML is larger than {MAX_DOMAIN >> 20} MiB", where="the domain XML")
        result = transform(domain, chosen, read_host, where="the domain XML")
        if result.refusal is None:
            return _done(result, name)
        if isinstance(result.refusal, PolicyNotMet) or chosen.policy in REFUSING:
            return _failed(result.refusal, name, report.as_dict(result.report))
        return _untouched(domain, result.refusal, name, report.as_dict(result.report))
    except Exception as error:  # noqa: BLE001 - a fault of ours must not cost a best-effort VM its start
        known = error if isinstance(error, PcinumaError) else _fault(error)
        bad = isinstance(known, BadInput) and not isinstance(known, TooLarge)
        if bad or chosen is None or chosen.policy in REFUSING:
            return _failed(known, name)
        return _untouched(domain, known, name)


def _fault(error: Exception) -> PcinumaError:
    return PcinumaError(f"internal error: {type(error).__name__}: {error}", hint="please report it")


def one_line_with_hint(error: PcinumaError) -> str:
    """The command line's message, hint included, on one line: how an error reaches virt-launcher's log."""
    return f"pcinuma: error: {error}" + (f"; hint: {error.hint}" if error.hint else "")


def _name(vmi: Mapping[str, Any]) -> dict[str, str | None]:
    metadata = vmi.get("metadata")
    found = metadata if isinstance(metadata, Mapping) else {}
    return {key: value if isinstance(value := found.get(key), str) else None for key in ("namespace", "name")}


def _done(result: Result, name: Mapping[str, str | None]) -> Answer:
    worst: Level = "info"
    for finding in result.report.findings:
        if finding.severity == "error":
            worst = "error"
        elif finding.severity == "warning" and worst == "info":
            worst = "warning"
    return Answer(as_utf8(result.xml), None, worst, {**name, **report.as_dict(result.report)})


def _untouched(
    domain: bytes, error: PcinumaError, name: Mapping[str, str | None], found: Mapping[str, Any] | None = None
) -> Answer:
    return Answer(domain, None, "error", _record("unchanged", error, name, found))


def _failed(error: PcinumaError, name: Mapping[str, str | None], found: Mapping[str, Any] | None = None) -> Answer:
    return Answer(None, error, "error", _record("refused", error, name, found))


def _record(
    outcome: Outcome, error: PcinumaError, name: Mapping[str, str | None], found: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A log record with the fields of every other, whatever is known."""
    if found is None:
        finding = Finding(error.code, "error", error.message, None, error.hint)
        found = report.as_dict(Report(outcome, Options(), Plan(), (finding,)))
    return {**name, **found, "outcome": outcome, "error": one_line_with_hint(error), "code": error.code}


def as_utf8(xml: bytes) -> bytes:
    """The domain in UTF-8, its declaration saying so: virt-launcher refuses any other. UTF-8 comes back as it is."""
    encoding = encoding_of(xml, "the result")
    text = xml.decode(encoding)
    if encoding == "utf-8" and not text.startswith("\ufeff"):
        return xml
    return _DECLARATION.sub(r"\1\2UTF-8\2", text, count=1).removeprefix("\ufeff").encode("utf-8")
