"""The kubelet's configuration: read from YAML, JSON, a dump of ``configz`` or a ConfigMap, and what its checks share.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pcinuma.errors import BadInput
from pcinuma.kubelet_fields import API_VERSION, FIELDS, KIND
from pcinuma.kubelet_text import Text, parse_text
from pcinuma.model import CpuSet, Finding

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


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and what is to be said of the text that it was read from. ``is_running``: it is what a kubelet
    runs with, drop-in files and flags included."""

    config: Config
    findings: tuple[Finding, ...] = ()
    is_running: bool = False


def load(data: bytes, where: str) -> Config:
    """The configuration alone that :func:`read` reads."""
    return read(data, where).config


def read(data: bytes, where: str) -> Loaded:
    """The KubeletConfiguration in YAML or JSON, in a dump of ``configz``, or in a ConfigMap as kubeadm keeps it.

    Raises BadInput when it is none. ``configz`` is what a kubelet runs with, so what only a newer one has is left out.
    """
    text = parse_text(data, where)
    if isinstance(text.content, Mapping) and text.content.get("kind") == "ConfigMap":
        text, where = _in_config_map(text, where)
    content, is_running = text.content, False
    if isinstance(content, Mapping) and set(content) == {"kubeletconfig"}:
        content, is_running = content["kubeletconfig"], True
        if isinstance(content, Mapping):
            known = {name: value for name, value in content.items() if name in FIELDS}
            content = {"apiVersion": API_VERSION, "kind": KIND, **known}
    if content is None and text.ignored:
        raise BadInput("the first YAML document is empty, and the kubelet reads no other", where=where, hint=_HINT)
    findings = [*ignored_documents(text, where)]
    findings += [_taken_last(name, where) for name in text.twice]
    return Loaded(checked(content, where), tuple(findings), is_running)


def checked(content: Any, where: str) -> Config:
    """The content when it has the form of a KubeletConfiguration, whole or in part. Raises BadInput."""
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


def ignored_documents(text: Text, where: str) -> Iterator[Finding]:
    """A warning where a file has more than the one document that the kubelet reads."""
    if text.ignored:
        yield Finding(
            "kubelet-documents",
            "warning",
            f"{where} has {text.ignored + 1} YAML documents: the kubelet reads the first, and of the rest says no word",
            None,
            "put all of it into the first document, or into files of the kubelet's --config-dir",
        )


def _taken_last(name: str, where: str) -> Finding:
    return Finding(
        "kubelet-twice",
        "warning",
        f"{where} has {name[:80]} twice: the kubelet takes the last, and says so in its log alone",
        None,
        "take one of them away",
    )


def _in_config_map(text: Text, where: str) -> tuple[Text, str]:
    """What the ConfigMap holds under data.kubelet (kubeadm's kubelet-config), and where that is."""
    if text.ignored:
        raise BadInput("a ConfigMap and other YAML documents after it", where=where, hint="give the ConfigMap alone")
    data = text.content.get("data")
    inner = data.get("kubelet") if isinstance(data, Mapping) else None
    if not isinstance(inner, str):
        raise BadInput("a ConfigMap without a text data.kubelet, where kubeadm keeps it", where=where, hint=_HINT)
    inside = f"{where}, data.kubelet"
    return parse_text(inner.encode("utf-8", "surrogatepass"), inside), inside


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
