"""The webhook's decisions, review by review; patches are applied by a JSON Patch library, as the API server does."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import jsonpatch
import pytest

from pcinuma.admission import Decision, Sidecar, decide
from pcinuma.errors import BadInput
from tests.support.webhook import review_of, vmi

ENABLED = "pcinuma.vm.kubevirt.io/enabled"
SIDECARS = "hooks.kubevirt.io/hookSidecars"
UID = "705ab4f5-6393-11e8-b7cc-42010a800002"
SIDECAR = Sidecar("registry.example/infra/pcinuma:1.0", "IfNotPresent", ("hook",))
ENTRY = '{"image": "registry.example/infra/pcinuma:1.0", "imagePullPolicy": "IfNotPresent", "args": ["hook"]}'


def decided(made: object, **request: Any) -> Decision:
    return decide(review_of(made, **request), SIDECAR)


def response_of(decision: Decision) -> dict[str, Any]:
    assert (decision.review["apiVersion"], decision.review["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response: dict[str, Any] = decision.review["response"]
    assert response["uid"] == UID
    return response


def operations(decision: Decision) -> list[dict[str, Any]]:
    response = response_of(decision)
    assert (response["allowed"], response["patchType"]) == (True, "JSONPatch")
    found: list[dict[str, Any]] = json.loads(base64.b64decode(response["patch"], validate=True))
    return found


def patched(made: dict[str, Any], decision: Decision) -> dict[str, Any]:
    changed: dict[str, Any] = jsonpatch.apply_patch(copy.deepcopy(made), operations(decision))
    return changed


def warned(made: object) -> list[str]:
    warnings: list[str] = response_of(decided(made)).get("warnings", [])
    return warnings


def refusal(made: object) -> str:
    """The message of a refusal, which must be what KubeVirt's own refusals are: 422 Invalid, and no patch."""
    decision = decided(made)
    response = response_of(decision)
    assert decision.outcome == "refused"
    assert sorted(response) == ["allowed", "status", "uid"]
    assert response["allowed"] is False
    status = response["status"]
    assert (status["status"], status["code"], status["reason"]) == ("Failure", 422, "Invalid")
    message: str = status["message"]
    assert message.isprintable()
    return message


# --- what is added ---------------------------------------------------------------------------------------------


def test_the_first_sidecar_is_one_added_annotation() -> None:
    made = vmi({ENABLED: "true"})
    decision = decided(made)
    path = "/metadata/annotations/hooks.kubevirt.io~1hookSidecars"
    assert operations(decision) == [{"op": "add", "path": path, "value": f"[{ENTRY}]"}]
    made["metadata"]["annotations"][SIDECARS] = f"[{ENTRY}]"
    assert patched(vmi({ENABLED: "true"}), decision) == made
    assert decision.outcome == "added"


@pytest.mark.parametrize(
    "before, after",
    [
        ('[{"image": "a"}]', f'[{{"image": "a"}}, {ENTRY}]'),
        ("[]", f"[{ENTRY}]"),
        ("[ ]", f"[{ENTRY} ]"),
        (' [ {"image":"a" ,"args":[ "]" ]}\t] \n', f' [ {{"image":"a" ,"args":[ "]" ]}}, {ENTRY}\t] \n'),
        ('[\n  {"image": "a"}\n]\n', f'[\n  {{"image": "a"}}, {ENTRY}\n]\n'),
        (
            '[{"args": ["--version", "v1alpha2"], "configMap": {"name": "c", "key": "k", "hookPath": "/usr/bin/h"}}]',
            '[{"args": ["--version", "v1alpha2"], "configMap": {"name": "c", "key": "k", "hookPath": "/usr/bin/h"}}, '
            f"{ENTRY}]",
        ),
        (
            r'[{"image": "\u00e9", "image": "é", "x": 1e400}]',
            rf'[{{"image": "\u00e9", "image": "é", "x": 1e400}}, {ENTRY}]',
        ),
    ],
)
def test_the_owners_entries_stay_as_written(before: str, after: str) -> None:
    made = vmi({ENABLED: "true", SIDECARS: before, "other/annotation": "kept"})
    decision = decided(made)
    path = "/metadata/annotations/hooks.kubevirt.io~1hookSidecars"
    assert operations(decision) == [{"op": "replace", "path": path, "value": after}]
    assert patched(made, decision)["metadata"]["annotations"] == {
        ENABLED: "true",
        SIDECARS: after,
        "other/annotation": "kept",
    }
    json.loads(after)


