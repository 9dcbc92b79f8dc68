"""The kubelet's configuration: each wrong value is found, and what is proposed is what the kubelet would start with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pcinuma.doctor_report import proposal_yaml
from pcinuma.errors import BadInput
from pcinuma.kubelet import check_kubelet
from pcinuma.kubelet_config import load
from pcinuma.kubelet_memory import eviction_bytes
from pcinuma.kubelet_proposal import propose
from pcinuma.model import CpuSet, HostTopology
from pcinuma.node_facts import CpuPlace, NodeFacts, PagePool
from pcinuma.quantity import format_bytes, parse_quantity
from tests.support.kubelet import GIB, GOOD, advises, changed, check, everything, facts, reservation


def test_a_good_configuration_has_no_finding() -> None:
    # of two cores on each node CPUs 0,4 and 2,6 are reserved
    assert check(GOOD) == []


# --- each wrong value ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, code, severity, text",
    (
        ({"cpuManagerPolicy": None}, "kubelet-cpu-manager", "error", "cpuManagerPolicy is 'none'"),
        ({"cpuManagerPolicy": "none"}, "kubelet-cpu-manager", "error", "dedicatedCpuPlacement"),
        ({"cpuManagerPolicy": ""}, "kubelet-cpu-manager", "error", "cpuManagerPolicy is 'none'"),
        ({"cpuManagerPolicy": "Static"}, "kubelet-cpu-manager", "error", "which the kubelet does not know"),
        ({"topologyManagerPolicy": None}, "kubelet-topology-policy", "error", "is none"),
        ({"topologyManagerPolicy": "best-effort"}, "kubelet-topology-policy", "warning", "admitted all the same"),
        ({"topologyManagerPolicy": "single-numa-node"}, "kubelet-topology-policy", "warning", "two nodes"),
        ({"topologyManagerPolicy": "strict"}, "kubelet-topology-policy", "error", "does not start"),
        ({"topologyManagerScope": None}, "kubelet-topology-scope", "info", "one by one"),
        ({"topologyManagerScope": "vm"}, "kubelet-topology-scope", "error", "does not start"),
        ({"memoryManagerPolicy": None}, "kubelet-memory-manager", "warning", "memoryManagerPolicy is None"),
        ({"memoryManagerPolicy": "static"}, "kubelet-memory-manager", "error", "does not start"),
        ({"reservedSystemCPUs": None}, "kubelet-reserved-cpus", "error", "no CPU is reserved"),
        ({"reservedSystemCPUs": "0-x"}, "kubelet-reserved-cpus", "error", "no list of CPUs"),
        ({"reservedSystemCPUs": "0-4,^2"}, "kubelet-reserved-cpus", "error", "no list of CPUs"),
        ({"reservedSystemCPUs": "0,4,2,6,64"}, "kubelet-reserved-cpus", "error", "not online: 64"),
        ({"reservedSystemCPUs": "0-7"}, "kubelet-reserved-cpus", "error", "leaves no CPU"),
        ({"reservedSystemCPUs": "0,2"}, "kubelet-reserved-cpus", "warning", "splits cores: 4,6 share a core"),
        ({"reservedSystemCPUs": "0,4"}, "kubelet-reserved-cpus", "info", "node 0 2, node 1 0"),
        ({"systemReservedCgroup": "/system.slice"}, "kubelet-reserved-cpus", "error", "systemReservedCgroup"),
        ({"reservedSystemCPUs": None, "kubeReserved": {"cpu": "1500m", "memory": "1Gi"}}, "kubelet-reserved-cpus", "info",
         "the 2 CPUs it reserves"),
        ({"reservedMemory": None}, "kubelet-reserved-memory", "error", "sums to 0 bytes of memory"),
        ({"featureGates": {"MemoryManager": False}}, "kubelet-gate", "error", "MemoryManager off"),
        ({"cpuManagerPolicyOptions": {"full-pcpus-only": "yes"}}, "kubelet-options", "error", "full-pcpus-only is 'yes'"),
        ({"cpuManagerPolicyOptions": {"full-pcpus-only": True}}, "kubelet-options", "error", "in quotes"),
        ({"cpuManagerPolicyOptions": {"full-pcpu": "true"}}, "kubelet-options", "warning", "not known"),
        ({"cpuManagerPolicyOptions": {"align-by-socket": "true"}}, "kubelet-options", "error", "CPUManagerPolicyAlphaOptions"),
        ({"cpuManagerPolicyOptions": {"full-pcpus-only": "true"}, "featureGates": {"CPUManagerPolicyOptions": False}},
         "kubelet-gate", "error", "CPUManagerPolicyOptions off"),
        ({"topologyManagerPolicyOptions": {"prefer-closest-numa-nodes": "on"}}, "kubelet-options", "error", "is 'on'"),
        ({"topologyManagerPolicyOptions": {"max-allowable-numa-nodes": "4"}}, "kubelet-options", "error", 'from "8" up'),
        ({"topologyManagerPolicyOptions": {"closest": "true"}}, "kubelet-options", "warning", "not known"),
    ),
)  # fmt: skip
def test_a_wrong_value(fields: dict[str, Any], code: str, severity: str, text: str) -> None:
    (finding,) = check(changed(**fields))
    assert (finding.code, finding.severity) == (code, severity)
    assert text in finding.message


@pytest.mark.parametrize(
    "options, threads, nodes, told",
    (
        ({}, 2, 2, ["full-pcpus-only is not on", "distribute-cpus-across-numa is not on"]),
        ({"full-pcpus-only": "true"}, 2, 2, ["full-pcpus-only is on", "distribute-cpus-across-numa is not on"]),
        ({"distribute-cpus-across-numa": "true"}, 2, 2, ["full-pcpus-only is not on"]),
        ({}, 2, 1, ["full-pcpus-only is not on"]),
        ({}, 1, 2, ["distribute-cpus-across-numa is not on"]),
    ),
)
def test_options_that_would_help(options: dict[str, str], threads: int, nodes: int, told: list[str]) -> None:
    node = facts(nodes=nodes)
    if threads == 1:
        node = dataclasses.replace(node, cpus={n: CpuPlace(0, CpuSet(frozenset((n,)))) for n in node.cpus})
    found = [f.message for f in everything(changed(cpuManagerPolicyOptions=options or None), node) if advises(f)]
    assert [message.split(":")[0] for message in found] == told


def test_full_pcpus_only_is_fine() -> None:
    assert check(changed(cpuManagerPolicyOptions={"full-pcpus-only": "true", "distribute-cpus-across-numa": "1"})) == []


def test_options_without_the_static_policy_stop_the_kubelet() -> None:
    found = check(changed(cpuManagerPolicy="none", cpuManagerPolicyOptions={"full-pcpus-only": "true"}))
    assert [finding.code for finding in found] == ["kubelet-cpu-manager", "kubelet-options"]


def test_align_by_socket_and_single_numa_node() -> None:
    found = check(
        changed(
            topologyManagerPolicy="single-numa-node",
            cpuManagerPolicyOptions={"align-by-socket": "true"},
            featureGates={"CPUManagerPolicyAlphaOptions": True},
        )
    )
    assert [(finding.code, finding.severity) for finding in found] == [
        ("kubelet-options", "error"),
        ("kubelet-topology-policy", "warning"),
    ]


def test_one_node_needs_no_topology_manager() -> None:
    config = changed(
        topologyManagerPolicy=None,
        topologyManagerScope=None,
        reservedSystemCPUs="0,2",
        reservedMemory=[{"numaNode": 0, "limits": {"memory": "1624Mi"}}],
    )
    assert check(config, facts(nodes=1)) == []


@pytest.mark.parametrize("options, found", ((None, True), ({"max-allowable-numa-nodes": "10"}, False)))
def test_more_nodes_than_the_topology_manager_takes(options: dict[str, str] | None, found: bool) -> None:
    node = facts(empty=8)  # ten nodes, two with CPUs
    assert (
        "kubelet-numa-limit" in [f.code for f in check(changed(topologyManagerPolicyOptions=options), node)]
    ) is found


def test_of_more_than_two_nodes_close_ones_are_wanted() -> None:
    node = facts(nodes=4)
    found = [finding.message for finding in check(changed(reservedSystemCPUs="0-1,8-9,2-7"), node)]
    assert any("prefer-closest-numa-nodes is not on: of the 4 nodes" in message for message in found)


# --- the memory rule -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, text",
    (
        ({"reservedMemory": reservation((0, {"memory": "1600Mi"}))}, "24Mi (25165824 bytes) too little"),
        ({"reservedMemory": reservation((0, {"memory": "1Gi"}), (1, {"memory": "601Mi"}))}, "1Mi (1048576 bytes) too much"),
        ({"reservedMemory": reservation((0, {"memory": "1624Mi"}), (1, {"hugepages-1Gi": "2Gi"}))},
         "sums to 2Gi (2147483648 bytes) of hugepages-1Gi"),
        ({"reservedMemory": reservation((0, {"memory": "1624Mi"}), (7, {"memory": "1Mi"}))}, "node 7, which is no node"),
        ({"reservedMemory": reservation((0, {"memory": "1624Mi"}), (1, {"memory": "0"}))}, "zero is refused"),
        ({"reservedMemory": reservation((0, {"memory": "1Gi"}), (0, {"memory": "600Mi"}))}, "memory of node 0 twice"),
        ({"reservedMemory": reservation((0, {"memory": "1624Mi", "cpu": "1"}))}, "only memory and hugepages-"),
        ({"evictionHard": {"nodefs.available": "10%"}}, "kubeReserved 1Gi + systemReserved 500Mi is 1524Mi"),
        ({"evictionHard": {"memory.available": "0%"}}, "is 1524Mi"),
        ({"evictionHard": {"memory.available": "100%"}}, "is 1524Mi"),
        ({"systemReserved": {"memory": "80Gi"},
          "reservedMemory": reservation((0, {"memory": "80Gi"}), (1, {"memory": "1124Mi"}))},
         "the node has 64Gi"),
    ),
)  # fmt: skip
def test_a_reservation_that_stops_the_kubelet(fields: dict[str, Any], text: str) -> None:
    found = check(changed(**fields))
    assert {(finding.code, finding.severity) for finding in found} == {("kubelet-reserved-memory", "error")}
    assert any(text in finding.message for finding in found)


@pytest.mark.parametrize(
    "fields",
    (
        {"evictionHard": None},  # 100Mi is the default
        {"evictionHard": {"nodefs.available": "10%"}, "mergeDefaultEvictionSettings": True},
        {"reservedMemory": reservation((0, {"memory": "1.5Gi"}), (1, {"memory": "88Mi"}))},
        {"reservedMemory": reservation((1, {"memory": 1702887424}))},  # unquoted, as resource.Quantity allows
        {"kubeReserved": {"memory": "1073741824"}},
        {"kubeReserved": {"memory": "1048576Ki"}},
        {"kubeReserved": {"memory": "1073741824000m"}},
    ),
)
def test_the_same_reservation_written_otherwise(fields: dict[str, Any]) -> None:
    assert check(changed(**fields)) == []


@pytest.mark.parametrize(
    "fields, name",
    (
        ({"kubeReserved": {"memory": 1073741824}}, "kubeReserved.memory"),  # a number is no string to the kubelet
        ({"kubeReserved": {"memory": "1 Gi"}}, "kubeReserved.memory"),
        ({"systemReserved": {"memory": "-1Gi"}}, "systemReserved.memory"),
        ({"evictionHard": {"memory.available": "0"}}, "evictionHard memory.available"),
        ({"evictionHard": {"memory.available": "lots"}}, "evictionHard memory.available"),
        ({"reservedMemory": reservation((0, {"memory": "1GB"}))}, "reservedMemory of node 0, memory"),
        ({"reservedSystemCPUs": None, "systemReserved": {"cpu": "two", "memory": "500Mi"}}, "systemReserved.cpu"),
    ),
)
def test_what_is_no_quantity(fields: dict[str, Any], name: str) -> None:
    (finding,) = check(changed(**fields))
    assert (finding.code, finding.severity) == ("kubelet-value", "error")
    assert finding.message.startswith(f"{name} is ")


def test_a_share_of_the_memory_as_the_kubelet_computes_it() -> None:
    # float32(5)/100 is 0.0500000007450580597, of 128 GiB 6871947776.2 bytes, cut
    assert eviction_bytes("5%", 128 * GIB) == 6871947776
    reserved = reservation((0, {"memory": str(6871947776 + 1524 * 2**20)}))
    assert check(changed(evictionHard={"memory.available": "5%"}, reservedMemory=reserved)) == []


def test_a_share_of_unknown_memory_is_told_and_not_guessed() -> None:
    node = dataclasses.replace(facts(), memory_bytes=None)
    (finding,) = check(changed(evictionHard={"memory.available": "5%"}), node)
    assert (finding.code, finding.severity) == ("kubelet-reserved-memory", "info")


@pytest.mark.parametrize(
    "text, number",
    (
        ("1", 1), ("1.5", Fraction(3, 2)), (".5", Fraction(1, 2)), ("5.", 5), ("1k", 1000), ("1Ki", 1024), ("-2M", -2_000_000),
        ("100m", Fraction(1, 10)), ("1e3", 1000), ("1E3", 1000), ("1E", 10**18), ("1Ei", 2**60), ("12E-1", Fraction(6, 5)),
        ("", None), ("Gi", None), ("1 Gi", None), ("1gi", None), ("1GB", None), ("1K", None), ("0x10", None), ("1_000", None),
        ("٣", None), ("1e", None), ("1e999", None),
    ),
)  # fmt: skip
def test_quantities(text: str, number: Fraction | int | None) -> None:
    assert parse_quantity(text) == number


@settings(deadline=None)  # a busy machine is slow, which is no failure
@given(st.integers(0, 2**62))
def test_bytes_are_written_exactly(count: int) -> None:
    assert parse_quantity(format_bytes(count)) == count


# --- files -----------------------------------------------------------------------------------------------------


def test_a_dump_of_configz() -> None:
    dump = json.dumps({"kubeletconfig": {k: v for k, v in GOOD.items() if k not in ("kind", "apiVersion")}})
    assert [f for f in check_kubelet(load(dump.encode(), "configz.json"), facts()) if not advises(f)] == []


@pytest.mark.parametrize(
    "text",
    (
        "", "[]", "42", "kind: Pod", "kubeletconfig: 3", "a: [", "cpuManagerPolicy: 5", "reservedSystemCPUs: 0",
        "reservedMemory: {}", "reservedMemory: [3]", "reservedMemory: [{numaNode: x, limits: {}}]",
        "reservedMemory: [{numaNode: 0, limits: []}]", "evictionHard: [1]", "kubeReserved: {1: a}", "1: 2",
        "kind: [KubeletConfiguration]", "\x00", "---\n---\na: b", "evictionSoft: 1", "enforceNodeAllocatable: pods",
    ),
)  # fmt: skip
def test_what_is_no_configuration(text: str) -> None:
    with pytest.raises(BadInput):
        load(text.encode(), "kubelet.yaml")


def test_what_a_newer_kubelet_runs_with_is_not_unknown() -> None:
    dump = json.dumps({"kubeletconfig": {**GOOD, "aFieldOfTheFuture": 1}})
    assert [f for f in check_kubelet(load(dump.encode(), "configz.json"), facts()) if not advises(f)] == []


@pytest.mark.parametrize("write", (yaml.safe_dump, json.dumps))
def test_a_config_map_as_kubeadm_keeps_it(write: Callable[[Any], str]) -> None:
    inside = yaml.safe_dump(changed(cpuManagerPolicy="none"))
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "data": {"kubelet": inside},
        "metadata": {"name": "kubelet-config"},
    }
    (finding,) = [f for f in check_kubelet(load(write(config_map).encode(), "cm"), facts()) if not advises(f)]
    assert finding.code == "kubelet-cpu-manager"


@pytest.mark.parametrize(
    "data, where, text",
    (
        (None, "cm.yaml", "a ConfigMap without a text data.kubelet"),
        ({"config": ""}, "cm.yaml", "a ConfigMap without a text data.kubelet"),
        ({"kubelet": {"kind": "KubeletConfiguration"}}, "cm.yaml", "a ConfigMap without a text data.kubelet"),
        ({"kubelet": "a: 1\n\tb: 2\n"}, "cm.yaml, data.kubelet, line 2", "not YAML"),
        ({"kubelet": "kind: Pod"}, "cm.yaml, data.kubelet", "kind is 'Pod'"),
        ({"kubelet": "kind: ConfigMap"}, "cm.yaml, data.kubelet", "kind is 'ConfigMap'"),
    ),
)
def test_a_config_map_that_holds_none(data: Any, where: str, text: str) -> None:
    with pytest.raises(BadInput) as caught:
        load(yaml.safe_dump({"kind": "ConfigMap", "data": data}).encode(), "cm.yaml")
    assert text in caught.value.message
    assert caught.value.where == where


scalars = st.none() | st.booleans() | st.integers(-9, 2**64) | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


@settings(deadline=None)  # a busy machine is slow, which is no failure
@given(
    st.dictionaries(
        st.sampled_from(
            [
                *GOOD,
                "featureGates",
                "cpuManagerPolicyOptions",
                "topologyManagerPolicyOptions",
                "evictionSoft",
                "evictionSoftGracePeriod",
                "evictionMinimumReclaim",
                "enforceNodeAllocatable",
                "kubeletCgroup",
                "cgroupsPerQOS",
            ]
        ),
        values,
    )
)
def test_any_configuration_is_refused_or_judged(config: dict[str, Any]) -> None:
    try:
        loaded = load(json.dumps(config).encode(), "kubelet.json")
    except BadInput:
        return
    for finding in check_kubelet(loaded, facts()):
        assert finding.message
    propose(facts(), loaded)


# --- the proposal ----------------------------------------------------------------------------------------------


def kubelet_would_start(config: Mapping[str, Any], node: NodeFacts) -> None:
    """The kubelet's rules of start, written out anew from its documentation and source; plain numbers only.

    https://kubernetes.io/docs/tasks/administer-cluster/memory-manager/#reserved-memory-flag
    """
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

    def amount(text: str) -> int:
        return int(text[:-2]) * units[text[-2:]] if text[-2:] in units else int(text)

    if config.get("memoryManagerPolicy") == "Static":
        nodes = [entry["numaNode"] for entry in config["reservedMemory"]]
        assert len(nodes) == len(set(nodes))
        assert set(nodes) <= set(node.host.nodes)
        amounts = [amount(entry["limits"]["memory"]) for entry in config["reservedMemory"]]
        assert all(amounts)
        assert all(set(entry["limits"]) == {"memory"} for entry in config["reservedMemory"])
        hard = config.get("evictionHard", {"memory.available": "100Mi"})
        wanted = amount(hard.get("memory.available", "0"))
        for name in ("kubeReserved", "systemReserved"):
            wanted += amount(config.get(name, {}).get("memory", "0"))
        assert sum(amounts) == wanted > 0
        for number, reserved in zip(nodes, amounts, strict=True):
            huge = sum(pool.size_kib * 1024 * pool.total for pool in (node.pools or {})[number])
            assert reserved + huge <= (node.host.nodes[number].memory_kib or 0) * 1024
    assert config["cpuManagerPolicy"] == "static"
    text = config.get("reservedSystemCPUs")
    if not text:
        assert any(config.get(name, {}).get("cpu") for name in ("kubeReserved", "systemReserved"))
        return
    assert not config.get("systemReservedCgroup")
    chosen: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        chosen |= set(range(int(first), int(last or first) + 1))
    every = set().union(*(host.cpus.members for host in node.host.nodes.values()))
    assert chosen
    assert chosen < every
    assert all(node.cpus[cpu].core.members <= chosen for cpu in chosen)


def proposed(config: Mapping[str, Any] | None, node: NodeFacts) -> dict[str, Any]:
    """What the node's configuration is with the proposal in it; the YAML that is shown is what is read."""
    proposal = propose(node, config)
    assert proposal is not None
    shown = proposal_yaml(proposal)
    assert all(len(line) <= 80 for line in shown.splitlines())
    fragment = yaml.safe_load(shown)
    assert fragment == proposal.fragment
    return {**(config or {}), **fragment}


