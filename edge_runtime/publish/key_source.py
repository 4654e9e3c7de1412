"""Private keys by URI: `file:PATH` and `envvar:NAME` here, `hsm:` (PKCS#11) and others by securesystemslib.

Owns: making keys, and turning a URI into a signer. A file or an environment variable holds a sealed key or PEM (PKCS#8
or OpenSSH, with or without its own passphrase). Never decides which key signs which role.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qs

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
from securesystemslib.exceptions import Error as SecureSystemsError
from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, CryptoSigner, HSMSigner, Key, Signer

from edge_runtime.errors import PublishError
from edge_runtime.publish.passphrases import Passphrases, is_sealed, seal, unseal

OWN_SCHEMES = ("file", "envvar")
SOURCES = "file:PATH, envvar:NAME or hsm:[ID][?label=TOKEN]"

_LIMIT_BYTES = 1 << 16
"""An RSA key of 16 384 bits has 13 KB as PEM."""


def new_key(passphrases: Passphrases | None) -> tuple[Signer, bytes]:
    """Return the signer of a new ed25519 key, and the bytes of its file: sealed; without passphrases, plain PEM."""
    signer = CryptoSigner.generate_ed25519()
    pem = signer.private_bytes
    if passphrases is not None:
        pem = seal(pem, passphrases.for_new_keys(), scrypt_n=passphrases.scrypt_n)
    return signer, pem


def public_key_of(uri: str, folder: Path, passphrases: Passphrases) -> tuple[str, Key]:
    """Return the URI to keep, and the public key. Raises PublishError: no such key, or it cannot be opened."""
    scheme = _scheme(uri)
    if scheme in OWN_SCHEMES:
        return uri, _own_signer(uri, folder, uri, passphrases).public_key
    if scheme != HSMSigner.SCHEME:
        raise PublishError(f"{uri}: its public key cannot be read from there; wanted {SOURCES}")
    number, _, query = uri.removeprefix(f"{scheme}:").partition("?")
    label = parse_qs(query).get("label", [None])[0]
    try:
        return HSMSigner.import_(int(number) if number else None, label, passphrases.secret)
    except Exception as error:  # Signer's own words: implementations may raise anything
        raise _unusable(uri, uri, error) from error


def is_reachable(uri: str, folder: Path) -> bool:
    """Return whether the key's source is there, without opening it."""
    scheme, _, rest = uri.partition(":")
    if scheme == "file":
        return (folder / rest).is_file()
    return rest in os.environ if scheme == "envvar" else True


def signer_for(name: str, uri: str, key: Key, folder: Path, passphrases: Passphrases) -> Signer:
    """Return the signer of a key. name: for questions and messages. Raises PublishError: unusable, or another key."""
    if _scheme(uri) in OWN_SCHEMES:
        signer: Signer = _own_signer(uri, folder, name, passphrases)
    else:
        try:
            signer = Signer.from_priv_key_uri(uri, key, passphrases.secret)
        except Exception as error:  # as above
            raise _unusable(name, uri, error) from error
    if signer.public_key.keyval != key.keyval:
        raise PublishError(f"{name}: {uri} holds another key than the one that is trusted; put the right one there")
    return signer


def _own_signer(uri: str, folder: Path, name: str, passphrases: Passphrases) -> CryptoSigner:
    data = _read(uri, folder, name)
    if is_sealed(data):
        opened = (unseal(data, phrase) for phrase in passphrases.candidates(name))
        pem = next((secret for secret in opened if secret is not None), None)
        if pem is None:
            raise PublishError(passphrases.why_none(name))
        return _from_pem(pem, None, name)
    if not _is_locked(data):
        return _from_pem(data, None, name)
    for phrase in passphrases.candidates(name):
        try:
            return _from_pem(data, phrase.encode(), name)
        except _WrongPassphrase:
            continue
    raise PublishError(passphrases.why_none(name))


class _WrongPassphrase(Exception):
    """This passphrase does not open the PEM."""


def _from_pem(data: bytes, passphrase: bytes | None, name: str) -> CryptoSigner:
    load = load_ssh_private_key if b"OPENSSH" in data[:64] else load_pem_private_key
    try:
        return CryptoSigner(load(data, passphrase))
    except (ValueError, TypeError, UnsupportedAlgorithm, SecureSystemsError) as error:
        if passphrase is not None:
            raise _WrongPassphrase from error
        raise PublishError(f"{name}: is no private key that can be used: {error}; wanted ed25519 as PEM") from error


def _is_locked(data: bytes) -> bool:
    if b"ENCRYPTED" in data:
        return True
    if b"OPENSSH" not in data[:64]:
        return False
    try:
        load_ssh_private_key(data, None)
    except TypeError:  # what it raises where a passphrase is missing
        return True
    except (ValueError, UnsupportedAlgorithm):
        pass
    return False


def _read(uri: str, folder: Path, name: str) -> bytes:
    scheme, _, rest = uri.partition(":")
    if scheme == "envvar":
        if rest not in os.environ:
            raise PublishError(f"{name}: the environment has no {rest}; set it to the private key as PEM")
        return os.environ[rest].encode()
    path = folder / rest
    try:
        with path.open("rb") as file:
            return file.read(_LIMIT_BYTES)
    except OSError as error:
        raise PublishError(f"{name}: {path}: {error.strerror}; plug in what it is on, or name another key") from error


def _scheme(uri: str) -> str:
    scheme, colon, _ = uri.partition(":")
    if not colon or scheme not in (*OWN_SCHEMES, *SIGNER_FOR_URI_SCHEME):
        raise PublishError(f"{uri[:200]!r} is no source of a key; wanted {SOURCES}")
    return scheme


def _unusable(name: str, uri: str, error: Exception) -> PublishError:
    return PublishError(f"{name}: {uri} cannot be used: {error}")
