"""What a transform and a sidecar load: every module costs each VM's start, and the sidecar has 64 MB in all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

EXAMPLE = ROOT / "examples" / "two-sockets"
HEAVY = (
    "urllib.request",
    "http.client",
    "ssl",
    "email",
    "asyncio",
    "yaml",
    "jsonschema_rs",
    "flask",
    "hypercorn",
    "wcwidth",
)

CODE = """
import sys
from pcinuma.model import HostTopology, Options
from pcinuma.pipeline import transform
from pcinuma import {more}
with open({domain!r}, "rb") as file:
    domain = file.read()
options = Options(group_by="switch", mmio="apply", distances="host", gpudirect_clique="by-switch")
transform(domain, options, lambda query: HostTopology({{}}, {{}}))
print(*sorted(set(sys.modules) & set({heavy!r})))
"""


@pytest.mark.parametrize("more", ["cli", "discover", "hook_server, hook_calls, grpc_wire"])
def test_nothing_heavy_is_loaded(more: str) -> None:
    code = CODE.format(more=more, domain=str(EXAMPLE / "domain.xml"), heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.split()
    assert loaded == []
