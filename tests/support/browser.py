"""A real Chromium, driven by Playwright: the one that is installed, nothing downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

PROGRAM = "chromium"

ARGUMENTS = (
    "--no-sandbox",  # root has no sandbox
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",  # a container's /dev/shm is small
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium with a profile of its own in the temporary folder, gone afterwards."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which(PROGRAM), args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """What a page complained of and asked for, from now on."""

    def __init__(self, page: Page) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._console)
        page.on("request", lambda request: self.requests.append(request.url))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


def violations(page: Page, context: str | None = None) -> list[str]:
    """What axe-core finds wrong on the page, or below a selector: its rules, each with the elements."""
    found = Axe().run(page, context).response["violations"]
    return [f"{v['id']}: {v['help']}: {', '.join(str(n['target']) for n in v['nodes'])}" for v in found]


def size_to_content(page: Page) -> tuple[int, int]:
    """Make the window as large as the SVG document that is shown, so that all of it can be seen; its size."""
    width, height = page.evaluate(
        "() => { const b = document.documentElement.viewBox.baseVal; return [b.width, b.height].map(Math.ceil); }"
    )
    page.set_viewport_size({"width": width, "height": height})
    return width, height
