"""What our rules accept libvirt defines: domains of ours as they came out, and domains that were broken."""

from __future__ import annotations

import pytest

from tests.proof import page
from tests.proof.differential import UNBROKEN, Tally, compare

pytestmark = [pytest.mark.libvirt, pytest.mark.timeout(300)]


def test_libvirt_refuses_nothing_that_our_rules_accept() -> None:
    tally = Tally()
    compare(80, tally, repeatable=False)
    assert [(verdict.how, verdict.libvirt, verdict.xml) for verdict in tally.missed] == []
    good = [verdict for verdict in tally.verdicts if verdict.how == UNBROKEN]
    assert good
    assert [(verdict.codes, verdict.libvirt, verdict.verified) for verdict in good if verdict.codes] == []
    # verify holds the output against the plan, and passes no break but one that leaves the domain as good as it was: an
    # expander may have its slot of bus 0 spelled out, where that one is free
    broken = [verdict for verdict in tally.verdicts if verdict.how != UNBROKEN]
    passed = [verdict for verdict in broken if verdict.verified]
    assert [v for v in passed if (v.how, v.codes, v.libvirt) != ("expander_on_a_taken_slot", (), "")] == []
    assert any(verdict.codes and verdict.libvirt for verdict in broken)


def test_the_page_knows_of_nothing_that_libvirt_alone_refuses() -> None:
    rows = page.rows_of("differential")
    assert {cells[0]: cells[5] for cells in rows[:2]} == {"as it came out": "0", "broken": "0"}
