"""``doctor``: is a node set up for aligned VMs? Pure: facts and the kubelet's configuration in, a diagnosis out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pcinuma.device_checks import Watched, check_devices, parsed_configs, watched
from pcinuma.kubelet import check_kubelet
from pcinuma.kubelet_config import Config
from pcinuma.kubelet_proposal import Proposal, propose
from pcinuma.model import Finding, PciAddress
from pcinuma.node_checks import check_node
from pcinuma.node_facts import NodeFacts
from pcinuma.pci_config import PciConfig
from pcinuma.peer_checks import check_peers

_ORDER = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found on a node. ``devices`` may be given to VMs, ``configs`` are theirs and their bridges'."""

    facts: NodeFacts
    devices: tuple[Watched, ...]
    configs: dict[PciAddress, PciConfig]
    findings: tuple[Finding, ...]
    proposal: Proposal | None
    kubelet_given: bool

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)


def diagnose(facts: NodeFacts, kubelet: Config | None, of_files: Sequence[Finding] = ()) -> Diagnosis:
    """All findings, errors first, and the fragment of a KubeletConfiguration that fits the node. ``of_files`` are those
    about the files that ``kubelet`` was read from."""
    configs = parsed_configs(facts)
    devices = watched(facts, configs)
    found = [*check_node(facts), *check_devices(facts, devices), *check_peers(facts, devices, configs)]
    if kubelet is not None:
        found += [*of_files, *check_kubelet(kubelet, facts)]
    if (unchecked := _unchecked(facts, kubelet)) is not None:
        found.append(unchecked)
    return Diagnosis(
        facts=facts,
        devices=tuple(devices),
        configs=configs,
        findings=tuple(sorted(found, key=lambda finding: _ORDER[finding.severity])),
        proposal=propose(facts, kubelet),
        kubelet_given=kubelet is not None,
    )


def _unchecked(facts: NodeFacts, kubelet: Config | None) -> Finding | None:
    pools = facts.pools
    groups = any(function.iommu_group is not None for function in facts.host.functions.values())
    lacking = {
        "huge pages": pools is None or any(node not in pools for node in facts.nodes_with_cpus()),
        "ACS and ATS": facts.configs is None,
        "the IOMMU": facts.iommu_groups is None and not groups,
        "the VFIO driver": facts.vfio_drivers is None,
        "packages": not all(facts.packages_of_node(node) for node in facts.nodes_with_cpus()),
        "cores": any(cpu not in facts.cpus for node in facts.host.nodes.values() for cpu in node.cpus),
        "the kernel's command line": facts.command_line is None,
        "the kubelet": kubelet is None,
    }
    names = [name for name, is_lacking in lacking.items() if is_lacking]
    if not names:
        return None
    only_kubelet = names == ["the kubelet"]
    return Finding(
        "not-checked",
        "info",
        f"could not be checked, {facts.source} does not say: {', '.join(names)}",
        None,
        "kubectl get --raw /api/v1/nodes/NODE/proxy/configz | pcinuma doctor --kubelet-config -"
        if only_kubelet
        else "run pcinuma doctor as root on the node itself, with --kubelet-config FILE",
    )
