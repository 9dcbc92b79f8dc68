"""The little of the Kubernetes API that a Job of ours needs: read an object, replace it. No client library for that.

A replacement carries the resourceVersion that was read, so that of two writers the second is told (Conflict).
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pcinuma.errors import BadInput, PcinumaError, one_line

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_SECONDS = 10.0
_MOST_BYTES = 8 * 1024 * 1024


class ApiRefused(PcinumaError):
    """The API server cannot be reached, or does not do what is asked: exit status 1."""

    code = "api-refused"


class Conflict(ApiRefused):
    """Somebody else changed the object since it was read."""


class Api:
    """A connection's worth of settings: address, token, and the authority to trust.

    ``url``: ``https://host:port``, by default where a pod finds it (KUBERNETES_SERVICE_HOST and _PORT).
    ``account``: a folder with ``token`` and ``ca.crt``, as every pod with a service account's token has.
    Raises BadInput.
    """

    def __init__(self, url: str | None, account: str = SERVICE_ACCOUNT):
        if url is None:
            host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            if not host:
                raise BadInput(
                    "this is no pod: KUBERNETES_SERVICE_HOST is not set", hint="give --api https://HOST:PORT"
                )
            url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname, parts.port or 443
        except ValueError:
            parts, self._host = urlsplit(""), None
        if parts.scheme != "https" or not self._host or not self._host.isascii():
            raise BadInput(f"not an address of an API server: {url[:200]}", hint="https://HOST:PORT")
        self._account = account
        try:
            self._context = ssl.create_default_context(cafile=os.path.join(account, "ca.crt"))
        except (OSError, ssl.SSLError) as error:
            raise BadInput(f"cannot be used: {error}", where=os.path.join(account, "ca.crt")) from None

    def get(self, path: str) -> dict[str, Any]:
        """The object at that path. Raises ApiRefused."""
        return self._ask("GET", path)

    def put(self, path: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Replaces the object by this one. Raises Conflict when it changed since it was read, ApiRefused."""
        return self._ask("PUT", path, json.dumps(content).encode())

    def _ask(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        assert self._host is not None
        where = f"{method} {path}"
        headers = {"Authorization": f"Bearer {self._token()}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=_SECONDS, context=self._context)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            data = answer.read(_MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise ApiRefused(f"the API server cannot be reached: {error}", where=where) from None
        finally:
            connection.close()
        try:
            content = json.loads(data) if len(data) <= _MOST_BYTES else None
        except ValueError:
            content = None
        if answer.status >= 300:
            said = content.get("message") if isinstance(content, dict) else None
            _refuse(answer.status, one_line(str(said or answer.reason), 500), where)
        if not isinstance(content, dict):
            raise ApiRefused("the API server's answer is no object", where=where)
        return content

    def _token(self) -> str:
        path = os.path.join(self._account, "token")
        try:
            with open(path, encoding="ascii") as file:  # read for each call: the kubelet replaces it
                return file.read().strip()
        except (OSError, ValueError) as error:
            raise BadInput(f"cannot be read: {error}", where=path) from None


def _refuse(status: int, said: str, where: str) -> None:
    if status == 409:
        raise Conflict(said, where=where)
    hint = {
        401: "the token of the service account is not taken",
        403: "the service account lacks a right: apply its Role and ClusterRole again",
        404: "apply the manifests first: the object is filled, not made",
    }.get(status)
    raise ApiRefused(f"the API server says {status}: {said}", where=where, hint=hint)
