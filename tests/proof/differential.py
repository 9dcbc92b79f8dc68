"""The rules of ours against libvirt's: domains that are good, and domains that were broken, judged by both."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lxml import etree

from pcinuma.audit import audit
from pcinuma.domain_xml import load
from pcinuma.errors import BadInput, PcinumaError
from pcinuma.parse import parse
from pcinuma.pipeline import Result, transform
from pcinuma.verify import verify
from tests.proof import page
from tests.proof.breaks import BREAKS
from tests.proof.corpus import GROUPINGS, Vm, vms
from tests.proof.machines import shape
from tests.property.test_libvirt import definable
from tests.property.test_pipeline import cases
from tests.support.guest import boot
from tests.support.libvirt import DomainDied, LibvirtRejected, define_and_dump
from tests.support.stand_in import GuestFailed

EXAMPLES = 1200
"""Of these about half are domains to judge: the others have nothing placed."""

MACHINES = ("single-socket", "single-socket-nps4", "four-sockets", "mi300x", "hgx-h100")
"""Of the corpus: those with functions joined in a slot, with cells of one device, with switches."""


UNBROKEN = "as it came out"
BOOT_SECONDS = 100


@dataclass(frozen=True)
class Verdict:
    """What is said of a domain: our error codes and libvirt's message, each empty where it is accepted, and whether
    ``verify`` passes it as the output for its input. ``expected`` are BDF and node by alias, as the plan has them."""

    how: str
    xml: str
    codes: tuple[str, ...]
    libvirt: str
    verified: bool
    expected: Mapping[str, tuple[str, int]] = field(default_factory=dict)


@dataclass
class Tally:
    verdicts: list[Verdict] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)

    @property
    def missed(self) -> list[Verdict]:
        """What libvirt refuses and our rules let pass: a bug."""
        return [verdict for verdict in self.verdicts if verdict.libvirt and not verdict.codes]

    @property
    def ours_alone(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.codes and not verdict.libvirt]

    @property
    def accepted(self) -> list[Verdict]:
        """Broken domains that both let pass."""
        return [v for v in self.verdicts if v.how != UNBROKEN and not v.codes and not v.libvirt]

    def report(self) -> str:
        """The part of docs/proof.md; boots a guest of one domain of each kind that libvirt alone could not judge."""
        rows = []
        for name, broken in (("as it came out", False), ("broken", True)):
            of = [verdict for verdict in self.verdicts if (verdict.how != UNBROKEN) == broken]
            count = Counter((bool(verdict.codes), bool(verdict.libvirt)) for verdict in of)
            verified = sum(verdict.verified for verdict in of)
            keys = ((False, False), (True, True), (True, False), (False, True))
            rows.append((name, str(len(of)), *(str(count[key]) for key in keys), str(verified)))
        head = ("domains", "judged", "both accept", "both refuse", "pcinuma alone refuses", "libvirt alone refuses")
        text = page.table((*head, "verify passes"), rows)
        text += "\nWhat pcinuma alone refuses, by its codes, and what became of a guest of one such domain:\n\n"
        text += page.table(("code", "domains", "verify passes", "the guest"), list(_outcomes(self.ours_alone)))
        text += "\nBroken domains that both accept, by what was done to them, and a guest of one:\n\n"
        by_break = [Verdict(v.how, v.xml, (v.how,), "", v.verified, v.expected) for v in self.accepted]
        return text + page.table(("break", "domains", "verify passes", "the guest"), list(_outcomes(by_break)))


def _outcomes(verdicts: list[Verdict]) -> Iterator[tuple[str, str, str, str]]:
    for code in sorted({code for verdict in verdicts for code in verdict.codes}):
        having = [verdict for verdict in verdicts if code in verdict.codes]
        # one of a single fault tells most, and one whose devices have names can be compared
        having.sort(key=lambda verdict: (not verdict.expected, len(verdict.codes), len(verdict.xml)))
        sample = next((verdict for verdict in having if _can_boot(verdict.xml)), having[0])
        beside = [other.replace("_", " ") for other in sample.codes if other != code]
        more = f" (also {', '.join(beside)})" if beside else ""
        verified = sum(verdict.verified for verdict in having)
        yield code.replace("_", " "), str(len(having)), str(verified), outcome(sample) + more


def _can_boot(xml: str) -> bool:
    """libvirtd 9.0 dies of a cell without CPUs that stands before one with CPUs."""
    with_cpus = [bool(cell.get("cpus")) for cell in etree.fromstring(xml.encode()).iterfind("cpu/numa/cell")]
    return with_cpus == sorted(with_cpus, reverse=True)


def outcome(verdict: Verdict) -> str:
    """What a guest of the domain shows, compared with what the unbroken one was to show."""
    if not _can_boot(verdict.xml):
        return "not booted: its cells are such that libvirtd 9.0 dies of them"
    try:
        view = boot(verdict.xml, timeout=BOOT_SECONDS)
    except LibvirtRejected as error:
        return f"does not start: {_short(str(error))}"
    except (GuestFailed, DomainDied) as error:
        return f"does not come up: {_short(str(error))}"
    if view.missing:
        return f"boots without {len(view.missing)} of {len(view.missing) + len(view.devices)} devices"
    elsewhere = sum(node != view.devices[alias].numa_node for alias, (_, node) in verdict.expected.items())
    if elsewhere:
        return f"boots, {elsewhere} of {len(verdict.expected)} devices on another node or none"
    if any(bdf != view.devices[alias].bdf for alias, (bdf, _) in verdict.expected.items()):
        return "boots, every device on its node, BDFs are others"
    return "boots, every device on its node"


def _short(message: str) -> str:
    """The telling line of a message, without names that differ from run to run."""
    lines = [line for line in message.splitlines() if line.strip() and not line.startswith("---")]
    line = next((line for line in lines if "qemu-system" in line), lines[0] if lines else "")
    told = line.rpartition("qemu-system-x86_64: ")[2].rpartition("}: ")[2]
    return re.sub(r"0000-[0-9a-f-]+", "BDF", told.replace("|", " ")).strip()[:110]


def judged(how: str, xml: str, before: str, result: Result) -> Verdict:
    document = load(xml.encode())
    try:
        parse(document)
        codes = tuple(sorted({finding.code for finding in audit(document) if finding.severity == "error"}))
    except BadInput:
        codes = ("bad-input",)
    try:
        verified = not verify(load(before.encode()), document, result.report.plan)
    except ValueError:
        verified = False  # as the pipeline takes it
    refused = ""
    try:
        define_and_dump(xml)
    except LibvirtRejected as error:
        refused = str(error)
    placed = [p for p in result.report.plan.placements if p.kind in ("placed", "approximate")]
    expected = {
        p.device.alias: (str(p.guest_bdf), p.cell)
        for p in placed
        if p.device.alias is not None and p.cell is not None and p.device.alias.startswith("ua-")
    }
    return Verdict(how, xml, codes, refused, verified, expected if len(expected) == len(placed) else {})


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, Result] | None:
    """A transformed domain with the domain it was made of: of a random case, or of a machine of the corpus."""
    if draw(st.booleans()):
        vm = draw(st.sampled_from(_vms()))
        return vm.xml.decode(), vm.run(draw(st.sampled_from(GROUPINGS)))
    case = definable(draw(cases()))
    try:
        result = transform(case.xml, case.options, case.read_host)
    except PcinumaError:
        return None
    return case.xml.decode(), result


def _vms() -> list[Vm]:
    return [vm for name in MACHINES for vm in vms(shape(name)) if len(vm.devices) <= 18]


def compare(examples: int, tally: Tally, *, repeatable: bool = True) -> None:
    """Judges that many examples, one in five as it came out and the others broken."""

    def example(data: st.DataObject) -> None:
        made = data.draw(outputs())
        if made is None or made[1].report.outcome != "changed" or not made[1].report.plan.expanders:
            return
        before, result = made
        good = result.xml.decode()
        if data.draw(st.integers(0, 4)) == 0:
            tally.add(judged(UNBROKEN, good, before, result))
            return
        root = etree.fromstring(result.xml)
        breaking = data.draw(st.sampled_from(BREAKS))
        if not breaking(root, data):
            return
        xml = etree.tostring(root, encoding="unicode")
        if xml != etree.tostring(etree.fromstring(result.xml), encoding="unicode"):
            tally.add(judged(breaking.__name__, xml, before, result))

    run = settings(
        max_examples=examples,
        deadline=None,
        derandomize=repeatable,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(given(st.data())(example))
    run()
