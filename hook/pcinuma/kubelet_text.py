"""The text of a kubelet's configuration file → what the kubelet takes of it, and what it passes over. Pure.

Rules: sigs.k8s.io/yaml reads the first document of a YAML stream and never looks at the rest; of a key that is there
twice the strict decoder complains, and the lenient one takes the last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pcinuma.yaml_text import keys_twice, loader_of, refuse_what_expands, text_of


@dataclass(frozen=True, slots=True)
class Text:
    """``content`` is what the first document says; ``ignored`` counts the documents after it that say something;
    ``twice`` are keys, as a path with dots, that a mapping has again."""

    content: Any
    ignored: int = 0
    twice: tuple[str, ...] = ()


def parse_text(data: bytes, where: str) -> Text:
    """The YAML or JSON text. Raises BadInput, with the line, where the kubelet could not read the first document."""
    with text_of(data, where) as text:
        if text.lstrip().startswith("{") and (known := _json(text)) is not None:
            return known
        return _yaml(text, where)


def _json(text: str) -> Text | None:
    """None for what is no JSON: a YAML flow mapping begins so, too."""
    twice: list[str] = []

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                twice.append(key)
            found[key] = value
        return found

    try:
        return Text(json.loads(text, object_pairs_hook=mapping), 0, tuple(twice))
    except ValueError:
        return None


def _yaml(text: str, where: str) -> Text:
    with loader_of(text, where) as loader:
        if not loader.check_node():
            return Text(None)
        node = loader.get_node()
        refuse_what_expands(node, where)
        twice = tuple(keys_twice(node))
        content = loader.construct_document(node)
        return Text(content, _further(loader), twice)


def _further(loader: Any) -> int:
    """The documents that follow and say something; one that is no YAML ends the count, and counts."""
    import yaml

    count = 0
    try:
        while loader.check_node():
            node = loader.get_node()
            count += not (isinstance(node, yaml.ScalarNode) and node.value in ("", "~", "null"))
    except yaml.YAMLError:
        count += 1
    return count
