"""Where SeaBIOS from 1.16.3 on puts what goes above 4 GiB: at the end of the address space (fw/pciinit.c).

Older ones put it right above the memory. Sizes and addresses are in bytes.
"""

from __future__ import annotations

GIB = 1 << 30
MOST_BITS = 46  # whatever the CPU has: what Linux of 2018 can use
AMD_HOLE = (1012 * GIB, 1024 * GIB)  # QEMU reserves it in guests with an AMD CPU (hw/i386/pc.c, AMD_HT_START)
MEMORY_ABOVE = 0xB0000000  # of so much memory q35 has a part above 4 GiB (hw/i386/pc_q35.c)
_HOLE_BITS = 40
_BRIDGE = 2 << 20  # PCI_BRIDGE_MEM_MIN


def trusts(bits: int, *, amd: bool) -> bool:
    """Whether it believes the CPU (fw/paravirt.c, physbits): QEMU says 40 when it means nothing by it. If not, it does
    as the older ones."""
    return bits > 40 or amd or bits in (36, 39)


def least_window(bits: int, memory: int, *, amd: bool) -> int:
    """The least window of a port, also of an empty one, and what it is aligned to at least."""
    return 1 << min(bits, MOST_BITS) >> 11 if _pads(bits, memory, amd) else _BRIDGE


def _pads(bits: int, memory: int, amd: bool) -> bool:
    """Whether it leaves room for hotplug: in guests with memory above 4 GiB."""
    return trusts(bits, amd=amd) and bits >= 36 and memory >= MEMORY_ABOVE


def fits(size: int, align: int, others: int, bits: int, memory: int, memory_end: int, *, amd: bool) -> bool:
    """Whether windows of ``size`` together, the first of which wants ``align``, end up in the address space, clear of
    the memory and of what QEMU reserves. ``others`` is the size of all other windows, which come after them.

    It takes room that ends where the address space does, in eighths of that where there is memory above 4 GiB, and what
    is above the memory if that is less; if something is reserved there, the room right below, without a look at what is
    in that.
    """
    top = 1 << min(bits, MOST_BITS)
    room = _up(size + others, GIB)
    if _pads(bits, memory, amd):
        room = _up(room, top >> 3)
    hole = AMD_HOLE if amd and bits >= _HOLE_BITS else (0, 0)
    start = max(memory_end, top - room)
    if _overlap((start, start + room), hole):
        start -= room
    if start < memory_end or room > top:
        return False
    start = _up(start, max(align, GIB))
    return start + size <= 1 << bits and not _overlap((start, start + size), hole)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _up(value: int, align: int) -> int:
    return -(-value // align) * align
