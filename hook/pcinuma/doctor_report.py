"""A diagnosis → the JSON object of ``schemas/doctor.schema.json``, or text for 80 columns. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from pcinuma.device_checks import Watched
from pcinuma.doctor import Diagnosis
from pcinuma.errors import one_line
from pcinuma.kubelet_proposal import Proposal
from pcinuma.model import Finding, Link, PciAddress
from pcinuma.node_checks import size_name
from pcinuma.pci_config import PORT_TYPES, PciConfig
from pcinuma.report import finding_dict, grouped

VERSION = 1
WIDTH = 80


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as ``schemas/doctor.schema.json`` describes it."""
    facts = diagnosis.facts
    bridges = sorted({bridge for device in diagnosis.devices for bridge in device.function.bridges})
    proposal = diagnosis.proposal
    return {
        "version": VERSION,
        "source": facts.source,
        "node": {
            "nodes": [_node_dict(diagnosis, number) for number in sorted(facts.host.nodes)],
            "packages": _packages(diagnosis),
            "iommuGroups": facts.iommu_groups,
            "vfioDrivers": None if facts.vfio_drivers is None else list(facts.vfio_drivers),
            "devices": [_device_dict(device, diagnosis.configs) for device in diagnosis.devices],
            "bridges": [_bridge_dict(bridge, diagnosis.configs) for bridge in bridges],
            "virtualFunctions": _count_vfs(diagnosis),
            "mediatedDevices": len(facts.host.mdev_parents),
        },
        "findings": [finding_dict(finding) for finding in diagnosis.findings],
        "proposal": None if proposal is None else {**proposal.fragment},
        "proposalNotes": {} if proposal is None else dict(proposal.notes),
    }


def _node_dict(diagnosis: Diagnosis, number: int) -> dict[str, Any]:
    facts = diagnosis.facts
    node = facts.host.nodes[number]
    pools = (facts.pools or {}).get(number)
    return {
        "id": number,
        "cpus": str(node.cpus),
        "memoryKiB": node.memory_kib,
        "hugePages": None
        if pools is None
        else [{"sizeKiB": pool.size_kib, "total": pool.total, "free": pool.free} for pool in pools],
    }


def _device_dict(device: Watched, configs: dict[PciAddress, PciConfig]) -> dict[str, Any]:
    function = device.function
    config = configs.get(function.address)
    link = function.link
    return {
        "address": device.name,
        "class": None if function.pci_class is None else f"0x{function.pci_class:06x}",
        "node": function.node,
        "driver": function.driver,
        "iommuGroup": function.iommu_group,
        "bridges": [str(bridge) for bridge in function.bridges],
        "link": {"speed": link.speed, "width": link.width, "maxSpeed": link.max_speed, "maxWidth": link.max_width},
        "ats": _ats(config),
    }


def _bridge_dict(bridge: PciAddress, configs: dict[PciAddress, PciConfig]) -> dict[str, Any]:
    config = configs.get(bridge)
    acs = config.acs if config is not None else None
    return {
        "address": str(bridge),
        "type": PORT_TYPES.get(config.port_type) if config is not None and config.port_type is not None else None,
        "acs": None if acs is None else {"capability": acs.capability, "control": acs.control},
        "problem": "no configuration space can be read" if config is None else config.problem,
    }


def _ats(config: PciConfig | None) -> str:
    if config is None or config.problem is not None:
        return "unknown"
    return "none" if config.ats is None else ("on" if config.ats else "off")


def _packages(diagnosis: Diagnosis) -> int | None:
    return len(diagnosis.facts.packages()) or None


def _count_vfs(diagnosis: Diagnosis) -> int:
    return sum(function.physfn is not None for function in diagnosis.facts.host.functions.values())


# --- text ------------------------------------------------------------------------------------------------------


def as_text(diagnosis: Diagnosis, *, quiet: bool = False) -> str:
    """Sections for people; ``quiet`` leaves errors and warnings alone."""
    findings = grouped(finding for finding in diagnosis.findings if not quiet or finding.severity != "info")
    lines: list[str] = []
    if not quiet:
        lines += ["node", *_node_lines(diagnosis), "", "devices", *_device_lines(diagnosis), "", "findings"]
    for number, finding in enumerate(findings):
        following = findings[number + 1 : number + 2]
        is_said_again = any((other.code, other.hint) == (finding.code, finding.hint) for other in following)
        lines += _finding_lines(finding, hint=None if is_said_again else finding.hint)
    if not findings and not quiet:
        lines.append("  nothing found")
    if not quiet:
        lines += ["", "kubelet: what fits this node", *_proposal_lines(diagnosis.proposal), "", _outcome(diagnosis)]
    return "".join(f"{line}\n" for line in lines)