@pytest.mark.parametrize(
    "node",
    (
        facts(),
        facts(nodes=1),
        facts(nodes=8, cpus=32),
        facts(nodes=2, cpus=128, memory_gib=1024, pages=1000),
        facts(nodes=2, cpus=8, empty=16),
        facts(nodes=3, cpus=4, memory_gib=1),
        facts(nodes=2, memory_gib=64, pages=63),
        facts(nodes=2, cpus=2),
    ),
    ids=("two", "one", "eight", "large", "grace", "small", "full", "one-core"),
)
@pytest.mark.parametrize(
    "config",
    (
        None,
        {},
        GOOD,
        changed(evictionHard={"memory.available": "5%", "nodefs.available": "10%"}),
        changed(evictionHard={"nodefs.available": "10%"}),
        changed(evictionHard={"memory.available": "broken"}),
        changed(kubeReserved={"memory": "broken", "cpu": "1"}, systemReserved=None),
        changed(kubeReserved={"memory": "333333333"}, systemReserved={"memory": "1"}),
        changed(reservedSystemCPUs="0"),
        changed(reservedSystemCPUs="1-3,^2"),
        changed(systemReservedCgroup="/system.slice"),
        {"cpuManagerPolicy": "none", "topologyManagerPolicyOptions": {"max-allowable-numa-nodes": "3"}},
    ),
    ids=("none", "empty", "good", "percent", "no-memory", "broken-eviction", "broken", "odd", "half-core", "bad-cpus", "cgroup",
         "limit"),
)  # fmt: skip
def test_the_proposal_is_what_the_kubelet_starts_with(config: dict[str, Any] | None, node: NodeFacts) -> None:
    whole = proposed(config, node)
    kubelet_would_start(whole, node)
    worse = [finding for finding in check(whole, node) if finding.severity != "info"]
    if whole.get("memoryManagerPolicy") != "Static":  # where huge pages leave no room, which is told
        assert [finding.code for finding in worse] in ([], ["kubelet-memory-manager"])
    else:
        assert worse == []


