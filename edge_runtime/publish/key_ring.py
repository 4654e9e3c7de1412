"""The keys that this publisher can sign with: their names, and the places of their private halves. Owns DIR/keys.

The ring maps key ids to names and URIs. Metadata alone says which keys are trusted: an entry too many means nothing.
Names are never used twice. Private halves are written before any metadata trusts them, and never removed here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct
from securesystemslib.signer import Key, Signer

from edge_runtime.errors import PublishError
from edge_runtime.publish.key_source import is_reachable, new_key, public_key_of, signer_for
from edge_runtime.publish.passphrases import Passphrases
from edge_runtime.repository.durable import Disk, make_folder, write_atomically

RING_FILE = "ring.json"
_SECRET_MODE = 0o600
_ID_CHARACTERS = 8


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
        found = [public_key_of(uri, self._folder, self._passphrases) for uri in wanted.uris]
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
        return entry.uri.removeprefix("file:") in self._files or is_reachable(entry.uri, self._folder)

    def is_online(self, keyid: str) -> bool:
        """Return whether a key signs without a person."""
        entry = self._entries.get(keyid)
        return entry is not None and entry.is_online

    def signer(self, key: Key) -> Signer:
        """Return the signer of a key. Raises PublishError: its passphrase is wrong, its source is gone."""
        if key.keyid not in self._signers:
            entry = self._entries[key.keyid]
            self._signers[key.keyid] = signer_for(entry.name, entry.uri, key, self._folder, self._passphrases)
        return self._signers[key.keyid]

    def _make(self, stem: str, is_online: bool) -> Key:
        signer, data = new_key(None if is_online else self._passphrases)
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
