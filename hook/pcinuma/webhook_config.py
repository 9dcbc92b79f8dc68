"""The webhook's file of configuration and its flags → the sidecar that a VM gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pcinuma import image_reference, options, schema, yaml_text
from pcinuma.admission import Sidecar
from pcinuma.errors import BadInput, BadOption

PULL_POLICIES = ("Always", "IfNotPresent", "Never")
DEFAULT_PULL_POLICY = "IfNotPresent"


def load(data: bytes, where: str) -> Mapping[str, Any]:
    """The file: YAML, valid against ``schemas/webhook.schema.json``. Raises BadInput."""
    content = yaml_text.load(data, where)
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise BadInput(
            "the webhook's configuration is no mapping", where=where, hint="write lines such as image: IMAGE"
        )
    try:
        loaded: dict[str, Any] = json.loads(json.dumps(content))  # YAML has dates and keys of any kind
    except (TypeError, ValueError):
        raise BadInput("a name or a value is neither text, number, list nor mapping", where=where) from None
    if loaded.get("options", {}) is None:
        loaded["options"] = {}  # its lines are all comments
    if isinstance(image := loaded.get("image"), str) and image:
        image_reference.check(image, where)  # says what the schema's pattern cannot
    schema.validate(loaded, "webhook", where)
    return loaded


def sidecar_of(config: Mapping[str, Any], image: str | None, pull_policy: str | None, where: str) -> Sidecar:
    """The sidecar: the flags ``image`` and ``pull_policy`` win over the file's. Raises BadOption, BadInput.

    The file's ``options`` become flags of the sidecar, which reads no file; a VM's annotations win over them there.
    """
    if pull_policy is not None and pull_policy not in PULL_POLICIES:
        what = f"image-pull-policy cannot be {pull_policy!r}"
        raise BadOption(what, where="--image-pull-policy", hint=f"one of: {', '.join(PULL_POLICIES)}")
    chosen = config.get("image") if image is None else image
    if chosen is None:
        raise BadOption("no image for the sidecar", hint="give --image, or a line image: in the file of --config")
    if image is not None:
        image_reference.check(image, "--image")
    args = ["hook"]
    if "version" in config:
        args += ["--version", config["version"]]
    defaults = options.load_defaults(json.dumps(config.get("options") or {}).encode(), f"{where}, options")
    args += [f"--{name}={value}" for name, value in sorted(defaults.items())]
    return Sidecar(chosen, pull_policy or config.get("image-pull-policy", DEFAULT_PULL_POLICY), tuple(args))
