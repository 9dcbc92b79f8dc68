"""The documentation of findings (``docs/*.md``, shipped with the program) → HTML for the debug page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

NAMES = ("findings", "nccl")
"""The documents there are."""

_TITLES = {"code": "Code", "severity": "Severity", "meaning": "Meaning", "what to do": "What to do"}


@cache
def page(name: str) -> str:
    """The document as HTML. In ``findings`` the first mention of a code in a table has the code as its id."""
    markdown = _markdown()
    tokens = markdown.parse(_text(name))
    seen: set[str] = set()
    for row in _rows(tokens):
        for code in _codes(row):
            if code.content not in seen:
                seen.add(code.content)
                code.attrSet("id", code.content)
    for token in tokens:
        if token.children is not None:
            token.children = list(_linked(token.children))
    return str(markdown.renderer.render(list(_boxed(tokens)), markdown.options, {}))


@cache
def of(code: str, severity: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """What is documented of a code: for each row of it, pairs of a title and HTML. Rows of another severity are left
    out where there are rows of this one."""
    rows = _by_code().get(code, ())
    fitting = tuple(row for row in rows if severity in dict(row).get("Severity", severity))
    return tuple(
        tuple((title, html) for title, html in row if title not in ("Code", "Severity")) for row in fitting or rows
    )


@cache
def _by_code() -> Mapping[str, tuple[tuple[tuple[str, str], ...], ...]]:
    markdown = _markdown()
    found: dict[str, tuple[tuple[tuple[str, str], ...], ...]] = {}
    for row in _rows(markdown.parse(_text("findings"))):
        cells = tuple(
            (
                _TITLES.get(title, title),
                str(markdown.renderer.render(_in_place(cell.children or []), markdown.options, {})),
            )
            for title, cell in row
        )
        for code in _codes(row):
            found[code.content] = (*found.get(code.content, ()), cells)
    return found


def _boxed(tokens: Iterable[Token]) -> Iterator[Token]:
    """The tokens with each table and each example in a box that it scrolls in, named after the heading above it."""
    from markdown_it.token import Token as Made

    heading, inside = "", False
    for token in tokens:
        inside = token.type == "heading_open" or (inside and token.type != "heading_close")
        heading = token.content if inside and token.type == "inline" else heading
        what = {"table_open": "table", "code_block": "example", "fence": "example"}.get(token.type)
        if what is not None:
            label = escape(f"{heading}, {what}", quote=True)
            box = f'<div class="scroll" role="group" tabindex="0" aria-label="{label}">\n'
            yield Made("html_block", "", 0, content=box)
        yield token
        if token.type in ("table_close", "code_block", "fence"):
            yield Made("html_block", "", 0, content="</div>\n")


def _in_place(tokens: Sequence[Token]) -> Sequence[Token]:
    """A cell for another page than the document: its links are the document's, so their text stays alone."""
    from markdown_it.token import Token as Made

    kept = [token for token in tokens if token.type not in ("link_open", "link_close")]
    return [Made("inline", "", 0, children=kept)]


def _rows(tokens: Iterable[Token]) -> Iterator[list[tuple[str, Token]]]:
    """The rows of the bodies of all tables: pairs of a column's title and the cell."""
    titles: list[str] = []
    cells: list[Token] = []
    inside = ""
    for token in tokens:
        if token.type in ("thead_open", "tbody_open"):
            inside = token.type
        elif token.type == "table_close":
            inside = ""
        elif token.type == "tr_open":
            cells = []
        elif token.type == "inline" and inside:
            cells.append(token)
        elif token.type == "tr_close" and inside == "thead_open":
            titles = [cell.content for cell in cells]
        elif token.type == "tr_close":
            yield list(zip(titles, cells, strict=False))


def _codes(row: Sequence[tuple[str, Token]]) -> list[Token]:
    if not row or row[0][0] != "code":
        return []
    return [token for token in row[0][1].children or () if token.type == "code_inline"]


def _linked(tokens: Iterable[Token]) -> Iterator[Token]:
    """The tokens with links to what the page has, or to elsewhere; of others the text alone. No link is in another."""
    kept = True
    for token in tokens:
        if token.type == "link_open":
            target = str(token.attrGet("href"))
            name, _, _ = target.partition(".md")
            kept = name in NAMES or target.startswith("https://")
            if name in NAMES:
                token.attrSet("href", target.replace(".md", "", 1))
        if kept or token.type not in ("link_open", "link_close"):
            yield token


@cache
def _markdown() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable("table")


def _text(name: str) -> str:
    path = os.path.join(os.path.dirname(__file__), "web_assets", "docs", f"{name}.md")
    with open(path, encoding="utf-8") as file:
        return file.read()
