"""The guest's address space: what the BARs of its devices need as firmware lays them out, and what it has for them.

Sizes and addresses are in bytes. A region is a size and the alignment it wants, both as firmware computes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pcinuma import seabios
from pcinuma.model import Bar, Domain, Finding, HostTopology, Placement, PlannedExpander, PlannedPort
from pcinuma.pci_tree import surroundings

MIB = 1 << 20
GIB = 1 << 30
NAMED_MODEL_BITS = 40
"""What QEMU gives a named CPU model (target/i386/cpu.c, TCG_PHYS_ADDR_BITS)."""

MOST_BITS = 52  # x86-64's architectural limit
VIRT_WINDOW = 512 * GIB  # hw/arm/virt.c, VIRT_HIGH_PCIE_MMIO
OVMF_SMALLEST = 32 * GIB  # OvmfPkg, PcdPciMmio64Size
HOLE64 = 32 * GIB  # q35's own window above the memory (hw/pci-host/q35.c)
OVMF_REST = GIB  # for what else is in the window: exactly filled, OVMF 2022.11 leaves a BAR out (measured)
LOW_WINDOW = 960 * MIB  # q35, 0xc0000000 to 0xfc000000; SeaBIOS has 44 MiB more
LOW_REST = 64 * MIB  # the chipset's and the other devices' own

_PREFETCHABLE, _IS_64 = 0x2000, 0x100000
_MEMORY = 0x200


@dataclass(frozen=True, slots=True)
class Region:
    """Address space that one bridge, or one root bus, wants."""

    size: int = 0
    align: int = MIB


@dataclass(frozen=True, slots=True)
class Need:
    """What the guest's passthrough devices want above and below 4 GiB, each root bus for itself; ``unknown`` devices
    have no BARs on record."""

    high: tuple[Region, ...]
    low: tuple[Region, ...]
    unknown: int

    @property
    def total(self) -> int:
        return sum(region.size for region in self.high)


def need(
    placements: Sequence[Placement], expanders: Sequence[PlannedExpander], host: HostTopology, *, least: int | None
) -> Need:
    """What the devices need, those of ``expanders`` below their ports, every other on a port of its own on bus 0.

    ``least`` as SeaBIOS has it: each bridge's window is a multiple of its alignment (fw/pciinit.c), which is so much at
    least above 4 GiB. None: as OVMF.
    """
    bars = {p.device.element: _bars(p, host) for p in placements}
    on_ours = {a.device.element for e in expanders for port in e.ports for a in port.attachments}
    alone = [own for element, own in bars.items() if element not in on_ours]

    def roots(*, wants_high: bool) -> tuple[Region, ...]:
        unit = least if wants_high or least is None else MIB
        ours = [_below(expander.index, expander.ports, bars, wants_high, unit) for expander in expanders]
        return (*ours, stacked([_window(own, wants_high, unit) for own in alone]))

    return Need(roots(wants_high=True), roots(wants_high=False), sum(not own for own in bars.values()))


def _bars(placement: Placement, host: HostTopology) -> tuple[Bar, ...]:
    """Those of the function itself: a mediated or vDPA device's are not its parent's, and small."""
    function = host.functions.get(placement.device.source) if placement.device.source is not None else None
    return function.bars if function is not None else ()


def _below(
    parent: int, ports: Sequence[PlannedPort], bars: dict[int, tuple[Bar, ...]], wants_high: bool, unit: int | None
) -> Region:
    regions = []
    for port in ports:
        if port.parent == parent:
            own = tuple(bar for a in port.attachments for bar in bars[a.device.element])
            inner = _below(port.index, ports, bars, wants_high, unit) if not port.attachments else None
            regions.append(_window(own, wants_high, unit) if inner is None else _as_window(inner, unit))
    return stacked(regions)


def _window(bars: Iterable[Bar], wants_high: bool, unit: int | None) -> Region:
    """The window of a bridge with these BARs behind it. Only what is prefetchable and 64 bits wide goes above 4 GiB."""
    fitting = [bar for bar in bars if bar.flags & _MEMORY and is_high(bar) == wants_high]
    return _as_window(stacked([Region(bar.size, bar.size) for bar in fitting]), unit)


def is_high(bar: Bar) -> bool:
    return bool(bar.flags & _PREFETCHABLE) and bool(bar.flags & _IS_64)


def _as_window(inside: Region, unit: int | None) -> Region:
    align = max(inside.align, unit or MIB)
    return Region(_up(inside.size, MIB if unit is None else align), align)


def stacked(regions: Iterable[Region]) -> Region:
    """The regions one after the other, those that want most alignment first."""
    offset, align = 0, 1
    for region in sorted(regions, key=lambda one: one.align, reverse=True):
        if region.size:
            offset = _up(offset, region.align) + region.size
            align = max(align, region.align)
    return Region(offset, align)


def _up(value: int, align: int) -> int:
    return -(-value // align) * align


# --- what there is ---------------------------------------------------------------------------------------------


def guest_bits(domain: Domain, host: HostTopology) -> int | None:
    """The guest's physical address bits, None where the host decides and does not say."""
    cpu = domain.cpu
    if cpu.address_mode == "emulate":
        return cpu.address_bits
    if cpu.address_mode == "passthrough":
        return host.address_bits if cpu.address_limit is None else min(host.address_bits or 64, cpu.address_limit)
    # RHEL's machine types give every model the host's bits
    if cpu.mode in ("host-passthrough", "maximum") or "rhel" in domain.machine:
        return host.address_bits
    return NAMED_MODEL_BITS


