"""Who may ask the debug page, and what every answer carries. Pure.

The page has no users and keeps nothing. What it must not become is a way for another web site to have this machine
read: by a name that is pointed at it (DNS rebinding), by a form that is sent to it, by a frame around it.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
from collections.abc import Sequence


def is_loopback(address: str) -> bool:
    """Whether a socket that is bound to this address takes connections of this machine alone."""
    found = _ip(address)
    return found is not None and found.is_loopback


def host_of(header: str) -> str:
    """The name or address in a Host header, lower-case, without brackets and port; empty where there is none.

    The port says nothing: the page is looked at through tunnels (ssh -L, kubectl port-forward) as well.
    """
    text = header.strip().lower()
    if text.startswith("["):
        inside, closed, _ = text[1:].partition("]")
        return inside if closed else ""
    return text.partition(":")[0] if text.count(":") <= 1 else text


def is_known_host(header: str, listen: str, bound: str) -> bool:
    """Whether a request with this Host header is meant for us: a loopback name, or the host that ``--listen`` says.

    ``bound`` is the address of the socket. Where that is not loopback, any IP address will do: rebinding takes a name.
    """
    host = host_of(header)
    address = _ip(host)
    if address is not None:
        return address.is_loopback or not is_loopback(bound)
    return host == "localhost" or (bool(host) and host == listen.lower())


def is_own_request(host: str, origin: str | None, site: str | None) -> bool:
    """Whether a request that does something comes from our own page, or from no page at all.

    Browsers send ``Origin`` with every POST, and most ``Sec-Fetch-Site`` (Fetch, "Origin header"; Fetch Metadata);
    what sends neither, such as curl, carries no one else's intent.
    """
    if site is not None and site not in ("same-origin", "none"):
        return False
    return origin is None or origin.lower() == f"http://{host.strip().lower()}"


def headers(styles: Sequence[str]) -> list[tuple[str, str]]:
    """The headers of every answer; ``styles`` are the texts of the inline style elements that may apply."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in styles)
    policy = (
        "default-src 'none'",
        f"style-src 'self' {hashes}",
        "script-src 'self'",
        "img-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
    return [
        ("Content-Security-Policy", "; ".join(policy)),
        ("X-Content-Type-Options", "nosniff"),
        ("X-Frame-Options", "DENY"),
        # no-referrer would have browsers send "Origin: null" with our own forms
        ("Referrer-Policy", "same-origin"),
        ("Cross-Origin-Opener-Policy", "same-origin"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Cache-Control", "no-store"),
    ]


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