def test_a_configured_sidecar_is_what_is_added() -> None:
    sidecar = Sidecar("quay.io/x/pcinuma@sha256:" + "a" * 64, "Always", ("hook", "--version", "v1alpha2"))
    made = vmi({ENABLED: "true"})
    decision = decide(review_of(made), sidecar)
    added = json.loads(patched(made, decision)["metadata"]["annotations"][SIDECARS])
    assert added == [
        {
            "image": "quay.io/x/pcinuma@sha256:" + "a" * 64,
            "imagePullPolicy": "Always",
            "args": ["hook", "--version", "v1alpha2"],
        }
    ]


# --- never twice -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, "[]", '[{"image": "a"}]'])
def test_a_second_review_adds_nothing(before: str | None) -> None:
    made = vmi({ENABLED: "true"} if before is None else {ENABLED: "true", SIDECARS: before})
    again = decided(patched(made, decided(made)))
    assert response_of(again) == {"uid": UID, "allowed": True}
    assert again.outcome == "present"


@pytest.mark.parametrize(
    "entry",
    [
        {"image": "registry.example/infra/pcinuma:0.9"},
        {"image": "registry.example/infra/pcinuma"},
        {"image": "registry.example/infra/pcinuma:1.0@sha256:" + "0" * 64},
        {"Image": "registry.example/infra/pcinuma:1.0", "Args": ["hook"]},
        {"image": "mirror.local:5000/pcinuma:1.0", "args": ["hook", "--policy=restricted"]},
        {"image": "quay.io/me/tools", "command": ["pcinuma", "hook"]},
        {"image": "quay.io/me/tools", "command": ["/usr/local/bin/pcinuma"], "args": ["hook"]},
        {"image": "quay.io/me/tools", "command": ["pcinuma", "--debug", "hook"]},
        {"image": "quay.io/me/tools", "command": ["/opt/pcinuma/bin/python", "-m", "pcinuma", "hook"]},
        {"image": "quay.io/me/tools", "command": ["python3", "-I", "-m", "pcinuma"], "args": ["--debug", "hook"]},
        {"image": "REGISTRY.Example/infra/pcinuma:1.0"},
        {"image": "registry.example/infra/pcinuma:1.0", "command": [], "args": []},
    ],
)
def test_a_pcinuma_of_the_owners_own_is_the_one(entry: dict[str, Any]) -> None:
    decision = decided(vmi({ENABLED: "true", SIDECARS: json.dumps([{"image": "first"}, entry])}))
    assert (decision.outcome, response_of(decision)) == ("present", {"uid": UID, "allowed": True})


@pytest.mark.parametrize(
    "entry",
    [
        {"image": "registry.example/infra/pcinuma-debug:1.0"},
        {"image": "registry.example/pcinuma:1.0"},
        {"image": "other.example:5000/infra/sidecar:pcinuma", "args": ["hook"]},
        {"image": "quay.io/me/tools", "command": ["pcinuma", "snapshot"]},
        {"image": "quay.io/me/tools", "args": ["pcinuma", "hook"]},
        {"args": ["hook"]},
        {"image": 3, "command": "pcinuma hook", "args": {}},
        {},
    ],
)
def test_another_sidecar_is_none_of_ours(entry: dict[str, Any]) -> None:
    assert decided(vmi({ENABLED: "true", SIDECARS: json.dumps([entry])})).outcome == "added"


