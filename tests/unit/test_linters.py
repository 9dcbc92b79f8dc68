"""What the linters say is a test result like any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LINTERS = (
    ("ruff", "check", "--no-cache", "."),
    ("ruff", "format", "--check", "--no-cache", "."),
    ("mypy",),
    ("lint-imports", "--no-cache"),
)


@pytest.mark.parametrize("command", LINTERS, ids=lambda command: " ".join(command[:2]))
def test_linter(command: tuple[str, ...]) -> None:
    tool = Path(sys.executable).with_name(command[0])
    assert tool.exists(), f"{command[0]} is not installed: make test installs it"
    done = subprocess.run([tool, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"
