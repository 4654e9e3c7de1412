"""The TUF client: fetches as little metadata as possible, has `trust` verify it, and keeps what was verified.

Owns: the workflow of TUF 1.0.34, section 5: which file is fetched when, under which name and bound, and the search
through delegations. Rules are `trust`'s, bytes `fetch`'s, files the store's. One object is one check. Called by the
daemon's updater and the command line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from urllib.parse import quote

from tuf.api.metadata import MetaFile, Root, TargetFile, Targets

from edge_runtime.errors import NotPublished, TrustError
from edge_runtime.updates.device_time import DeviceTime
from edge_runtime.updates.download import ExpectedFile
from edge_runtime.updates.fetch import Fetcher, FetchLimits, Pace, Pacer, fetch_bytes
from edge_runtime.updates.store import MetadataStore
from edge_runtime.updates.trust import TrustedSet

METADATA_LIMITS = FetchLimits(total_s=300.0, min_bytes_per_s=16.0)
"""For all metadata of one check. A device years behind fetches every root, one request each; accepted ones are kept, so
that the next check goes on from there. Small files over a long way are slow in bytes per second, but no server that
means well sends one a second: that ends after 30 s."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much of a repository one check reads: bytes of each file, and numbers of files.

    The sizes are python-tuf's (`ngclient/config.py`), for which repositories are made. A length in signed metadata may
    only narrow them: one stolen online key must not fill the memory of a device.
    """

    root_bytes: int = 512_000
    timestamp_bytes: int = 16_384
    snapshot_bytes: int = 2_000_000
    targets_bytes: int = 5_000_000
    root_rotations: int = 256
    delegations: int = 32


@dataclass(frozen=True, slots=True)
class SignedFile:
    """A target as metadata signs it. path: where its bytes lie, below the place of targets."""

    path: str
    expected: ExpectedFile


class TufClient:
    """One check of a repository: `refresh`, then any number of `look_up`. Thread: one owner.

    Accepted metadata is in the store, durable, before the next file is fetched; after a failed check the next one goes
    on from there.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        store: MetadataStore,
        *,
        now_utc: datetime,
        bootstrap: bytes | None = None,
        bounds: Bounds | None = None,
        device_time: DeviceTime | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        """Read and fetch nothing yet.

        now_utc: the instant that expiry is judged by (`trust.update_start`). bootstrap: the root file that came with
        the device, from which the kept root must have been reached; None: trust the kept one. device_time: judges
        expiry instead, once the newest root says whether its floor counts. pacer: starts the time that `refresh`, and
        later each `look_up`, may take.
        """
        self._fetcher = fetcher
        self._store = store
        self._now_utc = now_utc
        self._bootstrap = bootstrap
        self._bounds = bounds or Bounds()
        self._device_time = device_time
        self._pacer = pacer or Pacer(METADATA_LIMITS)
        self._trusted: TrustedSet | None = None
        self._targets: dict[tuple[int, str], Targets] = {}
        """By delegator object and role: the same role is another's word when another delegates to it. A delegator lives
        as long as this check, as a value here or in `trusted`: no id is used twice."""

    def refresh(self) -> None:
        """Bring the top-level roles up to date: two requests where nothing is new.

        Raises TrustError, MetadataExpired, DownloadError, StorageFailed; `look_up` is not possible then.
        """
        pace = self._pacer.start()
        self._trusted = None
        self._targets.clear()
        trusted = self._start()
        self._update_root(trusted, pace)
        self._update_timestamp(trusted, pace)
        self._update_snapshot(trusted, pace)
        self._load(trusted, "targets", trusted.root, pace)
        self._trusted = trusted

    @property
    def trusted(self) -> TrustedSet:
        """Return the trusted top-level metadata. Only after `refresh`."""
        assert self._trusted is not None, "refresh first"
        return self._trusted

    def look_up(self, path: str) -> SignedFile | None:
        """Return a target as the first role signs it that may; None: no such role signs it.

        Searches delegations depth first, in their order, and fetches roles as it reaches them. Raises as `refresh`,
        and TrustError for an unknown hash algorithm.
        """
        signer = self._signer(path)
        return None if signer is None else self._located(signer.targets[path])

    def signed_beside(self, path: str) -> Collection[str]:
        """Return the paths of all targets of the role that signs this one; none where no role does.

        Raises as `refresh`.
        """
        signer = self._signer(path)
        return () if signer is None else signer.targets.keys()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _signer(self, path: str) -> Targets | None:
        """Return the first role that signs a target and may."""
        trusted = self.trusted
        pace = self._pacer.start()
        visited: set[str] = set()
        to_visit: list[tuple[str, Root | Targets]] = [("targets", trusted.root)]
        while to_visit and len(visited) <= self._bounds.delegations:
            role, delegator = to_visit.pop()
            if role in visited:
                continue
            visited.add(role)
            targets = self._load(trusted, role, delegator, pace)
            if path in targets.targets:
                return targets
            children: list[tuple[str, Root | Targets]] = []
            for child, is_terminating in targets.delegations.get_roles_for_target(path) if targets.delegations else ():
                children.append((child, targets))
                if is_terminating:
                    to_visit.clear()
                    break
            to_visit.extend(reversed(children))
        return None

    def _start(self) -> TrustedSet:
        """Start from the kept root; from the bootstrap where the kept one was not reached from it, or is unreadable."""
        kept = self._store.load("root", self._bounds.root_bytes)
        if self._bootstrap is None:
            if kept is None:
                raise TrustError("no trusted root is here; give the root file that the repository's owner gave you")
            return TrustedSet(kept, self._now_utc)
        anchor = sha256(self._bootstrap).hexdigest()
        if kept is not None and self._store.load_anchor() == anchor:
            with contextlib.suppress(TrustError):
                return TrustedSet(kept, self._now_utc)
        trusted = TrustedSet(self._bootstrap, self._now_utc)
        # Invariant: the anchor is noted only when the kept root was reached from it.
        self._store.save("root", self._bootstrap)
        self._store.save_anchor(anchor)
        return trusted

    def _update_root(self, trusted: TrustedSet, pace: Pace) -> None:
        for _ in range(self._bounds.root_rotations):
            try:
                data = self._fetch("root", self._bounds.root_bytes, trusted.root.version + 1, pace)
            except NotPublished:
                break
            trusted.accept_root(data)
            self._store.save("root", data)
        below = self._device_time.below(trusted.root) if self._device_time is not None else self._now_utc
        trusted.check_last_root(below)

    def _update_timestamp(self, trusted: TrustedSet, pace: Pace) -> None:
        kept = self._store.load("timestamp", self._bounds.timestamp_bytes)
        if kept is not None:
            with contextlib.suppress(TrustError):
                trusted.recall_timestamp(kept)
        data = self._fetch("timestamp", self._bounds.timestamp_bytes, None, pace)
        if trusted.accept_timestamp(data):
            self._store.save("timestamp", data)

    def _update_snapshot(self, trusted: TrustedSet, pace: Pace) -> None:
        kept = self._store.load("snapshot", self._bounds.snapshot_bytes)
        if kept is not None:
            with contextlib.suppress(TrustError):
                if trusted.recall_snapshot(kept):
                    return
        data = self._fetch_named(
            trusted, "snapshot", trusted.timestamp.snapshot_meta, self._bounds.snapshot_bytes, pace
        )
        trusted.accept_snapshot(data)
        self._store.save("snapshot", data)

    def _load(self, trusted: TrustedSet, role: str, delegator: Root | Targets, pace: Pace) -> Targets:
        """Return a targets role: loaded before, or from the store where it is current, else from the repository."""
        edge = (id(delegator), role)
        if edge not in self._targets:
            kept = self._store.load(role, self._bounds.targets_bytes)
            if kept is not None:
                with contextlib.suppress(TrustError):
                    self._targets[edge] = trusted.accept_targets(kept, role, delegator)
                    return self._targets[edge]
            data = self._fetch_named(trusted, role, trusted.meta(role), self._bounds.targets_bytes, pace)
            targets = trusted.accept_targets(data, role, delegator)
            self._store.save(role, data)
            self._targets[edge] = targets
        return self._targets[edge]

    def _located(self, target: TargetFile) -> SignedFile:
        """Return where a target's bytes lie: with its hash before its name, where snapshots are consistent."""
        expected = ExpectedFile.of(target.length, target.hashes)
        if not self.trusted.root.consistent_snapshot:
            return SignedFile(target.path, expected)
        folder, slash, name = target.path.rpartition("/")
        # Any of its hashes would do by the specification; some repositories have it under the first one only.
        prefix = next(iter(expected.hashes.values()))
        return SignedFile(f"{folder}{slash}{prefix}.{name}", expected)

    def _fetch_named(self, trusted: TrustedSet, role: str, meta: MetaFile, max_bytes: int, pace: Pace) -> bytes:
        """Fetch a role whose version other metadata names: first in its file's name, where snapshots are consistent."""
        version = meta.version if trusted.root.consistent_snapshot else None
        return self._fetch(role, min(meta.length or max_bytes, max_bytes), version, pace)

    def _fetch(self, role: str, max_bytes: int, version: int | None, pace: Pace) -> bytes:
        name = f"{quote(role, safe='')}.json"
        path = name if version is None else f"{version}.{name}"
        return fetch_bytes(self._fetcher, path, max_bytes=max_bytes, pace=pace)
