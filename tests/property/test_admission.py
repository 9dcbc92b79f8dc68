"""The webhook's decision on anything that JSON can hold."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcinuma.admission import Sidecar, decide
from pcinuma.errors import BadInput
from tests.support.webhook import review_of, vmi

ENABLED = "pcinuma.vm.kubevirt.io/enabled"
SIDECARS = "hooks.kubevirt.io/hookSidecars"
SIDECAR = Sidecar("registry.example/pcinuma:1", "Always", ("hook",))

WHITE = st.text(" \t\r\n", max_size=4)
LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
ANY = st.recursive(LEAF, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)
PART = st.sampled_from(["metadata", "annotations", "spec", "domain", "cpu", "devices", "gpus", "machine", "type"])
LIKE_A_VMI = st.recursive(LEAF, lambda inner: st.dictionaries(PART, inner) | st.lists(inner), max_leaves=20)


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.text(), ANY)), WHITE, WHITE, st.booleans(), st.sampled_from([None, 0, 2, "\t"]))
def test_any_list_gets_one_more_entry_and_stays_as_written(
    entries: list[dict[str, Any]], before: str, after: str, ascii_only: bool, indent: int | str | None
) -> None:
    text = before + json.dumps(entries, indent=indent, ensure_ascii=ascii_only) + after
    response = decide(review_of(vmi({ENABLED: "true", SIDECARS: text})), SIDECAR).review["response"]
    [operation] = json.loads(base64.b64decode(response["patch"]))
    changed = operation["value"]
    added = {"image": "registry.example/pcinuma:1", "imagePullPolicy": "Always", "args": ["hook"]}
    assert json.loads(changed) == [*entries, added]
    entry = json.dumps(added)
    assert changed.replace(f", {entry}" if entries else entry, "", 1) == text


@given(ANY)
def test_any_json_is_a_review_or_told_to_be_none(content: object) -> None:
    with pytest.raises(BadInput):
        decide(content, SIDECAR)


@given(LIKE_A_VMI, st.dictionaries(st.sampled_from([ENABLED, SIDECARS, "a"]), st.sampled_from(["true", "[]"]) | ANY))
def test_any_object_is_answered_or_told_to_be_none(made: object, annotations: dict[str, object]) -> None:
    for content in (made, {**vmi(annotations), "spec": made}):
        try:
            decision = decide(review_of(content), SIDECAR)
        except BadInput as error:
            assert str(error).isprintable()
            continue
        answered = json.loads(json.dumps(decision.review))["response"]
        assert answered["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
        assert isinstance(answered["allowed"], bool)
        assert all(warning.isprintable() and len(warning) <= 256 for warning in answered.get("warnings", ()))
