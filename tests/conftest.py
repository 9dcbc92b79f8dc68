"""What all tests share: where the project is, recorded data beside it, and the switch that forbids skipping."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Tests fork, and grpcio's own handlers for that may abort the child; no child of ours uses grpcio before it is another
# program. To be set before grpcio is loaded.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

ROOT = Path(__file__).resolve().parent.parent

# In CI a change is judged by what it changes: the same random domains each time. `make test` elsewhere draws new ones.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

# Another platform's tests, which make test-trixie runs where what they need is unpacked
collect_ignore = [] if "PCINUMA_ARM64" in os.environ else ["guest/test_arm64.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped fails (CI)")
    parser.addoption("--regenerate-golden", action="store_true", help="write what the golden cases give now")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, tools in TOOLS.items():
        if item.get_closest_marker(name) is not None and (reason := _lacking(tools, name in NEED_ROOT)):
            pytest.skip(reason)


TOOLS = {
    "libvirt": ("libvirtd", "virtlogd", "virsh", "virt-xml-validate", "xmllint", "qemu-system-x86_64"),
    "guest": ("libvirtd", "virtlogd", "virsh", "qemu-system-x86_64", "qemu-img", "busybox", "cpio"),
    "browser": ("chromium",),
}
NEED_ROOT = ("libvirt", "guest")


@cache
def _lacking(tools: tuple[str, ...], root: bool) -> str | None:
    """Why this machine cannot run a test that needs these tools, and root or not; None when it can."""
    if root and os.geteuid() != 0:
        return "needs root: the test starts libvirtd"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [tool for tool in tools if shutil.which(tool, path=path) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests that are marked ``browser``."""
    from tests.support.browser import chromium  # loaded by those tests alone

    with chromium() as started:
        yield started
