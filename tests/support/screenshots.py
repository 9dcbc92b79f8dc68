"""Draws the pictures in docs/, and takes those of the debug page: ``make screenshots``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

from tests.support.browser import chromium, size_to_content
from tests.support.web import serving

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/two-sockets"
DOCS = ROOT / "docs"

Scheme = Literal["light", "dark"]
PAGES: tuple[tuple[str, Scheme, int, int], ...] = (
    ("light", "light", 1280, 1180),
    ("dark", "dark", 1280, 1180),
    ("phone", "dark", 390, 844),
)
"""The result of the example: name, theme, width and height of the window."""


def main() -> None:
    """The example's picture as the command draws it, and as a browser shows it in light and in dark."""
    program = Path(sys.executable).with_name("pcinuma")
    svg = DOCS / "picture.svg"
    inputs = [str(EXAMPLE / "domain.xml"), "--vmi", str(EXAMPLE / "vmi.yaml"), "--host", str(EXAMPLE / "host.json")]
    subprocess.run([program, "explain", *inputs, "--svg", svg], check=True, stdout=subprocess.DEVNULL)
    with chromium() as browser:
        schemes: tuple[Scheme, ...] = ("light", "dark")
        for scheme in schemes:
            page = browser.new_page(color_scheme=scheme)
            page.goto(svg.as_uri())
            size_to_content(page)
            page.screenshot(path=DOCS / f"picture-{scheme}.png", animations="disabled")
            page.close()
        with serving() as served:
            for name, scheme, width, height in PAGES:
                page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": height})
                page.goto(f"{served.url}example")
                with page.expect_navigation():
                    page.get_by_role("button", name="Show where devices go").click()
                page.screenshot(path=DOCS / f"page-{name}.png", animations="disabled")
                page.close()


if __name__ == "__main__":
    main()
