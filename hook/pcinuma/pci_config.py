"""PCI configuration space: from the bytes of sysfs ``config`` to port type, ACS and ATS. Pure; any bytes are taken.

Layouts: PCI Express Base Specification, chapter 7 (7.5.1 header, 7.5.3 PCI Express capability, 7.6.3 extended
capability header, 7.7.11 ACS, 10.5.1 ATS). Linux shows 64 bytes of it to users without CAP_SYS_ADMIN.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADER_BYTES = 64
EXTENDED_START = 0x100

ROOT_PORT, UPSTREAM_PORT, DOWNSTREAM_PORT = 4, 5, 6
PORT_TYPES = {
    0: "endpoint",
    1: "legacy endpoint",
    ROOT_PORT: "root port",
    UPSTREAM_PORT: "switch upstream port",
    DOWNSTREAM_PORT: "switch downstream port",
    7: "PCIe to PCI bridge",
    8: "PCI to PCIe bridge",
    9: "root complex endpoint",
    10: "root complex event collector",
}

SOURCE_VALIDATION, TRANSLATION_BLOCKING, REQUEST_REDIRECT, COMPLETION_REDIRECT = 1, 2, 4, 8
UPSTREAM_FORWARDING, EGRESS_CONTROL, DIRECT_TRANSLATED = 16, 32, 64

ASLEEP = "no answer: asleep, or gone from the bus"
"""The problem of a configuration space that is all ones."""

_EXPRESS, _ACS, _ATS = 0x10, 0x000D, 0x000F
_STATUS_HAS_LIST = 0x10


@dataclass(frozen=True, slots=True)
class Acs:
    """Access Control Services: what the port can do and what is switched on, both as the specification's bits."""

    capability: int
    control: int

    @property
    def redirects(self) -> bool:
        """Requests or completions between peers are sent up to the root complex."""
        return bool(self.control & (REQUEST_REDIRECT | COMPLETION_REDIRECT))

    @property
    def lets_translated_pass(self) -> bool:
        """Requests that were translated by ATS go straight to a peer all the same."""
        return bool(self.control & DIRECT_TRANSLATED) and not self.control & TRANSLATION_BLOCKING


@dataclass(frozen=True, slots=True)
class PciConfig:
    """What a configuration space says.

    ``port_type`` is the PCI Express device or port type, None for a conventional device or where it is not known.
    ``acs`` and ``ats`` (whether ATS is on) are None where the function has no such capability; with ``problem`` set,
    nothing is known of either and it says why.
    """

    port_type: int | None = None
    acs: Acs | None = None
    ats: bool | None = None
    problem: str | None = None


def parse(data: bytes) -> PciConfig:
    """The capabilities in ``data``, which is as much of a configuration space as could be read."""
    if len(data) < HEADER_BYTES:
        return PciConfig(problem="no configuration space can be read")
    if data[:4] == b"\xff\xff\xff\xff":
        return PciConfig(problem=ASLEEP)
    express, is_whole = _find_express(data)
    if express is None and is_whole:
        return PciConfig()  # conventional PCI: it has no extended capabilities
    if express is None:
        return PciConfig(problem=_short(data))
    port_type = _word(data, express + 2) >> 4 & 0xF
    if len(data) < EXTENDED_START + 4:
        return PciConfig(port_type, problem=_short(data))
    found, is_whole = _extended(data)
    acs_at, ats_at = found.get(_ACS), found.get(_ATS)
    if not is_whole or any(at is not None and at + 8 > len(data) for at in (acs_at, ats_at)):
        return PciConfig(port_type, problem=_short(data))
    return PciConfig(
        port_type,
        acs=Acs(_word(data, acs_at + 4), _word(data, acs_at + 6)) if acs_at is not None else None,
        ats=bool(_word(data, ats_at + 6) & 0x8000) if ats_at is not None else None,
    )


def _short(data: bytes) -> str:
    return f"only {len(data)} bytes of configuration space can be read"


def _find_express(data: bytes) -> tuple[int | None, bool]:
    """Where the PCI Express capability is, and whether the list was seen to its end."""
    if not _word(data, 0x06) & _STATUS_HAS_LIST:
        return None, True
    at, seen = data[0x34] & 0xFC, set[int]()
    while at >= HEADER_BYTES and at not in seen:
        if at + 4 > len(data):
            return None, False
        if data[at] == _EXPRESS:
            return at, True
        seen.add(at)
        at = data[at + 1] & 0xFC
    return None, True


def _extended(data: bytes) -> tuple[dict[int, int], bool]:
    """Offsets of the extended capabilities by their number, the first of each; whether the list was seen to its end."""
    found: dict[int, int] = {}
    at, seen = EXTENDED_START, set[int]()
    while at >= EXTENDED_START and at not in seen:
        if at + 4 > len(data):
            return found, False
        header = int.from_bytes(data[at : at + 4], "little")
        if header in (0, 0xFFFFFFFF):
            break
        found.setdefault(header & 0xFFFF, at)
        seen.add(at)
        at = header >> 20 & 0xFFC
    return found, True


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "little")
