"""The manifests: built by a real kubectl, held against Kubernetes' own schemas, evaluated where they hold CEL.

Every rule is shown to fail: on a copy of what is built, spoilt in the one place.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import celpy
import jsonschema_rs
import kubernetes_validate
import pytest
import yaml
from celpy import celtypes
from celpy.adapter import CELJSONEncoder, json_to_cel

from pcinuma import cli, options
from pcinuma.arguments import parser_of
from tests.conftest import ROOT
from tests.support import custom_schemas, image
from tests.support.manifests import (
    KUBECTL,
    MANIFESTS,
    OVERLAYS,
    Object,
    build,
    one,
    overlay,
    pod_complaints,
    pod_specs,
    rbac_complaints,
    service_complaints,
)

PREFIX = "pcinuma.vm.kubevirt.io/"
IMAGE = "ghcr.io/pcinuma/pcinuma:0.1.0"
OURS = f"registry.example/pcinuma@sha256:{'0123456789abcdef' * 4}"
# the first that has matchConditions switched on, and a recent one; the plugin's policy came with 1.36
KUBERNETES = {name: ("1.36", "1.37") if name == "plugin" else ("1.28", "1.37") for name in OVERLAYS}


# --- they build, and are what Kubernetes takes -----------------------------------------------------------------


@pytest.mark.parametrize("name, version", [(name, version) for name in OVERLAYS for version in KUBERNETES[name]])
def test_every_object_is_valid(name: str, version: str) -> None:
    for content in overlay(name):
        validate(content, version)


def test_the_kubevirt_object_is_valid() -> None:
    content = yaml.safe_load((MANIFESTS / "kubevirt/kubevirt.yaml").read_text())
    validate(content, "1.37")
    assert "Sidecar" in content["spec"]["configuration"]["developerConfiguration"]["featureGates"]
    for support in content["spec"]["configuration"]["supportContainerResources"]:
        assert support["resources"]["requests"] == support["resources"]["limits"]  # else the pod is not Guaranteed


def validate(content: Object, version: str) -> None:
    schema = custom_schemas.schema(content["apiVersion"], content["kind"])
    if schema is not None:
        jsonschema_rs.validate(schema, content)
    else:
        kubernetes_validate.validate(content, version, strict=True)


@pytest.mark.parametrize(
    "name, kind, spoil",
    [
        ("self-signed", "Deployment", lambda o: o["spec"].update(replica=2)),
        ("self-signed", "MutatingWebhookConfiguration", lambda o: o["webhooks"][0].pop("sideEffects")),
        ("self-signed", "CronJob", lambda o: o["spec"].update(schedule=3)),
        ("plugin", "MutatingAdmissionPolicy", lambda o: o["spec"].update(reinvocationPolicies="Never")),
        ("plugin", "Plugin", lambda o: o["spec"]["domainHooks"][0]["sidecar"].update(socketPath="/var/run/hook.sock")),
        ("cert-manager", "Certificate", lambda o: o["spec"].pop("secretName")),
        ("no-webhook", "VirtualMachine", lambda o: o["spec"]["template"]["spec"]["domain"].update(cpus=4)),
    ],
)
def test_the_schemas_can_refuse(name: str, kind: str, spoil: Callable[[Object], Any]) -> None:
    content = next(o for o in overlay(name) if o["kind"] == kind)
    spoil(content)
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema_rs.ValidationError)):
        validate(content, KUBERNETES[name][-1])


def test_what_is_in_each_overlay() -> None:
    webhook = {
        "Namespace pcinuma",
        "ServiceAccount pcinuma-webhook",
        "ConfigMap pcinuma-webhook",
        "Deployment pcinuma-webhook",
        "PodDisruptionBudget pcinuma-webhook",
        "Service pcinuma-webhook",
        "NetworkPolicy pcinuma-deny",
        "NetworkPolicy pcinuma-webhook",
        "MutatingWebhookConfiguration pcinuma",
    }
    more = {
        "cert-manager": webhook
        | {"Issuer pcinuma-root", "Issuer pcinuma-ca", "Certificate pcinuma-ca", "Certificate pcinuma-webhook"},
        "self-signed": webhook
        | {f"{kind} pcinuma-certs" for kind in ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "CronJob")}
        | {"ClusterRoleBinding pcinuma-certs", "NetworkPolicy pcinuma-certs", "Job pcinuma-certs-first"}
        | {"Secret pcinuma-webhook-tls"},
        "plugin": {
            f"{kind} pcinuma" for kind in ("Plugin", "MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding")
        },
        "no-webhook": {"VirtualMachine gpu-vm"},
    }
    for name in OVERLAYS:
        # a ConfigMap's name ends with a hash of what is in it
        found = {
            re.sub(r"^(ConfigMap .*)-[a-z0-9]{10}$", r"\1", f"{o['kind']} {o['metadata']['name']}")
            for o in overlay(name)
        }
        assert found == more[name], name


CLUSTER_WIDE = {
    "Namespace",
    "ClusterRole",
    "ClusterRoleBinding",
    "MutatingWebhookConfiguration",
    "Plugin",
    "MutatingAdmissionPolicy",
    "MutatingAdmissionPolicyBinding",
}


@pytest.mark.parametrize("name", ["cert-manager", "self-signed"])
def test_everything_is_in_our_namespace(name: str) -> None:
    for content in overlay(name):
        expected = None if content["kind"] in CLUSTER_WIDE else "pcinuma"
        assert content["metadata"].get("namespace") == expected, content["metadata"]["name"]
    labels = one(overlay(name), "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


# --- the image -------------------------------------------------------------------------------------------------


def images(objects: list[Object]) -> set[str]:
    """Every reference to the image, wherever it stands."""
    return set(re.findall(r"[\w./-]+/pcinuma(?::[\w.]+|@sha256:[0-9a-f]{64})", yaml.safe_dump(objects, width=10_000)))


@pytest.mark.parametrize("name", OVERLAYS)
def test_one_image_and_it_is_this_version(name: str) -> None:
    assert images(overlay(name)) == {IMAGE}
    assert "ghcr.io/pcinuma/pcinuma\n" not in yaml.safe_dump(overlay(name), width=10_000)


@pytest.mark.parametrize("name", OVERLAYS)
def test_one_edit_of_an_overlay_sets_the_image_everywhere(name: str, tmp_path: Path) -> None:
    """What `kustomize edit set image` writes."""
    shutil.copytree(MANIFESTS, tmp_path / "manifests")
    file = tmp_path / "manifests/overlays" / name / "kustomization.yaml"
    content = yaml.safe_load(file.read_text())
    repository, _, digest = OURS.partition("@")
    content["images"] = [{"name": "ghcr.io/pcinuma/pcinuma", "newName": repository, "digest": digest}]
    file.write_text(yaml.safe_dump(content))
    made = build(file.parent)
    assert images(made) == {OURS}
    if name in ("cert-manager", "self-signed"):
        (container,) = one(made, "Deployment")["spec"]["template"]["spec"]["containers"]
        assert container["image"] == OURS
        assert {"name": "SIDECAR_IMAGE", "value": OURS} in container["env"]
        assert "--image=$(SIDECAR_IMAGE)" in container["args"]


# --- rules for pods, references and rights ---------------------------------------------------------------------


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_rules_hold(name: str) -> None:
    assert pod_complaints(overlay(name)) + service_complaints(overlay(name)) + rbac_complaints(overlay(name)) == []


def _pod(objects: list[Object]) -> Object:
    spec: Object = one(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


def _container(objects: list[Object]) -> Object:
    container: Object = _pod(objects)["containers"][0]
    return container


SPOILT: list[tuple[str, Callable[[list[Object]], Any]]] = [
    ("seccomp", lambda o: _pod(o)["securityContext"].pop("seccompProfile")),
    ("user", lambda o: _pod(o)["securityContext"].update(runAsUser=0)),
    ("user", lambda o: _pod(o)["securityContext"].pop("runAsNonRoot")),
    ("hostNetwork", lambda o: _pod(o).update(hostNetwork=True)),
    ("hostPath", lambda o: _pod(o)["volumes"].append({"name": "sys", "hostPath": {"path": "/sys"}})),
    ("service links", lambda o: _pod(o).pop("enableServiceLinks")),
    ("service account", lambda o: _pod(o).pop("serviceAccountName")),
    ("token", lambda o: _pod(o).update(automountServiceAccountToken=True)),
    (
        "token",
        lambda o: one(o, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]["spec"].pop(
            "automountServiceAccountToken"
        ),
    ),
    (
        "token for all of the service account",
        lambda o: one(o, "ServiceAccount", "pcinuma-webhook").pop("automountServiceAccountToken"),
    ),
    ("privilege", lambda o: _container(o)["securityContext"].pop("allowPrivilegeEscalation")),
    ("privilege", lambda o: _container(o)["securityContext"].update(privileged=True)),
    ("root file system", lambda o: _container(o)["securityContext"].update(readOnlyRootFilesystem=False)),
    ("capabilities", lambda o: _container(o)["securityContext"]["capabilities"].update(add=["NET_ADMIN"])),
    ("requests", lambda o: _container(o)["resources"]["requests"].pop("memory")),
    ("limits", lambda o: _container(o)["resources"].pop("limits")),
    ("image", lambda o: _container(o).update(image="ghcr.io/pcinuma/pcinuma:latest")),
    ("image", lambda o: _container(o).update(image="ghcr.io/pcinuma/pcinuma")),
    ("livenessProbe", lambda o: _container(o).pop("livenessProbe")),
    ("readinessProbe", lambda o: _container(o).pop("readinessProbe")),
    ("startupProbe", lambda o: _container(o).pop("startupProbe")),
    (
        "secret in the environment",
        lambda o: _container(o)["env"].append({"name": "X", "valueFrom": {"secretKeyRef": {"name": "x", "key": "y"}}}),
    ),
    ("selector", lambda o: one(o, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].update(a="b")),
    ("reaches no port", lambda o: one(o, "Service")["spec"]["ports"][0].update(targetPort="http")),
    ("reaches no port", lambda o: one(o, "Service")["spec"]["selector"].update(a="b")),
    ("replicas", lambda o: one(o, "Deployment")["spec"].update(replicas=1)),
    ("anti-affinity", lambda o: _pod(o).pop("affinity")),
    (
        "no such service",
        lambda o: one(o, "MutatingWebhookConfiguration")["webhooks"][0]["clientConfig"]["service"].update(name="x"),
    ),
    ("for every name", lambda o: one(o, "Role")["rules"][0].pop("resourceNames")),
    ("verbs", lambda o: one(o, "ClusterRole")["rules"][0]["verbs"].append("delete")),
    ("wildcard", lambda o: one(o, "ClusterRole")["rules"][0].update(resources=["*"])),
    ("no such role", lambda o: one(o, "RoleBinding")["roleRef"].update(name="x")),
    ("no such account", lambda o: one(o, "ClusterRoleBinding")["subjects"][0].update(name="x")),
]


@pytest.mark.parametrize("complaint, spoil", SPOILT, ids=[f"{n}-{what}" for n, (what, _) in enumerate(SPOILT)])
def test_every_rule_can_fail(complaint: str, spoil: Callable[[list[Object]], Any]) -> None:
    objects = overlay("self-signed")
    spoil(objects)
    found = pod_complaints(objects) + service_complaints(objects) + rbac_complaints(objects)
    assert any(one.endswith(f": {complaint}") for one in found), found


# --- the webhook -----------------------------------------------------------------------------------------------


def test_the_pods_run_commands_that_are_there() -> None:
    """Every argument is taken by the command line's own parser."""
    for name in OVERLAYS:
        for where, spec in pod_specs(overlay(name)):
            for container in spec["containers"]:
                assert "command" not in container, where  # the image's entry point is the command
                parser_of(cli.COMMANDS).parse_args(container["args"])
    assert image.recipe().entrypoint[-1].endswith("/pcinuma")


