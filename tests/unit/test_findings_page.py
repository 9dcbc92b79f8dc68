"""Every code that doctor can find is explained in docs/findings.md, and the page of the node names no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "doctor",
    "node_checks",
    "device_checks",
    "peer_checks",
    "kubelet",
    "kubelet_config",
    "kubelet_cpus",
    "kubelet_drop_ins",
    "kubelet_memory",
    "kubelet_values",
)


def test_the_codes_of_doctor_are_those_of_the_page() -> None:
    in_code: set[str] = set()
    for module in MODULES:
        tree = ast.parse((ROOT / f"hook/pcinuma/{module}.py").read_text())
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Finding":
                code = call.args[0]
                assert isinstance(code, ast.Constant), f"{module}: a code that is computed"
                in_code.add(str(code.value))
    page = (ROOT / "docs/findings.md").read_text().split("## The node\n")[1]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    on_page = [code for row in rows for code in re.findall(r"`([a-z-]+)`", row)]
    assert sorted(on_page) == sorted(in_code)
