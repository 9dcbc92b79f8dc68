"""``make audit``: known vulnerabilities of the locked requirements, from PyPI's database by pip-audit.

Exit status 0: every package was looked up and has none; 1: some have; 2: not every package could be looked up, which is
said and never taken for a clean result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    worst = 0
    for name in sys.argv[1:] or ("run", "build", "dev"):
        worst = max(worst, audit(ROOT / "requirements" / f"{name}.txt"))
    return worst


def audit(requirements: Path) -> int:
    command = [sys.executable, "-m", "pip_audit", "-r", requirements, "--require-hashes", "--disable-pip"]
    done = subprocess.run(
        [*command, "--format", "json", "--progress-spinner", "off"], capture_output=True, text=True, check=False
    )
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "pip-audit said nothing")
        print(
            f"error: {requirements.name}: the vulnerability database cannot be reached: nothing was checked",
            file=sys.stderr,
        )
        print(f"hint: {reason.strip()[:300]}", file=sys.stderr)
        return 2
    unknown = [package["name"] for package in found if "skip_reason" in package]
    for package in found:
        for hole in package.get("vulns", ()):
            mended = ", ".join(hole["fix_versions"]) or "no version"
            print(f"{package['name']} {package['version']}: {hole['id']}, mended in {mended}")
    checked = len(found) - len(unknown)
    holes = sum(bool(package.get("vulns")) for package in found)
    print(
        f"{requirements.name}: {checked} of {len(found)} packages looked up, {holes} with known vulnerabilities",
        flush=True,
    )
    if not checked:
        print(f"error: {requirements.name}: nothing was checked: is there a way to PyPI from here?", file=sys.stderr)
    elif unknown:
        print(f"error: {requirements.name}: not checked: {', '.join(unknown)}", file=sys.stderr)
    if unknown or not found:
        if reasons := sorted({package["skip_reason"].strip()[:300] for package in found if "skip_reason" in package}):
            print(f"hint: {reasons[0]}", file=sys.stderr)
        return 2
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
