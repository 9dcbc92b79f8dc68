"""Result files: what is written opens as it was; whatever is changed in one is refused or shown, never a fault."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcinuma import options, report, result_file, svg, web_result
from pcinuma.errors import BadInput
from pcinuma.explain import Explained, explain
from pcinuma.result_file import Result
from pcinuma.schema import problems
from tests.support.pictures import machine


@cache
def explained(devices: int, policy: str, odd: bool) -> Explained:
    xml, host = machine(devices, 2, odd=odd)
    return explain(xml, options.resolve({"policy": policy, "group-by": "switch"}), host)


def written(made: Explained) -> dict[str, Any]:
    return result_file.dump(Result(report.as_dict(made.result.report), made.scene, "a\n", "b", None))


@pytest.mark.parametrize(
    "devices, policy, odd", [(1, "best-effort", False), (12, "restricted", True), (12, "none", True)]
)
def test_what_is_written_opens_as_it_was(devices: int, policy: str, odd: bool) -> None:
    made = explained(devices, policy, odd)
    content = written(made)
    assert problems(content, "result") == []
    opened = result_file.load(json.dumps(content).encode(), "f")
    assert opened.scene is not None
    assert svg.draw(opened.scene) == svg.draw(made.scene)
    assert result_file.dump(opened) == content


def test_a_file_may_number_its_devices_as_it_likes() -> None:
    """Up to a million, in any order: the picture has the numbers, in room enough, and all lines run straight."""
    content = written(explained(4, "best-effort", False))
    other = {1: 30, 2: 7, 3: 1_000_000, 4: 2}

    def renumber(part: Any) -> None:
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if key in ("number", "device"):
                part[key] = other[value]
            elif isinstance(value, (dict, list)):
                renumber(value)

    renumber(content["picture"])
    picture = web_result.opened(json.dumps(content).encode(), "f").picture
    assert picture is not None
    root = ElementTree.fromstring(picture)
    badges = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "badgetext"]
    assert badges == ["30", "7", "1000000", "2"] * 3
    lines = [path.get("d", "") for path in root.iter("{http://www.w3.org/2000/svg}path")
             if (path.get("class") or "").startswith("line")]  # fmt: skip
    assert ["C" in line for line in lines] == [False] * 8


def places(content: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all parts of it."""
    parts = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [at, *(place for key, part in parts for place in places(part, (*at, key)))]


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from([[], {}, 0, "aligned", None, "<script>alert(1)</script>\x00\x1b[31m", "\ud800"]),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_file_is_refused_or_shown(data: st.DataObject) -> None:
    content = copy.deepcopy(written(explained(4, "restricted", True)))
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from([place for place in places(content) if place]))
        at = content
        for key in way:
            at = at[key]
        change = data.draw(st.sampled_from(["set", "drop", "copy"]))
        if change == "set":
            at[last] = data.draw(ODD)
        elif change == "drop":
            del at[last]
        else:
            place = data.draw(st.sampled_from(places(content)))
            part: Any = content
            for key in place:
                part = part[key]
            at[last] = copy.deepcopy(part)
    try:
        view = web_result.opened(json.dumps(content).encode(), "f")
    except BadInput:
        return
    if view.picture is not None:
        ElementTree.fromstring(view.picture)
    for file in view.downloads:
        assert file.href
