"""The KubeletConfiguration fragment that fits a node: whole cores and memory reserved on every node, sums that agree.

Pure. What the given configuration already says well is kept; what is proposed passes :mod:`pcinuma.kubelet`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pcinuma.kubelet import MAX_NODES
from pcinuma.kubelet_config import Config, parse_cpus, parse_limit
from pcinuma.kubelet_memory import eviction_bytes, eviction_threshold, memory_reservation, room_of
from pcinuma.kubelet_values import RESERVABLE
from pcinuma.model import CpuSet
from pcinuma.node_facts import NodeFacts
from pcinuma.quantity import format_bytes, parse_quantity

_MIB = 2**20
_CPUS_PER_CORE_RESERVED = 32
_STARTS = ("1Gi", "512Mi", "256Mi")
"""kubeReserved and systemReserved memory where none is configured: the largest of these that fits, as a start."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """``fragment`` are fields of a KubeletConfiguration, ``notes`` say by field how its value was found."""

    fragment: Mapping[str, Any]
    notes: Mapping[str, str]


@dataclass(slots=True)
class _Draft:
    """A proposal in the making; ``reserved`` is what the kubelet takes of kubeReserved and systemReserved."""

    facts: NodeFacts
    given: Config
    reserved: dict[str, dict[str, Any]]
    fragment: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def reserves(self, resource: str) -> bool:
        return any((parse_quantity(amounts.get(resource, "0")) or 0) > 0 for amounts in self.reserved.values())


def propose(facts: NodeFacts, config: Config | None) -> Proposal | None:
    """The fragment for this node, on top of what is configured; None when the node's CPUs are not known."""
    if not facts.nodes_with_cpus():
        return None
    given: Config = config or {}
    draft = _Draft(facts, given, {name: _valid(given.get(name)) for name in ("kubeReserved", "systemReserved")})
    _cpus(draft)
    _memory(draft)
    reserved = {name: amounts for name, amounts in draft.reserved.items() if amounts or given.get(name)}
    policies = {"topologyManagerPolicy": "restricted", "topologyManagerScope": "pod"}
    draft.notes["topologyManagerPolicy"] = (
        "refuses a pod that cannot be aligned; single-numa-node where no VM spans two nodes"
    )
    options = _topology_options(facts, given)
    fragment = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "cpuManagerPolicy": "static",
        **reserved,
        **draft.fragment,
        **policies,
        **({"topologyManagerPolicyOptions": options} if options or given.get("topologyManagerPolicyOptions") else {}),
    }
    return Proposal(fragment, draft.notes)


def _valid(amounts: Any) -> dict[str, Any]:
    """A map of reservations without those that the kubelet would not take."""
    return {
        name: value
        for name, value in (amounts or {}).items()
        if name in RESERVABLE
        and isinstance(value, str)
        and (amount := parse_quantity(value)) is not None
        and amount >= 0
    }


# --- CPUs ------------------------------------------------------------------------------------------------------


def _cpus(draft: _Draft) -> None:
    why = "cpu: which CPUs share a core is not known here, so the kubelet chooses"
    if draft.given.get("systemReservedCgroup") or draft.given.get("kubeReservedCgroup"):
        why = "cpu: the kubelet chooses, for reservedSystemCPUs cannot stand beside a reserved cgroup"
        if draft.given.get("reservedSystemCPUs"):
            draft.fragment["reservedSystemCPUs"] = ""
    else:
        chosen, note = _kept_cpus(draft.facts, draft.given) or _whole_cores(draft.facts)
        if chosen:
            draft.fragment["reservedSystemCPUs"] = str(chosen)
            draft.notes["reservedSystemCPUs"] = note
            return
    if not draft.reserves("cpu"):
        draft.reserved["systemReserved"] = {**draft.reserved["systemReserved"], "cpu": "2"}
        draft.notes["systemReserved"] = why


def _kept_cpus(facts: NodeFacts, given: Config) -> tuple[CpuSet, str] | None:
    """The configured CPUs, when they are online, whole cores and not all there is."""
    chosen = parse_cpus(given.get("reservedSystemCPUs") or "")
    known = {cpu for node in facts.host.nodes.values() for cpu in node.cpus}
    if not chosen or not chosen.members < known:
        return None
    if not all(cpu in facts.cpus and facts.cpus[cpu].core <= chosen for cpu in chosen):
        return None
    return chosen, "as configured"


