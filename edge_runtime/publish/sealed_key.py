"""A private key in a file, sealed with a passphrase: JSON around AES-256-GCM, the key derived by scrypt.

Owns: that form. PKCS#8 and PKCS#12 as the cryptography package writes them derive the key, or check the passphrase,
with 2 048 rounds, which a graphics card tries a hundred thousand times a second; here one try costs 128 MiB and 0.3 s.
"""

from __future__ import annotations

import hashlib
import os
from typing import Annotated, Literal

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import Meta, Struct

from edge_runtime.errors import PublishError

SCRYPT_N = 1 << 17
"""With r = 8 and p = 1 the first choice of OWASP's Password Storage Cheat Sheet."""

_R, _P = 8, 1
_SALT_BYTES, _NONCE_BYTES = 16, 12


class _Sealed(Struct, frozen=True, forbid_unknown_fields=True):
    kdf: Literal["scrypt"]
    n: Annotated[int, Meta(ge=2, le=1 << 20)]
    cipher: Literal["aes-256-gcm"]
    salt: str
    nonce: str
    sealed: str


def seal(secret: bytes, passphrase: str, *, scrypt_n: int = SCRYPT_N) -> bytes:
    """The secret as the bytes of a file."""
    salt, nonce = os.urandom(_SALT_BYTES), os.urandom(_NONCE_BYTES)
    data = AESGCM(_derive(passphrase, salt, scrypt_n)).encrypt(nonce, secret, None)
    sealed = _Sealed("scrypt", scrypt_n, "aes-256-gcm", salt.hex(), nonce.hex(), data.hex())
    return msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n"


def is_sealed(data: bytes) -> bool:
    """Whether a file holds a sealed key; others are PEM."""
    return data.lstrip().startswith(b"{")


def unseal(data: bytes, passphrase: str) -> bytes | None:
    """The secret; None: the passphrase is another one, or bytes were changed. Raises PublishError: not that form."""
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        salt, nonce, secret = (bytes.fromhex(text) for text in (sealed.salt, sealed.nonce, sealed.sealed))
        return AESGCM(_derive(passphrase, salt, sealed.n)).decrypt(nonce, secret, None)
    except InvalidTag:
        return None
    except ValueError as error:
        raise PublishError(f"it is no sealed key: {error}; wanted what `repo` wrote, or PEM") from error


def _derive(passphrase: str, salt: bytes, scrypt_n: int) -> bytes:
    memory = 128 * _R * scrypt_n + (1 << 20)
    return hashlib.scrypt(passphrase.encode(), salt=salt, n=scrypt_n, r=_R, p=_P, maxmem=memory, dklen=32)