def _node_lines(diagnosis: Diagnosis) -> Iterator[str]:
    facts = diagnosis.facts
    packages = _packages(diagnosis)
    yield from _wrapped(f"read from {facts.source}; packages: {packages or 'not known'}", "  ")
    for number, node in sorted(facts.host.nodes.items()):
        memory = "memory not known" if node.memory_kib is None else f"memory {node.memory_kib / 2**20:.1f} GiB"
        yield from _wrapped(f"node {number}: CPUs {node.cpus or 'none'}; {memory}", "  ")
        pools = (facts.pools or {}).get(number)
        if pools is not None:
            shown = [
                f"{pool.total} of {size_name(pool.size_kib)} ({'?' if pool.free is None else pool.free} free)"
                for pool in pools
                if pool.total
            ]
            yield from _wrapped(f"huge pages: {', '.join(shown) or 'none'}", "    ")
    groups = "not known" if facts.iommu_groups is None else str(facts.iommu_groups)
    drivers = "not known" if facts.vfio_drivers is None else ", ".join(facts.vfio_drivers) or "none"
    yield from _wrapped(f"IOMMU groups: {groups}; VFIO drivers: {drivers}", "  ")


def _device_lines(diagnosis: Diagnosis) -> Iterator[str]:
    for device in diagnosis.devices:
        function = device.function
        node = "unknown" if function.node is None else str(function.node)
        kind = "GPU" if device.is_gpu else "NIC" if device.is_nic else f"class {(function.pci_class or 0) >> 8:04x}"
        parts = [f"{device.name} {kind}", f"node {node}", function.driver or "no driver", *_link_text(function.link)]
        ats = _ats(diagnosis.configs.get(function.address))
        yield from _wrapped(", ".join([*parts, f"ATS {ats}"]), "  ")
    if not diagnosis.devices:
        yield "  none that VMs are usually given"
    vfs, mdevs = _count_vfs(diagnosis), len(diagnosis.facts.host.mdev_parents)
    if vfs or mdevs:
        yield f"  and {vfs} virtual functions, {mdevs} mediated devices"


def _link_text(link: Link) -> list[str]:
    return [] if link.speed is None or link.width is None else [f"{link.speed:g} GT/s x{link.width}"]


def _finding_lines(finding: Finding, hint: str | None) -> Iterator[str]:
    yield from _wrapped(f"{finding.severity}: {finding.code}: {finding.message}", "  ")
    if hint:
        yield from _wrapped(f"hint: {hint}", "      ")


def _proposal_lines(proposal: Proposal | None) -> Iterator[str]:
    if proposal is None:
        yield "  the node's CPUs are not known: nothing can be proposed"
        return
    yield "# put these fields into the node's KubeletConfiguration; then drain the node,"
    yield "# stop the kubelet, remove cpu_manager_state and memory_manager_state from"
    yield "# /var/lib/kubelet, and start it"
    yield from proposal_yaml(proposal).splitlines()


def proposal_yaml(proposal: Proposal) -> str:
    """The fragment as YAML, each note a comment above its field."""
    import yaml  # costs 15 ms of CPU: loaded only when it is shown

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_representer(
        _Quoted, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
    )
    lines: list[str] = []
    for name, value in proposal.fragment.items():
        if note := proposal.notes.get(name):
            lines += textwrap.wrap(note, WIDTH, initial_indent="# ", subsequent_indent="# ")
        lines += yaml.dump({name: _quoted(value)}, Dumper=Dumper, sort_keys=False, width=WIDTH).splitlines()
    return "".join(f"{line}\n" for line in lines)


class _Quoted(str):
    """A text that is written in quotes: what begins with a digit is text to one YAML reader and a number to another."""


def _quoted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _quoted(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    return _Quoted(value) if isinstance(value, str) and not value[:1].isalpha() else value


def _outcome(diagnosis: Diagnosis) -> str:
    counts = dict.fromkeys(("error", "warning", "info"), 0)
    for finding in diagnosis.findings:
        counts[finding.severity] += 1
    verdict = "not set up for aligned VMs" if diagnosis.has_errors else "no error found"
    return f"outcome: {verdict}; errors {counts['error']}, warnings {counts['warning']}, notes {counts['info']}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        one_line(text),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
        break_long_words=True,
    )
