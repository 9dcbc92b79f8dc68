"""The kubelet's CPU manager: static, its options, the CPUs it keeps for the system. Pure.

Rules: Kubernetes pkg/kubelet/cm/cpumanager (policy_options.go, policy_static.go) and apis/config/validation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from pcinuma.kubelet_config import FALSE, TRUE, Config, bad_option, parse_cpus, text, unknown_option
from pcinuma.model import CpuSet, Finding
from pcinuma.node_facts import NodeFacts
from pcinuma.quantity import parse_quantity


def check_cpu_manager(config: Config, facts: NodeFacts) -> Iterator[Finding]:
    """Every finding about cpuManagerPolicy, its options and the reserved CPUs."""
    policy = text(config, "cpuManagerPolicy", "none")
    if policy != "static":
        known = "" if policy == "none" else ", which the kubelet does not know"
        yield Finding(
            "kubelet-cpu-manager",
            "error",
            f"cpuManagerPolicy is {policy!r}{known}: no VM with dedicatedCpuPlacement is scheduled here, and"
            " without dedicated CPUs there are no guest NUMA cells",
            None,
            "cpuManagerPolicy: static; drain the node and remove /var/lib/kubelet/cpu_manager_state before the restart",
        )
    yield from _cpu_options(config, is_static=policy == "static")
    if policy == "static":
        yield from _helpful_options(config, facts)
    yield from _reserved_cpus(config, facts, is_static=policy == "static")


_ALPHA_CPU_OPTIONS = ("align-by-socket", "distribute-cpus-across-cores")
_CPU_OPTIONS = (
    "full-pcpus-only", "distribute-cpus-across-numa", "strict-cpu-reservation", "prefer-align-cpus-by-uncorecache",
    *_ALPHA_CPU_OPTIONS,
)  # fmt: skip


def _cpu_options(config: Config, *, is_static: bool) -> Iterator[Finding]:
    options = config.get("cpuManagerPolicyOptions") or {}
    on = {name for name, value in options.items() if value in TRUE}
    for name, value in options.items():
        if name in _CPU_OPTIONS and (not isinstance(value, str) or value not in TRUE + FALSE):
            yield bad_option("cpuManagerPolicyOptions", name, value, '"true" or "false", in quotes')
        elif name not in _CPU_OPTIONS:
            yield unknown_option("cpuManagerPolicyOptions", name)
    if options and not is_static:
        yield Finding(
            "kubelet-options",
            "error",
            "cpuManagerPolicyOptions are set and cpuManagerPolicy is not static: the kubelet does not start",
        )
    gates = config.get("featureGates") or {}
    for name in sorted(on & set(_ALPHA_CPU_OPTIONS)):
        if gates.get("CPUManagerPolicyAlphaOptions") is not True:
            yield Finding(
                "kubelet-options",
                "error",
                f"cpuManagerPolicyOptions {name} is an alpha option and the gate CPUManagerPolicyAlphaOptions is"
                " not on: the kubelet does not start",
                None,
                "featureGates: {CPUManagerPolicyAlphaOptions: true}, or take the option away",
            )
    if "align-by-socket" in on and text(config, "topologyManagerPolicy", "none") == "single-numa-node":
        yield Finding(
            "kubelet-options",
            "error",
            "cpuManagerPolicyOptions align-by-socket and topologyManagerPolicy single-numa-node exclude each"
            " other: the kubelet does not start",
        )


def _helpful_options(config: Config, facts: NodeFacts) -> Iterator[Finding]:
    options = config.get("cpuManagerPolicyOptions") or {}
    nodes = len(facts.nodes_with_cpus())
    if any(len(place.core.members) > 1 for place in facts.cpus.values()):
        if options.get("full-pcpus-only") in TRUE:
            yield Finding(
                "kubelet-options",
                "info",
                "full-pcpus-only is on: VMs have whole cores to themselves, and a pod with an odd number of CPUs"
                " is refused (SMTAlignmentError), such as a VM with isolateEmulatorThread and an even number of"
                " vCPUs",
            )
        else:
            yield Finding(
                "kubelet-options",
                "info",
                "full-pcpus-only is not on: a VM with an odd number of CPUs shares a core with another pod",
                None,
                'cpuManagerPolicyOptions: {full-pcpus-only: "true"}, where pods with own CPUs take whole cores',
            )
    if nodes > 1 and options.get("distribute-cpus-across-numa") not in TRUE:
        yield Finding(
            "kubelet-options",
            "info",
            "distribute-cpus-across-numa is not on: a VM over several nodes gets one filled and the rest of the"
            " next, while KubeVirt gives every cell the same memory",
            None,
            'cpuManagerPolicyOptions: {distribute-cpus-across-numa: "true"}, from 1.33; before behind an alpha gate',
        )


def _reserved_cpus(config: Config, facts: NodeFacts, *, is_static: bool) -> Iterator[Finding]:
    written = text(config, "reservedSystemCPUs", "")
    if not written:
        if is_static:
            yield from _reserved_cpu_count(config, facts)
        return
    if config.get("systemReservedCgroup") or config.get("kubeReservedCgroup"):
        yield Finding(
            "kubelet-reserved-cpus",
            "error",
            "reservedSystemCPUs is set together with systemReservedCgroup or kubeReservedCgroup: the kubelet does"
            " not start",
        )
    reserved = parse_cpus(written)
    if reserved is None:
        yield Finding(
            "kubelet-reserved-cpus",
            "error",
            f"reservedSystemCPUs {written[:80]!r} is no list of CPUs: the kubelet does not start",
            None,
            'write it as "0-1,32-33"',
        )
        return
    known = {cpu for node in facts.host.nodes.values() for cpu in node.cpus}
    missing = CpuSet(reserved.members - known) if known else CpuSet()
    if missing:
        yield Finding(
            "kubelet-reserved-cpus",
            "error",
            f"reservedSystemCPUs {written} names CPUs that are not online: {missing}; the static policy refuses to"
            " start",
        )
    if known and not known - reserved.members:
        yield Finding("kubelet-reserved-cpus", "error", "reservedSystemCPUs leaves no CPU to VMs")
        return
    split = {cpu for cpu in reserved if cpu in facts.cpus and not facts.cpus[cpu].core <= reserved}
    if split:
        siblings = CpuSet(frozenset().union(*(facts.cpus[cpu].core.members for cpu in split)) - reserved.members)
        yield Finding(
            "kubelet-reserved-cpus",
            "warning",
            f"reservedSystemCPUs {written} splits cores: {siblings} share a core with reserved CPUs, so VMs get"
            " threads beside the system's work",
            None,
            f'reserve whole cores: "{CpuSet(reserved.members | siblings.members)}"',
        )
    if is_static:
        yield from _lopsided(reserved, facts)


def _lopsided(reserved: CpuSet, facts: NodeFacts) -> Iterator[Finding]:
    counts = {node: len(facts.host.nodes[node].cpus.members & reserved.members) for node in facts.nodes_with_cpus()}
    if len(counts) > 1 and 0 in counts.values():
        shown = ", ".join(f"node {node} {count}" for node, count in counts.items())
        yield Finding(
            "kubelet-reserved-cpus",
            "info",
            f"reservedSystemCPUs takes unevenly from the nodes ({shown}): the largest VM with equal cells is"
            " smaller by that",
        )


def _reserved_cpu_count(config: Config, facts: NodeFacts) -> Iterator[Finding]:
    total = Fraction(0)
    for name in ("kubeReserved", "systemReserved"):
        value = (config.get(name) or {}).get("cpu")
        amount = parse_quantity(value) if isinstance(value, str) else None
        if value is not None and (amount is None or amount < 0):
            return  # kubelet_values says so
        total += amount or 0
    count = math.ceil(total)
    if count == 0:
        yield Finding(
            "kubelet-reserved-cpus",
            "error",
            "cpuManagerPolicy is static and no CPU is reserved (reservedSystemCPUs, kubeReserved.cpu,"
            " systemReserved.cpu): the kubelet does not start",
            None,
            "reserve whole cores with reservedSystemCPUs",
        )
    elif len(facts.nodes_with_cpus()) > 1:
        yield Finding(
            "kubelet-reserved-cpus",
            "info",
            f"the kubelet itself chooses the {count} CPUs it reserves, the lowest cores, so node"
            f" {facts.nodes_with_cpus()[0]} bears most of it",
            None,
            "reservedSystemCPUs says which: whole cores of every node",
        )
