"""``pcinuma certs``: keeps the webhook's serving certificate, and the bundle that the API server trusts it by.

For clusters without cert-manager; a Job runs it once, a CronJob every day. The order keeps the webhook answering at
every moment: the API server learns to trust the new authority beside the old one, then the Secret gets the new
certificate, which the kubelet hands to the webhook within a minute or two. The next run takes the leavings out of
the bundle. A run that ends half-way leaves a webhook that works, and the next run goes on from there.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcinuma import cert_maker
from pcinuma.errors import BadInput, BadOption
from pcinuma.kube_api import Api, ApiRefused, Conflict

CERTIFICATE, KEY, BUNDLE = "tls.crt", "tls.key", "ca.crt"
_TRIES = 5

# Kubernetes' names: RFC 1123 label and subdomain, RFC 1035 label for a Service (apimachinery, util/validation)
_LABEL = re.compile(r"(?=.{1,63}\Z)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_SERVICE = re.compile(r"(?=.{1,63}\Z)[a-z](?:[-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")


@dataclass(frozen=True, slots=True)
class Settings:
    """Which objects, and how long a certificate lasts; ``days`` and ``renew_before`` in days."""

    namespace: str
    secret: str
    service: str
    webhook: str
    days: int
    renew_before: int

    def __post_init__(self) -> None:
        for flag, name, form, what in (
            ("--namespace", self.namespace, _LABEL, "a DNS label: a-z, 0-9 and -, 63 characters at most"),
            ("--service", self.service, _SERVICE, "a DNS label that begins with a letter: a-z, 0-9 and -, 63 at most"),
            ("--secret", self.secret, _SUBDOMAIN, "a DNS name: a-z, 0-9, - and ., 253 characters at most"),
            ("--webhook", self.webhook, _SUBDOMAIN, "a DNS name: a-z, 0-9, - and ., 253 characters at most"),
        ):
            if not form.fullmatch(name):
                raise BadOption(f"{flag[2:]} cannot be {name[:80]!r}, which is not {what}", where=flag)
        if not 1 <= self.days <= 3650:
            raise BadOption(f"days cannot be {self.days}", where="--days", hint="1 to 3650")
        if not 0 <= self.renew_before < self.days:
            raise BadOption(
                f"renew-before cannot be {self.renew_before}", where="--renew-before", hint=f"0 to {self.days - 1}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The DNS names of the service; the API server calls the first."""
        return (f"{self.service}.{self.namespace}.svc", f"{self.service}.{self.namespace}", self.service)


def ensure(api: Api, settings: Settings, now: datetime.datetime) -> str:
    """Brings both objects up to date; what was done, in one line. Raises ApiRefused, BadInput."""
    for _ in range(_TRIES):
        try:
            return _ensure(api, settings, now)
        except Conflict:
            continue  # another run was faster: look again
    raise ApiRefused(f"the objects changed {_TRIES} times while they were looked at", hint="try again")


def _ensure(api: Api, settings: Settings, now: datetime.datetime) -> str:
    secret_path = f"/api/v1/namespaces/{settings.namespace}/secrets/{settings.secret}"
    webhook_path = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{settings.webhook}"
    secret, webhook = api.get(secret_path), api.get(webhook_path)
    held = _held(secret)
    renew_before = datetime.timedelta(days=settings.renew_before)
    reason = cert_maker.reason_to_renew(held, settings.names, now, renew_before)
    if reason is None:
        changed = _trust(webhook, held.bundle)
        if changed:
            api.put(webhook_path, webhook)
        done = "its bundle is set in the webhook configuration" if changed else "nothing to do"
        return f"the certificate is valid until {cert_maker.until(held):%Y-%m-%dT%H:%M:%SZ}; {done}"
    made = cert_maker.make(settings.names, now, settings.days, held.bundle)
    # what the API server trusts now stays trusted, whoever put it there: the old certificate serves on for a while
    if _trust(webhook, cert_maker.merged(now, made.bundle, *_trusted(webhook))):
        api.put(webhook_path, webhook)
    data = {CERTIFICATE: made.certificate, KEY: made.key, BUNDLE: made.bundle}
    kept = secret.get("data")
    encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
    secret["data"] = {**(kept if isinstance(kept, Mapping) else {}), **encoded}
    api.put(secret_path, secret)
    return f"a new certificate, valid until {cert_maker.until(made):%Y-%m-%dT%H:%M:%SZ}: {reason}"


def _held(secret: Mapping[str, Any]) -> cert_maker.Serving:
    data = secret.get("data")
    data = data if isinstance(data, Mapping) else {}
    return cert_maker.Serving(*(_decoded(data.get(name)) for name in (CERTIFICATE, KEY, BUNDLE)))


def _decoded(value: object) -> bytes:
    try:
        return base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError):
        return b""


def _clients(webhook: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = webhook.get("webhooks")
    clients = (
        [one.get("clientConfig") for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    )
    found = [client for client in clients if isinstance(client, dict)]
    if not found:
        raise BadInput("the webhook configuration has no webhook")
    return found


def _trusted(webhook: Mapping[str, Any]) -> list[bytes]:
    return [_decoded(client.get("caBundle")) for client in _clients(webhook)]


def _trust(webhook: Mapping[str, Any], bundle: bytes) -> bool:
    """Sets the bundle in every webhook; whether that changed one."""
    encoded, changed = base64.b64encode(bundle).decode(), False
    for client in _clients(webhook):
        changed = changed or client.get("caBundle") != encoded
        client["caBundle"] = encoded
    return changed
