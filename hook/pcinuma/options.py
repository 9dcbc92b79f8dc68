"""Flags, annotations and the file of defaults → Options. A flag wins over an annotation, that over the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pcinuma.errors import BadInput, BadOption, why_not_json

if TYPE_CHECKING:
    from pcinuma.model import Options

ANNOTATION_PREFIX = "pcinuma.vm.kubevirt.io/"

CHOICES: Mapping[str, tuple[str, ...]] = {
    "policy": ("none", "best-effort", "restricted", "single-numa-node"),
    "group-by": ("numa", "root-complex", "switch"),
    "unmapped": ("leave", "nearest"),
    "addressed": ("keep", "move"),
    "mmio": ("off", "report", "apply"),
    "distances": ("keep", "host"),
    "gpudirect-clique": ("none", "by-switch"),
}
"""The options that flags, annotations and the file of defaults share, each with its set."""

ANNOTATIONS_ONLY: Mapping[str, tuple[str, ...]] = {"enabled": ("true", "false")}


def resolve(
    flags: Mapping[str, str | None],
    annotations: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> Options:
    """The options of one run. Values are checked where they come from: flags and annotations here, files on loading."""
    from pcinuma.model import Options  # the sidecar builds its parser from CHOICES before it needs any of this

    chosen: dict[str, str] = dict(defaults or {})
    chosen.update(annotations or {})
    for name, value in flags.items():
        if value is not None:
            chosen[name] = checked(name, value, f"--{name}")
    enabled = chosen.pop("enabled", "true") == "true"
    return Options(**{name.replace("-", "_"): value for name, value in chosen.items()}, enabled=enabled)


def checked(name: str, value: object, where: str, choices: Mapping[str, tuple[str, ...]] = CHOICES) -> str:
    """``value`` when it is in the option's set. Raises BadOption, listing the set."""
    allowed = choices[name]
    if not isinstance(value, str) or value not in allowed:
        shown = repr(value)[:80] if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
        shown = "empty" if value is None else shown
        raise BadOption(f"{name} cannot be {shown}", where=where, hint=f"one of: {', '.join(allowed)}")
    return value


def as_mapping(options: Options) -> dict[str, str]:
    """The options under the names that flags, annotations and ``schemas/options.schema.json`` have."""
    return {name: getattr(options, name.replace("-", "_")) for name in CHOICES}


# --- annotations -----------------------------------------------------------------------------------------------


def from_vmi(vmi: Mapping[str, Any], where: str) -> dict[str, str]:
    """The options that the annotations of a VirtualMachineInstance or VirtualMachine set.

    A VirtualMachine's are those of its template: KubeVirt gives the VMI no others. Raises BadOption for a name with
    our prefix that is none of ours, and for a value outside its set.
    """
    kind = vmi.get("kind")
    if kind == "VirtualMachine":
        own = _annotations(vmi, where, ())
        if misplaced := sorted(name for name in own if name.startswith(ANNOTATION_PREFIX)):
            raise BadOption(
                f"the annotation {misplaced[0]} is on the VirtualMachine itself, where it has no effect",
                where=where,
                hint="move it to spec.template.metadata.annotations",
            )
        return from_annotations(_annotations(vmi, where, ("spec", "template")), where)
    # virt-launcher marshals a VMI that may have lost its kind on the way, as Kubernetes clients' objects do
    nameless = kind in (None, "") and isinstance(vmi.get("metadata"), Mapping) and isinstance(vmi.get("spec"), Mapping)
    if kind == "VirtualMachineInstance" or nameless:
        return from_annotations(_annotations(vmi, where, ()), where)
    shown = f"kind is {kind[:80]!r}" if isinstance(kind, str) else "it has no kind"
    raise BadInput(
        f"{shown}: neither a VirtualMachineInstance nor a VirtualMachine",
        where=where,
        hint="give the output of 'kubectl get vmi NAME -o yaml'",
    )


def from_annotations(annotations: Mapping[str, Any], where: str) -> dict[str, str]:
    """The options among the annotations: those with our prefix, without it."""
    known = {**CHOICES, **ANNOTATIONS_ONLY}
    found: dict[str, str] = {}
    for key, value in annotations.items():
        if not key.startswith(ANNOTATION_PREFIX):
            continue
        name = key.removeprefix(ANNOTATION_PREFIX)
        if name not in known:
            hint = f"known: {', '.join(ANNOTATION_PREFIX + other for other in known)}"
            raise BadOption(f"unknown annotation {key}", where=where, hint=hint)
        found[name] = checked(name, value, f"{where}, annotation {key}", known)
    return found


def _annotations(vmi: Mapping[str, Any], where: str, path: tuple[str, ...]) -> Mapping[str, Any]:
    at: Any = vmi
    for part in (*path, "metadata", "annotations"):
        if at is None:
            return {}
        if not isinstance(at, Mapping):
            raise BadInput(f"{'.'.join((*path, 'metadata', 'annotations'))} is no mapping", where=where)
        at = at.get(part)
    if at is None:
        return {}
    if not isinstance(at, Mapping) or not all(isinstance(key, str) for key in at):
        raise BadInput("metadata.annotations is no mapping of strings", where=where)
    return at


# --- files -----------------------------------------------------------------------------------------------------


def load_defaults(data: bytes, where: str) -> dict[str, str]:
    """The file of defaults: a YAML mapping of option names to values. Raises BadOption, BadInput."""
    from pcinuma import yaml_text

    content = yaml_text.load(data, where)
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise BadInput("the file of defaults is no mapping", where=where, hint="write lines such as policy: restricted")
    found: dict[str, str] = {}
    for name, value in content.items():
        if name not in CHOICES:
            shown = f"unknown option {name[:80]!r}" if isinstance(name, str) else "the name of an option is no string"
            raise BadOption(shown, where=where, hint=f"known: {', '.join(CHOICES)}")
        # YAML 1.1 reads a bare off as false
        found[name] = checked(name, "off" if value is False and "off" in CHOICES[name] else value, where)
    return found


def load_object(data: bytes, where: str) -> Mapping[str, Any]:
    """A Kubernetes object from YAML or JSON. Raises BadInput when it is none."""
    from pcinuma import yaml_text

    content = yaml_text.load(data, where)
    if isinstance(content, Mapping) and content.get("kind") == "List":
        items = content.get("items")
        if isinstance(items, list) and len(items) == 1:
            content = items[0]
    if not isinstance(content, Mapping):
        raise BadInput("not a Kubernetes object", where=where, hint="give the output of 'kubectl get vmi NAME -o yaml'")
    return content


def load_json_object(data: bytes, where: str) -> Mapping[str, Any]:
    """A Kubernetes object from JSON, which is what KubeVirt hands a hook. Raises BadInput when it is none."""
    import json

    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {why_not_json(error)}", where=where) from None
    if not isinstance(content, Mapping):
        raise BadInput("not a Kubernetes object", where=where)
    return content
