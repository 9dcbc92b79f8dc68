"""The form of the debug page: its fields → what a transform needs, or what is wrong, each at its field. Pure.

An input comes as a file, as pasted text, or as a file that an earlier answer has handed back to the browser (`kept`):
the newest wins in this order, and nothing is remembered between requests.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pcinuma import host_file, options
from pcinuma.domain_xml import encoding_of, load
from pcinuma.errors import BadInput, HostUnreadable, PcinumaError, one_line
from pcinuma.model import HostQuery, HostTopology, Options
from pcinuma.parse import parse

MiB = 2**20
MAX_BYTES: Mapping[str, int] = {"domain": 2 * MiB, "host": 8 * MiB, "vmi": 1 * MiB}
"""The inputs, each with the most bytes it may have. A domain of KubeVirt's has some ten thousand."""

NAMES: Mapping[str, str] = {"domain": "domain XML", "host": "host record", "vmi": "VMI"}
"""What messages call the inputs, in the order of the page."""

RECORDED, MACHINE = "recorded", "machine"

ReadHost = Callable[[HostQuery], HostTopology]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept:
    """A file that was given: its bytes, and its name for people."""

    name: str
    data: bytes

    @property
    def encoded(self) -> str:
        return base64.b64encode(self.data).decode("ascii")

    @property
    def size(self) -> str:
        count = len(self.data)
        return (
            f"{count / MiB:.1f} MiB" if count >= MiB else f"{count / 1024:.1f} KiB" if count >= 1024 else f"{count} B"
        )


@dataclass(frozen=True, slots=True)
class Form:
    """What the fields hold, to be shown again as it is. ``texts`` and ``files`` are by input, ``chosen`` by option
    (empty: not chosen), ``source`` says where the host is read from."""

    texts: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Kept] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)
    source: str = RECORDED
    broken: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a field: an input, or an option."""

    field: str
    error: PcinumaError


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a transform is made of. ``where`` names the domain in messages."""

    domain: bytes
    where: str
    options: Options
    read_host: ReadHost


class HostProblem(Exception):
    """Carries an error of the host's through whoever asked for the host."""

    def __init__(self, error: PcinumaError):
        super().__init__(str(error))
        self.error = error


def read(values: Mapping[str, str], uploads: Mapping[str, Kept]) -> Form:
    """The form as it was sent: ``values`` of its fields, ``uploads`` of those that take a file."""
    texts: dict[str, str] = {}
    files: dict[str, Kept] = {}
    broken = set()
    for name in MAX_BYTES:
        text = values.get(name, "").replace("\r\n", "\n")  # a form has every line end as CR LF (HTML, 4.10.21.5)
        if name in uploads:
            files[name] = uploads[name]
        elif text.strip():
            texts[name] = text
        elif values.get(f"{name}-kept") and not values.get(f"{name}-drop"):
            try:
                data = base64.b64decode(values[f"{name}-kept"], validate=True)
            except (binascii.Error, ValueError):
                broken.add(name)
            else:
                files[name] = Kept(values.get(f"{name}-kept-name", ""), data)
    chosen = {name: values.get(name, "") for name in options.CHOICES}
    return Form(texts, files, chosen, values.get("source", RECORDED), frozenset(broken))


def inputs_of(form: Form, machine: ReadHost | None) -> tuple[Inputs | None, list[Problem]]:
    """What to transform, or all that is wrong with the fields. ``machine`` reads this machine, where that may be."""
    problems: list[Problem] = []

    def tried(name: str, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except PcinumaError as error:
            problems.append(Problem(name, error))
            return None

    domain = tried("domain", lambda: _required(form, "domain"))
    host = tried("host", lambda: _host(form, machine))
    annotations = tried("vmi", lambda: _annotations(form))
    chosen = {name: tried(name, lambda n=name, v=value: _checked(n, v)) for name, value in form.chosen.items() if value}  # type: ignore[misc]
    if problems or domain is None or host is None:
        if domain is not None:  # what the transform would say of it, beside the others
            tried("domain", lambda: parse(load(domain, _where(form, "domain"))))
        return None, problems
    made = options.resolve(chosen, annotations)
    return Inputs(domain, _where(form, "domain"), made, _told_apart(host)), []


def _checked(name: str, value: str) -> str:
    return options.checked(name, value, "this field")


def _annotations(form: Form) -> dict[str, str]:
    data = _bytes(form, "vmi")
    if data is None:
        return {}
    where = _where(form, "vmi")
    return options.from_vmi(options.load_object(data, where), where)


def _host(form: Form, machine: ReadHost | None) -> ReadHost:
    if form.source == MACHINE:
        if machine is None:
            raise BadInput(
                "this machine is not read: the page is served to others",
                hint="give a record made by 'pcinuma snapshot', or serve the page on loopback",
            )
        return machine
    if form.source != RECORDED:
        raise BadInput(f"source cannot be {form.source[:80]!r}", hint=f"one of: {RECORDED}, {MACHINE}")
    data = _bytes(form, "host")
    return host_file.load(data, _where(form, "host")) if data is not None else _no_host


def _no_host(_: HostQuery) -> HostTopology:
    # asked only when the domain has devices to place: one without needs no host
    raise HostUnreadable("no host", hint="give the record that 'pcinuma snapshot' makes on the VM's node")


def _told_apart(read_host: ReadHost) -> ReadHost:
    """The same reader, whose errors are told from those of the domain that is read meanwhile."""

    def asked(query: HostQuery) -> HostTopology:
        try:
            return read_host(query)
        except PcinumaError as error:
            raise HostProblem(error) from None

    return asked


def _required(form: Form, name: str) -> bytes:
    data = _bytes(form, name)
    if data is None:
        raise BadInput(f"no {NAMES[name]}", hint="paste it, or choose its file: virsh dumpxml VM > domain.xml")
    return data


def _bytes(form: Form, name: str) -> bytes | None:
    if name in form.broken:
        raise BadInput("the file that was kept did not come back whole", hint="choose it again")
    if name in form.files:
        data = form.files[name].data
    elif name in form.texts:
        data = _encoded(form.texts[name])
    else:
        return None
    if len(data) > MAX_BYTES[name]:
        raise BadInput(f"larger than {MAX_BYTES[name] // MiB} MiB", where=_where(form, name))
    return data


def _encoded(text: str) -> bytes:
    """Pasted text as the file it was copied from: in the encoding that an XML declaration names, else in UTF-8."""
    plain = text.encode("utf-8", "replace")
    try:
        return text.encode(encoding_of(plain, ""))
    except (BadInput, UnicodeError, LookupError):
        return plain


def _where(form: Form, name: str) -> str:
    given = form.files.get(name)
    return one_line(given.name, 120) if given is not None and given.name else NAMES[name]