@pytest.mark.parametrize(
    "run",
    [
        {"command": ["sleep", "inf"]},
        {"args": ["webhook"]},
        {"args": ["--debug"]},
        {"command": ["pcinuma"]},
        {"command": ["python3", "-m", "http.server", "hook"]},
        {"command": ["pcinuma", "webhook", "hook"]},
    ],
)
def test_our_image_that_runs_no_hook_is_there_and_warned_of(run: dict[str, Any]) -> None:
    entry = {"image": "registry.example/infra/pcinuma:1.0", **run}
    decision = decided(vmi({ENABLED: "true", SIDECARS: json.dumps([entry])}))
    assert decision.outcome == "present"
    (warning,) = response_of(decision)["warnings"]
    assert warning == (
        "the pcinuma image in hooks.kubevirt.io/hookSidecars does not run 'pcinuma hook', so nothing is placed:"
        " remove its command, and begin its args with hook"
    )
    twice = [entry, {"image": "registry.example/infra/pcinuma:1.0"}]
    assert "warnings" not in response_of(decided(vmi({ENABLED: "true", SIDECARS: json.dumps(twice)})))


@pytest.mark.parametrize("null", ["null", " null\n"])
def test_null_is_an_empty_list(null: str) -> None:
    made = vmi({ENABLED: "true", SIDECARS: null})
    (entry,) = json.loads(patched(made, decided(made))["metadata"]["annotations"][SIDECARS])
    assert entry["image"] == "registry.example/infra/pcinuma:1.0"


@pytest.mark.parametrize("same", ["pcinuma:2", "library/pcinuma", "docker.io/library/pcinuma:1"])
def test_docker_hubs_short_names_are_one_repository(same: str) -> None:
    made = vmi({ENABLED: "true", SIDECARS: json.dumps([{"image": same}])})
    assert decide(review_of(made), Sidecar("pcinuma:1", "Always", ("hook",))).outcome == "present"


# --- untouched -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "annotations",
    [
        None,
        {},
        {ENABLED: "false"},
        {ENABLED: "false", SIDECARS: "not JSON"},
        {SIDECARS: "not JSON"},
        {"pcinuma.vm.kubevirt.io/policy": "restricted"},
        {"example.com/pcinuma.vm.kubevirt.io": "x", "pcinuma.vm.kubevirt.io": "true"},
    ],
)
def test_who_has_not_opted_in_passes(annotations: dict[str, str] | None) -> None:
    decision = decided(vmi(annotations, evictionStrategy="LiveMigrate"))
    assert (decision.outcome, response_of(decision)) == ("untouched", {"uid": UID, "allowed": True})


VMI = {"group": "kubevirt.io", "version": "v1", "kind": "VirtualMachineInstance"}


@pytest.mark.parametrize(
    "request_fields",
    [
        {"operation": "UPDATE"},
        {"operation": "DELETE", "object": None, "oldObject": vmi({ENABLED: "true"})},
        {"operation": "CONNECT", "object": {"kind": "PodExecOptions"}},
        {"subResource": "status"},
        {"kind": {**VMI, "kind": "VirtualMachine"}},
        {"kind": {**VMI, "group": "example.com"}},
        {"kind": {**VMI, "version": "v1alpha3"}},
        {
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "object": {"metadata": {"annotations": {ENABLED: "maybe"}}},
        },
        {"kind": {**VMI, "kind": "VirtualMachineInstanceReplicaSet"}, "object": "no object"},
    ],
)
def test_what_is_no_creation_of_a_vmi_passes(request_fields: dict[str, Any]) -> None:
    decision = decide(review_of(vmi({ENABLED: "true", "pcinuma.vm.kubevirt.io/x": "y"}), **request_fields), SIDECAR)
    assert (decision.outcome, response_of(decision)) == ("untouched", {"uid": UID, "allowed": True})


def test_a_dry_run_is_answered_like_any_other() -> None:
    made = vmi({ENABLED: "true"})
    assert decided(made, dryRun=True).review == decided(made).review
    assert decided(made, dryRun=True).record["dryRun"] is True


def test_the_review_is_not_changed() -> None:
    review = review_of(vmi({ENABLED: "true", SIDECARS: "[]"}))
    before = copy.deepcopy(review)
    decide(review, SIDECAR)
    assert review == before


