"""The webhook's decision: an AdmissionReview in, an AdmissionReview out. Pure, no HTTP.

A VirtualMachineInstance that is created with ``pcinuma.vm.kubevirt.io/enabled: "true"`` gets pcinuma's entry in the
list of ``hooks.kubevirt.io/hookSidecars``. Shapes are those of Kubernetes' ``admission.k8s.io/v1``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from pcinuma import options
from pcinuma.errors import BadInput, PcinumaError, one_line, why_not_json
from pcinuma.vmi_warnings import warnings_of

API_VERSION = "admission.k8s.io/v1"
HOOK_SIDECARS = "hooks.kubevirt.io/hookSidecars"
ENABLED = options.ANNOTATION_PREFIX + "enabled"

_WHERE = "metadata.annotations"
_MOST_TEXT = 256 * 1024
"""Bytes. The API server takes no more of all annotations together (apimachinery, TotalAnnotationSizeLimitB)."""
_MOST_NAME = 253
"""Characters. No name in Kubernetes is longer."""
_WHITE = " \t\r\n"  # JSON's white space, RFC 8259
_PROGRAM, _COMMAND = "pcinuma", "hook"
_IDLE = (
    f"the {_PROGRAM} image in {HOOK_SIDECARS} does not run '{_PROGRAM} hook', so nothing is placed:"
    f" remove its command, and begin its args with {_COMMAND}"
)

Outcome = Literal["added", "present", "untouched", "refused"]


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The container that a VM gets: of an image whose entrypoint is ``pcinuma``, run with ``args``."""

    image: str
    pull_policy: str
    args: tuple[str, ...]

    def entry(self) -> str:
        """The entry as it stands in the annotation, JSON.

        KubeVirt hands ``args`` to the container and, where no command is named, keeps the image's entrypoint
        (virt-controller, newSidecarContainerRenderer).
        """
        return json.dumps({"image": self.image, "imagePullPolicy": self.pull_policy, "args": list(self.args)})


@dataclass(frozen=True, slots=True)
class Decision:
    """``review`` is the answer. ``record`` is what the log says of it: names, the outcome, warnings; no input else."""

    outcome: Outcome
    review: dict[str, Any]
    record: dict[str, Any]


def decide(review: object, sidecar: Sidecar) -> Decision:
    """The answer to a review. Raises BadInput for what is no ``admission.k8s.io/v1`` AdmissionReview with a request.

    Nothing but the creation of a kubevirt.io/v1 VirtualMachineInstance is looked into; the decision is the same in a
    dry run, and when the request comes again after other webhooks.
    """
    request = _request(review)
    if not _is_vmi_creation(request):
        return _decision(request, "untouched", {})
    vmi = request.get("object")
    if not isinstance(vmi, Mapping):
        raise BadInput("the request creates an object, but there is none", where="request.object")
    annotations = _annotations(vmi)
    try:
        chosen = options.from_annotations(annotations, _WHERE)
        if chosen.get("enabled") != "true":
            return _decision(request, "untouched", {})
        found = annotations.get(HOOK_SIDECARS)
        if found is not None and found.strip(_WHITE) == "null":
            found = "[]"  # so Go reads it
        entries = [] if found is None else _entries(found)
    except BadInput as error:
        return _decision(request, "refused", _refusal(error), error=error)
    warnings = warnings_of(vmi)
    ours = [runs for entry in entries if (runs := _runs_hook(entry, sidecar)) is not None]
    if ours:
        return _decision(request, "present", {}, warnings if any(ours) else (_IDLE, *warnings))
    if found is None:
        change = {"op": "add", "path": _pointer(), "value": f"[{sidecar.entry()}]"}
    else:
        change = {"op": "replace", "path": _pointer(), "value": _with_entry(found, sidecar.entry(), empty=not entries)}
    patch = base64.b64encode(json.dumps([change]).encode()).decode()
    return _decision(request, "added", {"patchType": "JSONPatch", "patch": patch}, warnings)


# --- the request -----------------------------------------------------------------------------------------------


def _request(review: object) -> Mapping[str, Any]:
    if not isinstance(review, Mapping):
        raise BadInput("not an AdmissionReview: no JSON object")
    for key, wanted in (("kind", "AdmissionReview"), ("apiVersion", API_VERSION)):
        if (value := review.get(key)) != wanted:
            shown = repr(value[:80]) if isinstance(value, str) else "missing" if value is None else "no string"
            raise BadInput(f"not an AdmissionReview of {API_VERSION}: {key} is {shown}, not {wanted}")
    request = review.get("request")
    if not isinstance(request, Mapping):
        raise BadInput("the AdmissionReview has no request")
    if not isinstance(uid := request.get("uid"), str) or not 0 < len(uid) <= _MOST_NAME:
        raise BadInput(f"the request has no uid of 1 to {_MOST_NAME} characters", where="request.uid")
    if not isinstance(request.get("operation"), str):
        raise BadInput("the request has no operation", where="request.operation")
    if not isinstance(kind := request.get("kind"), Mapping) or not isinstance(kind.get("kind"), str):
        raise BadInput("the request does not say of what kind its object is", where="request.kind")
    return request


def _is_vmi_creation(request: Mapping[str, Any]) -> bool:
    kind = request["kind"]
    what = tuple(kind.get(part) for part in ("group", "version", "kind"))
    wanted = ("kubevirt.io", "v1", "VirtualMachineInstance")
    return what == wanted and request["operation"] == "CREATE" and not request.get("subResource")


