"""The kubelet's configuration: read from YAML, JSON, a dump of ``configz`` or a ConfigMap, and what its checks share.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pcinuma.errors import BadInput
from pcinuma.kubelet_fields import API_VERSION, FIELDS, KIND
from pcinuma.model import CpuSet, Finding
from pcinuma.options import load_yaml

Config = Mapping[str, Any]

_MAPS = (
    "kubeReserved", "systemReserved", "evictionHard", "evictionSoft", "evictionSoftGracePeriod",
    "evictionMinimumReclaim", "featureGates", "cpuManagerPolicyOptions", "topologyManagerPolicyOptions",
)  # fmt: skip
_TEXTS = (
    "cpuManagerPolicy", "topologyManagerPolicy", "topologyManagerScope", "memoryManagerPolicy", "reservedSystemCPUs",
    "systemReservedCgroup", "kubeReservedCgroup",
)  # fmt: skip
TRUE, FALSE = ("1", "t", "T", "true", "TRUE", "True"), ("0", "f", "F", "false", "FALSE", "False")  # Go's ParseBool
_HINT = "kubectl get --raw /api/v1/nodes/NODE/proxy/configz gives what the kubelet runs with"


def load(data: bytes, where: str) -> Config:
    """The KubeletConfiguration in YAML or JSON, in a dump of ``configz``, or in a ConfigMap as kubeadm keeps it.

    Raises BadInput when it is none. ``configz`` is what a kubelet runs with, so what only a newer one has is left out.
    """
    content = load_yaml(data, where)
    if isinstance(content, Mapping) and content.get("kind") == "ConfigMap":
        content, where = _in_config_map(content, where)
    if isinstance(content, Mapping) and set(content) == {"kubeletconfig"}:
        content = content["kubeletconfig"]
        if isinstance(content, Mapping):
            known = {name: value for name, value in content.items() if name in FIELDS}
            content = {"apiVersion": API_VERSION, "kind": KIND, **known}
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise BadInput("not a KubeletConfiguration: no mapping", where=where, hint=_HINT)
    kind = content.get("kind", KIND)
    if kind != KIND:
        shown = repr(kind)[:80] if isinstance(kind, str) else "no text"
        raise BadInput(f"not a KubeletConfiguration: kind is {shown}", where=where, hint=_HINT)
    for name in _MAPS:
        value = content.get(name)
        if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
            raise BadInput(f"not a KubeletConfiguration: {name} is no mapping", where=where, hint=_HINT)
    for name in _TEXTS:
        if not isinstance(content.get(name), (str, type(None))):
            raise BadInput(
                f"not a KubeletConfiguration: {name} is no text",
                where=where,
                hint="the kubelet takes it in quotes only",
            )
    if not isinstance(content.get("enforceNodeAllocatable"), (list, type(None))):
        raise BadInput("not a KubeletConfiguration: enforceNodeAllocatable is no list", where=where, hint=_HINT)
    _check_reservations(content.get("reservedMemory"), where)
    return content


def _in_config_map(content: Mapping[Any, Any], where: str) -> tuple[Any, str]:
    """What the ConfigMap holds under data.kubelet (kubeadm's kubelet-config), and where that is."""
    data = content.get("data")
    text = data.get("kubelet") if isinstance(data, Mapping) else None
    if not isinstance(text, str):
        raise BadInput("a ConfigMap without a text data.kubelet, where kubeadm keeps it", where=where, hint=_HINT)
    inside = f"{where}, data.kubelet"
    return load_yaml(text.encode("utf-8", "surrogatepass"), inside), inside


def _check_reservations(reservations: Any, where: str) -> None:
    if reservations is None:
        return
    if not isinstance(reservations, list):
        raise BadInput("not a KubeletConfiguration: reservedMemory is no list", where=where)
    for number, entry in enumerate(reservations):
        node = entry.get("numaNode", 0) if isinstance(entry, Mapping) else None
        limits = entry.get("limits") if isinstance(entry, Mapping) else None
        if not isinstance(node, int) or isinstance(node, bool) or not isinstance(limits, (Mapping, type(None))):
            what = f"reservedMemory[{number}] is not a numaNode number with limits"
            raise BadInput(f"not a KubeletConfiguration: {what}", where=where)


def text(config: Config, name: str, default: str) -> str:
    """A text field; the empty text is the default, as it is to the kubelet."""
    return config.get(name) or default


def parse_cpus(written: str) -> CpuSet | None:
    """A list of CPUs as the kubelet takes it (no ``^``); None when it is none."""
    try:
        return CpuSet.parse(written) if re.fullmatch(r"[0-9,\-]+", written) else None
    except BadInput:
        return None


def parse_limit(value: Any) -> int | None:
    """The number of max-allowable-numa-nodes; None when it is none."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,4}", value) else None


# --- findings that say the same of several fields ------------------------------------------------------------


def bad_option(field: str, name: str, value: Any, wanted: str) -> Finding:
    return Finding(
        "kubelet-options", "error", f"{field} {name} is {value!r:.60}, not {wanted}: the kubelet does not start"
    )


def unknown_option(field: str, name: str) -> Finding:
    return Finding(
        "kubelet-options",
        "warning",
        f"{field} has {name[:60]!r}, which is not known here: a kubelet that does not know it does not start",
    )
