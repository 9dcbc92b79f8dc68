"""Small hosts written by hand, as records and as readers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pcinuma.host_file import HostFile, load


def host(nodes: Mapping[int, str], functions: Mapping[str, int], **details: dict[str, Any]) -> HostFile:
    """A host with these CPU lists by node and these functions on nodes (-1: unknown).

    ``details`` adds fields to a function; its name is the BDF with underscores for ``:`` and ``.``. Under the name
    ``cpu`` it is the host's processor.
    """
    record = {
        "kind": "pcinuma-host",
        "version": 1,
        "cpu": details.get("cpu"),
        "nodes": [
            {"id": node, "cpus": cpus, "distances": {str(n): 10 if n == node else 21 for n in nodes}}
            for node, cpus in nodes.items()
        ],
        "functions": [
            {"address": bdf, "node": node, **details.get(bdf.replace(":", "_").replace(".", "_"), {})}
            for bdf, node in functions.items()
        ],
        "mdevs": [],
    }
    return load(json.dumps(record).encode(), "a host of the tests")


def from_file(path: Path) -> HostFile:
    return load(path.read_bytes(), str(path))
