"""How far a repository had come when this device saw it last, and whether it has gone back since.

The metadata files guard against rollback by themselves; these marks lie in the journal, so that a device which lost
its files does not believe old ones. A mark belongs to a role and the keys that sign it: when root gives the role other
keys, it begins anew, which is how a repository recovers from a stolen key that raised versions without bound (TUF,
5.3.11). Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from tuf.api.metadata import Root, Snapshot, Timestamp

from edge_runtime.errors import TrustError
from edge_runtime.repository.names import MAX_VERSION


def marks_of(root: Root, timestamp: Timestamp, snapshot: Snapshot) -> dict[str, int]:
    """The version of each role, by its name and a digest of its keys; of targets' roles as the snapshot names them."""
    found = {
        "root": root.version,
        _name(root, "timestamp"): timestamp.version,
        _name(root, "snapshot"): snapshot.version,
    }
    signer = signer_of(root, "snapshot")
    for file, meta in snapshot.meta.items():
        found[f"{file.removesuffix('.json')} {signer}"] = meta.version
    return found


def check_marks(marks: Mapping[str, int], known: Mapping[str, int]) -> None:
    """Raise TrustError where a role has gone back behind what is known of it, or beyond what can be kept."""
    for name, version in marks.items():
        seen = known.get(name, 0)
        if version > MAX_VERSION:
            raise TrustError(
                f"{name.partition(' ')[0]}: got version {version}, wanted at most {MAX_VERSION}; a thief has its key: "
                "give the role another one"
            )
        if version < seen:
            raise TrustError(
                f"{name.partition(' ')[0]}: got version {version}, but version {seen} was seen here; somebody "
                "replays old files, or the repository was restored from an old copy (sign anew, with higher versions)"
            )


def signer_of(root: Root, role: str) -> str:
    """A digest of the keys that root gives a role: another one when they change."""
    keys = "\n".join(sorted(root.roles[role].keyids))
    return hashlib.sha256(keys.encode()).hexdigest()[:16]


def _name(root: Root, role: str) -> str:
    return f"{role} {signer_of(root, role)}"