def test_job_and_cron_job_run_the_same_pod() -> None:
    objects = overlay("self-signed")
    assert one(objects, "Job")["spec"]["template"] == one(objects, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]


def test_the_pods_wait_for_the_files_of_the_certificate() -> None:
    spec = _pod(overlay("self-signed"))
    arguments = spec["containers"][0]["args"]
    (mount,) = (one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "tls")
    (volume,) = (one for one in spec["volumes"] if one["name"] == "tls")
    paths = {f"{mount['mountPath']}/{item['path']}" for item in volume["secret"]["items"]}
    assert paths == {argument.split("=")[1] for argument in arguments if argument.startswith("--tls-")}
    assert "optional" not in volume["secret"]
    assert volume["secret"]["defaultMode"] == 0o440
    for name in ("cert-manager", "self-signed"):
        objects = overlay(name)
        kinds = ("Secret",) if name == "self-signed" else ("Certificate",)
        secrets = [
            o["spec"]["secretName"] if "spec" in o else o["metadata"]["name"] for o in objects if o["kind"] in kinds
        ]
        assert volume["secret"]["secretName"] in secrets


def test_the_configuration_is_mounted_and_a_change_of_it_rolls_the_pods(tmp_path: Path) -> None:
    objects = overlay("self-signed")
    spec = _pod(objects)
    (container,) = spec["containers"]
    (path,) = (a.split("=")[1] for a in container["args"] if a.startswith("--config="))
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == "config")
    (volume,) = (one for one in spec["volumes"] if one["name"] == "config")
    config = one(objects, "ConfigMap", volume["configMap"]["name"])
    assert [f"{mount['mountPath']}/{file}" for file in config["data"]] == [path]
    (text,) = config["data"].values()
    options.load_defaults(json.dumps(yaml.safe_load(text)["options"]).encode(), "config.yaml")
    shutil.copytree(MANIFESTS, tmp_path / "manifests")
    file = tmp_path / "manifests/base/config.yaml"
    file.write_text(file.read_text().replace("policy: best-effort", "policy: restricted"))
    changed = _pod(build(tmp_path / "manifests/overlays/self-signed"))
    assert changed["volumes"] != spec["volumes"]