# --- refused ---------------------------------------------------------------------------------------------------


def test_an_unknown_annotation_is_refused_with_the_known_ones() -> None:
    message = refusal(vmi({ENABLED: "true", "pcinuma.vm.kubevirt.io/polcy": "restricted"}))
    assert message.startswith("unknown annotation pcinuma.vm.kubevirt.io/polcy (metadata.annotations); known: ")
    assert "pcinuma.vm.kubevirt.io/policy" in message
    assert "pcinuma.vm.kubevirt.io/enabled" in message


def test_a_misspelt_opt_in_is_refused_not_forgotten() -> None:
    assert "unknown annotation pcinuma.vm.kubevirt.io/enable " in refusal(
        vmi({"pcinuma.vm.kubevirt.io/enable": "true"})
    )


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_a_value_outside_its_set_is_refused_with_the_set(enabled: str) -> None:
    assert refusal(vmi({ENABLED: enabled, "pcinuma.vm.kubevirt.io/policy": "strict"})) == (
        "policy cannot be 'strict' (metadata.annotations, annotation pcinuma.vm.kubevirt.io/policy); "
        "one of: none, best-effort, restricted, single-numa-node"
    )


@pytest.mark.parametrize("value", ["True", "yes", "1", "", " true"])
def test_enabled_is_true_or_false(value: str) -> None:
    message = refusal(vmi({ENABLED: value}))
    assert message.startswith(f"enabled cannot be {value!r} (metadata.annotations")
    assert message.endswith("one of: true, false")


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "is not JSON: Expecting value"),
        ("image: a", "is not JSON: Expecting value"),
        ('[{"image": "a"}', "is not JSON: Expecting"),
        ('[{"image": "a"}] []', "is not JSON: Extra data"),
        ("[{'image': 'a'}]", "is not JSON: Expecting property name"),
        ('[{"x": NaN}]', "is not JSON: NaN is no JSON"),
        ("[" * 100_000, "is not JSON: nested too deeply"),
        ('{"image": "a"}', "is not a JSON list of objects"),
        ('["a"]', "is not a JSON list of objects"),
        ('[{"image": "a"}, null]', "is not a JSON list of objects"),
        ("3", "is not a JSON list of objects"),
    ],
)
def test_a_list_of_sidecars_that_is_none_is_refused(text: str, why: str) -> None:
    message = refusal(vmi({ENABLED: "true", SIDECARS: text}))
    assert message.startswith(f"hooks.kubevirt.io/hookSidecars {why}")
    assert message.endswith('write it as [{"image": "IMAGE"}], or remove it; pcinuma adds its own entry')


def test_a_list_beyond_what_kubernetes_stores_is_refused() -> None:
    largest = '[{"image": "' + "a" * (256 * 1024 - 15) + '"}]'
    assert len(largest) == 256 * 1024
    assert decided(vmi({ENABLED: "true", SIDECARS: largest})).outcome == "added"
    message = "hooks.kubevirt.io/hookSidecars is larger than the 256 KiB of annotations (metadata.annotations)"
    assert refusal(vmi({ENABLED: "true", SIDECARS: largest + " "})) == message


def test_a_refusal_shows_control_characters_and_is_bounded() -> None:
    made = vmi({ENABLED: "true", "pcinuma.vm.kubevirt.io/policy": "a\n\x1b[2J\u202e" + "x" * 5000})
    message = refusal(made)
    assert "\\n\\x1b[2J" in message
    assert len(message) < 400
    named = refusal(vmi({ENABLED: "true", "pcinuma.vm.kubevirt.io/\x00" + "y" * 9000: ""}))
    assert len(named) < 3000


# --- warned ----------------------------------------------------------------------------------------------------


def opted_in(**spec: Any) -> dict[str, Any]:
    return vmi({ENABLED: "true"}, **spec)


def domain_without(*path: str) -> dict[str, Any]:
    made = opted_in()
    at = made["spec"]["domain"]
    for part in path[:-1]:
        at = at[part]
    del at[path[-1]]
    return made


