"""Domain XML as text and as a tree: hardened load, exact dump, find, and edits spliced into the text.

lxml decides what the document is; this module keeps, beside lxml's tree, where in the text each element stands, so
that an edit changes the characters it means to change and no other. It is the only module that touches lxml.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from lxml import etree

from pcinuma.errors import BadInput, PcinumaError, one_line

MAX_BYTES = 16 * 1024 * 1024
"""A domain XML larger than this is refused: libvirt's own limit on the wire is 4 MiB for a string."""

Element = etree._Element

QEMU_URI = "http://libvirt.org/schemas/domain/qemu/1.0"
QEMU = f"{{{QEMU_URI}}}"
"""What the tags of libvirt's QEMU namespace begin with in the tree."""

_DECLARED = re.compile(rb"""<\?xml\s[^>]{0,200}?encoding\s*=\s*["']([A-Za-z][A-Za-z0-9._-]{0,40})["']""")
_PROLOG = re.compile(r"\ufeff?(?:\s+|<\?.*?\?>|<!--.*?-->)*", re.S)
_MARKUP = re.compile(
    r"""<!--.*?--> | <!\[CDATA\[.*?\]\]> | <\?.*?\?>
      | </(?P<close>[^\s>]+)\s*>
      | <(?P<open>[^\s/>!?]+)(?:\s+[^\s=/>"'<]+\s*=\s*(?:"[^"]*"|'[^']*'))*\s*(?P<empty>/?)>""",
    re.S | re.X,
)
_NAME = re.compile(r"<[^\s/>]+")
_SPACE = re.compile(r"[ \t\r\n]*")
_ATTRIBUTE = re.compile(r"""(\s+)([^\s=/>"'<]+)(\s*=\s*)("[^"]*"|'[^']*')""")


@dataclass(frozen=True, slots=True)
class Span:
    """Where an element stands in the text: ``start`` its ``<``, ``open_end`` after the start tag, ``close_start``
    before the end tag (equal to ``open_end`` for ``<a/>``), ``end`` after the element."""

    start: int
    open_end: int
    close_start: int
    end: int


_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (b"<\0", "utf-16-le"),  # without a mark the first characters tell (XML 1.0, appendix F)
    (b"\0<", "utf-16-be"),
)
_ROOT_HINTS = {
    "domainsnapshot": "a snapshot holds the domain inside it; give the output of 'virsh dumpxml'",
    "domstatus": "give the output of 'virsh dumpxml', not libvirt's status file",
}


class Document:
    """A loaded domain XML: the tree, the exact text, and the way back to the same bytes."""

    def __init__(self, where: str, text: str, encoding: str, root: Element):
        self.where = where
        self.text = text
        self.encoding = encoding
        self.root = root
        self.elements: list[Element] = list(root.iter(etree.Element))

    @cached_property
    def _ordinals(self) -> dict[Element, int]:
        return {element: number for number, element in enumerate(self.elements)}

    def ordinal(self, element: Element) -> int:
        """The element's place in document order, root 0: how other modules name an element."""
        return self._ordinals[element]

    def prefix(self, uri: str) -> str | None:
        """The prefix that the root element declares for a namespace; None where it declares none."""
        return next((prefix for prefix, known in self.root.nsmap.items() if known == uri and prefix), None)

    def line(self, element: Element) -> str:
        """Where the element is, for a message."""
        return f"{self.where}, line {element.sourceline}, <{element.tag}>"

    @cached_property
    def spans(self) -> list[Span]:
        """The span of every element, by ordinal. Raises PcinumaError when text and tree disagree."""
        open_tags: list[tuple[int, str]] = []
        starts: list[list[int]] = []
        for match in _MARKUP.finditer(self.text):
            if (name := match["open"]) is not None:
                number = len(starts)
                starts.append([match.start(), match.end(), match.end(), match.end()])
                if number >= len(self.elements) or _local(self.elements[number].tag) != name.rpartition(":")[2]:
                    raise PcinumaError("the text of the domain XML could not be matched with its tree")
                if not match["empty"]:
                    open_tags.append((number, name))
            elif (name := match["close"]) is not None:
                if not open_tags or open_tags[-1][1] != name:
                    raise PcinumaError("the text of the domain XML could not be matched with its tree")
                number, _ = open_tags.pop()
                starts[number][2:] = [match.start(), match.end()]
        if open_tags or len(starts) != len(self.elements):
            raise PcinumaError("the text of the domain XML could not be matched with its tree")
        return [Span(*four) for four in starts]

    def encode(self, text: str) -> bytes:
        """``text`` in the document's own encoding."""
        return text.encode(self.encoding)


