"""What a VirtualMachineInstance lacks, or asks for, so that pcinuma will have nothing to place or somebody a surprise.

Kubernetes shows such warnings to who creates the object: 120 characters each if possible, above 256 each or 4096
together it cuts (``admission.k8s.io/v1`` AdmissionResponse, warnings).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pcinuma.errors import one_line

_ON_ROOT_COMPLEX = "kubevirt.io/placePCIDevicesOnRootComplex"
_MACHINES = ("q35", "pc-q35-", "virt", "virt-")
"""Machine types with a PCI Express root bus; a name that ends in a dash begins the versioned ones."""


def warnings_of(vmi: Mapping[str, Any]) -> tuple[str, ...]:
    """The warnings, one line each. ``vmi`` may be of any shape: KubeVirt judges what is not well-formed."""
    spec = _at(vmi, "spec")
    domain = _at(spec, "domain")
    found: list[str] = []
    if not isinstance(_at(domain, "cpu", "numa", "guestMappingPassthrough"), Mapping):
        found.append(
            "the guest has no NUMA cells to place devices on: set spec.domain.cpu.numa.guestMappingPassthrough"
        )
    if _at(domain, "cpu", "dedicatedCpuPlacement") is not True:
        found.append("the vCPUs are on no host node for sure: set spec.domain.cpu.dedicatedCpuPlacement")
    if not isinstance(_at(domain, "memory", "hugepages"), Mapping):
        found.append("the memory is on no host node for sure: set spec.domain.memory.hugepages")
    if not _has_devices(spec):
        found.append("there is nothing to place: no gpus, hostDevices, SR-IOV interfaces or resourceClaims")
    machine = _at(domain, "machine", "type")
    if isinstance(machine, str) and machine and not _takes_expanders(machine):
        found.append(f"nothing is placed on machine type {one_line(machine, 40)}: use q35, on arm64 virt")
    if _at(vmi, "metadata", "annotations", _ON_ROOT_COMPLEX) == "true":
        found.append(f"{_ON_ROOT_COMPLEX} keeps every device on the root bus: remove it")
    if _at(spec, "evictionStrategy") == "LiveMigrate":
        found.append("evictionStrategy LiveMigrate: passthrough devices do not migrate, a drain of the node will wait")
    return tuple(found)


def _has_devices(spec: object) -> bool:
    devices = _at(spec, "domain", "devices")
    interfaces = _at(devices, "interfaces")
    sriov = isinstance(interfaces, list) and any(_at(interface, "sriov") is not None for interface in interfaces)
    lists = (_at(devices, "gpus"), _at(devices, "hostDevices"), _at(spec, "resourceClaims"))
    return sriov or any(isinstance(some, list) and some for some in lists)


def _takes_expanders(machine: str) -> bool:
    return any(machine.startswith(name) if name.endswith("-") else machine == name for name in _MACHINES)


def _at(found: object, *path: str) -> Any:
    """What is at the path; None where there is nothing."""
    for part in path:
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return found
