"""Keys and certificates of a fleet: an authority's, its servers' and its devices'; by the cryptography package.

Owns: what a certificate says. Keys are ECDSA on P-256, which every broker and TLS library takes; who shows a
certificate (`clientAuth`, `serverAuth`) is part of it, so that a device's cannot stand for a server. Does no I/O.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edge_runtime.enrolment.messages import is_device_name, signed_for_renewal
from edge_runtime.errors import ConfigError

PrivateKey = ec.EllipticCurvePrivateKey
Certificate = x509.Certificate

CURVES = (ec.SECP256R1, ec.SECP384R1)
"""Of the keys that a certificate is given for: what every TLS library takes. Devices of ours have the first."""

AUTHORITY_DAYS = 3650
BACKDATED = timedelta(hours=1)
"""A certificate is good from before it was made: clocks of devices are off by minutes."""


def new_key() -> PrivateKey:
    """Make a key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: PrivateKey) -> bytes:
    """Return a key as PEM, not sealed."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def read_key(pem: bytes, name: str) -> PrivateKey:
    """Return the key in a PEM text. name: for the message. Raises ConfigError: there is none of ours."""
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name}: holds no key that can be read: {error}") from None
    if not isinstance(key, PrivateKey):
        raise ConfigError(f"{name}: holds a key of another kind; wanted one of an elliptic curve")
    return key


def read_certificate(pem: bytes, name: str) -> Certificate:
    """Return the first certificate in a PEM text. name: for the message. Raises ConfigError: there is none."""
    try:
        found = x509.load_pem_x509_certificate(pem)
        found.public_key(), found.subject, found.issuer
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{name}: holds no certificate that can be read: {error}") from None
    return found


def pem(certificate: Certificate) -> bytes:
    """Return a certificate as PEM."""
    return certificate.public_bytes(Encoding.PEM)


def der(certificate: Certificate) -> bytes:
    """Return a certificate as DER, of which a fingerprint is taken."""
    return certificate.public_bytes(Encoding.DER)


def new_authority(key: PrivateKey, now_utc: datetime) -> Certificate:
    """Make an authority's own certificate."""
    name = _name("edge-runtime devices authority")
    builder = _begun(name, name, key.public_key(), now_utc, timedelta(days=AUTHORITY_DAYS))
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    return (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )


class Issuer:
    """An authority's key with its certificate, at work."""

    def __init__(self, certificate: Certificate, key: PrivateKey) -> None:
        """Raises ConfigError: the key is not the certificate's."""
        if certificate.public_key() != key.public_key():
            raise ConfigError("the authority's certificate is of another key than its key file")
        self.certificate = certificate
        self._key = key

    def for_device(self, device: str, request: bytes, now_utc: datetime, life: timedelta) -> Certificate:
        """Issue a device's certificate. request: PEM.

        Raises ConfigError: it is not signed by its own key, or is another device's.
        """
        return self._issued(read_request(request, device).public_key(), device, (), now_utc, life, is_server=False)

    def for_server(self, names: Sequence[str], key: PrivateKey, now_utc: datetime, life: timedelta) -> Certificate:
        """Issue a server's certificate. names: host names and addresses that it is reached by."""
        return self._issued(key.public_key(), names[0], names, now_utc, life, is_server=True)

    def has_issued(self, certificate: Certificate) -> bool:
        """Return whether a certificate is one of this authority's for devices."""
        try:
            certificate.verify_directly_issued_by(self.certificate)
            usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        except (
            ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.ExtensionNotFound,
            x509.DuplicateExtension,
        ):  # fmt: skip
            return False
        return ExtendedKeyUsageOID.CLIENT_AUTH in usage

    def _issued(
        self,
        key: object,
        name: str,
        names: Sequence[str],
        now_utc: datetime,
        life: timedelta,
        *,
        is_server: bool,
    ) -> Certificate:
        usage = ExtendedKeyUsageOID.SERVER_AUTH if is_server else ExtendedKeyUsageOID.CLIENT_AUTH
        life = min(life, self.certificate.not_valid_after_utc - now_utc)
        if life <= timedelta():
            raise ConfigError("the authority's own certificate has expired; make another authority")
        builder = (
            _begun(_name(name), self.certificate.subject, key, now_utc, life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(each) for each in names]), False)
        return builder.sign(self._key, hashes.SHA256())


def signing_request(device: str, key: PrivateKey) -> bytes:
    """Return a device's signing request as PEM."""
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(device)).sign(key, hashes.SHA256())
    return request.public_bytes(Encoding.PEM)


def read_request(request: bytes, device: str) -> x509.CertificateSigningRequest:
    """Return a device's signing request. Raises ConfigError: it is none, or not of this device and its own key.

    Nothing of it but the key gets into a certificate. One that asks for more is refused: its sender would wait for it.
    """
    try:
        found = x509.load_pem_x509_csr(request)
        key, name, wanted = found.public_key(), subject_of(found.subject), len(found.extensions)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension) as error:
        raise ConfigError(f"the signing request cannot be read: {error}") from None
    # Before its signature is looked at: of a large key of another kind that takes long.
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVES):
        raise ConfigError("the signing request has a key of another kind; wanted one of an elliptic curve, P-256")
    if wanted or len(found.subject) != 1:
        raise ConfigError("the signing request asks for more than a certificate of its device; wanted a CN alone")
    try:
        is_whole = found.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"the signing request's signature cannot be read: {error}") from None
    if not is_whole or name != device:
        raise ConfigError("the signing request is not signed by its own key, or is another device's")
    return found


def proof(certificate: Certificate, key: PrivateKey, request: bytes) -> bytes:
    """Return a device's signature for a renewal. request: PEM."""
    signed = signed_for_renewal(der(certificate), x509.load_pem_x509_csr(request).public_bytes(Encoding.DER))
    return key.sign(signed, ec.ECDSA(hashes.SHA256()))


def is_proved(certificate: Certificate, request: x509.CertificateSigningRequest, signature: bytes) -> bool:
    """Return whether the key of a certificate has signed for the renewal."""
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    signed = signed_for_renewal(der(certificate), request.public_bytes(Encoding.DER))
    try:
        key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def key_hash(certificate: Certificate) -> str:
    """Return the SHA-256 of a certificate's key, in hex."""
    data = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(data).hexdigest()


def device_of(certificate: Certificate) -> str:
    """Return the device that a certificate is of; "" where it names none."""
    name = subject_of(certificate.subject)
    return name if is_device_name(name) else ""


def subject_of(name: x509.Name) -> str:
    """Return the CN of a name; "" where it has none, or several."""
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if len(found) == 1 else ""


# ---- private --------------------------------------------------------------------------------------------------------


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _begun(
    subject: x509.Name, issuer: x509.Name, key: object, now_utc: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)  # type: ignore[arg-type]
        .serial_number(x509.random_serial_number())
        .not_valid_before(now_utc - BACKDATED)
        .not_valid_after(now_utc + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)  # type: ignore[arg-type]
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