def fits(wanted: Need, bits: int, domain: Domain, *, amd: bool) -> bool:
    """Whether the regions above 4 GiB find room with that many address bits.

    SeaBIOS before 1.16.3 puts them above the memory (fw/pciinit.c). OVMF has a window of an eighth of the address space
    at its top, newest versions a quarter, when the memory leaves that free, else 32 GiB (OvmfPkg PlatformInitLib).
    """
    if not wanted.total:
        return True
    if domain.arch == "aarch64":
        return _end(wanted.high) <= VIRT_WINDOW
    end = memory_end(domain, amd=amd)
    if not domain.is_uefi:
        # its root buses share one region
        whole = stacked(wanted.high)
        return _up(end, whole.align) + whole.size <= 1 << bits
    return _end(wanted.high) + OVMF_REST <= ovmf_window(bits, end)


def memory_end(domain: Domain, *, amd: bool) -> int:
    """Where the guest's memory ends, give or take the 2 GiB of it that may be below 4 GiB. Where it would reach AMD's
    reserved range, QEMU puts all above 4 GiB above 1 TiB (hw/i386/pc.c, pc_memory_init)."""
    end = 4 * GIB + domain.memory
    start, stop = seabios.AMD_HOLE
    return stop + domain.memory if amd and end + HOLE64 >= start else end


def ovmf_window(bits: int, memory_end: int) -> int:
    """OVMF's window above 4 GiB."""
    window = 1 << bits >> 3
    return window if window > OVMF_SMALLEST and memory_end < (1 << bits) - window else OVMF_SMALLEST


def _end(regions: Iterable[Region]) -> int:
    """Where the last region ends, in the order of the root buses, from an address that suits them all."""
    at = 0
    for region in regions:
        at = _up(at, region.align) + region.size
    return at


# --- the finding -----------------------------------------------------------------------------------------------