def _whole_cores(facts: NodeFacts) -> tuple[CpuSet, str]:
    """The lowest cores of every node, one for 32 CPUs; a node with one core keeps it, unless there is no other."""
    chosen: set[int] = set()
    for number in facts.nodes_with_cpus():
        cpus = facts.host.nodes[number].cpus
        cores = sorted({tuple(facts.cpus[cpu].core) for cpu in cpus if cpu in facts.cpus})
        count = min(-(-len(cpus.members) // _CPUS_PER_CORE_RESERVED), len(cores) - 1)
        for core in cores[: max(0, count)]:
            chosen.update(core)
    cores = sorted({tuple(place.core) for place in facts.cpus.values()})
    if not chosen and len(cores) > 1:
        chosen.update(cores[0])
    return CpuSet(frozenset(chosen)), "the lowest whole cores of every node, one for each 32 of its CPUs"


# --- memory ----------------------------------------------------------------------------------------------------


def _memory(draft: _Draft) -> None:
    rooms = {node: room_of(draft.facts, node) for node in draft.facts.nodes_with_cpus()}
    known = {node: room for node, room in rooms.items() if room is not None}
    if len(known) < len(rooms):
        _without_static(draft, "no memoryManagerPolicy Static: the memory of a node is not known")
        return
    eviction = _absolute_eviction(draft.facts, draft.given)
    starts = (None,) if draft.reserves("memory") else _STARTS
    for start in starts:
        tried = {name: {**amounts, "memory": start} if start else amounts for name, amounts in draft.reserved.items()}
        trial: Config = {**draft.given, **tried, **({"evictionHard": eviction} if eviction is not None else {})}
        total, _, is_valid = memory_reservation(trial, draft.facts)
        shares = _shares(int(total), known) if total and is_valid else None
        if shares:
            break
    else:
        _without_static(
            draft, "no memoryManagerPolicy Static: the memory that is reserved has no room beside huge pages"
        )
        return
    draft.reserved = tried
    if start:
        draft.notes["kubeReserved"] = "memory: a start, measure what the node's services take"
    if eviction is not None:
        draft.fragment["evictionHard"] = eviction
        draft.notes["evictionHard"] = "memory.available in bytes: the sum below must match to the byte"
    draft.fragment["memoryManagerPolicy"] = "Static"
    draft.fragment["reservedMemory"] = [
        {"numaNode": node, "limits": {"memory": format_bytes(share)}} for node, share in shares.items() if share
    ]
    draft.notes["reservedMemory"] = "sums to kubeReserved + systemReserved + evictionHard, evenly over nodes with CPUs"


def _without_static(draft: _Draft, why: str) -> None:
    if draft.given.get("memoryManagerPolicy") == "Static":  # with which the kubelet would not start
        draft.fragment["memoryManagerPolicy"] = "None"
        draft.notes["memoryManagerPolicy"] = why
    else:
        draft.notes["cpuManagerPolicy"] = why


def _absolute_eviction(facts: NodeFacts, given: Config) -> dict[str, Any] | None:
    """evictionHard with memory.available in bytes, where it is in percent or none that counts; None to leave it."""
    threshold = eviction_threshold(given)
    if threshold is None:
        return None
    amount = eviction_bytes(threshold, facts.memory_bytes) if isinstance(threshold, str) else None
    if amount == 0:
        return None  # 0% and 100% are no threshold
    if amount and not threshold.endswith("%"):
        return None
    whole = -(-int(amount) // _MIB) * _MIB if amount else 100 * _MIB
    return {**(given.get("evictionHard") or {}), "memory.available": format_bytes(whole)}


def _shares(total: int, rooms: Mapping[int, int]) -> dict[int, int] | None:
    """``total`` bytes over the nodes, evenly in whole MiB, the odd rest on the first; None when they do not hold it."""
    if total > sum(rooms.values()):
        return None
    shares = dict.fromkeys(sorted(rooms), 0)
    left = total
    while left:
        open_nodes = [node for node in shares if shares[node] < rooms[node]]
        each = max(left // len(open_nodes) // _MIB * _MIB, 0)
        for node in open_nodes:
            part = min(each, rooms[node] - shares[node], left)
            shares[node] += part
            left -= part
        if each == 0:
            for node in open_nodes:
                part = min(left, rooms[node] - shares[node])
                shares[node] += part
                left -= part
    return shares


def _topology_options(facts: NodeFacts, given: Config) -> dict[str, Any]:
    options = {
        name: value
        for name, value in (given.get("topologyManagerPolicyOptions") or {}).items()
        if isinstance(value, str) and (name != "max-allowable-numa-nodes" or (parse_limit(value) or 0) >= MAX_NODES)
    }
    if len(facts.nodes_with_cpus()) > 2:
        options["prefer-closest-numa-nodes"] = "true"
    count = len(facts.host.nodes)
    if count > max(MAX_NODES, parse_limit(options.get("max-allowable-numa-nodes")) or 0):
        options["max-allowable-numa-nodes"] = str(count)
    return options
