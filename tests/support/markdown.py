"""Commands and links in Markdown files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def code_lines(text: str) -> list[str]:
    """The lines of code blocks, fenced and indented; a line that ends with a backslash goes on in the next."""
    found: list[str] = []
    fenced = False
    for line in text.splitlines():
        if line.strip().startswith("```"):
            fenced = not fenced
        elif fenced:
            found.append(line)
        elif line.startswith("    ") and not line.lstrip().startswith(("-", "*", "|")):
            found.append(line[4:])
    return "\n".join(found).replace("\\\n", " ").splitlines()


def commands(text: str, program: str = "pcinuma") -> list[list[str]]:
    """Each call of the program in code blocks, as its words; also behind a pipe, and after `$ `."""
    found: list[list[str]] = []
    for line in code_lines(text):
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:
            continue  # output, not a command
        starts = [
            n for n, word in enumerate(words) if word.rsplit("/", 1)[-1] == program and (n == 0 or words[n - 1] == "|")
        ]
        for start in starts:
            end = next((n for n in range(start, len(words)) if words[n] in ("|", ">", "&&", "2>", ";")), len(words))
            found.append(words[start + 1 : end])
    return found


def links(text: str) -> list[str]:
    """The targets of links."""
    return _LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def anchors(path: Path) -> set[str]:
    """The anchors of a file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