def load(data: bytes, where: str = "domain XML") -> Document:
    """The document in ``data``: bounded, without DTD, entities or network, root ``<domain>``.

    Raises BadInput with the line for anything else, including an encoding that is declared wrongly.
    """
    if not data.strip(b"\x00 \t\r\n"):
        raise BadInput("the domain XML is empty", where=where)
    if len(data) > MAX_BYTES:
        raise BadInput(f"the domain XML is larger than {MAX_BYTES // 2**20} MiB", where=where)
    encoding = encoding_of(data, where)
    try:
        text = data.decode(encoding)
        exact = text.encode(encoding) == data
    except (UnicodeError, LookupError) as error:
        raise BadInput(f"the domain XML is not {encoding}: {error}", where=where) from None
    if not exact:
        raise BadInput(f"the encoding {encoding} cannot be written back byte for byte", where=where, hint="use UTF-8")
    prolog = _PROLOG.match(text)
    if text.startswith("<!DOCTYPE", prolog.end() if prolog else 0):
        raise BadInput("the domain XML has a DOCTYPE; DTDs and entities are not read", where=where)
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
    try:
        root = etree.fromstring(data, parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        line = f"{where}, line {error.lineno}" if isinstance(error, etree.XMLSyntaxError) else where
        raise BadInput(f"not well-formed XML: {one_line(_without_position(str(error)).strip())}", where=line) from None
    if root.getroottree().docinfo.internalDTD is not None:
        raise BadInput("the domain XML has a DOCTYPE; DTDs and entities are not read", where=where)
    if root.tag != "domain":
        raise BadInput(
            f"the root element is <{one_line(str(root.tag), 80)}>, not <domain>",
            where=where,
            hint=_ROOT_HINTS.get(_local(root.tag)),
        )
    return Document(where, text, encoding, root)


def encoding_of(data: bytes, where: str) -> str:
    """The Python codec of the document: its first bytes, then the declaration, then UTF-8 (XML 1.0, 4.3.3)."""
    if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, b"<\0\0\0", b"\0\0\0<")):
        raise BadInput("UTF-32 is not supported", where=where, hint="use UTF-8")
    for mark, codec in _MARKS:
        if data.startswith(mark):
            return codec
    declared = _DECLARED.match(data)
    if declared is None:
        return "utf-8"
    name = declared[1].decode("ascii")
    try:
        codec = codecs.lookup(name).name
        b"".decode(codec)  # codecs such as "hex" are no text encodings
        # those that libxml2 does not know either are not tried: to decode punycode takes the square of its length
        etree.XMLParser(encoding=name)
    except (LookupError, ValueError):
        raise BadInput(f"unknown encoding {name!r}", where=where, hint="use UTF-8") from None
    if codec.startswith(("utf-16", "utf-32")):
        raise BadInput(f"the declaration says {name}, but the bytes do not", where=where)
    return codec


def _without_position(message: str) -> str:
    return re.sub(r", line \d+, column \d+.*$", "", message)


def _local(tag: object) -> str:
    return str(tag).rpartition("}")[2]


# --- finding ---------------------------------------------------------------------------------------------------


def children(element: Element, tag: str | None = None) -> Iterator[Element]:
    """The child elements, of one tag if given; comments and processing instructions are none."""
    return element.iterchildren(etree.Element if tag is None else tag)


def find(element: Element | None, *path: str) -> Element | None:
    """The first descendant by child tags, or None."""
    for tag in path:
        if element is None:
            return None
        element = next(element.iterchildren(tag), None)
    return element


def tag_of(element: Element) -> str:
    """The tag, ``{namespace}name`` for one in a namespace."""
    return str(element.tag)


def attribute(element: Element | None, name: str) -> str | None:
    """The attribute's value, None when it or the element is absent."""
    return None if element is None else element.get(name)


def text_of(element: Element | None) -> str:
    """The element's own text, stripped; empty when the element is absent."""
    return "" if element is None else (element.text or "").strip()


def serialized(node: Element) -> bytes:
    """The node with all below it, as lxml writes it, without what follows it."""
    return etree.tostring(node, with_tail=False)


def escaped(text: str) -> str:
    """The text as an attribute's value, whatever its quotes. (xml.sax.saxutils would load the whole of urllib.)"""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), ('"', "&quot;"), ("'", "&apos;")):
        text = text.replace(character, entity)
    return text


# --- editing ---------------------------------------------------------------------------------------------------