def test_what_is_proposed_for_a_two_socket_node() -> None:
    # two nodes of 128 CPUs: 64 cores each, CPU n and n + 128 a core; 128 / 32 = 4 cores of each node
    whole = proposed(None, facts(nodes=2, cpus=128, memory_gib=512, pages=480))
    assert whole == {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "cpuManagerPolicy": "static",
        "kubeReserved": {"memory": "1Gi"},
        "systemReserved": {"memory": "1Gi"},
        "reservedSystemCPUs": "0-3,64-67,128-131,192-195",
        "memoryManagerPolicy": "Static",
        # 2 GiB and evictionHard's 100 MiB are 2148 MiB
        "reservedMemory": [
            {"numaNode": 0, "limits": {"memory": "1074Mi"}},
            {"numaNode": 1, "limits": {"memory": "1074Mi"}},
        ],
        "topologyManagerPolicy": "restricted",
        "topologyManagerScope": "pod",
    }


def test_what_is_configured_well_is_kept() -> None:
    whole = proposed(GOOD, facts())
    assert {name: whole[name] for name in GOOD if name != "reservedMemory"} == {
        name: GOOD[name] for name in GOOD if name != "reservedMemory"
    } | {"reservedSystemCPUs": "0,2,4,6"}


def test_what_another_yaml_reader_takes_for_a_number_is_in_quotes() -> None:
    # other YAML readers take 1e9 for a number, and kubeReserved takes text alone
    shown = proposal_yaml(propose(facts(), changed(kubeReserved={"memory": "1e9"})))  # type: ignore[arg-type]
    assert '  memory: "1e9"' in shown.splitlines()
    assert 'reservedSystemCPUs: "0,2,4,6"' in shown.splitlines()
    assert "cpuManagerPolicy: static" in shown.splitlines()