def judged(
    domain: Domain,
    host: HostTopology,
    placements: Sequence[Placement],
    expanders: Sequence[PlannedExpander],
    *,
    apply: bool,
) -> tuple[list[Finding], int | None]:
    """What is to be said of the address space, and the ``<maxphysaddr>`` bits to set where ``apply`` allows it."""
    wanted = need(placements, expanders, host, least=None if domain.is_uefi else MIB)
    findings = list(_low(wanted, domain))
    if wanted.total <= GIB:
        return findings, None
    bits = guest_bits(domain, host)
    if bits is None:
        if wanted.total > OVMF_SMALLEST:
            message = f"the devices need {_shown(wanted.total)} of address space; the host's address bits are not known"
            hint = "record the host again with 'pcinuma snapshot', or set <maxphysaddr>"
            findings.append(Finding("mmio-window", "info", message, None, hint))
        return findings, None
    on_ours = [attached.device for e in expanders for port in e.ports for attached in port.attachments]
    other_ports = surroundings(domain, on_ours).root_buses - 1
    # a guest's CPU is of its host's vendor; one that is not known may be AMD's, which takes more
    amd = host.cpu is None or host.cpu.vendor == "AuthenticAMD"

    def old(bits: int) -> bool:
        return fits(wanted, bits, domain, amd=amd)

    def new(bits: int) -> bool:
        if domain.arch != "x86_64" or domain.is_uefi or not seabios.trusts(bits, amd=amd):
            return True
        least = seabios.least_window(bits, domain.memory, amd=amd)
        whole = stacked(need(placements, expanders, host, least=least).high)
        end = memory_end(domain, amd=amd)
        return seabios.fits(whole.size, whole.align, other_ports * least, bits, domain.memory, end, amd=amd)

    if old(bits) and new(bits):
        return findings, None
    enough = next((more for more in range(bits + 1, MOST_BITS + 1) if old(more) and new(more)), None)
    said = _said(wanted, bits, domain, memory_end(domain, amd=amd), newer_only=old(bits))
    if enough is None or (host.address_bits is not None and enough > host.address_bits):
        takes = f"; it would take {enough} bits; the host's CPUs have {host.address_bits}" if enough else ""
        message = f"{said}: the guest will lose BARs{takes}"
        findings.append(Finding("mmio-window", "warning", message, None, "pass through fewer of these devices"))
        return findings, None
    if apply:
        message = f"{said}: <maxphysaddr> is set to {enough} bits"
        findings.append(Finding("mmio-window", "info", message))
        return findings, enough
    hint = f'--mmio apply (annotation pcinuma.vm.kubevirt.io/mmio) sets <maxphysaddr mode="emulate" bits="{enough}"/>'
    if domain.cpu.mode != "host-passthrough":
        hint += "; or use the CPU model host-passthrough"
    findings.append(Finding("mmio-window", "warning", f"{said}: the guest will lose BARs", None, hint))
    return findings, None


def _low(wanted: Need, domain: Domain) -> Iterable[Finding]:
    total = _end(wanted.low)
    if domain.arch == "x86_64" and total + LOW_REST > LOW_WINDOW:
        message = f"the devices need {_shown(total)} below 4 GiB, where the guest has {_shown(LOW_WINDOW)} for all"
        yield Finding("mmio-window", "warning", message, None, "pass through fewer of these devices")


def _said(wanted: Need, bits: int, domain: Domain, memory_end: int, *, newer_only: bool) -> str:
    more = f", {wanted.unknown} devices not counted" if wanted.unknown else ""
    needs = f"the devices' BARs need {_shown(wanted.total)} of address space{more}"
    if domain.arch == "aarch64":
        return f"{needs}, the virt machine has {_shown(VIRT_WINDOW)}"
    if domain.is_uefi:
        window = ovmf_window(bits, memory_end)
        return f"{needs}, OVMF has {_shown(window)} with {bits} address bits"
    if newer_only:
        return f"{needs}, for which SeaBIOS from 1.16.3 on finds no room at the end of {bits} address bits"
    return f"{needs}, the guest has {_shown(1 << bits)} with {bits} address bits, memory included"


def _shown(size: int) -> str:
    for unit, name in ((1 << 60, "EiB"), (1 << 50, "PiB"), (1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} bytes"