def _annotations(vmi: Mapping[str, Any]) -> Mapping[str, str]:
    metadata = vmi.get("metadata")
    if not isinstance(metadata, Mapping):
        raise BadInput("the object has no metadata", where="request.object.metadata")
    found = metadata.get("annotations")
    if found is None:
        return {}
    if not isinstance(found, Mapping) or not all(isinstance(value, str) for value in found.values()):
        raise BadInput("the annotations are no mapping of strings", where="request.object.metadata.annotations")
    return cast(Mapping[str, str], found)


# --- the list of sidecars --------------------------------------------------------------------------------------


def _entries(text: str) -> list[Mapping[str, Any]]:
    """The entries of the annotation. Raises BadInput when it is not what KubeVirt takes."""
    if len(text.encode("utf-8", "replace")) > _MOST_TEXT:
        raise BadInput(f"{HOOK_SIDECARS} is larger than the {_MOST_TEXT >> 10} KiB of annotations", where=_WHERE)
    hint = f'write it as [{{"image": "IMAGE"}}], or remove it; {_PROGRAM} adds its own entry'
    try:
        # numbers as they stand: Python refuses very long ones, and none matters here
        found = json.loads(text, parse_int=str, parse_float=str, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{HOOK_SIDECARS} is not JSON: {why_not_json(error)}", where=_WHERE, hint=hint) from None
    if not isinstance(found, list) or not all(isinstance(entry, Mapping) for entry in found):
        raise BadInput(f"{HOOK_SIDECARS} is not a JSON list of objects", where=_WHERE, hint=hint)
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _runs_hook(entry: Mapping[str, Any], sidecar: Sidecar) -> bool | None:
    """Whether the entry runs pcinuma's hook; None when it is none of ours. Two hooks in one VM would work twice.

    An entry is ours when it is of our image's repository, whatever its tag (the owner may have pinned another), or when
    what it runs is ``pcinuma hook``, whatever registry the image is of: an image's name stands for its entrypoint. Our
    image runs the hook also without any arguments (Dockerfile, CMD).
    """
    fields = {key.lower(): value for key, value in entry.items()}  # Go's JSON takes a key in any case
    image = fields.get("image")
    repository = _repository(image) if isinstance(image, str) else ""
    command, args = (value if isinstance(value := fields.get(name), list) else [] for name in ("command", "args"))
    if repository == _repository(sidecar.image):
        return _is_hook([*(command or [_PROGRAM]), *(args or ([] if command else [_COMMAND]))])
    return _is_hook([*(command or [repository]), *args]) or None


def _is_hook(run: list[Any]) -> bool:
    """Whether a command line is ``pcinuma hook``, or ``python -m pcinuma hook``, with flags before ``hook``."""
    name, *rest = map(str, run)
    name = name.rpartition("/")[2]
    if name.startswith("python"):
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            rest = rest[1:]
        if rest[:2] != ["-m", _PROGRAM]:
            return False
        rest = rest[2:]
    elif name != _PROGRAM:
        return False
    return next((word for word in rest if not word.startswith("-")), None) == _COMMAND


def _repository(image: str) -> str:
    """The image reference without tag and digest, its registry spelled out (as containers' references are read)."""
    name = image.strip().partition("@")[0]
    folder, slash, last = name.rpartition("/")
    name = folder + slash + last.partition(":")[0]
    first, slash, path = name.partition("/")
    if not slash:
        return f"docker.io/library/{name}"
    host = first.lower()  # DNS knows no case
    return f"{host}/{path}" if "." in host or ":" in host or host == "localhost" else f"docker.io/{name}"


def _with_entry(text: str, entry: str, *, empty: bool) -> str:
    """The JSON list with the entry at its end, every other character as the owner wrote it."""
    before = text.rstrip(_WHITE).removesuffix("]").rstrip(_WHITE)
    return before + ("" if empty else ", ") + entry + text[len(before) :]


def _pointer() -> str:
    """The annotation's JSON Pointer, RFC 6901."""
    return "/metadata/annotations/" + HOOK_SIDECARS.replace("~", "~0").replace("/", "~1")


# --- the answer ------------------------------------------------------------------------------------------------


def _refusal(error: PcinumaError) -> dict[str, Any]:
    """What the API server hands on to who creates the VMI; ``Invalid`` and 422 are what KubeVirt itself answers."""
    return {"status": {"status": "Failure", "message": _with_hint(error), "reason": "Invalid", "code": 422}}


def _with_hint(error: PcinumaError) -> str:
    return f"{error}; {error.hint}" if error.hint else str(error)


def _decision(
    request: Mapping[str, Any],
    outcome: Outcome,
    response: Mapping[str, Any],
    warnings: tuple[str, ...] = (),
    error: PcinumaError | None = None,
) -> Decision:
    answer: dict[str, Any] = {"uid": request["uid"], "allowed": outcome != "refused", **response}
    if warnings:
        answer["warnings"] = list(warnings)
    kind = request["kind"]
    record: dict[str, Any] = {
        "namespace": _shown(request.get("namespace")),
        "name": _name(request),
        "uid": _shown(request["uid"]),
        "kind": _shown(kind["kind"]),
        "operation": _shown(request["operation"]),
        "dryRun": request.get("dryRun") is True,
        "outcome": outcome,
        "warnings": list(warnings),
        "error": _with_hint(error) if error else None,
    }
    return Decision(outcome, {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": answer}, record)


def _name(request: Mapping[str, Any]) -> str | None:
    """The object's name; before the API server has made one up, the prefix it will make it from."""
    made = request.get("object")
    metadata = made.get("metadata") if isinstance(made, Mapping) else None
    named = metadata if isinstance(metadata, Mapping) else {}
    return _shown(request.get("name") or named.get("name") or named.get("generateName"))


def _shown(value: object) -> str | None:
    return one_line(value, _MOST_NAME) if isinstance(value, str) and value else None
