"""Passphrases and PINs, given beforehand or asked for; and private keys sealed with a passphrase.

Owns: that passphrases are kept for one command and never written, and the form of a sealed key: JSON around
AES-256-GCM, its key derived by scrypt. PKCS#8 and PKCS#12 as the cryptography package writes them derive the key, or
check the passphrase, with 2 048 rounds, of which a graphics card tries a hundred thousand a second; here one try costs
128 MiB and 0.3 s. OpenSSH's form derives it by bcrypt, in 4 KiB. The form of `age` is as hard to guess, but its library
for Python (pyrage 1.4) offers no choice of the cost: it took 2^17, 2^18 and 2^19 in three tries on one machine.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
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

MIN_CHARACTERS = 8
"""Of a new one: each try of a thief costs 128 MiB and 0.3 s."""

_TRIES = 3


class Passphrases:
    """The passphrases of one command. given: tried for every key before `ask`.

    ask: shows a sentence and returns the typed text; None: there is no terminal. scrypt_n: cost of new key files.
    """

    def __init__(
        self, given: Sequence[str] = (), ask: Callable[[str], str] | None = None, *, scrypt_n: int = SCRYPT_N
    ) -> None:
        self._known = list(given)
        self._ask = ask
        self._new: str | None = None
        self.scrypt_n = scrypt_n

    def candidates(self, key: str) -> Iterator[str]:
        """Yield passphrases that may open a key; one that was typed is tried first for the next key."""
        tried: list[str] = []
        for known in list(self._known):
            tried.append(known)
            yield known
        for _ in range(_TRIES if self._ask is not None else 0):
            assert self._ask is not None
            typed = self._ask(f"Passphrase of {key}: ")
            if typed not in tried:
                tried.append(typed)
                self._known.insert(0, typed)
                yield typed

    def why_none(self, key: str) -> str:
        """Return the sentence for a key that no candidate opened."""
        if self._known or self._ask is not None:
            return f"{key}: wrong passphrase; nothing was signed"
        return (
            f"{key}: needs its passphrase and there is no terminal to ask on; give it by --passphrase-file, "
            "or in EDGE_RUNTIME_PASSPHRASE"
        )

    def for_new_keys(self) -> str:
        """Return one passphrase for all keys that a command makes. Raises PublishError: none, too short, mistyped."""
        if self._new is None:
            self._new = self._known[0] if self._known else self._asked_twice()
            if len(self._new) < MIN_CHARACTERS:
                raise PublishError(f"the passphrase has {len(self._new)} characters, wanted {MIN_CHARACTERS} or more")
            if self._new not in self._known:
                self._known.insert(0, self._new)
        return self._new

    def secret(self, name: str) -> str:
        """Ask for a PIN or the like that a signing device names. Raises PublishError: there is no terminal."""
        if self._ask is None:
            raise PublishError(f"the key asks for its {name}, and there is no terminal to ask on")
        return self._ask(f"{name}: ")

    def _asked_twice(self) -> str:
        if self._ask is None:
            raise PublishError(
                "new key files need a passphrase and there is no terminal to ask on; give it by --passphrase-file, "
                "or in EDGE_RUNTIME_PASSPHRASE"
            )
        typed = self._ask("Passphrase for the new keys: ")
        if self._ask("The same again: ") != typed:
            raise PublishError("the two passphrases differ; nothing was written")
        return typed


class _Sealed(Struct, frozen=True, forbid_unknown_fields=True):
    kdf: Literal["scrypt"]
    n: Annotated[int, Meta(ge=2, le=1 << 20)]
    cipher: Literal["aes-256-gcm"]
    salt: str
    nonce: str
    sealed: str


def seal(secret: bytes, passphrase: str, *, scrypt_n: int = SCRYPT_N) -> bytes:
    """Return the bytes of a file that holds the secret, sealed."""
    salt, nonce = os.urandom(_SALT_BYTES), os.urandom(_NONCE_BYTES)
    data = AESGCM(_derive(passphrase, salt, scrypt_n)).encrypt(nonce, secret, None)
    sealed = _Sealed("scrypt", scrypt_n, "aes-256-gcm", salt.hex(), nonce.hex(), data.hex())
    return msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n"


def is_sealed(data: bytes) -> bool:
    """Return whether a file holds a sealed key; others are PEM."""
    return data.lstrip().startswith(b"{")


def unseal(data: bytes, passphrase: str) -> bytes | None:
    """Return the secret; None: a wrong passphrase, or changed bytes. Raises PublishError: no sealed key."""
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        salt, nonce, secret = (bytes.fromhex(text) for text in (sealed.salt, sealed.nonce, sealed.sealed))
        return AESGCM(_derive(passphrase, salt, sealed.n)).decrypt(nonce, secret, None)
    except InvalidTag:
        return None
    except ValueError as error:
        raise PublishError(f"it is not a sealed key: {error}; wanted what `repo` wrote, or PEM") from error


def _derive(passphrase: str, salt: bytes, scrypt_n: int) -> bytes:
    memory = 128 * _R * scrypt_n + (1 << 20)
    return hashlib.scrypt(passphrase.encode(), salt=salt, n=scrypt_n, r=_R, p=_P, maxmem=memory, dklen=32)