def test_applying_again_keeps_what_the_job_made() -> None:
    """The Secret brings no data, the webhook no bundle: a field that a manifest never had, apply leaves alone."""
    objects = overlay("self-signed")
    assert set(one(objects, "Secret")) == {"apiVersion", "kind", "metadata", "type"}
    for name in ("cert-manager", "self-signed"):
        for webhook in one(overlay(name), "MutatingWebhookConfiguration")["webhooks"]:
            assert "caBundle" not in webhook["clientConfig"]


def test_the_certificates_are_for_the_name_that_the_api_server_calls() -> None:
    objects = overlay("cert-manager")
    (webhook,) = one(objects, "MutatingWebhookConfiguration")["webhooks"]
    service = webhook["clientConfig"]["service"]
    assert (
        f"{service['name']}.{service['namespace']}.svc"
        in one(objects, "Certificate", "pcinuma-webhook")["spec"]["dnsNames"]
    )
    injected = one(objects, "MutatingWebhookConfiguration")["metadata"]["annotations"]["cert-manager.io/inject-ca-from"]
    assert injected == "pcinuma/pcinuma-webhook"


def test_the_rights_are_what_the_command_needs() -> None:
    """tests/integration/test_certs.py runs it with these very rights, and no others."""
    objects = overlay("self-signed")
    assert one(objects, "Role")["rules"] == [
        {
            "apiGroups": [""],
            "resources": ["secrets"],
            "resourceNames": ["pcinuma-webhook-tls"],
            "verbs": ["get", "update"],
        }
    ]
    assert one(objects, "ClusterRole")["rules"] == [
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["mutatingwebhookconfigurations"],
            "resourceNames": ["pcinuma"],
            "verbs": ["get", "update"],
        }
    ]


