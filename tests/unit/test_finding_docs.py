"""The documentation that the page has of findings: every code of the document, with its own rows."""

from __future__ import annotations

import re
from pathlib import Path

from lxml.html import document_fromstring

from pcinuma import finding_docs

ROOT = Path(__file__).resolve().parents[2]


def test_a_code_has_its_row() -> None:
    (row,) = finding_docs.of("node-unmapped", "warning")
    assert [title for title, _ in row] == ["Meaning", "What to do"]
    assert dict(row)["Meaning"].strip() == "the device's host node backs no cell"
    assert "<code>--unmapped nearest</code>" in dict(row)["What to do"]


def test_the_row_of_the_severity_is_taken() -> None:
    (row,) = finding_docs.of("mmio-window", "info")
    assert dict(row)["Meaning"].startswith("<code>--mmio apply</code> has set")
    (row,) = finding_docs.of("mmio-window", "warning")
    assert dict(row)["Meaning"].startswith("the BARs need more address space")


def test_rows_of_several_codes_and_without_severity() -> None:
    for code in ("duplicate-index", "index-range"):
        (row,) = finding_docs.of(code, "error")
        assert dict(row)["Meaning"].startswith("two PCI controllers of one index")
    (row,) = finding_docs.of("policy-not-met", "error")
    assert list(dict(row)) == ["Meaning"]


def test_a_code_of_two_tables_has_both_rows() -> None:
    assert len(finding_docs.of("bus-numbers", "error")) == 2


def test_an_unknown_code_has_nothing() -> None:
    assert finding_docs.of("<script>", "error") == ()


def test_every_code_of_the_document_is_an_anchor_once() -> None:
    """Codes are found here by the text alone: the first cell of each row below a head that begins with `code`."""
    text = (ROOT / "docs/findings.md").read_text()
    codes: set[str] = set()
    for table in re.findall(r"^\| code .*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M):
        for row in table.splitlines():
            codes.update(re.findall(r"`([a-z0-9-]+)`", row.split("|")[1]))
    assert len(codes) > 40
    found = [code.get("id") for code in document_fromstring(finding_docs.page("findings")).iter("code")]
    assert sorted(filter(None, found)) == sorted(codes)


def test_links_lead_to_the_pages_or_out() -> None:
    for name in finding_docs.NAMES:
        links = [link.get("href", "") for link in document_fromstring(finding_docs.page(name)).iter("a")]
        assert "nccl" in links or name == "nccl"
        assert [link for link in links if link not in finding_docs.NAMES and not link.startswith("https://")] == []
