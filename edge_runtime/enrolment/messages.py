"""The messages of a device and its authority: JSON over HTTPS, and the token that begins it.

Pure. Owns: the form of a token, the bodies, their bounds, and which names a device and a group may have.

Decision: how a new device knows its authority, and the authority a new device.
Context: a device that was just flashed trusts no server, and has no certificate that could be trusted.
Options: EST (RFC 7030), which leaves the first trust to the operator and needs CMS; a public certificate for each
authority; a fingerprint that travels with the token, as kubeadm has it.
Decision: a token is `SECRET.AUTHORITY.ROOT`. Its second part is the SHA-256 of the authority's certificate, its third
that of the repository's root file. The device reads the certificate without trusting the connection, compares it, and
says the secret over a connection that this certificate vouches for.
Cost: a token is 130 characters, and another authority or root makes tokens useless.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from edge_runtime.errors import ConfigError

MAX_BODY_BYTES = 64 << 10
"""Of a request: a token and a signing request have some 600 bytes."""

MAX_ANSWER_BYTES = 2 << 20
"""Of an answer: a configuration, and a root file of at most 512 000 bytes in base64."""

CA_PATH, ENROL_PATH, RENEW_PATH = "/ca", "/enrol", "/renew"

SECRET_BYTES = 24

DEVICE_RULE = "1 to 64 letters, digits, '_' or '-'"

_DEVICE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DIGEST = re.compile(r"[A-Za-z0-9_-]{43}")

RENEWING = b"edge-runtime renew\n"
"""Begins what a device signs with its old key, so that it is good for nothing else."""

Text = Annotated[str, Meta(max_length=MAX_BODY_BYTES)]


class Enrol(Struct, frozen=True):
    """A device asks to be one of the fleet. request: a signing request (PKCS #10) in PEM, whose CN is the device."""

    secret: Text
    device: Text
    request: Text


class Enrolled(Struct, frozen=True):
    """The answer. certificate, trusted: PEM. configuration: of the device, as a template. root: base64."""

    device: str
    group: str
    certificate: str
    trusted: str
    configuration: str
    root: str


class Renew(Struct, frozen=True):
    """A device asks for another certificate. certificate: the old one; signature: by its key, of both, in base64."""

    certificate: Text
    request: Text
    signature: Text


class Renewed(Struct, frozen=True):
    """The answer. certificate: PEM; trusted: whom the device trusts from now on."""

    certificate: str
    trusted: str


class Token(NamedTuple):
    """A token in its parts. authority, root: SHA-256 of the authority's certificate (DER) and of the root file."""

    secret: str
    authority: bytes
    root: bytes

    def __str__(self) -> str:
        return f"{self.secret}.{_encoded(self.authority)}.{_encoded(self.root)}"


def parse_token(text: str) -> Token:
    """Return the parts of a token. Raises ConfigError: it is none."""
    parts = text.strip().split(".")
    if len(parts) != 3 or not parts[0] or not all(_DIGEST.fullmatch(part) for part in parts[1:]):
        raise ConfigError(
            f"the token has {len(text.strip())} characters and {len(parts)} parts; wanted all of what "
            "`edge-runtime authority token` printed, SECRET.AUTHORITY.ROOT"
        )
    try:
        return Token(parts[0], *(base64.urlsafe_b64decode(f"{part}=") for part in parts[1:]))
    except binascii.Error as error:
        raise ConfigError(f"the token makes no sense: {error}") from None


def is_device_name(text: str) -> bool:
    """Return whether a text may name a device."""
    return _DEVICE.fullmatch(text) is not None


def secret_hash(secret: str) -> str:
    """Return what an authority keeps of a token's secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def signed_for_renewal(certificate: bytes, request: bytes) -> bytes:
    """Return what a device signs to renew. Both in DER."""
    return RENEWING + hashlib.sha256(certificate).digest() + hashlib.sha256(request).digest()


def new_secret(chance: bytes) -> str:
    """Return a secret as text. chance: SECRET_BYTES of random bytes.

    It begins with a letter: one in 64 would begin with "-", and be an option to the command line.
    """
    return f"t{_encoded(chance)}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
