"""What no kubelet takes, whatever its policies: another apiVersion, misspelt fields, values of a wrong form. Pure.

Rules: Kubernetes pkg/kubelet/kubeletconfig/util/codec (strict decoding; what only that refuses is logged and ignored),
cmd/kubelet/app/server.go (parseResourceList), eviction/helpers.go (ParseThresholdConfig), apis/config/validation.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from pcinuma.kubelet_config import Config, parse_cpus
from pcinuma.kubelet_fields import API_VERSION, FIELDS, KIND, RESERVATION_FIELDS
from pcinuma.kubelet_memory import eviction_percent, parse_limit_quantity
from pcinuma.model import Finding
from pcinuma.quantity import parse_quantity


def check_values(config: Config) -> Iterator[Finding]:
    """Every finding, all at once: a kubelet names one at a time."""
    yield from _api_version(config)
    yield from _unknown_fields(config)
    yield from _reserved_amounts(config)
    yield from _reserved_memory(config)
    yield from _eviction(config)
    yield from _enforcement(config)


# --- names -------------------------------------------------------------------------------------------------------


def _api_version(config: Config) -> Iterator[Finding]:
    version, kind = config.get("apiVersion"), config.get("kind")
    if version is None and kind is None:
        yield Finding(
            "kubelet-api-version",
            "warning",
            f"there is no apiVersion and no kind: taken for a part of a {KIND}; the kubelet starts with no such file",
            None,
            f"apiVersion: {API_VERSION}, kind: {KIND}",
        )
    elif version != API_VERSION or kind is None:
        what = "there is no kind" if kind is None else "there is no apiVersion"
        if version not in (None, API_VERSION):
            what = f"apiVersion is {version!r:.80}"
        yield Finding(
            "kubelet-api-version",
            "error",
            f"{what}, and the kubelet takes a {KIND} of {API_VERSION} alone: it does not start",
            None,
            f"apiVersion: {API_VERSION}, kind: {KIND}",
        )


def _unknown_fields(config: Config) -> Iterator[Finding]:
    yield from _unknown(config, FIELDS, "")
    for number, entry in enumerate(config.get("reservedMemory") or []):
        yield from _unknown(entry, RESERVATION_FIELDS, f"reservedMemory[{number}].")


def _unknown(names: Iterable[Any], known: frozenset[str], prefix: str) -> Iterator[Finding]:
    for name in names:
        if name in known:
            continue
        nearest = _nearest(str(name), known)
        yield Finding(
            "kubelet-field",
            "warning",
            f"{prefix}{str(name)[:80]} is no field of a {KIND}: the kubelet ignores it, and says so in its log alone",
            None,
            f"{prefix}{nearest} is one; capital letters count" if nearest else "take it away",
        )


def _nearest(name: str, known: frozenset[str]) -> str | None:
    """The field that is likely meant, whose letters are the most alike; capitals and a flag's dashes do not count."""
    plain = {field.lower(): field for field in sorted(known)}
    alike = difflib.get_close_matches(name[:80].lower().replace("-", "").replace("_", ""), plain, n=1, cutoff=0.75)
    return plain[alike[0]] if alike else None


# --- quantities --------------------------------------------------------------------------------------------------


RESERVABLE = ("cpu", "memory", "ephemeral-storage", "pid")
"""What kubeReserved and systemReserved may name."""


def _reserved_amounts(config: Config) -> Iterator[Finding]:
    cpus_are_listed = bool(parse_cpus(config.get("reservedSystemCPUs") or ""))
    for field in ("kubeReserved", "systemReserved"):
        for resource, value in (config.get(field) or {}).items():
            if resource not in RESERVABLE:
                yield Finding(
                    "kubelet-value",
                    "error",
                    f"{field} reserves {resource[:60]!r}, not one of {', '.join(RESERVABLE)}: the kubelet does not"
                    " start",
                )
            elif not isinstance(value, str):
                yield _bad_quantity(f"{field}.{resource}", value)
            elif resource == "cpu" and cpus_are_listed:
                continue  # the kubelet puts their number in its place, unread
            elif (amount := parse_quantity(value)) is None or amount < 0:
                yield _bad_quantity(f"{field}.{resource}", value)


