"""Schemas of the custom resources that the manifests use, as far as they use them; an unknown field is an error.

Sources: KubeVirt's api/plugin/v1alpha1/types.go and api/core/v1/types.go (KubeVirtConfiguration,
SupportContainerResources), KubeVirt's policies on plugins' socket paths; cert-manager's apis/certmanager/v1.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


TEXT: Schema = {"type": "string", "minLength": 1}
ANY: Schema = {}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(h|m|s))+$"}
QUANTITIES: Schema = _object(cpu={"type": "string"}, memory={"type": "string", "pattern": "^[0-9]+(Mi|M)$"})
RESOURCES: Schema = _object(("requests", "limits"), requests=QUANTITIES, limits=QUANTITIES)
NAMED: Schema = _object(("name",), name=TEXT)
KEY: Schema = _object(
    algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
    size={"enum": [256, 384, 521, 2048, 4096]},
    rotationPolicy={"enum": ["Never", "Always"]},
)

_SPECS: dict[tuple[str, str], Schema] = {
    ("plugin.kubevirt.io/v1alpha1", "Plugin"): _object(
        condition=TEXT,
        failureStrategy={"enum": ["Fail", "Ignore"]},
        domainHooks=_list(
            _object(
                ("sidecar",),
                sidecar=_object(
                    ("socketPath",),
                    socketPath={
                        "type": "string",
                        "pattern": r"^/var/run/kubevirt-plugin/pcinuma/.*\.sock$",
                        "maxLength": 107,
                    },
                ),
                condition=TEXT,
                failureStrategy={"enum": ["Fail", "Ignore"]},
                timeout=DURATION,
            )
        ),
        mutatingAdmissionPolicies=_list(NAMED),
    ),
    ("cert-manager.io/v1", "Issuer"): {
        "oneOf": [
            _object(("selfSigned",), selfSigned=_object()),
            _object(("ca",), ca=_object(("secretName",), secretName=TEXT)),
        ]
    },
    ("cert-manager.io/v1", "Certificate"): _object(
        ("secretName", "issuerRef"),
        secretName=TEXT,
        isCA={"type": "boolean"},
        commonName=TEXT,
        duration=DURATION,
        renewBefore=DURATION,
        dnsNames=_list(TEXT),
        usages=_list({"enum": ["server auth", "digital signature", "key encipherment"]}),
        privateKey=KEY,
        issuerRef=_object(("name", "kind"), name=TEXT, kind={"enum": ["Issuer", "ClusterIssuer"]}),
    ),
    ("kubevirt.io/v1", "KubeVirt"): _object(
        configuration=_object(
            developerConfiguration=_object(featureGates=_list(TEXT)),
            supportContainerResources=_list(
                _object(
                    ("type", "resources"),
                    type={
                        "enum": [
                            "container-disk",
                            "hotplug-disk",
                            "guest-console-log",
                            "sidecar",
                            "virtiofs",
                            "vmexport",
                        ]
                    },
                    resources=RESOURCES,
                )
            ),
        )
    ),
    ("kubevirt.io/v1", "VirtualMachine"): _object(
        ("template",),
        runStrategy={"enum": ["Always", "Halted", "Manual", "RerunOnFailure", "Once"]},
        template=_object(
            ("metadata", "spec"),
            metadata=_object(annotations={"type": "object", "additionalProperties": {"type": "string"}}),
            spec=_object(
                ("domain",),
                domain=_object(
                    ("devices",),
                    cpu=_object(
                        cores={"type": "integer"},
                        sockets={"type": "integer"},
                        threads={"type": "integer"},
                        dedicatedCpuPlacement={"type": "boolean"},
                        isolateEmulatorThread={"type": "boolean"},
                        numa=_object(guestMappingPassthrough=_object()),
                        model=TEXT,
                    ),
                    memory=_object(guest=TEXT, hugepages=_object(("pageSize",), pageSize={"enum": ["2Mi", "1Gi"]})),
                    machine=_object(type={"enum": ["q35", "virt"]}),
                    firmware=ANY,
                    devices=_object(
                        disks=_list(ANY),
                        interfaces=_list(
                            _object(("name",), name=TEXT, masquerade=_object(), sriov=_object(), bridge=_object())
                        ),
                        gpus=_list(_object(("name", "deviceName"), name=TEXT, deviceName=TEXT)),
                        hostDevices=_list(_object(("name", "deviceName"), name=TEXT, deviceName=TEXT)),
                        autoattachMemBalloon={"type": "boolean"},
                    ),
                ),
                networks=_list(_object(("name",), name=TEXT, pod=_object(), multus=_object(networkName=TEXT))),
                volumes=_list(ANY),
                nodeSelector=ANY,
            ),
        ),
    ),
}


def schema(api_version: str, kind: str) -> Schema | None:
    """The schema of a custom resource; None for a kind that is not one of these."""
    spec = _SPECS.get((api_version, kind))
    if spec is None:
        return None
    metadata = _object(
        ("name",),
        name={"type": "string", "pattern": "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"},
        namespace=TEXT,
        labels={"type": "object"},
        annotations={"type": "object"},
    )
    return _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )
