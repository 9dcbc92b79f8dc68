"""``doctor`` on a kubelet's drop-in directory: real directories, the real command.

How the kubelet reads them was measured with the libraries that it uses (Go's WalkDir, yaml.v2, json-patch).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.test_doctor import KUBELET, codes, doctor, node, result
from tests.support.node_tree import NodeTree

__all__ = ["node"]

KIND = {"apiVersion": KUBELET["apiVersion"], "kind": KUBELET["kind"]}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The kubelet's own file, in order, and an empty drop-in directory."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(KUBELET))
    (tmp_path / "kubelet.conf.d").mkdir()
    return tmp_path


def drop(place: Path, name: str, content: str | dict[str, Any]) -> Path:
    path = place / "kubelet.conf.d" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump({**KIND, **content}))
    return path


def judged(node: NodeTree, place: Path, *, base: bool = True) -> dict[str, Any]:
    own = ("--kubelet-config", place / "config.yaml") if base else ()
    return result(doctor("--sysfs", node.sys, *own, "--kubelet-config-dir", place / "kubelet.conf.d", "--json"))


def kubelet(content: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What is said of the kubelet but of options that would help: code, severity and message."""
    found = [(f["code"], f["severity"], f["message"]) for f in content["findings"] if f["code"].startswith("kubelet")]
    return [entry for entry in found if entry[:2] != ("kubelet-options", "info")]


# --- which files, in which order -------------------------------------------------------------------------------


def test_an_empty_directory_changes_nothing(node: NodeTree, place: Path) -> None:
    assert kubelet(judged(node, place)) == []


def test_a_later_name_wins(node: NodeTree, place: Path) -> None:
    drop(place, "10-a.conf", {"topologyManagerPolicy": "none"})
    assert [code for code, *_ in kubelet(judged(node, place))] == ["kubelet-topology-policy"]
    drop(place, "9-b.conf", {"topologyManagerPolicy": "restricted"})  # letter by letter: 9 comes after 10
    assert kubelet(judged(node, place)) == []


def test_a_folder_stands_where_its_name_does(node: NodeTree, place: Path) -> None:
    drop(place, "50/a.conf", {"topologyManagerPolicy": "none"})
    drop(place, "40.conf", {"topologyManagerPolicy": "restricted"})
    assert [code for code, *_ in kubelet(judged(node, place))] == ["kubelet-topology-policy"]
    drop(place, "60.conf", {"topologyManagerPolicy": "restricted"})
    assert kubelet(judged(node, place)) == []


@pytest.mark.parametrize("name", [".conf", "a.b.conf"])
def test_only_the_end_of_the_name_counts(node: NodeTree, place: Path, name: str) -> None:
    drop(place, name, {"topologyManagerPolicy": "none"})
    assert [code for code, *_ in kubelet(judged(node, place))] == ["kubelet-topology-policy"]


@pytest.mark.parametrize("name", ["a.CONF", "a.conf.bak", "README"])
def test_what_does_not_end_in_conf_is_not_read(node: NodeTree, place: Path, name: str) -> None:
    drop(place, name, ": [ no YAML")
    assert kubelet(judged(node, place)) == []


@pytest.mark.parametrize("name", ["99-gpu.yaml", "99-gpu.yml", "sub/99-gpu.json"])
def test_a_configuration_that_the_kubelet_passes_over_is_named(node: NodeTree, place: Path, name: str) -> None:
    path = drop(place, name, {"topologyManagerPolicy": "none"})
    ((code, severity, message),) = kubelet(judged(node, place))
    assert (code, severity) == ("kubelet-drop-in", "warning")
    assert message.startswith(f"{path} does not end in .conf")


def test_a_directory_that_is_a_link_is_not_read(node: NodeTree, place: Path) -> None:
    drop(place, "10.conf", {"topologyManagerPolicy": "none"})
    (place / "link").symlink_to("kubelet.conf.d")
    arguments = ("--sysfs", node.sys, "--kubelet-config", place / "config.yaml", "--json", "--kubelet-config-dir")
    ((code, severity, message),) = kubelet(result(doctor(*arguments, place / "link")))
    assert (code, severity, "is a symbolic link" in message) == ("kubelet-drop-in", "warning", True)
    assert [found[0] for found in kubelet(result(doctor(*arguments, f"{place}/link/")))] == ["kubelet-topology-policy"]


# --- how they are merged ---------------------------------------------------------------------------------------


def test_mappings_are_merged_and_lists_replaced(node: NodeTree, place: Path) -> None:
    """kubeReserved gets a second entry and keeps its memory; reservedMemory becomes the new list alone."""
    drop(place, "10.conf", {"kubeReserved": {"cpu": "500m"}, "systemReserved": {"memory": "3Gi"}})
    ((code, severity, _),) = kubelet(judged(node, place))
    assert (code, severity) == ("kubelet-reserved-memory", "error")  # 1074Mi twice is 2 GiB less
    limits = [{"numaNode": 0, "limits": {"memory": "4196Mi"}}]  # 1Gi + 3Gi + 100Mi
    drop(place, "20.conf", {"reservedMemory": limits})
    assert kubelet(judged(node, place)) == []


def test_null_takes_away(node: NodeTree, place: Path) -> None:
    drop(place, "10.conf", {"topologyManagerPolicy": None})
    assert [code for code, *_ in kubelet(judged(node, place))] == ["kubelet-topology-policy"]  # its default is none


def test_eviction_over_the_defaults(node: NodeTree, place: Path) -> None:
    """Without evictionHard in its own file the kubelet has 100Mi of memory before the drop-in files come."""
    own = {name: value for name, value in KUBELET.items() if name != "evictionHard"}
    (place / "config.yaml").write_text(yaml.safe_dump(own))
    drop(place, "10.conf", {"evictionHard": {"nodefs.available": "5%"}})
    assert kubelet(judged(node, place)) == []
    (place / "config.yaml").write_text(yaml.safe_dump({**own, "evictionHard": {"nodefs.available": "5%"}}))
    assert [code for code, *_ in kubelet(judged(node, place))] == ["kubelet-reserved-memory"]


def test_the_directory_alone(node: NodeTree, place: Path) -> None:
    drop(place, "00.conf", KUBELET)
    assert kubelet(judged(node, place, base=False)) == []


def test_a_config_map_under_them(node: NodeTree, place: Path) -> None:
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"kubelet": yaml.safe_dump(KUBELET)}}
    (place / "config.yaml").write_text(yaml.safe_dump(config_map))
    drop(place, "10.conf", {"topologyManagerPolicy": "none"})
    assert [code for code, *_ in kubelet(judged(node, place))] == ["kubelet-topology-policy"]


# --- what keeps the kubelet from starting ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("# nothing yet\n", "is empty"),
        ("---\n---\n" + yaml.safe_dump(KIND), "is empty, or only its first YAML document is"),
        ("maxPods: 50\n", "apiVersion and kind"),
        ("kind: KubeletConfiguration\n", "apiVersion and kind"),
        (yaml.safe_dump({**KIND, "apiVersion": "kubelet.config.k8s.io/v1"}), "apiVersion and kind"),
        (yaml.safe_dump(KIND) + "maxPods: 50\nmaxPods: 60\n", "has maxPods twice"),
        (yaml.safe_dump(KIND) + "kubeReserved: {memory: 1Gi, memory: 1Gi}\n", "has kubeReserved.memory twice"),
        (json.dumps(KIND)[:-1] + ', "maxPods": 1, "maxPods": 2}', "has maxPods twice"),
    ],
)
def test_a_file_that_the_kubelet_refuses(node: NodeTree, place: Path, content: str, says: str) -> None:
    path = drop(place, "10.conf", content)
    found = [entry for entry in kubelet(judged(node, place)) if entry[0] == "kubelet-drop-in"]
    ((_, severity, message),) = found
    assert severity == "error"
    assert message.startswith(f"{path} ")
    assert says in message
    assert message.endswith("the kubelet does not start")


@pytest.mark.parametrize(
    ("field", "says"),
    [("topologyManagerPolcy", "ignores it without a word"), ("TopologyManagerPolicy", "takes it for topologyManager")],
)
def test_a_misspelt_field(node: NodeTree, place: Path, field: str, says: str) -> None:
    path = drop(place, "10.conf", {field: "none"})
    ((code, severity, message),) = kubelet(judged(node, place))
    assert (code, severity) == ("kubelet-field", "warning")
    assert message.startswith(f"{path}: {field} is no field")
    assert says in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (": [", "not YAML"),
        ("- a\n", "no mapping"),
        ("kind: Pod\n", "kind is 'Pod'"),
        (yaml.safe_dump({**KIND, "kubeReserved": [1]}), "kubeReserved is no mapping"),
    ],
)
def test_a_file_that_is_none_is_one_line(node: NodeTree, place: Path, content: str, says: str) -> None:
    path = drop(place, "10.conf", content)
    done = doctor("--sysfs", node.sys, "--kubelet-config-dir", place / "kubelet.conf.d")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("hint: ")]
    assert line.startswith("pcinuma: error: ")
    assert says in line
    assert str(path) in line