def domain_with(**domain: Any) -> dict[str, Any]:
    made = opted_in()
    made["spec"]["domain"].update(domain)
    return made


def test_a_vm_that_is_set_up_right_has_no_warnings() -> None:
    assert "warnings" not in response_of(decided(opted_in()))


@pytest.mark.parametrize(
    "made, about",
    [
        (domain_without("cpu", "numa"), "spec.domain.cpu.numa.guestMappingPassthrough"),
        (domain_with(cpu={"dedicatedCpuPlacement": True, "numa": {}}), "spec.domain.cpu.numa.guestMappingPassthrough"),
        (domain_without("cpu", "dedicatedCpuPlacement"), "spec.domain.cpu.dedicatedCpuPlacement"),
        (domain_without("memory", "hugepages"), "spec.domain.memory.hugepages"),
        (domain_without("memory"), "spec.domain.memory.hugepages"),
        (domain_without("devices"), "there is nothing to place"),
        (
            domain_with(devices={"gpus": [], "hostDevices": None, "interfaces": [{"masquerade": {}}]}),
            "nothing to place",
        ),
        (domain_with(machine={"type": "pc"}), "machine type pc:"),
        (domain_with(machine={"type": "pc-i440fx-rhel7.6.0"}), "machine type pc-i440fx-rhel7.6.0:"),
        (domain_with(machine={"type": "s390-ccw-virtio"}), "machine type s390-ccw-virtio:"),
        (domain_with(machine={"type": "microvm\r\nX: y"}), "machine type microvm\\x0d\\nX: y:"),
        (vmi({ENABLED: "true", "kubevirt.io/placePCIDevicesOnRootComplex": "true"}), "placePCIDevicesOnRootComplex"),
        (opted_in(evictionStrategy="LiveMigrate"), "evictionStrategy LiveMigrate"),
    ],
)
def test_one_thing_amiss_is_one_warning(made: dict[str, Any], about: str) -> None:
    warnings = warned(made)
    assert len(warnings) == 1, warnings
    assert about in warnings[0]
    assert len(warnings[0]) <= 120, "Kubernetes asks for 120 characters"
    assert warnings[0].isprintable()
    assert decided(made).outcome == "added"


@pytest.mark.parametrize(
    "made",
    [
        domain_with(devices={"hostDevices": [{"name": "ib0", "deviceName": "mellanox.com/cx7"}]}),
        domain_with(devices={"interfaces": [{"name": "default", "masquerade": {}}, {"name": "fast", "sriov": {}}]}),
        {**opted_in(), "spec": {**domain_with(devices={})["spec"], "resourceClaims": [{"name": "gpu"}]}},
        domain_with(machine={"type": "pc-q35-rhel9.4.0"}),
        domain_with(machine={"type": "virt"}),
        domain_with(machine={"type": "virt-rhel9.4.0"}),
        domain_with(machine={"type": ""}),
        domain_without("machine"),
        vmi({ENABLED: "true", "kubevirt.io/placePCIDevicesOnRootComplex": "false"}),
        opted_in(evictionStrategy="External"),
        opted_in(evictionStrategy="None"),
    ],
)
def test_what_is_right_is_not_warned_of(made: dict[str, Any]) -> None:
    assert warned(made) == []


def test_everything_amiss_is_within_kubernetes_limits() -> None:
    made = vmi({ENABLED: "true", "kubevirt.io/placePCIDevicesOnRootComplex": "true"}, evictionStrategy="LiveMigrate")
    made["spec"]["domain"] = {"machine": {"type": "pc" + "x" * 9000}}
    warnings = warned(made)
    assert len(warnings) == 7
    assert max(map(len, warnings)) <= 256
    assert sum(map(len, warnings)) <= 4096


@pytest.mark.parametrize("spec", [None, 3, "x", [], {"domain": []}, {"domain": {"cpu": 1, "devices": {"gpus": {}}}}])
def test_a_spec_of_any_shape_is_left_to_kubevirt(spec: object) -> None:
    made = {**opted_in(), "spec": spec}
    assert decided(made).outcome == "added"
    assert len(warned(made)) == 4


