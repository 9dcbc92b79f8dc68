"""What no kubelet takes, whatever its policies: names and forms of values in the kubelet's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.kubelet import changed, check, reservation


def found(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [(finding.code, finding.severity, finding.message) for finding in check(config)]


# --- quantities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ("Static", "None"))
@pytest.mark.parametrize(
    "fields, name",
    (
        ({"kubeReserved": {"memory": "1GB"}}, "kubeReserved.memory is '1GB'"),
        ({"kubeReserved": {"memory": None}}, "kubeReserved.memory is None"),  # Go reads null as the empty text
        ({"systemReserved": {"memory": "1Gi "}}, "systemReserved.memory is '1Gi '"),
        ({"systemReserved": {"ephemeral-storage": 3}}, "systemReserved.ephemeral-storage is 3"),
        ({"systemReserved": {"pid": "-1"}}, "systemReserved.pid is '-1'"),
        ({"systemReserved": {"cpu": 2}}, "systemReserved.cpu is 2"),
        ({"systemReserved": {"nvidia.com/gpu": "1"}}, "systemReserved reserves 'nvidia.com/gpu'"),
        ({"evictionHard": {"memory.available": "5 %"}}, "evictionHard memory.available is '5 %'"),
        ({"evictionHard": {"nodefs.available": 10}}, "evictionHard nodefs.available is 10"),
        ({"evictionHard": {"nodefs.available": "101%"}}, "evictionHard nodefs.available is '101%'"),
        ({"evictionSoft": {"memory.available": "1GB"}, "evictionSoftGracePeriod": {"memory.available": "1m"}},
         "evictionSoft memory.available is '1GB'"),
        ({"evictionSoft": {"memory.available": "5Gi"}}, "evictionSoft memory.available has no evictionSoftGracePeriod"),
        ({"evictionMinimumReclaim": {"memory.available": "-1Gi"}}, "evictionMinimumReclaim memory.available is '-1Gi'"),
        ({"reservedMemory": reservation((1, {"memory": "1 Gi"}))}, "reservedMemory of node 1, memory is '1 Gi'"),
    ),
)  # fmt: skip
def test_quantities_are_judged_whatever_the_policy(fields: dict[str, Any], name: str, policy: str) -> None:
    others = ("kubelet-memory-manager", "kubelet-reserved-memory")
    ((code, severity, message),) = [
        entry for entry in found(changed(**fields, memoryManagerPolicy=policy)) if entry[0] not in others
    ]
    assert (code, severity) == ("kubelet-value", "error")
    assert message.startswith(name)
    assert "the kubelet does not start" in message


def test_all_quantities_are_named_at_once() -> None:
    config = changed(
        kubeReserved={"memory": "1GB"},
        systemReserved={"memory": "1Gi "},
        evictionHard={"memory.available": "lots"},
        reservedMemory=reservation((0, {"memory": "1 Gi"}), (7, {"memory": "1K"})),
    )
    assert [message.split(" is ")[0] for code, _, message in found(config) if code == "kubelet-value"] == [
        "kubeReserved.memory",
        "systemReserved.memory",
        "reservedMemory of node 0, memory",
        "reservedMemory of node 7, memory",
        "evictionHard memory.available",
    ]
    assert [message for code, _, message in found(config) if code == "kubelet-reserved-memory"] == [
        "reservedMemory names node 7, which is no node of this host: the kubelet does not start"
    ]


@pytest.mark.parametrize(
    "fields",
    (
        {"reservedMemory": reservation((0, {"memory": " 1Gi "}), (1, {"memory": "600Mi"}))},  # Quantity takes blanks
        {"systemReserved": {"memory": "500Mi", "cpu": "two"}},  # unread beside reservedSystemCPUs
        {"systemReserved": {"memory": "500Mi", "pid": "1000", "ephemeral-storage": "1Gi"}},
        {"evictionSoft": {"memory.available": "5Gi"}, "evictionSoftGracePeriod": {"memory.available": "1m"}},
        {"evictionSoft": {"memory.available": "0%"}},  # no threshold, so no period is asked for
        {"evictionMinimumReclaim": {"nodefs.available": "0", "imagefs.available": "2Gi"}},
        {"featureGates": {"CPUManager": True, "NodeSwap": False}},
        {"enforceNodeAllocatable": ["pods"]},
        {"enforceNodeAllocatable": ["none"], "cgroupsPerQOS": False},
        {"enforceNodeAllocatable": [], "cgroupsPerQOS": False},
    ),
)
def test_what_the_kubelet_takes(fields: dict[str, Any]) -> None:
    assert found(changed(**fields)) == []


# --- gates and enforcement -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ("false", "true", 0, 1, [], "no"))
def test_a_gate_that_is_no_bool_stops_the_kubelet(value: Any) -> None:
    ((code, severity, message),) = found(changed(featureGates={"MemoryManager": value}))
    assert (code, severity) == ("kubelet-gate", "error")
    assert message == (
        f"featureGates MemoryManager is {value!r}, not true or false without quotes: the kubelet does not start"
    )


def test_a_gate_that_is_null_is_off() -> None:
    ((code, _, message),) = found(changed(featureGates={"MemoryManager": None}))
    assert code == "kubelet-gate"
    assert "switches MemoryManager off" in message


@pytest.mark.parametrize(
    "fields, text",
    (
        ({"enforceNodeAllocatable": ["pods", "kube-reserved"]}, "has kube-reserved and there is no kubeReservedCgroup"),
        ({"enforceNodeAllocatable": ["system-reserved-compressible"]},
         "has system-reserved-compressible and there is no systemReservedCgroup"),
        ({"enforceNodeAllocatable": ["pod"]}, "has 'pod', none of none, pods, system-reserved,"),
        ({"enforceNodeAllocatable": [{"a": 1}]}, "has {'a': 1}, none of"),
        ({"enforceNodeAllocatable": ["pods", "pods"]}, "has pods twice"),
        ({"enforceNodeAllocatable": ["none", "pods"]}, "has none and others beside it"),
        ({"cgroupsPerQOS": False}, "needs cgroupsPerQOS"),
        ({"enforceNodeAllocatable": ["kube-reserved", "kube-reserved-compressible"], "kubeReservedCgroup": "/k",
          "reservedSystemCPUs": None, "systemReserved": {"cpu": "1", "memory": "500Mi"}},
         "has kube-reserved and kube-reserved-compressible, which exclude each other"),
    ),
)  # fmt: skip
def test_what_is_enforced(fields: dict[str, Any], text: str) -> None:
    ((code, severity, message),) = [entry for entry in found(changed(**fields)) if entry[0] != "kubelet-reserved-cpus"]
    assert (code, severity) == ("kubelet-enforce", "error")
    assert message.startswith(f"enforceNodeAllocatable {text}")


def test_the_hint_on_a_missing_cgroup_leads_to_no_other_error() -> None:
    (finding,) = check(changed(enforceNodeAllocatable=["kube-reserved"]))  # beside reservedSystemCPUs
    assert finding.hint is not None
    assert finding.hint.startswith("take kube-reserved away")
    config = changed(enforceNodeAllocatable=["kube-reserved"], reservedSystemCPUs=None, kubeReserved={"cpu": "1"})
    (hint,) = [finding.hint for finding in check(config) if finding.code == "kubelet-enforce"]
    assert hint == "set kubeReservedCgroup, or take kube-reserved away"


# --- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, severity, text",
    (
        ({"apiVersion": "kubelet.config.k8s.io/v1alpha9"}, "error", "apiVersion is 'kubelet.config.k8s.io/v1alpha9'"),
        ({"apiVersion": 1}, "error", "apiVersion is 1"),
        ({"apiVersion": None}, "error", "there is no apiVersion, and"),
        ({"kind": None}, "error", "there is no kind, and"),
        ({"kind": None, "apiVersion": None}, "warning", "there is no apiVersion and no kind"),
    ),
)
def test_the_api_version(fields: dict[str, Any], severity: str, text: str) -> None:
    (finding,) = check(changed(**fields))
    assert (finding.code, finding.severity) == ("kubelet-api-version", severity)
    assert finding.message.startswith(text)


@pytest.mark.parametrize(
    "name, hint",
    (
        ("CPUManagerPolicy", "cpuManagerPolicy is one; capital letters count"),
        ("TopologyManagerPolicy", "topologyManagerPolicy is one; capital letters count"),
        ("reservedSystemCpus", "reservedSystemCPUs is one; capital letters count"),
        ("memory-manager-policy", "memoryManagerPolicy is one; capital letters count"),  # as the flag has it
        ("topologyManagerPolicyOption", "topologyManagerPolicyOptions is one; capital letters count"),
        ("metadata", "take it away"),
        ("x" * 500, "take it away"),
    ),
)
def test_an_unknown_field(name: str, hint: str) -> None:
    (finding,) = check(changed(**{name: "static"}))
    assert (finding.code, finding.severity, finding.hint) == ("kubelet-field", "warning", hint)
    assert finding.message.startswith(f"{name[:80]} is no field of a KubeletConfiguration: the kubelet ignores it")


def test_an_unknown_field_of_a_reservation() -> None:
    reserved = [*reservation((0, {"memory": "1624Mi"})), {"numanode": 1}]
    (finding,) = check(changed(reservedMemory=reserved))
    assert finding.message.startswith("reservedMemory[1].numanode is no field")
    assert finding.hint == "reservedMemory[1].numaNode is one; capital letters count"


def test_no_field_that_kubeadm_writes_is_unknown() -> None:
    written = """
        authentication authorization cgroupDriver clusterDNS clusterDomain containerRuntimeEndpoint
        cpuManagerReconcilePeriod crashLoopBackOff evictionPressureTransitionPeriod fileCheckFrequency
        healthzBindAddress healthzPort httpCheckFrequency imageMaximumGCAge imageMinimumGCAge logging memorySwap
        nodeStatusReportFrequency nodeStatusUpdateFrequency resolvConf rotateCertificates runtimeRequestTimeout
        shutdownGracePeriod shutdownGracePeriodCriticalPods staticPodPath streamingConnectionIdleTimeout syncFrequency
        volumeStatsAggPeriod
    """
    assert found(changed(**{name: {} for name in written.split()})) == []
