"""Kubernetes quantities (``1Gi``, ``500m``, ``1e3``): text to an exact number and back. Pure.

The grammar is that of k8s.io/apimachinery ``resource.Quantity``.
"""

from __future__ import annotations

import re
from fractions import Fraction

_QUANTITY = re.compile(r"([+-]?)([0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})([a-zA-Z]{0,2}|[eE][+-]?[0-9]{1,2})\Z")
_SUFFIXES = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12), "P": Fraction(10**15),
    "E": Fraction(10**18), "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40),
    "Pi": Fraction(2**50), "Ei": Fraction(2**60),
}  # fmt: skip


def parse_quantity(text: str) -> Fraction | None:
    """The number that the text writes; None when it is no quantity."""
    match = _QUANTITY.match(text)
    if match is None:
        return None
    sign, digits, suffix = match.groups()
    if suffix in _SUFFIXES:
        factor = _SUFFIXES[suffix]
    elif suffix[:1] in ("e", "E") and suffix[1:]:
        factor = Fraction(10) ** int(suffix[1:])
    else:
        return None
    whole, _, rest = digits.partition(".")
    number = (Fraction(int(whole or "0")) + (Fraction(int(rest), 10 ** len(rest)) if rest else 0)) * factor
    return -number if sign == "-" else number


def format_bytes(count: Fraction | int) -> str:
    """The shortest exact way to write a number of bytes: ``1Gi``, ``1100Mi``, ``1073741825``."""
    if count != int(count):
        return f"{float(count):g}"
    whole = int(count)
    for suffix in ("Gi", "Mi", "Ki"):
        unit = int(_SUFFIXES[suffix])
        if whole and whole % unit == 0:
            return f"{whole // unit}{suffix}"
    return str(whole)