def test_a_sidecar_that_is_there_already_is_warned_for_as_well() -> None:
    made = vmi({ENABLED: "true", SIDECARS: f"[{ENTRY}]"}, evictionStrategy="LiveMigrate")
    decision = decided(made)
    assert decision.outcome == "present"
    assert len(response_of(decision)["warnings"]) == 1


# --- malformed -------------------------------------------------------------------------------------------------


def without(review: dict[str, Any], *path: str) -> dict[str, Any]:
    at = review
    for part in path[:-1]:
        at = at[part]
    del at[path[-1]]
    return review


def review() -> dict[str, Any]:
    return review_of(vmi({ENABLED: "true"}))


@pytest.mark.parametrize(
    "given, message",
    [
        (None, "not an AdmissionReview: no JSON object"),
        ([review()], "not an AdmissionReview: no JSON object"),
        ({}, "not an AdmissionReview of admission.k8s.io/v1: kind is missing, not AdmissionReview"),
        (
            {**review(), "kind": "Pod"},
            "not an AdmissionReview of admission.k8s.io/v1: kind is 'Pod', not AdmissionReview",
        ),
        (
            {**review(), "apiVersion": "admission.k8s.io/v1beta1"},
            "not an AdmissionReview of admission.k8s.io/v1: "
            "apiVersion is 'admission.k8s.io/v1beta1', not admission.k8s.io/v1",
        ),
        (without(review(), "request"), "the AdmissionReview has no request"),
        ({**review(), "request": []}, "the AdmissionReview has no request"),
        (without(review(), "request", "uid"), "the request has no uid of 1 to 253 characters (request.uid)"),
        (review_of(vmi(), uid=7), "the request has no uid of 1 to 253 characters (request.uid)"),
        (review_of(vmi(), uid="u" * 254), "the request has no uid of 1 to 253 characters (request.uid)"),
        (review_of(vmi(), uid=""), "the request has no uid of 1 to 253 characters (request.uid)"),
        (without(review(), "request", "operation"), "the request has no operation (request.operation)"),
        (without(review(), "request", "kind"), "the request does not say of what kind its object is (request.kind)"),
        (review_of(None), "the request creates an object, but there is none (request.object)"),
        (review_of({}), "the object has no metadata (request.object.metadata)"),
        (
            review_of({"metadata": {"annotations": {ENABLED: True}}}),
            "the annotations are no mapping of strings (request.object.metadata.annotations)",
        ),
        (
            review_of({"metadata": {"annotations": [ENABLED]}}),
            "the annotations are no mapping of strings (request.object.metadata.annotations)",
        ),
    ],
)
def test_what_is_no_review_raises(given: object, message: str) -> None:
    with pytest.raises(BadInput) as raised:
        decide(given, SIDECAR)
    assert str(raised.value) == message


# --- the record ------------------------------------------------------------------------------------------------


def test_the_record_names_who_and_what() -> None:
    decision = decided(opted_in(evictionStrategy="LiveMigrate"))
    assert decision.record == {
        "namespace": "ml",
        "name": "train-0",
        "uid": UID,
        "kind": "VirtualMachineInstance",
        "operation": "CREATE",
        "dryRun": False,
        "outcome": "added",
        "warnings": ["evictionStrategy LiveMigrate: passthrough devices do not migrate, a drain of the node will wait"],
        "error": None,
    }


def test_a_name_that_is_still_to_be_made_up_is_shown_as_its_prefix() -> None:
    made = opted_in()
    made["metadata"] = {"generateName": "train-", "annotations": {ENABLED: "true"}}
    assert decided(made, name="").record["name"] == "train-"


def test_the_record_holds_no_control_character_and_little_of_the_input() -> None:
    made = opted_in(secret="s3cret")
    decision = decided(made, namespace="a\n\x1bb", name="n" * 100_000)
    assert decision.record["namespace"] == "a\\n\\x1bb"
    assert len(json.dumps(decision.record)) < 1000
    assert "s3cret" not in json.dumps(decision.record)
