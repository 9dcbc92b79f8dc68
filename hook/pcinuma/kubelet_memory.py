"""The kubelet's Memory Manager: Static, and the sum that reservedMemory must be for the kubelet to start. Pure.

Rules: Kubernetes pkg/kubelet/cm/memorymanager (validateReservedMemory, NewPolicyStatic), eviction/helpers.go,
cm/node_container_manager_linux.go (GetNodeAllocatableReservation) and apis/config/validation.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from pcinuma.kubelet_config import Config, text
from pcinuma.model import Finding
from pcinuma.node_facts import NodeFacts
from pcinuma.quantity import format_bytes, parse_quantity

DEFAULT_EVICTION = "100Mi"
"""evictionHard memory.available where evictionHard is not set (kubelet's DefaultEvictionHard on Linux)."""


def check_memory_manager(config: Config, facts: NodeFacts, *, many: bool) -> Iterator[Finding]:
    """Every finding about memoryManagerPolicy and reservedMemory; ``many``: several nodes hold CPUs."""
    policy = text(config, "memoryManagerPolicy", "None")
    if policy == "Static":
        yield from _reserved_memory(config, facts)
        return
    if policy != "None":
        yield Finding(
            "kubelet-memory-manager",
            "error",
            f"memoryManagerPolicy {policy!r} is none of None, Static: the kubelet does not start",
            None,
            "the values begin with a capital letter",
        )
    elif many:
        yield Finding(
            "kubelet-memory-manager",
            "warning",
            "memoryManagerPolicy is None: nothing holds huge pages of a VM's CPUs' nodes for it. It is admitted"
            " when another node has them, and then does not start, for its cells bind to their own nodes",
            None,
            "memoryManagerPolicy: Static, with reservedMemory as proposed; drain the node and remove"
            " /var/lib/kubelet/memory_manager_state before the restart",
        )


def _reserved_memory(config: Config, facts: NodeFacts) -> Iterator[Finding]:
    totals: dict[str, Fraction] = {"memory": Fraction(0)}
    seen: set[tuple[int, str]] = set()
    are_valid = True
    for entry in config.get("reservedMemory") or []:
        node = entry.get("numaNode", 0)
        if facts.host.nodes and node not in facts.host.nodes:
            yield _reserved_error(f"reservedMemory names node {node}, which is no node of this host")
        for name, value in (entry.get("limits") or {}).items():
            amount = parse_limit_quantity(value)
            if amount is None:
                are_valid = False
                continue
            if name != "memory" and not str(name).startswith("hugepages-"):
                yield _reserved_error(
                    f"reservedMemory of node {node} reserves {str(name)[:60]!r}: only memory and hugepages-"
                )
            if amount == 0:
                yield _reserved_error(
                    f"reservedMemory of node {node} reserves no {name}: zero is refused, leave it out"
                )
            if (node, name) in seen:
                yield _reserved_error(f"reservedMemory has {name} of node {node} twice")
            seen.add((node, name))
            totals[name] = totals.get(name, Fraction(0)) + amount
            if name == "memory" and (room := room_of(facts, node)) is not None and amount > room:
                yield _reserved_error(
                    f"reservedMemory of node {node} is {format_bytes(amount)}, and beside its huge pages the node"
                    f" has {format_bytes(room)}"
                )
    reservation, parts, is_valid = memory_reservation(config, facts)
    if not are_valid or not is_valid:
        return  # what is no quantity, kubelet_values names
    if reservation is None:
        yield Finding(
            "kubelet-reserved-memory",
            "info",
            "whether reservedMemory sums right cannot be told: evictionHard is in percent, and the node's memory is not"
            " known to the byte here",
            None,
            "write memory.available in bytes, such as 100Mi",
        )
        return
    for name, total in totals.items():
        wanted = reservation if name == "memory" else Fraction(0)
        if total != wanted:
            what = (
                " + ".join(parts)
                if name == "memory"
                else "the reservation, which the kubelet has none of for huge pages,"
            )
            yield _reserved_error(
                f"reservedMemory sums to {_bytes(total)} of {name}, {what} is {_bytes(wanted)}:"
                f" {_bytes(abs(total - wanted))} too {'much' if total > wanted else 'little'}"
            )
    if not reservation and not totals["memory"]:
        yield _reserved_error("memoryManagerPolicy is Static and no memory is reserved")


def memory_reservation(config: Config, facts: NodeFacts) -> tuple[Fraction | None, list[str], bool]:
    """What the reservedMemory of all nodes must sum to, in bytes: kubeReserved + systemReserved + evictionHard.

    Also its parts in words, and whether they are quantities. None where it cannot be known: evictionHard in percent of
    a memory whose size is not known.
    """
    total, parts, is_valid = Fraction(0), [], True
    for name in ("kubeReserved", "systemReserved"):
        value = (config.get(name) or {}).get("memory", "0")
        amount = parse_quantity(value) if isinstance(value, str) else None
        if amount is None or amount < 0:
            is_valid = False
        elif amount:
            total += amount
            parts.append(f"{name} {format_bytes(amount)}")
    threshold = eviction_threshold(config)
    if threshold is not None:
        amount = eviction_bytes(threshold, facts.memory_bytes) if isinstance(threshold, str) else None
        if amount is None and isinstance(threshold, str) and eviction_percent(threshold) is not None:
            return None, parts, is_valid
        if amount is None:
            is_valid = False
        elif amount:
            total += amount
            parts.append(f"evictionHard {threshold}")
    return total, parts or ["the reservation"], is_valid


def parse_limit_quantity(value: Any) -> Fraction | None:
    """A limit of reservedMemory: text or a number, in blanks perhaps (Quantity.UnmarshalJSON); None when none."""
    return parse_quantity(str(value).strip()) if isinstance(value, (str, int, float)) else None


def eviction_threshold(config: Config) -> Any:
    """evictionHard's memory.available as it counts, with the kubelet's v1beta1 defaults; None for no threshold."""
    hard = config.get("evictionHard")
    if hard is None:
        return DEFAULT_EVICTION
    if "memory.available" in hard:
        return hard["memory.available"]
    # one signal set switches the defaults of the others off, unless they are merged (1.32 and later)
    return DEFAULT_EVICTION if config.get("mergeDefaultEvictionSettings") is True else None


def eviction_bytes(threshold: str, memory_bytes: int | None) -> Fraction | None:
    """The threshold in bytes; None for no quantity, and for a percentage of unknown memory."""
    percent = eviction_percent(threshold)
    if percent is None:
        amount = parse_quantity(threshold)
        return amount if amount is not None and amount > 0 else None
    if percent in (0, 100):
        return Fraction(0)  # the kubelet takes both for no threshold
    if memory_bytes is None:
        return None
    # the kubelet keeps it as a 32-bit float divided by 100 (eviction/helpers.go parsePercentage), and cuts the product
    share = _float32(_float32(percent) / 100)
    return Fraction(int(float(memory_bytes) * share))


def eviction_percent(threshold: str) -> float | None:
    """The number of a threshold in percent, 0 to 100; None when it is none."""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,10})?)%", threshold)
    return float(match[1]) if match and float(match[1]) <= 100 else None


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def room_of(facts: NodeFacts, node: int) -> int | None:
    """Bytes of the node's memory that are no huge pages; None where its memory is not known."""
    host_node = facts.host.nodes.get(node)
    if host_node is None or host_node.memory_kib is None:
        return None
    pools = (facts.pools or {}).get(node, ())
    return max(0, host_node.memory_kib - sum(pool.size_kib * pool.total for pool in pools)) * 1024


def _reserved_error(message: str) -> Finding:
    hint = "the sum over the nodes must be kubeReserved + systemReserved + evictionHard: the proposal has one that is"
    return Finding("kubelet-reserved-memory", "error", f"{message}: the kubelet does not start", None, hint)


def _bytes(count: Fraction) -> str:
    short = format_bytes(count)
    return f"{short} bytes" if short.isdigit() else f"{short} ({int(count)} bytes)"
