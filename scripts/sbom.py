"""``make sbom``: what pcinuma is made of, as CycloneDX 1.6 JSON (cyclonedx-py), its own requirements and no tool's."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from pcinuma import __version__

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist" / "pcinuma.cdx.json"
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", ROOT / "pyproject.toml"]
    command += ["--spec-version", "1.6", "--output-reproducible", "--no-validate", "--of", "JSON", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = json.dumps(needed(json.loads(done.stdout)), indent=2) + "\n"
    if (wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        print(f"error: not valid CycloneDX: {wrong}", file=sys.stderr)
        return 1
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    print(f"{len(json.loads(text)['components'])} components in {out}")
    return 0


def needed(bom: dict[str, Any]) -> dict[str, Any]:
    """The bill of what is locked to run: the environment holds tools as well, on which some depend in their tests."""
    locked = set(re.findall(r"^([A-Za-z0-9._-]+)==", (ROOT / "requirements" / "run.txt").read_text(), re.M))
    components = [part for part in bom["components"] if re.sub(r"[-_.]+", "-", part["name"]).lower() in locked]
    refs = {part["bom-ref"] for part in (bom["metadata"]["component"], *components)}
    kept = [entry for entry in bom["dependencies"] if entry["ref"] in refs]
    edges = [{**entry, "dependsOn": [ref for ref in entry.get("dependsOn", ()) if ref in refs]} for entry in kept]
    for part in components:  # a licence that is no SPDX name is left out there, not here
        if "licenses" not in part and (said := importlib.metadata.metadata(part["name"]).get("License")):
            part["licenses"] = [{"license": {"name": said, "acknowledgement": "declared"}}]
    whole = {**bom["metadata"], "component": {**bom["metadata"]["component"], "version": __version__}}
    return {**bom, "metadata": whole, "components": components, "dependencies": edges}


if __name__ == "__main__":
    sys.exit(main())
