"""PCI configuration spaces, byte by byte after the PCI Express Base Specification (chapter 7)."""

from __future__ import annotations

ENDPOINT, ROOT_PORT, UPSTREAM, DOWNSTREAM = 0x0, 0x4, 0x5, 0x6


def config_space(
    port: int | None = ENDPOINT,
    *,
    acs: tuple[int, int] | None = None,
    ats: bool | None = None,
    serial: bytes | None = None,
    size: int = 4096,
) -> bytes:
    """A configuration space: PCI Express of a port type (None: conventional PCI), ACS (capability, control), ATS."""
    space = bytearray(4096)
    space[0x00:0x04] = bytes.fromhex("de103023")  # vendor 10de, device 2330, little endian
    space[0x06:0x08] = bytes.fromhex("1000")  # status: bit 4, a capabilities list
    space[0x34] = 0x60  # to power management at 0x60
    space[0x60:0x62] = bytes([0x01, 0x00 if port is None else 0x78])
    if port is not None:
        space[0x78:0x7A] = bytes([0x10, 0x00])  # PCI Express, the last of the list
        space[0x7A:0x7C] = bytes([0x02 | port << 4, 0x00])  # capability version 2, device/port type in bits 7:4
    extended: list[bytes] = []
    if serial is not None:
        extended.append(header(0x0003) + serial)  # device serial number: eight bytes after the header
    extended.append(header(0x0001) + bytes(0x44))  # advanced error reporting
    if acs is not None:
        extended.append(header(0x000D) + word(acs[0]) + word(acs[1]))  # ACS: capability, then control
    if ats is not None:
        extended.append(header(0x000F) + word(0x0020) + word(0x8000 if ats else 0))  # ATS: enable is bit 15 of control
    if port is not None:
        at = 0x100
        for number, capability in enumerate(extended):
            after = at + (len(capability) + 3) // 4 * 4
            following = after if number + 1 < len(extended) else 0
            space[at : at + len(capability)] = capability
            space[at + 2 : at + 4] = word(0x1 | following << 4)  # version in bits 19:16, next in 31:20
            at = after
    return bytes(space[:size])


def header(number: int) -> bytes:
    return word(number) + word(0)


def word(value: int) -> bytes:
    return bytes([value & 0xFF, value >> 8])
