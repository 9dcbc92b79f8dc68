"""What the webhook is told: its file, its flags, its address."""

from __future__ import annotations

import json

import jsonschema_rs
import pytest

from pcinuma.admission import Sidecar
from pcinuma.errors import BadInput, BadOption
from pcinuma.listen import address
from pcinuma.webhook_config import load, sidecar_of
from tests.conftest import ROOT

FULL = b"""
image: registry.example/pcinuma:1.0
image-pull-policy: Always
version: v1alpha2
options:
  policy: restricted
  group-by: root-complex
"""


def test_the_file_gives_image_policy_version_and_options() -> None:
    assert sidecar_of(load(FULL, "f"), None, None, "f") == Sidecar(
        "registry.example/pcinuma:1.0",
        "Always",
        ("hook", "--version", "v1alpha2", "--group-by=root-complex", "--policy=restricted"),
    )


def test_flags_win_over_the_file() -> None:
    sidecar = sidecar_of(load(FULL, "f"), "other:2", "Never", "f")
    assert (sidecar.image, sidecar.pull_policy) == ("other:2", "Never")


def test_what_holds_without_a_file() -> None:
    assert sidecar_of(load(b"", "f"), "a/b:1", None, "f") == Sidecar("a/b:1", "IfNotPresent", ("hook",))


def test_without_an_image_there_is_no_webhook() -> None:
    with pytest.raises(BadOption) as raised:
        sidecar_of({}, None, None, "f")
    assert str(raised.value) == "no image for the sidecar"


@pytest.mark.parametrize(
    "text, part",
    [
        (b"- image", "is no mapping"),
        (b"imgae: x", "'imgae'"),
        (b"image: ''", "/image"),
        (b"image: 'a b'", "no image reference: 'a b'"),
        (b'image: "a\\nb"', "no image reference: 'a"),
        (b"image: 7", "/image"),
        (b'{"image": "\\ud800"}', "no image reference: '\\\\xd800'"),
        (b'{"image-pull-policy": "\\ud800"}', "half of a surrogate pair"),
        (b"image-pull-policy: Sometimes", "/image-pull-policy"),
        (b"version: v1beta1", "/version"),
        (b"options: [policy]", "/options"),
        (b"? [a]\n: b", "unhashable key"),
        (b"image: 2020-01-01", "neither text, number, list nor mapping"),
        (b"image: [", "not YAML"),
    ],
)
def test_a_file_that_is_none_is_told_in_one_line(text: bytes, part: str) -> None:
    with pytest.raises(BadInput) as raised:
        load(text, "the file")
    assert part in str(raised.value)
    assert "(the file" in str(raised.value)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("options", ["{policy: strict}", "{polcy: restricted}", "{enabled: 'true'}"])
def test_options_are_checked_before_any_vm_gets_them(options: str) -> None:
    config = load(f"image: a\noptions: {options}".encode(), "the file")
    with pytest.raises(BadOption, match="the file, options"):
        sidecar_of(config, None, None, "the file")


def test_options_left_empty_are_none() -> None:
    assert sidecar_of(load(b"image: a\noptions:\n  # policy: restricted\n", "f"), None, None, "f").args == ("hook",)


DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "image",
    [
        "pcinuma",
        "a/b:1",
        "registry.example:5000/infra/pc.i_nu--ma:V1.0_x-y",
        "localhost/x",
        "REGISTRY.example/x:1",
        "[fd00::1]:5000/x:1",
        f"a/b@sha256:{DIGEST}",
        f"registry.example/a/b:1@sha256:{DIGEST}",
        f"a@sha512:{DIGEST}{DIGEST}",
    ],
)
def test_image_references(image: str) -> None:
    assert sidecar_of({}, image, None, "f").image == image
    assert sidecar_of(load(json.dumps({"image": image}).encode(), "f"), None, None, "f").image == image


@pytest.mark.parametrize(
    "image, wrong",
    [
        ("A/B:1", "the path in lower case"),
        ("https://x/y:1", "no scheme"),
        ("a/b:", "its tag '' is none"),
        ("a/b@", "its digest is not"),
        ("a/b@sha256:zz", "its digest is not"),
        (f"a/b@sha256:{DIGEST.upper()}", "its digest is not"),
        (f"a/b@sha256:{DIGEST}0", "its digest is not"),
        (f"a/b@md5:{DIGEST}", "its digest is not"),
        ("a/b:1:2", "its name is|its tag"),
        ("x//y", "its name is"),
        ("/x", "its name is"),
        ("x/", "its name is"),
        ("a/-b", "its name is"),
        ("a/b ", "its name is"),
        ("a/b\n", "its name is"),
        ("", "its name is"),
        ("a/b:" + "t" * 129, "its tag"),
        ("a/" + "b" * 254, "more than 255"),
    ],
)
def test_what_is_no_image_reference(image: str, wrong: str) -> None:
    with pytest.raises(BadInput, match=f"no image reference: .*({wrong})") as raised:
        sidecar_of({}, image, None, "f")
    assert raised.value.where == "--image"
    assert str(raised.value).isprintable()
    with pytest.raises(BadInput):
        load(json.dumps({"image": image}).encode(), "f")
    if len(image) < 256:
        schema = json.loads((ROOT / "schemas" / "webhook.schema.json").read_text())
        assert not jsonschema_rs.validator_for(schema).is_valid({"image": image}), "an editor says so, too"


def test_flags_are_checked() -> None:
    with pytest.raises(BadOption, match="image-pull-policy cannot be 'always'"):
        sidecar_of({}, "a", "always", "f")
    with pytest.raises(BadInput, match="--image"):
        sidecar_of({}, "a b", None, "f")


def test_the_schema_says_what_is_taken() -> None:
    schema = json.loads((ROOT / "schemas" / "webhook.schema.json").read_text())
    jsonschema_rs.meta.validate(schema)
    assert set(schema["properties"]) == {"image", "image-pull-policy", "version", "options"}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("0.0.0.0:8443", ("0.0.0.0", 8443)),
        (":8443", ("0.0.0.0", 8443)),
        ("localhost:0", ("localhost", 0)),
        ("[::]:8443", ("::", 8443)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_an_address(text: str, expected: tuple[str, int]) -> None:
    assert address(text) == expected


@pytest.mark.parametrize(
    "text", ["", "8443", "host", "host:", "host:x", "host:65536", "host:-1", "::1:80", "::", "h:٣"]
)
def test_no_address(text: str) -> None:
    with pytest.raises(BadOption, match="listen cannot be"):
        address(text)
