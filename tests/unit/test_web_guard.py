"""Whom the debug page answers: Host headers, and forms that others send."""

from __future__ import annotations

import pytest

from pcinuma import web_guard


@pytest.mark.parametrize(
    "header, listen, bound, known",
    [
        ("localhost", "127.0.0.1", "127.0.0.1", True),
        ("localhost:9000", "::1", "::1", True),
        ("[::1]:8080", "127.0.0.1", "127.0.0.1", True),
        ("[::ffff:127.0.0.1]", "127.0.0.1", "127.0.0.1", True),
        ("192.0.2.7", "127.0.0.1", "127.0.0.1", False),
        ("node1.example", "127.0.0.1", "127.0.0.1", False),
        ("node1.example:8080", "node1.example", "192.0.2.7", True),
        ("NODE1.example", "node1.Example", "192.0.2.7", True),
        ("other.example", "node1.example", "192.0.2.7", False),
        ("192.0.2.7:8080", "0.0.0.0", "0.0.0.0", True),
        ("[2001:db8::7]:8080", "::", "::", True),
        ("node1.example", "0.0.0.0", "0.0.0.0", False),
        ("localhost.", "0.0.0.0", "0.0.0.0", False),
        ("", "", "0.0.0.0", False),
        ("[::1", "127.0.0.1", "127.0.0.1", False),
        ("2130706433", "127.0.0.1", "127.0.0.1", False),
    ],
)
def test_known_hosts(header: str, listen: str, bound: str, known: bool) -> None:
    assert web_guard.is_known_host(header, listen, bound) is known


@pytest.mark.parametrize(
    "bound, loopback",
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", False), ("::", False), ("192.0.2.7", False)],
)  # fmt: skip
def test_loopback(bound: str, loopback: bool) -> None:
    assert web_guard.is_loopback(bound) is loopback


@pytest.mark.parametrize(
    "origin, site, own",
    [
        (None, None, True),
        ("http://localhost:8080", None, True),
        ("http://LOCALHOST:8080", "same-origin", True),
        (None, "none", True),
        ("http://localhost:8081", None, False),
        ("http://localhost", None, False),
        ("https://localhost:8080", None, False),
        ("null", None, False),
        ("", None, False),
        ("http://localhost:8080", "cross-site", False),
        ("http://localhost:8080", "same-site", False),
        ("http://evil.example", "same-origin", False),
    ],
)
def test_own_requests(origin: str | None, site: str | None, own: bool) -> None:
    assert web_guard.is_own_request("localhost:8080", origin, site) is own
