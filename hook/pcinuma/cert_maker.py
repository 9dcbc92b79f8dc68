"""Makes and judges the webhook's serving certificate: bytes and times in, bytes out.

Every certificate gets a certificate authority of its own, whose key signs it and is forgotten: there is no key to
steal that could sign another. Clients trust a bundle of the new authority and the one before it, so that a server
that has not yet loaded the new certificate is trusted, too.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_SKEW = datetime.timedelta(hours=1)  # a client's clock may be behind ours
_MOST_AUTHORITIES = 4


@dataclass(frozen=True, slots=True)
class Serving:
    """A serving certificate with its key, and the bundle to trust it by, newest authority first; all PEM."""

    certificate: bytes
    key: bytes
    bundle: bytes


def make(names: Sequence[str], now: datetime.datetime, days: int, trusted: bytes = b"") -> Serving:
    """A certificate for the DNS names, valid for ``days`` from an hour before ``now``.

    ``trusted``: the bundle in use so far, whose authorities stay in the new one until they expire.
    """
    begin, end = now - _SKEW, now + datetime.timedelta(days=days)
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = _name(f"pcinuma webhook CA {now:%Y-%m-%dT%H:%M:%SZ}")
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key(), begin, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    certificate = (
        _builder(_name(names[0][:64]), authority_name, key.public_key(), begin, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    bundle = merged(now, _pem(authority), trusted)
    return Serving(certificate=_pem(certificate), key=encoded, bundle=bundle)


def reason_to_renew(
    held: Serving, names: Sequence[str], now: datetime.datetime, renew_before: datetime.timedelta
) -> str | None:
    """Why this certificate is to be replaced, in words for a log; None when it serves on."""
    if not held.certificate or not held.key:
        return "there is none yet"
    try:
        certificate = x509.load_pem_x509_certificate(held.certificate)
        key = serialization.load_pem_private_key(held.key, password=None)
        authority = x509.load_pem_x509_certificates(held.bundle)[0]
        certificate.verify_directly_issued_by(authority)
        covered = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError, x509.ExtensionNotFound):
        return "what is there is no certificate with its key and authority"
    if certificate.public_key() != key.public_key():
        return "its key is another's"
    if missing := sorted(set(names) - set(covered.get_values_for_type(x509.DNSName))):
        return f"it is not for {missing[0]}"
    if now < certificate.not_valid_before_utc:
        return "it is not valid yet"
    if now >= (end := until(held)) - renew_before:
        return f"it {'expired' if now >= end else 'expires'} at {end:%Y-%m-%dT%H:%M:%SZ}"
    return None


def until(held: Serving) -> datetime.datetime:
    """The moment from which the certificate serves no more."""
    return x509.load_pem_x509_certificate(held.certificate).not_valid_after_utc


def merged(now: datetime.datetime, *bundles: bytes) -> bytes:
    """One bundle of the authorities in the given ones: each once, none expired, the newest few, order kept."""
    found: list[x509.Certificate] = []
    for bundle in bundles:
        try:
            certificates = x509.load_pem_x509_certificates(bundle)
        except ValueError:
            continue  # no certificate in it
        found += [one for one in certificates if one not in found and one.not_valid_after_utc > now]
    return b"".join(_pem(one) for one in found[:_MOST_AUTHORITIES])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
