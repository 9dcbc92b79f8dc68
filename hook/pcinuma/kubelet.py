"""``doctor`` on the kubelet: what keeps VMs from being aligned, and what the kubelet does not start with.

Pure. Rules: Kubernetes pkg/kubelet/cm/topologymanager (policies, policy_options.go) and apis/config/validation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pcinuma.kubelet_config import FALSE, TRUE, Config, bad_option, parse_limit, text, unknown_option
from pcinuma.kubelet_cpus import check_cpu_manager
from pcinuma.kubelet_memory import check_memory_manager
from pcinuma.kubelet_values import check_values
from pcinuma.model import Finding
from pcinuma.node_facts import NodeFacts

MAX_NODES = 8
"""The Topology Manager's limit of NUMA nodes without max-allowable-numa-nodes."""

TOPOLOGY_POLICIES = ("none", "best-effort", "restricted", "single-numa-node")
_SCOPES = ("container", "pod")


def check_kubelet(config: Config, facts: NodeFacts) -> Iterator[Finding]:
    """Every finding about the configuration on this node."""
    many = len(facts.nodes_with_cpus()) > 1
    yield from check_values(config)
    yield from _gates(config)
    yield from check_cpu_manager(config, facts)
    yield from _topology_manager(config, facts, many=many)
    yield from check_memory_manager(config, facts, many=many)


# --- feature gates ------------------------------------------------------------------------------------------


_GATES = {
    "CPUManager": None,
    "TopologyManager": None,
    "MemoryManager": None,
    "CPUManagerPolicyOptions": "cpuManagerPolicyOptions",
    "TopologyManagerPolicyOptions": "topologyManagerPolicyOptions",
}
"""Feature gates that must not be off, and the field without which it does not matter."""


def _gates(config: Config) -> Iterator[Finding]:
    gates = config.get("featureGates") or {}
    for name, value in gates.items():
        if value is not None and not isinstance(value, bool):
            yield Finding(
                "kubelet-gate",
                "error",
                f"featureGates {name[:60]} is {value!r:.60}, not true or false without quotes: the kubelet does not"
                " start",
            )
    for name, field in _GATES.items():
        is_off = name in gates and (gates[name] is False or gates[name] is None)  # Go decodes null as false
        if is_off and (field is None or config.get(field)):
            yield Finding(
                "kubelet-gate",
                "error",
                f"featureGates switches {name} off: what is configured for it has no effect, or the kubelet does"
                " not start",
                None,
                "take it away: it is on by default, and cannot be switched off in newer versions",
            )


# --- Topology Manager ---------------------------------------------------------------------------------------


def _topology_manager(config: Config, facts: NodeFacts, *, many: bool) -> Iterator[Finding]:
    policy = text(config, "topologyManagerPolicy", "none")
    options = config.get("topologyManagerPolicyOptions") or {}
    if policy not in TOPOLOGY_POLICIES:
        yield Finding(
            "kubelet-topology-policy",
            "error",
            f"topologyManagerPolicy {policy!r} is none of {', '.join(TOPOLOGY_POLICIES)}: the kubelet does not start",
        )
    elif many and policy != "restricted":
        yield _topology_policy(policy)
    scope = text(config, "topologyManagerScope", "container")
    if scope not in _SCOPES:
        yield Finding(
            "kubelet-topology-scope",
            "error",
            f"topologyManagerScope {scope!r} is none of {', '.join(_SCOPES)}: the kubelet does not start",
        )
    elif many and scope == "container" and policy != "none":
        yield Finding(
            "kubelet-topology-scope",
            "info",
            "topologyManagerScope is container: the containers of a virt-launcher pod are aligned one by one."
            " compute, which has the CPUs, the huge pages and the devices, is whole in itself; sidecars may land"
            " on other nodes",
            None,
            "topologyManagerScope: pod aligns them together",
        )
    yield from _topology_options(options, facts)
    limit = parse_limit(options.get("max-allowable-numa-nodes")) or MAX_NODES
    count = len(facts.host.nodes)
    if policy != "none" and count > limit:
        yield Finding(
            "kubelet-numa-limit",
            "error",
            f"the host has {count} NUMA nodes, those without CPUs counted, and the Topology Manager takes {limit}:"
            " the kubelet does not start",
            None,
            f'topologyManagerPolicyOptions: {{max-allowable-numa-nodes: "{count}"}} (1.31 and later)',
        )


def _topology_policy(policy: str) -> Finding:
    fix = "topologyManagerPolicy: restricted"
    if policy == "none":
        return Finding(
            "kubelet-topology-policy",
            "error",
            "topologyManagerPolicy is none: CPUs, memory and devices of a pod are chosen without regard to each"
            " other, so a VM gets GPUs of one node and CPUs of another",
            None,
            fix,
        )
    if policy == "best-effort":
        return Finding(
            "kubelet-topology-policy",
            "warning",
            "topologyManagerPolicy is best-effort: a pod that cannot be aligned is admitted all the same, and only"
            " the slow VM tells",
            None,
            f"{fix} refuses such a pod; it also refuses one whose GPUs need two nodes and whose CPUs would fit one",
        )
    return Finding(
        "kubelet-topology-policy",
        "warning",
        "topologyManagerPolicy is single-numa-node: VMs that fit one node are aligned, one with CPUs or devices of"
        " two nodes is never admitted (TopologyAffinityError)",
        None,
        f"{fix}, where VMs larger than a node are wanted",
    )


_TOPOLOGY_OPTIONS = ("prefer-closest-numa-nodes", "max-allowable-numa-nodes")


def _topology_options(options: Mapping[str, Any], facts: NodeFacts) -> Iterator[Finding]:
    for name, value in options.items():
        if name not in _TOPOLOGY_OPTIONS:
            yield unknown_option("topologyManagerPolicyOptions", name)
        elif name == "max-allowable-numa-nodes" and (parse_limit(value) or 0) < MAX_NODES:
            yield bad_option("topologyManagerPolicyOptions", name, value, f'a number from "{MAX_NODES}" up, in quotes')
        elif name == "prefer-closest-numa-nodes" and (not isinstance(value, str) or value not in TRUE + FALSE):
            yield bad_option("topologyManagerPolicyOptions", name, value, '"true" or "false", in quotes')
    if len(facts.nodes_with_cpus()) > 2 and options.get("prefer-closest-numa-nodes") not in TRUE:
        yield Finding(
            "kubelet-options",
            "info",
            f"prefer-closest-numa-nodes is not on: of the {len(facts.nodes_with_cpus())} nodes with CPUs, a VM over"
            " two gets any two, not two close ones",
            None,
            'topologyManagerPolicyOptions: {prefer-closest-numa-nodes: "true"} (on by default gate since 1.28)',
        )