# --- CEL -------------------------------------------------------------------------------------------------------


def met(conditions: list[Object], content: Any) -> bool:
    """Whether all matchConditions hold. An error is one: the API server's failurePolicy would decide."""
    environment = celpy.Environment()
    for condition in conditions:
        program = environment.program(environment.compile(condition["expression"]))
        if not program.evaluate({"object": json_to_cel(content)}):
            return False
    return True


@pytest.mark.parametrize(
    "metadata, reaches",
    [
        ({"annotations": {f"{PREFIX}enabled": "true"}}, True),
        ({"annotations": {f"{PREFIX}enabled": "yes"}}, True),  # to be refused, not passed over
        ({"annotations": {f"{PREFIX}polcy": "restricted"}}, True),
        ({"annotations": {"hooks.kubevirt.io/hookSidecars": "[]"}}, False),
        ({"annotations": {"example.com/pcinuma.vm.kubevirt.io": "true"}}, False),
        ({"annotations": {}}, False),
        ({}, False),
        ({"labels": {f"{PREFIX}enabled": "true"}}, False),
    ],
)
def test_only_annotated_vmis_reach_the_webhook(metadata: Object, reaches: bool) -> None:
    (webhook,) = one(overlay("self-signed"), "MutatingWebhookConfiguration")["webhooks"]
    assert met(webhook["matchConditions"], {"metadata": {"name": "vm", **metadata}}) is reaches
    assert webhook["rules"] == [
        {
            "apiGroups": ["kubevirt.io"],
            "apiVersions": ["v1"],
            "operations": ["CREATE"],
            "resources": ["virtualmachineinstances"],
            "scope": "Namespaced",
        }
    ]


def launcher(annotations: Object | None = None, *, volumes: bool = True, there: bool = False) -> Object:
    containers = [{"name": "compute"}, *([{"name": "pcinuma"}] if there else [])]
    spec: Object = {"containers": containers}
    if volumes:
        spec["volumes"] = [{"name": "private"}, {"name": "kubevirt-plugin-sockets", "emptyDir": {}}]
    metadata: Object = {"labels": {"kubevirt.io": "virt-launcher"}}
    if annotations is not None:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": spec}


