"""Any domain that libvirt takes: it takes our output as well, fills it in, and leaves nothing for the audit to find."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import HealthCheck, given, settings

from pcinuma.audit import audit
from pcinuma.domain_xml import load
from pcinuma.errors import PcinumaError
from pcinuma.pipeline import transform
from tests.property.test_pipeline import Case, cases
from tests.support.libvirt import LibvirtRejected, define_and_dump

pytestmark = [pytest.mark.libvirt, pytest.mark.timeout(300)]


def definable(case: Case) -> Case:
    """The case with what libvirt wants of every domain: memory, vCPUs, cells in a row, whole devices."""
    text = case.xml.decode()
    cells = {cell: str(number) for number, cell in enumerate(re.findall(r"<cell id=.(\d+).", text))}
    text = re.sub(r"((?:<cell id|cellid)=.)(\d+)", lambda found: found[1] + cells[found[2]], text)
    text = re.sub(r""" cpus=(""|'')""", "", text)
    text = re.sub(r"memory=(.)0(.)", r"memory=\g<1>1024\2", text)
    text = text.replace("<name>any</name>", "<name>any</name><memory>262144</memory><vcpu>8</vcpu>")
    text = text.replace("<rng/>", "<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>")
    text = text.replace("pc-i440fx-7.2", "q35")
    return Case(text.encode(), case.host, dataclasses.replace(case.options, policy="best-effort"))


@given(cases())
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
def test_libvirt_takes_what_we_make_of_what_it_takes(given_case: Case) -> None:
    case = definable(given_case)
    try:
        result = transform(case.xml, case.options, case.read_host)
    except PcinumaError:
        return
    assert result.refusal is None, result.refusal
    if result.report.outcome != "changed":
        return
    try:
        define_and_dump(case.xml.decode())
    except LibvirtRejected:
        return
    defined = define_and_dump(result.xml.decode())
    assert [finding for finding in audit(load(defined.encode())) if finding.severity == "error"] == []
