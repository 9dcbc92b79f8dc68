"""``transform``: the steps in order. A newcomer reads this first.

parse → (ask the host) → plan → apply → verify → report. No step takes a path, an environment variable or a global.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pcinuma.apply import apply
from pcinuma.audit import audit
from pcinuma.domain_xml import Document, load
from pcinuma.errors import PcinumaError, PolicyNotMet, UnsafeResult
from pcinuma.model import Domain, Finding, HostQuery, HostTopology, Options, Outcome, Plan, Report
from pcinuma.parse import parse
from pcinuma.plan import host_query, plan
from pcinuma.verify import verify


@dataclass(frozen=True, slots=True)
class Result:
    """``xml`` is what is to be used: the input's very bytes when the outcome is not ``changed``. ``before`` is the
    domain as it was read; ``refusal`` is set when the outcome is ``refused``."""

    xml: bytes
    report: Report
    before: Domain
    refusal: PcinumaError | None = None


def transform(
    xml: bytes, options: Options, read_host: Callable[[HostQuery], HostTopology], *, where: str = "domain XML"
) -> Result:
    """The domain XML with its passthrough devices placed.

    Raises BadInput for a domain that libvirt would refuse, HostUnreadable when the host cannot be read; a refusal
    is a Result, so that its report can be shown.
    """
    document = load(xml, where)
    domain = parse(document)
    query = host_query(domain, options)
    host = read_host(query) if query is not None else None
    made = plan(domain, host, options)
    if host is not None and any(controller.is_expander and not controller.is_ours for controller in domain.controllers):
        # expanders of another hand stay as they are, right or wrong
        made = replace(made, findings=(*made.findings, *(f for f in audit(document) if f.severity == "error")))
    if made.refusal is not None:
        error = PolicyNotMet(made.refusal, where=where, hint=made.refusal_hint)
        return _result(xml, "refused", options, made, domain, error)
    if options.policy == "none":
        return _result(xml, "unchanged", options, made, domain)
    text = apply(document, made)
    if text == document.text:
        return _result(xml, "unchanged", options, made, domain)
    output = document.encode(text)
    if problems := _problems(document, output, made):
        first = "; ".join(problem.message for problem in problems[:3])
        unsafe = UnsafeResult(f"the result failed verification: {first}", where=where, hint=_way_out(made))
        return _result(xml, "refused", options, replace(made, findings=(*made.findings, *problems)), domain, unsafe)
    return _result(output, "changed", options, made, domain)


def _way_out(made: Plan) -> str | None:
    """What to do where a set of ours could neither stay nor make room: that is the domain's fault, not ours."""
    if not made.drop:
        return None
    full = next((p.reason for p in made.placements if p.code in ("bus-numbers", "root-bus-slots")), None)
    why = f"pcinuma's controllers of an earlier run no longer fit{f', and {full}' if full else ''}"
    return (
        f"{why}: take every <controller type='pci'> and the guest addresses of all devices out of the domain, and run"
        " pcinuma again; where that has no room either, pass through fewer devices"
    )


def _problems(document: Document, output: bytes, made: Plan) -> list[Finding]:
    try:
        after = load(output, "the result")
        return verify(document, after, made)
    except (PcinumaError, ValueError) as error:
        return [Finding("unsafe-result", "error", f"the result cannot be read back: {error}")]


def _result(
    xml: bytes, outcome: Outcome, options: Options, made: Plan, domain: Domain, refusal: PcinumaError | None = None
) -> Result:
    findings = made.findings
    if refusal is not None:
        findings = (*findings, Finding(refusal.code, "error", refusal.message, None, refusal.hint))
    return Result(xml, Report(outcome, options, made, findings), domain, refusal)