def test_a_percentage_becomes_bytes() -> None:
    whole = proposed(changed(evictionHard={"memory.available": "5%", "nodefs.available": "10%"}), facts())
    # 6871947776 bytes are 6553.6 MiB, up to whole ones
    assert whole["evictionHard"] == {"memory.available": "6554Mi", "nodefs.available": "10%"}


def test_nodes_without_cpus_reserve_nothing_and_count_for_the_limit() -> None:
    whole = proposed(None, facts(empty=16))
    assert [entry["numaNode"] for entry in whole["reservedMemory"]] == [0, 1]
    assert whole["topologyManagerPolicyOptions"] == {"max-allowable-numa-nodes": "18"}


def test_beside_the_huge_pages_there_must_be_room() -> None:
    proposal = propose(facts(memory_gib=64, pages=64), None)
    assert proposal is not None
    assert "memoryManagerPolicy" not in proposal.fragment
    assert "no room" in proposal.notes["cpuManagerPolicy"]
    uneven = facts(memory_gib=64)
    pools = {0: (PagePool(2**20, 64, 64),), 1: (PagePool(2**20, 32, 32),)}
    filled = NodeFacts(uneven.host, "a test", pools, uneven.cpus, memory_bytes=uneven.memory_bytes)
    whole = proposed(None, filled)
    assert whole["reservedMemory"] == [{"numaNode": 1, "limits": {"memory": "2148Mi"}}]


def test_a_node_with_little_room_reserves_what_it_has() -> None:
    node = facts(memory_gib=64)
    pools = {0: (PagePool(2**20, 63, 63),), 1: (PagePool(2**20, 32, 32),)}
    filled = NodeFacts(node.host, "a test", pools, node.cpus, memory_bytes=node.memory_bytes)
    whole = proposed(changed(systemReserved={"memory": "9Gi"}), filled)
    # 1 GiB + 9 GiB + 100 MiB: node 0 has 1 GiB beside its huge pages
    assert whole["reservedMemory"] == [
        {"numaNode": 0, "limits": {"memory": "1Gi"}},
        {"numaNode": 1, "limits": {"memory": "9316Mi"}},
    ]


def test_without_nodes_there_is_no_proposal() -> None:
    assert propose(NodeFacts(HostTopology({}, {}), "a test"), None) is None
