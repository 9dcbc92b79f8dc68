"""What `kubectl kustomize` builds, and rules of the house for it, as functions from objects to complaints."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT

KUBECTL = Path(sys.executable).with_name("kubectl")
MANIFESTS = ROOT / "manifests"
OVERLAYS = ("cert-manager", "self-signed", "plugin", "no-webhook")

Object = dict[str, Any]


def build(folder: Path) -> list[Object]:
    """The objects that kubectl's kustomize makes of a folder. Raises AssertionError with what it says, warnings too."""
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [content for content in yaml.safe_load_all(done.stdout) if content is not None]


@functools.cache
def _overlay(name: str) -> str:
    return yaml.safe_dump_all(build(MANIFESTS / "overlays" / name))


def overlay(name: str) -> list[Object]:
    """A copy of an overlay's objects, for a test to change."""
    return list(yaml.safe_load_all(_overlay(name)))


def one(objects: list[Object], kind: str, name: str | None = None) -> Object:
    """The only object of the kind, of that name if it is given."""
    found = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name or ''}"
    return found[0]


def pod_specs(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Each pod template's spec, with a name for messages."""
    for content in objects:
        spec = content.get("spec", {})
        if content["kind"] == "CronJob":
            spec = spec["jobTemplate"]["spec"]
        if content["kind"] in ("Deployment", "Job", "CronJob", "DaemonSet", "StatefulSet"):
            yield f"{content['kind']} {content['metadata']['name']}", spec["template"]["spec"]


# --- rules -----------------------------------------------------------------------------------------------------


def pod_complaints(objects: list[Object]) -> list[str]:
    """What is wrong with the pods: the restricted Pod Security Standard, and what kube-linter asks for beyond it."""
    found: list[str] = []
    accounts = {o["metadata"]["name"]: o for o in objects if o["kind"] == "ServiceAccount"}
    for where, spec in pod_specs(objects):
        pod = spec.get("securityContext", {})
        if pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
            found.append(f"{where}: seccomp")
        if pod.get("runAsNonRoot") is not True or pod.get("runAsUser") != 107 or pod.get("runAsGroup") != 107:
            found.append(f"{where}: user")
        found += [f"{where}: {key}" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
        if any("hostPath" in volume for volume in spec.get("volumes", ())):
            found.append(f"{where}: hostPath")
        if spec.get("enableServiceLinks", True):
            found.append(f"{where}: service links")
        account = accounts.get(spec.get("serviceAccountName", "default"))
        if account is None:
            found.append(f"{where}: service account")
        elif account.get("automountServiceAccountToken", True):
            found.append(f"{where}: token for all of the service account")
        needs_token = where.split()[0] in ("Job", "CronJob")
        if spec.get("automountServiceAccountToken") is not needs_token:
            found.append(f"{where}: token")
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            found += [f"{where}: {what}" for what in _container_complaints(container, probes=not needs_token)]
    return found


def _container_complaints(container: Object, *, probes: bool) -> Iterator[str]:
    security = container.get("securityContext", {})
    if security.get("allowPrivilegeEscalation") is not False or security.get("privileged"):
        yield "privilege"
    if security.get("readOnlyRootFilesystem") is not True:
        yield "root file system"
    if security.get("capabilities") != {"drop": ["ALL"]}:
        yield "capabilities"
    resources = container.get("resources", {})
    for kind in ("requests", "limits"):
        if set(resources.get(kind, ())) != {"cpu", "memory"}:
            yield kind
    if not re.fullmatch(r"[\w./-]+(:(?!latest$)[\w.-]+|@sha256:[0-9a-f]{64})", container["image"]):
        yield "image"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if probes and "httpGet" not in container.get(probe, {}):
            yield probe
    if any(variable.get("valueFrom", {}).get("secretKeyRef") for variable in container.get("env", ())):
        yield "secret in the environment"


def service_complaints(objects: list[Object]) -> list[str]:
    """References between objects that lead nowhere."""
    found: list[str] = []
    pods: list[tuple[str, Object, Object]] = []
    for content in objects:
        if content["kind"] == "Deployment":
            template = content["spec"]["template"]
            labels = template["metadata"]["labels"]
            pods.append((content["metadata"]["name"], labels, template["spec"]))
            if not _selects(content["spec"]["selector"]["matchLabels"], labels):
                found.append("Deployment: selector")
            if content["spec"].get("replicas", 1) < 2:
                found.append("Deployment: replicas")
            if "podAntiAffinity" not in template["spec"].get("affinity", {}):
                found.append("Deployment: anti-affinity")
    for content in objects:
        spec = content.get("spec", {})
        if content["kind"] == "Service":
            targets = {port["targetPort"] for port in spec["ports"]}
            reached = [pod for _, labels, pod in pods if _selects(spec["selector"], labels)]
            ports = {port["name"] for pod in reached for c in pod["containers"] for port in c.get("ports", ())}
            if not reached or not targets <= ports:
                found.append("Service: reaches no port")
        if content["kind"] == "PodDisruptionBudget" and not any(
            _selects(spec["selector"]["matchLabels"], labels) for _, labels, _ in pods
        ):
            found.append("PodDisruptionBudget: selector")
    services = {
        (o["metadata"]["name"], o["metadata"].get("namespace")): {port["port"] for port in o["spec"]["ports"]}
        for o in objects
        if o["kind"] == "Service"
    }
    for content in objects:
        for webhook in content.get("webhooks", ()):
            service = webhook["clientConfig"]["service"]
            if service.get("port", 443) not in services.get((service["name"], service["namespace"]), ()):
                found.append(f"{webhook['name']}: no such service")
    return found


def _selects(selector: Object, labels: Object) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def rbac_complaints(objects: list[Object]) -> list[str]:
    """Rights that are not for one named object each, and bindings that bind nothing."""
    found: list[str] = []
    accounts = {
        (o["metadata"]["name"], o["metadata"].get("namespace")) for o in objects if o["kind"] == "ServiceAccount"
    }
    roles = {(o["kind"], o["metadata"]["name"]) for o in objects if o["kind"] in ("Role", "ClusterRole")}
    for content in objects:
        where = f"{content['kind']} {content['metadata']['name']}"
        for rule in content.get("rules", ()) if content["kind"] in ("Role", "ClusterRole") else ():
            if not rule.get("resourceNames"):
                found.append(f"{where}: for every name")
            if not set(rule["verbs"]) <= {"get", "update", "patch"}:
                found.append(f"{where}: verbs")
            if "*" in (*rule["apiGroups"], *rule["resources"], *rule["verbs"]):
                found.append(f"{where}: wildcard")
        if content["kind"] in ("RoleBinding", "ClusterRoleBinding"):
            if (content["roleRef"]["kind"], content["roleRef"]["name"]) not in roles:
                found.append(f"{where}: no such role")
            if any((subject["name"], subject["namespace"]) not in accounts for subject in content["subjects"]):
                found.append(f"{where}: no such account")
    return found
