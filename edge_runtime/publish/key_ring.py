"""The keys that this publisher can sign with: their names, and the sources of their private halves. Owns DIR/keys.

The ring maps key ids to names and URIs. Metadata alone says which keys are trusted: an entry too many means nothing.
Names are never used twice. Private halves are written before any metadata trusts them, and never removed here.

A source is a URI: `file:PATH` and `envvar:NAME` are read here, `hsm:` (PKCS#11) and others by securesystemslib. A file
or an environment variable holds a sealed key or PEM (PKCS#8 or OpenSSH, with or without its own passphrase).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
from msgspec import Struct
from securesystemslib.exceptions import Error as SecureSystemsError
from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, CryptoSigner, HSMSigner, Key, Signer

from edge_runtime.durable import Disk, make_folder, write_atomically
from edge_runtime.errors import PublishError
from edge_runtime.publish.passphrases import Passphrases, is_sealed, seal, unseal

RING_FILE = "ring.json"
_SECRET_MODE = 0o600
_ID_CHARACTERS = 8

OWN_SCHEMES = ("file", "envvar")
SOURCES = "file:PATH, envvar:NAME or hsm:[ID][?label=TOKEN]"

_LIMIT_BYTES = 1 << 16
"""An RSA key of 16 384 bits has 13 KB as PEM."""


class KeyEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One key. uri: of a relative file, below the keys folder. is_online: it signs without a person."""

    name: str
    uri: str
    is_online: bool


@dataclass(frozen=True, slots=True)
class NewKeys:
    """The keys that a role gets: those at `uris`, else `count` new ones. is_online: without a passphrase."""

    count: int = 1
    uris: tuple[str, ...] = ()
    is_online: bool = False


class KeyRing:
    """The keys of one repository. Thread: one owner, who holds the repository's lock."""

    def __init__(self, folder: Path, passphrases: Passphrases, disk: Disk) -> None:
        """Read the ring; a missing one is empty. Raises PublishError: it cannot be read."""
        self._folder = folder
        self._passphrases = passphrases
        self._disk = disk
        self._files: dict[str, bytes] = {}
        self._signers: dict[str, Signer] = {}
        self._entries = _read_ring(folder / RING_FILE)

    def add(self, stem: str, wanted: NewKeys) -> list[Key]:
        """Make keys or add existing ones, named `stem-<n>`; nothing is written before `save`. Raises PublishError."""
        if not wanted.uris:
            return [self._make(stem, wanted.is_online) for _ in range(wanted.count)]
        found = [_public_key_of(uri, self._folder, self._passphrases) for uri in wanted.uris]
        keys = {key.keyid: (uri, key) for uri, key in found}
        if len(keys) < len(found):
            raise PublishError(f"{stem}: {', '.join(wanted.uris)} are not {len(found)} different keys")
        for keyid, (uri, _) in keys.items():
            name = self._entries[keyid].name if keyid in self._entries else self._next_name(stem)
            self._entries[keyid] = KeyEntry(name, uri, wanted.is_online)
        return [key for _, key in keys.values()]

    def save(self) -> None:
        """Write new keys, then the ring. Raises StorageFailed."""
        make_folder(self._folder, disk=self._disk)
        self._folder.chmod(0o700)
        for name, data in self._files.items():
            write_atomically(self._folder / name, data, mode=_SECRET_MODE, disk=self._disk)
        self._files.clear()
        ring = msgspec.json.format(msgspec.json.encode(self._entries), indent=1) + b"\n"
        write_atomically(self._folder / RING_FILE, ring, mode=_SECRET_MODE, disk=self._disk)

    def name(self, keyid: str) -> str:
        """Return a key's name; the beginning of its id where it has none here."""
        entry = self._entries.get(keyid)
        return entry.name if entry is not None else keyid[:_ID_CHARACTERS]

    def entry(self, keyid: str) -> KeyEntry | None:
        """Return the ring's entry of a key."""
        return self._entries.get(keyid)

    def can_sign(self, keyid: str) -> bool:
        """Return whether the private half is within reach, without opening it."""
        entry = self._entries.get(keyid)
        if entry is None:
            return False
        return entry.uri.removeprefix("file:") in self._files or _is_reachable(entry.uri, self._folder)

    def is_online(self, keyid: str) -> bool:
        """Return whether a key signs without a person."""
        entry = self._entries.get(keyid)
        return entry is not None and entry.is_online

    def signer(self, key: Key) -> Signer:
        """Return the signer of a key. Raises PublishError: its passphrase is wrong, its source is gone."""
        if key.keyid not in self._signers:
            entry = self._entries[key.keyid]
            self._signers[key.keyid] = _signer_for(entry.name, entry.uri, key, self._folder, self._passphrases)
        return self._signers[key.keyid]

    def _make(self, stem: str, is_online: bool) -> Key:
        signer, data = _new_key(None if is_online else self._passphrases)
        key = signer.public_key
        name = self._next_name(stem)
        file = f"{name}.pem" if is_online else f"{name}.key"
        self._files[file] = data
        self._signers[key.keyid] = signer
        self._entries[key.keyid] = KeyEntry(name, f"file:{file}", is_online)
        return key

    def _next_name(self, stem: str) -> str:
        taken = {entry.name for entry in self._entries.values()}
        taken |= {path.stem for path in self._folder.glob("*")} if self._folder.is_dir() else set()
        numbers = [int(match[1]) for name in taken if (match := re.fullmatch(rf"{re.escape(stem)}-(\d+)", name))]
        return f"{stem}-{max(numbers, default=0) + 1}"


def _read_ring(path: Path) -> dict[str, KeyEntry]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, KeyEntry])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise PublishError(f"{path}: cannot be read: {error}; bring it back from a copy of the keys folder") from error


# ---- the sources of private halves -----------------------------------------------------------------------------------


def _new_key(passphrases: Passphrases | None) -> tuple[Signer, bytes]:
    """Return the signer of a new ed25519 key, and the bytes of its file: sealed; without passphrases, plain PEM."""
    signer = CryptoSigner.generate_ed25519()
    pem = signer.private_bytes
    if passphrases is not None:
        pem = seal(pem, passphrases.for_new_keys(), scrypt_n=passphrases.scrypt_n)
    return signer, pem


def _public_key_of(uri: str, folder: Path, passphrases: Passphrases) -> tuple[str, Key]:
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


def _is_reachable(uri: str, folder: Path) -> bool:
    """Return whether the key's source is there, without opening it."""
    scheme, _, rest = uri.partition(":")
    if scheme == "file":
        return (folder / rest).is_file()
    return rest in os.environ if scheme == "envvar" else True


def _signer_for(name: str, uri: str, key: Key, folder: Path, passphrases: Passphrases) -> Signer:
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
        raise PublishError(f"{name}: is not a private key that can be used: {error}; wanted ed25519 as PEM") from error


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
        raise PublishError(f"{uri[:200]!r} is not a source of a key; wanted {SOURCES}")
    return scheme


def _unusable(name: str, uri: str, error: Exception) -> PublishError:
    return PublishError(f"{name}: {uri} cannot be used: {error}")
