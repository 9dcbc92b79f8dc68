"""The KubeletConfiguration fragment that fits a node: whole cores and memory reserved on every node, sums that agree.

Pure. What the given configuration already says well is kept; what is proposed passes :mod:`pcinuma.kubelet`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcinuma.kubelet import MAX_NODES
from pcinuma.kubelet_config import Config, parse_cpus, parse_limit
from pcinuma.kubelet_memory import eviction_bytes, eviction_threshold, memory_reservation, room_of
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


def propose(facts: NodeFacts, config: Config | None) -> Proposal | None:
    """The fragment for this node, on top of what is configured; None when the node's CPUs are not known."""
    given: Config = config or {}
    nodes = facts.nodes_with_cpus()
    if not nodes:
        return None
    fragment: dict[str, Any] = {"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"}
    notes: dict[str, str] = {}
    fragment["cpuManagerPolicy"] = "static"
    reserved = {name: _valid(given.get(name)) for name in ("kubeReserved", "systemReserved")}
    _cpus(facts, given, fragment, notes, reserved)
    _memory(facts, given, fragment, notes, reserved)
    for name in ("kubeReserved", "systemReserved"):
        if reserved[name]:
            fragment[name] = reserved[name]
    if "reservedMemory" in fragment:  # after what it is the sum of
        fragment["reservedMemory"] = fragment.pop("reservedMemory")
    fragment["topologyManagerPolicy"] = "restricted"
    notes["topologyManagerPolicy"] = (
        "refuses a pod that cannot be aligned; single-numa-node where no VM spans two nodes"
    )
    fragment["topologyManagerScope"] = "pod"
    if options := _topology_options(facts, given):
        fragment["topologyManagerPolicyOptions"] = options
    return Proposal(fragment, notes)


def _valid(amounts: Any) -> dict[str, Any]:
    """A map of reservations without those that the kubelet would not take."""
    return {
        name: value
        for name, value in (amounts or {}).items()
        if isinstance(value, str) and (amount := parse_quantity(value)) is not None and amount >= 0
    }


# --- CPUs ------------------------------------------------------------------------------------------------------


def _cpus(
    facts: NodeFacts,
    given: Config,
    fragment: dict[str, Any],
    notes: dict[str, str],
    reserved: dict[str, dict[str, Any]],
) -> None:
    if given.get("systemReservedCgroup") or given.get("kubeReservedCgroup"):
        chosen = None
        why = "the lowest cores: reservedSystemCPUs cannot be used beside systemReservedCgroup or kubeReservedCgroup"
    else:
        chosen, note = _kept_cpus(facts, given) or _whole_cores(facts)
        why = "which CPUs share a core is not known here, so the kubelet chooses"
        if chosen:
            fragment["reservedSystemCPUs"] = str(chosen)
            notes["reservedSystemCPUs"] = note
            return
    if not any((parse_quantity(amounts.get("cpu", "0")) or 0) > 0 for amounts in reserved.values()):
        reserved["systemReserved"] = {"cpu": "2", **{k: v for k, v in reserved["systemReserved"].items() if k != "cpu"}}
        notes["systemReserved"] = why


def _kept_cpus(facts: NodeFacts, given: Config) -> tuple[CpuSet, str] | None:
    """The configured CPUs, when they are online, whole cores and not all there is."""
    chosen = parse_cpus(given.get("reservedSystemCPUs") or "")
    known = {cpu for node in facts.host.nodes.values() for cpu in node.cpus}
    if not chosen or not chosen.members < known:
        return None
    if not all(cpu in facts.cpus and facts.cpus[cpu].core.members <= chosen.members for cpu in chosen):
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


def _memory(
    facts: NodeFacts,
    given: Config,
    fragment: dict[str, Any],
    notes: dict[str, str],
    reserved: dict[str, dict[str, Any]],
) -> None:
    rooms = {node: room for node in facts.nodes_with_cpus() if (room := room_of(facts, node))}
    unknown = [node for node in facts.nodes_with_cpus() if room_of(facts, node) is None]
    eviction = _absolute_eviction(facts, given)
    configured = any((parse_quantity(amounts.get("memory", "0")) or 0) > 0 for amounts in reserved.values())
    shares = None
    for start in (None,) if configured else _STARTS:
        tried = {name: {**amounts, "memory": start} if start else amounts for name, amounts in reserved.items()}
        trial: Config = {**given, **tried, **({"evictionHard": eviction} if eviction is not None else {})}
        total, _, problems = memory_reservation(trial, facts)
        shares = _shares(int(total), rooms) if total and not problems and total == int(total) else None
        if shares and not unknown:
            reserved.update(tried)
            if start:
                notes["kubeReserved"] = "memory: a start, measure what the node's services take"
            break
    if not shares or unknown:
        notes["cpuManagerPolicy"] = (
            "memoryManagerPolicy Static is not proposed: the memory of a node is not known"
            if unknown
            else "memoryManagerPolicy Static is not proposed: beside the huge pages there is no room for what is reserved"
        )
        return
    fragment["memoryManagerPolicy"] = "Static"
    if eviction is not None:
        fragment["evictionHard"] = eviction
        notes["evictionHard"] = "bytes instead of percent or of nothing readable: the sum must match to the byte"
    fragment["reservedMemory"] = [
        {"numaNode": node, "limits": {"memory": format_bytes(share)}} for node, share in shares.items() if share
    ]
    notes["reservedMemory"] = "sums to kubeReserved + systemReserved + evictionHard, evenly over nodes with CPUs"


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
