"""Draws the pictures in docs/, and takes those of the debug page: ``make screenshots``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

from pcinuma import svg as svg_file
from pcinuma.explain import explain
from pcinuma.model import Options
from tests.support.browser import chromium, size_to_content
from tests.support.pictures import kept_on_bus_0
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
    """The example's picture as the command draws it, and as a browser shows it in light and in dark; one whose lines
    cross; the page with the example's result."""
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
        page = browser.new_page()
        domain, host = kept_on_bus_0(12)
        crossing = svg_file.draw(explain(domain, Options(), host).scene).partition("?>")[2]
        page.set_content(f"<style>body {{margin: 0}} svg {{display: block}}</style>{crossing}")
        page.locator("svg").screenshot(path=DOCS / "picture-crossing.png", animations="disabled")
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
