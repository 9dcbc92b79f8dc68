"""Draws the pictures in docs/: ``make screenshots``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

from tests.support.browser import chromium, size_to_content

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/two-sockets"
DOCS = ROOT / "docs"


def main() -> None:
    """The example's picture as the command draws it, and as a browser shows it in light and in dark."""
    program = Path(sys.executable).with_name("pcinuma")
    svg = DOCS / "picture.svg"
    inputs = [str(EXAMPLE / "domain.xml"), "--vmi", str(EXAMPLE / "vmi.yaml"), "--host", str(EXAMPLE / "host.json")]
    subprocess.run([program, "explain", *inputs, "--svg", svg], check=True, stdout=subprocess.DEVNULL)
    with chromium() as browser:
        schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
        for scheme in schemes:
            page = browser.new_page(color_scheme=scheme)
            page.goto(svg.as_uri())
            size_to_content(page)
            page.screenshot(path=DOCS / f"picture-{scheme}.png", animations="disabled")
            page.close()


if __name__ == "__main__":
    main()
