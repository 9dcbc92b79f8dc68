"""What can go wrong, as types: their names say the error, not that it is one.

Every error that reaches a user is a :class:`PcinumaError`: one line that says what is wrong, where, and, if
there is one, what to do about it. The edges turn the class into an exit status, a gRPC code or an HTTP status.
"""

from __future__ import annotations


class PcinumaError(Exception):
    """An error for the user.

    ``message`` is one line without the place; ``where`` names the place (a file, a line, an element, a device);
    ``hint`` says what to do. ``code`` is the stable kebab-case name used in findings; ``exit_status`` the
    command's exit status (2 bad input or usage, 1 refused).
    """

    code = "internal"
    exit_status = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = one_line(message)
        self.where = one_line(where) if where else None
        self.hint = one_line(hint) if hint else None
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.message} ({self.where})" if self.where else self.message


class BadInput(PcinumaError):
    """The domain, the VMI, the host record or the request does not say what it must: exit status 2."""

    code = "bad-input"
    exit_status = 2


class TooLarge(BadInput):
    """More than a sidecar's memory allows; under best-effort the domain goes back as it came."""

    code = "too-large"


class BadOption(BadInput):
    """A flag, annotation or configuration value is unknown or outside its set: exit status 2."""

    code = "bad-option"


class HostUnreadable(PcinumaError):
    """The host's topology as a whole cannot be read (a single odd device is a finding, not this)."""

    code = "host-unreadable"
    exit_status = 2


class PolicyNotMet(PcinumaError):
    """The policy refuses this domain on this host: exit status 1."""

    code = "policy-not-met"


class UnsafeResult(PcinumaError):
    """The transformed domain failed verification and is not handed out: exit status 1."""

    code = "unsafe-result"


def one_line(text: str, limit: int = 2000) -> str:
    """``text`` with every control character, line break included, made visible, and cut at ``limit`` characters.

    Input decides parts of our messages; none of it may forge a line in a log or move a terminal's cursor.
    """
    clean = "".join(c if c.isprintable() else ("\\n" if c == "\n" else f"\\x{ord(c):02x}") for c in text)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def why_not_json(error: ValueError | RecursionError) -> str:
    """Why a text is no JSON, from what Python's parser raised, in words for who wrote it."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    return "a number has too many digits" if type(error) is ValueError and "digits" in str(error) else str(error)