@pytest.mark.parametrize(
    "pod, gets_it",
    [
        (launcher({f"{PREFIX}enabled": "true"}), True),
        (launcher({f"{PREFIX}enabled": "false"}), False),
        (launcher({f"{PREFIX}policy": "restricted"}), False),
        (launcher({}), False),
        (launcher(), False),
        (launcher({f"{PREFIX}enabled": "true"}, volumes=False), False),
        (launcher({f"{PREFIX}enabled": "true"}, there=True), False),
    ],
)
def test_which_pods_get_the_plugins_container(pod: Object, gets_it: bool) -> None:
    policy = one(overlay("plugin"), "MutatingAdmissionPolicy")["spec"]
    assert met(policy["matchConditions"], pod) is gets_it
    assert policy["matchConstraints"]["objectSelector"] == {"matchLabels": {"kubevirt.io": "virt-launcher"}}


def test_the_plugins_condition_is_the_policys() -> None:
    condition = one(overlay("plugin"), "Plugin")["spec"]["condition"]
    environment = celpy.Environment()
    program = environment.program(environment.compile(condition))
    for given, holds in (({f"{PREFIX}enabled": "true"}, True), ({f"{PREFIX}enabled": "no"}, False), ({}, False)):
        assert bool(program.evaluate({"vmi": json_to_cel({"Annotations": given})})) is holds


def mutated() -> Object:
    """The container that the policy adds, its expression evaluated."""
    policy = one(overlay("plugin"), "MutatingAdmissionPolicy")["spec"]
    (mutation,) = policy["mutations"]
    assert mutation["patchType"] == "JSONPatch"
    expression = mutation["jsonPatch"]["expression"]
    # CEL's object types are Kubernetes' own; here each is a plain message, whose fields are looked at below
    expression = re.sub(r"\bObject(\.\w+)+\{", lambda found: found[0].replace(".", "_"), expression)
    types = set(re.findall(r"\b(JSONPatch|Object_\w+)\{", expression))
    environment = celpy.Environment(annotations=dict.fromkeys(types, celtypes.MessageType))
    variables = {
        v["name"]: environment.program(environment.compile(v["expression"])).evaluate({}) for v in policy["variables"]
    }
    patches = environment.program(environment.compile(expression)).evaluate(
        {"variables": json_to_cel({name: str(value) for name, value in variables.items()})}
    )
    (patch,) = json.loads(json.dumps(patches, cls=CELJSONEncoder))
    assert (patch["op"], patch["path"]) == ("add", "/spec/containers/-")
    container: Object = patch["value"]
    return container


def test_the_plugins_container() -> None:
    container = mutated()
    assert container["image"] == IMAGE
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": [container]}},
        "1.36",
        strict=True,
    )
    plugin = one(overlay("plugin"), "Plugin")
    (hook,) = plugin["spec"]["domainHooks"]
    parsed = parser_of(cli.COMMANDS).parse_args(container["args"])
    assert parsed.plugin_socket == hook["sidecar"]["socketPath"]
    (mount,) = container["volumeMounts"]
    # KubeVirt refuses a container that mounts the volume without a subPath of its own
    assert mount["name"] == "kubevirt-plugin-sockets"
    assert mount["subPath"] == plugin["metadata"]["name"]
    for path in (parsed.plugin_socket, parsed.socket):
        assert path.startswith(f"{mount['mountPath']}/")
    assert container["resources"]["requests"] == container["resources"]["limits"] == {"cpu": "200m", "memory": "64M"}
    assert container["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 107,
        "runAsGroup": 107,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert one(overlay("plugin"), "MutatingAdmissionPolicyBinding")["spec"]["policyName"] == "pcinuma"
    assert plugin["spec"]["mutatingAdmissionPolicies"] == [{"name": "pcinuma"}]


# --- without a webhook -----------------------------------------------------------------------------------------


def test_the_vm_without_a_webhook_names_the_sidecar() -> None:
    template = one(overlay("no-webhook"), "VirtualMachine")["spec"]["template"]
    (entry,) = json.loads(template["metadata"]["annotations"]["hooks.kubevirt.io/hookSidecars"])
    assert entry == {"image": IMAGE, "imagePullPolicy": "IfNotPresent", "args": ["hook"]}
    parser_of(cli.COMMANDS).parse_args(entry["args"])
    assert template["metadata"]["annotations"][f"{PREFIX}policy"] == "restricted"


def test_kubectl_is_the_real_one() -> None:
    done = subprocess.run([KUBECTL, "version", "--client", "-o", "json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["kustomizeVersion"].startswith("v5.")


def test_the_version_is_the_packages() -> None:
    from pcinuma import __version__

    assert IMAGE.endswith(f":{__version__}")
    assert (ROOT / "Dockerfile").read_text().count(f"pcinuma:{__version__}") == 1