class Editor:
    """Collects edits of a document's text and applies them at once. Positions are those of the original text."""

    def __init__(self, document: Document):
        self._document = document
        self._text = document.text
        self._edits: list[tuple[int, int, str]] = []

    def insert_first(self, parent: int, xml: list[str]) -> None:
        """Elements before everything that ``parent`` has, each on a line of its own as its first child is."""
        at = self._document.spans[parent].open_end
        lead = self._space_at(at)
        self._edits.append((at, at, "".join(lead + piece for piece in xml)))

    def append(self, parent: int, xml: str) -> None:
        """An element after the last child of ``parent``, indented as that child is."""
        span = self._document.spans[parent]
        last = self._last_child(parent)
        if last is None:
            if span.close_start == span.end:
                self._open_up(parent, xml)
            else:
                self._edits.append((span.close_start, span.close_start, xml))
            return
        at = self._document.spans[last].end
        self._edits.append((at, at, self._space_before(self._document.spans[last].start) + xml))

    def remove(self, element: int) -> None:
        """The element and the white space before it."""
        span = self._document.spans[element]
        self._edits.append((span.start - len(self._space_before(span.start)), span.end, ""))

    def replace(self, element: int, xml: str) -> None:
        """Another element in this one's place."""
        span = self._document.spans[element]
        self._edits.append((span.start, span.end, xml))

    def set_attributes(self, element: int, values: Mapping[str, str]) -> None:
        """Set attributes in the start tag: present ones keep their place and quotes, others come last."""
        span = self._document.spans[element]
        tag = self._text[span.start : span.open_end]
        present: dict[str, tuple[int, int, str]] = {}
        end = _NAME.match(tag).end()  # type: ignore[union-attr]  # a start tag begins so
        while (match := _ATTRIBUTE.match(tag, end)) is not None:
            present[match[2]] = (match.start(4), match.end(4), match[4][0])
            end = match.end()
        added = ""
        for name, value in values.items():
            if name in present:
                start, stop, quote = present[name]
                self._edits.append((span.start + start, span.start + stop, quote + value + quote))
            else:
                quote = self.quote(element)
                added += f" {name}={quote}{value}{quote}"
        if added:
            self._edits.append((span.start + end, span.start + end, added))

    def quote(self, element: int) -> str:
        """The quote character that attributes have from the element on, or had before it."""
        span = self._document.spans[element]
        if found := _ATTRIBUTE.search(self._text, span.start, span.open_end):
            return found[4][0]
        for match in _MARKUP.finditer(self._text, span.open_end):
            if found := _ATTRIBUTE.search(match[0]) if match["open"] else None:
                return found[4][0]
        for span in reversed(self._document.spans[:element]):
            if found := _ATTRIBUTE.search(self._text[span.start : span.open_end]):
                return found[4][0]
        return '"'

    def indent(self, parent: int) -> tuple[str, str]:
        """White space before a child of ``parent``, and before a child of such a child."""
        outer = self._space_before(self._document.spans[parent].start)
        inner = self._space_at(self._document.spans[parent].open_end)
        step = inner[len(outer) :] if inner.startswith(outer) and outer else ("\t" if "\t" in inner else "  ")
        return inner, inner + step if "\n" in inner else ""

    def result(self) -> str:
        """The text with the edits applied; edits must not overlap."""
        pieces: list[str] = []
        done = 0
        for start, end, new in sorted(self._edits, key=lambda edit: edit[:2]):
            if start < done:
                raise PcinumaError("two edits of the domain XML overlap")
            pieces += (self._text[done:start], new)
            done = end
        pieces.append(self._text[done:])
        return "".join(pieces)

    def _open_up(self, element: int, xml: str) -> None:
        span = self._document.spans[element]
        tag = self._text[span.start : span.open_end]
        name = _NAME.match(tag)[0][1:]  # type: ignore[index]  # a start tag begins so
        slash = tag.rindex("/")
        self._edits.append((span.start + slash, span.end, f">{xml}</{name}>"))

    def _last_child(self, parent: int) -> int | None:
        element = self._document.elements[parent]
        last = None
        for child in children(element):
            last = child
        return None if last is None else self._document.ordinal(last)

    def _space_before(self, at: int) -> str:
        start = at
        while start > 0 and self._text[start - 1] in " \t\r\n":
            start -= 1
        return self._text[start:at]

    def _space_at(self, at: int) -> str:
        return _SPACE.match(self._text, at)[0]  # type: ignore[index]  # it matches the empty text too
