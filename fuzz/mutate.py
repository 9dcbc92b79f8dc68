"""Changes to a text by its tokens: tags, quoted values, numbers, words. XML, JSON and YAML stay nearly what they were.

Single bytes, which the fuzzer itself changes, seldom get past a parser; a value in another's place does.
"""

from __future__ import annotations

import random
import re

_TOKEN = re.compile(rb"""<[^<>]*>|"[^"\n]*"|'[^'\n]*'|[A-Za-z_][A-Za-z0-9_.-]*|[0-9]+|\s+|.""", re.S)
_NUMBERS = (b"0", b"-1", b"1", b"7", b"8", b"31", b"32", b"255", b"256", b"4095", b"65535", b"65536", b"2147483648",
            b"18446744073709551616", b"0x1f", b"0xff", b"010", b"1e9", b"1.5", b"9" * 40)  # fmt: skip
_VALUES = (b"", b" ", b"null", b"true", b"[]", b"{}", b"\\u0000", b"\\ud800", b"\xff", b"\xe2\x80\xae", b"&amp;",
           b"&#10;", b"<!--", b"-->", b"<![CDATA[", b"]]>", b"\n", b"\x1b[2J", b"0000:ff:1f.7", b"x" * 300)  # fmt: skip


def mutated(data: bytes, dice: random.Random, most: int) -> bytes:
    """The text with a few tokens lost, doubled, moved, swapped or replaced; ``most`` bytes of it."""
    tokens: list[bytes] = _TOKEN.findall(data)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        if not tokens:
            break
        at = dice.randrange(len(tokens))
        run = dice.choice((1, 1, 2, 3, 10, 40))
        other = dice.randrange(len(tokens))
        match dice.randrange(6):
            case 0:
                del tokens[at : at + run]
            case 1:
                tokens[other:other] = tokens[at : at + run]
            case 2:
                moved = tokens[at : at + run]
                del tokens[at : at + run]
                other = min(other, len(tokens))
                tokens[other:other] = moved
            case 3:
                tokens[at] = tokens[other]
            case 4:
                tokens[at] = _inside(tokens[at], dice.choice(_NUMBERS + _VALUES))
            case 5:
                numbers = [i for i, token in enumerate(tokens) if any(48 <= byte < 58 for byte in token)]
                if numbers:
                    at = dice.choice(numbers)
                    tokens[at] = re.sub(
                        rb"[0-9]+", lambda _: dice.choice(_NUMBERS), tokens[at], count=dice.choice((1, 0))
                    )
    return b"".join(tokens)[:most]


def _inside(token: bytes, value: bytes) -> bytes:
    """The value in the token's quotes or tag, if it has any."""
    if token[:1] in (b'"', b"'"):
        return token[:1] + value + token[:1]
    if token.startswith(b"<"):
        return re.sub(rb"""(["'])[^"']*\1""", lambda found: found[1] + value + found[1], token, count=1)
    return value
