"""A kubelet's configuration that is in order, its changes, and a node that it fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from pcinuma.kubelet import check_kubelet
from pcinuma.kubelet_config import load
from pcinuma.model import CpuSet, Finding, HostNode, HostTopology
from pcinuma.node_facts import CpuPlace, NodeFacts, PagePool

GIB = 2**30
GOOD: dict[str, Any] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "cpuManagerPolicy": "static",
    "reservedSystemCPUs": "0,4,2,6",
    "memoryManagerPolicy": "Static",
    "kubeReserved": {"memory": "1Gi"},
    "systemReserved": {"memory": "500Mi"},
    "evictionHard": {"memory.available": "100Mi", "nodefs.available": "10%"},
    # 1024 + 500 + 100 = 1624 MiB
    "reservedMemory": [
        {"numaNode": 0, "limits": {"memory": "1Gi"}},
        {"numaNode": 1, "limits": {"memory": "600Mi"}},
    ],
    "topologyManagerPolicy": "restricted",
    "topologyManagerScope": "pod",
}


def facts(nodes: int = 2, cpus: int = 4, memory_gib: int = 64, pages: int = 0, empty: int = 0) -> NodeFacts:
    """Nodes of ``cpus`` CPUs, two threads a core (n and n + cpus / 2 of the node), and ``empty`` ones without."""
    known: dict[int, HostNode] = {}
    places: dict[int, CpuPlace] = {}
    for number in range(nodes):
        first = number * cpus // 2
        firsts = range(first, first + cpus // 2)
        half = nodes * cpus // 2
        known[number] = HostNode(
            number, CpuSet(frozenset([*firsts, *(cpu + half for cpu in firsts)])), memory_gib * 2**20
        )
        for cpu in firsts:
            core = CpuSet(frozenset((cpu, cpu + half)))
            places[cpu] = places[cpu + half] = CpuPlace(number, core)
    for number in range(nodes, nodes + empty):
        known[number] = HostNode(number, CpuSet(frozenset()), 16 * 2**20)
    return NodeFacts(
        HostTopology(known, {}),
        "a test",
        pools={number: (PagePool(2**20, pages, pages),) for number in known},
        cpus=places,
        memory_bytes=(nodes * memory_gib + empty * 16) * GIB,
    )


def check(config: Mapping[str, Any], node: NodeFacts | None = None) -> list[Finding]:
    """What is found in the configuration, after it has gone through a file; which options would help left out."""
    return [finding for finding in everything(config, node) if not advises(finding)]


def everything(config: Mapping[str, Any], node: NodeFacts | None = None) -> list[Finding]:
    return list(check_kubelet(load(yaml.safe_dump(dict(config)).encode(), "kubelet.yaml"), node or facts()))


def advises(finding: Finding) -> bool:
    return finding.message.startswith(("full-pcpus-only is", "distribute-cpus-across-numa is"))


def changed(**fields: Any) -> dict[str, Any]:
    """The good configuration with some fields changed, or taken away by None."""
    return {name: value for name, value in {**GOOD, **fields}.items() if value is not None}


def reservation(*entries: tuple[int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"numaNode": node, "limits": limits} for node, limits in entries]