@pytest.mark.parametrize("name", ["absent", "config.yaml", "kubelet.conf.d"])
def test_a_directory_that_cannot_be_read(node: NodeTree, place: Path, name: str) -> None:
    """It is absent, it is a file, or what ends in .conf in it is a link to a folder, which the kubelet takes for a file."""
    (place / "kubelet.conf.d" / "d.conf").symlink_to("/")
    done = doctor("--sysfs", node.sys, "--kubelet-config-dir", place / name)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pcinuma: error: ")
    assert done.stderr.count("\n") == 1


def test_a_dump_of_configz_has_them_already(node: NodeTree, place: Path) -> None:
    (place / "config.yaml").write_text(json.dumps({"kubeletconfig": KUBELET}))
    done = doctor(
        "--sysfs", node.sys, "--kubelet-config", place / "config.yaml", "--kubelet-config-dir", place / "kubelet.conf.d"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pcinuma: error: a dump of configz has the drop-in files in it already ")


@pytest.mark.parametrize("name", ["10.conf", "more/10.conf"])
def test_the_result_replaces_no_drop_in(node: NodeTree, place: Path, name: str) -> None:
    path = drop(place, name, {"topologyManagerPolicy": "restricted"})
    before = path.read_bytes()
    (place / "link").symlink_to(path)
    for out in (path, place / "link"):
        done = doctor("--sysfs", node.sys, "--kubelet-config-dir", place / "kubelet.conf.d", "-o", out)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("pcinuma: error: -o would overwrite a file of --kubelet-config-dir ")
    assert path.read_bytes() == before


# --- one document, each key once -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "count"),
    [
        ("---\ntopologyManagerPolicy: none\n", 2),
        ("---\na: 1\n---\nb: 2\n", 3),
        ("---\n: [ no YAML\n", 2),
        ("...\n---\na: 1\n", 2),
        ("---\n", 0),
        ("---\n# a comment\n", 0),
        ("...\n", 0),
    ],
)
def test_only_the_first_document_is_read(node: NodeTree, place: Path, more: str, count: int) -> None:
    (place / "config.yaml").write_text("# the node's\n---\n" + yaml.safe_dump(KUBELET) + more)
    content = result(doctor("--sysfs", node.sys, "--kubelet-config", place / "config.yaml", "--json"))
    expected = [("kubelet-documents", "warning", f"{place / 'config.yaml'} has {count} YAML documents")]
    assert [(c, s, m.split(":")[0]) for c, s, m in kubelet(content)] == (expected if count else [])
    assert codes(content)[0] == "acs-redirect"


def test_a_drop_in_file_of_two_documents(node: NodeTree, place: Path) -> None:
    path = drop(place, "10.conf", yaml.safe_dump(KIND) + "---\ntopologyManagerPolicy: none\n")
    assert [(c, s, m.split(":")[0]) for c, s, m in kubelet(judged(node, place))] == [
        ("kubelet-documents", "warning", f"{path} has 2 YAML documents")
    ]


def test_of_a_key_twice_the_last_counts(node: NodeTree, place: Path) -> None:
    """In the kubelet's own file: there it only logs it."""
    text = yaml.safe_dump(KUBELET)
    (place / "config.yaml").write_text(text + "topologyManagerPolicy: none\n")
    content = result(doctor("--sysfs", node.sys, "--kubelet-config", place / "config.yaml", "--json"))
    assert [(c, s) for c, s, _ in kubelet(content)] == [
        ("kubelet-topology-policy", "error"),
        ("kubelet-twice", "warning"),
    ]
    twice = text.replace("numaNode: 0", "numaNode: 1\n  numaNode: 0")
    assert twice != text
    (place / "config.yaml").write_text(twice)
    content = result(doctor("--sysfs", node.sys, "--kubelet-config", place / "config.yaml", "--json"))
    ((code, _, message),) = kubelet(content)
    assert code == "kubelet-twice"
    assert "has reservedMemory[0].numaNode twice" in message


def test_a_merge_key_is_no_second_one(node: NodeTree, place: Path) -> None:
    text = yaml.safe_dump({name: value for name, value in KUBELET.items() if name != "kubeReserved"})
    (place / "config.yaml").write_text(text + "kubeReserved:\n  <<: {memory: 2Gi}\n  memory: 1Gi\n")
    content = result(doctor("--sysfs", node.sys, "--kubelet-config", place / "config.yaml", "--json"))
    assert kubelet(content) == []


def test_a_config_map_beside_others_is_refused(node: NodeTree, place: Path) -> None:
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"kubelet": yaml.safe_dump(KUBELET)}}
    (place / "config.yaml").write_text(yaml.safe_dump_all([config_map, {"kind": "Pod"}]))
    done = doctor("--sysfs", node.sys, "--kubelet-config", place / "config.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("pcinuma: error: a ConfigMap and other YAML documents after it ")
