"""Validation against the project's JSON Schemas, every error at once, each with its path."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import TYPE_CHECKING, Any

from pcinuma.errors import BadInput

if TYPE_CHECKING:
    from jsonschema_rs import Draft202012Validator

SHOWN = 5


def validate(instance: object, name: str, where: str) -> None:
    """Raise BadInput when ``instance`` is not valid against ``schemas/NAME.schema.json``."""
    errors = problems(instance, name)
    if errors:
        more = f"; and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
        raise BadInput(f"not valid against {name}.schema.json: {'; '.join(errors[:SHOWN])}{more}", where=where)


def problems(instance: object, name: str) -> list[str]:
    """What is wrong with ``instance``, each as ``/path: message``; empty when it is valid."""
    found = []
    try:
        for error in _validator(name).iter_errors(instance):
            path = "/".join(str(part) for part in error.instance_path)
            found.append(f"/{path}: {error.message}")
    except UnicodeEncodeError:  # JSON can say "\ud800"; the validator takes text that is UTF-8
        found.append("/: a text holds half of a surrogate pair, which no character is")
    except ValueError as error:  # its own limit, of 255 lists and objects in each other
        if "recursion" not in str(error).lower():
            raise
        found.append("/: nested too deeply")
    return found


def schema(name: str) -> dict[str, Any]:
    """The schema itself."""
    path = os.path.join(os.path.dirname(__file__), "schemas", f"{name}.schema.json")
    with open(path, encoding="utf-8") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


@cache
def _validator(name: str) -> Draft202012Validator:
    from jsonschema_rs import Draft202012Validator  # costs 20 ms of CPU: loaded only when something is validated

    return Draft202012Validator(schema(name))
