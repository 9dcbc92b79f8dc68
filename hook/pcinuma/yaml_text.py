"""Files in YAML or JSON: bounded before they are read, and one line where they are not what they must be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pcinuma.errors import BadInput

MAX_BYTES = 4 * 1024 * 1024
MAX_EXPANDED = 1_000_000
MAX_DIGITS = 4300
"""Of a number in YAML, as Python has it for decimal ones; 1:1:1… is one to base 60, and takes time by the square."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def load(data: bytes, where: str) -> Any:
    """What the YAML (or JSON) text holds. Raises BadInput with the line when it is neither or too large."""
    with text_of(data, where) as text:
        if text.lstrip().startswith("{"):
            import json

            try:
                return json.loads(text, object_pairs_hook=_once)
            except ValueError:
                pass  # a YAML flow mapping begins so, too
        with loader_of(text, where) as loader:
            node = loader.get_single_node()
            if node is None:
                return None
            refuse_what_expands(node, where)
            if (name := next(keys_twice(node), None)) is not None:
                raise BadInput(f"{name} is there twice", where=where)
            return loader.construct_document(node)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key that is there twice")
    return found


@contextlib.contextmanager
def text_of(data: bytes, where: str) -> Iterator[str]:
    """The text. What is too large, and what cannot be made sense of while it is read, is told as BadInput."""
    if len(data) > MAX_BYTES:
        raise BadInput(f"larger than {MAX_BYTES // 2**20} MiB", where=where)
    try:
        yield data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput("not UTF-8", where=where) from None
    except (RecursionError, ValueError, TypeError, OverflowError):
        raise BadInput("not YAML that can be read: nested too deeply, or a value that is none", where=where) from None


@contextlib.contextmanager
def loader_of(text: str, where: str) -> Iterator[Any]:
    """PyYAML's loader of the text; what is no YAML is told as BadInput, with the line."""
    import yaml  # costs 15 ms of CPU: loaded only when a YAML file is given

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        yield loader
    except yaml.MarkedYAMLError as error:
        line = f"{where}, line {error.problem_mark.line + 1}" if error.problem_mark else where
        raise BadInput(f"not YAML: {error.problem}", where=line) from None
    except yaml.YAMLError as error:
        raise BadInput(f"not YAML: {error}", where=where) from None
    finally:
        loader.dispose()


def refuse_what_expands(node: Any, where: str) -> None:
    """Raise BadInput for a YAML node that, every alias written out, holds more than is worked on."""
    if _expanded_size(node, {}) > MAX_EXPANDED:
        raise BadInput("not YAML that can be read: it holds too much, or its aliases repeat too much", where=where)


def _expanded_size(node: Any, known: dict[int, int]) -> int:
    """How many nodes there are once every alias is written out; more than is allowed for one that holds itself."""
    if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
        raise ValueError("a number that is too long")
    if id(node) not in known:
        known[id(node)] = MAX_EXPANDED + 1  # found again below itself
        below = node.value if isinstance(node.value, list) else ()
        flat = [part for item in below for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_expanded_size(part, known) for part in flat)
    return known[id(node)]


def keys_twice(root: Any) -> Iterator[str]:
    """Each key that a mapping of the document has again, once for each time."""
    import yaml

    seen: set[int] = set()
    stack = [(root, "")]
    while stack:
        node, path = stack.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            stack += [(item, f"{path}[{number}]") for number, item in reversed(list(enumerate(node.value)))]
        if not isinstance(node, yaml.MappingNode):
            continue
        keys: set[tuple[str, str]] = set()
        below = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name = f"{path}.{key.value}" if path else key.value
            if (key.tag, key.value) in keys:
                yield name
            keys.add((key.tag, key.value))
            below.append((value, name))
        stack += reversed(below)
