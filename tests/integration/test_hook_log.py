"""What the sidecar says on standard error: who, what and why, in one line a call, and nothing that could deceive."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.conftest import ROOT
from tests.support import sidecar
from tests.support.domains import domain, hostdev
from tests.support.sidecar import Client, Sidecar, refused, vmi

NEAR, FAR, UNKNOWN = "0000:41:00.0", "0000:81:00.0", "0000:c1:00.0"
FITS = domain({0: 0, 1: 1}, [hostdev(NEAR, "ua-gpu-near"), hostdev(FAR, "ua-gpu-far")])
ONE_DOES_NOT = domain({0: 0, 1: 1}, [hostdev(NEAR, "ua-gpu-near"), hostdev(UNKNOWN, "ua-gpu-unknown")])
SECRET = "s3cret-of-the-owner"
SECRETIVE = FITS.replace("<devices>", f"<!-- {SECRET} --><metadata><{SECRET}/></metadata><devices>").replace(
    "/dev/urandom", f"/{SECRET}"
)
REPORT = jsonschema_rs.validator_for(json.loads((ROOT / "schemas" / "report.schema.json").read_text()))
REPORT_FIELDS = ("version", "outcome", "options", "cells", "devices", "findings")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("host") / "host.json"
    return sidecar.host_file(path, {0: "0-7", 1: "8-15"}, {NEAR: 0, FAR: 1, UNKNOWN: -1})


@pytest.fixture(scope="module")
def hook(host: Path) -> Iterator[Sidecar]:
    with sidecar.running("--host", host, plugin=True) as running:
        yield running


@pytest.fixture
def client(hook: Sidecar) -> Iterator[Client]:
    with Client(hook.socket) as made:
        yield made


def the_line(hook: Sidecar, before: int) -> dict[str, Any]:
    """The one line that was logged since the log was ``before`` long."""
    lines = hook.text()[before:].splitlines()
    assert len(lines) == 1, lines
    found: dict[str, Any] = json.loads(lines[0])
    return found


# --- the fields ------------------------------------------------------------------------------------------------


def test_a_call_that_placed(hook: Sidecar, client: Client) -> None:
    before = len(hook.text())
    client.define(FITS, vmi(name="train-0", namespace="ml"))
    record = the_line(hook, before)
    assert (record["namespace"], record["name"]) == ("ml", "train-0")
    assert (record["level"], record["outcome"], record["findings"]) == ("info", "changed", [])
    fields = ("source", "alias", "hostNode", "cell", "placement", "guestAddress", "guestBDF")
    # by hand: one device a cell, so two blocks of two bus numbers that end at 255; expanders 1 and 3, ports 2 and 4
    assert [tuple(device[field] for field in fields) for device in record["devices"]] == [
        (NEAR, "ua-gpu-near", 0, 0, "placed", "0000:02:00.0", "0000:fd:00.0"),
        (FAR, "ua-gpu-far", 1, 1, "placed", "0000:04:00.0", "0000:ff:00.0"),
    ]
    assert isinstance(record["milliseconds"], int | float)
    assert 0 < record["milliseconds"] < 20_000
    when = datetime.fromisoformat(record["time"].replace("Z", "+00:00"))
    assert abs(datetime.now(UTC) - when) < timedelta(seconds=60)


def test_a_call_that_left_a_device(hook: Sidecar, client: Client) -> None:
    before = len(hook.text())
    client.define(ONE_DOES_NOT, vmi())
    record = the_line(hook, before)
    assert (record["level"], record["outcome"]) == ("warning", "changed")
    found = {
        device["source"]: (device["placement"], device["cell"], device["guestBDF"]) for device in record["devices"]
    }
    assert found == {NEAR: ("placed", 0, "0000:ff:00.0"), UNKNOWN: ("left", None, None)}
    (finding,) = record["findings"]
    assert (finding["code"], finding["severity"], finding["device"]) == ("numa-unknown", "warning", UNKNOWN)
    assert "-1" in finding["message"]


def test_a_call_that_was_refused(hook: Sidecar, client: Client) -> None:
    before = len(hook.text())
    _, said = refused(lambda: client.define(ONE_DOES_NOT, vmi({"policy": "restricted"}, name="train-0")))
    record = the_line(hook, before)
    assert (record["level"], record["outcome"], record["name"]) == ("error", "refused", "train-0")
    assert record["error"] == said
    assert {device["source"] for device in record["devices"]} == {NEAR, UNKNOWN}
    assert {finding["code"] for finding in record["findings"]} == {"numa-unknown", "policy-not-met"}


@pytest.mark.parametrize(
    ("xml", "annotations"),
    [
        (FITS, None),
        (FITS, {"policy": "none"}),
        (ONE_DOES_NOT, None),
        (ONE_DOES_NOT, {"policy": "restricted"}),
        (FITS, {"policy": "single-numa-node"}),
        (domain({}, []), None),
        (domain({0: 0}, []), {"policy": "restricted"}),
    ],
    ids=range(7),
)
def test_every_call_has_one_line_with_the_whole_report(
    hook: Sidecar, client: Client, xml: str, annotations: dict[str, str] | None
) -> None:
    before = len(hook.text())
    client.begin_define(xml, vmi(annotations)).exception()
    record = the_line(hook, before)
    assert (record["namespace"], record["name"]) == ("ns", "vm")
    assert record["outcome"] in ("changed", "unchanged", "refused")
    assert isinstance(record["milliseconds"], int | float)
    part = {key: record[key] for key in REPORT_FIELDS if key in record}
    assert [error.message for error in REPORT.iter_errors(part)] == []


@pytest.mark.parametrize(
    ("xml", "annotations", "code"),
    [
        ("<domain>", None, "bad-input"),
        ("", {"policy": "restricted"}, "bad-input"),
        (FITS, {"policy": "x"}, "bad-option"),
    ],
)
def test_a_call_that_was_no_good_has_the_same_fields(
    hook: Sidecar, client: Client, xml: str, annotations: dict[str, str] | None, code: str
) -> None:
    """Who collects the lines of a thousand VMs asks each for its findings."""
    before = len(hook.text())
    _, said = refused(lambda: client.define(xml, vmi(annotations)))
    record = the_line(hook, before)
    assert (record["namespace"], record["name"], record["outcome"]) == ("ns", "vm", "refused")
    assert record["devices"] == []
    assert [(finding["code"], finding["severity"]) for finding in record["findings"]] == [(code, "error")]
    assert record["findings"][0]["message"] in said
    assert isinstance(record["milliseconds"], int | float)


def test_a_vmi_that_is_none_has_a_line_all_the_same(hook: Sidecar, client: Client) -> None:
    for given in (b"", b"[]", b'{"metadata": {"name": 1}}', b'{"metadata": {"name": ["a"], "namespace": {}}}'):
        before = len(hook.text())
        client.begin_define(FITS, given).exception()
        record = the_line(hook, before)
        assert (record["level"], record["outcome"]) == ("error", "refused")
        assert (record["namespace"], record["name"]) == (None, None)
        assert record["error"].startswith("pcinuma: error: ")


def test_a_plugin_call_has_its_line(hook: Sidecar) -> None:
    assert hook.plugin_socket is not None
    with Client(hook.plugin_socket) as client:
        for context in ("Boot", "MigrationTarget"):
            before = len(hook.text())
            client.mutate(FITS, vmi(name="train-0"), context)
            record = the_line(hook, before)
            assert (record["name"], record["outcome"]) == ("train-0", "changed")
            assert context in json.dumps(record)


def test_calls_at_once_have_a_line_each(hook: Sidecar, client: Client) -> None:
    before = len(hook.text())
    calls = [client.begin_define(FITS, vmi(name=f"vm-{number}")) for number in range(60)]
    for call in calls:
        call.result()
    names = [record["name"] for record in hook.records(since=before)]
    assert sorted(names) == sorted(f"vm-{number}" for number in range(60))


def test_a_long_list_of_devices(tmp_path: Path) -> None:
    functions = {f"0000:{number:02x}:00.0": number % 2 for number in range(1, 129)}
    host = sidecar.host_file(tmp_path / "host.json", {0: "0-7", 1: "8-15"}, functions)
    xml = domain({0: 0, 1: 1}, [hostdev(bdf, f"ua-hostdevice-{bdf}") for bdf in functions])
    with sidecar.running("--host", host) as hook, Client(hook.socket) as client:
        client.define(xml, vmi())
        (record,) = hook.records("OnDefineDomain")
        assert [device["source"] for device in record["devices"]] == list(functions)
        client.define(xml, vmi({"policy": "none"}))
        assert len(hook.records("OnDefineDomain")) == 2


# --- what it does not say --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "xml",
    [SECRETIVE, SECRETIVE.replace("</memory>", ""), SECRETIVE.replace('slot="0x00"', 'slot="0x77"'), f"<{SECRET}>"],
    ids=["good", "not well-formed", "bad address", "not closed"],
)
@pytest.mark.parametrize("policy", ["best-effort", "restricted", "none"])
def test_the_domain_is_not_in_the_log(hook: Sidecar, client: Client, xml: str, policy: str) -> None:
    before = len(hook.text())
    client.begin_define(xml, vmi({"policy": policy})).exception()
    logged = hook.text()[before:]
    assert "<domain " not in logged
    assert "<hostdev " not in logged  # "line 8, <hostdev>" says where
    if xml != f"<{SECRET}>":  # the name of a tag may be in a parser's message, what stands between tags may not
        assert SECRET not in logged


def test_the_vmi_is_not_in_the_log(hook: Sidecar, client: Client) -> None:
    content = json.loads(vmi())
    content["spec"]["volumes"] = [{"cloudInitNoCloud": {"userData": SECRET}}]
    for given in (json.dumps(content).encode(), json.dumps(content).encode()[:-3]):
        before = len(hook.text())
        client.begin_define(FITS, given).exception()
        assert SECRET not in hook.text()[before:]


def test_cloud_init_data_is_not_in_the_log(hook: Sidecar, client: Client) -> None:
    before = len(hook.text())
    client.call("/kubevirt.hooks.v1alpha3.Callbacks/PreCloudInitIso", cloudInitData=SECRET.encode(), vmi=vmi())
    assert SECRET not in hook.text()[before:]


def test_debug_has_the_domain(host: Path) -> None:
    """Before and after, each on a line of its own; the line of the call is there as ever."""
    with sidecar.running("--host", host, "--log-level", "debug") as hook, Client(hook.socket) as client:
        answer = client.define(SECRETIVE, vmi())
        (record,) = hook.records("OnDefineDomain")
        assert record["outcome"] == "changed"
        said = [json.dumps(one) for one in hook.records()]
        assert sum(json.dumps(SECRETIVE)[1:-1] in line for line in said) == 1
        assert sum(json.dumps(answer.decode())[1:-1] in line for line in said) == 1


# --- for people ------------------------------------------------------------------------------------------------


def test_text(host: Path) -> None:
    with sidecar.running("--host", host, "--log-format", "text") as hook, Client(hook.socket) as client:
        for xml, annotations, said in (
            (FITS, None, [NEAR, FAR, "cell 0", "cell 1", "changed"]),
            (ONE_DOES_NOT, None, [UNKNOWN, "left", "numa_node is -1", "warning"]),
            (ONE_DOES_NOT, {"policy": "restricted"}, [UNKNOWN, "refused", "error"]),
            (domain({0: 0}, []), None, ["unchanged", "no passthrough"]),
            ("<domain>", None, ["error", "the domain XML"]),
        ):
            before = len(hook.text())
            client.begin_define(xml, vmi(annotations, name="train-0", namespace="ml")).exception()
            (line,) = hook.text()[before:].splitlines()
            assert "ml/train-0" in line
            assert [word for word in said if word not in line] == []
            assert "<domain" not in line.replace("<domain>", "")
            assert not line.startswith("{")
        before = len(hook.text())
        client.begin_define(FITS, b"").exception()
        (line,) = hook.text()[before:].splitlines()
        assert "error" in line


# --- what would deceive ----------------------------------------------------------------------------------------

FORGED = '{"level": "info", "event": "OnDefineDomain", "name": "forged"}'
HOSTILE = [
    f"vm\n{FORGED}",
    f"vm\r\n{FORGED}\n",
    f"vm\u2028{FORGED}\u2029",
    f"vm\x85{FORGED}\x0b\x0c\x1c\x1d\x1e",
    "vm\x1b[2J\x1b[31m",
    "vm\x9b2J",
    "vm\u202egnp.exe",
    "vm\x00\x07\x08\x7f",
    'vm", "outcome": "placed',
    "vm" * 5000,
]


@pytest.fixture(scope="module")
def text_hook(host: Path) -> Iterator[Sidecar]:
    with sidecar.running("--host", host, "--log-format", "text") as running:
        yield running


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:8]))
def test_a_name_forges_no_line(hook: Sidecar, text_hook: Sidecar, name: str) -> None:
    for one in (hook, text_hook):
        before = len(one.text())
        with Client(one.socket) as client:
            client.define(FITS, vmi(name=name, namespace=name))
            refused(lambda client=client: client.define(ONE_DOES_NOT, vmi({"policy": "restricted"}, name=name)))  # type: ignore[misc]
            _, said = refused(lambda client=client: client.define(FITS, vmi({"policy": name})))  # type: ignore[misc]
            assert said.isprintable()
            _, said = refused(lambda client=client: client.define(FITS, vmi({name: "none"})))  # type: ignore[misc]
            assert said.isprintable()
        lines = one.text()[before:].splitlines()
        assert len(lines) == 4
        assert all(line.isprintable() for line in lines)
    for record in hook.records()[-4:]:
        assert record["name"] != "forged"
        assert record["outcome"] in ("changed", "refused")


@pytest.mark.parametrize("reference", ["&#10;", "&#13;&#10;", "&#x2028;", "&#x85;", "&#x9b;", "&#x202e;"])
def test_an_alias_forges_no_line(hook: Sidecar, text_hook: Sidecar, reference: str) -> None:
    alias = f"ua-gpu-near{reference}{FORGED}".replace('"', "&quot;")
    xml = ONE_DOES_NOT.replace("ua-gpu-near", alias).replace("ua-gpu-unknown", alias + "2")
    for one in (hook, text_hook):
        before = len(one.text())
        with Client(one.socket) as client:
            client.begin_define(xml, vmi()).exception()
            call = client.begin_define(xml, vmi({"policy": "restricted"}))
            assert call.exception() is not None
            assert call.details().isprintable()
        lines = one.text()[before:].splitlines()
        assert len(lines) == 2
        assert all(line.isprintable() for line in lines)


def test_what_a_plugin_call_says_forges_no_line(hook: Sidecar) -> None:
    assert hook.plugin_socket is not None
    with Client(hook.plugin_socket) as client:
        before = len(hook.text())
        client.mutate(FITS, vmi(), f"Boot\n{FORGED}")
        _, said = refused(lambda: client.mutate(FITS, vmi(), domain_type=f"libvirt\n{FORGED}"))
        assert said.isprintable()
        lines = hook.text()[before:].splitlines()
        assert all(line.isprintable() for line in lines)
        assert [line for line in lines if json.loads(line).get("name") == "forged"] == []


def test_text_of_hostile_calls_is_found_in_the_line_that_it_belongs_to(text_hook: Sidecar) -> None:
    before = len(text_hook.text())
    with Client(text_hook.socket) as client:
        client.define(FITS, vmi(name=f"vm\n{FORGED}"))
    (line,) = text_hook.text()[before:].splitlines()
    assert re.search(r"vm\\n", line)
    assert "forged" in line
