"""What the fuzz targets hold a result against notices what is wrong with one: good results, spoilt in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from fuzz.grammar import Case, must_hold_of

from fuzz import oracles
from pcinuma.model import HostQuery, HostTopology, Options
from pcinuma.pipeline import Result, transform
from tests.support import hosts, kubevirt
from tests.support.domains import domain, hostdev

HOST = hosts.host({0: "0-7", 1: "8-15"}, {"0000:1a:00.0": 0, "0000:9a:00.0": 1, "0000:9b:00.0": -1})
XML = domain(
    {0: 0, 1: 1},
    [hostdev(f"0000:{bus}:00.0", f"ua-{bus}") for bus in ("1a", "9a", "9b")],
    extra="\t\t<!-- kept -->\n",
).encode()
OPTIONS = Options(distances="keep")


def spoilt(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Result], Result], *, calls: int = 1) -> None:
    """The first ``calls`` transforms come out spoilt."""
    left = [spoil] * calls

    def run(*given: object, **named: object) -> Result:
        result = transform(*given, **named)  # type: ignore[arg-type]
        return left.pop()(result) if left else result

    monkeypatch.setattr(oracles, "transform", run)


def with_text(old: bytes, new: bytes) -> Callable[[Result], Result]:
    def spoil(result: Result) -> Result:
        assert old in result.xml
        return dataclasses.replace(result, xml=result.xml.replace(old, new, 1))

    return spoil


def test_a_good_result_is_let_pass() -> None:
    result = oracles.must_hold(XML, OPTIONS, HOST)
    assert result is not None
    assert result.report.outcome == "changed"
    assert oracles.must_agree(XML, OPTIONS, HOST, result) is not None
    whole = HOST(HostQuery(frozenset(p.source for p in result.report.plan.placements if p.source is not None)))
    must_hold_of(Case(XML, whole, OPTIONS, "1.7"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"<!-- kept -->", b"<!-- kept-->"),
        (b"\t<features>", b"    <features>"),
        (b'<alias name="ua-9b">', b"<alias name='ua-9b'>"),
        (b"<acpi></acpi>", b'<acpi x=""></acpi>'),
        (b'managed="no"', b'managed="yes"'),
        (b'<source>\n\t\t\t\t<address type="pci"', b"<source>\n\t\t\t\t<address"),
    ],
)
def test_a_character_that_changed(monkeypatch: pytest.MonkeyPatch, old: bytes, new: bytes) -> None:
    """Of what verification by itself leaves alone, white space and quotes, as well as of what it looks at."""
    spoilt(monkeypatch, with_text(old, new))
    with pytest.raises(AssertionError):
        oracles.must_hold(XML, OPTIONS, HOST)


def test_a_result_that_another_order_of_the_host_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles, "backwards", lambda read: lambda query: HostTopology({}, {}))
    with pytest.raises(AssertionError, match="order"):
        oracles.must_hold(XML, OPTIONS, HOST)


def test_a_place_that_a_second_run_reports_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(result: Result) -> Result:
        plan = result.report.plan
        places = tuple(dataclasses.replace(p, guest_bdf=None) for p in plan.placements)
        report = dataclasses.replace(result.report, plan=dataclasses.replace(plan, placements=places))
        return dataclasses.replace(result, report=report)

    spoilt(monkeypatch, spoil)
    with pytest.raises(AssertionError, match="other places"):
        oracles.must_hold(XML, OPTIONS, HOST)


def test_a_device_that_is_left_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(result: Result) -> Result:
        return dataclasses.replace(result, report=dataclasses.replace(result.report, findings=()))

    spoilt(monkeypatch, spoil)
    with pytest.raises(AssertionError, match="9b"):
        oracles.must_hold(XML, OPTIONS, HOST)


def test_bytes_that_are_not_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(monkeypatch, lambda result: dataclasses.replace(result, xml=bytes(bytearray(result.xml))))
    with pytest.raises(AssertionError):
        oracles.must_hold(XML, Options(policy="none"), HOST)


def test_a_change_under_a_policy_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Best effort's result, given out for that of restricted."""
    best = transform(XML, OPTIONS, HOST)
    spoilt(monkeypatch, lambda result: best)
    with pytest.raises(AssertionError):
        oracles.must_hold(XML, Options(policy="restricted"), HOST)


def test_check_that_does_not_take_what_transform_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="transform does not take it"):
        oracles.must_agree(XML, OPTIONS, HOST, None)
    result = transform(XML, OPTIONS, HOST)
    with pytest.raises(AssertionError, match="transform takes it"):
        oracles.must_agree(b"<domain", OPTIONS, HOST, result)


def test_a_device_that_kubevirts_structs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that took the second pass for the first would make a second set."""

    def without_ours(xml: str, version: str) -> str:
        return xml.replace("ua-pcinuma-", "other-")

    monkeypatch.setattr(kubevirt, "through_structs", without_ours)
    whole = HOST(
        HostQuery(frozenset(p.source for p in transform(XML, OPTIONS, HOST).report.plan.placements if p.source))
    )
    with pytest.raises(AssertionError, match="moved a device"):
        must_hold_of(Case(XML, whole, OPTIONS, "1.7"))
