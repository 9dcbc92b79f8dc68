"""``doctor`` on traffic between devices: ACS at the ports below switches, ATS at the devices. Pure.

What it costs is said in NVIDIA's "Optimizing VM Configuration for AI Inference", appendix, and in the threads
NVIDIA/nccl#949 (half the bandwidth until ACS was set) and openucx/ucx#11412 (which bits block peers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pcinuma import pci_config
from pcinuma.device_checks import Watched
from pcinuma.model import Finding, PciAddress
from pcinuma.node_facts import NodeFacts
from pcinuma.pci_config import DOWNSTREAM_PORT, PciConfig

_MELLANOX = 0x15B3
_WANTED_ACS = 0x5D  # SrcValid, ReqRedir, CmpltRedir, UpstreamFwd, DirectTrans: NVIDIA's value for passthrough
_SHOWN = 4
_HINTS = {pci_config.ASLEEP: "look again with the device in use; dmesg tells of one that fell off the bus"}


def check_peers(
    facts: NodeFacts, devices: Sequence[Watched], configs: Mapping[PciAddress, PciConfig]
) -> Iterator[Finding]:
    """Every finding about ACS and ATS of these devices and the bridges above them."""
    if facts.configs is None:
        return  # said to be unchecked elsewhere
    yield from _unreadable(devices, configs)
    yield from _translation_blocked(devices, configs)
    yield from _switches(devices, configs)
    yield from _ats(facts, devices, configs)


def _unreadable(devices: Sequence[Watched], configs: Mapping[PciAddress, PciConfig]) -> Iterator[Finding]:
    wanted = sorted({address for d in devices for address in (*d.function.bridges, d.function.address)})
    why: dict[str, list[PciAddress]] = {}
    for address in wanted:
        config = configs.get(address)
        problem = config.problem if config is not None else "no configuration space can be read"
        if problem is not None:
            why.setdefault(problem, []).append(address)
    for problem, addresses in why.items():
        yield Finding(
            "config-unreadable",
            "warning",
            f"whether ACS and ATS are on cannot be told for {_some(addresses)}: {problem}",
            str(addresses[0]) if len(addresses) == 1 else None,
            _HINTS.get(problem, "run as root on the node, or record the tree as root: Linux shows others 64 bytes"),
        )


def _translation_blocked(devices: Sequence[Watched], configs: Mapping[PciAddress, PciConfig]) -> Iterator[Finding]:
    above = sorted({address for device in devices for address in device.function.bridges})
    blocked = [
        address
        for address in above
        if (config := configs.get(address)) and config.acs and config.acs.control & pci_config.TRANSLATION_BLOCKING
    ]
    if blocked:
        yield Finding(
            "acs-blocks-ats",
            "warning",
            f"ACS Translation Blocking is on at {_some(blocked)}: requests translated by ATS are refused there, so"
            " that ATS of the devices below is of no use",
            str(blocked[0]) if len(blocked) == 1 else None,
            "take pci=noats from the kernel's command line; a port marked external or untrusted keeps it on",
        )


def _switches(devices: Sequence[Watched], configs: Mapping[PciAddress, PciConfig]) -> Iterator[Finding]:
    for switch, members in _peers(devices).items():
        ports = sorted({_port_below(switch, device) for device in members})
        downstream = [port for port in ports if (config := configs.get(port)) and config.port_type == DOWNSTREAM_PORT]
        names = _some([device.function.address for device in members])
        kinds: dict[str, list[PciAddress]] = {}
        for port in downstream:
            if (kind := _acs_kind(configs[port])) is not None:
                kinds.setdefault(kind, []).append(port)
        for kind, at in kinds.items():
            if kind == "redirect":
                yield _acs_redirect(switch, at, names, configs)
            else:
                yield (_acs_off if kind == "off" else _acs_missing)(switch, at, names)


def _acs_kind(config: PciConfig) -> str | None:
    if config.problem is not None:
        return None
    if config.acs is None:
        return "missing"
    if not config.acs.redirects:
        return "off"
    return None if config.acs.lets_translated_pass else "redirect"


def _acs_redirect(
    switch: PciAddress, ports: list[PciAddress], names: str, configs: Mapping[PciAddress, PciConfig]
) -> Finding:
    able = [port for port in ports if (acs := configs[port].acs) and acs.capability & pci_config.DIRECT_TRANSLATED]
    message = (
        f"below switch {switch} the ports {_some(ports)} redirect peer requests (ACS) and let no translated ones"
        f" pass: traffic between {names} goes up through the root complex, which about halves GPUDirect bandwidth."
        " The redirect is also what keeps devices of different VMs apart"
    )
    if able:
        value = (acs.capability if (acs := configs[able[0]].acs) else 0) & _WANTED_ACS
        hint = (
            f"keep the redirect, add Direct Translated: setpci -s {able[0]} ECAP_ACS+6.w={value:04x} (each port,"
            " each boot), with ATS on at the NICs; clearing it instead gives up the isolation"
        )
    else:
        hint = "these ports cannot do Direct Translated; give all devices below the switch to one VM, or accept it"
    return Finding("acs-redirect", "warning", message, str(switch), hint)


def _acs_off(switch: PciAddress, ports: list[PciAddress], names: str) -> Finding:
    return Finding(
        "acs-off",
        "info",
        f"below switch {switch} the ports {_some(ports)} redirect no peer requests (ACS off): traffic between"
        f" {names} may take the short way past the IOMMU. That is fast, and no isolation: they normally share an"
        " IOMMU group and can only go to one VM",
        str(switch),
        "pci=config_acs= on the kernel's command line (6.11 and later) or firmware switch ACS on",
    )


def _acs_missing(switch: PciAddress, ports: list[PciAddress], names: str) -> Finding:
    return Finding(
        "acs-missing",
        "info",
        f"below switch {switch} the ports {_some(ports)} have no ACS: {names} normally share an IOMMU group and"
        " can only go to one VM",
        str(switch),
    )


def _ats(facts: NodeFacts, devices: Sequence[Watched], configs: Mapping[PciAddress, PciConfig]) -> Iterator[Finding]:
    if any("noats" in word.removeprefix("pci=").split(",") for word in _pci_words(facts.command_line)):
        yield Finding(
            "ats-off",
            "warning",
            "the kernel's command line has pci=noats: no device can use ATS, and peer traffic of VMs goes through"
            " the root complex",
            None,
            "take it away",
        )
        return
    near = {device.name for members in _peers(devices).values() for device in members}
    missing, off = [], []
    for device in devices:
        config = configs.get(device.function.address)
        if device.name not in near or config is None or config.problem is not None:
            continue
        if device.is_nic and config.ats is None:
            missing.append(device)
        elif (device.is_nic or device.is_gpu) and config.ats is False:
            off.append(device)
    if missing:
        mellanox = any(device.function.vendor == _MELLANOX for device in missing)
        yield Finding(
            "ats-missing",
            "warning",
            f"the NICs {_some([d.function.address for d in missing])} share a switch with a GPU and offer no ATS:"
            " in a VM their GPUDirect RDMA goes through the root complex, at about half the bandwidth",
            missing[0].name if len(missing) == 1 else None,
            "mlxconfig -d BDF set ATS_ENABLED=true, then reboot the host (the VM alone is not enough)"
            if mellanox
            else "a setting of the NIC's firmware, if it has one",
        )
    if off:
        yield Finding(
            "ats-off",
            "warning" if any(device.is_nic for device in off) else "info",
            f"ATS is offered and not on at {_some([d.function.address for d in off])}: translated peer requests are"
            " not made until it is",
            off[0].name if len(off) == 1 else None,
            "the kernel switches it on when an IOMMU with ATS serves the device: look again with the VM running",
        )


def _pci_words(command_line: str | None) -> list[str]:
    return [word for word in (command_line or "").split() if word.startswith("pci=")]


def _peers(devices: Sequence[Watched]) -> dict[PciAddress, list[Watched]]:
    """By switch: the devices below it, where they are in two slots or more and one of them is a GPU."""
    below: dict[PciAddress, list[Watched]] = {}
    for device in devices:
        for switch in device.switches:
            below.setdefault(switch, []).append(device)
    found: dict[PciAddress, list[Watched]] = {}
    for switch, members in sorted(below.items()):
        slots = {device.function.address.slot_key for device in members}
        if len(slots) > 1 and any(device.is_gpu for device in members):
            found[switch] = members
    return found


def _port_below(switch: PciAddress, device: Watched) -> PciAddress:
    """The bridge right below the switch's upstream port on the way down to the device."""
    bridges = device.function.bridges
    at = bridges.index(switch) + 1
    return bridges[at] if at < len(bridges) else device.function.address


def _some(addresses: Sequence[PciAddress]) -> str:
    shown = ", ".join(str(address) for address in addresses[:_SHOWN])
    return shown if len(addresses) <= _SHOWN else f"{shown} and {len(addresses) - _SHOWN} more"
