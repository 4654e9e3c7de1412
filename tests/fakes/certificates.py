"""Certificates for tests of TLS: an authority, a server on loopback and a client, as PEM files in one folder."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BEGIN = dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)
END = dt.datetime(2120, 1, 1, tzinfo=dt.timezone.utc)


class Certificates:
    """Paths of PEM files, all new: `ca`, `server` and `server_key`, `client` and `client_key`, signed by `ca`."""

    def __init__(self, folder: Path) -> None:
        self.ca = folder / "ca.pem"
        self.server, self.server_key = folder / "server.pem", folder / "server.key"
        self.client, self.client_key = folder / "client.pem", folder / "client.key"
        ca_key = ec.generate_private_key(ec.SECP256R1())
        ca = _signed("test authority", ca_key.public_key(), None, ca_key)
        self.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
        for name, certificate, key_file in (
            ("server", self.server, self.server_key),
            ("client", self.client, self.client_key),
        ):
            key = ec.generate_private_key(ec.SECP256R1())
            signed = _signed(name, key.public_key(), ca.subject, ca_key)
            certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
            key_file.write_bytes(
                key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
            )


def _signed(
    name: str,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name | None,
    issuer_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """A certificate for a name and loopback; without an issuer, an authority's own."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    loopback = [ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")]
    names = [x509.DNSName("localhost"), *map(x509.IPAddress, loopback)]
    is_authority = issuer is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGIN)
        .not_valid_after(END)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if is_authority:
        usage = x509.KeyUsage(
            digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = builder.add_extension(usage, critical=True)
    return builder.sign(issuer_key, hashes.SHA256())