def _reserved_memory(config: Config) -> Iterator[Finding]:
    for entry in config.get("reservedMemory") or []:
        for name, value in (entry.get("limits") or {}).items():
            if parse_limit_quantity(value) is None:
                yield _bad_quantity(f"reservedMemory of node {entry.get('numaNode', 0)}, {str(name)[:60]}", value)


def _eviction(config: Config) -> Iterator[Finding]:
    for field in ("evictionHard", "evictionSoft", "evictionMinimumReclaim"):
        for signal, value in (config.get(field) or {}).items():
            if not _is_threshold(value, or_zero=field == "evictionMinimumReclaim"):
                yield _bad_quantity(f"{field} {signal[:60]}", value)
    periods = config.get("evictionSoftGracePeriod") or {}
    for signal, value in (config.get("evictionSoft") or {}).items():
        counts = isinstance(value, str) and eviction_percent(value) not in (0, 100)  # those are no threshold
        if counts and signal not in periods:
            yield Finding(
                "kubelet-value",
                "error",
                f"evictionSoft {signal[:60]} has no evictionSoftGracePeriod: the kubelet does not start",
                None,
                f'evictionSoftGracePeriod: {{{signal[:60]}: "1m30s"}}',
            )


def _is_threshold(value: Any, *, or_zero: bool) -> bool:
    if not isinstance(value, str):
        return False
    if eviction_percent(value) is not None:
        return True
    amount = parse_quantity(value)
    return amount is not None and (amount > 0 or (or_zero and amount == 0))


def _bad_quantity(name: str, value: Any) -> Finding:
    what = repr(value)[:60]
    return Finding(
        "kubelet-value", "error", f'{name} is {what}: no quantity in quotes, such as "1Gi"; the kubelet does not start'
    )


# --- what is enforced --------------------------------------------------------------------------------------------


_CGROUPS = {
    "system-reserved": "systemReservedCgroup",
    "system-reserved-compressible": "systemReservedCgroup",
    "kube-reserved": "kubeReservedCgroup",
    "kube-reserved-compressible": "kubeReservedCgroup",
}
_ENFORCEABLE = ("none", "pods", *_CGROUPS)


def _enforcement(config: Config) -> Iterator[Finding]:
    given = config.get("enforceNodeAllocatable")
    enforced = ["pods"] if given is None else given
    for number, name in enumerate(enforced):
        if not isinstance(name, str) or name not in _ENFORCEABLE:
            yield _enforce(f"has {name!r:.60}, none of {', '.join(_ENFORCEABLE)}")
        elif name in enforced[:number]:
            yield _enforce(f"has {name} twice")
        elif name in _CGROUPS and not config.get(_CGROUPS[name]):
            yield _enforce(
                f"has {name} and there is no {_CGROUPS[name]}",
                f"take {name} away: {_CGROUPS[name]} and reservedSystemCPUs exclude each other"
                if config.get("reservedSystemCPUs")
                else f"set {_CGROUPS[name]}, or take {name} away",
            )
        elif f"{name}-compressible" in enforced:
            yield _enforce(f"has {name} and {name}-compressible, which exclude each other")
        elif name == "none" and len(enforced) > 1:
            yield _enforce("has none and others beside it")
    if config.get("cgroupsPerQOS") is False and [name for name in enforced if name != "none"]:
        yield _enforce(
            "needs cgroupsPerQOS, which is false",
            "cgroupsPerQOS: true, without which nothing is held back for the system; or enforceNodeAllocatable: [none]",
        )


def _enforce(what: str, hint: str | None = None) -> Finding:
    return Finding("kubelet-enforce", "error", f"enforceNodeAllocatable {what}: the kubelet does not start", None, hint)
