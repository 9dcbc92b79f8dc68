"""What a container runtime takes as the name of an image: the grammar of distribution/reference."""

from __future__ import annotations

import re

from pcinuma.errors import BadInput, one_line

_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:]+\])"
_PATH = re.compile(rf"(?:{_HOST}(?::[0-9]+)?/)?{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha384:[0-9a-f]{96}|sha512:[0-9a-f]{128}")
_MOST_NAME = 255

PATTERN = f"^{_PATH.pattern}(?::{_TAG.pattern})?(?:@(?:{_DIGEST.pattern}))?$"
"""All of it, as it stands in the schema of the webhook's configuration."""


def check(text: str, where: str) -> None:
    """Raise BadInput, one line that says which part is wrong, for what is no image reference."""
    rest, at, digest = text.partition("@")
    folder, slash, last = rest.rpartition("/")
    last, colon, tag = last.partition(":")
    name = folder + slash + last
    if at and not _DIGEST.fullmatch(digest):
        wrong = "its digest is not sha256: and 64 digits 0-9a-f"
    elif colon and not _TAG.fullmatch(tag):
        wrong = f"its tag {one_line(tag, 80)!r} is none"
    elif "://" in rest:
        wrong = "it has no scheme such as https://"
    elif len(name) > _MOST_NAME:
        wrong = f"its name has more than {_MOST_NAME} characters"
    elif not _PATH.fullmatch(name):
        wrong = "its name is REGISTRY/PATH, the path in lower case"
    else:
        return
    hint = "write it as REGISTRY/PATH:TAG or REGISTRY/PATH@sha256:DIGEST"
    raise BadInput(f"no image reference: {one_line(text, 120)!r}: {wrong}", where=where, hint=hint)
